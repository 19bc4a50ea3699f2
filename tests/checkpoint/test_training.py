"""A training that was stopped goes on as if it had not been, on whatever ranks."""

import os
import random
import signal

import pytest
import torch

from mini_dist import GPT, ModelConfig, RankError, launch
from mini_dist.checkpoint import Training
from mini_dist.collectives import all_reduce
from mini_dist.data import Batches
from mini_dist.data_parallel import Naive
from mini_dist.model import token_loss
from mini_dist.zero import ZeRO1, ZeRO2, ZeRO3

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8, tied_embedding=True)
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
BATCH = 12
ZEROS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def make(strategy, group, config=CONFIG, dtype=torch.float64, optimizer=adamw):
    """(model, optimizer, step): step() after backward of this rank's part of the batch."""
    gpt = GPT(config, seed=0, dtype=dtype)
    if strategy == "alone":
        optimizer = optimizer(gpt.parameters())
        return gpt, optimizer, optimizer.step
    if strategy == "dp":
        model = Naive(gpt, group)
        optimizer = optimizer(model.parameters())

        def step():
            model.finish()
            optimizer.step()

        return model, optimizer, step
    model = ZEROS[strategy](gpt, group, optimizer, units=gpt.blocks)
    return model, model.optimizer, model.step


def train(directory, strategy, until, group, every=None, kill=None, background=False, **how):
    """Losses of the steps that were run, by number; saves at the end, and each `every` steps."""
    model, optimizer, step = make(strategy, group, **how)
    training = Training(model, optimizer, group, background=background)
    saved = training.resume(directory)
    batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=group.rank(), size=group.size())
    losses = {}
    for number in range(saved.step if saved else 0, until):
        model.zero_grad()
        inputs, targets = batches.batch(number)
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        if kill == (number, group.rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        losses[number] = all_reduce(loss.detach().reshape(1), group, op="mean").item()
        if every and (number + 1) % every == 0 and number + 1 < until:
            training.save(directory, number + 1)
    training.save(directory, until)
    training.wait()
    return losses


# --- the same losses, on any ranks ---------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """One process, never stopped."""
    run = launch(train, 1, (str(tmp_path_factory.mktemp("oracle")), "alone", 6))
    return run.results[0]


def resumed(tmp_path, before, after, oracle):
    """Three steps so, three more so; the losses of the last three."""
    launch(train, before[1], (str(tmp_path), before[0], 3))
    losses = launch(train, after[1], (str(tmp_path), after[0], 6)).results[0]
    assert sorted(losses) == [3, 4, 5]
    for number, loss in losses.items():
        # float64: rounding where the ranks add gradients up in another order, nothing else
        assert loss == pytest.approx(oracle[number], rel=1e-12)
    return losses


@pytest.mark.parametrize(
    "before, after",
    [
        (("dp", 2), ("dp", 4)),
        (("dp", 4), ("zero3", 3)),
        (("zero3", 3), ("alone", 1)),
        (("zero1", 2), ("zero3", 4)),
        (("zero2", 4), ("dp", 2)),
        (("alone", 1), ("zero2", 2)),
    ],
    ids=lambda layout: "-".join(map(str, layout)),
)
def test_resumed_in_another_layout_losses_go_on_as_if_never_stopped(
    before, after, tmp_path, oracle
):
    resumed(tmp_path, before, after, oracle)


DROPOUT = {"config": CONFIG.replace(dropout=0.2), "dtype": torch.float32}


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_resumed_on_the_same_ranks_losses_are_the_same_bit_by_bit(strategy, optimizer, tmp_path):
    """In float32 and with dropout: parameters, states and generators are all as they were."""
    how = {**DROPOUT, "optimizer": optimizer}
    whole = launch(train, 2, (str(tmp_path / "whole"), strategy, 6), how).results
    launch(train, 2, (str(tmp_path / "parts"), strategy, 3), how)
    parts = launch(train, 2, (str(tmp_path / "parts"), strategy, 6), how, seed=99).results
    for rank in range(2):
        assert parts[rank] == {number: whole[rank][number] for number in (3, 4, 5)}


def train_without(what, directory, group):
    """As `train` resumes, with one thing left out: the control."""
    resume = Training.resume

    def forgetful(self, directory, step=None):
        before = torch.get_rng_state()
        saved = resume(self, directory, step)
        if what == "generators":
            torch.set_rng_state(before)
        elif what == "states":
            self.optimizers[0].state.clear()
        return saved

    Training.resume = forgetful
    return train(directory, "dp", 6, group, **DROPOUT)


@pytest.mark.parametrize("what", ["generators", "states"])
def test_without_generators_or_states_the_losses_would_tell(what, tmp_path):
    whole = launch(train, 2, (str(tmp_path / "whole"), "dp", 6), DROPOUT).results[0]
    launch(train, 2, (str(tmp_path / "parts"), "dp", 3), DROPOUT)
    parts = launch(train_without, 2, (what, str(tmp_path / "parts")), seed=99).results[0]
    assert parts[5] != whole[5]


# --- killed --------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc):
    if "kill_number" in metafunc.fixturenames:
        times = 10 if metafunc.config.getoption("long") else 3
        metafunc.parametrize("kill_number", range(times))


def test_a_killed_rank_costs_time_and_nothing_else(kill_number, tmp_path):
    """Any rank, at any step, also while the last checkpoint is being written."""
    draw = random.Random(kill_number)
    strategy, ranks, steps = draw.choice(["dp", "zero1", "zero2", "zero3"]), 3, 10
    kill = draw.randrange(4, steps), draw.randrange(ranks)  # (2 is on the disk when 4 is begun)
    how = {**DROPOUT, "every": 2, "background": True}
    whole = launch(train, ranks, (str(tmp_path / "whole"), strategy, steps), how).results
    here = str(tmp_path / "killed")
    with pytest.raises(RankError, match=f"rank {kill[1]} of {ranks} was killed by SIGKILL"):
        launch(train, ranks, (here, strategy, steps), {**how, "kill": kill})
    parts = launch(train, ranks, (here, strategy, steps), how, seed=99).results
    first, begun = min(parts[0]), kill[0] // 2 * 2
    assert first in (begun - 2, begun)  # the one before, if the last was not yet on the disk
    for rank in range(ranks):
        assert parts[rank] == {number: whole[rank][number] for number in range(first, steps)}
