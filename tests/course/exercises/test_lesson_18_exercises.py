"""Lesson 18: servers that answer too early or miscount, too many rows, wrong outer steps."""

import sys

import cloudpickle
import pytest
import torch

from mini_dist import check
from mini_dist.collectives import all_reduce, barrier, recv, send
from mini_dist.collectives.messages import recv_any
from mini_dist.strategies.asynchronous import Applied, push
from mini_dist.strategies.asynchronous.ideas import LEAVE, PULL, PUSH, next_request
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_server, wrong_push, wrong_outer = Wrong(), Wrong(), Wrong()


def server(
    table,
    update,
    num_workers,
    group,
    may_go,
    stale=lambda applied, pulled, worker: None,
    looks=lambda kind: True,
    forgets=True,
):
    """Run a server with its own rule: may_go(steps, worker, number of workers still there).

    looks: after which requests it checks waiting pulls. forgets: drop a leaving worker's steps."""
    steps, waiting, pulled, applied, left = {}, [], {}, [], 0
    while left < num_workers:
        kind, worker, rows = next_request(group)
        if kind == PUSH:
            table[rows] = update(table[rows], recv(table[rows], worker, group))
            found = stale(applied, pulled, worker)
            right = len(applied) - pulled.get(worker, 0)
            applied.append(Applied(worker, right if found is None else found))
        elif kind == PULL:
            steps[worker] = steps.get(worker, 0) + 1
            waiting.append((worker, rows))
        else:
            left += 1
            if forgets:
                steps.pop(worker, None)
        for each in list(waiting) if looks(kind) else []:
            if may_go(steps, each[0], num_workers - left):
                waiting.remove(each)
                pulled[each[0]] = len(applied)
                send(table[each[1]], each[0], group)
    return applied


def bounded(bound):
    def may_go(steps, worker, there):
        fewest = min(steps.values()) if len(steps) == there else 0
        return bound is None or steps[worker] - fewest <= bound

    return may_go


@wrong_server("A pull was answered too early")
def lets_everyone_go(table, update, num_workers, bound, group):
    return server(table, update, num_workers, group, bounded(None))


@wrong_server("A pull was answered too early")
def forgets_who_has_not_begun(table, update, num_workers, bound, group):
    def may_go(steps, worker, there):
        return bound is None or steps[worker] - min(steps.values()) <= bound

    return server(table, update, num_workers, group, may_go)


@wrong_server("A pull was answered too early")
def one_step_too_far(table, update, num_workers, bound, group):
    return server(table, update, num_workers, group, bounded(bound if bound is None else bound + 1))


@wrong_server("everyone waits")
def one_step_too_few(table, update, num_workers, bound, group):
    return server(table, update, num_workers, group, bounded(bound if bound is None else bound - 1))


@wrong_server("everyone waits")
def waits_for_those_who_have_left(table, update, num_workers, bound, group):
    def may_go(steps, worker, there):
        return bounded(bound)(steps, worker, num_workers)

    return server(table, update, num_workers, group, may_go)


@wrong_server("A worker that has begun no step counts as 0")
def waits_until_all_have_begun(table, update, num_workers, bound, group):
    def may_go(steps, worker, there):
        return bound is None or (len(steps) == there and bounded(bound)(steps, worker, there))

    return server(table, update, num_workers, group, may_go)


@wrong_server("Nobody waits for a worker that has left")
def remembers_the_steps_of_those_who_have_left(table, update, num_workers, bound, group):
    def may_go(steps, worker, there):
        return bounded(bound)(steps, worker, max(there, len(steps)))

    return server(table, update, num_workers, group, may_go, forgets=False)


@wrong_server("or for that worker to leave")
def does_not_look_again_when_one_leaves(table, update, num_workers, bound, group):
    def looks(kind):
        return kind != LEAVE

    return server(table, update, num_workers, group, bounded(bound), looks=looks)


@wrong_server("The staleness is off")
def counts_its_own(table, update, num_workers, bound, group):
    def stale(applied, pulled, worker):
        return len(applied) + 1 - pulled.get(worker, 0)

    return server(table, update, num_workers, group, bounded(bound), stale)


@wrong_server("The staleness is off")
def calls_the_lead_staleness(table, update, num_workers, bound, group):
    return server(table, update, num_workers, group, bounded(bound), lambda *_: 0)


