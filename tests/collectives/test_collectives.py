"""Collectives: torch's values, the same bits on every rank, and exactly the predicted bytes."""

import functools
import itertools
import time
from collections import Counter, deque

import pytest
import torch
import torch.distributed as dist

from mini_dist import RankError, collectives, launch
from mini_dist.collectives.mesh import Mesh
from mini_dist.collectives.messages import Members
from mini_dist.plan.calculators import costs

SIZES = range(1, 9)
LENGTHS = (840, 841, 3, 0)  # 1 to 8 all divide 840; 841 is one too many; 3 is too few
ALL_REDUCE = ("star", "stars", "tree", "ring", "pipelined_ring", "doubling", "halving_doubling")
ALL_GATHER = ("ring", "doubling")
REDUCE_SCATTER = ("ring", "halving")
ROOTED = ("star", "tree")
OPS = ("sum", "max", "min", "product")


def divisors(size):
    return [k for k in range(1, size + 1) if size % k == 0]


def values(rank, length, dtype=torch.int64, *shape):
    """Return values that differ by rank and index and, if signed, have both signs."""
    generator = torch.Generator().manual_seed(1000 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(length, *shape, generator=generator).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.bool) else -9
    return torch.randint(low, 10, (length, *shape), generator=generator).to(dtype)


def every_rank(size, *args):
    return [values(rank, *args) for rank in range(size)]


def in_order(op, tensors):
    return functools.reduce(collectives.messages.REDUCTIONS[op], tensors)


def all_same(tensors):
    return all(torch.equal(tensors[0], other) for other in tensors)


def all_reduce_in_every_way(x, group, op="sum", small_pieces=True):
    """Return {algorithm: result}, including hierarchies of every node size."""
    ways = ALL_REDUCE + ("auto",)
    results = {way: collectives.all_reduce(x, group, op, way) for way in ways}
    for k in divisors(group.size()):
        results[f"hierarchical {k}"] = collectives.all_reduce(x, group, op, "hierarchical", nodes=k)
    for roots in range(1, group.size() + 1) if op != "mean" else ():
        results[f"stars, {roots} roots"] = collectives.stars_all_reduce(x, group, op, roots)
    if small_pieces:
        small = collectives.pipelined_ring_all_reduce(x, group, op, piece_bytes=256)
        results["pipelined_ring in small pieces"] = small
        here = x.detach().clone(memory_format=torch.contiguous_format)
        collectives.pipelined_ring_all_reduce(here, group, op, piece_bytes=256, out=here)
        results["pipelined_ring in place"] = here
    return results


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_equals_torch_exactly_for_integers(size):
    def job(group):
        native = {
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
            "product": dist.ReduceOp.PRODUCT,
        }
        results = []
        for length in LENGTHS:
            for op in native if length == 841 else ["sum"]:
                x = values(group.rank(), length)
                theirs = x.clone()
                dist.all_reduce(theirs, native[op], group=group)
                results.append((op, theirs, all_reduce_in_every_way(x, group, op)))
        return results

    for results in launch(job, size).results:
        for op, theirs, ours in results:
            assert torch.equal(theirs, in_order(op, every_rank(size, len(theirs))))
            for way, result in ours.items():
                assert torch.equal(result, theirs), (way, op, len(theirs))


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_chunk_r_on_rank_r_and_all_gather_puts_them_together(size):
    def job(group):
        results = []
        for length in LENGTHS:
            x = values(group.rank(), length, torch.int64, 2)
            sizes = collectives.split_sizes(length, size)
            for op in OPS if length == 841 else ["sum"]:
                for way in REDUCE_SCATTER:
                    chunk = collectives.reduce_scatter(x, group, op, algorithm=way)
                    for way in ALL_GATHER:
                        whole = collectives.all_gather(chunk, group, sizes, algorithm=way)
                        results.append((op, length, chunk, whole))
        return results

    for rank, results in enumerate(launch(job, size).results):
        for op, length, chunk, whole in results:
            expected = in_order(op, every_rank(size, length, torch.int64, 2))
            assert torch.equal(whole, expected)
            assert torch.equal(chunk, expected.tensor_split(size)[rank])


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_takes_parts_of_any_sizes(size):
    sizes = [(3 * rank) % 5 for rank in range(size)]  # including 0

    def job(group):
        x = values(group.rank(), sizes[group.rank()], torch.float32, 3)
        gathered = [collectives.all_gather(x, group, sizes, algorithm=way) for way in ALL_GATHER]
        return gathered, [collectives.gather(x, root, group, sizes) for root in range(size)]

    expected = torch.cat([values(rank, sizes[rank], torch.float32, 3) for rank in range(size)])
    for rank, (gathered, rooted) in enumerate(launch(job, size).results):
        assert all(torch.equal(whole, expected) for whole in gathered)
        for root, whole in enumerate(rooted):
            assert torch.equal(whole, expected) if rank == root else whole is None


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_reduce_and_scatter_know_every_root(size):
    def job(group):
        x, results = values(group.rank(), 11), []
        for root in range(size):
            for way in ROOTED:
                results.append(
                    (
                        root,
                        collectives.broadcast(x, root, group, algorithm=way),
                        collectives.reduce(x, root, group, "sum", way),
                        collectives.reduce(x, root, group, "max", way),
                        collectives.reduce(x, root, group, "product", way),
                        collectives.scatter(x, root, group),
                    )
                )
        return results

    everyone = every_rank(size, 11)
    for rank, results in enumerate(launch(job, size).results):
        for root, copy, total, largest, product, part in results:
            assert torch.equal(copy, everyone[root])
            assert torch.equal(part, everyone[root].tensor_split(size)[rank])
            if rank == root:
                assert torch.equal(total, in_order("sum", everyone))
                assert torch.equal(largest, in_order("max", everyone))
                assert torch.equal(product, in_order("product", everyone))
            else:
                assert total is None and largest is None and product is None


