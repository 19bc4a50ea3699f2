"""Explorer of lessons 06, 07, 17: what fills a device, does it fit, and what would make it fit."""

from __future__ import annotations

from mini_dist.plan.calculators import (
    Breakdown,
    Layout,
    Line,
    ModelConfig,
    device_memory,
    framework,
    peak_memory,
    rank_memory,
    readable,
)
from mini_dist.plan.calculators import model as model_preset

from ..draw.svg import LIMIT, Drawing, Panel, numbered
from ..lab import choice, flag, whole
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer

MODELS = (
    *("gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "bloom-176b"),
    *("mixtral-8x7b", "deepseek-v3", "qwen2.5-7b", "qwen3-32b", "qwen3-235b-a22b"),
    *("gpt-oss-120b", "glm-4.5", "kimi-k2", "llama4-scout", "gemma3-27b"),
)
GPUS = (
    *("v100", "rtx-4090", "rtx-5090", "l40s", "a100-40", "a100-80", "a800"),
    *("h20", "h800", "h100", "h200", "b200", "gb200", "mi300x", "ascend-910b", MINE),
)
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
    my_gib: float = START["my_gib"],
) -> tuple[Drawing, str]:
    """Draw the fullest rank's memory as a waterfall, and the memory of all pipeline ranks.

    Raises ValueError if the layout cannot cut the model.
    """
    config, machine = model_preset(model).replace(seq_len=seq_len), machine_of(gpu, my_gib)
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
    """Return (change, bytes that a device then needs) for single changes, the least first.

    tp, pp and cp take their ranks from dp, if dp is even. A change that cannot cut the model is
    left out.
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
    """Return the color of a line."""
    if line.name.startswith(STATES):
        return STATE
    return ACTIVATION if line.name in ("activations", "embedding dropout") else MOMENT


def draw(title, config, layout, program, fullest: Breakdown, has: float) -> Drawing:
    needed = device_memory(fullest.total, program)
    bars = [(line.name, line.value / GIB, kind_of(line)) for line in fullest]
    bars.append(("outside, fragments", (needed - fullest.total) / GIB, OUTSIDE))
    most = max(needed, has) / GIB
    left = Panel(
        420, 300, (0, 1.3 * most), (len(bars) + 0.5, -1.3), xlabel="GiB", sides="l",
        yticks=dict(enumerate([*(name for name, _, _ in bars), "sum"])),
    )  # fmt: skip
    end = 0.0
    for row, (_, size, color) in enumerate(bars):  # a waterfall down to the sum
        left.box(end, row - 0.38, end + size, row + 0.38, color)
        end += size
        left.words(end, row, f"{size:,.1f}", shift=(5, 0))
    left.box(0, len(bars) - 0.38, end, len(bars) + 0.38, "#969696")
    left.words(end, len(bars), f"{end:,.1f}", bold=True, shift=(5, 0))
    left.guide(x=has / GIB, color=LIMIT)
    near = dict(anchor="end", shift=(-5, 0)) if has / GIB > 0.8 * most else dict(shift=(5, 0))
    left.words(has / GIB, -0.9, "the device", LIMIT, **near)

    right = Panel(
        300, 300, (-0.5, layout.pp - 0.5), (0, 1.1 * most), title="allocated, by pipeline rank",
        xticks=numbered(sorted({0, layout.pp - 1})), yticks=numbered([0, round(has / GIB)]),
        legend={"states": STATE, "activations": ACTIVATION, "worst moment": MOMENT},
    )  # fmt: skip
    floors = [0.0] * layout.pp
    waterfalls = [rank_memory(config, layout, program, rank) for rank in range(layout.pp)]
    for color in (STATE, ACTIVATION, MOMENT):
        for rank, each in enumerate(waterfalls):
            size = sum(line.value for line in each if kind_of(line) == color) / GIB
            right.box(rank - 0.5, floors[rank], rank + 0.5, floors[rank] + size, color)
            floors[rank] += size
    right.guide(y=has / GIB, color=LIMIT)
    return Drawing([left, right], title, title, "#de2d26" if needed > has else "#31a354")


SHOWN_IF = {  # A control is hidden while another one makes it change nothing.
    "zero": lambda values: values["dp"] > 1 or values["cp"] > 1,
    "ep": lambda values: bool(model_preset(values["model"]).num_experts) or values["ep"] > 1,
    "num_micro_batches": lambda values: values["pp"] > 1,
    "sequence_parallel": lambda values: values["tp"] > 1,
}


def memory_waterfall(only: tuple[str, ...] = (), **start) -> Explorer:
    """Return the explorer; `start` sets controls, as in memory_waterfall(model="llama3-70b").

    only: the names of the controls to show; () shows all.
    """
    explorer = Explorer(
        render,
        SHOWN_IF | shown_if_mine("my_gib"),
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
        **controls("my_gib"),
    )
    if only:
        explorer.keep_only(*only)
    explorer.change(**start)
    return explorer
