"""Lesson 13, solved as a learner would."""


def less_bubble():
    lists = []
    for rank in range(4):
        warmup, waiting = 3 - rank, []
        actions = [f"{rank}F{k}" for k in range(warmup)]
        for k in range(8):
            if warmup + k < 8:
                actions.append(f"{rank}F{warmup + k}")
            actions.append(f"{rank}B{k}")
            waiting.append(f"{rank}W{k}")
            if len(waiting) > rank:
                actions.append(waiting.pop(0))
        lists.append(actions + waiting)
    return lists
