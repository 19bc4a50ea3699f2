"""Step times: the parts behave like the machine, and predictions are near published runs."""

import math

import pytest

from mini_dist.collectives.mesh import axis_groups
from mini_dist.plan.calculators import (
    Compression,
    device_memory,
    hardware,
    model,
    num_parameters,
    peak_memory,
    readable,
    step_time,
)
from mini_dist.plan.calculators.bubble import bubble_seconds, message_line
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.calculators.devices import KERNEL_SECONDS
from mini_dist.plan.calculators.frameworks import FRAMEWORKS, framework
from mini_dist.plan.calculators.kernels import LayerPiece, gemm_seconds, layer_time, stream_seconds
from mini_dist.plan.calculators.parameters import copies, parameters_of_rank
from mini_dist.plan.calculators.published import (
    ZERO_BUBBLE_RATES,
    korthikanti_2022,
    later,
    megatron_2021,
    mpt_h100,
    nearest,
    nemo_h100,
)
from mini_dist.plan.config import Layout
from mini_dist.plan.schedule import SCHEDULES, Times, simulate

A100, H100 = hardware("a100-80"), hardware("h100")


def test_a_gemm_pays_for_a_wave_that_is_not_full():
    """108 tiles of 128 x 256 are one wave on an A100; one more tile costs a second wave."""
    full, one_more = (gemm_seconds(A100.device, 108 * 128, n, 8192) for n in (256, 257))
    assert one_more == pytest.approx(2 * full, rel=0.02)
    useful = 2 * 108 * 128 * 256 * 8192 / full
    assert 0.95 * A100.device.gemm_rate < useful < A100.device.gemm_rate


def test_a_thin_gemm_waits_for_memory():
    one_row = gemm_seconds(A100.device, 1, 8192, 8192)
    assert one_row == pytest.approx(stream_seconds(A100.device, 2 * 8192 * 8192), rel=0.01)


@pytest.mark.parametrize("shape", [(0, 512, 8192), (128, 0, 8192), (128, 512, 0)])
def test_a_gemm_without_elements_is_only_launched(shape):
    """An expert that gets no token in a step runs such a GEMM."""
    assert gemm_seconds(A100.device, *shape) == KERNEL_SECONDS


def test_a_group_inside_a_node_uses_the_node_s_links_and_one_across_uses_the_ports():
    size = 1e9
    inside = collective_seconds(H100, "all_reduce", size, 8)
    assert inside == pytest.approx(2 * 7 / 8 * size / (0.75 * 450e9), rel=0.05)
    alone = collective_seconds(H100, "all_reduce", size, 16, stride=8)  # one member per node
    assert alone == pytest.approx(2 * 15 / 16 * size / (0.92 * 50e9), rel=0.05)
    together = collective_seconds(H100, "all_reduce", size, 16, stride=1)  # eight ports at once
    assert inside < together < alone / 4
    assert collective_seconds(H100, "all_reduce", size, 1) == 0


def test_an_all_to_all_between_nodes_leaves_by_each_device_s_own_port():
    """Priced as a ring, it would share the ports of the node and look faster than it is."""
    size = 1e9  # per rank; 56/64 of it goes to other nodes
    across = collective_seconds(H100, "all_to_all", size, 64)
    assert across == pytest.approx(56 / 64 * size / (0.92 * 50e9), rel=0.05)
    assert across > 4 * collective_seconds(H100, "all_gather", size, 64)
    inside = collective_seconds(H100, "all_to_all", size, 8)
    assert inside == pytest.approx(7 / 8 * size / H100.node_link("all_to_all").bandwidth, rel=0.05)


def test_a_ring_of_keys_that_leaves_the_node_goes_at_the_pace_of_the_network():
    layer = model("llama3-8b").replace(seq_len=131_072)

    def exchange(cp):
        lines = step_time(layer, Layout(cp=cp, num_micro_batches=1), "h100").breakdown
        return lines["cp exchange"] / lines["attention"]

    assert exchange(8) < 0.02  # NVLink: hidden behind attention, which it slows a little
    assert exchange(64) > 0.2


