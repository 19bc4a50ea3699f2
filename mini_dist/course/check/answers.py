"""Right answers to exercises for which the library has no function, or one that does more.
Other exercises have a function of the library as their answer. `.solution()` prints either.
"""

import itertools

import torch
import torch.distributed as dist

from mini_dist import collectives
from mini_dist.collectives import (
    all_gather,
    all_reduce,
    begin_all_gather_,
    begin_reduce_scatter,
    exchange,
    ops,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    split_sizes,
)
from mini_dist.collectives.mesh import Mesh
from mini_dist.collectives.messages import Members
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss, token_loss
from mini_dist.plan.config import Layout
from mini_dist.plan.schedule import build
from mini_dist.strategies import context_parallel as cp
from mini_dist.strategies.data_parallel import Bucketed, Overlapped
from mini_dist.strategies.pipeline import Pipeline, cut_gpt
from mini_dist.strategies.tensor_parallel import (
    GPT_PLAN,
    SEQUENCE,
    TENSOR,
    finish_gradients,
    for_grad_norm,
    shard_model,
    vocab_parallel_cross_entropy,
)
from mini_dist.strategies.tensor_parallel.ideas import find_rows
from mini_dist.strategies.train import train_step
from mini_dist.training.checkpoint import Training


def my_all_reduce(x, group):
    rank, size = group.rank(), group.size()
    right, left = (rank + 1) % size, (rank - 1) % size
    parts = list(x.tensor_split(size))
    for k in range(size - 1):
        to_send, to_add = (rank - k) % size, (rank - k - 1) % size
        arrived = exchange(parts[to_send], right, left, group, like=parts[to_add])
        parts[to_add] = parts[to_add] + arrived
    for k in range(size - 1):  # rank r has the sum of part r + 1
        to_send, to_fill = (rank - k + 1) % size, (rank - k) % size
        parts[to_fill] = exchange(parts[to_send], right, left, group, like=parts[to_fill])
    return torch.cat(parts)


def copy(x, group):
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return all_reduce(dy, ctx.group), None

    return Copy.apply(x, group)


def differentiable_all_reduce(x, group):
    class AllReduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            return all_reduce(x, group)

        @staticmethod
        def backward(ctx, dy):
            return dy, None

    return AllReduce.apply(x, group)


def loss_of_cut_logits(logits, targets, group):
    row, is_here = find_rows(targets, logits.shape[-1], group)
    at_target = logits.gather(-1, row[..., None]).squeeze(-1).where(is_here, 0)
    mine = logits.logsumexp(-1)
    highest = collectives.all_reduce(mine.detach(), group, op="max")
    exp_sum, at_target = ops.all_reduce(torch.stack([(mine - highest).exp(), at_target]), group)
    losses = highest + exp_sum.log() - at_target
    counts = targets != IGNORE_INDEX
    return TokenLoss(losses[counts].sum(), counts.sum())


def less_bubble():
    lists = []
    for rank in range(4):
        warmup, waiting = 3 - rank, []
        actions = [f"{rank}F{k}" for k in range(warmup)]
        for k in range(8):
            if warmup + k < 8:
                actions.append(f"{rank}F{warmup + k}")
            actions.append(f"{rank}B{k}")
            waiting.append(f"{rank}W{k}")
            if len(waiting) > rank:
                actions.append(waiting.pop(0))
        lists.append(actions + waiting)
    return lists


def groups_of_ranks(pp, dp, cp, tp):
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    groups = {}
    for axis in sizes:
        lists = {}
        for rank in range(pp * dp * cp * tp):
            place, left = {}, rank
            for name in ("tp", "cp", "dp", "pp"):
                place[name] = left % sizes[name]
                left //= sizes[name]
            key = tuple(place[name] for name in sizes if name != axis)
            lists.setdefault(key, []).append(rank)
        groups[axis] = list(lists.values())
    return groups


