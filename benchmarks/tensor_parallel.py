"""Compare our tensor and sequence parallelism with DTensor's parallelize_module.

The same GPT runs on 4 ranks. Theirs: ColwiseParallel and RowwiseParallel, with loss_parallel (or
with full logits on every rank, which users get without it), and SequenceParallel. x becomes a
DTensor once for q, k and v, so that its gradient is reduced once, as in ours.
Rows "step": forward, loss, backward and AdamW; both sides take turns in the same processes.
Rows "step, theirs under torchrun": each side has its own processes, started as its users start it,
so that theirs runs without our recorder, malloc settings and threads. They also take turns in one
run.
Rows "CPU time": the CPU time of all ranks together, which says more than the step on a busy
machine.
Rows "bytes": the ledger's count for one step, all ranks together. DTensor's native collectives
count as the minimum that they need, so gloo's extra traffic is not charged to DTensor. Differences:
with full logits theirs gathers them. With SP it reduces the norms' gradients inside the optimizer,
tensor by tensor and use by use; ours gathers once more per region.
Rows "memory": the peak of bytes allocated during a second step, on the rank that needs most. On
rank 0, where small tensors are summed, ours receives two at a time from the others. Every run
compares the losses and gradients of both sides.
"""

import statistics
import sys
from functools import partial

import _torchrun
import torch
from _form import (
    Case,
    in_turn,
    in_turn_with_torchrun,
    main,
    of_all_ranks,
    peak_allocated,
    step_cases,
)

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.loss import token_loss
from mini_dist.strategies.tensor_parallel import (
    GPT_PLAN,
    SEQUENCE,
    SEQUENCE_AGAIN,
    TENSOR,
    finish_gradients,
    shard_model,
    vocab_parallel_cross_entropy,
)
from mini_dist.training.full_state import full_state_dict

RANKS = 4
CONFIG = ModelConfig()  # 4 layers x 256, 128 tokens
BATCH = 8
OURS = {"TP": TENSOR, "TP + SP": SEQUENCE, "TP + SP, gathered again": SEQUENCE_AGAIN}


def data(config):
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, config.seq_len + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def our_step(config, pair, group):
    model = shard_model(GPT(config), GPT_PLAN, group, pair=OURS[pair])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs, targets = data(config)

    def step():
        optimizer.zero_grad()
        loss = vocab_parallel_cross_entropy(model(inputs), targets, group).mean()
        loss.backward()
        finish_gradients(model)
        optimizer.step()
        return loss.item()

    return step, lambda: gradients_of_ours(model, group)


