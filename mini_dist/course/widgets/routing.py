"""Explorer of lesson 14: who visits whom, what is dropped, and how many rows travel."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.model.routing import route
from mini_dist.plan.calculators import readable
from mini_dist.strategies.expert_parallel import capacity_of, choose_copies

from ..draw.svg import FAINT, Drawing, Panel, numbered, round_places
from ..lab import ParameterError, choice, real
from . import page
from .explorer import Explorer

TOKENS = 128  # per rank
KEPT, DROPPED = "#3182bd", "#fdae6b"
D_MODEL, BYTES = 4096, 2  # elements per row, bytes per element


class Traffic(NamedTuple):
    """What the routers of all ranks decided."""

    wanted: Tensor  # [ranks, E] copies that each rank's tokens want to send to each expert
    went: Tensor  # [ranks, E] those within capacity
    capacity: int | None


@lru_cache(maxsize=256)
def traffic(
    num_experts: int, top_k: int, num_ranks: int, liking: float, capacity_factor: str
) -> Traffic:
    """Route 128 random tokens per rank; expert 0 is the most popular, the last one the least."""
    liked = torch.linspace(liking, -liking, num_experts)
    capacity = None
    if capacity_factor != "none":
        capacity = capacity_of(float(capacity_factor), TOKENS, top_k, num_experts)
    wanted, went = [], []
    for rank in range(num_ranks):
        generator = torch.Generator().manual_seed(rank)
        logits = torch.randn(TOKENS, num_experts, generator=generator) + liked
        experts = route(logits, top_k).experts
        wanted.append(choose_copies(experts, num_experts).counts)
        went.append(choose_copies(experts, num_experts, capacity).counts)
    return Traffic(torch.stack(wanted), torch.stack(went), capacity)


def render(
    num_experts: int = 8,
    top_k: int = 2,
    num_ranks: int = 4,
    liking: float = 0.5,
    capacity_factor: str = "none",
) -> tuple[Drawing, str]:
    """Draw the load of every expert and the rows from every rank to every other.

    liking: the first expert's mean logit in standard deviations; the last expert's is -liking.
    Raises ValueError for more ranks than experts, and for more choices than experts.
    """
    if num_ranks > num_experts:
        raise ParameterError(f"{num_ranks} ranks need as many experts: give num_experts more.")
    if top_k > num_experts:
        raise ParameterError(f"A token cannot visit {top_k} of {num_experts} experts.")
    shown = traffic(num_experts, top_k, num_ranks, liking, capacity_factor)
    return draw(shown), table(shown)


def between_ranks(shown: Traffic) -> Tensor:
    """Return [from rank, to rank] rows for the experts there; the diagonal's rows stay."""
    num_ranks = len(shown.went)
    return shown.went.view(num_ranks, num_ranks, -1).sum(-1)


def draw(shown: Traffic) -> Drawing:
    num_ranks, num_experts = shown.went.shape
    wanted, went = shown.wanted.sum(0).tolist(), shown.went.sum(0).tolist()
    most, mean, per_rank = max(wanted), sum(wanted) / num_experts, num_experts // num_ranks
    left = Panel(
        420, 280, (-0.5, num_experts - 0.5), (0, 1.1 * most), xlabel="expert",
        ylabel="copies, all ranks", legend={"answered": KEPT, "dropped": DROPPED},
        xticks=numbered(range(num_experts)[:: max(1, num_experts // 16)]),
        yticks=numbered(round_places(0, 1.1 * most)),
    )  # fmt: skip
    for expert in range(num_experts):
        left.box(expert - 0.4, went[expert], expert + 0.4, wanted[expert], DROPPED)
        left.box(expert - 0.4, 0, expert + 0.4, went[expert], KEPT)
    left.guide(y=mean, dash="2 2")
    for rank in range(num_ranks):
        if rank:
            left.guide(x=rank * per_rank - 0.5, dash="", width=1, alpha=2 * FAINT)
        name = f"rank {rank}" if num_ranks < 8 else str(rank)
        left.words((rank + 0.5) * per_rank - 0.5, 1.1 * most, name, anchor="middle", shift=(0, 4))

    rows = between_ranks(shown)
    travel = rows - rows.diagonal().diag()
    most = max(travel.max().item(), 1)
    ranks, square = numbered(range(num_ranks)), (-0.5, num_ranks - 0.5)
    right = Panel(
        300, 280, square, square[::-1], xlabel="to rank", ylabel="from rank", xticks=ranks,
        yticks=ranks, title="rows, from rank to rank (no color: stay)",
    )  # fmt: skip
    for source, target in product(range(num_ranks), repeat=2):
        if number := travel[source, target].item():
            alpha = 0.1 + 0.6 * number / most
            right.box(target - 0.5, source - 0.5, target + 0.5, source + 0.5, "#756bb1", alpha)
        right.words(target, source, rows[source, target].item(), anchor="middle")
    said = f"{num_experts} experts on {num_ranks} ranks: {went} of {wanted} copies answered"
    return Drawing([left, right], said)


def table(shown: Traffic) -> str:
    num_ranks, num_experts = shown.went.shape
    wanted, went = shown.wanted.sum(), shown.went.sum()
    rows = between_ranks(shown)
    arriving = rows.sum(0)
    leaving = (rows.sum() - rows.diagonal().sum()).item()
    mean = wanted.item() / num_experts
    lines = [
        ("capacity, copies of one rank for one expert", shown.capacity or "any"),
        ("dropped", f"{1 - went.item() / wanted.item():.1%}"),
        (
            "busiest expert / mean",
            f"{shown.went.sum(0).max().item() / (went.item() / num_experts):.2f}",
        ),
        ("busiest rank / mean", f"{arriving.max().item() / arriving.double().mean().item():.2f}"),
        ("rows that leave their rank", f"{leaving} of {went.item()}"),
        (
            f"bytes of dispatch, all ranks, D = {D_MODEL} in bf16",
            readable(leaving * D_MODEL * BYTES, "bytes"),
        ),
    ]
    note = f"{TOKENS} tokens per rank, {mean:.0f} copies per expert if all were alike."
    return page.table(lines) + page.paragraph(note)


def expert_routing(**start) -> Explorer:
    """Return the explorer; `start` sets controls."""
    shown = Explorer(
        render,
        num_experts=choice(4, 8, 16, 32),
        top_k=choice(1, 2, 4, 8),
        num_ranks=choice(1, 2, 4, 8),
        liking=real(0, 3),
        capacity_factor=choice("none", "1.0", "1.25", "1.5", "2.0"),
    )
    shown.change(**start)
    return shown
