"""`launch(fn, world_size=1024, simulate="h100")`: the same function at the size it is for.

Each rank's function runs in a process of this machine, on tensors that have shapes and no storage,
over groups that send nothing (one_rank.py). Its kernels, messages and bytes are recorded as in a
real run. Then all ranks are played in virtual time (player.py): kernels take the planner's
rooflines, messages its links (calculated.py), and a collective takes the time of the machine's own
library (native.py).

In a world of up to ALL_RANKS ranks every rank is run, and the ledger equals a real run's, message
by message. In a larger one, a rank of each kind is run (kinds.py) and stands for the others.
"""

from __future__ import annotations

import linecache
import os
import random
import warnings

from mini_dist.plan.calculators import hardware
from mini_dist.plan.calculators.machines import SLOWED
from mini_dist.plan.fields import at_least, whole

from ..ledger import Ledger
from ..report import SimulatedRun, print_outputs
from .by_kind import LedgerByKind, PlayerByKind
from .calculated import CalculatedMachine
from .kinds import Kinds, apart, axes_of
from .native import as_native
from .one_rank import Job, run_ranks
from .player import Player

ALL_RANKS = 8
MOST_KINDS = 512  # each takes a run, of a second or so


def simulate(
    launch,
    fn,
    world_size,
    args,
    kwargs,
    machine,
    ranks=None,
    pretend=None,
    host_us=0.0,
    stragglers=None,
    slow_links=None,
    **options,
) -> SimulatedRun:
    """Run ranks without storage, then play the world in virtual time.

    launch: starts the workers. machine: a name of the planner's, or a Hardware. ranks: "all", or
    "kinds"; None: all of a small world. pretend: values that the function may ask for, by name.
    host_us: microseconds that the host takes to launch a kernel. stragglers, slow_links: rank ->
    how many times as long its kernels take, or its node's messages to other nodes.
    Raises ValueError for a machine that is not known, RankError for what the function raises.
    """
    slow = {
        name: slow_ranks(name, given, world_size)
        for name, given in (("stragglers", stragglers), ("slow_links", slow_links))
    }
    machine = CalculatedMachine(
        hardware(machine), slowed=SLOWED, launch_seconds=1e-6 * host_us, **slow
    )
    ranks = ranks or ("all" if world_size <= ALL_RANKS else "kinds")
    if ranks not in ("all", "kinds"):
        raise ValueError(f'ranks={ranks!r}: give "all", or "kinds" (one rank of each kind)')
    call = fn, args, kwargs, pretend, sources_of_cells()
    world = World(launch, call, world_size, options.pop("seed"), options)
    if ranks == "all":
        found = world.run([Job(rank) for rank in range(world_size)])
        ledger = Ledger.from_ranks([export for _, export, *_ in found])
        run = played(Player, ledger, machine)
        back = [each[2] for each in found]
    else:
        kinds, found = find_kinds(world, {*slow["stragglers"], *slow["slow_links"]})
        ledger = LedgerByKind.of(kinds, [export for _, export, *_ in found])
        run = played(PlayerByKind, ledger, machine)
        back = [found[kinds.of(rank)][2] for rank in range(world_size)]
    run.results, run.outputs = map(list, zip(*back))
    run.costs = world.costs
    if not options["quiet"] and ranks == "all":
        print_outputs(run.outputs)
    return run


