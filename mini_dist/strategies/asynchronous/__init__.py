"""Training without waiting for all ranks: a parameter server, and steps between two averages.

Read ideas.py first. engine.py trains any model this way, sharded or not. hogwild.py: parameters in
memory that all ranks share. emulated.py: a server in virtual time. staleness.py: how old the
parameters behind each update were, from the ledger.
"""

from .emulated import Arrivals
from .engine import DiLoCo, ServerLost, Worker, serve_model
from .hogwild import add_rows_, interleave, shared
from .ideas import (
    Applied,
    dealt,
    leave,
    outer_step,
    pull,
    pull_dealt,
    push,
    push_dealt,
    push_touched,
    serve,
)
from .staleness import updates

__all__ = [
    "Applied",
    "Arrivals",
    "DiLoCo",
    "ServerLost",
    "Worker",
    "add_rows_",
    "dealt",
    "interleave",
    "leave",
    "outer_step",
    "pull",
    "pull_dealt",
    "push",
    "push_dealt",
    "push_touched",
    "serve",
    "serve_model",
    "shared",
    "updates",
]