def test_experts_gradients_travel_between_ranks_that_stand_as_far_apart_as_in_the_mesh():
    mixtral, layout = model("mixtral-8x7b"), Layout(dp=16, tp=2, ep=4, sequence_parallel=True)
    groups = axis_groups(pp=1, dp=16, cp=1, tp=2, ep=4)
    held = parameters_of_rank(mixtral, layout, 0)
    for (numel, size, stride), axis, count in zip(
        copies(held, layout), ("dp", "edp"), (held.dense, held.experts)
    ):
        ranks = groups[axis][0]
        assert (numel, size, stride) == (count, len(ranks), ranks[1] - ranks[0]), axis


def test_whole_experts_on_all_tp_ranks_wait_for_ep_and_not_for_tp():
    """In a layer with experts, tp then serves only attention, and ep groups are neighbors."""
    mixtral, machine, how = model("mixtral-8x7b"), hardware("h100"), framework("megatron-core")
    cut = Layout(dp=16, tp=4, ep=2, sequence_parallel=True)
    whole = cut.replace(ep=8, etp=1)
    groups = axis_groups(pp=1, dp=16, cp=1, tp=4, ep=8, etp=1)
    numel, size, stride = copies(parameters_of_rank(mixtral, whole, 0), whole)[1]
    ranks = groups["edp"][0]
    assert (size, stride) == (len(ranks), ranks[1] - ranks[0]) == (8, 8)
    assert groups["ep"][0] == list(range(8))
    assert numel == copies(parameters_of_rank(mixtral, cut, 0), cut)[1][0]  # equal counts
    pieces = [LayerPiece.of(mixtral, layout, moe=True) for layout in (cut, whole)]
    a, b = (layer_time(mixtral, piece, machine, how).forward for piece in pieces)
    assert b["tp collectives"] == pytest.approx(a["tp collectives"] / 2)
    assert b["matrices"] < a["matrices"]  # fewer and larger
    assert b["attention"] == a["attention"] and b["elementwise"] == a["elementwise"]


@pytest.mark.parametrize("run", megatron_2021() + korthikanti_2022(), ids=lambda run: run.name)
def test_published_runs_come_out_near_and_inside_the_interval(run):
    """Zero-shot: no constant was fitted to these tables."""
    ours = run.predicted()
    assert ours.seconds == pytest.approx(run.seconds, rel=0.12)
    assert ours.low < run.seconds < ours.high


def test_fsdp_on_h100_comes_out_near_in_a_table_that_the_model_had_not_seen():
    runs = mpt_h100()
    errors = [abs(run.predicted().seconds / run.seconds - 1) for run in runs]
    assert len(runs) == 52 and sum(errors) / 52 < 0.1 and max(errors) < 0.25


def test_mean_errors_on_the_published_tables_meet_their_bars():
    for runs, bar in ((megatron_2021(), 0.06), (korthikanti_2022(), 0.04)):
        errors = [abs(run.predicted().seconds / run.seconds - 1) for run in runs]
        assert sum(errors) / len(errors) < bar


def test_the_lines_add_up_and_utilisations_follow():
    run = megatron_2021()[6]
    ours = run.predicted()
    assert ours.seconds == sum(line.value for line in ours.breakdown)
    assert ours.mfu < ours.hfu < ours.mfu * 4 / 3 + 1e-9  # full recompute: one more forward
    assert ours.tokens == run.layout.global_batch_size * 2048
    assert ours.low < ours.seconds < ours.high
    days = ours.training(1e12, run.layout.world_size, dollars_per_hour=2.0)
    assert days["days, expected"] == pytest.approx(1e12 / ours.tokens_per_second / 86400)
    assert days["cost, low"] == pytest.approx(days["days, low"] * 24 * run.layout.world_size * 2.0)


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("naive", 1)]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_the_closed_form_of_the_bubble_is_the_simulator_s(name, chunks, p, m):
    """With equal stages and no communication, the closed form is exact."""
    layout = Layout(pp=p, num_micro_batches=m, schedule=name, num_chunks=chunks)
    f, b, w = 1.0, 1.3, 0.8
    bubble, _ = bubble_seconds(layout, [f] * p, [b + w] * p, [w] * p)
    lists = SCHEDULES[name](p, m, *((chunks,) if chunks > 1 else ()))
    makespan = simulate(lists, Times(f / chunks, b / chunks, w / chunks)).makespan
    assert bubble == pytest.approx(makespan - m * (f + b + w), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 3, 8), (4, 2, 6), (4, 5, 16), (8, 2, 9), (8, 3, 24)])
