"""Change every printed solution in one place and see which mutants the judge refuses.

    python -m tests.course.exercises.mutate                      all exercises, all mutants
    python -m tests.course.exercises.mutate merge zigzag         some exercises
    python -m tests.course.exercises.mutate --sample 3           this many of each, by a seed
    python -m tests.course.exercises.mutate --json FILE          also write the result to FILE

A mutant is the text that `.solution()` prints with one change that a learner might make: another
operator or comparison, an index off by one, swapped arguments, a line left out or repeated, the
world instead of the group, another dtype. Some changes show only later or on another rank: a value
or the whole result stays that of the first call, only rank 0 runs a line, arguments or results are
kept, arguments are rounded. The judge should refuse every mutant. A survivor is a hole in the
judge, unless the change makes no difference: equivalent.py lists those mutants with the reason.
"""

import argparse
import ast
import copy
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from mini_dist import check

from .equivalent import EQUIVALENT

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Add, ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
WORDS = {"mean": "sum", "sum": "mean", "max": "min", "min": "max"}
TENSORS = set("x a b q kv flat gradient parameters logits table state answers before".split())
SECOND_LOOK = {"reversed", "sorted", "list", "tuple"}  # f(x) -> x
CASTS = {"float", "double", "int", "long", "to", "type_as"}
LEFT_OUT = {"detach", "clone", "contiguous", "wait", "requires_grad_", "flatten", *CASTS}
# Source of decorators that keep the first result, keep arguments or results, or round arguments.
AROUND = {
    "freeze": """
def freeze(fn, seen=[]):
    def call(*args, **kwargs):
        if not seen:
            seen.append(fn(*args, **kwargs))
        return seen[0]
    return call
""",
    "keep_what_is_given": """
def keep_what_is_given(fn, seen=[]):
    def call(*args, **kwargs):
        seen.append(args)
        return fn(*args, **kwargs)
    return call
""",
    "keep_what_is_returned": """
def keep_what_is_returned(fn, seen=[]):
    def call(*args, **kwargs):
        seen.append(fn(*args, **kwargs))
        return seen[-1]
    return call
""",
    "round_what_is_given": """
def round_what_is_given(fn):
    def rounded(value):
        if hasattr(value, "_fields"):
            return type(value)(*map(rounded, value))
        is_tensor = hasattr(value, "is_floating_point") and not hasattr(value, "optim")
        if not is_tensor or not value.is_floating_point():
            return value
        return value.bfloat16().to(value.dtype)
    return lambda *args, **kwargs: fn(*map(rounded, args), **kwargs)
""",
}


class Mutant:
    """A changed solution: `text` is its source, `what` names the change and its line."""

    def __init__(self, text: str, what: str):
        self.text, self.what = text, what


def mutants(source: str) -> list[Mutant]:
    """Return all distinct single changes of a solution's function."""
    tree, found = without_annotations(ast.parse(source)), []
    seen = {normal(tree)}
    lines = source.splitlines()
    for number, node in enumerate(ast.walk(tree)):
        for change, what in changes(node):
            mutated = copy.deepcopy(tree)
            twin = list(ast.walk(mutated))[number]
            change(twin)
            ast.fix_missing_locations(mutated)
            try:
                text = ast.unparse(mutated)
                compile(text, "<mutant>", "exec")
            except (SyntaxError, ValueError):
                continue
            if what.endswith("rank 0 only") and not names(tree) & {"group", "row"}:
                continue  # There is only one rank.
            if normal(mutated) not in seen:
                seen.add(normal(mutated))
                line = getattr(node, "lineno", 0)
                where = f" in `{lines[line - 1].strip()}`" * ("`" not in what)
                found.append(Mutant(text, what + where))
    return found + decorated(tree)


def decorated(tree: ast.Module) -> list[Mutant]:
    """Wrap the solution's function in each decorator of AROUND that applies.

    A function without tensors keeps nothing that takes up memory, and has no digits to lose."""
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    takes = {arg.arg for arg in function.args.args}
    chosen = ["freeze"] if takes else []
    if takes & TENSORS:
        chosen += ["keep_what_is_given", "round_what_is_given"]
        if any(isinstance(n, ast.Return) and n.value for n in ast.walk(function)):
            chosen += ["keep_what_is_returned"]
    return [
        Mutant(f"{AROUND[name]}\n{ast.unparse(tree)}\n{function.name} = {name}({function.name})",
               f"inside of {name}")
        for name in chosen
    ]  # fmt: skip


