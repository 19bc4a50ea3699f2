"""What a lesson's cells use on the page: show source, keep a guess, reveal the answer.

show(ring_all_reduce)                   its source, highlighted
show_diff(ZeRO1, ZeRO2)                 what a class changes in the one it inherits from
predict("bytes sent", 3_000)            before the run
reveal("bytes sent", 3_072, "bytes")    after it: guess beside measurement
fold("Answer 1", f"{16 * P:,} bytes")   a computed answer, folded away at first
"""

import ast
import difflib
import functools
import html
import inspect
import math
import textwrap
from fractions import Fraction
from numbers import Real
from pathlib import Path

# ---- show ----------------------------------------------------------------------------------------


def show(*objects):
    """Display the source of functions, classes, methods or modules, highlighted.

    The source is read from the library at this moment, so a lesson never holds a second copy of it.
    Outside a notebook it is printed. Raises TypeError for what has no Python source.
    """
    for obj in objects:
        obj = _unwrap(obj)
        where, source = _where(obj), _source(obj)
        if _shell() is None:
            print(f"# {where}\n{source}\n")
        else:
            from IPython.display import display

            # A fence in Markdown takes its colours from the page: light, dark, JupyterLab, GitHub.
            fence = "`" * (3 + 3 * ("```" in source))
            display(
                {
                    "text/markdown": f"`{where}`\n{fence}python\n{source}\n{fence}",
                    "text/plain": f"# {where}\n{source}",
                },
                raw=True,
            )


def show_diff(old, new):
    """Display what the class `new` does otherwise than `old`, from which it inherits, as a diff.

    A method that replaces the old one is shown against it; one that is new, or that begins by
    calling the old one, is all new lines.
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

        text = {"text/markdown": f"`{title}`\n```diff\n{source}\n```"}
        display({**text, "text/plain": f"# {title}\n{source}"}, raw=True)


def _unwrap(obj):
    """The thing that was written: under decorators, partials, properties; an instance's class."""
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
        # Python knows no file for a class of a notebook cell: find it in what the learner ran
        source = _class_in_a_cell(obj) if inspect.isclass(obj) else None
        if source is None:
            raise TypeError(
                f"show() needs something written in Python; {obj!r} has no source to read"
            ) from None
    return textwrap.dedent(source).rstrip()


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
    """`mini_dist/zero.py`, `torch/optim/adam.py` or `this notebook`; no path of this machine."""
    module = inspect.getmodule(obj)
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__":
        return "this notebook"
    depth = module.__name__.count(".") + 1 + (Path(file).name == "__init__.py")
    return Path(*Path(file).parts[-depth:]).as_posix()


def _shell():
    """The notebook's IPython shell, or None in a script or a terminal."""
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None


# ---- predict, reveal -----------------------------------------------------------------------------

_guesses = {}  # the learner's, by name, for as long as the kernel lives


def predict(name, value=None):
    """Keep the learner's guess under `name` until `reveal(name, ...)`; None means no guess yet."""
    _guesses[name] = value
    if value is not None:
        print(f"noted: {name} = {_format(value)}")


def reveal(name, measured, unit="", how="measured"):
    """Print what was measured and, beside it, the guess and how far off it was.

    Numbers are compared as a ratio, anything else as equal or not; a guess may be written out, as
    "3/19" or "15.8 %". `how`: what to call a number that was not measured, such as "computed".
    Raises ValueError when no cell predicted `name`.
    """
    if name not in _guesses:
        near = difflib.get_close_matches(str(name), map(str, _guesses), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "run its predict(...) cell first"
        raise ValueError(f"nothing was predicted as {name!r}; {hint}")
    measured = measured.item() if hasattr(measured, "item") else measured
    unit = f" {unit}" if unit else ""
    line = f"{name}: {how} {_format(measured)}{unit}"
    guess = _guesses[name]
    if guess is not None:
        percent = 1 if "%" in f"{name}{unit}" else 0.01
        meant = _number(guess, percent) if _is_number(measured) else guess
        line += f", your guess {_format(guess)}{unit}: {_verdict(meant, measured)}"
    print(line)


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
    """A number that was written out, as a number; whatever else it is, as it is."""
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
    """Show `summary`, and the paragraphs below it only when the learner opens it.

    Outside a notebook all of it is printed.
    """
    text = "\n".join([summary, *paragraphs])
    if _shell() is None:
        print(text)
        return
    from IPython.display import display

    body = "".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
    page = f"<details><summary>{html.escape(summary)}</summary>{body}</details>"
    display({"text/html": page, "text/plain": text}, raw=True)
