"""Explorer of lesson 17: the best layout of each tp and pp, and why the chosen one is slower."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache

from mini_dist.plan.calculators import (
    Candidate,
    Layout,
    Plan,
    device_memory,
    hardware,
    peak_memory,
    plan,
    readable,
)
from mini_dist.plan.calculators import model as model_preset
from mini_dist.plan.calculators.layouts import Search, short

from ..draw.labels import ticks, write
from ..draw.picture import Picture
from ..lab import choice, whole
from . import page
from .explorer import Explorer

MODELS = (
    *("llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "bloom-176b"),
    *("mixtral-8x7b", "deepseek-v3"),
)
GPUS = ("a100-80", "h100", "h100-hf", "h200", "b200")
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
) -> tuple[Picture, str]:
    """MFU of the best layout with each tp and pp; the chosen cell against the best of all.

    Raises ValueError when nothing fits at all.
    """
    found = search(model, gpu, num_gpus, TOKENS[tokens_a_step])
    cells = best_of_cells(found)
    picture = draw(f"{model} on {num_gpus:,} {gpu}", found, cells, tp, pp)
    return picture, why(found, cells, tp, pp)


@lru_cache(maxsize=64)  # a click in the map asks for the same plan again
def search(model: str, gpu: str, num_gpus: int, tokens: int) -> Plan:
    """The planner's answer by closed form; what it simulates besides would take too long here."""
    config = model_preset(model)
    sequences = max(1, tokens // config.seq_len)
    on_the_map = Search(
        micro_batch_sizes=(1, 2, 4),
        max_tp=min(max(TP), hardware(gpu).devices_per_node),
        max_pp=max(PP),
        num_simulated=0,
        fastest_of_axes=True,
    )
    found = plan(config, gpu, num_gpus, sequences * config.seq_len, search=on_the_map)
    if found.how.offload_optimizer:  # the map is of the devices' own memory
        raise ValueError(found.cautions()[0])
    return found


def best_of_cells(found: Plan) -> dict[tuple[int, int], Candidate]:
    """The fastest layout with each (tp, pp)."""
    cells: dict[tuple[int, int], Candidate] = {}
    for candidate in found.candidates:  # the fastest first
        if candidate.layout.tp in TP and candidate.layout.pp in PP:  # else it is not on the map
            cells.setdefault((candidate.layout.tp, candidate.layout.pp), candidate)
    return cells


def why(found: Plan, cells: dict, tp: int, pp: int) -> str:
    """What the chosen cell's best layout is, where its time goes, and what the winner does better.

    Of a cell where nothing fits: the layout that came nearest.
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
            "stage a layer, and tp * pp has to divide the devices, dp the sequences of a batch."
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


def draw(title: str, found: Plan, cells: dict, tp: int, pp: int) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.6), dpi=100)
    left, right = figure.add_axes((0.07, 0.13, 0.4, 0.74)), figure.add_axes((0.68, 0.13, 0.3, 0.74))

    mfu = [[cells[t, p].time.mfu if (t, p) in cells else math.nan for p in PP] for t in TP]
    best = found.best.time.mfu
    left.set_facecolor("#eeeeee")
    left.imshow(mfu, cmap="YlGn", vmin=0, vmax=1.25 * best, aspect="auto")
    shown = [(TP.index(t), PP.index(p)) for t, p in cells]
    rows, columns = zip(*shown) if shown else ((), ())
    write(left, [f"{100 * mfu[row][column]:.0f}" for row, column in shown], columns, rows,
          size=10, color="black")  # fmt: skip
    place = (PP.index(pp), TP.index(tp))
    left.plot(*place, "s", markersize=34, markerfacecolor="none", markeredgecolor="#d62728", mew=2)
    ticks(left, dict(enumerate(map(str, PP))), dict(enumerate(map(str, TP))))
    left.set(xlabel="pp", ylabel="tp")
    left.set_title("MFU in %, best tried with each tp, pp (grey: none fits)", fontsize=9)

    compared = {"fastest": found.best}
    if (tp, pp) in cells and cells[tp, pp] is not found.best:
        compared["yours"] = cells[tp, pp]
    names = list(dict.fromkeys(line.name for c in compared.values() for line in c.time.breakdown))
    names = sorted(names, key=lambda n: -max(value_of(c, n) for c in compared.values()))[:7]
    height = 0.8 / len(compared)
    for number, (label, candidate) in enumerate(compared.items()):
        places = [row + (number - (len(compared) - 1) / 2) * height for row in range(len(names))]
        values = [value_of(candidate, name) for name in names]
        color = "#31a354" if label == "fastest" else "#d62728"
        right.barh(places, values, height, color=color)
        right.text(0.98, 0.05 + 0.09 * number, label, color=color, ha="right", fontsize=9,
                   transform=right.transAxes)  # fmt: skip
    right.invert_yaxis()
    ticks(right, y=dict(enumerate(names)))
    longest = max(value_of(c, name) for c in compared.values() for name in names)
    right.set_xlabel(f"longest bar {readable(longest, 's')}", fontsize=8)
    right.set_title("where a step's time goes", fontsize=9)
    right.spines[["top", "right"]].set_visible(False)
    said = f"{title}: {short(found.best.layout)}, MFU {best:.1%}"
    figure.text(0.02, 0.95, said, fontsize=10)
    return Picture(figure, said)


def value_of(candidate: Candidate, name: str) -> float:
    return next((line.value for line in candidate.time.breakdown if line.name == name), 0.0)


def layout_planner(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in layout_planner(num_gpus=1024, tp=4)."""
    explorer = Explorer(
        render,
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        num_gpus=whole(8, 16384, log=True),
        tokens_a_step=choice(*TOKENS),
        tp=choice(*TP),
        pp=choice(*PP),
    )
    explorer.change(**start)
    return explorer