def without_annotations(tree: ast.AST) -> ast.AST:
    """Remove annotations: a learner writes none, and changing one has no effect."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return tree


def normal(tree: ast.AST) -> str:
    return ast.dump(tree, include_attributes=False)


def changes(node: ast.AST) -> Iterator[tuple]:
    """Yield (function that changes a copy of this node in place, name of the change)."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield lambda n: n.ops.__setitem__(0, other()), f"{other.__name__} as comparison"
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        other = OPERATORS[type(node.op)]
        yield lambda n: setattr(n, "op", other()), f"{other.__name__} as operator"
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield lambda n: setattr(n, "op", other()), f"{other.__name__} as operator"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert, ast.Not)):
        yield lambda n: become(n, n.operand), "without the sign or not"
    if isinstance(node, ast.Constant):
        yield from changes_of_constant(node)
    if isinstance(node, ast.Call):
        yield from changes_of_call(node)
    if isinstance(node, ast.Name) and node.id == "group" and isinstance(node.ctx, ast.Load):
        world = "__import__('torch').distributed.group.WORLD"
        yield lambda n: become(n, ast.parse(world, mode="eval").body), "the world for the group"
    if isinstance(node, (ast.If, ast.IfExp)):
        yield (
            lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test)),
            "the other way round",
        )
    if isinstance(node, ast.While):
        yield lambda n: become(n, ast.If(n.test, n.body, n.orelse)), "if for while"
    if isinstance(node, ast.If) and names(node.test) & stored(node.body):  # or else it never ends
        yield lambda n: become(n, ast.While(n.test, n.body, [])), "while for if"
    if isinstance(node, ast.Tuple) and len(node.elts) > 1 and isinstance(node.ctx, ast.Load):
        yield lambda n: n.elts.reverse(), "turned round"
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list) and not isinstance(node, ast.Module):
            yield from changes_of_block(block, name)


def changes_of_constant(node: ast.Constant) -> Iterator[tuple]:
    value = node.value
    if isinstance(value, bool):
        yield lambda n: setattr(n, "value", not value), f"{not value}"
    elif isinstance(value, int):
        yield lambda n: setattr(n, "value", value + 1), f"{value + 1} for {value}"
        yield lambda n: setattr(n, "value", value - 1), f"{value - 1} for {value}"
    elif isinstance(value, float):
        yield lambda n: setattr(n, "value", 2 * value + 1), f"{2 * value + 1} for {value}"
    elif value in WORDS:
        yield lambda n: setattr(n, "value", WORDS[value]), f"{WORDS[value]!r} for {value!r}"


def changes_of_call(node: ast.Call) -> Iterator[tuple]:
    for i in range(len(node.args) - 1):
        if not any(isinstance(arg, ast.Starred) for arg in node.args[i : i + 2]):
            yield lambda n, i=i: swap(n.args, i), f"arguments {i} and {i + 1} swapped"
    if node.keywords:
        yield lambda n: n.keywords.pop(), "without the last keyword"
    if [k.arg for k in node.keywords[:-1]].count("dtype"):
        kept = [k.arg != "dtype" for k in node.keywords]
        yield (
            lambda n: setattr(n, "keywords", [*itertools.compress(n.keywords, kept)]),
            "without dtype",
        )
    if isinstance(node.func, ast.Name) and node.func.id in CASTS and len(node.args) == 1:
        yield lambda n: become(n, n.args[0]), f"without {node.func.id}"
    function = node.func
    if isinstance(function, ast.Name) and function.id in SECOND_LOOK and node.args:
        yield lambda n: become(n, n.args[0]), f"without {function.id}"
    if isinstance(function, ast.Attribute):
        if function.attr in LEFT_OUT:
            yield lambda n: become(n, n.func.value), f"without .{function.attr}()"
        if function.attr in WORDS:
            other = WORDS[function.attr]
            yield lambda n: setattr(n.func, "attr", other), f".{other} for .{function.attr}"


