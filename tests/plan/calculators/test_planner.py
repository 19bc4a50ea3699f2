"""plan() accounts for every layout, puts the best first, gives reasons, and exports."""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mini_dist.plan.calculators import (
    deepspeed_json,
    device_memory,
    hardware,
    layout_source,
    megatron_arguments,
    model,
    peak_memory,
    plan,
    planner,
    step_time,
    torchrun_line,
    torchtitan_config,
)
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.plan.calculators.layouts import Search, layouts, short
from mini_dist.plan.calculators.memory import SHARDED_FROM, rank_memory, states_of_all
from mini_dist.plan.config import Layout, ModelConfig


@pytest.fixture(scope="module")
def big():
    return plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20)


def test_every_candidate_fits_and_the_dropped_do_not(big):
    limit = hardware("h100").device.memory_bytes
    assert all(candidate.device_bytes <= limit for candidate in big.candidates)
    for drop in big.dropped[::20]:
        assert drop.reason == "memory"
        assert device_memory(peak_memory(big.model, drop.layout, big.how).total, big.how) > limit
        assert re.match(
            r"[\d.]+ [GT]iB of 79.60 GiB, most of it \w+|"
            r"[\d.]+ [GT]iB of model states alone, for 79.60 GiB",
            drop.detail,
        )


