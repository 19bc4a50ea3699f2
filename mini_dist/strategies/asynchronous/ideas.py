"""Training without waiting for all ranks: a parameter server, and steps between two averages.

    serve                    keeps a table of parameters, applies pushes, answers pulls
    pull, push, leave        the worker's side
    pull_dealt, push_dealt   the same when several servers share the rows
    push_touched             push only the rows of an embedding's gradient that the batch touched
    outer_step               local SGD and DiLoCo: average the changes made by many local steps

A worker that fails with an exception can still `leave` (engine.py does this), and the servers go
on. A worker whose process dies sends nothing: with a bound, all workers would soon wait for it, and
so would the server at the end. In an elastic run the server is told, and the survivors go on.

Legend: L rows of a table, l rows in a request, D the rest of the table's shape; k servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.collectives import all_reduce
from mini_dist.collectives.messages import recv, recv_any, send
from mini_dist.ranks.ledger.recording import recorded

PULL, PUSH, LEAVE = range(3)  # the kind of a request
ALL_ROWS = -1  # in a request: its number of rows, when it asks for the whole table


class Applied(NamedTuple):
    """An update by the server: the worker it came from, and how many updates the server made in
    between, after that worker pulled the parameters for which it computed the gradient."""

    worker: int
    staleness: int


def serve(
    table: Tensor, update: Callable, num_workers: int, bound: int | None, group
) -> list[Applied]:
    """Keep a table [L, D] for workers until all of them have left; returns the updates in order.

    update: (rows [l, D], gradients [l, D]) -> new rows. bound: how far (in steps) a worker may be
    ahead of the slowest one. 0 is synchronous; None sets no limit (Ho et al. 2013, stale
    synchronous parallel; Dean et al. 2012, Downpour SGD). Raises ValueError if bound is below 0.
    """
    if bound is not None and bound < 0:
        raise ValueError(
            f"bound={bound}: the slowest worker cannot be ahead of itself; give 0 or more"
        )
    steps: dict[int, int] = {}  # begun by each worker, until it leaves
    early: list[tuple[int, Tensor | slice]] = []  # pulls of workers that are too far ahead
    pulled: dict[int, int] = {}  # how many updates had been made when a worker last pulled
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
    """Receive the next request from any worker: its kind, the worker's rank, and the rows."""
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
    """Return the server's current rows of the table, [l, D], as soon as the bound allows it.

    like: a tensor with the result's shape and dtype. rows: [l], int64, distinct; None for all rows.
    """
    ask(PULL, rows, server, group)
    return recv(like, server, group)


@recorded
def push(gradients: Tensor, rows: Tensor | None, server: int, group) -> None:
    """Send the server the gradients [l, D] of these rows, which it applies at once.

    Raises FloatingPointError, before anything is sent, if an element is not finite.
    """
    if not gradients.isfinite().all():
        raise FloatingPointError(
            "a gradient is inf or nan, and in the table it would reach every worker: it was "
            "not pushed; skip this step, or lower the learning rate"
        )
    ask(PUSH, rows, server, group)
    send(gradients, server, group)


@recorded
def leave(server: int, group) -> None:
    """Tell the server that this worker will send no more requests, so that nobody waits for it."""
    ask(LEAVE, None, server, group)


def dealt(table: Tensor, server: int, num_servers: int) -> Tensor:
    """Return the rows of a table [L, D] that this server stores: server r % k has row r, at r // k.

    Neighboring rows are on different servers, so each server gets its share of popular rows.
    """
    return table[server::num_servers]


def pull_dealt(like: Tensor, rows: Tensor | None, num_servers: int, group) -> Tensor:
    """Pull as `pull` does, from ranks 0 to k - 1, each of which stores its `dealt` rows."""
    pulled = torch.empty_like(like)
    for server in range(num_servers):  # even for no rows: each server counts steps by requests
        if rows is None:
            mine, there = slice(server, None, num_servers), None
        else:
            mine = rows % num_servers == server
            there = rows[mine] // num_servers
        pulled[mine] = pull(pulled[mine], there, server, group)
    return pulled


def push_dealt(gradients: Tensor, num_servers: int, group) -> None:
    """Send each server the gradients [L, D] of the rows that it stores."""
    for server in range(num_servers):
        push(dealt(gradients, server, num_servers), None, server, group)


def push_touched(gradient: Tensor, tokens: Tensor, num_servers: int, group) -> None:
    """Push only the rows of an embedding's gradient [V, D] for these tokens; all others are 0.

    tokens: int64, any shape; each row is sent once. A server without any of the rows gets nothing.
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
    """Average the ranks' changes since they were last equal; return new parameters and momentum.

    before: the parameters at that time, equal on all ranks. now: this rank's, after local steps.
    momentum: same shape, initially 0. lr=1 and beta=0 give local SGD, the mean of the parameters
    (Stich 2019). DiLoCo treats the mean change as a gradient and takes a step with Nesterov
    momentum (Douillard et al. 2023, algorithm 1: lr 0.7, beta 0.9).
    """
    change = all_reduce(before - now, group, op="mean")
    momentum = beta * momentum + change
    return before - lr * (change + beta * momentum), momentum
