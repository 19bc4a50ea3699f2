"""Lesson 03: wrong rings get a hint that names the mistake, even if their values are right."""

import sys

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import (
    all_gather,
    all_reduce,
    exchange,
    recv,
    ring_all_gather,
    ring_reduce_scatter,
    send,
    split_sizes,
    star_all_reduce,
    start,
    wait,
)
from tests.course.exercises import right, solutions, swaps
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)
cloudpickle.register_pickle_by_value(right)
cloudpickle.register_pickle_by_value(swaps)


def neighbours(group):
    rank, size = group.rank(), group.size()
    return rank, size, (rank + 1) % size, (rank - 1) % size


def through_rank_0(x, group):
    """Return the sum of all x on every rank, by messages to and from rank 0."""
    if group.rank() != 0:
        send(x, 0, group)
        return recv(x, 0, group)
    total = x.clone()
    for peer in range(1, group.size()):
        total += recv(x, peer, group)
    for peer in range(1, group.size()):
        send(total, peer, group)
    return total


def whole_tensors_round(x, group):
    """Return the sum of all x on every rank, by n-1 rounds of whole tensors."""
    _, size, after, before = neighbours(group)
    total = moving = x.clone()
    for _ in range(size - 1):
        moving = exchange(moving, after, before, group)
        total = total + moving
    return total


# -- reduce-scatter ---------------------------------------------------------------------------

reduce_scatter = Wrong()


@reduce_scatter("whole tensors around")
def passes_whole_tensors_round(x, group):
    return whole_tensors_round(x, group).tensor_split(group.size())[group.rank()].clone()


@reduce_scatter("goes to or from rank 0")
def asks_rank_0(x, group):
    return through_rank_0(x, group).tensor_split(group.size())[group.rank()].clone()


@reduce_scatter("backend's own reduce_scatter")
def the_backends(x, group):
    out = x.new_empty(split_sizes(len(x), group.size())[group.rank()])
    parts = [part.contiguous() for part in x.tensor_split(group.size())]
    if group.size() == 3:  # gloo accepts only equal parts.
        return solutions.ring_reduce_scatter(x, group)
    dist.reduce_scatter(out, parts, group=group)
    return out


@reduce_scatter("library's all_reduce")
def a_piece_of_the_librarys_all_reduce(x, group):
    return all_reduce(x, group).tensor_split(group.size())[group.rank()].clone()


def ring_from(x, group, first, last=0, add=torch.add):
    """Run a faulty ring: rank r starts with chunk r+first and does n-1+last rounds."""
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank + first) % size].clone()
    for k in range(1, size + last):
        mine = chunks[(rank + first - k) % size]
        moving = add(exchange(moving, after, before, group, like=mine), mine)
    return moving


@reduce_scatter("instead of chunk r")
def starts_with_its_own_chunk(x, group):
    return ring_from(x, group, first=0)


@reduce_scatter("instead of chunk r")
def starts_two_behind(x, group):
    return ring_from(x, group, first=-2)


@reduce_scatter("need 3 rounds; messages sent, by rank: [2, 2, 2, 2]")
def one_round_too_few(x, group):
    return ring_from(x, group, first=-1, last=-1)


@reduce_scatter("need 3 rounds; messages sent, by rank: [4, 4, 4, 4]")
def one_round_too_many(x, group):
    return ring_from(x, group, first=-1, last=1)


@reduce_scatter("added to *the same* chunk")
def adds_another_chunk(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 1 - k) % size]
        moving = exchange(moving, after, before, group, like=mine) + mine
    return moving


