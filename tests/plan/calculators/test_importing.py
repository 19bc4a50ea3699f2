"""Other frameworks' configs become a Layout.

What we export comes back, configs from elsewhere are read, and a contradiction gets a one-sentence
error that names the fields.
"""

import json
import math
import random
import shlex
import sys

import pytest

from mini_dist.plan.calculators import (
    Layout,
    deepspeed_json,
    from_deepspeed,
    from_megatron,
    from_torchtitan,
    megatron_arguments,
    model,
    torchtitan_config,
)
from mini_dist.plan.calculators.export import layout_source, torchrun_line
from mini_dist.plan.schedule import SYNCHRONOUS

LLAMA = model("llama3-8b")  # 32 layers
NEEDS_TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")


MIXTRAL = model("mixtral-8x7b")  # 32 layers, 8 experts


def random_layout(dice: random.Random) -> Layout | None:
    """Return a random layout for 32 layers, or None if the dice chose an invalid one."""
    pp, tp, chunks = dice.choice((1, 1, 2, 2, 4)), dice.choice((1, 2, 8)), dice.choice((1, 2, 4))
    recompute = dice.choice(("none", "selective", "full", "full"))
    try:
        return Layout(
            pp=pp,
            dp=dice.choice((1, 2, 6, 8)),
            cp=dice.choice((1, 1, 2)),
            tp=tp,
            sequence_parallel=tp > 1 and dice.random() < 0.7,
            zero=dice.choice((0, 1, 1, 2, 3)),
            micro_batch_size=dice.choice((1, 2, 3)),
            num_micro_batches=dice.choice((1, 2, 3, 4, 5, 6, 8, 10, 12)),
            recompute=recompute,
            recompute_every=1 if recompute == "none" else dice.choice((1, 1, 1, 2, 3)),
            schedule=dice.choice(("1f1b", *["interleaved"] * 3, *SYNCHRONOUS)),
            num_chunks=chunks,
        )
    except ValueError:
        return None


def random_layouts(count: int, seed: int, config, experts: tuple[int, ...] = (1,)) -> list[Layout]:
    """Return this many different layouts in which the model can run."""
    dice, found = random.Random(seed), {}
    while len(found) < count:
        layout = random_layout(dice)
        try:
            found[layout.replace(ep=dice.choice(experts)).check(config)] = None
        except (AttributeError, ValueError):
            continue
    return list(found)


def exported(export, *arguments):
    """Return the export, or None if it is refused."""
    try:
        return export(*arguments)
    except ValueError as error:
        assert str(error).endswith("."), error
        return None


def without_a_pipeline(layout):
    """Reset the schedule where there is no pipeline, because no config names one there."""
    return layout.replace(schedule="1f1b", num_chunks=1) if layout.pp == 1 else layout


