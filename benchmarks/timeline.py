"""Measure the cost of profiling: a step with torch.profiler and regions, and a step without.

Rows "a step": the same training on two ranks in one launch, recorded and not recorded by turns. A
row is the slowest rank's time, the median over the rounds. The ledger records in both, as it always
does.
Row "unexplained": the share of the recorded steps that belongs to no part, in percent; the bar is
2.
Row "the record": milliseconds to put a recorded step of both ranks into the table, afterwards.
"""

import statistics
import sys
import time

import torch
from _form import Case, main

from mini_dist import GPT, Batches, ModelConfig, launch, load_text, token_loss
from mini_dist.course.profile import Timeline, profiled, where_it_went
from mini_dist.course.profile.profiled import Profile
from mini_dist.strategies.data_parallel import Bucketed, Overlapped

RANKS, STEPS = 2, 3  # steps per round: starting a profiler for one step is too dear
CONFIG = ModelConfig(d_model=128, num_layers=2, num_heads=4, seq_len=64)


def in_turn(kind, rounds, group):
    """Return {recorded or not: seconds per step in each round}, and the last round's spans."""
    rank, size = group.rank(), group.size()
    model = kind(GPT(CONFIG, seed=0), group, bucket_bytes=1 << 20)
    optimizer = torch.optim.AdamW(model.tensors_to_step())
    batches = Batches(load_text(), 8 * size, CONFIG.seq_len, rank=rank, size=size)

    def steps(profile):
        began = time.perf_counter()
        for number in range(STEPS):
            with profile.step():
                with profile.region("data"):
                    inputs, targets = batches.batch(number)
                with profile.region("forward"):
                    loss = token_loss(model(inputs), targets).mean()
                with profile.region("backward"):
                    loss.backward()
                with profile.region("average"):
                    model.finish()
                with profile.region("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
        return (time.perf_counter() - began) / STEPS

    taken, spans = {"ours": [], "theirs": []}, []
    for turn in range(-1, rounds):
        for side in taken if turn % 2 else reversed(taken):
            group.barrier().wait()
            if side == "ours":
                with profiled(group) as profile:
                    seconds = steps(profile)
                spans = profile.spans
            else:
                seconds = steps(Profile())
            if turn >= 0:
                taken[side].append(seconds)
    return taken, spans


def cases(long):
    for kind in (Bucketed, Overlapped):
        run = launch(in_turn, RANKS, (kind, 15 if long else 5), timeout=500)
        sides = [taken for taken, _ in run.results]
        ms = {
            side: 1e3 * statistics.median(map(max, zip(*(taken[side] for taken in sides))))
            for side in ("ours", "theirs")
        }
        name = kind.__name__
        yield Case(f"a step, {name}: recorded / not", ms["ours"], ms["theirs"], 1.3)
        began = time.perf_counter()
        went = where_it_went(Timeline.of(run.ledger, [spans for _, spans in run.results]))
        took = 1e3 * (time.perf_counter() - began) / STEPS
        share = 100 * went.unexplained
        yield Case(f"unexplained, {name} / 2 %", lambda x=share: x, 2.0, 1.0, "%", 1, 0)
        yield Case(f"the record of a step, {name} / the step", lambda x=took: x, ms["ours"], None,
                   "ms", 1, 0)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
