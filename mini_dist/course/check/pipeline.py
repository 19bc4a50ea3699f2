"""Exercises of lessons 12 and 13: write the lists of a schedule, then see them judged and run.

A schedule is data, so the simulator judges it: can it run, how large is the bubble, what is held?
Then it runs, on ranks with small stages, and its gradients must equal those from one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from mini_dist.plan import schedule as library
from mini_dist.plan.schedule import (
    Action,
    Fused,
    Schedule,
    ScheduleError,
    Times,
    asynchronous,
    orders,
    simulate,
    validate,
    zero_bubble,
)
from mini_dist.plan.schedule.action import COMMUNICATION, Key
from mini_dist.strategies.pipeline import Pipeline

from . import answers
from .engine import Exercise, Line, Measured
from .watch import functions_of

LAYERS = 8  # of the puzzle's model, which the stages must share evenly
# The library's functions that make or change lists.
WRITERS = {
    *(*library.SCHEDULES.values(), library.build, library.forward_only),
    *(library.add_communication, library.fuse_communication),
    *functions_of(orders, zero_bubble, asynchronous) - {orders.check_sizes},
}


@dataclass(frozen=True)
class Question:
    """The arguments of a call, and the ranks and micro-batches that the lists are for."""

    num_ranks: int
    num_micro_batches: int
    arguments: tuple

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} rank{'s' * (self.num_ranks > 1)}"
        return f"{ranks}, {self.num_micro_batches} micro-batches"


@dataclass(frozen=True)
class Case:
    """One question, whose lists run on ranks; or several, whose lists are only simulated."""

    questions: tuple[Question, ...]

    @property
    def is_run(self) -> bool:
        return len(self.questions) == 1

    def __str__(self) -> str:
        if not self.is_run:
            return "other cases, in the simulator"
        return f"{self.questions[0].num_micro_batches} micro-batches"


def cases(run: list[Question], played: list[Question]) -> list[tuple[int, Case]]:
    return [*((each.num_ranks, Case((each,))) for each in run), (1, Case(tuple(played)))]


# -- on a rank --------------------------------------------------------------------------------


@dataclass
class Answer:
    """The answer to a question; `refused` says in a sentence why the lists cannot run."""

    schedule: Schedule | None
    refused: str
    right: bool = False  # whether its gradients are right, if it ran


def trial(fn, case: Case, group) -> list[Answer]:
    found = []
    for question in case.questions:
        try:
            schedule = read(fn(*question.arguments), question)
            validate(schedule)
        except ScheduleError as error:
            found.append(Answer(None, str(error)))
        else:
            found.append(Answer(schedule, "", case.is_run and runs_right(schedule, group)))
    return found


def read(returned, asked: Question) -> Schedule:
    """Return the learner's lists as a Schedule; raise ScheduleError if they are not as asked."""
    mixed = any(getattr(each, "mixed", False) for each in (returned, *asked.arguments))
    lists = returned.ranks if isinstance(returned, Schedule) else returned
    if not in_order(lists) or isinstance(lists, str):
        raise ScheduleError(
            f"a {type(returned).__name__} came back: return a list with one list of actions for "
            'each rank, such as [["0F0", "0B0"], ["1F0", "1B0"]]'
        )
    read_lists = []
    for actions in lists:
        if not in_order(actions) or isinstance(actions, Action):
            raise ScheduleError(
                f"one of the lists is a {type(actions).__name__}: each rank has a list of "
                'actions, such as ["0F0", "0B0"]'
            )
        items = actions.split() if isinstance(actions, str) else actions
        read_lists.append([read_item(item) for item in items])
    schedule = Schedule("your schedule", read_lists, mixed)
    if schedule.num_ranks != asked.num_ranks:
        flat = bool(read_lists) and all(len(each) == 1 for each in read_lists)
        raise ScheduleError(
            f"there are {schedule.num_ranks} lists for {asked.num_ranks} ranks: one for each rank"
            + ". A single list of actions came back: put each rank's into a list of its own" * flat
        )
    if schedule.num_stages and schedule.forward_only:
        raise ScheduleError("there are forwards only: every F needs its B")
    if schedule.asynchronous:
        raise ScheduleError(
            "there is an optimizer step (S) among the micro-batches: then gradients come from "
            "other weights than in one process, but the training must be the same"
        )
    if schedule.num_stages and schedule.num_micro_batches != asked.num_micro_batches:
        if (schedule.num_micro_batches, schedule.num_stages) == asked.arguments:
            raise ScheduleError(
                "stage and micro-batch are swapped: 1F0 is the forward of micro-batch 0 on stage 1"
            )
        first = min(action.micro for action in schedule.all_actions)
        raise ScheduleError(
            f"the micro-batches are {first} to {schedule.num_micro_batches - 1}, but should be "
            f"0 to {asked.num_micro_batches - 1}" + ": counting starts at 0" * (first > 0)
        )
    return schedule