@pytest.mark.parametrize("hop", [0.02, 0.3, 1.0])  # of a chunk's forward
def test_waiting_for_messages_between_chunks_is_the_simulator_s(p, v, m, hop):
    """While a message travels, a rank computes other chunks; only the schedule's ends wait."""
    layout = Layout(pp=p, num_micro_batches=m, schedule="interleaved", num_chunks=v)
    lists, f, b = SCHEDULES["interleaved"](p, m, v), 1.0, 2.0
    still, moving = (
        simulate(lists, Times(f / v, b / v / 2, b / v / 2, comm=comm)).makespan
        for comm in (0.0, hop * f / v)
    )
    hops, core = [hop * f / v] * (p - 1), framework("megatron-core")
    waits, _ = message_line(layout, core, hops, f, b)
    assert waits == pytest.approx(moving - still, rel=1e-9)
    old, _ = message_line(layout, framework("megatron-2021"), hops, f, b)
    assert old > waits  # It waits for every message.


def test_gradients_of_chunks_hide_behind_the_chunks_that_follow():
    """Only the last chunk's gradients have no more than their own backward to hide behind."""

    def waits(layout):
        lines = step_time(config, layout, slow).breakdown
        return {line.name: line.value for line in lines}.get("gradients over dp", 0.0)

    config = model("llama3-70b").replace(vocab_size=64)
    slow = H100.replace(network_bandwidth=H100.network_bandwidth / 8)
    layout = Layout(pp=8, tp=8, dp=64, zero=1, sequence_parallel=True, num_micro_batches=16)
    chunks = [layout.replace(schedule="interleaved", num_chunks=v) for v in (2, 5, 10)]
    assert waits(layout) > waits(chunks[0]) > waits(chunks[1]) > waits(chunks[2]) > 0


def test_large_runs_with_context_parallelism_and_chunks_come_out_near():
    errors = [
        step_time(run.config, run.layout, run.machine, run.how).seconds / run.seconds - 1
        for run in nemo_h100()
    ]
    assert sum(map(abs, errors)) / len(errors) < 0.05 and abs(sum(errors)) / len(errors) < 0.03


def test_zero_bubble_schedules_wait_less():
    def bubble(name, chunks=1):
        layout = Layout(pp=4, num_micro_batches=12, schedule=name, num_chunks=chunks)
        return bubble_seconds(layout, [1.0] * 4, [2.0] * 4, [1.0] * 4)[0]

    assert bubble("1f1b") == 9 and bubble("zb_h1") == 3 and bubble("zb_h2") == 0
    assert bubble("zb_v", 2) == 0


@pytest.mark.parametrize("rates", ZERO_BUBBLE_RATES, ids=lambda r: f"{r[0]}-m{r[2]}")
def test_published_bubble_rates_come_from_the_simulator(rates):
    """Qi et al. 2023: table 9's times give table 5, with 1F1B and ZB-H1 to four decimals."""
    _, p, m, one_f_one_b, _, zb_h1, zb_h2, *times = rates
    for name, published, within in (
        ("1f1b", one_f_one_b, 5.1e-5),
        ("zb_h1", zb_h1, 5.1e-5),
        ("zb_h2", zb_h2, 5e-3),
    ):
        rate = simulate(SCHEDULES[name](p, m), Times(*times)).bubble_over_longest_span
        assert rate == pytest.approx(published, abs=within)


