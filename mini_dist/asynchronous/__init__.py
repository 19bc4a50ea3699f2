"""Training in which nobody waits for all: a parameter server, and steps between two averages.

ideas.py is to be read; engine.py averages any model that trains, sharded or not.
"""

from .engine import DiLoCo
from .ideas import Applied, leave, outer_step, pull, push, serve

__all__ = ["Applied", "DiLoCo", "leave", "outer_step", "pull", "push", "serve"]
