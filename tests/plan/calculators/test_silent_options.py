"""An option that another option switches off is refused in a sentence, or documented.

A search toggles every option of a class alone and together with each other option. If the second
no longer changes any result of the calculators, the pair must be in DOCUMENTED with its reason.
"""

import dataclasses

import pytest

from mini_dist.plan.calculators import (
    costs,
    file_memory,
    framework,
    hardware,
    host_memory,
    model,
    parameter_counts,
    rank_memory,
    step_time,
    step_volume,
    traffic,
)
from mini_dist.plan.calculators.flops import model_flops
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.strategies.offload import Lanes, OverlappedOffload

H100 = hardware("h100")
REFUSED = "refused"


def numbers(config, layout, how):
    """Return everything that the calculators say about a training run."""
    parts = [rank_memory(config, layout, how, rank) for rank in range(layout.pp)]
    parts += [host_memory(config, layout, how), file_memory(config, layout, how)]
    parts += [traffic(config, layout, how), step_volume(config, layout, how)]
    parts += [step_time(config, layout, H100, how).breakdown, parameter_counts(config)]
    lines = [(line.name, line.value) for part in parts for line in part]
    return lines, model_flops(config, 8)


# ---- classes: how to compute results from changes, and the changes that are tried ---------------

SMALL = dict(d_model=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, seq_len=256)
EXPERTS = SMALL | dict(num_experts=8, top_k=2, num_shared_experts=1)
LATENT = SMALL | dict(kv_lora_rank=64, rope_head_dim=32, num_kv_heads=None)
OF_A_MODEL = dict(
    vocab_size=512,
    d_ffn=1024,
    activation="swiglu",
    norm="rmsnorm",
    positions="learned",
    bias=False,
    qkv_bias=False,
    qk_norm=True,
    norms_a_layer=4,
    attention_sinks=True,
    embedding_norm=True,
    tied_embedding=True,
    dropout=0.1,
    num_kv_heads=2,
    head_dim=128,
)
OF_EXPERTS = dict(
    top_k=3,
    d_expert=256,
    d_ffn=1024,
    num_shared_experts=2,
    d_shared=1024,
    shared_gate=True,
    router_bias=True,
    first_dense_layers=1,
)
OF_A_LATENT = dict(
    q_lora_rank=64, rope_head_dim=16, v_head_dim=32, kv_lora_rank=128, qk_norm=True, qkv_bias=False
)
SPREAD = dict(pp=2, dp=8, cp=2, tp=2, ep=2, sequence_parallel=True, micro_batch_size=2)
SPREAD |= dict(num_micro_batches=8, zero=1, recompute="selective")
OF_A_LAYOUT = dict(
    pp=4,
    dp=4,
    cp=1,
    tp=1,
    ep=4,
    etp=1,
    sequence_parallel=False,
    zero=3,
    micro_batch_size=1,
    num_micro_batches=4,
    recompute="full",
    schedule="zb_h1",
    num_chunks=2,
    recompute_every=2,
)


def of_a_model(fields):
    return lambda changes: numbers(ModelConfig(**fields | changes), Layout(tp=2), "megatron-core")


def of_a_layout(changes):
    return numbers(model("mixtral-8x7b"), Layout(**SPREAD | changes), "megatron-core")


def of_a_framework(base):
    layouts = [
        Layout(dp=8, tp=2, sequence_parallel=True, zero=0),
        Layout(dp=8, zero=2, recompute="full", num_micro_batches=4),
        Layout(dp=8, tp=2, sequence_parallel=True, zero=3, pp=2, recompute="selective"),
    ]

    def come_to(changes):
        how = base.replace(**changes)
        return [numbers(model("llama3-8b"), layout, how) for layout in layouts]

    return come_to


def toggled(how):
    """Return another value for each option of a framework."""
    found = {}
    for field in dataclasses.fields(how):
        value = getattr(how, field.name)
        if isinstance(value, bool):
            found[field.name] = not value
        elif isinstance(value, (int, float)):
            found[field.name] = value + 2
    return found


