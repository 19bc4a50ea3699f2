"""Exercises of lessons 12 and 13: write the lists of a schedule, then see them judged and run.

A schedule is data, so the simulator judges it: can it run, how large is the bubble, what is held.
Then it runs, on ranks with small stages, and its gradients must be those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from .. import schedule as library
from ..pipeline import Pipeline
from ..schedule import Action, Schedule, ScheduleError, Times, simulate, validate
from ..schedule.action import COMMUNICATION, Key
from .exercise import Exercise, Line, Trial, calls_of

LAYERS = 8  # of the small model that every schedule runs, cut evenly into its stages
TIMES = Times(forward=1, backward=1, weight=1)  # of a rank's whole share of the model


@dataclass(frozen=True)
class Case:
    """What the learner's function is called with, and what its lists are for."""

    num_ranks: int
    num_micro_batches: int
    arguments: tuple

    def __str__(self) -> str:
        return f"{self.num_micro_batches} micro-batches"


def sizes(*pairs: tuple[int, int]) -> list[tuple[int, Case]]:
    """Cases of a function of (num_ranks, num_micro_batches)."""
    return [(p, Case(p, m, (p, m))) for p, m in pairs]


@dataclass
class Answer:
    """What came of one case; `refused` says in a sentence why the lists were not run."""

    schedule: Schedule | None
    refused: str
    borrowed: set[str]  # the library's functions that wrote the lists
    right: bool = False  # the gradients


# -- on a rank --------------------------------------------------------------------------------


def trial(fn: Callable, case: Case, group) -> Answer:
    with calls_of(WRITERS, library) as borrowed:
        returned = fn(*case.arguments)
    try:
        schedule = read(returned, case)
        validate(schedule)
    except ScheduleError as error:
        return Answer(None, str(error), borrowed)
    return Answer(schedule, "", borrowed, runs_right(schedule, group))


# The library's functions that make or change lists.
WRITERS = {fn.__name__ for fn in library.SCHEDULES.values()} | {
    *("build", "in_turn", "looped", "add_communication", "fuse_communication", "from_csv")
}


def read(returned, case: Case) -> Schedule:
    """The learner's lists as a Schedule; ScheduleError where they are none, or not of this case."""
    if isinstance(returned, Schedule):
        schedule = returned
    elif isinstance(returned, Mapping) or not isinstance(returned, (list, tuple)):
        raise ScheduleError(
            f"a {type(returned).__name__} came back: return a list with one list of actions for "
            'each rank, such as [["0F0", "0B0"], ["1F0", "1B0"]]'
        )
    else:
        for actions in returned:
            if not isinstance(actions, (list, tuple, str)):
                raise ScheduleError(
                    f"one of the lists is a {type(actions).__name__}: each rank has a list of "
                    'actions, such as ["0F0", "0B0"]'
                )
        schedule = Schedule("your schedule", returned)
    if schedule.num_ranks != case.num_ranks:
        raise ScheduleError(
            f"there are {schedule.num_ranks} lists for {case.num_ranks} ranks: one for each rank"
        )
    if schedule.num_stages and schedule.forward_only:
        raise ScheduleError("there are forwards only: every F needs its B")
    if schedule.asynchronous:
        raise ScheduleError(
            "there is an optimizer step (S) among the micro-batches: then gradients are of other "
            "weights than one process would have, and this is to be the same training"
        )
    if schedule.num_stages and schedule.num_micro_batches != case.num_micro_batches:
        if (schedule.num_micro_batches, schedule.num_stages) == case.arguments:
            raise ScheduleError(
                "stage and micro-batch have changed places: 1F0 is the forward of micro-batch 0 on "
                "stage 1"
            )
        first = min(action.micro for action in schedule.all_actions)
        raise ScheduleError(
            f"the micro-batches are {first} to {schedule.num_micro_batches - 1}, asked for are "
            f"0 to {case.num_micro_batches - 1}" + ": counting starts at 0" * (first > 0)
        )
    if LAYERS % max(1, schedule.num_stages) and case.num_ranks < schedule.num_stages:
        raise ScheduleError(
            f"{schedule.num_stages} stages cannot share {LAYERS} layers evenly: "
            f"{case.num_ranks}, or a multiple of it that divides {LAYERS}, would work"
        )
    return schedule


