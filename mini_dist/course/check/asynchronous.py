"""Exercises of lesson 18: a server that bounds staleness, touched rows, DiLoCo's outer step.

A server's answers depend on the order of the requests, so the workers make their requests in a
fixed order: each passes the turn to the next one in an empty message. The values that a pull brings
show how many updates were made before it was answered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives.messages import recv, send, start, wait
from mini_dist.strategies import asynchronous
from mini_dist.strategies.asynchronous.ideas import (
    LEAVE,
    PULL,
    PUSH,
    ask,
    leave,
    outer_step,
    push,
    push_touched,
    serve,
)

from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks, yes
from .measures import close, mistake_of_dtype

# ---- a server with a bound ----------------------------------------------------------------------

LENGTH, WIDTH = 6, 2


class Event(NamedTuple):
    worker: int
    kind: int
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Told:
    """The requests of all workers in order, drawn at random from what a right server allows."""

    bound: int | None
    steps: int = 3
    fewer: int = 0  # the odd workers take this many steps fewer, so they leave early
    with_rows: bool = False
    seed: int = 0
    servers: int = 1  # the first ranks; workers send the same requests to each
    push_first: bool = False  # each worker begins with a push, before any pull

    def __str__(self) -> str:
        more = {
            ", some workers leave early": self.fewer,
            ", workers that ask for some rows only": self.with_rows,
            f", {self.servers} servers": self.servers > 1,
            ", workers that push before they pull, or leave without a pull": self.push_first,
        }
        return f"bound={self.bound}" + "".join(words for words, so in more.items() if so)

    def gradient(self, worker: int, number: int) -> Tensor:
        rows = torch.arange(LENGTH * WIDTH, dtype=torch.float64).view(LENGTH, WIDTH)
        return rows + 10 * worker + number

    def play(self, size: int) -> tuple[list[Event], list, list, Tensor, list[tuple]]:
        """Return the events, what each rank's pulls bring, after how many events each is answered,
        the final table, and the updates (staleness is None if nothing was pulled before)."""
        lot = random.Random(100 * (size - self.servers) + self.seed)
        table, events = table_at_first(), []
        brought, answered = ([[] for _ in range(size)] for _ in range(2))
        begun, pushes = dict.fromkeys(range(self.servers, size), 0), dict.fromkeys(range(9), 0)
        waits: dict[int, tuple | None] = {}  # worker -> rows of its unanswered pull
        ready = list(begun) * self.push_first  # workers whose next request is a push
        pulled, applied = {}, []
        while begun:
            free = sorted(worker for worker in begun if worker not in waits)
            worker = lot.choice(free)
            rows = tuple(sorted(lot.sample(range(LENGTH), 3))) if self.with_rows else None
            at = slice(None) if rows is None else list(rows)
            if worker in ready:
                events.append(Event(worker, PUSH, rows))
                pushes[worker] += 1
                table[at] = update(table[at], self.gradient(worker, pushes[worker])[at])
                stale = len(applied) - pulled[worker] if worker in pulled else None
                applied.append((worker, stale))
                ready.remove(worker)
            elif begun[worker] == self.steps - worker % 2 * self.fewer:
                events.append(Event(worker, LEAVE, None))
                del begun[worker]
            else:
                events.append(Event(worker, PULL, rows))
                begun[worker] += 1
                waits[worker] = rows
            for other, rows in list(waits.items()):
                ahead = begun[other] - min(begun.values())
                if self.bound is None or ahead <= self.bound:
                    at = slice(None) if rows is None else list(rows)
                    brought[other].append(table[at].clone())
                    answered[other].append(len(events))
                    pulled[other] = len(applied)
                    ready.append(other)
                    del waits[other]
        return events, brought, answered, table, applied


def table_at_first() -> Tensor:
    return torch.arange(LENGTH * WIDTH, dtype=torch.float64).view(LENGTH, WIDTH) * 8


def update(rows: Tensor, gradients: Tensor) -> Tensor:
    """Return an update for which the order of the pushes matters."""
    return rows / 2 - gradients


def server_trial(fn, case: Told, group):
    rank, servers = group.rank(), range(case.servers)
    if rank in servers:
        table, workers = table_at_first(), range(case.servers, group.size())
        applied = fn(table, update, len(workers), case.bound, group)
        pairs = [tuple(each) for each in applied] if isinstance(applied, (list, tuple)) else applied
        let_go(workers, group)
        return table, pairs
    events = case.play(group.size())[0]
    brought, pushes = [], 0
    for number, event in enumerate(events):
        if event.worker != rank:
            continue
        if number and events[number - 1].worker != rank:
            recv(WORD, events[number - 1].worker, group)
        rows = None if event.rows is None else torch.tensor(event.rows)
        pushes += event.kind == PUSH
        receives = []
        for server in servers:
            if event.kind == PULL:
                ask(PULL, rows, server, group)
                shape = (LENGTH if rows is None else len(rows), WIDTH)
                brought.append(torch.empty(shape, dtype=torch.float64))
                receives += start(group, receives=[(brought[-1], server)])
            elif event.kind == PUSH:
                gradient = case.gradient(rank, pushes)
                push(gradient if rows is None else gradient[rows], rows, server, group)
            else:
                leave(server, group)
        if number + 1 < len(events) and events[number + 1].worker != rank:
            send(WORD, events[number + 1].worker, group)
        wait(receives)
    for server in servers:
        recv(WORD, server, group)
    return brought


WORD = torch.empty(0)


def let_go(workers: Iterable[int], group) -> None:
    """Tell the workers that the server is done: their next messages are for another call."""
    for worker in workers:
        send(WORD, worker, group)


class Served(Measured):
    def measure(self):
        k = self.case.servers
        _, expected, self.after, self.table, self.applied = self.case.play(self.size)
        self.tables, self.pairs = zip(*self.results[:k])
        self.answered_after, self.answered = {s: [[] for _ in self.results] for s in range(k)}, 0
        for server, after in self.answered_after.items():
            requests = 0
            for comm in self.run.ledger.leaves(rank=server):
                requests += comm.op == "recv_anysource"
                if comm.op == "send" and comm.sent:
                    after[comm.peers[0]].append(requests)
                    self.answered += comm.sent
        # Each worker asks every server for the same rows.
        pulls = [[pull for pull in pulls for _ in range(k)] for pulls in expected[k:]]
        self.right = [
            len(found) == len(wanted) and all(map(torch.equal, found, wanted))
            for found, wanted in zip(self.results[k:], pulls)
        ]
        self.answers = sum(pull.nbytes for of_one in pulls for pull in of_one)
        self.in_time = all(after == self.after for after in self.answered_after.values())
        self.table_right = all(torch.equal(table, self.table) for table in self.tables)

    def told(self, pairs) -> bool:
        """Return whether these are the updates. A push without a pull has no staleness to judge."""
        form = isinstance(pairs, (list, tuple)) and len(pairs) == len(self.applied)
        return form and all(
            len(found) == 2 and found[0] == worker and stale in (None, found[1])
            for found, (worker, stale) in zip(pairs, self.applied)
        )

    def lines(self) -> list[Line]:
        right = f"{sum(self.right)} of {len(self.right)} workers"
        everyone = f"{len(self.right)} of {len(self.right)} workers"
        return [
            Line("pulls answered with the right parameters for", right, everyone, all(self.right)),
            yes("each pull answered after the right request", self.in_time),
            yes("all updates in the table", self.table_right),
            yes("updates returned as (worker, staleness)", all(map(self.told, self.pairs))),
            line("bytes that the server sent", self.answered, self.answers),
        ]

    def mistake(self) -> str:
        if self.answered > self.answers:
            return (
                f"The server sent {self.answered:,} bytes where {self.answers:,} do: a pull is for "
                "its rows, table[rows], and is answered once."
            )
        if not self.in_time and self.case.bound is not None:
            early = any(
                found < right
                for of_server in self.answered_after.values()
                for of_one in zip(of_server, self.after)
                for found, right in zip(*of_one)
            )
            return (
                f"A pull was answered too {'early' if early else 'late'}. A pull begins a step of "
                "its worker, which is answered as soon as this worker has begun at most "
                f"bound={self.case.bound} steps more than the one that has begun the fewest, of "
                "those that have not left. A worker that has not begun has begun 0 steps."
            )
        if not self.in_time:
            return "With bound=None nobody waits: answer each pull at once."
        if self.table_right and not all(self.right):
            return (
                "The table is right, but a pull was not answered with its rows: send table[rows] "
                "as the table is when you answer, which may be later than when the pull comes."
            )
        if not self.table_right:
            return (
                "The table is not the result of all updates: at each push, "
                "table[rows] = update(table[rows], gradients), in place, once."
            )
        wrong = next(pairs for pairs in self.pairs if not self.told(pairs))
        workers = [worker for worker, _ in self.applied]
        if not isinstance(wrong, (list, tuple)) or len(wrong) != len(workers):
            return f"Return a list with one Applied for each of the {len(workers)} updates."
        if [worker for worker, *_ in wrong] != workers:
            return "Each Applied names the worker whose push it was, in the order of the pushes."
        return (
            "The staleness is off. It is the number of updates that have been made since this "
            "worker's pull was answered, its own excluded."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "KeyError" in error or "IndexError" in error:
            return (
                "a worker is known by its rank, which may be any, and may push or leave before it "
                "has pulled: steps.get(worker, 0), pulled.get(worker, 0), steps.pop(worker, None)."
                "\n"
            )
        if "deadlock" not in error and "timeout" not in error.lower():
            return ""
        return (
            "everyone waits. A pull that had to wait has to be looked at again after every "
            "request: it may have waited for a step of another worker, or for that worker to "
            "leave. With bound=0 no worker is ahead, but all may be in the same step. A worker "
            "that has begun no step counts as 0: with bound=1 no first step waits for it. Nobody "
            "waits for a worker that has left, and when all have left, the server returns.\n"
        )


# ---- only the touched rows ----------------------------------------------------------------------


@dataclass(frozen=True)
class Touched:
    servers: int
    tokens: tuple[int, ...]  # of worker 0; worker n adds n to each
    vocabulary: int = 40
    width: int = 3
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        servers = f"{self.servers} server{'s' * (self.servers > 1)}"
        return f"{servers}, {len(self.tokens)} tokens" + f" of {self.dtype}" * (
            self.dtype != torch.float32
        )

    def batch(self, worker: int) -> Tensor:
        """Return a worker's tokens [2, S]; a token may occur twice."""
        return (torch.tensor(self.tokens) + worker).view(2, -1)

    def gradient(self, worker: int) -> Tensor:
        """Return an embedding's gradient: 0 except in the tokens' rows, and 0 in one of these."""
        gradient = torch.zeros(self.vocabulary, self.width, dtype=self.dtype)
        rows = self.batch(worker).unique()
        gradient[rows] = (rows[:, None] + torch.arange(self.width)).to(self.dtype) + 100 * worker
        gradient[rows[0]] = 0
        return gradient


