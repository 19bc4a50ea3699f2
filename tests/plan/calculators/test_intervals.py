"""The interval of a prediction depends on the kind of step and contains the prediction."""

import pytest

from mini_dist.plan.calculators import step_time
from mini_dist.plan.calculators.intervals import ACROSS_NODES, IN_A_NODE, interval_of
from mini_dist.plan.config import Layout


def test_the_more_a_step_waits_for_messages_the_wider():
    widths = [kind.high / kind.low for kind in (IN_A_NODE, *ACROSS_NODES)]
    assert widths[1:] == sorted(widths[1:])
    assert [kind.waits for kind in ACROSS_NODES] == sorted(kind.waits for kind in ACROSS_NODES)
    assert all(kind.low < 1 < kind.high for kind in (IN_A_NODE, *ACROSS_NODES))


@pytest.mark.parametrize(
    ("num_nodes", "waits", "kind"),
    [(1, 0.9, IN_A_NODE), (0.5, 0.0, IN_A_NODE), (2, 0.0, ACROSS_NODES[0])]
    + [(2, 0.1, ACROSS_NODES[0]), (64, 0.11, ACROSS_NODES[1]), (64, 1.0, ACROSS_NODES[2])],
)
def test_the_kind_follows_from_nodes_and_from_the_share_of_messages(num_nodes, waits, kind):
    assert interval_of(num_nodes, waits) is kind


def test_a_step_says_the_interval_of_its_kind():
    inside = step_time("llama3-8b", Layout(dp=8, zero=1), "h100")
    assert inside.low == pytest.approx(IN_A_NODE.low * inside.seconds)
    waiting = step_time("llama3-8b", Layout(tp=32, sequence_parallel=True), "h100-hf")
    assert waiting.high == pytest.approx(ACROSS_NODES[2].high * waiting.seconds)
