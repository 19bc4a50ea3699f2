"""The stepper shows, step by step, what a real run sent and what each rank has."""

import pytest

from mini_dist.collectives import ring_all_reduce
from mini_dist.course.draw.svg import Words
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import collective_stepper, stepper
from mini_dist.ranks.ledger.steps import steps
from mini_dist.ranks.watch import watch


def names(numbers, size=4):
    return [stepper.name_of(number, size) for number in numbers]


def test_a_ring_reduce_scatter_by_hand():
    """Rank 1 starts chunk a, each step adds a rank's term, and after three steps rank 0 has it."""
    film = stepper.film("ring_reduce_scatter", 4)
    assert [len(step) for step in film.messages] == [4, 4, 4]
    way_of_a = [
        (m.source, m.target, *names(m.numbers))
        for step in film.messages
        for m in step
        if names(m.numbers)[0].startswith("a")
    ]
    assert way_of_a == [(1, 2, "a1"), (2, 3, "a12"), (3, 0, "a123")]
    assert names(film.has[0][0]) == ["a0", "b0", "c0", "d0"]
    assert "a0123" in names(film.has[3][0])
    assert all("a0123" not in names(film.has[2][rank]) for rank in range(4))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("collective", stepper.COLLECTIVES)
def test_in_the_end_everyone_has_its_result_and_nobody_has_what_it_was_not_sent(
    collective, num_ranks
):
    film = stepper.film(collective, num_ranks)
    everyone = "".join(map(str, range(num_ranks)))
    chunks = "abcd"[:num_ranks]
    for rank, has in enumerate(names(row, num_ranks) for row in film.has[-1]):
        if collective.endswith("all_reduce"):
            assert has == [chunk + everyone for chunk in chunks]
        elif collective == "ring_all_gather":
            assert has == [f"{chunk}{owner}" for owner, chunk in enumerate(chunks)]
        elif collective == "ring_reduce_scatter":
            assert chunks[rank] + everyone in has
        else:
            assert {f"{chunks[rank]}{source}" for source in range(num_ranks)} <= set(has)
    for step, row in enumerate(film.has):
        for rank, numbers in enumerate(row):
            heard = {rank}  # ranks whose terms can have arrived by now
            for messages in reversed(film.messages[:step]):
                heard |= {m.source for m in messages if m.target in heard}
            assert all(who in heard for n in numbers for _, who in stepper.terms_of(n, num_ranks))


def test_its_steps_are_those_of_the_ledger():
    run = watch(ring_all_reduce, 4).run
    film = stepper.film("ring_all_reduce", 4)
    expected = [[(m.source, m.target) for m in step] for step in steps(run.ledger)]
    assert [[(m.source, m.target) for m in step] for step in film.messages] == expected


def test_no_collective_has_more_steps_than_the_control():
    longest = max(len(stepper.film(name, 4).messages) for name in stepper.COLLECTIVES)
    assert longest == stepper.MOST_STEPS


def test_picture_and_table_follow_the_step():
    shown = collective_stepper(collective="ring_all_gather", num_ranks=3, step=2)
    assert repr(shown.picture) == "ring_all_gather, 3 ranks, step 2 of 2: 3 messages"
    assert "rank 2 → rank 0" in shown.html and ">b1</td>" in shown.html
    shown.change(step=6)  # A step past the end shows the last step.
    assert "step 2 of 2" in repr(shown.picture)
    boxes = [mark.text for mark in shown.picture.panels[0].marks if isinstance(mark, Words)]
    assert "has after step 2 of 2" in boxes and "b₁" in boxes
    with pytest.raises(ParameterError, match="num_ranks"):
        shown.change(num_ranks=5)


def test_its_control_turns_the_page():
    pytest.importorskip("ipywidgets")
    shown = collective_stepper(num_ranks=2)
    controls, (picture, _) = (part.children for part in shown.view.children)
    before = picture.value
    controls[-1].value = 2
    assert shown.values["step"] == 2 and picture.value != before