def runs_right(schedule: Schedule, group) -> bool:
    """Run it on small stages of whole numbers: are this rank's gradients those of one process?"""
    stages, m = schedule.num_stages, schedule.num_micro_batches
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randint(-1, 2, shape, generator=generator).double()  # noqa: E731
    weights, inputs = [draw(3, 3) for _ in range(stages)], [draw(2, 3) for _ in range(m)]

    def of_one_process() -> list[torch.Tensor]:
        parameters = [w.clone().requires_grad_() for w in weights]
        for x in inputs:
            for w in parameters:
                x = functional.linear(x, w)
            (x.square().sum() / m).backward()
        return [w.grad for w in parameters]

    def stage(number: int, weight: torch.Tensor):
        if number == stages - 1:
            return lambda x: functional.linear(x, weight).square().sum()
        return lambda x: functional.linear(x, weight)

    mine = {n: weights[n].clone().requires_grad_() for n in schedule.stages_of[group.rank()]}
    activation = torch.empty(2, 3, dtype=torch.float64, device="meta")
    callables = {number: stage(number, weight) for number, weight in mine.items()}
    Pipeline(schedule, callables, group, activation=activation).step(inputs)
    expected = of_one_process()
    return all(torch.allclose(weight.grad, expected[n]) for n, weight in mine.items())


# -- what was measured ------------------------------------------------------------------------


class ScheduleExercise(Exercise):
    """An exercise whose answer is data: who wrote the lists is noted while they are written."""

    def used(self, trials: list[Trial]) -> set[str]:
        return {name for one in trials for answer in one.run.results for name in answer.borrowed}


class Measured:
    """One case's schedule in numbers, by the names that hints speak of."""

    def __init__(self, one: Trial) -> None:
        self.case, self.answers = one.case, one.run.results
        self.p, self.m = one.case.num_ranks, one.case.num_micro_batches
        self.schedule, self.refused = self.answers[0].schedule, self.answers[0].refused
        self.right = sum(answer.right for answer in self.answers)
        self.ledger = one.run.ledger
        if self.schedule is not None:
            chunks = self.schedule.num_stages / self.p  # thin stages last and hold less
            times = Times(*[t / chunks for t in (TIMES.forward, TIMES.backward, TIMES.weight)])
            self.timeline = simulate(self.schedule, times)
            self.bubble = self.timeline.bubble
            self.held = [count / chunks for count in self.timeline.peak_in_flight]

    @property
    def can_run(self) -> Line:
        return Line("the lists can run", self.schedule is not None, True, self.schedule is not None)

    @property
    def gradients(self) -> Line:
        found = f"{self.right} of {self.p} ranks"
        return Line("gradients of one process on", found, f"all {self.p}", self.right == self.p)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def counts(held: list[float]) -> str:
    return " ".join(f"{count:g}" for count in held)


def judge(
    describe: Callable[[Measured], list[Line]],
    mistake: Callable[[Measured], str],
    if_stuck: str = "",
):
    """Lines of the first case and whatever fails in the others; the first hint that fits.

    if_stuck: what helps most against a deadlock in this exercise.
    """

    def judge_trials(trials: list[Trial]) -> tuple[list[Line], str]:
        lines, hint = [], ""
        for number, one in enumerate(trials):
            measured = Measured(one)
            found = [measured.can_run]
            if measured.schedule is not None:
                found += describe(measured)
            if not hint and not all(line.ok for line in found):
                before = " and ".join(str(t.run.world_size) for t in trials[:number])
                here = f"Right with {before} ranks, not with {one.case.num_ranks} and {one.case}. "
                refused = measured.schedule is None
                said = refusal(measured, if_stuck) if refused else mistake(measured)
                hint = here * (number > 0) + said
            for line in found:
                if number == 0 or not line.ok:
                    line.what += f" ({one.case.num_ranks} ranks, {one.case})" * (number > 0)
                    lines.append(line)
        return lines, hint

    return judge_trials


