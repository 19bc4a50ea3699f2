"""Explorer of lesson 20: the largest model on few devices, tier by tier, and what it costs."""

from __future__ import annotations

from math import log10

from mini_dist.plan.calculators import readable, step_time
from mini_dist.plan.calculators.offload import (
    PUBLISHED,
    TIERS,
    Largest,
    host_memory,
    intensity,
    largest_model,
)

from ..draw.svg import Drawing, Panel
from ..lab import choice, real, whole
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer

GPUS = ("dgx-2", "a100-40", "a100-80", "h100", "h200", "b200", MINE)


def render(
    gpu: str = "dgx-2",
    devices: int = 1,
    micro_batch_size: int = 1,
    seq_len: int = 1024,
    link_times: float = 1.0,
    my_gib: float = START["my_gib"],
    my_tflops: float = START["my_tflops"],
    my_memory_gb_s: float = START["my_memory_gb_s"],
) -> tuple[Drawing, str]:
    """Draw the largest model that fits with each tier of borrowed memory; tabulate its step.

    link_times: speed of the host link, as a multiple of that machine's.
    """
    machine = machine_of(gpu, my_gib, my_tflops, my_memory_gb_s)
    machine = machine.replace(host_bandwidth=link_times * machine.host_bandwidth)
    found = {
        tier: largest_model(
            machine, devices, tier, micro_batch_size=micro_batch_size, seq_len=seq_len
        )
        for tier in TIERS
    }
    rows = []
    for tier, each in found.items():
        how = each.how.replace(offload_overlaps=True)
        time = step_time(each.config, each.layout, each.machine, how)
        hides = intensity(each.config, each.layout, how)
        rows.append(
            (
                tier,
                f"{each.parameters / 1e9:.3g}",
                f"{each.config.num_layers} x {each.config.d_model}",
                each.limit,
                readable(host_memory(each.config, each.layout, how).total or 0, "bytes"),
                readable(time.seconds, "s"),
                f"{time.mfu:.1%}",
                "-" if hides == float("inf") else f"{hides:,.0f}",
            )
        )
    head = ("borrowed", "billions", "layers x width", "full is", "host, a device", "a step", "MFU")
    said = f"{devices} x {machine.device.name}: " + ", ".join(
        f"{tier} {each.parameters / 1e9:.3g} billion" for tier, each in found.items()
    )
    need = machine.device.gemm_rate / (machine.host_seconds(1) ** -1)
    html = page.paragraph(said + f". To hide, {need:,.0f} FLOPs for a byte of the link are needed.")
    html += page.table(rows, (*head, "FLOPs a byte"))
    return draw(gpu, devices, found, said), html


def draw(gpu: str, devices: int, found: dict[str, Largest], said: str) -> Drawing:
    sizes = [log10(each.parameters / 1e9) for each in found.values()]
    low, high = min(sizes) - 0.4, max(sizes) + 0.6
    marks = [1, 10, 100, 1000, 10000]
    panel = Panel(
        700, 220, (low, high), (len(sizes) - 0.5, -0.5), yticks=dict(enumerate(found)),
        xticks={log10(m): f"{m:,}" for m in marks if low < log10(m) < high},
        xlabel="billions of parameters; dots: published",
    )  # fmt: skip
    for row, size in enumerate(sizes):
        panel.box(low, row - 0.3, size, row + 0.3, "#6baed6")
        panel.words(size, row, f"{10**size:.3g}", shift=(12, 0))
    for machine, count, tier, billions, _ in PUBLISHED:
        if (machine, count) == (gpu, devices):
            panel.dot(log10(billions), list(found).index(tier), "#d95f02", 4.5)
    return Drawing([panel], said)


def largest_fits(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in largest_fits(gpu="h100", devices=8)."""
    explorer = Explorer(
        render,
        shown_if_mine("my_gib", "my_tflops", "my_memory_gb_s"),
        gpu=choice(*GPUS),
        devices=choice(1, 2, 4, 8, 16),
        micro_batch_size=whole(1, 64, log=True),
        seq_len=whole(128, 2**15, log=True),
        link_times=real(0.1, 10.0),
        **controls("my_gib", "my_tflops", "my_memory_gb_s"),
    )
    explorer.change(**start)
    return explorer
