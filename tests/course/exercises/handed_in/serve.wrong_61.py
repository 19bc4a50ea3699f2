# WRONG: "With 0 the server answers a pull only when all workers have pushed, which is synchronous training": an answer that waits has the rows as they were at the request, without the pushes since, which its staleness does not count either. Shown by: bound 0, two workers that pull rows given as a tensor, [0]: 1 pulls, 2 pulls, 1 pushes, 1 pulls (must wait), 2 pushes, 2 pulls: 1 gets row 0 without the push of 2 (slice(None) is a view, and right)
from mini_dist import recv, send
from mini_dist.strategies.asynchronous import Applied
from mini_dist.strategies.asynchronous.ideas import PULL, PUSH, next_request


def serve(table, update, num_workers, bound, group):
    begun, answered, waiting, applied, active = {}, {}, {}, [], num_workers
    while active:
        kind, worker, rows = next_request(group)
        if kind == PULL:
            begun[worker] = begun.get(worker, 0) + 1
            waiting[worker] = table[rows]
        elif kind == PUSH:
            gradients = recv(table[rows], worker, group)
            table[rows] = update(table[rows], gradients)
            applied.append(Applied(worker, len(applied) - answered.get(worker, 0)))
        else:
            active -= 1
            begun.pop(worker, None)
        slowest = min(begun.values(), default=0) if len(begun) == active else 0
        for each in list(waiting):
            if bound is None or begun[each] - slowest <= bound:
                answered[each] = len(applied)
                send(waiting.pop(each), each, group)
    return applied