def refusal(m: Measured, if_stuck: str) -> str:
    """Why the lists cannot run, with what usually helps. The first line says it; below it the
    validator has the whole timetable with the place marked."""
    said = m.refused.splitlines()[0]
    if "deadlock" in said:
        said += f". {if_stuck}".rstrip()
    if "SEND_W" in said or "RECV_W" in said:
        said += ". Nobody waits for W: only F and B hand something over."
    if "has no other end" in said:
        said += (
            ". Two stages on the same rank hand over in memory, the first stage reads its input "
            "from the data, and nobody is behind the last one: schedule.rank_of says where a "
            "stage lives."
        )
    if "but stage" in said and any(kind in said for kind in COMMUNICATION):
        said += ". A receive is named by the stage that receives, a send by the one that sends."
    elif "but stage" in said:
        said += ". An action begins with its stage; with one stage a rank that is the rank."
    return f"{said[0].upper()}{said[1:]}"


# -- GPipe and 1F1B ---------------------------------------------------------------------------


def describe_order(held: Callable[[int, int], list[int]]):
    """The lines of a schedule with one stage a rank, whose bubble is (p-1)/(m+p-1)."""

    def describe(m: Measured) -> list[Line]:
        bubble, most = (m.p - 1) / (m.m + m.p - 1), held(m.p, m.m)
        return [
            Line("bubble", percent(m.bubble), percent(bubble), abs(m.bubble - bubble) < 1e-9),
            Line("held at most, rank by rank", counts(m.held), counts(most), m.held == most),
            m.gradients,
        ]

    return describe


def held_by_gpipe(p: int, m: int) -> list[int]:
    return [m] * p


def held_by_1f1b(p: int, m: int) -> list[int]:
    return [min(p - rank, m) for rank in range(p)]


def common_mistake(m: Measured) -> str:
    if m.schedule.num_stages != m.p:
        return f"There are {m.schedule.num_stages} stages. Here each of the {m.p} ranks has one."
    if m.schedule.split:
        return "Backwards are split (W). Here a B is the whole backward: leave the W out."
    if m.p > 1 and m.m > 1 and m.held == [1] * m.p:
        return (
            "One micro-batch goes all the way down and back before the next one starts: that is "
            "the naive schedule, and three of four ranks wait. Let the next forward begin at once."
        )
    return ""


def gpipe_mistake(m: Measured) -> str:
    if found := common_mistake(m):
        return found
    if m.held != held_by_gpipe(m.p, m.m):
        return (
            f"The ranks hold {counts(m.held)} micro-batches at most. In GPipe a rank does all its "
            f"forwards before its first backward, so it holds all {m.m}. (To hold fewer is the "
            "next exercise.)"
        )
    return (
        "All forwards come first, but the ranks take the micro-batches in different orders, so "
        "they wait for each other. Let all of them go through 0, 1, 2, ... alike."
    )


