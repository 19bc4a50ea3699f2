"""Lesson 12, solved as a learner would."""


def gpipe(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        forwards = [f"{rank}F{k}" for k in range(num_micro_batches)]
        backwards = [f"{rank}B{k}" for k in range(num_micro_batches)]
        lists.append(forwards + backwards)
    return lists


def one_f_one_b(num_ranks, num_micro_batches):
    lists = []
    for rank in range(num_ranks):
        warmup = min(num_ranks - 1 - rank, num_micro_batches)
        actions = [f"{rank}F{k}" for k in range(warmup)]
        for k in range(num_micro_batches):
            if warmup + k < num_micro_batches:
                actions.append(f"{rank}F{warmup + k}")
            actions.append(f"{rank}B{k}")
        lists.append(actions)
    return lists


def add_communication(schedule):
    lists = []
    for rank in range(schedule.num_ranks):
        actions = []

        def elsewhere(stage, rank=rank):
            return stage in schedule.rank_of and schedule.rank_of[stage] != rank

        for action in schedule.actions(rank):
            stage, kind, micro, _ = action
            if kind == "W":
                actions.append(action)
                continue
            step = 1 if kind == "F" else -1
            if elsewhere(stage - step):
                actions.append(f"{stage}RECV_{kind}{micro}")
            actions.append(action)
            if elsewhere(stage + step):
                actions.append(f"{stage}SEND_{kind}{micro}")
        lists.append(actions)
    return lists
