"""Shardings: on real ranks, every small expression gives the unsharded result and planned bytes.

Impossible expressions get a one-sentence error, and the search finds the known strategies.
"""

import itertools
import random

import pytest
import torch

from mini_dist import Mesh, all_reduce, launch
from mini_dist.collectives.sharding import (
    ATTENTION,
    MLP,
    cheapest_way,
    piece,
    place,
    placements,
    product,
    run,
)
from mini_dist.collectives.sharding.notation import one_tensor
from mini_dist.collectives.sharding.strategies import SIZES as STRATEGY_SIZES
from mini_dist.collectives.sharding.strategies import STRATEGIES

SIZES = {"I": 4, "J": 8, "K": 12}


def every_placement(name, dims, mesh):
    """Yield all placements: each axis cuts a dim, in either order, has summands or is unused."""
    for number in range(len(mesh) + 1):
        for due in itertools.combinations(mesh, number):
            rest = {axis: size for axis, size in mesh.items() if axis not in due}
            for placed in placements(name, dims, rest, SIZES):
                yield placed.with_due(due)


def every_expression(mesh):
    all_of = [
        list(every_placement(*each, mesh)) for each in (("A", "IJ"), ("B", "JK"), ("C", "IK"))
    ]
    return [f"{a} . {b} -> {c}" for a, b, c in itertools.product(*all_of)]


def whole(name, dims):
    dice = torch.Generator().manual_seed(ord(name))
    shape = [SIZES[dim] for dim in dims]
    return torch.randint(-8, 9, shape, generator=dice).double()  # sums are exact


def my_piece(placed, x, mesh):
    """Return this rank's piece or, where a sum is due, this rank's summand of it."""
    for axis in sorted(placed.due):
        dice = torch.Generator().manual_seed(ord(axis[0]))
        summands = torch.randint(-8, 9, (mesh[axis].size(), *x.shape), generator=dice).double()
        summands[0] += x - summands.sum(0)
        x = summands[mesh.index(axis)]
    return piece(x, placed.with_due(()), mesh)


def summed(y, placed, mesh):
    """Add up the sums that are still due."""
    for axis in placed.due:
        y = all_reduce(y, mesh[axis])
    return y


def carried_out(expressions, axes, group):
    """Return (this rank's piece is right, bytes sent, bytes planned) for each expression."""
    mesh, found = Mesh(group, **axes), []
    a, b = whole("A", "IJ"), whole("B", "JK")
    oracle = a @ b
    rows = group.recorder.comms
    for text in expressions:
        plan = product(text, axes, itemsize=8, **SIZES)
        pieces = [my_piece(each, x, mesh) for each, x in zip(plan.inputs, (a, b))]
        start = len(rows)
        y = run(plan, pieces, mesh)
        sent = sum(row[3] for row in rows[start:] if row[0] == "send")
        y = summed(y, plan.result, mesh)
        right = torch.equal(y, piece(oracle, plan.result.with_due(()), mesh))
        found.append((right, sent, plan.sent))
    return found


def check_all(expressions, axes):
    ranks = 1
    for size in axes.values():
        ranks *= size
    results = launch(carried_out, ranks, (expressions, axes), timeout=500).results
    for text, each in zip(expressions, zip(*results)):
        assert all(right for right, _, _ in each), text
        assert sum(sent for _, sent, _ in each) == each[0][2], text


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_product_on_one_axis(size):
    expressions = every_expression({"X": size})
    assert len({*expressions}) == (4**3 if size > 1 else 2**3)
    check_all(expressions, {"X": size})


def test_every_product_on_two_axes(pytestconfig):
    expressions = every_expression({"X": 2, "Y": 2})
    assert len(expressions) == 18**3
    if not pytestconfig.getoption("--long"):
        expressions = random.Random(0).sample(expressions, 400)
    check_all(expressions, {"X": 2, "Y": 2})


def test_products_on_three_axes():
    mesh = {"X": 2, "Y": 2, "Z": 2}
    kinds = [list(every_placement(*each, mesh)) for each in (("A", "IJ"), ("B", "JK"), ("C", "IK"))]
    dice = random.Random(0)
    expressions = ["{} . {} -> {}".format(*map(dice.choice, kinds)) for _ in range(60)]
    check_all(expressions, mesh)


