"""Lesson 20: answers that wait for the link, hold too much or leave gaps are told so."""

import sys

import cloudpickle
import pytest

from mini_dist import check
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong_read, wrong_place = Wrong(), Wrong()
right_read, right_place = Right("read_ahead"), Right("offsets")


# ---- read ahead ---------------------------------------------------------------------------------


@wrong_read("Nothing is hidden")
def waits_at_once(x, layers, load):
    for number, layer in enumerate(layers):
        x = layer(x, load(number).wait())
    return x


@wrong_read("begin to load the next one, before this layer computes")
def asks_two_layers_at_a_time(x, layers, load):
    for first in range(0, len(layers), 2):
        pair = [load(n) for n in range(first, min(first + 2, len(layers)))]
        for number, arriving in enumerate(pair, first):
            weight = arriving.wait()
            x = layers[number](x, weight)
            del weight
    return x


@wrong_read("elements are held where")
def asks_for_all(x, layers, load):
    arriving = [load(number) for number in range(len(layers))]
    for layer, one in zip(layers, arriving):
        x = layer(x, one.wait())
    return x


@wrong_read("elements are held where")
def two_ahead(x, layers, load):
    arriving = [load(number) for number in range(min(2, len(layers)))]
    for number, layer in enumerate(layers):
        weight = arriving.pop(0).wait()
        if number + 2 < len(layers):
            arriving.append(load(number + 2))
        x = layer(x, weight)
        del weight
    return x


@wrong_read("elements are held where")
def keeps_the_last(x, layers, load):
    kept, arriving = [], load(0) if layers else None
    for number, layer in enumerate(layers):
        kept.append(arriving.wait())
        if number + 1 < len(layers):
            arriving = load(number + 1)
        x = layer(x, kept[-1])
    return x


@wrong_read("A weight was loaded twice")
def asks_again(x, layers, load):
    for number, layer in enumerate(layers):
        load(number)
        x = layer(x, load(number).wait())
    return x


@wrong_read("an empty list has no first layer")
def goes_one_too_far(x, layers, load):
    arriving = load(0)
    for number, layer in enumerate(layers):
        weight = arriving.wait()
        arriving = load(number + 1)
        x = layer(x, weight)
    return x


@wrong_read("an empty list has no first layer")
def forgets_that_there_may_be_none(x, layers, load):
    arriving = load(0)
    for number, layer in enumerate(layers):
        weight = arriving.wait()
        if number + 1 < len(layers):
            arriving = load(number + 1)
        x = layer(x, weight)
        del weight
    return x


@wrong_read("Each layer computes once, in order")
def stops_before_the_last(x, layers, load):
    arriving = load(0) if layers else None
    for number, layer in enumerate(layers[:-1]):
        weight = arriving.wait()
        arriving = load(number + 1)
        x = layer(x, weight)
    return x


@wrong_read("Wrong result")
def takes_the_first_x(x, layers, load):
    out, arriving = x, load(0) if layers else None
    for number, layer in enumerate(layers):
        weight = arriving.wait()
        if number + 1 < len(layers):
            arriving = load(number + 1)
        out = layer(x, weight)
        del weight
    return out


@wrong_read("wait() was called twice")
def waits_twice(x, layers, load):
    arriving = load(0) if layers else None
    for number, layer in enumerate(layers):
        arriving.wait()
        weight = arriving.wait()
        if number + 1 < len(layers):
            arriving = load(number + 1)
        x = layer(x, weight)
    return x


@right_read
def asks_before_it_waits_for_the_one_before(x, layers, load):
    arriving = load(0) if layers else None
    for number, layer in enumerate(layers):
        coming = load(number + 1) if number + 1 < len(layers) else None
        x = layer(x, arriving.wait())
        arriving = coming
    return x


@right_read
def by_recursion(x, layers, load):
    def rest(x, number, arriving):
        if number == len(layers):
            return x
        weight = arriving.wait()
        arriving = load(number + 1) if number + 1 < len(layers) else None
        x = layers[number](x, weight)
        del weight
        return rest(x, number + 1, arriving)

    return rest(x, 0, load(0)) if layers else x


@right_read
def by_a_generator(x, layers, load):
    def weights():
        arriving = load(0)
        for number in range(1, len(layers)):
            weight = arriving.wait()
            arriving = load(number)
            yield weight
            del weight
        yield arriving.wait()

    if layers:
        ready = weights()
        for layer in layers:
            x = layer(x, next(ready))
    return x


@right_read
def with_a_dictionary(x, layers, load):
    there = {}
    for number in range(len(layers) + 1):
        weight = there.pop(number - 1).wait() if number else None
        if number < len(layers):
            there[number] = load(number)
        if number:
            x = layers[number - 1](x, weight)
        weight = None
    return x


