"""Which layouts are worth trying, and how to write one in a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import RECOMPUTE, ZERO, Layout, ModelConfig
from ..fields import at_least, checks_kinds
from ..schedule import V_SHAPED

LONG = 16384  # tokens per sequence above which context parallelism is worth trying
SEARCHED = ("1f1b", "interleaved", "zb_h1", "zb_v")  # schedules that can be


@checks_kinds
@dataclass(frozen=True)
class Search:
    """Which layouts are tried, and for how many of the fastest the pipeline is simulated.

    zero: stages; (0, 1) is what Megatron-LM's distributed optimizer does. max_tp: None for the
    devices of a node; max_pp: for the layers; max_cp: for 64 if a sequence is LONG, else 1.
    schedules: of pipelines; "zb_h1" and "zb_v" (zero-bubble) are tried if they are named.
    fastest_of_axes: of all layouts with the same pp, dp, cp and tp only the fastest (by the closed
    form) is certainly ranked; most others are neither tried nor counted, so the answer is faster.
    """

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    recompute: tuple[str, ...] = ("none", "full")
    zero: tuple[int, ...] = (0, 1, 2, 3)
    max_tp: int | None = None
    max_pp: int | None = None
    max_cp: int | None = None
    num_simulated: int = 10
    recompute_every: tuple[int, ...] = (1, 2, 4)
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    fastest_of_axes: bool = False

    def __post_init__(self):
        for field, known in (
            ("micro_batch_sizes", None),
            ("recompute", RECOMPUTE),
            ("recompute_every", None),
            ("zero", ZERO),
            ("schedules", SEARCHED),
        ):
            values = getattr(self, field)
            if isinstance(values, (str, int)):  # one is meant
                values = (values,)
            if not isinstance(values, (tuple, list)) or not values:
                raise ValueError(f"{field}={values!r} is empty or no tuple: give one like (1, 2).")
            for value in values:
                if known is None:
                    at_least(field, value, 1)
                elif isinstance(value, bool) or value not in known:
                    names = ", ".join(map(repr, known))
                    raise ValueError(f"{field}={value!r} is not known: give some of {names}.")
            object.__setattr__(self, field, tuple(values))
        for field, least in (("max_tp", 1), ("max_pp", 1), ("max_cp", 1), ("num_simulated", 0)):
            if (value := getattr(self, field)) is not None:
                at_least(field, value, least)


def layouts(
    config: ModelConfig, num_devices: int, sequences: int, search: Search
) -> Iterator[Layout]:
    """Yield the layouts that are tried.

    They exclude replicas with whole optimizer states (ZeRO-1 costs no more traffic); tp
    without sequence parallelism; ZeRO-2 and 3 in a pipeline (they communicate in each of its many
    micro-batches, and Megatron-LM and DeepSpeed refuse them), though 3 can fit where 1 does not;
    uneven chunks, even with embedding and head counted as layers (frameworks refuse them).
    Experts are sharded by tp (etp=tp) or whole (etp=1), not in between; whole ones only if ep spans
    tp, so that a rank holds no more of them than with tp.
    """
    max_tp, max_pp = search.max_tp or num_devices, search.max_pp or config.num_layers
    max_cp = search.max_cp or (64 if config.seq_len >= LONG else 1)
    for tp in _divisors(num_devices, max_tp):
        for pp in _divisors(num_devices // tp, min(max_pp, config.num_layers)):
            for cp in _divisors(num_devices // tp // pp, max_cp):
                dp = num_devices // tp // pp // cp
                zeros = (0,) if dp * cp == 1 else (1,) if pp > 1 else (1, 2, 3)
                for size in search.micro_batch_sizes:
                    if sequences % (dp * size):
                        continue
                    m = sequences // (dp * size)
                    for ep, etp in _of_experts(config, dp * cp, tp):
                        for stage in (z for z in zeros if z in search.zero or dp * cp == 1):
                            base = Layout(pp, dp, cp, tp, ep, etp, tp > 1, stage, size, m)
                            for cut in _scheduled(config, base, search.schedules):
                                yield from _recomputing(config, cut, search)


def _of_experts(config: ModelConfig, replicas: int, tp: int) -> Iterator[tuple[int, int]]:
    """Return (ep, etp): whole experts that ep spreads over the tp ranks as well, else sharded by
    tp.

    Both hold the same. Whole experts send fewer bytes, since no tokens are gathered over tp, and
    multiply larger matrices: over 6,000 pairs of layouts they took 0.25 to 1.003 of the time.
    """
    experts = config.num_experts or 1
    for ep in _divisors(replicas, experts):
        if tp == 1 or experts % (ep * tp):
            yield ep, tp
        else:
            yield ep * tp, 1


def _scheduled(config: ModelConfig, base: Layout, schedules: tuple[str, ...]) -> Iterator[Layout]:
    """Yield the layout with each schedule, if it has a pipeline.

    Several stages per rank get equally many layers, where the embedding and the head count as one
    layer each or not at all. (Narayanan et al. 2021 had 3 chunks, Llama 3 126 layers + 2.)
    """
    if base.pp == 1:
        yield base
        return
    most = (config.num_layers + 2) // base.pp
    whole_rounds = base.num_micro_batches % base.pp == 0
    for name in schedules:
        numbers = range(2, most + 1) if name == "interleaved" else (2 if name in V_SHAPED else 1,)
        for chunks in numbers:
            even = not all((config.num_layers + ends) % (base.pp * chunks) for ends in (0, 2))
            if (name, chunks) == (base.schedule, base.num_chunks):
                yield base
            elif chunks == 1 or even and (whole_rounds or name != "interleaved"):
                yield base.replace(schedule=name, num_chunks=chunks)


def _recomputing(config: ModelConfig, base: Layout, search: Search) -> Iterator[Layout]:
    """Yield recomputation of nothing, every, every second and every fourth layer, if there are
    any."""
    longest = -(-config.num_layers // base.num_stages)
    for again in search.recompute:
        if again == "none":
            yield base
            continue
        for every in search.recompute_every:
            if every <= longest:
                yield base.replace(recompute=again, recompute_every=every)


def short(layout: Layout) -> str:
    """Write a layout in one line: the axes larger than 1, then the rest that matters."""
    axes = [f"{axis}={size}" for axis, size in {**layout.axes, "ep": layout.ep}.items() if size > 1]
    if layout.etp != layout.tp:
        axes.append(f"etp={layout.etp}")
    rest = [f"micro-batch {layout.micro_batch_size} x {layout.num_micro_batches}"]
    if layout.zero:
        rest.append(f"ZeRO-{layout.zero}")
    if layout.schedule not in ("1f1b", "interleaved"):
        rest.append(layout.schedule)
    elif layout.num_chunks > 1:
        rest.append(f"{layout.num_chunks} chunks")
    if layout.recompute != "none":
        some = f", 1 layer in {layout.recompute_every}" if layout.recompute_every > 1 else ""
        rest.append(f"recompute {layout.recompute}{some}")
    return " ".join(axes or ["one device"]) + ", " + ", ".join(rest)


def _divisors(number: int, at_most: int) -> list[int]:
    return [d for d in range(1, min(number, at_most) + 1) if number % d == 0]
