"""What `launch` refuses, each in one sentence, before anything is started."""

from __future__ import annotations

import inspect
import os
import sys

from .devices import count_gpus
from .diagnose import brief
from .hosts import Hosts

RANKS_PER_CORE = 16
LAST_SEED = 2**64 - 1  # of torch's generators


def check_arguments(world_size, args, kwargs, seed, start) -> None:
    most = max(RANKS_PER_CORE * (os.cpu_count() or 1), count_gpus())
    if world_size > most:
        raise ValueError(
            f"world_size={brief(world_size)} is too many for this machine: its {os.cpu_count()} "
            f"cores can share at most {most} ranks ({RANKS_PER_CORE} a core). Use {most} or fewer, "
            'or simulate="h100".'
        )
    check_world(world_size, args, kwargs, seed)
    if start not in ("fork", "spawn"):
        raise ValueError(f'start must be "fork" or "spawn", not {start!r}')


def check_world(world_size, args, kwargs, seed) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, not {brief(world_size)}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"args must be a tuple of arguments, not {brief(args)}; did you mean ({brief(args)},)?"
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise TypeError(f"kwargs must be a dict of arguments by name, not {brief(kwargs)}")
    if not 0 <= seed <= LAST_SEED - world_size:
        raise ValueError(
            f"seed must be from 0 to 2**64 - 1 - world_size, as torch's generators take it for "
            f"each rank, not {brief(seed)}"
        )


def check_hosts(hosts, world_size: int, start: str, network: bool) -> None:
    if hosts is None:
        return
    if not isinstance(hosts, Hosts):
        raise TypeError(f"hosts must be Hosts(number, uplink=...), not {brief(hosts)}")
    hosts.places(world_size)
    if network:
        raise ValueError(
            "hosts of ours lead nowhere else: give either hosts=... or network=True, not both"
        )
    if start == "spawn" and sys.platform == "linux":
        raise ValueError('ranks on hosts are forked: give no start, or start="fork"')


def only_gloo(asked: str | None, chosen: str, option: str) -> str:
    """The device of a run whose messages gloo has to carry. Raises ValueError for device="cuda"."""
    if asked != "cuda":
        return "cpu" if chosen == "cuda" else chosen
    why = {
        "hosts": "NCCL does not use the cables between our hosts",
        "elastic": "NCCL cannot go on without a rank that died",
    }
    raise ValueError(
        f'device="cuda" cannot be combined with {option}=...: {why[option]}; give "cpu", or '
        '"cuda:0", where gloo carries the messages of all ranks on one GPU'
    )


def check_call(fn, args, kwargs) -> None:
    try:
        signature = inspect.signature(fn, follow_wrapped=False)  # A decorator may add arguments.
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind(*args, "the group", **kwargs)
    except TypeError as error:
        given = ", ".join([*(f"args[{i}]" for i in range(len(args))), "group"])
        name = getattr(fn, "__name__", "fn")
        more = f"Give the others as launch({name}, ..., args=(...)). " * ("missing" in str(error))
        raise TypeError(
            f"{name}{signature} cannot take what launch passes to it, {name}({given}): {error}. "
            f"{more}The process group is the last positional argument."
        ) from None
