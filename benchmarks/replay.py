"""Compare a replay with the clock: a training step on this machine, replayed at its measured rates.

Rows "step": 2 ranks, one per core. `ours` is the difference between the replayed and the measured
step, in percent; `theirs` is the 20 % that are allowed. Kernels, and the host's pace between them,
get the CPU time that they took in a counted run. Messages get the time that they take between ranks
that do nothing else, and the core time that they cost (see `measure_here`). Nothing is fitted to
the step that is predicted. A round is a run, a counted run and a measurement of the rates. Rounds
of all programs take turns, so that a busy minute affects all of them, and the rows compare medians
over the rounds. stderr also shows the part that a rank computes, in CPU time, which a busy machine
hardly changes.
Rows "bubble": an emulated pipeline is replayed and compared with the simulator. The rows give the
difference in percentage points; half a point is allowed.
"""

import statistics
import sys
import time
from functools import lru_cache, partial
from pathlib import Path

import cloudpickle
import torch
from _form import Case, main

from mini_dist import launch
from mini_dist.course.replay import measure_here, replay
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.schedule import Times, build, simulate
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped, ring_mean
from mini_dist.training.all_axes import parallelize

CONFIG = ModelConfig(num_layers=4, d_model=256)
BATCH, STEPS = 8, 6
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ddp(model, group):
    return torch.nn.parallel.DistributedDataParallel(model, process_group=group)


DATA_PARALLEL = {
    "naive ring": partial(Naive, reduce=ring_mean),
    "bucketed ring": partial(Bucketed, reduce=ring_mean, bucket_bytes=2**20),
    "overlapped ring": partial(Overlapped, reduce=ring_mean, bucket_bytes=2**20),
    "DDP": ddp,
}
LAYOUTS = {
    "ZeRO-1": Layout(dp=2, zero=1, micro_batch_size=BATCH),
    "ZeRO-3": Layout(dp=2, zero=3, micro_batch_size=BATCH),
    "TP 2": Layout(tp=2, micro_batch_size=BATCH),
    "pipeline of 2, 1F1B": Layout(pp=2, num_micro_batches=4, micro_batch_size=BATCH // 4),
}
PROGRAMS = (*DATA_PARALLEL, *LAYOUTS)


def train(program, steps, group):
    """Return for each step on this rank the seconds on the clock and the CPU seconds of this
    thread."""
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.seq_len + 1),
                           generator=torch.Generator().manual_seed(0))  # fmt: skip
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if program in LAYOUTS:
        model = parallelize(CONFIG, LAYOUTS[program], group, torch.optim.AdamW)
        step = partial(model.step, inputs, targets)
    else:
        model = DATA_PARALLEL[program](GPT(CONFIG), group)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            optimizer.zero_grad()
            token_loss(model(inputs), targets).mean().backward()
            if hasattr(model, "finish"):
                model.finish()
            optimizer.step()

    seconds = []
    for _ in range(steps):
        began = time.perf_counter(), time.thread_time()
        step()
        seconds.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
    return seconds


@lru_cache
def compared(rounds):
    """Return {program: seconds of a step: measured, computing in it, replayed, computing in the
    replay}, medians over the rounds."""
    found = {program: [] for program in PROGRAMS}
    for program in rounds * PROGRAMS:
        run = launch(train, 2, (program, STEPS), quiet=True)
        steps = [list(zip(*ranks)) for ranks in zip(*run.results)][1:]
        measured = statistics.median(max(clocks) for clocks, _ in steps)
        computing = statistics.median(statistics.mean(cpu) for _, cpu in steps)
        counted = launch(train, 2, (program, 4), count=True, quiet=True)
        replayed = replay(counted, measure_here(counted))
        there = replayed.seconds, replayed.seconds - replayed.exposed
        found[program].append((measured, computing, *there))
    return {
        program: [statistics.median(part) for part in zip(*each)] for program, each in found.items()
    }


def percent_off(program, rounds):
    measured, computing, replayed, there = compared(rounds)[program]
    print(
        f"  {program}: measured {1e3 * measured:.1f} ms, {1e3 * computing:.1f} of them computing; "
        f"replayed {1e3 * replayed:.1f} ({replayed / measured - 1:+.1%}), {1e3 * there:.1f} of "
        f"them computing ({there / computing - 1:+.1%})",
        file=sys.stderr,
    )
    return 100 * abs(replayed / measured - 1)


def bubble_off(name, options):
    from tests.course.test_replay_elsewhere import Hops, run_stated

    schedule, times = build(name, 4, 8, **options), Times(1.0, 1.0, 1.0, comm=0.25)

    def once():
        played = replay(launch(run_stated, 4, (schedule, times), count=True), Hops(0.25))
        busy = sum(span.end - span.start for span in played.spans if span.kind == "stated")
        return 100 * abs(1 - busy / (4 * played.seconds) - simulate(schedule, times).bubble)

    return once


def cases(long):
    for program in PROGRAMS:
        off = partial(percent_off, program, 15 if long else 3)
        yield Case(f"step, {program}", off, 20, 1.0, "%", repeats=1, warmup=0)
    for name, options in (("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2})):
        yield Case(f"bubble, {name}", bubble_off(name, options), 0.5, 1.0, "points", 1, warmup=0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