def in_order(value) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (Mapping, set, frozenset))


def read_item(item) -> Action | Fused:
    if isinstance(item, Fused):
        return Fused(map(read_item, item))
    if item is None:
        raise ScheduleError(
            "None stands among the actions, such as what a function without return gives, or a "
            "conditional expression: leave out what is not there"
        )
    if not isinstance(item, (Action, str)):
        raise ScheduleError(
            f"{item!r} is a {type(item).__name__}, no action: write it as text, such as 1F0, or as "
            'Action(1, "F", 0)'
        )
    return Action.parse(str(item)) if "(" not in str(item) else item


def runs_right(schedule: Schedule, group) -> bool:
    """Run small stages; return whether this rank's gradients equal those of one process."""
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


# -- the measurements -------------------------------------------------------------------------


class Lists(Measured):
    """The measurements of one question: the first that is not right, else the last. An exercise
    defines the lines that it wants (`wanted`) and the hint if one is not right (`wrong`)."""

    if_stuck = ""  # what helps most against a deadlock

    def wanted(self) -> list[Line]:
        raise NotImplementedError

    def wrong(self) -> str:
        raise NotImplementedError

    def turn_to(self, number: int) -> None:
        self.asked = self.case.questions[number]
        self.p, self.m = self.asked.num_ranks, self.asked.num_micro_batches
        answer = self.results[0][number]
        self.schedule, self.refused = answer.schedule, answer.refused
        self.right = [answers[number].right for answers in self.results]
        if self.schedule is not None:
            self.bubble, self.held = played(self.schedule)

    def lines(self) -> list[Line]:
        for number in range(len(self.case.questions)):
            self.turn_to(number)
            can_run = self.schedule is not None
            found = [Line("the lists can run", can_run, True, can_run)]
            if can_run:
                found += self.wanted()
            if not all(each.ok for each in found):
                break
        return found

    def mistake(self) -> str:
        where = "" if self.case.is_run else f"{self.asked}: "
        return where + (self.refusal() if self.schedule is None else self.wrong())

    @property
    def gradients(self) -> list[Line]:
        if not self.case.is_run:
            return []
        found = f"{sum(self.right)} of {self.p} ranks"
        return [Line("gradients of one process on", found, f"all {self.p}", all(self.right))]

    def refusal(self) -> str:
        """Return why the lists cannot run, with what usually helps. Only the first line of the
        validator's message is used; below it is a timetable with the place marked."""
        said = self.refused.splitlines()[0]
        if "deadlock" in said:
            said += f". {self.if_stuck}".rstrip()
        if "SEND_W" in said or "RECV_W" in said:
            said += ". No rank waits for W: only F and B send something."
        if "has no other end" in said:
            said += (
                ". Two stages on the same rank hand over in memory, the first stage reads its "
                "input from the data, and no stage follows the last one: schedule.rank_of tells "
                "the rank of a stage."
            )
        if "but stage" in said and any(kind in said for kind in COMMUNICATION):
            said += ". A receive is named by the stage that receives, a send by the one that sends."
        elif "but stage" in said:
            said += ". An action begins with its stage: with one stage per rank, that is the rank."
        return f"{said[0].upper()}{said[1:]}"


def played(schedule: Schedule) -> tuple[float, list[float]]:
    """Return a schedule's bubble, and the most micro-batches that each rank holds. F, B and W of a
    rank's whole share of the model take 1 each, so a thinner stage takes and holds less."""
    chunks = schedule.num_stages / schedule.num_ranks
    timeline = simulate(schedule, Times(1 / chunks, 1 / chunks, 1 / chunks))
    return timeline.bubble, [count / chunks for count in timeline.peak_in_flight]


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def counts(held: list[float]) -> str:
    return " ".join(f"{count:g}" for count in held)


# -- GPipe and 1F1B ---------------------------------------------------------------------------


