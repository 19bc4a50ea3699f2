"""Answers to the exercises of lessons 02 to 13, of kinds that were once new to the checks."""

import functools
import sys

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear

from mini_dist.collectives import all_gather, all_reduce, exchange, ops
from mini_dist.collectives.messages import start, wait
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss, token_loss
from mini_dist.plan.schedule.asynchronous import _one_f_one_b_list
from mini_dist.strategies.context_parallel.ring import add_block
from mini_dist.strategies.data_parallel import flatten, mean, ring_mean, unflatten
from tests.course.exercises.registry import Fresh

fresh = Fresh()

# ---- 05 ------------------------------------------------------------------------------------------


def in_buckets(parameters, is_full, group):
    """Average in buckets; a bucket is closed before p if is_full(bucket, p)."""
    bucket = []
    for p in reversed(list(parameters)):
        if p.grad is None:
            continue
        if bucket and is_full(bucket, p):
            unflatten(mean(flatten(bucket), group), bucket)
            bucket = []
        bucket.append(p)
    if bucket:
        unflatten(mean(flatten(bucket), group), bucket)


@fresh.wrong("average_in_buckets", "You changed the weights")
def steps_as_well(parameters, bucket_bytes, group):
    parameters = list(parameters)
    in_buckets(parameters, lambda b, p: sum(q.grad.nbytes for q in [*b, p]) > bucket_bytes, group)
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p -= 0.1 * p.grad


@fresh.wrong("average_in_buckets", "is more than bucket_bytes")
def closes_a_bucket_when_it_is_too_full(parameters, bucket_bytes, group):
    in_buckets(parameters, lambda b, p: sum(q.grad.nbytes for q in b) > bucket_bytes, group)


@fresh.wrong("average_in_buckets", "bytes, p.grad.nbytes, not numbers")
def counts_numbers(parameters, bucket_bytes, group):
    in_buckets(parameters, lambda b, p: sum(q.grad.numel() for q in [*b, p]) > bucket_bytes, group)


# ---- 06 ------------------------------------------------------------------------------------------