def gradients_of_ours(model, group):
    """Return every parameter's whole gradient by its name."""
    kept = [parameter.data for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.grad
    whole = full_state_dict(model, group)
    for parameter, data in zip(model.parameters(), kept):
        parameter.data = data
    return whole


def their_step(config, sequence, loss_parallel, group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    between = Shard(1) if sequence else Replicate()
    enter = tp.PrepareModuleInput(
        input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
    )
    leave = tp.RowwiseParallel(output_layouts=between)
    logits = Shard(-1) if loss_parallel else Replicate()
    plan = {
        "embed.token": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attn": enter,
        **{f"blocks.*.attn.{name}": tp.ColwiseParallel() for name in "qkv"},
        "blocks.*.attn.o": leave,
        "blocks.*.ffn": enter,
        "blocks.*.ffn.up": tp.ColwiseParallel(),
        "blocks.*.ffn.down": leave,
        "head.out": tp.ColwiseParallel(
            input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel
        ),
    }
    if sequence:
        norms = ("blocks.*.attn_norm", "blocks.*.ffn_norm", "head.norm")
        plan |= {name: tp.SequenceParallel() for name in norms}
    model = GPT(config)
    tp.parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    inputs, targets = data(config)

    def step():
        optimizer.zero_grad()
        if not loss_parallel:
            loss = token_loss(model(inputs), targets).mean()
            loss.backward()
            optimizer.step()
            return loss.item()
        with tp.loss_parallel():
            logits = model(inputs).flatten(0, -2)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
            loss.backward()
        optimizer.step()
        return loss.to_local().item() if hasattr(loss, "to_local") else loss.item()

    def gradients():
        whole = {}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            whole[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        return whole

    return step, gradients


def ours_beside_torchrun(config, pair, rounds, torchrun, group):
    """Run our step and theirs in turn, each in its own processes."""
    step, _ = our_step(config, pair, group)
    theirs = partial(_torchrun.step, torchrun, group.rank())
    step(), theirs()  # the first step sets things up: not timed
    return in_turn_with_torchrun(step, theirs, rounds, group)


def both_on_a_rank(config, pair, loss_parallel, rounds, group):
    """Run our step and theirs in turn in the same processes; compare losses and gradients."""
    sides = [
        our_step(config, pair, group),
        their_step(config, pair != "TP", loss_parallel, group),
    ]
    losses = [step() for step, _ in sides]  # the first step sets things up: not timed
    assert abs(losses[0] - losses[1]) < 1e-5, losses
    ours, theirs = (gradients() for _, gradients in sides)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-6, msg=name)
    return in_turn(*(step for step, _ in sides), rounds, group)


def step_times(config, pair, loss_parallel, rounds):
    """Return the ranks' measurements, first each side in its own processes, then both in ours."""
    theirs = (config, pair != "TP", loss_parallel)
    with _torchrun.ranks(their_step, theirs, RANKS) as torchrun:
        args = (config, pair, rounds, torchrun)
        apart = launch(ours_beside_torchrun, RANKS, args, timeout=600, quiet=True).results
    args = (config, pair, loss_parallel, rounds)
    together = launch(both_on_a_rank, RANKS, args, timeout=600, quiet=True).results
    return apart, together


def second_step(make, args, profiled, group):
    """Run two steps; if asked, return the peak in MiB that the second step allocated."""
    step, _ = make(*args, group)
    step()
    group.recorder.phases.set("second step")
    group.recorder.comms.clear()
    return peak_allocated(step) / 2**20 if profiled else step()


def sent(make, *args):
    run = launch(second_step, RANKS, (make, args, False), timeout=300, quiet=True)
    return run.ledger.total_bytes() / 2**20


def peak(make, *args):
    """Return the middle one of three runs, because theirs frees when gloo's threads are done,
    sometimes late."""
    runs = [launch(second_step, RANKS, (make, args, True), timeout=300, quiet=True) for _ in "123"]
    return statistics.median(max(run.results) for run in runs)


def cases(long):
    config = CONFIG.replace(d_model=512, num_layers=6) if long else CONFIG
    rounds = 30 if long else 12
    for pair, loss_parallel, bar in (
        ("TP", False, 0.6),
        ("TP", True, 0.6),
        ("TP + SP", True, 0.5),
        ("TP + SP, gathered again", True, 0.5),
    ):
        theirs = (config, pair != "TP", loss_parallel)
        name = f"{pair}{', their loss_parallel' if loss_parallel else ', their full logits'}"
        apart, together = step_times(config, pair, loss_parallel, rounds)
        for kind, rows in ("step", together), ("step, theirs under torchrun", apart):
            yield from step_cases(f"{kind}, {name}", of_all_ranks(rows), bar)
        yield from step_cases(f"CPU time, {name}", of_all_ranks(together, sum, kind=1), None)
        yield Case(
            f"bytes, {name}",
            lambda pair=pair: sent(our_step, config, pair),
            lambda theirs=theirs: sent(their_step, *theirs),
            None if "again" in pair else 1.0,  # This pair trades more bytes for less memory.
            unit="MiB",
            repeats=1,
            warmup=0,
        )
        yield Case(
            f"memory, {name}",
            lambda pair=pair: peak(our_step, config, pair),
            lambda theirs=theirs: peak(their_step, *theirs),
            1.0,
            unit="MiB",
            repeats=1,
            warmup=0,
        )


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