PRODUCT_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.bool)


@pytest.mark.parametrize("size", SIZES)
def test_a_product_is_the_same_to_the_last_bit_on_all_ranks_and_close_to_the_exact_one(size):
    """Include complex, where a b and b a may round differently; for bool, a product is "all"."""

    def job(group):
        everything = [values(group.rank(), 97, dtype) for dtype in PRODUCT_TYPES]
        return [all_reduce_in_every_way(x, group, "product") for x in everything]

    ranks = launch(job, size).results
    for number, dtype in enumerate(PRODUCT_TYPES):
        everyone = every_rank(size, 97, dtype)
        exact = functools.reduce(torch.mul, [x.to(torch.complex128) for x in everyone])
        rounding = 0 if dtype == torch.bool else 4 * size * torch.finfo(dtype).eps * exact.abs()
        for way in ranks[0][number]:
            results = [rank[number][way] for rank in ranks]
            assert all_same(results), (way, dtype)
            assert results[0].dtype == dtype
            assert ((results[0].to(torch.complex128) - exact).abs() <= rounding).all(), (way, dtype)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_equals_torch_with_even_and_uneven_splits(size):
    def rows(sender, receiver):
        return (2 * sender + 3 * receiver) % 4  # 0 to some peers; both directions differ

    def job(group):
        rank = group.rank()
        inputs = [rows(rank, peer) for peer in range(size)]
        outputs = [rows(peer, rank) for peer in range(size)]
        x = values(rank, sum(inputs), torch.float32, 2)
        theirs = torch.empty(sum(outputs), 2)
        dist.all_to_all_single(theirs, x, outputs, inputs, group=group)
        uneven = collectives.all_to_all(x, group, inputs, outputs)
        return theirs, uneven, collectives.all_to_all(values(rank, 2 * size + 1), group)

    even = every_rank(size, 2 * size + 1)
    for rank, (theirs, uneven, others) in enumerate(launch(job, size).results):
        assert torch.equal(theirs, uneven)
        assert torch.equal(others, torch.cat([x.tensor_split(size)[rank] for x in even]))


