"""A chain of products, such as an MLP or attention: which open placements send the least?

A block is a list of products, forward.  Each has its backward: two more products, which share the
moves of the incoming gradient.  Moved inputs are not saved for backward but moved again, as in
ZeRO-3 and sequence parallelism.  Tensors that are computed elementwise from each other, or added,
have the same placement; so do a tensor and its gradient.

The search tries all placements and cuts a branch when its bytes exceed the best so far. So `place`
finds the minimum under these rules and within the given memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from mini_dist.plan.fields import checks_kinds

from .moves import frozen
from .notation import Placed, check_numbers, check_sizes, parse, placements
from .products import ProductPlan, candidates


@dataclass(frozen=True)
class BlockProducts:
    """products: forward, as `X[B, D] . V[D, F] -> H[B, F]`, without cuts. alike: names of tensors
    with the same placement, dim by dim. weights: names. whole: pairs (tensor, dim) not to be cut.
    kept: what forward saves for backward. inside: tensors that are never materialized."""

    name: str
    products: tuple[str, ...]
    alike: tuple[tuple[str, ...], ...]
    weights: tuple[str, ...]
    kept: tuple[str, ...]
    whole: tuple[tuple[str, str], ...] = ()

    def tensors(self) -> list[tuple[list[Placed], Placed]]:
        return [parse(text, {}) for text in self.products]


# The GELU between H and G is elementwise, and so is the residual's sum of X and Y.
MLP = BlockProducts(
    "MLP",
    ("X[B, D] . V[D, F] -> H[B, F]", "G[B, F] . W[F, D] -> Y[B, D]"),
    alike=(("X", "Y"), ("H", "G")),
    weights=("V", "W"),
    kept=("X", "H"),
)
# U makes queries, keys and values, M = 3 H numbers per head. A key's position is called T, to
# show that the softmax of P needs all of them. (P itself is never stored: flash attention.)
ATTENTION = BlockProducts(
    "attention",
    (
        "X[B, S, D] . U[D, N, M] -> A[B, S, N, M]",
        "Q[B, S, N, H] . K[B, T, N, H] -> P[B, N, S, T]",
        "P[B, N, S, T] . V[B, T, N, H] -> O[B, S, N, H]",
        "O[B, S, N, H] . W[N, H, D] -> Y[B, S, D]",
    ),
    alike=(("X", "Y"), ("A", "Q", "K", "V", "O"), ("P",)),
    weights=("U", "W"),
    kept=("X", "A"),
    whole=(("A", "M"), ("P", "T"), ("W", "H")),
)


@dataclass(frozen=True)
class Found:
    """The result of `place`. placed: tensor -> placement; forward, backward: plans in order."""

    block: str
    placed: dict[str, Placed]
    forward: list[ProductPlan]
    backward: list[tuple[ProductPlan, ProductPlan]]
    sent: int
    held: int  # bytes per rank: weights, their gradients, saved activations
    tried: int = field(compare=False)

    def __str__(self) -> str:
        lines = [f"{self.block}: {self.sent:,} bytes by all ranks, {self.held:,} held by each"]
        for plan in self.forward:
            lines.append("  forward   " + one_line(plan.inputs, plan.result, plan.collectives))
        for pair in reversed(self.backward):
            seen: set = set()
            for plan in pair:
                new = [move for move in plan.collectives if move not in seen]
                seen.update(new)
                lines.append("  backward  " + one_line(plan.inputs, plan.result, new))
        return "\n".join(lines)


def one_line(inputs, result, moves) -> str:
    does = ", ".join(f"{m.op} {m.before.name} over {'*'.join(m.axes)}" for m in moves)
    return f"{' . '.join(map(str, inputs))} -> {result}: {does or 'nothing is sent'}"


@checks_kinds
def place(
    block: BlockProducts,
    mesh: Mapping[str, int],
    memory: int | None = None,
    given: Mapping[str, str] | None = None,
    itemsize: int = 4,
    **sizes: int,
) -> Found:
    """Find the placements with which forward and backward send the fewest bytes.

    No rank repeats another rank's computation (`share` of `product`). memory: bytes that a rank
    may use for weights, their gradients and saved activations. given: placements that are fixed,
    such as {"X": "X[B_dp, D]"}. sizes: of the dims.
    Raises ValueError if nothing fits in the memory, or if the block has no tensor of a given name.
    """
    check_numbers({**mesh, "itemsize": itemsize, **sizes})
    search = CutSearch(block, dict(mesh), memory, dict(given or {}), itemsize, sizes)
    search.go_on(0, {}, 0, [])
    if search.best is None:
        room = "" if memory is None else f" in {memory:,} bytes a rank"
        raise ValueError(
            f"no placement of the {block.name} on {dict(mesh)}{room} lets each rank do its share: "
            "give more memory, or sizes that the axes divide"
        )
    sent, placed, steps = search.best
    forward, backward = [step[0] for step in steps], [step[1] for step in steps]
    return Found(block.name, placed, forward, backward, sent, search.held(placed), search.tried)


class CutSearch:
    """Go through the products in order; try each one's open placements, cheapest first."""

    def __init__(self, block, mesh, memory, given, itemsize, sizes):
        self.block, self.mesh, self.memory, self.itemsize = block, mesh, memory, itemsize
        self.sizes, self.tried, self.best = sizes, 0, None
        self.like = {name: names[0] for names in block.alike for name in names}
        tensors = [each for ins, out in block.tensors() for each in (*ins, out)]
        check_sizes(tensors, sizes, mesh)
        self.dims = {each.name: each.dims for each in tensors}
        self.given = {}
        for name, text in given.items():
            if name not in self.dims:
                known = ", ".join(self.dims)
                raise ValueError(f"the {block.name} has no tensor {name!r}, it has {known}")
            _, placed = parse(f"{text} -> {text}", mesh)
            if (placed.name, placed.dims, placed.due) != (name, self.dims[name], frozenset()):
                wanted = f"{name}[{', '.join(self.dims[name])}]"
                raise ValueError(f"{name} is given as {placed}: give it as {wanted}, with its cuts")
            first, axes = self.like.get(name, name), tuple(axes for _, axes in placed.cuts)
            if self.given.setdefault(first, axes) != axes:
                raise ValueError(f"{name} is given as {placed}, and {first}, placed alike, is not")
        first = [self.choices(names[0]) for names in block.alike]
        self.all = {names[0]: choice for names, choice in zip(block.alike, first)}
        self.all |= {name: self.choices(name) for name in block.weights}

    def choices(self, name: str) -> list[Placed]:
        """Return the open placements of a tensor and of all tensors with the same placement."""
        if name in self.given:
            return [Placed(name, tuple(zip(self.dims[name], self.given[name])))]
        return [
            placed
            for placed in placements(name, self.dims[name], self.mesh, self.sizes)
            if not any(placed.name == n and placed.axes_of(dim) for n, dim in self.block.whole)
        ]

    def as_placed(self, name: str, chosen: Mapping[str, Placed]) -> Placed:
        """Place a tensor like the tensor whose placement it shares."""
        cuts = chosen[self.like.get(name, name)].cuts
        return Placed(name, tuple((dim, axes) for dim, (_, axes) in zip(self.dims[name], cuts)))

    def held(self, placed: Mapping[str, Placed]) -> int:
        """Return the bytes per rank of the tensors placed so far."""
        bytes_of = {
            name: self.itemsize * math.prod(at.local_shape(self.sizes, self.mesh))
            for name, at in placed.items()
        }
        kept = sum(bytes_of.get(name, 0) for name in self.block.kept)
        return kept + sum(2 * bytes_of.get(name, 0) for name in self.block.weights)

    def go_on(self, number: int, chosen: dict, sent: int, steps: list) -> None:
        """Choose the open placements of product `number`, and go on to the next product."""
        if number == len(self.block.products):
            self.tried += 1
            if self.best is None or sent < self.best[0]:
                names = [
                    *self.block.weights,
                    *(name for group in self.block.alike for name in group),
                ]
                placed = {name: self.as_placed(name, chosen) for name in names}
                self.best = sent, placed, list(steps)
            return
        inputs, result = self.block.tensors()[number]
        options = []
        for more in self.open_choices(number, chosen):
            if self.memory is not None and self.held(more) > self.memory:
                continue
            ins = tuple(self.as_placed(each.name, more) for each in inputs)
            out = self.as_placed(result.name, more)
            step = cheapest_step(ins, out, *map(frozen, (self.sizes, self.mesh)), self.itemsize)
            if step is not None:
                options.append((step[0], more, step))
        for cost, more, step in sorted(options, key=lambda option: option[0]):
            if self.best is not None and sent + cost >= self.best[0]:
                break
            self.go_on(number + 1, more, sent + cost, [*steps, step[1:]])

    def open_choices(self, number: int, chosen: dict) -> Iterator[dict]:
        inputs, result = self.block.tensors()[number]
        names = dict.fromkeys(self.like.get(each.name, each.name) for each in (*inputs, result))
        ahead = [chosen]
        for name in names:
            if name not in chosen:
                ahead = [{**so_far, name: at} for so_far in ahead for at in self.all[name]]
        return iter(ahead)