def one_f_one_b_mistake(m: Measured) -> str:
    if found := common_mistake(m):
        return found
    expected = held_by_1f1b(m.p, m.m)
    if m.held == held_by_gpipe(m.p, m.m):
        return (
            f"Every rank holds all {m.m} micro-batches: this is GPipe. Start each backward as soon "
            "as it can: on the last rank right after the forward."
        )
    if m.p > 2 and len(set(m.held)) == 1:
        return (
            f"All ranks warm up alike, and all hold {m.held[0]:g}. The last rank needs no warm-up "
            "at all: its backward can follow its forward. The one before needs one forward more."
        )
    more = [rank for rank in range(m.p) if m.held[rank] > expected[rank]]
    if more:
        rank = more[0]
        return (
            f"Rank {rank} holds {m.held[rank]:g} micro-batches, and {expected[rank]} would do: it "
            "warms up with more forwards than there are ranks behind it."
        )
    fewer = [rank for rank in range(m.p) if m.held[rank] < expected[rank]]
    if fewer:
        rank = fewer[0]
        return (
            f"Rank {rank} holds only {m.held[rank]:g} and waits where it could run one forward "
            f"more: the bubble is {percent(m.bubble)}. There are {m.p - 1 - rank} ranks behind it, "
            "and the first backward takes its way through all of them."
        )
    return (
        f"Memory is right, but the bubble is {percent(m.bubble)}: after the warm-up one forward "
        "and one backward take turns, each in the order 0, 1, 2, ..."
    )


# -- sends and receives -----------------------------------------------------------------------


def describe_messages(m: Measured) -> list[Line]:
    schedule, plain = m.schedule, m.case.arguments[0]
    borders = sum(plain.crosses(stage) for stage in range(plain.num_stages - 1))
    wanted = 2 * borders * m.m
    sends = sum(action.kind.startswith("SEND") for action in schedule.all_actions)
    same = compute_lists(schedule) == compute_lists(plain)
    late, early = late_sends(schedule), early_receives(schedule)
    nbytes = wanted * 2 * 3 * 8  # a message is [2, 3] of float64
    sent = sum(m.ledger.total_bytes(op="send", phase=phase) for phase in ("forward", "backward"))
    return [
        Line("messages", sends, wanted, sends == wanted),
        Line("the computations are as before", same, True, same),
        Line("sends right after what they send", sends - len(late), wanted, not late),
        Line("receives right before their use", sends - len(early), wanted, not early),
        Line("bytes sent when it ran", sent, nbytes, sent == nbytes),
        m.gradients,
    ]


def compute_lists(schedule: Schedule) -> list[list[Action]]:
    return [
        [action for action in schedule.actions(rank) if action.kind not in COMMUNICATION]
        for rank in range(schedule.num_ranks)
    ]


def late_sends(schedule: Schedule) -> list[tuple[Action, Action]]:
    """(send, the computation before it), where that is not what it sends."""
    found = []
    for rank in range(schedule.num_ranks):
        last = None
        for action in schedule.actions(rank):
            if action.kind not in COMMUNICATION:
                last = action
            elif action.kind.startswith("SEND") and last.key != _carried(action):
                found.append((action, last))
    return found


def early_receives(schedule: Schedule) -> list[tuple[Action, Action]]:
    """(receive, the computation after it), where that is not what needs it."""
    found = []
    for rank in range(schedule.num_ranks):
        coming = None
        for action in reversed(list(schedule.actions(rank))):
            if action.kind not in COMMUNICATION:
                coming = action
            elif action.kind.startswith("RECV"):
                user = (action.stage, action.kind[-1], action.micro)
                if coming is None or coming.key != user:
                    found.append((action, coming))
    return found


def _carried(send: Action) -> Key:
    return (send.stage, send.kind[-1], send.micro)


def message_mistake(m: Measured) -> str:
    schedule = m.schedule
    if not schedule.has_communication:
        return "There are no sends and receives in your lists: put them in."
    if compute_lists(schedule) != compute_lists(m.case.arguments[0]):
        return (
            "The computations are not those of the schedule that you were given, or in another "
            "order. The pass only adds; the order is the schedule's business."
        )
    if late := late_sends(schedule):
        send, last = late[0]
        return (
            f"{send} stands behind {last}: the next rank waits for a result that is long ready. "
            "Put each send right behind the action that computes it."
        )
    if early := early_receives(schedule):
        receive, coming = early[0]
        return (
            f"{receive} stands before {coming}, which does not need it: its buffer is held for "
            f"nothing meanwhile. Put it right before {receive.kind[-1]}{receive.micro} of stage "
            f"{receive.stage}. (The library's `early` does so on purpose, a little.)"
        )
    return "Print your lists for a small case, 2 ranks and 2 micro-batches, and follow a message."


