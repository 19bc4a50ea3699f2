"""A checkpoint is whole or refused, holds everything once, and fits any other layout."""

import json
import math
import os
import re
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file

from mini_dist import RankError, launch
from mini_dist.collectives import barrier
from mini_dist.training.checkpoint import CheckpointError, Piece, Place, Training, find, piece, save
from mini_dist.training.checkpoint.manifest import sealed

SHAPES = {"w": (4, 6), "v": (12,), "cube": (2, 4, 3), "one": ()}


def whole(scale=1):
    """Return what all ranks hold together; no two numbers are equal."""
    tensors, at = {}, 0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        tensors[name] = scale * torch.arange(at, at + numel, dtype=torch.float32).view(shape)
        at += numel
    return tensors


def part(tensor, pieces, number):
    """Return (start, stop) of one of several even parts; the last ones may be empty."""
    each = -(-tensor.numel() // pieces)
    return min(number * each, tensor.numel()), min((number + 1) * each, tensor.numel())


def box(name, tensor, dim, pieces, number):
    if tensor.dim() <= dim or tensor.shape[dim] % pieces:
        return piece(name, tensor)  # not cut: the same on all ranks
    offset = [0] * tensor.dim()
    offset[dim] = number * tensor.shape[dim] // pieces
    return piece(name, tensor.chunk(pieces, dim)[number].clone(), tensor.shape, offset)


def a_range(whole_piece, pieces, number):
    place, tensor = whole_piece.place, whole_piece.tensor
    start, stop = part(tensor, pieces, number)
    place = Place(place.name, place.shape, place.offset, place.size, start, stop)
    return Piece(place, tensor.flatten()[start:stop].clone())


def alike(tensors, rank, size):  # plain data parallel
    return [piece(name, tensor) for name, tensor in tensors.items()]


def rows(tensors, rank, size):  # tensor parallel
    return [box(name, tensor, 0, size, rank) for name, tensor in tensors.items()]


def columns(tensors, rank, size):
    return [box(name, tensor, 1, size, rank) for name, tensor in tensors.items()]


def ranges(tensors, rank, size):  # ZeRO
    return [a_range(piece(name, tensor), size, rank) for name, tensor in tensors.items()]


def ranges_of_columns(tensors, rank, size):  # ZeRO over dp, after a cut by tp 2
    dp, tp = divmod(rank, 2) if size % 2 == 0 else (rank, 0)
    ways = 2 if size % 2 == 0 else 1
    boxes = [box(name, tensor, 1, ways, tp) for name, tensor in tensors.items()]
    return [a_range(each, size // ways, dp) for each in boxes]


def stages(tensors, rank, size):  # a pipeline
    return [piece(n, t) for k, (n, t) in enumerate(tensors.items()) if k % size == rank]


LAYOUTS = {f.__name__: f for f in (alike, rows, columns, ranges, ranges_of_columns, stages)}


def store(directory, layout, step, group, scale=1, **options):
    pieces = LAYOUTS[layout](whole(scale), group.rank(), group.size())
    save(directory, step, pieces, group, **options)


def fetch(directory, layout, group, step=None):
    """Return what is loaded, what was found and warnings; empty pieces ask for nothing."""
    empty = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    pieces = LAYOUTS[layout](empty, group.rank(), group.size())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        saved = find(directory, group, step)
    if saved is None:
        return None
    saved.load(pieces, group)
    return pieces, saved, [str(warning.message) for warning in told]


def loaded_step(directory, **options):
    """Return the step that 2 ranks find, with its values checked, and the warnings."""
    run = launch(fetch, 2, (str(directory), "ranges"), options)
    for rank, (pieces, saved, _) in enumerate(run.results):
        expected = ranges(whole(saved.step), rank, 2)
        for ours, theirs in zip(pieces, expected):
            assert torch.equal(ours.tensor, theirs.tensor)
    return saved.step, run.results[0][2]


# --- resharding ----------------------------------------------------------------------------------


def fetch_all(directory, group):
    return {layout: fetch(directory, layout, group)[0] for layout in LAYOUTS}


@pytest.mark.parametrize("saved_as, ranks", [("alike", 3), *[(layout, 2) for layout in LAYOUTS]])
def test_what_is_saved_in_one_layout_is_loaded_in_any_other_bit_by_bit(saved_as, ranks, tmp_path):
    launch(store, ranks, (str(tmp_path), saved_as, 5))
    for size in (1, 4):
        for rank, loaded in enumerate(launch(fetch_all, size, (str(tmp_path),)).results):
            for layout, pieces in loaded.items():
                expected = LAYOUTS[layout](whole(), rank, size)
                for ours, theirs in zip(pieces, expected, strict=True):
                    assert ours.place == theirs.place
                    assert torch.equal(ours.tensor, theirs.tensor), (layout, rank, ours.place)


def test_ranges_of_what_is_cut_are_loaded_from_four_ranks(tmp_path):
    launch(store, 4, (str(tmp_path), "ranges_of_columns", 5))
    for rank, (pieces, *_) in enumerate(launch(fetch, 4, (str(tmp_path), "rows")).results):
        for ours, theirs in zip(pieces, rows(whole(), rank, 4)):
            assert torch.equal(ours.tensor, theirs.tensor)


def cast(directory, group):
    save(directory, 0, [piece("w", torch.tensor([1.0, 2.5]))], group)
    into = piece("w", torch.zeros(2, dtype=torch.bfloat16))
    find(directory, group).load([into], group)
    return into.tensor.tolist()


def test_a_tensor_is_cast_to_what_it_is_loaded_into(tmp_path):
    assert launch(cast, 1, (str(tmp_path),)).results == [[1.0, 2.5]]


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_written_once_and_the_replicas_share_the_work(layout, tmp_path):
    launch(store, 4, (str(tmp_path), layout, 5))
    shards = [load_file(path) for path in sorted(tmp_path.glob("step-*/*.safetensors"))]
    total = sum(t.numel() for shard in shards for t in shard.values())
    assert total == sum(math.prod(shape) for shape in SHAPES.values())
    assert len(shards) == min(4, sum(map(len, shards)))


def test_a_whole_tensor_has_its_own_name_for_any_reader_of_safetensors(tmp_path):
    launch(store, 1, (str(tmp_path), "alike", 5))
    tensors = load_file(tmp_path / "step-00000005" / "rank-00000.safetensors")
    for name, tensor in whole().items():
        assert torch.equal(tensors[name], tensor)


def hole(directory, group):
    w = torch.zeros(4, 6)
    save(
        directory,
        0,
        [piece("w", w[group.rank() : group.rank() + 2], (4, 6), (group.rank(), 0))],
        group,
    )


def disagree(directory, group):
    save(directory, 0, [piece("w", torch.zeros(4, 6 + group.rank()))], group)


def test_pieces_that_are_not_the_whole_together_are_refused_before_a_file_is_written(tmp_path):
    with pytest.raises(RankError, match=r"hold 18 of the 24 elements of w \[4, 6\]"):
        launch(hole, 2, (str(tmp_path),))
    with pytest.raises(RankError, match=r"w is float32\[4, 6\] on one rank and float32\[4, 7\] on"):
        launch(disagree, 2, (str(tmp_path),))
    assert list(tmp_path.iterdir()) == []


def overlapping(directory, group):
    """Save rows 0-2 and rows 1-3, which overlap as two cuts of a tied embedding may."""
    w = torch.arange(24.0).view(4, 6)[group.rank() : group.rank() + 3].clone()
    save(directory, 0, [piece("w", w, (4, 6), (group.rank(), 0))], group)
    into = piece("w", torch.zeros(4, 6))
    find(directory, group).load([into], group)
    return torch.equal(into.tensor, torch.arange(24.0).view(4, 6))


def test_pieces_may_overlap(tmp_path):
    assert launch(overlapping, 2, (str(tmp_path),)).results == [True, True]


def refused_numbers(directory, group):
    pieces = [piece("w", torch.zeros(2))]
    for keep in (0, -1):
        with pytest.raises(ValueError, match=r"^keep=.* cannot be: give a whole number from 1, or"):
            save(directory, 1, pieces, group, keep=keep)
    for keep in (1.5, True, "2", [1]):
        with pytest.raises(
            ValueError, match=r"^keep=.* is not a whole number: give an int, or None"
        ):
            save(directory, 1, pieces, group, keep=keep)
    for step in (-1, 10**18):
        with pytest.raises(ValueError, match=r"^step=.* cannot be: give a whole number from 0$"):
            save(directory, step, pieces, group)
    for step in (1.5, None, True):
        with pytest.raises(ValueError, match=r"^step=.* is not a whole number: give an int"):
            save(directory, step, pieces, group)
    training = Training(torch.nn.Linear(1, 1), (), group, background=True)
    with pytest.raises(ValueError, match="^keep=0 cannot be"):
        training.save(directory, 1, keep=0)
    with pytest.raises(ValueError, match="w is complex128, which safetensors cannot store"):
        save(directory, 1, [piece("w", torch.zeros(2, dtype=torch.complex128))], group)


def test_numbers_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    launch(refused_numbers, 2, (str(tmp_path),))
    assert list(tmp_path.iterdir()) == []


def cannot_write(directory, group):
    if group.rank() == 1:
        import mini_dist.training.checkpoint.files as files

        def no_space(*_):
            raise OSError(28, "No space left on device")

        files.save_file = no_space
    tensors = {"w": torch.zeros(4), "v": torch.zeros(4)}
    with pytest.raises(CheckpointError, match="rank 1: cannot write: .*No space left"):
        save(directory, 7, [piece(name, tensor) for name, tensor in tensors.items()], group)


def test_if_one_rank_cannot_write_all_say_so_and_the_last_checkpoint_stays(tmp_path):
    launch(store, 2, (str(tmp_path), "alike", 5), {"scale": 5})
    launch(cannot_write, 2, (str(tmp_path),))
    assert loaded_step(tmp_path) == (5, [])


def with_extra(directory, group):
    extra = {10: "ten", 9: ["nine", None, 0.1]}  # JSON has no such keys and another order
    save(directory, 3, [piece("w", torch.zeros(2))], group, extra)
    found = find(directory, group).extra
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(directory, 4, [piece("w", torch.zeros(2))], group, {"w": torch.zeros(2)})
    return found, find(directory, group).step


def test_extra_comes_back_as_json_and_what_json_cannot_say_is_refused_by_all(tmp_path):
    run = launch(with_extra, 2, (str(tmp_path),))
    assert run.results == [({"10": "ten", "9": ["nine", None, 0.1]}, 3)] * 2


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankError, match="rank 0: cannot write: .*Not a directory"):
        launch(store, 2, (str(tmp_path / "file"), "alike", 5))


def test_keep_leaves_the_newest(tmp_path):
    for step in (1, 2, 3):
        launch(store, 2, (str(tmp_path), "ranges", step), {"keep": 2, "scale": step})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "latest",
        "step-00000002",
        "step-00000003",
    ]


def test_a_step_can_be_saved_again(tmp_path):
    launch(store, 3, (str(tmp_path), "ranges", 5), {"scale": 100})
    launch(store, 2, (str(tmp_path), "ranges", 5), {"scale": 5})
    assert loaded_step(tmp_path) == (5, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005"]


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Save checkpoints of steps 5 and 10; tests damage the newer one."""
    for step in (5, 10):
        launch(store, 2, (str(tmp_path), "ranges", step), {"scale": step})
    assert loaded_step(tmp_path) == (10, [])
    return tmp_path


def newest(directory, name="rank-00001.safetensors"):
    return directory / "step-00000010" / name


def flip_a_bit(path, byte):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << 3
    path.write_bytes(data)


def damage_truncate(directory):
    path = newest(directory)
    os.truncate(path, path.stat().st_size - 1)


def damage_bit_of_a_tensor(directory):
    flip_a_bit(newest(directory), -2)


def damage_bit_of_a_header(directory):
    flip_a_bit(newest(directory), 12)


def damage_file_of_another_step(directory):
    older = directory / "step-00000005" / "rank-00001.safetensors"
    newest(directory).write_bytes(older.read_bytes())


def damage_file_is_missing(directory):
    newest(directory).unlink()


def damage_no_manifest(directory):
    newest(directory, "manifest.json").unlink()


def damage_half_a_manifest(directory):
    path = newest(directory, "manifest.json")
    os.truncate(path, path.stat().st_size // 2)


def damage_number_in_the_manifest(directory):
    path = newest(directory, "manifest.json")
    path.write_text(path.read_text().replace('"step": 10', '"step": 11'))


def damage_manifest_is_a_list(directory):
    newest(directory, "manifest.json").write_text("[1]")


def damage_a_future_format(directory):
    forge(newest(directory).parent, lambda manifest: manifest.update(format=2))


def damage_a_new_seal(directory):
    """The manifest is valid, but it is not the one that was saved."""
    forge(newest(directory).parent, lambda manifest: manifest.update(extra={"note": "forged"}))


def forge(folder, change):
    """Change the manifest and seal it again, as if it had been saved that way."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    (folder / "manifest.json").write_text(sealed(manifest))


def damage_a_link(directory):
    path = newest(directory)
    path.rename(directory / "elsewhere")
    path.symlink_to(directory / "elsewhere")


def damage_a_pipe(directory):
    newest(directory).unlink()
    os.mkfifo(newest(directory))


def damage_a_pipe_for_the_manifest(directory):
    newest(directory, "manifest.json").unlink()
    os.mkfifo(newest(directory, "manifest.json"))


def damage_deep_json(directory):
    deep = '{"extra": ' * 100_000 + "{}" + "}" * 100_000
    newest(directory, "manifest.json").write_text(deep)


def damage_folder_is_a_link(directory):
    folder = newest(directory).parent
    folder.rename(directory / "elsewhere")
    folder.symlink_to(directory / "elsewhere")


def damage_folder_of_another_step(directory):
    shutil.rmtree(newest(directory).parent)
    shutil.copytree(directory / "step-00000005", newest(directory).parent)


WHY = {
    damage_truncate: r"rank-00001\.safetensors has \d+ bytes, not \d+",
    damage_bit_of_a_tensor: r"rank-00001\.safetensors has changed since it was written",
    damage_bit_of_a_header: r"rank-00001\.safetensors has changed since it was written",
    damage_file_of_another_step: r"rank-00001\.safetensors has changed since it was written",
    damage_file_is_missing: r"rank-00001\.safetensors is missing",
    damage_no_manifest: r"it has no manifest\.json",
    damage_half_a_manifest: r"manifest\.json cannot be read",
    damage_number_in_the_manifest: r"manifest\.json has changed since it was written",
    damage_manifest_is_a_list: r"manifest\.json cannot be read",
    damage_a_future_format: r"its format is 2, this version reads 1",
    damage_a_new_seal: r"it is not the checkpoint that latest lists under this name",
    damage_a_link: r"rank-00001\.safetensors cannot be read: Too many levels of symbolic links",
    damage_a_pipe: r"rank-00001\.safetensors cannot be read: not a plain file",
    damage_a_pipe_for_the_manifest: r"manifest\.json cannot be read",
    damage_deep_json: r"manifest\.json cannot be read",
    damage_folder_is_a_link: r"it is a symbolic link",
    damage_folder_of_another_step: r"it is not the checkpoint that latest lists under this name",
}


@pytest.mark.parametrize("damage", WHY, ids=lambda damage: damage.__name__)
def test_what_is_not_whole_is_refused_in_a_sentence_and_the_one_before_used(damage, two):
    damage(two)
    step, told = loaded_step(two)
    assert step == 5
    (sentence,) = told
    assert re.search(rf"step-00000010 is refused: {WHY[damage]}\. Step 5 is taken\.$", sentence)


def of_w(**changes):
    return lambda manifest: manifest["tensors"]["w"].update(changes)


def piece_of_w(number, value):
    def change(manifest):
        manifest["tensors"]["w"]["pieces"][0][number] = value

    return change


def outside(name):
    """Let a piece be in a file that exists and is whole, but is not in this folder."""

    def change(manifest):
        files, pieces = manifest["files"], manifest["tensors"]["w"]["pieces"]
        files[name] = files[pieces[0][0]]
        pieces[0][0] = name

    return change


FORGED = {
    "no tensors": (lambda m: m.pop("tensors"), "which no save writes"),
    "one field more": (lambda m: m.update(more=1), "which no save writes"),
    "a number for the files": (lambda m: m.update(files=3), "files is 3, which no save writes"),
    "true for a step": (lambda m: m.update(step=True), "step is true, which no save writes"),
    "text for a step": (lambda m: m.update(step="10"), 'step is "10", which no save writes'),
    "not a number": (lambda m: m.update(world_size=math.nan), "world_size is NaN, which no save"),
    "a huge number": (lambda m: m.update(world_size=10**30), "world_size is 10+, which no save"),
    "a list for extra": (lambda m: m.update(extra=[]), r"extra is \[\], which no save writes"),
    "another step": (lambda m: m.update(step=11), r"its manifest\.json is of step 11"),
    "a file above": (
        outside("../step-00000005/rank-00000.safetensors"),
        "no file of one of 2 ranks",
    ),
    "an absolute path": (outside("/tmp/rank-00000.safetensors"), "no file of one of 2 ranks"),
    "a rank too many": (outside("rank-00002.safetensors"), "no file of one of 2 ranks"),
    "an unwatched file": (piece_of_w(0, "../step-00000005/rank-00000.safetensors"), "not among"),
    "an attribute of torch": (of_w(dtype="save"), "w has dtype 'save', which cannot be stored"),
    "another dtype": (
        of_w(dtype="int32"),
        r"manifest\.json and rank-0.* do not agree about w",
    ),
    "a negative shape": (of_w(shape=[-4, 6]), r"\[-4, 6\]|-4, which no save writes"),
    "another shape": (of_w(shape=[6, 4]), "is no part of a tensor of shape"),
    "a huge shape": (of_w(shape=[2**40, 2**40]), "the pieces of w are not all of its"),
    "no pieces": (of_w(pieces=[]), "the pieces of w are not all of its"),
    "a piece too few": (lambda m: m["tensors"]["w"]["pieces"].pop(), "the pieces of w are not all"),
    "a piece twice": (
        lambda m: m["tensors"]["w"].update(pieces=m["tensors"]["w"]["pieces"][:1] * 2),
        "do not agree about w",
    ),
    "a piece beyond the tensor": (piece_of_w(1, [9, 0]), "is no part of a tensor of shape"),
    "a piece cut": (piece_of_w(3, 1), "the pieces of w are not all of its"),
    "a piece enlarged": (piece_of_w(4, 20), "do not agree about w"),
    "a tensor that is not there": (
        lambda m: m["tensors"].update(u=m["tensors"]["w"]),
        "do not agree about u",
    ),
    "a tensor forgotten": (lambda m: m["tensors"].pop("w"), "do not agree about w"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_no_save_writes_is_refused_though_its_seal_is_right(name, two):
    change, why = FORGED[name]
    (two / "latest").write_text("step-00000010\n")  # by hand: it has no seal to compare with
    forge(newest(two).parent, change)
    step, (sentence,) = loaded_step(two)
    assert step == 5 and re.search(why, sentence), sentence


@pytest.mark.parametrize("text", ["null", "[]", '"text"', "1", "{}", '{"sha256": 1}', "\x00", "{"])
def test_a_manifest_of_anything_else_is_refused(text, two):
    newest(two, "manifest.json").write_text(text)
    assert loaded_step(two)[0] == 5


def flips(directory, sizes, group):
    """Flip bits in many places, one at a time; return the step found after each flip."""
    found = []
    for path, size in sizes.items():
        for byte in range(0, size, size // 20):
            for flipping in (True, False):
                if group.rank() == 0:
                    flip_a_bit(path, byte)
                barrier(group)
                found += [fetch(directory, "rows", group)[1].step] if flipping else []
                barrier(group)
    return found


def test_every_byte_of_every_file_is_watched(two):
    """This includes the bytes of headers and of the manifest."""
    sizes = {path: path.stat().st_size for path in sorted(two.glob("step-00000010/*"))}
    (found,) = {tuple(each) for each in launch(flips, 2, (str(two), sizes)).results}
    assert len(found) >= 20 * len(sizes) and set(found) == {5}
    assert loaded_step(two)[0] == 10


def test_all_ranks_refuse_what_one_of_them_finds_damaged(two):
    damage_bit_of_a_tensor(two)
    for size in (1, 3):
        run = launch(fetch, size, (str(two), "rows"))
        assert {saved.step for _, saved, _ in run.results} == {5}


def test_a_save_that_was_killed_leaves_the_last_one_and_is_cleared_by_the_next(two):
    half = two / "step-00000015.writing"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"half a file")
    (half / "rank-00009.safetensors").write_bytes(b"of more ranks")
    assert loaded_step(two) == (10, [])
    launch(store, 2, (str(two), "ranges", 15), {"scale": 15})
    assert loaded_step(two) == (15, [])
    names = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
    assert sorted(p.name for p in two.glob("step-00000015/*")) == names


def test_a_folder_that_no_save_has_made_stays(two):
    names = [f"step-00000005.{word}" for word in ("old", "backup", "writing.old")]
    for name in [*names, "step-5.writing", "notes"]:
        (two / name).mkdir()
        (two / name / "notes.txt").write_text("what I saw")
    for step in (5, 15, 20):
        launch(store, 2, (str(two), "ranges", step), {"scale": step, "keep": 1})
    for name in [*names, "step-5.writing", "notes"]:
        assert (two / name / "notes.txt").read_text() == "what I saw"


def test_latest_can_send_the_run_further_back(two):
    (two / "latest").write_text("step-00000005\n")
    assert loaded_step(two) == (5, [])
    launch(store, 2, (str(two), "ranges", 7), {"scale": 7})  # and the run goes on from there
    assert loaded_step(two) == (7, [])
    damage_truncate_of(two / "step-00000007")
    step, (sentence,) = loaded_step(two)
    assert step == 5 and "step-00000007 is refused" in sentence  # 10 was left behind
    launch(store, 2, (str(two), "ranges", 12), {"scale": 12, "keep": 2})  # past 10
    assert sorted(path.name for path in two.glob("step-*")) == ["step-00000007", "step-00000012"]


def damage_truncate_of(folder):
    path = folder / "rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def test_a_newest_checkpoint_that_is_gone_is_named_and_the_newest_whole_one_taken(two):
    shutil.rmtree(two / "step-00000010")
    step, (sentence,) = loaded_step(two)
    assert step == 5 and re.search(
        r"step-00000010 is refused: latest names it, but it is gone\. Step 5 is taken\.$", sentence
    )
    shutil.rmtree(two / "step-00000005")
    with pytest.raises(RankError, match="step 10: latest names it, but it is gone"):
        launch(fetch, 2, (str(two), "rows"))


@pytest.mark.parametrize("without_latest", [False, True])
@pytest.mark.parametrize("name", ["step-00000010.bak", "step-00000011", "step-10", "best"])
def test_a_newest_checkpoint_under_another_name_is_named(name, without_latest, two):
    (two / "step-00000010").rename(two / name)
    if without_latest:
        (two / "latest").unlink()
    step, told = loaded_step(two)
    assert step == 5
    first = "latest is refused: it is missing" if without_latest else "step-00000010 is refused"
    renamed = f"{name} is refused: it has a checkpoint, but would have to be named step-00000010"
    if name == "step-00000011" and without_latest:
        renamed = "step-00000011 is refused: its manifest.json is of step 10"
    elif name == "step-00000011":  # beyond what latest names
        renamed = first
    assert any(first in sentence for sentence in told)
    assert any(renamed in sentence for sentence in told)


def test_a_checkpoint_alone_under_another_name_does_not_let_the_training_begin_anew(two):
    shutil.rmtree(two / "step-00000005")
    (two / "latest").unlink()
    (two / "step-00000010").rename(two / "kept")
    with pytest.raises(RankError, match="kept: it has a checkpoint, but would have to be"):
        launch(fetch, 2, (str(two), "rows"))


def test_a_latest_that_is_older_than_what_is_there_is_told(two):
    launch(store, 2, (str(two), "ranges", 15), {"scale": 15})
    lines = (two / "latest").read_text().splitlines(keepends=True)
    (two / "latest").write_text("".join(lines[1:]))  # as it was before
    step, (sentence,) = loaded_step(two)
    assert step == 10
    assert "step-00000015 is refused: it is newer than latest, which does not list it" in sentence
    (two / "step-00000015").rename(two / "best")
    step, (sentence,) = loaded_step(two)
    assert step == 10 and "best is refused: it has a checkpoint, but would have to be" in sentence
    (two / "latest").write_text("step-00000010\n")  # written by hand, so it is intended
    assert loaded_step(two) == (10, [])
    shutil.copytree(two / "step-00000005", two / "first")  # and an older one is not reported
    (two / "latest").write_text("".join(lines[1:]))
    assert len(loaded_step(two)[1]) == 1


def test_an_older_save_of_the_same_step_is_not_taken_for_the_newer(two):
    shutil.copytree(two / "step-00000010", two / "copy")
    launch(store, 2, (str(two), "ranges", 10), {"scale": 10})
    launch(store, 1, (str(two), "rows", 10), {"scale": 10})
    shutil.rmtree(two / "step-00000010")
    (two / "copy").rename(two / "step-00000010")
    step, (sentence,) = loaded_step(two)
    assert step == 5 and "not the checkpoint that latest lists" in sentence


@pytest.mark.parametrize("how", ["directory", "link", "pipe", "empty", "binary", "short name"])
def test_a_latest_that_is_no_list_of_names_is_told(how, two):
    latest = two / "latest"
    latest.unlink()
    if how == "directory":
        latest.mkdir()
    elif how == "link":
        latest.symlink_to(two / "step-00000005" / "manifest.json")
    elif how == "pipe":
        os.mkfifo(latest)
    else:
        contents = {"empty": b"", "binary": b"\xff\x00", "short name": b"step-0000001"}
        latest.write_bytes(contents[how])
    step, (sentence,) = loaded_step(two)
    assert step == 10 and "latest is refused" in sentence
    if how == "directory":
        latest.rmdir()
    launch(store, 2, (str(two), "ranges", 15), {"scale": 15, "keep": 2})  # repairs it
    assert loaded_step(two) == (15, [])


def test_without_a_readable_latest_the_newest_is_taken_and_it_is_said(two):
    (two / "latest").write_text("nonsense")
    step, (sentence,) = loaded_step(two)
    assert step == 10 and re.search(
        r"latest is refused: its first line is no name of a checkpoint\. Step 10 is taken\.$",
        sentence,
    )
    (two / "latest").unlink()
    step, (sentence,) = loaded_step(two)
    assert step == 10 and "latest is refused: it is missing, so a newer checkpoint may" in sentence


def test_a_step_can_be_asked_for(two):
    assert loaded_step(two, step=5) == (5, [])
    with pytest.raises(RankError, match=r"step 7: it has no manifest\.json"):
        launch(fetch, 2, (str(two), "rows"), {"step": 7})


def test_if_none_is_whole_the_training_does_not_begin_anew_in_silence(two):
    damage_truncate(two)
    (two / "step-00000005" / "manifest.json").unlink()
    with pytest.raises(RankError, match="no checkpoint .* is whole: step 10: .*; step 5: "):
        launch(fetch, 2, (str(two), "rows"))


def test_where_there_is_none_none_is_found(tmp_path):
    assert launch(fetch, 2, (str(tmp_path), "rows")).results == [None, None]
    assert launch(fetch, 2, (str(tmp_path / "nowhere"), "rows")).results == [None, None]


# --- another model -------------------------------------------------------------------------------


def load_another(directory, names_and_shapes, group):
    into = [piece(name, torch.full(shape, -1.0)) for name, shape in names_and_shapes.items()]
    try:
        find(directory, group).load(into, group)
    except ValueError as error:
        untouched = all(bool((each.tensor == -1).all()) for each in into)
        return str(error), untouched


@pytest.mark.parametrize(
    "change, says",
    [
        ({"w": (4, 7)}, r"its w is \[4, 6\], this model's \[4, 7\]"),
        ({"u": (2, 2)}, r"it has no u \[2, 2\], which this model has"),
        ({"cube": None}, r"it has cube \[2, 4, 3\], which this model lacks"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused_by_the_tensor_and_nothing_is_changed(
    change, says, two
):
    wanted = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    for result in launch(load_another, 2, (str(two), wanted)).results:
        message, untouched = result
        assert re.search(f"step-00000010 is of another model: {says}", message)
        assert untouched


def test_what_is_saved_never_runs_code(two):
    """Files are read as safetensors and JSON; nothing in them is unpickled."""
    from mini_dist.training.checkpoint import (
        background,
        files,
        manifest,
        random_state,
        reading,
        training,
    )

    for module in (background, files, manifest, random_state, reading, training):
        with open(module.__file__) as file:
            assert not re.search(r"\bpickle\.|torch\.load\(|import pickle", file.read())
