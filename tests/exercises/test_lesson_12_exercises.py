"""Lesson 12: whoever writes a list wrongly is told what is wrong."""

import sys

import cloudpickle
import pytest

from mini_dist import check
from mini_dist import schedule as library
from mini_dist.schedule import Action, Schedule
from tests.exercises import solutions_12 as solutions
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)


def forwards(rank, m):
    return [f"{rank}F{k}" for k in range(m)]


def backwards(rank, m):
    return [f"{rank}B{k}" for k in range(m)]


def taking_turns(p, m, warmups):
    """1F1B with other warm-ups, for the wrong answers to be wrong in one thing only."""
    lists = []
    for rank in range(p):
        f, b, warmup = forwards(rank, m), backwards(rank, m), min(m, warmups(rank))
        actions = f[:warmup]
        for k in range(m):
            actions += [*f[warmup + k : warmup + k + 1], b[k]]
        lists.append(actions)
    return lists


# -- GPipe ------------------------------------------------------------------------------------

gpipe = Wrong()


@gpipe("that is the naive schedule")
def one_at_a_time(p, m):
    return [[f"{r}{kind}{k}" for k in range(m) for kind in "FB"] for r in range(p)]


@gpipe("and micro-batch have changed places")
def micro_batch_before_stage(p, m):
    return [[f"{k}{kind}{r}" for kind in "FB" for k in range(m)] for r in range(p)]


@gpipe("To hold fewer is the next exercise")
def as_1f1b(p, m):
    return taking_turns(p, m, lambda rank: p - 1 - rank)


@gpipe("0B7 is missing")
def forgets_the_last_backward(p, m):
    return [forwards(r, m) + backwards(r, m - 1) for r in range(p)]


@gpipe("There are forwards only")
def forgets_all_backwards(p, m):
    return [forwards(r, m) for r in range(p)]


@gpipe("with one stage a rank that is the rank")
def same_list_for_all(p, m):
    return [forwards(0, m) + backwards(0, m) for _ in range(p)]


@gpipe("There are 1 lists for 4 ranks")
def only_one_rank(p, m):
    return [forwards(0, m) + backwards(0, m)]


@gpipe("'F0' is not an action")
def without_stages(p, m):
    return [[f"F{k}" for k in range(m)] + [f"B{k}" for k in range(m)] for _ in range(p)]


@gpipe("A backward needs its own forward")
def backwards_first(p, m):
    return [backwards(r, m) + forwards(r, m) for r in range(p)]


@gpipe("take the micro-batches in different orders")
def each_rank_in_another_order(p, m):
    return [forwards(r, m)[:: 1 - 2 * (r % 2)] + backwards(r, m) for r in range(p)]


@gpipe("The micro-batches are 1 to 8, asked for are 0 to 7: counting starts at 0")
def counts_from_one(p, m):
    return [[f"{r}{kind}{k + 1}" for kind in "FB" for k in range(m)] for r in range(p)]


@gpipe("The micro-batches are 0 to 8, asked for are 0 to 7")
def one_micro_batch_too_many(p, m):
    return [forwards(r, m + 1) + backwards(r, m + 1) for r in range(p)]


@gpipe("leave the W out")
def splits_the_backward(p, m):
    w = lambda r: [f"{r}W{k}" for k in range(m)]  # noqa: E731
    return [forwards(r, m) + backwards(r, m) + w(r) for r in range(p)]


@gpipe("Right with 4 ranks, not with 3")
def only_for_4_ranks(p, m):
    return taking_turns(p, m, lambda rank: 0 if p == 3 and rank == 2 else m)


@gpipe("A dict came back")
def a_dict(p, m):
    return {r: forwards(r, m) + backwards(r, m) for r in range(p)}


@gpipe("A NoneType came back")
def returns_nothing(p, m):
    for r in range(p):
        forwards(r, m) + backwards(r, m)


@gpipe("the library's one_f_one_b")
def another_of_the_library(p, m):
    return library.one_f_one_b(p, m)


