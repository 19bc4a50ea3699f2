"""Experts whose matrices tensor parallelism cuts: each etp rank has a part of an expert.

Without sequence parallelism all tp ranks have the same tokens, route them alike, and an expert is
cut as any MLP is, over the tp ranks. With it a tp rank has tokens of its own and routes them by
itself; so before an expert's matrices its rows are gathered from all etp ranks, and behind them the
partial results are added up for the rank that each row came from. With etp=1 an expert is whole,
and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_gather
from mini_dist.collectives.ops import all_to_all
from mini_dist.model.gpt import MoE
from mini_dist.strategies.tensor_parallel import GPT_PLAN, TENSOR, Pair, ParallelMLP


def plan(experts_group) -> dict[str, Callable]:
    """How tensor parallelism cuts a GPT: its experts over this group, the rest over another."""
    return {**GPT_PLAN, "blocks.*.ffn": partial(parallel_ffn, experts_group=experts_group)}


def parallel_ffn(ffn: nn.Module, group, *, pair: Pair, experts_group) -> nn.Module:
    """For the tensor-parallel plan: an MLP is cut, and so is each expert; a router stays whole."""
    if not isinstance(ffn, MoE):
        return ParallelMLP(ffn, group, pair=pair)
    gathers = pair.cuts_sequence and experts_group.size() > 1
    ffn.experts = nn.ModuleList(
        ParallelMLP(expert, experts_group, pair=pair_for_uneven_rows() if gathers else TENSOR)
        for expert in ffn.experts
    )
    if ffn.shared is not None:
        ffn.shared = ParallelMLP(ffn.shared, group, pair=pair)
    return ffn


def pair_for_uneven_rows() -> Pair:
    """How the rows [r, D] that etp ranks have for an expert enter and leave it: gathered from all,
    [R, D], and added up for each. Like SEQUENCE, but that r differs from rank to rank.

    An all-to-all does it: to send everyone the same is to gather, to add up what comes is to sum.
    """
    rows: list[int] = []  # of each rank, in this forward

    def enter(x: Tensor, group) -> Tensor:
        nonlocal rows
        mine = torch.tensor([len(x)], device=x.device)
        everyones = all_gather(mine, group)  # (without storage: as many as here)
        rows = [len(x)] * group.size() if x.is_meta else everyones.tolist()
        return all_to_all(x.repeat(group.size(), 1), group, [len(x)] * group.size(), rows)

    def leave(y: Tensor, group) -> Tensor:
        mine = rows[group.rank()]
        terms = all_to_all(y, group, rows, [mine] * group.size())  # [t r, D]
        return terms.view(group.size(), mine, y.shape[-1]).sum(0)

    return Pair(enter, leave)
