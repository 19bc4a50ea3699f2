"""Other frameworks' words become a Layout: what we export comes back, what strangers write is
read, and a contradiction is one sentence that names the fields."""

import itertools
import json
import random
import sys

import pytest

from mini_dist.calculators import (
    Layout,
    deepspeed_json,
    from_deepspeed,
    from_megatron,
    from_torchtitan,
    megatron_arguments,
    model,
    torchtitan_config,
)

LLAMA = model("llama3-8b")  # 32 layers
NEEDS_TOML = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


def layouts():
    """Many layouts that cut 32 layers, each said in the one way that an export has."""
    made = set()
    for pp, dp, cp, tp in itertools.product((1, 2, 4), (1, 2, 6), (1, 2), (1, 2, 8)):
        for zero, micro, m in itertools.product((0, 1, 2, 3), (1, 3), (1, 8)):
            if zero and dp * cp == 1:
                continue  # nothing to shard
            for recompute, every in (("none", 1), ("selective", 1), ("full", 1), ("full", 2)):
                for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("zb_v", 2)):
                    if pp == 1 and schedule != "1f1b" or m % pp and schedule != "1f1b":
                        continue
                    made.add(
                        Layout(
                            pp=pp,
                            dp=dp,
                            cp=cp,
                            tp=tp,
                            sequence_parallel=tp > 1,
                            zero=zero,
                            micro_batch_size=micro,
                            num_micro_batches=m,
                            recompute=recompute,
                            schedule=schedule,
                            num_chunks=chunks,
                            recompute_every=every,
                        )
                    )
    return sorted(made, key=repr)


LAYOUTS = layouts()


def exported(export, *arguments):
    """What the export says, or None where it refuses."""
    try:
        return export(*arguments)
    except ValueError:
        return None


def test_megatron_arguments_come_back():
    back = 0
    for layout in LAYOUTS:
        words = exported(megatron_arguments, LLAMA, layout)
        if words:
            assert from_megatron(words, layout.world_size).layout == layout
            back += 1
    assert back > 500


def test_a_ds_config_comes_back_with_what_the_program_says():
    back = 0
    beside = ("pp", "cp", "tp", "sequence_parallel", "recompute", "recompute_every", "schedule")
    for layout in LAYOUTS:
        text = exported(deepspeed_json, layout)
        if text:
            program = {name: getattr(layout, name) for name in (*beside, "num_chunks")}
            assert from_deepspeed(text, layout.world_size, **program).layout == layout
            back += 1
    assert back > 1000


def same_in_torchtitan(layout):
    """torchtitan has one word for ZeRO-1 and 2, shards over cp always, and knows no ZeRO-2 in a
    pipeline."""
    if layout.cp > 1 and not layout.zero:
        return False
    return layout.zero != (2 if layout.pp > 1 else 1)


def test_a_torchtitan_config_comes_back():
    back = 0
    for layout in LAYOUTS:
        text = exported(torchtitan_config, LLAMA, layout)
        if text and same_in_torchtitan(layout):
            found = from_torchtitan(text, layout.world_size, num_layers=32)
            assert found.layout == layout
            if layout.dp == 1 or layout.cp == 1:
                assert not found.cannot_say
            back += 1
    assert back > 300


def test_what_torchtitan_has_one_word_for_comes_back_as_the_other():
    for layout, zero in ((Layout(dp=4, zero=1), 2), (Layout(dp=4, pp=2, zero=2), 1)):
        text = torchtitan_config(LLAMA, layout)
        assert from_torchtitan(text, num_layers=32).layout == layout.replace(zero=zero)


def test_experts_come_back():
    config = model("mixtral-8x7b")
    layout = Layout(dp=8, tp=2, ep=4, sequence_parallel=True, zero=1, num_micro_batches=2)
    assert from_megatron(megatron_arguments(config, layout), 16).layout == layout
    layout = layout.replace(tp=1, sequence_parallel=False, zero=3)
    assert from_torchtitan(torchtitan_config(config, layout), 8).layout == layout


def test_experts_that_span_tp_come_back():
    config = model("mixtral-8x7b")
    whole = Layout(dp=4, tp=2, ep=8, etp=1, sequence_parallel=True, zero=1)
    cut = Layout(dp=2, tp=4, ep=4, etp=2, sequence_parallel=True, zero=1)
    for layout in (whole, cut):
        assert from_megatron(megatron_arguments(config, layout), 8).layout == layout
    for zero in (2, 3):
        layout = whole.replace(zero=zero)
        assert from_torchtitan(torchtitan_config(config, layout), 8).layout == layout
    for layout in (cut, whole.replace(ep=1)):  # cut experts, and whole ones that ep does not spread
        with pytest.raises(ValueError, match="give etp=1 and ep of 2 or more, or tp=1"):
            torchtitan_config(config, layout)


