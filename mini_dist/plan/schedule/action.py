"""A pipeline schedule is data: for each rank, the list of actions it does, in that order.

Nothing else is stored. Where a stage lives, how many micro-batches there are, who waits for whom,
which backward is split in two: all of it is read from the lists. So what is printed, simulated,
drawn and executed is one and the same thing.

    1F0   stage 1 runs the forward of micro-batch 0
    1B0   stage 1 runs its backward: the gradients of its input and of its weights,
          or, where the schedule also has a 1W0, of its input alone
    1W0   stage 1 computes the weight gradients that 1B0 left out
    1S0   stage 1 takes optimizer step 0, which makes version 1 of its weights
    1F4@2 stage 1 runs that forward with version 2 of its weights (asynchronous schedules only)
    1SEND_F0, 2RECV_F0   stage 1 sends its output, stage 2 receives it
    2SEND_B0, 1RECV_B0   stage 2 sends the gradient of its input, stage 1 receives it
    (1SEND_F1;1RECV_B0)  two communications started together, as one

Letters: p ranks, m micro-batches, v chunks (stages a rank). Source of the notation: the action IR
of torch.distributed.pipelining, which writes I where we write a B that has its W.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..fields import checks_kinds

COMPUTE = ("F", "B", "W", "S")
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|W|S)(\d+)(?:@(\d+))?")

Key = tuple[int, str, int]  # an action without its version: (stage, kind, micro)


class ScheduleError(ValueError):
    """A schedule that cannot be built or cannot run; the message says where and what would."""


class Action(NamedTuple):
    """One thing a rank does; prints as `1F0`. For kind S, `micro` counts optimizer steps."""

    stage: int
    kind: str
    micro: int
    version: int | None = None

    @staticmethod
    def parse(text: str) -> Action:
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{text!r} is not an action: write stage, kind, micro-batch, as in 1F0, 1B0, 1W0"
            )
        stage, kind, micro, version = match.groups()
        return Action(int(stage), kind, int(micro), None if version is None else int(version))

    @property
    def key(self) -> Key:
        return self[:3]

    def __str__(self) -> str:
        version = "" if self.version is None else f"@{self.version}"
        return f"{self.stage}{self.kind}{self.micro}{version}"

    __repr__ = __str__


class Fused(tuple):
    """Communications that a rank starts together, as one batch; prints as `(1SEND_F1;1RECV_B0)`."""

    def __str__(self) -> str:
        return f"({';'.join(map(str, self))})"

    __repr__ = __str__


def _item(item: Action | Fused | str) -> Action | Fused:
    if not isinstance(item, str):
        return item
    if item.startswith("("):
        return Fused(Action.parse(part) for part in item.strip("()").split(";"))
    return Action.parse(item)


def members(item: Action | Fused) -> tuple[Action, ...]:
    """The actions of one entry of a rank's list: itself, or all of a fused one."""
    return tuple(item) if isinstance(item, Fused) else (item,)


@checks_kinds(error=ScheduleError)
@dataclass(frozen=True)
class Schedule:
    """For each rank its actions in order, given as Actions or as text: `[["0F0", "0B0"], ...]`.

    `mixed=True` says that some backwards are split into B and W and others not, on purpose
    (DualPipeV). Without it a B whose W was forgotten is an error, not a full backward.
    """

    name: str
    ranks: tuple[tuple[Action | Fused, ...], ...]
    mixed: bool = False

    def __post_init__(self) -> None:
        lists = self.ranks.values() if isinstance(self.ranks, dict) else self.ranks
        lists = [actions.split() if isinstance(actions, str) else actions for actions in lists]
        object.__setattr__(self, "ranks", tuple(tuple(map(_item, a)) for a in lists))

    def actions(self, rank: int) -> Iterator[Action]:
        """One rank's actions in order, fused ones one after another."""
        for item in self.ranks[rank]:
            yield from members(item)

    @property
    def all_actions(self) -> Iterator[Action]:
        for rank in range(self.num_ranks):
            yield from self.actions(rank)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((a.stage for a in self.all_actions), default=-1)

    @cached_property
    def num_micro_batches(self) -> int:
        return 1 + max((a.micro for a in self.all_actions if a.kind != "S"), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """Stage -> the rank that holds it: the first one that computes for it."""
        holders: dict[int, int] = {}
        for rank in range(self.num_ranks):
            for action in self.actions(rank):
                holders.setdefault(action.stage, rank)
        return dict(sorted(holders.items()))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Rank -> its chunks: the stages it holds, in the model's order."""
        chunks = defaultdict(list)
        for stage, rank in self.rank_of.items():
            chunks[rank].append(stage)
        return tuple(tuple(chunks[rank]) for rank in range(self.num_ranks))

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, micro-batch) whose backward is split: the list has a W for it."""
        return frozenset((a.stage, a.micro) for a in self.all_actions if a.kind == "W")

    @cached_property
    def has_communication(self) -> bool:
        return any(a.kind in COMMUNICATION for a in self.all_actions)

    @cached_property
    def forward_only(self) -> bool:
        return not any(a.kind == "B" for a in self.all_actions)

    @cached_property
    def asynchronous(self) -> bool:
        """Whether the weights change while micro-batches are in flight (there are S actions)."""
        return any(a.kind == "S" for a in self.all_actions)

    def crosses(self, stage: int) -> bool:
        """Whether the border between `stage` and the next one lies between two ranks."""
        return self.rank_of.get(stage) != self.rank_of.get(stage + 1)

    def __str__(self) -> str:
        batches = "micro-batch" if self.num_micro_batches == 1 else "micro-batches"
        header = f"{self.name}: {self.num_ranks} ranks, {self.num_micro_batches} {batches}"
        return f"{header}\n{timetable(self)}"


def needs(schedule: Schedule, action: Action) -> list[Key]:
    """What must be over before `action` can start; the one statement of who waits for whom.

    A receive starts at once and is over when it is posted; who uses the message waits for both.
    """
    stage, kind, micro = action.key
    if kind == "F":
        keys = [] if stage == 0 else _message(schedule, stage - 1, stage, "F", micro)
        if action.version:  # version 0 is there from the start
            keys.append((stage, "S", action.version - 1))
        return keys
    if kind == "B":
        is_last = stage == schedule.num_stages - 1
        keys = [] if is_last else _message(schedule, stage + 1, stage, "B", micro)
        return [(stage, "F", micro), *keys]
    if kind == "W":
        return [(stage, "B", micro)]
    if kind == "S":
        return [(stage, "S", micro - 1)] if micro > 0 else []
    if kind in ("SEND_F", "SEND_B"):
        return [(stage, kind[-1], micro)]
    return []


def _message(schedule: Schedule, source: int, target: int, kind: str, micro: int) -> list[Key]:
    """What `target` waits for to have what `source` computed."""
    if schedule.has_communication and schedule.crosses(min(source, target)):
        return [(source, f"SEND_{kind}", micro), (target, f"RECV_{kind}", micro)]
    return [(source, kind, micro)]


class Stuck(Exception):
    """No rank can go on. `places` is how far each got: an index into its list, or its length."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__(places)
        self.places = list(places)


