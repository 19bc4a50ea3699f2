"""Right answers that are written differently from the printed ones."""

import torch
from torch.nn import functional

from mini_dist import collectives
from mini_dist.collectives import (
    all_gather,
    all_reduce,
    exchange,
    gather,
    ops,
    recv,
    reduce_scatter,
    send,
    star_broadcast,
    start,
    wait,
)
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss
from mini_dist.strategies.asynchronous.ideas import PULL, PUSH, next_request, push
from mini_dist.strategies.context_parallel import Partial
from mini_dist.strategies.context_parallel.ring import add_block
from mini_dist.strategies.data_parallel import flatten, mean, unflatten
from mini_dist.strategies.expert_parallel import Dispatched


def average_through_rank_0(parameters, group):
    for p in parameters:
        if p.grad is None:
            continue
        everyones = gather(p.grad[None], 0, group)
        if group.rank() == 0:
            p.grad = everyones.mean(dim=0)
        p.grad = star_broadcast(p.grad, 0, group)


def ring_reduce_scatter(x, group):
    rank, size = group.rank(), group.size()
    chunks = list(x.tensor_split(size))
    moving = chunks[(rank - 1) % size].clone()
    for k in range(size - 1):
        mine = chunks[(rank - 2 - k) % size]
        came = exchange(moving, (rank + 1) % size, (rank - 1) % size, group, like=mine)
        moving = came + mine
    return moving


def ring_all_gather(x, group):
    rank, size = group.rank(), group.size()
    parts = {rank: x}
    for k in range(1, size):
        x = exchange(x, (rank + 1) % size, (rank - 1) % size, group)
        parts[(rank - k) % size] = x
    return torch.cat([parts[r] for r in range(size)])


def ring_all_reduce(x, group):
    return ring_all_gather(ring_reduce_scatter(x, group), group)


def doubling_all_reduce(x, group):
    rank, size, distance = group.rank(), group.size(), 1
    x = x.clone()  # A single rank also returns a new tensor.
    while distance < size:
        x = x + exchange(x, rank ^ distance, rank ^ distance, group)
        distance *= 2
    return x


def all_to_all(x, group):
    rank, size = group.rank(), group.size()
    parts = x.chunk(size)
    out = [parts[rank]] * size
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        out[source] = exchange(parts[to], to, source, group)
    return torch.cat(out)


def average_in_buckets(parameters, bucket_bytes, group):
    buckets = [[]]  # Fill the buckets first, then send them.
    for p in [p for p in parameters if p.grad is not None][::-1]:
        if buckets[-1] and sum(q.grad.nbytes for q in [*buckets[-1], p]) > bucket_bytes:
            buckets.append([])
        buckets[-1].append(p)
    for bucket in filter(None, buckets):
        total = all_reduce(torch.cat([p.grad.reshape(-1) for p in bucket]), group)
        for p in bucket:
            p.grad.copy_(total[: p.numel()].view_as(p) / group.size())
            total = total[p.numel() :]


def overlapped_backward(loss, buckets, sender, group):
    missing, leaving, hooks = [len(bucket) for bucket in buckets], [], []
    for number, bucket in enumerate(buckets):

        def ready(p, number=number):
            missing[number] -= 1
            while len(leaving) < len(buckets) and missing[len(leaving)] == 0:
                leaving.append(sender.submit(mean, flatten(buckets[len(leaving)]), group))

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in bucket]
    loss.backward()
    for future, bucket in zip(leaving, buckets):
        unflatten(future.result(), bucket)
    for hook in hooks:
        hook.remove()


def sharded_step(flat, gradient, update, group):
    rank, size = group.rank(), group.size()
    per_rank = len(flat) // size
    mean = reduce_scatter(gradient, group) / size
    new = update(flat[rank * per_rank : (rank + 1) * per_rank], mean)
    return all_gather(new, group)


def backward_in_units(loss, units, group):
    parts, hooks, missing = {}, [], [len(unit) for unit in units]

    for number, unit in enumerate(units):

        def ready(p, number=number, unit=unit):
            missing[number] -= 1
            if missing[number] == 0:
                flat = torch.cat([q.grad.reshape(-1) for q in unit])
                parts[number] = reduce_scatter(flat, group, op="mean")
                for q in unit:
                    q.grad = None

        hooks += [p.register_post_accumulate_grad_hook(ready) for p in unit]
    loss.backward()
    for hook in hooks:
        hook.remove()
    return [parts[number] for number in range(len(units))]


def forward_on_demand(x, layers, shards, group):
    for number in range(len(layers)):
        x = layers[number](x, all_gather(shards[number], group))
    return x


def column_linear(x, weight, bias, group):
    return functional.linear(ops.copy(x, group), weight, bias)


def row_linear(x, weight, bias, group):
    y = ops.all_reduce(x @ weight.T, group)
    if bias is not None:
        y = y + bias
    return y


def vocab_parallel_cross_entropy(logits, targets, group):
    width = logits.shape[-1]
    highest = all_reduce(logits.detach().amax(-1), group, op="max")
    logits = logits - highest[..., None]
    local = targets - group.rank() * width
    mine = (0 <= local) & (local < width)
    at_target = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0] * mine
    exp_sum, at_target = ops.all_reduce(torch.stack([logits.exp().sum(-1), at_target]), group)
    loss = exp_sum.log() - at_target
    counts = targets != IGNORE_INDEX
    return TokenLoss(loss[counts].sum(), counts.sum())