@wrong_server("in place, once")
def keeps_the_new_rows_to_itself(table, update, num_workers, bound, group):
    return server(table.clone(), update, num_workers, group, bounded(bound))


@wrong_server("Return a list with one Applied")
def returns_the_table(table, update, num_workers, bound, group):
    server(table, update, num_workers, group, bounded(bound))
    return table


def keeps(applied_of, forget, first=lambda num_workers: {}):
    """Return a server whose bookkeeping fails for a worker that has not pulled."""

    def serve(table, update, num_workers, bound, group):
        steps, waiting, pulled, applied, left = first(num_workers), [], {}, [], 0
        while left < num_workers:
            kind, worker, rows = next_request(group)
            if kind == PUSH:
                table[rows] = update(table[rows], recv(table[rows], worker, group))
                applied.append(Applied(worker, applied_of(len(applied), pulled, worker)))
            elif kind == PULL:
                steps[worker] = steps.get(worker, 0) + 1
                waiting.append((worker, rows))
            else:
                left += 1
                forget(steps, worker)
            fewest = min(steps.values()) if len(steps) == num_workers - left and steps else 0
            for each in [w for w in waiting if bound is None or steps[w[0]] - fewest <= bound]:
                waiting.remove(each)
                pulled[each[0]] = len(applied)
                send(table[each[1]], each[0], group)
        return applied

    return serve


@wrong_server("may push or leave before it has pulled")
def believes_that_a_push_follows_a_pull(*args):
    def stale(made, pulled, worker):
        return made - pulled[worker]

    return keeps(stale, lambda steps, worker: steps.pop(worker, None))(*args)


@wrong_server("may push or leave before it has pulled")
def believes_that_who_leaves_has_pulled(*args):
    def forget(steps, worker):
        del steps[worker]

    return keeps(lambda made, pulled, worker: made - pulled.get(worker, 0), forget)(*args)


@wrong_server("a worker is known by its rank, which may be any")
def numbers_workers_from_1(*args):
    def first(num_workers):
        return dict.fromkeys(range(1, num_workers + 1), 0)

    def forget(steps, worker):
        del steps[worker]

    return keeps(lambda made, pulled, worker: made - pulled.get(worker, 0), forget, first)(*args)


