"""A world of ranks that waits for the next launch, so that most launches find theirs started."""

from __future__ import annotations

import contextlib
import time

from .hosts import Hosts
from .world import World
from .zygote_handle import LOOK, ZygoteDied, ZygoteHandle


def take(
    zygote: ZygoteHandle, size: int, device: str, hosts: Hosts | None, deadline: float
) -> World:
    """Return the world on standby if it fits and is whole, else a new one."""
    if zygote.standby:  # the zygote answers in order: before this, what has died of it
        zygote.request(ping=True)
        zygote.answered = False
        while not zygote.answered and time.monotonic() < deadline:  # (it may be loading torch)
            zygote.read_answers()
    world, zygote.standby = zygote.standby, None
    whole = world and not any(rank.failed for rank in world.ranks)
    if whole and (world.size, world.device, world.hosts) == (size, device, hosts):
        return world
    if world:
        world.end(wait=False)
    try:
        return World(zygote, size, device, hosts)
    except OSError:  # the system has no room, perhaps as long as those ranks are not gone yet
        if not world:
            raise
        zygote.request(ping=True)
        time.sleep(LOOK)
        return World(zygote, size, device, hosts)


def prepare(
    zygote: ZygoteHandle,
    size: int,
    device: str,
    hosts: Hosts | None = None,
    modules: dict[str, str] | None = None,
) -> None:
    """Put a world on standby for the next launch, which is likely to want the same: as many ranks,
    and the modules that the last ones have imported, {name: file}."""
    if not zygote.alive():
        return
    with contextlib.suppress(OSError, ZygoteDied):  # that launch will find out
        zygote.load(modules or {})
        zygote.standby = World(zygote, size, device, hosts)
