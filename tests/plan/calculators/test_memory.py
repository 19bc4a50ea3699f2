"""Compare memory with the papers' formulas (exactly) and allocators' peaks (with bars)."""

import dataclasses
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from mini_dist import launch
from mini_dist.plan.calculators import (
    FRAMEWORKS,
    device_memory,
    framework,
    layer_activations,
    micro_batches_in_flight,
    model,
    model_states,
    num_parameters,
    peak_memory,
    rank_memory,
)
from mini_dist.plan.calculators.published import (
    KORTHIKANTI_FIGURE_1,
    KORTHIKANTI_FIGURE_7,
    ZERO_TABLE_1,
    gpt,
    korthikanti_2022,
)
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.schedule import SCHEDULES, peak_in_flight

GIB = 2**30


def per_token(config, layout, how="formula"):
    return sum(item.bytes_per_token for item in layer_activations(config, layout, how))


@pytest.mark.parametrize(("billions", "dp", *[f"zero{i}" for i in (1, 2, 3)]), ZERO_TABLE_1)
def test_zero_table_1_to_the_digits_printed(billions, dp, zero1, zero2, zero3):
    """The paper rounds some of 54 cells and truncates others, so allow one last-digit unit."""
    assert model_states(billions * 1e9, dp, 0).total == 16 * billions * 1e9
    for zero, cell in ((1, zero1), (2, zero2), (3, zero3)):
        unit = 10 ** -len(cell.partition(".")[2])
        gigabytes = model_states(billions * 1e9, dp, zero).total / 1e9
        assert abs(gigabytes - float(cell)) < unit * (1 - 1e-9)


@pytest.mark.parametrize(("a", "h"), [(64, 6144), (96, 12288), (160, 25600)])
@pytest.mark.parametrize("t", [1, 2, 8])
def test_a_gpt_layer_keeps_what_korthikanti_table_2_says(a, h, t):
    """s b h (10 + 24/t + 5 a s / (h t)); with sequence parallel s b h / t (34 + 5 a s / h)."""
    config, s = gpt(a, h, 48), 2048
    assert per_token(config, Layout(tp=t)) == pytest.approx(
        h * (10 + 24 / t + 5 * a * s / (h * t)), rel=1e-12
    )
    assert per_token(config, Layout(tp=t, sequence_parallel=True)) == pytest.approx(
        h / t * (34 + 5 * a * s / h), rel=1e-12
    )


def test_gqa_swiglu_and_flash_change_the_terms_they_should():
    base = dict(num_heads=8, d_model=256, bias=False, dropout=0.0, seq_len=64)
    mha, gqa = ModelConfig(**base), ModelConfig(**base, num_kv_heads=2)
    layout = Layout()
    assert per_token(mha, layout) - per_token(gqa, layout) == 2 * 2 * (8 - 2) * 32  # K and V
    gated = ModelConfig(**base, activation="swiglu", d_ffn=1024)
    assert per_token(gated, layout) - per_token(mha, layout) == 2 * 1024  # the gate
    flash = framework("formula").replace(flash_attention=True)
    # The scores go; one statistic per head stays.
    assert per_token(mha, layout) - per_token(mha, layout, flash) == 2 * 8 * 64 - 4 * 8
    longer = mha.replace(seq_len=128)
    assert per_token(longer, layout, flash) == per_token(mha, layout, flash)


def test_experts_keep_k_copies_of_a_token():
    base = dict(d_model=256, bias=False, activation="swiglu", d_ffn=512)
    moe = ModelConfig(**base, num_experts=8, top_k=2)
    names = {item.name: item.bytes_per_token for item in layer_activations(moe, Layout(), moe=True)}
    dense = {
        item.name: item.bytes_per_token for item in layer_activations(ModelConfig(**base), Layout())
    }
    assert names["experts hidden"] == 2 * dense["ffn hidden"]
    assert names["dispatched tokens"] == 2 * 2 * 256


