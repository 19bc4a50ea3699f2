"""Generate questions: which one collective does `X[B, F_tp] . W[F_tp, D] -> Y[B, D]` need?

    five(23)                                       # five expressions, the same for the same seed
    score(23, ["all_reduce tp", "nothing", ...])   # how many are right, and the right answers

The answers do not come from rules. The quiz makes the arrays of four ranks and tries every
collective on every tensor, before and after the local product. The answer is the cheapest way to
give each rank its numbers. (tests/course/test_sharding_quiz.py compares the answers with the rules
of mini_dist/collectives/sharding.)
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from mini_dist.collectives.mesh import Grid
from mini_dist.collectives.sharding.notation import Placed, parse
from mini_dist.plan.tables import Table

QUESTIONS = 5
LENGTH = 4  # of every dim, so that the answer does not depend on sizes
MESHES = (("dp", "tp"), ("X", "Y"), ("data", "model"))
DIMS = (("B", "F", "D"), ("I", "J", "K"), ("T", "D", "F"))
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
NOTHING = "nothing"
Ranks = list[np.ndarray]  # one array per rank


# ---- every collective is tried -------------------------------------------------------------------


def answers_of(expression: str, axes: tuple[str, str]) -> tuple[str, ...]:
    """Return the collectives that send the fewest numbers, as "all_reduce tp" or "nothing": several
    if they send equally many, none if one collective is not enough."""
    found = what_works(expression, axes)
    least = min(found.values(), default=0)
    return tuple(sorted(name for name, sent in found.items() if sent == least))


@cache
def what_works(expression: str, axes: tuple[str, str]) -> dict[str, int]:
    """Return {collective and axis: the fewest numbers that all ranks send} of those that work."""
    mesh = dict.fromkeys(axes, 2)
    grid = Grid(**mesh)
    inputs, result = parse(expression, mesh)
    dice = np.random.default_rng(0)
    wholes = [dice.integers(1, 2**20, (LENGTH,) * len(each.dims)) for each in inputs]
    how = ",".join("".join(each.dims) for each in inputs) + "->" + "".join(result.dims)
    target = cut(np.einsum(how, *wholes), result, mesh, grid)
    found: dict[str, int] = {}
    ways = [list(one_step(cut(w, p, mesh, grid), grid)) for w, p in zip(wholes, inputs)]
    for before in itertools.product(*ways):
        names = [name for name, _, _ in before if name]
        if len(names) > 1:
            continue
        try:
            local = [np.einsum(how, *pieces) for pieces in zip(*(ranks for _, ranks, _ in before))]
        except ValueError:  # these pieces cannot be multiplied
            continue
        for name, ranks, sent in one_step(local, grid):
            if not (name and names) and has(ranks, target, grid):
                total = sent + sum(each for _, _, each in before)
                done = name or (names[0] if names else NOTHING)
                found[done] = min(total, found.get(done, total))
    return found


def has(ranks: Ranks, target: Ranks, grid: Grid) -> bool:
    """Return whether each rank has its target, or something from which it can cut its target."""
    shape, wanted = ranks[0].shape, target[0].shape
    if shape == wanted:
        return all(map(np.array_equal, ranks, target))
    if any(n % m for n, m in zip(shape, wanted)):  # no cut gives this shape
        return False
    smaller = (after for name, after, _ in one_step(ranks, grid, OPS[:0]) if after is not ranks)
    return any(has(after, target, grid) for after in smaller)


def cut(whole: np.ndarray, placed: Placed, mesh: dict[str, int], grid: Grid) -> Ranks:
    """Return each rank's piece of an array."""
    pieces = []
    for rank in range(grid.size):
        index, piece = grid.coordinates(rank), whole
        for dim, (_, axes) in enumerate(placed.cuts):
            for axis in axes:
                piece = np.split(piece, mesh[axis], dim)[index[axis]]
        pieces.append(piece)
    return pieces


