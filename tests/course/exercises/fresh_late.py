"""Answers to the exercises of lessons 14 to 26, of kinds that were once new to the checks."""

import bisect
import heapq
import itertools
import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import torch

from mini_dist.collectives import all_gather, all_reduce, broadcast
from mini_dist.collectives.mesh import Grid, uplink_bytes
from mini_dist.collectives.messages import Members
from mini_dist.strategies.asynchronous.ideas import push
from tests.course.exercises.registry import Fresh

fresh = Fresh()

# ---- 14: balance_loss ----------------------------------------------------------------------------


def visits_of(decision):
    return decision.experts.flatten().bincount(minlength=decision.probabilities.shape[1])


@fresh.wrong("balance_loss")
def counts_the_first_choice_only(decision, group):
    E = decision.probabilities.shape[1]
    visits = all_reduce(decision.experts[:, 0].bincount(minlength=E), group)
    return E * (visits / visits.sum() * decision.probabilities.mean(0)).sum(), visits


@fresh.wrong("balance_loss")
def sums_the_probabilities(decision, group):
    visits = all_reduce(visits_of(decision), group)
    E = len(visits)
    return E * (visits / visits.sum() * decision.probabilities.sum(0)).sum(), visits


@fresh.wrong("balance_loss")
def counts_by_the_top_of_the_probabilities(decision, group):
    E = decision.probabilities.shape[1]
    visits = all_reduce(decision.probabilities.argmax(1).bincount(minlength=E), group)
    return E * (visits / visits.sum() * decision.probabilities.mean(0)).sum(), visits


@fresh.right("balance_loss")
def counts_with_one_hot_and_einsum(decision, group):
    E = decision.probabilities.shape[1]
    mine = torch.nn.functional.one_hot(decision.experts.reshape(-1), E).sum(0)
    visits = all_reduce(mine, group)
    share = visits.to(decision.probabilities.dtype) / int(visits.sum())
    loss = torch.einsum("te,e->", decision.probabilities, share) * E / len(decision.probabilities)
    return loss, visits


# ---- 15: groups_of_ranks -------------------------------------------------------------------------

SIZES = {}


@fresh.wrong("groups_of_ranks")
def remembers_the_first_grid(pp, dp, cp, tp):
    SIZES.setdefault("first", (pp, dp, cp, tp))
    block = np.arange(math.prod(SIZES["first"])).reshape(SIZES["first"])
    return {
        axis: np.moveaxis(block, i, -1).reshape(-1, SIZES["first"][i]).tolist()
        for i, axis in enumerate(("pp", "dp", "cp", "tp"))
    }


@fresh.wrong("groups_of_ranks")
def leaves_cp_out(pp, dp, cp, tp):
    block = np.arange(pp * dp * tp).reshape(pp, dp, 1, tp)
    return {
        axis: np.moveaxis(block, i, -1).reshape(-1, block.shape[i]).tolist()
        for i, axis in enumerate(("pp", "dp", "cp", "tp"))
    }


@fresh.wrong("groups_of_ranks")
def swaps_dp_and_cp_where_they_differ(pp, dp, cp, tp):
    block = np.arange(pp * dp * cp * tp).reshape(pp, cp, dp, tp)
    return {
        axis: np.moveaxis(block, i, -1).reshape(-1, block.shape[i]).tolist()
        for axis, i in (("pp", 0), ("dp", 2), ("cp", 1), ("tp", 3))
    }


@fresh.wrong("groups_of_ranks")
def blocks_of_neighbours_for_all(pp, dp, cp, tp):
    n = pp * dp * cp * tp
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    return {
        axis: [list(range(i, i + size)) for i in range(0, n, size)] for axis, size in sizes.items()
    }


