"""Byte-level batches of a real text, for one process or for every rank of the dp axis.

    tokens = load_text()                                        # [num_bytes] uint8
    batches = Batches(tokens, batch_size=8, seq_len=128, rank=rank, size=size)
    inputs, targets = batches.batch(step)                       # [B/dp, S] int64, twice

There is no position to save, because a batch is a function of its step: training that stopped after
`step` resumes with `batches.batch(step + 1)`.

Letters: B samples per batch over all ranks, S bytes per sample, dp ranks that share the batch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mini_dist.plan.fields import checks_kinds, whole

from .loss import IGNORE_INDEX

TEXT = Path(__file__).resolve().parent / "text/python_reference.txt"
VOCAB_SIZE = 256  # a token is a byte: no tokenizer to train, nothing to download


@checks_kinds
def encode(text: str) -> Tensor:
    """Turn text into tokens, one per UTF-8 byte: [num_bytes] int64, as the model takes them."""
    return _from_bytes(text.encode("utf-8")).long()


def decode(tokens: Tensor) -> str:
    """Turn tokens [num_bytes] back into text; bytes that are not UTF-8 (a model may sample
    some) become U+FFFD."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def load_text(path: str | Path | None = None) -> Tensor:
    """Read a file's bytes, or, without a path, the course's own text.

    The text is Python's language reference, 0.5 MB of English, as included in Python 3.11.7
    (`pydoc_data.topics`). Other versions have other texts, and models trained on them have other
    losses, so we keep a copy.

    Returns [num_bytes] uint8. Raises ValueError for an empty file, and what `open` raises.
    """
    text = Path(TEXT if path is None else path).read_bytes()
    if not text:
        raise ValueError(f"{path} is empty (0 bytes): give a file with some text in it.")
    return _from_bytes(text)


def _from_bytes(text: bytes) -> Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8)  # frombuffer refuses an empty buffer,
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # and warns about a read-only one


@checks_kinds
class Batches:
    """Cut a text into samples and give each rank of the dp axis its own share of every batch.

    Sample i is the S + 1 bytes from i*S on: S inputs, and the same bytes shifted by one as targets.
    Fewer than S bytes at the end of the text are not used. Each epoch goes through the
    samples in an order drawn from (seed, epoch), the same on all ranks; batch j of the epoch is
    the j-th group of B samples in this order, and rank r has rows [r*B/dp, (r+1)*B/dp) of it. So
    the ranks' rows, concatenated, are exactly the batch of a single process.

    The last batch of an epoch may lack samples. `tail="drop"` skips it: every sample is used
    at most once per epoch, and the next epoch's new order skips other samples. `tail="pad"`
    fills it with rows whose targets are all IGNORE_INDEX: every sample is used exactly once
    and shapes never change, but then ranks have different numbers of tokens (the last ranks
    perhaps none), so divide by the number of tokens on all ranks.

    Args:
        tokens: [num_bytes], as from `load_text`.
        batch_size: B, over all ranks. seq_len: S.
        rank, size: this rank's index on the dp axis, and the size of the axis.
        device: where the batches go, by default torch's default device; the text stays where it is.
    Raises ValueError when the text is too short or the sizes do not fit.
    """

    def __init__(
        self,
        tokens: Tensor,
        batch_size: int,
        seq_len: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        tail: str = "drop",
        device: torch.device | str | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("size", size)):
            whole(name, value)
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}: with size={size} it must be in 0..{size - 1}.")
        whole("seed", seed, at_least=0)
        if tail not in ("drop", "pad"):
            raise ValueError(f"tail is {tail!r}: it must be 'drop' or 'pad'.")
        if batch_size % size:
            nearest = round(batch_size / size) * size or size
            raise ValueError(
                f"batch_size is {batch_size}, over all ranks: {size} ranks cannot share it "
                f"equally. The nearest that works is {nearest}."
            )
        samples_needed = batch_size if tail == "drop" else 1
        bytes_needed = samples_needed * seq_len + 1
        if len(tokens) < bytes_needed:
            raise ValueError(
                f"the text has {len(tokens)} bytes, but {bytes_needed} are needed: "
                f"{samples_needed} sample(s) of seq_len={seq_len}, and 1 more as the last target. "
                "Give a longer text, or lower batch_size or seq_len."
            )
        self.tokens, self.batch_size, self.seq_len = tokens, batch_size, seq_len
        self.rank, self.size, self.seed = rank, size, seed
        self.device = torch.get_default_device() if device is None else device
        self.num_samples = (len(tokens) - 1) // seq_len
        full, rest = divmod(self.num_samples, batch_size)
        self.steps_per_epoch = full + (1 if rest and tail == "pad" else 0)
        self._order = (-1, np.empty(0, dtype=np.int64))  # (epoch, its order): a cache

    def sample_indices(self, step: int) -> Tensor:
        """Return the indices of this rank's samples at `step` (0, 1, ... through all epochs): B/dp
        numbers in 0..num_samples-1, or fewer (even none) in a padded last batch."""
        if step < 0:
            raise ValueError(f"step is {step}: steps count from 0.")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            # NumPy mixes the two numbers into one seed; seed + epoch would make epoch 1 of seed 0
            # the same as epoch 0 of seed 1
            rng = np.random.default_rng([self.seed, epoch])
            self._order = (epoch, rng.permutation(self.num_samples))
        share = self.batch_size // self.size  # B/dp
        start = step_in_epoch * self.batch_size + self.rank * share
        return torch.from_numpy(self._order[1][start : start + share].copy())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's (inputs, targets) of `step`, each [B/dp, S] int64."""
        samples = self.sample_indices(step)
        where = samples[:, None] * self.seq_len + torch.arange(
            self.seq_len + 1, device=samples.device
        )
        window = self.tokens[where].to(self.device, torch.int64)  # [up to B/dp, S+1]
        inputs, targets = window[:, :-1], window[:, 1:]
        missing = self.batch_size // self.size - len(samples)
        return (
            torch.cat([inputs, inputs.new_zeros(missing, self.seq_len)]),
            torch.cat([targets, targets.new_full((missing, self.seq_len), IGNORE_INDEX)]),
        )