def touched_trial(fn, case: Touched, group):
    rank, k = group.rank(), case.servers
    if rank < k:
        table = torch.zeros(case.vocabulary, case.width, dtype=case.dtype)[rank::k].clone()
        applied = serve(table, torch.sub, group.size() - k, None, group)
        let_go(range(k, group.size()), group)
        return table, len(applied)
    fn(case.gradient(rank - k), case.batch(rank - k), k, group)
    for server in range(k):
        leave(server, group)
    for server in range(k):
        recv(WORD, server, group)


class Pushed(Measured):
    def measure(self):
        case, k = self.case, self.case.servers
        workers = range(self.size - k)
        whole = -sum(case.gradient(worker) for worker in workers)
        self.expected = [whole[server::k] for server in range(k)]
        self.tables, self.pushes = zip(*self.results[:k])
        rows = [case.batch(worker).unique() for worker in workers]
        self.wanted_pushes = [
            sum(bool((r % k == server).any()) for r in rows) for server in range(k)
        ]
        of_a_row = 8 + case.width * whole.element_size()
        self.wanted = sum(len(r) for r in rows) * of_a_row + 16 * sum(self.wanted_pushes)
        self.wanted += 16 * k * len(workers)  # the workers' leave requests

    def lines(self) -> list[Line]:
        right = (close(a, b, 1e3) for a, b in zip(self.tables, self.expected))
        return [
            on_ranks("right tables on", right),
            line("pushes that each server got", list(self.pushes), self.wanted_pushes),
            line("bytes sent by all ranks", self.sent, self.wanted),
        ]

    def mistake(self) -> str:
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted, beside="int64"):
            return wrong_dtype
        right = all(close(a, b, 1e3) for a, b in zip(self.tables, self.expected))
        if right and self.sent < self.wanted:
            return (
                "Fewer rows were pushed than were touched: a row whose gradient happens to be 0 "
                "was used all the same, and a server with momentum or decay steps it. Go by the "
                "tokens, not by what is not 0."
            )
        if right and list(self.pushes) != self.wanted_pushes:
            return (
                "Send one push to each server that has some of the rows, with all of them, and no "
                "message to a server that has none."
            )
        if right:
            return (
                f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: push the rows "
                "of the tokens, each once, and no others."
            )
        if self.sent > self.wanted:
            return (
                "Wrong tables, and too many bytes: a token may come twice in a batch, and its row "
                "has one gradient, which is pushed once. tokens.unique() has each once."
            )
        if self.sent < self.wanted:
            return "Wrong tables, and fewer rows than the batch has touched: go by all tokens."
        if self.case.servers == 1:
            return "The rows may be right, but the pushed gradients are not: push gradient[rows]."
        return (
            "Wrong tables. With k servers, row r of the gradient belongs to server r % k, where it "
            "is row r // k."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "index" not in error or "out of" not in error:
            return ""
        return "a server has no row of that number: row r is on server r % k, as its row r // k.\n"


# ---- the outer step -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Outer:
    length: int
    lr: float = 0.5
    beta: float = 0.75
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        kind = f" of {self.dtype}" * (self.dtype != torch.float32)
        return f"{self.length} parameters{kind}, lr={self.lr}, beta={self.beta}"

    def given(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return before, now and momentum. Only now differs between ranks."""
        generator = torch.Generator().manual_seed(rank)
        own = torch.randint(-80, 80, (self.length,), generator=generator) / 4
        before = torch.arange(self.length) / 4
        momentum = torch.arange(self.length).flip(0) / 2 - 3
        return before.to(self.dtype), (before + own).to(self.dtype), momentum.to(self.dtype)


def outer_trial(fn, case: Outer, group):
    return fn(*case.given(group.rank()), case.lr, case.beta, group)


class Stepped(Measured):
    def measure(self):
        lr, beta = self.case.lr, self.case.beta
        everyones = [[x.double() for x in self.case.given(rank)] for rank in range(self.size)]
        before, _, momentum = everyones[0]
        self.nows = [now for _, now, _ in everyones]
        change = before - sum(self.nows) / self.size
        self.new = beta * momentum + change
        self.expected = [before - lr * (change + beta * self.new), self.new]
        total = self.size * change
        m_total, m_ema = beta * momentum + total, beta * momentum + (1 - beta) * change
        m_lr = beta * momentum + lr * change
        self.known = {
            "This is plain momentum: the step is against the momentum itself. Nesterov's looks "
            "ahead: it steps against change + beta * momentum, with the new momentum.": (
                before - lr * self.new,
                self.new,
            ),
            "These are sums of the changes: the mean over the ranks is what a gradient stands "
            'for: all_reduce(before - now, group, op="mean").': (
                before - lr * (total + beta * m_total),
                m_total,
            ),
            "The sign is wrong: a change is before - now, and the step goes against it, "
            "as against a gradient.": (
                before + lr * (change - beta * (beta * momentum - change)),
                beta * momentum - change,
            ),
            "The change goes into the momentum with a weight of 1, not of 1 - beta: momentum = "
            "beta * momentum + change.": (before - lr * (change + beta * m_ema), m_ema),
            "lr belongs in the step, not into the momentum.": (
                before - (lr * change + beta * m_lr),
                m_lr,
            ),
            "The step starts from `before`, where all ranks were equal, not from the mean of "
            "where they are now.": (before - change - lr * (change + beta * self.new), self.new),
            "Return the new momentum: the next outer step needs it.": (self.expected[0], momentum),
        }
        self.wanted = 2 * (self.size - 1) * everyones[0][0].numel() * self.case.dtype.itemsize

    def are(self, found, expected) -> bool:
        return (
            isinstance(found, (tuple, list))
            and len(found) == 2
            and all(close(a, b.to(self.case.dtype), 200.0) for a, b in zip(found, expected))
        )

    def lines(self) -> list[Line]:
        return [
            on_ranks("right steps on", (self.are(found, self.expected) for found in self.results)),
            line("bytes sent by all ranks", self.sent, self.wanted),
            line("barriers", self.barriers, 0),
        ]

    def mistake(self) -> str:
        if self.barriers:
            return NO_BARRIER
        if wrong_dtype := mistake_of_dtype(self.run, self.case.dtype, self.wanted, "parameters"):
            return wrong_dtype
        for hint, known in self.known.items():
            if all(self.are(found, known) for found in self.results):
                return hint
        if self.size > 1 and not self.sent:
            return "Nothing was sent: the ranks' changes have to be averaged."
        if not all(self.are(found, self.expected) for found in self.results):
            return (
                "Wrong step. With the mean change d of all ranks: m = beta m + d, and the "
                "parameters are before - lr (d + beta m). Return both."
            )
        return (
            f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do: one all-reduce, "
            "of what was changed. `before` and the momentum are equal on all ranks."
        )


EXERCISES = [
    Exercise(
        "serve",
        serve,
        server_trial,
        [
            (3, Told(0)),
            (4, Told(1)),
            (4, Told(2, steps=5, seed=1)),
            (4, Told(1, steps=5, fewer=3)),
            (4, Told(0, steps=4, with_rows=True, seed=1)),  # several held pulls at once
            (3, Told(None)),
            (4, Told(1, fewer=3, servers=2, push_first=True)),
        ],
        Served,
        hints=[
            "Keep three things: how many steps each worker has begun, which pulls wait for an "
            "answer, and how many updates had been made when a worker was last answered. After "
            "every request, look at all waiting pulls.",
            "A pull: steps[worker] += 1, and it waits. A push: recv the gradients, table[rows] = "
            "update(table[rows], gradients), note Applied. Leaving: forget the worker's steps. "
            "Then answer all that may go on: bound is None, or steps[worker] - the fewest steps <= "
            "bound, where a worker that has not begun has 0. It may push or leave all the same.",
        ],
        skeleton="""\
def serve(table, update, num_workers, bound, group):
    steps, waiting, pulled, applied, left = {}, [], {}, [], 0
    while left < num_workers:
        kind, worker, rows = next_request(group)
        if kind == PUSH:
            gradients = recv(table[rows], worker, group)
            ...
        elif kind == PULL:
            ...
        else:
            ...
        for worker, rows in list(waiting):
            if ...:                                      # may it go on?
                waiting.remove(...)
                pulled[worker] = len(applied)
                send(table[rows], worker, group)
    return applied""",
        changes=["table"],
        contiguous=["table"],
        again=False,
    ),
    Exercise(
        "push_touched",
        push_touched,
        touched_trial,
        [
            (3, Touched(1, (3, 7, 7, 12, 30, 3))),
            (4, Touched(2, (3, 7, 7, 12, 30, 3, 4, 9))),
            (5, Touched(3, (6, 9, 9, 12), dtype=torch.float64)),
            (2, Touched(1, (0, 1), vocabulary=2)),
            (5, Touched(3, (38, 2, 9, 12))),
        ],
        Pushed,
        refuses={asynchronous.push_dealt},
        one_dtype=True,
        hints=[
            "tokens.unique() has each token once. Of these, which rows are this server's?",
            "mine = rows[rows % num_servers == server]; push(gradient[mine], mine // num_servers, "
            "server, group), if there are any.",
        ],
        skeleton="""\
def push_touched(gradient, tokens, num_servers, group):
    rows = ...
    for server in range(num_servers):
        mine = rows[...]
        if len(mine):
            push(gradient[...], ..., server, group)""",
        again=False,
    ),
    Exercise(
        "outer_step",
        outer_step,
        outer_trial,
        [
            (4, Outer(9)),
            (3, Outer(5, 0.75, 0.5, torch.float64)),
            (2, Outer(7, 1.0, 0.0)),
            (1, Outer(4)),
        ],
        Stepped,
        hints=[
            "before - now is the change made by this rank's steps, with the sign of a gradient. "
            "Average that, and take one step of SGD with Nesterov's momentum.",
            "change = all_reduce(before - now, group, op='mean'); momentum = beta * momentum + "
            "change; the step is lr * (change + beta * momentum).",
        ],
        skeleton="""\
def outer_step(before, now, momentum, lr, beta, group):
    change = all_reduce(..., group, op="mean")
    momentum = ...
    return before - ..., momentum""",
    ),
]
