"""Every calculator accepts names, and impossible values get a one-sentence error."""

import math

import pytest

from mini_dist.plan.calculators import (
    Search,
    device_memory,
    forward_flops,
    framework,
    hardware,
    layer_activations,
    micro_batches_in_flight,
    model,
    model_flops,
    model_states,
    num_parameters,
    peak_memory,
    plan,
    rank_memory,
    step_flops,
    step_time,
    step_volume,
    training_time,
)
from mini_dist.plan.config import Layout

LAYOUT = Layout(dp=8, zero=1)
NAMED = "llama3-8b"


def test_every_calculator_takes_the_names_that_plan_takes():
    config, machine = model(NAMED), hardware("h100")
    assert step_time(NAMED, LAYOUT, "h100").seconds == step_time(config, LAYOUT, machine).seconds
    for calculate in (peak_memory, rank_memory, step_volume):
        assert calculate(NAMED, LAYOUT).total == calculate(config, LAYOUT).total
    for count in (lambda model: model_flops(model, 8), num_parameters):
        assert count(NAMED) == count(config)
    assert forward_flops(NAMED) == forward_flops(config)
    assert step_flops(NAMED, 8, "full") == step_flops(config, 8, "full")
    assert layer_activations(NAMED, LAYOUT) == layer_activations(config, LAYOUT)
    assert model(config) is config and hardware(machine) is machine


def test_one_value_of_a_search_may_stand_alone():
    alone = Search(micro_batch_sizes=4, zero=1, recompute="full")
    assert alone == Search((4,), ("full",), (1,))
    found = plan(NAMED, "h100", 8, 64 * 8192, search=alone)
    assert {c.layout.recompute for c in found.candidates} == {"full"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: plan(NAMED, "h100", 8, "4M"), "global_batch_tokens='4M' is not a finite"),
        (
            lambda: plan(NAMED, "h100", 8, math.nan),
            "global_batch_tokens=nan is not a finite number",
        ),
        (
            lambda: plan(NAMED, "h100", 8, math.inf),
            "global_batch_tokens=inf is not a finite number",
        ),
        (lambda: plan(NAMED, "h100", 8, -8192), "global_batch_tokens=-8192 is too small"),
        (lambda: plan(NAMED, "h100", "8", 8192), "num_devices='8' is not"),
        (lambda: plan(NAMED, 100, 8, 8192), "hardware=100 is not known"),
        (lambda: plan(8, "h100", 8, 8192), "model=8 is not known"),
        (lambda: step_time("llama9", LAYOUT), "model='llama9' is not known"),
        (lambda: step_time(NAMED, LAYOUT, how=3), "framework=3 is not known"),
        (lambda: peak_memory(None, LAYOUT), "model=None is not known"),
        (lambda: step_time(NAMED, LAYOUT, straggler="2"), "straggler='2' is not a finite"),
        (
            lambda: step_time(NAMED, LAYOUT, straggler=math.nan),
            "straggler=nan is not a finite number",
        ),
        (lambda: Search(recompute="all"), "recompute='all' is not known: give some of 'none'"),
        (lambda: Search(zero=4), "zero=4 is not known: give some of 0, 1, 2, 3"),
        (lambda: Search(schedules="gpipe"), "schedules='gpipe' is not known: give some of '1f1b'"),
        (lambda: Search(micro_batch_sizes=0), "micro_batch_sizes=0 is too small"),
        (lambda: Search(micro_batch_sizes=()), "micro_batch_sizes=() is empty"),
        (lambda: Search(max_tp=-1), "max_tp=-1 is too small"),
        (lambda: Search(num_simulated=math.nan), "num_simulated=nan is not a whole number"),
        (lambda: model_states(-1.0), "parameters=-1.0 is too small"),
        (lambda: model_states(1.0, 0), "shards=0 is too small"),
        (lambda: model_states(1.0, optimizer_bytes=-12), "bytes of optimizer=-12 is too small"),
        (lambda: model_flops(model(NAMED), -1), "sequences=-1 is too small"),
        (lambda: step_flops(NAMED, -1, "full"), "sequences=-1 is too small"),
        (lambda: step_flops(NAMED, math.nan), "sequences=nan is not a whole number"),
        (lambda: model_flops("llama9", 1), "model='llama9' is not known"),
        (lambda: num_parameters(8), "model=8 is not known"),
        (lambda: layer_activations(None, LAYOUT), "model=None is not known"),
        (lambda: device_memory(-1), "allocated=-1 is too small"),
        (lambda: training_time(-7e9, 1e12), "model=-7000000000.0 is too small"),
        (lambda: step_time(NAMED, LAYOUT).training(-1, 8), "tokens=-1 is too small"),
        (lambda: step_time(NAMED, LAYOUT).training(1, 0), "num_devices=0 is too small"),
        (lambda: Layout(dp=-2), "dp=-2 is too small"),
        (lambda: Layout(zero=1.0), "zero=1.0 is not a whole number"),
        (
            lambda: step_time(NAMED, LAYOUT, local_steps=2.5),
            "local_steps=2.5 is not a whole number",
        ),
        (lambda: plan(NAMED, "h100", 8, 8192, search="full"), "search='full' is no Search"),
        (lambda: plan(NAMED, "h100", 8, 8192, search=None), "search=None is no Search"),
        (lambda: rank_memory(NAMED, LAYOUT, pp_rank="a"), "pp_rank='a' is not a whole number"),
        (lambda: rank_memory(NAMED, LAYOUT, pp_rank=0.5), "pp_rank=0.5 is not a whole number"),
        (lambda: micro_batches_in_flight(LAYOUT, 5), "pp_rank=5 is not a stage of pp=1"),
        (lambda: framework("fsdp").replace(prefetch=-1), "prefetch=-1 of framework 'fsdp'"),
        (
            lambda: framework("fsdp").replace(softmax_heads=0),
            "softmax_heads of framework 'fsdp'=0 is too small",
        ),
        (
            lambda: framework("fsdp").replace(unit_gather_bytes=-1),
            "unit_gather_bytes=-1 of framework 'fsdp'",
        ),
        (
            lambda: hardware("h100").replace(devices_per_node=2.5),
            "devices_per_node=2.5 is not a whole number",
        ),
        (lambda: step_time(NAMED, "dp=8"), "layout='dp=8' is no Layout"),
        (lambda: peak_memory(NAMED, {"dp": 8}), "layout={'dp': 8} is no Layout"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(call, says):
    with pytest.raises(ValueError) as error:
        call()
    assert says in str(error.value) and "\n" not in str(error.value)
