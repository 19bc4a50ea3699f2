"""A stopped training resumes as if it had never stopped, on any ranks."""

import os
import random
import signal
from functools import partial

import pytest
import torch

from mini_dist import GPT, ModelConfig, RankError, launch
from mini_dist.collectives import all_reduce
from mini_dist.collectives.mesh import Mesh
from mini_dist.model.data import Batches
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import Layout
from mini_dist.strategies.data_parallel import Naive
from mini_dist.strategies.tensor_parallel import GPT_PLAN, shard_model, vocab_parallel_cross_entropy
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize
from mini_dist.training.checkpoint import CheckpointError, Training, find

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8, tied_embedding=True)
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
BATCH = 12
ZEROS = {"zero1": ZeRO1, "zero2": ZeRO2, "zero3": ZeRO3}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def make(strategy, group, config=CONFIG, dtype=torch.float64, optimizer=adamw):
    """Return (model, optimizer, dp group, loss function) of strategies joined by a "*"."""
    gpt = GPT(config, seed=0, dtype=dtype)
    loss = token_loss
    if strategy.startswith("tp*"):
        mesh = Mesh(group, dp=group.size() // 2, tp=2)
        shard_model(gpt, GPT_PLAN, mesh["tp"])
        group, loss = mesh["dp"], partial(vocab_parallel_cross_entropy, group=mesh["tp"])
    strategy = strategy.removeprefix("tp*")
    if strategy in ZEROS:
        model = ZEROS[strategy](gpt, group, optimizer, units=gpt.blocks)
        return model, model.optimizer, group, loss
    model = Naive(gpt, group)
    return model, optimizer(model.parameters()), group, loss


def train(directory, strategy, until, group, every=None, kill=None, background=False, **how):
    """Return losses by step number; save every `every` steps and at the end."""
    model, optimizer, dp, loss_of = make(strategy, group, **how)
    training = Training(model, optimizer, group, background=background)
    saved = training.resume(directory)
    batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=dp.rank(), size=dp.size())
    losses = {}
    for number in range(saved.step if saved else 0, until):
        model.zero_grad()
        inputs, targets = batches.batch(number)
        loss = loss_of(model(inputs), targets).mean()
        loss.backward()
        if kill == (number, group.rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        model.finish()
        optimizer.step()
        model.refresh_parameters()
        losses[number] = all_reduce(loss.detach().reshape(1), dp, op="mean").item()
        if every and (number + 1) % every == 0 and number + 1 < until:
            training.save(directory, number + 1)
    training.save(directory, until)
    training.wait()
    return losses


# --- the same losses, on any ranks ---------------------------------------------------------------


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """The losses of one process that is never stopped."""
    run = launch(train, 1, (str(tmp_path_factory.mktemp("oracle")), "dp", 6))
    return run.results[0]


def resumed(tmp_path, before, after, oracle):
    """Train three steps in `before`, three more in `after`; return the last three losses."""
    launch(train, before[1], (str(tmp_path), before[0], 3))
    losses = launch(train, after[1], (str(tmp_path), after[0], 6)).results[0]
    assert sorted(losses) == [3, 4, 5]
    for number, loss in losses.items():
        # In float64, only rounding differs, because the ranks add gradients in another order.
        assert loss == pytest.approx(oracle[number], rel=1e-12)
    return losses


@pytest.mark.parametrize(
    "before, after",
    [
        (("dp", 2), ("dp", 4)),
        (("dp", 4), ("zero3", 3)),
        (("zero3", 3), ("dp", 1)),
        (("zero1", 2), ("zero3", 4)),
        (("zero2", 4), ("dp", 2)),
        (("dp", 1), ("zero2", 2)),
        (("tp*zero1", 4), ("zero3", 2)),
        (("zero2", 3), ("tp*dp", 4)),
        (("tp*dp", 2), ("tp*zero3", 4)),
    ],
    ids=lambda layout: "-".join(map(str, layout)),
)
def test_resumed_in_another_layout_losses_go_on_as_if_never_stopped(
    before, after, tmp_path, oracle
):
    resumed(tmp_path, before, after, oracle)


DENSE = ModelConfig(
    d_model=16, num_layers=4, num_heads=2, num_kv_heads=1, seq_len=8, tied_embedding=True
)
EXPERTS = DENSE.replace(num_experts=4, top_k=2, d_expert=16)
GRIDS = {
    "one process": Layout(micro_batch_size=8),
    "tp2*pp2": Layout(tp=2, pp=2, num_micro_batches=4, micro_batch_size=2),
    "dp4, zero3": Layout(dp=4, zero=3, micro_batch_size=2),
    "pp2*dp2, zero1": Layout(pp=2, dp=2, zero=1, num_micro_batches=2, micro_batch_size=2),
    "pp2*dp2*ep2, zero1": Layout(pp=2, dp=2, ep=2, zero=1, num_micro_batches=2, micro_batch_size=2),
    "dp2*tp2*ep2": Layout(dp=2, tp=2, ep=2, sequence_parallel=True, micro_batch_size=4),
    "dp2*tp2*ep4, zero1": Layout(
        dp=2, tp=2, ep=4, etp=1, sequence_parallel=True, zero=1, micro_batch_size=4
    ),
}


def train_grid(directory, config, layout, until, group):
    options = {"balance_loss": 0.0} if config.num_experts else {}
    model = parallelize(config, layout, group, adamw, **options)
    optimizers = model.optimizer.optimizers
    training = Training(model.parts, optimizers, group, names=model.names_in_whole())
    saved = training.resume(directory)
    place = {"rank": model.mesh.index("dp"), "size": layout.dp}
    batches = Batches(TEXT, 8, config.seq_len, **place)
    losses = {}
    for number in range(saved.step if saved else 0, until):
        losses[number] = model.step(*batches.batch(number)).loss.item()
    training.save(directory, until)
    names = [name for name in find(directory, group).tensors if not name.startswith("rank ")]
    return losses, sorted(names)


@pytest.mark.parametrize(
    "config, before, after",
    [
        (DENSE, "tp2*pp2", "dp4, zero3"),
        (DENSE, "dp4, zero3", "pp2*dp2, zero1"),
        (EXPERTS, "pp2*dp2*ep2, zero1", "dp2*tp2*ep2"),
        (EXPERTS, "dp2*tp2*ep2", "one process"),
        (EXPERTS, "dp2*tp2*ep4, zero1", "dp2*tp2*ep2"),
    ],
    ids=["dense", "dense back", "experts", "experts back", "experts that span tp"],
)
def test_all_axes_can_be_exchanged_for_others(config, before, after, tmp_path):
    """A tied embedding on two stages, one kv head on two ranks and experts are each saved once."""
    alone, before, after = GRIDS["one process"], GRIDS[before], GRIDS[after]
    expected, names = launch(train_grid, 1, (str(tmp_path / "one"), config, alone, 6)).results[0]
    here = str(tmp_path / "grid")
    first = launch(train_grid, before.world_size, (here, config, before, 3))
    then = launch(train_grid, after.world_size, (here, config, after, 6))
    for rank in range(after.world_size):
        losses, saved_names = then.results[rank]
        assert saved_names == first.results[0][1] == names
        assert sorted(losses) == [3, 4, 5]
        for number, loss in losses.items():
            assert loss == pytest.approx(expected[number], rel=1e-5)


DROPOUT = {"config": CONFIG.replace(dropout=0.2), "dtype": torch.float32}


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_resumed_on_the_same_ranks_losses_are_the_same_bit_by_bit(strategy, optimizer, tmp_path):
    """In float32 with dropout, parameters, states and generators are all restored exactly."""
    how = {**DROPOUT, "optimizer": optimizer}
    whole = launch(train, 2, (str(tmp_path / "whole"), strategy, 6), how).results
    launch(train, 2, (str(tmp_path / "parts"), strategy, 3), how)
    parts = launch(train, 2, (str(tmp_path / "parts"), strategy, 6), how, seed=99).results
    for rank in range(2):
        assert parts[rank] == {number: whole[rank][number] for number in (3, 4, 5)}


def train_without(what, directory, group):
    """The control: resume as `train` does, but leave one thing out."""
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
    """Kill any rank at any step, even while the last checkpoint is being written."""
    draw = random.Random(kill_number)
    strategy, ranks, steps = draw.choice(["dp", "zero1", "zero2", "zero3"]), 3, 10
    kill = draw.randrange(4, steps), draw.randrange(ranks)  # (step 2 is on disk when 4 begins)
    how = {**DROPOUT, "every": 2, "background": True}
    whole = launch(train, ranks, (str(tmp_path / "whole"), strategy, steps), how).results
    here = str(tmp_path / "killed")
    with pytest.raises(RankError, match=f"rank {kill[1]} of {ranks} was killed by SIGKILL"):
        launch(train, ranks, (here, strategy, steps), {**how, "kill": kill})
    parts = launch(train, ranks, (here, strategy, steps), how, seed=99).results
    first, begun = min(parts[0]), kill[0] // 2 * 2
    assert first in (begun - 2, begun)  # the previous one if the last was not yet on the disk
    for rank in range(ranks):
        assert parts[rank] == {number: whole[rank][number] for number in range(first, steps)}


# --- what cannot be resumed ---------------------------------------------------------------------


def other_optimizer(directory, group):
    train(directory, "dp", 2, group)
    train(directory, "zero1", 3, group, optimizer=sgd)


def other_size(directory, group):
    train(directory, "zero3", 2, group)
    train(directory, "zero3", 3, group, config=CONFIG.replace(d_ffn=48))


def more_layers(directory, group):
    train(directory, "zero3", 2, group)
    train(directory, "zero3", 3, group, config=CONFIG.replace(num_layers=3))


def fewer_layers(directory, group):
    train(directory, "zero3", 2, group)
    train(directory, "zero3", 3, group, config=CONFIG.replace(num_layers=1))


REFUSED = {
    other_optimizer: "was saved with AdamW, this training has SGD",
    other_size: r"its blocks\.0\.ffn\.up\.weight is \[64, 16\], this model's \[48, 16\]",
    more_layers: r"it has no blocks\.2\.attn_norm\.weight \[16\], which this model has",
    fewer_layers: r"it has blocks\.1\.attn_norm\.weight \[16\], which this model lacks",
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_the_checkpoint_of_another_training_is_refused_by_name(fn, tmp_path):
    with pytest.raises(RankError, match=REFUSED[fn]):
        launch(fn, 2, (str(tmp_path),))


def foreign_parameters(group):
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"a tensor of shape \[3, 2\] that is in none"):
        Training(model, adamw(other.parameters()), group)


def counts_differ(directory, group):
    """One process steps only parameters with a gradient; a ZeRO unit steps all together."""
    model = torch.nn.Linear(2, 2)
    optimizer = adamw(model.parameters())
    for trained in (model.weight, model.bias), (model.weight,):
        optimizer.zero_grad()
        for parameter in trained:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    Training(model, optimizer, group).save(directory, 2)
    sharded = ZeRO1(torch.nn.Linear(2, 2), group, adamw)
    with pytest.raises(ValueError, match="weight/step is 2 and bias/step is 1, but here one optim"):
        Training(sharded, (), group).resume(directory)


def test_what_would_be_lost_or_mixed_is_refused(tmp_path):
    launch(foreign_parameters, 1)
    launch(counts_differ, 1, (str(tmp_path),))


# --- small things --------------------------------------------------------------------------------


def buffers_frozen_and_extra(directory, strategy, group):
    def make():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        model[0].weight.requires_grad = False
        if strategy == "dp":
            return Naive(model, group), adamw([p for p in model.parameters() if p.requires_grad])
        sharded = ZEROS[strategy](model, group, adamw)
        return sharded, sharded.optimizer

    torch.manual_seed(0)
    model, optimizer = make()
    for _ in range(2):
        model(torch.rand(4, 3)).sum().backward()
        model.finish()
        optimizer.step()
        model.refresh_parameters()
        model.zero_grad()
    before = {name: t.clone() for name, t in model.module.state_dict().items()}
    Training(model, optimizer, group).save(directory, 2, {"tokens": 24, "note": "as JSON"})
    again, optimizer = make()
    saved = Training(again, optimizer, group).resume(directory)
    after = again.module.state_dict()
    equal = all(torch.equal(before[name], after[name]) for name in before)
    return saved.extra, saved.step, equal, list(saved.tensors)


@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_frozen_parameters_buffers_and_extra_are_in_it(strategy, tmp_path):
    run = launch(buffers_frozen_and_extra, 2, (str(tmp_path), strategy))
    for extra, step, equal, names in run.results:
        assert extra == {"tokens": 24, "note": "as JSON"} and step == 2 and equal
        assert {"0.weight", "0.bias", "0.bias/exp_avg", "1.running_mean"} <= set(names)
        assert "0.weight/exp_avg" not in names  # it is frozen


def offloaded(directory, folder, group):
    def steps(model, count, start=0):
        batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=group.rank(), size=group.size())
        for number in range(start, start + count):
            inputs, targets = batches.batch(number)
            loss = token_loss(model(inputs), targets).mean()
            loss.backward()
            model.step()
            model.zero_grad()
        return loss.item()

    def make(folder):
        gpt = GPT(CONFIG, seed=0)
        return ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=folder)

    model = make(f"{folder}/a")
    steps(model, 2)
    Training(model, (), group).save(directory, 2)
    again = make(f"{folder}/b")
    saved = Training(again, (), group).resume(directory)
    return steps(model, 2, 2) == steps(again, 2, saved.step)