def compose(config, layout, group):
    mesh = Mesh(group, **layout.axes)
    schedule = build(layout.schedule, layout.pp, layout.num_micro_batches)
    number = mesh.index("pp")
    sequence = {}
    if layout.cp > 1:
        sequence = {
            "attention": cp.make_attention(mesh["cp"]),
            "positions": cp.positions_here(config.seq_len, mesh["cp"]),
        }
    stage = cut_gpt(config, [number], layout.pp, **sequence)[number]
    if layout.tp > 1:
        shard_model(
            stage, GPT_PLAN, mesh["tp"], pair=SEQUENCE if layout.sequence_parallel else TENSOR
        )
    averaged = Bucketed(stage, mesh["dp", "cp"])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    weight = [1.0]

    def loss_fn(logits, targets):
        if layout.tp > 1:
            return weight[0] * vocab_parallel_cross_entropy(logits, targets, mesh["tp"]).total
        return weight[0] * token_loss(logits, targets).total

    cut = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    shape = layout.micro_batch_size, config.seq_len // cut, config.d_model
    pipeline = Pipeline(
        schedule, averaged, mesh["pp"], loss_fn=loss_fn, activation=torch.empty(shape)
    )

    def step(inputs, targets):
        if layout.cp > 1:
            inputs, targets = (cp.shard(x, mesh["cp"]) for x in (inputs, targets))
        tokens = all_reduce((targets != IGNORE_INDEX).sum(), mesh["dp", "cp"])
        n = layout.dp * layout.cp
        weight[0] = n * layout.num_micro_batches / tokens
        averaged.zero_grad()
        loss = all_reduce(pipeline.step(inputs, targets), mesh["dp", "cp"]) / n
        averaged.finish()
        squares = 0.0
        if layout.tp > 1:
            finish_gradients(stage)
            whole, cut_by = for_grad_norm(stage)
            mine = sum(p.grad.pow(2).sum() for p in cut_by[mesh["tp"]])
            squares = all_reduce(mine, mesh["tp"])
        else:
            whole = list(stage.parameters())
        squares = squares + sum(p.grad.pow(2).sum() for p in whole)
        norm = all_reduce(squares, mesh["pp"]).sqrt()
        for p in stage.parameters():
            p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        optimizer.step()
        return loss, norm

    return step


def layout_for_70b():
    pipeline = {"pp": 8, "schedule": "interleaved", "num_chunks": 5, "num_micro_batches": 32}
    return Layout(dp=16, tp=4, sequence_parallel=True, zero=1, **pipeline)


def top_k_with_feedback(x, error, k, group):
    whole = x + error
    places = whole.abs().topk(k).indices
    everyones = all_gather(places.int(), group)
    values = all_gather(whole[places], group)
    mean = torch.zeros_like(x).index_add(0, everyones, values) / group.size()
    return mean, whole.index_fill(0, places, 0.0)


def cache_bytes(config, tokens, bytes_a_number, tp):
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config.get("hidden_size", config.get("n_embd")) // heads
    on_a_device = max(kv_heads // tp, 1)
    return 2 * layers * on_a_device * head_dim * tokens * bytes_a_number


def all_reduce_on_hosts(x, hosts, group):
    ranks = {host: [r for r, its in enumerate(hosts) if its == host] for host in sorted({*hosts})}
    inside = Members(group, ranks[hosts[group.rank()]])
    across = Members(group, [members[inside.rank()] for members in ranks.values()])
    flat = x.flatten()
    chunk = ring_reduce_scatter(flat, inside)
    chunk = ring_all_reduce(chunk, across)
    sizes = split_sizes(len(flat), inside.size())
    return ring_all_gather(chunk, inside, sizes).view(x.shape)


def find_exchanged(traffic):
    n = len(traffic)
    after = [row.index(max(row)) for row in traffic]  # where each place sends most
    for a, b in itertools.combinations(range(n), 2):
        rank_at = list(range(n))
        rank_at[a], rank_at[b] = b, a
        if all(rank_at[after[place]] == (rank_at[place] + 1) % n for place in range(n)):
            return a, b


def one_all_reduce():
    return {
        "x": ("dp", None),
        "v": (None, "tp"),
        "w": ("tp", None),
        "y": ("dp", None),
    }


def deepspeed_bytes(zero, sizes, k, n):
    total, stage = sum(sizes), zero.get("stage", 0)
    if stage == 3:
        limit = zero.get("stage3_param_persistence_threshold", 100_000)
        small = sum(size for size in sizes if size <= limit)
        numbers = 2 * k * (total - small) + small + k * total
    else:
        together = zero.get("use_multi_rank_bucket_allreduce", True)
        together = together or not zero.get("reduce_scatter", True)
        reduced = 2 if stage == 0 or together else 1
        numbers = (k if stage == 2 else 1) * reduced * total
        numbers += total if stage else 0
    return 4 * (n - 1) * numbers


def gradients_at_scale(model, batches, loss_of, group):
    *earlier, last = batches
    for batch in earlier:
        (loss_of(model, batch) / len(batches)).backward()
    under_way = {}

    def leave(p):
        under_way[p] = dist.all_reduce(p.grad, group=group, async_op=True)

    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(leave) for p in trained]
    (loss_of(model, last) / len(batches)).backward()
    for hook in hooks:
        hook.remove()
    for p in trained:
        if p.grad is not None and p not in under_way:  # the last micro-batch did not use it
            leave(p)
    for p, work in under_way.items():
        work.wait()
        p.grad /= group.size()


