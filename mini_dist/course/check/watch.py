"""Note which functions the learner's code calls, as they run.

The code that runs counts, not its name: an alias or a partial calls the same code. If a function
that the learner may use calls something in the library, that is not the learner's call.
"""

from __future__ import annotations

import dis
import inspect
import os
import pkgutil
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType

import torch

from mini_dist.collectives import collective
from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.ledger.group import RecordedWork

LIBRARY = str(Path(__file__).parents[2]) + os.sep
# Frames of files in these folders only pass calls on.
AROUND = (
    sysconfig.get_paths()["stdlib"] + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
)
# The wrappers that `recorded`, `collective` and `checks_kinds` add do no work of their own.
DECORATED, CHECKED = collective(lambda group: None), checks_kinds(lambda: None)
DECORATORS = {DECORATED.__code__, DECORATED.__wrapped__.__code__, CHECKED.__code__}


def learners(fn: Callable, *args, **kwargs):
    """Call the learner's function; this frame represents the learner if `fn` is the library's."""
    return fn(*args, **kwargs)


def functions_of(*modules: ModuleType) -> set[Callable]:
    """Return all functions defined in these modules, and in modules inside packages."""
    found = set()
    for module in modules:
        inside = pkgutil.iter_modules(getattr(module, "__path__", []), f"{module.__name__}.")
        for each in [module, *(import_module(info.name) for info in inside)]:
            for function in map(inspect.unwrap, filter(callable, vars(each).values())):
                if isinstance(function, FunctionType) and function.__module__ == each.__name__:
                    found.add(function)
    return found


@contextmanager
def handles_kept() -> Iterator[dict[int, tuple]]:
    """Yield {id of a ledger row: (torch's handle, operation)} of what nobody has waited for.

    A message is delivered even if its handle is dropped. In torch it may be lost, and then its
    receiver waits forever; here the run ends, and the judge can report it."""
    kept = {}
    names = "__init__", "wait", "is_completed", "get_future"
    whole = {name: getattr(RecordedWork, name) for name in names}

    def init(handle, *args) -> None:
        whole["__init__"](handle, *args)
        kept[id(handle._row)] = handle._work, handle._row[0]

    def wait(handle, *args, **kwargs) -> bool:
        kept.pop(id(handle._row), None)
        return whole["wait"](handle, *args, **kwargs)

    def is_completed(handle) -> bool:
        if done := whole["is_completed"](handle):
            kept.pop(id(handle._row), None)
        return done

    def get_future(handle):
        kept.pop(id(handle._row), None)  # whoever has the future waits for it: DDP does
        return whole["get_future"](handle)

    for name, method in zip(names, (init, wait, is_completed, get_future)):
        setattr(RecordedWork, name, method)
    try:
        yield kept
    finally:
        for name, method in whole.items():
            setattr(RecordedWork, name, method)


@contextmanager
def started_when_possible(recorder) -> Iterator[None]:
    """Record as a message's start the end of the last message that its thread knows about.

    So the program itself decides what had to wait for what, not a scheduler that starts a thread
    late. A thread begins with the knowledge of the thread that started it or gave it work. A thread
    that joins it, or asks for its result, learns what it knows.
    """
    here, began = threading.local(), time.time()
    start, join = threading.Thread.start, threading.Thread.join
    submit, result = ThreadPoolExecutor.submit, Future.result
    wait, is_completed, begin = RecordedWork.wait, RecordedWork.is_completed, recorder.begin

    def known() -> float:
        return getattr(here, "known", began)

    def learn(moment: float | None) -> None:
        here.known = max(known(), moment or began)

    def for_a_thread(function: Callable, back: list[float]) -> Callable:
        given = known()

        def run(*args, **kwargs):
            learn(given)
            try:
                return function(*args, **kwargs)
            finally:
                back.append(known())

        return run

    def begun(*args, **kwargs):
        row = begin(*args, **kwargs)
        row[5] = known()
        return row

    def started(thread):
        thread.back = []
        thread.run = for_a_thread(thread.run, thread.back)
        return start(thread)

    def submitted(pool, function, /, *args, **kwargs):
        back = []
        future = submit(pool, for_a_thread(function, back), *args, **kwargs)
        future.back = back
        return future

    def then_learn(function: Callable, what: Callable) -> Callable:
        def call(self, *args, **kwargs):
            value = function(self, *args, **kwargs)
            learn(what(self))
            return value

        return call

    def of_the_thread(thread) -> float:
        return max(getattr(thread, "back", None) or [began])

    def of_the_message(work) -> float | None:
        return work._row[6]

    threading.Thread.start, ThreadPoolExecutor.submit = started, submitted
    threading.Thread.join, Future.result = (then_learn(f, of_the_thread) for f in (join, result))
    RecordedWork.wait = then_learn(wait, of_the_message)
    RecordedWork.is_completed = then_learn(is_completed, of_the_message)
    recorder.begin = begun
    try:
        yield
    finally:
        threading.Thread.start, threading.Thread.join = start, join
        ThreadPoolExecutor.submit, Future.result = submit, result
        RecordedWork.wait, RecordedWork.is_completed = wait, is_completed
        recorder.begin = begin


