"""Measure explorers: from a moved control to the new picture and words; the bar is 100 ms.

Rows "NAME": one control of the explorer moves, to a different value each time. The time is measured
in the live widget in Python, which draws the picture as SVG, without the way to the browser and
back. People perceive 100 ms as immediate (Nielsen 1993, chapter 5).
Rows "NAME, a new question": another number of GPUs makes the planner search again; these rows only
inform.
"""

import itertools
import sys

from _form import Case, main

from mini_dist.course.widgets import (
    collective_stepper,
    compare_with_published,
    expert_routing,
    layout_planner,
    memory_and_time,
    memory_waterfall,
    rank_grid,
    scaling_curve,
    zero_figure,
)
from mini_dist.course.widgets.links import explorer as all_reduces
from mini_dist.course.widgets.pipeline import explorer as pipelines
from mini_dist.course.widgets.planner import search

AT_ONCE = 100  # ms
MOVES = {
    memory_and_time: ("num_gpus", [2**k for k in range(17)]),
    memory_waterfall: ("dp", [2**k for k in range(11)]),
    rank_grid: ("rank", range(16)),
    layout_planner: ("pp", [1, 2, 4, 8, 16, 32]),
    scaling_curve: ("num_gpus", [2**k for k in range(5, 15)]),
    compare_with_published: ("straggler", [1 + k / 100 for k in range(50)]),
    all_reduces: ("num_bytes", [4**k for k in range(1, 16)]),
    collective_stepper: ("step", range(1, 7)),
    expert_routing: ("liking", [k / 10 for k in range(30)]),
    pipelines: ("num_micro_batches", range(1, 33)),
    zero_figure: ("ranks", [2**k for k in range(13)]),
}


def mover(make, name, values, **start):
    """Return a function that moves one control of a live explorer to its next value."""
    grid, seen = make(**start).view.children
    picture, words = seen.children
    (control,) = (c for c in grid.children if c.description == name.replace("_", " "))
    following = itertools.cycle(values)

    def move():
        before = picture.value, words.value
        while control.value == (value := next(following)):
            pass
        control.value = value
        assert (picture.value, words.value) != before

    return move


def plan_anew():
    """Do the same as `mover`, with nothing remembered from earlier questions."""
    move = mover(layout_planner, "num_gpus", [256, 512, 1024])

    def forgetful():
        search.cache_clear()
        move()

    return forgetful


def cases(long):
    repeats = 51 if long else 15
    for make, (name, values) in MOVES.items():
        label = {all_reduces: "all_reduces", pipelines: "pipelines"}.get(make, make.__name__)
        yield Case(f"{label}: {name}", mover(make, name, values), AT_ONCE, 1.0, repeats=repeats)
    yield Case("layout_planner, a new question", plan_anew(), AT_ONCE, repeats=repeats)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