def changes_of_block(block: list[ast.stmt], name: str) -> Iterator[tuple]:
    for i, statement in enumerate(block):
        is_doc = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_doc or isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Pass)):
            continue
        where = f"`{ast.unparse(statement).splitlines()[0]}`"
        yield lambda n, i=i: getattr(n, name).__setitem__(i, ast.Pass()), f"{where} left out"
        if isinstance(statement, (ast.Expr, ast.AugAssign)):
            again = copy.deepcopy(statement)
            yield lambda n, i=i, s=again: getattr(n, name).insert(i, s), f"{where} done twice"
        if i + 1 < len(block):
            yield lambda n, i=i: swap(getattr(n, name), i), f"{where} after the next"
        if isinstance(statement, ast.Assign) and names(statement.value):
            yield (
                lambda n, i=i: setattr(
                    at := getattr(n, name)[i], "value", of_the_first_call(at.value, "FIRST")
                ),
                f"{where} of the first call",
            )
        if isinstance(statement, (ast.Expr, ast.AugAssign)):
            yield lambda n, i=i: only_on_rank_0(getattr(n, name), i), f"{where} on rank 0 only"


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def stored(block: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in block for node in ast.walk(statement)]
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def of_the_first_call(value: ast.expr, key: str) -> ast.expr:
    """Return an expression for the value from the first time that the line ran."""
    kept = ast.parse(f"globals()[{key!r}] if {key!r} in globals() else 0", mode="eval").body
    kept.orelse = ast.parse(f"globals().setdefault({key!r}, 0)", mode="eval").body
    kept.orelse.args[1] = value
    return kept


def swap(items: list, i: int) -> None:
    items[i], items[i + 1] = items[i + 1], items[i]


def only_on_rank_0(block: list[ast.stmt], i: int) -> None:
    test = ast.parse("__import__('torch').distributed.get_rank() == 0", mode="eval").body
    block[i] = ast.If(test, [block[i]], [])


def become(node: ast.AST, other: ast.AST) -> None:
    """Turn this node of a tree into `other`."""
    node.__class__ = type(other)
    node.__dict__ = dict(other.__dict__)


def judged(name: str, text: str) -> str:
    """Return right, wrong or still the library's; or broken if the text no longer runs."""
    cell = {"__name__": "__main__"}
    try:
        exec(compile(text, f"<a mutant of {name}>", "exec"), cell)
    except Exception:  # the cell fails before it can be checked
        return "broken"
    try:
        return check.exercises()[name].judge(cell[name]).state
    except Exception as error:  # The judge itself failed, which is worse than a survivor.
        return f"the judge raised {type(error).__name__}: {error}"


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("exercises", nargs="*", help="(default: all)")
    parser.add_argument("--sample", type=int, help="mutants of each exercise")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    known = check.exercises()
    chosen, work = options.exercises or sorted(known), []
    for name in chosen:
        every = mutants(known[name].answer())
        if options.sample is not None:  # A new exercise must not change the others' samples.
            dice = random.Random(f"{options.seed} {name}")
            every = dice.sample(every, min(options.sample, len(every)))
        work += [(name, mutant) for mutant in every]
    rows, survivors = {name: [0, 0] for name in chosen}, []
    start = time.monotonic()
    for name, mutant in tqdm(work, unit="mutant"):
        state = judged(name, mutant.text)
        rows[name][1] += 1
        if state in ("wrong", "broken") or mutant.what in EQUIVALENT.get(name, {}):
            rows[name][0] += 1
        else:
            survivors.append((name, mutant.what, state))
    for name, what, state in survivors:
        print(f"{name}: {what}: {state}")
    for name, (refused, all_of_them) in rows.items():
        print(f"{name:<32} {refused:>4} of {all_of_them:<4} {refused / all_of_them:7.1%}")
    refused, total = (sum(column) for column in zip(*rows.values()))
    seconds = time.monotonic() - start
    print(f"{refused} of {total} refused ({refused / total:.1%}) in {seconds:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "survivors": survivors}, indent=1))
    return 0 if not survivors else 1


if __name__ == "__main__":
    sys.exit(main())
