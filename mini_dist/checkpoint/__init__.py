"""Checkpoints: a training that was killed goes on as if it had not been, on any number of ranks.

pieces.py     which part of which tensor, and what two parts have in common
files.py      on disk: sharded, atomic, checksummed
training.py   what there is to save; `Training` is what a training loop uses
"""

from .files import CheckpointError, Saved, find, save
from .pieces import Piece, Place, piece
from .training import Training

__all__ = ["CheckpointError", "Piece", "Place", "Saved", "Training", "find", "piece", "save"]
