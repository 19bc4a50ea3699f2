"""A layout in the words of the frameworks that would run it."""

from __future__ import annotations

import json

from ..config import Layout, ModelConfig

_SCHEDULES = {  # ours: Megatron-LM has 1F1B and interleaved; torch.distributed.pipelining's names
    "naive": None,
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb_h1": None,
    "zb_h2": None,
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}


def megatron_arguments(config: ModelConfig, layout: Layout) -> list[str]:
    """The arguments of Megatron-LM's pretrain_gpt.py that say the model and the layout.

    Raises ValueError for what Megatron-LM has no argument for.
    """
    layout.check(config)
    if layout.schedule not in ("1f1b", "interleaved") and layout.pp > 1:
        raise ValueError(
            f"schedule={layout.schedule!r} is not one of Megatron-LM's: give "
            "'1f1b' or 'interleaved'."
        )
    if layout.zero > 1:
        raise ValueError(
            f"zero={layout.zero} is not what Megatron-LM's distributed optimizer "
            "does: give 1, or export to DeepSpeed or torchtitan."
        )
    if layout.pp > 1 and config.num_layers % layout.num_stages:
        raise ValueError(
            f"pp*num_chunks={layout.num_stages} does not divide num_layers="
            f"{config.num_layers}, as Megatron-LM's arguments ask."
        )
    arguments = {
        "num-layers": config.num_layers,
        "hidden-size": config.d_model,
        "ffn-hidden-size": config.d_ffn,
        "num-attention-heads": config.num_heads,
        "kv-channels": config.head_dim,
        "seq-length": config.seq_len,
        "max-position-embeddings": config.seq_len,
        "micro-batch-size": layout.micro_batch_size,
        "global-batch-size": layout.global_batch_size,
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
        "bf16": True,
    }
    if layout.num_chunks > 1:
        arguments["num-layers-per-virtual-pipeline-stage"] = config.num_layers // layout.num_stages
    arguments["sequence-parallel"] = layout.sequence_parallel
    arguments["use-distributed-optimizer"] = layout.zero == 1
    if layout.recompute == "full":
        arguments |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    elif layout.recompute == "selective":
        arguments["recompute-granularity"] = "selective"
    if config.num_kv_heads < config.num_heads:
        arguments |= {"group-query-attention": True, "num-query-groups": config.num_kv_heads}
    arguments |= {
        "swiglu": config.activation == "swiglu",
        "disable-bias-linear": not config.bias,
        "untie-embeddings-and-output-weights": not config.tied_embedding,
        "normalization": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm",
        "position-embedding-type": {
            "rotary": "rope",
            "learned": "learned_absolute",
            "alibi": "alibi",
        }[config.positions],
    }
    if config.num_experts:
        arguments |= {
            "num-experts": config.num_experts,
            "moe-router-topk": config.top_k,
            "moe-ffn-hidden-size": config.d_expert,
            "expert-model-parallel-size": layout.ep,
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


def deepspeed_json(layout: Layout) -> str:
    """A DeepSpeed config: its batch sizes and ZeRO stage.  tp and pp are set outside of it."""
    return json.dumps(
        {
            "train_batch_size": layout.global_batch_size,
            "train_micro_batch_size_per_gpu": layout.micro_batch_size,
            "gradient_accumulation_steps": layout.num_micro_batches,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": layout.zero, "overlap_comm": True},
        },
        indent=2,
    )


def torchtitan_toml(config: ModelConfig, layout: Layout) -> str:
    """torchtitan's job config: parallelism, batch and recompute.  The model is its `flavor`.

    Raises ValueError for a schedule that torch.distributed.pipelining does not have.
    """
    layout.check(config)
    if layout.pp > 1 and _SCHEDULES[layout.schedule] is None:
        known = ", ".join(repr(name) for name, theirs in _SCHEDULES.items() if theirs)
        raise ValueError(f"schedule={layout.schedule!r} is not one of torchtitan's: give {known}.")
    sharded = layout.zero > 0  # fully_shard: ZeRO-3, or 2 when it does not reshard after forward
    parallelism = {
        "data_parallel_replicate_degree": 1 if sharded else layout.dp,
        "data_parallel_shard_degree": layout.dp if sharded else 1,
        "fsdp_reshard_after_forward": '"always"' if layout.zero == 3 else '"never"',
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if layout.pp > 1:
        parallelism["pipeline_parallel_schedule"] = f'"{_SCHEDULES[layout.schedule]}"'
        parallelism["pipeline_parallel_microbatch_size"] = layout.micro_batch_size
    if config.num_experts:
        parallelism["expert_parallel_degree"] = layout.ep
    # A pipeline cuts its local batch into micro-batches; without one they are accumulated.
    local = layout.micro_batch_size * (layout.num_micro_batches if layout.pp > 1 else 1)
    sections = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": layout.global_batch_size,
            "seq_len": config.seq_len,
        },
        "parallelism": parallelism,
        "activation_checkpoint": {"mode": f'"{layout.recompute}"'},
    }
    return (
        "\n\n".join(
            f"[{name}]\n" + "\n".join(f"{key} = {value}" for key, value in body.items())
            for name, body in sections.items()
        )
        + "\n"
    )


def torchrun_line(layout: Layout, devices_per_node: int, script: str = "train.py") -> str:
    """What each node runs; RANK and HEAD are the node's number and the first node's address."""
    if layout.world_size <= devices_per_node:
        return f"torchrun --standalone --nproc-per-node={layout.world_size} {script}"
    if layout.world_size % devices_per_node:
        raise ValueError(
            f"devices_per_node={devices_per_node} does not divide world_size="
            f"{layout.world_size}: torchrun starts as many on each node."
        )
    return (
        f"torchrun --nnodes={layout.world_size // devices_per_node} "
        f"--nproc-per-node={devices_per_node} --node-rank=$RANK "
        f"--rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 {script}"
    )


def layout_source(layout: Layout) -> str:
    """The Layout as Python, for this course: only what differs from the defaults."""
    default = Layout()
    changed = {
        name: value for name, value in vars(layout).items() if value != getattr(default, name)
    }
    return f"Layout({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
