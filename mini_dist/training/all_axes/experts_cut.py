"""Experts whose matrices are sharded by tensor parallelism: each etp rank has a shard of an expert.

Without sequence parallelism all tp ranks have the same tokens and route them alike, and an expert
is sharded over the tp ranks like any MLP. With it each tp rank has its own tokens and routes them
itself. So an expert's input rows are first gathered from all etp ranks, and afterwards the
partial results are summed for the rank of each row. With etp=1 an expert is whole,
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
    """Return the tensor-parallel plan of a GPT: its experts over this group, the rest over
    another."""
    return {**GPT_PLAN, "blocks.*.ffn": partial(parallel_ffn, experts_group=experts_group)}


def parallel_ffn(ffn: nn.Module, group, *, pair: Pair, experts_group) -> nn.Module:
    """Shard an MLP, or each expert of an MoE, for the tensor-parallel plan; a router stays
    whole."""
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
    """Return the pair that gathers the rows [r, D] of all etp ranks for an expert, [R, D], and sums
    its results for each rank. It is SEQUENCE, except that r differs between ranks.

    An all-to-all does both: sending all ranks the same is a gather; adding what arrives is a sum.
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
