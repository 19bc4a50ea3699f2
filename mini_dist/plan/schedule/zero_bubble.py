"""Zero-bubble schedules: split the backward in B (gradient of the input) and W (of the weights).

Only B has somebody waiting for it, the stage before. W can be done at any time until the optimizer
step, so it fills the holes. Bubbles below hold for F, B and W of equal length and no time for
messages; simulate() says what other times give.

Sources: Qi et al. 2023 (arXiv:2401.10241) sections 2 (H1, H2) and 6 (V); DualPipeV, DeepSeek-AI
2025 (github.com/deepseek-ai/DualPipe).
"""

from __future__ import annotations

from collections import defaultdict, deque

from ..fields import checks_kinds
from .action import Action, Schedule, ScheduleError, needs
from .orders import in_turn
from .simulate import peak_in_flight
from .sizes import check_sizes, enough_for_dualpipe


@checks_kinds(error=ScheduleError)
def zb_h1(num_ranks: int, num_micro_batches: int) -> Schedule:
    """1F1B's order of F and B; rank r puts each W off by r backwards. A third of 1F1B's bubble.

    Every rank then holds at most p micro-batches, which is what 1F1B's worst rank does.
    """
    return _delayed_weights("ZB-H1", num_ranks, num_micro_batches, depth=1)


