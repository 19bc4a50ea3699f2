"""Activation recomputation: drop activations after forward, and compute them again for backward.

    none        save everything
    selective   drop the core of attention, whose scores grow with S^2 and are cheap to repeat
                (Korthikanti et al. 2022, section 5)
    full        save only a block's input: a third more arithmetic (Chen et al. 2016)

    recompute_blocks(gpt, "full")               # every block
    recompute_blocks(gpt, "full", every=2)      # blocks 0, 2, 4, ...; the others save everything
    y = recomputed(fn, parameters)(x)           # any fn: several blocks, half a block

The second run must compute the same values: random numbers (dropout) are drawn from the first
run's state, and autocast is restored.
"""

from .blocks import Recompute, recompute_blocks, recomputed
from .ideas import forget_and_repeat
from .saved_bytes import SavedBytes

__all__ = ["Recompute", "SavedBytes", "forget_and_repeat", "recompute_blocks", "recomputed"]