def moved(starts, axes, group):
    """Do the same for plans that only move a tensor."""
    mesh, found, rows = Mesh(group, **axes), [], group.recorder.comms
    for text in starts:
        plan = product(text, axes, itemsize=8, **SIZES)
        (start,), end = plan.inputs, plan.result
        x = whole("A", "IJ")
        begun = len(rows)
        y = run(plan, [my_piece(start, x, mesh)], mesh)
        sent = sum(row[3] for row in rows[begun:] if row[0] == "send")
        y = summed(y, end, mesh)
        found.append((torch.equal(y, piece(x, end.with_due(()), mesh)), sent, plan.sent))
    return found


def test_every_move_on_two_axes():
    mesh = {"X": 2, "Y": 2}
    kinds = list(every_placement("A", "IJ", mesh))
    texts = [f"{a} -> {b}" for a, b in itertools.product(kinds, kinds) if b.due <= a.due]
    results = launch(moved, 4, (texts, mesh), timeout=300).results
    for text, each in zip(texts, zip(*results)):
        assert all(right for right, _, _ in each), text
        assert sum(sent for _, sent, _ in each) == each[0][2], text


def test_an_attention_score_is_a_product_too():
    """It has batch dims, a contraction and sharded heads."""
    plan = product(
        "Q[B, S, N_X, H] . K[B, T, N_X, H] -> P[B, N_X, S, T]", {"X": 4}, **ATTENTION_SIZES
    )
    assert plan.sent == 0 and plan.flops * 4 == 2 * 2 * 8 * 8 * 4 * 6


ATTENTION_SIZES = {"B": 2, "S": 8, "T": 8, "N": 4, "H": 6}


@pytest.mark.parametrize(
    "name, axes, expression, does",
    [(*strategy, does) for strategy, does in zip(STRATEGIES, [
        ["all_reduce dp"],
        ["all_gather dp"],
        ["reduce_scatter dp"],
        [],
        ["all_reduce tp"],
        ["all_gather tp"],
        ["reduce_scatter tp"],
        ["all_to_all tp"],
        ["all_gather tp", "all_gather dp"],
        ["all_gather z", "all_gather x", "reduce_scatter y"],
    ])],
)  # fmt: skip
def test_a_strategy_is_one_line(name, axes, expression, does):
    plan = product(expression, axes, **STRATEGY_SIZES)
    assert [f"{move.op} {'*'.join(move.axes)}" for move in plan.collectives] == does