@pytest.mark.parametrize("how", FRAMEWORKS)
@pytest.mark.parametrize("name", ["llama3-70b", "deepseek-v3", "gpt2"])
def test_the_states_of_all_layouts_at_once_are_those_of_each_and_a_floor_of_its_peak(name, how):
    config = model(name)
    every = list(layouts(config, 128, 1024, Search((1, 4), max_tp=8, max_pp=8, max_cp=2)))
    if FRAMEWORKS[how].own_runs:  # it walks every action of a schedule
        every = [layout for layout in every if layout.num_chunks <= 2]
    every = every[:: len(every) // 50]
    able = []
    for layout in every:
        try:
            FRAMEWORKS[how].check(config, layout.check(config))
            able.append(layout)
        except ValueError:
            continue
    assert len(able) > 20
    for layout, floor in zip(able, states_of_all(config, able, how)):
        ranks = [rank_memory(config, layout, how, rank) for rank in range(layout.pp)]
        states = [
            sum(line.value for line in rank if line.name.split()[0] in SHARDED_FROM)
            for rank in ranks
        ]
        if not FRAMEWORKS[how].own_runs or layout.num_micro_batches > 1:
            assert floor == pytest.approx(max(states))
        assert floor <= max(rank.total for rank in ranks) * (1 + 1e-12)


def test_candidates_are_ranked_and_use_the_whole_machine_and_batch(big):
    again = big.candidates[: Search().num_simulated]
    assert [c.time.seconds for c in again] == sorted(c.time.seconds for c in again)
    simulated = [
        c
        for c in again
        if any(line.source == "mini_dist.plan.schedule.simulate" for line in c.time.breakdown)
    ]
    assert big.num_simulated == len(simulated) == sum(c.layout.pp > 1 for c in again)
    for candidate in big.candidates:
        assert candidate.layout.world_size == 1024
        assert candidate.layout.global_batch_size * 8192 == 4 * 2**20
    assert len({candidate.layout for candidate in big.candidates}) == len(big.candidates)


def test_the_funnel_accounts_for_every_layout(big):
    text = big.funnel()
    total, dropped, fit = (
        int(re.search(pattern, text)[1])
        for pattern in (r"^(\d+) layouts", r"- (\d+) dropped: memory", r"= (\d+) fit")
    )
    assert total == dropped + fit == len(big.candidates) + len(big.dropped)


def test_the_explanation_names_both_what_is_saved_and_what_is_paid(big):
    words = big.explain()
    assert short(big.best.layout) in words and short(big.runner_up.layout) in words
    assert "faster than" in words and "it saves" in words and "memory" in words
    assert big.runner_up.layout.axes != big.best.layout.axes
    assert "Nearest published run" in str(big)


def test_enumeration_finds_every_cut_of_a_small_machine():
    config = ModelConfig(num_layers=4)
    tried = list(layouts(config, 8, 8, Search((1,), ("none",))))
    found = {(l.pp, l.dp, l.tp) for l in tried}
    assert found == {
        (pp, 8 // pp // tp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4, 8) if 8 % (pp * tp) == 0
    }
    zeros = {(l.pp > 1, l.zero) for l in tried if l.dp > 1}
    assert zeros == {(False, 1), (False, 2), (False, 3), (True, 1)}
    only = layouts(config, 8, 8, Search((1,), ("none",), zero=(1,)))
    assert {l.zero for l in only if l.dp > 1} == {1}


EVERY_SCHEDULE = ("1f1b", "interleaved", "zb_h1", "zb_v")


def test_zero_bubble_schedules_are_tried_only_where_they_are_named():
    config = model("bloom-176b")  # 70 layers: 72 stages with the embedding and the head
    usual, wide = (
        list(layouts(config, 384, 2048, search))
        for search in (Search(max_tp=8), Search(max_tp=8, schedules=EVERY_SCHEDULE))
    )
    assert usual == [l for l in wide if not l.schedule.startswith("zb_")]
    assert {l.schedule for l in wide if l.pp > 1} == set(EVERY_SCHEDULE)
    assert {l.schedule for l in wide if l.pp == 1} == {"1f1b"}
    assert {l.pp for l in wide if l.schedule == "zb_v"} == {2, 3, 4, 6, 12}  # 2 pp divides 72
    only = [l for l in layouts(config, 384, 2048, Search(schedules="zb_v")) if l.pp > 1]
    assert only and {(l.schedule, l.num_chunks) for l in only} == {("zb_v", 2)}


def test_a_plan_finds_what_a_step_under_a_zero_bubble_schedule_takes():
    name, machine, size = "gpt3-175b", "a100-80", (96, 96 * 2048)
    usual = plan(name, machine, *size)
    wide = plan(name, machine, *size, search=Search(schedules=EVERY_SCHEDULE))
    assert wide.best.layout.schedule == "zb_v" and "zb_v" in short(wide.best.layout)
    assert wide.best.time == step_time(name, wide.best.layout, machine, simulate=True)
    assert wide.best.time.seconds < usual.best.time.seconds
    by_formula = wide.candidates[Search().num_simulated :]
    for candidate in [c for c in by_formula if c.layout.schedule == "zb_v"][::20]:
        assert candidate.time == step_time(name, candidate.layout, machine)
    assert {c.layout for c in usual.candidates} < {c.layout for c in wide.candidates}
    assert "Not searched unless asked: zero-bubble" in str(usual)


def test_on_98304_devices_most_layouts_cost_no_waterfall_and_no_step(monkeypatch):
    calls = Counter()

    def counted(name, calculate):
        def calculates(*arguments, **more):
            calls[name] += 1
            return calculate(*arguments, **more)

        monkeypatch.setattr(planner, name, calculates)

    for name in ("peak_memory", "step_time"):
        counted(name, getattr(planner, name))
    found = plan("deepseek-v3", "h100", 98_304, 98_304 * 4096)
    tried = len(found.candidates) + len(found.dropped)
    # (With experts that tp shards and whole ones that ep spreads over tp: 15,339 layouts.)
    assert found.best.layout.world_size == 98_304 and tried < 12_000
    # The memory is computed only if the model states alone fit, and the time only if the memory
    # fits, or nearly; the first layouts are timed once more.
    assert calls["peak_memory"] < tried / 2
    nearly = calls["step_time"] - len(found.candidates) - Search().num_simulated
    assert 0 <= nearly < tried / 50


@pytest.mark.parametrize(
    "name, machine, size",
    [
        ("llama3-8b", "a100-80", 64),
        ("llama3-70b", "b200", 256),
        ("gpt3-175b", "h100-hf", 512),  # a slow network hides recomputation
        ("mixtral-8x7b", "h100", 64),
        ("deepseek-v3", "h200", 256),
    ],
)
def test_the_fastest_of_each_cut_are_those_of_the_whole_search(name, machine, size):
    search = Search((1, 2), zero=(1, 3), max_pp=16, recompute_every=(1, 2), num_simulated=0)
    whole, part = (
        plan(name, machine, size, 2**22, search=replace(search, fastest_of_axes=some))
        for some in (False, True)
    )
    assert fastest_of_axes(part) == fastest_of_axes(whole)
    assert part.nearly == whole.nearly
    looked_at = [len(found.candidates) + len(found.dropped) for found in (part, whole)]
    assert looked_at[0] < looked_at[1]
    assert [drop for drop in whole.dropped if drop in {*part.dropped}] == [*part.dropped]
    fit = {tuple(c.layout.axes.values()) for c in whole.candidates}
    where_none_fits = [d for d in whole.dropped if tuple(d.layout.axes.values()) not in fit]
    assert {*where_none_fits} <= {*part.dropped}  # to report what came nearest
    bound = planner._lower_bound(whole.model, whole.machine, whole.how)
    assert all(bound(c.layout) <= c.time.seconds for c in whole.candidates)
    assert max(bound(c.layout) / c.time.seconds for c in whole.candidates) > 0.8


def test_what_nearly_fits_is_compared_by_the_same_way_of_timing():
    for simulated in (0, 10):
        search = Search(micro_batch_sizes=(1,), zero=(1,), num_simulated=simulated)
        found = plan("llama3-70b", "h100", 512, 4 * 2**20, search=search)
        for candidate in (found.best, found.nearly):
            again = step_time(found.model, candidate.layout, "h100", simulate=simulated > 0)
            assert candidate.time == again


def fastest_of_axes(found):
    first = {}
    for candidate in found.candidates:
        first.setdefault(tuple(candidate.layout.axes.values()), candidate)
    return first


def test_what_cannot_be_cut_is_dropped_with_its_reason():
    config = model("llama3-8b").replace(num_heads=12, num_kv_heads=12, head_dim=128, d_ffn=1536)
    answer = plan(config, "h100", 8, 64 * 8192)
    assert any(
        drop.reason == "the model cannot be cut so"
        and "tp=8 does not divide num_heads=12" in drop.detail
        for drop in answer.dropped
    )


def test_long_sequences_are_cut_by_cp_and_experts_by_ep():
    long = plan(model("llama3-8b").replace(seq_len=131072), "h100", 64, 64 * 131072)
    assert long.best.layout.cp > 1
    moe = plan("mixtral-8x7b", "a100-80", 64, 2**21)
    assert moe.best.layout.ep > 1


def test_experts_that_span_tp_are_tried_and_can_be_the_fastest():
    search = Search(micro_batch_sizes=(1,), zero=(1,), max_pp=1, schedules=("1f1b",))
    config = model("mixtral-8x7b").replace(num_layers=8)
    answer = plan(config, "h100", 8, 8 * config.seq_len, search=replace(search, max_tp=4))
    layouts = [c.layout for c in answer.candidates] + [d.layout for d in answer.dropped]
    # With tp=4, eight experts can stay whole if ep spreads them; six cannot, so tp cuts them.
    assert {(layout.ep, layout.etp) for layout in layouts if layout.tp == 4} == {(4, 1), (8, 1)}
    six = plan(config.replace(num_experts=6), "h100", 8, 8 * config.seq_len, search=search)
    of_six = [c.layout for c in six.candidates] + [d.layout for d in six.dropped]
    assert {layout.etp for layout in of_six if layout.tp == 4} == {4}
    of_four = [c for c in answer.candidates if c.layout.tp == 4]
    assert of_four[0].layout.etp == 1
    assert "tp=4 ep=8 etp=1" in short(of_four[0].layout)
    dense = plan("gpt2", "h100", 8, 64 * 1024)
    assert all(c.layout.etp == c.layout.tp for c in dense.candidates)


def test_a_small_model_on_one_device_needs_no_axes():
    alone = plan("gpt2", "a100-80", 1, 64 * 1024)
    assert alone.best.layout.world_size == 1 and alone.runner_up is None
    assert "only way" in alone.explain()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_devices": 0}, "num_devices=0 is too small"),
        ({"num_devices": 2.5}, "num_devices=2.5 is not"),
        ({"global_batch_tokens": 100}, "global_batch_tokens=100 is not a whole number"),
        ({"global_batch_tokens": 3 * 8192 + 1}, ": 24576 would be"),
        ({"model": "llama9"}, "model='llama9' is not known"),
        ({"machine": "abacus"}, "hardware='abacus' is not known"),
        (
            {"model": "llama3-405b", "machine": hardware("h100").replace(file_bytes=0)},
            "num_devices=8 of h100 is too few: the nearest layout",
        ),
        (
            {"model": "llama3-70b", "num_devices": 125},
            "No layout of num_devices=125 cuts",
        ),
    ],
)
def test_impossible_plans_are_refused(arguments, says):
    with pytest.raises(ValueError) as error:
        plan(
            **{
                "model": "llama3-8b",
                "machine": "h100",
                "num_devices": 8,
                "global_batch_tokens": 2**20,
                **arguments,
            }
        )
    assert says in str(error.value)
    assert "\n" not in str(error.value)


