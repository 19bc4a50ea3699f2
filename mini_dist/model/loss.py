"""Cross entropy of tokens as a sum and a count, which ranks and micro-batches can add up.

Letters: V vocab.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from .digits import at_least_float32
from .vocabulary import check_tokens

IGNORE_INDEX = -100  # a target that does not count, as in torch


class TokenLoss(NamedTuple):
    """Cross entropy of some tokens, before the division: ranks and micro-batches with different
    numbers of tokens add up both fields, then divide once."""

    total: Tensor  # [], in nats, summed
    num_tokens: Tensor  # [] int64, targets that count

    def mean(self) -> Tensor:
        """Return total / num_tokens. Raises ValueError for zero tokens, where it would be nan."""
        if not self.num_tokens.is_meta and not self.num_tokens:
            raise ValueError(
                f"no target counts (all are IGNORE_INDEX={IGNORE_INDEX}), so there is no mean "
                "loss. If other ranks have tokens, divide `total` by the number of tokens over "
                "all ranks."
            )
        return self.total / self.num_tokens


def check_any_counts(num_tokens: Tensor | int) -> None:
    """Raise ValueError if all ranks have zero tokens, because the batch has no mean loss."""
    if not num_tokens:
        raise ValueError(f"no target of any rank counts: all are IGNORE_INDEX={IGNORE_INDEX}")


def token_loss(logits: Tensor, targets: Tensor) -> TokenLoss:
    """Compute the cross entropy of logits [..., V] and targets [...] int64, except where targets
    are IGNORE_INDEX. For zero tokens `total` is 0, with zero gradients.

    Raises ValueError for another target outside 0..V-1.
    """
    check_tokens(targets, logits.shape[-1], "target", ignored=IGNORE_INDEX)
    total = functional.cross_entropy(
        at_least_float32(logits).flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )
    return TokenLoss(total, (targets != IGNORE_INDEX).sum())
