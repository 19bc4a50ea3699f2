"""Unmodified DDP and FSDP2 run on our collectives, with gloo's losses and the ring's bytes."""

import pytest
import torch
import torch.distributed as dist

from mini_dist import GPT, ModelConfig, launch
from mini_dist.collectives import ring_all_reduce
from mini_dist.collectives.backend import own_backend
from mini_dist.model.loss import token_loss

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8)


def ddp(gpt, group):
    return torch.nn.parallel.DistributedDataParallel(gpt, process_group=group)


def fsdp2(gpt, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return gpt


def train(wrap, use_own, group):
    backend = own_backend(group) if use_own else group
    model = wrap(GPT(CONFIG), backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(group.rank())
    losses = []
    for step in range(3):
        group.recorder.phases.set(f"step {step}")
        tokens = torch.randint(0, 256, (2, 9), generator=generator)
        loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wrap", [ddp, fsdp2])
def test_losses_are_those_of_gloo(wrap):
    """Two ranks match to the last bit, because a + b is b + a; three match up to rounding."""
    for size, rounding in ((2, 0), (3, 1e-5)):
        theirs, ours = (launch(train, size, (wrap, own)).results for own in (False, True))
        for expected, found in zip(theirs, ours):
            assert found == pytest.approx(expected, rel=rounding, abs=0)


def ops(ledger):
    """Return the outermost ops of the steps, without DDP's broadcast of its bucket order."""
    messages = [c for c in ledger.leaves() if c.phase != "setup" and c.op != "broadcast"]
    return {[*c.within()][-1].op for c in messages}


def test_all_their_traffic_goes_round_the_ring():
    n, whole = 4, 4 * sum(p.numel() for p in GPT(CONFIG).parameters())
    run = launch(train, n, (ddp, True))
    ring = run.ledger.total_bytes(op="ring_all_reduce")
    assert ring == 3 * 2 * (n - 1) * whole
    assert ops(run.ledger) == {"ring_all_reduce"}
    run = launch(train, n, (fsdp2, True))
    assert run.ledger.total_bytes(op="ring_reduce_scatter") == 3 * (n - 1) * whole
    assert ops(run.ledger) == {"ring_all_gather", "ring_reduce_scatter"}


def one_of_each(group):
    called = []

    def mine(x, group):
        called.append(x.tolist())
        return ring_all_reduce(x, group)

    own = own_backend(group, all_reduce=mine)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (group.rank() + 1)
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        results.append(x.clone())
        dist.all_reduce(results[-1], op, group=own)
    return results, len(called)


def test_a_learners_function_is_what_runs():
    """It runs for sums and means; a maximum goes to gloo."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for results, calls in launch(one_of_each, 3).results:
        assert all(map(torch.equal, results, (6 * x, 2 * x, 3 * x)))
        assert calls == 2


def test_a_group_of_torch_is_refused():
    with pytest.raises(ValueError, match="object records nothing: give the group of a launch"):
        own_backend(object())