@pytest.mark.parametrize("size", SIZES)
def test_floats_agree_to_rounding_and_to_the_last_bit_between_ranks_and_runs(size):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.complex64)

    def job(group):
        return [all_reduce_in_every_way(values(group.rank(), 501, d), group) for d in dtypes]

    first, second = launch(job, size).results, launch(job, size).results
    for i, dtype in enumerate(dtypes):
        everyone = every_rank(size, 501, dtype)
        exact = sum(x.to(torch.complex128) for x in everyone)
        # Each of n-1 additions rounds a partial sum, and none exceeds the sum of magnitudes.
        rounding = (size - 1) * torch.finfo(dtype).eps * sum(x.abs().double() for x in everyone)
        for way, result in first[0][i].items():
            assert result.dtype == dtype
            assert ((result.to(torch.complex128) - exact).abs() <= rounding).all(), (way, dtype)
            assert all_same([results[i][way] for results in first + second]), (way, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_order_of_each_sum_is_the_documented_one(size, dtype):
    def job(group):
        x = values(group.rank(), 100, dtype)
        return (
            collectives.star_all_reduce(x, group),
            collectives.ring_all_reduce(x, group),
            collectives.pipelined_ring_all_reduce(x, group, piece_bytes=16),
        )

    everyone = every_rank(size, 100, dtype)
    chunks = [x.tensor_split(size) for x in everyone]
    round_the_ring = [  # chunk c starts on rank c+1 and ends on rank c
        in_order("sum", [chunks[(c + 1 + k) % size][c] for k in range(size)]) for c in range(size)
    ]
    for star, ring, pipelined in launch(job, size).results:
        assert torch.equal(star, in_order("sum", everyone))
        assert torch.equal(ring, torch.cat(round_the_ring))
        assert torch.equal(pipelined, ring)


def allocated(run):
    """Return the peak number of bytes that `run()` allocates in this thread."""
    from torch.profiler import profile

    with profile(profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes), default=0)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_root_of_a_star_holds_two_large_terms_however_many_ranks(size):
    def job(group):
        x = torch.ones(2**18)  # 1 MiB
        collectives.star_all_reduce(x, group)
        return allocated(lambda: collectives.star_all_reduce(x, group)) / x.nbytes

    root, *others = launch(job, size).results
    assert root == pytest.approx(min(size - 1, 2), abs=0.01)
    assert others == pytest.approx([1] * (size - 1), abs=0.01)


@pytest.mark.parametrize("size", [4, 5, 8])
def test_stars_need_no_memory_but_the_results_on_any_rank(size):
    """This holds for any number of roots, also with parts of unequal length."""

    def job(group):
        x = torch.ones(2**18 + 1)  # 1 MiB
        ways = [
            functools.partial(collectives.stars_all_reduce, x, group, roots=roots)
            for roots in range(2, size + 1)
        ]
        return [way() is None or allocated(way) / x.nbytes for way in ways]

    for rank in launch(job, size).results:
        assert rank == pytest.approx([1] * (size - 1), abs=0.001)


@pytest.mark.parametrize("roots", [0, 4])
def test_stars_refuse_no_roots_and_more_than_ranks(roots):
    with pytest.raises(RankError, match=f"roots={roots}: in a group of 3 ranks it can be 1 to 3"):
        launch(lambda group: collectives.stars_all_reduce(torch.ones(8), group, roots=roots), 3)


def test_mean_divides_by_the_ranks_of_the_group():
    def job(group):
        x = values(group.rank(), 10, torch.float64)
        results = list(all_reduce_in_every_way(x, group, "mean").values())
        scattered = collectives.reduce_scatter(x, group, "mean")
        results.append(collectives.all_gather(scattered, group, collectives.split_sizes(10, 3)))
        return results, collectives.reduce(x, 1, group, "mean")

    expected = torch.stack(every_rank(3, 10, torch.float64)).mean(0)
    for rank, (results, rooted) in enumerate(launch(job, 3).results):
        for result in results:
            torch.testing.assert_close(result, expected)
        assert rooted is None if rank != 1 else torch.allclose(rooted, expected)


def test_small_and_odd_dtypes():
    kinds = [(torch.int8, "sum"), (torch.uint8, "max"), (torch.int16, "sum"), (torch.bool, "max")]

    def job(group):
        return [all_reduce_in_every_way(values(group.rank(), 23, d), group, op) for d, op in kinds]

    for results in launch(job, 3).results:
        for (dtype, op), ours in zip(kinds, results, strict=True):
            expected = in_order(op, every_rank(3, 23, dtype))
            for way, result in ours.items():
                assert result.dtype == dtype and torch.equal(result, expected), (way, dtype)


