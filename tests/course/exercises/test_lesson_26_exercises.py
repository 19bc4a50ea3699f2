"""Lesson 26: rings that cross too often, orders that fill an uplink, ranks that look exchanged."""

import itertools
import math
import sys

import cloudpickle
import pytest
import torch

from mini_dist import Grid, check
from mini_dist.collectives import (
    exchange,
    gather,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter,
    split_sizes,
    star_broadcast,
    star_reduce,
)
from mini_dist.collectives.mesh import uplink_bytes
from mini_dist.collectives.messages import Members
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_all_reduce, wrong_order, wrong_places = Wrong(), Wrong(), Wrong()
right_all_reduce, right_order = Right("all_reduce_on_hosts"), Right("order_on_hosts")
right_places = Right("find_exchanged")


def levels(hosts, group):
    """Return my host's ranks, and the ranks with my index on each host."""
    ranks = {host: [r for r, h in enumerate(hosts) if h == host] for host in sorted(set(hosts))}
    inside = Members(group, ranks[hosts[group.rank()]])
    return inside, Members(group, [members[inside.rank()] for members in ranks.values()])


@wrong_all_reduce("at least as many as in a single ring")
def one_ring(x, hosts, group):
    return ring_all_reduce(x, group)


@wrong_all_reduce("whichever ranks `hosts` puts there")
def thinks_that_neighbours_share_a_host(x, hosts, group):
    k = hosts.count(hosts[0])
    inside, across = levels([rank // k for rank in range(group.size())], group)
    chunk = ring_all_reduce(ring_reduce_scatter(x.flatten(), inside), across)
    return ring_all_gather(chunk, inside, split_sizes(x.numel(), inside.size())).view(x.shape)


@wrong_all_reduce("only a rank's own chunk")
def sends_all_of_it_across(x, hosts, group):
    inside, across = levels(hosts, group)
    return ring_all_reduce(ring_all_reduce(x, inside), across)


@wrong_all_reduce("at least as many as in a single ring")
def a_star_across(x, hosts, group):
    inside, across = levels(hosts, group)
    chunk = ring_reduce_scatter(x.flatten(), inside)
    total = star_broadcast(chunk if (t := star_reduce(chunk, 0, across)) is None else t, 0, across)
    return ring_all_gather(total, inside, split_sizes(x.numel(), inside.size())).view(x.shape)


@wrong_all_reduce("The sum has the shape of x")
def stays_flat(x, hosts, group):
    return solutions.all_reduce_on_hosts(x.flatten(), hosts, group)


@wrong_all_reduce("the ring between hosts joins the ranks that have the same chunk")
def leaves_out_the_other_hosts(x, hosts, group):
    inside, _ = levels(hosts, group)
    chunk = ring_reduce_scatter(x.flatten(), inside)
    return ring_all_gather(chunk, inside, split_sizes(x.numel(), inside.size())).view(x.shape)


@wrong_all_reduce("x was changed")
def works_in_x(x, hosts, group):
    x.copy_(solutions.all_reduce_on_hosts(x, hosts, group))
    return x.clone()


@wrong_all_reduce("a tensor like x")
def returns_nothing(x, hosts, group):
    solutions.all_reduce_on_hosts(x, hosts, group)


@right_all_reduce
def through_a_leader(x, hosts, group):
    inside, _ = levels(hosts, group)
    leaders = Members(group, [hosts.index(host) for host in sorted(set(hosts))])
    total = star_reduce(x, 0, inside)
    if inside.rank() == 0:
        total = ring_all_reduce(total, leaders)
    return star_broadcast(x if total is None else total, 0, inside)


@right_all_reduce
def gathers_inside_and_adds(x, hosts, group):
    inside, across = levels(hosts, group)
    everyones = gather(x[None], 0, inside)
    own = None if everyones is None else everyones.sum(0, dtype=x.dtype).flatten()
    chunk = scatter(x.flatten() if own is None else own, 0, inside)
    chunk = ring_all_reduce(chunk, across)
    return ring_all_gather(chunk, inside, split_sizes(x.numel(), inside.size())).view(x.shape)


@right_all_reduce
def in_halves_across(x, hosts, group):
    inside, across = levels(hosts, group)
    chunk = ring_reduce_scatter(x.flatten(), inside)
    part = ring_reduce_scatter(chunk, across)
    chunk = ring_all_gather(part, across, split_sizes(len(chunk), across.size()))
    return ring_all_gather(chunk, inside, split_sizes(x.numel(), inside.size())).view(x.shape)


@right_all_reduce
def all_gather_by_hand(x, hosts, group):
    inside, across = levels(hosts, group)
    chunk = ring_all_reduce(ring_reduce_scatter(x.flatten(), inside), across)
    size, rank = inside.size(), inside.rank()
    parts = list(x.flatten().tensor_split(size))
    parts[rank] = chunk
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        parts[source] = exchange(chunk, to, source, inside, like=parts[source])
    return torch.cat(parts).view(x.shape)


@wrong_order("Reversed")
def busiest_outermost(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=sent.get, reverse=True))


@wrong_order("two small axes may fit")
def busiest_innermost(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=sent.get))


@wrong_order("two small axes may fit")
def largest_traffic_in_all_innermost(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=lambda axis: sent[axis] * axes[axis]))


@wrong_order("another order has")
def most_sent_for_its_size_innermost(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=lambda axis: sent[axis] / axes[axis]))


@wrong_order("Reversed")
def as_they_come(axes, sent, ranks_per_host):
    return tuple(axes)


@wrong_order("each once, the outermost first")
def the_innermost_alone(axes, sent, ranks_per_host):
    return max(axes, key=sent.get)


