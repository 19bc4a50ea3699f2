"""A checkpoint is whole or refused, holds everything once, and fits any other layout."""

import json
import math
import os
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file

from mini_dist import RankError, launch
from mini_dist.checkpoint import CheckpointError, Piece, Place, find, piece, save
from mini_dist.collectives import barrier

SHAPES = {"w": (4, 6), "v": (12,), "cube": (2, 4, 3), "one": ()}


def whole(scale=1):
    """What all ranks hold together; no two numbers are equal."""
    tensors, at = {}, 0
    for name, shape in SHAPES.items():
        numel = math.prod(shape)
        tensors[name] = scale * torch.arange(at, at + numel, dtype=torch.float32).view(shape)
        at += numel
    return tensors


def part(tensor, pieces, number):
    """(start, stop) of one of so many even parts, the last ones perhaps empty."""
    each = -(-tensor.numel() // pieces)
    return min(number * each, tensor.numel()), min((number + 1) * each, tensor.numel())


def box(name, tensor, dim, pieces, number):
    if tensor.dim() <= dim or tensor.shape[dim] % pieces:
        return piece(name, tensor)  # not cut: alike on all ranks
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


def ranges_of_columns(tensors, rank, size):  # ZeRO over dp, of what tp 2 has cut
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
    """What is loaded, and what was found; empty pieces ask for nothing."""
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
    """The step that 2 ranks find, checked to be what was saved as that step, and what was said."""
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
    """Rows 0-2 and 1-3: more than whole, as two cuts of a tied embedding may be."""
    w = torch.arange(24.0).view(4, 6)[group.rank() : group.rank() + 3].clone()
    save(directory, 0, [piece("w", w, (4, 6), (group.rank(), 0))], group)
    into = piece("w", torch.zeros(4, 6))
    find(directory, group).load([into], group)
    return torch.equal(into.tensor, torch.arange(24.0).view(4, 6))


def test_pieces_may_overlap(tmp_path):
    assert launch(overlapping, 2, (str(tmp_path),)).results == [True, True]


def cannot_write(directory, group):
    if group.rank() == 1:
        import mini_dist.checkpoint.files as files

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
    extra = {10: "ten", 9: ["nine", None, 0.1]}  # JSON has no such keys, and another order
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
    """Checkpoints of steps 5 and 10, the newer one to be damaged."""
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
    from mini_dist.checkpoint.files import sealed

    path = newest(directory, "manifest.json")
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(sealed({**manifest, "format": 2}))


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
}


@pytest.mark.parametrize("damage", WHY, ids=lambda damage: damage.__name__)
def test_what_is_not_whole_is_refused_in_a_sentence_and_the_one_before_used(damage, two):
    damage(two)
    step, told = loaded_step(two)
    assert step == 5
    (sentence,) = told
    assert re.search(
        rf"step-00000010 is refused: {WHY[damage]}\. Trying the one before\.$", sentence
    )


def flips(directory, sizes, group):
    """Flip one bit here and there, one at a time; the steps that are found then."""
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
    """Also those of headers and of the manifest."""
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


def test_latest_can_send_the_run_further_back(two):
    (two / "latest").write_text("step-00000005\n")
    assert loaded_step(two) == (5, [])


def test_without_a_readable_latest_the_newest_is_taken(two):
    (two / "latest").write_text("nonsense")
    assert loaded_step(two) == (10, [])
    (two / "latest").unlink()
    assert loaded_step(two) == (10, [])


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
    from mini_dist.checkpoint import files, training

    for module in (files, training):
        with open(module.__file__) as file:
            assert not re.search(r"\bpickle\.|torch\.load\(|import pickle", file.read())