def as_megatron(layout):
    """Take the smallest `recompute_every` that recomputes as many layers of a stage.

    Megatron-LM's arguments give only this number of layers.
    """
    layout = without_a_pipeline(layout)
    if layout.recompute != "full":
        return layout
    of_stage = -(-32 // layout.num_stages)
    count = layout.num_recomputed(of_stage)
    every = next(n for n in range(1, of_stage + 1) if -(-of_stage // n) == count)
    return layout.replace(recompute_every=every)


def as_torchtitan(layout):
    """torchtitan has one setting for ZeRO-1 and 2: it means 1 in a pipeline, else 2."""
    layout = without_a_pipeline(layout)
    if layout.dp * layout.cp == 1:
        return layout.replace(zero=0)
    return layout.replace(
        zero=(1 if layout.pp > 1 else 2) if layout.zero in (1, 2) else layout.zero
    )


def megatron_line(config, layout):
    """Return a command line whose torchrun options give the number of ranks."""
    words = shlex.join(megatron_arguments(config, layout))
    per_node = math.gcd(layout.world_size, 8)
    return f"{torchrun_line(layout, per_node, 'pretrain_gpt.py')} {words}"


def with_its_program(text, layout):
    axes = ("pp", "cp", "tp", "ep", "sequence_parallel", "recompute", "recompute_every")
    program = {name: getattr(layout, name) for name in (*axes, "schedule", "num_chunks")}
    return from_deepspeed(text, layout.world_size, **program)


ROUND_TRIPS = {  # export, import, what comes back
    "Megatron-LM": (
        megatron_arguments,
        lambda words, layout: from_megatron(words, layout.world_size),
        as_megatron,
    ),
    "Megatron-LM, one line": (
        megatron_line,
        lambda line, layout: from_megatron(line),
        as_megatron,
    ),
    "DeepSpeed": (
        lambda config, layout: deepspeed_json(layout),
        with_its_program,
        lambda layout: layout,
    ),
    "torchtitan": (
        torchtitan_config,
        lambda text, layout: from_torchtitan(text, layout.world_size, num_layers=32),
        as_torchtitan,
    ),
}


@pytest.mark.parametrize("program", ROUND_TRIPS)
@pytest.mark.parametrize("config", [LLAMA, MIXTRAL], ids=["dense", "experts"])
def test_what_is_exported_comes_back(config, program):
    export, read, said = ROUND_TRIPS[program]
    back = 0
    for layout in random_layouts(800, 7, config, (1, 2, 4) if config.num_experts else (1,)):
        text = exported(export, config, layout)
        if text:
            assert read(text, layout).layout == said(layout), layout
            back += 1
    assert back > 40


def test_a_layout_comes_back_from_its_source():
    for layout in random_layouts(100, 8, LLAMA):
        assert eval(layout_source(layout), {"Layout": Layout}) == layout


@pytest.mark.parametrize(("pp", "m", "group"), [(2, 3, 3), (4, 6, 6), (4, 10, 5), (2, 4, None)])
def test_micro_batches_that_are_no_multiple_of_the_pipeline_say_their_group(pp, m, group):
    layout = Layout(pp=pp, num_micro_batches=m, schedule="interleaved", num_chunks=2)
    words = megatron_arguments(LLAMA, layout)
    name = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert (words[words.index(name) + 1] if name in words else None) == (group and str(group))
    assert from_megatron(words, pp).layout == layout


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (
            Layout(pp=2, schedule="interleaved", num_chunks=2),
            "num_micro_batches=1 is less than pp=2",
        ),
        (
            Layout(pp=4, num_micro_batches=2, schedule="interleaved", num_chunks=2),
            "num_micro_batches=2 is less than pp=4",
        ),
        (
            Layout(pp=2, num_micro_batches=2, schedule="interleaved"),
            "schedule='interleaved' with num_chunks=1 has one stage on each rank",
        ),
        (
            Layout(recompute="selective", recompute_every=2),
            "recompute_every=2 is not what Megatron-LM's selective recompute does",
        ),
    ],
)
def test_what_megatron_would_run_otherwise_is_not_exported(layout, says):
    with pytest.raises(ValueError, match=says):
        megatron_arguments(LLAMA, layout)


def test_torchtitan_shards_over_cp_in_any_case():
    with pytest.raises(ValueError, match="zero=0 with cp=2 is not what torchtitan does"):
        torchtitan_config(LLAMA, Layout(cp=2))


def test_what_torchtitan_has_one_word_for_comes_back_as_the_other():
    for layout, zero in ((Layout(dp=4, zero=1), 2), (Layout(dp=4, pp=2, zero=2), 1)):
        text = torchtitan_config(LLAMA, layout)
        assert from_torchtitan(text, num_layers=32).layout == layout.replace(zero=zero)


def test_experts_that_span_tp_come_back():
    config = model("mixtral-8x7b")
    whole = Layout(dp=4, tp=2, ep=8, etp=1, sequence_parallel=True, zero=1)
    cut = Layout(dp=2, tp=4, ep=4, etp=2, sequence_parallel=True, zero=1)
    for layout in (whole, cut):
        assert from_megatron(megatron_arguments(config, layout), 8).layout == layout
    for zero in (2, 3):
        layout = whole.replace(zero=zero)
        assert from_torchtitan(torchtitan_config(config, layout), 8).layout == layout
    for layout in (cut, whole.replace(ep=1)):  # cut experts; whole experts without ep
        with pytest.raises(ValueError, match="give etp=1 and ep of 2 or more, or tp=1"):
            torchtitan_config(config, layout)


# Sizes from Megatron-LM's tests/functional_tests/test_cases/moe/*/model_config.yaml, each on the
# 8 devices of a node: (name, arguments, layout).
MEGATRON_EXPERTS = [
    (
        "gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --micro-batch-size 4 "
        "--expert-tensor-parallel-size 1 --global-batch-size 32 --num-experts 8",
        dict(dp=4, tp=2, ep=4, etp=1, micro_batch_size=4, num_micro_batches=2),
    ),
    (
        "gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 16 "
        "--num-virtual-stages-per-pipeline-rank 4 --expert-model-parallel-size 4 "
        "--expert-tensor-parallel-size 1 --use-distributed-optimizer --micro-batch-size 4 "
        "--global-batch-size 32 --num-experts 32",
        dict(
            **dict(pp=2, dp=2, tp=2, ep=4, etp=1, zero=1, micro_batch_size=4, num_micro_batches=4),
            **dict(schedule="interleaved", num_chunks=4),
        ),
    ),
    (
        "gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 4 "
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 --num-layers 12 "
        "--global-batch-size 32 --use-distributed-optimizer --num-experts 8",
        dict(pp=2, dp=1, tp=4, ep=2, etp=2, zero=1, micro_batch_size=4, num_micro_batches=8),
    ),
]


@pytest.mark.parametrize(
    "arguments, layout",
    [case[1:] for case in MEGATRON_EXPERTS],
    ids=[c[0] for c in MEGATRON_EXPERTS],
)
def test_megatron_s_own_layouts_of_experts_are_read(arguments, layout):
    found = from_megatron(f"{arguments} --sequence-parallel", world_size=8)
    assert found.layout == Layout(**layout, sequence_parallel=True)
    assert not found.cannot_say


# More options in that folder (Megatron-LM, June to November 2026), and what a Layout cannot say
# about them.
MORE_OF_MEGATRON = [
    ("--recompute-granularity selective", ()),
    ("--recompute-granularity selective --recompute-modules core_attn", ()),
    (
        "--recompute-granularity selective --recompute-modules [moe_act]",
        ("recompute-modules=moe_act: a Layout's selective recomputes core_attn.",),
    ),
    (
        "--recompute-granularity selective "
        "--recompute-modules '[layernorm mla_up_proj mlp moe_act]' "
        "--fine-grained-activation-offloading",
        (
            "fine-grained-activation-offloading: activations stay on the device in a Layout.",
            "recompute-modules=layernorm mla_up_proj mlp moe_act: a Layout's selective recomputes "
            "core_attn.",
        ),
    ),
    (
        "--use-tp-pp-dp-mapping",
        (
            "use-tp-pp-dp-mapping: ranks of one pipeline are neighbors, in a Layout those of dp "
            "are.",
        ),
    ),
    (
        "--pipeline-model-parallel-layout Et*3|(tt|)*6mL",
        ("pipeline-model-parallel-layout: stages are laid out by hand, and a Layout cuts evenly.",),
    ),
]


@pytest.mark.parametrize("more, cannot_say", MORE_OF_MEGATRON)
def test_what_megatron_s_own_configs_ask_beyond_a_layout_is_named(more, cannot_say):
    _, arguments, layout = MEGATRON_EXPERTS[-1]
    found = from_megatron(f"{arguments} --sequence-parallel {more}", world_size=8)
    recompute = "selective" if "selective" in more else "none"
    assert found.layout == Layout(**layout, sequence_parallel=True, recompute=recompute)
    assert sorted(found.cannot_say) == sorted(cannot_say)


# The models with experts in torchtitan's models/qwen3_5/config_registry.py (May 2026), the largest
# last: (tensor, expert, pipeline degree, local batch, ranks).
QWEN = [(2, 4, 2, 2, 8), (2, 8, 1, 4, 8), (4, 8, 1, 4, 16), (8, 16, 1, 4, 64)]


@pytest.mark.parametrize("tp, ep, pp, local, ranks", QWEN)
def test_torchtitan_s_own_layouts_of_experts_are_read(tp, ep, pp, local, ranks):
    config = {
        "training": {"local_batch_size": local, "seq_len": 4096},
        "parallelism": {
            "tensor_parallel_degree": tp,
            "expert_parallel_degree": ep,
            "pipeline_parallel_degree": pp,
        },
        "activation_checkpoint": {"mode": "full"},
    }
    found = from_torchtitan(config, ranks).layout
    assert (found.tp, found.ep, found.etp, found.dp) == (tp, ep, 1, ranks // (tp * pp))
    assert found.edp == ranks // pp // ep and found.sequence_parallel
    config["parallelism"]["expert_tensor_parallel_degree"] = tp  # a key of torchtitan 0.2
    if (ranks // (tp * pp)) % ep:
        with pytest.raises(ValueError, match=f"expert_parallel_degree={ep} does not divide the"):
            from_torchtitan(config, ranks)


@pytest.mark.parametrize(
    "read, says",
    [
        (
            lambda: from_megatron(f"{SPANNING} --expert-tensor-parallel-size 2 {SP}", 8),
            "expert-model-parallel-size=4 with expert-tensor-parallel-size=2 does not divide the 4 "
            "ranks of a pipeline stage: give 2, or expert-tensor-parallel-size=1.",
        ),
        (
            lambda: from_megatron(f"{SPANNING} --expert-tensor-parallel-size 1", 8),
            "tensor-model-parallel-size=2 with experts needs sequence-parallel",
        ),
        (
            lambda: from_megatron(f"{SPANNING} --expert-tensor-parallel-size 4 {SP}", 8),
            "expert-tensor-parallel-size=4 does not divide tensor-model-parallel-size=2, and a "
            "Layout's etp divides its tp: give 2.",
        ),
        (
            lambda: from_torchtitan(TITAN.format("expert_tensor_parallel_degree=2"), 8),
            "expert_tensor_parallel_degree=2 is neither 1 nor tensor_parallel_degree=4: give one.",
        ),
        (
            lambda: from_torchtitan(TITAN.format("enable_sequence_parallel=False"), 8),
            "whose tokens a Layout cuts only with enable_sequence_parallel=True: give that.",
        ),
    ],
)
def test_experts_that_a_layout_cannot_say_are_refused(read, says):
    with pytest.raises(ValueError) as error:
        read()
    assert says in str(error.value)


SP = "--sequence-parallel"
SPANNING = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 "
    "--expert-model-parallel-size 4 --num-experts 8"
)
TITAN = """Trainer.Config(
    training=TrainingConfig(local_batch_size=1),
    parallelism=ParallelismConfig(tensor_parallel_degree=4, expert_parallel_degree=8, {}),
)"""


# The sizes in Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh, on `nodes` nodes.
GPT3 = """
torchrun --nproc_per_node 8 --nnodes {nodes} --master_port 6000 pretrain_gpt.py \\
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 \\
    --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto \\
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \\
    --weight-decay 0.1 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --split 949,50,1
"""


def test_megatron_s_own_example_is_read_on_the_nodes_that_it_needs():
    found = from_megatron(GPT3.format(nodes=128))
    assert found.layout == Layout(pp=16, dp=8, tp=8, num_micro_batches=192)
    assert found.batch == "global 1536 = micro-batch 1 x 192 accumulated x dp 8"
    assert found.cannot_say == (
        "rampup-batch-size: the global batch grows to its size, and a Layout has one size.",
    )
    assert {"fp16", "lr", "split"} <= set(found.passed_over)


def test_as_it_stands_the_example_is_for_one_node_and_needs_sixteen():
    with pytest.raises(ValueError, match="which is 128, does not divide world_size=8: give"):
        from_megatron(GPT3.format(nodes=1))


# torchtitan, torchtitan/models/llama3/train_configs/llama3_70b.toml: a preset for 64 GPUs.
TITAN_70B = """
[job]
description = "Llama 3 70B training"
[model]
name = "llama3"
flavor = "70B"
[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0  # grad norm clipping
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
pipeline_parallel_degree = 1
context_parallel_degree = 1
[activation_checkpoint]
mode = "full"
"""


@NEEDS_TOML
def test_torchtitan_s_own_example_is_read(tmp_path):
    layout = Layout(
        dp=8, tp=8, sequence_parallel=True, zero=3, micro_batch_size=8, recompute="full"
    )
    assert from_torchtitan(TITAN_70B, 64).layout == layout
    path = tmp_path / "llama3_70b.toml"
    path.write_text(TITAN_70B)
    assert from_torchtitan(path, 64) == from_torchtitan(str(path), 64)
    hybrid = TITAN_70B.replace("replicate_degree = 1", "replicate_degree = 2")
    (sentence,) = from_torchtitan(hybrid, 64).cannot_say
    assert sentence.startswith("data_parallel_replicate_degree=2 with 4 shards is HSDP")


# As written in the documentation of DeepSpeed's config and of Hugging Face's integration.
ZERO_3 = {
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def test_a_ds_config_of_hugging_face_is_read_and_its_offload_said():
    found = from_deepspeed(ZERO_3, 16)
    assert found.layout == Layout(dp=16, zero=3, micro_batch_size=4, num_micro_batches=2)
    assert found.layout.global_batch_size == 128
    (sentence,) = found.cannot_say
    assert "offload_optimizer.device='cpu' is the Framework's" in sentence
    assert "ignored: bf16, gradient_clipping" in str(found)


def test_clipping_that_is_not_said_is_said_to_be_at_1():
    (sentence,) = from_deepspeed({"train_batch_size": 64}, 16).cannot_say
    assert "clips at 1.0" in sentence
    assert not from_deepspeed({"train_batch_size": 64, "gradient_clipping": 0.0}, 16).cannot_say


def test_three_batch_sizes_say_how_many_replicas_there_are():
    three = {"train_batch_size": 256, BATCH_EACH: 4, "gradient_accumulation_steps": 8}
    assert from_deepspeed(three).layout.dp == 8
    assert from_deepspeed({"train_batch_size": 64}, 16).layout.micro_batch_size == 4
    assert from_deepspeed({BATCH_EACH: 4}, 16).layout.global_batch_size == 64


BATCH_EACH = "train_micro_batch_size_per_gpu"


def deepspeed(changes, world_size=16, **program):
    return lambda: from_deepspeed({BATCH_EACH: 4, **changes}, world_size, **program)


def megatron(words, world_size=16):
    return lambda: from_megatron(f"--micro-batch-size 1 {words}", world_size)


def titan(training=None, cuts=None, world_size=16, **sections):
    config = {"training": training or {}, "parallelism": cuts or {}, **sections}
    return lambda: from_torchtitan(config, world_size)


BAD = [
    (
        deepspeed({"train_batch_size": 256, "gradient_accumulation_steps": 8}),
        "train_batch_size=256 is not train_micro_batch_size_per_gpu=4 x "
        "gradient_accumulation_steps=8 x dp=16, which is 512: give train_batch_size=512, or "
        "gradient_accumulation_steps=4.",
    ),
    (
        deepspeed({"train_batch_size": 100}),
        "train_batch_size=100 is not a multiple of train_micro_batch_size_per_gpu=4 x dp=16, which "
        "is 64: give 128.",
    ),
    (
        deepspeed({"zero_optimization": {"stage": 3}}, pp=4),
        "zero_optimization.stage=3 cannot be combined with pp=4: DeepSpeed's pipeline refuses "
        "stages 2 and 3 (runtime/pipe/engine.py); give stage=1, or pp=1.",
    ),
    (deepspeed({}, pp=3), "pp=3 does not divide world_size=16: give world_size=15, or pp=2."),
    (
        deepspeed({}, pp=3, tp=2),
        "pp=3 x tp=2, which is 6, does not divide world_size=16: give world_size=18.",
    ),
    (
        deepspeed({"train_microbatch_size_per_gpu": 4}),
        "'train_microbatch_size_per_gpu' is not a key of DeepSpeed's config: give "
        "'train_micro_batch_size_per_gpu'.",
    ),
    (
        deepspeed({"zero_optimization": {"Stage": 3}}),
        "'Stage' is not a key of zero_optimization: give 'stage'.",
    ),
    (
        deepspeed({"zero_optimization": {"stage": "3"}}),
        "zero_optimization.stage='3' is not a whole number: give 3, without quotes.",
    ),
    (
        deepspeed({"zero_optimization": {"stage": 4}}),
        "zero_optimization.stage=4 is not known: give 0, 1, 2 or 3.",
    ),
    (
        deepspeed({"train_batch_size": 64.0}),
        "train_batch_size=64.0 is not a whole number: give 64.",
    ),
    (
        deepspeed({"train_batch_size": "sixty-four"}),
        "train_batch_size='sixty-four' is not a whole number: give an int, 1 or more.",
    ),
    (
        deepspeed({"gradient_accumulation_steps": 0}),
        "gradient_accumulation_steps=0 is too small: give 1 or more.",
    ),
    (
        deepspeed({"zero_optimization": 2}),
        "zero_optimization=2 is no group of keys: give one, such as zero_optimization = {}.",
    ),
    (
        lambda: from_deepspeed({"zero_optimization": {"stage": 1}}, 4),
        "Neither train_batch_size nor train_micro_batch_size_per_gpu is given: give one, such as "
        "train_micro_batch_size_per_gpu=1.",
    ),
    (
        deepspeed({}, None),
        "train_micro_batch_size_per_gpu=4 alone does not say how many ranks share the batch: give "
        "world_size.",
    ),
    (
        deepspeed({"tensor_parallel": {"autotp_size": 4}}, tp=2),
        "tensor_parallel.autotp_size=4 is not tp=2: give tp=4, or none.",
    ),
    (
        deepspeed({}, dp=4),
        "dp=4 is not what a program sets beside ds_config.json: give some of pp, tp, cp, ep, "
        "etp, sequence_parallel, recompute, recompute_every, schedule, num_chunks.",
    ),
    (
        lambda: from_deepspeed('{"train_batch_size": 4, "train_batch_size": 8}', 4),
        "'train_batch_size' is given 2 times: give it once.",
    ),
    (
        lambda: from_deepspeed("ds_confg.json", 4),
        "'ds_confg.json' is no file: give a path, its text, or a dict.",
    ),
    (
        megatron("--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4"),
        "tensor-model-parallel-size=8 x pipeline-model-parallel-size=4, which is 32, does not "
        "divide world_size=16: give world_size=32.",
    ),
    (
        megatron("--context-parallel-size 3"),
        "context-parallel-size=3 does not divide world_size=16: give world_size=15, or "
        "context-parallel-size=2.",
    ),
    (
        megatron("--global-batch-size 100"),
        "global-batch-size=100 is not a multiple of micro-batch-size=1 x dp=16, which is 16: give "
        "96.",
    ),
    (
        megatron("--tensor_model_parallel_size 8"),
        "--tensor_model_parallel_size is not an argument of Megatron-LM: give "
        "--tensor-model-parallel-size.",
    ),
    (
        megatron("--tensor-parallel-size 8"),
        "--tensor-parallel-size is not an argument of Megatron-LM: give "
        "--tensor-model-parallel-size.",
    ),
    (
        megatron("--use-distributed-optimiser"),
        "--use-distributed-optimiser is not an argument of Megatron-LM: give "
        "--use-distributed-optimizer.",
    ),
    (
        megatron("--sequence-parallel True"),
        "--sequence-parallel takes no value, and 'True' follows it: leave that out.",
    ),
    (
        megatron("--sequence-parallel false"),
        "--sequence-parallel takes no value, and 'false' follows it: leave the argument out.",
    ),
    (
        megatron("--tensor-model-parallel-size $TP"),
        "--tensor-model-parallel-size $TP is a shell variable: give what it stands for.",
    ),
    (
        megatron("${MODEL_ARGS[@]} --bf16"),
        "--micro-batch-size takes one value, not ['1', '${MODEL_ARGS[@]}']: give one.",
    ),
    (
        megatron("--pipeline-model-parallel-size two"),
        "pipeline-model-parallel-size=two is not a whole number: give an int, 1 or more.",
    ),
    (
        megatron("--micro-batch-size 4"),
        "--micro-batch-size is given as 1 and as 4: give it once.",
    ),
    (
        megatron("--use-torch-fsdp2 --pipeline-model-parallel-size 4"),
        "use-torch-fsdp2 cannot be combined with pipeline-model-parallel-size=4, says Megatron-LM: "
        "give one of them.",
    ),
    (
        megatron("--recompute-granularity full"),
        "recompute-granularity=full needs recompute-method: give uniform, with "
        "recompute-num-layers=1.",
    ),
    (
        megatron("--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"),
        "global-batch-size=4 leaves 1 micro-batches, which pipeline-model-parallel-size=4 does not "
        "divide as interleaving needs: give global-batch-size=16.",
    ),
    (
        lambda: from_megatron("--global-batch-size 8", 8),
        "micro-batch-size is not given, and Megatron-LM has no default: give it.",
    ),
    (
        lambda: from_megatron("--micro-batch-size 8"),
        "No argument says how many ranks there are: give world_size.",
    ),
    (
        lambda: from_megatron("torchrun --nproc-per-node gpu train.py --micro-batch-size 8"),
        "nproc-per-node=gpu is no number of its own: give world_size.",
    ),
    (
        titan({"batch_size": 2}),
        "training.batch_size is no longer a key of torchtitan: give training.local_batch_size.",
    ),
    (
        titan(cuts={"tensor_parallel_degre": 2}),
        "'tensor_parallel_degre' is not a key of parallelism: give 'tensor_parallel_degree'.",
    ),
    (
        titan(cuts={"tensor_parallel_degree": 3}),
        "tensor_parallel_degree=3 does not divide world_size=16: give world_size=15, or "
        "tensor_parallel_degree=2.",
    ),
    (
        titan(cuts={"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}),
        "data_parallel_shard_degree=4 x tensor_parallel_degree=2 is 8, not world_size=16: give "
        "data_parallel_shard_degree=8, or -1.",
    ),
    (
        titan({"local_batch_size": 8, "global_batch_size": 100}),
        "global_batch_size=100 is not a multiple of local_batch_size=8 x dp=16, which is 128: give "
        "128.",
    ),
    (
        titan({"local_batch_size": 8}, {"tensor_parallel_degree": 2}, None),
        "data_parallel_shard_degree=-1 is whatever ranks are left: give world_size.",
    ),
    (
        titan(
            {"local_batch_size": 6},
            {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 4},
        ),
        "pipeline_parallel_microbatch_size=4 does not divide local_batch_size=6: give "
        "local_batch_size=8, or a pipeline_parallel_microbatch_size that divides.",
    ),
    (
        titan(cuts={"pipeline_parallel_schedule": "ZeroBubble", "pipeline_parallel_degree": 2}),
        "pipeline_parallel_schedule='ZeroBubble' is not known: give one of GPipe, 1F1B, "
        "Interleaved1F1B, ZBVZeroBubble, DualPipeV.",
    ),
    (
        titan(activation_checkpoint={"mode": "ful"}),
        "activation_checkpoint.mode='ful' is not known: give one of selective, full, "
        "memory_budget, none.",
    ),
    (
        titan(trainning={}),
        "'trainning' is not a key of torchtitan: give 'training'.",
    ),
    (
        lambda: from_torchtitan("Trainer.Config(training=TrainingConfig(local_batch_size=n))\n"),
        "local_batch_size=n is computed: give the number itself.",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), BAD)
def test_a_contradiction_is_one_sentence_with_fields_values_and_what_works(call, sentence):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == sentence


def test_what_the_sentences_propose_is_accepted():
    assert deepspeed({"train_batch_size": 512, "gradient_accumulation_steps": 8})()
    assert deepspeed({"train_batch_size": 256, "gradient_accumulation_steps": 4})()
    assert deepspeed({"train_batch_size": 128})()
    assert deepspeed({}, 15, pp=3)() and deepspeed({}, 16, pp=2)() and deepspeed({}, 18, pp=3, tp=2)
    assert megatron("--global-batch-size 96")()
    assert titan(cuts={"data_parallel_shard_degree": 8, "tensor_parallel_degree": 2})()
    virtual = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    assert megatron(f"{virtual} --global-batch-size 16")().layout.num_chunks == 2


JUNK = (None, True, -1, 0, 3, 7.5, "8", "auto", "x", [], [2], {}, {"a": 1}, float("nan"))


def with_junk(dice, keys):
    return {dice.choice(keys): dice.choice(JUNK) for _ in range(dice.randint(0, 2))}


def read_junk(dice, config):
    """Fill `config` with junk, so that a failure can show it, and import it."""
    from mini_dist.plan.calculators.from_deepspeed import BATCH, ZERO_KEYS
    from mini_dist.plan.calculators.from_torchtitan import PARALLELISM, TRAINING

    if dice.random() < 0.5:
        config |= {BATCH_EACH: 4, **with_junk(dice, BATCH)}
        config["zero_optimization"] = with_junk(dice, ZERO_KEYS)
        return from_deepspeed(config, 16)
    config["training"] = with_junk(dice, TRAINING)
    config["parallelism"] = with_junk(dice, PARALLELISM)
    return from_torchtitan(config, 16, 32)


def test_whatever_stands_in_a_config_is_a_layout_or_one_sentence():
    """Read 3,000 configs with junk in some fields, as users might write them."""
    dice, outcomes = random.Random(0), {"layout": 0, "sentence": 0}
    for _ in range(3000):
        config = {}
        try:
            found = read_junk(dice, config)
        except ValueError as error:
            assert str(error).endswith(".") and "\n" not in str(error), config
            outcomes["sentence"] += 1
        else:
            assert found.layout.world_size == 16, config
            outcomes["layout"] += 1
    assert min(outcomes.values()) > 500, outcomes


def test_the_json_that_lesson_17_prints_is_read_as_bloom_s_layout():
    bloom = Layout(pp=12, dp=8, tp=4, zero=1, micro_batch_size=2, num_micro_batches=128)
    text = deepspeed_json(bloom)
    assert json.loads(text)["train_batch_size"] == 2048
    assert from_deepspeed(text, 384, pp=12, tp=4).layout == bloom


# --- torchtitan: keys in the wrong section, and Python code after the call -----------------------

PYTHON = """
def config_70b():
    config = Trainer.Config(
        training=TrainingConfig(local_batch_size=8, seq_len=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
    )
    config.optimizer.lr = compute_lr()
    {}
    return config
"""


def python(lines, world_size=16):
    return from_torchtitan(PYTHON.format("\n    ".join(lines)), world_size).layout


def test_what_is_assigned_after_the_call_is_read():
    layout = python(["pass"])
    assert (layout.pp, layout.tp, layout.dp, layout.micro_batch_size) == (1, 2, 8, 8)
    layout = python(
        [
            "config.parallelism.pipeline_parallel_degree = 4",
            "config.training.local_batch_size = 2 * 8",
            "config.parallelism.tensor_parallel_degree = 1",
            "config.activation_checkpoint = None",
        ]
    )
    assert (layout.pp, layout.tp, layout.dp, layout.recompute) == (4, 1, 4, "none")
    assert layout.num_micro_batches == 16
    layout = python(["config.parallelism = ParallelismConfig(context_parallel_degree=4)"])
    assert (layout.cp, layout.tp, layout.dp) == (4, 1, 4)


@pytest.mark.parametrize(
    "line",
    [
        "config.parallelism.pipeline_parallel_degree += 2",
        "config.parallelism.pipeline_parallel_degree: int = 2",
        "if LARGE: config.parallelism.pipeline_parallel_degree = 2",
        "for n in (2,): config.parallelism.pipeline_parallel_degree = n",
        "other.parallelism.pipeline_parallel_degree = 2",
        "p = config.parallelism; p.pipeline_parallel_degree = 2",
        "setattr(config.parallelism, 'pipeline_parallel_degree', 2)",
        "setattr(config, 'parallelism', smaller)",
        "config = replace(config, parallelism=smaller)",
        "config.parallelism, x = smaller, 1",
        "config.activation_checkpoint.mode = 'none'",
    ],
)
def test_a_change_that_is_not_read_is_refused_by_name(line):
    with pytest.raises(ValueError, match=r"in line 8 may change the config in a way that is not"):
        python([line])


def test_a_value_that_is_computed_and_a_second_config_are_refused():
    with pytest.raises(ValueError, match="pipeline_parallel_degree=n // 2 is computed: give"):
        python(["config.parallelism.pipeline_parallel_degree = n // 2"])
    with pytest.raises(ValueError, match="the text has 2 Trainer.Config.* give the text of one"):
        from_torchtitan(2 * PYTHON, 16)
    with pytest.raises(ValueError, match=r"\*\*common is computed: give the fields"):
        from_torchtitan("config = Trainer.Config(**common)\n", 16)
    with pytest.raises(ValueError, match="'pipeline_degree' is not a key of parallelism"):
        python(["config.parallelism.pipeline_degree = 2"])


@NEEDS_TOML
def test_a_cut_outside_its_section_is_refused_and_a_section_of_ones_own_is_not():
    text = (
        "[training]\nlocal_batch_size = 8\n[experimental]\npipeline_parallel_degree = 2\n"
        "context_parallel_degree = 2\n"
    )
    with pytest.raises(ValueError) as error:
        from_torchtitan(text, 8)
    assert str(error.value) == (
        "experimental.pipeline_parallel_degree is not read there by torchtitan: give "
        "parallelism.pipeline_parallel_degree."
    )
    with pytest.raises(ValueError, match="job.local_batch_size is not read .*training.local_batch"):
        from_torchtitan(text.replace("training", "job"), 8)
    own = text[: text.index("[experimental]")] + "[my_team]\nowner = 'we'\n[validation]\n"
    found = from_torchtitan(own + "local_batch_size = 4\n", 8)
    assert found.layout.dp == 8 and found.passed_over == ("my_team", "validation")


def test_torchtitan_s_keys_since_0_3_are_read():
    text = """Trainer.Config(
    training=TrainingConfig(
        num_tokens_per_microbatch_per_dp_rank=4 * 4096, {}max_context_length=4096
    ),
    parallelism=ParallelismConfig(spmd_backend="full_dtensor", pipeline_parallel_degree={}),
)
"""
    assert from_torchtitan(text.format("", 1), 8).layout.micro_batch_size == 4
    layout = from_torchtitan(text.format("num_tokens_per_train_step=8 * 4 * 4096 * 3, ", 1), 8)
    assert layout.layout.num_micro_batches == 3
    with pytest.raises(ValueError, match="alone does not say the batch: give num_pp_microbatches"):
        from_torchtitan(text.format("", 2), 8)
    in_pipeline = text.format("", "2, num_pp_microbatches=6")
    assert from_torchtitan(in_pipeline, 8).layout.num_micro_batches == 6
    with pytest.raises(ValueError, match="16384 is not a whole number of sequences"):
        from_torchtitan(text.format("", 1).replace("length=4096", "length=5000"), 8)


# --- DeepSpeed and Megatron-LM: once refused, now read --------------------------------------------


def test_keys_that_deepspeed_takes_are_not_refused():
    from mini_dist.plan.calculators.from_deepspeed import ZERO_FIELD_NAMES, ZERO_KEYS

    assert {f"stage3_{name}" for name in ZERO_FIELD_NAMES} <= set(ZERO_KEYS)
    for name in ZERO_FIELD_NAMES:
        assert deepspeed({"zero_optimization": {"stage": 3, name: 1}})().layout.zero == 3
    others = ("bfloat16", "sparse_attention", "progressive_layer_drop", "eigenvalue")
    others = {name: {"enabled": True} for name in others} | {"elasticity": {"enabled": False}}
    assert set(deepspeed(others)().passed_over) == set(others)
    found = deepspeed({"zero_optimization": {"stage": 3, "mics_shard_size": 8}})()
    assert any("mics_shard_size=8 shards inside groups of 8" in each for each in found.cannot_say)
    found = deepspeed({"zero_optimization": {"stage": 2, "cpu_offload": True}})()
    assert any("offload_optimizer.device='cpu' is the Framework" in s for s in found.cannot_say)
    with pytest.raises(ValueError, match="elasticity.enabled=True lets DeepSpeed choose the batch"):
        deepspeed({"elasticity": {"enabled": True}})()
    with pytest.raises(ValueError, match=r"the config=\[\] is no group of keys"):
        from_deepspeed("[]", 4)


def test_a_sharding_strategy_without_fsdp_does_nothing():
    found = megatron("--data-parallel-sharding-strategy optim_grads_params")()
    assert found.layout.zero == 0
    assert found.cannot_say == (
        "data-parallel-sharding-strategy=optim_grads_params does nothing without "
        "use-megatron-fsdp.",
    )


VIRTUAL = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
GROUP = "microbatch-group-size-per-virtual-pipeline-stage"


def test_groups_of_micro_batches_are_read():
    found = megatron(f"{VIRTUAL} --global-batch-size 20 --{GROUP} 5")()  # dp 4
    assert found.layout.num_micro_batches == 5 and not found.cannot_say
    found = megatron(f"{VIRTUAL} --global-batch-size 32 --{GROUP} 8")()
    assert found.cannot_say == (f"{GROUP}=8: a Layout's micro-batches pass in groups of 4 here.",)
    for batch, group, says in (
        (20, 3, f"{GROUP}=3 does not fit 5 micro-batches, .*=4: give 5."),
        (24, 5, f"{GROUP}=5 does not fit 6 micro-batches, .*=4: give 6."),
        (8, 4, "leaves 2 micro-batches, fewer than pipeline-model-parallel-size=4: give .*=16."),
        (36, 5, f"{GROUP}=5 cannot be said by a Layout: .* 9 micro-batches in 2 rounds"),
    ):
        with pytest.raises(ValueError, match=says):
            megatron(f"{VIRTUAL} --global-batch-size {batch} --{GROUP} {group}")()