class OneStageARank(Lists):
    """A schedule whose bubble is (p-1)/(m+p-1)."""

    def most(self) -> list[int]:
        """Return how many micro-batches each rank holds at most."""
        raise NotImplementedError

    def wanted(self) -> list[Line]:
        bubble, most = (self.p - 1) / (self.m + self.p - 1), self.most()
        stages = [list(stages) for stages in self.schedule.stages_of]
        right = [[rank] for rank in range(self.p)]
        return [
            Line("bubble", percent(self.bubble), percent(bubble), abs(self.bubble - bubble) < 1e-9),
            Line("held at most, rank by rank", counts(self.held), counts(most), self.held == most),
            *([] if stages == right else [Line("stages, rank by rank", stages, right, False)]),
            *self.gradients,
        ]

    def common_mistake(self) -> str:
        if self.schedule.num_stages != self.p:
            return (
                f"There are {self.schedule.num_stages} stages. Here each of the {self.p} ranks has "
                "one."
            )
        if self.schedule.split:
            return "Backwards are split (W). Here a B is the whole backward: leave the W out."
        if self.schedule.stages_of[0] != (0,):
            return (
                f"Rank 0 has stage {self.schedule.stages_of[0][0]}: the pipeline is reversed. "
                "Here the stage is the rank: a micro-batch enters on rank 0."
            )
        if self.p > 1 and self.m > 1 and self.held == [1] * self.p:
            return (
                "One micro-batch goes all the way down and back before the next one starts: that "
                "is the naive schedule, and three of four ranks wait. Let the next forward begin "
                "at once."
            )
        return ""


class GPipe(OneStageARank):
    if_stuck = "A backward needs its own forward, and the backward of the next stage."

    def most(self) -> list[int]:
        return [self.m] * self.p

    def wrong(self) -> str:
        if found := self.common_mistake():
            return found
        if self.held != self.most():
            return (
                f"The ranks hold {counts(self.held)} micro-batches at most. In GPipe a rank does "
                f"all its forwards before its first backward, so it holds all {self.m}. (To hold "
                "fewer is the next exercise.)"
            )
        return (
            "All forwards come first, but the ranks take the micro-batches in different orders, so "
            "they wait for each other. Let all of them go through 0, 1, 2, ... alike."
        )


class OneFOneB(OneStageARank):
    if_stuck = (
        "The first backward starts on the last rank, right after its first forward: so the last "
        "rank has no warm-up, and the first rank has the longest."
    )

    def most(self) -> list[int]:
        return [min(self.p - rank, self.m) for rank in range(self.p)]

    def wrong(self) -> str:
        if found := self.common_mistake():
            return found
        if self.held == [self.m] * self.p:
            return (
                f"Every rank holds all {self.m} micro-batches: this is GPipe. Start each backward "
                "as soon as it can: on the last rank right after the forward."
            )
        if self.p > 2 and len(set(self.held)) == 1:
            return (
                f"All ranks warm up alike, and all hold {self.held[0]:g}. The last rank needs no "
                "warm-up at all: its backward can follow its forward. The one before needs one "
                "forward more."
            )
        differ = [held - right for held, right in zip(self.held, self.most())]
        if max(differ) > 0:
            rank = next(rank for rank in range(self.p) if differ[rank] > 0)
            return (
                f"Rank {rank} holds {self.held[rank]:g} micro-batches, and {self.most()[rank]} "
                "would do: it warms up with more forwards than there are ranks behind it."
            )
        if min(differ) < 0:
            rank = next(rank for rank in range(self.p) if differ[rank] < 0)
            return (
                f"Rank {rank} holds only {self.held[rank]:g} and waits where it could run one "
                f"forward more: the bubble is {percent(self.bubble)}. There are "
                f"{self.p - 1 - rank} ranks behind it, and the first backward passes "
                "through all of them."
            )
        return (
            f"Memory is right, but the bubble is {percent(self.bubble)}: after the warm-up one "
            "forward and one backward take turns, each in the order 0, 1, 2, ..."
        )


# -- sends and receives -----------------------------------------------------------------------


