"""Tensors in files: directly to the disk where possible, and without loss where not.

    store = FileStore(folder)
    store.write("3.exp_avg", tensor)      # the old file stays until the new one is complete
    store.read("3.exp_avg", tensor)       # into the tensor's memory

A file that a training step reads and writes once should not be in the page cache: the cache
would use up the host memory that offloading should save, and copy everything once more. With
O_DIRECT the disk reads from and writes to the process's own memory. This requires memory, file
offset and length to be multiples of a block, so tensors go through aligned buffers. Several threads
work at a time, because a fast disk needs many requests to be busy (Rajbhandari et al. 2021,
section 6.3, "DeepNVMe"). On a file system without O_DIRECT the page cache is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from torch import Tensor

from mini_dist.plan.fields import checks_kinds

BLOCK = 4096  # O_DIRECT needs lengths, offsets and addresses that are multiples of this
CHUNK = 4 * 2**20  # bytes per read or write of one thread
THREADS = 4  # per rank


class OffloadError(OSError):
    """A file of the tier could not be read or written; the message says what is intact."""

    what = ""  # the message without the part about what is intact

    @classmethod
    def about(cls, number: int | None, what: str, intact: str) -> OffloadError:
        error = cls(number, f"{what}. {intact}")
        error.what = what
        return error

    def but(self, intact: str) -> OffloadError:
        """Return the same error, with more knowledge of what is intact."""
        return self.about(self.errno, self.what, intact)


@checks_kinds
class FileStore:
    """The files of one rank, by name. direct: use O_DIRECT; None: if the file system has it."""

    def __init__(self, folder: str | Path, direct: bool | None = None):
        self.folder = Path(folder)
        if self.folder.is_file():
            raise ValueError(f"folder={str(folder)!r} is a file: give a directory")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.direct = works(self.folder) if direct is None else direct
        self.pool = ThreadPoolExecutor(THREADS, "file")
        self.buffers: SimpleQueue[mmap.mmap] = SimpleQueue()  # mmap is aligned to pages
        for _ in range(THREADS):
            self.buffers.put(mmap.mmap(-1, CHUNK))
        self.sizes: dict[str, int] = {}

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the tensor. Raises OffloadError on failure; the old file is then unchanged."""
        path, new = self.folder / name, self.folder / f"{name}.new"
        try:
            self.in_chunks(new, os.O_WRONLY | os.O_CREAT, tensor, self.write_chunk)
            os.truncate(new, tensor.nbytes)  # cut off the padding of the last block
            new.replace(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
            raise OffloadError.about(
                error.errno,
                f"{path} could not be written, {why}",
                "What it was to hold stays in memory, the old file is as it was, and the next step "
                "tries again",
            ) from error
        self.sizes[name] = tensor.nbytes

    def read(self, name: str, tensor: Tensor) -> None:
        """Fill the tensor. Raises OffloadError if the file is gone, has another length or cannot be
        read; the tensor's contents are then undefined."""
        self.check(name)
        path = self.folder / name
        try:
            self.in_chunks(path, os.O_RDONLY, tensor, self.read_chunk)
        except OSError as error:
            raise OffloadError.about(
                error.errno,
                f"{path} could not be read, {error.strerror or error}",
                "Nothing was changed; call again, or go back to the last checkpoint",
            ) from error

    def check(self, name: str) -> None:
        """Raise OffloadError unless the file exists with the length that was written."""
        path, wanted = self.folder / name, self.sizes[name]
        found = path.stat().st_size if path.exists() else None
        if found != wanted:
            what = "is gone" if found is None else f"has {found:,} bytes of {wanted:,}"
            raise OffloadError.about(
                errno.ENOENT if found is None else errno.EIO,
                f"{path} {what}: it was removed or truncated",
                "Nothing was changed; put the file back and call again, or go back to the last "
                "checkpoint",
            )

    def in_chunks(self, path: Path, flags: int, tensor: Tensor, move: Callable) -> None:
        file = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o600)
        try:
            moves = [
                self.pool.submit(move, file, tensor.data_ptr() + begin, begin, end - begin)
                for begin, end in chunks(tensor.nbytes)
            ]
            for one in moves:
                one.exception()  # all threads end before the file is closed
            for one in moves:
                one.result()
        finally:
            os.close(file)

    def write_chunk(self, file: int, address: int, begin: int, length: int) -> None:
        buffer = self.buffers.get()
        try:
            ctypes.memmove(address_of(buffer), address, length)
            whole = -(-length // BLOCK) * BLOCK
            done = 0
            while done < whole:
                done += os.pwrite(file, memoryview(buffer)[done:whole], begin + done)
        finally:
            self.buffers.put(buffer)

    def read_chunk(self, file: int, address: int, begin: int, length: int) -> None:
        buffer = self.buffers.get()
        try:
            whole, done = -(-length // BLOCK) * BLOCK, 0
            while done < length:
                found = os.preadv(file, [memoryview(buffer)[done:whole]], begin + done)
                if not found:
                    raise OSError(errno.EIO, f"it ended after {begin + done:,} bytes")
                done += found
            ctypes.memmove(address, address_of(buffer), length)
        finally:
            self.buffers.put(buffer)


def chunks(nbytes: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + CHUNK, nbytes)) for begin in range(0, nbytes, CHUNK)]


def address_of(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def works(folder: Path) -> bool:
    """Return whether the file system has O_DIRECT (tmpfs since Linux 6.6, macOS never)."""
    if not hasattr(os, "O_DIRECT"):
        return False
    path = folder / ".direct"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        os.pwrite(file, mmap.mmap(-1, BLOCK), 0)
        return True
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink(missing_ok=True)