def sequence_parallel_mlp(x, norm, up, down, bias, group):
    x = ops.all_gather(norm(x), group, dim=1)
    x = functional.gelu(x @ up.T) @ down.T
    return ops.reduce_scatter(x, group, dim=1) + bias


def merge(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    share_a = (a.lse - lse).exp()[..., None]
    share_b = (b.lse - lse).exp()[..., None]
    return Partial(share_a * a.out + share_b * b.out, lse)


def ring_step(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    after, before = (rank + 1) % size, (rank - 1) % size
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, before)], sends=[(kv, after)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


def zigzag(seq_len, size):
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)])


def gpipe(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        forwards = [f"{rank}F{k}" for k in range(num_micro_batches)]
        backwards = [f"{rank}B{k}" for k in range(num_micro_batches)]
        lists.append(forwards + backwards)
    return lists


def one_f_one_b(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        actions = [f"{rank}F{k}" for k in range(warmup)]
        for k in range(num_micro_batches):
            if warmup + k < num_micro_batches:
                actions.append(f"{rank}F{warmup + k}")
            actions.append(f"{rank}B{k}")
        lists.append(actions)
    return lists


def add_communication(schedule):
    lists = []
    for rank in range(schedule.num_ranks):
        actions = []

        def elsewhere(stage, rank=rank):
            return stage in schedule.rank_of and schedule.rank_of[stage] != rank

        for action in schedule.actions(rank):
            stage, kind, micro, _ = action
            if kind == "W":
                actions.append(action)
                continue
            step = 1 if kind == "F" else -1
            if elsewhere(stage - step):
                actions.append(f"{stage}RECV_{kind}{micro}")
            actions.append(action)
            if elsewhere(stage + step):
                actions.append(f"{stage}SEND_{kind}{micro}")
        lists.append(actions)
    return lists


def dispatch(x, counts, group):
    n = group.size()
    theirs = collectives.all_to_all(counts, group).reshape(n, -1)
    sent = counts.reshape(n, -1).sum(dim=1).tolist()
    received = theirs.sum(dim=1).tolist()
    arrived = ops.all_to_all(x, group, sent, received)
    expert = []
    for from_rank in theirs.tolist():
        for e, number in enumerate(from_rank):
            expert += [e] * number
    by_expert = torch.tensor(expert, dtype=torch.long).argsort(stable=True)
    return arrived[by_expert], Dispatched(sent, received, by_expert, theirs.sum(dim=0).tolist())


def combine(answers, dispatched, group):
    as_they_came = answers[dispatched.by_expert.argsort()]
    return ops.all_to_all(as_they_came, group, dispatched.received, dispatched.sent)


def balance_loss(decision, group):
    num_experts = decision.probabilities.shape[1]
    mine = torch.zeros(num_experts, dtype=torch.int64)
    for e in range(num_experts):
        mine[e] = (decision.experts == e).sum()
    visits = all_reduce(mine, group)
    share = visits / visits.sum()
    return num_experts * (share * decision.probabilities.mean(dim=0)).sum(), visits


def round_by_lot(x, lots):
    below = x.floor()
    return below + torch.bernoulli(x - below, generator=lots)


def top_k_with_feedback(x, error, k, group):
    owed = x + error
    places = owed.abs().argsort(descending=True)[:k]
    at = all_gather(places.int()[None], group)
    values = all_gather(owed[places][None], group)
    mean = torch.zeros_like(x)
    for one, theirs in zip(at, values):
        mean.index_add_(0, one, theirs / group.size())
    sent = torch.zeros_like(x).index_copy(0, places, owed[places])
    return mean, owed - sent


def power_mean(x, q, group):
    p = torch.linalg.svd(all_reduce(x @ q, group, op="mean"), full_matrices=False).U
    q = all_reduce(x.T @ p, group) / group.size()
    return p @ q.T, q


def serve(table, update, num_workers, bound, group):
    begun, waiting, seen, applied, gone = {}, {}, {}, [], 0
    while gone < num_workers:
        kind, worker, rows = next_request(group)
        if kind == PULL:
            begun[worker] = begun.get(worker, 0) + 1
            waiting[worker] = rows
        elif kind == PUSH:
            table[rows] = update(table[rows], recv(table[rows], worker, group))
            applied.append((worker, len(applied) - seen.get(worker, 0)))
        else:
            begun.pop(worker, None)
            gone += 1
        counts = [*begun.values(), *[0] * (num_workers - gone - len(begun))]
        for each in [w for w in waiting if bound is None or begun[w] <= min(counts) + bound]:
            seen[each] = len(applied)
            send(table[waiting.pop(each)], each, group)
    return applied


def push_touched(gradient, tokens, num_servers, group):
    by_server = {}
    for row in sorted({*tokens.flatten().tolist()}):
        by_server.setdefault(row % num_servers, []).append(row)
    for server, rows in by_server.items():
        push(gradient[rows], torch.tensor(rows) // num_servers, server, group)


def shares(batch_size, seconds):
    ends = sorted((k * s, d) for d, s in enumerate(seconds) for k in range(1, batch_size + 1))
    devices = [device for _, device in ends[:batch_size]]
    return [devices.count(device) for device in range(len(seconds))]