def test_shapes_are_kept_and_layouts_do_not_matter():
    def job(group):
        x = values(group.rank(), 6, torch.int64, 4)
        transposed = all_reduce_in_every_way(x.t(), group)
        number = all_reduce_in_every_way(x[0, 0], group)
        columns = collectives.all_gather(x, group, dim=-1)
        halves = [collectives.reduce_scatter(x, group, dim=1, algorithm=w) for w in REDUCE_SCATTER]
        rooted = (
            collectives.tree_broadcast(x.t(), 1, group),
            collectives.star_broadcast(x.t(), 1, group),
        )
        turned = collectives.all_to_all(x.t(), group), collectives.scatter(x.t(), 0, group)
        return transposed, number, columns, halves, rooted, turned

    a, b = every_rank(2, 6, torch.int64, 4)
    for rank, result in enumerate(launch(job, 2).results):
        transposed, number, columns, halves, rooted, turned = result
        assert all(torch.equal(total, (a + b).t()) for total in transposed.values())
        assert all(torch.equal(total, a[0, 0] + b[0, 0]) for total in number.values())
        assert torch.equal(columns, torch.cat([a, b], dim=1))
        assert all(torch.equal(half, (a + b)[:, 2 * rank : 2 * rank + 2]) for half in halves)
        assert all(torch.equal(copy, b.t()) for copy in rooted)
        mine = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(turned[0], torch.cat([a.t()[mine], b.t()[mine]]))
        assert torch.equal(turned[1], a.t()[mine])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_arguments_are_left_alone_and_results_are_new_and_outside_of_autograd(size):
    def job(group):
        x = values(group.rank(), 12, torch.float32).requires_grad_()
        before = x.detach().clone()
        results = [*all_reduce_in_every_way(x, group).values()]
        for way in ALL_GATHER:
            results.append(collectives.all_gather(x, group, algorithm=way))
        for way in REDUCE_SCATTER:
            results.append(collectives.reduce_scatter(x, group, algorithm=way))
        for way in ROOTED:
            results.append(collectives.broadcast(x, 0, group, algorithm=way))
            results.append(collectives.reduce(x, 0, group, algorithm=way))
        results += [collectives.gather(x, 0, group), collectives.scatter(x, 0, group)]
        results.append(collectives.all_to_all(x, group))
        for result in results:
            if result is not None:
                assert not result.requires_grad
                result.fill_(7)
        return torch.equal(x, before)

    assert all(launch(job, size).results)


def test_a_sub_group_speaks_in_its_own_ranks():
    def job(group):
        mesh = Mesh(group, dp=2, tp=3)
        results = {}
        for axis in ("dp", "tp"):
            sub = mesh[axis]
            x = values(group.rank(), 13)
            ways = all_reduce_in_every_way(x, sub)
            ways["root"] = collectives.broadcast(x, sub.size() - 1, sub, algorithm="tree")
            results[axis] = ways
        return results

    run = launch(job, 6)
    members = {
        "dp": lambda r: [r % 3, r % 3 + 3],
        "tp": lambda r: [r - r % 3 + k for k in (0, 1, 2)],
    }
    for rank, results in enumerate(run.results):
        for axis, ways in results.items():
            everyone = [values(peer, 13) for peer in members[axis](rank)]
            assert torch.equal(ways.pop("root"), everyone[-1])
            assert all(torch.equal(total, in_order("sum", everyone)) for total in ways.values())
    assert {comm.axis for comm in run.ledger.comms} == {"dp", "tp"}


def test_members_of_a_group_come_in_the_order_given():
    def job(group):
        some = Members(group, [3, 0, 2])
        if group.rank() in some.ranks:
            return collectives.ring_all_gather(torch.tensor([group.rank()]), some).tolist()

    assert launch(job, 4).results == [[3, 0, 2], None, [3, 0, 2], [3, 0, 2]]


# -- messages, rounds and bytes ----------------------------------------------------------------


def leaves_of(run, call):
    """Return the messages of one call, on the rank that made it."""
    return [comm for comm in run.ledger.leaves(rank=call.rank) if [*comm.within()][-1] is call]


def calls_of(run, op):
    """Group the k-th calls of `op` on all ranks: [[rank 0's first, rank 1's first, ...], ...]."""
    by_rank = [run.ledger.calls(op, rank=rank) for rank in range(len(run.ledger.span))]
    return list(zip(*by_rank, strict=True))


