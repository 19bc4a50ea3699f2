"""torchtitan's config as a Layout: TOML (0.2: config/job_config.py) or its Python form (0.3)."""

from __future__ import annotations

import math
from pathlib import Path

from ..config import Layout
from ..fields import checks_kinds, nearest_divisor
from ..schedule import V_SHAPED
from .export import TORCH_SCHEDULES
from .importing import Batch, Imported, alike, check_keys, choice, flag, integer, replicas, section
from .python_config import sections_of_python

TRAINING = (
    *("dataset", "dataset_path", "local_batch_size", "global_batch_size", "seq_len", "max_norm"),
    *("steps", "enable_cpu_offload", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
    *("gc_freq", "gc_debug", "dataloader"),
)
PARALLELISM = (
    *("data_parallel_replicate_degree", "data_parallel_shard_degree"),
    *("fsdp_reshard_after_forward", "tensor_parallel_degree", "disable_loss_parallel"),
    *("enable_async_tensor_parallel", "pipeline_parallel_degree", "module_fqns_per_model_part"),
    *("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"),
    *("pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule"),
    *("pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size"),
    *("pipeline_parallel_expert_parallel_overlap", "context_parallel_degree"),
    *("context_parallel_load_balancer", "context_parallel_rotate_method"),
    *("expert_parallel_degree", "expert_tensor_parallel_degree", "expert_parallel_comm_backend"),
)
RECOMPUTE = (
    *("mode", "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns"),
    *("early_stop", "memory_budget", "visualize_memory_budget_pareto", "preserve_rng_state"),
    *("determinism_check", "debug"),
)
SECTIONS = (
    *("job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "checkpoint", "compile"),
    *("quantize", "comm", "memory_estimation", "fault_tolerance", "experimental", "validation"),
    "debug",
)
# In the Python form: of 0.3, and of the main branch in November 2026, which counts in tokens.
TRAINING_SINCE_0_3 = (
    *("disable_cuda_graphs", "num_tokens_per_microbatch_per_dp_rank"),
    *("num_tokens_per_train_step", "max_context_length"),
)
PARALLELISM_SINCE_0_3 = (
    *("enable_sequence_parallel", "enable_fsdp_symm_mem", "spmd_backend"),
    *("context_parallel_ptrr_mask_key", "num_pp_microbatches"),
)
TOKENS = "num_tokens_per_microbatch_per_dp_rank"
OWN = ("training", "parallelism", "activation_checkpoint")
SLIP = 0.8  # above this similarity an unknown section is a misspelt known one
GONE = {  # names of older versions: (section, key) -> what it is now
    ("training", "batch_size"): "training.local_batch_size",
    ("training", "compile"): "compile.enable",
    ("training", "data_parallel_shard_degree"): "parallelism.data_parallel_shard_degree",
    ("training", "data_parallel_degree"): "parallelism.data_parallel_shard_degree",
    ("training", "tensor_parallel_degree"): "parallelism.tensor_parallel_degree",
}
OUR_SCHEDULES = {theirs.lower(): ours for ours, theirs in TORCH_SCHEDULES.items()}


@checks_kinds
def from_torchtitan(
    source: str | Path | dict, world_size: int | None = None, num_layers: int | None = None
) -> Imported:
    """Read the layout of a torchtitan config: TOML or Python (text or path), or the dict of
    sections.

    world_size is needed if data_parallel_shard_degree is -1, and num_layers if an interleaved
    schedule gives its layers per stage.
    Raises ValueError for a contradiction, an unknown key or a wrong type, in one sentence.
    """
    config, is_python = _read(source)
    for group, key in GONE:
        if key in section(group, config.get(group, {})):
            raise ValueError(
                f"{group}.{key} is no longer a key of torchtitan: give {GONE[group, key]}."
            )
    _check_sections(config)
    training = section("training", config.get("training", {}))
    cuts = section("parallelism", config.get("parallelism", {}))
    check_keys(training, TRAINING + TRAINING_SINCE_0_3 * is_python, "training")
    check_keys(cuts, PARALLELISM + PARALLELISM_SINCE_0_3 * is_python, "parallelism")

    cannot_say: list[str] = []
    tp, pp, cp = (_degree(cuts, f"{axis}_parallel") for axis in ("tensor", "pipeline", "context"))
    replicate = _degree(cuts, "data_parallel_replicate")
    shard = _shards(cuts, world_size, replicate, {"tp": tp, "pp": pp, "cp": cp})
    if replicate > 1 and shard * cp > 1:
        cannot_say.append(
            f"data_parallel_replicate_degree={replicate} with {shard * cp} shards is HSDP "
            f"(lesson 26): a Layout's ZeRO shards over all of dp * cp = {replicate * shard * cp}."
        )
    dp = replicate * shard
    micro, accumulated = _batch(training, cuts, dp, pp, cannot_say)
    schedule, chunks = _schedule(cuts, pp, num_layers)
    if flag("enable_cpu_offload", training.get("enable_cpu_offload", False)):
        cannot_say.append(
            "enable_cpu_offload is the Framework's, not the Layout's: give "
            "framework('torchtitan').replace(offload_optimizer=True, offload_parameters=True)."
        )
    name = "enable_async_tensor_parallel"
    if flag(name, cuts.get(name, False)):
        cannot_say.append(
            "enable_async_tensor_parallel is the Framework's: give "
            "framework('torchtitan').replace(overlaps_tensor=True)."
        )
    if cuts.get("module_fqns_per_model_part"):
        cannot_say.append("module_fqns_per_model_part cuts by hand, and a Layout cuts evenly.")
    ep = _degree(cuts, "expert_parallel")
    sequence = cuts.get("enable_sequence_parallel", True)  # 0.2 has no other
    etp = _cut_of_experts(cuts, ep, tp, dp * cp, sequence)
    layout = Layout(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep,
        etp=etp,
        sequence_parallel=flag("enable_sequence_parallel", sequence) and tp > 1,
        zero=_zero(cuts, shard * cp > 1, pp),
        micro_batch_size=micro,
        num_micro_batches=accumulated,
        schedule=schedule,
        num_chunks=chunks,
        **_recompute(config, cannot_say),
    )
    passed_over = tuple(key for key in config if key not in OWN)
    return Imported(layout, tuple(cannot_say), passed_over)


def _check_sections(config: dict) -> None:
    """Raise ValueError for a misspelt section, and for an axis or a batch size in the wrong place.

    A section unlike any other belongs to the program, and torchtitan accepts it.
    """
    for name, group in config.items():
        if name in OWN:
            continue
        near = alike(str(name), (*OWN, *SECTIONS), SLIP)
        if name not in SECTIONS and near:
            raise ValueError(f"{name!r} is not a key of torchtitan: give {near!r}.")
        keys = group if isinstance(group, dict) else ()
        for key in keys:
            home = "parallelism" if key in PARALLELISM else None
            if key in ("local_batch_size", "global_batch_size") and name != "validation":
                home = "training"
            if home:
                raise ValueError(
                    f"{name}.{key} is not read there by torchtitan: give {home}.{key}."
                )


def _degree(cuts: dict, axis: str) -> int:
    return integer(f"{axis}_degree", cuts.get(f"{axis}_degree", 1))


def _cut_of_experts(cuts: dict, ep: int, tp: int, replicas: int, sequence: bool) -> int:
    """Return etp: without ep torchtitan shards experts as tp does, whatever else is given."""
    name = "expert_tensor_parallel_degree"
    etp = _degree(cuts, "expert_tensor_parallel")  # 0.3 has it no more: whole experts
    if ep == 1:
        return tp
    if etp not in (1, tp):
        raise ValueError(f"{name}={etp} is neither 1 nor tensor_parallel_degree={tp}: give one.")
    if etp < tp and not sequence:
        raise ValueError(
            f"expert_parallel_degree={ep} spreads experts over ranks of tensor_parallel_degree="
            f"{tp}, whose tokens a Layout cuts only with enable_sequence_parallel=True: give that."
        )
    if (ranks := replicas * tp // etp) % ep:
        raise ValueError(
            f"expert_parallel_degree={ep} does not divide the {ranks} ranks that it spreads "
            f"experts over: give {nearest_divisor(ranks, ep)}."
        )
    return etp


def _shards(cuts: dict, world_size: int | None, replicate: int, sizes: dict[str, int]) -> int:
    """Return data_parallel_shard_degree; -1 means what the other axes leave."""
    shard = integer("data_parallel_shard_degree", cuts.get("data_parallel_shard_degree", -1), -1)
    if shard == 0:
        raise ValueError("data_parallel_shard_degree=0 is too small: give 1 or more, or -1.")
    names = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}
    others = {"data_parallel_replicate_degree": replicate} | {
        f"{names[axis]}_degree": size for axis, size in sizes.items()
    }
    if world_size is None:
        if shard == -1:
            raise ValueError(
                "data_parallel_shard_degree=-1 is whatever ranks are left: give world_size."
            )
        return shard
    left = replicas(integer("world_size", world_size), others)
    if shard not in (-1, left):
        product = world_size // left * shard
        said = " x ".join(f"{name}={size}" for name, size in others.items() if size > 1)
        raise ValueError(
            f"data_parallel_shard_degree={shard}{' x ' + said if said else ''} is {product}, not "
            f"world_size={world_size}: give data_parallel_shard_degree={left}, or -1."
        )
    return left


def _batch(training, cuts, dp, pp, cannot_say) -> tuple[int, int]:
    """Return (micro-batch size, micro-batches): a pipeline splits its local batch itself."""
    if TOKENS in training:
        return _batch_of_tokens(training, cuts, dp, pp, cannot_say)
    local = integer("local_batch_size", training.get("local_batch_size", 8))
    total = integer("global_batch_size", training.get("global_batch_size", -1), -1)
    if total == 0:
        raise ValueError("global_batch_size=0 is too small: give 1 or more, or -1.")
    names = ("global_batch_size", "local_batch_size", "accumulation")
    _, local, accumulated = Batch(None if total == -1 else total, local, None, names).solve(dp)
    if pp == 1:
        return local, accumulated
    name = "pipeline_parallel_microbatch_size"
    micro = integer(name, cuts.get(name, 1))
    if local % micro:
        near = max(1, round(local / micro)) * micro
        raise ValueError(
            f"{name}={micro} does not divide local_batch_size={local}: give "
            f"local_batch_size={near}, or a {name} that divides."
        )
    return micro, _in_pipeline(local // micro, accumulated, "global_batch_size", cannot_say)


def _in_pipeline(each: int, times: int, name: str, cannot_say: list[str]) -> int:
    """Return all micro-batches of a step if the pipeline is filled `times` times."""
    if times > 1:
        cannot_say.append(
            f"The pipeline runs empty {times} times a step, after {each} micro-batches each "
            f"({name}); a Layout's does so once, after all of them."
        )
    return each * times


def _batch_of_tokens(training, cuts, dp, pp, cannot_say) -> tuple[int, int]:
    """Return the batch if the config counts tokens: per micro-batch, and per step on all ranks."""
    for group, key, needed in (
        (training, "max_context_length", True),
        (cuts, "num_pp_microbatches", pp > 1),
    ):
        if needed and key not in group:
            raise ValueError(f"{TOKENS} alone does not say the batch: give {key}, too.")
    tokens, length = (integer(key, training[key]) for key in (TOKENS, "max_context_length"))
    if tokens % length:
        near = max(1, round(tokens / length)) * length
        raise ValueError(
            f"{TOKENS}={tokens} is not a whole number of sequences of max_context_length={length}: "
            f"give {near}."
        )
    each = integer("num_pp_microbatches", cuts["num_pp_microbatches"]) if pp > 1 else 1
    name = "num_tokens_per_train_step"
    total = integer(name, training.get(name, -1), -1)
    names = (name, f"{TOKENS} x num_pp_microbatches" if pp > 1 else TOKENS, "accumulation")
    _, _, times = Batch(None if total == -1 else total, tokens * each, None, names).solve(dp)
    return tokens // length, _in_pipeline(each, times, name, cannot_say)


def _schedule(cuts: dict, pp: int, num_layers: int | None) -> tuple[str, int]:
    """Return (name, chunks per rank)."""
    name = cuts.get("pipeline_parallel_schedule", "1F1B")
    ours = OUR_SCHEDULES.get(name.lower()) if isinstance(name, str) else None
    if ours is None:
        choice("pipeline_parallel_schedule", name, TORCH_SCHEDULES.values())
    if pp == 1:
        return "1f1b", 1
    if ours in V_SHAPED:
        return ours, 2
    if ours != "interleaved":
        return ours, 1
    each = cuts.get("pipeline_parallel_layers_per_stage")
    if each is None:
        return ours, 2  # pipeline_parallel.py: two stages a rank
    if num_layers is None:
        raise ValueError(
            f"pipeline_parallel_layers_per_stage={each} of how many layers? Give num_layers."
        )
    names = (f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
    ends = sum(integer(name, cuts.get(name, 1), at_least=0) for name in names)
    stages = math.ceil((num_layers + ends) / integer("pipeline_parallel_layers_per_stage", each))
    if stages % pp or stages == pp:
        raise ValueError(
            f"pipeline_parallel_layers_per_stage={each} of {num_layers} layers and {ends} for the "
            f"ends makes {stages} stages, not several for each of pipeline_parallel_degree={pp}: "
            f"give {max(1, (num_layers + ends) // (2 * pp))}."
        )
    return ours, stages // pp


def _zero(cuts: dict, sharded: bool, pp: int) -> int:
    """Return the ZeRO stage of fully_shard: in a pipeline gradients are reduced once (lesson
    17)."""
    name = "fsdp_reshard_after_forward"
    policy = choice(name, cuts.get(name, "default"), ("default", "always", "never"))
    if not sharded:
        return 0
    if policy == "always" or (policy == "default" and pp == 1):
        return 3
    return 1 if pp > 1 else 2


def _recompute(config: dict, cannot_say: list[str]) -> dict:
    group = section("activation_checkpoint", config.get("activation_checkpoint", {}))
    check_keys(group, RECOMPUTE, "activation_checkpoint")
    modes = ("selective", "full", "memory_budget", "none")
    mode = choice("activation_checkpoint.mode", group.get("mode", "selective"), modes)
    if mode in ("full", "none"):
        return {"recompute": mode}
    if mode == "memory_budget":
        cannot_say.append(
            "memory_budget lets the compiler choose what is kept, and a Layout says which layers."
        )
        return {"recompute": "none"}
    option = str(group.get("selective_ac_option", "2"))
    if option == "op":
        cannot_say.append(
            "selective_ac_option='op' keeps attention and every second matrix: with "
            "framework('torchtitan') that is what recompute='selective' means."
        )
        return {"recompute": "selective"}
    if not option.isdigit():
        raise ValueError(
            f"selective_ac_option={option!r} is not known: give 'op', or a number such as '2'."
        )
    every = max(1, int(option))
    if every > 1:
        cannot_say.append(
            f"selective_ac_option={option!r} recomputes layers {every}, {2 * every}, ... whole; "
            f"recompute_every={every} begins with the first one."
        )
    return {"recompute": "full", "recompute_every": every}


def _read(source: str | Path | dict) -> tuple[dict, bool]:
    """Return (the sections, whether they were in Python)."""
    if isinstance(source, dict):
        return source, False
    text = source
    if isinstance(source, Path) or (isinstance(source, str) and "\n" not in source.strip()):
        path = Path(source)
        if path.suffix in (".toml", ".py") or isinstance(source, Path):
            if not path.is_file():
                raise ValueError(f"{str(source)!r} is no file: give a path, its text, or a dict.")
            text = path.read_text()
    if not isinstance(text, str):
        raise ValueError(f"{source!r} is no config: give a path, its text, or a dict.")
    if ".Config(" in text:
        return sections_of_python(text), True
    try:
        import tomllib
    except ModuleNotFoundError:
        raise ValueError(
            "TOML is read by Python 3.11 and later: give the dict of its sections."
        ) from None
    try:
        return tomllib.loads(text), False
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the config is neither TOML nor Python: {error}.") from None
