"""Explorer of lesson 17: one layout from 8 to 16,384 GPUs, the batch fixed or growing with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from mini_dist.plan.calculators import (
    Layout,
    StepTime,
    device_memory,
    hardware,
    peak_memory,
    readable,
    step_time,
)
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.kernels import COMMUNICATION

from ..draw.labels import ticks
from ..draw.picture import INK, Picture
from ..lab import ParameterError, choice, whole
from . import page
from .explorer import Explorer

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b")
GPUS = ("a100-80", "h100", "h100-hf", "b200")
SIZES = tuple(2**k for k in range(3, 15))  # 8 ... 16,384
STRONG, WEAK = "strong: the batch stays", "weak: the batch grows"
KINDS = {  # what a line of a step's breakdown counts as
    "computing": "#74c476",
    "recomputing": "#c7e9c0",
    "layers' messages": "#fd8d3c",
    "pipeline": "#9e9ac8",
    "gradients over dp": "#de2d26",
}


@dataclass(frozen=True)
class Point:
    """The layout on that many GPUs, and its step."""

    layout: Layout
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second


def render(
    model: str = "llama3-70b",
    gpu: str = "h100",
    tp: int = 8,
    pp: int = 4,
    zero: int = 1,
    recompute: str = "none",
    micro_batch_size: int = 1,
    batch: int = 1024,
    scaling: str = STRONG,
    num_gpus: int = 512,
) -> tuple[Picture, str]:
    """Throughput over the number of GPUs, and where a step's time goes.

    `batch` is sequences a step: everywhere (strong), or on the first point (weak).
    Raises ValueError when tp * pp GPUs are more than there are, or the batch too small to begin.
    """
    both = {
        kind: curve(model, gpu, tp, pp, zero, recompute, micro_batch_size, batch, kind)
        for kind in (STRONG, WEAK)
    }
    shown = both[scaling]
    if not shown:
        raise ParameterError(
            f"tp={tp}, pp={pp} needs a batch that {micro_batch_size} * dp divides: batch={batch} "
            f"does not start on {max(8, tp * pp)} GPUs; give more sequences."
        )
    picture = draw(f"{model} on {gpu}, tp={tp} pp={pp}", both, scaling, num_gpus)
    return picture, words(model, gpu, shown, scaling, num_gpus)


@lru_cache(maxsize=256)
def curve(
    model: str,
    gpu: str,
    tp: int,
    pp: int,
    zero: int,
    recompute: str,
    micro_batch_size: int,
    batch: int,
    scaling: str,
) -> dict[int, Point]:
    """{GPUs: Point} for as long as every replica still has a micro-batch to compute."""
    config, machine, points = model_preset(model), hardware(gpu), {}
    first = max(SIZES[0], tp * pp)
    for size in SIZES:
        if size < first:
            continue
        sequences = batch if scaling == STRONG else batch * size // first
        replicas = size // (tp * pp) * micro_batch_size
        if sequences % replicas:
            break
        layout = Layout(
            pp=pp,
            dp=size // (tp * pp),
            tp=tp,
            sequence_parallel=tp > 1,
            zero=zero,
            micro_batch_size=micro_batch_size,
            num_micro_batches=sequences // replicas,
            recompute=recompute,
        )
        points[size] = Point(layout, step_time(config, layout, machine))
    return points


def shares(time: StepTime) -> dict[str, float]:
    """What part of the step each kind of line takes."""
    parts = dict.fromkeys(KINDS, 0.0)
    for line in time.breakdown:
        if line.name in COMMUNICATION:
            kind = "layers' messages"
        elif line.name.startswith("pipeline"):
            kind = "pipeline"
        elif line.name == "recomputed":
            kind = "recomputing"
        else:
            kind = line.name if line.name in KINDS else "computing"
        parts[kind] += line.value / time.seconds
    return parts


def words(model: str, gpu: str, points: dict[int, Point], scaling: str, num_gpus: int) -> str:
    """The chosen point, beside the first one: efficiency, and whether it fits."""
    first, last = min(points), max(points)
    if num_gpus not in points:
        why = f"the layout needs {first}" if num_gpus < first else "no micro-batch is left"
        if num_gpus > last:
            why += f" for a replica: the batch is used up at {last:,} GPUs"
        return page.paragraph(f"{num_gpus:,} GPUs: {why}.")
    here, start = points[num_gpus], points[first]
    efficiency = here.tokens_per_second / num_gpus / (start.tokens_per_second / first)
    config, machine = model_preset(model), hardware(gpu)
    needed = device_memory(peak_memory(config, here.layout).total)
    fits = "fits" if needed <= machine.device.memory_bytes else "does NOT fit"
    text = (
        f"{num_gpus:,} GPUs: {readable(here.tokens_per_second, 'tokens/s')}, "
        f"{efficiency:.0%} of {num_gpus // first} times what {first} do; MFU {here.time.mfu:.1%}; "
        f"dp={here.layout.dp}, {here.layout.num_micro_batches} micro-batches, a batch of "
        f"{readable(here.time.tokens, 'tokens')}. A device needs {readable(needed, 'bytes')}: "
        f"it {fits}."
    )
    if scaling == WEAK:
        text += " (Whether so large a batch still learns as much from a token is another question.)"
    return page.paragraph(text) + page.breakdown(here.time.breakdown)


def draw(title: str, both: dict, scaling: str, num_gpus: int) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.6), dpi=100)
    left, right = (
        figure.add_axes((0.08, 0.14, 0.44, 0.72)),
        figure.add_axes((0.6, 0.14, 0.25, 0.72)),
    )

    # Logarithms on plain axes, which are laid out faster than log axes.
    points = both[scaling]
    first = min(points)
    ideal = log2(points[first].tokens_per_second / first)
    ends = (log2(SIZES[0]), log2(SIZES[-1]))
    left.plot(ends, [ideal + end for end in ends], "--", color="#bdbdbd", linewidth=1)
    left.text(ends[1], ideal + ends[1], "ideal ", ha="right", va="bottom", fontsize=8)
    for kind, curve_ in both.items():
        strong = kind == scaling
        color = "#3182bd" if kind == STRONG else "#e6550d"
        xs = [log2(size) for size in curve_]
        ys = [log2(point.tokens_per_second) for point in curve_.values()]
        left.plot(xs, ys, "o-", color=color, markersize=3, alpha=1 if strong else 0.35)
        if xs:
            left.text(xs[-1] + 0.15, ys[-1], kind.split(":")[0], color=color, fontsize=8, va="top")
    if num_gpus in points:
        here = log2(points[num_gpus].tokens_per_second)
        left.plot(log2(num_gpus), here, "o", markersize=10, markerfacecolor="none",
                  markeredgecolor=INK)  # fmt: skip
    low, high = left.get_ylim()
    left.set(xlabel="GPUs", xlim=(ends[0] - 0.3, ends[1] + 1.2), ylim=(low, high))
    powers = [10**k for k in range(3, 10) if low < log2(10**k) < high]
    ticks(left, {log2(n): f"{n:,}" for n in SIZES[::2]}, {log2(n): readable(n) for n in powers})
    left.set_title("tokens a second", fontsize=9)

    xs = [log2(size) for size in points]
    parts = [shares(point.time) for point in points.values()]
    floors = [0.0] * len(xs)
    for row, (kind, color) in enumerate(KINDS.items()):
        tops = [floor + part[kind] for floor, part in zip(floors, parts)]
        right.fill_between(xs, floors, tops, color=color, linewidth=0)
        right.text(1.04, 0.05 + 0.12 * row, kind, color=color, fontsize=8, weight="bold",
                   transform=right.transAxes)  # fmt: skip
        floors = tops
    right.axvline(log2(num_gpus), color=INK, linestyle=":", linewidth=1)
    ticks(right, {log2(n): f"{n:,}" for n in SIZES[::4]}, {0: "0", 0.5: "50 %", 1: "100 %"})
    right.set(xlim=ends, ylim=(0, 1), xlabel="GPUs")
    right.set_title("where a step's time goes", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.02, 0.95, f"{title}, {scaling}", fontsize=10)
    last = max(points)
    said = f"{title}, {scaling}: {readable(points[last].tokens_per_second, 'tokens/s')} on {last:,}"
    return Picture(figure, said)


def scaling_curve(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in scaling_curve(gpu="h100-hf")."""
    explorer = Explorer(
        render,
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        tp=whole(1, 8, log=True),
        pp=whole(1, 32, log=True),
        zero=choice(0, 1, 2, 3),
        recompute=choice("none", "selective", "full"),
        micro_batch_size=whole(1, 8, log=True),
        batch=whole(8, 8192, "sequences", log=True),
        scaling=choice(STRONG, WEAK),
        num_gpus=whole(SIZES[0], SIZES[-1], log=True),
    )
    explorer.change(**start)
    return explorer
