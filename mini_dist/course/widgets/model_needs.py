"""Explorer of lesson 01: what the model states of a known model need, and how long it trains."""

from __future__ import annotations

from dataclasses import replace
from math import log10

from mini_dist.plan.calculators import (
    Breakdown,
    model_states,
    num_parameters,
    readable,
    training_time,
)
from mini_dist.plan.calculators import model as model_preset

from ..draw.svg import FAINT, LIMIT, Drawing, Panel
from ..lab import choice, real
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer, doublings

MODELS = ("gpt2-xl", "gpt3-175b", "llama3-8b", "llama3-70b", "llama3-405b")
GPUS = ("a100-40", "a100-80", "h100", "h200", "b200", MINE)

# Bytes per parameter: parameters, gradients | the optimizer's fp32 copy and Adam's two moments.
RECIPES = {
    "bf16 + Adam": (2, 2, 4, 4, 4),
    "bf16 + Adam, fp32 gradients": (2, 4, 4, 4, 4),
    "fp32 + Adam": (4, 4, 0, 4, 4),
    "bf16 + 8-bit Adam": (2, 2, 4, 1, 1),
    "bf16 + SGD with momentum": (2, 2, 4, 4, 0),
}
STATED_BY = {
    "bf16 + Adam": "Rajbhandari et al. 2020, ZeRO, section 3.1",
    "bf16 + Adam, fp32 gradients": "Megatron-LM's main gradients",
    "fp32 + Adam": "torch's AdamW on a plain model",
    "bf16 + 8-bit Adam": "Dettmers et al. 2022, 8-bit Optimizers, and a float32 copy",
    "bf16 + SGD with momentum": "torch's SGD on a float32 copy",
}
KINDS = ("parameters", "gradients", "fp32 copy", "1st moment", "2nd moment")
COLORS = ("#3182bd", "#fd8d3c", "#c7e9c0", "#74c476", "#238b45")

TOKENS = ("as published", "20 per parameter", "15 trillion")
PUBLISHED = {
    "gpt3-175b": (300e9, "Brown et al. 2020, table D.1"),
    "llama3-8b": (15e12, "Llama 3 model card: over 15 T"),
    "llama3-70b": (15e12, "Llama 3 model card: over 15 T"),
    "llama3-405b": (15.6e12, "Llama 3 herd 2024, section 1"),
}
KEYS = {  # of the sources in devices.py
    "[acc]": "stas00/ml-engineering, accelerators",
    "[mamf]": "its best measured matrix products",
    "[sheet]": "NVIDIA's datasheet",
    "[simumax]": "SimuMax's timings",
}
SPANS = {  # in years
    "1 minute": 1 / 525_960,
    "1 hour": 1 / 8766,
    "1 day": 1 / 365.25,
    "1 month": 1 / 12,
    "1 year": 1,
    "10 years": 10,
    "100 years": 100,
    "1,000 years": 1000,
}


def render(
    model: str = "gpt3-175b",
    recipe: str = "bf16 + Adam",
    gpu: str = "a100-80",
    num_gpus: int = 1,
    utilisation: float = 0.45,
    tokens: str = "as published",
    my_gib: float = START["my_gib"],
    my_tflops: float = START["my_tflops"],
) -> tuple[Drawing, str]:
    """Draw the memory of all model states next to one GPU's, and the time of training:
    6 P T / (GPUs * peak * utilization)."""
    machine, parameters = machine_of(gpu, my_gib, my_tflops), num_parameters(model_preset(model))
    each = RECIPES[recipe]
    states = model_states(
        parameters, parameter_bytes=each[0], gradient_bytes=each[1], optimizer_bytes=sum(each[2:])
    )
    states = Breakdown(
        states.title, tuple(replace(line, source=STATED_BY[recipe]) for line in states)
    )
    num_tokens, why = tokens_of(model, parameters, tokens)
    time = training_time(parameters, num_tokens, num_gpus, machine, utilisation)
    picture = draw(model, each, states, machine, time, num_gpus)
    assumed = f"{readable(num_tokens, 'tokens')}: {why}. Activations are not in here (lesson 06)."
    said = page.breakdown(states) + page.breakdown(time)
    keys = "; ".join(f"{key} {name}" for key, name in KEYS.items() if key in said)
    return picture, said + page.paragraph(assumed) + page.paragraph(f"{keys}.")