def test_what_zero_has_offloaded_to_files_is_saved_and_resumed(tmp_path):
    run = launch(offloaded, 2, (str(tmp_path / "saved"), str(tmp_path)))
    assert run.results == [True, True]


def draws(directory, group):
    import random

    import numpy as np

    def draw():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    draw()  # gauss and randn store a second number
    training = Training(torch.nn.Linear(1, 1), (), group)
    training.save(directory, 1)
    expected = draw()
    draw()
    training.resume(directory)
    return draw() == expected, expected


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path):
    results = launch(draws, 3, (str(tmp_path),)).results
    assert all(same for same, _ in results)
    assert len({str(expected) for _, expected in results}) == 3


def slow_save(directory, group):
    """Save in the background, change everything right away, save again before it is written."""
    import time

    import mini_dist.training.checkpoint.files as files

    write_shard = files.write_shard

    def slow(*args):
        time.sleep(0.3)
        return write_shard(*args)

    files.write_shard = slow
    weight = torch.nn.Linear(2, 2)
    training = Training(weight, (), group, background=True)
    for step in (1, 2):
        with torch.no_grad():
            weight.weight.fill_(step)
        training.save(directory, step)
        with torch.no_grad():
            weight.weight.fill_(-1)
        all_reduce(torch.ones(5), group)  # the training goes on, in its own group
    training.wait()
    values = []
    for step in (1, 2):
        training.resume(directory, step)
        values.append(weight.weight[0, 0].item())
    return values


