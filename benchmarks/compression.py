"""Compare our compressed gradients with torch's hooks of DistributedDataParallel, on 4 ranks.

Rows "step, ...": one training step (forward, backward, AdamW) of the same GPT. Both sides take
turns in the same processes. The rows give medians of the slowest rank, and of the processor time of
all ranks, which a busy machine disturbs less.
Rows "sent": the bytes that all ranks send per step, from the ledger. A native collective counts as
the minimum that any algorithm has to move.
Rows "pays below": the bytes that compression saves, divided by the processor time that it costs on
these cores. On slower links it pays, if nothing is hidden behind backward. Theirs is 1 Gbit/s.
Rows "emulated step": a step of the same model on devices that take LAYER seconds per layer, over
links of the stated bandwidth (loopback would hide the savings), with `Overlapped` in four buckets.
Ours uses the method, theirs is dense. The messages of a bucket take the formula's time and start
after the processor time that was measured for that bucket.
Row "between hosts": the bytes that leave the hosts when a ZeRO unit is scattered in int8, with 8
ranks on two hosts. Ours takes two hops, theirs one. torch's hook has one bucket here. With more
buckets its all-reduces start from callbacks, ranks enter them in different orders, and gloo ends
with an error.
"""

import statistics
import sys
import time

import torch
from _form import Case, in_turn, main, of_all_ranks, step_cases

from mini_dist import Hosts, launch
from mini_dist.collectives.emulate import Clock, EmulatedAllReduce, EmulatedDevice, EmulatedModel
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators.compression import Compression
from mini_dist.plan.calculators.links import Link
from mini_dist.plan.config import ModelConfig
from mini_dist.strategies.compression import (
    Compressed,
    OneBit,
    PowerSGD,
    Quantized,
    half,
    int8,
    sign,
    top_k,
)
from mini_dist.strategies.data_parallel import Overlapped, mean_

RANKS = 4
CONFIG = ModelConfig(num_layers=4, d_model=256)  # 3.3 M parameters
RANK = 4  # PowerSGD's rank
LAYER = 0.002, 0.004  # seconds of an emulated layer's forward and backward
GBITS = 0.1, 1.0, 10.0, 100.0  # Gbit/s of an emulated link


CALCULATED = {
    "fp16": Compression("half"),
    f"PowerSGD, rank {RANK}": Compression("power", rank=RANK),
    "int8": Compression("int8"),
    "signs": Compression("sign"),
    "one bit both ways": Compression("one_bit"),
    "top 1 %": Compression("top_k", share=0.01),
}


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
    "one bit both ways": OneBit,
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
    """Return when a fourth step began (torch's hook starts with the third)."""
    step = make(name, group)
    for _ in range(3):
        step()
    group.barrier().wait()
    began = time.time()
    step()
    group.barrier().wait()
    return began


def sent(make, name):
    """Return the MB that all ranks send per step."""
    run = launch(one_step, RANKS, (make, name), quiet=True)
    began = max(run.results)
    return sum(c.sent for c in run.ledger.leaves() if c.start >= began - 0.001) / 1e6


def processor_time(name, group):
    """Return the seconds that one bucket's mean takes on a rank, compressed and dense."""
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


def extra_seconds(name):
    """Return the extra time per rank of compressing all gradients, over averaging them."""
    both = launch(processor_time, RANKS, (name,), quiet=True).results
    return sum(compressed - dense for compressed, dense in both) / RANKS


def pays_below(name, extra):
    """Return the bandwidth of a rank's link below which compression pays, in Gbit/s."""
    saved = (sent(ours, "dense") - sent(ours, name)) / RANKS
    return saved * 8 / 1e3 / extra if extra > 0 else float("inf")


def emulated_steps(name, extra, group):
    """Return for each link the ms of a step with this method and of a dense step."""
    gpt = GPT(CONFIG)
    shapes = [tuple(p.shape) for p in gpt.parameters() if p.dim() == 2]
    numel = sum(p.numel() for p in gpt.parameters())
    found = []
    for gbits in GBITS:
        link = Link(5e-5, 1e9 / 8 * gbits)
        dense = link.seconds(4 * numel / RANKS, rounds=2 * (RANKS - 1))
        compressed = CALCULATED[name].ring_seconds(numel, RANKS, link, shapes) + max(extra, 0)
        found.append([emulated(seconds, link, group) for seconds in (compressed, dense)])
    return found


def emulated(seconds, link, group):
    """Return the ms of a step whose averages take `seconds` in all, a quarter for each layer."""
    clock = Clock()
    device = EmulatedDevice(clock)
    reduce = EmulatedAllReduce(device, link, lambda num_bytes, size: seconds / 4)
    model = Overlapped(EmulatedModel([100] * 4, *LAYER, device), group, reduce, bucket_bytes=800)
    clock.start(group)
    model().backward()
    model.finish()
    return 1e3 * reduce.network.done[-1].end


def between_hosts(by_hosts):
    """Return the MB that leave both hosts."""

    def scatter(group):
        messages = Quantized(8, 8, by_hosts=by_hosts)
        messages.begin_reduce_scatter(torch.ones(1 << 20), group).wait()

    return sum(launch(scatter, 8, hosts=Hosts(2, emulated=True), quiet=True).ledger.out_of()) / 1e6


def given(name, ours, theirs, unit, bar=None):
    return Case(name, lambda: ours, theirs, bar=bar, unit=unit, repeats=1, warmup=0)


def cases(long):
    rounds = 100 if long else 40
    for name in ("fp16", f"PowerSGD, rank {RANK}"):
        results = launch(both_in_turn, RANKS, (name, rounds), timeout=600).results
        yield from step_cases(f"step, {name}", of_all_ranks(results), 1.0)
        yield from step_cases(f"step, {name}, CPU of all", of_all_ranks(results, sum, 1), 1.0)
        yield given(f"sent, {name}", sent(ours, name), sent(theirs, name), "MB", 1.001)
    hops = between_hosts(True), between_hosts(False)
    yield given("between hosts, int8 in two hops", *hops, "MB", 0.25)
    for name in OURS:
        if name != "dense":
            yield given(f"sent, {name}, dense", sent(ours, name), sent(ours, "dense"), "MB")
            extra = extra_seconds(name)
            yield given(f"pays below, {name}", pays_below(name, extra), 1.0, "Gbit/s")
            steps = launch(emulated_steps, RANKS, (name, extra), quiet=True).results[0]
            for gbits, (compressed, dense) in zip(GBITS, steps):
                yield given(f"emulated step, {name}, {gbits:g} Gbit/s", compressed, dense, "ms")


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