@cache
def cheapest_step(inputs, result, sizes, mesh, itemsize) -> tuple[int, ProductPlan, tuple] | None:
    """Return (bytes, the product's plan, its backward's two plans) with the least sum of bytes."""
    dims, axes = dict(sizes), dict(mesh)
    needed = {dim for each in (*inputs, result) for dim in each.dims}
    dims = {dim: dims[dim] for dim in dims if dim in needed}
    a, b = inputs
    da, db, dc = (Placed(f"d{each.name}", each.cuts) for each in (a, b, result))
    forward = fewest(candidates([a, b], result, dims, axes, itemsize, share=True))
    to_a = by_way_of_gradient(candidates([dc, b], da, dims, axes, itemsize, share=True), 0)
    to_b = by_way_of_gradient(candidates([a, dc], db, dims, axes, itemsize, share=True), 1)
    if forward is None or not to_a or not to_b:
        return None
    pairs = itertools.product(to_a.items(), to_b.items())
    sent, p, q = min(map(together, pairs), key=lambda pair: pair[0])
    return forward.sent + sent, forward, (p, q)


def fewest(plans: Iterator[ProductPlan]) -> ProductPlan | None:
    return min(plans, key=lambda plan: plan.sent, default=None)


def by_way_of_gradient(
    plans: Iterator[ProductPlan], place: int
) -> dict[tuple, tuple[int, ProductPlan]]:
    """Return {moves of the incoming gradient, which is input `place`: (the plan that sends fewest
    bytes besides, these bytes)}."""
    best: dict = {}
    for plan in plans:
        way = plan.before[place]
        others = plan.sent - sum(move.sent for move in way)
        if way not in best or others < best[way][0]:
            best[way] = others, plan
    return best


def together(pair) -> tuple[int, ProductPlan, ProductPlan]:
    """Return the bytes of two plans that share the moves of the gradient."""
    (way, (others, plan)), (way_too, (others_too, plan_too)) = pair
    moved = sum(move.sent for move in dict.fromkeys((*way, *way_too)))
    return others + others_too + moved, plan, plan_too