class World:
    """Runs some ranks of a world in as many processes as there are cores."""

    def __init__(self, launch, call, world_size, seed, options) -> None:
        self.launch, self.call, self.size = launch, call, world_size
        self.seed, self.options = seed, options
        self.costs = []

    def run(self, jobs: list[Job]) -> list[tuple]:
        """What run_ranks returns of each job."""
        workers = min(os.cpu_count() or 1, len(jobs))
        dealt = [jobs[worker::workers] for worker in range(workers)]
        args = (self.call, dealt, self.size, self.seed)
        back = self.launch(run_ranks, workers, args, device="cpu", **self.options).results
        found = [back[n % workers][n // workers] for n in range(len(jobs))]
        self.costs += [cost for *_, cost in found]
        return found


def sources_of_cells() -> dict[str, tuple]:
    """linecache's entries that were not read from a file: the cells of a notebook."""
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }


def slow_ranks(name: str, given: dict | None, world_size: int) -> dict[int, float]:
    """The argument, checked: {rank: factor}."""
    if not isinstance(given or {}, dict):
        raise ValueError(f"{name}={given!r} is no dict: give ranks and factors, such as {{5: 1.5}}")
    for rank, factor in (given or {}).items():
        if not 0 <= whole(f"a rank of {name}", rank, 0) < world_size:
            raise ValueError(f"{name} names rank {rank}: there are 0 to {world_size - 1}")
        at_least(f"{name}[{rank}]", factor, 1, "how many times as long it takes")
    return dict(given or {})


def find_kinds(world: World, slow: set[int]) -> tuple[Kinds, list[tuple]]:
    """The kinds of ranks, and what the first rank of each did. Warns if a second one differs.

    slow: ranks that are of a kind of their own, because they are to take longer.
    """
    known = {}

    def learn(jobs: list[Job]) -> None:
        known.update(zip([job.rank for job in jobs], world.run(jobs) if jobs else []))

    learn([Job(rank, shortcut=True) for rank in range(min(2, world.size))])  # 1 is a probe, too
    export = known[0][1]
    axes = axes_of(export["groups"], export["axes"], world.size)
    probes = {i * axis.stride for axis in axes for i in axis.probes()}
    learn([Job(rank, shortcut=True) for rank in sorted(probes - set(known))])
    did = {rank: each[0] for rank, each in known.items()}
    parts = [axis.parts({i: did[i * axis.stride] for i in axis.probes()}) for axis in axes]
    for rank in slow:
        parts = [apart(each, rank // axis.stride % axis.size) for each, axis in zip(parts, axes)]
    kinds = Kinds(axes, parts)
    if (number := len(kinds.firsts())) > MOST_KINDS:
        raise ValueError(
            f"this function does something else on each of {number:,} kinds of ranks, more than "
            f"the {MOST_KINDS} that a simulation runs: give fewer ranks"
        )
    seconds = kinds.another(random.Random(world.seed), known)
    new = [rank for rank in kinds.firsts() if rank not in known]
    checks = [rank for rank in seconds if rank is not None and rank not in known]
    learn([Job(rank, True) for rank in new] + [Job(rank, True, keep=False) for rank in checks])
    for one, other in zip(kinds.firsts(), seconds):
        if other is not None and not known[one][0].alike(known[other][0]):
            warnings.warn(
                f"rank {other} did something else than rank {one}, which stands for it: "
                'give ranks="all" where the world is small enough',
                stacklevel=4,
            )
    return kinds, [known[rank] for rank in kinds.firsts()]


def played(make_player, ledger: Ledger, machine: CalculatedMachine) -> SimulatedRun:
    """Play the ledger's programs on the machine, and give its records their virtual times."""
    comms = [[] for _ in ledger.programs]
    for comm in ledger.comms:
        comms[comm.rank].append(comm)
    ledger.programs = [as_native(*each) for each in zip(ledger.programs, comms)]
    player = make_player(ledger, machine)
    player.play()
    for rank, mine in enumerate(comms):
        for number, comm in enumerate(mine):
            comm.carrier = comm.carrier and "NCCL"
            if (rank, number) in player.starts:
                comm.start, comm.end = player.starts[rank, number], player.ends[rank, number]
            elif comm.parent is not None:
                comm.start, comm.end = comm.parent.start, comm.parent.end
    ledger.phases = player.phase_changes()
    ledger.span = [(0.0, player.end())] * len(comms)
    return SimulatedRun(
        results=[],
        outputs=[],
        ledger=ledger,
        seconds=player.end(),
        device=machine.machine.name,
        steps=player.steps(),
        spans=player.spans,
    )
