"""Lesson 07: answers that shard in name only are told what is still whole."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import all_gather, all_reduce, broadcast, reduce_scatter
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_step, wrong_backward, wrong_forward = Wrong(), Wrong(), Wrong()


@wrong_step("Each rank steps its own 5 only")
def steps_the_whole(flat, gradient, update, group):
    return update(flat, all_reduce(gradient, group, op="mean"))


@wrong_step("Each rank steps its own 5 only")
def steps_the_whole_and_shares_parts(flat, gradient, update, group):
    new = update(flat, all_reduce(gradient, group, op="mean"))
    return all_gather(new.chunk(group.size())[group.rank()], group)


@wrong_step("given (20, 5) elements")
def steps_the_whole_with_its_part(flat, gradient, update, group):
    return all_gather(update(flat, reduce_scatter(gradient, group, op="mean")), group)


@wrong_step("an all-reduce gives every rank the whole gradient")
def all_reduces_the_gradient(flat, gradient, update, group):
    mean = all_reduce(gradient, group, op="mean", algorithm="ring")
    mine = [x.chunk(group.size())[group.rank()] for x in (flat, mean)]
    return all_gather(update(*mine), group)


@wrong_step("steps with sums")
def steps_with_sums(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    return all_gather(update(shard, reduce_scatter(gradient, group)), group)


@wrong_step("returns its shard only")
def keeps_the_shard(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    return update(shard, reduce_scatter(gradient, group, op="mean"))


@wrong_step("what is gathered are the shards that update has returned")
def gathers_the_old_shards(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    update(shard, reduce_scatter(gradient, group, op="mean"))
    return all_gather(shard, group)


@wrong_step("Rank r owns chunk r")
def steps_a_neighbours_shard(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank() - 1]
    return all_gather(update(shard, reduce_scatter(gradient, group, op="mean")), group)


def scatter(unit, group):
    whole = torch.cat([p.grad.flatten() for p in unit])
    for p in unit:
        p.grad = None
    return reduce_scatter(whole, group, op="mean")


def with_hooks(loss, units, ready, keep=False):
    parts = [None] * len(units)
    hooks = []
    for number, unit in enumerate(units):

        def hook(p, number=number, unit=unit):
            if all(q.grad is not None for q in unit):
                parts[number] = ready(unit)

        hooks += [p.register_post_accumulate_grad_hook(hook) for p in unit]
    loss.backward()
    for handle in [] if keep else hooks:
        handle.remove()
    return parts


@wrong_backward("10 gradients were there at once")
def scatters_after_backward(loss, units, group):
    loss.backward()
    return [scatter(unit, group) for unit in units]


@wrong_backward("10 gradients were there at once")
def forgets_to_free(loss, units, group):
    def ready(unit):
        return reduce_scatter(torch.cat([p.grad.flatten() for p in unit]), group, op="mean")

    return with_hooks(loss, units, ready)


@wrong_backward("These are sums")
def scatters_sums(loss, units, group):
    return with_hooks(loss, units, lambda unit: scatter(unit, group) * group.size())


@wrong_backward("in the order of backward")
def returns_in_backward_order(loss, units, group):
    return with_hooks(loss, units, lambda unit: scatter(unit, group))[::-1]


@wrong_backward("still there in the next backward")
def leaves_hooks_behind(loss, units, group):
    return with_hooks(loss, units, lambda unit: scatter(unit, group), keep=True)


@wrong_backward("still there in the next backward")
def leaves_hooks_that_would_send_nothing(loss, units, group):
    left = {id(unit): len(unit) for unit in units}
    number = {p: (i, unit) for i, unit in enumerate(units) for p in unit}
    parts = [None] * len(units)

    def ready(p):
        i, unit = number[p]
        left[id(unit)] -= 1
        if not left[id(unit)]:
            parts[i] = scatter(unit, group)

    for p in number:
        p.register_post_accumulate_grad_hook(ready)
    loss.backward()
    return parts


@wrong_backward("an all-reduce sends twice that")
def all_reduces_units(loss, units, group):
    def ready(unit):
        whole = torch.cat([p.grad.flatten() for p in unit])
        for p in unit:
            p.grad = None
        whole = all_reduce(whole, group, op="mean", algorithm="ring")
        return whole.chunk(group.size())[group.rank()]

    return with_hooks(loss, units, ready)


@wrong_backward("Wrong parts")
def returns_whole_gradients(loss, units, group):
    parts = with_hooks(loss, units, lambda unit: scatter(unit, group))
    return [all_gather(part, group) for part in parts]


@wrong_forward("All weights are gathered before the first layer")
def gathers_everything_first(x, layers, shards, group):
    weights = [all_gather(shard, group) for shard in shards]
    for layer, weight in zip(layers, weights):
        x = layer(x, weight)
    return x


@wrong_forward("holds the last one until the next has arrived")
def keeps_the_name(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        weight = all_gather(shard, group)
        x = layer(x, weight)
    return x


@wrong_forward("keep no list")
def keeps_a_list(x, layers, shards, group):
    kept = []
    for layer, shard in zip(layers, shards):
        kept.append(all_gather(shard, group))
        x = layer(x, kept[-1])
    return x


@wrong_forward("was given a shard")
def uses_the_shard(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        part = layer(x.chunk(group.size())[group.rank()], shard)
        x = all_gather(part, group)
    return x


@wrong_forward("was given a shard")
def forgets_to_gather(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        x = layer(x, shard)
    return x


@wrong_forward("Wrong outputs")
def gathers_the_inputs(x, layers, shards, group):
    x = broadcast(x, 0, group)
    for layer, shard in zip(layers, shards):
        x = layer(x, all_gather(shard, group))
    return x


@wrong_forward("bytes were sent where")
def gathers_twice(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        all_gather(shard, group)
        x = layer(x, all_gather(shard, group))
    return x


@wrong_forward("bytes were sent where")
def lets_the_backend_gather_in_double(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        parts = [torch.empty_like(shard, dtype=torch.float64) for _ in range(group.size())]
        dist.all_gather(parts, shard.double(), group=group)
        x = layer(x, torch.cat(parts).float())
    return x


@wrong_step("A barrier moves nothing")
def meets_before_the_step(flat, gradient, update, group):
    dist.barrier(group=group)
    shard = flat.chunk(group.size())[group.rank()]
    return all_gather(update(shard, reduce_scatter(gradient, group, op="mean")), group)


@wrong_step("are needed: numbers travel in the dtype")
def scatters_bfloat16(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    mean = reduce_scatter(gradient.bfloat16(), group, op="mean").to(flat)
    return all_gather(update(shard, mean), group)


@wrong_step("travel as float64")
def scatters_double(flat, gradient, update, group):
    shard = flat.chunk(group.size())[group.rank()]
    mean = reduce_scatter(gradient.double(), group, op="mean").to(flat)
    return all_gather(update(shard, mean), group)


@wrong_backward("though not in .grad")
def stashes_and_scatters_after_backward(loss, units, group):
    stashed = []

    def stash(p):
        stashed.append((p, p.grad))
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(stash) for unit in units for p in unit]
    loss.backward()
    for hook in hooks:
        hook.remove()
    grads = dict(stashed)
    flats = [torch.cat([grads[p].flatten() for p in unit]) for unit in units]
    return [reduce_scatter(flat, group, op="mean") for flat in flats]


@wrong_backward("Put a hook on each")
def hooks_only_the_first_of_a_unit(loss, units, group):
    parts, hooks = [None] * len(units), []
    for number, unit in enumerate(units):

        def ready(p, number=number, unit=unit):
            parts[number] = scatter(unit, group)

        hooks.append(unit[0].register_post_accumulate_grad_hook(ready))
    loss.backward()
    for hook in hooks:
        hook.remove()
    return parts


@wrong_backward("though not in .grad")
def keeps_the_flat_ones(loss, units, group):
    kept = []

    def ready(unit):
        kept.append(torch.cat([p.grad.flatten() for p in unit]))
        return scatter(unit, group)

    parts = with_hooks(loss, units, ready)
    kept.clear()
    return parts


@wrong_backward("A barrier moves nothing")
def a_barrier_a_unit(loss, units, group):
    def ready(unit):
        dist.barrier(group=group)
        return scatter(unit, group)

    return with_hooks(loss, units, ready)


@wrong_backward("are needed: numbers travel in the dtype")
def scatters_half_units(loss, units, group):
    def ready(unit):
        whole = torch.cat([p.grad.flatten() for p in unit]).bfloat16()
        for p in unit:
            p.grad = None
        return reduce_scatter(whole, group, op="mean").float()

    return with_hooks(loss, units, ready)


@wrong_forward("and no copy")
def keeps_them_and_passes_clones(x, layers, shards, group):
    kept = []
    for layer, shard in zip(layers, shards):
        kept.append(all_gather(shard, group))
        x = layer(x, kept[-1].clone())
    return x


@wrong_forward("Gather them one by one")
def gathers_all_others_at_once(x, layers, shards, group):
    x = layers[0](x, all_gather(shards[0], group))
    if len(shards) > 1:
        length, size = len(shards[0]), group.size()
        others = all_gather(torch.cat(list(shards[1:])), group).view(size, -1, length)
        for number, layer in enumerate(layers[1:]):
            x = layer(x, others[:, number].reshape(-1))
    return x


@wrong_forward("each right before its layer")
def fetches_one_ahead(x, layers, shards, group):
    weight = all_gather(shards[0], group)
    for number, layer in enumerate(layers):
        ahead = all_gather(shards[number + 1], group) if number + 1 < len(layers) else None
        x = layer(x, weight)
        weight = ahead
        del ahead
    return x


@wrong_forward("A barrier moves nothing")
def a_barrier_a_layer(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        dist.barrier(group=group)
        x = layer(x, all_gather(shard, group))
    return x


KEPT = [
    (name, fn, says)
    for name, wrong in (
        ("sharded_step", wrong_step),
        ("backward_in_units", wrong_backward),
        ("forward_on_demand", wrong_forward),
    )
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", KEPT, ids=[fn.__name__ for _, fn, _ in KEPT])
def test_a_wrong_answer_is_refused_with_the_hint_that_helps(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


right_step, right_backward = Right("sharded_step"), Right("backward_in_units")
right_forward = Right("forward_on_demand")
right_step(solutions.sharded_step)
right_backward(solutions.backward_in_units)
right_forward(solutions.forward_on_demand)


@right_step
def divides_before_it_adds(flat, gradient, update, group):
    mean = reduce_scatter(gradient / group.size(), group)
    return all_gather(update(flat.view(group.size(), -1)[group.rank()], mean), group)


@right_step
def with_the_backend(flat, gradient, update, group):
    shard = flat.tensor_split(group.size())[group.rank()].clone()
    mean = torch.empty_like(shard)
    dist.reduce_scatter_single(mean, gradient, group=group)
    new = torch.empty_like(flat)
    dist.all_gather_single(new, update(shard, mean / group.size()), group=group)
    return new


@right_step
def gathers_a_list(flat, gradient, update, group):
    length = len(flat) // group.size()
    shard = flat.narrow(0, group.rank() * length, length)
    shard = update(shard, reduce_scatter(gradient, group, op="mean"))
    parts = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(parts, shard, group=group)
    return torch.cat(parts)


@right_backward
def asks_for_one_units_gradients_at_a_time(loss, units, group):
    parts = []
    for unit in units[::-1]:
        grads = torch.autograd.grad(loss, unit, retain_graph=True)
        whole = torch.cat([grad.flatten() for grad in grads])
        del grads
        parts.append(reduce_scatter(whole, group, op="mean"))
        del whole
    return parts[::-1]


@right_backward
def frees_the_storage_in_place(loss, units, group):
    def ready(unit):
        whole = torch.cat([p.grad.flatten() for p in unit])
        for p in unit:
            p.grad.untyped_storage().resize_(0)
        return reduce_scatter(whole, group, op="mean")

    left, parts, hooks = [len(unit) for unit in units], {}, []
    for number, unit in enumerate(units):

        def hook(p, number=number, unit=unit):
            left[number] -= 1
            if not left[number]:
                parts[number] = ready(unit)

        hooks += [p.register_post_accumulate_grad_hook(hook) for p in unit]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [parts[number] for number in range(len(units))]


@right_backward
def in_one_reused_buffer(loss, units, group):
    buffer = torch.empty(max(sum(p.numel() for p in unit) for unit in units))
    parts, waiting, place = [None] * len(units), [set(unit) for unit in units], {}
    for number, unit in enumerate(units):
        at = 0
        for p in unit:
            place[p] = number, at
            at += p.numel()

    def arrived(p):
        number, at = place[p]
        buffer[at : at + p.numel()] = p.grad.flatten()
        p.grad = None
        waiting[number].discard(p)
        if not waiting[number]:
            whole = buffer[: sum(p.numel() for p in units[number])]
            parts[number] = reduce_scatter(whole / group.size(), group)

    hooks = [p.register_post_accumulate_grad_hook(arrived) for p in place]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return parts


@right_forward
def lets_no_name_hold_it(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        x = layer(x, all_gather(shard, group))
    return x


@right_forward
def into_one_reused_buffer(x, layers, shards, group):
    buffer = shards[0].new_empty(len(shards[0]) * group.size())
    for layer, shard in zip(layers, shards):
        dist.all_gather_single(buffer, shard, group=group)
        x = layer(x, buffer)
    return x


@right_forward
def frees_its_storage(x, layers, shards, group):
    for number, layer in enumerate(layers):
        weight = shards[number].new_empty(len(shards[number]) * group.size())
        dist.all_gather_single(weight, shards[number], group=group)
        x = layer(x, weight)
        weight.untyped_storage().resize_(0)
    return x


RIGHT = [
    (each.name, fn) for each in (right_step, right_backward, right_forward) for fn in each.answers
]


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_a_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
