"""Checkpoints: a training that was killed goes on as if it had not been, on any number of ranks.

ideas.py          the page: shards, one file per rank, an atomic rename, any number of ranks
pieces.py         which part of which tensor, and what two parts have in common
manifest.py       what a checkpoint says of itself, and `latest` of all; how it is read with care
files.py          written: sharded, atomic, checksummed
reading.py        found again: the newest that is whole, and whatever was passed over is told
lock.py           one training at a time saves into a directory
training.py       what there is to save; `Training` is what a training loop uses
random_state.py   each rank's generators, as tensors
background.py     a save that goes on while the training does
protocol.py       what it asks of a model whose parameters are sharded or cut
"""

from .files import save
from .manifest import CheckpointError
from .pieces import Piece, Place, piece
from .reading import Saved, find
from .training import Training

__all__ = ["CheckpointError", "Piece", "Place", "Saved", "Training", "find", "piece", "save"]
