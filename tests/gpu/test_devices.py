"""launch(device=...) on a GPU: NCCL if each rank has a GPU of its own, gloo if ranks share one.

Also torch's streams, pinned copies, allocator (lesson 20) and the profiler's kernels (lesson 21).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mini_dist import GPT, launch
from mini_dist.collectives import ring_all_reduce
from mini_dist.course.profile import profiled
from mini_dist.model.data import Batches, load_text
from mini_dist.plan.config import ModelConfig
from mini_dist.strategies.train import train_step
from tests.ranks.test_devices import every_operation
from tests.ranks.test_launch import test_a_gpu_a_rank_means_nccl_and_cuda  # noqa: F401
from tests.strategies.test_offload import (  # noqa: F401
    test_a_copy_comes_after_what_it_was_told_to_and_before_who_waits,
    test_a_copy_goes_on_beside_a_kernel,
    test_pytorch_s_allocator_does_what_the_toy_does,
    test_streams_change_no_number,
)

ROOT = Path(__file__).resolve().parents[2]
RUNGS = sorted(path.name for path in ROOT.glob("ladder/[0-9]*.py"))


def sums(group):
    x = torch.full((1000,), float(group.rank() + 1), device=group.device)
    y = ring_all_reduce(x, group)
    dist.all_reduce(x, group=group)
    return x, y, torch.cuda.current_device(), group.device


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_a_gpu_over_gloo(size):
    run = launch(sums, size, device="cuda:0")
    assert run.title() == f"{size} ranks on cuda:0, gloo"
    for x, y, current, device in run.results:
        assert x[0] == y[-1] == size * (size + 1) / 2
        assert current == 0 and device == torch.device("cuda:0")


def made_without_device(group):
    """Return where things are that were made without `device=`, and a random number."""
    x, (inputs, _) = torch.rand(1), Batches(load_text(), 2, 8).batch(0)
    here = [x.device, inputs.device, next(GPT(SMALL).parameters()).device]
    return *map(str, here), x.item()


def test_a_gpu_that_was_asked_for_is_where_tensors_are_made_and_arrive():
    x = torch.ones(3)
    assert launch(lambda group: str(x.device), 2, device="cuda:0").results == ["cuda:0"] * 2
    first, second = launch(made_without_device, 2, device="cuda:0").results
    assert first[:3] == second[:3] == ("cuda:0",) * 3
    assert first[3] != second[3]  # each rank has a seed of its own, on the GPU, too
    assert launch(made_without_device, 2, device="cuda:0").results == [first, second]
    assert launch(made_without_device, 1).results[0][:3] == ("cpu",) * 3  # a GPU, but not asked for


def test_more_ranks_than_gpus_are_refused_where_nccl_would_fail():
    number = torch.cuda.device_count()
    with pytest.raises(ValueError, match="NCCL refuses two ranks on one GPU"):
        launch(sums, number + 1, device="cuda")


def test_what_stays_on_the_host_goes_by_gloo_and_the_title_says_so():
    def on_the_host(group):
        x = torch.ones(3, device="cpu")
        dist.all_reduce(x, group=group)
        return x

    run = launch(on_the_host, 1, device="cuda")
    assert run.title() == "1 rank on cuda, gloo"
    run = launch(lambda group: dist.all_reduce(torch.ones(3, device=group.device)), 1)
    assert run.title() == "1 rank on cuda, NCCL"


def test_every_operation_on_a_shared_gpu_is_that_on_the_host():
    here = launch(every_operation, 3, (False,), device="cpu")
    there = launch(every_operation, 3, (False,), device="cuda:0")
    assert {c.carrier for c in there.ledger.comms if c.is_leaf and c.op != "barrier"} == {"gloo"}
    for ours, theirs in zip(there.results, here.results):
        for name in {*theirs} - {"DDP"}:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
        assert {*theirs} == {*ours}


@pytest.mark.parametrize("rung", RUNGS)
def test_a_rung_of_the_ladder_runs_at_one_rank_on_nccl(rung):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"ladder/{rung}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "loss" in done.stdout


SMALL = ModelConfig(d_model=256, num_layers=4, num_heads=8, seq_len=256)


def watched(group):
    model = GPT(SMALL, device=group.device)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = Batches(load_text(), 8, SMALL.seq_len, device=group.device)
    train_step(model, optimizer, [batches.batch(0)])
    with profiled(group) as profile:
        with profile.step():
            train_step(model, optimizer, [batches.batch(1)])
            torch.cuda.synchronize()
    return profile.spans


def test_the_profiler_sees_kernels_on_the_device(figure):
    (spans,) = launch(watched, 1, device="cuda").results
    kernels = [span for span in spans if span.kind == "compute"]
    (step,) = [span for span in spans if span.kind == "step"]
    assert len(kernels) > 100 and not any(k.name.startswith("aten::") for k in kernels)
    busy = sum(k.end - k.start for k in kernels) / (step.end - step.start)
    assert 0 < busy <= 1.01  # one stream: its kernels do not overlap
    figure("kernels of a step", len(kernels))
    figure("busy share of a step", busy)
