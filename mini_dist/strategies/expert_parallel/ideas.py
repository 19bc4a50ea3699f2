"""Send tokens to their experts: choose, dispatch, combine, and keep the load balanced.

    copies = choose_copies(experts, num_experts, capacity)
    arrived, dispatched = dispatch(tokens[copies.token], copies.counts, group)
    answers = combine(run_experts(arrived), dispatched, group)

layer.py builds a layer of a GPT from this: it multiplies each answer by its gate weight and adds up
the k answers of each token.

Legend: T tokens per rank, k experts per token, E experts, n ranks of the group. A *copy* is one
token on its way to one of its experts, so there are k T copies before any are dropped.
Sources: GShard (Lepikhin et al. 2020, sections 2.2 and 3.1), Switch (Fedus et al. 2021, section 2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, all_to_all
from mini_dist.collectives.ops import all_to_all as all_to_all_with_gradient
from mini_dist.model.routing import Routing
from mini_dist.ranks.ledger.recording import recorded


class Copies(NamedTuple):
    """The copies that travel, sorted: those for expert 0 first, then expert 1, ..."""

    token: Tensor  # [copies] the token it is a copy of
    slot: Tensor  # [copies] which of the token's k choices it is
    counts: Tensor  # [E] copies for each expert


def choose_copies(experts: Tensor, num_experts: int, capacity: int | None = None) -> Copies:
    """Sort the copies by expert, and drop copies beyond `capacity` for one expert.

    experts [T, k]. All first choices come before all second choices, and within one choice, tokens
    keep their order. So if an expert has too many copies, the last choices of late tokens are
    dropped first (GShard, algorithm 1).
    """
    num_tokens = experts.shape[0]
    wanted = experts.T.flatten()  # [k T], first choices first
    order = wanted.argsort(stable=True)  # [k T]: by expert, stable within each expert
    counts = wanted.bincount(minlength=num_experts)  # [E]
    if capacity is not None:
        first = counts.cumsum(0) - counts  # where each expert's copies begin
        place = torch.arange(len(order), device=order.device) - first[wanted[order]]
        order = order[place < capacity]
        counts = counts.clamp(max=capacity)
    return Copies(order % num_tokens, order // num_tokens, counts)


def capacity_of(capacity_factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return how many copies each rank may send to one expert: the even share times the factor,
    rounded up (Switch, eq. 3, for one expert per token). An expert gets at most n times that."""
    return math.ceil(capacity_factor * num_tokens * top_k / num_experts)


class Dispatched(NamedTuple):
    """How the copies were sent: what `combine` needs to send the answers back."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    by_expert: Tensor  # [arrived] permutation that sorts arrived rows by expert
    rows_per_expert: list[int]  # arrived rows for each of this rank's experts


@recorded
def dispatch(x: Tensor, counts: Tensor, group) -> tuple[Tensor, Dispatched]:
    """Send each row to the rank of its expert; rank r has the experts r E/n ... (r+1) E/n - 1.

    x [copies, D] sorted by expert, counts [E] -> [arrived, D], sorted by this rank's experts, and
    within one expert by source rank. The counts are sent first, 8 E/n bytes to each other rank,
    because no rank knows beforehand how many rows it will receive. Then the rows are sent:
    about (n-1)/n k T D elements per rank if the load is even.
    """
    theirs = all_to_all(counts, group).view(group.size(), -1)  # [n, E/n]: from rank r for expert e
    sent = counts.view(group.size(), -1).sum(1).tolist()
    received = theirs.sum(1).tolist()
    arrived = all_to_all_with_gradient(x, group, sent, received)  # by source rank, then by expert
    local = torch.arange(theirs.shape[1], device=x.device).repeat(group.size())  # 0 1 0 1 ...
    by_expert = local.repeat_interleave(theirs.flatten()).argsort(stable=True)
    return arrived[by_expert], Dispatched(sent, received, by_expert, theirs.sum(0).tolist())


@recorded
def combine(answers: Tensor, dispatched: Dispatched, group) -> Tensor:
    """Send every answer back to the rank of its row: the exact inverse of `dispatch`.

    answers [arrived, D] -> [copies, D], in the order that `dispatch` was given.
    """
    as_they_came = torch.empty_like(dispatched.by_expert)
    as_they_came[dispatched.by_expert] = torch.arange(len(answers), device=answers.device)
    return all_to_all_with_gradient(
        answers[as_they_came], group, dispatched.received, dispatched.sent
    )


@recorded
def balance_loss(decision: Routing, group) -> tuple[Tensor, Tensor]:
    """Return one rank's part of E * sum over experts of (share of visits) * (mean probability).

    Also returns the visits [E] of all ranks' tokens. If all ranks have equally many tokens, the
    mean of this loss over the ranks is the whole batch's loss (`load_balance_loss` of routing.py,
    Switch eq. 4), and the mean of the gradients is its gradient. The loss is linear in the
    probabilities, so only the visits have to be summed over the ranks. With a rank's own visits it
    would be a different loss, one that asks for an even load from each rank's tokens alone, not
    only from all tokens together.
    """
    num_experts = decision.probabilities.shape[1]
    visits = all_reduce(decision.experts.flatten().bincount(minlength=num_experts), group)  # [E]
    share = visits / visits.sum()
    return num_experts * (share * decision.probabilities.mean(0)).sum(), visits
