"""DeepSpeed's ds_config.json as a Layout (0.19: runtime/config.py, runtime/zero/config.py)."""

from __future__ import annotations

import json
from pathlib import Path

from ..config import Layout
from ..fields import checks_kinds
from .importing import Batch, Imported, check_keys, choice, flag, integer, replicas, section

BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# What no file says, because DeepSpeed takes it from the calling program.
IN_THE_PROGRAM = (
    *("pp", "tp", "cp", "ep", "etp", "sequence_parallel", "recompute", "recompute_every"),
    *("schedule", "num_chunks"),
)
# Top-level keys other than batch and axes. DeepSpeed ignores a key that it does not know; here
# that is an error, because it is almost always a typo.
OTHER_KEYS = (
    *("optimizer", "scheduler", "bf16", "fp16", "amp", "torch_autocast", "data_types"),
    *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping"),
    *("sparse_gradients", "steps_per_print", "wall_clock_breakdown", "memory_breakdown"),
    *("dump_state", "flops_profiler", "activation_checkpointing", "tensorboard", "wandb"),
    *("csv_monitor", "comet", "monitor_config", "comms_logger", "checkpoint", "aio"),
    *("hybrid_engine", "pipeline", "data_efficiency", "autotuning", "weight_quantization"),
    *("compression_training", "compile", "timers", "nebula", "datastates_ckpt", "log_level"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "vocabulary_size"),
    *("dataloader_drop_last", "disable_allgather", "disable_python_gc", "local_rank"),
    *("managed_gradient_accumulation", "use_data_before_expert_parallelism"),
    *("bfloat16", "sparse_attention", "progressive_layer_drop", "eigenvalue", "elasticity"),
)
ZERO_KEYS = (  # of DeepSpeedZeroConfig, which refuses any other
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
    *("use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size"),
    *("overlap_comm", "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint"),
    *("offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param"),
    *("cpu_offload_use_pin_memory", "cpu_offload", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    *("stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters", "legacy_stage1"),
    *("round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
    "zero_quantized_gradients",
    *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply"),
    *("log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory"),
    "leaf_module",
)
# The config class also takes these by the name of their field, without "stage3_".
ZERO_FIELD_NAMES = (
    *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
    *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
    *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
)
ZERO_KEYS_ELSEWHERE = (  # of versions before or after 0.19
    *("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"),
    "stage3_partition_stream_chunk_size",
)


@checks_kinds
def from_deepspeed(
    source: str | Path | dict, world_size: int | None = None, **program: object
) -> Imported:
    """Read the layout of a ds_config.json: its text, its path, or the dict.

    The file contains neither the ranks nor, usually, the other axes: give world_size (unless the
    file has all three batch sizes) and what the program sets, such as pp=2, tp=2.  "auto", which
    Hugging Face's Trainer fills in, counts as not given.
    Raises ValueError for a contradiction, an unknown key or a wrong type, in one sentence.
    """
    config = _read(source)
    for name in program:
        if name not in IN_THE_PROGRAM:
            raise ValueError(
                f"{name}={program[name]!r} is not what a program sets beside ds_config.json: give "
                f"some of {', '.join(IN_THE_PROGRAM)}."
            )
    own = ("zero_optimization", "tensor_parallel", "sequence_parallel_size", "expert_parallel")
    check_keys(config, (*BATCH, *own, *OTHER_KEYS), "DeepSpeed's config")
    cannot_say: list[str] = []
    outside = Layout(**{**program, "ep": 1, "etp": None})  # these are checked with dp, below
    tp, cp = outside.tp, outside.cp
    if "tensor_parallel" in config:
        group = section("tensor_parallel", config["tensor_parallel"])
        tp = _same("tensor_parallel.autotp_size", group.get("autotp_size", tp), "tp", tp)
    if "sequence_parallel_size" in config:
        cp = _same("sequence_parallel_size", config["sequence_parallel_size"], "cp", cp)
    if cp > 1:
        cannot_say.append(
            f"cp={cp} is a ring here, and Ulysses in DeepSpeed: all-to-alls that exchange heads for"
            " tokens, which send other bytes."
        )
    if "expert_parallel" in config:
        cannot_say.append(
            "expert_parallel is read by the program's MoE layers: give ep=..., which divides dp."
        )
    elasticity = section("elasticity", config.get("elasticity", {}))
    if flag("elasticity.enabled", elasticity.get("enabled", False)):
        raise ValueError(
            "elasticity.enabled=True lets DeepSpeed choose the batch sizes (before 0.19, which has "
            f"removed it): give {BATCH[0]} and {BATCH[1]}, and enabled=false."
        )
    zero = _zero(config, cannot_say)
    if "gradient_clipping" not in config:
        cannot_say.append(
            "gradient_clipping is missing: that clips at 1.0 since DeepSpeed PR 8068 (June 2026) "
            "and did not clip before; 0.0 turns it off in every version."
        )
    if zero > 1 and outside.pp > 1:
        raise ValueError(
            f"zero_optimization.stage={zero} cannot be combined with pp={outside.pp}: DeepSpeed's "
            "pipeline refuses stages 2 and 3 (runtime/pipe/engine.py); give stage=1, or pp=1."
        )
    said = [None if config.get(name) == "auto" else config.get(name) for name in BATCH]
    sizes = (None if value is None else integer(name, value) for name, value in zip(BATCH, said))
    batch, dp = Batch(*sizes, BATCH), None
    if world_size is not None:
        dp = replicas(integer("world_size", world_size), {"pp": outside.pp, "tp": tp, "cp": cp})
    dp, micro, accumulated = batch.solve(dp)
    layout = outside.replace(
        dp=dp,
        cp=cp,
        tp=tp,
        ep=program.get("ep", 1),
        etp=program.get("etp"),
        zero=zero,
        micro_batch_size=micro,
        num_micro_batches=accumulated,
    )
    passed_over = tuple(key for key in config if key in OTHER_KEYS)
    return Imported(layout, tuple(cannot_say), passed_over)


def _zero(config: dict, cannot_say: list[str]) -> int:
    if "zero_optimization" not in config:
        return 0
    zero = config["zero_optimization"]
    if isinstance(zero, bool):  # an old form that DeepSpeed still reads
        return int(zero)
    zero = section("zero_optimization", zero)
    check_keys(zero, (*ZERO_KEYS, *ZERO_FIELD_NAMES, *ZERO_KEYS_ELSEWHERE), "zero_optimization")
    stage = integer("zero_optimization.stage", zero.get("stage", 0), at_least=0)
    if stage > 3:
        raise ValueError(f"zero_optimization.stage={stage} is not known: give 0, 1, 2 or 3.")
    for old, key in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.get(old) is None or zero.get(key) is not None:
            continue
        if flag(f"zero_optimization.{old}", zero[old]):  # the older word, which is still read
            zero = {**zero, key: {"device": "cpu"}}
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key) is None:
            continue
        name = f"zero_optimization.{key}.device"
        device = choice(
            name,
            section(f"zero_optimization.{key}", zero[key]).get("device", "none"),
            ("none", "cpu", "nvme"),
        )
        if device != "none":
            ours = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
            cannot_say.append(
                f"{name}={device!r} is the Framework's, not the Layout's: give "
                f"framework(...).replace({ours[key]}=True)."
            )
    name = "zero_hpz_partition_size"
    if (ways := integer(name, zero.get(name, 1))) > 1:
        cannot_say.append(
            f"{name}={ways} keeps a second shard of the parameters in each node (ZeRO++), and a "
            "Layout shards once, over dp * cp."
        )
    name = "mics_shard_size"
    if (ways := integer(name, zero.get(name, -1), -1)) > 1:
        cannot_say.append(
            f"{name}={ways} shards inside groups of {ways} ranks (MiCS), and a Layout shards over "
            "all of dp * cp."
        )
    codes = {
        "zero_quantized_weights": "Compression('int8')",
        "zero_quantized_gradients": "Compression('int8', gradient_bits=4, by_hosts=True)",
    }
    for name, ours in codes.items():
        if flag(name, zero.get(name, False)):
            cannot_say.append(f"{name} (ZeRO++) is {ours} of a step's time.")
    return stage


def _same(name: str, value: object, field: str, given: int) -> int:
    """Return the file's size of an axis; ValueError if the caller gave another."""
    value = integer(name, value)
    if given not in (1, value):
        raise ValueError(f"{name}={value} is not {field}={given}: give {field}={value}, or none.")
    return value


def _read(source: str | Path | dict) -> dict:
    if isinstance(source, dict):
        return source
    text, name = source, "the config"
    if isinstance(source, Path) or (
        isinstance(source, str) and not source.lstrip().startswith(("{", "["))
    ):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"{str(source)!r} is no file: give a path, its text, or a dict.")
        text, name = path.read_text(), str(path)
    if not isinstance(text, str):
        raise ValueError(f"{source!r} is no config: give a path, its text, or a dict.")
    try:
        return section(name, json.loads(text, object_pairs_hook=_each_key_once))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}.") from None


def _each_key_once(pairs: list[tuple]) -> dict:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key!r} is given {keys.count(key)} times: give it once.")
    return dict(pairs)
