"""Borrowed memory: the host's and files', and how a device's own is dealt out.

ideas.py        to be read
lanes.py        copies, files and the host's arithmetic go on beside the device's
emulated.py     the same in virtual time
sides.py        how much memory each of the two would need, where both are one
tier.py         what ZeRO takes as `offload=`: transfers behind the computation
gradients.py    of it, how gradients come to the host and are added up
shelf.py        of it, what is in files between two uses
files.py        tensors in files, straight to the disk; what happens when it is full
activations.py  what forward keeps for backward, on the host
states.py       an optimizer whose states have 8 bits
allocator.py    a caching allocator to look at, fed with what a training step asked for
"""

from .activations import activations_to_host
from .allocator import Allocator, OutOfMemory, replay, requests
from .emulated import EmulatedLanes
from .files import FileStore, OffloadError
from .ideas import blockwise, delayed, offsets, read_ahead, step_behind, undo
from .lanes import CudaLanes, Lanes
from .sides import Sides
from .states import Adam8bit
from .tier import OverlappedOffload

__all__ = [
    "Adam8bit",
    "Allocator",
    "CudaLanes",
    "EmulatedLanes",
    "FileStore",
    "Lanes",
    "OffloadError",
    "OutOfMemory",
    "OverlappedOffload",
    "Sides",
    "activations_to_host",
    "blockwise",
    "delayed",
    "offsets",
    "read_ahead",
    "replay",
    "requests",
    "step_behind",
    "undo",
]
