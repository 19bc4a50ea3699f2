"""`parallelize` applies the strategies, in the only order in which they work together.

Each strategy changes the modules that it is given and knows nothing of the others. Two other files
of this folder hold what they must agree on: over which ranks a gradient is averaged (averaging.py)
and how often each element counts in the norm (norm.py).
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
    """Build the GPT of this config and seed, sharded over `group` by `layout`, on the group's
    device, ready to train.

    attention: "ring", "all_gather" or "ulysses", used if cp > 1. expert_options: options for
    ExpertParallel (capacity_factor, balance_loss, z_loss).
    Raises ValueError for a layout that cannot work, and names the nearest one that does.
    """
    check_fits(config, layout, group, precision)
    mesh = Mesh(group, **layout.axes, ep=layout.ep, etp=layout.etp)
    schedule = schedule_of(layout)
    mine = schedule.stages_of[mesh.index("pp")]

    # cp shards the sequence: attention gets keys and values from the other ranks, and every token
    # of this rank needs its position in the whole sequence.
    sequence = {}
    if layout.cp > 1:
        sequence["attention"] = make_attention(mesh["cp"], attention)
        sequence["positions"] = positions_here(config.seq_len, mesh["cp"])

    # pp splits the layers into stages.
    device = device_of(group)
    stages = cut_gpt(config, mine, schedule.num_stages, seed=seed, device=device, **sequence)

    for stage in stages.values():
        # tp shards every matrix (etp the experts' matrices). With sequence parallelism it also
        # shards the activations that it would otherwise replicate.
        if layout.tp > 1:
            pair = SEQUENCE_AGAIN if layout.sequence_parallel else TENSOR
            shard_model(stage, plan(mesh["etp"]), mesh["tp"], pair=pair)

        # ep distributes the experts.
        if any(isinstance(module, MoE) for module in stage.modules()):
            cutting_tokens = ("dp", "cp", "tp") if layout.sequence_parallel else ("dp", "cp")
            shard_experts(
                stage,
                mesh["ep"],
                balance_group=mesh[cutting_tokens],
                # Gradients are averaged over dp*cp and summed over tp, and ep can span both.
                averaged_over=layout.ep * layout.etp / layout.tp,
                **expert_options,
            )

        recompute_blocks(stage, layout.recompute, layout.recompute_every)

    # tp gave each end of a tied embedding its own shards; they are one parameter.
    tie_ends(stages, schedule.num_stages)

    # dp splits the batch. A gradient is a mean over tokens, and it does not matter whether they
    # come from other rows or other parts of the sequence: so average over dp and cp together.
    parts, optimizer = average_gradients(stages, layout, mesh, make_optimizer)
    return ParallelModel(config, layout, mesh, schedule, stages, parts, optimizer, precision)


def schedule_of(layout: Layout) -> Schedule:
    options = {"chunks": layout.num_chunks} if layout.schedule == "interleaved" else {}
    return build(layout.schedule, layout.pp, layout.num_micro_batches, **options)
