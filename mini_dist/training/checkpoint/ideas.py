"""Checkpoints on one page: every rank writes its shards, and one rename completes the checkpoint.

A shard is a range of a flattened tensor, as in ZeRO. `save` leaves a whole checkpoint or none, and
`load` fills shards whatever number of ranks wrote them. files.py and reading.py do the same for
shards of any shape, in the background of a training run, and on disks that fail.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mini_dist.collectives import barrier


class Shard(NamedTuple):
    values: Tensor  # [stop - start]
    start: int  # index of its first element in the flattened whole tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def save(shards: dict[str, Shard], step: int, directory: Path, group) -> None:
    """Write all ranks' shards to directory/step-N. A crash at any time leaves the previous one.

    The files go to a folder with a temporary name. Rank 0 renames the folder only after every rank
    has written its file, and then points `latest` to it. Both operations are atomic.
    """
    folder = Path(directory) / f"step-{step:08d}"
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    file = unfinished / f"rank-{group.rank():05d}.safetensors"
    save_file({name: shard.values for name, shard in shards.items()}, file)
    ranges = {name: (shard.start, shard.stop) for name, shard in shards.items()}
    index = {"ranges": ranges, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    file.with_suffix(".json").write_text(json.dumps(index))
    for written in (file, file.with_suffix(".json")):
        with open(written, "rb") as opened:
            os.fsync(opened.fileno())  # Until then the data may be in the host's memory only.
    barrier(group)
    if group.rank() == 0:
        unfinished.rename(folder)
        (Path(directory) / "latest.new").write_text(folder.name)
        (Path(directory) / "latest.new").rename(Path(directory) / "latest")
    barrier(group)


def load(shards: dict[str, Shard], directory: Path) -> None:
    """Fill these shards from the latest checkpoint, whatever number of ranks wrote it.

    Each rank reads from every file the ranges that overlap its own. Raises ValueError for a file
    that has changed since it was written.
    """
    folder = Path(directory) / (Path(directory) / "latest").read_text()
    for index_file in sorted(folder.glob("*.json")):
        index, file = json.loads(index_file.read_text()), index_file.with_suffix(".safetensors")
        if hashlib.sha256(file.read_bytes()).hexdigest() != index["sha256"]:
            raise ValueError(f"{file.name} has changed since it was written")
        with safe_open(file, "pt") as stored:
            for name, (start, stop) in index["ranges"].items():
                mine = shards[name]
                first, last = max(start, mine.start), min(stop, mine.stop)
                if first < last:
                    part = stored.get_slice(name)[first - start : last - start]
                    mine.values[first - mine.start : last - mine.start].copy_(part)