def one_step(ranks: Ranks, grid: Grid, ops=OPS) -> Iterator[tuple[str, Ranks, int]]:
    """Yield (name, the ranks' arrays afterwards, numbers sent) of every possible step. Doing
    nothing, and cutting a piece locally, have no name."""
    yield "", ranks, 0
    dims = range(ranks[0].ndim)
    size = sum(piece.size for piece in ranks)
    for axis, n in grid.axes.items():
        tries = [("", cut_here, (dim,), 0) for dim in dims]
        if "all_gather" in ops:
            tries += [("all_gather", gather, (dim,), (n - 1) * size) for dim in dims]
        if "reduce_scatter" in ops:
            tries += [("reduce_scatter", scatter, (dim,), (n - 1) * size // n) for dim in dims]
        if "all_reduce" in ops:
            tries += [("all_reduce", add_up, (), 2 * (n - 1) * size // n)]
        if "all_to_all" in ops:
            pairs = itertools.permutations(dims, 2)
            tries += [("all_to_all", exchange, pair, (n - 1) * size // n) for pair in pairs]
        for op, function, args, sent in tries:
            after: Ranks = list(ranks)
            try:
                for group in grid.groups(axis):
                    for rank, piece in zip(group, function([ranks[r] for r in group], *args)):
                        after[rank] = piece
            except ValueError:  # this dim is too short to be cut again
                continue
            yield f"{op} {axis}" if op else "", after, sent


def cut_here(pieces: Ranks, dim: int) -> Ranks:
    return [np.split(piece, len(pieces), dim)[rank] for rank, piece in enumerate(pieces)]


def gather(pieces: Ranks, dim: int) -> Ranks:
    return [np.concatenate(pieces, dim)] * len(pieces)


def add_up(pieces: Ranks) -> Ranks:
    return [sum(pieces)] * len(pieces)


def scatter(pieces: Ranks, dim: int) -> Ranks:
    return np.split(sum(pieces), len(pieces), dim)


def exchange(pieces: Ranks, one: int, other: int) -> Ranks:
    """Cut each piece along `other`, one part per rank, and join the received parts along `one`."""
    parts = [np.split(piece, len(pieces), other) for piece in pieces]
    return [np.concatenate([part[rank] for part in parts], one) for rank in range(len(pieces))]


# ---- questions -----------------------------------------------------------------------------------


def questions(seed: int) -> list[tuple[str, tuple[str, str], str]]:
    """Return five (expression, axes of the mesh, answer). Most of the answers differ."""
    dice, found = random.Random(seed), []
    while len(found) < QUESTIONS:
        expression, axes = one_question(dice)
        start, _, end = expression.partition(" -> ")
        if start == end:
            continue
        answers = answers_of(expression, axes)
        asked = [before.split()[0] for _, _, before in found]
        if len(answers) == 1 and (answers[0].split()[0] not in asked or dice.random() < 0.1):
            found.append((expression, axes, answers[0]))
    return found


def one_question(dice: random.Random) -> tuple[str, tuple[str, str]]:
    """Return an expression and the axes of its mesh. One axis cuts any dim of each tensor, or none.
    The other one cuts the result's rows or columns, or nothing, and needs no collective."""
    axes, (i, j, k) = dice.choice(MESHES), dice.choice(DIMS)
    names = dice.choice((("A", "B", "C"), ("X", "W", "Y"), ("G", "W", "H")))
    dims = ((i, j), (j, k), (i, k))
    main, other = dice.sample(axes, 2)
    cuts = [dice.choice((*each, each[0], each[1], "")) for each in dims]
    rows_or_columns = dice.choice((i, k, ""))

    def tensor(name: str, dims: tuple, its_cut: str) -> str:
        words = []
        for dim in dims:
            its = [f"_{other}"] * (dim == rows_or_columns) + [f"_{main}"] * (dim == its_cut)
            words.append(dim + "".join(sorted(its, key=lambda word: axes.index(word[1:]))))
        return f"{name}[{', '.join(words)}]"

    a, b, c = map(tensor, names, dims, cuts)
    if dice.random() < 0.15:  # no product: a tensor only changes its sharding
        return f"{a} -> {tensor(names[0], dims[0], dice.choice((*dims[0], '')))}", axes
    return f"{a} . {b} -> {c}", axes


def five(seed: int) -> Table:
    """Return a table of five expressions."""
    rows = [(n + 1, text, " x ".join(axes)) for n, (text, axes, _) in enumerate(questions(seed))]
    return Table(["", "which collective is missing?", "mesh"], rows)


def score(seed: int, answers: Sequence[str]) -> Table:
    """Return a table of whether each answer is right, with the right one if it is not."""
    asked = questions(seed)
    if isinstance(answers, str) or len(answers) != len(asked):
        raise ValueError(
            f"give {len(asked)} answers, such as {[a for *_, a in questions(0)]}, not {answers!r}"
        )
    rows = [
        (text, str(mine), "✓" if normal(mine) == right else f"✗ {right}")
        for (text, _, right), mine in zip(asked, answers)
    ]
    points = sum(normal(mine) == right for (_, _, right), mine in zip(asked, answers))
    return Table(["", "you", ""], rows, f"{points} of {len(asked)}")


def normal(answer: object) -> str:
    """Return all_reduce tp for `all-reduce over tp`, `AllReduce(tp)` and ("all_reduce", "tp")."""
    if answer is None:
        return NOTHING
    text = " ".join(map(str, answer)) if isinstance(answer, (tuple, list)) else str(answer)
    words = [word for word in re.split(r"[\s(),]+", text) if word.lower() not in ("", "over", "on")]
    if not words:
        return ""
    op, *axes = words
    bare = op.lower().replace("_", "").replace("-", "")
    op = {each.replace("_", ""): each for each in (*OPS, NOTHING)}.get(bare, op)
    return " ".join((op, *axes))
