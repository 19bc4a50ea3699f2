"""Explorer of lesson 07: the ZeRO paper's figure 1 for any model, optimizer, number of ranks."""

from __future__ import annotations

from mini_dist.plan.calculators import model_states

from ..draw.svg import LIMIT, Drawing, Panel, numbered, round_places
from ..lab import choice, real, whole
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer

GPUS = ("a100-40", "a100-80", "h100", "h200", "b200", MINE)
STAGES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")
KINDS = {"parameters": "#3182bd", "gradients": "#fd8d3c", "optimizer": "#74c476"}
# Bytes per parameter: parameters, gradients, and K, what the optimizer holds.
OPTIMIZERS = {
    "bf16, AdamW: 2 + 2 + 12": (2, 2, 12),  # Rajbhandari et al. 2020, section 3.1
    "fp32, AdamW: 4 + 4 + 8": (4, 4, 8),  # a plain torch model, and the runs of this course
    "fp32, SGD with momentum: 4 + 4 + 4": (4, 4, 4),
}


def render(
    billions: float = 7.5,
    ranks: int = 64,
    optimizer: str = "bf16, AdamW: 2 + 2 + 12",
    gpu: str = "a100-80",
    my_gib: float = START["my_gib"],
) -> tuple[Drawing, str]:
    """Compare one rank's model states, without ZeRO and at each stage, with one GPU's memory."""
    each, memory = OPTIMIZERS[optimizer], machine_of(gpu, my_gib).device.memory_bytes
    states = [model_states(billions * 1e9, ranks, stage, *each) for stage in range(4)]
    picture = draw(states, memory, f"{billions:g} billion parameters on {ranks:,} ranks", gpu)
    rows = [
        (name, *(f"{state[kind] / 1e9:,.2f}" for kind in KINDS), f"{state.total / 1e9:,.2f}", most)
        for name, state, most in zip(STAGES, states, largest(memory, ranks, each))
    ]
    head = ["", *KINDS, "sum, GB", f"largest model on one {gpu}"]
    return picture, page.table(rows, head) + page.paragraph(
        "Model states only: no activations, and in ZeRO-3 none of the units that are whole for the "
        "moment. [ZeRO] Rajbhandari et al. 2020, figure 1 and table 1."
    )


def largest(memory: float, ranks: int, each: tuple) -> list[str]:
    """Return how many billions of parameters have states that fill the memory, at each stage."""
    return [
        f"{memory / model_states(1, ranks, stage, *each).total / 1e9:,.1f} billion"
        for stage in range(4)
    ]


def draw(states, memory: float, title: str, gpu: str) -> Drawing:
    most = states[0].total / 1e9
    panel = Panel(
        700, 215, (0, 1.2 * most), (3.6, -0.8), title=title, xlabel="GB on each rank",
        xticks=numbered(round_places(0, 1.2 * most)), yticks=dict(enumerate(STAGES)), legend=KINDS,
    )  # fmt: skip
    for row, state in enumerate(states):
        start = 0.0
        for kind, color in KINDS.items():
            panel.box(start, row - 0.36, start + state[kind] / 1e9, row + 0.36, color)
            start += state[kind] / 1e9
        panel.words(start, row, f"{start:,.3g} GB", shift=(6, 0))
    if memory / 1e9 < 1.2 * most:
        panel.guide(x=memory / 1e9, color=LIMIT)
        anchor, shift = ("end", -5) if memory / 1e9 > most else ("start", 5)
        panel.words(memory / 1e9, -0.62, gpu, LIMIT, anchor, shift=(shift, 0))
    said = ", ".join(f"{name} {s.total / 1e9:,.3g} GB" for name, s in zip(STAGES, states))
    return Drawing([panel], f"{title}: {said}")


def zero_figure(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in zero_figure(billions=70.0, ranks=512)."""
    explorer = Explorer(
        render,
        shown_if_mine("my_gib"),
        billions=real(0.1, 1000.0, log=True),
        ranks=whole(1, 2**12, log=True),
        optimizer=choice(*OPTIMIZERS),
        gpu=choice(*GPUS),
        **controls("my_gib"),
    )
    explorer.change(**start)
    return explorer
