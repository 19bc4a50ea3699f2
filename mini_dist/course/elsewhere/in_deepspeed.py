"""The run in DeepSpeed 0.19: ZeRO's three stages, offload, and its pipeline.

The functions' configs contain the required settings, with reasons.
"""

from __future__ import annotations

import json
import os

from torch import nn

from mini_dist.model.data import Batches, load_text
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators import deepspeed_json
from mini_dist.plan.config import Layout
from mini_dist.ranks.launch import launch

from .kept import kept
from .run import BATCH, CONFIG, PSI, RANKS, adamw, measure, name_axes


def start(group):
    """DeepSpeed in this rank, over the group that it has.

    It asks the environment for what its own launcher says (comm/comm.py, init_distributed). For
    small all-reduces it would compile an operator of its own over shared memory, 60 s with g++ and
    ninja, whose bytes no socket sees: it is declared missing (ops/__init__.py), so gloo is used.
    """
    rank, size = str(group.rank()), str(group.size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu")
    import deepspeed
    from deepspeed.utils import logger

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logger.setLevel("ERROR")
    return deepspeed


def config(stage: int, micro: int = BATCH // RANKS, **zero) -> dict:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": BATCH // RANKS // micro,
        "zero_optimization": {"stage": stage, **zero},
        "gradient_clipping": 0.0,  # a missing value means 1.0 (since PR 8068, June 2026)
        "zero_allow_untested_optimizer": True,  # torch's AdamW is not on DeepSpeed's list
        "zero_force_ds_cpu_optimizer": False,  # otherwise offload compiles a CPU Adam: 108 s
        "steps_per_print": 10**9,
    }


def zero(settings, batches, group):
    deepspeed = start(group)
    gpt = GPT(CONFIG)
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=adamw(gpt.parameters()), config=settings)
    losses, micro = [], settings["train_micro_batch_size_per_gpu"]
    for micro_batches in batches(group.rank(), group.size(), micro):
        total = 0.0
        for inputs, targets in micro_batches:
            loss = token_loss(engine(inputs), targets).mean()
            engine.backward(loss)
            engine.step()  # counts calls, and steps only after the last micro-batch
            total += loss.item()
        losses.append(total / len(micro_batches))
    return losses


def pipeline(stages, micro, batches, group):
    deepspeed = start(group)
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed()
    gpt = GPT(CONFIG)
    layers = [nn.Sequential(gpt.embed, gpt.blocks[0]), *gpt.blocks[1:-1]]
    layers.append(nn.Sequential(gpt.blocks[-1], gpt.head))
    module = PipelineModule(
        layers=layers,
        num_stages=stages,
        partition_method="uniform",  # one layer each; by parameters where nothing is said
        loss_fn=lambda logits, targets: token_loss(logits, targets).mean(),
    )
    settings = config(0) | {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": BATCH // micro // (RANKS // stages),
    }
    optimizer = adamw(module.parameters())
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    dp = engine.grid.get_data_parallel_group()
    name_axes(group, pp=engine.grid.get_pipe_parallel_group(), dp=dp)
    return [
        float(engine.train_batch(iter(micro_batches)))
        for micro_batches in batches(dp.rank(), dp.size(), micro)
    ]


OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
PLAIN = {
    # each rank's part is reduced to that rank, not all-reduced (stage_1_and_2.py, average_tensor)
    "use_multi_rank_bucket_allreduce": False,
    # 5e8 numbers where nothing is said, and they are allocated: 2 GB (zero/config.py)
    "reduce_bucket_size": PSI,
}
BARE = {  # nothing that was gathered stays. By default two things do, each alone enough here:
    "stage3_param_persistence_threshold": 0,  # 1e5: smaller parameters stay whole
    # 1e9 both: keep what is used again within this many numbers, while at most this many are
    # gathered (partitioned_param_coordinator.py, "examine all modules within
    # max_reuse_dist_in_numel")
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
    "reduce_bucket_size": PSI,
}
ONLY_THRESHOLD = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": PSI}


