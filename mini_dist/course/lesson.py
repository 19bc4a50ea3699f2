"""What a lesson's cells use: show source, store a guess, reveal the answer.

    show(ring_all_reduce)                   its source, highlighted
    show_diff(ZeRO1, ZeRO2)                 what a class changes compared with its base class
    predict("bytes sent", 3_000)            before the run
    reveal("bytes sent", 3_072, "bytes")    after it: the guess and the measurement
    fold("Answer 1", f"{16 * P:,} bytes")   a computed answer, folded at first
    with raises(RankError): launch(crash)   show the error that ends the block, and continue
    calm(longest < 3 * median, "...")       report if a busy machine has spoilt the times above
    for n in bar(sizes): ...                a bar, if a person watches; a long cell shows its time

Outside a notebook, `show`, `show_diff` and `fold` print plain text.
"""

import ast
import difflib
import functools
import html
import importlib.util
import inspect
import math
import re
import sys
import textwrap
import threading
import time
from contextlib import contextmanager
from fractions import Fraction
from numbers import Real
from pathlib import Path

from . import learner
from .language import said

# ---- show ----------------------------------------------------------------------------------------


def show(*objects):
    """Display the source of functions, classes, methods or modules, highlighted.

    The source is read from the library at that moment, so a lesson never contains a second copy.
    Outside a notebook it is printed. Raises TypeError for an object without Python source.
    """
    learner.note()
    for obj in objects:
        obj = _unwrap(obj)
        _display_source(_where(obj), _source(obj))


def _display_source(where: str, source: str) -> None:
    if _shell() is None:
        print(f"# {where}\n{source}\n")
    else:
        from IPython.display import display

        text = _fenced(where, "python", source)
        display({"text/markdown": text, "text/plain": f"# {where}\n{source}"}, raw=True)


def _fenced(title: str, language: str, source: str) -> str:
    """Return Markdown of code under its title.

    A fence takes its colors from the page: light, dark, JupyterLab, GitHub. nbconvert's pages
    would use the surrounding font, so the fence asks for a monospaced one.
    """
    fence = "`" * (3 + 3 * ("```" in source))
    code = f"`{title}`\n{fence}{language}\n{source}\n{fence}"
    return f'<div style="font-family: monospace">\n\n{code}\n\n</div>'


def show_to_paste(*objects, name: str = ""):
    """Display source that runs in a separate cell, see `to_paste`."""
    _display_source(_where(_unwrap(objects[0])), to_paste(*objects, name=name))


def to_paste(*objects, name: str = "") -> str:
    """Return the source of functions and classes as a person would type it: with the imports that
    it needs, without the library's own decorators. name: a new name for the last one."""
    objects = [_unwrap(obj) for obj in objects]
    own, homes, sources = {obj.__name__ for obj in objects}, {}, []
    for obj in objects:
        source = _source(obj)
        (node,) = ast.parse(source).body
        sources.append("\n".join(source.splitlines()[node.lineno - 1 :]))  # (below decorators)
        module = inspect.getmodule(obj)
        imported = _imported(module)
        for used in _free(node) & {*vars(module)} - own:
            package, what = imported.get(used) or (_shortest(module.__name__, used), used)
            homes.setdefault(package, set()).add(what)
    body = "\n\n\n".join(sources)
    if name:
        body = re.sub(rf"\b{objects[-1].__name__}\b", name, body)
    head = [f"import {what}" for what in sorted(homes.pop("", ()))]
    head += [
        f"from {home} import {', '.join(sorted(names))}" for home, names in sorted(homes.items())
    ]
    return "\n".join([*head, "", "", body]) if head else body