@right_order
def by_trying(axes, sent, ranks_per_host):
    best = None
    for order in itertools.permutations(axes):
        grid = Grid(**{axis: axes[axis] for axis in order})
        hosts = [rank // ranks_per_host for rank in range(grid.size)]
        cost = uplink_bytes(grid, sent, hosts)
        if best is None or cost < best[0]:
            best = cost, order
    return best[1]


@right_order
def as_a_list_of_the_last_best(axes, sent, ranks_per_host):
    def cost(order):
        hosts = [r // ranks_per_host for r in range(math.prod(axes.values()))]
        return uplink_bytes(Grid(**{a: axes[a] for a in order}), sent, hosts)

    return list(min(list(itertools.permutations(axes))[::-1], key=cost))


@right_order
def counts_by_itself(axes, sent, ranks_per_host):
    def cost(order):
        """On an axis of stride s, neighbors are s apart, and the last wraps around to the first."""
        out, stride = {}, 1
        size = math.prod(axes.values())
        for axis in reversed(order):
            for rank in range(size):
                index = rank // stride % axes[axis]
                after = rank + (((index + 1) % axes[axis]) - index) * stride
                if rank // ranks_per_host != after // ranks_per_host:
                    host = rank // ranks_per_host
                    out[host] = out.get(host, 0) + sent[axis]
            stride *= axes[axis]
        return max(out.values(), default=0)

    return min(itertools.permutations(axes), key=cost)


@right_order
def by_recursion(axes, sent, ranks_per_host):
    hosts = [rank // ranks_per_host for rank in range(math.prod(axes.values()))]

    def best(chosen, left):
        if not left:
            grid = Grid(**{axis: axes[axis] for axis in chosen})
            return uplink_bytes(grid, sent, hosts), chosen
        return min(best((*chosen, axis), left - {axis}) for axis in left)

    return best((), set(axes))[1]


@wrong_places("Some ranks send wrongly only because")
def the_first_that_send_wrongly(traffic):
    n = len(traffic)
    after = [row.index(max(row)) for row in traffic]
    odd = [place for place in range(n) if after[place] != (place + 1) % n]
    return tuple(odd[:2]) if odd else None


@wrong_places("Return the two places")
def what_a_place_sends_to_itself(traffic):
    """The noise of a job is no clue: no rank sends to itself, wherever it was placed."""
    odd = [place for place in range(len(traffic)) if traffic[place][place]]
    return tuple(odd) if odd else None


@wrong_places("return None")
def always_finds(traffic):
    return solutions.find_exchanged(traffic) or (0, 1)


@wrong_places("Return the two places")
def finds_one(traffic):
    found = solutions.find_exchanged(traffic)
    return found and found[0]


@wrong_places("put the smaller index first")
def the_larger_first(traffic):
    found = solutions.find_exchanged(traffic)
    return found and found[::-1]


@right_places
def builds_the_ring(traffic):
    """Follow the ring from every place; the two exchanged ranks are in each other's place."""
    n = len(traffic)
    for first in range(n):
        order, place = [], first
        for _ in range(n):
            order.append(place)
            place = max(range(n), key=traffic[place].__getitem__)
        wrong = [p for rank, p in enumerate(order) if rank != p]
        if len(wrong) in (0, 2):
            return tuple(sorted(wrong)) or None


@right_places
def exchanges_rows_and_columns(traffic):
    n = len(traffic)

    def is_a_ring(matrix):
        return all(max(range(n), key=matrix[p].__getitem__) == (p + 1) % n for p in range(n))

    if is_a_ring(traffic):
        return None
    for a in range(n):
        for b in range(a + 1, n):
            at = list(range(n))
            at[a], at[b] = b, a
            if is_a_ring([[traffic[i][j] for j in at] for i in at]):
                return a, b


@right_places
def with_tensors(traffic):
    edges = torch.tensor(traffic)
    edges = edges > edges.max() / 2
    n = len(edges)
    wanted = torch.roll(torch.eye(n, dtype=torch.bool), 1, 1)
    if torch.equal(edges, wanted):
        return None
    for a, b in itertools.combinations(range(n), 2):
        at = list(range(n))
        at[a], at[b] = at[b], at[a]
        if torch.equal(edges[at][:, at], wanted):
            return [a, b]


@right_places
def with_a_map(traffic):
    n = len(traffic)
    after = {place: row.index(max(row)) for place, row in enumerate(traffic)}
    if all(there == (place + 1) % n for place, there in after.items()):
        return None
    pairs = itertools.combinations(range(n), 2)

    def fits(pair):
        swap = {pair[0]: pair[1], pair[1]: pair[0]}
        return all(
            swap.get(there, there) == (swap.get(place, place) + 1) % n
            for place, there in after.items()
        )

    return next(filter(fits, pairs))


WRONG = [("all_reduce_on_hosts", *each) for each in wrong_all_reduce.answers] + [
    ("order_on_hosts", *each) for each in wrong_order.answers
]
WRONG += [("find_exchanged", *each) for each in wrong_places.answers]
RIGHT = [
    (right.name, fn)
    for right in (right_all_reduce, right_order, right_places)
    for fn in right.answers
]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=lambda each: getattr(each, "__name__", ""))
def test_a_known_mistake_is_refused_and_named(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("name, fn", RIGHT, ids=lambda each: getattr(each, "__name__", ""))
def test_a_right_answer_may_look_otherwise(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", ["all_reduce_on_hosts", "order_on_hosts", "find_exchanged"])
def test_the_printed_solution_is_right(name):
    assert getattr(check, name).judge(getattr(solutions, name)).state == "right"
