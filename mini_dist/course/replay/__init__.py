"""What ran here, on another machine: the same kernels and the same messages, other rates and links.

    run = launch(train, world_size=8, count=True)         # count: note every kernel
    replay(run, "h100")                                   # 8 H100s in one node, NVLink
    replay(run, "h100", nodes=2)                          # the same ranks on 2 nodes, InfiniBand
    elsewhere(run)                                        # both, and A100s on a slow network

Of the run only the order is kept: what each rank computed, what it sent, what it waited for, what
another thread did for it. A kernel takes the time of the roofline in calculators.kernels: matrices
on measured GEMM ceilings, everything else at the memory's rate. A message takes latency + bytes /
bandwidth, begins when both sides are there, and each rank sends one and receives one at a time.
A native collective (DDP's, say) is a ring, timed as the planner times it.

The host is left out. It takes 5 to 10 microseconds to start a kernel from Python, so small
models run slower than this says, unless CUDA graphs start them. For this machine the host's time is
measured, as all other rates are, and no card carries its messages (`measure_here`): so the replay
of a run can be compared with the clock (benchmarks/replay.py).
"""

from mini_dist.ranks.simulation.calculated import CalculatedMachine
from mini_dist.ranks.simulation.player import Player, Span

from .measured import MeasuredMachine, measure_here
from .replays import Replay, elsewhere, replay

__all__ = [
    "CalculatedMachine",
    "MeasuredMachine",
    "Player",
    "Replay",
    "Span",
    "elsewhere",
    "measure_here",
    "replay",
]
