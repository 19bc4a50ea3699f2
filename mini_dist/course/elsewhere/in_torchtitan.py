"""The run in torchtitan 0.2: its Llama 3, cut by its own `parallelize_llama`, TP x FSDP."""

from __future__ import annotations

import logging

import torch

from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators import model as preset
from mini_dist.plan.calculators import torchtitan_config
from mini_dist.plan.config import Layout

from .kept import kept
from .run import BATCH, CONFIG, adamw, measure, name_axes


def grid(tp, batches, group):
    logging.disable(logging.WARNING)
    torch._utils._get_available_device_type = lambda: "cpu"  # it asks for CUDA's name without one
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    job = JobConfig()
    job.training.seq_len = CONFIG.seq_len
    job.training.mixed_precision_param = "float32"  # bfloat16 where nothing is said (job_config.py)
    job.activation_checkpoint.mode = "none"  # "selective" where nothing is said
    job.parallelism.disable_loss_parallel = True  # its loss is our own, of whole logits
    dims = ParallelDims(
        dp_replicate=1,
        dp_shard=4 // tp,
        cp=1,
        tp=tp,
        pp=1,
        ep=1,
        etp=1,
        world_size=4,
    )
    dims.build_mesh()
    cut = [axis for axis, size in (("tp", tp), ("fsdp", 4 // tp)) if size > 1]
    name_axes(group, **{axis: dims.get_mesh(axis).get_group() for axis in cut})
    model = llama()
    parallelize_llama(model, dims, job)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    optimizer = adamw(model.parameters())
    losses = []
    for inputs, targets in batches(group.rank() // tp, 4 // tp):
        # gradients are added up over the ranks, not averaged (infra/parallelize.py,
        # disable_fsdp_gradient_division): the loss divides by the tokens of all
        loss = token_loss(model(inputs), targets).total / (BATCH * CONFIG.seq_len)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * (4 // tp))
    return losses


def llama():
    """torchtitan's Llama 3 with the weights of our GPT."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    args = TransformerModelArgs(
        dim=CONFIG.d_model,
        n_layers=CONFIG.num_layers,
        n_heads=CONFIG.num_heads,
        vocab_size=CONFIG.vocab_size,
        multiple_of=64,  # of the size of its ffn, 8/3 dim rounded up
        max_seq_len=CONFIG.seq_len,
        # Llama 3.1 turns slow pairs 8 times slower, torchtitan all of its Llamas (model/args.py)
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
    )
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()  # makes the table of rotary positions
    model.load_state_dict(titan_weights(GPT(CONFIG)), strict=False)
    return model


def titan_weights(gpt):
    """Our weights under torchtitan's names."""
    weights = {
        "tok_embeddings.weight": gpt.embed.token.weight,
        "norm.weight": gpt.head.norm.weight,
        "output.weight": gpt.head.out.weight,
    }
    for number, block in enumerate(gpt.blocks):
        layer = f"layers.{number}."
        weights |= {
            layer + "attention_norm.weight": block.attn_norm.weight,
            layer + "attention.wq.weight": neighbours(block.attn.q.weight),
            layer + "attention.wk.weight": neighbours(block.attn.k.weight),
            layer + "attention.wv.weight": block.attn.v.weight,
            layer + "attention.wo.weight": block.attn.o.weight,
            layer + "ffn_norm.weight": block.ffn_norm.weight,
            layer + "feed_forward.w1.weight": block.ffn.gate.weight,
            layer + "feed_forward.w2.weight": block.ffn.down.weight,
            layer + "feed_forward.w3.weight": block.ffn.up.weight,
        }
    return weights


def neighbours(weight):
    """Rows of q or k for positions that turn neighbours (model/model.py, apply_rotary_emb), where
    ours turn number i of a head's first half with number i of its second."""
    halves = weight.unflatten(0, (CONFIG.num_heads, 2, -1))  # [N, 2, H/2, D]
    return halves.transpose(1, 2).flatten(0, 2)


@kept("torchtitan", "triton")  # its experts' kernels want triton, even where none runs
def grids() -> list[dict]:
    return measure(
        {
            "fsdp 4": (grid, 1),
            "tp 4": (grid, 4),
            "tp 2 x fsdp 2": (grid, 2),
        }
    )


def exported() -> dict[str, str]:
    """Layouts in the words of calculators.torchtitan_config, by name."""
    layouts = {
        "dp=16, zero=3": Layout(dp=16, zero=3, num_micro_batches=4, recompute="full"),
        "dp=2, tp=8": Layout(dp=2, tp=8, zero=2, sequence_parallel=True),
        "pp=4, dp=2, tp=2": Layout(pp=4, dp=2, tp=2, zero=1, num_micro_batches=8),
    }
    return {name: torchtitan_config(preset("llama3-8b"), each) for name, each in layouts.items()}


# of version 0.3, where a config is Python; the other functions here are for 0.2
@kept("torchtitan.trainer", how="`make torchtitan` builds an environment with its version 0.3")
def exports() -> dict[str, dict]:
    """What was exported, and what its Trainer.Config has of it, by name."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.trainer import Trainer

    names = dict(ParallelismConfig=ParallelismConfig, TrainingConfig=TrainingConfig)
    names |= dict(FullAC=FullAC, Trainer=Trainer)
    found = {}
    for name, source in exported().items():
        config = eval(source, names)
        cuts = config.parallelism
        understood = {
            "global": config.training.global_batch_size,
            "shard": cuts.data_parallel_shard_degree,
            "tp": cuts.tensor_parallel_degree,
            "pp": cuts.pipeline_parallel_degree,
            "reshard": cuts.fsdp_reshard_after_forward,
            "recompute": type(config.activation_checkpoint).__qualname__,
        }
        found[name] = {"source": source, "understood": understood}
    return found
