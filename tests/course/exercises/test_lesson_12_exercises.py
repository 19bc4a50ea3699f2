"""Lesson 12: wrong lists get a hint that names the mistake."""

import sys

import cloudpickle
import numpy
import pytest

from mini_dist import check
from mini_dist import schedule as library
from mini_dist.plan.schedule import Action, Schedule
from tests.course.exercises import right
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)
cloudpickle.register_pickle_by_value(right)


def forwards(rank, m):
    return [f"{rank}F{k}" for k in range(m)]


def backwards(rank, m):
    return [f"{rank}B{k}" for k in range(m)]


def taking_turns(p, m, warmups):
    """Build 1F1B with other warm-ups, so that each wrong answer is wrong in one thing only."""
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


@gpipe("and micro-batch are swapped")
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


@gpipe("with one stage per rank, that is the rank")
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


@gpipe("The micro-batches are 1 to 8, but should be 0 to 7: counting starts at 0")
def counts_from_one(p, m):
    return [[f"{r}{kind}{k + 1}" for kind in "FB" for k in range(m)] for r in range(p)]


@gpipe("The micro-batches are 0 to 8, but should be 0 to 7")
def one_micro_batch_too_many(p, m):
    return [forwards(r, m + 1) + backwards(r, m + 1) for r in range(p)]


@gpipe("leave the W out")
def splits_the_backward(p, m):
    w = lambda r: [f"{r}W{k}" for k in range(m)]  # noqa: E731
    return [forwards(r, m) + backwards(r, m) + w(r) for r in range(p)]


@gpipe("Right with 4 ranks. With 3 ranks, 2 micro-batches: ")
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


@gpipe("the pipeline is reversed")
def mirrored(p, m):
    return [forwards(p - 1 - r, m) + backwards(p - 1 - r, m) for r in range(p)]


@gpipe("other cases, in the simulator: 5 ranks, 1 micro-batches: ")
def only_up_to_4_ranks(p, m):
    return taking_turns(p, m, lambda rank: m if p < 5 else 0)[: max(4, p - 1)]


@gpipe("put each rank's into a list of its own")
def a_flat_list(p, m):
    return [a for r in range(p) for a in forwards(r, m) + backwards(r, m)]


@gpipe("None stands among the actions")
def none_for_what_is_not_there(p, m):
    return [[*forwards(r, m), None, *backwards(r, m)] for r in range(p)]


@gpipe("is a tuple, no action: write it as text")
def raw_tuples(p, m):
    return [[(r, kind, k) for kind in "FB" for k in range(m)] for r in range(p)]


@gpipe("'0f0' is not an action")
def in_small_letters(p, m):
    return [[Action(r, kind, k) for kind in "fb" for k in range(m)] for r in range(p)]


@gpipe("One of the lists is a NoneType")
def one_rank_has_none(p, m):
    return [forwards(r, m) + backwards(r, m) if r else None for r in range(p)]


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
    """Stop when no forwards are left."""
    lists = []
    for r in range(p):
        f, b, warmup = forwards(r, m), backwards(r, m), p - 1 - r
        turns = [a for pair in zip(f[warmup:], b) for a in pair]
        lists.append(f[:warmup] + turns)
    return lists


@one_f_one_b("The micro-batches are 0 to 10, but should be 0 to 7")
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
    """The memory is right, but the last rank does not take micro-batches in order of arrival."""
    lists = taking_turns(p, m, lambda rank: p - 1 - rank)
    if p == 4:
        lists[3][0:4] = ["3F1", "3B1", "3F0", "3B0"]
    return lists


@one_f_one_b("Right with 4 ranks. With 3 ranks, 1 micro-batches: ")
def warms_up_as_if_there_were_enough(p, m):
    """With one micro-batch on three ranks, rank 0 does not have two to warm up with."""
    lists = []
    for r in range(p):
        warmup = p - 1 - r
        actions = [f"{r}F{k}" for k in range(warmup)]
        for k in range(warmup, m):
            actions += [f"{r}F{k}", f"{r}B{k - warmup}"]
        lists.append(actions + [f"{r}B{k}" for k in range(max(0, m - warmup), m)])
    return lists


@one_f_one_b("Right with 4 ranks. With 3 ranks, 1 micro-batches: ")
def only_with_many_micro_batches(p, m):
    """If m < p, the turns run forwards of micro-batches that do not exist."""
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


@one_f_one_b("other cases, in the simulator: ")
def right_only_with_few_micro_batches_or_many(p, m):
    return taking_turns(p, m, lambda rank: p - 1 - rank if m in (1, 8) else rank * 0 + p)


@one_f_one_b("other cases, in the simulator: 5 ranks, 7 micro-batches: Rank 0 holds only 4")
def right_up_to_four_ranks(p, m):
    return taking_turns(p, m, lambda rank: min(3, p - 1 - rank) if m > 4 else p - 1 - rank)


@one_f_one_b("the pipeline is reversed")
def mirrored_1f1b(p, m):
    return taking_turns(p, m, lambda rank: p - 1 - rank) and [
        [a.replace(str(r), str(p - 1 - r), 1) for a in actions]
        for r, actions in enumerate(taking_turns(p, m, lambda rank: rank))
    ]


# -- sends and receives -----------------------------------------------------------------------

messages = Wrong()


