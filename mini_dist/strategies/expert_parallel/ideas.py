"""Tokens travel to the experts that they visit: choose, dispatch, combine, and keep the load even.

    copies = choose_copies(experts, num_experts, capacity)
    arrived, dispatched = dispatch(tokens[copies.token], copies.counts, group)
    answers = combine(run_experts(arrived), dispatched, group)

layer.py makes a layer of a GPT of it: each answer is multiplied by its gate weight, and a token's k
answers are added up.

Legend: T tokens of this rank, k experts a token visits, E experts, n ranks of the group; a *copy*
is one token for one of its experts, so there are k T before any are dropped.
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
    """The copies of tokens that travel, those for expert 0 first, then expert 1, ..."""

    token: Tensor  # [copies] which token each one is
    slot: Tensor  # [copies] which of its token's k choices
    counts: Tensor  # [E] how many go to each expert


def choose_copies(experts: Tensor, num_experts: int, capacity: int | None = None) -> Copies:
    """Sort the copies by expert, and drop what is more than `capacity` for one expert.

    experts [T, k]. All first choices come before all second ones, and a choice's tokens in their
    order, so what one expert has too much of, the late tokens' last choices first, is
    dropped (GShard, algorithm 1).
    """
    num_tokens = experts.shape[0]
    wanted = experts.T.flatten()  # [k T], first choices first
    order = wanted.argsort(stable=True)  # [k T]: by expert, and within one as they stood
    counts = wanted.bincount(minlength=num_experts)  # [E]
    if capacity is not None:
        first = counts.cumsum(0) - counts  # where each expert's copies begin
        place = torch.arange(len(order), device=order.device) - first[wanted[order]]
        order = order[place < capacity]
        counts = counts.clamp(max=capacity)
    return Copies(order % num_tokens, order // num_tokens, counts)


def capacity_of(capacity_factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Copies that each rank may send to one expert: its even share, times the factor, rounded up
    (Switch, eq. 3, where tokens choose one expert). So an expert gets at most n times that."""
    return math.ceil(capacity_factor * num_tokens * top_k / num_experts)


class Dispatched(NamedTuple):
    """How the copies went, so that the answers find the way back."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    by_expert: Tensor  # [arrived] order that sorts the rows as they came by expert
    rows_per_expert: list[int]  # how many of them are for each of this rank's experts


@recorded
def dispatch(x: Tensor, counts: Tensor, group) -> tuple[Tensor, Dispatched]:
    """Send each row to the rank of its expert; rank r has the experts r E/n ... (r+1) E/n - 1.

    x [copies, D] sorted by expert, counts [E] -> [arrived, D], sorted by this rank's experts, those
    of one expert in the order of the ranks they came from. Sends the counts first, 8 E/n bytes to
    each other rank: how many rows come from whom is known to nobody beforehand. Then the rows:
    about (n-1)/n k T D elements a rank, if the load is even.
    """
    theirs = all_to_all(counts, group).view(group.size(), -1)  # [n, E/n]: from rank r for expert e
    sent = counts.view(group.size(), -1).sum(1).tolist()
    received = theirs.sum(1).tolist()
    arrived = all_to_all_with_gradient(x, group, sent, received)  # by rank, then by expert
    local = torch.arange(theirs.shape[1], device=x.device).repeat(group.size())  # 0 1 0 1 ...
    by_expert = local.repeat_interleave(theirs.flatten()).argsort(stable=True)
    return arrived[by_expert], Dispatched(sent, received, by_expert, theirs.sum(0).tolist())


@recorded
def combine(answers: Tensor, dispatched: Dispatched, group) -> Tensor:
    """Send every answer back to where its row came from: the inverse of `dispatch`, no more.

    answers [arrived, D] -> [copies, D], in the order that `dispatch` was given.
    """
    as_they_came = torch.empty_like(dispatched.by_expert)
    as_they_came[dispatched.by_expert] = torch.arange(len(answers), device=answers.device)
    return all_to_all_with_gradient(
        answers[as_they_came], group, dispatched.received, dispatched.sent
    )


@recorded
def balance_loss(decision: Routing, group) -> tuple[Tensor, Tensor]:
    """E * sum over experts of (share of visits) * (mean probability), for one of several ranks.

    Returns it, and the visits [E] of the tokens of all ranks. The mean of this over ranks with
    equally many tokens is the loss of the whole batch (`load_balance_loss` of routing.py, Switch
    eq. 4), and the mean of its gradients that loss's gradient: it is linear in the probabilities,
    so these need not be sent, and only the visits are summed over the ranks. With a rank's own
    visits it would be another loss: one that wants every rank's tokens spread evenly, and not only
    all together.
    """
    num_experts = decision.probabilities.shape[1]
    visits = all_reduce(decision.experts.flatten().bincount(minlength=num_experts), group)  # [E]
    share = visits / visits.sum()
    return num_experts * (share * decision.probabilities.mean(0)).sum(), visits
