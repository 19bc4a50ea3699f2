"""Each rank keeps a copy of its neighbor's shards in memory, in case the neighbor dies.

With ZeRO no two ranks hold the same, so a dead rank's shards are lost. The last checkpoint has them
as they were some minutes ago. Here the next rank has them as they were at the last `keep`: it costs
memory and saves time (checkpoints in other machines' memory: Wang et al. 2023, Gemini, section 4).
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce, exchange
from mini_dist.ranks.ledger.recording import recorded
from mini_dist.ranks.membership import numbers

from ..checkpoint import Piece, Place, Training
from .taking_over import DTYPES, Offered, take_over

NOTHING = 2**62  # the step of a rank that has kept nothing


class ShardCopies:
    """This rank's copies of its own pieces and of the previous rank's, at the last two steps at
    which it kept any: when a rank dies, some ranks may have the newer copy and others not."""

    def __init__(self):
        self.kept: dict[int, dict[int, list[Piece]]] = {}  # step -> a rank's number -> its pieces

    def keep(self, training: Training, step: int, group) -> None:
        """Copy this rank's part of the training, and send a copy to the next rank; every rank calls
        it. It sends 12 bytes per parameter of its shard, with AdamW in float32."""
        with training.fetched():
            mine = [Piece(p.place, p.tensor.detach().cpu().clone()) for p in training.pieces()]
        members, rank, size = numbers(group), group.rank(), group.size()
        kept = {members[rank]: mine}
        if size > 1:
            before, after = (rank - 1) % size, (rank + 1) % size
            kept[members[before]] = pass_on(mine, after, before, group)
        self.kept = {**dict(sorted(self.kept.items())[-1:]), step: kept}

    def restore(self, training: Training, group) -> int:
        """Fill the training from the survivors' copies; return the step, the newest that all of
        them have, or 0, without changes, if no rank has kept anything.

        Raises LookupError, on all ranks, if two neighbors are gone.
        """
        newest = torch.tensor(max(self.kept, default=NOTHING))
        step = int(all_reduce(newest, group, op="min"))
        if step == NOTHING:
            return 0
        mine, there = numbers(group)[group.rank()], numbers(group)
        kept = self.kept.get(step, {})
        offered = [
            piece
            for owner, pieces in kept.items()
            if owner == mine or owner not in there
            for piece in pieces
        ]
        take_over(training, Offered(offered, group))
        self.kept = {step: kept} if kept else {}
        return step


@recorded
def pass_on(pieces: list[Piece], to: int, source: int, group) -> list[Piece]:
    """Send these pieces while receiving others: first descriptions, then all values as bytes."""
    about = [[p.place.name, p.place.shape, *p.place.where, str(p.tensor.dtype)] for p in pieces]
    head = as_bytes(torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8))
    body = torch.cat([as_bytes(p.tensor) for p in pieces])
    lengths = exchange(torch.tensor([len(head), len(body)]), to, source, group).tolist()
    theirs = [
        exchange(mine, to, source, group, like=torch.empty(length, dtype=torch.uint8))
        for mine, length in zip((head, body), lengths)
    ]
    received, at = [], 0
    for *fields, dtype in json.loads(bytes(theirs[0].tolist())):
        place, dtype = Place(*fields), DTYPES[dtype]
        size = place.numel * dtype.itemsize
        values = theirs[1][at : at + size].clone().view(dtype)
        received.append(Piece(place, values))
        at += size
    return received


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
