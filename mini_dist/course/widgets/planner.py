"""Explorer of lesson 17: the best layout of each tp and pp, and why the chosen one is slower."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

from mini_dist.plan.calculators import (
    Candidate,
    Layout,
    Plan,
    device_memory,
    peak_memory,
    plan,
    readable,
)
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.layouts import Search, short
from mini_dist.plan.calculators.machines import Hardware, hardware

from ..draw.svg import FAINT, INK, Drawing, Panel, ink_on
from ..lab import choice, whole
from . import page
from .device import CONTROLS, MINE, START, machine_of, shown_if_mine
from .explorer import Explorer

MODELS = (
    *("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "bloom-176b"),
    *("mixtral-8x7b", "deepseek-v3", "qwen2.5-72b", "qwen3-32b", "gpt-oss-120b"),
    *("glm-4.5", "kimi-k2"),
)
GPUS = (
    *("v100", "a100-80", "a800", "h20", "h800", "h100", "h100-hf", "h200"),
    *("b200", "gb200", "mi300x", "ascend-910b", MINE),
)
TP = (1, 2, 4, 8)
PP = (1, 2, 4, 8, 16, 32)
TOKENS = {f"{size} Mi": size * 2**20 for size in (1, 2, 4, 8, 16, 32)}


def render(
    model: str = "llama3-70b",
    gpu: str = "h100",
    num_gpus: int = 512,
    tokens_a_step: str = "4 Mi",
    tp: int = 8,
    pp: int = 4,
    my_gib: float = START["my_gib"],
    my_tflops: float = START["my_tflops"],
    my_memory_gb_s: float = START["my_memory_gb_s"],
    my_network_gb_s: float = START["my_network_gb_s"],
) -> tuple[Drawing, str]:
    """Draw the MFU of the best layout with each tp and pp; compare the chosen with the best of all.

    Raises ValueError if nothing fits into the devices' own memory.
    """
    machine = machine_of(gpu, my_gib, my_tflops, my_memory_gb_s, my_network_gb_s)
    found = search(model, machine, num_gpus, TOKENS[tokens_a_step])
    cells = best_of_cells(found)
    picture = draw(f"{model} on {num_gpus:,} {gpu}", found, cells, tp, pp)
    return picture, why(found, cells, tp, pp)


@lru_cache(maxsize=64)  # a click in the map asks for the same plan again
def search(model: str, machine: Hardware | str, num_gpus: int, tokens: int) -> Plan:
    """Plan by closed form only, because simulating the best layouts takes too long here."""
    config, machine = model_preset(model), hardware(machine)
    sequences = max(1, tokens // config.seq_len)
    on_the_map = Search(
        micro_batch_sizes=(1, 2, 4),
        max_tp=min(max(TP), machine.devices_per_node),
        max_pp=max(PP),
        num_simulated=0,
        fastest_of_axes=True,
    )
    found = plan(config, machine, num_gpus, sequences * config.seq_len, search=on_the_map)
    if found.how.offload_optimizer:  # the map shows what fits without offloading
        raise ValueError(found.cautions()[0])
    return found


def best_of_cells(found: Plan) -> dict[tuple[int, int], Candidate]:
    """Return the fastest layout with each (tp, pp)."""
    cells: dict[tuple[int, int], Candidate] = {}
    for candidate in found.candidates:  # the fastest first
        if candidate.layout.tp in TP and candidate.layout.pp in PP:  # else it is not on the map
            cells.setdefault((candidate.layout.tp, candidate.layout.pp), candidate)
    return cells


def why(found: Plan, cells: dict, tp: int, pp: int) -> str:
    """Describe the chosen cell's best layout, where its time goes, and what the winner does better.

    If nothing fits in the cell, name the layout that came nearest.
    """
    if (tp, pp) not in cells:
        return page.paragraph(why_not(found, tp, pp))
    chosen = cells[tp, pp]
    said = page.paragraph(str(chosen))
    if chosen is found.best:
        said += page.paragraph("No other layout that was tried is faster. " + found.explain())
    else:
        two = dataclasses.replace(found, candidates=(found.best, chosen))
        same = chosen.layout.axes == found.best.layout.axes
        said += page.paragraph("" if same else two.explain())
    return said + page.breakdown(chosen.time.breakdown)


def why_not(found: Plan, tp: int, pp: int) -> str:
    here = [drop for drop in found.dropped if (drop.layout.tp, drop.layout.pp) == (tp, pp)]
    if not here:
        return (
            f"No layout with tp={tp}, pp={pp} was tried: tp stays inside a node, pp at most one "
            "stage per layer, and tp * pp has to divide the devices, dp the sequences of a batch."
        )
    cut = [drop for drop in here if drop.reason != "memory"]
    if cut:
        return f"tp={tp}, pp={pp}: {cut[0].detail}"
    nearest = min(here, key=lambda drop: device_memory_of(found, drop.layout))
    others = " (ZeRO-3 was not tried: few programs have it in a pipeline.)" if pp > 1 else ""
    said = f"{short(nearest.layout)}: {nearest.detail}"
    return f"tp={tp}, pp={pp} does not fit. Nearest is {said}.{others}"


def device_memory_of(found: Plan, layout: Layout) -> float:
    return device_memory(peak_memory(found.model, layout, found.how).total, found.how)


def draw(title: str, found: Plan, cells: dict, tp: int, pp: int) -> Drawing:
    best = found.best.time.mfu
    left = Panel(
        335, 290, (-0.5, len(PP) - 0.5), (len(TP) - 0.5, -0.5), xlabel="pp", ylabel="tp", sides="",
        xticks=dict(enumerate(map(str, PP))), yticks=dict(enumerate(map(str, TP))),
        title="MFU in %, best tried with each tp, pp (gray: none fits)",
    )  # fmt: skip
    left.box(-0.5, -0.5, len(PP) - 0.5, len(TP) - 0.5, INK, FAINT)
    for (t, p), candidate in cells.items():
        x, y, mfu = PP.index(p), TP.index(t), candidate.time.mfu
        left.box(x - 0.5, y - 0.5, x + 0.5, y + 0.5, color := shade(mfu / (1.25 * best)))
        left.words(x, y, f"{100 * mfu:.0f}", ink_on(color), "middle")
    x, y = PP.index(pp), TP.index(tp)
    corners = [(x + dx, y + dy) for dx, dy in ((-0.48, -0.48), (0.48, -0.48), (0.48, 0.48))]
    left.line([*corners, (x - 0.48, y + 0.48), corners[0]], "#d62728", 3)

    compared = {"fastest": found.best}
    if (tp, pp) in cells and cells[tp, pp] is not found.best:
        compared["yours"] = cells[tp, pp]
    names = list(dict.fromkeys(line.name for c in compared.values() for line in c.time.breakdown))
    names = sorted(names, key=lambda n: -max(value_of(c, n) for c in compared.values()))[:7]
    longest = max(value_of(c, name) for c in compared.values() for name in names)
    colors = {"fastest": "#31a354", "yours": "#d62728"}
    right = Panel(
        380, 290, (0, 1.03 * longest), (len(names) - 0.4, -0.6), yticks=dict(enumerate(names)),
        title="where a step's time goes", legend={label: colors[label] for label in compared},
        xlabel=f"longest bar {readable(longest, 's')}",
    )  # fmt: skip
    height = 0.8 / len(compared)
    for number, (label, candidate) in enumerate(compared.items()):
        for row, name in enumerate(names):
            low = row - 0.4 + number * height
            right.box(0, low, value_of(candidate, name), low + height, colors[label])
    said = f"{title}: {short(found.best.layout)}, MFU {best:.1%}"
    return Drawing([left, right], said, said)


def shade(share: float) -> str:
    """Return a green, from pale (0) to dark (1)."""
    ends = zip((0xF7, 0xFC, 0xB9), (0x00, 0x68, 0x37))
    return "#" + "".join(f"{round(pale + share * (dark - pale)):02x}" for pale, dark in ends)


def value_of(candidate: Candidate, name: str) -> float:
    return next((line.value for line in candidate.time.breakdown if line.name == name), 0.0)


def layout_planner(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in layout_planner(num_gpus=1024, tp=4)."""
    explorer = Explorer(
        render,
        shown_if_mine(*CONTROLS),
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        num_gpus=whole(8, 16384, log=True),
        tokens_a_step=choice(*TOKENS),
        tp=choice(*TP),
        pp=choice(*PP),
        **CONTROLS,
    )
    explorer.change(**start)
    return explorer