# -- the puzzle -------------------------------------------------------------------------------

BUDGET = 4  # micro-batches that a rank may hold, as much as 1F1B's first rank does
KNOWN = [
    library.naive,
    library.gpipe,
    library.one_f_one_b,
    library.interleaved,
    library.zb_h1,
    library.zb_h2,
    library.zb_v,
    library.dualpipe_v,
]


def describe_puzzle(m: Measured) -> list[Line]:
    par = (m.p - 1) / (m.m + m.p - 1)
    less, most = m.bubble < par - 1e-9, max(m.held)
    return [
        Line("bubble", percent(m.bubble), f"below {percent(par)}", less),
        Line("held at most by a rank", f"{most:g}", f"{BUDGET}", most <= BUDGET),
        m.gradients,
        *ranking(m),
    ]


def puzzle_mistake(m: Measured) -> str:
    most = max(m.held)
    if most > BUDGET:
        rank = m.held.index(most)
        holder = f"Rank {rank} holds {most:g} micro-batches and may hold {BUDGET}"
        if m.schedule.split:
            return (
                f"{holder}. A micro-batch is held until its W is done: put fewer of them off, or "
                "start fewer forwards."
            )
        return f"{holder}: start a backward before the next forward."
    return (
        f"The bubble is {percent(m.bubble)}, not below 1F1B's. Who waits, and for what? The stage "
        "before waits for B only. W has nobody waiting: it can fill a hole. Or give each rank two "
        "thin stages."
    )


def ranking(mine: Measured) -> list[Line]:
    """Yours among the known schedules, smallest bubble first; who holds too much has no place."""
    found = [("yours", mine.bubble, max(mine.held))]
    for build in KNOWN:
        schedule = build(mine.p, mine.m)
        chunks = schedule.num_stages / mine.p
        timeline = simulate(schedule, Times(1 / chunks, 1 / chunks, 1 / chunks))
        found.append((schedule.name, timeline.bubble, max(timeline.peak_in_flight) / chunks))
    place, lines = 0, []
    for name, bubble, most in sorted(found, key=lambda row: (round(row[1], 9), row[2])):
        fits = most <= BUDGET
        place += fits
        where = f"{place}." if fits else "over the budget:"
        lines.append(Line(f"{where} {name}", f"{percent(bubble)}, holds {most:g}", "", True))
    return lines


# -- the exercises ----------------------------------------------------------------------------

