"""Tensors that are in files between two uses, and in memory while they are used.

    shelf = Shelf(folder, group)
    shelf.put(tensor, "3.exp_avg")    # written, and its memory given back
    shelf.get(tensor, "3.exp_avg")    # its memory and its values again

What cannot be written stays in memory, and nothing is lost: `raise_failed` says it when the step is
done. What cannot be read raises at once.
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
        self.numbers: dict[Tensor, int] = {}  # of the shards
        self.away: set[str] = set()  # names of what is in a file and not in memory
        self.failed: list[OffloadError] = []  # what could not be written

    def name(self, shard: Tensor, what: str) -> str:
        """Of a file that belongs to a shard: "3.exp_avg" """
        number = self.numbers.setdefault(shard, len(self.numbers))
        return f"{number}.{what}"

    def get(self, tensor: Tensor, name: str) -> None:
        """Into memory, unless it is there: what could not be written still is."""
        if name in self.away:
            self.look(tensor, name)
            self.away.discard(name)

    def look(self, tensor: Tensor, name: str) -> None:
        """Into memory for reading only: the file remains what counts."""
        from_file_(tensor, name, self.files, self.group)

    def put(self, tensor: Tensor, name: str) -> None:
        """Into its file, or, if that fails, nowhere: see `raise_failed`."""
        try:
            to_file_(tensor, name, self.files, self.group)
            self.away.add(name)
        except OffloadError as error:
            self.away.discard(name)
            self.failed.append(error)

    def check(self) -> None:
        """Raises OffloadError if a file is gone or has another length."""
        for name in sorted(self.away):
            self.files.check(name)

    def raise_failed(self) -> None:
        """Raises what writing has met since the last call, if anything."""
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
    """Write the tensor and give its memory back."""
    files.write(name, tensor)
    give_room_back_(tensor)


@recorded
def from_file_(tensor: Tensor, name: str, files: FileStore, group) -> None:
    """Give the tensor its memory again, and its values; neither, if they cannot be read."""
    make_room_(tensor)
    try:
        files.read(name, tensor)
    except OffloadError:
        give_room_back_(tensor)
        raise
