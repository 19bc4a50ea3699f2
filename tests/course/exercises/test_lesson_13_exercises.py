"""Lesson 13's puzzle: lists that break a rule are refused, and right lists are ranked."""

import re
import sys
from functools import partial

import cloudpickle
import pytest

from mini_dist import check
from mini_dist import schedule as library
from mini_dist.plan.schedule import Schedule
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)


def split(warmup, put_off, kinds="FBW"):
    """Build 1F1B with other warm-ups, and put each W off by put_off(rank) backwards."""
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
    """The bubble is smaller, but rank 0 holds 5.5 micro-batches."""
    return INTERLEAVED


@wrong("not below 1F1B's")
def in_a_loop_through_two_stages():
    """Give each rank two thin stages; run one micro-batch after another."""
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
    return PIPEDREAM


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
    return THREE_CHUNKS


@wrong("the library's zb_v")
def the_librarys_best():
    return library.zb_v(4, 8)


def as_text(schedule):
    return [[str(action) for action in actions] for actions in schedule.ranks]


# These are text, as if written by hand: on a rank, the judge would notice a library call.
INTERLEAVED = as_text(library.interleaved(4, 8))
THREE_CHUNKS = as_text(library.interleaved(4, 8, chunks=3))
PIPEDREAM = as_text(library.pipedream(4, 8))
ZB_V = as_text(library.zb_v(4, 8))

# An earlier cell of the lesson defines these.
four = {"ZB-H1": library.zb_h1(4, 8), "ZB-V": library.zb_v(4, 8)}
played = {name: library.simulate(schedule) for name, schedule in four.items()}


@wrong("Your function uses four, which was there before it was called")
def the_lessons_own():
    return four["ZB-V"]


@wrong("Your function uses four")
def a_copy_of_the_lessons_own():
    return [[str(action) for action in actions] for actions in four["ZB-V"].ranks]


def take():
    return played["ZB-V"]


@wrong("Your function uses played")
def what_the_lesson_has_played():
    return [[span.action for span in spans] for spans in take().spans]


@wrong("Your function uses schedule")
def the_lessons_own_as_a_default(schedule=four["ZB-V"]):
    return schedule


# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn, says", wrong.answers, ids=wrong.names())
def test_what_breaks_a_rule_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.less_bubble.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint


def place(verdict):
    """Return the place of `yours` in a verdict's ranking."""
    found = [re.match(r"(\d+)\. yours", line.what) for line in verdict.lines]
    return next(int(match[1]) for match in found if match)


def test_the_solution_is_right_and_has_its_place_among_the_known():
    verdict = check.less_bubble.judge(solutions.less_bubble)
    assert verdict.state == "right", verdict
    assert place(verdict) == 2  # like ZB-H1; only ZB-V is better and fits
    ranked = [line.what for line in verdict.lines]
    assert "1. ZB-V" in ranked and "over the budget: ZB-H2" in ranked


@pytest.mark.parametrize("answer", [solutions.less_bubble, as_gpipe])
def test_a_place_in_the_ranking_is_neither_right_nor_wrong(answer):
    for line in check.less_bubble.judge(answer).lines:
        is_place = re.match(r"\d+\. |over the budget: ", line.what)
        assert (line.mark == "") == bool(is_place), line


right = Right("less_bubble")


@right
def weights_at_once():
    return split(lambda rank: 3 - rank, lambda rank: 0)


@right
def the_v():
    """Written down by hand."""
    return ZB_V


@right
def each_weight_as_late_as_there_is_room_for():
    """Take F and B from 1F1B; run a W when a rank would otherwise hold more than 4."""
    lists = []
    for rank in range(4):
        actions, late, f, b = [], [], 0, 0
        while b < 8:
            if f < 8 and f - b <= 3 - rank:
                if f - b + len(late) == 4:
                    actions.append(late.pop(0))
                actions.append(f"{rank}F{f}")
                f += 1
            else:
                actions.append(f"{rank}B{b}")
                late.append(f"{rank}W{b}")
                b += 1
        lists.append(actions + late)
    return lists


@right
def some_backwards_whole():
    lists = split(lambda rank: 3 - rank, lambda rank: rank)
    lists[0] = [a for a in lists[0] if "W" not in a]  # rank 0's backwards stay whole
    return Schedule("mine", lists, mixed=True)


@right
def in_lines_of_text():
    return tuple(" ".join(actions) for actions in split(lambda r: 3 - r, lambda r: min(r, 2)))


@pytest.mark.parametrize("fn", right.answers, ids=lambda fn: fn.__name__)
def test_whatever_has_less_bubble_and_holds_no_more_is_right(fn):
    verdict = check.less_bubble.judge(fn)
    assert verdict.state == "right", verdict


def test_a_better_list_has_a_better_place_and_the_best_known_the_first():
    assert place(check.less_bubble.judge(weights_at_once)) == 3
    assert place(check.less_bubble.judge(the_v)) <= 2  # shared with ZB-V


def test_the_printed_solution_as_text_is_the_librarys():
    def executed():
        cell = {}
        exec(check.less_bubble.answer(), cell)
        return cell["less_bubble"]()

    assert "the library's Exercise.answer" in check.less_bubble.judge(executed).hint


class Kept:
    lists = four["ZB-V"]

    def __call__(self):
        return self.lists


def in_a_closure(kept=None):
    kept = four["ZB-V"]
    return lambda: kept


HIDDEN = {
    "in a closure": in_a_closure(),
    "in an argument": partial(dict.get, four, "ZB-V"),
    "in a class": lambda: Kept.lists,
    "in an object": Kept.__call__.__get__(Kept()),
    "in what a dict does": four.copy,
}


@pytest.mark.parametrize("fn", HIDDEN.values(), ids=HIDDEN)
def test_a_schedule_made_before_is_found_wherever_it_is_kept(fn):
    assert "which was there before it was called" in check.less_bubble.judge(fn).hint
