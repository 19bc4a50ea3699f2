"""Run a benchmark: ours and theirs in turn, medians, a table, an exit status.

    python benchmarks/NAME.py [--json FILE] [--long]

A benchmark is a file with a function `cases(long)` that yields `Case`s, and as its last line

    sys.exit(main(cases, __doc__))

Runs alternate, and so does the side that goes first, so that a busy minute on the machine affects
both sides. Trust the ratio, not the milliseconds.

"Theirs" is PyTorch as its users have it. `launch` starts gloo's threads so that they do not take a
core from a thread that computes (`threads_that_do_not_interrupt` in ranks/threads.py), and assigns
cores to ranks (`stay_on_a_core` in the same file). Both make every program on gloo faster, theirs
even more than ours. torchrun does neither, so theirs runs without them, and that row has the bar.
The row "theirs with our threads" shows the ratio when both sides have them; its bar is 1.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """Describe one row: `ours` compared with `theirs`.

    Each is a function without arguments. The form measures the wall time of a call, in
    milliseconds. A function that returns a number has measured something itself (bytes, the time
    inside the ranks), and `unit` names it. `theirs` may be a plain number: a target that was stated
    beforehand. The row passes if ours / theirs <= `bar`; without a bar it only informs. Each
    function is first called `warmup` times without counting (0 if the first call is the question).
    """

    name: str
    ours: Callable
    theirs: Callable | Real
    bar: float | None = None
    unit: str = "ms"
    repeats: int = 7
    warmup: int = 1


def measure(case: Case) -> dict:
    """Run a case and return its row with medians."""
    sides = {"ours": case.ours, "theirs": case.theirs}
    stated = {name: float(side) for name, side in sides.items() if isinstance(side, Real)}
    running = [name for name in sides if name not in stated]
    taken = {name: [] for name in running}
    for turn in range(-case.warmup, case.repeats):
        for name in running if turn % 2 == 0 else reversed(running):
            value = _once(sides[name])
            if turn >= 0:
                taken[name].append(value)
    median = {**stated, **{name: statistics.median(values) for name, values in taken.items()}}
    ratio = median["ours"] / median["theirs"] if median["theirs"] else float("inf")
    return {
        "case": case.name,
        "ours": median["ours"],
        "theirs": median["theirs"],
        "unit": case.unit,
        "ratio": ratio,
        "bar": case.bar,
        "ok": case.bar is None or ratio <= case.bar,
    }


def _once(function):
    start = time.perf_counter()
    value = function()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    return float(value) if isinstance(value, Real) else elapsed_ms


@contextmanager
def as_shipped() -> Iterator[None]:
    """Let the threads of this process, including gloo's, compete for all cores, as torch starts
    them."""
    tasks = Path("/proc/self/task").glob("*") if hasattr(os, "SCHED_BATCH") else ()
    threads = [int(task.name) for task in tasks]
    before = {
        thread: (os.sched_getscheduler(thread), os.sched_getaffinity(thread)) for thread in threads
    }
    of_the_parent = os.sched_getaffinity(os.getppid()) if threads else None
    for thread in threads:
        schedule(thread, os.SCHED_OTHER, of_the_parent)
    try:
        yield
    finally:
        for thread, (policy, cores) in before.items():
            with suppress(ProcessLookupError):  # The process has ended.
                schedule(thread, policy, cores)


def schedule(thread: int, policy: int, cores: set[int]) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))
    os.sched_setaffinity(thread, cores)


SIDES = {"ours": nullcontext, "theirs": as_shipped, "theirs with our threads": nullcontext}


def in_turn(ours: Callable, theirs: Callable, rounds: int, group, prepare=None) -> dict:
    """Return {side: [(seconds, CPU seconds) of each round]} on a rank; the sides of SIDES take
    turns.

    prepare: a function of "ours" or "theirs" that runs before each call and is not timed.
    """
    taken = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in taken if turn % 2 else reversed(taken):
            whose, step = ("ours", ours) if side == "ours" else ("theirs", theirs)
            if prepare:
                prepare(whose)
            with SIDES[side]():
                group.barrier().wait()
                taken[side].append(timed(step))
    return taken


def in_turn_with_torchrun(ours: Callable, theirs: Callable, rounds: int, group) -> dict:
    """Do the same as `in_turn`, with theirs in separate processes.

    theirs: lets this rank's counterpart there take a step, and returns the two times that it took
    (_torchrun.py).
    """
    sides = {"ours": lambda: timed(ours), "theirs": theirs}
    taken = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn % 2 else reversed(sides):
            group.barrier().wait()
            taken[side].append(sides[side]())
    return taken


def timed(step: Callable) -> tuple[float, float]:
    """Return the seconds and CPU seconds of a step."""
    start = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def of_all_ranks(results: list[dict], of_ranks: Callable = max, kind: int = 0) -> dict:
    """Summarize `in_turn` over all ranks as {side: ms}: the median over the rounds of the slowest
    rank's time, or with `sum` and kind 1 of all ranks' CPU time."""
    return {
        side: 1e3
        * statistics.median(
            of_ranks(sample[kind] for sample in moment)
            for moment in zip(*[rank[side] for rank in results])
        )
        for side in results[0]
    }


def step_cases(name: str, medians: dict, bar: float | None, unit: str = "ms") -> Iterator[Case]:
    """Yield a row with the bar. If theirs was also measured with our threads, yield a second row
    with its own bar: with equal threads we want to be no slower."""
    ours = medians["ours"]
    for side, theirs in medians.items():
        if side != "ours":
            title, its_bar = (name, bar) if side == "theirs" else (f"{name}: {side}", bar and 1.0)
            yield Case(title, lambda: ours, theirs, its_bar, unit, repeats=1, warmup=0)


def peak_allocated(run: Callable) -> int:
    """Return the peak of bytes that `run()` has allocated, above the bytes held before it.

    It covers the main thread and autograd's threads, because torch's profiler does not see into a
    thread that Python started.
    """
    from torch.profiler import profile

    with profile(profile_memory=True) as seen:
        run()
    held = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def machine() -> dict:
    """Describe the machine of the figures: cores, memory, versions, and load."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu():
    info = Path("/proc/cpuinfo")
    names = info.read_text().partition("model name")[2] if info.exists() else ""
    return names.partition(":")[2].partition("\n")[0].strip() or platform.processor()


def _version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(rows: list[dict]) -> str:
    """Return the rows as text, one line per case. A row that misses its bar says so."""
    lines = [("case", "ours", "theirs", "unit", "ratio", "bar", "")]
    for row in rows:
        bar = "" if row["bar"] is None else f"<= {row['bar']:g}"
        verdict = "" if row["bar"] is None else "ok" if row["ok"] else "MISSED"
        numbers = f"{row['ours']:,.4g}", f"{row['theirs']:,.4g}", row["unit"], f"{row['ratio']:.3g}"
        lines.append((row["case"], *numbers, bar, verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def main(cases: Callable[[bool], Iterable[Case]], description: str, argv=None) -> int:
    """Measure `cases(long)`, print the table, write the JSON; return 0 if all bars hold, else 1."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows here")
    parser.add_argument("--long", action="store_true", help="larger sizes, more repeats")
    options = parser.parse_args(argv)

    about, rows = machine(), []
    for case in cases(options.long):
        rows.append(measure(case))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1