class Messages(Lists):
    if_stuck = "A receive comes before the action that uses the message, a send after its source."

    def wanted(self) -> list[Line]:
        schedule, (plain,) = self.schedule, self.asked.arguments
        borders = sum(plain.crosses(stage) for stage in range(plain.num_stages - 1))
        wanted = 2 * borders * self.m
        sends = sum(action.kind.startswith("SEND") for action in schedule.all_actions)
        as_before = compute_lists(schedule) == compute_lists(plain)
        late, early = misplaced(schedule, "SEND"), misplaced(schedule, "RECV")
        lines = [
            Line("messages", sends, wanted, sends == wanted),
            Line("the computations are as before", as_before, True, as_before),
            Line("sends right after what they send", sends - len(late), wanted, not late),
            Line("receives right before their use", sends - len(early), wanted, not early),
        ]
        if self.case.is_run:
            nbytes = wanted * 2 * 3 * 8  # a message is [2, 3] of float64
            ledger, phases = self.run.ledger, ("forward", "backward")
            sent = sum(ledger.total_bytes(op="send", phase=phase) for phase in phases)
            lines.append(Line("bytes sent when it ran", sent, nbytes, sent == nbytes))
        return [*lines, *self.gradients]

    def wrong(self) -> str:
        schedule, (plain,) = self.schedule, self.asked.arguments
        if not schedule.has_communication:
            return "There are no sends and receives in your lists: put them in."
        if compute_lists(schedule) != compute_lists(plain):
            return (
                "The computations differ from the schedule that you were given, or are in another "
                "order. The pass only adds; the order is the schedule's business."
            )
        if late := misplaced(schedule, "SEND"):
            send, last = late[0]
            return (
                f"{send} comes after {last}: the next rank waits for a result that is already "
                "ready. Put each send right after the action that computes it."
            )
        if early := misplaced(schedule, "RECV"):
            receive, coming = early[0]
            return (
                f"{receive} comes before {coming}, which does not need it: its buffer is held for "
                f"nothing meanwhile. Put it right before {receive.kind[-1]}{receive.micro} of "
                f"stage {receive.stage}. (The library's `early` does so on purpose, a little.)"
            )
        return (
            "Print your lists for a small case, 2 ranks and 2 micro-batches, and follow a message."
        )


def compute_lists(schedule: Schedule) -> list[list[Action]]:
    return [
        [action for action in schedule.actions(rank) if action.kind not in COMMUNICATION]
        for rank in range(schedule.num_ranks)
    ]


def misplaced(schedule: Schedule, kind: str) -> list[tuple[Action, Action]]:
    """Return (send, the action before it) if that does not make the message; for receives,
    (receive, the action after it) if that does not use the message."""
    found = []
    for rank in range(schedule.num_ranks):
        beside, actions = None, list(schedule.actions(rank))
        for action in actions if kind == "SEND" else reversed(actions):
            if not action.kind.startswith(kind):
                beside = action
            elif beside.key != carried(action):
                found.append((action, beside))
    return found


def carried(message: Action) -> Key:
    """Return the computation that makes or uses a message."""
    return (message.stage, message.kind[-1], message.micro)


# Neighboring stages on ranks that are far apart; and a rank that has the first and the last stage.
APART = Schedule("stages on ranks 0, 2, 1, 3", [library.gpipe(4, 3).ranks[r] for r in (0, 2, 1, 3)])
BOTH_ENDS = Schedule(
    "five stages on two ranks",
    ["0F0 1F0 4F0 4B0 1B0 0B0 0F1 1F1 4F1 4B1 1B1 0B1", "2F0 3F0 3B0 2B0 2F1 3F1 3B1 2B1"],
)


# -- the puzzle -------------------------------------------------------------------------------

BUDGET = 4  # micro-batches that a rank may hold, as many as 1F1B's first rank


