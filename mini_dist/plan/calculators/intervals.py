"""How far from its best guess a measured step may be: read off published runs, not assumed.

Four of five runs lie inside, of the half that these factors were not read off
(benchmarks/planner.py counts them, in all and table by table).  That is split conformal prediction
(Lei et al. 2018, section 2.2): the factors are the 10th and 90th percentile of measured / predicted
over the runs of the other half that are of the same kind.  The kinds differ in what is hard to
know: in one node nothing but the kernels, beyond it the more, the more a step waits for messages.

The promise holds for runs like those: A100, H100 and B200, 2021 to 2024, by the programs of
frameworks.py.  Nearly all those of the last kind come from one cluster.  Of a table that none of
the factors were read off, between 47 % and all of the runs lie inside.
"""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Factors on the best guess, for steps that wait for messages at most so much of their time."""

    waits: float
    low: float
    high: float


IN_A_NODE = Interval(1.0, 0.921, 1.151)
ACROSS_NODES = (
    Interval(0.1, 0.985, 1.257),
    Interval(0.3, 0.960, 1.383),
    Interval(1.0, 0.960, 4.122),
)


def interval_of(num_nodes: float, waits: float) -> Interval:
    """The kind of a step: on how many nodes, and which share of it is waiting for messages."""
    if num_nodes <= 1:
        return IN_A_NODE
    return next(kind for kind in ACROSS_NODES if waits <= kind.waits)
