"""Check the closed forms of costs.py against every message of every algorithm, one by one.

The oracle below knows no formula: it moves sets of (shard, contributing ranks) between ranks,
checks that the collective did its job, and adds up what each rank sent.
"""

import pytest

from mini_dist.plan.calculators import costs
from mini_dist.plan.calculators.links import Hierarchy, Link

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16]
LINK = Link(latency=1e-6, bandwidth=1e9)


class Ranks:
    """Hold, for each rank and shard, the set of ranks whose terms the partial sum contains."""

    def __init__(self, size, shards, held):
        self.size, self.shards, self.held = size, shards, held
        self.sent, self.rounds, self.seconds = [0] * size, 0, 0.0

    def round(self, messages):
        """Send all messages at once: (source, target, shards, "add" or "replace")."""
        messages = list(messages)
        assert len({source for source, *_ in messages}) == len(messages), "sends twice in a round"
        assert len({target for _, target, *_ in messages}) == len(messages), "is sent to twice"
        before = [dict(held) for held in self.held]
        longest = 0
        for source, target, shards, how in messages:
            num_bytes = sum(self.shards[shard] for shard in shards)
            self.sent[source] += num_bytes
            longest = max(longest, num_bytes)
            for shard in shards:
                mine = self.held[target].get(shard, frozenset()) if how == "add" else frozenset()
                assert not mine & before[source][shard], f"a term of shard {shard} is added twice"
                self.held[target][shard] = mine | before[source][shard]
        self.rounds += 1
        self.seconds += LINK.latency + longest / LINK.bandwidth


def whole(size, shards):
    """Every rank holds its own term of every shard."""
    return Ranks(
        size, shards, [{s: frozenset([r]) for s in range(len(shards))} for r in range(size)]
    )


def own(size, shards):
    """Rank r holds shard r, finished."""
    return Ranks(size, shards, [{r: frozenset([r])} for r in range(size)])


def ring_reduce_scatter(ranks, n):
    for step in range(n - 1):  # shard c starts on rank c + 1 and ends on rank c
        ranks.round([(r, (r + 1) % n, [(r - 1 - step) % n], "add") for r in range(n)])


def ring_all_gather(ranks, n):
    for step in range(n - 1):
        ranks.round([(r, (r + 1) % n, [(r - step) % n], "replace") for r in range(n)])


def halving(ranks, m, blocks):
    distance = m // 2
    while distance:
        ranks.round(
            [
                (
                    r,
                    r ^ distance,
                    [
                        s
                        for b in range(m)
                        if b // distance == (r ^ distance) // distance
                        for s in blocks[b]
                    ],
                    "add",
                )
                for r in range(m)
            ]
        )
        distance //= 2