class Puzzle(Lists):
    if_stuck = "F waits for F of the stage before, B for B of the next stage, W for its own B."

    def wanted(self) -> list[Line]:
        par = (self.p - 1) / (self.m + self.p - 1)
        less, most = self.bubble < par - 1e-9, max(self.held)
        left = LAYERS % self.schedule.num_stages
        uneven = Line("layers that no stage has", left, 0, False)
        return [
            Line("bubble", percent(self.bubble), f"below {percent(par)}", less),
            Line("held at most by a rank", f"{most:g}", f"{BUDGET}", most <= BUDGET),
            *[uneven] * bool(left),
            *self.gradients,
            *self.ranking(),
        ]

    def wrong(self) -> str:
        if LAYERS % self.schedule.num_stages:
            return (
                f"{self.schedule.num_stages} stages cannot share {LAYERS} layers evenly: {self.p}, "
                f"or a multiple of it that divides {LAYERS}, would work"
            )
        most = max(self.held)
        if most > BUDGET:
            rank = self.held.index(most)
            holder = f"Rank {rank} holds {most:g} micro-batches and may hold {BUDGET}"
            if self.schedule.split:
                return (
                    f"{holder}. A micro-batch is held until its W is done: put fewer of them off, "
                    "or start fewer forwards."
                )
            return f"{holder}: start a backward before the next forward."
        return (
            f"The bubble is {percent(self.bubble)}, not below 1F1B's. Which rank waits, for what? "
            "The stage before waits for B only, so run B as soon as you can. No rank waits for W: "
            "it can fill a gap. Or give each rank two thin stages."
        )

    def ranking(self) -> list[Line]:
        """Rank the learner's schedule among the known ones by bubble, except those over budget."""
        found = [("yours", self.bubble, max(self.held))]
        for build in library.SYNCHRONOUS.values():
            schedule = build(self.p, self.m)
            bubble, held = played(schedule)
            found.append((schedule.name, bubble, max(held)))
        place, lines = 0, []
        for name, bubble, most in sorted(found, key=lambda row: (round(row[1], 9), row[2])):
            fits = most <= BUDGET
            place += fits
            where = f"{place}." if fits else "over the budget:"
            lines.append(Line(f"{where} {name}", f"{percent(bubble)}, holds {most:g}", "", True))
        return lines


# -- the exercises ----------------------------------------------------------------------------


def sizes(*pairs: tuple[int, int]) -> list[Question]:
    return [Question(p, m, (p, m)) for p, m in pairs]


def schedules(*given: Schedule) -> list[Question]:
    return [Question(each.num_ranks, each.num_micro_batches, (each,)) for each in given]


MORE_SIZES = sizes(*((p, m) for p in (1, 2, 3, 5, 11) for m in (1, 2, 3, 4, 7, 12)))

EXERCISES = [
    Exercise(
        "gpipe",
        library.gpipe,
        trial,
        cases(sizes((4, 8), (3, 2)), MORE_SIZES),
        GPipe,
        refuses=WRITERS,
        hints=[
            "A list for each rank. Rank 1's begins 1F0, 1F1, 1F2, ...; after the last forward come "
            "1B0, 1B1, ... With one stage per rank, the stage is the rank.",
            'Two comprehensions per rank: [f"{rank}F{k}" for k in range(num_micro_batches)], and '
            "the same with B; one list after the other.",
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
    Exercise(
        "one_f_one_b",
        library.one_f_one_b,
        trial,
        cases(sizes((4, 8), (3, 1)), MORE_SIZES),
        OneFOneB,
        refuses=WRITERS,
        hints=[
            "Three phases per rank: a warm-up of forwards, then one forward and one backward in "
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
    Exercise(
        "add_communication",
        library.add_communication,
        trial,
        cases(
            schedules(library.one_f_one_b(4, 8), library.zb_v(2, 4)),
            schedules(
                *(library.gpipe(1, 2), library.naive(3, 2), APART, BOTH_ENDS),
                *(library.interleaved(2, 4, chunks=2), library.interleaved(3, 6, chunks=4)),
                *(library.zb_h1(5, 3), library.zb_v(4, 8), library.dualpipe_v(3, 6)),
            ),
        ),
        Messages,
        refuses=WRITERS,
        hints=[
            "Go down each rank's list. Before F of stage s its input must come from stage s-1, "
            "before B the gradient from stage s+1; after F the output goes to s+1, after B the "
            "gradient to s-1. W needs no message, and no rank waits for it.",
            "No message where the other stage does not exist (before the first, after the last), "
            "and none where it is on the same rank: compare schedule.rank_of[other] with rank. "
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
    Exercise(
        "less_bubble",
        library.zb_h1,
        trial,
        [(4, Case((Question(4, 8, ()),)))],
        Puzzle,
        refuses=WRITERS,
        makes=(Schedule, Action),
        hints=[
            "Print simulate(one_f_one_b(4, 8)) and look at the dots at the end: between its last "
            "backwards rank 0 waits for rank 1, which computes weight gradients that nobody needs "
            "yet. Split them: B for the gradient of the input, W for the gradient of the weights.",
            "Take 1F1B's order of F and B. Put each W off until the rank would wait, but not "
            "further: a micro-batch is held until its W is done, and rank 0 has no room left.",
            "Rank r may put W off by r backwards: rank 3 runs F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 "
            "... That is ZB-H1, 11.1 %. To beat it, give each rank two thin stages, in a V: rank r "
            "has r and 7-r. Then the last stage is on the rank of the first.",
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
        answer=(answers.less_bubble,),
    ),
]
