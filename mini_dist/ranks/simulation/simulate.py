"""`launch(fn, world_size=1024, simulate="h100")`: the same function at the size it is for."""

from __future__ import annotations

import os

from mini_dist.plan.calculators import Hardware, hardware
from mini_dist.plan.calculators.machines import SLOWED

from ..ledger import Ledger
from ..report import SimulatedRun
from .calculated import CalculatedMachine
from .native import as_native
from .one_rank import run_ranks
from .player import Player


def simulate(launch, fn, world_size, args, kwargs, machine: Hardware | str, **options):
    """Run each rank without storage, then play all of them in virtual time."""
    machine = hardware(machine)
    workers = min(os.cpu_count() or 1, world_size)
    dealt = [list(range(worker, world_size, workers)) for worker in range(workers)]
    seed = options.pop("seed")
    run = launch(run_ranks, workers, ((fn, args, kwargs), dealt, world_size, seed), **options)
    found = {rank: each for mine, back in zip(dealt, run.results) for rank, each in zip(mine, back)}
    found = [found[rank] for rank in range(world_size)]
    ledger = Ledger.from_ranks([export for export, _ in found])
    player = play(ledger, machine)
    return SimulatedRun(
        results=[result for _, result in found],
        outputs=[""] * world_size,
        ledger=ledger,
        seconds=player.end(),
        device=machine.name,
        steps=player.steps(),
        spans=player.spans,
    )


def play(ledger: Ledger, machine: Hardware) -> Player:
    """Play the ledger's programs on the machine, and give its records their virtual times."""
    comms = [[] for _ in ledger.programs]
    for comm in ledger.comms:
        comms[comm.rank].append(comm)
    ledger.programs = [as_native(*each) for each in zip(ledger.programs, comms)]
    player = Player(ledger, CalculatedMachine(machine, slowed=SLOWED))
    player.play()
    for rank, mine in enumerate(comms):
        for number, comm in enumerate(mine):
            if (rank, number) in player.starts:
                comm.start, comm.end = player.starts[rank, number], player.ends[rank, number]
            elif comm.parent is not None:
                comm.start, comm.end = comm.parent.start, comm.parent.end
    return player
