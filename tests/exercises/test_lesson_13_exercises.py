"""Lesson 13's puzzle: what breaks a rule is refused, and what is right finds its place."""

import re
import sys

import cloudpickle
import pytest

from mini_dist import check
from mini_dist import schedule as library
from mini_dist.schedule import Schedule
from tests.exercises import solutions_13 as solutions
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)


def split(warmup, put_off, kinds="FBW"):
    """1F1B's turns with other warm-ups, and each W as many backwards late as one says."""
    lists = []
    for rank in range(4):
        actions, late = [f"{rank}F{k}" for k in range(min(8, warmup(rank)))], []
        for k in range(8):
            if warmup(rank) + k < 8:
                actions.append(f"{rank}F{warmup(rank) + k}")
            actions.append(f"{rank}B{k}")
            if "W" in kinds:
                late.append(f"{rank}W{k}")
            if len(late) > put_off(rank):
                actions.append(late.pop(0))
        lists.append(actions + late)
    return lists


wrong = Wrong()


@wrong("not below 1F1B's")
def one_f_one_b_itself():
    return split(lambda rank: 3 - rank, lambda rank: 0, kinds="FB")


@wrong("not below 1F1B's")
def splits_and_keeps_one_at_a_time():
    return split(lambda rank: 0, lambda rank: 0)


@wrong("Rank 0 holds 7 micro-batches and may hold 4")
def as_zb_h2():
    return split(lambda rank: 2 * (3 - rank), lambda rank: 2 * rank)


@wrong("put fewer of them off")
def all_weights_at_the_end():
    return split(lambda rank: 3 - rank, lambda rank: 8)


@wrong("start a backward before the next forward")
def as_gpipe():
    return split(lambda rank: 8, lambda rank: 0, kinds="FB")


@wrong("start a backward before the next forward")
def interleaved_by_hand():
    """Less bubble, but 5.5 micro-batches held on rank 0."""
    return [[str(a) for a in actions] for actions in INTERLEAVED]


@wrong("not below 1F1B's")
def in_a_loop_through_two_stages():
    """Two thin stages a rank, one micro-batch after the other."""
    lists = []
    for rank in range(4):
        one = "{0}F{2} {1}F{2} {1}B{2} {0}B{2}"
        lists.append(" ".join(one.format(rank, rank + 4, k) for k in range(8)))
    return lists


@wrong("0W0 is missing")
def forgets_a_weight():
    lists = split(lambda rank: 3 - rank, lambda rank: rank)
    lists[0].remove("0W0")
    return lists


@wrong("There are forwards only")
def no_backward_at_all():
    return [[f"{rank}F{k}" for k in range(8)] for rank in range(4)]


@wrong("The micro-batches are 0 to 3")
def four_micro_batches_are_less_work():
    return [[a for a in actions if int(a[-1]) < 4] for actions in solutions.less_bubble()]


@wrong("optimizer step (S) among the micro-batches")
def never_drains():
    return [[str(a) for a in actions] for actions in PIPEDREAM]


@wrong("W for its own B")
def weight_before_its_backward():
    lists = solutions.less_bubble()
    lists[3].remove("3W0")
    lists[3].insert(0, "3W0")
    return lists


@wrong("There are 2 lists for 4 ranks")
def on_two_ranks_there_is_less_to_wait():
    return ["0F0 0B0", "1F0 1B0"]


@wrong("12 stages cannot share 8 layers evenly")
def three_stages_a_rank():
    return [[str(a) for a in actions] for actions in THREE_CHUNKS]


@wrong("the library's zb_v")
def the_librarys_best():
    return library.zb_v(4, 8)


# made here: on a rank a call of the library would be noted
INTERLEAVED = library.interleaved(4, 8).ranks
THREE_CHUNKS = library.interleaved(4, 8, chunks=3).ranks
PIPEDREAM = library.pipedream(4, 8).ranks
ZB_V = library.zb_v(4, 8).ranks

# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn, says", wrong.answers, ids=wrong.names())
def test_what_breaks_a_rule_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.less_bubble.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint


def place(verdict):
    """Where a verdict ranks `yours`."""
    found = [re.match(r"(\d+)\. yours", line.what) for line in verdict.lines]
    return next(int(match[1]) for match in found if match)


def test_the_solution_is_right_and_has_its_place_among_the_known():
    verdict = check.less_bubble.judge(solutions.less_bubble)
    assert verdict.state == "right", verdict
    assert place(verdict) == 2  # as ZB-H1; only ZB-V is better and fits
    ranked = [line.what for line in verdict.lines]
    assert "1. ZB-V" in ranked and "over the budget: ZB-H2" in ranked


@pytest.mark.parametrize("answer", [solutions.less_bubble, as_gpipe])
def test_a_place_in_the_ranking_is_neither_right_nor_wrong(answer):
    for line in check.less_bubble.judge(answer).lines:
        is_place = re.match(r"\d+\. |over the budget: ", line.what)
        assert (line.mark == "") == bool(is_place), line


def test_a_better_list_has_a_better_place_and_the_best_known_the_first():
    def weights_at_once():
        return split(lambda rank: 3 - rank, lambda rank: 0)

    def the_v():
        return ZB_V

    assert place(check.less_bubble.judge(weights_at_once)) == 3
    assert place(check.less_bubble.judge(the_v)) <= 2  # shared with ZB-V
    assert check.less_bubble.judge(the_v).state == "right"


def test_lists_that_split_some_backwards_are_taken_as_a_schedule():
    def mixed():
        lists = split(lambda rank: 3 - rank, lambda rank: rank)
        lists[0] = [a for a in lists[0] if "W" not in a]  # rank 0's backwards stay whole
        return Schedule("mine", lists, mixed=True)

    assert check.less_bubble.judge(mixed).state == "right"