# ---- place tensors ------------------------------------------------------------------------------


def lives_with(a, b):
    return a[1] < b[2] and b[1] < a[2]


def lowest_places(tensors, order):
    place = {}
    for number in order:
        size = tensors[number][0]
        beside = [i for i in place if lives_with(tensors[i], tensors[number])]
        candidates = sorted({0, *(place[i] + tensors[i][0] for i in beside)})
        for at in candidates:
            if all(at + size <= place[i] or at >= place[i] + tensors[i][0] for i in beside):
                place[number] = at
                break
    return [place[number] for number in range(len(tensors))]


@wrong_place("Each tensor has its own memory")
def one_after_the_other(tensors):
    places, end = [], 0
    for size, _, _ in tensors:
        places.append(end)
        end += size
    return places


@wrong_place("pairs of tensors overlap while both live")
def all_at_zero(tensors):
    return [0] * len(tensors)


@wrong_place("pairs of tensors overlap while both live")
def looks_at_begins_only(tensors):
    place = {}
    for number in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        size, begin, _ = tensors[number]
        beside = [i for i in place if tensors[i][1] == begin]
        place[number] = max((place[i] + tensors[i][0] for i in beside), default=0)
    return [place[number] for number in range(len(tensors))]


@wrong_place("when the tensors begin")
def in_the_order_of_birth(tensors):
    return lowest_places(tensors, range(len(tensors)))


@wrong_place("the smallest tensor comes first")
def the_smallest_first(tensors):
    return lowest_places(tensors, sorted(range(len(tensors)), key=lambda i: tensors[i][0]))


@wrong_place("the longest life comes first")
def the_longest_life_first(tensors):
    lives = sorted(range(len(tensors)), key=lambda i: tensors[i][1] - tensors[i][2])
    return lowest_places(tensors, lives)


@wrong_place("look only at the last end")
def never_in_a_gap(tensors):
    place = {}
    for number in sorted(range(len(tensors)), key=lambda i: -tensors[i][0]):
        beside = [i for i in place if lives_with(tensors[i], tensors[number])]
        place[number] = max((place[i] + tensors[i][0] for i in beside), default=0)
    return [place[number] for number in range(len(tensors))]


@wrong_place("as long as it lives")
def an_end_still_lives(tensors):
    longer = [(size, begin, end + 1) for size, begin, end in tensors]
    return lowest_places(longer, sorted(range(len(tensors)), key=lambda i: -tensors[i][0]))


@wrong_place("0 or more")
def below_zero(tensors):
    return [-1] * len(tensors)


@wrong_place("Return a list of")
def returns_the_end(tensors):
    return sum(size for size, _, _ in tensors)


@right_place
def by_candidates(tensors):
    return lowest_places(tensors, sorted(range(len(tensors)), key=lambda i: -tensors[i][0]))


@right_place
def by_steps_up(tensors):
    place = [None] * len(tensors)
    for _, number in sorted((-size, n) for n, (size, _, _) in enumerate(tensors)):
        at, moved = 0, True
        while moved:
            moved = False
            for other, start in enumerate(place):
                if start is None or not lives_with(tensors[other], tensors[number]):
                    continue
                if at < start + tensors[other][0] and start < at + tensors[number][0]:
                    at, moved = start + tensors[other][0], True
        place[number] = at
    return place


@right_place
def from_the_top_down(tensors):
    places = by_candidates(tensors)
    end = max((p + size for p, (size, _, _) in zip(places, tensors)), default=0)
    return [end - p - size for p, (size, _, _) in zip(places, tensors)]


@right_place
def the_best_of_several_orders(tensors):
    def end(places):
        return max((p + size for p, (size, _, _) in zip(places, tensors)), default=0)

    keys = (
        lambda i: -tensors[i][0],
        lambda i: (-tensors[i][0], tensors[i][1] - tensors[i][2]),
        lambda i: -tensors[i][0] * (tensors[i][2] - tensors[i][1]),
    )
    tries = [lowest_places(tensors, sorted(range(len(tensors)), key=key)) for key in keys]
    return min(tries, key=end)


WRONG = [
    (name, fn, says)
    for name, wrong in (("read_ahead", wrong_read), ("offsets", wrong_place))
    for fn, says in wrong.answers
]
RIGHT = [(each.name, fn) for each in (right_read, right_place) for fn in each.answers]


@pytest.mark.parametrize("name, fn, says", WRONG, ids=[fn.__name__ for _, fn, _ in WRONG])
def test_a_wrong_answer_is_refused_with_the_hint_that_helps(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint and "0 tensors" not in str(verdict), verdict


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_a_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict
