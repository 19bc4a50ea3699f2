# WRONG: "the state of a rank that has completed the most steps, and the number of these steps". Shown by: two living ranks with steps 16777216 and 16777217: float32 does not tell them apart, so rank 0's state and 16777216 come back.
import torch

from mini_dist import all_gather, broadcast
from mini_dist.collectives.messages import Members


def rebuild(state, step, dead, group):
    alive = sorted(set(range(group.size())) - set(dead))
    there = Members(group, alive)
    mine = torch.full((1,), float(step))
    steps = all_gather(mine, there)
    most, root = steps.max(dim=0)
    return there, broadcast(state, int(root), there), int(most)
