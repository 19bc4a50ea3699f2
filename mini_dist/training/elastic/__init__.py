"""A training that goes on when ranks die, and takes in those that come.

    def train(group):
        step, data = 0, load_text()
        while step < steps:
            try:
                model, training = build(group)                 # for so many ranks as there are now
                step = catch_up(training, step, group)         # DP; copies.restore with ZeRO
                while step < steps:
                    ...
            except RanksChanged:
                group = regroup(group)

    launch(train, 4, elastic=True)

ideas.py         to be read: who has come furthest, and whose share of a batch is how large
detectors.py     is it dead, or only late? A fixed timeout, and phi accrual
taking_over.py   state from those who have it to those who need it, however it is cut
copies.py        each rank keeps a copy of its neighbour's shards, for the day that it dies

Under them: ranks/elastic.py and ranks/membership.py, who tell of deaths and make new groups.
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
