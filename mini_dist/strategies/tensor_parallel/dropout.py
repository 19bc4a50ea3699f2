"""Dropout: drop replicated tensors equally on all ranks, and sharded ones differently.

    outside the regions    TENSOR: x is replicated, so all ranks must drop the same numbers
                           SEQUENCE: each rank has other tokens, and drops other numbers
    inside attention       each rank has other heads, and drops other scores

torch draws masks from one random state per process. All ranks start from one state and draw the
same numbers; where masks must differ, they draw from a separate state for that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mini_dist.collectives import broadcast


def share_random_state(model: nn.Module, group) -> None:
    """Give all ranks the same random state, from a seed that rank 0 draws."""
    device = next(model.parameters()).device
    seed = torch.randint(2**62, (1,), device=None if device.type == "meta" else device)
    torch.manual_seed(int(broadcast(seed, 0, group)))


@contextmanager
def own_random_numbers(group) -> Iterator[None]:
    """Make each rank draw different random numbers inside `with`, and the same ones afterwards.

    The seed comes from the state that all ranks share. So activation checkpointing, which restores
    that state before it repeats a forward, gets the same masks again.
    """
    seed = int(torch.randint(2**62, ())) + group.rank()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


class SequenceCutDropout(nn.Dropout):
    """Drop out x [B, S/t, D], where each rank has different tokens."""

    def __init__(self, dropout: nn.Dropout, group):
        super().__init__(dropout.p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        with own_random_numbers(self.group):
            return super().forward(x)


def attend_with_own_dropout(attend: Callable, group) -> Callable:
    """Return an attention function (q, k, v, positions, dropout) -> out that drops different scores
    on each rank."""

    def attend_on_this_rank(q, k, v, positions, dropout):
        if not dropout:
            return attend(q, k, v, positions, dropout)
        with own_random_numbers(group):
            return attend(q, k, v, positions, dropout)

    return attend_on_this_rank
