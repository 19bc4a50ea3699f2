"""Lesson 27: samples that any number of ranks can resume, attention that moves the stated bytes."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.model.slow_memory import keys_outside
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_samples, right_samples = Wrong(), Right("next_samples")
wrong_attention, right_attention = Wrong(), Right("tiled_attention")


# ---- next_samples -------------------------------------------------------------------------------


def part(batch, group):
    rank, size = group.rank(), group.size()
    return batch[len(batch) * rank // size : len(batch) * (rank + 1) // size]


def whole(position, batch_size, num_samples, order):
    """Return the batch of one process; draw each order once."""
    epochs = range(position // num_samples, (position + batch_size - 1) // num_samples + 1)
    run = [sample for epoch in epochs for sample in order(epoch)]
    start = position - epochs[0] * num_samples
    return run[start : start + batch_size]


@wrong_samples("Return two things")
def returns_the_samples_only(position, batch_size, num_samples, order, group):
    return part(whole(position, batch_size, num_samples, order), group)


@wrong_samples("one whole number")
def has_a_position_of_its_own(position, batch_size, num_samples, order, group):
    mine = part(whole(position, batch_size, num_samples, order), group)
    return mine, {"epoch": 0, "step": 1}


@wrong_samples("It has counted its own samples")
def counts_its_own(position, batch_size, num_samples, order, group):
    mine = part(whole(position, batch_size, num_samples, order), group)
    return mine, position + len(mine)


@wrong_samples("It has counted steps")
def counts_steps(position, batch_size, num_samples, order, group):
    return part(whole(position, batch_size, num_samples, order), group), position + 1


@wrong_samples("nobody knows the epoch any more")
def begins_again_with_each_epoch(position, batch_size, num_samples, order, group):
    mine = part(whole(position, batch_size, num_samples, order), group)
    return mine, (position + batch_size) % num_samples


@wrong_samples("Every rank has the whole batch")
def takes_all(position, batch_size, num_samples, order, group):
    return whole(position, batch_size, num_samples, order), position + batch_size


@wrong_samples("batch_size counts the samples of all ranks together")
def takes_a_batch_of_its_own(position, batch_size, num_samples, order, group):
    batch = whole(position, batch_size * group.size(), num_samples, order)
    return part(batch, group), position + batch_size


@wrong_samples("dealt like cards")
def deals(position, batch_size, num_samples, order, group):
    batch = whole(position, batch_size, num_samples, order)
    return batch[group.rank() :: group.size()], position + batch_size


@wrong_samples("in another order")
def sorts(position, batch_size, num_samples, order, group):
    batch = sorted(whole(position, batch_size, num_samples, order))
    return part(batch, group), position + batch_size


@wrong_samples("Every epoch has the order of epoch 0")
def forgets_the_epoch(position, batch_size, num_samples, order, group):
    first = order(0)
    batch = [first[n % num_samples] for n in range(position, position + batch_size)]
    return part(batch, group), position + batch_size


@wrong_samples("all of it comes from the first one's order")
def wraps_round(position, batch_size, num_samples, order, group):
    its = order(position // num_samples)
    batch = [its[n % num_samples] for n in range(position, position + batch_size)]
    return part(batch, group), position + batch_size


@wrong_samples("too short: go on in the next epoch")
def stops_at_the_end(position, batch_size, num_samples, order, group):
    start = position % num_samples
    batch = order(position // num_samples)[start : start + batch_size]
    return part(batch, group), position + batch_size


@wrong_samples("Some ranks take one more")
def leaves_the_rest(position, batch_size, num_samples, order, group):
    batch, each = whole(position, batch_size, num_samples, order), batch_size // group.size()
    return batch[group.rank() * each :][:each], position + batch_size


@wrong_samples("One rank has 2 samples more than another")
def gives_the_rest_to_the_last(position, batch_size, num_samples, order, group):
    batch = whole(position, batch_size, num_samples, order)
    rank, each = group.rank(), max(1, batch_size // group.size())
    until = (rank + 1) * each if rank < group.size() - 1 else batch_size
    return batch[rank * each : until], position + batch_size


@wrong_samples("more than once for one epoch")
def draws_for_each_sample(position, batch_size, num_samples, order, group):
    numbers = part(range(position, position + batch_size), group)
    return [order(n // num_samples)[n % num_samples] for n in numbers], position + batch_size


@wrong_samples("an epoch that the batch does not touch")
def draws_the_next_epoch_always(position, batch_size, num_samples, order, group):
    epoch = position // num_samples
    run = [s for later in range(3) for s in order(epoch + later)]
    batch = run[position % num_samples :][:batch_size]
    return part(batch, group), position + batch_size


@wrong_samples("Nobody needs to send anything")
def asks_rank_0(position, batch_size, num_samples, order, group):
    batch = [whole(position, batch_size, num_samples, order)]
    dist.broadcast_object_list(batch, group=group, group_src=0)
    return part(batch[0], group), position + batch_size


@wrong_samples("These are not the samples that one process has")
def is_one_too_far(position, batch_size, num_samples, order, group):
    batch = whole(position + 1, batch_size, num_samples, order)
    return part(batch, group), position + batch_size


SEEN = []


@wrong_samples("")
def counts_in_a_global(position, batch_size, num_samples, order, group):
    SEEN.append(batch_size)
    return part(whole(sum(SEEN[:-1]), batch_size, num_samples, order), group), position + batch_size


@right_samples
def takes_part_of_the_whole_batch(position, batch_size, num_samples, order, group):
    return part(whole(position, batch_size, num_samples, order), group), position + batch_size


@right_samples
def in_a_tensor(position, batch_size, num_samples, order, group):
    numbers = torch.arange(position, position + batch_size).tensor_split(group.size())
    numbers = numbers[group.rank()]
    samples = torch.empty_like(numbers)
    for epoch in (numbers // num_samples).unique().tolist():
        its = numbers // num_samples == epoch
        samples[its] = torch.tensor(order(epoch))[numbers[its] % num_samples]
    return samples, position + batch_size


@right_samples
def one_by_one(position, batch_size, num_samples, order, group):
    sizes = [batch_size // group.size() + (r < batch_size % group.size()) for r in range(99)]
    at, mine, epoch, now = position + sum(sizes[: group.rank()]), [], None, None
    while len(mine) < sizes[group.rank()]:
        if at // num_samples != epoch:
            epoch = at // num_samples
            now = order(epoch)
        mine.append(now[at % num_samples])
        at += 1
    return tuple(mine), position + batch_size


# ---- tiled_attention ----------------------------------------------------------------------------


def attend(memory, tile, rows=None, scale=True, shrink=(True, True), divide=True, begin=-torch.inf):
    """Attend correctly; the arguments can introduce mistakes."""
    height = rows or tile
    for i in range(0, memory.num_rows("q"), height):
        q = memory.load("q", i, min(i + height, memory.num_rows("q")))
        out, total, largest = torch.zeros_like(q), q.new_zeros(len(q), 1), q.new_full((1,), begin)
        for j in range(0, memory.num_rows("k"), tile):
            until = min(j + tile, memory.num_rows("k"))
            scores = q @ memory.load("k", j, until).T / (q.shape[-1] ** 0.5 if scale else 1)
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, less = (scores - largest).exp(), (before - largest).exp()
            total = total * (less if shrink[0] else 1) + weights.sum(-1, keepdim=True)
            out = out * (less if shrink[1] else 1) + weights @ memory.load("v", j, until)
        memory.store("out", out / total if divide else out, i)


@wrong_attention("Nothing was stored in out")
def stores_nothing(memory, tile):
    memory.load("q", 0, tile)


@wrong_attention("divided by the square root of the head dim")
def does_not_scale(memory, tile):
    attend(memory, tile, scale=False)


@wrong_attention("both the total and the output so far")
def does_not_shrink_the_total(memory, tile):
    attend(memory, tile, shrink=(False, True))


@wrong_attention("both the total and the output so far")
def does_not_shrink_the_output(memory, tile):
    attend(memory, tile, shrink=(True, False))


@wrong_attention("both the total and the output so far")
def shrinks_nothing(memory, tile):
    attend(memory, tile, shrink=(False, False))


@wrong_attention("divide each row by its total")
def does_not_divide(memory, tile):
    attend(memory, tile, divide=False)


@wrong_attention("Every tile has a softmax of its own")
def normalizes_each_tile(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out = torch.zeros_like(q)
        for j in range(0, memory.num_rows("k"), tile):
            until = min(j + tile, memory.num_rows("k"))
            scores = q @ memory.load("k", j, until).T / q.shape[-1] ** 0.5
            out += scores.softmax(-1) @ memory.load("v", j, until)
        memory.store("out", out, i)


@wrong_attention("exp overflows")
def does_not_subtract_the_largest(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
        for j in range(0, memory.num_rows("k"), tile):
            until = min(j + tile, memory.num_rows("k"))
            weights = (q @ memory.load("k", j, until).T / q.shape[-1] ** 0.5).exp()
            total += weights.sum(-1, keepdim=True)
            out += weights @ memory.load("v", j, until)
        memory.store("out", out / total, i)


@wrong_attention("The last tile is shorter")
def leaves_the_last_rows(memory, tile):
    for i in range(0, memory.num_rows("q") - tile + 1, tile):
        q = memory.load("q", i, i + tile)
        scores = torch.cat([q @ k.T for k in tiles_of(memory, "k", tile)], -1) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1).split(tile, -1)
        memory.store("out", sum(w @ v for w, v in zip(weights, tiles_of(memory, "v", tile))), i)


def tiles_of(memory, name, tile):
    rows = memory.num_rows(name)
    return (memory.load(name, j, min(j + tile, rows)) for j in range(0, rows, tile))


@wrong_attention("a kernel may not use it")
def looks_at_whole_tensors(memory, tile):
    q, k, v = memory["q"], memory["k"], memory["v"]
    memory.store("out", (q @ k.T / q.shape[-1] ** 0.5).softmax(-1) @ v)


@wrong_attention("hold one tile of keys, one of values and its scores")
def holds_a_row_of_scores(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        scores = torch.cat([q @ k.T for k in tiles_of(memory, "k", tile)], -1) / q.shape[-1] ** 0.5
        weights = scores.softmax(-1).split(tile, -1)
        memory.store("out", sum(w @ v for w, v in zip(weights, tiles_of(memory, "v", tile))), i)


@wrong_attention("hold one tile of keys, one of values and its scores")
def loads_all_keys_each_time(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        scores = q @ memory.load("k").T / q.shape[-1] ** 0.5
        memory.store("out", scores.softmax(-1) @ memory.load("v"), i)


@wrong_attention("all keys stay in fast memory")
def loads_everything(memory, tile):
    q, k, v = memory.load("q"), memory.load("k"), memory.load("v")
    memory.store("out", (q @ k.T / q.shape[-1] ** 0.5).softmax(-1) @ v)


@wrong_attention("your tiles of queries have more than")
def takes_larger_tiles_of_queries(memory, tile):
    attend(memory, tile, rows=2 * tile)


@wrong_attention("Keys and values are loaded 25 times, and 13 do")
def takes_smaller_tiles_of_queries(memory, tile):
    attend(memory, tile, rows=tile // 2)


@wrong_attention("load a tile of them before the loop over keys")
def loads_the_queries_again(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        rows = i, min(i + tile, memory.num_rows("q"))
        out = total = largest = None
        for k, v in zip(tiles_of(memory, "k", tile), tiles_of(memory, "v", tile)):
            q = memory.load("q", *rows)
            if out is None:
                out, total = torch.zeros_like(q), q.new_zeros(len(q), 1)
                largest = q.new_full((len(q), 1), -torch.inf)
            scores = q @ k.T / q.shape[-1] ** 0.5
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, less = (scores - largest).exp(), (before - largest).exp()
            total = total * less + weights.sum(-1, keepdim=True)
            out = out * less + weights @ v
        memory.store("out", out / total, i)


@wrong_attention("out is stored more than once")
def stores_after_each_tile(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out, total, largest = torch.zeros_like(q), q.new_zeros(len(q), 1), q.new_full((1,), -1e300)
        for k, v in zip(tiles_of(memory, "k", tile), tiles_of(memory, "v", tile)):
            scores = q @ k.T / q.shape[-1] ** 0.5
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, less = (scores - largest).exp(), (before - largest).exp()
            total = total * less + weights.sum(-1, keepdim=True)
            out = out * less + weights @ v
            memory.store("out", out / total, i)


@wrong_attention("Let the loop over queries be the outer one")
def keeps_the_keys_outside(memory, tile):
    """Version 1, with total and largest in fast memory."""
    rows = memory.num_rows("q")
    state = {}
    for k, v in zip(tiles_of(memory, "k", tile), tiles_of(memory, "v", tile)):
        for i in range(0, rows, tile):
            q = memory.load("q", i, min(i + tile, rows))
            out = memory.load("out", i, min(i + tile, rows))
            scores = q @ k.T / q.shape[-1] ** 0.5
            here = torch.cat([scores, state[i]], -1) if i in state else scores
            lse = here.logsumexp(-1, keepdim=True)
            less = (state[i] - lse).exp() if i in state else 0
            memory.store("out", out * less + (scores - lse).exp() @ v, i)
            state[i] = lse


@right_attention
def by_log_sum_exp(memory, tile):
    rows = memory.num_rows("q")
    for i in range(0, rows, tile):
        q = memory.load("q", i, min(i + tile, rows))
        q = q / q.shape[-1] ** 0.5
        out, lse = torch.zeros_like(q), torch.full_like(q[:, :1], -torch.inf)
        for k, v in zip(tiles_of(memory, "k", tile), tiles_of(memory, "v", tile)):
            scores = q @ k.T
            new = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            out = out * (lse - new).exp() + (scores - new).exp() @ v
            lse = new
        memory.store("out", out, i)


@right_attention
def one_key_at_a_time(memory, tile):
    for i in range(0, memory.num_rows("q"), tile):
        q = memory.load("q", i, min(i + tile, memory.num_rows("q")))
        out, total, largest = 0, 0, torch.full_like(q[:, :1], -torch.inf)
        for j in range(memory.num_rows("k")):
            score = q @ memory.load("k", j, j + 1).T / q.shape[-1] ** 0.5
            larger = torch.maximum(largest, score)
            less, weight = (largest - larger).exp(), (score - larger).exp()
            out, total = out * less + weight @ memory.load("v", j, j + 1), total * less + weight
            largest = larger
        memory.store("out", out / total, i)


@right_attention
def from_the_end(memory, tile):
    rows, keys = memory.num_rows("q"), memory.num_rows("k")
    for i in reversed(range(0, rows, tile)):
        q = memory.load("q", i, min(i + tile, rows))
        sums = torch.zeros(len(q), q.shape[1] + 1, dtype=q.dtype)
        largest = torch.full_like(q[:, :1], -torch.inf)
        for j in reversed(range(0, keys, tile)):
            v = memory.load("v", j, min(j + tile, keys))
            scores = q @ memory.load("k", j, j + len(v)).T / q.shape[-1] ** 0.5
            before, largest = largest, largest.maximum(scores.amax(-1, keepdim=True))
            with_ones = torch.cat([v, torch.ones_like(v[:, :1])], -1)
            sums = sums * (before - largest).exp() + (scores - largest).exp() @ with_ones
        memory.store("out", sums[:, :-1] / sums[:, -1:], i)
        del sums, with_ones


# -------------------------------------------------------------------------------------------------

WRONG = [
    (name, fn, says)
    for name, wrong in (("next_samples", wrong_samples), ("tiled_attention", wrong_attention))
    for fn, says in wrong.answers
]
RIGHT = [(each.name, fn) for each in (right_samples, right_attention) for fn in each.answers]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_a_known_mistake_is_refused_and_named(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_a_right_answer_may_look_otherwise(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


def test_the_other_order_of_loops_is_the_library_s_work():
    verdict = check.tiled_attention.judge(keys_outside)
    assert verdict.state == "wrong" and "'total' is not in memory" in verdict.hint, verdict