def test_in_the_background_what_is_saved_is_what_was_there_and_saves_do_not_overlap(tmp_path):
    assert launch(slow_save, 2, (str(tmp_path),)).results == [[1.0, 2.0]] * 2


def background_failure(directory, group):
    training = Training(torch.nn.Linear(2, 2), (), group, background=True)
    if group.rank() == 0:
        open(directory, "w").close()  # a file where the directory should be
    training.save(f"{directory}", 1)
    with pytest.raises(CheckpointError, match="rank 0: cannot write"):
        training.wait()


def test_an_error_in_the_background_is_raised_when_waited_for(tmp_path):
    launch(background_failure, 2, (str(tmp_path / "file"),))


# --- compared with production --------------------------------------------------------------------


LARGER = CONFIG.replace(d_model=128, d_ffn=512, num_heads=4)


def both_save(ours, theirs, group):
    """Save and load with Training and with torch.distributed.checkpoint; return what each loads."""
    import warnings

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    warnings.simplefilter("ignore")

    def make(seed):
        model = GPT(LARGER, seed=seed)
        optimizer = adamw(model.parameters())
        inputs, targets = Batches(TEXT, BATCH, CONFIG.seq_len).batch(seed)
        token_loss(model(inputs), targets).mean().backward()
        optimizer.step()
        return model, optimizer

    def tensors(model, optimizer):
        found = dict(model.named_parameters())
        for name, parameter in model.named_parameters():
            found |= {f"{name}/{key}": t for key, t in optimizer.state[parameter].items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    model, optimizer = make(0)
    saved = tensors(model, optimizer)
    Training(model, optimizer, group).save(ours, 1)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=theirs
    )

    by_us = make(1)
    Training(*by_us, group).resume(ours)
    by_them = make(2)
    state = dict(zip(("model", "optimizer"), get_state_dict(*by_them)))
    dcp.load(state, checkpoint_id=theirs)
    loaded = {}
    for name, _ in by_them[0].named_parameters():
        loaded[name] = state["model"][name]
        states = state["optimizer"]["state"][name]
        loaded |= {f"{name}/{key}": tensor for key, tensor in states.items()}
    return saved, tensors(*by_us), loaded


def test_values_and_size_are_those_of_torchs_distributed_checkpoint(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run = launch(both_save, 2, (str(ours), str(theirs)))
    for saved, by_us, by_them in run.results:
        assert saved.keys() == by_us.keys() == by_them.keys()
        for name, tensor in saved.items():
            assert torch.equal(tensor, by_us[name]) and torch.equal(tensor, by_them[name]), name
    state = 12 * GPT(LARGER).num_parameters()  # float32: parameters, averages, squares, each once
    for directory in (ours, theirs):
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        assert state < size < 1.1 * state, directory  # names, places, checksums, generators
