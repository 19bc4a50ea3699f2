"""A simulated run is the real run without its values: the same bytes, the same memory."""

import sys
from collections.abc import Callable

import cloudpickle
import pytest
import torch

from mini_dist import GPT, Layout, launch
from mini_dist.collectives import exchange, ring_all_reduce
from mini_dist.model.data import Batches
from mini_dist.plan.calculators import hardware
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.config import ModelConfig
from mini_dist.plan.schedule import SCHEDULES
from mini_dist.ranks.diagnose import RankError
from mini_dist.ranks.ledger.memory import MemoryRecord
from mini_dist.ranks.simulation.kinds import Axis, axes_of
from mini_dist.strategies import compression as K
from mini_dist.strategies.context_parallel import make_attention, positions_here
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped, ring_mean
from mini_dist.strategies.train import split, train_step
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

SMALL = ModelConfig(vocab_size=64, seq_len=16, d_model=32, num_layers=4, num_heads=4)
TEXT = torch.arange(4000) % 64


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def batch_of(group, rows=4):
    return Batches(TEXT, rows, SMALL.seq_len, device=group.device).batch(0)


def wrapped(kind, *options, **named) -> Callable:
    def train(group):
        model = kind(GPT(SMALL, device=group.device), group, *options, **named)
        optimizer = getattr(model, "optimizer", None) or adamw(model.parameters())
        for _ in range(2):
            train_step(model, optimizer, split(*batch_of(group), 2), max_norm=1.0)

    return train


def on_all_axes(**layout) -> Callable:
    def train(group):
        cut = Layout(num_micro_batches=4, **layout)
        model = parallelize(SMALL, cut, group, adamw)
        model.step(*batch_of(group, 4), max_norm=1.0)

    return train


def in_context(form) -> Callable:
    def train(group):
        model = GPT(SMALL, device=group.device, attention=make_attention(group, form))
        positions = positions_here(SMALL.seq_len, group).to(group.device)
        inputs = batch_of(group)[0][:, : SMALL.seq_len // group.size()]
        model(inputs, positions).sum().backward()

    return train


CHUNKS = {"interleaved": 2, "zb_v": 2, "dualpipe_v": 2}
STRATEGIES = {kind.__name__: wrapped(kind) for kind in (Naive, Bucketed)}
STRATEGIES |= {stage.__name__: wrapped(stage, adamw) for stage in (ZeRO1, ZeRO2, ZeRO3)}
STRATEGIES |= {
    "ring mean": wrapped(Bucketed, ring_mean),
    "half": wrapped(Bucketed, K.half()),
    "tp": on_all_axes(tp=4),
    "sp, zero": on_all_axes(tp=2, dp=2, sequence_parallel=True, zero=1),
    "cp": on_all_axes(cp=2, dp=2, zero=3),
    "recompute": on_all_axes(tp=2, dp=2, recompute="full"),
    "ring attention": in_context("ring"),
    "ulysses": in_context("ulysses"),
}
STRATEGIES |= {
    name: on_all_axes(pp=2, dp=2, schedule=name, num_chunks=CHUNKS.get(name, 1))
    for name in SCHEDULES
    if not name.startswith("pipedream")
}


def all_of_them(group) -> list[tuple[int, int]]:
    """Train by each strategy in turn; where each one's records end in the ledger and the memory."""
    ends = []
    for train in STRATEGIES.values():
        train(group)
        ends.append((len(group.recorder.comms), len(group.recorder.memory.events)))
    return ends


@pytest.fixture(scope="module")
def both():
    real = launch(all_of_them, 4, memory=True, timeout=300)
    return real, launch(all_of_them, 4, simulate="h100", timeout=300)


def of_each(run, rank: int):
    """For each strategy its rows in the ledger, and the most bytes that the rank held."""
    comms = [comm for comm in run.ledger.comms if comm.rank == rank]
    events, at, born = run.ledger.memory[rank].events, 0, 0
    for name, (comm, event) in zip(STRATEGIES, run.results[rank]):
        rows = [(c.op, c.axis, c.dtype, c.nbytes, c.phase, c.sent_to) for c in comms[at:comm]]
        yield name, rows, MemoryRecord(events[:event], []).peak_bytes()
        at, born = comm, event


def test_the_ledger_is_that_of_a_real_run_message_by_message(both):
    for rank in range(4):
        for (name, real, _), (_, simulated, _) in zip(*(of_each(run, rank) for run in both)):
            assert simulated == real and real, (name, rank)
