"""Measure the seconds to save and resume a checkpoint, against torch.distributed.checkpoint.

    python benchmarks/checkpoint.py [--json FILE] [--long]

Each of two ranks has a replica of the model and AdamW, and both use one disk. Both programs write
every tensor once, spread over the ranks, and wait for the disk (fsync). Ours also computes a
SHA-256 of what it wrote and of what it is about to read; torch's has no checksums. The programs
alternate in one run, and a row is the time of the slower rank. "Stall" is the time that training
waits when the writing continues in the background.
"""

import shutil
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed.checkpoint as dcp
from _form import Case, main
from torch.distributed.checkpoint.state_dict import get_state_dict

from mini_dist import GPT, ModelConfig, launch
from mini_dist.collectives import barrier
from mini_dist.training.checkpoint import Training

SMALL = ModelConfig(d_model=256, num_layers=4, num_heads=4, seq_len=128)
LARGE = ModelConfig(d_model=768, num_layers=12, num_heads=12, seq_len=128)


def measure(config, directory, repeats, group):
    """Return {what: [(ours, theirs) of each repeat]} in milliseconds."""
    warnings.simplefilter("ignore")
    model = GPT(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    ours = Training(model, optimizer, group)
    behind = Training(model, optimizer, group, background=True)

    def state():
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    def their_stall():
        return dcp.async_save(state(), checkpoint_id=f"{directory}/async")

    pairs = {
        "save": (
            lambda: ours.save(f"{directory}/ours", 1),
            lambda: dcp.save(state(), checkpoint_id=f"{directory}/theirs"),
        ),
        "resume": (
            lambda: ours.resume(f"{directory}/ours"),
            lambda: dcp.load(state(), checkpoint_id=f"{directory}/theirs"),
        ),
        "stall": (lambda: behind.save(f"{directory}/behind", 1), their_stall),
    }
    taken = {what: [] for what in pairs}
    for what, both in pairs.items():
        for number in range(-1, repeats):
            times = [0.0, 0.0]
            for side in (0, 1) if number % 2 else (1, 0):
                barrier(group)
                start = time.perf_counter()
                pending = both[side]()
                times[side] = 1e3 * (time.perf_counter() - start)
                behind.wait()
                if what == "stall" and side == 1:
                    pending.result()
                barrier(group)
            if number >= 0:
                taken[what].append(times)
    return taken


def cases(long):
    repeats = 9 if long else 5
    for config in (SMALL, LARGE) if long else (SMALL,):
        directory = tempfile.mkdtemp(prefix="mini_dist-checkpoint-")
        try:
            run = launch(measure, 2, (config, directory, repeats), timeout=600)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        megabytes = 12 * GPT(config, device="meta").num_parameters() / 1e6
        for what in run.results[0]:
            slowest = [
                [max(times) for times in zip(*ranks)]
                for ranks in zip(*(result[what] for result in run.results))
            ]
            ours, theirs = (iter(times) for times in zip(*slowest))
            yield Case(
                f"{what}, {megabytes:.0f} MB on 2 ranks",
                lambda times=ours: next(times),
                lambda times=theirs: next(times),
                repeats=repeats,
                warmup=0,
            )


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