@wrong_push("push the rows of the tokens, each once, and no others")
def pushes_all(gradient, tokens, num_servers, group):
    for number in range(num_servers):
        rows = torch.arange(number, len(gradient), num_servers)
        push(gradient[rows], rows // num_servers, number, group)


@wrong_push("a token may come twice")
def pushes_tokens_that_come_twice_twice(gradient, tokens, num_servers, group):
    rows = tokens.flatten()
    for number in range(num_servers):
        mine = rows[rows % num_servers == number]
        for row in mine:
            push(gradient[row][None], row[None] // num_servers, number, group)


@wrong_push("whose gradient happens to be 0")
def goes_by_what_is_not_zero(gradient, tokens, num_servers, group):
    rows = gradient.any(1).nonzero().flatten()
    for number in range(num_servers):
        mine = rows[rows % num_servers == number]
        if len(mine):
            push(gradient[mine], mine // num_servers, number, group)


@wrong_push("no message to a server that has none")
def pushes_nothing_too(gradient, tokens, num_servers, group):
    rows = tokens.unique()
    for number in range(num_servers):
        mine = rows[rows % num_servers == number]
        push(gradient[mine], mine // num_servers, number, group)


@wrong_push("row r is on server r % k")
def forgets_to_divide(gradient, tokens, num_servers, group):
    rows = tokens.unique()
    for number in range(num_servers):
        mine = rows[rows % num_servers == number]
        if len(mine):
            push(gradient[mine], mine, number, group)


@wrong_push("Wrong tables")
def everything_to_the_first(gradient, tokens, num_servers, group):
    rows = tokens.unique()
    push(gradient[rows], rows // num_servers, 0, group)


@wrong_push("Wrong tables")
def cuts_in_ranges(gradient, tokens, num_servers, group):
    rows, length = tokens.unique(), -(-len(gradient) // num_servers)
    for number in range(num_servers):
        mine = rows[rows // length == number]
        if len(mine):
            push(gradient[mine], mine % length, number, group)


@wrong_outer("These are sums of the changes")
def adds_up(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group)
    momentum = beta * momentum + change
    return before - lr * (change + beta * momentum), momentum


@wrong_outer("This is plain momentum")
def heavy_ball(before, now, momentum, lr, beta, group):
    momentum = beta * momentum + all_reduce(before - now, group, op="mean")
    return before - lr * momentum, momentum


@wrong_outer("The sign is wrong")
def the_other_way(before, now, momentum, lr, beta, group):
    change = all_reduce(now - before, group, op="mean")
    momentum = beta * momentum + change
    return before - lr * (change + beta * momentum), momentum


@wrong_outer("with a weight of 1")
def averages_over_time(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group, op="mean")
    momentum = beta * momentum + (1 - beta) * change
    return before - lr * (change + beta * momentum), momentum


@wrong_outer("This is plain momentum")
def looks_back(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group, op="mean")
    return before - lr * (change + beta * momentum), beta * momentum + change


@wrong_outer("lr belongs in the step")
def lr_in_the_momentum(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group, op="mean")
    momentum = beta * momentum + lr * change
    return before - (lr * change + beta * momentum), momentum


@wrong_outer("The step starts from `before`")
def from_the_mean(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group, op="mean")
    momentum = beta * momentum + change
    return before - change - lr * (change + beta * momentum), momentum


@wrong_outer("Return the new momentum")
def the_old_momentum(before, now, momentum, lr, beta, group):
    change = all_reduce(before - now, group, op="mean")
    return before - lr * (change + beta * (beta * momentum + change)), momentum


@wrong_outer("Nothing was sent")
def alone(before, now, momentum, lr, beta, group):
    momentum = beta * momentum + before - now
    return before - lr * (before - now + beta * momentum), momentum


@wrong_outer("A barrier moves nothing")
def meets_first(before, now, momentum, lr, beta, group):
    barrier(group)
    return solutions.outer_step(before, now, momentum, lr, beta, group)


@wrong_outer("bytes were sent where")
def averages_all_three(before, now, momentum, lr, beta, group):
    before, now, momentum = (
        all_reduce(x, group, op="mean", algorithm="ring") for x in (before, now, momentum)
    )
    momentum = beta * momentum + before - now
    return before - lr * (before - now + beta * momentum), momentum


@wrong_outer("numbers travel in the dtype")
def in_half_the_bits(before, now, momentum, lr, beta, group):
    change = all_reduce((before - now).bfloat16(), group, op="mean").to(before)
    momentum = beta * momentum + change
    return before - lr * (change + beta * momentum), momentum


KEPT = [
    (name, fn, says)
    for name, wrong in (
        ("serve", wrong_server),
        ("push_touched", wrong_push),
        ("outer_step", wrong_outer),
    )
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", KEPT, ids=[fn.__name__ for _, fn, _ in KEPT])
def test_a_wrong_answer_is_refused_with_the_hint_that_helps(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


right_server, right_push, right_outer = Right("serve"), Right("push_touched"), Right("outer_step")
right_server(solutions.serve)
right_push(solutions.push_touched)
right_outer(solutions.outer_step)


@right_server
def with_a_rule_apart(table, update, num_workers, bound, group):
    return server(table, update, num_workers, group, bounded(bound))


@right_server
def hears_the_message_itself(table, update, num_workers, bound, group):
    workers = range(group.size() - num_workers, group.size())  # the servers are the first ranks
    begun, gone = dict.fromkeys(workers, 0), set()
    open_, at, out = {}, {}, []
    while len(gone) < num_workers:
        (kind, number), who = recv_any(torch.empty(2, dtype=torch.int64), group)
        where = slice(None)
        if number >= 0:
            where = recv(torch.empty(int(number), dtype=torch.int64), who, group)
        if kind == LEAVE:
            gone.add(who)
        elif kind == PULL:
            begun[who] += 1
            open_[who] = where
        else:
            table[where] = update(table[where], recv(table[where], who, group))
            out.append((who, len(out) - at.get(who, 0)))
        slowest = min((n for w, n in begun.items() if w not in gone), default=0)
        for w in [w for w in open_ if bound is None or begun[w] <= slowest + bound]:
            at[w] = len(out)
            send(table[open_.pop(w)], w, group)
    return out


@right_server
def answers_the_last_comer_first(table, update, num_workers, bound, group):
    pulls, steps, then, applied = [], {}, {}, []
    for _ in range(100_000):
        if not num_workers:
            break
        kind, worker, rows = next_request(group)
        if kind == LEAVE:
            num_workers -= 1
            steps.pop(worker, None)
        elif kind == PULL:
            steps[worker] = 1 + (steps[worker] if worker in steps else 0)
            pulls.insert(0, (worker, rows))
        else:
            table[rows] = update(table[rows], recv(table[rows], worker, group))
            applied += [Applied(worker, len(applied) - then.get(worker, 0))]
        least = min(steps.values()) if len(steps) == num_workers and steps else 0
        go = [p for p in pulls if bound is None or steps[p[0]] <= least + bound]
        pulls = [p for p in pulls if p not in go]
        for who, which in go:
            then[who] = len(applied)
            send(table[which], who, group)
    return applied


@right_server
def counts_updates_for_each_worker(table, update, num_workers, bound, group):
    missed = {}

    def stale(applied, pulled, worker):
        return len(applied[pulled.get(worker, 0) :])

    missed.clear()
    return server(table, update, num_workers, group, bounded(bound), stale)


@right_push
def from_a_set(gradient, tokens, num_servers, group):
    rows = sorted(set(tokens.flatten().tolist()))
    for number in range(num_servers):
        mine = [row for row in rows if row % num_servers == number]
        if mine:
            there = torch.tensor([row // num_servers for row in mine])
            push(gradient[mine], there, number, group)


@right_push
def by_a_mask(gradient, tokens, num_servers, group):
    touched = torch.zeros(len(gradient), dtype=torch.bool)
    touched[tokens.flatten()] = True
    for number in range(num_servers):
        rows = touched[number::num_servers].nonzero().flatten()
        if rows.numel():
            push(gradient[number::num_servers][rows].contiguous(), rows, number, group)


@right_push
def the_last_server_first(gradient, tokens, num_servers, group):
    rows, _ = torch.sort(torch.unique(tokens), descending=True)
    for number in reversed(range(num_servers)):
        at = (rows % num_servers == number).nonzero().flatten()
        if at.numel() > 0:
            mine = rows.index_select(0, at)
            push(
                gradient.index_select(0, mine),
                mine.div(num_servers, rounding_mode="floor"),
                number,
                group,
            )


@right_push
def a_row_at_a_time_into_lists(gradient, tokens, num_servers, group):
    lists = {}
    for row in tokens.unique().tolist():
        lists.setdefault(row % num_servers, []).append(row)
    for number, rows in lists.items():
        push(
            torch.stack([gradient[r] for r in rows]),
            torch.tensor(rows) // num_servers,
            number,
            group,
        )


@right_outer
def averages_the_parameters(before, now, momentum, lr, beta, group):
    change = before - all_reduce(now, group, op="mean")
    momentum = change + beta * momentum
    return before - lr * change - lr * beta * momentum, momentum


@right_outer
def by_torchs_optimizer(before, now, momentum, lr, beta, group):
    x = torch.nn.Parameter(before.clone())
    x.grad = all_reduce(before - now, group, op="mean")
    optimizer = torch.optim.SGD([x], lr=lr, momentum=beta, nesterov=beta > 0)
    if beta:
        optimizer.state[x]["momentum_buffer"] = momentum.clone()
    optimizer.step()
    new = optimizer.state[x]["momentum_buffer"] if beta else x.grad
    return x.detach(), new


@right_outer
def divides_by_itself(before, now, momentum, lr, beta, group):
    change = all_reduce((before - now) / group.size(), group)
    new = momentum * beta
    new += change
    return torch.sub(before, change.add(new, alpha=beta), alpha=lr), new


@right_outer
def unrolled(before, now, momentum, lr, beta, group):
    change = all_reduce(now - before, group, op="mean")
    step = lr * (1 + beta) * change - lr * beta * beta * momentum
    return before + step, beta * momentum - change


RIGHT = [
    (right.name, fn) for right in (right_server, right_push, right_outer) for fn in right.answers
]


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_a_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