@pytest.mark.parametrize("run", korthikanti_2022(), ids=lambda run: run.name)
def test_korthikanti_figure_1_exactly(run):
    """States: 18 bytes for each of 12 L h^2 / (t p). Activations: table 2 for all in flight."""
    states, tensor, selective = KORTHIKANTI_FIGURE_1[run.name.split(",")[0]]
    config, layout = run.config, run.layout
    matrices = 12 * config.num_layers * config.d_model**2
    assert model_states(matrices / layout.tp / layout.pp, 1, 0, 2, 4, 12).total / GIB == states
    sequence = run.layout.sequence_parallel
    waterfall = rank_memory(
        config, layout.replace(recompute="selective" if sequence else "none"), "formula"
    )
    wanted = selective if sequence else tensor
    assert waterfall["activations"] / GIB == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", KORTHIKANTI_FIGURE_7)
def test_korthikanti_figure_7_to_what_can_be_read_off_it(name):
    run = next(run for run in korthikanti_2022() if run.name.startswith(f"{name},"))
    config, tp = run.config, Layout(tp=8)
    variants = [
        Layout(tp=8, sequence_parallel=True),
        Layout(tp=8, recompute="selective"),
        Layout(tp=8, sequence_parallel=True, recompute="selective"),
        Layout(tp=8, recompute="full"),
    ]
    whole = rank_memory(config, tp, "formula")["activations"]
    for layout, percent in zip(variants, KORTHIKANTI_FIGURE_7[name]):
        share = 100 * rank_memory(config, layout, "formula")["activations"] / whole
        assert share == pytest.approx(percent, abs=0.15)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2"])
@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 4), (8, 16), (3, 6), (2, 3), (4, 2), (1, 3)])
def test_micro_batches_in_flight_are_those_of_the_schedule_itself(name, p, m):
    if name == "interleaved" and p == 1:  # one rank has nothing to interleave with
        with pytest.raises(ValueError, match="num_chunks=2 needs a pipeline"):
            Layout(pp=p, num_micro_batches=m, schedule=name, num_chunks=2)
        return
    chunks = 2 if name == "interleaved" else 1
    lists = SCHEDULES[name](p, m, *((chunks,) if name == "interleaved" else ()))
    layout = Layout(pp=p, num_micro_batches=m, schedule=name, num_chunks=chunks)
    ours = [chunks * micro_batches_in_flight(layout, rank) for rank in range(p)]
    if name == "interleaved" and m < p:  # Megatron's count is capped at all m
        assert all(a >= b for a, b in zip(ours, peak_in_flight(lists)))
    elif p == 1:
        assert name == "gpipe" or ours == peak_in_flight(lists)
    else:
        assert ours == peak_in_flight(lists)


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
def test_the_v_schedules_hold_at_most_what_we_say(name):
    layout = Layout(pp=4, num_micro_batches=12, schedule=name, num_chunks=2)
    ours = [2 * micro_batches_in_flight(layout, rank) for rank in range(4)]
    assert max(peak_in_flight(SCHEDULES[name](4, 12))) == max(ours)


def test_the_waterfall_has_every_byte_once_and_says_why():
    config = model("llama3-8b")
    waterfall = peak_memory(config, Layout(dp=8, zero=1))
    assert waterfall.total == sum(line.value for line in waterfall)
    assert waterfall["parameters"] == 2 * num_parameters(config)
    assert waterfall["optimizer"] == 12 * num_parameters(config) / 8
    assert all(line.formula and line.source for line in waterfall)
    with pytest.raises(KeyError, match="it has parameters, gradients"):
        waterfall["weights"]


def test_zero_shards_experts_over_the_ranks_that_hold_the_same_ones():
    config = ModelConfig(num_experts=8, top_k=2, d_expert=128)
    lines = peak_memory(config, Layout(dp=8, ep=4, zero=1))
    experts = lines["parameters of experts"] / 2
    assert lines["optimizer of experts"] == 12 * experts / 2  # dp * cp / ep = 2
    assert lines["optimizer"] == 12 * (lines["parameters"] / 2) / 8


def test_recompute_keeps_less_and_cp_cuts_the_sequence():
    config = model("llama3-8b")
    none, full = (peak_memory(config, Layout(recompute=r))["activations"] for r in ("none", "full"))
    assert full == 32 * 8192 * 2 * 4096 < none / 5
    assert peak_memory(config, Layout(cp=4))["activations"] == none / 4