def _free(node) -> set[str]:
    """Return the names that a definition uses and does not define, except its own parameters."""
    node.decorator_list = []
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    made = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    made |= {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return {n.id for n in names} - made


@functools.cache
def _imported(module) -> dict[str, tuple[str, str]]:
    """Return name -> (module, name there), from the module's import lines; "" for `import ...`."""
    found = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        for alias in getattr(node, "names", []) if not isinstance(node, ast.Global) else ():
            name = alias.asname or alias.name
            what = f"{alias.name} as {name}" if alias.asname else name
            if isinstance(node, ast.Import):
                found[name] = "", what
            elif isinstance(node, ast.ImportFrom):
                relative = "." * node.level + (node.module or "")
                home = importlib.util.resolve_name(relative, module.__package__)
                found[name] = _shortest(home, alias.name), what
    return found


def _shortest(home: str, name: str) -> str:
    """Return the outermost package that has, under this name, the same object as `home`."""
    value = getattr(sys.modules.get(home), name, None)
    parents = [home.rsplit(".", n)[0] for n in range(home.count(".") + 1)]
    same = [p for p in parents if getattr(sys.modules.get(p), name, None) is value]
    return same[-1] if value is not None and same else home


def show_diff(old, new):
    """Display how the class `new` differs from its base class `old`, as a diff.

    A method that replaces the old one is shown as a diff; a new method, or one that begins by
    calling the old one, is shown as new lines.
    """
    lines = []
    for name, method in vars(new).items():
        if not inspect.isfunction(method):
            continue
        after = inspect.getsource(method).rstrip().splitlines()
        before = []
        if hasattr(old, name) and "super()" not in inspect.getsource(method):
            before = inspect.getsource(getattr(old, name)).rstrip().splitlines()
        changed = difflib.ndiff(before, after)
        lines += [*(line[:2] + line[6:] for line in changed if line[0] != "?"), ""]
    source = "\n".join(lines).rstrip()
    title = f"{old.__name__} -> {new.__name__}"
    if _shell() is None:
        print(f"# {title}\n{source}\n")
    else:
        from IPython.display import display

        text = _fenced(title, "diff", source)
        display({"text/markdown": text, "text/plain": f"# {title}\n{source}"}, raw=True)


def _unwrap(obj):
    """Return the written object: under decorators, partials, properties; an instance's class."""
    if isinstance(obj, functools.partial):
        return _unwrap(obj.func)
    if isinstance(obj, property):
        return _unwrap(obj.fget)
    if callable(obj) and hasattr(obj, "__wrapped__"):
        return inspect.unwrap(obj)
    written = (inspect.isroutine, inspect.isclass, inspect.ismodule, inspect.iscode)
    return obj if any(is_one(obj) for is_one in written) else type(obj)


def _source(obj):
    try:
        source = inspect.getsource(obj)
    except (OSError, TypeError):
        # Python knows no file for a class in a notebook cell, so search the cells that were run.
        source = _class_in_a_cell(obj) if inspect.isclass(obj) else None
        if source is None:
            raise TypeError(
                f"show() needs something written in Python; {obj!r} has no source to read"
            ) from None
    # Every public function checks the kinds of its arguments (fields.py): do not show that line.
    return re.sub(r"^@checks_kinds.*\n", "", textwrap.dedent(source)).rstrip()


def _class_in_a_cell(cls):
    shell = _shell()
    for cell in reversed(shell.user_ns.get("In", []) if shell else []):
        code = shell.transform_cell(cell)  # magics become Python
        try:
            nodes = ast.walk(ast.parse(code))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                return "\n".join(code.splitlines()[first - 1 : node.end_lineno])
    return None


def _where(obj):
    """Return where an object is written, as `torch/optim/adam.py` or `this notebook`."""
    module = inspect.getmodule(obj)
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return "this notebook"
    depth = module.__name__.count(".") + 1 + (Path(file).name == "__init__.py")
    return Path(*Path(file).parts[-depth:]).as_posix()


def _shell():
    """Return the notebook's IPython shell, or None in a script or a terminal."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None


# ---- predict, reveal -----------------------------------------------------------------------------

_guesses = {}  # the learner's guesses, by name, as long as the kernel lives


def predict(name, value=None, *more):
    """Store the learner's guess as `name` until `reveal(name, ...)`; None means no guess yet.
    Raises TypeError for several values, as in predict(name, 2,5)."""
    if more:
        raise TypeError(f"give one guess, with a decimal point: {value}.{more[0]}, say")
    _guesses[name] = value
    if value is not None:
        learner.note(guess=(str(name), value))
        print(said(f"noted: {name} = {_format(value)}"))


def reveal(name, measured, unit="", how="measured"):
    """Print the measured value, the guess, and how far off the guess was.

    Numbers are compared as a ratio, anything else as equal or not; a guess may also be text such as
    "3/19" or "15.8 %". `how`: the word for a number that was not measured, such as "computed".
    Raises ValueError if no cell predicted `name`.
    """
    if name not in _guesses:
        near = difflib.get_close_matches(str(name), map(str, _guesses), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "run its predict(...) cell first"
        raise ValueError(f"nothing was predicted as {name!r}; {hint}")
    measured = measured.item() if hasattr(measured, "item") else measured
    unit = f" {unit}" if unit else ""
    learner.note()
    line = f"{name}: {how} {_format(measured)}{unit}"
    guess = _guesses[name]
    if guess is not None:
        percent = 1 if "%" in f"{name}{unit}" else 0.01
        meant = _number(guess, percent) if _is_number(measured) else guess
        line += f", your guess {_format(guess)}{unit}: {_verdict(meant, measured)}"
    print(said(line))


def _verdict(guess, measured):
    if not _is_number(measured):
        same = str(guess).strip().lower() == str(measured).strip().lower()
        return "right" if same else "not this time"
    if not _is_number(guess):
        return f"expected a number, not {guess!r}"
    if guess == measured:
        return "exactly right"
    if measured == 0 or guess == 0 or (guess < 0) != (measured < 0):
        return f"off by {_format(guess - measured)}"
    side = "high" if abs(guess) > abs(measured) else "low"
    factor = max(guess / measured, measured / guess)
    if factor < 1.01:
        return "right within 1 %"
    if factor < 2:
        return f"{abs(guess / measured - 1):.0%} too {side}".replace("%", " %")
    return f"{factor:.3g} times too {side}"


def _number(guess, percent):
    """Convert a number given as text; return anything else unchanged."""
    text = guess.replace(" ", "") if isinstance(guess, str) else ""
    try:
        return percent * float(text[:-1]) if text.endswith("%") else float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        return guess


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool)


def _format(value):
    if not _is_number(value):
        return str(value)
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and value < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


# ---- fold ----------------------------------------------------------------------------------------


def fold(summary, *paragraphs):
    """Show `summary`, with the paragraphs folded below it until the learner opens them."""
    text = "\n".join([summary, *paragraphs])
    if _shell() is None:
        print(text)
        return
    from IPython.display import display

    body = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
    page = f"<details><summary>{html.escape(summary)}</summary>{body}</details>"
    display({"text/html": page, "text/plain": text}, raw=True)


# ---- raises --------------------------------------------------------------------------------------


@contextmanager
def raises(kind):
    """Show the error of this `kind` that ends the block, as its cell would, and continue.

    Papermill, and so a grader, treats an error at the end of a cell as the notebook's failure,
    expected or not. Errors of other kinds are raised as usual. If the block ends without an error,
    this only prints a note, because the learner may have fixed it; our build and tests refuse it.
    """
    try:
        yield
    except kind as error:
        sys.stdout.flush()  # earlier output must appear first
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    else:
        print(said(f"{kind.__name__} was expected here, but nothing was raised."))


# ---- calm ----------------------------------------------------------------------------------------


def calm(holds: bool, rule: str) -> None:
    """Report times that break a `rule` which holds on a machine with nothing else to do.

    The learner runs the cell again; our build runs the notebook again, and finally refuses it.
    """
    if not holds:
        spoilt = f"A busy machine has spoilt these times: {rule} does not hold."
        print(said(f"{spoilt} Run the cell once more."))


# ---- long cells ----------------------------------------------------------------------------------


def bar(items, unit="it"):
    """Iterate over `items`, with a progress bar if a person has the notebook open.

    nbval, papermill and the build see no bar, so compared outputs stay the same.
    """
    from tqdm import tqdm

    CLOCK.end()
    is_read = bool(learner.open_notebook())
    below = LineBelow() if is_read else None
    return tqdm(items, unit=unit, leave=False, disable=not is_read, file=below)


class LineBelow:
    """A file whose newest line stands below the cell, in an output of its own that becomes empty at
    the end. (A line that is erased on stderr leaves a red band.)"""

    def __init__(self):
        self.shown = None

    def write(self, text):
        from IPython.display import display

        line = {"text/plain": text.replace("\r", "").strip()}
        if self.shown is not None:
            self.shown.update(line, raw=True)
        elif line["text/plain"]:
            self.shown = display(line, raw=True, display_id=True)

    def flush(self):
        """Do nothing: each line is shown at once."""


class Clock:
    """Show below a cell how long it has been running; vanish when the cell is done."""

    PATIENCE = 3.0  # seconds

    def __init__(self):
        self.done, self.thread = threading.Event(), None

    def begin(self, *_):
        self.end()  # a cell may run another one
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.show, args=(self.done,), daemon=True)
        self.thread.start()

    def end(self, *_):
        self.done.set()
        if self.thread is not None:
            self.thread.join()

    def show(self, done):
        began, line, wait = time.monotonic(), LineBelow(), self.PATIENCE
        while not done.wait(wait):
            seconds, wait = int(time.monotonic() - began), 1
            line.write(said(f"This cell has been running for {seconds} s."))
        line.write("")


CLOCK = Clock()
if _shell() is not None and learner.open_notebook():
    _shell().events.register("pre_run_cell", CLOCK.begin)
    _shell().events.register("post_run_cell", CLOCK.end)
