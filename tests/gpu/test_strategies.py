"""Each strategy on CUDA reaches the losses of one process.

It runs on one rank over NCCL, and on 2 and 4 ranks that share the GPU over gloo. Here tensors have
values; in tests/training/test_any_device.py they have no storage.
"""

import random
from functools import partial

import pytest
import torch

from mini_dist import GPT, Layout, launch
from mini_dist.model.data import Batches
from mini_dist.serving import Engine, Memory, Policy, Request
from mini_dist.strategies.expert_parallel import layers_with_experts, move_balance_biases
from mini_dist.strategies.train import train_step
from mini_dist.training.all_axes import parallelize
from mini_dist.training.checkpoint import Training
from tests.training.test_random_layouts import (
    BALANCE,
    CONFIGS,
    MAX_NORM,
    ROWS,
    STEPS,
    TEXT,
    adamw,
    micro_batches_fit,
    one_process,
    random_layout,
    short,
    wrappers,
)

CLOSE = dict(rtol=1e-7, atol=1e-10)  # float64, but a GPU adds in another order


def in_layout(config, layout, group):
    """Return the losses and norms of STEPS steps, and whether all parameters are on the GPU."""
    torch.set_default_dtype(torch.float64)
    model = parallelize(config, layout, group, adamw)
    place = dict(rank=model.mesh.index("dp"), size=layout.dp, device=group.device)
    batches, done = Batches(TEXT, ROWS, config.seq_len, **place), []
    stages = torch.nn.ModuleList(model.stages.values())
    for step in range(STEPS):
        loss, norm, _ = model.step(*batches.batch(step), max_norm=MAX_NORM)
        if config.router == "sigmoid" and layers_with_experts(stages):
            move_balance_biases(stages, BALANCE)
        done.append((loss.item(), norm.item()))
    return done, all(p.is_cuda for p in model.parameters())


def layouts_of(number):
    draw, found = random.Random(f"gpu {number}"), []
    while len(found) < 3:
        name = draw.choice(list(CONFIGS))
        layout = micro_batches_fit(random_layout(draw, CONFIGS[name]))
        if layout.world_size in (2, 4):
            found.append((name, layout))
    return found


@pytest.mark.parametrize("number", range(4))
def test_layouts_on_a_shared_gpu_train_as_one_process(number):
    for name, layout in layouts_of(number):
        ((expected, _),) = one_process(CONFIGS[name], STEPS)
        run = launch(in_layout, layout.world_size, (CONFIGS[name], layout), device="cuda:0")
        assert run.title() == f"{layout.world_size} ranks on cuda:0, gloo"
        for done, is_there in run.results:
            torch.testing.assert_close(done, expected, **CLOSE, msg=f"{name}, {short(layout)}")
            assert is_there, f"{name}, {short(layout)}"


@pytest.mark.parametrize("name", CONFIGS)
def test_one_rank_on_nccl_trains_as_one_process(name):
    layout = micro_batches_fit(Layout(micro_batch_size=4))
    ((expected, _),) = one_process(CONFIGS[name], STEPS)
    run = launch(in_layout, 1, (CONFIGS[name], layout), device="cuda")
    torch.testing.assert_close(run.results[0][0], expected, **CLOSE)


def under_wrappers(folder, group):
    torch.set_default_dtype(torch.float64)
    config, found = CONFIGS["tied"], {}
    place = dict(rank=group.rank(), size=group.size(), device=group.device)
    batches = Batches(TEXT, ROWS, config.seq_len, **place)
    for name, (make, _) in wrappers(folder).items():
        model = make(GPT(config, seed=0, dtype=torch.float64, device=group.device), group)
        optimizer = model.optimizer if hasattr(model, "optimizer") else adamw(model.parameters())
        found[name] = [
            train_step(model, optimizer, [batches.batch(step)]).loss.item() for step in range(STEPS)
        ]
    return found


@pytest.mark.parametrize("device, size", [("cuda", 1), ("cuda:0", 2), ("cuda:0", 4)])
def test_every_wrapper_trains_as_one_process(device, size, tmp_path):
    ((numbers, _),) = one_process(CONFIGS["tied"], STEPS, max_norm=float("inf"))
    expected = [loss for loss, _ in numbers]
    exact = {name: is_exact for name, (_, is_exact) in wrappers(tmp_path).items()}
    for found in launch(under_wrappers, size, (str(tmp_path),), device=device).results:
        for name, losses in found.items():
            close = CLOSE if exact[name] else dict(rtol=0.1, atol=0)
            torch.testing.assert_close(losses, expected, **close, msg=name)


def saved_and_loaded(directory, first, group):
    torch.set_default_dtype(torch.float64)
    config = CONFIGS["tied"]
    model = parallelize(config, Layout(dp=group.size(), zero=3), group, adamw)
    training = Training(
        model.parts, model.optimizer.optimizers, group, names=model.names_in_whole()
    )
    saved = training.resume(directory)
    assert (saved.step if saved else 0) == first
    batches = Batches(
        TEXT, group.size(), config.seq_len, rank=group.rank(), size=group.size()
    )  # (on the host: a parallelized model takes tokens from any device)
    model.step(*batches.batch(first))
    training.save(directory, first + 1)
    return {str(p.place): p.tensor.cpu() for p in training.pieces()}


def test_a_checkpoint_goes_from_the_gpu_to_the_host_and_back(tmp_path):
    launch(saved_and_loaded, 2, (str(tmp_path), 0), device="cuda:0")
    launch(saved_and_loaded, 2, (str(tmp_path), 1), device="cpu")
    launch(saved_and_loaded, 1, (str(tmp_path), 2), device="cuda")


def answers(group):
    model = GPT(CONFIGS["untied"].replace(seq_len=64), device=group.device)
    engine = Engine(model, Memory(num_blocks=16, block_size=4, host_blocks=4), None)
    requests = [Request(str(i), [1 + i, 2, 3], max_new_tokens=20) for i in range(4)]
    return engine.serve(requests, Policy(max_batch=4)).texts


def test_the_server_says_on_a_gpu_what_it_says_on_the_host():
    on = partial(launch, answers, 1)
    assert on(device="cuda").results == on(device="cpu").results