@checks_kinds(error=ScheduleError)
def zb_h2(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Twice the warm-up of ZB-H1 and no bubble within a rank's span, for 2p - 1 held micro-batches.

    Rank r starts r forwards late and ends r forwards late: the picture is a parallelogram. The next
    iteration fits into that shape only if the optimizer step waits for nobody, so whatever it needs
    from all ranks (the gradient norm, a NaN check) has to be checked afterwards and undone
    (section 4). Until then the idle corners are still there: `bubble` counts them, the paper's
    `bubble_over_longest_span` does not. From m = 2p - 1 up there is nothing in between.
    """
    return _delayed_weights("ZB-H2", num_ranks, num_micro_batches, depth=2)


def _delayed_weights(name: str, num_ranks: int, num_micro_batches: int, depth: int) -> Schedule:
    check_sizes(num_ranks, num_micro_batches)
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(rank, "F", micro) for micro in range(num_micro_batches)]
        backwards = [Action(rank, "B", micro) for micro in range(num_micro_batches)]
        warmup, delay = depth * (num_ranks - 1 - rank), depth * rank
        ranks.append(in_turn(forwards, backwards, warmup, delay))
    return Schedule(name, ranks)


class _List:
    """A rank's list being written: `add("FBW", stage)` takes the stage's next micro-batch of each.

    Micro-batches from `limit` up are left out, so that a pattern for many serves few.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.actions = limit, []
        self.count: dict[tuple[int, str], int] = defaultdict(int)
        self.late: deque[Action] = deque()  # the Ws that were put off, oldest first

    def add(self, kinds: str, stage: int) -> None:
        for kind in kinds:
            micro = self.count[stage, kind]
            self.count[stage, kind] += 1
            if micro < self.limit:
                self.actions.append(Action(stage, kind, micro))

    def backward(self, stage: int, put_off: bool) -> None:
        """A full backward, or a B whose W waits in `late`."""
        if put_off:
            self.late.append(Action(stage, "W", self.count[stage, "B"]))
        self.add("B", stage)

    def weight(self) -> None:
        """The oldest W that was put off, if there is one."""
        if self.late:
            self.actions.append(self.late.popleft())


@checks_kinds(error=ScheduleError)
def zb_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Two stages a rank, laid out as a V: rank r holds stages r and 2p-1-r. No bubble, p held.

    The last stage lies on the first rank, next to the first: a rank that waits for one leg of the V
    works on the other, and its optimizer step needs nobody's. From m = 2p - 1 up, no rank idles
    within its span. With fewer the first rank has nothing to do for 2p - 1 - m slots, until its
    first micro-batch comes back up; from m = p up no rank's span is longer than that costs.
    """
    check_sizes(num_ranks, num_micro_batches)
    p, many = num_ranks, max(2 * num_ranks - 1, num_micro_batches)
    ranks = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        todo = _List(limit=num_micro_batches)
        for _ in range(2 * (p - rank) - 1):
            todo.add("F", down)
        for _ in range(rank):
            todo.add("F", up)
            todo.add("F", down)
        for _ in range(p - rank):
            todo.add("FBW", up)
        while todo.count[up, "F"] < many:
            if todo.count[down, "F"] < many:
                todo.add("F", down)
            todo.add("BW", down)
            todo.add("FBW", up)
        for _ in range(rank):  # the backwards that others wait for first, their Ws at the end
            todo.add("B", down)
            todo.add("B", up)
        for _ in range(p - rank):
            todo.add("BW", down)
        for stage in (up, down):
            while todo.count[stage, "W"] < many:
                todo.add("W", stage)
        ranks.append(todo.actions)
    schedule = Schedule("ZB-V", ranks)
    return schedule if num_micro_batches == many else fill_holes(schedule)


def fill_holes(schedule: Schedule) -> Schedule:
    """Put each W where its rank would idle: in every slot a rank takes its next F or B if the input
    is there, else its oldest W.

    F and B keep their order, and no rank holds more than before. (F = B = W, messages for free.)
    """
    limits = peak_in_flight(schedule)
    todo = [deque(action for action in actions if action.kind != "W") for actions in schedule.ranks]
    late: list[deque[Action]] = [deque() for _ in todo]
    filled: list[list[Action]] = [[] for _ in todo]
    held, done = [0] * len(todo), set()
    while any(todo) or any(late):
        slot = []  # what the ranks do at the same time
        for rank, actions in enumerate(todo):
            action = actions[0] if actions else None
            full = held[rank] == limits[rank]
            if (
                action
                and not (action.kind == "F" and full)
                and done.issuperset(needs(schedule, action))
            ):
                slot.append((rank, actions.popleft()))
            elif late[rank]:
                slot.append((rank, late[rank].popleft()))
        for rank, action in slot:
            filled[rank].append(action)
            done.add(action.key)
            held[rank] += (action.kind == "F") - (action.kind == "W")
            if action.kind == "B":
                late[rank].append(action._replace(kind="W"))
    return Schedule(schedule.name, filled)


@checks_kinds(error=ScheduleError)
def dualpipe_v(num_ranks: int, num_micro_batches: int) -> Schedule:
    """DualPipe folded into a V: in the main part each rank pairs a forward with a backward.

    On a GPU such a pair (adjacent F of one leg and B of the other) runs together, so that one's
    communication hides behind the other's arithmetic. Here it stands as two actions, one after the
    other, which is also what PyTorch executes. Backwards are split only where that fills a hole.
    Needs m >= 2p: a micro-batch for each stage.
    """
    check_sizes(num_ranks, num_micro_batches)
    enough_for_dualpipe(num_ranks, num_micro_batches)
    p, m = num_ranks, num_micro_batches
    ranks = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        todo = _List(limit=m)
        for _ in range(2 * (p - rank - 1)):
            todo.add("F", down)
        for _ in range(rank + 1):
            todo.add("F", down)
            todo.add("F", up)
        for _ in range(p - rank - 1):
            todo.backward(up, put_off=True)
            todo.weight()
            todo.add("F", up)
        for _ in range(m - 2 * p + rank + 1):  # the main part: pairs
            todo.add("F", down)
            todo.backward(up, put_off=False)
            todo.add("F", up)
            todo.backward(down, put_off=False)
        for _ in range(p - rank - 1):
            todo.backward(up, put_off=False)
            todo.add("F", up)
            todo.backward(down, put_off=False)
        for i in range(2 * (rank + 1)):  # up, down, up, down...: from the middle on put Ws off
            todo.backward(down if i % 2 else up, put_off=i > rank)
        for _ in range(p - rank - 1):
            todo.weight()
            todo.backward(down, put_off=True)
        while todo.late:
            todo.weight()
        ranks.append(todo.actions)
    return Schedule("DualPipeV", ranks, mixed=True)