def walk(schedule: Schedule, *, rendezvous: bool = False) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, place, action) in an order in which the ranks can run their lists.

    Each rank goes down its own list and waits at an action whose inputs are not there yet. Sends
    and receives are only started. With `rendezvous` each is brought to its end before the rank goes
    on (a fused one: all of it together), so both sides have to come to it: NCCL runs a rank's
    communications in order like that. Raises Stuck where no rank can go on.
    """
    lists = [[members(item) for item in items] for items in schedule.ranks]
    places = [0] * len(lists)
    done: set[Key] = set()

    def posted(key: Key) -> bool:  # has its rank come to this action, or passed it?
        rank = schedule.rank_of[key[0]]
        here = lists[rank][places[rank]] if places[rank] < len(lists[rank]) else ()
        return key in done or any(action.key == key for action in here)

    def ready(action: Action) -> bool:
        if not all(key in done for key in needs(schedule, action)):
            return False
        if rendezvous and action.kind.startswith("SEND"):
            return posted(receive_of(action).key)
        if rendezvous and action.kind.startswith("RECV"):
            return send_of(action).key in done
        return True

    progress = True
    while progress:
        progress = False
        for rank, items in enumerate(lists):
            while places[rank] < len(items):
                item = items[places[rank]]
                for action in item:
                    if action.key not in done and ready(action):
                        done.add(action.key)
                        progress = True
                        yield rank, places[rank], action
                if not all(action.key in done for action in item):
                    break
                places[rank] += 1
                progress = True
    if any(place < len(items) for place, items in zip(places, lists, strict=True)):
        raise Stuck(places)


def send_of(receive: Action) -> Action:
    """The send on the other side: `2RECV_F0` -> `1SEND_F0`, `1RECV_B0` -> `2SEND_B0`."""
    if receive.kind == "RECV_F":
        return Action(receive.stage - 1, "SEND_F", receive.micro)
    return Action(receive.stage + 1, "SEND_B", receive.micro)


def receive_of(send: Action) -> Action:
    """The receive on the other side: `1SEND_F0` -> `2RECV_F0`, `2SEND_B0` -> `1RECV_B0`."""
    if send.kind == "SEND_F":
        return Action(send.stage + 1, "RECV_F", send.micro)
    return Action(send.stage - 1, "RECV_B", send.micro)


def timetable(schedule: Schedule, marks: Iterable[tuple[int, int]] = ()) -> str:
    """The lists as text, a column a rank, a row a place; the (rank, place) in `marks` get a `<--`.

    Rows are places in the lists, not times: `print(simulate(schedule))` shows the times.
    """
    marks = set(marks)
    height = max([len(items) for items in schedule.ranks] + [p + 1 for _, p in marks], default=0)
    columns = [[str(place) for place in range(height)]]
    for rank, items in enumerate(schedule.ranks):
        cells = [str(item) for item in items] + [""] * (height - len(items))
        columns.append([f"{c} <--" if (rank, i) in marks else c for i, c in enumerate(cells)])
    heads = [""] + [f"rank {rank}" for rank in range(schedule.num_ranks)]
    widths = [max(map(len, [head, *cells])) for head, cells in zip(heads, columns, strict=True)]
    rows = [heads, *zip(*columns, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
