"""Checkpoints: a training that was killed continues as if nothing had happened, on any ranks.

ideas.py          the page: shards, one file per rank, an atomic rename, any number of ranks
pieces.py         which part of which tensor, and the overlap of two parts
manifest.py       the contents of a checkpoint, and `latest`; both are read with care
files.py          writing: sharded, atomic, checksummed
reading.py        finding the newest complete checkpoint, and reporting all that are skipped
lock.py           only one training at a time saves into a directory
training.py       what has to be saved; a training loop uses `Training`
random_state.py   each rank's generators, as tensors
background.py     a save that runs during training
protocol.py       the interface of a model whose parameters are sharded
"""

from .files import save
from .manifest import CheckpointError
from .pieces import Piece, Place, piece
from .reading import Saved, find
from .training import Training

__all__ = ["CheckpointError", "Piece", "Place", "Saved", "Training", "find", "piece", "save"]
