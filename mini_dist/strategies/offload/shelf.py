"""Tensors that are in files between uses, and in memory during a use.

    shelf = Shelf(folder, group)
    shelf.put(tensor, "3.exp_avg")    # written, and its memory freed
    shelf.get(tensor, "3.exp_avg")    # back in memory, with its values

If a write fails, the tensor stays in memory and nothing is lost: `raise_failed` reports it after
the step. If a read fails, it raises at once.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from mini_dist.ranks.ledger.recording import recorded

from .files import FileStore, OffloadError


class Shelf:
    """The files of one rank's shards. folder: None keeps everything in memory."""

    def __init__(self, folder: str | Path | None, group):
        self.group = group
        self.files = FileStore(Path(folder) / f"rank{group.rank()}") if folder else None
        self.numbers: dict[Tensor, int] = {}  # of each shard
        self.away: set[str] = set()  # names of tensors that are in a file and not in memory
        self.failed: list[OffloadError] = []  # failed writes

    def name(self, shard: Tensor, what: str) -> str:
        """Name a file that belongs to a shard: "3.exp_avg" """
        number = self.numbers.setdefault(shard, len(self.numbers))
        return f"{number}.{what}"

    def get(self, tensor: Tensor, name: str) -> None:
        """Load a tensor, unless it is in memory because its write failed."""
        if name in self.away:
            self.look(tensor, name)
            self.away.discard(name)

    def look(self, tensor: Tensor, name: str) -> None:
        """Load a tensor for reading only: the file stays authoritative."""
        from_file_(tensor, name, self.files, self.group)

    def put(self, tensor: Tensor, name: str) -> None:
        """Write a tensor to its file and free its memory; if the write fails, keep it in memory."""
        try:
            to_file_(tensor, name, self.files, self.group)
            self.away.add(name)
        except OffloadError as error:
            self.away.discard(name)
            self.failed.append(error)

    def check(self) -> None:
        """Raise OffloadError if a file is gone or has another length."""
        for name in sorted(self.away):
            self.files.check(name)

    def raise_failed(self) -> None:
        """Raise the errors of writes since the last call, if there are any."""
        if self.failed:
            failed, self.failed = self.failed, []
            raise failed[0]


def is_here(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() > 0


def make_room_(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def give_room_back_(tensor: Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@recorded
def to_file_(tensor: Tensor, name: str, files: FileStore, group) -> None:
    """Write the tensor and free its memory."""
    files.write(name, tensor)
    give_room_back_(tensor)


@recorded
def from_file_(tensor: Tensor, name: str, files: FileStore, group) -> None:
    """Allocate the tensor's memory and read its values; do neither if the read fails."""
    make_room_(tensor)
    try:
        files.read(name, tensor)
    except OffloadError:
        give_room_back_(tensor)
        raise
