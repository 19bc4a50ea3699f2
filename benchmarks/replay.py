"""Replay beside the clock: a training step on this machine, replayed with its own measured rates.

Rows "step": 2 ranks, one a core. `ours` is how far the replayed step lies from the measured one, in
percent; `theirs` the 20 % that are allowed. Kernels have the times they took in a counted run,
messages a latency and a bandwidth from an exchange between 2 ranks, and everything else (Python,
autograd, the dispatcher) one time a kernel, from a model that is all host. Nothing is fitted to the
step that is predicted. All three come anew for each repeat, so that a busy minute falls on both.
Rows "bubble": an emulated pipeline, replayed, beside the simulator: points of difference, and the
half point that is allowed.
"""

import statistics
import sys
import time
from pathlib import Path

import cloudpickle
import torch
from _form import Case, main

from mini_dist import launch
from mini_dist.config import ModelConfig
from mini_dist.data_parallel import Bucketed, Overlapped, ring_mean
from mini_dist.model import GPT, token_loss
from mini_dist.replay import measure_here, replay
from mini_dist.schedule import Times, build, simulate

CONFIG = ModelConfig(num_layers=4, d_model=256)
BATCH, STEPS = 8, 6
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(kind, steps, group):
    """Seconds of each step on this rank."""
    model = GPT(CONFIG)
    if kind == "DDP":
        replica = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    else:
        strategy = {"bucketed ring": Bucketed, "overlapped ring": Overlapped}[kind]
        replica = strategy(model, group, reduce=ring_mean, bucket_bytes=2**20)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.seq_len + 1))
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        token_loss(replica(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        if hasattr(replica, "finish"):
            replica.finish()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def percent_off(kind):
    def once():
        run = launch(train, 2, (kind, STEPS), quiet=True)
        measured = statistics.median(max(pair) for pair in zip(*run.results))
        counted = launch(train, 2, (kind, 3), count=True, quiet=True)
        replayed = replay(counted, measure_here(counted)).seconds
        print(
            f"  {kind}: measured {1e3 * measured:.1f} ms, replayed {1e3 * replayed:.1f} ms",
            file=sys.stderr,
        )
        return 100 * abs(replayed / measured - 1)

    return once


def bubble_off(name, options):
    from tests.test_replay_elsewhere import Hops, run_stated

    schedule, times = build(name, 4, 8, **options), Times(1.0, 1.0, 1.0, comm=0.25)

    def once():
        played = replay(launch(run_stated, 4, (schedule, times), count=True), Hops(0.25))
        busy = sum(span.end - span.start for span in played.spans if span.kind == "stated")
        return 100 * abs(1 - busy / (4 * played.seconds) - simulate(schedule, times).bubble)

    return once


def cases(long):
    for kind in ("bucketed ring", "overlapped ring", "DDP"):
        repeats = 15 if long else 5
        bar = None if kind == "overlapped ring" else 1.0  # its thread takes turns with backward
        yield Case(f"step, {kind}", percent_off(kind), 20, bar, "%", repeats=repeats, warmup=1)
    for name, options in (("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2})):
        yield Case(f"bubble, {name}", bubble_off(name, options), 0.5, 1.0, "points", 1, warmup=0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