@contextmanager
def calls_of(functions: Iterable[Callable]) -> Iterator[set[str]]:
    """Yield the names of the functions that the learner's code has called, in any thread."""
    codes = {}
    for function in functions:
        plain = inspect.unwrap(function)
        codes[plain.__code__] = plain.__qualname__
    called, before = set(), (sys.getprofile(), threading.getprofile())

    def note(frame: FrameType, event: str, _) -> None:
        if event == "call" and frame.f_code in codes and is_learners(frame.f_back):
            called.add(codes[frame.f_code])

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def is_learners(frame: FrameType | None) -> bool:
    """Return whether a call comes from the learner's code, or directly from a thread that it
    started; frames that only pass it on, such as torch's and decorators', are skipped."""
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code is learners.__code__:
            return True
        if frame.f_code not in DECORATORS and file.startswith(LIBRARY):
            return False
        if not file.startswith((LIBRARY, *AROUND)):
            return True
        frame = frame.f_back
    return True


def made_before(
    value,
    kinds: tuple[type, ...],
    seen: set[int] | None = None,
    counts: Callable[[object], bool] = lambda held: True,
) -> str:
    """Return the name by which a function, or a function that it calls, reaches an object of these
    kinds that was made before the call; "" if there is none.

    counts: whether such an object matters. Objects inside modules and in the library are skipped.
    """
    seen = set() if seen is None else seen
    for name, held in within(value) if kinds else ():
        if id(held) not in seen:
            seen.add(id(held))
            if isinstance(held, kinds) and counts(held):
                return name
            if found := made_before(held, kinds, seen, counts):
                return name if found == INSIDE else found
    return ""


INSIDE = "something"  # for an object without a name of its own


def within(value) -> Iterator[tuple[str, object]]:
    """Yield what a value holds, with its name if it has one."""
    if isinstance(value, FunctionType):
        code = value.__code__
        if not code.co_filename.startswith((LIBRARY, *AROUND)):
            names = global_names(code) & {*value.__globals__}
            yield from ((name, value.__globals__[name]) for name in sorted(names))
            defaults = value.__defaults__ or ()
            yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults)
            yield from (value.__kwdefaults__ or {}).items()
            for name, cell in zip(code.co_freevars, value.__closure__ or ()):
                with suppress(ValueError):  # the cell is empty
                    yield name, cell.cell_contents
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        values = value.values() if isinstance(value, dict) else value
        yield from ((INSIDE, held) for held in values)
    elif isinstance(value, partial):
        yield from ((INSIDE, held) for held in (value.func, value.args, value.keywords))
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield INSIDE, value.__self__
        yield INSIDE, getattr(value, "__func__", None)
    elif isinstance(value, type):
        if is_learners_class(value):
            yield from ((INSIDE, held) for held in vars(value).values())
    elif not isinstance(value, ModuleType):
        yield INSIDE, type(value)
        yield from ((INSIDE, held) for held in getattr(value, "__dict__", {}).values())


def is_learners_class(value: type) -> bool:
    file = getattr(sys.modules.get(value.__module__), "__file__", None) or ""
    return value.__module__ != "builtins" and not file.startswith((LIBRARY, *AROUND))


def global_names(code: CodeType) -> set[str]:
    """Return the global names that a function, and all functions inside it, look up."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return own.union(*(global_names(each) for each in code.co_consts if isinstance(each, CodeType)))