LAYOUT = Layout(
    pp=4,
    dp=8,
    tp=8,
    sequence_parallel=True,
    zero=1,
    micro_batch_size=2,
    num_micro_batches=16,
    schedule="interleaved",
    num_chunks=5,
    recompute="full",
)


def test_megatron_arguments_say_the_layout_and_the_model():
    words = megatron_arguments(model("llama3-70b"), LAYOUT)
    said = dict(zip(words, words[1:]))
    assert said["--tensor-model-parallel-size"] == "8"
    assert said["--pipeline-model-parallel-size"] == "4"
    assert said["--num-layers-per-virtual-pipeline-stage"] == "4"  # 80 layers, 20 stages
    assert said["--global-batch-size"] == str(8 * 16 * 2) and said["--micro-batch-size"] == "2"
    assert said["--hidden-dropout"] == said["--attention-dropout"] == "0.0"  # their default is 0.1
    assert said["--num-query-groups"] == "8" and said["--recompute-granularity"] == "full"
    for flag in (
        "sequence-parallel",
        "use-distributed-optimizer",
        "swiglu",
        "bf16",
        "untie-embeddings-and-output-weights",
        "disable-bias-linear",
    ):
        assert f"--{flag}" in words
    assert not {"True", "False"} & set(words)
    moe = megatron_arguments(model("mixtral-8x7b"), Layout(dp=8, ep=8, zero=1))
    assert dict(zip(moe, moe[1:]))["--expert-model-parallel-size"] == "8"