# -- 1F1B -------------------------------------------------------------------------------------

one_f_one_b = Wrong()


@one_f_one_b("this is GPipe")
def as_gpipe(p, m):
    return [forwards(r, m) + backwards(r, m) for r in range(p)]


@one_f_one_b("that is the naive schedule")
def no_warmup_at_all(p, m):
    return taking_turns(p, m, lambda rank: 0)


@one_f_one_b("All ranks warm up alike, and all hold 4")
def same_warmup_for_all(p, m):
    return taking_turns(p, m, lambda rank: p - 1)


@one_f_one_b("Rank 0 holds 5 micro-batches, and 4 would do")
def one_forward_too_many(p, m):
    return taking_turns(p, m, lambda rank: p - rank)


@one_f_one_b("Rank 0 holds only 3 and waits")
def one_forward_too_few(p, m):
    return taking_turns(p, m, lambda rank: max(0, p - 2 - rank))


@one_f_one_b("the last rank has no warm-up")
def warmup_of_the_wrong_end(p, m):
    return taking_turns(p, m, lambda rank: rank)


@one_f_one_b("0B5 is missing")
def no_cooldown(p, m):
    """Stops when the forwards are used up."""
    lists = []
    for r in range(p):
        f, b, warmup = forwards(r, m), backwards(r, m), p - 1 - r
        turns = [a for pair in zip(f[warmup:], b) for a in pair]
        lists.append(f[:warmup] + turns)
    return lists


@one_f_one_b("The micro-batches are 0 to 10, asked for are 0 to 7")
def forwards_beyond_the_last(p, m):
    lists = []
    for r in range(p):
        actions = forwards(r, p - 1 - r)
        for k in range(m):
            actions += [f"{r}F{p - 1 - r + k}", f"{r}B{k}"]
        lists.append(actions)
    return lists


@one_f_one_b("after the warm-up one forward and one backward take turns")
def waits_for_two(p, m):
    """Right memory, but the last rank takes the micro-batches in another order than they come."""
    lists = taking_turns(p, m, lambda rank: p - 1 - rank)
    if p == 4:
        lists[3][0:4] = ["3F1", "3B1", "3F0", "3B0"]
    return lists