EXERCISES = [
    ScheduleExercise(
        "gpipe",
        library.gpipe,
        trial,
        sizes((4, 8), (3, 2), (1, 4)),
        judge(
            describe_order(held_by_gpipe),
            gpipe_mistake,
            "A backward needs its own forward, and the backward of the stage behind it.",
        ),
        hints=[
            "A list for each rank. Rank 1's begins 1F0, 1F1, 1F2, ...; after the last forward come "
            "1B0, 1B1, ... With one stage a rank, the stage is the rank.",
            'Two comprehensions for a rank: [f"{rank}F{k}" for k in range(num_micro_batches)], and '
            "the same with B; one list behind the other.",
        ],
        skeleton="""\
def gpipe(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        forwards = ...
        backwards = ...
        lists.append(...)
    return lists""",
    ),
    ScheduleExercise(
        "one_f_one_b",
        library.one_f_one_b,
        trial,
        sizes((4, 8), (3, 1), (1, 4)),
        judge(
            describe_order(held_by_1f1b),
            one_f_one_b_mistake,
            "The first backward starts on the last rank, right after its first forward: so the "
            "last rank has no warm-up, and the first rank has the longest.",
        ),
        hints=[
            "Three phases a rank: a warm-up of forwards, then one forward and one backward in "
            "turn, then the backwards that are left. How many forwards can rank r run before its "
            "first backward can come back to it?",
            "The last rank has no warm-up: F0 B0 F1 B1 ... Each rank before it has one forward "
            "more: rank r warms up with p-1-r. With few micro-batches there may not be as many.",
            "Take the lists of forwards and backwards of the last exercise. actions = "
            "forwards[:warmup]; then for each k the forward number warmup + k, if there is one, "
            "and backward k. A slice [i : i + 1] is empty where there is none.",
        ],
        skeleton="""\
def one_f_one_b(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        forwards, backwards = ..., ...
        warmup = ...
        actions = forwards[:warmup]
        for k in range(num_micro_batches):
            actions += ...          # the next forward, if there is one left
            actions += ...          # backward k
        lists.append(actions)
    return lists""",
    ),
    ScheduleExercise(
        "add_communication",
        library.add_communication,
        trial,
        [
            (schedule.num_ranks, Case(schedule.num_ranks, schedule.num_micro_batches, (schedule,)))
            for schedule in (
                library.one_f_one_b(4, 8),
                library.zb_v(2, 4),
                library.interleaved(2, 4, chunks=2),
                library.gpipe(1, 2),
            )
        ],
        judge(
            describe_messages,
            message_mistake,
            "A receive has to stand before what uses the message, a send behind what makes it.",
        ),
        hints=[
            "Go down each rank's list. Before F of stage s its input must come from stage s-1, "
            "before B the gradient from stage s+1; after F the output goes to s+1, after B the "
            "gradient to s-1. W needs nobody and nobody waits for it.",
            "No message where the other stage does not exist (before the first, behind the last), "
            "and none where it lives on the same rank: compare schedule.rank_of[other] with rank. "
            "A receive is named by the stage that receives: 1RECV_F0 gets what 0SEND_F0 sends.",
        ],
        skeleton="""\
def add_communication(schedule):
    lists = []
    for rank in range(schedule.num_ranks):
        actions = []
        for action in schedule.actions(rank):
            stage, kind, micro, _ = action
            before, after = {"F": (stage - 1, stage + 1), "B": (..., ...)}.get(kind, (None, None))
            if before in schedule.rank_of and schedule.rank_of[before] != rank:
                actions.append(...)
            actions.append(action)
            if ...:
                actions.append(...)
        lists.append(actions)
    return lists""",
    ),
    ScheduleExercise(
        "less_bubble",
        library.zb_h1,
        trial,
        [(4, Case(4, 8, ()))],
        judge(
            describe_puzzle,
            puzzle_mistake,
            "F waits for F of the stage before, B for B of the stage behind, W for its own B.",
        ),
        hints=[
            "Print simulate(one_f_one_b(4, 8)) and look at the dots at the end: between its last "
            "backwards rank 0 waits for rank 1, which computes weight gradients that nobody needs "
            "yet. Split them: B for the gradient of the input, W for that of the weights.",
            "Take 1F1B's order of F and B. Put each W off until the rank would wait, but not "
            "further: a micro-batch is held until its W is done, and rank 0 has no room left.",
            "Rank r may put W off by r backwards: rank 3 runs F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 "
            "... That is ZB-H1, 11.1 %. To beat it, give each rank two thin stages, in a V: rank r "
            "has r and 7-r. Then the last stage lies next to the first.",
        ],
        skeleton="""\
def less_bubble():
    lists = []
    for rank in range(4):
        actions, put_off = [], []
        warmup = 3 - rank
        ...
        for k in range(8):
            ...                              # F, B
            put_off.append(f"{rank}W{k}")
            if len(put_off) > ...:           # may one wait any longer?
                actions.append(put_off.pop(0))
        lists.append(actions + put_off)
    return lists""",
    ),
]
