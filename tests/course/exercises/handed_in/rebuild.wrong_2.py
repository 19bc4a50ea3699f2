# WRONG: root as a rank of the OLD group. Wrong if a dead rank is before it.
import torch
from mini_dist import all_gather, broadcast
from mini_dist.collectives.messages import Members
def rebuild(state, step, dead, group):
    alive = [r for r in range(group.size()) if r not in dead]
    new = Members(group, alive)
    steps = all_gather(torch.tensor([step]), new).tolist()
    best = max(range(len(steps)), key=steps.__getitem__)
    return new, broadcast(state, min(alive[best], new.size() - 1), new), max(steps)
