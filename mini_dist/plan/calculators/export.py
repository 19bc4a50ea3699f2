"""A layout in the terms of the frameworks that would run it."""

from __future__ import annotations

import json

from ..config import Layout, ModelConfig
from ..fields import checks_kinds
from ..schedule.sizes import round_size

TORCH_SCHEDULES = {  # of those that torch.distributed.pipelining has, its names
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


def megatron_arguments(config: ModelConfig, layout: Layout) -> list[str]:
    """Return the arguments of Megatron-LM's pretrain_gpt.py for the model and the layout.

    They exclude the tokenizer with its vocabulary, the base of rotary positions, the learning
    rate and the data.
    Raises ValueError for anything that Megatron-LM has no argument for.
    """
    layout.check(config)
    if config.positions == "alibi" or config.embedding_norm:
        what = "positions='alibi'" if config.positions == "alibi" else "embedding_norm=True"
        raise ValueError(
            f"{what} is not one of Megatron-LM's arguments, only of its BigScience fork: give "
            "'rotary' or 'learned' positions, and no norm after the embedding."
        )
    for field in (
        "norms_a_layer",
        "qk_norm_whole",
        "attention_sinks",
        "router_bias",
        "shared_gate",
    ):
        if getattr(config, field) != (usual := getattr(ModelConfig, field)):
            raise ValueError(
                f"{field}={getattr(config, field)!r} is said to Megatron-LM by a model's own spec, "
                f"not by arguments: only {usual!r} is exported."
            )
    if config.windowed_layers:
        raise ValueError(
            f"windowed_layers={config.windowed_layers} does not say which layers these are: give 0 "
            "and window=0, and add --window-size and --window-attn-skip-freq by hand."
        )
    if layout.schedule not in ("1f1b", "interleaved") and layout.pp > 1:
        raise ValueError(
            f"schedule={layout.schedule!r} is not one of Megatron-LM's: give "
            "'1f1b' or 'interleaved'."
        )
    _check_interleaving(layout)
    if layout.schedule == "interleaved" and layout.pp > layout.num_micro_batches:
        raise ValueError(
            f"num_micro_batches={layout.num_micro_batches} is less than pp={layout.pp}, and "
            f"Megatron-LM's interleaving has groups of at least pp: give {layout.pp} or more."
        )
    if layout.recompute == "selective" and layout.recompute_every > 1:
        raise ValueError(
            f"recompute_every={layout.recompute_every} is not what Megatron-LM's selective "
            "recompute does, which has every layer: give 1, or recompute='full'."
        )
    if layout.zero > 1:
        raise ValueError(
            f"zero={layout.zero} is not what Megatron-LM's distributed optimizer "
            "does: give 1, or export to DeepSpeed or torchtitan."
        )
    shorter = ends_are_shorter(config, layout)
    arguments = {
        "num-layers": config.num_layers,
        "hidden-size": config.d_model,
        "ffn-hidden-size": config.d_ffn,
        "num-attention-heads": config.num_heads,
        "kv-channels": config.head_dim,
        "seq-length": config.seq_len,
        "max-position-embeddings": config.seq_len,
        "attention-dropout": config.dropout,  # 0.1 if not given
        "hidden-dropout": config.dropout,
        "micro-batch-size": layout.micro_batch_size,
        "global-batch-size": layout.global_batch_size,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "bf16": True,
    }
    if layout.num_chunks > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = layers_per_stage(config, layout)
        group = round_size(layout.pp, layout.num_micro_batches)
        if group != layout.pp:  # Megatron-LM takes groups of pp if not given
            arguments["microbatch-group-size-per-virtual-pipeline-stage"] = group
    arguments["account-for-embedding-in-pipeline-split"] = shorter
    arguments["account-for-loss-in-pipeline-split"] = shorter
    arguments["sequence-parallel"] = layout.sequence_parallel
    if layout.zero == 1:  # the planner assumes that gradients and parameters overlap
        sharded = ("use-distributed-optimizer", "overlap-grad-reduce", "overlap-param-gather")
        arguments |= dict.fromkeys(sharded, True)
    if layout.recompute == "full":
        # Which layers save only their input: all of them, or this many per stage.
        every = layout.recompute_every
        of_stage = -(-config.num_layers // layout.num_stages)
        arguments |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform" if every == 1 else "block",
            "recompute-num-layers": 1 if every == 1 else layout.num_recomputed(of_stage),
        }
    elif layout.recompute == "selective":
        arguments["recompute-granularity"] = "selective"
    if config.num_kv_heads < config.num_heads:
        arguments |= {"group-query-attention": True, "num-query-groups": config.num_kv_heads}
    arguments |= {
        "swiglu": config.activation == "swiglu",
        "disable-bias-linear": not config.bias,
        "add-qkv-bias": config.qkv_bias and not config.bias,
        "qk-layernorm": config.qk_norm,
        "untie-embeddings-and-output-weights": not config.tied_embedding,
        "normalization": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm",
        "position-embedding-type": {"rotary": "rope", "learned": "learned_absolute"}[
            config.positions
        ],
    }
    if config.num_experts:
        arguments |= {
            "num-experts": config.num_experts,
            "moe-router-topk": config.top_k,
            "moe-ffn-hidden-size": config.d_expert,
            "expert-model-parallel-size": layout.ep,
            **({"expert-tensor-parallel-size": layout.etp} if layout.etp != layout.tp else {}),
            "moe-token-dispatcher-type": "alltoall",  # otherwise each rank gathers all tokens
            "moe-grouped-gemm": True,
        }
        if config.first_dense_layers:
            dense = config.first_dense_layers
            arguments["moe-layer-freq"] = f"([0]*{dense}+[1]*{config.num_layers - dense})"
        if config.num_shared_experts:
            arguments["moe-shared-expert-intermediate-size"] = config.d_shared
        if config.router == "sigmoid":
            arguments |= {
                "moe-router-score-function": "sigmoid",
                "moe-router-enable-expert-bias": True,
            }
    if config.is_mla:
        arguments |= {
            "multi-latent-attention": True,
            "kv-lora-rank": config.kv_lora_rank,
            "qk-head-dim": config.head_dim,
            "qk-pos-emb-head-dim": config.rope_head_dim,
            "v-head-dim": config.v_head_dim,
        }
        if config.q_lora_rank:
            arguments["q-lora-rank"] = config.q_lora_rank
    words = []
    for name, value in arguments.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", str(value)]
    return words


def _check_interleaving(layout: Layout) -> None:
    if layout.schedule == "interleaved" and layout.pp > 1 and layout.num_chunks == 1:
        raise ValueError(
            "schedule='interleaved' with num_chunks=1 has one stage on each rank, which frameworks "
            "run as 1F1B: give schedule='1f1b', or num_chunks=2."
        )


def ends_are_shorter(config: ModelConfig, layout: Layout) -> bool:
    """Return whether embedding and head count as a layer each, so that the stages are even.

    False if the layers alone are even. Raises ValueError if neither is possible.
    """
    if layout.pp == 1 or config.num_layers % layout.num_stages == 0:
        return False
    if (config.num_layers + 2) % layout.num_stages == 0:
        return True
    raise ValueError(
        f"pp*num_chunks={layout.num_stages} does not divide num_layers={config.num_layers}, nor "
        f"{config.num_layers + 2} with the embedding and the head: the stages would be uneven."
    )


def layers_per_stage(config: ModelConfig, layout: Layout) -> int:
    """Return the layers per stage, including the embedding and the head if they count as layers."""
    return (config.num_layers + 2 * ends_are_shorter(config, layout)) // layout.num_stages


def deepspeed_json(layout: Layout) -> str:
    """Return a DeepSpeed config: its batch sizes and ZeRO stage.  tp and pp are set elsewhere.

    Gradients are not clipped, because a Layout does not say so; without the key DeepSpeed 0.19
    clips at 1. Raises ValueError for ZeRO-2 and 3 in a pipeline, which DeepSpeed's pipeline engine
    refuses.
    """
    if layout.pp > 1 and layout.zero > 1:
        raise ValueError(
            f"zero={layout.zero} cannot be combined with pp={layout.pp} in DeepSpeed: give zero=1, "
            "or pp=1."
        )
    return json.dumps(
        {
            "train_batch_size": layout.global_batch_size,
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.num_micro_batches,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
        },
        indent=2,
    )


def torchtitan_config(config: ModelConfig, layout: Layout) -> str:
    """Return torchtitan's Trainer.Config, as Python (version 0.3.0): batch, axes and recomputation.

    The model, the data and clipping (max_norm, 1 by default) are other fields. "Sharded" means
    fully_shard. With zero=3 it gathers parameters for each forward, otherwise it keeps them until
    the step is over. Gradients are reduced in every micro-batch, as in ZeRO-2 and 3; in a pipeline
    once per step, as in ZeRO-1. Raises ValueError for anything that torchtitan would do
    differently.
    """
    layout.check(config)
    if layout.pp > 1 and layout.schedule not in TORCH_SCHEDULES:
        known = ", ".join(map(repr, TORCH_SCHEDULES))
        raise ValueError(f"schedule={layout.schedule!r} is not one of torchtitan's: give {known}.")
    _check_interleaving(layout)
    if layout.cp > 1 and not layout.zero:
        raise ValueError(
            f"zero=0 with cp={layout.cp} is not what torchtitan does, which shards parameters over "
            "cp in any case: give zero=2 or 3 (in a pipeline 1 or 3)."
        )
    if layout.recompute == "selective":
        raise ValueError(
            "recompute='selective' is the core of attention; torchtitan's SelectiveAC chooses "
            "other operations: give 'none' or 'full'."
        )
    if layout.recompute_every > 1:
        raise ValueError(
            f"recompute_every={layout.recompute_every} is not what torchtitan's FullAC does, which "
            "has every layer: give 1."
        )
    if config.num_experts and (layout.etp > 1 or layout.ep == 1 < layout.tp):
        raise ValueError(
            f"ep={layout.ep}, etp={layout.etp}: torchtitan's expert_parallel_degree spreads whole "
            "experts over the tp ranks, too: give etp=1 and ep of 2 or more, or tp=1."
        )
    # A pipeline cuts its local batch into micro-batches; without one they are accumulated.
    local = layout.micro_batch_size * (layout.num_micro_batches if layout.pp > 1 else 1)
    training = {
        "local_batch_size": local,
        "global_batch_size": layout.global_batch_size,
        "seq_len": config.seq_len,
    }
    if layout.pp > 1:
        training["disable_cuda_graphs"] = True  # otherwise Trainer.Config refuses a pipeline
    sharded = layout.zero > 0
    parallelism = {
        "data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "data_parallel_shard_degree": layout.dp if sharded else 1,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.tp > 1:
        parallelism["enable_sequence_parallel"] = layout.sequence_parallel
    if layout.pp > 1:
        shorter = int(ends_are_shorter(config, layout))
        parallelism |= {
            "pipeline_parallel_schedule": TORCH_SCHEDULES[layout.schedule],
            "pipeline_parallel_microbatch_size": layout.micro_batch_size,
            "pipeline_parallel_layers_per_stage": layers_per_stage(config, layout),
            "pipeline_parallel_first_stage_less_layers": shorter,
            "pipeline_parallel_last_stage_less_layers": shorter,
        }
    if config.num_experts:
        parallelism["expert_parallel_degree"] = layout.ep
    recompute = "FullAC.Config()" if layout.recompute == "full" else "None"
    return (
        "Trainer.Config(\n"
        f"    training=TrainingConfig({_keywords(training)}),\n"
        f"    parallelism=ParallelismConfig({_keywords(parallelism)}),\n"
        f"    activation_checkpoint={recompute},\n"
        ")\n"
    )


def _keywords(fields: dict) -> str:
    """Write one keyword argument per line, two levels deep."""
    lines = "".join(f"        {name}={value!r},\n" for name, value in fields.items())
    return f"\n{lines}    "


@checks_kinds
def torchrun_line(layout: Layout, devices_per_node: int, script: str = "train.py") -> str:
    """Return each node's command; HEAD is the first node's address, JOB a name that all nodes
    share."""
    if layout.world_size <= devices_per_node:
        return f"torchrun --standalone --nproc-per-node={layout.world_size} {script}"
    if layout.world_size % devices_per_node:
        raise ValueError(
            f"devices_per_node={devices_per_node} does not divide world_size="
            f"{layout.world_size}: torchrun starts as many on each node."
        )
    return (
        f"torchrun --nnodes={layout.world_size // devices_per_node} "
        f"--nproc-per-node={devices_per_node} "
        f"--rdzv-backend=c10d --rdzv-id=$JOB --rdzv-endpoint=$HEAD:29500 {script}"
    )


def layout_source(layout: Layout) -> str:
    """Return the Layout as Python code for this course: only what differs from the defaults."""
    default = vars(Layout()) | {"etp": layout.tp}
    changed = {name: value for name, value in vars(layout).items() if value != default[name]}
    return f"Layout({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
