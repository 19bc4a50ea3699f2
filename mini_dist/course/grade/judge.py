"""A worker that judges answers: it hands each pickle to the ranks and never opens one itself.

The job: {"answers": {exercise: base64 of a pickle}}. For each it says {"judged": exercise, "state":
..., "lines": [[what, measured, expected, mark]], "hint": ...}.

This process is the one whose word counts, so nothing of the learner's runs in it. Ranks answer with
pickles; here, loading one may build plain data and nothing else (`only_data`). It cannot be looked
into by others in the sandbox, and what it says goes through a pipe that it passes on to nobody.
"""

from __future__ import annotations

import base64
import ctypes
import dataclasses
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping

from mini_dist.ranks.launch import launch, warm_up
from mini_dist.ranks.transport import rebuild_tensor

from ..check import Verdict, adversities, exercises
from ..check.clinic import Clinic
from ..check.engine import LIBRARY, RIGHT, WRONG, watched
from ..check.watch import calls_of, learners, made_before
from .inside import PR_SET_DUMPABLE

# Seconds until a run that does not end is given up: no right answer is to fall to a busy machine.
PATIENCE = 60
MOST = 4_000  # letters of what is said: a learner's exception may have any number
DATA = {
    ("mini_dist.ranks.rank", "Report"),
    ("mini_dist.ranks.rank", "Failure"),
    ("mini_dist.ranks.transport", rebuild_tensor.__name__),
    ("mini_dist.plan.config", "Layout"),
    ("mini_dist.plan.schedule.action", "Action"),
    ("mini_dist.plan.schedule.action", "Schedule"),
    ("mini_dist.strategies.expert_parallel.ideas", "Dispatched"),
    ("torch", "Size"),
    ("torch._utils", "_rebuild_parameter"),
    ("collections", "OrderedDict"),
    ("collections", "Counter"),
    ("collections", "defaultdict"),
    *(("builtins", name) for name in ("set", "frozenset", "list", "dict", "int", "complex")),
    *(("builtins", name) for name in ("slice", "range", "bytearray")),
}


SIMULATED = {  # where the records are defined that a simulated rank returns
    "mini_dist.ranks.ledger.counting",
    "mini_dist.ranks.ledger.memory",
    "mini_dist.ranks.simulation.kinds",
    "mini_dist.ranks.simulation.one_rank",
}


class NotData(pickle.UnpicklingError):
    """A rank has answered with something that is more than data."""


def is_data(module: str, name: str) -> bool:
    """Whether a pickle from a rank may name this: types of plain data, torch's dtypes, the records
    that trials of mini_dist.course.check return, and those of a simulated rank."""
    if (module, name) in DATA:
        return True
    found = getattr(sys.modules.get(module), name, None) if "." not in name else None
    if module == "torch":
        return type(found) is type(sys.modules["torch"].float32)
    record = dataclasses.is_dataclass(found) or isinstance(found, type) and issubclass(found, tuple)
    known = module.startswith("mini_dist.course.check.") or module in SIMULATED
    return known and isinstance(found, type) and record


def only_data(event: str, args: tuple) -> None:
    if event == "pickle.find_class" and not is_data(*args):
        raise NotData(
            f"what it returns holds {args[0]}.{args[1]}: numbers, texts, tensors and the types "
            "that the exercise names can be judged"
        )


class Reader(pickle._Unpickler):
    """Reads a pickle as ever, but that it changes no type and no function: pickle's BUILD would set
    whatever attribute of whatever was named, and so change what this process believes in."""

    dispatch = dict(pickle._Unpickler.dispatch)

    def load_build(self):
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):
            raise NotData("what it returns would change a type")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read(data, **options):
    """In place of `pickle.loads`."""
    return Reader(io.BytesIO(data), **options).load()


UNSEAL = pickle.loads  # (as it is on a rank)


class Sealed:
    """A learner's function that nobody has opened: on a rank it becomes the function."""

    def __init__(self, name: str, data: bytes):
        self.__name__, self.data = name, data

    def __reduce__(self):
        return UNSEAL, (self.data,)

    def __call__(self, *args):
        raise RuntimeError("a sealed function is called on ranks only")

    def asked(self, args: tuple, refuses, facts) -> tuple[object, set[str]]:
        """What the function answers, on a rank, and which of `refuses` it has called."""
        given = call, self, args, refuses, facts
        ((came, called),) = launch(watched, 1, given, device="cpu", quiet=True).results
        return came, called


def call(fn, args: tuple, group):
    return fn(*args)


def seen_made_before(fn, kinds: tuple[type, ...], group) -> str:
    return made_before(fn, kinds)


def judge(name: str, data: bytes) -> Verdict:
    exercise, fn = exercises()[name], Sealed(name, data)
    try:
        if isinstance(exercise, Clinic):  # its answers are no ranks' work
            return from_the_clinic(exercise, data)
        if exercise._makes:
            how = dict(device="cpu", quiet=True)
            (found,) = launch(seen_made_before, 1, (fn, exercise._makes), **how).results
            if found:
                return exercise.told_made_before(found)
        return exercise.judge(fn)
    except Exception as error:  # such as what a rank has sent that is no answer
        return Verdict(name, WRONG, hint=f"{type(error).__name__}: {error}")


def from_the_clinic(exercise: Clinic, data: bytes) -> Verdict:
    """Have another process find the answers, and judge these."""
    command = [sys.executable, "-m", "mini_dist.course.grade.judge", exercise.name]
    found = subprocess.run(command, input=data, capture_output=True, timeout=300)
    try:
        said = json.loads(found.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = found.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return Verdict(exercise.name, WRONG, hint=" ".join(["Your function raised", *last]))
    if said["before"]:
        return exercise.told_made_before(said["before"])
    if said["called"]:
        return Verdict(exercise.name, LIBRARY, hint="These are the clinic's own.")
    answers = said["answers"]
    return exercise.judge(lambda: answers)


def answers_of(name: str) -> None:
    """In that other process: call the learner's function, and print what it answers."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    exercise, fn = exercises()[name], pickle.loads(sys.stdin.buffer.read())
    before = made_before(fn, exercise._makes)
    with calls_of(exercise._refuses) as called:
        answers = None if before else learners(fn)
    answers = dict(answers) if isinstance(answers, Mapping) else answers
    said = {"before": before, "called": bool(called), "answers": answers}
    print(
        json.dumps(said, default=lambda x: list(x) if hasattr(x, "__iter__") else int(x)), file=out
    )


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    out = os.fdopen(os.dup(1), "w")  # (not inherited: PEP 446)
    os.dup2(2, 1)
    adversities.SECONDS = PATIENCE
    exercises()  # all modules are there before what may be loaded is narrowed down
    pickle.loads = read
    sys.addaudithook(only_data)
    warm_up()
    job = json.load(sys.stdin)
    for name, data in job["answers"].items():
        verdict = judge(name, base64.b64decode(data))
        lines = [
            [str(part)[:MOST] for part in (line.what, line.measured, line.expected, line.mark)]
            for line in verdict.lines
        ]
        state = {RIGHT: "right", WRONG: "wrong", LIBRARY: "untouched"}[verdict.state]
        said = dict(judged=name, state=state, lines=lines, hint=verdict.hint[:MOST])
        print(json.dumps(said), file=out, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answers_of(sys.argv[1])
    else:
        main()