def tokens_of(model: str, parameters: int, tokens: str) -> tuple[float, str]:
    if tokens == "15 trillion":
        return 15e12, "what Llama 3 saw"
    if tokens == "as published" and model in PUBLISHED:
        return PUBLISHED[model]
    optimal = "about compute-optimal (Hoffmann et al. 2022, table 3)"
    unknown = "not published: 20 per parameter, " * (tokens == "as published")
    return 20 * parameters, unknown + optimal


def draw(model, each, states: Breakdown, machine, time: Breakdown, num_gpus: int) -> Drawing:
    one, gib = machine.device.memory_bytes / 2**30, states["parameters"] / each[0] / 2**30
    total = sum(each) * gib
    count = total / one
    said = f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
    left = Panel(
        385, 280, (0, 1.55 * max(total, one)), (len(each) + 0.5, -1.2), sides="l", xlabel="GiB",
        yticks=dict(enumerate([*KINDS, "sum"])),
        title=f"{model}: model states = {said} × {machine.device.name}",
    )  # fmt: skip
    left.guide(x=one, color=LIMIT)  # drawn first, so that the numbers are above it
    near = dict(anchor="end", shift=(-5, 0)) if one > 0.8 * total else dict(shift=(5, 0))
    left.words(one, -0.8, "one GPU", LIMIT, **near)
    start = 0.0
    for row, (nbytes, color) in enumerate(zip(each, COLORS)):  # a waterfall down to the sum
        left.box(start, row - 0.38, start + nbytes * gib, row + 0.38, color)
        start += nbytes * gib
        left.words(start, row, f"{nbytes} × P = {nbytes * gib:,.0f}", shift=(5, 0))
    left.box(0, len(each) - 0.38, start, len(each) + 0.38, "#969696")
    left.words(start, len(each), f"{start:,.0f}", bold=True, shift=(5, 0))

    # Logarithms on both axes.
    years, most, here = log10(time["years"]), log10(2**16), log10(num_gpus)
    low, high = min(-3.3, years + here - most - 0.2), max(3.3, years + here + 0.2)
    said = f"{duration(time['time'])} on {num_gpus:,} GPU{'s' * (num_gpus > 1)}"
    right = Panel(
        335, 280, (-0.1, most + 0.1), (low, high), title=f"training: {said}", xlabel="GPUs",
        xticks={log10(8**k): f"{8**k:,}" for k in range(6)},
    )  # fmt: skip
    for name, span in SPANS.items():
        if low < log10(span) < high:
            right.guide(y=log10(span), dash="", width=1, alpha=FAINT)
            right.words(most, log10(span), name, anchor="end", shift=(0, -8))
    right.line([(0, years + here), (most, years + here - most)], "#756bb1", 2)
    right.dot(here, years, "#756bb1", 5)
    return Drawing([left, right], f"{model}: {start:,.0f} GiB of model states; {said}")


def duration(seconds: float) -> str:
    """Return seconds in words: 77,160 years, 32 days, 3.2 hours."""
    units = {"years": 365.25 * 86400, "days": 86400, "hours": 3600, "minutes": 60, "s": 1}
    name, scale = next((unit for unit in units.items() if seconds >= unit[1]), ("s", 1))
    value = seconds / scale
    return f"{value:,.0f} {name}" if value >= 1000 else f"{value:.4g} {name}"


def memory_and_time(only: tuple[str, ...] = (), **start) -> Explorer:
    """Return the explorer; `start` sets controls, as in memory_and_time(model="llama3-8b").

    only: the names of the controls to show; () shows all.
    """
    explorer = Explorer(
        render,
        shown_if_mine("my_gib", "my_tflops"),
        model=choice(*MODELS),
        recipe=choice(*RECIPES),
        gpu=choice(*GPUS),
        num_gpus=choice(*doublings(1, 2**16)),  # a slider's number invites typing
        utilisation=real(0.05, 1.0),
        tokens=choice(*TOKENS),
        **controls("my_gib", "my_tflops"),
    )
    if only:
        explorer.keep_only(*only)
    explorer.change(**start)
    return explorer
