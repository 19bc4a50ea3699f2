"""Compare two axes at once with FSDP2 x DTensor and FSDP2 x torch.distributed.pipelining.

The same GPT runs on 4 ranks with the same groups. Theirs: fully_shard over dp of a model that
parallelize_module has sharded over tp (with SequenceParallel and loss_parallel), and fully_shard of
the stages of Schedule1F1B. In the pipeline theirs does not reshard after forward, which is
torchtitan's default: parameters are gathered once per step, and gradients are accumulated and
scattered at its end, as in ZeRO-1.
Rows "step": one training step with AdamW. Both take turns in the same processes, so that other work
on the machine affects both. Medians of the slowest rank.
Rows "sent": the bytes that all ranks send per step, from the ledger. A native collective counts as
the minimum that any algorithm has to move. With SP ours gathers the inputs of a region again in
backward, which makes 10 (t-1)/t BSD per block; theirs keeps them and sends 8. FSDP2 gathers the
root twice, ours once. With ZeRO-3 in a pipeline ours scatters gradients after every micro-batch,
FSDP2 after the last: it sends less and holds whole gradients. Every run compares the losses of both
sides.
"""

import sys

import torch
from _form import Case, in_turn, main, of_all_ranks, step_cases

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.collectives.mesh import Mesh
from mini_dist.model.loss import token_loss

RANKS, BATCH = 4, 8
CONFIG = ModelConfig()  # 4 layers x 256, 128 tokens
LAYOUTS = {
    "dp 2 x tp 2, ZeRO-3 and SP": Layout(
        dp=2, tp=2, zero=3, sequence_parallel=True, micro_batch_size=BATCH // 2
    ),
    "pp 2 x dp 2, ZeRO-1, 1F1B": Layout(pp=2, dp=2, zero=1, num_micro_batches=BATCH // 2),
    "pp 2 x dp 2, ZeRO-3, 1F1B": Layout(pp=2, dp=2, zero=3, num_micro_batches=BATCH // 2),
}
BARS = dict(zip(LAYOUTS, (0.9, 0.9, None)))


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-3)


def rows(mesh):
    """Return this replica's part of the batch: [B/dp, S] inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, CONFIG.seq_len + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    tokens = tokens.chunk(mesh.axes["dp"])[mesh.index("dp")]
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def our_step(layout, group):
    from mini_dist.training.all_axes import parallelize

    model = parallelize(CONFIG, layout, group, adamw)
    inputs, targets = rows(model.mesh)
    return lambda: model.step(inputs, targets).loss.item()


def their_step(layout, group):
    mesh = Mesh(group, **layout.axes)
    reshard = layout.zero == 3
    return fsdp_of_stages(mesh, reshard) if layout.pp > 1 else fsdp_of_tensor_parallel(mesh)


def shard_fully(model, mesh, reshard=True):
    from torch.distributed.fsdp import fully_shard

    blocks = model.blocks.values() if hasattr(model.blocks, "values") else model.blocks
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    return model


def fsdp_of_tensor_parallel(mesh):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    both = DeviceMesh.from_group(
        [mesh["dp"], mesh["tp"]],
        "cpu",
        mesh=torch.arange(RANKS).view(2, 2),
        mesh_dim_names=("dp", "tp"),
    )
    enter = tp.PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    )
    leave = tp.RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "embed.token": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.attn": enter,
        **{f"blocks.*.attn.{name}": tp.ColwiseParallel() for name in "qkv"},
        "blocks.*.attn.o": leave,
        "blocks.*.ffn": enter,
        "blocks.*.ffn.up": tp.ColwiseParallel(),
        "blocks.*.ffn.down": leave,
        "head.out": tp.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
        **{name: tp.SequenceParallel() for name in ("blocks.*.attn_norm", "blocks.*.ffn_norm")},
        "head.norm": tp.SequenceParallel(),
    }
    model = GPT(CONFIG)
    tp.parallelize_module(model, both["tp"], plan)
    shard_fully(model, both["dp"])
    optimizer = adamw(model.parameters())
    inputs, targets = rows(mesh)

    def step():
        optimizer.zero_grad()
        with tp.loss_parallel():
            logits = model(inputs).flatten(0, -2)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
            loss.backward()
        optimizer.step()
        return mean_over(loss.full_tensor().detach(), mesh["dp"])

    return step


def fsdp_of_stages(mesh, reshard):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from mini_dist.strategies.pipeline import cut_gpt

    number, last = mesh.index("pp"), mesh.axes["pp"] - 1
    module = cut_gpt(CONFIG, [number], mesh.axes["pp"])[number]
    shard_fully(module, DeviceMesh.from_group(mesh["dp"], "cpu"), reshard)
    optimizer = adamw(module.parameters())
    stage = PipelineStage(module, number, last + 1, torch.device("cpu"), group=mesh["pp"])
    schedule = Schedule1F1B(
        stage, BATCH // 2, loss_fn=lambda logits, targets: token_loss(logits, targets).mean()
    )
    inputs, targets = rows(mesh)

    def step():
        optimizer.zero_grad()
        losses = []
        if number == last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(*([inputs] if number == 0 else []))
        optimizer.step()
        # Theirs does not send the loss to the first stage, which has nothing to compare.
        return mean_over(torch.stack(losses).mean().detach(), mesh["dp"]) if losses else None

    return step


def mean_over(value, group):
    total = value.clone()
    group.allreduce([total]).wait()
    return total.item() / group.size()


def both_on_a_rank(layout, rounds, group):
    """Run our step and theirs in turn in the same processes; return the seconds of each."""
    sides = [our_step(layout, group), their_step(layout, group)]
    for _ in range(2):  # The second pair of losses shows that both made the same update.
        ours, theirs = (step() for step in sides)
        assert theirs is None or abs(ours - theirs) < 1e-4, (ours, theirs)
    return in_turn(*sides, rounds, group)


def step_times(layout, rounds):
    """Return the ms of each side."""
    return of_all_ranks(
        launch(both_on_a_rank, RANKS, (layout, rounds), timeout=600, quiet=True).results
    )


def steps(make, layout, number, group):
    step = make(layout, group)
    for _ in range(number):
        step()


def sent(make, layout):
    """Return the MiB that all ranks send per step: three steps minus two."""
    three, two = (
        launch(steps, RANKS, (make, layout, number), timeout=300, quiet=True).ledger.total_bytes()
        for number in (3, 2)
    )
    return (three - two) / 2**20


def cases(long):
    for name, layout in LAYOUTS.items():
        yield from step_cases(f"step, {name}", step_times(layout, 40 if long else 12), BARS[name])
        yield Case(
            f"sent, {name}",
            lambda layout=layout: sent(our_step, layout),
            lambda layout=layout: sent(their_step, layout),
            unit="MiB",
            repeats=1,
            warmup=0,
        )


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
