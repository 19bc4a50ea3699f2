"""Explorer of lessons 06, 07, 17: what fills a device, does it fit, and what would make it fit."""

from __future__ import annotations

from itertools import accumulate

from mini_dist.plan.calculators import (
    Breakdown,
    Layout,
    Line,
    ModelConfig,
    device_memory,
    framework,
    hardware,
    peak_memory,
    rank_memory,
    readable,
)
from mini_dist.plan.calculators import model as model_preset

from ..draw.labels import numbered, ticks
from ..draw.picture import Picture
from ..lab import choice, flag, whole
from . import page
from .explorer import Explorer

MODELS = (
    *("gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "bloom-176b"),
    *("mixtral-8x7b", "deepseek-v3"),
)
GPUS = ("a100-40", "a100-80", "h100", "h200", "b200", "mi300x")
PROGRAMS = ("megatron-core", "fsdp", "nanotron", "megatron-deepspeed")
STATES = ("parameters", "gradients", "optimizer", "unsharded parameters")
STATE, ACTIVATION, MOMENT, OUTSIDE = "#3182bd", "#fd8d3c", "#9e9ac8", "#bdbdbd"
GIB = 2**30


def render(
    model: str = "llama3-8b",
    gpu: str = "h100",
    program: str = "megatron-core",
    seq_len: int = 8192,
    dp: int = 8,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 1,
    micro_batch_size: int = 1,
    num_micro_batches: int = 8,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> tuple[Picture, str]:
    """The fullest rank's memory as a waterfall beside the device's, and all pipeline ranks'.

    Raises ValueError when the layout cannot cut the model.
    """
    config, machine = model_preset(model).replace(seq_len=seq_len), hardware(gpu)
    layout = Layout(
        pp,
        dp,
        cp,
        tp,
        ep,
        sequence_parallel=sequence_parallel,
        zero=zero,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        recompute=recompute,
    )
    fullest = peak_memory(config, layout, program)
    needed = device_memory(fullest.total, program)
    has = machine.device.memory_bytes
    if needed <= has:
        verdict = f"fits: {needed / GIB:.1f} of {has / GIB:.1f} GiB"
    else:
        largest = max(fullest, key=lambda line: line.value)
        excess = f"{(needed - has) / GIB:,.1f} GiB too much"
        verdict = f"does not fit: {excess}; the largest part: {largest.name}"
    picture = draw(f"{model} on {gpu}: {verdict}", config, layout, program, fullest, has)
    outside = framework(program).outside
    said = page.breakdown(
        Breakdown(
            fullest.title,
            (
                *fullest,
                Line("fragmentation", needed - fullest.total - outside, "bytes", "assumed share"),
                Line("outside the allocator", outside, "bytes", "CUDA context, NCCL: assumed"),
            ),
        )
    )
    return picture, said + page.table(
        [(what, readable(bytes_, "bytes"), "fits" if bytes_ <= has else "") for what, bytes_ in
         one_change(config, layout, program)],
        ("one change", "a device then needs", ""),
    )  # fmt: skip


def one_change(config: ModelConfig, layout: Layout, program: str) -> list[tuple[str, float]]:
    """What a device would need if one thing were different, the least first.

    tp, pp and cp take their ranks from dp; where that leaves no whole number the change is left
    out, and so is what cannot cut the model.
    """
    changes: dict[str, dict] = {}
    if layout.zero < 3:
        changes[f"ZeRO-{layout.zero + 1} instead of {layout.zero}"] = {"zero": layout.zero + 1}
    if layout.recompute != "full":
        changes["full recompute"] = {"recompute": "full"}
    if layout.micro_batch_size > 1:
        half = layout.micro_batch_size // 2
        changes[f"micro-batches of {half}"] = {
            "micro_batch_size": half,
            "num_micro_batches": layout.num_micro_batches * layout.micro_batch_size // half,
        }
    if layout.tp > 1 and not layout.sequence_parallel:
        changes["sequence parallel"] = {"sequence_parallel": True}
    for axis in ("tp", "pp", "cp"):
        if layout.dp % 2 == 0:  # the same devices and batch
            changes[f"{axis}={2 * getattr(layout, axis)}, dp={layout.dp // 2}"] = {
                axis: 2 * getattr(layout, axis),
                "dp": layout.dp // 2,
                "num_micro_batches": 2 * layout.num_micro_batches,
                **({"sequence_parallel": True} if axis == "tp" else {}),
            }
    changes[f"twice the ranks, dp={2 * layout.dp}"] = {"dp": 2 * layout.dp}
    if config.num_experts and layout.edp % 2 == 0:
        changes[f"ep={2 * layout.ep}"] = {"ep": 2 * layout.ep}
    needs = []
    for what, change in changes.items():
        try:
            peak = peak_memory(config, layout.replace(**change), program).total
        except ValueError:
            continue
        needs.append((what, device_memory(peak, program)))
    return sorted(needs, key=lambda need: need[1])


def kind_of(line: Line) -> str:
    """The colour of a line."""
    if line.name.startswith(STATES):
        return STATE
    return ACTIVATION if line.name in ("activations", "embedding dropout") else MOMENT


def draw(title, config, layout, program, fullest: Breakdown, has: float) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.7), dpi=100)
    # Fixed places: matplotlib's own layout engines take longer than all the rest.
    left, right = (
        figure.add_axes((0.19, 0.13, 0.49, 0.77)),
        figure.add_axes((0.76, 0.13, 0.2, 0.77)),
    )

    needed = device_memory(fullest.total, program)
    bars = [(line.name, line.value / GIB, kind_of(line)) for line in fullest]
    bars.append(("outside, fragments", (needed - fullest.total) / GIB, OUTSIDE))
    names, sizes, colors = zip(*bars)
    ends = list(accumulate(sizes))  # a waterfall down to the sum
    starts = [end - size for end, size in zip(ends, sizes)]
    rows = range(len(bars) + 1)
    left.barh(rows, [*sizes, ends[-1]], 0.75, [*starts, 0], color=[*colors, "#969696"])
    for row, (end, size) in enumerate(zip([*ends, ends[-1]], [*sizes, ends[-1]])):
        left.text(end, row, f" {size:,.1f}", va="center", fontsize=8)
    left.axvline(has / GIB, color="#de2d26", linestyle="--")
    left.text(has / GIB, -0.8, " the device", fontsize=8, color="#de2d26")
    ticks(left, y=dict(enumerate([*names, "sum"])))  # (the numbers stand at the bars)
    most = max(needed, has) / GIB
    left.set(ylim=(len(bars) + 0.6, -1.3), xlim=(0, 1.18 * most), xlabel="GiB")

    waterfalls = [rank_memory(config, layout, program, rank) for rank in range(layout.pp)]
    edges = [rank - 0.5 for rank in range(layout.pp + 1)]
    floors = [0.0] * layout.pp
    for color, name in ((STATE, "states"), (ACTIVATION, "activations"), (MOMENT, "worst moment")):
        tops = [
            floor + sum(line.value for line in each if kind_of(line) == color) / GIB
            for floor, each in zip(floors, waterfalls)
        ]
        right.stairs(tops, edges, baseline=floors, fill=True, color=color)
        middle = (floors[0] + tops[0]) / 2
        if tops[0] - floors[0] > 0.07 * most:
            right.text(-0.4, middle, name, fontsize=7, va="center", color="white")
        floors = tops
    right.axhline(has / GIB, color="#de2d26", linestyle="--")
    right.set(ylim=(0, 1.1 * most), xlim=(-0.5, layout.pp - 0.5), xlabel="pipeline rank")
    ticks(right, numbered(sorted({0, layout.pp - 1})), numbered([0, round(has / GIB)]))
    right.set_title("allocated", fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.02, 0.95, title, fontsize=10, color="#a50f15" if needed > has else "#006d2c")
    return Picture(figure, title)


def memory_waterfall(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in memory_waterfall(model="llama3-70b")."""
    explorer = Explorer(
        render,
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        program=choice(*PROGRAMS),
        seq_len=whole(1024, 131072, log=True),
        dp=whole(1, 1024, log=True),
        tp=whole(1, 8, log=True),
        pp=whole(1, 64, log=True),
        cp=whole(1, 16, log=True),
        ep=whole(1, 64, log=True),
        zero=whole(0, 3),
        micro_batch_size=whole(1, 16, log=True),
        num_micro_batches=whole(1, 128, log=True),
        sequence_parallel=flag(),
        recompute=choice("none", "selective", "full"),
    )
    explorer.change(**start)
    return explorer
