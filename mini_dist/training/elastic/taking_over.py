"""Send state from ranks that have it to ranks that need it, for any sharding on either side.

This does among live ranks what a checkpoint does with files (checkpoint/reading.py): pieces say
which part of which tensor they are, and each goes to every rank with an overlapping piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mini_dist.collectives import recv, send
from mini_dist.strategies.trainable import Trainable

from ..checkpoint import Piece, Place, Training
from ..checkpoint.files import tell_all
from ..checkpoint.pieces import copy_common, meet
from ..checkpoint.training import load
from .ideas import furthest

DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Offered:
    """What the ranks of a group offer together; `checkpoint.training.load` treats it as a
    checkpoint.

    mine: this rank's pieces, possibly none. Every rank of the group makes one.
    """

    def __init__(self, mine: Sequence[Piece], group):
        self.mine, self.group = list(mine), group
        fields = [[p.place.name, p.place.shape, *p.place.where, str(p.tensor.dtype)] for p in mine]
        self.everyones = [
            [(Place(*place), DTYPES[dtype]) for *place, dtype in theirs]
            for theirs in tell_all(fields, group)
        ]

    @property
    def states(self) -> dict:
        """Return shape and dtype of each parameter's optimizer states, as Saved.states."""
        found: dict = {}
        for theirs in self.everyones:
            for place, dtype in theirs:
                owner, slash, key = place.name.rpartition("/")
                if slash:
                    found.setdefault(owner, {})[key] = place.shape, dtype
        return found

    def load(self, pieces: list[Piece], group) -> None:
        """Fill these pieces after all have arrived: if a rank dies meanwhile, no mixture is left.

        Raises LookupError on all ranks if no rank has some part of them.
        """
        self.check(pieces)
        rank, arrived = group.rank(), []
        wanted = tell_all([[p.place.name, p.place.shape, *p.place.where] for p in pieces], group)
        wanted = [[Place(*fields) for fields in theirs] for theirs in wanted]
        for holder, theirs in enumerate(self.everyones):
            for number, (place, dtype) in enumerate(theirs):
                takers = [
                    taker
                    for taker, places in enumerate(wanted)
                    if any(each.name == place.name and meet(each, place) for each in places)
                ]
                if rank == holder:
                    values = self.mine[number].tensor.detach().contiguous()
                    for taker in takers:
                        if taker != holder:
                            send(values, taker, group)
                elif rank in takers:
                    values = recv(torch.empty(place.numel, dtype=dtype), holder, group)
                if rank in takers:
                    arrived.append(Piece(place, values))
        for source in arrived:
            for piece in pieces:
                if piece.place.name == source.place.name:
                    copy_common(piece, source)

    def check(self, pieces: list[Piece]) -> None:
        lacks = next((str(p.place) for p in pieces if not self.covers(p.place)), None)
        lacking = [each for each in tell_all(lacks, self.group) if each]
        if lacking:
            raise LookupError(
                f"no rank that is there has all of {lacking[0]}: more were lost than have left a "
                "copy. Go on from the last checkpoint"
            )

    def covers(self, place: Place) -> bool:
        found = Piece(place, torch.zeros(place.numel, dtype=torch.bool))
        for theirs in self.everyones:
            for other, _ in theirs:
                if other.name == place.name:
                    copy_common(found, Piece(other, torch.ones(other.numel, dtype=torch.bool)))
        return bool(found.tensor.all())


def take_over(training: Training, offered: Offered) -> None:
    """Load parameters, buffers and optimizer states from the ranks into this training.

    Raises LookupError, on all ranks, if a part of them is nowhere. If anything is raised before all
    parts have arrived, the training is unchanged.
    """
    before = [(optimizer, dict(optimizer.state)) for optimizer in training.optimizers]
    before = [(o, {tensor: dict(kept) for tensor, kept in states.items()}) for o, states in before]
    with torch.no_grad(), training.fetched():
        try:
            training.make_states(offered)
            load(offered, training.pieces(), [], offered.group)
        except BaseException:
            for optimizer, states in before:
                optimizer.state.clear()
                optimizer.state.update(states)
            raise
    for model in training.models:
        if isinstance(model, Trainable):
            model.refresh_parameters()


def catch_up(training: Training, step: int, group) -> int:
    """Copy the state from the rank that has completed the most steps, if every rank holds the full
    state (plain data parallelism).

    step: this rank's completed steps; 0 for a new rank. Returns the completed steps, equal on
    all ranks. Every rank of the group calls it, at the start and after each change.
    """
    root, step = furthest(step, group)
    take_over(training, Offered(training.pieces() if group.rank() == root else [], group))
    return step