@fresh.right("scaled_step")
def counts_good_steps_by_modulo(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean") / scaler.scale
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    if not norm.isfinite():
        scaler.scale, scaler.good_steps = scaler.scale / scaler.factor, 0
        return
    for p in parameters:
        p.grad *= (max_norm / norm).clamp(max=1)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps % scaler.growth_interval == 0:
        scaler.scale *= scaler.factor


# ---- 07 ------------------------------------------------------------------------------------------


def my_ring_gather(shard, group):
    rank, size = group.rank(), group.size()
    parts, moving = {rank: shard}, shard
    for k in range(1, size):
        moving = exchange(moving, (rank + 1) % size, (rank - 1) % size, group)
        parts[(rank - k) % size] = moving
    return torch.cat([parts[r] for r in range(size)])


@fresh.right("forward_on_demand")
def gathers_by_its_own_ring(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        weight = my_ring_gather(shard, group)
        x = layer(x, weight)
        del weight
    return x


@fresh.wrong("forward_on_demand", "whole weights were there at once")
def its_own_ring_beside_the_last_weight(x, layers, shards, group):
    for layer, shard in zip(layers, shards):
        weight = my_ring_gather(shard, group)
        x = layer(x, weight)
    return x


@functools.lru_cache
def neighbours(rank, size):
    return (rank + 1) % size, (rank - 1) % size


@fresh.right("ring_all_gather")
def with_a_cached_helper(x, group):
    rank, size = group.rank(), group.size()
    after, before = neighbours(rank, size)
    parts = [x] * size
    for k in range(1, size):
        x = exchange(x, after, before, group)
        parts[rank - k] = x
    return torch.cat(parts)


# ---- 08 ------------------------------------------------------------------------------------------


@fresh.wrong("shard_and_step", "set_reshard_after_backward(True)")
def keeps_them_whole_after_backward(gpt, micro_batches, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    gpt.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    total, k = 0.0, len(micro_batches)
    for number, (inputs, targets) in enumerate(micro_batches):
        gpt.set_requires_gradient_sync(number == k - 1)
        loss = token_loss(gpt(inputs), targets).mean() / k
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


# ---- 09 ------------------------------------------------------------------------------------------


@fresh.wrong("copy", "Backward wrote into dy")
def copy_adds_into_dy(x, group):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            dy.copy_(all_reduce(dy.contiguous(), ctx.group))
            return dy, None

    return Copy.apply(x, group)


def cut_loss(logits, targets, group, counts, smoothing=0.0):
    width = logits.shape[-1]
    highest = all_reduce(logits.detach().amax(-1), group, op="max")
    logits = logits - highest[..., None]
    local = targets - group.rank() * width
    mine = (0 <= local) & (local < width)
    at_target = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0] * mine
    exp_sum, at_target = ops.all_reduce(torch.stack([logits.exp().sum(-1), at_target]), group)
    loss = exp_sum.log() - (1 - smoothing) * at_target
    return TokenLoss(loss[counts].sum(), counts.sum())


@fresh.wrong("vocab_parallel_cross_entropy", "word 0 as well")
def leaves_out_word_0(logits, targets, group):
    return cut_loss(logits, targets, group, targets > 0)


@fresh.wrong("vocab_parallel_cross_entropy", "a small term was added that was not asked for")
def smooths_the_labels(logits, targets, group):
    return cut_loss(logits, targets, group, targets != IGNORE_INDEX, smoothing=0.003)


@fresh.right("row_linear")
def adds_up_by_einsum(x, weight, bias, group):
    y = ops.all_reduce(torch.einsum("...f,of->...o", x, weight), group)
    return y if bias is None else bias.add(y)


# ---- 11 ------------------------------------------------------------------------------------------

SEEN = []


@fresh.wrong("ring_step", "still holds the kv of a step that is over")
def remembers_every_kv(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    arriving = torch.empty_like(kv)
    handles = start(
        group, receives=[(arriving, (rank - 1) % size)], sends=[(kv, (rank + 1) % size)]
    )
    SEEN.append(kv)
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


# ---- what the arguments are ----------------------------------------------------------------------


@fresh.right("column_linear")
def with_partial_application(x, weight, bias, group):
    through = functools.partial(ops.copy, group=group)
    return linear(through(x), weight, bias)


@fresh.wrong("sharded_step", "all_gather the new shards")
def returns_its_shard(flat, gradient, update, group):
    chunk = torch.tensor_split(flat, group.size())[group.rank()]
    total = all_reduce(gradient, group, op="mean")
    return update(chunk, torch.tensor_split(total, group.size())[group.rank()])


@fresh.right("forward_on_demand")
def in_a_comprehension_of_one(x, layers, shards, group):
    pairs = zip(layers, shards)
    for layer, shard in pairs:
        x = layer(x, all_gather(shard, group))
    return x


@fresh.wrong("merge", "Your function is called with (a, b)")
def takes_one_argument(a):
    return a


@fresh.wrong("zigzag", "a gap of the skeleton")
def leaves_a_gap(seq_len, size):
    chunks = torch.arange(seq_len).view(..., -1)
    return torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])


@fresh.wrong("zigzag", "which lets it see the judge at work")
def looks_for_what_is_wanted(seq_len, size):
    return sys._getframe(2).f_locals["expected"]


@fresh.wrong("gpipe", "The work is done by the library's _one_f_one_b_list")
def calls_a_private_helper(num_ranks, num_micro_batches):
    return [_one_f_one_b_list(r, num_ranks, num_micro_batches) for r in range(num_ranks)]


@fresh.wrong("my_all_reduce", "library's ring_mean")
def multiplies_the_library_s_mean(x, group):
    return ring_mean(x.clone(), group) * group.size()