def my_plan():
    cut = dict(dp=64, tp=2, sequence_parallel=True, zero=1)
    return "Ada Lovelace", "B", Layout(micro_batch_size=2, num_micro_batches=8, **cut)


def my_strategy(model, make_optimizer, loss_of, group):
    rank, size = group.rank(), group.size()
    buckets, bucket_of = [[]], {}
    for p in reversed(list(model.parameters())):  # backward completes the last ones first
        if sum(q.numel() for q in buckets[-1]) > 100_000_000:
            buckets.append([])
        buckets[-1].append(p)
        bucket_of[p] = len(buckets) - 1

    def flat(tensors):
        x = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(x, (0, -len(x) % size))

    shards = [flat(p.detach() for p in bucket).chunk(size)[rank].clone() for bucket in buckets]
    optimizer = make_optimizer(shards)

    def step(batches):
        missing, under_way = [len(bucket) for bucket in buckets], {}

        def ready(p):
            n = bucket_of[p]
            missing[n] -= 1
            if not missing[n]:  # the bucket leaves, and backward goes on
                under_way[n] = begin_reduce_scatter(flat(q.grad for q in buckets[n]), group)
                for q in buckets[n]:
                    q.grad = None

        *earlier, last = batches
        for batch in earlier:
            (loss_of(model, batch) / len(batches)).backward()
        hooks = [p.register_post_accumulate_grad_hook(ready) for p in bucket_of]
        (loss_of(model, last) / len(batches)).backward()
        for hook in hooks:
            hook.remove()
        for n, work in under_way.items():
            shards[n].grad = work.wait() / size
        optimizer.step()
        arriving = []
        for shard in shards:
            shard.grad = None
            whole = shard.new_empty(size * len(shard))
            whole.chunk(size)[rank].copy_(shard)
            arriving.append(begin_all_gather_(whole, group))
        for bucket, work in zip(buckets, arriving):
            sizes = [p.numel() for p in bucket]
            for p, part in zip(bucket, work.wait()[: sum(sizes)].split(sizes)):
                p.data.copy_(part.view_as(p))

    return step


def my_training(model, optimizer, batches, steps, every, folder, group):
    model, losses = Overlapped(model, group), {}
    training = Training(model, optimizer, group)
    saved = training.resume(folder)
    for step in range(saved.step if saved else 0, steps):
        losses[step] = train_step(model, optimizer, [batches.batch(step)]).loss.item()
        if (step + 1) % every == 0:
            training.save(folder, step + 1)
    return losses


def two_faults(record):
    went, found = record.went, []
    shares = [
        {part: seconds / step for part, seconds in parts.items()}
        for parts, step in zip(went.seconds, went.step)
    ]

    # What the ranks have read, seen and kept.
    read = [{sample for step in steps for sample in step.samples} for steps in record.steps]
    shared = [sum(len(mine & other) for other in read) - len(mine) for mine in read]
    if any(shared):
        found.append(("unsynchronised seeds", shared.index(max(shared))))
    losses = [max(step.loss for step in steps) for steps in record.steps]
    if max(losses) > 20 * min(losses):
        found.append(("bad shard", losses.index(max(losses))))
    grows = [steps[-1].held > 2 * steps[1].held for steps in record.steps]
    if any(grows):
        found.append(("memory leak", None if all(grows) else grows.index(True)))

    # Where the time went: one cause at most.
    counts = [len(steps[0].samples) for steps in record.steps]
    odd = [rank for rank, count in enumerate(counts) if counts.count(count) == 1]
    data = [share["data"] > 0.15 for share in shares]
    waits = [share["waiting"] for share in shares]
    if odd and len({*counts}) > 1:
        found.append(("another batch size", odd[0]))
    elif any(data):
        found.append(("input stall", None if all(data) else data.index(True)))
    elif max(waits) > 0.15:
        found.append(("straggler", waits.index(min(waits))))
    elif min(share["communication"] for share in shares) > 0.25:
        found.append(("buckets too small", None))
    elif min(share["host"] for share in shares) > 0.15:
        found.append(("host sync", None))
    return found