def test_the_optimizer_may_live_on_the_host():
    config = model("gpt2-xl")
    offloaded = FRAMEWORKS["fsdp"].replace(offload_optimizer=True)
    here, there = (peak_memory(config, Layout(), how).total for how in ("fsdp", offloaded))
    assert here - there == 8 * num_parameters(config)


def test_the_fullest_rank_is_found_without_asking_all():
    for name in ("1f1b", "gpipe", "zb_h1", "interleaved"):
        for p, L in ((2, 5), (4, 9), (8, 30), (12, 70)):
            chunks = 2 if name == "interleaved" and 2 * p <= L else 1
            layout = Layout(
                pp=p,
                num_micro_batches=2 * p,
                num_chunks=chunks,
                schedule="1f1b" if name == "interleaved" and chunks == 1 else name,
            )
            config = ModelConfig(num_layers=L)
            everywhere = max(rank_memory(config, layout, "course", r).total for r in range(p))
            assert peak_memory(config, layout, "course").total == everywhere


class Alive(TorchDispatchMode):
    """Count the bytes of tensors made since entry, now and at the peak, also inside DTensors."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = set(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # the call comes back with local tensors
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            # (DTensor tries each kind of call once with tensors that have no memory.)
            memory = tensor.untyped_storage() if type(tensor) is torch.Tensor else None
            if memory is not None and memory._cdata not in self.known:
                self.known.add(memory._cdata)
                self.now += memory.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(memory, self.free, memory._cdata, memory.nbytes())
        return made

    def free(self, known, num_bytes):
        self.known.discard(known)
        self.now -= num_bytes


def bytes_of_a_logit(rows, columns, cut, group):
    """Return one rank's peak bytes per logit in torchtitan's loss and backward (train.py)."""
    targets = torch.zeros(rows, dtype=torch.long)
    weight = torch.randn(rows, columns, dtype=torch.bfloat16, requires_grad=True)
    if cut:
        mesh = DeviceMesh.from_group(group, "cpu")
        targets = DTensor.from_local(targets, mesh, [Replicate()])
    with Alive() as alive, loss_parallel() if cut else nullcontext():
        logits = weight * 1
        if cut:
            logits = DTensor.from_local(logits, mesh, [Shard(1)])
        loss = cross_entropy(logits.float(), targets)
        del logits
        loss.backward()
    return alive.peak / rows / columns


@pytest.mark.parametrize(("ranks", "field"), [(1, "loss_bytes"), (2, "loss_bytes_cut")])
def test_torchtitan_s_loss_holds_what_torch_s_does(ranks, field):
    found = launch(bytes_of_a_logit, ranks, (256, 1024, ranks > 1)).results[0]
    assert found == pytest.approx(getattr(FRAMEWORKS["torchtitan"], field), rel=0.03)


def test_bloom_fits_near_its_measured_59_gb():
    """BigScience's run on 384 A100-80 (Le Scao et al. 2022); a popular public script says 813."""
    layout = Layout(
        tp=4, pp=12, dp=8, zero=1, micro_batch_size=2, num_micro_batches=128, recompute="full"
    )
    how = "megatron-deepspeed"
    needed = device_memory(peak_memory(model("bloom-176b"), layout, how).total, how) / 1e9
    assert needed == pytest.approx(59, rel=0.10)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: model_states(1e9, 4, 5), "zero=5 is not a stage"),
        (lambda: model_states(1e9, 0), "shards=0 is too small"),
        (lambda: rank_memory(ModelConfig(), Layout(), pp_rank=1), "pp_rank=1 is not a stage"),
        (lambda: peak_memory(ModelConfig(), Layout(tp=16)), "tp=16 does not divide num_heads=8"),
        (lambda: framework("megatron"), "framework='megatron' is not known: give one of"),
        (lambda: FRAMEWORKS["course"].replace(loss_bytes=-1), "loss_bytes=-1 of framework"),
        (lambda: FRAMEWORKS["course"].replace(weight_gradients="all"), "weight_gradients='all'"),
    ],
)
def test_impossible_questions_are_refused(call, says):
    with pytest.raises(ValueError) as error:
        call()
    assert says in str(error.value)


def test_every_framework_says_where_its_numbers_come_from():
    assert all(how.source for how in FRAMEWORKS.values())
    assert all(dataclasses.replace(how) == how for how in FRAMEWORKS.values())
