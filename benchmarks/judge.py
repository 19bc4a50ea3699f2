"""Measure how long a learner waits for a verdict on the printed solution of every exercise.

    python benchmarks/judge.py [--json FILE] [--long]

Each solution is right, so it is judged to the end, with all its cases and adversities. "Theirs" is
our promise: 4 s for any exercise, 1 s for the median of all. A wrong answer gets its verdict
sooner, because the first wrong case ends the trial.
"""

import statistics
import sys
import time
from pathlib import Path

from _form import Case, main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mini_dist import check
from tests.course.exercises import solutions

AT_MOST, MEDIAN = 4000, 1000  # ms


def cases(long):
    medians = []
    for name, exercise in sorted(check.exercises().items()):
        solution, taken = getattr(solutions, name), []

        def verdict(exercise=exercise, fn=solution, taken=taken):
            began = time.perf_counter()
            state = exercise.judge(fn).state
            taken.append(1e3 * (time.perf_counter() - began))
            assert state == "right", f"{exercise.name}: its printed solution is {state}"
            return taken[-1]

        yield Case(name, verdict, AT_MOST, bar=1, repeats=7 if long else 3)
        medians.append(statistics.median(taken[1:]))
    yield Case("the median of all", lambda: statistics.median(medians), MEDIAN, 1, repeats=1)


sys.exit(main(cases, __doc__))
