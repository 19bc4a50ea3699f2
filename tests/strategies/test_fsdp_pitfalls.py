"""Test what lessons 08 and 22 say about fully_shard: three ways to train nothing or four models,
and what keeping parameters between micro-batches saves."""

from collections import Counter

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from mini_dist import GPT, Batches, ModelConfig, launch, load_text, token_loss

CONFIG = ModelConfig(num_layers=4, d_model=64, num_heads=4, seq_len=32)


def sharded(gpt, group, root=True, **knobs):
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*gpt.blocks, *([gpt] if root else [])):
        fully_shard(module, mesh=mesh, **knobs)
    return gpt


def train(mistake, group):
    """Take three steps on one batch. Return the losses, the embedding's sum, whether the optimizer
    has the model's parameters, and how many parameters are whole after the steps."""
    gpt = GPT(CONFIG)
    if mistake == "optimizer first":
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
        sharded(gpt, group)
    else:
        kept = {"reshard_after_forward": False} if mistake == "never freed" else {}
        sharded(gpt, group, root=mistake != "no root", **kept)
        if mistake == "never freed":
            gpt.set_reshard_after_backward(False)
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    inputs, targets = Batches(load_text(), 8, 32, rank=group.rank(), size=group.size()).batch(0)
    losses = []
    for _ in range(3):
        loss = token_loss(gpt(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stepped = {id(p) for group_ in optimizer.param_groups for p in group_["params"]}
    whole = [p for p in gpt.parameters() if not hasattr(p, "full_tensor")]
    embedding = next(gpt.parameters())
    if hasattr(embedding, "full_tensor"):
        embedding = embedding.full_tensor()
    same = all(id(p) in stepped for p in gpt.parameters())
    return losses, embedding.double().sum().item(), same, len(whole)


def test_the_right_order_trains_one_model():
    results = launch(train, 4, ("",)).results
    losses, _, same, whole = results[0]
    assert losses[0] - losses[2] > 0.3 and same and whole == 0
    assert len({embedding for _, embedding, _, _ in results}) == 1


def test_an_optimizer_made_before_steps_nothing():
    losses, _, same, whole = launch(train, 4, ("optimizer first",)).results[0]
    assert losses[0] == losses[1] == losses[2] and not same and whole == 0


def test_parameters_that_are_never_freed_stay_as_they_were():
    """The optimizer steps the shards, but forward uses the whole parameters still in memory."""
    losses, _, _, whole = launch(train, 4, ("never freed",)).results[0]
    assert losses[0] == losses[1] == losses[2]
    assert whole == len(list(GPT(CONFIG).parameters()))


def test_without_the_root_the_loss_falls_and_the_ranks_part():
    """Parameters outside the blocks differ on every rank: their gradients are never averaged."""
    results = launch(train, 4, ("no root",)).results
    losses, _, same, whole = results[0]
    assert losses[0] - losses[2] > 0.3 and same and whole == 4  # embedding, norm (2), head
    assert len({embedding for _, embedding, _, _ in results}) == 4


def accumulate(kept, group):
    """Run eight micro-batches with one reduce-scatter; return the sum of the stepped weights."""
    gpt = sharded(GPT(CONFIG), group, reshard_after_forward=False)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
    batches = Batches(load_text(), 8, 32, rank=group.rank(), size=group.size())
    for micro in range(8):
        last = micro == 7
        gpt.set_requires_gradient_sync(last)
        if kept:
            gpt.set_reshard_after_backward(last)
        inputs, targets = batches.batch(micro)
        token_loss(gpt(inputs), targets).mean().backward()
    optimizer.step()
    return sum(p.to_local().double().sum().item() for p in gpt.parameters())


def test_quiz_1_of_lesson_08():
    """All five units are gathered 8 times, or once if only the last backward frees them."""
    runs = {kept: launch(accumulate, 4, (kept,)) for kept in (False, True)}
    for kept, gathers in ((False, 8), (True, 1)):
        calls = Counter(call.op for call in runs[kept].ledger.calls(rank=0))
        assert calls["all_gather"] == gathers * 5 and calls["reduce_scatter"] == 5
    assert runs[True].results[0] == pytest.approx(runs[False].results[0], rel=1e-9)
