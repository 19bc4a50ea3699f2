"""Kill ranks at random moments of elastic runs: no hang, and every sample counts exactly once.

    python benchmarks/elastic.py --cases 50 --seed 0

Each case is a run of 3 to 5 ranks, either data parallel (the state comes from the rank that has
completed the most steps) or ZeRO (the state comes from copies on neighboring ranks). One to three
ranks kill themselves (SIGKILL) after a random time, wherever they are: in a step, in the exchange
of state, while a group is being made. Some are replaced. The model counts: each sample adds one to
its element of a buffer, through the same messages as the gradients, and after an epoch each element
must be one. The parameters must equal the result of an undisturbed single process, up to rounding
in float64.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from mini_dist import RankError, launch
from mini_dist.collectives import all_reduce
from mini_dist.strategies.data_parallel import Naive
from mini_dist.strategies.zero import ZeRO1
from mini_dist.training.checkpoint import Training
from mini_dist.training.elastic import (
    Elastic,
    RanksChanged,
    ShardCopies,
    catch_up,
    numbers,
    regroup,
    rows_of,
    shares,
)

SAMPLES, BATCH, WIDTH, EPOCHS = 192, 12, 6, 2
STEPS = EPOCHS * SAMPLES // BATCH
DEADLINE = 60.0  # seconds; a run takes about one


class Counting(nn.Module):
    """A small regression that counts how often each sample was used."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("w", (WIDTH, WIDTH)), ("v", (WIDTH,))):
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values))
        self.register_buffer("used", torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x):
        return (x @ self.w).tanh() @ self.v


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, x.sin().sum(1)


def samples_of(step: int, rows: slice) -> torch.Tensor:
    """Return which samples these rows of the step's batch are; the order changes each epoch."""
    epoch, step = divmod(step, SAMPLES // BATCH)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return order[step * BATCH : (step + 1) * BATCH][rows]


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=0.05)


def gradients(model, module, samples, size, group) -> torch.Tensor:
    """Put the gradients of the batch's mean into the parameters; return how often each sample was
    used."""
    x, y = data()
    model.zero_grad()
    ((model(x[samples]) - y[samples]).square().sum() * size / BATCH).backward()
    model.finish()
    used = torch.zeros(SAMPLES, dtype=torch.float64)
    used[samples] = 1.0
    return all_reduce(used, group)


def data_parallel(group) -> dict:
    step, module = 0, Counting()
    optimizer, sizes = adamw(module.parameters()), []
    while step < STEPS:
        try:
            step = catch_up(Training(module, optimizer, group), step, group)
            model = Naive(module, group)  # Not earlier: Naive copies the parameters of rank 0.
            sizes.append(group.size())
            rows = rows_of(group.rank(), shares(BATCH, [1.0] * group.size()))
            while step < STEPS:
                used = gradients(model, module, samples_of(step, rows), group.size(), group)
                optimizer.step()  # From here on nothing is sent until the step is counted.
                module.used += used
                step += 1
        except RanksChanged:
            group = regroup(group)
    return result(module, sizes)


def sharded(group) -> dict:
    """Train with ZeRO-1: the parameters of a step are whole on every rank, the optimizer's states
    are not."""
    copies, sizes, done, module = ShardCopies(), [], False, None
    while not done:
        try:
            module = Counting()
            model = ZeRO1(module, group, adamw, units=[])
            training = Training(model, (), group)
            step = copies.restore(training, group)
            sizes.append(group.size())
            rows = rows_of(group.rank(), shares(BATCH, [1.0] * group.size()))
            while step < STEPS:
                module.used += gradients(model, module, samples_of(step, rows), group.size(), group)
                model.optimizer.step()
                model.refresh_parameters()
                step += 1
                if step % 4 == 0:
                    copies.keep(training, step, group)
            done = True
        except RanksChanged:
            group = regroup(group)
    return result(module, sizes)


def result(module, sizes) -> dict:
    return dict(sizes=sizes, used=module.used, w=module.w.detach(), v=module.v.detach())


WAYS = {"data parallel": data_parallel, "ZeRO-1": sharded}


def with_deaths(way: str, deaths: dict[int, float], group) -> dict:
    """Train, while ranks with these numbers kill themselves after the given seconds."""
    me = numbers(group)[group.rank()]
    if me in deaths:
        threading.Timer(deaths[me], os.kill, (os.getpid(), signal.SIGKILL)).start()
    return WAYS[way](group)


@lru_cache
def undisturbed(way: str) -> dict:
    return launch(with_deaths, 1, (way, {}), elastic=True).results[0]


def case(number: int, seed: int) -> tuple[str, str | None]:
    """Run one case; return its description and its mistakes."""
    lot = random.Random(f"{seed} {number}")
    way, size = lot.choice(list(WAYS)), lot.randint(3, 5)
    # With one copy of each shard, two neighbors may not die together, so with ZeRO only one dies.
    most = size - 1 if way == "data parallel" else 1
    victims = lot.sample(range(size), lot.randint(1, min(most, 3)))
    deaths = {victim: lot.uniform(0, 0.5) for victim in victims}
    replace = lot.randint(0, len(victims))
    told = f"{way}, {size} ranks, dying {sorted(deaths.items())}, {replace} replaced"
    try:
        run = launch(
            with_deaths,
            size,
            (way, deaths),
            timeout=DEADLINE,
            quiet=True,
            elastic=Elastic(replace=replace),
        )
    except RankError as error:
        return told, f"did not end well: {error}"
    expected = undisturbed(way)
    for rank, found in enumerate(run.results):
        if found is None and rank not in {lost.rank for lost in run.lost}:
            return told, f"rank {rank} has no result, and is not lost"
        if found and not bool((found["used"] == EPOCHS).all()):
            return told, f"rank {rank} used samples {Counter(found['used'].tolist())} times"
        for name in ("w", "v") if found else ():
            if not torch.allclose(found[name], expected[name], rtol=1e-8, atol=1e-8):
                return told, f"rank {rank} has another {name}"
    if not {lost.rank for lost in run.lost} <= set(deaths):
        return told, f"others died: {run.lost}"
    return told, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found here")
    parser.add_argument("--long", action="store_true", help="ten times as many cases")
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    cases = options.cases * (10 if options.long else 1)
    wrong, began = {}, time.monotonic()
    for number in range(cases):
        told, problem = case(number, options.seed)
        if problem:
            wrong[number] = f"{told}: {problem}"
            print(f"case {number}, {wrong[number]}")
    seconds = time.monotonic() - began
    print(f"{cases - len(wrong)} of {cases} cases right, in {seconds:.0f} s")
    if options.json:
        found = dict(cases=cases, seed=options.seed, seconds=seconds, wrong=wrong)
        options.json.write_text(json.dumps(found, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
