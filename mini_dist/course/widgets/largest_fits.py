"""Explorer of lesson 20: the largest model on few devices, tier by tier, and what it costs."""

from __future__ import annotations

from math import log10

from mini_dist.plan.calculators import hardware, readable, step_time
from mini_dist.plan.calculators.offload import (
    PUBLISHED,
    TIERS,
    Largest,
    host_memory,
    intensity,
    largest_model,
)

from ..draw.labels import ticks
from ..draw.picture import Picture
from ..lab import choice, real, whole
from . import page
from .explorer import Explorer

GPUS = ("dgx-2", "a100-40", "a100-80", "h100", "h200", "b200")


def render(
    gpu: str = "dgx-2",
    devices: int = 1,
    micro_batch_size: int = 1,
    seq_len: int = 1024,
    link_times: float = 1.0,
) -> tuple[Picture, str]:
    """Billions of parameters that fit, by what is borrowed; seconds of a step of each.

    link_times: the way to the host so many times as fast as that machine's.
    """
    machine = hardware(gpu)
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


def draw(gpu: str, devices: int, found: dict[str, Largest], said: str) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 2.6), dpi=100)
    axes = figure.add_axes((0.12, 0.2, 0.85, 0.68))
    sizes = [log10(each.parameters / 1e9) for each in found.values()]
    low = min(sizes) - 0.4
    axes.barh(range(len(found)), [size - low for size in sizes], 0.6, left=low, color="#9ecae1")
    for tier, size in zip(range(len(found)), sizes):
        axes.text(size, tier, f"   {10**size:.3g}", va="center", fontsize=9)
    for machine, count, tier, billions, _ in PUBLISHED:
        if (machine, count) == (gpu, devices):
            axes.plot(log10(billions), list(found).index(tier), "o", color="#d95f02")
    high = max(sizes) + 0.4
    marks = [1, 10, 100, 1000, 10000]
    rows = dict(enumerate(found))
    ticks(axes, {log10(m): f"{m:,}" for m in marks if low < log10(m) < high}, rows)
    axes.set(xlim=(low, high), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel("billions of parameters; dots: published")
    axes.spines[["top", "right"]].set_visible(False)
    return Picture(figure, said)


def largest_fits(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in largest_fits(gpu="h100", devices=8)."""
    explorer = Explorer(
        render,
        gpu=choice(*GPUS),
        devices=choice(1, 2, 4, 8, 16),
        micro_batch_size=whole(1, 64, log=True),
        seq_len=whole(128, 2**15, log=True),
        link_times=real(0.1, 10.0),
    )
    explorer.change(**start)
    return explorer
