"""Training that continues when ranks die, and takes in new ranks.

    def train(group):
        step, data = 0, load_text()
        while step < steps:
            try:
                model, training = build(group)                 # for the current number of ranks
                step = catch_up(training, step, group)         # DP; copies.restore with ZeRO
                while step < steps:
                    ...
            except RanksChanged:
                group = regroup(group)

    launch(train, 4, elastic=True)

ideas.py         read first: which rank has completed most, and how to divide a batch
detectors.py     is a rank dead, or only late? A fixed timeout, and phi accrual
taking_over.py   state from ranks that have it to ranks that need it, for any sharding
copies.py        each rank keeps a copy of its neighbor's shards, in case the neighbor dies

They use ranks/elastic.py and ranks/membership.py, which report deaths and make new groups.
"""

from mini_dist.ranks.elastic import Elastic
from mini_dist.ranks.membership import (
    Lost,
    RanksChanged,
    check_members,
    invite,
    numbers,
    regroup,
)

from .copies import ShardCopies
from .detectors import FixedTimeout, PhiAccrual, judged, patience
from .ideas import furthest, rebuild, rows_of, shares
from .taking_over import catch_up

__all__ = [
    "Elastic",
    "FixedTimeout",
    "Lost",
    "PhiAccrual",
    "RanksChanged",
    "ShardCopies",
    "catch_up",
    "check_members",
    "furthest",
    "invite",
    "judged",
    "numbers",
    "patience",
    "rebuild",
    "regroup",
    "rows_of",
    "shares",
]
