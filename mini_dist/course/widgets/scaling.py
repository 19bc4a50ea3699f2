"""Explorer of lesson 17: one layout from 8 to 16,384 GPUs, the batch fixed or growing with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from mini_dist.plan.calculators import (
    Layout,
    StepTime,
    device_memory,
    peak_memory,
    readable,
    step_time,
)
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.kernels import COMMUNICATION
from mini_dist.plan.calculators.machines import Hardware

from ..draw.svg import INK, Drawing, Panel
from ..lab import ParameterError, choice, whole
from . import page
from .device import CONTROLS, MINE, START, machine_of, shown_if_mine
from .explorer import Explorer

MODELS = ("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b")
GPUS = ("a100-80", "h100", "h100-hf", "b200", MINE)
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
    """The layout on some number of GPUs, and its step's time."""

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
    my_gib: float = START["my_gib"],
    my_tflops: float = START["my_tflops"],
    my_memory_gb_s: float = START["my_memory_gb_s"],
    my_network_gb_s: float = START["my_network_gb_s"],
) -> tuple[Drawing, str]:
    """Draw throughput over the number of GPUs, and where a step's time goes.

    `batch` is sequences per step: at every point (strong), or at the first one (weak).
    Raises ValueError if the batch does not divide over the replicas of the first point.
    """
    machine = machine_of(gpu, my_gib, my_tflops, my_memory_gb_s, my_network_gb_s)
    both = {
        kind: curve(model, machine, tp, pp, zero, recompute, micro_batch_size, batch, kind)
        for kind in (STRONG, WEAK)
    }
    shown = both[scaling]
    if not shown:
        raise ParameterError(
            f"tp={tp}, pp={pp} needs a batch that {micro_batch_size} * dp divides: batch={batch} "
            f"does not start on {max(8, tp * pp)} GPUs; give more sequences."
        )
    picture = draw(f"{model} on {gpu}, tp={tp} pp={pp}", both, scaling, num_gpus)
    return picture, words(model, machine, shown, scaling, num_gpus)


@lru_cache(maxsize=256)
def curve(
    model: str,
    machine: Hardware | str,
    tp: int,
    pp: int,
    zero: int,
    recompute: str,
    micro_batch_size: int,
    batch: int,
    scaling: str,
) -> dict[int, Point]:
    """Return {GPUs: Point} up to the last size at which replicas have whole micro-batches."""
    config, points = model_preset(model), {}
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
    """Return the share of the step that each kind of line takes."""
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


def words(
    model: str, machine: Hardware, points: dict[int, Point], scaling: str, num_gpus: int
) -> str:
    """Compare the chosen point with the first one: efficiency, and whether it fits."""
    first, last = min(points), max(points)
    if num_gpus not in points:
        why = f"the layout needs {first}" if num_gpus < first else "no micro-batch is left"
        if num_gpus > last:
            why += f" for a replica: the batch is used up at {last:,} GPUs"
        return page.paragraph(f"{num_gpus:,} GPUs: {why}.")
    here, start = points[num_gpus], points[first]
    efficiency = here.tokens_per_second / num_gpus / (start.tokens_per_second / first)
    needed = device_memory(peak_memory(model_preset(model), here.layout).total)
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


def draw(title: str, both: dict, scaling: str, num_gpus: int) -> Drawing:
    # Logarithms on both axes.
    points = both[scaling]
    first, ends = min(points), (log2(SIZES[0]), log2(SIZES[-1]))
    ideal = log2(points[first].tokens_per_second / first)
    rates = [log2(point.tokens_per_second) for curve_ in both.values() for point in curve_.values()]
    low, high = min(*rates, ideal + ends[0]) - 0.5, max(*rates, ideal + ends[1]) + 0.5
    powers = [10**k for k in range(3, 10) if low < log2(10**k) < high]
    colors = {STRONG: "#3182bd", WEAK: "#e6550d"}
    left = Panel(
        390, 300, (ends[0] - 0.3, ends[1] + 0.6), (low, high), title="tokens per second",
        xlabel="GPUs", xticks={log2(n): f"{n:,}" for n in SIZES[::3]},
        yticks={log2(n): readable(n) for n in powers},
        legend={kind.split(":")[0]: colors[kind] for kind in both} | {"ideal": "#969696"},
    )  # fmt: skip
    left.line([(end, ideal + end) for end in ends], "#969696", 1.2, "4 3")
    for kind, curve_ in both.items():
        alpha = 1 if kind == scaling else 0.35
        spots = [(log2(size), log2(point.tokens_per_second)) for size, point in curve_.items()]
        left.line(spots, colors[kind], alpha=alpha)
        for spot in spots if kind == scaling else ():
            left.dot(*spot, colors[kind], 2.5)
    if num_gpus in points:
        left.dot(log2(num_gpus), log2(points[num_gpus].tokens_per_second), INK, 7, filled=False)

    right = Panel(
        325, 300, ends, (0, 1), title="where a step's time goes", xlabel="GPUs", legend=KINDS,
        xticks={log2(n): f"{n:,}" for n in SIZES[::4]}, yticks={0: "0", 0.5: "50 %", 1: "100 %"},
    )  # fmt: skip
    xs, floors = [log2(size) for size in points], [0.0] * len(points)
    parts = [shares(point.time) for point in points.values()]
    for kind, color in KINDS.items():
        tops = [floor + part[kind] for floor, part in zip(floors, parts)]
        right.line([*zip(xs, floors), *zip(xs[::-1], tops[::-1])], color, filled=True)
        floors = tops
    right.guide(x=log2(num_gpus), dash="2 2")
    title = f"{title}, {scaling}"
    said = f"{readable(points[max(points)].tokens_per_second, 'tokens/s')} on {max(points):,}"
    return Drawing([left, right], f"{title}: {said}", title)


def scaling_curve(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in scaling_curve(gpu="h100-hf")."""
    explorer = Explorer(
        render,
        shown_if_mine(*CONTROLS),
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
        **CONTROLS,
    )
    explorer.change(**start)
    return explorer
