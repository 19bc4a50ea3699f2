"""Rules of thumb: judge only layouts that the rule allows, by the planner's own formulas."""

import pytest

from mini_dist.plan.calculators import device_memory, hardware, model, peak_memory, step_time
from mini_dist.plan.calculators.rules import CLOSE, RULES, Rule, judge

M = 2**20


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.says}, {rule.machine}")
def test_a_judgement_is_of_what_the_rule_allows_and_of_what_fits(rule):
    found = judge(rule)
    assert found.tried and found.winner.world_size == rule.devices
    config, machine = model(rule.model), hardware(rule.machine)
    assert found.winner.global_batch_size * config.seq_len == rule.tokens
    if found.best is None:
        assert found.verdict == "out of memory"
        return
    for field, values in rule.allows.items():
        assert getattr(found.best, field) in values
    for layout in (found.best, found.winner):
        needed = device_memory(peak_memory(config, layout).total)
        assert needed <= machine.device.memory_bytes
    assert 0 < found.fitting <= found.tried
    assert found.winner_seconds <= found.best_seconds <= 1.1 * found.worst_seconds
    formula = step_time(config, found.best, machine).seconds
    assert found.best_seconds == pytest.approx(formula, rel=0.1)  # simulated if it has a pipeline


def test_what_never_fits_is_said():
    """16 bytes for each of 8 billion parameters exceed 80 GB at any micro-batch size."""
    rule = Rule("DDP for everything", "nobody", "llama3-8b", 8, M, {"dp": [8], "zero": [0]})
    found = judge(rule)
    assert (found.best, found.times, found.fitting) == (None, None, 0)
    assert found.tried > 0 and "out of memory. 0 of" in str(found)


def test_a_verdict_on_more_devices_than_any_run_like_it_is_an_extrapolation():
    """The largest ZeRO-3 run on A100s that we know of had 64 devices."""
    allows = {"dp": [256], "zero": [3]}
    found = judge(Rule("ZeRO-3", "nobody", "llama3-8b", 256, 2 * M, allows, "a100-80"))
    assert found.best and found.extrapolated and "an extrapolation" in str(found)
    assert not judge(RULES[-1]).extrapolated


def test_the_planner_s_own_choice_is_judged_the_best():
    winner = judge(RULES[0]).winner
    allows = {field: [getattr(winner, field)] for field in ("dp", "tp", "pp", "zero")}
    found = judge(RULES[0]._replace(allows=allows))
    assert found.best == winner and found.times == 1 and found.verdict == "the best"


def test_a_rule_that_beats_the_planner_s_list_becomes_the_winner():
    """Layouts that only a rule tries, such as ZeRO-2 in a pipeline, are compared as well."""
    rule = Rule("ZeRO-0 only", "nobody", "gpt2-xl", 2, M // 2, {"zero": [0], "dp": [2]})
    found = judge(rule)
    assert found.winner_seconds <= found.best_seconds
    assert found.verdict in ("the best", "as good") and found.times <= CLOSE


def test_zero_2_in_a_pipeline_is_slower_than_zero_1_for_its_traffic():
    """Compare with the same cuts and ZeRO-1 on the Playbook's 1,024 GPUs."""
    (rule,) = [rule for rule in RULES if rule.allows.get("zero") == [2]]
    with_2 = judge(rule)
    with_1 = judge(rule._replace(allows={**rule.allows, "zero": [1]}))
    assert with_1.best_seconds < with_2.best_seconds
