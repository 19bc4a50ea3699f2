"""Training data in files that are larger than memory: packed, shuffled, and resumed anywhere.

    write_tokens(documents, "data", tokens_per_file=100_000_000)         # once
    stream = TokenStream("data", batch_size=512, seq_len=4096, group=group)
    inputs, targets, position = stream.batch(position)                   # [its rows, S], twice

A position is one whole number: how many samples all ranks together have had since the beginning.
It is all that a checkpoint has to hold, because a batch is a function of the position. So a run
continues exactly on another number of ranks, and with another batch size. `model/data.py` does the
same for one text in memory, with a step as the position.

`prefetched` loads batches ahead, in threads, while the device computes.

Letters: B samples per batch over all ranks, S tokens per sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_dist.collectives import device_of
from mini_dist.plan.fields import checks_kinds, whole

END_OF_DOCUMENT = 0  # a byte that no text in UTF-8 has
STORED = np.dtype("<u2")  # two bytes per token, in this order on every machine


@checks_kinds
def next_samples(
    position: int,
    batch_size: int,
    num_samples: int,
    order: Callable[[int], Sequence[int]],
    group,
) -> tuple[list[int], int]:
    """Return this rank's sample numbers in the batch at `position`, and the next position.

    The ranks' samples, concatenated in the order of ranks, are the same for any number of ranks;
    if batch_size does not divide, some ranks have one sample more. A batch may begin in one epoch
    and end in the next one.

    position: how many samples all ranks together have had, over all epochs.
    order: epoch -> the num_samples sample numbers in that epoch's order, the same on all ranks.
        Drawing an order is expensive, so it is called once per epoch.
    """
    rank, size = group.rank(), group.size()
    first = position + batch_size * rank // size
    last = position + batch_size * (rank + 1) // size
    orders, samples = {}, []
    for number in range(first, last):
        epoch, index = divmod(number, num_samples)
        if epoch not in orders:
            orders[epoch] = order(epoch)
        samples.append(orders[epoch][index])
    return samples, position + batch_size


@checks_kinds
def write_tokens(documents: Iterable[str], folder: str | Path, tokens_per_file: int) -> list[Path]:
    """Pack documents one after the other into files of tokens, and return the files.

    A token is a UTF-8 byte; END_OF_DOCUMENT follows each document. A document may begin in one
    file and end in the next. Only one file's tokens are in memory at a time.
    Raises ValueError for a folder that already has such files.
    """
    whole("tokens_per_file", tokens_per_file)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if there := files_in(folder):
        raise ValueError(f"{folder} has {len(there)} files of tokens: give an empty folder.")
    held, files = bytearray(), []

    def write(number: int) -> None:
        files.append(folder / f"{len(files):05}.tokens")
        np.frombuffer(held[:number], dtype=np.uint8).astype(STORED).tofile(files[-1])
        del held[:number]

    for document in documents:
        held += document.encode("utf-8") + bytes([END_OF_DOCUMENT])
        while len(held) >= tokens_per_file:
            write(tokens_per_file)
    if held:
        write(len(held))
    return files


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tokens"))


@checks_kinds
class TokenStream:
    """Read batches from the files of `write_tokens`, for each rank of a group its rows.

    A file holds (its tokens - 1) // S samples: sample i is the S + 1 tokens from i * S on, the
    last one only as a target. The files are mapped into memory: the operating system reads the
    pages that a batch touches, and may drop them again. Each epoch goes through all samples of all
    files in an order drawn from (seed, epoch), which takes 8 bytes per sample.

    Args:
        folder: where the files are. batch_size: B, over all ranks. seq_len: S.
        group: the ranks that share each batch (the dp axis).
    Raises ValueError if the folder has no files, or no file has a whole sample.
    """

    def __init__(
        self, folder: str | Path, batch_size: int, seq_len: int, group, *, seed: int = 0
    ) -> None:
        whole("batch_size", batch_size)
        whole("seq_len", seq_len)
        whole("seed", seed, at_least=0)
        files = files_in(Path(folder))
        if not files:
            raise ValueError(f"{folder} has no *.tokens files: write them with write_tokens.")
        self.files = [np.memmap(file, STORED, "r") for file in files]
        self.batch_size, self.seq_len, self.group, self.seed = batch_size, seq_len, group, seed
        in_files = [max(0, len(file) - 1) // seq_len for file in self.files]
        self.ends = np.cumsum(in_files)  # the number of samples up to the end of each file
        self.num_samples = int(self.ends[-1])
        if not self.num_samples:
            raise ValueError(
                f"the longest file in {folder} has {max(map(len, self.files))} tokens, but one "
                f"sample of seq_len={seq_len} needs {seq_len + 1}: lower seq_len."
            )
        self._orders: dict[int, np.ndarray] = {}  # the last epochs' orders: a cache

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample numbers of an epoch in its order: [num_samples]."""
        orders = self._orders
        if epoch not in orders:
            if len(orders) > 1:  # a batch may need two epochs
                del orders[min(orders)]
            # NumPy mixes the two numbers into one seed: epoch 1 of seed 0 differs from epoch 0
            # of seed 1
            orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        return orders[epoch]

    def sample(self, number: int) -> np.ndarray:
        """Return the tokens of one sample: [S + 1]."""
        file = int(np.searchsorted(self.ends, number, side="right"))
        start = (number - (self.ends[file - 1] if file else 0)) * self.seq_len
        return self.files[file][start : start + self.seq_len + 1]

    def batch(self, position: int) -> tuple[Tensor, Tensor, int]:
        """Return this rank's inputs and targets, each [its rows, S] int64, and the next
        position."""
        whole("position", position, at_least=0)
        samples, after = next_samples(
            position, self.batch_size, self.num_samples, self.order, self.group
        )
        rows = np.zeros((len(samples), self.seq_len + 1), dtype=np.int64)
        for row, number in zip(rows, samples):
            row[:] = self.sample(number)
        window = torch.from_numpy(rows).to(device_of(self.group))
        return window[:, :-1], window[:, 1:], after


@checks_kinds
def prefetched(
    load: Callable, arguments: Iterable, *, workers: int = 1, ahead: int = 1
) -> Iterator:
    """Yield load(argument) for each argument, in order, computed ahead in threads.

    workers: how many threads load at the same time. ahead: how many results to prepare beyond the
    one that is asked for. An exception of `load` is raised when its result is due. Reading a file
    and most of NumPy release Python's lock, so threads are enough for them; loading that is
    written in Python needs processes (torch.utils.data.DataLoader).
    """
    whole("workers", workers)
    whole("ahead", ahead)
    return _prefetched(load, arguments, workers, ahead)


def _prefetched(load: Callable, arguments: Iterable, workers: int, ahead: int) -> Iterator:
    pool, waiting = ThreadPoolExecutor(workers, "prefetch"), deque()
    try:
        for argument in arguments:
            waiting.append(pool.submit(load, argument))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # also when the caller stops early
        pool.shutdown(wait=True, cancel_futures=True)