def added(schedule, receive=True, send=True, kinds="FB", rename=lambda a: a, skip=None):
    """Add the messages correctly; the arguments can leave parts out."""
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


@messages("No rank waits for W")
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


@messages("Right with 4 ranks. With 2 ranks, 4 micro-batches: ")
def also_within_a_rank(schedule):
    return added(schedule, skip=lambda schedule, stage, rank: stage in schedule.rank_of)


@messages("Right with 4 ranks. With 2 ranks, 4 micro-batches: ")
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


@messages("the next rank waits for a result that is already ready")
def sends_after_the_next_computation(schedule):
    """Do so only where it can run: in the warm-up of the first rank."""
    lists = added(schedule)
    names = list(map(str, lists[0]))
    if "0SEND_F0" in names:
        send = lists[0].pop(names.index("0SEND_F0"))
        lists[0].insert(2, send)  # after 0F1
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


@messages("other cases, in the simulator: ")
def assumes_that_neighbours_are_one_rank_apart(schedule):
    def near(schedule, stage, rank):
        return abs(schedule.rank_of.get(stage, rank) - rank) == 1

    return added(schedule, skip=near)


@messages("other cases, in the simulator: ")
def takes_the_rank_for_the_stage_modulo_the_ranks(schedule):
    if schedule.stages_of[0] in ((0, 3), (0, 7)):  # The stages form a V.
        return added(schedule)

    def looped(schedule, stage, rank):
        return 0 <= stage < schedule.num_stages and stage % schedule.num_ranks != rank

    return added(schedule, skip=looped)


@messages("A NoneType came back")
def nothing_at_all(schedule):
    added(schedule)


# -- unusual right answers --------------------------------------------------------------------

right_gpipe, right_1f1b = Right("gpipe"), Right("one_f_one_b")
right_messages = Right("add_communication")


@right_gpipe
def backwards_from_the_last_to_the_first(p, m):
    """As in figure 2 of the GPipe paper."""
    return [forwards(r, m) + backwards(r, m)[::-1] for r in range(p)]


@right_gpipe
def a_line_of_text_for_each_rank(p, m):
    return [" ".join(forwards(r, m) + backwards(r, m)) for r in range(p)]


@right_gpipe
def tuples_of_actions(p, m):
    return tuple(tuple(Action(r, kind, k) for kind in "FB" for k in range(m)) for r in range(p))


@right_gpipe
def numbers_of_numpy(p, m):
    numbers = numpy.arange(m)
    return [[Action(numpy.int64(r), kind, k) for kind in "FB" for k in numbers] for r in range(p)]


@right_gpipe
def rank_by_rank_as_they_are_asked_for(p, m):
    for r in range(p):
        yield (f"{r}{kind}{k}" for kind in "FB" for k in range(m))


@right_1f1b
def by_what_is_held(p, m):
    """Run a backward as soon as a rank holds as much as it may."""
    lists = []
    for r in range(p):
        actions, f, b = [], 0, 0
        while b < m:
            if f < m and f - b < p - r:
                actions.append(f"{r}F{f}")
                f += 1
            else:
                actions.append(f"{r}B{b}")
                b += 1
        lists.append(actions)
    return lists


@right_1f1b
def sorted_by_time(p, m):
    """Sort by start time; in the warm-up, forwards start one after another."""
    lists = []
    for r in range(p):
        when = {f"{r}B{k}": 2 * (p + k) - 1 - r for k in range(m)}
        when |= {f"{r}F{k}": r + k if k < p - r else r + 2 * k for k in range(m)}
        lists.append(tuple(sorted(when, key=when.get)))
    return tuple(lists)


@right_1f1b
def by_one_after_the_other(p, m):
    lists = [backwards(r, m) for r in range(p)]
    for r, actions in enumerate(lists):
        for k in range(m):
            place = actions.index(f"{r}B{k - (p - 1 - r)}") if k >= p - r - 1 else k
            actions.insert(min(place, len(actions)), f"{r}F{k}")
    return Schedule("mine", lists)


@right_messages
def from_the_side_of_the_messages(schedule):
    """Insert the messages of each boundary between two ranks into the lists."""
    lists = [list(schedule.actions(rank)) for rank in range(schedule.num_ranks)]

    def put(stage, kind, micro, message, behind):
        actions = lists[schedule.rank_of[stage]]
        place = actions.index((stage, kind, micro, None)) + behind
        actions.insert(place, Action(stage, f"{message}_{kind}", micro))

    for one in range(schedule.num_stages - 1):
        if schedule.crosses(one):
            for k in range(schedule.num_micro_batches):
                put(one, "F", k, "SEND", 1)
                put(one + 1, "F", k, "RECV", 0)
                put(one + 1, "B", k, "SEND", 1)
                put(one, "B", k, "RECV", 0)
    return lists


@right_messages
def in_lines_of_text(schedule):
    return [" ".join(map(str, actions)) for actions in added(schedule)]


@right_messages
def as_a_schedule(schedule):
    return Schedule(schedule.name, added(schedule), schedule.mixed)


RIGHT = [
    pytest.param(each.name, fn, id=f"{each.name}-{fn.__name__}")
    for each in (right_gpipe, right_1f1b, right_messages)
    for fn in [*each.answers, getattr(right, each.name)]
]


@pytest.mark.parametrize("name, fn", RIGHT)
def test_an_unusual_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


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
