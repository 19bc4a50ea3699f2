"""Explorer of lesson 24: how many requests fit next to the weights, and what more of them cost."""

from __future__ import annotations

from math import log10

from mini_dist.plan.calculators import MODELS, readable
from mini_dist.plan.calculators.serving import (
    Server,
    answer,
    cache_room,
    curve,
    decode_time,
    kv_bytes_a_text,
    kv_bytes_a_token,
)

from ..draw.svg import Drawing, Panel, numbered, round_places
from ..lab import choice, real, whole
from . import page
from .device import MINE, START, controls, machine_of, shown_if_mine
from .explorer import Explorer

GPUS = (
    *("t4", "l4", "a10g", "rtx-4090", "rtx-5090", "l40s"),
    *("v100", "a100-40", "a100-80", "h20", "h100", "h200", "b200", "gb200", "mi300x"),
    *("ascend-910b", "tpu-v6e", MINE),
)
WEIGHTS = {"16 bits": 2, "8 bits": 1, "4 bits": 0.5}
CACHE = {"16 bits": 2, "8 bits": 1}


def render(
    model: str = "llama3-8b",
    gpu: str = "h100",
    tp: int = 1,
    weights: str = "16 bits",
    cache: str = "16 bits",
    prompt: int = 1024,
    new: int = 256,
    batch: int = 16,
    dollars_an_hour: float = 2.5,
    my_gib: float = START["my_gib"],
    my_tflops: float = START["my_tflops"],
    my_memory_gb_s: float = START["my_memory_gb_s"],
) -> tuple[Drawing, str]:
    """Draw a device's memory, and tokens per second over the time to a reader's next token.

    dollars_an_hour: the price of one GPU, for the reader to fill in.
    """
    machine = machine_of(gpu, my_gib, my_tflops, my_memory_gb_s)
    server = Server(model, machine, tp, WEIGHTS[weights], CACHE[cache])
    points = curve(server, prompt, new)
    batch = min(batch, points[-1][0])
    mine = answer(server, batch, prompt, new)
    said = (
        f"{points[-1][0]:,} requests of {prompt + new:,} tokens fit on {tp} x "
        f"{server.machine.device.name}. {batch} at once: {mine.tokens_a_second:,.0f} tokens per "
        f"second and GPU, the first after {readable(mine.first_token, 's')}, the next after "
        f"{readable(mine.next_token, 's')}, ${mine.dollars(dollars_an_hour):.2f} for a million."
    )
    picture = draw(server, prompt + new, batch, points, mine)
    html = page.paragraph(said) + page.breakdown(cache_room(server))
    html += page.breakdown(kv_bytes_a_token(server.config, server.kv_bytes, tp))
    html += page.breakdown(decode_time(server, batch, prompt + new / 2))
    rows = [
        (f"{many:,}", f"{each.tokens_a_second:,.0f}", readable(each.next_token, "s"),
         f"${each.dollars(dollars_an_hour):.2f}")
        for many, each in points
    ]  # fmt: skip
    head = ("at once", "tokens per second and GPU", "next token", "a million tokens")
    return picture, html + page.table(rows, head)


def draw(server: Server, tokens: int, batch: int, points, mine) -> Drawing:
    memory, room, gib = server.machine.device.memory_bytes, cache_room(server), 2**30
    each = kv_bytes_a_text(server.config, tokens, server.kv_bytes, server.tp)
    parts = {
        "weights": (-room["weights"], "#3182bd"),
        f"{batch} requests": (batch * each, "#fd8d3c"),
        "room for more": (room.total - batch * each, "#fdd0a2"),
        "kept free": (memory * (1 - server.memory_share), "#bdbdbd"),
    }
    left = Panel(
        300, 170, (0, memory / gib), (0, 1), title="memory of a device", xlabel="GiB", sides="b",
        xticks=numbered(round_places(0, memory / gib)),
        legend={name: color for name, (_, color) in parts.items()},
    )  # fmt: skip
    start = 0.0
    for size, color in parts.values():
        left.box(start / gib, 0.1, (start + size) / gib, 0.9, color)
        start += size

    xs = [log10(1e3 * point.next_token) for _, point in points]
    ys = [log10(point.tokens_a_second) for _, point in points]
    marks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    low, high = min(xs) - 0.1, max(xs) + 0.15
    right = Panel(
        420, 260, (low, high), (min(ys) - 0.3, max(ys) + 0.3), xlabel="ms to the next token",
        xticks={log10(mark): f"{mark:,}" for mark in marks if low < log10(mark) < high},
        yticks={float(k): f"{10**k:,}" for k in range(6) if min(ys) - 0.3 < k < max(ys) + 0.3},
        title="tokens per second and GPU; all but the last: twice the batch",
    )  # fmt: skip
    right.line(zip(xs, ys), "#756bb1")
    for x, y in zip(xs, ys):
        right.dot(x, y, "#756bb1", 3)
    right.dot(log10(1e3 * mine.next_token), log10(mine.tokens_a_second), "#de2d26", 5)
    said = f"{points[-1][0]:,} requests of {tokens:,} tokens fit; {batch}: "
    return Drawing([left, right], f"{said}{mine.tokens_a_second:,.0f} tokens per second and GPU")


def requests_fit(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in requests_fit(model="llama3-70b", tp=4)."""
    explorer = Explorer(
        render,
        shown_if_mine("my_gib", "my_tflops", "my_memory_gb_s"),
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        tp=choice(1, 2, 4, 8),
        weights=choice(*WEIGHTS),
        cache=choice(*CACHE),
        prompt=whole(16, 2**17, log=True),
        new=whole(16, 2**14, log=True),
        batch=whole(1, 1024, log=True),
        dollars_an_hour=real(0.5, 20.0),
        **controls("my_gib", "my_tflops", "my_memory_gb_s"),
    )
    explorer.change(**start)
    return explorer
