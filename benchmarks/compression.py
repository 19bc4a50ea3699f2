"""Compressed gradients: ours beside torch's hooks of DistributedDataParallel, on 4 ranks.

Rows "step": one training step (forward, backward, AdamW) of the same GPT; both sides take turns in
the same processes. Medians of the slowest rank.
Rows "sent": what all ranks send in a step, as the ledger counts it (a native collective: the least
that any algorithm has to move).
Rows "pays below": what compression saves in bytes beside what it costs in processor time on these
cores: on links slower than this it pays, if nothing is hidden behind backward. Theirs: 1 Gbit/s.
torch's hook has one bucket here: with more, its all-reduces start from callbacks, and ranks enter
them in different orders, which ends in an error under gloo.
"""

import statistics
import sys
import time

import torch
from _form import Case, in_turn, main, of_all_ranks, step_cases

from mini_dist import launch
from mini_dist.compression import Compressed, PowerSGD, half, int8, sign, top_k
from mini_dist.config import ModelConfig
from mini_dist.data_parallel import Overlapped, mean_
from mini_dist.loss import token_loss
from mini_dist.model import GPT

RANKS = 4
CONFIG = ModelConfig(num_layers=4, d_model=256)  # 3.3 M parameters
RANK = 4  # of PowerSGD


def step_of(model, group, finish=lambda: None):
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(0, CONFIG.vocab_size, (1, 33), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad()
        token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        finish()
        optimizer.step()

    return step


OURS = {
    "dense": lambda: None,
    "fp16": lambda: half(torch.float16),
    f"PowerSGD, rank {RANK}": lambda: PowerSGD(RANK),
    "int8": lambda: Compressed(int8()),
    "signs": lambda: Compressed(sign()),
    "top 1 %": lambda: Compressed(top_k(0.01)),
}


def ours(name, group):
    model = Overlapped(GPT(CONFIG), group, OURS[name]())
    return step_of(model, group, model.finish)


def theirs(name, group):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(GPT(CONFIG), process_group=group, bucket_cap_mb=100)
    if name == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(group, RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return step_of(model, group)


def both_in_turn(name, rounds, group):
    steps = [make(name, group) for make in (ours, theirs)]
    for step in steps:
        for _ in range(3):
            step()
    return in_turn(*steps, rounds, group)


def one_step(make, name, group):
    """When a fourth step began (torch's hook starts with the third)."""
    step = make(name, group)
    for _ in range(3):
        step()
    group.barrier().wait()
    began = time.time()
    step()
    group.barrier().wait()
    return began


def sent(make, name):
    """MB of all ranks in a step."""
    run = launch(one_step, RANKS, (make, name), quiet=True)
    began = max(run.results)
    return sum(c.sent for c in run.ledger.leaves() if c.start >= began - 0.001) / 1e6


def processor_time(name, group):
    """Seconds that one bucket's mean takes on a rank, compressed and dense."""
    parameters = list(GPT(CONFIG).parameters())
    flat = torch.randn(sum(parameter.numel() for parameter in parameters))
    reduce = OURS[name]()
    calls = [reduce.of_bucket(parameters) if hasattr(reduce, "of_bucket") else reduce, mean_]
    taken = [[], []]
    for _ in range(9):
        for call, times in zip(calls, taken):
            x = flat.clone()
            group.barrier().wait()
            start = time.process_time()
            call(x, group)
            times.append(time.process_time() - start)
    return [statistics.median(times) for times in taken]


def pays_below(name):
    """Gbit/s of a rank's link."""
    both = launch(processor_time, RANKS, (name,), quiet=True).results
    extra = sum(compressed - dense for compressed, dense in both) / RANKS
    saved = (sent(ours, "dense") - sent(ours, name)) / RANKS
    return saved * 8 / 1e3 / extra if extra > 0 else float("inf")


def given(name, ours, theirs, unit, bar=None):
    return Case(name, lambda: ours, theirs, bar=bar, unit=unit, repeats=1, warmup=0)


def cases(long):
    rounds = 100 if long else 40
    for name in ("fp16", f"PowerSGD, rank {RANK}"):
        times = of_all_ranks(launch(both_in_turn, RANKS, (name, rounds), timeout=600).results)
        yield from step_cases(f"step, {name}", times, 1.0)
        yield given(f"sent, {name}", sent(ours, name), sent(theirs, name), "MB", 1.001)
    for name in OURS:
        if name != "dense":
            yield given(f"sent, {name}, dense", sent(ours, name), sent(ours, "dense"), "MB")
            yield given(f"pays below, {name}", pays_below(name), 1.0, "Gbit/s")


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
