"""The flight recorder: what each rank is doing, readable by the parent even when the rank is dead.

gloo hangs when two ranks call different collectives, and aborts the process when their dtypes
differ. A rank that hangs in C++ or has died cannot be asked, so every rank writes its last
operations into a small file that the parent also maps. From those files alone the parent finds
which ranks disagree (`mismatch`) and which can never continue (`stuck`), within a tenth of a
second.

A **channel** is an ordered stream on which ranks must agree: all collectives of one group, all
calls of our own collectives by the same ranks, or all messages from one rank to another with one
tag. The k-th entries of a channel belong together.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import struct
import threading
import time
from dataclasses import dataclass
from itertools import combinations

HEADER = struct.Struct("<qq")  # entries written so far, number of the entry waited for (or -1)
ENTRY = struct.Struct("<qqqd96s64s128s")  # number, k, 1 if done, time, channel, signature, text
DONE_AT = struct.calcsize("<qq")  # offset of the 1 in an entry
GROUPS_BYTES = 8192  # JSON: group name -> world ranks of its members
ENTRIES = 256  # a ring: old entries are overwritten
UNKNOWN = 0  # for the k of an operation
FIRST = HEADER.size + GROUPS_BYTES
FILE_BYTES = FIRST + ENTRIES * ENTRY.size


class FlightRecorder:
    """One rank's writing end."""

    def __init__(self, path: str):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, FILE_BYTES)
            reserve(fd)
            self._map = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self._lock = threading.Lock()  # several threads of a rank may communicate
        self._written = 0
        self._counts: dict[str, int] = {}
        self._uncounted: dict[str, str] = {}  # groups where it received from any source: its number
        self._groups: dict[str, list[int]] = {}
        HEADER.pack_into(self._map, 0, 0, -1)

    def add_group(self, name: str, ranks: list[int]) -> None:
        self._groups[name] = ranks
        text = json.dumps(self._groups).encode()
        if len(text) < GROUPS_BYTES:  # above this `stuck` reports nothing and the deadline decides
            self._map[HEADER.size : HEADER.size + len(text)] = text

    def begin(self, channel: str, signature: str, text: str, waits: bool) -> int:
        """Note an operation as it is issued; `waits`: the caller blocks until it is complete."""
        with self._lock:
            number = self._written
            k = self._counts[channel] = self._counts.get(channel, 0) + 1
            if " any " in channel or self._uncounted:  # (splitting costs more than all the rest)
                kind, group, *route = channel.split()
                if "any" in route:
                    self._uncounted[group] = route[1]
                if kind == "message" and route[1] == self._uncounted.get(group):
                    k = UNKNOWN  # which of a sender's messages this is depends on what "any" took
            ENTRY.pack_into(
                self._map,
                FIRST + number % ENTRIES * ENTRY.size,
                *(number, k, 0, time.time()),
                *(channel.encode(), signature.encode(), text.encode()),
            )
            self._written += 1
        if waits:
            self.wait(number)
        else:
            HEADER.pack_into(self._map, 0, self._written, -1)
        return number

    def wait(self, number: int) -> None:
        """Note that the caller, and with it the rank, blocks until that operation is complete.

        If other threads could still do what a rank waits for, nothing is noted.
        """
        blocked = threading.active_count() == 1
        HEADER.pack_into(self._map, 0, self._written, number if blocked else -1)

    def idle(self) -> None:
        """Note that the caller no longer waits: what it waited for has failed."""
        HEADER.pack_into(self._map, 0, self._written, -1)

    def done(self, number: int) -> None:
        if self._written - number < ENTRIES:  # else it is overwritten
            at = FIRST + number % ENTRIES * ENTRY.size + DONE_AT
            self._map[at : at + 8] = (1).to_bytes(8, "little")


