"""Compare our data parallelism and ZeRO with DDP, ZeroRedundancyOptimizer and FSDP2 on 4 ranks.

Rows "step": one training step (forward, backward, AdamW) of the same GPT. Both sides take turns in
the same processes; medians of the slowest rank. With 32 tokens per rank the step is mostly
communication, which is what the bars are about. With 256 tokens most of it is the same arithmetic
on both sides. With equal threads Overlapped is 0 to 3 % behind DDP on our own ring, and 3 to 6 %
ahead on gloo's. Four ranks on two cores wait only for each other's CPU time. A mean of these 13 MB
takes 26 ms of CPU time on gloo's ring and 33 ms on ours, because every rank sends and receives 24
pieces, and the ledger and the flight recorder note each of them. Without these notes it takes 28
ms, and the step equals DDP's within 1 %.
Rows "sent": the bytes that rank 0 sends per step, from the ledger. A native collective counts as
the minimum that any algorithm has to move. Overlapped and DDP send the same bytes.
ZeroRedundancyOptimizer all-reduces gradients and then broadcasts parameters, which makes 3 units
where ZeRO-1 sends 2. FSDP2 gathers the root for forward and again for backward, ZeRO-3 once.
Rows "on the sockets": the same bytes as the kernel counts them. gloo's reduce-scatter is an
all-reduce inside and sends twice the bytes.
Rows "memory": the peak of allocated bytes while the model is made and two steps run, on the rank
that needs most. The profiler sees only allocations of the main thread and of autograd, so in these
rows Overlapped averages on the main thread. Every run compares the losses of both sides.
"""

import sys
import time
from concurrent.futures import Executor, Future

import torch
from _form import Case, in_turn, main, of_all_ranks, peak_allocated, step_cases

from mini_dist import launch
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import ModelConfig
from mini_dist.ranks.ledger.wire import wire_bytes
from mini_dist.strategies.data_parallel import wrappers

RANKS = 4
CONFIG = ModelConfig(num_layers=4, d_model=256)  # 3.3 M parameters
FEW, MANY = (1, 32), (2, 128)  # sequences, tokens per sequence on a rank


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def data(shape, group):
    generator = torch.Generator().manual_seed(group.rank())
    sequences, length = shape
    tokens = torch.randint(0, CONFIG.vocab_size, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


# Each function returns a step: a function that trains once and returns the loss.


def overlapped(shape, group):
    from mini_dist.strategies.data_parallel import Overlapped

    model = Overlapped(GPT(CONFIG), group)
    return plain_step(model, adamw(model.parameters()), shape, group, model.finish)


def overlapped_on_gloo(shape, group):
    from mini_dist.strategies.data_parallel import Overlapped, backend_mean_

    model = Overlapped(GPT(CONFIG), group, backend_mean_)
    return plain_step(model, adamw(model.parameters()), shape, group, model.finish)


def ddp(shape, group):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(GPT(CONFIG), process_group=group)
    return plain_step(model, adamw(model.parameters()), shape, group)


def zero_redundancy(shape, group):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(GPT(CONFIG), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3
    )
    return plain_step(model, optimizer, shape, group)


def fsdp2_on_our_ring(shape, group):
    from mini_dist.collectives.backend import own_backend

    return fsdp2(shape, own_backend(group))


def fsdp2(shape, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    gpt, mesh = GPT(CONFIG), DeviceMesh.from_group(group, "cpu")
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return plain_step(gpt, adamw(gpt.parameters()), shape, group)


def zero(stage, shape, group):
    from mini_dist.strategies import zero as stages

    gpt = GPT(CONFIG)
    model = getattr(stages, f"ZeRO{stage}")(gpt, group, adamw, units=gpt.blocks)
    inputs, targets = data(shape, group)

    def step():
        model.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.step()
        return loss.item()

    return step


def zero_1(shape, group):
    return zero(1, shape, group)


def zero_2(shape, group):
    return zero(2, shape, group)


def zero_3(shape, group):
    return zero(3, shape, group)


def plain_step(model, optimizer, shape, group, finish=lambda: None):
    inputs, targets = data(shape, group)

    def step():
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        finish()
        optimizer.step()
        return loss.item()

    return step


PAIRS = {  # ours, theirs, the largest ratio of our step time to theirs
    "Overlapped, DDP": (overlapped, ddp, 1.05),
    "Overlapped on gloo's all-reduce, DDP": (overlapped_on_gloo, ddp, 1.05),
    "ZeRO-1, ZeroRedundancyOptimizer": (zero_1, zero_redundancy, 0.95),
    "ZeRO-3, FSDP2": (zero_3, fsdp2, 0.7),
    "FSDP2 on our ring, on gloo": (fsdp2_on_our_ring, fsdp2, None),
}


def pair_in_turn(pair, shape, rounds, group):
    """Run a pair's steps in turn on this rank; return the times and the first losses."""
    steps = [make(shape, group) for make in pair]
    losses = [[step() for _ in range(3)] for step in steps]
    return losses, in_turn(*steps, rounds, group)


def step_times(pair, shape, rounds):
    """Return the milliseconds of each side's step."""
    ranks = launch(pair_in_turn, RANKS, (pair, shape, rounds), timeout=600, quiet=True).results
    for (ours, theirs), _ in ranks:
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    return of_all_ranks([taken for _, taken in ranks])


def one_step(make, group):
    """Return when a second step began, and the kernel's count for it; the first step sets up."""
    step = make(MANY, group)
    step()
    group.barrier().wait()
    began, before = time.time(), wire_bytes()
    step()
    group.barrier().wait()
    return began, (wire_bytes()[0] - before[0] if before else 0)


def sent_in_a_step(make):
    """Return the MB that rank 0 sent, by the ledger and by the kernel."""
    run = launch(one_step, RANKS, (make,), quiet=True)
    began, on_sockets = run.results[0]
    ledger = sum(c.sent for c in run.ledger.leaves(rank=0) if c.start >= began)
    return ledger / 1e6, on_sockets / 1e6


class AtOnce(Executor):
    """Replace Overlapped's background thread, because torch's profiler would not see inside it."""

    def __init__(self, **_):
        pass

    def submit(self, function, *args):
        future = Future()
        future.set_result(function(*args))
        return future


def peak_on_a_rank(make, group):
    """Return the peak of MB allocated while the model is made and two steps run."""
    wrappers.ThreadPoolExecutor = AtOnce

    def make_and_train():
        step = make(MANY, group)
        step()
        step()

    return peak_allocated(make_and_train) / 1e6


def peak(make):
    return max(launch(peak_on_a_rank, RANKS, (make,), timeout=300, quiet=True).results)


def cases(long):
    rounds = 100 if long else 40
    for shape in (FEW, MANY):
        for name, (*pair, bar) in PAIRS.items():
            what = f"step of {shape[0]} x {shape[1]} tokens, {name}"
            times = step_times(pair, shape, rounds)
            yield from step_cases(what, times, bar if shape == FEW else None)
    for name, (ours, theirs, _) in PAIRS.items():
        counted = sent_in_a_step(ours), sent_in_a_step(theirs)
        for what, our_mb, their_mb in zip(("sent", "on the sockets"), *counted):
            yield given(f"{what}, {name}", our_mb, their_mb, "MB", None)
    for name, (ours, theirs, _) in PAIRS.items():
        yield given(f"memory, {name}", peak(ours), peak(theirs), "MB", 1.0)


def given(name, ours, theirs, unit, bar):
    """Return a row whose two figures were measured together."""
    return Case(name, lambda: ours, theirs, bar=bar, unit=unit, repeats=1, warmup=0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
