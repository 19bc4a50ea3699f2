"""Lesson 08: wrong uses of FSDP2 and wrong rings under DDP get a hint that names the mistake."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mini_dist import check, collectives
from mini_dist.collectives import exchange, ring_all_gather, ring_reduce_scatter
from mini_dist.course.check import wrappers
from mini_dist.model.loss import token_loss
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

step, right_step = Wrong(), Right("shard_and_step")


def cut(gpt, group, modules=None, **knobs):
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*gpt.blocks, gpt) if modules is None else modules:
        fully_shard(module, mesh=mesh, **{"reshard_after_forward": True, **knobs})


def sgd(gpt):
    return torch.optim.SGD(gpt.parameters(), lr=0.5)


def accumulate(gpt, batches, over=None, sync=None):
    """Run all forwards and backwards; sync(number) says whether gradients are scattered."""
    k, total = len(batches), 0.0
    for number, (inputs, targets) in enumerate(batches):
        gpt.set_requires_gradient_sync(number == k - 1 if sync is None else sync(number))
        loss = token_loss(gpt(inputs), targets).mean()
        (loss / (over or k)).backward()
        total += loss.item() / k
    return total


def step_of(gpt, batches, **how):
    optimizer = sgd(gpt)
    total = accumulate(gpt, batches, **how)
    optimizer.step()
    return total


@step("an optimizer that was made before holds the old ones")
def makes_the_optimizer_first(gpt, micro_batches, group):
    optimizer = sgd(gpt)
    cut(gpt, group)
    total = accumulate(gpt, micro_batches)
    optimizer.step()
    return total


@step("The parameters are whole on every rank")
def wraps_with_ddp(gpt, micro_batches, group):
    model, total = DistributedDataParallel(gpt, process_group=group), 0.0
    optimizer = sgd(gpt)
    for inputs, targets in micro_batches:
        loss = token_loss(model(inputs), targets).mean() / len(micro_batches)
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@step("the root takes what is in no other unit")
def forgets_the_root(gpt, micro_batches, group):
    cut(gpt, group, modules=gpt.blocks)
    optimizer, k, total = sgd(gpt), len(micro_batches), 0.0
    for number, (inputs, targets) in enumerate(micro_batches):
        for block in gpt.blocks:
            block.set_requires_gradient_sync(number == k - 1)
        loss = token_loss(gpt(inputs), targets).mean() / k
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@step("every block is one, by itself")
def takes_the_model_as_one_unit(gpt, micro_batches, group):
    cut(gpt, group, modules=[gpt])
    return step_of(gpt, micro_batches)


@step("every block is one, by itself")
def takes_each_linear_as_a_unit(gpt, micro_batches, group):
    linears = [m for m in gpt.blocks.modules() if isinstance(m, torch.nn.Linear)]
    cut(gpt, group, modules=[*linears, *gpt.blocks, gpt])
    return step_of(gpt, micro_batches)


@step("scattered after each of the 3 micro-batches")
def scatters_after_each(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches, sync=lambda number: True)


@step("no gradient was scattered")
def never_scatters(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches, sync=lambda number: False)


@step("the root stays whole from forward to backward")
def leaves_the_root_as_it_is(gpt, micro_batches, group):
    cut(gpt, group, reshard_after_forward=None)
    return step_of(gpt, micro_batches)


@step("some unit was not freed after forward")
def keeps_all_for_backward(gpt, micro_batches, group):
    cut(gpt, group, reshard_after_forward=False)
    return step_of(gpt, micro_batches)


@step("some unit was not freed")
def keeps_all_after_backward(gpt, micro_batches, group):
    cut(gpt, group)
    gpt.set_reshard_after_backward(False)
    total = step_of(gpt, micro_batches)
    gpt.reshard()
    for block in gpt.blocks:
        block.reshard()
    return total


@step("3 times the gradient: the mean is over micro-batches")
def adds_up_the_losses(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches, over=1)


@step("gradient over 4: the mean over ranks was taken twice")
def divides_by_the_ranks(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches, over=len(micro_batches) * group.size())


@step("one step at the end")
def steps_after_each(gpt, micro_batches, group):
    cut(gpt, group)
    optimizer, k, total = sgd(gpt), len(micro_batches), 0.0
    for inputs, targets in micro_batches:
        loss = token_loss(gpt(inputs), targets).mean() / k
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


@step("1 forwards were made of 3 micro-batches")
def takes_the_first_only(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches[:1])


@step("1 forwards were made of 3 micro-batches")
def puts_them_together(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, [tuple(map(torch.cat, zip(*micro_batches)))])


@step("gathers where 18 are to be")
def goes_back_from_all_at_once(gpt, micro_batches, group):
    cut(gpt, group)
    optimizer = sgd(gpt)
    losses = [token_loss(gpt(inputs), targets).mean() for inputs, targets in micro_batches]
    loss = sum(losses) / len(losses)
    loss.backward()
    optimizer.step()
    return loss


@step("numbers travel in the dtype")
def sends_half(gpt, micro_batches, group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    cut(gpt, group, mp_policy=policy)
    return step_of(gpt, micro_batches)


@step("a call of barrier")
def waits_for_all(gpt, micro_batches, group):
    cut(gpt, group)
    dist.barrier(group)
    return step_of(gpt, micro_batches)


@step("a call of all_reduce")
def averages_the_loss(gpt, micro_batches, group):
    cut(gpt, group)
    return collectives.all_reduce(torch.tensor(step_of(gpt, micro_batches)), group, op="mean")


@step("the sum over micro-batches")
def returns_the_sum(gpt, micro_batches, group):
    cut(gpt, group)
    return step_of(gpt, micro_batches) * len(micro_batches)


@step("a number: on some rank there is none")
def returns_nothing(gpt, micro_batches, group):
    cut(gpt, group)
    step_of(gpt, micro_batches)


@step("a number: on some rank there is none")
def returns_a_list(gpt, micro_batches, group):
    cut(gpt, group)
    return [step_of(gpt, micro_batches)]


@step("Right as long as the group is the whole job")
def shards_over_the_world(gpt, micro_batches, group):
    cut(gpt, dist.group.WORLD)
    return step_of(gpt, micro_batches)


@step("SGD with lr=0.5")
def steps_by_adamw(gpt, micro_batches, group):
    cut(gpt, group)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=0.5)
    total = accumulate(gpt, micro_batches)
    optimizer.step()
    return total


@right_step
def without_an_optimizer(gpt, micro_batches, group):
    cut(gpt, group)
    total = accumulate(gpt, micro_batches)
    with torch.no_grad():
        for p in gpt.parameters():
            p -= 0.5 * p.grad
    return total


@right_step
def divides_the_gradients(gpt, micro_batches, group):
    cut(gpt, group)
    optimizer = sgd(gpt)
    total = accumulate(gpt, micro_batches, over=1)
    for p in gpt.parameters():
        p.grad /= len(micro_batches)
    optimizer.step()
    optimizer.zero_grad()
    return torch.tensor(total)


@right_step
def says_later_that_all_are_freed(gpt, micro_batches, group):
    cut(gpt, group, reshard_after_forward=None)
    gpt.set_reshard_after_forward(True)
    return step_of(gpt, micro_batches)


@right_step
def frees_the_root_by_hand(gpt, micro_batches, group):
    cut(gpt, group, reshard_after_forward=None)
    gpt.register_forward_hook(lambda *_: gpt.reshard())
    return step_of(gpt, micro_batches)


@right_step
def the_last_one_apart(gpt, micro_batches, group):
    mesh, k = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)), len(micro_batches)
    for block in reversed(gpt.blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(gpt, mesh=mesh, reshard_after_forward=True)
    optimizer, losses = torch.optim.SGD(gpt.parameters(), lr=0.5 / k, foreach=False), []

    def forward_and_backward(inputs, targets):
        losses.append(token_loss(gpt(inputs), targets).mean())
        losses[-1].backward()

    gpt.set_requires_gradient_sync(False)
    for batch in micro_batches[:-1]:
        forward_and_backward(*batch)
    gpt.set_requires_gradient_sync(True)
    forward_and_backward(*micro_batches[-1])
    optimizer.step()
    return torch.stack(losses).mean().detach()


# -- the ring under DDP ---------------------------------------------------------------------------

ring, right_ring = Wrong(), Right("my_all_reduce")


def neighbours(group, step=1):
    rank, size = group.rank(), group.size()
    return rank, size, (rank + step) % size, (rank - step) % size


@ring("twice: return the sum")
def averages(x, group):
    return solutions.my_all_reduce(x, group) / group.size()


@ring("exchange(..., like=")
def cuts_off_what_does_not_divide(x, group):
    rank, size, right, left = neighbours(group)
    parts = list(x[: len(x) // size * size].chunk(size))
    if not len(parts[0]):
        return x
    total = torch.cat([sum([parts[rank]] * size)] * size)
    return torch.cat([total, x[len(total) :]])


@ring("parts go round, twice n-1 of them, not whole buckets")
def passes_whole_buckets(x, group):
    rank, size, right, left = neighbours(group)
    total, moving = x.clone(), x
    for _ in range(size - 1):
        moving = exchange(moving, right, left, group)
        total = total + moving
    return total


@ring("knows the next one only")
def sends_to_everyone(x, group):
    rank, size = group.rank(), group.size()
    parts = list(x.tensor_split(size))
    mine = parts[rank]
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        mine = mine + exchange(parts[to], to, source, group, like=parts[rank])
    everyones = {rank: mine}
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        everyones[source] = exchange(mine, to, source, group, like=parts[source])
    return torch.cat([everyones[r] for r in range(size)])


@ring("numbers travel in the dtype")
def sends_float32(x, group):
    if x.dtype == torch.float64:
        return solutions.my_all_reduce(x.float(), group).double()
    return solutions.my_all_reduce(x, group)


@ring("who has carried the gradients?")
def leaves_it_to_the_world(x, group):
    total = x.clone()
    dist.all_reduce(total)
    return total


@ring("A barrier moves nothing")
def waits_for_all_in_a_ring(x, group):
    collectives.barrier(group)
    return solutions.my_all_reduce(x, group)


@ring("library's ring_all_gather, ring_reduce_scatter: write that part")
def two_of_the_library(x, group):
    sizes = [len(part) for part in x.tensor_split(group.size())]
    return ring_all_gather(ring_reduce_scatter(x, group), group, sizes)


@ring("an all-reduce of this group is your function")
def asks_the_group(x, group):
    dist.all_reduce(x, group=group)
    return x


@ring("Your function changes x")
def adds_into_the_bucket(x, group):
    return x.copy_(solutions.my_all_reduce(x, group))


@right_ring
def the_other_way_round(x, group):
    rank, size, left, right = neighbours(group, -1)
    parts = list(x.reshape(-1).tensor_split(size))
    for k in range(size - 1):
        to_add = (rank + k + 1) % size
        came = exchange(parts[(rank + k) % size], left, right, group, like=parts[to_add])
        parts[to_add] = came + parts[to_add]
    for k in range(size - 1):
        to_fill = (rank + k) % size
        parts[to_fill] = exchange(
            parts[(rank + k - 1) % size], left, right, group, like=parts[to_fill]
        )
    return torch.cat(parts)


@right_ring
def in_two_functions(x, group):
    def scatter(x):
        rank, size, right, left = neighbours(group)
        parts = x.flatten().tensor_split(size)
        moving = parts[(rank - 1) % size]
        for k in range(size - 1):
            mine = parts[(rank - 2 - k) % size]
            moving = exchange(moving, right, left, group, like=mine) + mine
        return moving

    def gather(part, like):
        rank, size, right, left = neighbours(group)
        found = {rank: part}
        for k in range(1, size):
            source = (rank - k) % size
            part = found[source] = exchange(part, right, left, group, like=like[source])
        return torch.cat([found[r] for r in range(size)])

    return gather(scatter(x), x.flatten().tensor_split(group.size()))


@right_ring
def into_one_buffer(x, group):
    rank, size, right, left = neighbours(group)
    total = x.flatten().clone()
    parts = total.tensor_split(size)
    for k in range(2 * (size - 1)):
        out, into = parts[(rank - k) % size], parts[(rank - k - 1) % size]
        came = exchange(out, right, left, group, like=into)
        into.copy_(into + came if k < size - 1 else came)
    return total.view(x.shape)


@right_ring
def with_sends_and_receives(x, group):
    rank, size, right, left = neighbours(group)
    parts = list(x.flatten().tensor_split(size))
    for k in range(2 * (size - 1)):
        arriving = torch.empty_like(parts[(rank - k - 1) % size])
        work = dist.isend(parts[(rank - k) % size].contiguous(), group=group, group_dst=right)
        dist.recv(arriving, group=group, group_src=left)
        work.wait()
        place = (rank - k - 1) % size
        parts[place] = parts[place] + arriving if k < size - 1 else arriving
    return torch.cat(parts).view_as(x)


KEPT = [
    (name, fn, says)
    for name, wrong in (("shard_and_step", step), ("my_all_reduce", ring))
    for fn, says in wrong.answers
]
RIGHT = [(right.name, fn) for right in (right_step, right_ring) for fn in right.answers]


@pytest.mark.parametrize("name, fn, says", KEPT, ids=[fn.__name__ for _, fn, _ in KEPT])
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_an_unusual_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", ["shard_and_step", "my_all_reduce"])
def test_the_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def as_shipped(gpt, micro_batches, group):
    return wrappers.shard_and_step(gpt, micro_batches, group)


def ring_as_shipped(x, group):
    return collectives.ring_all_reduce(x, group)


@pytest.mark.parametrize(
    "name, fn", [("shard_and_step", as_shipped), ("my_all_reduce", ring_as_shipped)]
)
def test_the_library_s_own_is_called_so(name, fn):
    assert getattr(check, name).judge(fn).state == "still the library's"