def reserve(fd: int) -> None:
    """Make a full disk an OSError now; in mapped memory it would be a SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno == errno.ENOSPC:  # (some file systems cannot reserve)
            raise


@dataclass(frozen=True)
class Entry:
    number: int
    k: int  # the k-th of its channel, from 1, or UNKNOWN
    done: int
    time: float
    channel: (
        # "collective GROUP", "call GROUP RANKS" (one of ours, which is made of messages), or
        # "message GROUP SRC DST TAG" (world ranks; SRC may be "any")
        str
    )
    signature: str  # what ranks must agree on
    text: str  # for people: all_reduce(float32[4, 2])

    @property
    def group(self) -> str:
        return self.channel.split()[1]

    @property
    def is_collective(self) -> bool:
        return self.channel.startswith("collective")

    @property
    def is_message(self) -> bool:
        return self.channel.startswith("message")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of its tensors from the text: if there are many, only the first few."""
        found = re.findall(r"\[([\d, ]*)\]", self.text)
        return [tuple(int(length) for length in each.split(", ") if each) for each in found]


@dataclass(frozen=True)
class FlightRecord:
    """What the parent reads about one rank."""

    entries: list[Entry]  # oldest first, the last ENTRIES of them
    waiting: Entry | None
    groups: dict[str, list[int]]

    def count(self, channel: str) -> int | None:
        """Return how many operations this rank issued on a channel; None if that is unknown."""
        for entry in reversed(self.entries):
            if entry.channel == channel:
                return entry.k if entry.k != UNKNOWN else None
        return 0 if not self.entries or self.entries[0].number == 0 else None


def head(path: str) -> bytes:
    """Return bytes that change when the rank begins an operation, or begins to wait for one."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEADER.size)
    except FileNotFoundError:  # the rank has not joined yet
        return b""


def read(path: str) -> FlightRecord:
    try:
        with open(path, "rb", buffering=0) as file:
            data = file.read()
            file.seek(0)
            header = file.read(HEADER.size)
    except FileNotFoundError:
        data = b""
    if len(data) < FILE_BYTES:  # the rank has not joined yet
        return FlightRecord([], None, {})
    written_since, _ = HEADER.unpack(header)
    written, waited = HEADER.unpack_from(data, 0)
    entries = []
    # What the rank overwrote while we were reading, or is overwriting now, may be torn.
    for number in range(max(0, written_since - ENTRIES + 1), written):
        fields = ENTRY.unpack_from(data, FIRST + number % ENTRIES * ENTRY.size)
        texts = (text.rstrip(b"\0").decode(errors="replace") for text in fields[4:])
        entries.append(Entry(*fields[:4], *texts))
    waiting = next((e for e in entries if e.number == waited and not e.done), None)
    try:
        groups = json.loads(data[HEADER.size : FIRST].rstrip(b"\0") or b"{}")
    except ValueError:  # read while it was being written
        groups = {}
    return FlightRecord(entries, waiting, groups)


def mismatch(flights: list[FlightRecord]) -> dict[int, Entry] | None:
    """Return the first operation that ranks entered together but differently: entries by rank.

    Groups of other ranks may have the same name, if only their own ranks made them.
    """
    met: dict[tuple, dict[int, Entry]] = {}
    for rank, flight in enumerate(flights):
        for entry in flight.entries:
            if entry.k == UNKNOWN:
                continue
            members = tuple(flight.groups.get(entry.group, ()))
            met.setdefault((entry.channel, entry.k, members), {})[rank] = entry
    unlike = [entries for (*_, members), entries in met.items() if not agree(entries, members)]
    return min(unlike, key=lambda entries: min(e.time for e in entries.values()), default=None)


def agree(entries: dict[int, Entry], members: tuple[int, ...]) -> bool:
    """Return whether ranks of a group do the same with tensors whose elements belong together."""
    if len({entry.signature for entry in entries.values()}) > 1:
        return False
    first, *others = entries.values()
    if not others:  # What a single rank does wrong is raised there, and the rank may handle it.
        return True
    has_splits = ", sends " in first.text
    if not has_splits and all(other.text == first.text for other in others):
        return True  # (as almost always, and much faster than by their shapes)
    known = {tuple(entry.shapes) for entry in entries.values()}
    if has_splits:
        if {*members} <= {*entries} and not splits_meet([entries[rank] for rank in members]):
            return False
        # Ranks may have different numbers of rows, and in a list a tensor's partner may be at
        # another index.
        known = {(shapes[0][1:],) for shapes in known if len(shapes) == 1}
    return all(
        elements_line_up(one, other) for pair in combinations(known, 2) for one, other in zip(*pair)
    )


def elements_line_up(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether the shapes differ only by merged neighboring dims, as [8], [1, 8] and [2, 4]
    do, so that a flattened tensor fits the other. [2, 4] and [4, 2] differ."""
    ends, others = ({math.prod(shape[dim:]) for dim in range(len(shape))} for shape in (one, other))
    return ends <= others or others <= ends


