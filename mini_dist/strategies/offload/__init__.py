"""Borrowed memory: the host's and files', and how a device allocates its own.

ideas.py        read this first
lanes.py        copies, files and host arithmetic that overlap with the device's computation
emulated.py     the same in virtual time
sides.py        how much memory device and host would each need, if both are one machine
tier.py         the `offload=` of ZeRO: transfers overlapped with the computation
gradients.py    part of it: how gradients reach the host and are summed
shelf.py        part of it: tensors that are in files between two uses
files.py        tensors in files, directly to the disk; what happens when it is full
activations.py  saved activations on the host
states.py       an optimizer with 8-bit states
allocator.py    a caching allocator to study, fed with the requests of a training step
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
