"""Test the checkpoint page and its engine: any number of ranks reads what another wrote."""

import pytest
import torch
from safetensors.torch import load_file

from mini_dist import launch
from mini_dist.training.checkpoint import Piece, Place, find, ideas, piece
from mini_dist.training.checkpoint import save as engine_save

WHOLE = {"w": torch.arange(24.0), "v": torch.arange(100.0, 107.0), "one": torch.tensor([7.0])}


def shards_of(rank, size, fill=None):
    """Return a rank's even ranges; the last ones are shorter or empty."""
    shards = {}
    for name, whole in WHOLE.items():
        each = -(-whole.numel() // size)
        start = min(rank * each, whole.numel())
        part = whole[start : start + each].clone()
        shards[name] = ideas.Shard(part if fill is None else torch.full_like(part, fill), start)
    return shards


def saved(directory, step, add, group):
    shards = shards_of(group.rank(), group.size())
    for shard in shards.values():
        shard.values.add_(add)
    ideas.save(shards, step, directory, group)


def loaded(directory, group):
    shards = shards_of(group.rank(), group.size(), fill=-1.0)
    ideas.load(shards, directory)
    return {name: shard.values for name, shard in shards.items()}


def assert_whole(results, add):
    for name, whole in WHOLE.items():
        torch.testing.assert_close(torch.cat([rank[name] for rank in results]), whole + add)


@pytest.mark.parametrize("before, after", [(4, 3), (1, 4), (3, 1), (2, 2)])
def test_shards_of_any_number_of_ranks_are_filled(tmp_path, before, after):
    launch(saved, before, (tmp_path, 5, 0.5))
    assert_whole(launch(loaded, after, (tmp_path,)).results, 0.5)


def test_the_older_checkpoint_counts_until_the_newer_one_is_whole(tmp_path):
    launch(saved, 2, (tmp_path, 1, 0.25))
    launch(saved, 2, (tmp_path, 2, 0.5))
    assert_whole(launch(loaded, 2, (tmp_path,)).results, 0.5)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.unfinished")
    (tmp_path / "latest").write_text("step-00000001")  # as a crash before the rename leaves it
    assert_whole(launch(loaded, 2, (tmp_path,)).results, 0.25)


def test_a_changed_file_is_refused(tmp_path):
    launch(saved, 2, (tmp_path, 1, 0.0))
    file = next((tmp_path / "step-00000001").glob("rank-00001.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match="rank-00001.safetensors has changed"):
        ideas.load(shards_of(0, 1), tmp_path)


def by_both(directory, group):
    """Write with both; then read the engine's checkpoint with the engine, whole on each rank."""
    shards = shards_of(group.rank(), group.size())
    ideas.save(shards, 3, directory / "page", group)
    pieces = [
        Piece(Place(name, (n,), (0,), (n,), shard.start, shard.stop), shard.values)
        for name, shard in shards.items()
        for n in [WHOLE[name].numel()]
    ]
    engine_save(directory / "engine", 3, pieces, group)
    targets = {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}
    whole = [piece(name, tensor) for name, tensor in targets.items()]
    find(directory / "engine", group).load(whole, group)
    return targets


def test_page_and_engine_store_the_same_values_in_the_same_bytes(tmp_path):
    by_engine = launch(by_both, 3, (tmp_path,)).results[0]
    by_page = shards_of(0, 1, fill=-1.0)
    ideas.load(by_page, tmp_path / "page")
    for name in WHOLE:
        assert torch.equal(by_page[name].values, by_engine[name])
    assert sum(stored_bytes(tmp_path / "page")) == sum(stored_bytes(tmp_path / "engine"))


def stored_bytes(directory):
    for file in directory.rglob("*.safetensors"):
        yield sum(tensor.nbytes for tensor in load_file(file).values())
