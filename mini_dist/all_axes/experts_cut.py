"""Experts whose matrices tensor parallelism cuts: each tp rank has a part of every expert.

Without sequence parallelism all tp ranks have the same tokens, route them alike, and an expert is
cut as any MLP is. With it a tp rank has tokens of its own and routes them by itself; so before an
expert's matrices its rows are gathered from all tp ranks, and behind them the partial results are
added up for the rank that each row came from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..collectives import all_gather
from ..model import MoE
from ..ops import all_to_all
from ..tensor_parallel import GPT_PLAN, TENSOR, Pair, ParallelMLP


def parallel_ffn(ffn: nn.Module, group, *, pair: Pair) -> nn.Module:
    """For the tensor-parallel plan: an MLP is cut, and so is each expert; a router stays whole."""
    if not isinstance(ffn, MoE):
        return ParallelMLP(ffn, group, pair=pair)
    ffn.experts = nn.ModuleList(
        ParallelMLP(expert, group, pair=pair_for_uneven_rows() if pair.cuts_sequence else TENSOR)
        for expert in ffn.experts
    )
    if ffn.shared is not None:
        ffn.shared = ParallelMLP(ffn.shared, group, pair=pair)
    return ffn


PLAN = {**GPT_PLAN, "blocks.*.ffn": parallel_ffn}


def pair_for_uneven_rows() -> Pair:
    """How the rows [r, D] that tp ranks have for an expert enter and leave it: gathered from all,
    [R, D], and added up for each. Like SEQUENCE, but that r differs from rank to rank.

    An all-to-all does it: to send everyone the same is to gather, to add up what comes is to sum.
    """
    rows: list[int] = []  # of each rank, in this forward

    def enter(x: Tensor, group) -> Tensor:
        nonlocal rows
        mine = torch.tensor([len(x)], device=x.device)
        rows = all_gather(mine, group).tolist()
        return all_to_all(x.repeat(group.size(), 1), group, [len(x)] * group.size(), rows)

    def leave(y: Tensor, group) -> Tensor:
        mine = rows[group.rank()]
        terms = all_to_all(y, group, rows, [mine] * group.size())  # [t r, D]
        return terms.view(group.size(), mine, y.shape[-1]).sum(0)

    return Pair(enter, leave)