# The sizes of Megatron-LM's tests/functional_tests/test_cases/moe/*/model_config.yaml, each on the
# 8 devices of a node: (its name there, arguments, the layout).
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


# torchtitan, models/qwen3_5/config_registry.py (May 2026): its models with experts, the largest
# one last: (tensor, expert, pipeline degree, local batch, ranks).
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
    config["parallelism"]["expert_tensor_parallel_degree"] = tp  # of torchtitan 0.2
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


# Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh: its sizes, on as many nodes as given.
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
    assert sentence.startswith("data_parallel_replicate_degree=2 beside 4 shards is HSDP")


# As the documentation of DeepSpeed's config and of Hugging Face's integration write it.
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
    assert "passed over: bf16, gradient_clipping" in str(found)


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
        "zero_optimization.stage=3 does not go with pp=4: DeepSpeed's pipeline refuses stages 2 "
        "and 3 (runtime/pipe/engine.py); give stage=1, or pp=1.",
    ),
    (deepspeed({}, pp=3), "pp=3 does not divide world_size=16: give world_size=15, or pp=2."),
    (
        deepspeed({}, pp=3, tp=2),
        "pp=3 x tp=2, which is 6, does not divide world_size=16: give world_size=18.",
    ),
    (
        deepspeed({"train_microbatch_size_per_gpu": 4}),
        "'train_microbatch_size_per_gpu' is no key of DeepSpeed's config: give "
        "'train_micro_batch_size_per_gpu'.",
    ),
    (
        deepspeed({"zero_optimization": {"Stage": 3}}),
        "'Stage' is no key of zero_optimization: give 'stage'.",
    ),
    (
        deepspeed({"zero_optimization": {"stage": "3"}}),
        "zero_optimization.stage='3' is no whole number: give 3, without quotes.",
    ),
    (
        deepspeed({"zero_optimization": {"stage": 4}}),
        "zero_optimization.stage=4 is not known: give 0, 1, 2 or 3.",
    ),
    (
        deepspeed({"train_batch_size": 64.0}),
        "train_batch_size=64.0 is no whole number: give 64.",
    ),
    (
        deepspeed({"train_batch_size": "sixty-four"}),
        "train_batch_size='sixty-four' is no whole number: give an int, 1 or more.",
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
        "--tensor_model_parallel_size is no argument of Megatron-LM: give "
        "--tensor-model-parallel-size.",
    ),
    (
        megatron("--tensor-parallel-size 8"),
        "--tensor-parallel-size is no argument of Megatron-LM: give --tensor-model-parallel-size.",
    ),
    (
        megatron("--use-distributed-optimiser"),
        "--use-distributed-optimiser is no argument of Megatron-LM: give "
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
        "pipeline-model-parallel-size=two is no whole number: give an int, 1 or more.",
    ),
    (
        megatron("--micro-batch-size 4"),
        "--micro-batch-size is given as 1 and as 4: give it once.",
    ),
    (
        megatron("--use-torch-fsdp2 --pipeline-model-parallel-size 4"),
        "use-torch-fsdp2 does not go with pipeline-model-parallel-size=4, says Megatron-LM: give "
        "one of them.",
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
        "training.batch_size is no key of torchtitan any more: give training.local_batch_size.",
    ),
    (
        titan(cuts={"tensor_parallel_degre": 2}),
        "'tensor_parallel_degre' is no key of parallelism: give 'tensor_parallel_degree'.",
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
        "'trainning' is no key of torchtitan: give 'training'.",
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
    """What an importer makes of it; `config` is filled, so that a failure shows it."""
    from mini_dist.calculators.from_deepspeed import BATCH, ZERO_KEYS
    from mini_dist.calculators.from_torchtitan import PARALLELISM, TRAINING

    if dice.random() < 0.5:
        config |= {BATCH_EACH: 4, **with_junk(dice, BATCH)}
        config["zero_optimization"] = with_junk(dice, ZERO_KEYS)
        return from_deepspeed(config, 16)
    config["training"] = with_junk(dice, TRAINING)
    config["parallelism"] = with_junk(dice, PARALLELISM)
    return from_torchtitan(config, 16, 32)


def test_whatever_stands_in_a_config_is_a_layout_or_one_sentence():
    """3,000 configs with junk in some places, as strangers write them."""
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