def test_megatron_counts_embedding_and_head_as_layers_where_the_layers_alone_are_uneven():
    bloom = model("bloom-176b").replace(positions="rotary", embedding_norm=False)
    words = megatron_arguments(bloom, Layout(pp=12, tp=4, dp=8, num_micro_batches=12))
    both = {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"}
    assert both <= set(words)  # 70 + 2 layers in 12 stages
    assert not both & set(megatron_arguments(bloom, Layout(pp=10, num_micro_batches=10)))


def test_megatron_arguments_keep_every_part_of_a_mixture_of_experts():
    words = megatron_arguments(model("deepseek-v3"), Layout(dp=8, ep=8, zero=1))
    said = dict(zip(words, words[1:]))
    assert said["--moe-layer-freq"] == "([0]*3+[1]*58)"  # 61 layers, the first three dense
    assert said["--moe-shared-expert-intermediate-size"] == "2048"
    assert said["--moe-router-score-function"] == "sigmoid"
    assert "--moe-router-enable-expert-bias" in words


def test_deepspeed_config_multiplies_up():
    config = json.loads(deepspeed_json(LAYOUT))
    assert (
        config["train_batch_size"]
        == config["train_micro_batch_size_per_gpu"]
        * config["gradient_accumulation_steps"]
        * LAYOUT.dp
    )
    assert config["zero_optimization"]["stage"] == 1


def evaluated(source: str) -> dict:
    """Evaluate `source` with torchtitan's classes as dictionaries of their arguments."""
    names = dict.fromkeys(("TrainingConfig", "ParallelismConfig"), dict)
    names |= {"Trainer": SimpleNamespace(Config=dict), "FullAC": SimpleNamespace(Config=dict)}
    return eval(source, names)


def test_torchtitan_config_evaluates_and_multiplies_up():
    titan = evaluated(torchtitan_config(model("llama3-70b"), LAYOUT))
    parallelism = titan["parallelism"]
    assert parallelism["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert parallelism["pipeline_parallel_layers_per_stage"] == 4  # 80 layers, 20 stages
    assert parallelism["pipeline_parallel_first_stage_less_layers"] == 0
    assert parallelism["enable_sequence_parallel"] == LAYOUT.sequence_parallel
    assert titan["training"]["local_batch_size"] == 32  # the pipeline cuts it into 16 x 2
    assert titan["activation_checkpoint"] == {}  # FullAC with its defaults
    ways = ("data_parallel_replicate", "data_parallel_shard", "context_parallel")
    degrees = [
        parallelism[f"{way}_degree"] for way in (*ways, "tensor_parallel", "pipeline_parallel")
    ]
    assert math.prod(degrees) == LAYOUT.world_size and parallelism["tensor_parallel_degree"] == 8
    alone = evaluated(torchtitan_config(model("llama3-8b"), Layout(dp=4, num_micro_batches=2)))
    assert alone["activation_checkpoint"] is None  # the default would be SelectiveAC
    assert alone["parallelism"]["data_parallel_replicate_degree"] == 4


def test_the_schedule_names_are_those_of_torch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    from mini_dist.plan.calculators.export import TORCH_SCHEDULES

    for name in TORCH_SCHEDULES.values():
        schedules.get_schedule_class(name)


def test_a_plan_exports_its_choice_or_says_why_not(big):
    said = big.exports()
    assert eval(said["mini_dist"]) == big.best.layout
    assert json.loads(said["DeepSpeed"])["train_batch_size"] == 4 * 2**20 // 8192
    assert "--nnodes=128" in said["torchrun"]
    if big.best.layout.zero > 1:
        assert said["Megatron-LM"].startswith("not for Megatron-LM: zero=")
    assert "tensor_parallel_degree" in said["torchtitan"]


def test_torchrun_starts_every_rank_once():
    assert torchrun_line(Layout(dp=4), 8) == "torchrun --standalone --nproc-per-node=4 train.py"
    line = torchrun_line(LAYOUT, 8, "run.py")
    assert "--nnodes=32 --nproc-per-node=8" in line and line.endswith("run.py")


def test_a_layout_s_source_evaluates_to_it():
    assert eval(layout_source(LAYOUT)) == LAYOUT
    assert layout_source(Layout()) == "Layout()"
    assert layout_source(Layout(tp=2)) == "Layout(tp=2)"  # etp follows tp
    spanning = Layout(dp=2, tp=2, ep=4, etp=1, sequence_parallel=True)
    assert eval(layout_source(spanning)) == spanning


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: megatron_arguments(c, Layout(dp=2, zero=3)), "zero=3 is not what Megatron"),
        (lambda c: megatron_arguments(c, Layout(pp=2, schedule="gpipe")), "schedule='gpipe'"),
        (lambda c: megatron_arguments(c, Layout(pp=3)), "pp*num_chunks=3 does not divide"),
        (lambda c: megatron_arguments(c.replace(positions="alibi"), Layout()), "positions='alibi'"),
        (lambda c: deepspeed_json(Layout(pp=2, zero=2)), "zero=2 cannot be combined with pp=2"),
        (lambda c: torchtitan_config(c, Layout(pp=3)), "pp*num_chunks=3 does not divide"),
        (lambda c: torchtitan_config(c, Layout(recompute="selective")), "recompute='selective'"),
        (
            lambda c: torchtitan_config(model("mixtral-8x7b"), Layout(dp=2, tp=2, ep=2)),
            "ep=2, etp=2: torchtitan's expert_parallel_degree spreads whole experts",
        ),
        (lambda c: torchtitan_config(c, Layout(pp=2, schedule="zb_h1")), "schedule='zb_h1'"),
        (lambda c: torchrun_line(Layout(dp=12), 8), "devices_per_node=8 does not divide"),
    ],
)
def test_what_a_framework_cannot_say_is_refused(call, says):
    with pytest.raises(ValueError) as error:
        call(model("llama3-8b"))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("qwen2.5-7b", "t4"),
        ("qwen3-8b", "rtx-5090"),
        ("glm-4.5", "gb200"),  # nodes of 72
        ("gpt-oss-20b", "ascend-910b"),
    ],
)
def test_two_nodes_of_any_machine_are_planned_for(name, machine):
    size = 2 * hardware(machine).devices_per_node
    search = Search((1,), zero=(1, 3), max_pp=8, num_simulated=0)
    best = plan(name, machine, size, size * 2**15, search=search).best
    assert best.layout.world_size == size and 0 < best.time.seconds
    assert best.device_bytes < hardware(machine).device.memory_bytes
