# WRONG: "Put each send right after the computation that produces the tensor, and each receive right before the computation that needs it": ranks of odd number receive first and send then, the old cure for blocking sends. Shown by: one_f_one_b(2, 2), rank 1: 1B0 1RECV_F1 1SEND_B0 1F1 (rank 0 is right).
from mini_dist.plan.schedule import Action


def add_communication(schedule):
    lists = []
    for rank, actions in enumerate(schedule.ranks):
        out = []
        for a in actions:
            step = {"F": 1, "B": -1}.get(a.kind)
            away = {
                side: step is not None and schedule.rank_of.get(a.stage + side * step, rank) != rank
                for side in (-1, 1)
            }
            if away[-1]:
                receive = Action(a.stage, f"RECV_{a.kind}", a.micro)
                if rank % 2 and out and out[-1].kind.startswith("SEND"):
                    out.insert(len(out) - 1, receive)
                else:
                    out.append(receive)
            out.append(a)
            if away[1]:
                out.append(Action(a.stage, f"SEND_{a.kind}", a.micro))
        lists.append(out)
    return lists