AWAY = framework("fsdp").replace(offload_optimizer=True)
CLASSES = {
    "ModelConfig": (of_a_model(SMALL), OF_A_MODEL),
    "ModelConfig with experts": (of_a_model(EXPERTS), OF_EXPERTS),
    "ModelConfig with a latent": (of_a_model(LATENT), OF_A_LATENT),
    "Layout": (of_a_layout, OF_A_LAYOUT),
    "megatron-core": (
        of_a_framework(framework("megatron-core")),
        toggled(framework("megatron-core")),
    ),
    "fsdp with an offload": (of_a_framework(AWAY), toggled(AWAY)),
}

# (what is set, what it switches off), with the words that document it.
OF_EVERY_FRAMEWORK = {
    ("flash_attention", "flash_speed"),  # "with flash_attention only"
    ("flash_attention", "flash_2"),
    ("own_runs", "loss_bytes"),  # "are the engine's own"
    ("own_runs", "prefetch"),
    ("own_runs", "backward"),
    ("overlaps_tensor", "overlaps_tensor_backward"),  # "it hides all that ... does"
    ("whole_in_pipeline", "prefetch"),  # "parameters stay whole": nothing is gathered ahead
}
DOCUMENTED = {
    "ModelConfig": {
        ("bias", "norm"),  # LayerNorm without a bias has as many numbers as RMSNorm
        ("bias", "qkv_bias"),  # "as `bias` unless given"
    },
    "ModelConfig with experts": {
        ("d_expert", "d_ffn"),  # d_ffn: "that of dense layers, and of experts where not given"
        ("d_shared", "num_shared_experts"),  # "else their number is unused"
        ("d_ffn", "d_shared"),  # (d_shared would be 1024 anyway, so no option is lost)
    },
    "ModelConfig with a latent": set(),
    "Layout": {
        ("tp", "etp"),  # "tp unless given"
        ("tp", "sequence_parallel"),  # "if tp > 1"
    },
    "megatron-core": OF_EVERY_FRAMEWORK
    | {
        ("flash_attention", "loss_bytes"),  # (the peak is then at the scores, not at the loss)
        ("offload_optimizer", "shard_bytes"),  # "on the device"
    },
    "fsdp with an offload": OF_EVERY_FRAMEWORK
    | {
        ("offload_optimizer", "offload_overlaps"),  # "of what is offloaded"
        ("own_runs", "loss_bytes_cut"),
    },
}


def come_to(make, changes):
    try:
        return make(changes)
    except (ValueError, TypeError):
        return REFUSED


def switched_off(make, toggles):
    """Return the pairs (set, then without effect) of options that each have an effect alone."""
    plain = make({})
    alone = {name: come_to(make, {name: value}) for name, value in toggles.items()}
    works = [name for name, found in alone.items() if found not in (plain, REFUSED)]
    return {
        (one, other)
        for one in works
        for other in works
        if one != other and come_to(make, {one: toggles[one], other: toggles[other]}) == alone[one]
    }


@pytest.mark.parametrize("name", CLASSES)
def test_no_option_switches_another_off_in_silence(name):
    assert switched_off(*CLASSES[name]) == DOCUMENTED.get(name, set())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ModelConfig(**LATENT, qkv_bias=False), "qkv_bias=False has no meaning with lat"),
        (lambda: costs.all_reduce(8, 4, "ring", ranks_per_node=2), "ranks_per_node=2 is of 'hier"),
        (lambda: costs.all_reduce(8, 4, "hierarchical", roots=2), "roots=2 is of 'stars'"),
        (lambda: OverlappedOffload(Lanes(), micro_batches=2), "micro_batches=2 without early"),
        (lambda: framework("fsdp").replace(unit_scatter_by_nodes=True), "needs unit_scatter_bytes"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()
