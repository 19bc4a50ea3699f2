"""One training run for all frameworks: the same model, weights, data and optimizer, counted alike.

A framework's file has functions `train(..., batches, group)` that take from `batches(rank, size)`
this rank's share of each step and return its losses.  `measure` launches them and reads the ledger,
the kernel's count of the sockets and the memory record, the same for everyone.
"""

from __future__ import annotations

import ast
import gc
import inspect
import io
import statistics
import time
import tokenize
import warnings
from collections.abc import Callable, Iterator

import torch

from mini_dist.model.data import Batches, load_text
from mini_dist.plan.calculators import num_parameters
from mini_dist.plan.config import ModelConfig
from mini_dist.ranks.launch import launch
from mini_dist.ranks.ledger.memory import MemoryRecorder
from mini_dist.ranks.ledger.wire import wire_bytes

# A small Llama: what all of these frameworks can build.
CONFIG = ModelConfig(
    num_layers=4,
    d_model=64,
    num_heads=4,
    seq_len=32,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
RANKS, BATCH, STEPS = 4, 8, 3
PSI = num_parameters(CONFIG)


def adamw(parameters) -> torch.optim.Optimizer:
    """Return an AdamW whose eps is far above a gradient, so its steps grow with the gradient.

    With the usual eps of 1e-8, a step hardly depends on the size of the gradient: multiplying all
    gradients by 4 changes the third loss by 2e-6, and a wrong factor would go unnoticed.
    """
    return torch.optim.AdamW(parameters, lr=0.1, eps=1.0)


class Meter:
    """This rank's batches; notes times and the kernel's count at the start of each step."""

    def __init__(self, group, steps: int = STEPS):
        self.group, self.steps, self.marks = group, steps, []

    def __call__(self, rank: int, size: int, micro: int = 0) -> Iterator:
        """(inputs, targets) [B/size, S] of each step; or a list of such, of `micro` rows each."""
        batches = Batches(load_text(), BATCH, CONFIG.seq_len, rank=rank, size=size)
        for step in range(self.steps):
            self.mark()
            inputs, targets = batches.batch(step)
            if micro:
                yield list(zip(inputs.split(micro), targets.split(micro)))
            else:
                yield inputs, targets
        self.mark()

    def mark(self) -> None:
        self.group.barrier().wait()
        clocks = time.time(), time.perf_counter(), time.process_time()
        self.marks.append((*clocks, wire_bytes()))


def metered(runs: dict, group) -> list[tuple]:
    """On a rank, of each run: its losses, the marks between steps, the peak of memory, the axes.

    The peak is of two steps of a second time, since to look at every operation takes its time.
    """
    warnings.simplefilter("ignore")  # each framework's, about others that are missing
    rows, recorder = [], group.recorder
    own_axes = dict(recorder.axes)
    for train, *args in runs.values():
        recorder.axes = dict(own_axes)
        meter = Meter(group)
        losses = train(*args, meter, group)
        # by ranks, as a later run may call the same group otherwise; of two names the first
        named = reversed(recorder.axes.items())
        axes = {tuple(recorder.groups[name]): axis for name, axis in named}
        gc.collect()
        memory = MemoryRecorder(recorder.phases)
        with memory.hooks(), memory:
            train(*args, Meter(group, steps=2), group)
        rows.append((losses, meter.marks, memory.export().peak_bytes(), axes))
        gc.collect()
    return rows


def measure(runs: dict[str, tuple]) -> list[dict]:
    """What training runs did, {name: (train, *arguments)}, in one launch: a row of plain data each.

    losses: of each step, the mean over the ranks that know it. sent: bytes of all ranks in a step,
    by the ledger; sent_by: the same by axis and operation. on_sockets: by the kernel, None where
    nobody counts. peak: bytes of tensors, most on a rank, in two steps. seconds: of
    a step, the slowest rank. cpu_seconds: of all ranks together in a step, which others on the
    machine hardly change. lines: of code, of `train` and what it calls in its file. The
    first step sets things up, and is not in the bytes and seconds.
    """
    run = launch(metered, RANKS, (runs,), timeout=600, quiet=True)
    return [
        row_of(name, runs[name][0], of_ranks, run.ledger)
        for name, of_ranks in zip(runs, zip(*run.results))
    ]


def row_of(name: str, train: Callable, of_ranks: tuple, ledger) -> dict:
    all_losses, marks, peaks, axes = zip(*of_ranks)
    known = [losses for losses in all_losses if losses and losses[0] is not None]
    by: dict[str, float] = {}
    for comm in ledger.leaves():
        if marks[comm.rank][1][0] <= comm.start < marks[comm.rank][-1][0] and comm.sent:
            *_, outermost = comm.within()
            key = f"{axes[comm.rank].get(comm.group, comm.axis)} {outermost.op}"
            by[key] = by.get(key, 0) + comm.sent / (STEPS - 1)
    times = [[mark[1] for mark in of_rank] for of_rank in marks]
    took = [max(t[i + 1] - t[i] for t in times) for i in range(1, STEPS)]
    busy = sum(of_rank[-1][2] - of_rank[1][2] for of_rank in marks) / (STEPS - 1)
    counted = all(of_rank[1][3] for of_rank in marks)
    on_sockets = counted and sum(m[-1][3][0] - m[1][3][0] for m in marks) / (STEPS - 1)
    return {
        "name": name,
        "losses": [round(sum(step) / len(known), 6) for step in zip(*known)],
        "sent": sum(by.values()),
        "sent_by": dict(sorted(by.items())),
        "on_sockets": on_sockets or None,
        "peak": max(peaks),
        "seconds": statistics.median(took),
        "cpu_seconds": busy,
        "lines": num_lines(train),
    }


def num_lines(function: Callable) -> int:
    """Lines of code of a function and of what it calls in its own file.

    As they stand in the source, without comments, blank lines and docstrings.
    """
    return sum(len(code_lines(inspect.getsource(each))) for each in called(function))


def called(function: Callable) -> list[Callable]:
    """A function, and all functions and classes of its file that it names, and they."""
    found, module = [function], inspect.getmodule(function)
    for each in found:
        for node in ast.walk(ast.parse(inspect.getsource(each))):
            other = getattr(module, node.id, None) if isinstance(node, ast.Name) else None
            if getattr(other, "__module__", None) == module.__name__ and other not in found:
                found.append(other)
    return found


def code_lines(source: str) -> set[int]:
    """Numbers of the lines that hold code."""
    no_code = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*no_code, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def name_axes(group, **groups) -> None:
    """Say in the ledger what a framework's own groups are, {axis: group}."""
    for axis, of_axis in groups.items():
        if of_axis.size() > 1:
            group.recorder.axes[of_axis.name] = axis
