"""The same launch under torchrun: join the existing world instead of making one.

torchrun starts ranks and notices when one has ended. It does not notice when ranks wait for
something that never comes: for a host whose cable is pulled, or for a rank that loops forever. Only
the ranks themselves can see that, so each has a thread that looks (`Watch`). A finding ends its
process, as with NCCL's watchdog: without the others this run is over. Then torchrun ends
the other ranks, or starts all of them again.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress

from .connections import own_addresses, silences
from .diagnose import RankError, ranks_text, traceback_lines
from .hosts import ranks_of
from .membership import LONGER_THAN_ANY_RUN

LOOK = 1.0  # seconds between two looks
SILENCE = 15.0  # seconds until a host is given up, as long as torchrun's own rendezvous
GRACE = 2.0  # seconds for the others to report the same; then their connections to this rank break


def join_torchrun(
    fn,
    world_size: int,
    args,
    kwargs,
    *,
    device: str | None,
    timeout: float,
    seed: int,
    memory: bool,
    count: bool,
):
    """Call `fn` in this process as one of torchrun's ranks; every rank gets the whole Run."""
    import torch
    import torch.distributed as dist

    from .devices import choose_device, default_device, device_of_rank, is_shared
    from .ledger import Ledger
    from .ledger.group import register
    from .ledger.recording import Recorder
    from .rank import seed_everything
    from .report import Run

    actual = int(os.environ["WORLD_SIZE"])
    if world_size != actual:
        raise ValueError(
            f"launch(world_size={world_size}) under a torchrun of {actual} ranks: use "
            f"world_size={actual}, or start torchrun with --nproc-per-node {world_size}"
        )
    num_local = int(os.environ["LOCAL_WORLD_SIZE"])
    chosen = choose_device(device, num_local, torch.cuda.device_count())
    with Watch(timeout, int(os.environ["RANK"]), actual) as watch:
        if not dist.is_initialized():
            here = device_of_rank(chosen, int(os.environ["LOCAL_RANK"]))
            register(Recorder(), here, is_shared(chosen))
            join(here, watch)
        group = dist.group.WORLD
        began = time.perf_counter()
        seed_everything(seed + group.rank())
        nodes = [None] * actual
        own = int(os.environ["GROUP_RANK"]), own_addresses()
        dist.all_gather_object(nodes, own, group=group)
        hosts = [host for host, _ in nodes]
        group.recorder.start(memory, count, hosts if len({*hosts}) > 1 else None)
        watch.hosts, watch.recorder = hosts, group.recorder
        watch.addresses = {each: host for host, some in nodes for each in some if host != own[0]}
        with default_device(group.device, device is not None) or nullcontext():
            result = fn(*args, group, **kwargs)
        group.recorder.stop()
        both = [None] * actual
        dist.all_gather_object(both, (result, group.recorder.export()), group=group)
    results, ledgers = zip(*both)
    seconds = time.perf_counter() - began
    return Run(list(results), [""] * actual, Ledger.from_ranks(ledgers), seconds, chosen)


def join(device, watch: Watch) -> None:
    """Initialize torch.distributed from torchrun's variables. Raises RankError."""
    import torch
    import torch.distributed as dist

    from .ledger.group import BACKEND

    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:  # (the watch has the deadline: a later launch may have another)
        dist.init_process_group(BACKEND, timeout=LONGER_THAN_ANY_RUN)
    except RuntimeError as error:
        raise RankError(f"{watch.me()}: {error}.{watch.doing()}") from error
    atexit.register(leave)


class Watch:
    """End this process, with one error, when the run is out of time or a host is silent.

    hosts: of every rank; addresses: of the other hosts -> their number. Both are set once they are
    known. Except on Linux silences are not known, and only the deadline counts.
    """

    def __init__(self, timeout: float, rank: int, size: int):
        self.timeout, self.rank, self.size = timeout, rank, size
        self.deadline = time.monotonic() + timeout
        self.hosts: list[int] = []
        self.addresses: dict[str, int] = {}
        self.recorder = None
        self.over = threading.Event()
        self.watched = threading.get_ident()
        self.host = os.environ["GROUP_RANK"] if os.environ["GROUP_WORLD_SIZE"] != "1" else None

    def __enter__(self) -> Watch:
        threading.Thread(target=self.look, name="mini_dist watch", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.over.set()

    def look(self) -> None:
        while not self.over.wait(min(LOOK, max(0.0, self.deadline - time.monotonic()))):
            found = {}
            with suppress(OSError):  # no file descriptor is left: look again later
                found = silences(self.addresses)
            address = max(found, key=found.get, default=None)
            if address and found[address] > SILENCE:
                self.end(f"RankError: {self.me()}: {self.silent(address, found[address])}")
            if time.monotonic() >= self.deadline:
                late = f"not done after {self.timeout:g} s, the timeout of this launch."
                self.end(f"RankTimeout: {self.me()}: {late}")

    def end(self, sentence: str) -> None:
        lines = [f"{sentence}{self.doing()}", *traceback_lines(self.frames())]
        os.write(2, "\n".join([*lines, ""]).encode())  # (at once, so that no rank's cuts in)
        sys.stdout.flush()
        time.sleep(GRACE)
        os._exit(1)

    def me(self) -> str:
        host = f" (host {self.host})" if self.host else ""
        return f"rank {self.rank} of {self.size}{host}"

    def silent(self, address: str, seconds: float) -> str:
        host = self.addresses[address]
        there = ranks_text(ranks_of(host, self.hosts))
        return (
            f"host {host} ({there}, {address}) has not answered for {seconds:.0f} s. Its cable is "
            "pulled, a switch between is off, or the host itself is."
        )

    def doing(self) -> str:
        """Describe the last communication that is not over."""
        if self.recorder is None:
            name = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            return f" It has not joined the others. (GLOO_SOCKET_IFNAME, how gloo gets out: {name})"
        under_way = [row for row in self.recorder.comms if row[6] is None]
        if not under_way:
            return " It waits for nobody."
        op, group, _, nbytes, peer, start = under_way[-1][:6]
        ranks = self.recorder.groups[group]
        whom = [ranks[peer]] if isinstance(peer, int) else {*ranks} - {self.rank}
        what = f"{op} of {nbytes:,} bytes with {ranks_text(whom)}"
        return f" {what} began {time.time() - start:.1f} s ago and is not over."

    def frames(self) -> list[tuple[str, int, str]]:
        frame = sys._current_frames().get(self.watched)
        return [(each.filename, each.lineno, each.name) for each in traceback.extract_stack(frame)]


def leave() -> None:
    """End the world while Python still runs: gloo's threads may hold tensors, and if one of them
    frees a tensor after Python has ended, the process aborts (2 of 400 did)."""
    import torch.distributed as dist

    if dist.is_initialized():  # the script may have done it
        dist.destroy_process_group()