def rounds(run, calls):
    """Count the rounds that these messages need.

    Per round, a rank can send one message and receive one, in the order of its program. It knows
    a message only after it has waited for it.
    """
    leaves = [leaves_of(run, call) for call in calls]
    sends = [deque(comm for comm in mine if comm.op == "send") for mine in leaves]
    receives = [
        deque(sorted((comm for comm in mine if comm.op == "recv"), key=lambda comm: comm.end))
        for mine in leaves
    ]
    sent, received = Counter(), Counter()  # by rank: the last round of each
    arrived = [[] for _ in calls]  # by rank: (time, round)

    def is_next(rank, peer):
        send, receive = sends[rank][0], receives[peer][0] if receives[peer] else None
        knows_all = not receives[rank] or receives[rank][0].end > send.start
        return knows_all and receive and rank in receive.received_from

    while any(sends):
        heads = (
            (rank, peer) for rank, mine in enumerate(sends) if mine for peer in mine[0].sent_to
        )
        rank, peer = next(pair for pair in heads if is_next(*pair))  # (raises if none match)
        send, receive = sends[rank].popleft(), receives[peer].popleft()
        known = max((turn for when, turn in arrived[rank] if when <= send.start), default=0)
        sent[rank] = received[peer] = turn = 1 + max(sent[rank], received[peer], known)
        arrived[peer].append((receive.end, turn))
    assert not any(receives)
    return max(sent.values(), default=0)


def every_collective(length, group):
    """Call each algorithm once on `length` int32 values."""
    size = group.size()
    x = values(group.rank(), length, torch.int32)
    shard, sizes = x.tensor_split(size)[group.rank()], collectives.split_sizes(length, size)
    collectives.star_broadcast(x, 0, group)
    collectives.tree_broadcast(x, 0, group)
    collectives.star_reduce(x, 0, group)
    collectives.tree_reduce(x, 0, group)
    collectives.gather(shard, 0, group, sizes)
    collectives.scatter(x, 0, group)
    collectives.ring_all_gather(shard, group, sizes)
    collectives.recursive_doubling_all_gather(shard, group, sizes)
    collectives.ring_reduce_scatter(x, group)
    collectives.recursive_halving_reduce_scatter(x, group)
    collectives.star_all_reduce(x, group)
    for roots in range(2, size + 1):
        collectives.stars_all_reduce(x, group, roots=roots)
    collectives.tree_all_reduce(x, group)
    collectives.ring_all_reduce(x, group)
    collectives.doubling_all_reduce(x, group)
    collectives.halving_doubling_all_reduce(x, group)
    collectives.pipelined_ring_all_reduce(x, group, piece_bytes=64)
    collectives.pairwise_all_to_all(x, group)
    for k in divisors(size):
        collectives.hierarchical_all_reduce(x, group, k)


FORMULAS = {
    "star_broadcast": ("broadcast", "star"),
    "tree_broadcast": ("broadcast", "tree"),
    "star_reduce": ("reduce", "star"),
    "tree_reduce": ("reduce", "tree"),
    "gather": ("gather", "star"),
    "scatter": ("scatter", "star"),
    "ring_all_gather": ("all_gather", "ring"),
    "recursive_doubling_all_gather": ("all_gather", "doubling"),
    "ring_reduce_scatter": ("reduce_scatter", "ring"),
    "recursive_halving_reduce_scatter": ("reduce_scatter", "halving"),
    "star_all_reduce": ("all_reduce", "star"),
    "stars_all_reduce": ("all_reduce", "stars"),
    "tree_all_reduce": ("all_reduce", "tree"),
    "ring_all_reduce": ("all_reduce", "ring"),
    "doubling_all_reduce": ("all_reduce", "doubling"),
    "halving_doubling_all_reduce": ("all_reduce", "halving_doubling"),
    "pipelined_ring_all_reduce": ("all_reduce", "ring"),
    "pairwise_all_to_all": ("all_to_all", "pairwise"),
    "hierarchical_all_reduce": ("all_reduce", "hierarchical"),
}
NO_ITEMSIZE = {"broadcast", "reduce"}