def doubling(ranks, m, blocks):
    distance = 1
    while distance < m:
        ranks.round(
            [
                (
                    r,
                    r ^ distance,
                    [s for b in range(m) if b // distance == r // distance for s in blocks[b]],
                    "replace",
                )
                for r in range(m)
            ]
        )
        distance *= 2


def fold(n):
    m = 1
    while 2 * m <= n:
        m *= 2
    return m, range(m, n)


def play(op, algorithm, n, shards):
    """Run the algorithm, check that it did its job, and return the ranks."""
    everyone, all_shards = frozenset(range(n)), list(range(len(shards)))
    m, extras = fold(n)
    blocks = [[s for s in all_shards if s % m == b] for b in range(m)]  # with the folded rank's
    if op == "reduce_scatter":
        ranks = whole(n, shards)
        if algorithm == "ring":
            ring_reduce_scatter(ranks, n)
        else:
            if extras:
                ranks.round([(r, r - m, all_shards, "add") for r in extras])
            halving(ranks, m, blocks)
            if extras:
                ranks.round([(r - m, r, [r], "replace") for r in extras])
        assert all(ranks.held[r][r] == everyone for r in range(n))
    elif op == "all_gather":
        ranks = own(n, shards)
        if algorithm == "ring":
            ring_all_gather(ranks, n)
        else:
            if extras:
                ranks.round([(r, r - m, [r], "replace") for r in extras])
            doubling(ranks, m, blocks)
            if extras:
                ranks.round([(r - m, r, all_shards, "replace") for r in extras])
        assert all(ranks.held[r] == {s: frozenset([s]) for s in all_shards} for r in range(n))
    elif op == "all_reduce":
        ranks = whole(n, shards)
        if algorithm == "ring":
            ring_reduce_scatter(ranks, n)
            ring_all_gather(ranks, n)
        elif algorithm == "doubling":
            if extras:
                ranks.round([(r, r - m, all_shards, "add") for r in extras])
            distance = 1
            while distance < m:
                ranks.round([(r, r ^ distance, all_shards, "add") for r in range(m)])
                distance *= 2
            if extras:
                ranks.round([(r - m, r, all_shards, "replace") for r in extras])
        elif algorithm == "halving_doubling":
            if extras:
                ranks.round([(r, r - m, all_shards, "add") for r in extras])
            pieces = [[s] for s in all_shards]
            halving(ranks, m, pieces)
            doubling(ranks, m, pieces)
            if extras:
                ranks.round([(r - m, r, all_shards, "replace") for r in extras])
        elif algorithm == "star":
            for r in range(1, n):
                ranks.round([(r, 0, all_shards, "add")])
            for r in range(1, n):
                ranks.round([(0, r, all_shards, "replace")])
        elif algorithm == "stars":  # shard s belongs to root places[s]
            places = [s * n // len(shards) for s in all_shards]
            others, k = [r for r in range(n) if r not in places], len(places)
            rounds = [[(p, places[s - j], s) for s, p in enumerate(places)] for j in range(1, k)]
            most = max(k, len(others))
            for j in range(most if others else 0):
                meet = [(p, (s + j) % most, s) for s, p in enumerate(places)]
                rounds.append([(p, others[i], s) for p, i, s in meet if i < len(others)])
            for each in rounds:
                ranks.round([(r, p, [s], "add") for p, r, s in each])
            for each in rounds:
                ranks.round([(p, r, [s], "replace") for p, r, s in each])
        else:
            half = 1
            while half < n:
                half *= 2
            while half > 1:
                half //= 2
                ranks.round([(r + half, r, all_shards, "add") for r in range(half) if r + half < n])
            while half < n:
                ranks.round(
                    [(r, r + half, all_shards, "replace") for r in range(half) if r + half < n]
                )
                half *= 2
        assert all(ranks.held[r][s] == everyone for r in range(n) for s in all_shards)
    return ranks


def parts(num_bytes, count, itemsize):
    items = num_bytes // itemsize
    return [(items // count + (i < items % count)) * itemsize for i in range(count)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("op", "algorithm"),
    [
        ("reduce_scatter", "ring"),
        ("reduce_scatter", "halving"),
        ("all_gather", "ring"),
        ("all_gather", "doubling"),
        ("all_reduce", "ring"),
        ("all_reduce", "doubling"),
        ("all_reduce", "halving_doubling"),
        ("all_reduce", "star"),
        ("all_reduce", "stars"),
        ("all_reduce", "tree"),
    ],
)
def test_the_closed_form_counts_every_message(op, algorithm, size):
    function = costs.COLLECTIVES[op][0]
    pieces = fold(size)[0] if algorithm == "halving_doubling" else size
    for num_bytes, itemsize in ((960, 4), (1000, 4), (40, 8), (4, 4), (0, 4)):
        shards = parts(num_bytes, pieces, itemsize)
        if algorithm == "stars":  # equal shards, except for shorter last ones
            roots = max(1, size // 2)
            longest = -(-num_bytes // itemsize // roots) * itemsize
            shards = [min(longest, max(0, num_bytes - r * longest)) for r in range(roots)]
        played = play(op, algorithm, size, shards)
        cost = (
            function(num_bytes, size, algorithm, LINK, itemsize)
            if algorithm not in ("star", "tree")
            else function(num_bytes, size, algorithm, LINK)
        )
        assert list(cost.sent) == played.sent
        assert cost.rounds == played.rounds
        assert cost.seconds == pytest.approx(played.seconds, rel=1e-9)


@pytest.mark.parametrize("roots", [0, 5, 1.5])
def test_stars_with_a_number_of_roots_that_cannot_be_are_refused(roots):
    with pytest.raises(ValueError, match=f"roots={roots} is not a number of roots: give 1 to 4"):
        costs.all_reduce(960, 4, "stars", LINK, 4, roots=roots)


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_all_reduce_moves_the_optimal_bytes(size):
    n, N = size, 13 * size * 8
    cost = costs.all_reduce(N, n, "ring")
    assert cost.total_bytes == 2 * (n - 1) * N
    assert set(cost.sent) == {2 * (n - 1) * N // n}  # n divides N, so all ranks send the same
    assert cost.rounds == 2 * (n - 1)
    uneven = costs.all_reduce(N + 8, n, "ring", itemsize=8)
    assert uneven.total_bytes == 2 * (n - 1) * (N + 8)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_and_reduce_reach_everyone_once(size):
    for algorithm, rounds in (("star", size - 1), ("tree", (size - 1).bit_length())):
        down = costs.broadcast(100, size, algorithm)
        up = costs.reduce(100, size, algorithm)
        assert down.total_bytes == up.total_bytes == (size - 1) * 100
        assert down.rounds == up.rounds == rounds
        assert up.sent == (0,) + (100,) * (size - 1)
    assert costs.broadcast(100, size, "star").sent[0] == (size - 1) * 100
    assert costs.broadcast(100, size, "tree").bytes_per_rank == (size - 1).bit_length() * 100


@pytest.mark.parametrize(("size", "per_node"), [(4, 2), (8, 4), (12, 3), (6, 6), (6, 1)])
def test_hierarchical_sends_a_node_s_share_of_the_bytes_between_nodes(size, per_node):
    N = 12 * size * per_node
    cost = costs.all_reduce(N, size, "hierarchical", LINK, ranks_per_node=per_node)
    nodes = size // per_node
    inside, between = 2 * (per_node - 1) * N // per_node, 2 * (nodes - 1) * N // nodes // per_node
    assert set(cost.sent) == {inside + between}
    assert cost.rounds == 2 * (per_node - 1) + 2 * (nodes - 1)


def test_all_to_all_keeps_what_is_its_own():
    even = costs.all_to_all(960, 4)
    assert even.sent == (720,) * 4 and even.rounds == 3
    splits = [[5, 1, 2], [0, 7, 3], [4, 4, 9]]
    uneven = costs.all_to_all(0, 3, link=LINK, splits=splits)
    assert uneven.sent == (3, 3, 8)
    # Round 1 sends 1, 3, 4 and round 2 sends 2, 0, 4; the longest message sets the time.
    assert uneven.seconds == pytest.approx(2 * LINK.latency + (4 + 4) / LINK.bandwidth)


def test_gather_and_scatter_load_the_root():
    assert costs.gather(100, 5).sent == (0, 20, 20, 20, 20)
    assert costs.scatter(100, 5).sent == (80, 0, 0, 0, 0)


def test_who_wins_depends_on_the_size():
    """Latency decides for small messages, bandwidth for large ones (Thakur et al. 2005)."""
    slow_start = Link(latency=1e-3, bandwidth=1e9)

    def best(num_bytes):
        return min(
            ("star", "tree", "ring"),
            key=lambda a: costs.all_reduce(num_bytes, 16, a, slow_start).seconds,
        )

    assert best(100) == "tree" and best(10**9) == "ring"


def test_a_hierarchy_makes_flat_rings_wait_for_the_network():
    pair = Hierarchy(4, inner=Link(0, 100.0), outer=Link(0, 1.0))
    assert costs.all_reduce(800, 4, "ring", pair).seconds == pytest.approx(2 * 3 * 200 / 100)
    assert costs.all_reduce(800, 8, "ring", pair).seconds == pytest.approx(2 * 7 * 100 / 1)
    across = costs.all_reduce(800, 8, "hierarchical", pair)
    # There are 6 rounds of 200 inside, then 2 rounds of 100 between the nodes.
    assert across.seconds == pytest.approx(6 * 200 / 100 + 2 * 100 / 1)
    # Only halving's first exchange, of 400 bytes, goes to the other node.
    halved = costs.reduce_scatter(800, 8, "halving", pair)
    assert halved.seconds == pytest.approx(400 / 1 + 200 / 100 + 100 / 100)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Link(-1e-6, 1e9), "latency=-1e-06"),
        (lambda: Link(0, -1e9), "bandwidth=-1000000000.0"),
        (lambda: Link(0, 0), "bandwidth=0"),
        (lambda: Link(0, float("nan")), "bandwidth=nan"),
        (lambda: Hierarchy(0, LINK, LINK), "ranks_per_node=0"),
        (lambda: costs.all_reduce(10, 4, "butterfly"), "algorithm='butterfly'"),
        (lambda: costs.all_reduce(10, 0), "size=0"),
        (lambda: costs.all_reduce(-1, 4), "num_bytes=-1"),
        (lambda: costs.all_reduce(10, 6, "hierarchical", ranks_per_node=4), "ranks_per_node=4"),
        (lambda: costs.all_to_all(0, 3, splits=[[1]]), "splits has 1 rows"),
    ],
)
def test_impossible_links_and_collectives_are_refused(call, says):
    with pytest.raises(ValueError) as error:
        call()
    assert says in str(error.value)
