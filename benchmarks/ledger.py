"""Measure the cost of the ledger: a step of the course's GPT with and without it.

    python benchmarks/ledger.py [--json FILE] [--long]

Two ranks have one core each. Recorded steps (the group of every launch, and the hooks that follow
the phases) alternate with plain steps (torch's own gloo group, no hooks) in one run. One row sends
one message per step; another sends one message per parameter, the worst case for a recorder.

The rows of one collective give the CPU time of a small collective on rank 0, where nothing else
hides the recorder: once with everything that it does, and once without the record of shapes for the
parent (flight.py, which names operations on which the ranks do not agree). These rows have no bar.
"""

import sys
import time

import torch
import torch.distributed as dist
from _form import Case, main

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.data import Batches, load_text
from mini_dist.model.loss import token_loss

MANY = 200  # small collectives that are timed together
CONFIG = ModelConfig(d_model=128, num_layers=4, num_heads=4, seq_len=64)


def step_times(text, repeats, one_message, group):
    """Return the seconds of each step, as pairs (recorded, plain)."""
    plain = dist.new_group(backend="gloo")
    model = GPT(CONFIG, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = Batches(text, 8, CONFIG.seq_len, rank=group.rank(), size=group.size())

    def step(number, group):
        inputs, targets = batches.batch(number)
        loss = token_loss(model(inputs), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        if one_message:
            grads = [torch.cat([grad.flatten() for grad in grads])]
        for grad in grads:
            dist.all_reduce(grad, group=group)
        optimizer.step()

    def timed(number, recorded):
        phases = group.recorder.phases
        phases.watch() if recorded else phases.unwatch()
        dist.barrier(plain)
        start = time.perf_counter()
        step(number, group if recorded else plain)
        dist.barrier(plain)
        return time.perf_counter() - start

    group.recorder.phases.unwatch()
    for recorded in (True, False):
        timed(0, recorded)
    pairs = []
    for number in range(repeats):
        order = (True, False) if number % 2 else (False, True)
        taken = {recorded: timed(number, recorded) for recorded in order}
        pairs.append((taken[True], taken[False]))
    group.recorder.phases.watch()
    return pairs


def small_collectives(repeats, group):
    """Return microseconds of CPU time per all-reduce of 1 KB: (recorded, without shapes, plain)."""
    plain, x = dist.new_group(backend="gloo"), torch.ones(256)
    flight = group.recorder.flight
    noted = flight.begin, flight.wait, flight.done

    def timed(group, shapes):
        if not shapes:
            flight.begin, flight.wait, flight.done = (lambda *_, **__: 0 for _ in range(3))
        dist.barrier(plain)
        start = time.process_time()
        for _ in range(MANY):
            dist.all_reduce(x, group=group)
        taken = time.process_time() - start
        flight.begin, flight.wait, flight.done = noted
        return 1e6 * taken / MANY

    ways = (group, True), (group, False), (plain, True)
    rounds = []
    for number in range(repeats + 1):  # the first round warms up
        order = ways if number % 2 else ways[::-1]
        taken = {way: timed(*way) for way in order}
        rounds.append([taken[way] for way in ways])
    return rounds[1:]


def cases(long):
    text = load_text()
    repeats = 200 if long else 60
    for name, one_message in (("one message a step", True), ("one message a parameter", False)):
        run = launch(step_times, 2, (text, repeats, one_message), timeout=300)
        recorded, plain = (iter([1e3 * t for t in times]) for times in zip(*run.results[0]))
        yield Case(
            f"GPT step, {name}",
            lambda times=recorded: next(times),
            lambda times=plain: next(times),
            bar=1.05,
            repeats=repeats,
            warmup=0,
        )
    run = launch(small_collectives, 2, (repeats,), timeout=300)
    recorded, unshaped, plain = map(list, zip(*run.results[0]))
    for name, ours, theirs in (
        ("all-reduce of 1 KB, against torch's", recorded, plain),
        ("all-reduce of 1 KB, against no shapes", recorded, unshaped),
    ):
        ours, theirs = iter(ours), iter(theirs)
        yield Case(
            name,
            lambda ours=ours: next(ours),
            lambda theirs=theirs: next(theirs),
            unit="us",
            repeats=repeats,
            warmup=0,
        )


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
