"""Explorer of lesson 03: a collective step by step, with what every rank has before and after.

The collective really runs, on numbers that tell where they come from (mini_dist.ranks.watch).
Moving `step` only turns the pages of the record.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from mini_dist import collectives
from mini_dist.ranks.ledger.steps import steps
from mini_dist.ranks.watch import read, watch

from ..draw.messages import box, contents
from ..draw.svg import Drawing, Panel
from ..lab import choice, whole
from . import page
from .explorer import Explorer

COLLECTIVES = {  # name -> whether a rank starts with only its part of the whole
    "ring_reduce_scatter": False,
    "ring_all_gather": True,
    "ring_all_reduce": False,
    "star_all_reduce": False,
    "stars_all_reduce": False,
    "doubling_all_reduce": False,
    "halving_doubling_all_reduce": False,
    "pairwise_all_to_all": False,
}
MOST_STEPS = 6  # of these collectives on 4 ranks


class Sent(NamedTuple):
    """One message of a step."""

    source: int
    target: int
    numbers: list[int]


class Film(NamedTuple):
    """The record: messages[k] are of step k + 1, has[k][rank] is what the rank has after step k."""

    messages: list[list[Sent]]
    has: list[list[list[int]]]


@lru_cache(maxsize=64)
def film(collective: str, num_ranks: int) -> Film:
    """Run the collective and order its record by steps."""
    fn, parts = getattr(collectives, collective), COLLECTIVES[collective]
    seen = watch(fn, num_ranks, parts=parts)
    carried = contents(seen)
    messages = [
        [Sent(m.source, m.target, carried[id(m.send)]) for m in step]
        for step in steps(seen.run.ledger)
    ]
    has = []
    for number in range(len(messages) + 1):
        row = []
        for rank in range(num_ranks):
            known = set(seen.inputs[rank])
            for k, step in enumerate(messages):
                for sent in step:
                    # A rank already has what it sends in the next step.
                    if (sent.target == rank and k < number) or (
                        sent.source == rank and k <= number
                    ):
                        known |= set(sent.numbers)
            if number == len(messages):
                known |= set(seen.results[rank])
            row.append(most_complete(known, num_ranks))
        has.append(row)
    return Film(messages, has)


def most_complete(numbers: set[int], size: int) -> list[int]:
    """Drop sums that a larger one contains; sort the others by chunk, then by rank."""
    terms = {number: terms_of(number, size) for number in numbers}
    kept = [n for n in numbers if not any(terms[n] < terms[other] for other in numbers)]
    return sorted(kept, key=lambda number: sorted(terms[number]))


def terms_of(number: int, size: int) -> set[tuple[int, int]]:
    """Return the (chunk, rank) of the terms in a number."""
    return {(chunk, rank) for chunk, ranks in read(number, size).items() for rank in ranks}


def name_of(number: int, size: int) -> str:
    """Return a name such as `a013`: chunk a, summed over ranks 0, 1 and 3."""
    return " ".join(
        "abcd"[chunk] + "".join(map(str, ranks)) for chunk, ranks in read(number, size).items()
    )


def render(
    collective: str = "ring_all_reduce", num_ranks: int = 4, step: int = 1
) -> tuple[Drawing, str]:
    """Draw what every rank has before a step, what it sends, and what it has afterwards.

    A step after the last one shows the last one.
    """
    shown = film(collective, num_ranks)
    step = min(step, len(shown.messages))
    return draw(collective, shown, step), words(shown, num_ranks, step)


def draw(collective: str, shown: Film, step: int) -> Drawing:
    size = len(shown.has[0])
    before, after = (shown.has[k] for k in (step - 1, step))
    messages = shown.messages[step - 1]
    by_sender = [[m for m in messages if m.source == rank] for rank in range(size)]
    lines = [max(1, len(own)) for own in by_sender]
    tops = [sum(lines[:rank]) + 0.7 * rank for rank in range(size)]
    width_before, width_sent, width_after = (
        max(len(numbers) for numbers in column)
        for column in (before, [m.numbers for m in messages], after)
    )
    sends, arrives = width_before + 1.0, width_before + width_sent + 3.6
    width, height = arrives + width_after + 1.6, tops[-1] + lines[-1] + 1.1
    panel = Panel(43 * width, 26 * height, (-1.6, width - 1.6), (height - 1.0, -1.0), sides="")

    def middle(rank: int) -> float:
        return tops[rank] + lines[rank] / 2

    for rank in range(size):
        panel.words(-0.2, middle(rank), f"rank {rank}", anchor="end")
        for index, number in enumerate(before[rank]):
            box(panel, index, middle(rank), number, size)
        for index, number in enumerate(after[rank]):
            box(panel, arrives + index, middle(rank), number, size)
            if number not in before[rank]:
                left, low = arrives + index, middle(rank) + 0.47
                panel.line([(left, low), (left + 0.8, low)], "#de2d26", 2.5)
        for line, message in enumerate(by_sender[rank]):
            y = tops[rank] + line + 0.5
            for index, number in enumerate(message.numbers):
                box(panel, sends + index, y, number, size)
            ends = [(sends + len(message.numbers), y), (arrives - 0.1, middle(message.target))]
            panel.line(ends, "#888888", 1.2, head=True)
    names = {0: "has", sends: "sends", arrives: f"has after step {step} of {len(shown.messages)}"}
    for left, name in names.items():
        panel.words(left, -0.5, name)
    said = f"{collective}, {size} ranks, step {step} of {len(shown.messages)}"
    return Drawing([panel], f"{said}: {len(messages)} messages")


def words(shown: Film, size: int, step: int) -> str:
    """Return the step's messages as a table, and how to read a box."""
    rows = [
        (
            f"rank {m.source} → rank {m.target}",
            ", ".join(name_of(n, size) for n in m.numbers),
            ", ".join(name_of(n, size) for n in shown.has[step][m.target]),
        )
        for m in shown.messages[step - 1]
    ]
    head = ("message", "carries", "the receiver then has")
    note = "A letter and its color: which chunk. Digits: whose terms are in the sum. Strong edge: "
    note += (
        "the sum is complete. Underlined in red: new in this step. (A sum shows when it is first "
    )
    note += "sent, or in the end.)"
    return page.table(rows, head) + page.paragraph(note)


def collective_stepper(**start) -> Explorer:
    """Return the explorer; `start` sets controls, as in collective_stepper(num_ranks=3)."""
    shown = Explorer(
        render,
        collective=choice(*COLLECTIVES),
        num_ranks=whole(2, 4),
        step=whole(1, MOST_STEPS),
    )
    shown.change(**start)
    return shown
