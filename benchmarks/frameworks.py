"""Compare our ZeRO-1, 2 and 3 with DeepSpeed's on 4 ranks, and our bytes with other frameworks'.

    pip install -e .[frameworks]
    python benchmarks/frameworks.py

Rows "step": one training step (forward, backward, AdamW) of the same GPT by both, in turn in the
same processes. DeepSpeed runs as shipped, with two exceptions: its shared memory operator is not
compiled, so that it runs here at all (it uses gloo), and clipping is off, as in ours. "offloaded"
is ZeRO-2 with optimizer and gradients on the host. Both sides step with torch's AdamW there,
because DeepSpeed's CPU Adam would have to be compiled first. Device and host are the same memory,
so both sides copy without need. Our lanes are threads.
Rows "sent": bytes of all ranks in a step of lesson 22's small model, from the ledger. "memory": the
peak of tensor bytes on a rank. It includes DeepSpeed's bucket of 5e8 numbers, which is allocated
even if it is not written. In "plain" and "bare" the bucket is as large as the model, and the bytes
equal the figures of DeepSpeed's paper. Megatron-core: the grids that both programs support; the bar
is equal bytes. torchtitan: its `fsdp 4` against our ZeRO-3 (its grids with tp have sequence
parallelism, ours of lesson 22 do not). torchft is compared with our data parallelism "on sockets",
by the kernel's count, because the ledger does not record its groups. Every row compares the losses
of both sides.
"""

import sys

import torch
from _form import Case, in_turn, main, of_all_ranks, step_cases

from mini_dist import GPT, ModelConfig, launch, token_loss
from mini_dist.course.elsewhere import (
    in_deepspeed,
    in_megatron,
    in_torch,
    in_torchft,
    in_torchtitan,
    ours,
)
from mini_dist.course.elsewhere.kept import is_installed
from mini_dist.course.elsewhere.run import RANKS, adamw
from mini_dist.strategies.offload import Lanes, OverlappedOffload

CONFIG = ModelConfig(num_layers=4, d_model=256)  # 3.3 M parameters, as in data_parallel.py
TOKENS = (1, 32)  # sequences, tokens per sequence on a rank: mostly communication


def data(group):
    dice = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(0, CONFIG.vocab_size, (TOKENS[0], TOKENS[1] + 1), generator=dice)
    return tokens[:, :-1], tokens[:, 1:]


def our_step(stage, offloaded, group):
    from mini_dist.strategies import zero

    gpt, offload = GPT(CONFIG), OverlappedOffload(Lanes()) if offloaded else None
    model = getattr(zero, f"ZeRO{stage}")(gpt, group, adamw, units=gpt.blocks, offload=offload)
    inputs, targets = data(group)

    def step():
        model.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.step()
        return loss.item()

    return step


def their_step(stage, offloaded, group):
    deepspeed = in_deepspeed.start(group)
    offload = in_deepspeed.OFFLOAD if offloaded else {}
    gpt, settings = GPT(CONFIG), in_deepspeed.config(stage, **offload)
    settings["train_batch_size"] = RANKS * TOKENS[0]
    settings["train_micro_batch_size_per_gpu"] = TOKENS[0]
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=adamw(gpt.parameters()), config=settings)
    inputs, targets = data(group)

    def step():
        loss = token_loss(engine(inputs), targets).mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def both(stage, offloaded, rounds, group):
    """Return both steps' first losses on this rank, and their times in turn."""
    steps = our_step(stage, offloaded, group), their_step(stage, offloaded, group)
    losses = [[step() for _ in range(3)] for step in steps]
    return losses, in_turn(*steps, rounds, group)


def cases(long):
    needed = ("deepspeed", "megatron.core", "torchft", "torchtitan", "triton")
    missing = [name for name in needed if not is_installed(name)]
    if missing:
        sys.exit(f"{' and '.join(missing)} not installed here: pip install -e '.[frameworks]'")
    for stage, offloaded in ((1, False), (2, False), (3, False), (2, True)):
        work = (stage, offloaded, 60 if long else 20)
        ranks = launch(both, RANKS, work, timeout=600, quiet=True).results
        for (mine, theirs), _ in ranks:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=0)
        times = of_all_ranks([taken for _, taken in ranks])
        name = f"step, ZeRO-{stage}{', offloaded' * offloaded}, DeepSpeed's"
        yield from step_cases(name, times, bar=1.0)
    mine = {row["name"]: row for row in ours.runs()}
    theirs = {row["name"]: row for row in in_deepspeed.runs()}
    for stage, names in (
        (1, ("ZeRO-1, as shipped",)),
        (2, ("ZeRO-2, as shipped", "ZeRO-2, plain")),
        (3, ("ZeRO-3, as shipped", "ZeRO-3, bare")),
    ):
        for name in names:
            yield from compared(mine[f"ZeRO-{stage}"], theirs[name], f"DeepSpeed {name}")
    for row in in_megatron.grids():
        yield from compared(mine[row["name"]], row, f"Megatron {row['name']}", bar=1.001)
    counterparts = {"DDP": "data parallel", "FSDP2": "ZeRO-3", "HSDP 2 x 2": "HSDP 2 x 2"}
    for row in in_torch.runs():
        yield from compared(mine[counterparts[row["name"]]], row, f"PyTorch {row['name']}")
    sharded = {row["name"]: row for row in in_torchtitan.grids()}["fsdp 4"]
    yield from compared(mine["ZeRO-3"], sharded, "torchtitan fsdp 4")
    (replicas,) = in_torchft.runs()
    if replicas["on_sockets"]:  # Otherwise nothing counts these bytes here.
        yield from compared(mine["data parallel"], replicas, "torchft", key="on_sockets")


def compared(mine, theirs, name, bar=None, key="sent"):
    """Return bytes and memory of two rows of elsewhere.run.measure; their losses must be equal."""
    torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=0, atol=1e-5)
    what = key.replace("_", " ")
    for label, column, at_most in ((what, key, bar), ("memory", "peak", None)):
        values = mine[column] / 1e6, theirs[column] / 1e6
        yield Case(f"{label}, {name}", lambda v=values: v[0], values[1], at_most, "MB", 1, 0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