@one_f_one_b("Right with 4 ranks, not with 3")
def warms_up_as_if_there_were_enough(p, m):
    """With one micro-batch on three ranks, rank 0 has no two to warm up with."""
    lists = []
    for r in range(p):
        warmup = p - 1 - r
        actions = [f"{r}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            actions += [f"{r}F{k}", f"{r}B{k - warmup}"]
        lists.append(actions + [f"{r}B{k}" for k in range(max(0, m - warmup), m)])
    return lists


@one_f_one_b("Right with 4 ranks, not with 3")
def only_with_many_micro_batches(p, m):
    """m < p: warms up with micro-batches that do not exist, and leaves their forwards out twice."""
    lists = []
    for r in range(p):
        warmup = p - 1 - r
        actions = [f"{r}F{k}" for k in range(warmup) if k < m]
        for k in range(m):
            actions += [f"{r}F{warmup + k}"] if warmup + k < m or m < p else []
            actions.append(f"{r}B{k}")
        lists.append(actions)
    return lists


@one_f_one_b("the library's interleaved")
def by_the_librarys_interleaved(p, m):
    return library.interleaved(p, m, chunks=1)


# -- sends and receives -----------------------------------------------------------------------

messages = Wrong()


def added(schedule, receive=True, send=True, kinds="FB", rename=lambda a: a, skip=None):
    """The right pass, with parts to leave out."""
    lists = []
    for rank in range(schedule.num_ranks):
        actions = []
        for action in schedule.actions(rank):
            stage, kind, micro, _ = action
            step = {"F": 1, "B": -1}.get(kind)
            before, after = [], []
            if step and kind in kinds:
                wanted = skip or elsewhere
                if wanted(schedule, stage - step, rank):
                    before.append(rename(Action(stage, f"RECV_{kind}", micro)))
                if wanted(schedule, stage + step, rank):
                    after.append(rename(Action(stage, f"SEND_{kind}", micro)))
            actions += before * receive + [action] + after * send
        lists.append(actions)
    return lists


def elsewhere(schedule, stage, rank):
    return schedule.rank_of.get(stage, rank) != rank


@messages("put them in")
def nothing(schedule):
    return schedule.ranks


@messages("Nobody waits for W")
def sends_the_weight_gradients_too(schedule):
    lists = added(schedule)
    return [
        [b for a in actions for b in ([a, f"{a.stage}SEND_W{a.micro}"] if a.kind == "W" else [a])]
        for actions in lists
    ]


@messages("is missing")
def forwards_only(schedule):
    return added(schedule, kinds="F")


@messages("is missing")
def sends_without_receives(schedule):
    return added(schedule, receive=False)


@messages("is missing")
def receives_without_sends(schedule):
    return added(schedule, send=False)


@messages("A receive is named by the stage that receives")
def receives_named_by_their_sender(schedule):
    def rename(a):
        shift = {"RECV_F": -1, "RECV_B": 1}.get(a.kind, 0)
        return a._replace(stage=a.stage + shift)

    return added(schedule, rename=rename)


@messages("has no other end")
def also_at_the_ends(schedule):
    return added(schedule, skip=lambda schedule, stage, rank: True)


@messages("Right with 4 ranks, not with 2")
def also_within_a_rank(schedule):
    return added(schedule, skip=lambda schedule, stage, rank: stage in schedule.rank_of)


@messages("Right with 4 ranks, not with 2")
def takes_the_stage_for_the_rank(schedule):
    return added(schedule, skip=lambda schedule, stage, rank: 0 <= stage < schedule.num_ranks)


@messages("deadlock")
def receives_after_use(schedule):
    lists = added(schedule)
    for actions in lists:
        for i in range(len(actions) - 1):
            if "RECV" in actions[i].kind:
                actions[i], actions[i + 1] = actions[i + 1], actions[i]
    return lists


@messages("the next rank waits for a result that is long ready")
def sends_after_the_next_computation(schedule):
    """Only where that can run: in the warm-up of the first rank."""
    lists = added(schedule)
    names = list(map(str, lists[0]))
    if "0SEND_F0" in names:
        send = lists[0].pop(names.index("0SEND_F0"))
        lists[0].insert(2, send)  # behind 0F1
    return lists


@messages("its buffer is held for nothing meanwhile")
def receives_all_at_the_start(schedule):
    lists = []
    for actions in added(schedule):
        first = [a for a in actions if "RECV" in a.kind]
        lists.append(first + [a for a in actions if "RECV" not in a.kind])
    return lists


@messages("the order is the schedule's business")
def sorts_the_computations(schedule):
    order = lambda action: (action.kind != "F", action.micro)  # noqa: E731
    return added(Schedule("", [sorted(actions, key=order) for actions in schedule.ranks]))


@messages("the library's fuse_communication")
def another_pass_of_the_library(schedule):
    return library.fuse_communication(Schedule("", added(schedule)))


# ------------------------------------------------------------------------------------------------

CASES = [
    pytest.param(name, fn, says, id=f"{name}-{fn.__name__}")
    for name, wrong in [
        ("gpipe", gpipe),
        ("one_f_one_b", one_f_one_b),
        ("add_communication", messages),
    ]
    for fn, says in wrong.answers
]


@pytest.mark.parametrize("name, fn, says", CASES)
def test_a_wrong_list_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "add_communication"])
def test_the_solutions_are_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def test_backwards_in_the_order_of_the_gpipe_paper_are_right_too():
    """Its figure 2 runs them from the last micro-batch to the first."""

    def last_first(p, m):
        return [forwards(r, m) + backwards(r, m)[::-1] for r in range(p)]

    assert check.gpipe.judge(last_first).state == "right"