def formula(op, nbytes, size, **more):
    """Return what calculators.costs predicts for `op` on int32."""
    name, algorithm = FORMULAS[op]
    if name not in NO_ITEMSIZE:
        more["itemsize"] = 4
    return getattr(costs, name)(nbytes, size, algorithm, **more)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_rounds_equal_the_closed_forms_of_the_calculator(size):
    def job(group):
        for length in LENGTHS:
            every_collective(length, group)

    run = launch(job, size)
    for op in FORMULAS:
        measured = calls_of(run, op)
        if op == "hierarchical_all_reduce":
            nodes = [dict(ranks_per_node=k) for _ in LENGTHS for k in divisors(size)]
        elif op == "stars_all_reduce":
            nodes = [dict(roots=roots) for _ in LENGTHS for roots in range(2, size + 1)]
        else:
            nodes = [{}] * len(LENGTHS)
        lengths = [length for length in LENGTHS for _ in range(len(nodes) // len(LENGTHS))]
        assert len(measured) == len(lengths)
        for calls, length, node in zip(measured, lengths, nodes, strict=True):
            theory = formula(op, 4 * length, size, **node)
            assert tuple(call.sent for call in calls) == theory.sent, (op, length, node)
            assert sum(call.received for call in calls) == theory.total_bytes
            if op != "pipelined_ring_all_reduce":  # it cuts each round into several
                assert rounds(run, calls) == theory.rounds, (op, length, node)


@pytest.mark.parametrize("size", SIZES)
def test_ring_all_reduce_moves_the_optimal_bytes_and_only_to_the_successor(size):
    run = launch(lambda group: collectives.ring_all_reduce(torch.ones(840), group), size)
    nbytes = 840 * 4
    assert run.ledger.total_bytes() == 2 * (size - 1) * nbytes
    for rank in range(size):
        assert run.ledger.total_bytes(rank=rank) * size == 2 * (size - 1) * nbytes
        sends = [comm for comm in run.ledger.leaves(rank=rank) if comm.op == "send"]
        assert len(sends) == 2 * (size - 1)  # one per round
        assert {comm.nbytes for comm in sends} <= {nbytes // size}  # at most one chunk
        assert {peer for comm in sends for peer in comm.sent_to} <= {(rank + 1) % size}


def test_the_ring_stays_a_ring_when_the_ranks_do_not_divide_the_elements():
    run = launch(lambda group: collectives.ring_all_reduce(torch.ones(841), group), 5)
    assert run.ledger.total_bytes() == 2 * 4 * 841 * 4
    for rank, row in enumerate(run.ledger.traffic()):
        assert [peer for peer, sent in enumerate(row) if sent] == [(rank + 1) % 5]


def test_an_all_reduce_is_one_call_made_of_a_reduce_scatter_and_an_all_gather():
    run = launch(lambda group: collectives.all_reduce(torch.ones(8), group, algorithm="ring"), 4)
    for rank in range(4):
        (call,) = run.ledger.calls(rank=rank)
        chains = {tuple(outer.op for outer in leaf.within()) for leaf in leaves_of(run, call)}
        halves = ("ring_reduce_scatter", "ring_all_gather")
        assert chains == {
            (message, half, "ring_all_reduce", "all_reduce")
            for message in ("send", "recv")
            for half in halves
        }


def test_all_to_all_sends_exactly_its_splits():
    def job(group):
        rank = group.rank()
        inputs = [(rank + 2 * peer) % 3 for peer in range(4)]
        outputs = [(peer + 2 * rank) % 3 for peer in range(4)]
        collectives.all_to_all(torch.ones(sum(inputs), 5), group, inputs, outputs)

    splits = [[20 * ((rank + 2 * peer) % 3) for peer in range(4)] for rank in range(4)]
    traffic = [
        [sent * (peer != rank) for peer, sent in enumerate(row)] for rank, row in enumerate(splits)
    ]
    run = launch(job, 4)
    assert run.ledger.traffic() == traffic
    theory = costs.all_to_all(0, 4, splits=splits)
    assert theory.sent == tuple(map(sum, traffic))
    assert rounds(run, calls_of(run, "all_to_all")[0]) == theory.rounds


@pytest.mark.skipif(not hasattr(__import__("socket"), "TCP_INFO"), reason="needs Linux TCP_INFO")
@pytest.mark.parametrize("way", ALL_REDUCE)
def test_the_sockets_carried_what_the_ledger_says(way):
    elements = 100_001

    def job(group):
        collectives.all_reduce(torch.ones(elements), group, algorithm=way)
        collectives.barrier(group)  # The kernel may still hold the last sends.

    run = launch(job, 4)
    for rank, (sent, received) in enumerate(run.ledger.wire_bytes):
        messages = list(run.ledger.leaves(rank=rank))
        for wire, noted in (
            (sent, sum(comm.sent for comm in messages)),
            (received, sum(comm.received for comm in messages)),
        ):
            # gloo puts a header before each message and answers each with a ready signal.
            assert noted <= wire <= noted + 128 * len(messages), (rank, wire, noted)


def test_the_fast_ring_keeps_two_pieces_on_their_way():
    def job(group):
        x = torch.ones(4 * 8 * 256)
        collectives.ring_all_reduce(x, group)
        collectives.pipelined_ring_all_reduce(x, group, piece_bytes=1024)

    def most_at_once(messages):
        marks = [(c.start, 1) for c in messages] + [(c.end, -1) for c in messages]
        total = most = 0
        for _, change in sorted(marks):
            total += change
            most = max(most, total)
        return most

    run = launch(job, 4)
    for rank in range(4):
        receives = {
            call.op: [c for c in leaves_of(run, call) if c.op == "recv"]
            for call in run.ledger.calls(rank=rank)
        }
        assert len(receives["ring_all_reduce"]) == 6
        assert most_at_once(receives["ring_all_reduce"]) == 1
        pieces = receives["pipelined_ring_all_reduce"]
        assert len(pieces) == 6 * 8 and {c.nbytes for c in pieces} == {1024}
        assert most_at_once(pieces) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_nobody_leaves_a_barrier_before_the_last_has_come(size):
    def job(group):
        times = []
        for late in range(size):
            collectives.barrier(group)
            if group.rank() == late:
                time.sleep(0.03)
            came = time.time()
            collectives.barrier(group)
            times.append((came, time.time()))
        return times

    run = launch(job, size)
    for turn in zip(*run.results, strict=True):
        assert min(left for _, left in turn) >= max(came for came, _ in turn)
    assert run.ledger.total_bytes() == 0
    assert rounds(run, calls_of(run, "barrier")[0]) == (size - 1).bit_length()


@pytest.mark.parametrize(
    "nbytes, algorithm",
    [
        (1 << 10, "star_all_reduce"),
        (16 << 20, "ring_all_reduce"),
    ],
)
def test_auto_goes_by_size(nbytes, algorithm):
    run = launch(lambda group: collectives.all_reduce(torch.ones(nbytes // 4), group)[0].item(), 4)
    assert run.results == [4.0] * 4
    for rank in range(4):
        inner = [comm.op for comm in run.ledger.comms if comm.rank == rank and comm.parent]
        assert inner[0] == algorithm


# -- errors in one sentence ----------------------------------------------------------------------

X = torch.ones(4)


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda c, g: c.all_reduce(X, g, op="avg"), 'op=\'avg\' is none of "sum", "max", "min"'),
        (lambda c, g: c.ring_all_reduce(X, g, op="mean"), "is known to reduce"),
        (lambda c, g: c.all_reduce(X.int(), g, op="mean"), "torch.int32 would have to round"),
        (lambda c, g: c.all_reduce(X.bool(), g), "count with x.int()"),
        (lambda c, g: c.all_reduce(X, g, algorithm="fast"), "algorithm='fast' is none of"),
        (lambda c, g: c.hierarchical_all_reduce(X, g, 3), "nodes=3 ranks each do not divide the 1"),
        (lambda c, g: c.hierarchical_all_gather(X, g, [0, 1]), "not one entry for each of 1 ranks"),
        (lambda c, g: c.broadcast(X, 1, g), "root=1 is no rank of this group: give 0 to 0"),
        (lambda c, g: c.star_reduce(X, -1, g), "root=-1 is no rank"),
        (lambda c, g: c.all_gather(X, g, sizes=[3]), "of which rank 0 has 4 rows"),
        (lambda c, g: c.all_gather(X.sum(), g), "no dimension"),
        (lambda c, g: c.reduce_scatter(X.sum(), g), "no dimension"),
        (lambda c, g: c.all_to_all(X, g, [3], [3]), "does not cut 4 rows"),
        (lambda c, g: c.all_to_all(X, g, [4]), "both input_splits and output_splits"),
        (lambda c, g: c.all_to_all(X, g, [4], [3]), "what this rank keeps, is 4"),
        (lambda c, g: c.start(g, sends=[(X, 1)]), "send with rank 1: this group has ranks 0 to 0."),
        (lambda c, g: c.recv(X, -1, g), "recv with rank -1: this group has ranks 0 to 0."),
        (lambda c, g: c.exchange(X, 0, 0, g), "recv with rank 0 itself: a message goes to another"),
    ],
)
def test_errors_say_what_would_be_right(call, said):
    def job(group):
        with pytest.raises(ValueError) as error:
            call(collectives, group)
        return str(error.value)

    assert said in launch(job, 1).results[0]