SPLITS = re.compile(r"sends ([\d ]+), receives ([\d ]+) bytes")


def splits_meet(entries: list[Entry]) -> bool:
    """Return whether in an all-to-all every rank, in the group's order, expects what the others
    send. True if a text had no room for all splits."""
    found = [SPLITS.search(entry.text) for entry in entries]
    if not all(found):
        return True
    sent, received = ([each[side].split() for each in found] for side in (1, 2))
    return sent == [list(column) for column in zip(*received)]


def stuck(flights: list[FlightRecord], finished: set[int]) -> set[int]:
    """Return the ranks that wait for something that can no longer happen.

    A rank is stuck if it waits for an operation that some other rank has not issued, and that
    other rank is itself stuck or has finished; one that waits for a message from any rank is stuck
    if no message to it is under way and all others are stuck or have finished. This is the largest
    set with that property; it is empty unless one of its ranks waits.
    """
    waiting = [r for r, flight in enumerate(flights) if flight.waiting and r not in finished]
    missing = {rank: absent(flights, rank) for rank in waiting}
    senders = {rank: senders_to(flights, rank) for rank in waiting}

    def is_stuck(rank: int, gone: set[int]) -> bool:
        return bool(missing[rank] & gone) or bool(senders[rank]) and senders[rank] <= gone

    candidates = set(waiting)
    while True:
        still = {rank for rank in candidates if is_stuck(rank, candidates | finished)}
        if still == candidates:
            return still
        candidates = still


def absent(flights: list[FlightRecord], rank: int) -> set[int]:
    """Return the ranks that have not issued their part of the operation that `rank` waits for."""
    waiting = flights[rank].waiting
    if waiting.is_collective:
        partners = flights[rank].groups.get(waiting.group, [])
    else:
        source, target = waiting.channel.split()[2:4]
        if source == "any":
            return set()
        partners = [int(source), int(target)]
        messages = (e for e in flights[int(target)].entries if e.is_message)
        if any(e.group == waiting.group and e.channel.split()[2] == "any" for e in messages):
            return set()  # it may have been received by a receive from any source
    lacking = set()
    for partner in partners:
        count = flights[partner].count(waiting.channel)
        if partner != rank and count is not None and count < waiting.k:
            lacking.add(partner)
    return lacking


def senders_to(flights: list[FlightRecord], rank: int) -> set[int]:
    """Return the ranks any of which could send what `rank` waits for; nobody if it waits for a
    certain rank, or if a message may be under way to it."""
    flight, waiting = flights[rank], flights[rank].waiting
    if not waiting.is_message or waiting.channel.split()[2] != "any":
        return set()
    if flight.entries[0].number != 0:  # earlier ones are overwritten, so nobody can count them
        return set()
    _, group, _, _, tag = waiting.channel.split()
    others = {*flight.groups.get(group, [])} - {rank}
    sent = [flights[other].count(f"message {group} {other} {rank} {tag}") for other in others]
    came = sum(
        each.done
        for each in flight.entries
        if each.is_message and each.group == group and each.channel.split()[3:] == [str(rank), tag]
    )
    return others if None not in sent and sum(sent) == came else set()