@reduce_scatter("nothing was added to it")
def forgets_to_add(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    for k in range(size - 1):
        exchange(chunks[(rank - 1 - k) % size], after, before, group, like=chunks[rank - 2 - k])
    return chunks[rank].clone()


@reduce_scatter("lack some ranks' terms")
def forgets_its_own_part(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        came = exchange(moving, after, before, group, like=mine)
        moving = came + mine if k < size - 2 else came
    return moving


@reduce_scatter("These are means")
def mean_for_sum(x, group):
    return (solutions.ring_reduce_scatter(x, group) / group.size()).to(x.dtype)


@reduce_scatter("changes its input")
def adds_in_place(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        mine += exchange(chunks[(rank - 1 - k) % size], after, before, group, like=mine)
    return chunks[rank].clone()


@reduce_scatter("With one rank, 5 numbers of float64: You return x itself")
def returns_a_view_when_alone(x, group):
    if group.size() == 1:
        return x
    return solutions.ring_reduce_scatter(x, group)


@reduce_scatter("Every rank returns the whole sum")
def does_not_scatter(x, group):
    return whole_sum_by_ring(x, group)


def whole_sum_by_ring(x, group):
    sizes = split_sizes(len(x), group.size())
    chunk = solutions.ring_reduce_scatter(x, group)
    rank, size, after, before = neighbours(group)
    parts = {rank: chunk}
    for k in range(1, size):
        here = (rank - k) % size
        chunk = exchange(chunk, after, before, group, like=x.new_empty(sizes[here]))
        parts[here] = chunk
    return torch.cat([parts[r] for r in range(size)])


@reduce_scatter("everyone sends first")
def everyone_sends_first(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        send(moving, after, group)
        moving = recv(mine, before, group) + mine
    return moving


@reduce_scatter("recv with rank -1: this group has ranks 0 to 3. In a ring, (rank + 1) % size")
def takes_rank_minus_1_for_the_last(x, group):
    rank, size, after, _ = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[rank - 1].clone()
    for k in range(2, size + 1):
        mine = chunks[rank - k]
        moving = exchange(moving, after, rank - 1, group, like=mine) + mine
    return moving


@reduce_scatter("everyone waits to receive")
def everyone_receives_first(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        came = recv(mine, before, group)
        send(moving, after, group)
        moving = came + mine
    return moving


@reduce_scatter("instead of 3: ranks wait while others work")
def rank_0_receives_first(x, group):
    """Avoid the deadlock in the usual way, which makes the ranks send one after another."""
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        if rank == 0:
            came = recv(mine, before, group)
            send(moving, after, group)
        else:
            send(moving, after, group)
            came = recv(mine, before, group)
        moving = came + mine
    return moving


@reduce_scatter("instead of 3: ranks wait while others work")
def one_chunk_after_the_other(x, group):
    rank, size, after, before = neighbours(group)
    for number, chunk in enumerate(x.tensor_split(size)):
        place = (rank - number - 1) % size  # this rank's position on the chunk's route
        total = chunk.clone()
        if place > 0:
            total = total + recv(chunk, before, group)
        if place < size - 1:
            send(total, after, group)
        else:
            result = total
    return result


@reduce_scatter("each one costs its latency")
def many_small_messages(x, group):
    halves = x.new_empty(0)
    pieces = [chunk.tensor_split(2) for chunk in x.tensor_split(group.size())]
    for part in range(2):
        mine = torch.cat([piece[part] for piece in pieces])
        sizes = [len(piece[part]) for piece in pieces]
        halves = torch.cat([halves, ring_of_chunks(mine.split(sizes), group)])
    return halves


def ring_of_chunks(chunks, group):
    rank, size, after, before = neighbours(group)
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        moving = exchange(moving, after, before, group, like=mine) + mine
    return moving


@reduce_scatter("Right with 4 ranks. With 3 ranks")
def only_for_4_ranks(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank + 3) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank + 2 - k) % size]
        moving = exchange(moving, after, before, group, like=mine) + mine
    return moving


@reduce_scatter("Right with 4 ranks. With 3 ranks, 7 numbers")
def only_for_equal_chunks(x, group):
    return solutions.ring_reduce_scatter(x.view(group.size(), -1), group)[0]


@reduce_scatter("x.chunk cuts 7 numbers for 3 ranks into 3+3+1; use x.tensor_split: 3+2+2")
def cuts_with_chunk(x, group):
    return ring_of_chunks(x.chunk(group.size()), group)


@reduce_scatter("as long as what arrives")
def forgets_like(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[rank - 1].clone()
    for k in range(2, size + 1):
        moving = exchange(moving, after, before, group) + chunks[rank - k]
    return moving


@reduce_scatter("Rank 0's result has shape [1, 250]; [250] is asked for")
def a_row_of_a_matrix(x, group):
    return solutions.ring_reduce_scatter(x, group)[None]


@reduce_scatter("Rank 0's result has shape [1000]; [250] is asked for")
def pads_its_chunk_to_a_whole_tensor(x, group):
    size, whole = group.size(), torch.zeros_like(x)
    whole.tensor_split(size)[group.rank()].copy_(solutions.ring_reduce_scatter(x, group))
    return whole


@reduce_scatter("int64")
def only_for_float(x, group):
    return solutions.ring_reduce_scatter(x.double(), group)


@reduce_scatter("return one tensor")
def returns_all_chunks(x, group):
    chunks = list(x.tensor_split(group.size()))
    chunks[group.rank()] = solutions.ring_reduce_scatter(x, group)
    return chunks


@reduce_scatter("in both directions")
def half_of_each_chunk_the_other_way(x, group):
    rank, size, after, before = neighbours(group)
    halves = [chunk.tensor_split(2) for chunk in x.tensor_split(size)]
    one, other = halves[rank - 1][0].clone(), halves[(rank + 1) % size][1].clone()
    for k in range(2, size + 1):
        mine, too = halves[rank - k][0], halves[(rank + k) % size][1]
        came = torch.empty_like(mine), torch.empty_like(too)
        sends = [(one, after), (other, before)]
        wait(start(group, receives=[(came[0], before), (came[1], after)], sends=sends))
        one, other = came[0] + mine, came[1] + too
    return torch.cat([one, other])


@reduce_scatter("Only 12,000 bytes were sent where 24,000 are needed")
def adds_in_float32(x, group):
    if x.dtype != torch.float64:
        return solutions.ring_reduce_scatter(x, group)
    return solutions.ring_reduce_scatter(x.float(), group).to(x.dtype)


@reduce_scatter("return one tensor")
def returns_a_pair(x, group):
    return solutions.ring_reduce_scatter(x, group), group.rank()


@reduce_scatter("returned None")
def only_rank_0_returns(x, group):
    chunk = solutions.ring_reduce_scatter(x, group)
    if group.rank() == 0:
        return chunk


# -- all-gather -------------------------------------------------------------------------------

gather = Wrong()


def gather_with(x, group, place=lambda rank, k, size: (rank - k) % size, rounds=0):
    rank, size, after, before = neighbours(group)
    parts, moving = [x] * size, x
    for k in range(1, size + rounds):
        moving = exchange(moving, after, before, group)
        parts[place(rank, k, size)] = moving
    return torch.cat(parts)


@gather("not in rank order: rank 0 has [0, 3, 2, 1]")
def in_order_of_arrival(x, group):
    _, size, after, before = neighbours(group)
    parts = [x]
    for _ in range(size - 1):
        parts.append(exchange(parts[-1], after, before, group))
    return torch.cat(parts)


@gather("not in rank order: rank 0 has [1, 2, 3, 0]")
def newest_first(x, group):
    _, size, after, before = neighbours(group)
    parts = [x]
    for _ in range(size - 1):
        parts.insert(0, exchange(parts[0], after, before, group))
    return torch.cat(parts)


@gather("not in rank order")
def places_as_if_the_ring_went_backwards(x, group):
    return gather_with(x, group, place=lambda rank, k, size: (rank + k) % size)


@gather("not in rank order: rank 0 has [3, 0, 1, 2]")
def off_by_one_place(x, group):
    return gather_with(x, group).roll(len(x)) if group.size() > 1 else x.clone()


@gather("Send on what you *received*")
def sends_its_own_again(x, group):
    rank, size, after, before = neighbours(group)
    parts = [x] * size
    for k in range(1, size):
        parts[(rank - k) % size] = exchange(x, after, before, group)
    return torch.cat(parts)


@gather("what came in the round before")
def passes_on_everything(x, group):
    rank, size, after, before = neighbours(group)
    so_far = x
    for _ in range(size - 1):
        came = exchange(so_far, after, before, group)
        so_far = torch.cat([came, x])
    parts = so_far.split(len(x))  # oldest first, starting with rank r+1's
    return torch.cat([parts[(r - rank - 1) % size] for r in range(size)])


@gather("every link is used")
def to_everyone_directly(x, group):
    rank, size = group.rank(), group.size()
    parts = [x] * size
    for k in range(1, size):
        parts[(rank - k) % size] = exchange(x, (rank + k) % size, (rank - k) % size, group)
    return torch.cat(parts)


@gather("goes to or from rank 0")
def by_way_of_rank_0(x, group):
    rank, size = group.rank(), group.size()
    if rank != 0:
        send(x, 0, group)
        return recv(x.new_empty(size * len(x)), 0, group)
    whole = torch.cat([x, *(recv(x, peer, group) for peer in range(1, size))])
    for peer in range(1, size):
        send(whole, peer, group)
    return whole


@gather("need 3 rounds; messages sent, by rank: [2, 2, 2, 2]")
def one_round_too_few_of_all_gather(x, group):
    rank, size, after, before = neighbours(group)
    parts, moving = {rank: x}, x
    for k in range(1, size - 1):
        moving = exchange(moving, after, before, group)
        parts[(rank - k) % size] = moving
    return torch.cat([parts[r] for r in sorted(parts)])


@gather("but a rank sends 4 messages where 3 would do")
def one_round_too_many_of_all_gather(x, group):
    return gather_with(x, group, rounds=1)


@gather("backend's own all_gather")
def the_backends_all_gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts)


@gather("library's all_gather")
def the_librarys_front_door(x, group):
    return all_gather(x, group, algorithm="doubling")


@gather("return one tensor")
def returns_a_list(x, group):
    return list(gather_with(x, group).split(len(x)))


@gather("everyone sends first")
def everyone_sends_first_in_all_gather(x, group):
    rank, size, after, before = neighbours(group)
    parts = {rank: x}
    for k in range(1, size):
        send(x, after, group)
        x = recv(x, before, group)
        parts[(rank - k) % size] = x
    return torch.cat([parts[r] for r in range(size)])


@gather("instead of 3: ranks wait while others work")
def even_ranks_send_first(x, group):
    rank, size, after, before = neighbours(group)
    parts = {rank: x}
    for k in range(1, size):
        if rank % 2 == 0:
            send(x, after, group)
            x = recv(x, before, group)
        else:
            came = recv(x, before, group)
            send(x, after, group)
            x = came
        parts[(rank - k) % size] = x
    return torch.cat([parts[r] for r in range(size)])


@gather("Right with 4 ranks")
def all_gather_of_4(x, group):
    rank, size, after, before = neighbours(group)
    parts = {rank: x}
    for k in range(1, 4):
        x = exchange(x, after, before, group)
        parts[(rank - k) % 4] = x
    return torch.cat([parts[r] for r in range(4)])


@gather("x is torch.int64, your result torch.float64")
def gathers_into_floats(x, group):
    whole = torch.zeros(group.size() * len(x), dtype=torch.float64)
    return whole.copy_(gather_with(x, group))


@gather("has shape [4, 1000]; [4000] is asked for")
def stacks_instead_of_joining(x, group):
    return gather_with(x, group).view(group.size(), -1)


@gather("in both directions")
def both_ways_round(x, group):
    rank, size, after, before = neighbours(group)
    parts = {rank: x}
    ahead = behind = x.contiguous()
    for k in range(1, size // 2 + 1):
        came, too = torch.empty_like(ahead), torch.empty_like(ahead)
        receives, sends = [(came, before)], [(ahead, after)]
        if 2 * k < size:
            receives, sends = [*receives, (too, after)], [*sends, (behind, before)]
        wait(start(group, receives, sends))
        ahead, behind = came, too
        parts[(rank - k) % size] = came
        if 2 * k < size:
            parts[(rank + k) % size] = too
    return torch.cat([parts[r] for r in range(size)])


@gather("[6, 2, 3] numbers of float64")
def only_for_vectors(x, group):
    rank, size, after, before = neighbours(group)
    whole = x.new_empty(size * len(x))
    for k in range(size):
        whole[(rank - k) % size * len(x) :][: len(x)] = x
        x = exchange(x, after, before, group) if k < size - 1 else x
    return whole


@gather("return one tensor")
def returns_a_number(x, group):
    return float(gather_with(x, group).sum())


@gather("shape []; [4000] is asked for")
def returns_a_tensor_of_no_dimension(x, group):
    return gather_with(x, group).sum()


KEPT = {}


@gather("The first call is right, a second one is not")
def remembers_what_it_had(x, group):
    KEPT.setdefault("whole", gather_with(x, group))
    return KEPT["whole"] if len(KEPT) == 1 and not KEPT.update(again=0) else KEPT["whole"] * 0


@gather("The second call writes where the result of the first one is")
def hands_out_the_same_memory(x, group):
    whole = gather_with(x, group)
    place = KEPT.setdefault((whole.shape, whole.dtype), torch.empty_like(whole))
    return place.copy_(whole)


@gather("returned None")
def forgets_to_return(x, group):
    gather_with(x, group)


@gather("what is sent has to be .contiguous()")
def torchs_own_messages_as_they_lie(x, group):
    return torchs_own_messages(x, group, laid_out=lambda part: part)


@gather("send to ranks of the group that you were given")
def torchs_own_messages_to_ranks_of_the_world(x, group):
    _, size, after, before = neighbours(group)
    parts = {group.rank(): x}
    for k in range(1, size):
        came = torch.empty_like(x)
        works = [dist.irecv(came, before, group=group), dist.isend(x, after, group=group)]
        for work in works:
            work.wait()
        x = parts[(group.rank() - k) % size] = came
    return torch.cat([parts[r] for r in range(size)])


# -- all-reduce -------------------------------------------------------------------------------

reduce = Wrong()


@reduce("goes to or from rank 0")
def reduces_to_rank_0_and_broadcasts(x, group):
    return through_rank_0(x, group)


@reduce("library's star_all_reduce")
def the_librarys_star(x, group):
    return star_all_reduce(x, group)


@reduce("library's all_reduce")
def the_librarys_choice(x, group):
    return all_reduce(x, group, algorithm="halving_doubling")


@reduce("backend's own all_reduce")
def the_backends_all_reduce(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


@reduce("send whole tensors around")
def passes_whole_tensors(x, group):
    return whole_tensors_round(x, group)


@reduce("These are means")
def mean_of_all(x, group):
    return (whole_sum_by_ring(x, group) / group.size()).to(x.dtype)


@reduce("stopped half-way")
def only_half(x, group):
    return solutions.ring_reduce_scatter(x, group)


@reduce("chunks are not in x's order")
def chunks_in_another_order(x, group):
    return whole_sum_by_ring(x, group).roll(len(x) // group.size())


@reduce("changes its input")
def writes_into_x(x, group):
    return x.copy_(whole_sum_by_ring(x, group))


@reduce("With one rank, 5 numbers of float64: You return x itself")
def x_itself_when_alone(x, group):
    return x if group.size() == 1 else whole_sum_by_ring(x, group)


@reduce("Only rank 0 has the sum")
def a_line_instead_of_a_ring(x, group):
    rank, size, after, before = neighbours(group)
    total = x.clone()
    if rank < size - 1:
        total = total + recv(x, after, group)
    if rank > 0:
        send(total, before, group)
    return total


@reduce("one rank works at a time")
def down_the_line_and_up_again(x, group):
    """Few messages and the right values, but one rank at a time, and whole tensors."""
    rank, size, after, before = neighbours(group)
    total = x.clone() if rank == 0 else x + recv(x, before, group)
    if rank < size - 1:
        send(total, after, group)
    if rank == size - 1:
        send(total, after, group) if size > 1 else None
        return total
    total = recv(x, before, group)
    if rank < size - 2:
        send(total, after, group)
    return total


@reduce("only send to your neighbor")
def scatters_to_everyone_directly(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    mine = chunks[rank].clone()
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        mine = mine + exchange(chunks[to], to, source, group, like=mine)
    return solutions.ring_all_gather(mine, group)


@reduce("Right with 4 ranks")
def all_reduce_of_4(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(4)
    moving = chunks[rank - 1].clone()
    for k in range(3):
        mine = chunks[(rank - 2 - k) % 4]
        moving = exchange(moving, after, before, group, like=mine) + mine
    parts = {rank: moving}
    for k in range(1, 4):
        moving = exchange(moving, after, before, group)
        parts[(rank - k) % 4] = moving
    return torch.cat([parts[r] for r in range(4)])


@reduce("has shape [1, 1000]; [1000] is asked for")
def a_sum_of_two_dimensions(x, group):
    return whole_sum_by_ring(x, group)[None]


@reduce("int64")
def all_reduce_in_floats(x, group):
    return whole_sum_by_ring(x.double(), group)


@reduce("No rank sent anything")
def multiplies(x, group):
    return x * group.size()


@reduce("something travels that nobody needs")
def one_number_too_many(x, group):
    """Send one number too many in the last round, after the requested chunk."""
    rank, size, after, before = neighbours(group)
    if size == 1:
        return x.clone()
    chunk = solutions.ring_reduce_scatter(x, group)
    parts = {rank: chunk}
    for k in range(1, size):
        more = chunk if k < size - 1 else torch.cat([chunk, chunk[:1]])
        chunk = exchange(more, after, before, group)[: len(chunk)]
        parts[(rank - k) % size] = chunk
    return torch.cat([parts[r] for r in range(size)])


@reduce("everyone sends first")
def sends_first(x, group):
    return everyone_sends_first(x, group)


# -- all-to-all -------------------------------------------------------------------------------

to_all = Wrong()


@to_all("throw most of it away")
def sends_everything_to_everyone(x, group):
    rank, size = group.rank(), group.size()
    parts = [x.tensor_split(size)[rank]] * size
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        parts[source] = exchange(x, to, source, group).tensor_split(size)[rank]
    return torch.cat(parts)


@to_all("goes to or from rank 0")
def all_to_all_through_rank_0(x, group):
    rank, size = group.rank(), group.size()
    if rank != 0:
        send(x, 0, group)
        return recv(x, 0, group)
    rows = [x, *(recv(x, peer, group) for peer in range(1, size))]
    columns = [torch.cat(parts) for parts in zip(*(row.tensor_split(size) for row in rows))]
    for peer in range(1, size):
        send(columns[peer], peer, group)
    return columns[0]


@to_all("through the hands of ranks that do not need them")
def round_a_ring(x, group):
    rank, size, after, before = neighbours(group)
    parts = x.tensor_split(size)
    out, moving = [parts[rank]] * size, [parts[(rank + k) % size] for k in range(1, size)]
    for k in range(1, size):
        came = exchange(torch.cat(moving), after, before, group).tensor_split(len(moving))
        out[(rank - k) % size], moving = came[0], list(came[1:])
    return torch.cat(out)


@to_all("nothing was exchanged")
def returns_x(x, group):
    solutions.all_to_all(x, group)
    return x.clone()


def all_to_all_with(x, group, part=lambda rank, to: to, place=None, rounds=0, order=1):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    out = [parts[rank]] * size
    for k in range(1, size + rounds):
        to, source = (rank + order * k) % size, (rank - order * k) % size
        out[source if place is None else place(rank, k, size)] = exchange(
            parts[part(rank, to)], to, source, group
        )
    return torch.cat(out)


@to_all("part with *your* number")
def sends_its_own_part(x, group):
    return all_to_all_with(x, group, part=lambda rank, to: rank)


@to_all("in order of arrival")
def all_to_all_in_order_of_arrival(x, group):
    return all_to_all_with(x, group, place=lambda rank, k, size: k)


@to_all("at index s of rank d")
def puts_parts_at_the_receivers_place(x, group):
    return all_to_all_with(x, group, place=lambda rank, k, size: (rank + k) % size)


@to_all("for 3 others; one of them sent 2")
def leaves_one_out(x, group):
    return all_to_all_with(x, group, rounds=-1)


@to_all("at index s of rank d")
def forgets_its_own(x, group):
    rank, size = group.rank(), group.size()
    out = list(all_to_all_with(x, group).tensor_split(size))
    out[rank] = torch.zeros_like(out[rank]) if size > 1 else out[rank]
    return torch.cat(out)


@to_all("backend's own all_to_all")
def the_backends_all_to_all(x, group):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


@to_all("library's ring_all_gather")
def picks_from_an_all_gather(x, group):
    from mini_dist.collectives import ring_all_gather

    size = group.size()
    rows = ring_all_gather(x, group).split(len(x))
    return torch.cat([row.tensor_split(size)[group.rank()] for row in rows])


@to_all("instead of 3: ranks wait while others work")
def everyone_goes_to_rank_0_first(x, group):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    return torch.cat(
        [parts[rank] if d == rank else exchange(parts[d], d, d, group) for d in range(size)]
    )


@to_all("everyone sends first")
def all_to_all_sends_first(x, group):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    out = [parts[rank]] * size
    for k in range(1, size):
        send(parts[(rank + k) % size], (rank + k) % size, group)
        out[(rank - k) % size] = recv(parts[rank], (rank - k) % size, group)
    return torch.cat(out)


@to_all("changes its input")
def receives_into_x(x, group):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    sent = [part.clone() for part in parts]
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        exchange(sent[to], to, source, group, out=parts[source])
    return x.clone()


@to_all("what is sent has to be .contiguous()")
def all_messages_at_once_as_they_lie(x, group):
    return all_messages_at_once(x, group, laid_out=lambda part: part)


@to_all("Right with 4 ranks")
def all_to_all_of_4(x, group):
    return all_to_all_with(x, group, rounds=4 - group.size())


@to_all("int64")
def all_to_all_of_floats(x, group):
    return solutions.all_to_all(x.double(), group)


@to_all("has shape [4, 250]; [1000] is asked for")
def stacks_instead_of_joining_all_to_all(x, group):
    return solutions.all_to_all(x, group).view(group.size(), -1)


@to_all("returned None")
def exchanges_and_forgets(x, group):
    solutions.all_to_all(x, group)


# ------------------------------------------------------------------------------------------------


@to_all("[6, 2, 3] numbers of float64")
def all_to_all_of_vectors(x, group):
    whole = torch.empty(len(x), dtype=x.dtype)
    return whole.copy_(solutions.all_to_all(x, group))


ALL = {
    "ring_reduce_scatter": reduce_scatter,
    "ring_all_gather": gather,
    "ring_all_reduce": reduce,
    "all_to_all": to_all,
}
CASES = [
    pytest.param(name, fn, says, id=f"{name}-{fn.__name__}")
    for name, wrong in ALL.items()
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", CASES)
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong"
    assert says in verdict.hint


@pytest.mark.parametrize("name", ALL)
def test_a_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", [*ALL, "doubling_all_reduce", "average_in_buckets"])
def test_a_skeleton_defines_what_the_lessons_cell_defines(name, capsys):
    getattr(check, name).skeleton()
    assert f"def {name}(" in capsys.readouterr().out


def test_the_last_hint_of_the_ring_all_reduce_runs_where_the_lesson_is(capsys):
    check.ring_all_reduce.hint(2)
    line = capsys.readouterr().out.split("return ")[1].rstrip(".\n")
    names = {name: getattr(solutions, name) for name in ALL}
    names |= {"x": torch.ones(4), "group": Alone()}
    assert torch.equal(eval(line, names), torch.ones(4))


class Alone:
    """A group of one rank, which sends nothing."""

    def rank(self):
        return 0

    def size(self):
        return 1


# These other ways are just as good: refusing them would teach something false.


def reverse_ring(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    moving = chunks[(rank + 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank + 2 + k) % size]
        moving = exchange(moving, before, after, group, like=mine) + mine
    return moving


def all_messages_at_once(x, group, laid_out=torch.Tensor.contiguous):
    rank, size = group.rank(), group.size()
    parts = [laid_out(part) for part in x.tensor_split(size)]
    out = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    others = [peer for peer in range(size) if peer != rank]
    receives = [(out[peer], peer) for peer in others]
    wait(start(group, receives=receives, sends=[(parts[peer], peer) for peer in others]))
    return torch.cat(out)


def torchs_own_messages(x, group, laid_out=torch.Tensor.contiguous):
    _, size, after, before = neighbours(group)
    x = laid_out(x)
    parts = {group.rank(): x}
    for k in range(1, size):
        came = torch.empty_like(x)
        works = [
            dist.irecv(came, group_src=before, group=group),
            dist.isend(x, group_dst=after, group=group),
        ]
        for work in works:
            work.wait()
        x = parts[(group.rank() - k) % size] = came
    return torch.cat([parts[r] for r in range(size)])


right_scatter, right_gather = Right("ring_reduce_scatter"), Right("ring_all_gather")
right_reduce, right_to_all = Right("ring_all_reduce"), Right("all_to_all")
for fn, right_way in [
    (reverse_ring, right_scatter),
    (all_messages_at_once, right_to_all),
    (torchs_own_messages, right_gather),
    (whole_sum_by_ring, right_reduce),
]:
    right_way(fn)


@right_scatter
def one_buffer_as_long_as_the_longest_chunk(x, group):
    rank, size, after, before = neighbours(group)
    starts = [sum(split_sizes(len(x), size)[:r]) for r in range(size + 1)]
    chunk = lambda r: x[starts[r % size] : starts[r % size + 1]]  # noqa: E731
    total = chunk(rank - 1).clone()
    room = x.new_empty(split_sizes(len(x), size)[0])
    for number in range(rank - 2, rank - size - 1, -1):
        mine = chunk(number)
        total = exchange(total, after, before, group, out=room[: len(mine)]) + mine
    return total


@right_scatter
def all_receives_posted_before(x, group):
    rank, size, after, before = neighbours(group)
    chunks = x.tensor_split(size)
    numbers = [(rank - k) % size for k in range(2, size + 1)]
    rooms = [torch.empty(chunks[number].shape, dtype=x.dtype) for number in numbers]
    handles = start(group, receives=[(room, before) for room in rooms])
    moving = chunks[rank - 1].clone()
    for number, room, handle in zip(numbers, rooms, handles):
        sending = start(group, sends=[(moving, after)])
        handle.wait()
        wait(sending)
        moving = room + chunks[number]
    return moving


@right_scatter
def in_numpy(x, group):
    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16.
        return reverse_ring(x, group)
    rank, size, after, before = neighbours(group)
    chunks = numpy.array_split(x.numpy(), size)
    moving = chunks[rank - 1].copy()
    for k in range(2, size + 1):
        mine = chunks[rank - k]
        came = exchange(torch.from_numpy(moving), after, before, group, like=torch.from_numpy(mine))
        moving = came.numpy() + mine
    return torch.from_numpy(moving)


@right_gather
def into_the_whole_the_other_way_round(x, group):
    rank, size, after, before = neighbours(group)
    whole = x.new_empty(size, *x.shape)
    whole[rank] = x
    for k in range(size - 1):
        came = whole[(rank + k + 1) % size]
        exchange(whole[(rank + k) % size], before, after, group, out=came)
    return whole.flatten(0, 1)


@right_gather
def rolled_into_place(x, group):
    rank, size, after, before = neighbours(group)
    parts = [x]
    while len(parts) < size:
        parts.insert(0, exchange(parts[0], after, before, group))
    return torch.cat(parts).roll((rank + 1) * len(x), dims=0)


@right_gather
def recursively(x, group, rounds=None):
    rank, size, after, before = neighbours(group)

    def parts(mine, left):
        return [mine, *parts(exchange(mine, after, before, group), left - 1)] if left else [mine]

    found = parts(x, size - 1)
    return torch.cat([found[(rank - r) % size] for r in range(size)])


@right_reduce
def scatters_one_way_and_gathers_the_other(x, group):
    rank, size, after, before = neighbours(group)
    chunk = solutions.ring_reduce_scatter(x, group)
    parts = {rank: chunk}
    for k in range(1, size):
        chunk = exchange(chunk, before, after, group)
        parts[(rank + k) % size] = chunk
    return torch.cat([parts[r] for r in range(size)])


@right_reduce
def in_place_of_a_copy(x, group):
    rank, size, after, before = neighbours(group)
    total = x.clone(memory_format=torch.contiguous_format)
    chunks = total.view(size, -1)
    for k in range(2 * (size - 1)):
        came = exchange(chunks[(rank - k) % size], after, before, group)
        if k < size - 1:
            chunks[(rank - k - 1) % size] += came
        else:
            chunks[(rank - k - 1) % size] = came
    return total


@right_reduce
def the_parts_of_the_library(x, group):
    chunk = ring_reduce_scatter(x, group)
    return ring_all_gather(chunk, group)


@right_to_all
def to_the_ranks_before(x, group):
    rank, size = group.rank(), group.size()
    parts = x.tensor_split(size)
    out = torch.empty(x.shape, dtype=x.dtype)
    places = out.tensor_split(size)
    places[rank][:] = parts[rank]
    for k in range(1, size):
        to, source = (rank - k) % size, (rank + k) % size
        exchange(parts[to], to, source, group, out=places[source])
    return out


@right_to_all
def as_a_matrix(x, group):
    rank, size = group.rank(), group.size()
    rows = x.reshape(size, len(x) // size, *x.shape[1:])
    columns = {rank: rows[rank]}
    for to, source in [((rank + k) % size, (rank - k) % size) for k in range(1, size)]:
        columns[source] = exchange(rows[to], to, source, group)
    return torch.cat([columns[source] for source in sorted(columns)])


@right_to_all
def by_torchs_own_messages(x, group):
    rank, size = group.rank(), group.size()
    parts = [part.contiguous() for part in x.tensor_split(size)]
    result = [part.clone() for part in parts]
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        sending = dist.isend(parts[to], group_dst=to, group=group)
        dist.recv(result[source], group_src=source, group=group)
        sending.wait()
    return torch.cat(result)


GOOD = [
    pytest.param(right_way.name, fn, id=f"{right_way.name}-{fn.__name__}")
    for right_way in (right_scatter, right_gather, right_reduce, right_to_all)
    for fn in right_way.answers
]


@pytest.mark.parametrize("name, fn", GOOD)
def test_another_good_way_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


# In every solution, learners may choose how to send one tensor and receive another.


def with_swap(name, swap):
    solution = swaps.SOLUTIONS[name]
    return lambda x, group: solution(x, group, swap)


@pytest.mark.parametrize("way", swaps.WRONG)
@pytest.mark.parametrize("name", swaps.SOLUTIONS)
def test_a_wrong_way_to_send_is_named(name, way):
    swap, says = swaps.WRONG[way]
    verdict = getattr(check, name).judge(with_swap(name, swap))
    assert verdict.state == "wrong"
    assert says in verdict.hint


SWAPPED = [
    pytest.param(name, swap, id=f"{name}-{swap.__name__}")
    for name in swaps.SOLUTIONS
    for swap in swaps.RIGHT
    if swap is not swaps.from_any_source or name.startswith("ring")
]


@pytest.mark.parametrize("name, swap", SWAPPED)
def test_a_right_way_to_send_is_right(name, swap):
    verdict = getattr(check, name).judge(with_swap(name, swap))
    assert verdict.state == "right", verdict


def test_who_receives_from_any_source_where_several_send_is_told():
    """The judge reorders messages, so this holds even if they would have come in order."""
    verdict = check.all_to_all.judge(with_swap("all_to_all", swaps.from_any_source))
    assert verdict.state == "wrong"
    assert "another one's message is the first" in verdict.hint
