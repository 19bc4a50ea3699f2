"""The parent's side of a world: ranks that belong together, and one job on them.

The ranks' own connections are in a network that only they can reach (network.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import time
from pathlib import Path

from . import flight
from .folder import remove_world
from .hosts import Hosts, is_unplugged
from .rank import Job
from .rank_handle import RankHandle
from .transport import Frames, send
from .zygote_handle import LOOK, ZygoteDied, ZygoteHandle

GRACE = 0.4  # seconds for others to fail too: the first failure is not always the cause
PATIENCE = 10  # seconds for killed ranks to be gone


class World:
    """n ranks that have joined each other, or are about to."""

    def __init__(self, keeper: ZygoteHandle, size: int, device: str, hosts: Hosts | None = None):
        self.keeper, self.size, self.device, self.hosts = keeper, size, device, hosts
        self.places = hosts and hosts.places(size)
        self.has_hosts = False
        self.no_hosts: str | None = None  # why its ranks are on one host after all
        self.number = keeper.started = keeper.started + 1
        self.moved = time.time()  # when a rank last began an operation, or to wait for one
        keeper.worlds[self.number] = self
        self.directory = f"{keeper.directory}/{self.number}"
        self.ranks: list[RankHandle] = []
        try:
            os.mkdir(self.directory)
            self.has_hosts = bool(hosts) and self.ask_for_hosts(hosts)
            for number in range(size):
                self.ranks.append(RankHandle(number))
            for rank in self.ranks:
                self.start(rank)
        except OSError:
            self.end(wait=False)
            remove_world(self.directory)
            raise

    def ask_for_hosts(self, hosts: Hosts) -> bool:
        """Whether the zygote could make them; if not, `no_hosts` says why."""
        if hosts.emulated or not self.keeper.forks:
            why = "emulated=True asks for none", "this system has no network namespaces"
            self.no_hosts = why[not hosts.emulated]
            return False
        self.switched = False
        about = dict(switch=hosts.number, rate=hosts.bandwidth, latency=hosts.latency)
        self.keeper.request(**about, world=self.number)
        while not self.switched:
            self.keeper.read_answers()
        return self.no_hosts is None

    def start(self, rank: RankHandle) -> None:
        self.keeper.request(
            [rank.far_socket.fileno(), rank.far_output_fd],
            **dict(start=rank.number, size=self.size, device=self.device, world=self.number),
            **({"host": self.places[rank.number]} if self.has_hosts else {}),
        )
        rank.hand_over()

    def add(self) -> RankHandle:
        """One rank more, which waits to be told who it is to join (elastic.py)."""
        self.ranks.append(RankHandle(len(self.ranks)))
        self.start(self.ranks[-1])
        return self.ranks[-1]

    def note(self, answer: dict) -> None:
        if "switched" in answer:
            self.switched, self.no_hosts = True, answer["switched"]
            return
        rank = self.ranks[answer["rank"]]
        rank.pid = answer.get("started", rank.pid)
        rank.refused = answer.get("refused", rank.refused)
        rank.status = answer.get("status", rank.status)

    def run(self, job: Job, call: Frames, timeout: float) -> str:
        """Run the job on all ranks; say how it ended: done, failed, mismatch, stuck, unplugged,
        timeout.

        call: (function, args, kwargs), pickled.
        """
        message = [pickle.dumps(job), *call]
        started = next_look = time.monotonic()
        for rank in self.ranks:
            rest = max(LOOK, started + timeout - time.monotonic())
            rank.socket.settimeout(min(rest, 3600))  # (it refuses infinity)
            with contextlib.suppress(OSError):  # it died on standby: the loop will see its end
                send(rank.socket, message)
            rank.socket.setblocking(False)
        failed_at = heads = analysed = None
        with selectors.DefaultSelector() as selector:
            selector.register(self.keeper.control, selectors.EVENT_READ)
            for rank in self.ranks:
                selector.register(rank.socket, selectors.EVENT_READ, rank.read_report)
                selector.register(rank.output_fd, selectors.EVENT_READ, rank.read_output)
            while True:
                for key, _ in selector.select(LOOK):
                    if key.data is None:  # an answer: never long in coming
                        self.keeper.read_answers()
                    elif not key.data():
                        selector.unregister(key.fileobj)
                if all(rank.returned for rank in self.ranks):
                    # Some disagreements pass through gloo: half a buffer filled, sum against max.
                    return "mismatch" if flight.mismatch(self.flights()) else "done"
                now = time.monotonic()
                if any(rank.failed for rank in self.ranks):
                    failed_at = failed_at or now
                    over = all(rank.returned or rank.failed for rank in self.ranks)
                    if over or now > failed_at + GRACE:
                        return "failed"
                elif now > started + timeout:
                    return "timeout"
                elif now > next_look:
                    next_look = now + LOOK
                    heads, before = self.heads(), heads
                    if heads != before:
                        self.moved = time.time()
                    if heads == before and self.unplugged():
                        return "unplugged"
                    # While something moves there is nothing to find, and what one would read may
                    # be two ranks at different moments. When all is quiet, one analysis is enough.
                    if heads == before and heads != analysed:
                        analysed, flights = heads, self.flights()
                        if flight.mismatch(flights):
                            return "mismatch"
                        if flight.stuck(flights, {r.number for r in self.ranks if r.returned}):
                            return "stuck"

    def unplugged(self) -> list[int]:
        """The hosts that nothing reaches any more."""
        if not self.has_hosts:
            return []
        first = {place: rank for rank, place in zip(self.ranks[::-1], self.places[::-1])}
        # A rank that has no flight recorder yet may not have moved into its host.
        alive = {
            place: rank.pid
            for place, rank in first.items()
            if rank.pid and not rank.gone and flight.head(self.flight_path(rank))
        }
        return sorted(place for place, pid in alive.items() if is_unplugged(pid))

    def flight_path(self, rank: RankHandle) -> str:
        return f"{self.directory}/flight-{rank.number}"

    def heads(self) -> list:
        """How far each rank has come; unchanged while it computes, waits, or is done."""
        return [(flight.head(self.flight_path(rank)), rank.returned) for rank in self.ranks]

    def flights(self) -> list[flight.FlightRecord]:
        return [flight.read(self.flight_path(rank)) for rank in self.ranks]

    def stacks(self) -> list[str]:
        """Where every live rank is just now, as faulthandler writes it."""
        paths = [Path(f"{self.directory}/stack-{rank.number}") for rank in self.ranks]
        alive = [rank for rank in self.ranks if rank.pid and rank.status is None]
        for rank in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:  # a rank writes its stack at once, if it is scheduled
            if all("File" in text(paths[rank.number]) for rank in alive):
                time.sleep(0.01)  # for the rest of the last one's lines
                break
            time.sleep(0.005)
        return [text(path) for path in paths]

    def end(self, wait: bool) -> None:
        """End every rank; `wait` until the processes are gone. The zygote removes the folder when
        the last has ended. If the zygote dies meanwhile, the system ends its ranks with it, and
        `died` has closed their sockets and pipes, which else are closed here."""
        with contextlib.suppress(ZygoteDied):  # then they have ended with it
            self.keeper.request(kill=self.number)
            deadline = time.monotonic() + PATIENCE
            while wait and any(rank.pid and not rank.gone for rank in self.ranks):
                if time.monotonic() > deadline:
                    raise self.keeper.died("did not answer any more")
                self.keeper.read_answers()
        open_still = self.keeper.control.fileno() != -1  # else it has closed them
        if self.keeper.worlds.pop(self.number, None) and open_still:
            for rank in self.ranks:
                rank.read_output()
                rank.close()


def text(path: Path) -> str:
    """What the file says; nothing, if its rank has not come so far as to make it."""
    return path.read_text(errors="replace") if path.exists() else ""