def test_simulated_and_closed_form_steps_agree_where_the_closed_form_holds():
    config = model("llama3-70b")
    for layout in (
        Layout(pp=4, dp=2, tp=8, zero=1, sequence_parallel=True, num_micro_batches=32),
        Layout(
            pp=4,
            dp=2,
            tp=8,
            zero=1,
            sequence_parallel=True,
            num_micro_batches=32,
            schedule="interleaved",
            num_chunks=4,
        ),
    ):
        closed = step_time(config, layout, "h100").seconds
        assert step_time(config, layout, "h100", simulate=True).seconds == pytest.approx(
            closed, rel=0.05
        )


def test_a_long_step_is_simulated_in_part_and_means_the_same():
    """After the first 2 p micro-batches, each one adds the slowest stage's work."""
    times = Times([1.0, 1.1, 1.0, 1.4], [1.0, 1.1, 1.0, 1.4], [0.9, 1.0, 0.9, 1.3], comm=0.05)
    long, short = (simulate(SCHEDULES["1f1b"](4, m), times).makespan for m in (40, 8))
    assert long - short == pytest.approx(32 * (1.4 + 1.4 + 1.3), rel=0.02)


def test_more_of_anything_takes_longer():
    config, layout = model("llama3-8b"), Layout(dp=8, zero=1, num_micro_batches=4)

    def seconds(layout=layout, **more):
        return step_time(config, layout, **{"machine": "h100", **more}).seconds

    base = seconds()
    assert seconds(straggler=1.1) == pytest.approx(base * 1.1, rel=0.02)
    assert seconds(layout.replace(recompute="full")) > 1.2 * base
    assert seconds(machine="a100-80") > 2 * base
    assert seconds(layout.replace(num_micro_batches=8)) > 1.8 * base
    slow = H100.replace(node_bandwidth=1e9)
    assert seconds(layout.replace(zero=3), machine=slow) > seconds(layout, machine=slow)


def test_local_steps_divide_what_an_average_of_all_parameters_takes():
    config, layout = model("gpt2"), Layout(dp=16)
    slow = H100.replace(network_bandwidth=1e9 / 8, network_latency=0.0)

    def lines(local_steps):
        return step_time(config, layout, slow, local_steps=local_steps).breakdown

    every, seldom = lines(10)["average over dp"], lines(500)["average over dp"]
    assert every == pytest.approx(50 * seldom)
    dense, local = lines(1), lines(10)
    assert dense["gradients over dp"] > 5 * every  # backward hides little on such a network
    for line in dense:
        if line.name != "gradients over dp":
            assert local[line.name] == line.value


def test_the_embeddings_gradient_comes_last_and_hides_behind_nothing():
    """The other gradients hide; the embedding's all-reduce is as long as if it were alone."""
    config = model("llama3-8b").replace(num_layers=64, tied_embedding=True)
    layout = Layout(dp=64, micro_batch_size=2)
    waits = {line.name: line.value for line in step_time(config, layout).breakdown}
    embedding = 4 * config.vocab_size * config.d_model  # bytes on the wire
    alone = collective_seconds(hardware("h100"), "all_reduce", embedding, 64, 1, 64)
    small = step_time(config.replace(vocab_size=64), layout).breakdown
    (behind,) = [line.value for line in small if line.name == "gradients over dp"]
    assert waits["gradients over dp"] == pytest.approx(behind + alone, rel=0.02)
    assert alone > 0.1 * behind


def test_clusters_average_their_shards_and_train_like_one_of_them_alone():
    """DiLoCo between two sites, each a node of eight devices that runs ZeRO inside."""
    config, layout, alone = model("gpt2"), Layout(dp=16, zero=1), Layout(dp=8, zero=1)
    slow = H100.replace(network_bandwidth=1e9 / 8, network_latency=0.0)
    apart = step_time(config, layout, slow, local_steps=20, clusters=2).breakdown
    for line in step_time(config, alone, slow).breakdown:
        assert apart[line.name] == line.value, line.name
    average, numel = apart["average over dp"], num_parameters(config)
    # Each shard sends 4 bytes per parameter of an eighth of the model, between ranks 8 apart.
    shard = collective_seconds(slow, "all_reduce", 4 * numel / 8, 2, 8, 16)
    assert average == pytest.approx(shard / 20, rel=0.02)
    whole = step_time(
        config, Layout(dp=16), slow, local_steps=20, clusters=2, compression="int8"
    ).breakdown
    plain = step_time(config, Layout(dp=16), slow, local_steps=20, clusters=2).breakdown
    assert plain["average over dp"] == pytest.approx(8 * average, rel=0.02)
    # int8 sends 1 + 4/256 bytes instead of 4, straight to the owner and back.
    ratio = whole["average over dp"] / plain["average over dp"]
    assert ratio == pytest.approx((1 + 4 / 256) / 4, rel=0.02)
    assert 0 < whole["compressing"] < average


