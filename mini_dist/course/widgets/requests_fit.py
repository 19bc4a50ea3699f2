"""Explorer of lesson 24: how many requests fit beside the weights, and what more of them cost."""

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

from ..draw.labels import ticks
from ..draw.picture import Picture
from ..lab import choice, real, whole
from . import page
from .explorer import Explorer

GPUS = ("l40s", "a100-40", "a100-80", "h100", "h200", "b200")
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
) -> tuple[Picture, str]:
    """A device's memory, and tokens a second against the time a reader waits for the next token.

    dollars_an_hour: of one GPU, yours to fill in.
    """
    server = Server(model, gpu, tp, WEIGHTS[weights], CACHE[cache])
    points = curve(server, prompt, new)
    batch = min(batch, points[-1][0])
    mine = answer(server, batch, prompt, new)
    said = (
        f"{points[-1][0]:,} requests of {prompt + new:,} tokens fit on {tp} x "
        f"{server.machine.device.name}. {batch} at once: {mine.tokens_a_second:,.0f} tokens a "
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
    head = ("at once", "tokens a second and GPU", "next token", "a million tokens")
    return picture, html + page.table(rows, head)


def draw(server: Server, tokens: int, batch: int, points, mine) -> Picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.2), dpi=100)
    left, right = figure.add_axes((0.03, 0.2, 0.4, 0.5)), figure.add_axes((0.54, 0.18, 0.44, 0.68))
    whole, room = server.machine.device.memory_bytes, cache_room(server)
    each = kv_bytes_a_text(server.config, tokens, server.kv_bytes, server.tp)
    start, gib = 0.0, 2**30
    for name, size, color in (
        ("weights", -room["weights"], "#3182bd"),
        (f"{batch} requests", batch * each, "#fd8d3c"),
        ("room for more", room.total - batch * each, "#fee6ce"),
        ("kept free", whole * (1 - server.memory_share), "#e6e6e6"),
    ):
        left.barh(0, size / gib, 0.5, start / gib, color=color, label=name)
        start += size
    left.set(xlim=(0, whole / gib), ylim=(-0.3, 0.3), yticks=[], xlabel="GiB of a device")
    left.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8, frameon=False)
    left.spines[["top", "right", "left"]].set_visible(False)

    xs = [log10(1e3 * point.next_token) for _, point in points]
    ys = [log10(point.tokens_a_second) for _, point in points]
    right.plot(xs, ys, "o-", color="#756bb1", markersize=4)
    right.plot(log10(1e3 * mine.next_token), log10(mine.tokens_a_second), "o", color="#de2d26")
    marks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    low, high = min(xs) - 0.1, max(xs) + 0.15
    ticks(
        right,
        {log10(mark): f"{mark:,}" for mark in marks if low < log10(mark) < high},
        {float(k): f"{10**k:,}" for k in range(6) if min(ys) - 0.3 < k < max(ys) + 0.3},
    )
    right.set(xlim=(low, high), ylim=(min(ys) - 0.3, max(ys) + 0.3))
    right.set(xlabel="ms to the next token")
    right.set_title("tokens a second and GPU; all but the last: twice the batch", fontsize=9)
    right.spines[["top", "right"]].set_visible(False)
    said = f"{points[-1][0]:,} requests of {tokens:,} tokens fit; {batch}: "
    return Picture(figure, f"{said}{mine.tokens_a_second:,.0f} tokens a second and GPU")


def requests_fit(**start) -> Explorer:
    """The explorer; `start` sets some controls, as in requests_fit(model="llama3-70b", tp=4)."""
    explorer = Explorer(
        render,
        model=choice(*MODELS),
        gpu=choice(*GPUS),
        tp=choice(1, 2, 4, 8),
        weights=choice(*WEIGHTS),
        cache=choice(*CACHE),
        prompt=whole(16, 2**17, log=True),
        new=whole(16, 2**14, log=True),
        batch=whole(1, 1024, log=True),
        dollars_an_hour=real(0.5, 20.0),
    )
    explorer.change(**start)
    return explorer
