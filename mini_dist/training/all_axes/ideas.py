"""`parallelize` is the list of the strategies, in the order in which they must come.

Each changes the modules that it is given and knows nothing of the others. What they have to agree
on is in the files beside this one: over which ranks a gradient is averaged (averaging.py), and how
often each element counts in the norm (norm.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mini_dist.collectives import device_of
from mini_dist.collectives.mesh import Mesh
from mini_dist.model.gpt import MoE
from mini_dist.model.recompute import recompute_blocks
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.schedule import Schedule, build
from mini_dist.strategies.context_parallel import make_attention, positions_here
from mini_dist.strategies.expert_parallel import shard_experts
from mini_dist.strategies.pipeline import cut_gpt, tie_ends
from mini_dist.strategies.precision import FULL, Precision
from mini_dist.strategies.tensor_parallel import SEQUENCE_AGAIN, TENSOR, shard_model

from .averaging import average_gradients
from .experts_cut import plan
from .fits import check_fits
from .parallel_model import ParallelModel


def parallelize(
    config: ModelConfig,
    layout: Layout,
    group,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    seed: int = 0,
    attention: str = "ring",
    precision: Precision = FULL,
    **expert_options,
) -> ParallelModel:
    """The GPT of this config and seed, spread over `group` as `layout` says, ready to train, on the
    device of the group.

    attention: how a cut sequence attends, "ring", "all_gather" or "ulysses". expert_options: those
    of ExpertParallel (capacity_factor, balance_loss, z_loss).
    Raises ValueError in one sentence for a layout that cannot work, with the nearest that does.
    """
    check_fits(config, layout, group, precision)
    mesh = Mesh(group, **layout.axes, ep=layout.ep, etp=layout.etp)
    schedule = schedule_of(layout)
    mine = schedule.stages_of[mesh.index("pp")]

    # cp cuts the sequence: attention asks the other ranks for keys and values, and every token
    # here is told its position in the whole sequence.
    sequence = {}
    if layout.cp > 1:
        sequence["attention"] = make_attention(mesh["cp"], attention)
        sequence["positions"] = positions_here(config.seq_len, mesh["cp"])

    # pp cuts the layers.
    device = device_of(group)
    stages = cut_gpt(config, mine, schedule.num_stages, seed=seed, device=device, **sequence)

    for stage in stages.values():
        # tp cuts every matrix (etp those of experts), and with sequence parallelism what it would
        # leave whole.
        if layout.tp > 1:
            pair = SEQUENCE_AGAIN if layout.sequence_parallel else TENSOR
            shard_model(stage, plan(mesh["etp"]), mesh["tp"], pair=pair)

        # ep spreads the experts.
        if any(isinstance(module, MoE) for module in stage.modules()):
            cutting_tokens = ("dp", "cp", "tp") if layout.sequence_parallel else ("dp", "cp")
            shard_experts(
                stage,
                mesh["ep"],
                balance_group=mesh[cutting_tokens],
                # Gradients are averaged over dp*cp and added up over tp, and ep can span both.
                averaged_over=layout.ep * layout.etp / layout.tp,
                **expert_options,
            )

        recompute_blocks(stage, layout.recompute, layout.recompute_every)

    # tp has given both ends of a tied embedding pieces of their own; they are one parameter.
    tie_ends(stages, schedule.num_stages)

    # dp cuts the batch. To a gradient it is all the same whether other tokens come from other rows
    # or from another part of the sequence, so gradients are averaged over dp and cp together.
    parts, optimizer = average_gradients(stages, layout, mesh, make_optimizer)
    return ParallelModel(config, layout, mesh, schedule, stages, parts, optimizer, precision)


def schedule_of(layout: Layout) -> Schedule:
    options = {"chunks": layout.num_chunks} if layout.schedule == "interleaved" else {}
    return build(layout.schedule, layout.pp, layout.num_micro_batches, **options)
