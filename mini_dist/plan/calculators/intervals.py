"""How far a measured step may be from the best guess: read off published runs, not assumed.

Of the half of the runs that these factors were not read off, four of five lie inside
(benchmarks/planner.py counts them, in all and per table).  This is split conformal prediction
(Lei et al. 2018, section 2.2): the factors are the 10th and 90th percentile of measured / predicted
over the runs of the other half that are of the same kind.  The kinds differ in what is hard to
know: in one node only the kernels; on several, messages as well, more so the longer a step waits.

The promise holds for similar runs: A100, H100 and B200, 2021 to 2024, by the programs of
frameworks.py.  Almost all runs of the last kind come from one cluster.  In tables that none of
the factors were read off, between 47 % and all of the runs lie inside.
"""

from __future__ import annotations

from typing import NamedTuple


class Interval(NamedTuple):
    """Factors on the best guess, for steps whose share of waiting for messages is at most this."""

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
    """Return the kind of a step: by its number of nodes and its share of waiting for messages."""
    if num_nodes <= 1:
        return IN_A_NODE
    return next(kind for kind in ACROSS_NODES if waits <= kind.waits)
