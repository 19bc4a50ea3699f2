"""The run with this library: ZeRO's stages, HSDP, and TP x PP. Needs nothing else.

Each function is whole, as a user would write it, though they look alike: lesson 22's table counts
the lines of each as a user's program, and no user has the loop that would fit all of them.
"""

from __future__ import annotations

from mini_dist.collectives.mesh import Mesh
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import Layout
from mini_dist.strategies import zero as stages
from mini_dist.strategies.data_parallel import Overlapped
from mini_dist.training.all_axes import parallelize

from .run import BATCH, CONFIG, RANKS, adamw, measure


def data_parallel(batches, group):
    model = Overlapped(GPT(CONFIG), group)
    optimizer = adamw(model.parameters())
    losses = []
    for inputs, targets in batches(group.rank(), group.size()):
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def zero(stage, batches, group):
    gpt = GPT(CONFIG)
    model = getattr(stages, f"ZeRO{stage}")(gpt, group, adamw, units=gpt.blocks)
    losses = []
    for inputs, targets in batches(group.rank(), group.size()):
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def hsdp(batches, group):
    gpt, mesh = GPT(CONFIG), Mesh(group, across=2, inside=2)
    model = stages.ZeRO3(gpt, mesh["inside"], adamw, units=gpt.blocks, replicas=mesh["across"])
    losses = []
    for inputs, targets in batches(group.rank(), group.size()):
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        model.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def grid(layout, batches, group):
    model = parallelize(CONFIG, layout, group, adamw)
    losses = []
    for inputs, targets in batches(model.mesh.index("dp"), layout.dp):
        losses.append(float(model.step(inputs, targets).loss))
    return losses


def layout(pp: int, tp: int) -> Layout:
    """Of four ranks: what is neither pp nor tp is dp. Micro-batches of 2 rows in a pipeline."""
    dp = RANKS // (pp * tp)
    micro = 2 if pp > 1 else BATCH // dp
    return Layout(
        pp=pp, dp=dp, tp=tp, micro_batch_size=micro, num_micro_batches=BATCH // dp // micro
    )


def runs() -> list[dict]:
    return measure(
        {
            "data parallel": (data_parallel,),
            "ZeRO-1": (zero, 1),
            "ZeRO-2": (zero, 2),
            "ZeRO-3": (zero, 3),
            "HSDP 2 x 2": (hsdp,),
            "pp 4": (grid, layout(4, 1)),
            "pp 2 x dp 2": (grid, layout(2, 1)),
            "tp 2 x dp 2": (grid, layout(1, 2)),
            "tp 2 x pp 2": (grid, layout(2, 2)),
        }
    )
