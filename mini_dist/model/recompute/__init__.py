"""Activation recomputation: forget what forward kept for backward, and compute it again then.

    none        keep everything
    selective   forget the core of attention, whose scores grow with S^2 and cost little to repeat
                (Korthikanti et al. 2022, section 5)
    full        keep only the input of a block: a third more arithmetic (Chen et al. 2016)

    recompute_blocks(gpt, "full")               # every block
    recompute_blocks(gpt, "full", every=2)      # blocks 0, 2, 4, ...; the others keep all
    y = recomputed(fn, parameters)(x)           # whatever fn is: several blocks, half a block

What is computed the second time must be the same: random numbers are drawn from the state of the
first time (dropout), and autocast is as it was then.
"""

from .blocks import Recompute, recompute_blocks, recomputed
from .ideas import forget_and_repeat
from .saved_bytes import SavedBytes

__all__ = ["Recompute", "SavedBytes", "forget_and_repeat", "recompute_blocks", "recomputed"]