@fresh.wrong("groups_of_ranks")
def strides_without_the_inner_axes(pp, dp, cp, tp):
    n, groups = pp * dp * cp * tp, {}
    for axis, size in {"pp": pp, "dp": dp, "cp": cp, "tp": tp}.items():
        groups[axis] = [list(range(i, n, n // size)) for i in range(n // size)]
    return groups


@fresh.right("groups_of_ranks")
def as_arrays(pp, dp, cp, tp):
    block = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    return {
        axis: block.movedim(i, -1).reshape(-1, block.shape[i]).numpy()
        for i, axis in enumerate(("pp", "dp", "cp", "tp"))
    }


@fresh.right("groups_of_ranks")
def by_products_of_coordinates(pp, dp, cp, tp):
    sizes = dict(pp=pp, dp=dp, cp=cp, tp=tp)
    groups = {axis: defaultdict(list) for axis in sizes}
    for rank, place in enumerate(itertools.product(*map(range, sizes.values()))):
        for i, axis in enumerate(sizes):
            groups[axis][place[:i] + place[i + 1 :]].append(rank)
    return {axis: list(found.values()) for axis, found in groups.items()}


@fresh.right("groups_of_ranks")
def by_ranges_with_steps(pp, dp, cp, tp):
    sizes, step, groups, n = dict(tp=tp, cp=cp, dp=dp, pp=pp), 1, {}, pp * dp * cp * tp
    for axis, size in sizes.items():
        starts = [r for r in range(n) if r // step % size == 0]
        groups[axis] = tuple(range(r, r + size * step, step) for r in starts)
        step *= size
    return groups


# ---- 18: push_touched, outer_step ----------------------------------------------------------------


@fresh.wrong("push_touched", "the rows of the tokens, each once")
def pushes_the_tokens_as_rows_of_the_gradient(gradient, tokens, num_servers, group):
    for server in range(num_servers):
        rows = torch.arange(tokens.max() + 1)
        mine = rows[rows % num_servers == server]
        if len(mine):
            push(gradient[mine], mine // num_servers, server, group)


@fresh.wrong("push_touched")
def sums_what_comes_twice(gradient, tokens, num_servers, group):
    rows, counts = tokens.unique(return_counts=True)
    for server in range(num_servers):
        at = rows % num_servers == server
        if at.any():
            mine = rows[at]
            push(gradient[mine] * counts[at][:, None], mine // num_servers, server, group)


@fresh.wrong("push_touched")
def the_first_row_of_the_batch_only(gradient, tokens, num_servers, group):
    rows = tokens[0].unique()
    for server in range(num_servers):
        mine = rows[rows % num_servers == server]
        if len(mine):
            push(gradient[mine], mine // num_servers, server, group)


@fresh.right("outer_step")
def by_torchs_sgd(before, now, momentum, lr, beta, group):
    change = all_reduce((before - now) / group.size(), group)
    weights = torch.nn.Parameter(before.clone())
    weights.grad = change
    optimizer = torch.optim.SGD([weights], lr=lr, momentum=beta or 1e-9, nesterov=True)
    if not beta:
        return before - lr * change, change
    optimizer.state[weights]["momentum_buffer"] = momentum.clone()
    optimizer.step()
    return weights.detach(), optimizer.state[weights]["momentum_buffer"]


# ---- 19: round_by_lot, top_k_with_feedback -------------------------------------------------------


@fresh.wrong("round_by_lot", "the first call's numbers again")
def begins_again_in_each_call(x, lots):
    again = torch.Generator().manual_seed(lots.initial_seed())
    return (x + torch.rand(x.shape, generator=again, dtype=x.dtype)).floor()


@fresh.wrong("round_by_lot", "allow any")
def only_of_matrices(x, lots):
    if x.dim() != 2:
        x = x.reshape(-1, 1)
    rows, columns = x.shape
    return (x + torch.rand(rows, columns, generator=lots, dtype=x.dtype)).floor()


@fresh.wrong("round_by_lot")
def rounds_half_of_it(x, lots):
    up = torch.rand(x.shape, generator=lots, dtype=x.dtype) < (x - x.trunc()).abs()
    return x.trunc() + up * x.sign().clamp(min=0)


@fresh.wrong("round_by_lot")
def clamps_to_a_byte(x, lots):
    lot = torch.rand(x.shape, generator=lots, dtype=x.dtype)
    return (x + lot).floor().clamp(-8, 7)


@fresh.wrong("round_by_lot")
def adds_noise_twice(x, lots):
    noise = sum(torch.rand(x.shape, generator=lots, dtype=x.dtype) for _ in range(2)) / 2
    return (x + noise).floor()


@fresh.right("round_by_lot")
def by_where(x, lots):
    lot = torch.empty_like(x).uniform_(generator=lots)
    return torch.where(lot < x - x.floor(), x.floor() + 1, x.floor())


@fresh.right("round_by_lot")
def from_above_by_where(x, lots):
    up = x.ceil()
    return up - (torch.rand(x.numel(), generator=lots).reshape(x.shape) < up - x).to(x.dtype)


@fresh.right("round_by_lot")
def in_place_on_a_copy(x, lots):
    y = x.clone()
    y += torch.rand(y.size(), generator=lots, dtype=y.dtype)
    return y.floor_()


@fresh.wrong("top_k_with_feedback", "topk(k) takes some of them")
def by_a_threshold(x, error, k, group):
    whole = x + error
    places = (whole.abs() >= whole.abs().topk(k).values[-1]).nonzero().flatten()
    everyones, values = all_gather(places.int(), group), all_gather(whole[places], group)
    mean = torch.zeros_like(x).index_add(0, everyones, values) / group.size()
    return mean, whole.index_fill(0, places, 0.0)


@fresh.right("top_k_with_feedback")
def by_sorting_all(x, error, k, group):
    whole = x.add(error)
    places = np.argsort(-whole.abs().numpy(), kind="stable")[:k]
    places = torch.from_numpy(places.astype(np.int32))
    indices = all_gather(places, group)
    values = all_gather(whole[places], group)
    mean = torch.zeros_like(x)
    mean.scatter_add_(0, indices.long(), values)
    left = whole.clone()
    left[places] = 0
    return mean.div_(group.size()), left


# ---- 20: offsets, read_ahead ---------------------------------------------------------------------


def beside(tensors, i, place):
    _, begin, end = tensors[i]
    return sorted(
        (place[j], place[j] + tensors[j][0])
        for j in place
        if tensors[j][1] < end and begin < tensors[j][2]
    )


def greedy(tensors, order):
    place = {}
    for i in order:
        low = 0
        for start, stop in beside(tensors, i, place):
            if start - low >= tensors[i][0]:
                break
            low = max(low, stop)
        place[i] = low
    return [place[i] for i in range(len(tensors))]


@fresh.wrong("offsets")
def by_bytes_times_life(tensors):
    return greedy(
        tensors,
        sorted(range(len(tensors)), key=lambda i: -tensors[i][0] / (tensors[i][2] - tensors[i][1])),
    )


@fresh.wrong("offsets")
def after_the_last_end_only(tensors):
    place = {}
    for i in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        place[i] = max((stop for _, stop in beside(tensors, i, place)), default=0)
    return [place[i] for i in range(len(tensors))]


@fresh.wrong("offsets")
def in_order_of_size_not_of_the_list(tensors):
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i][0])
    found = greedy(tensors, order)
    return [found[i] for i in order]


@fresh.wrong("offsets")
def touches_count_as_together(tensors):
    longer = [(size, begin - 1, end + 1) for size, begin, end in tensors]
    return greedy(longer, sorted(range(len(tensors)), key=lambda i: -tensors[i][0]))


@fresh.wrong("offsets")
def by_steps_of_eight(tensors):
    rounded = [(-(-size // 8) * 8, begin, end) for size, begin, end in tensors]
    return greedy(rounded, sorted(range(len(tensors)), key=lambda i: -tensors[i][0]))


@fresh.right("offsets")
def as_numpys_numbers(tensors):
    order = np.argsort([-size for size, _, _ in tensors], kind="stable")
    return np.array(greedy(tensors, order.tolist()), dtype=np.int64)


@fresh.right("offsets")
def as_a_list_of_numpys_numbers(tensors):
    order = sorted(range(len(tensors)), key=lambda i: (-tensors[i][0], i))
    return [np.int64(each) for each in greedy(tensors, order)]


@fresh.right("offsets")
def as_a_tensor(tensors):
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i][0])
    return torch.tensor(greedy(tensors, order), dtype=torch.long)


@fresh.wrong("read_ahead")
def waits_after_the_next_is_asked_for(x, layers, load):
    arriving = [load(i) for i in range(min(2, len(layers)))]
    for i, layer in enumerate(layers):
        weight = arriving.pop(0).wait()
        x = layer(x, weight)
        if i + 2 < len(layers):
            arriving.append(load(i + 2))
    return x


@fresh.wrong("read_ahead")
def keeps_a_copy(x, layers, load):
    arriving, copies = (load(0) if layers else None), []
    for i, layer in enumerate(layers):
        weight = arriving.wait()
        if i + 1 < len(layers):
            arriving = load(i + 1)
        copies.append(weight.clone())
        x = layer(x, copies[-1])
        del weight
    return x


@fresh.wrong("read_ahead")
def computes_before_it_asks(x, layers, load):
    arriving = load(0) if layers else None
    for i, layer in enumerate(layers):
        x = layer(x, arriving.wait())
        if i + 1 < len(layers):
            arriving = load(i + 1)
    return x


@fresh.wrong("read_ahead")
def reads_ahead_in_pairs(x, layers, load):
    for i in range(0, len(layers), 2):
        two = [load(j) for j in range(i, min(i + 2, len(layers)))]
        for j, each in enumerate(two):
            x = layers[i + j](x, each.wait())
    return x


@fresh.wrong("read_ahead")
def adds_the_layers_up(x, layers, load):
    total, arriving = 0, load(0) if layers else None
    for i, layer in enumerate(layers):
        weight = arriving.wait()
        arriving = load(i + 1) if i + 1 < len(layers) else None
        total = total + layer(x, weight)
        del weight
    return x + total


@fresh.right("read_ahead")
def with_a_nested_function(x, layers, load):
    def step(x, i, arriving):
        weight = arriving.wait()
        after = load(i + 1) if i + 1 < len(layers) else None
        return layers[i](x, weight), after

    after = load(0) if len(layers) else None
    for i in range(len(layers)):
        x, after = step(x, i, after)
    return x


@fresh.right("read_ahead")
def with_a_deque_of_one(x, layers, load):
    from collections import deque

    line = deque([load(0)] if layers else [], maxlen=1)
    number = 0
    while line:
        weight = line.popleft().wait()
        if number < len(layers) - 1:
            line.append(load(number + 1))
        x = layers[number](x, weight)
        del weight
        number += 1
    return x


# ---- 22: deepspeed_bytes -------------------------------------------------------------------------


def by_the_book(zero, sizes, k, n, limit=100_000, ignore_in_3=True, twice=2, key="stage"):
    total, stage = sum(sizes), zero.get(key, 0)
    if stage == 3:
        limit = zero.get("stage3_param_persistence_threshold", limit)
        small = sum(s for s in sizes if s <= limit)
        numbers = 2 * k * (total - small) + small + k * total
        if not ignore_in_3 and not zero.get("reduce_scatter", True):
            numbers += k * total
        return 4 * (n - 1) * numbers
    all_reduced = zero.get("use_multi_rank_bucket_allreduce", True)
    all_reduced = all_reduced or not zero.get("reduce_scatter", True) or stage == 0
    numbers = (k if stage == 2 else 1) * (twice if all_reduced else 1) * total
    return 4 * (n - 1) * (numbers + total * (stage > 0))


@fresh.wrong("deepspeed_bytes")
def stage_3_all_reduces_too(zero, sizes, k, n):
    return by_the_book(zero, sizes, k, n, ignore_in_3=False)


@fresh.wrong("deepspeed_bytes")
def counts_small_ones_in_each_micro_batch(zero, sizes, k, n):
    if zero.get("stage", 0) < 3:
        return by_the_book(zero, sizes, k, n)
    limit = zero.get("stage3_param_persistence_threshold", 100_000)
    small = sum(s for s in sizes if s <= limit)
    return 4 * (n - 1) * (2 * k * (sum(sizes) - small) + k * small + k * sum(sizes))


@fresh.wrong("deepspeed_bytes")
def another_default_of_the_threshold(zero, sizes, k, n):
    return by_the_book(zero, sizes, k, n, limit=10_000)


@fresh.wrong("deepspeed_bytes")
def gathers_once_a_micro_batch(zero, sizes, k, n):
    if zero.get("stage", 0) < 3:
        return by_the_book(zero, sizes, k, n)
    limit = zero.get("stage3_param_persistence_threshold", 100_000)
    small = sum(s for s in sizes if s <= limit)
    return 4 * (n - 1) * (k * (sum(sizes) - small) + small + k * sum(sizes))


@fresh.wrong("deepspeed_bytes", "Return a number")
def as_text(zero, sizes, k, n):
    return f"{by_the_book(zero, sizes, k, n):,}"


@fresh.right("deepspeed_bytes")
def as_a_tensor_of_one_number(zero, sizes, k, n):
    return torch.tensor(by_the_book(zero, sizes, k, n))


@fresh.right("deepspeed_bytes")
def as_numpys_number(zero, sizes, k, n):
    return np.int64(by_the_book(zero, sizes, k, n))


@fresh.right("deepspeed_bytes")
def as_a_fraction(zero, sizes, k, n):
    return Fraction(by_the_book(zero, sizes, k, n) * 3, 3)


# ---- 23: one_all_reduce --------------------------------------------------------------------------


@fresh.right("one_all_reduce")
def with_pairs_of_a_class_of_its_own():
    class Spec(tuple):
        def __new__(cls, *axes):
            return super().__new__(cls, axes)

    return {"x": Spec("dp", None), "v": Spec(None, "tp"), "w": Spec("tp", None), "y": Spec("dp")}


# ---- 24: place_tokens, who_runs, cache_bytes -----------------------------------------------------


def places_in(table, written, new, size):
    return [table[i // size] * size + i % size for i in range(written, written + new)]


@fresh.wrong("place_tokens", "blocks more than the tokens need")
def takes_all_but_the_last_of_free_where_nothing_is_needed(table, free, written, new, block_size):
    needed = -(-(written + new) // block_size)
    table = table + free[: needed - len(table)]
    return table, places_in(table, written, new, block_size)


@fresh.wrong("place_tokens")
def counts_only_the_new_tokens(table, free, written, new, block_size):
    table = table + free[: -(-new // block_size)]
    return table, places_in(table, written, new, block_size)


@fresh.wrong("place_tokens")
def drops_what_it_does_not_need(table, free, written, new, block_size):
    needed = -(-(written + new) // block_size)
    table = (table + free)[:needed]
    return table, places_in(table, written, new, block_size)


@fresh.wrong("place_tokens", "the table has no such entry")
def forgets_to_make_the_table_longer(table, free, written, new, block_size):
    return table, places_in(table, written, new, block_size)


@fresh.wrong("place_tokens")
def begins_a_block_with_each_call(table, free, written, new, block_size):
    here = len(table) * block_size
    table = table + free[: -(-new // block_size)]
    return table, places_in(table, here, new, block_size)


@fresh.right("place_tokens")
def as_arrays_of_numpy(table, free, written, new, block_size):
    more = max(math.ceil((written + new) / block_size) - len(table), 0)
    table = np.array([*table, *free[:more]], dtype=np.int64)
    at = np.arange(written, written + new)
    return table, table[at // block_size] * block_size + at % block_size


@fresh.right("place_tokens")
def takes_from_the_end_of_free(table, free, written, new, block_size):
    table, free = list(table), list(free)
    while len(table) * block_size < written + new:
        table.append(free.pop())
    return table, places_in(table, written, new, block_size)


@fresh.right("place_tokens")
def with_an_iterator(table, free, written, new, block_size):
    table, spare, places = [*table], iter(free), []
    for i in range(written, written + new):
        if i // block_size == len(table):
            table.append(next(spare))
        places.append(block_size * table[i // block_size] + i % block_size)
    return table, places


def missing(text, block_size):
    return -(-text.tokens // block_size) - text.blocks


@fresh.wrong("who_runs", "Your function changes running")
def pops_from_what_it_was_given(running, waiting, free, block_size):
    leave, come = [], []
    while sum(missing(t, block_size) for t in running) > free:
        last = running.pop()
        free += last.blocks
        leave.append(last.name)
    free -= sum(missing(t, block_size) for t in running)
    for text in waiting:
        if leave or missing(text, block_size) > free:
            break
        free -= missing(text, block_size)
        come.append(text.name)
    return leave, come


def choose(running, waiting, free, block_size, need=missing, until=lambda need, free: need > free):
    stay, leave, come = list(running), [], []
    while stay and until(sum(need(t, block_size) for t in stay), free):
        last = stay.pop()
        free += last.blocks
        leave.append(last.name)
    free -= sum(missing(t, block_size) for t in stay)
    for text in waiting:
        if leave or need(text, block_size) > free:
            break
        free -= need(text, block_size)
        come.append(text.name)
    return leave, come


@fresh.wrong("who_runs")
def keeps_one_block_in_reserve(running, waiting, free, block_size):
    return choose(running, waiting, free - 1, block_size)


@fresh.wrong("who_runs")
def makes_room_for_the_token_after(running, waiting, free, block_size):
    def need(text, size):
        return -(-(text.tokens + 1) // size) - text.blocks

    return choose(running, waiting, free, block_size, need)


@fresh.wrong("who_runs")
def lets_leave_where_it_just_suffices(running, waiting, free, block_size):
    return choose(running, waiting, free, block_size, until=lambda need, free: need >= free)


@fresh.wrong("who_runs")
def takes_the_waiting_for_as_long_as_one_block(running, waiting, free, block_size):
    leave, come = choose(running, waiting, free, block_size)
    if leave:
        return leave, []
    return leave, [text.name for text in waiting[: max(free, 0)]]


@fresh.right("who_runs")
def as_arrays_of_names(running, waiting, free, block_size):
    leave, come = choose(running, waiting, free, block_size)
    return np.array(leave, dtype=str), np.array(come, dtype=str)


@fresh.right("who_runs")
def by_running_sums(running, waiting, free, block_size):
    for stay in range(len(running), -1, -1):
        room = free + sum(t.blocks for t in running[stay:])
        room -= sum(missing(t, block_size) for t in running[:stay])
        if room >= 0:
            break
    if stay < len(running):
        return [t.name for t in running[stay:]], []
    sums = [*itertools.accumulate(missing(t, block_size) for t in waiting)]
    return [], [t.name for t in waiting[: bisect.bisect_right(sums, room)]]


@fresh.right("who_runs")
def as_sets(running, waiting, free, block_size):
    leave, come = choose(running, waiting, free, block_size)
    return frozenset(leave), set(come)


def count(config, tokens, nbytes, tp, heads_on=lambda kv, tp: max(kv // tp, 1), dim=None, times=2):
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    kv = config.get("num_key_value_heads", heads)
    hidden = config.get("hidden_size") or config["n_embd"]
    of_head = dim(config, hidden, heads, kv) if dim else config.get("head_dim", hidden // heads)
    return times * layers * heads_on(kv, tp) * of_head * tokens * nbytes


@fresh.wrong("cache_bytes", "as long as one of the attention heads")
def divides_by_key_value_heads(config, tokens, bytes_a_number, tp):
    return count(
        config, tokens, bytes_a_number, tp, dim=lambda config, hidden, heads, kv: hidden // kv
    )


@fresh.wrong("cache_bytes", "heads are not split")
def cuts_heads(config, tokens, bytes_a_number, tp):
    return count(config, tokens, bytes_a_number, tp, heads_on=lambda kv, tp: kv / tp)


@fresh.wrong("cache_bytes")
def in_bits(config, tokens, bytes_a_number, tp):
    return 8 * count(config, tokens, bytes_a_number, tp)


@fresh.wrong("cache_bytes", "spread over tp")
def of_all_devices(config, tokens, bytes_a_number, tp):
    return count(config, tokens, bytes_a_number, 1)


@fresh.wrong("cache_bytes", "A head has head_dim=128")
def does_not_know_head_dim(config, tokens, bytes_a_number, tp):
    return count(
        config, tokens, bytes_a_number, tp, dim=lambda config, hidden, heads, kv: hidden // heads
    )


@fresh.right("cache_bytes")
def as_an_array_of_one(config, tokens, bytes_a_number, tp):
    return np.float64(count(config, tokens, bytes_a_number, tp))


@fresh.right("cache_bytes")
def with_a_match(config, tokens, bytes_a_number, tp):
    match config:
        case {"n_embd": hidden, "n_layer": layers, "n_head": heads}:
            kv, dim = heads, hidden // heads
        case {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}:
            kv = config.get("num_key_value_heads") or heads
            dim = config.get("head_dim") or hidden // heads
    kv_here = kv // tp if kv >= tp else 1
    return sum(layers * kv_here * dim * bytes_a_number for _ in "kv") * tokens


@fresh.right("cache_bytes")
def as_a_tensor_of_bytes(config, tokens, bytes_a_number, tp):
    return torch.tensor(count(config, tokens, bytes_a_number, tp), dtype=torch.int64)


# ---- 25: patience, shares, rebuild ---------------------------------------------------------------


@fresh.wrong("patience")
def by_a_quantile(silences, allowed):
    return float(np.quantile(silences, 1 - allowed))


@fresh.wrong("patience")
def one_too_strict(silences, allowed):
    n = len(silences)
    return sorted(silences)[min(n - 1, n - int(allowed * n))]


@fresh.wrong("patience")
def mean_and_two_deviations(silences, allowed):
    return float(np.mean(silences) + 2 * np.std(silences))


@fresh.wrong("patience")
def twice_the_longest(silences, allowed):
    return 2 * max(silences)


@fresh.wrong("patience")
def rounds_the_number_of_alarms(silences, allowed):
    most = round(allowed * len(silences) + 0.5)
    return sorted(silences)[max(len(silences) - 1 - most, 0)]


@fresh.right("patience")
def as_a_number_of_numpy(silences, allowed):
    ordered = np.sort(np.asarray(silences))
    return ordered[len(ordered) - 1 - int(allowed * len(ordered))]


@fresh.right("patience")
def with_a_heap(silences, allowed):
    return heapq.nlargest(math.floor(allowed * len(silences)) + 1, silences)[-1]


@fresh.right("patience")
def by_bisection_of_candidates(silences, allowed):
    ordered = sorted(set(silences))
    low, high = 0, len(ordered) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(s > ordered[middle] for s in silences) <= allowed * len(silences):
            high = middle
        else:
            low = middle + 1
    return ordered[low]


def dealt(batch_size, seconds, key):
    taken = [0] * len(seconds)
    for _ in range(batch_size):
        taken[min(range(len(seconds)), key=lambda d: key(taken, seconds, d))] += 1
    return taken


@fresh.wrong("shares")
def to_who_is_done_first_now(batch_size, seconds):
    return dealt(batch_size, seconds, lambda taken, seconds, d: taken[d] * seconds[d])


@fresh.wrong("shares")
def by_rounded_proportions(batch_size, seconds):
    speeds = [1 / s for s in seconds]
    taken = [round(batch_size * v / sum(speeds)) for v in speeds]
    taken[0] += batch_size - sum(taken)
    return taken


@fresh.wrong("shares")
def the_rest_to_the_fastest(batch_size, seconds):
    speeds = [1 / s for s in seconds]
    taken = [int(batch_size * v / sum(speeds)) for v in speeds]
    taken[speeds.index(max(speeds))] += batch_size - sum(taken)
    return taken


@fresh.wrong("shares")
def at_least_one_each(batch_size, seconds):
    taken = [1] * len(seconds)
    for _ in range(batch_size - len(seconds)):
        taken[min(range(len(seconds)), key=lambda d: (taken[d] + 1) * seconds[d])] += 1
    return taken


@fresh.wrong("shares")
def only_the_fastest(batch_size, seconds):
    taken = [0] * len(seconds)
    taken[seconds.index(min(seconds))] = batch_size
    return taken


@fresh.right("shares")
def as_an_array(batch_size, seconds):
    seconds = np.asarray(seconds)
    taken = np.zeros(len(seconds), dtype=np.int32)
    for _ in range(batch_size):
        taken[np.argmin((taken + 1) * seconds)] += 1
    return taken


@fresh.right("shares")
def by_the_times_at_which_samples_end(batch_size, seconds):
    ends = sorted((k * s, d) for d, s in enumerate(seconds) for k in range(1, batch_size + 1))[
        :batch_size
    ]
    return [sum(device == d for _, device in ends) for d in range(len(seconds))]


@fresh.right("shares")
def as_a_tensor_of_counts(batch_size, seconds):
    found = Counter()
    for _ in range(batch_size):
        found[min(range(len(seconds)), key=lambda d: (found[d] + 1) * seconds[d])] += 1
    return torch.tensor([found[d] for d in range(len(seconds))])


@fresh.wrong("rebuild", "in its own dtype")
def broadcasts_in_float32(state, step, dead, group):
    alive = [r for r in range(group.size()) if r not in dead]
    there = Members(group, alive)
    steps = all_gather(torch.tensor([step]), there)
    root = int(steps.argmax())
    return there, broadcast(state.float(), root, there).to(state.dtype), int(steps[root])


@fresh.wrong("rebuild", "Return three things")
def returns_nothing_of_it(state, step, dead, group):
    alive = [r for r in range(group.size()) if r not in dead]
    Members(group, alive)


@fresh.wrong("rebuild")
def says_nan_steps(state, step, dead, group):
    alive = [r for r in range(group.size()) if r not in dead]
    there = Members(group, alive)
    steps = all_gather(torch.tensor([step]), there)
    return there, broadcast(state, int(steps.argmax()), there), float("nan")


# ---- 26: order_on_hosts, find_exchanged ----------------------------------------------------------


def busiest_of(axes, sent, k, order):
    hosts = [rank // k for rank in range(math.prod(axes.values()))]
    return uplink_bytes(Grid(**{axis: axes[axis] for axis in order}), sent, hosts)


@fresh.wrong("order_on_hosts", "another order has")
def tries_rotations_only(axes, sent, ranks_per_host):
    names = list(axes)
    turns = [tuple(names[i:] + names[:i]) for i in range(len(names))]
    return min(turns, key=lambda order: busiest_of(axes, sent, ranks_per_host, order))


@fresh.wrong("order_on_hosts", "another order has")
def tries_one_swap_only(axes, sent, ranks_per_host):
    names, orders = list(axes), [tuple(axes)]
    for i, j in itertools.combinations(range(len(names)), 2):
        order = names[:]
        order[i], order[j] = order[j], order[i]
        orders.append(tuple(order))
    return min(orders, key=lambda order: busiest_of(axes, sent, ranks_per_host, order))


@fresh.wrong("order_on_hosts")
def by_what_each_sends(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=lambda axis: sent[axis]))


@fresh.wrong("order_on_hosts")
def by_bytes_of_the_whole_axis(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=lambda axis: sent[axis] * axes[axis]))


@fresh.wrong("order_on_hosts")
def the_largest_axis_outermost(axes, sent, ranks_per_host):
    return tuple(sorted(axes, key=lambda axis: (-axes[axis], sent[axis])))


@fresh.right("order_on_hosts")
def as_an_array_of_axes(axes, sent, ranks_per_host):
    orders = list(itertools.permutations(axes))
    costs = [busiest_of(axes, sent, ranks_per_host, order) for order in orders]
    return np.array(orders[int(np.argmin(costs))])


@fresh.right("order_on_hosts")
def as_a_dict_in_order(axes, sent, ranks_per_host):
    best = min(
        itertools.permutations(axes),
        key=lambda order: busiest_of(axes, sent, ranks_per_host, order),
    )
    return {axis: axes[axis] for axis in best}


@fresh.right("order_on_hosts")
def the_last_of_the_best(axes, sent, ranks_per_host):
    best = None
    for order in itertools.permutations(reversed(list(axes))):
        cost = busiest_of(axes, sent, ranks_per_host, order)
        if best is None or cost <= best[0]:
            best = cost, list(order)
    return best[1]


def heaviest(traffic):
    return [max(range(len(row)), key=row.__getitem__) for row in traffic]


@fresh.wrong("find_exchanged")
def the_first_and_the_last_that_send_wrongly(traffic):
    n = len(traffic)
    wrong = [i for i, to in enumerate(heaviest(traffic)) if to != (i + 1) % n]
    return (wrong[0], wrong[-1]) if wrong else None


@fresh.wrong("find_exchanged")
def those_after_who_sends_wrongly(traffic):
    n = len(traffic)
    wrong = [i for i, to in enumerate(heaviest(traffic)) if to != (i + 1) % n]
    return (wrong[0] + 1, wrong[-1]) if wrong else None


@fresh.wrong("find_exchanged")
def never_none(traffic):
    n, after = len(traffic), heaviest(traffic)
    for a, b in itertools.combinations(range(n), 2):
        rank_at = list(range(n))
        rank_at[a], rank_at[b] = b, a
        if all(rank_at[after[p]] == (rank_at[p] + 1) % n for p in range(n)):
            return a, b
    return 0, 0


@fresh.wrong("find_exchanged")
def without_the_last_place(traffic):
    n, after = len(traffic), heaviest(traffic)
    for a, b in itertools.combinations(range(n - 1), 2):
        rank_at = list(range(n))
        rank_at[a], rank_at[b] = b, a
        if all(rank_at[after[p]] == (rank_at[p] + 1) % n for p in range(n)):
            return a, b


@fresh.wrong("find_exchanged")
def the_smallest_sum_of_a_row(traffic):
    totals = [sum(row) for row in traffic]
    a, b = sorted(sorted(range(len(traffic)), key=totals.__getitem__)[-2:])
    return a, b


@fresh.right("find_exchanged")
def as_an_array_of_two(traffic):
    traffic = np.array(traffic)
    n = len(traffic)
    for a in range(n):
        for b in range(a + 1, n):
            order = np.arange(n)
            order[[a, b]] = b, a
            turned = traffic[np.ix_(order, order)]
            if all(turned[i].argmax() == (i + 1) % n for i in range(n)):
                return np.array([a, b])


@fresh.right("find_exchanged")
def follows_the_ring(traffic):
    after, n = heaviest(traffic), len(traffic)
    ring = [0]
    while len(ring) < n:
        ring.append(after[ring[-1]])
    for turn in range(n):
        moved = [ring[(i + turn) % n] for i in range(n)]
        off = [i for i in range(n) if moved[i] != i]
        if not off:
            return None
        if len(off) == 2:
            return tuple(off)


@fresh.right("find_exchanged")
def as_a_list(traffic):
    found = as_an_array_of_two(traffic)
    return None if found is None else [int(each) for each in found]