@kept("deepspeed")
def runs() -> list[dict]:
    """ZeRO's stages as shipped and as their paper has them; offload; a pipeline; one trap."""
    forgetful = config(2, **PLAIN)
    del forgetful["gradient_clipping"]
    return measure(
        {
            "ZeRO-1, as shipped": (zero, config(1)),
            "ZeRO-2, as shipped": (zero, config(2)),
            "ZeRO-3, as shipped": (zero, config(3)),
            "ZeRO-2, plain": (zero, config(2, **PLAIN)),
            "ZeRO-3, threshold 0": (zero, config(3, **ONLY_THRESHOLD)),
            "ZeRO-3, bare": (zero, config(3, **BARE)),
            "ZeRO-2, plain, offload": (zero, config(2, **PLAIN, **OFFLOAD)),
            "clipping not mentioned": (zero, forgetful),
            "pp 4": (pipeline, 4, 2),
            "pp 2 x dp 2": (pipeline, 2, 2),
        }
    )


def obeyed(files, group):
    """On a rank: what DeepSpeed has understood of each config file, and the losses of two steps."""
    deepspeed = start(group)
    found = {}
    for name, file in files.items():
        settings = json.loads(file)
        # the program's part: an optimizer that is none of DeepSpeed's own
        settings["zero_allow_untested_optimizer"] = True
        gpt = GPT(CONFIG)
        optimizer = adamw(gpt.parameters())
        engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=settings)
        batch, micro = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()
        batches = Batches(load_text(), batch, CONFIG.seq_len, rank=group.rank(), size=RANKS)
        losses = []
        for step in range(2):
            inputs, targets = batches.batch(step)
            for part in zip(inputs.split(micro), targets.split(micro)):
                loss = token_loss(engine(part[0]), part[1]).mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
        found[name] = {
            "stage": engine.zero_optimization_stage(),
            "global": batch,
            "micro": micro,
            "accumulated": engine.gradient_accumulation_steps(),
            "clipping": engine.gradient_clipping(),
            "bf16": engine.bfloat16_enabled(),
            "steps": engine.global_steps,
            "falls": losses[1] < losses[0],
        }
    return found


@kept("deepspeed")
def exports() -> dict[str, dict]:
    """Layouts of four ranks exported by calculators.deepspeed_json, and run by DeepSpeed."""
    layouts = [Layout(dp=RANKS, zero=zero, num_micro_batches=2) for zero in range(4)]
    files = {f"zero={layout.zero}": deepspeed_json(layout) for layout in layouts}
    return launch(obeyed, RANKS, (files,), timeout=300, quiet=True).results[0]


@kept("deepspeed")
def knobs() -> list[dict]:
    """What each setting does to the bytes; two micro-batches in a step where it says so."""
    quiet = {"reduce_bucket_size": PSI}
    apart = {"use_multi_rank_bucket_allreduce": False}
    return measure(
        {
            "0": (zero, config(0)),
            "0, k=2": (zero, config(0, 1)),
            "1, k=2": (zero, config(1, 1, **quiet)),
            "2, k=2": (zero, config(2, 1, **quiet)),
            "1, apart, k=2": (zero, config(1, 1, **quiet, **apart)),
            "2, apart, k=2": (zero, config(2, 1, **quiet, **apart)),
            "2, reduce_scatter=False": (zero, config(2, **quiet, reduce_scatter=False)),
            "2, apart, reduce_scatter=False": (
                zero,
                config(2, **quiet, **apart, reduce_scatter=False),
            ),
            "3, bare, k=2": (zero, config(3, 1, **BARE)),
            "3, threshold 5000": (
                zero,
                config(3, **BARE | {"stage3_param_persistence_threshold": 5000}),
            ),
            "3, k=2": (zero, config(3, 1, **quiet)),
            "3, threshold 0, k=2": (zero, config(3, 1, **ONLY_THRESHOLD)),
        }
    )