def test_column_then_row_leaves_one_all_reduce():
    plan = product(
        "G[B_dp, F_tp] . W[F_tp, D] -> Y[B_dp, D]", {"dp": 2, "tp": 4}, B=256, F=256, D=64
    )
    (move,) = plan.collectives
    assert (move.op, move.axes, move.nbytes) == ("all_reduce", ("tp",), 256 * 64 * 4 // 2)
    assert plan.sent == 8 * plan.sent_by_a_rank == 2 * 3 * move.nbytes * 2


MESH = {"X": 2, "Y": 4}
LETTERS = {"I": 8, "J": 8, "K": 8}


@pytest.mark.parametrize(
    "expression, says",
    [
        ("A[I_X, J_X] . B[J, K] -> C[I, K]", "A[I_X, J_X]: axis X is used twice"),
        ("A[I_X_X, J] . B[J, K] -> C[I, K]", "A[I_X_X, J]: axis X is used twice"),
        ("A[I_X, J]{X} . B[J, K] -> C[I, K]", "axis X is used twice"),
        ("A[I_Z, J] . B[J, K] -> C[I, K]", "the mesh has no axis 'Z', it has X=2, Y=4"),
        ("A[I_XY, J] . B[J, K] -> C[I, K]", "for both axes write _X_Y"),
        ("A[I, I] . B[I, K] -> C[I, K]", "dim I stands there twice"),
        ("A[I, J] . B[L, K] -> C[I, K]", "dim J is in A[I, J] only, and not in C[I, K]"),
        ("A[I, J] . B[J, K] -> C[I, M]", "C[I, M] has a dim M that is in none of A[I, J] and B[J"),
        ("A[I, J] . B[J, K]", "has no ->: write A[I_X, J] . B"),
        ("A[I, J . B[J, K] -> C[I, K]", "is no tensor with its dims in brackets"),
        ("A[I, ] . B[J, K] -> C[I, K]", "'' in 'A[I, ]' is no dim"),
        ("A[I,J].B[J,K].D[K,L] -> C[I,L]", "has 3 tensors, 1 or 2 can go in"),
        ("A[I, J] -> A[J, I]", "keeps its dims in their order"),
        ("A[I, J] -> A[I, J]{X}", "a sum can be made, or cut, but not taken apart again"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(expression, says):
    with pytest.raises(ValueError) as error:
        product(expression, MESH, **LETTERS)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("sign", [".", "@", "·"])
def test_three_signs_for_a_product(sign):
    plan = product(f"A[I_X,J]{sign}B[J,K]->C[I_X,K]", MESH, **LETTERS)
    assert plan.sent == 0 and str(plan.inputs[0]) == "A[I_X, J]"


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"X \* Y = 8 must divide J=12: 8 or 16 would do"):
        product("A[I, J_X_Y] . B[J, K] -> C[I, K]", MESH, I=8, J=12, K=8)
    with pytest.raises(ValueError, match="I=-4 is too small: give 1 or more"):
        product("A[I, J] . B[J, K] -> C[I, K]", MESH, I=-4, J=8, K=8)
    with pytest.raises(ValueError, match=r"X=2.0 is not a whole number"):
        product("A[I, J] . B[J, K] -> C[I, K]", {"X": 2.0}, **LETTERS)
    with pytest.raises(ValueError, match="how long is dim F"):
        place(MLP, {"x": 2}, B=8, D=8)
    with pytest.raises(ValueError, match="how long is dim K"):
        product("A[I, J] . B[J, K] -> C[I, K]", MESH, I=8, J=8)


def wrong_pieces(group):
    mesh = Mesh(group, X=2)
    plan = product("A[I_X, J] . B[J, K] -> C[I_X, K]", {"X": 2}, **LETTERS)
    told = []
    for attempt in (
        lambda: run(plan, [torch.ones(8, 8), torch.ones(8, 8)], mesh),
        lambda: run(plan, [torch.ones(4, 8)], mesh),
        lambda: run(plan, [torch.ones(4, 8), torch.ones(8, 8)], Mesh(group, Y=2)),
        lambda: piece(torch.ones(8, 8), one_tensor("A[I, J]{X}", {"X": 2}), mesh),
    ):
        try:
            attempt()
        except ValueError as error:
            told.append(str(error))
    return told


def test_wrong_pieces_are_told_before_anything_is_sent():
    run_ = launch(wrong_pieces, 2)
    for told, says in zip(
        run_.results[0],
        ("has the shape (8, 8)", "1 tensors came for the 2", "this is {'Y': 2}", "its summand"),
        strict=True,
    ):
        assert says in told
    assert run_.ledger.total_bytes() == 0


def test_a_plan_has_seconds_on_a_machine():
    """The last axes of a mesh lie inside a node, so their messages are faster."""
    text, sizes = "G[B_dp, F_tp] . W[F_tp, D] -> Y[B_dp, D]", dict(B=8192, D=8192, F=28672)
    inside = product(text, {"dp": 8, "tp": 8}, itemsize=2, **sizes)
    across = product(text, {"tp": 8, "dp": 8}, itemsize=2, **sizes)
    assert inside.sent == across.sent
    moved = [sum(m.seconds("h100", dict(p.mesh)) for m in p.moves) for p in (inside, across)]
    assert moved[0] < moved[1] / 4
    from mini_dist.plan.calculators import costs, hardware

    (move,) = inside.collectives
    ring = costs.all_reduce(move.nbytes, 8, "ring", hardware("h100").node_link("all_reduce"))
    assert moved[0] == pytest.approx(ring.seconds)
    assert inside.seconds("h100") > moved[0]


def test_the_cheapest_way_goes_through_several_moves():
    at, to = one_tensor("A[I, J]{X, Y}", MESH), one_tensor("A[I_X, J_Y]", MESH)
    assert [move.op for move in cheapest_way(at, to, LETTERS, MESH)] == ["reduce_scatter"] * 2


# ---- blocks --------------------------------------------------------------------------------------


def sizes_of(tokens):
    return dict(B=tokens, D=32, F=128)


@pytest.mark.parametrize(
    "tokens, memory, placed, passes",
    [
        (4096, None, {"X": "X[B_x, D]", "V": "V[D, F]", "W": "W[F, D]"}, 2 * 2 * 32 * 128),
        (64, None, {"X": "X[B, D]", "V": "V[D, F_x]", "W": "W[F_x, D]"}, 4 * 64 * 32),
        (64, 27_000, {"X": "X[B_x, D]", "V": "V[D, F_x]", "W": "W[F_x, D]"}, 5 * 64 * 32),
    ],
    ids=["data parallel", "column, row", "sequence parallel"],
)
def test_the_known_strategies_are_found(tokens, memory, placed, passes):
    """passes: elements gathered or scattered; an all-reduce counts as both."""
    found = place(MLP, {"x": 4}, memory=memory, **sizes_of(tokens))
    assert {name: str(found.placed[name]) for name in placed} == placed
    assert found.sent == 3 * 4 * passes
    assert memory is None or found.held <= memory


def test_with_little_memory_all_is_cut():
    found = place(MLP, {"x": 4}, memory=680_000, **sizes_of(4096))
    assert all(found.placed[name].used == {"x"} for name in "XHVW")
    with pytest.raises(ValueError, match="in 600,000 bytes a rank lets each rank do its share"):
        place(MLP, {"x": 4}, memory=600_000, **sizes_of(4096))


def test_what_is_found_is_the_least():
    """Compare with an exhaustive search over every placement."""
    mesh, sizes = {"x": 2}, dict(B=8, D=4, F=8)
    all_sent = []
    for x, h, v, w in itertools.product(*(
        placements(name, dims, mesh, sizes) for name, dims in zip("XHVW", ("BD", "BF", "DF", "FD"))
    )):  # fmt: skip
        given = {each.name: str(each) for each in (x, h, v, w)}
        try:
            all_sent.append(place(MLP, mesh, given=given, **sizes).sent)
        except ValueError:
            pass
    assert len(all_sent) > 40
    assert place(MLP, mesh, **sizes).sent == min(all_sent)


@pytest.mark.parametrize(
    "sequences, tokens, x, heads",
    [
        (8, 64, "X[B_x, S, D]", "Q[B_x, S, N, H]"),
        (1, 64, "X[B, S, D]", "Q[B, S, N_x, H]"),
        (1, 1024, "X[B, S_x, D]", "Q[B, S, N_x, H]"),
    ],
    ids=["data parallel", "heads", "Ulysses"],
)
def test_attention_is_cut_by_sequences_heads_or_positions(sequences, tokens, x, heads):
    found = place(ATTENTION, {"x": 4}, B=sequences, S=tokens, T=tokens, D=32, N=4, H=8, M=24)
    assert (str(found.placed["X"]), str(found.placed["Q"])) == (x, heads)


def test_tensors_that_are_placed_alike_may_be_given_each_by_its_own_dims():
    sizes = dict(B=4, S=16, T=16, D=64, N=4, H=16, M=48)
    by_heads = {"Q": "Q[B, S, N_x, H]", "K": "K[B, T, N_x, H]"}
    assert place(ATTENTION, {"x": 2}, given=by_heads, **sizes).placed["V"].axes_of("N") == ("x",)
    with pytest.raises(ValueError, match=r"K is given as K\[B_x, T, N, H\], and A, placed alike"):
        place(ATTENTION, {"x": 2}, given=by_heads | {"K": "K[B_x, T, N, H]"}, **sizes)


def test_a_placement_can_be_given():
    found = place(MLP, {"x": 4}, given={"V": "V[D_x, F]"}, **sizes_of(4096))
    assert str(found.placed["V"]) == "V[D_x, F]"
    for given, says in (
        ({"X": "V[B_x, D]"}, "give it as X"),
        ({"X": "X[B, D]{x}"}, "give it as X"),
        ({"X": "X[B_x, D]", "Y": "Y[B, D_x]"}, "placed alike"),
    ):
        with pytest.raises(ValueError, match=says):
            place(MLP, {"x": 4}, given=given, **sizes_of(64))
    with pytest.raises(ValueError, match="the MLP has no tensor 'Z', it has X, V, H"):
        place(MLP, {"x": 4}, given={"Z": "Z[D, F]"}, **sizes_of(64))
