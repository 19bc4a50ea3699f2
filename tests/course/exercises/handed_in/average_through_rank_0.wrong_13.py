# WRONG: takes the parameters out of the caller's list (pop): an optimizer's list is empty afterwards.
from mini_dist import gather
from mini_dist.collectives import star_broadcast

def average_through_rank_0(parameters, group):
    todo = parameters if isinstance(parameters, list) else list(parameters)
    while todo:
        p = todo.pop()
        if p.grad is None:
            continue
        everyones = gather(p.grad[None], 0, group)
        p.grad = star_broadcast(p.grad if everyones is None else everyones.mean(0), 0, group)