def test_small_layers_wait_for_the_host():
    """For GPT-2 on tp 4 with short sequences, the device finishes before the next launch."""
    waits = step_time(model("gpt2").replace(seq_len=128), Layout(tp=4), "h100").breakdown
    assert waits["waiting for the host"] > 0.5 * waits.total
    large = step_time(model("llama3-70b"), Layout(tp=4, sequence_parallel=True), "h100").breakdown
    assert "waiting for the host" not in [line.name for line in large]


def test_moe_layers_cost_their_visits_and_their_exchange():
    config, layout = model("mixtral-8x7b"), Layout(dp=8, ep=8, zero=1)
    spread = step_time(config, layout, "h100").breakdown
    alone = step_time(config, layout.replace(ep=1), "h100").breakdown
    assert spread["ep all-to-all"] > 0
    with pytest.raises(KeyError):
        alone["ep all-to-all"]
    assert (
        step_time(config.replace(top_k=4), layout, "h100").breakdown["matrices"]
        > 1.5 * spread["matrices"]
    )


def test_mla_and_long_context_have_times_too():
    deepseek = step_time(
        model("deepseek-v3"), Layout(pp=16, dp=64, ep=64, zero=1, num_micro_batches=32), "h100"
    )
    assert 0.1 < deepseek.mfu < 0.7
    config = model("llama3-8b").replace(seq_len=131072)
    ring = step_time(config, Layout(cp=8, zero=1), "h100")
    assert math.isfinite(ring.seconds) and ring.mfu > 0.2


def test_a_plan_is_compared_with_a_run_of_its_kind():
    assert "145B" in nearest(model("gpt3-175b"), A100, 1536).name
    assert "1.7B" in nearest(model("gpt2-xl"), A100, 32).name
    assert "8,192" in nearest(model("llama3-405b"), H100, 8192).name


def test_a_published_run_says_where_we_call_it_too_large():
    llama = later()[0]
    needed = device_memory(peak_memory(llama.config, llama.layout).total)
    limit = H100.device.memory_bytes
    assert needed > limit
    sizes = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
    assert str(llama).endswith(f"we call it too large: {sizes}")
    fits = megatron_2021()[6]
    assert device_memory(peak_memory(fits.config, fits.layout, fits.how).total, fits.how) < limit
    assert "too large" not in str(fits)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"straggler": 0.9}, "straggler=0.9 is too small (the slowest"),
        ({"machine": "h900"}, "hardware='h900'"),
        ({"how": "jax"}, "framework='jax' is not known"),
        ({"layout": Layout(tp=5)}, "tp=5 does not divide num_heads=32"),
        ({"local_steps": 0}, "local_steps=0 is too small (1 averages"),
        ({"local_steps": 20, "layout": Layout(dp=2, zero=1)}, "give clusters below dp, or zero=0"),
        ({"local_steps": 20, "clusters": 3, "layout": Layout(dp=8)}, "clusters=3 does not divide"),
        ({"clusters": 2, "layout": Layout(dp=8)}, "give local_steps above 1, or no clusters"),
        ({"compression": Compression("int8", gradient_bits=4)}, "gradient_bits=4 is of what ZeRO"),
    ],
)
def test_impossible_steps_are_refused(arguments, says):
    with pytest.raises(ValueError) as error:
        step_time(**{"config": model("llama3-8b"), "layout": Layout(), **arguments})
    assert says in str(error.value)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_a_time(name):
    assert 0 < step_time(model("gpt2"), Layout(dp=2), "a100-80", name).seconds < 10
