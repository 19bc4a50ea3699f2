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

from ..draw.labels import numbered, round_places, ticks, write
from ..draw.picture import INK, Picture
from ..lab import ParameterError, choice, real
from . import page
from .explorer import Explorer

TOKENS = 128  # of each rank
KEPT, DROPPED = "#3182bd", "#fdae6b"
D_MODEL, BYTES = 4096, 2  # of a row, for the table


class Traffic(NamedTuple):
    """What the routers of all ranks decided."""

    wanted: Tensor  # [ranks, E] copies that each rank's tokens want to send to each expert
    went: Tensor  # [ranks, E] those within capacity
    capacity: int | None


@lru_cache(maxsize=256)
def traffic(
    num_experts: int, top_k: int, num_ranks: int, liking: float, capacity_factor: str
) -> Traffic:
    """Route 128 random tokens a rank; expert 0 is liked most, the last one least."""
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
) -> tuple[Picture, str]:
    """The load of every expert and the rows from every rank to every other.

    liking: how much more the router likes the first expert than the last, in units of what tokens
    differ by. Raises ValueError for more ranks than experts, and for more choices than experts.
    """
    if num_ranks > num_experts:
        raise ParameterError(f"{num_ranks} ranks need as many experts: give num_experts more.")
    if top_k > num_experts:
        raise ParameterError(f"A token cannot visit {top_k} of {num_experts} experts.")
    shown = traffic(num_experts, top_k, num_ranks, liking, capacity_factor)
    return draw(shown), table(shown)


def between_ranks(shown: Traffic) -> Tensor:
    """[from rank, to rank] rows for the experts there; those on the diagonal stay at home."""
    num_ranks = len(shown.went)
    return shown.went.view(num_ranks, num_ranks, -1).sum(-1)


def draw(shown: Traffic) -> Picture:
    from matplotlib.figure import Figure

    num_ranks, num_experts = shown.went.shape
    wanted, went = shown.wanted.sum(0).tolist(), shown.went.sum(0).tolist()
    figure = Figure(figsize=(9.2, 3.4), dpi=100)
    left, right = (
        figure.add_axes((0.08, 0.17, 0.5, 0.72)),
        figure.add_axes((0.67, 0.17, 0.28, 0.72)),
    )
    places = range(num_experts)
    left.bar(places, wanted, 0.8, color=DROPPED, label="dropped")
    left.bar(places, went, 0.8, color=KEPT, label="answered")
    mean = sum(wanted) / num_experts
    left.axhline(mean, color=INK, linestyle=":", linewidth=1)
    left.text(num_experts - 0.5, mean, " mean", fontsize=8, va="center", color=INK)
    per_rank = num_experts // num_ranks
    borders = [rank * per_rank - 0.5 for rank in range(num_ranks + 1)]
    left.vlines(borders[1:-1], 0, 1, color="#cccccc", linewidth=0.8,
                transform=left.get_xaxis_transform())  # fmt: skip
    names = [f"rank {rank}" if num_ranks < 8 else str(rank) for rank in range(num_ranks)]
    middles = [border + per_rank / 2 for border in borders[:-1]]
    write(left, names, middles, [1.02] * num_ranks, va="bottom",
          transform=left.get_xaxis_transform())  # fmt: skip
    ticks(
        left,
        numbered(places[:: max(1, num_experts // 16)]),
        numbered(round_places(*left.get_ylim())),
    )
    left.set_xlabel("expert")
    left.set_ylabel("copies, all ranks")
    if sum(went) < sum(wanted):
        left.legend(frameon=False, fontsize=8, loc="upper right")

    rows = between_ranks(shown)
    travel = rows - rows.diagonal().diag()
    most = max(travel.max().item(), 1)
    right.imshow(travel.tolist(), cmap="Purples", vmin=0, vmax=1.3 * most)
    sources, targets = zip(*product(range(num_ranks), repeat=2))
    counts = rows.flatten().tolist()
    inks = ["white" if count > 0.7 * most else INK for count in travel.flatten().tolist()]
    write(right, map(str, counts), targets, sources, color=inks)
    ticks(right, numbered(range(num_ranks)), numbered(range(num_ranks)))
    right.set_xlabel("to rank")
    right.set_ylabel("from rank")
    right.set_title("rows, from rank to rank (white: stay)", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    said = f"{num_experts} experts on {num_ranks} ranks: {went} of {wanted} copies answered"
    return Picture(figure, said)


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
    note = f"{TOKENS} tokens a rank, {mean:.0f} copies an expert if all were alike."
    return page.table(lines) + page.paragraph(note)


def expert_routing(**start) -> Explorer:
    """The explorer; `start` sets controls."""
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
