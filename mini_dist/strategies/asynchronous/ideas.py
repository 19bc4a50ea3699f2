"""Training in which nobody waits for all: a parameter server, and steps between two averages.

    serve                    keeps a table of parameters, applies pushes, answers pulls
    pull, push, leave        a worker's side of it
    pull_dealt, push_dealt   the same where several servers share the rows
    push_touched             of an embedding's gradient, only the rows that a batch has touched
    outer_step               local SGD and DiLoCo: average what many local steps have changed

A worker that fails by an exception can `leave` (engine.py does it), and the servers go on. One
whose process dies says nothing: with a bound all would soon wait for it, and so would the server at
the end. In an elastic run the server is told, and engine.py goes on with those who are left.

Legend: L rows of a table, l those that a request is for, D the rest of its shape; k servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce
from mini_dist.collectives.messages import recv, recv_any, send
from mini_dist.ranks.ledger.recording import recorded

PULL, PUSH, LEAVE = range(3)  # what a request asks for
ALL_ROWS = -1  # the number of rows of a request for the whole table


class Applied(NamedTuple):
    """An update that a server has made: whose, and how many others it has made since that worker
    pulled the parameters that the gradient is of."""

    worker: int
    staleness: int


def serve(
    table: Tensor, update: Callable, num_workers: int, bound: int | None, group
) -> list[Applied]:
    """Keep a table [L, D] for workers until all of them have left; returns the updates in order.

    update: (rows [l, D], gradients [l, D]) -> new rows. bound: how many steps a worker may be ahead
    of the slowest one; 0 is synchronous, None lets everyone go on (Ho et al. 2013, stale
    synchronous parallel; Dean et al. 2012, Downpour SGD). Raises ValueError if bound is below 0.
    """
    if bound is not None and bound < 0:
        raise ValueError(
            f"bound={bound}: the slowest worker cannot be ahead of itself; give 0 or more"
        )
    steps: dict[int, int] = {}  # that each worker has begun, until it leaves
    early: list[tuple[int, Tensor | slice]] = []  # pulls of workers that are too far ahead
    pulled: dict[int, int] = {}  # updates that were made when a worker last pulled
    applied: list[Applied] = []
    left = 0
    while left < num_workers:
        kind, worker, rows = next_request(group)
        if kind == PUSH:
            gradients = recv(table[rows], worker, group)
            table[rows] = update(table[rows], gradients)
            applied.append(Applied(worker, len(applied) - pulled.get(worker, 0)))
        elif kind == PULL:
            steps[worker] = steps.get(worker, 0) + 1
            early.append((worker, rows))
        else:
            left += 1
            steps.pop(worker, None)
        all_began = len(steps) == num_workers - left
        fewest = min(steps.values(), default=0) if all_began else 0
        waiting, early = early, []
        for worker, rows in waiting:
            if bound is None or steps[worker] - fewest <= bound:
                pulled[worker] = len(applied)
                send(table[rows], worker, group)
            else:
                early.append((worker, rows))
    return applied


def next_request(group) -> tuple[int, int, Tensor | slice]:
    """Whatever worker speaks first: what it asks for, who it is, and which rows it means."""
    request, worker = recv_any(torch.empty(2, dtype=torch.long), group)
    kind, num_rows = request.tolist()
    if num_rows == ALL_ROWS:
        return kind, worker, slice(None)
    return kind, worker, recv(torch.empty(num_rows, dtype=torch.long), worker, group)


def ask(kind: int, rows: Tensor | None, server: int, group) -> None:
    num_rows = ALL_ROWS if rows is None else len(rows)
    send(torch.tensor([kind, num_rows]), server, group)
    if rows is not None:
        send(rows, server, group)


@recorded
def pull(like: Tensor, rows: Tensor | None, server: int, group) -> Tensor:
    """The server's rows of the table, as they are when this worker may have them: [l, D].

    like: a tensor of that shape and dtype. rows: [l] of the table, int64, each once; None for all.
    """
    ask(PULL, rows, server, group)
    return recv(like, server, group)


@recorded
def push(gradients: Tensor, rows: Tensor | None, server: int, group) -> None:
    """Give the server the gradients [l, D] of these rows, which it applies at once.

    Raises FloatingPointError, before anything is sent, if one of them is not finite.
    """
    if not gradients.isfinite().all():
        raise FloatingPointError(
            "a gradient is inf or nan, and what it is applied to all workers would pull: it was "
            "not pushed; skip this step, or lower the learning rate"
        )
    ask(PUSH, rows, server, group)
    send(gradients, server, group)


@recorded
def leave(server: int, group) -> None:
    """Pull and push no more. Others no longer wait for this worker."""
    ask(LEAVE, None, server, group)


def dealt(table: Tensor, server: int, num_servers: int) -> Tensor:
    """The rows of a table [L, D] that this server keeps: row r lies on server r % k, at r // k.

    Neighbours lie on different servers, so that each has its share of what is asked for often.
    """
    return table[server::num_servers]


def pull_dealt(like: Tensor, rows: Tensor | None, num_servers: int, group) -> Tensor:
    """As `pull`, from ranks 0 to k - 1, which keep what `dealt` gives them."""
    pulled = torch.empty_like(like)
    for server in range(num_servers):  # each is asked, if for nothing: it counts steps
        if rows is None:
            mine, there = slice(server, None, num_servers), None
        else:
            mine = rows % num_servers == server
            there = rows[mine] // num_servers
        pulled[mine] = pull(pulled[mine], there, server, group)
    return pulled


def push_dealt(gradients: Tensor, num_servers: int, group) -> None:
    """Give each server the gradients [L, D] of what it keeps."""
    for server in range(num_servers):
        push(dealt(gradients, server, num_servers), None, server, group)


def push_touched(gradient: Tensor, tokens: Tensor, num_servers: int, group) -> None:
    """Of an embedding's gradient [V, D], push the rows of these tokens, each once; others are 0.

    tokens: int64, any shape. A server that keeps none of the rows hears nothing.
    """
    rows = tokens.unique()
    for server in range(num_servers):
        mine = rows[rows % num_servers == server]
        if len(mine):
            push(gradient[mine], mine // num_servers, server, group)


@recorded
def outer_step(
    before: Tensor, now: Tensor, momentum: Tensor, lr: float, beta: float, group
) -> tuple[Tensor, Tensor]:
    """Average what the ranks have changed since they were equal; the new parameters and momentum.

    before: the parameters then, alike on all ranks; now: this rank's, after steps of its own;
    momentum: like them, 0 at first. lr=1 and beta=0 make it local SGD, the mean of the parameters
    (Stich 2019). DiLoCo takes the mean change for a gradient, and steps against it by Nesterov's
    momentum (Douillard et al. 2023, algorithm 1: lr 0.7, beta 0.9).
    """
    change = all_reduce(before - now, group, op="mean")
    momentum = beta * momentum + change
    return before - lr * (change + beta * momentum), momentum
