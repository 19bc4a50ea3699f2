"""Lesson 11: whoever merges, passes on or deals out wrongly is told what is wrong."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist import context_parallel as library
from mini_dist.collectives import exchange, send, start, wait
from mini_dist.context_parallel import Partial
from mini_dist.context_parallel.ring import add_block
from tests.exercises import solutions_11
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions_11)

# -- merge ------------------------------------------------------------------------------------

wrong_merge = Wrong()


@wrong_merge("plain mean")
def a_plain_mean(a, b):
    return Partial((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))


@wrong_merge("sum of the outputs")
def a_sum(a, b):
    return Partial(a.out + b.out, torch.logaddexp(a.lse, b.lse))


@wrong_merge("which is a logarithm")
def weighs_by_lse(a, b):
    total = (a.lse + b.lse)[..., None]
    out = (a.lse[..., None] * a.out + b.lse[..., None] * b.out) / total
    return Partial(out, torch.logaddexp(a.lse, b.lse))


@wrong_merge("wrong way round")
def swaps_the_shares(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(torch.lerp(b.out, a.out, (b.lse - lse).exp()[..., None]), lse)


@wrong_merge("do not add up")
def adds_the_logarithms(a, b):
    return Partial(library.Partial(*solutions_11.merge(a, b)).out, a.lse + b.lse)


@wrong_merge("larger one only")
def keeps_the_larger_lse(a, b):
    return Partial(solutions_11.merge(a, b).out, torch.maximum(a.lse, b.lse))


@wrong_merge("The next merge needs it")
def forgets_the_logarithm(a, b):
    return Partial(solutions_11.merge(a, b).out, a.lse.exp() + b.lse.exp())


@wrong_merge("overflows for large scores")
def exponentiates_what_may_be_900(a, b):
    of_a, of_b = a.lse.exp()[..., None], b.lse.exp()[..., None]
    out = (of_a * a.out + of_b * b.out) / (of_a + of_b)
    return Partial(out, torch.log(a.lse.exp() + b.lse.exp()))


@wrong_merge("over no keys at all: There is inf or nan")
def divides_by_what_may_be_nothing(a, b):
    difference = torch.log(a.lse.exp() / b.lse.exp())  # 0 / 0 far below
    share_b = 1 / (1 + (a.lse - b.lse).exp())
    lse = b.lse - share_b.log()
    return Partial(torch.lerp(a.out, b.out, share_b[..., None]), lse + 0 * difference.nan_to_num())


@wrong_merge("wrote into a or b")
def writes_into_a(a, b):
    merged = solutions_11.merge(a, b)
    a.out.copy_(merged.out)
    return merged


@wrong_merge("Return a pair")
def returns_the_output_only(a, b):
    return solutions_11.merge(a, b).out


# -- a step of the ring -----------------------------------------------------------------------

wrong_step = Wrong()


def neighbours(group):
    return (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()


@wrong_step("nothing travels while the kernel works")
def attends_then_exchanges(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    total = add_block(total, q, kv, block, kernel)
    return total, exchange(kv, after, before, group)


@wrong_step("nothing travels while the kernel works")
def exchanges_then_attends(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    came = exchange(kv, after, before, group)
    return add_block(total, q, kv, block, kernel), came


@wrong_step("did not begin with its own keys")
def attends_to_what_arrives(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    came = exchange(kv, after, before, group)
    return add_block(total, q, came, block, kernel), came


@wrong_step("turns the other way")
def sends_to_the_rank_before(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, after)], sends=[(kv, before)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


@wrong_step("got its own keys and values back")
def returns_the_old_ones(total, q, kv, block, kernel, group):
    return solutions_11.ring_step(total, q, kv, block, kernel, group)[0], kv


@wrong_step("Return two things, in this order")
def returns_them_in_the_other_order(*args):
    return solutions_11.ring_step(*args)[::-1]


@wrong_step("Return two things, in this order")
def returns_the_attention_only(*args):
    return solutions_11.ring_step(*args)[0]


@wrong_step("receive into a tensor of its own")
def receives_into_what_it_attends_to(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    leaving = kv.clone()
    handles = start(group, receives=[(kv, before)], sends=[(leaving, after)])
    total = add_block(total, q, leaving, block, kernel)
    wait(handles)
    return total, kv


@wrong_step("wait(handles) after add_block")
def never_waits(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    start(group, receives=[(arriving, before)], sends=[(kv, after)])
    return add_block(total, q, kv, block, kernel), arriving


@wrong_step("is what was in `total` still in")
def forgets_what_came_before(total, q, kv, block, kernel, group):
    total, kv = solutions_11.ring_step(None, q, kv, block, kernel, group)
    return total, kv


@wrong_step("keys *and* values")
def sends_the_keys_only(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    came = exchange(kv[0].contiguous(), after, before, group)
    return add_block(total, q, kv, block, kernel), torch.stack([came, came])


@wrong_step("In a ring each rank sends to the rank after it only")
def sends_to_everyone(total, q, kv, block, kernel, group):
    rank, size = group.rank(), group.size()
    came = {}
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        came[source] = exchange(kv, to, source, group)
    return add_block(total, q, kv, block, kernel), came[(rank - 1) % size]


@wrong_step("Nothing was sent")
def sends_nothing(total, q, kv, block, kernel, group):
    return add_block(total, q, kv, block, kernel), kv


@wrong_step("send kv on once a step")
def sends_it_twice(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    exchange(kv, after, before, group)
    return solutions_11.ring_step(total, q, kv, block, kernel, group)


@wrong_step("backend's own all_gather")
def the_backends_all_gather(total, q, kv, block, kernel, group):
    parts = [torch.empty_like(kv) for _ in range(group.size())]
    dist.all_gather(parts, kv, group=group)
    return add_block(total, q, kv, block, kernel), parts[group.rank() - 1]


@wrong_step("everyone sends first and waits for a receiver")
def sends_first(total, q, kv, block, kernel, group):
    send(kv, neighbours(group)[0], group)
    return total, kv


# -- the zig-zag order ------------------------------------------------------------------------

wrong_order = Wrong()


def dealt(seq_len, size, second):
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([chunks[r], chunks[second(r)]]) for r in range(size)])


@wrong_order("contiguous pieces")
def contiguous_pieces(seq_len, size):
    return torch.arange(seq_len).view(size, -1)


@wrong_order("like cards")
def like_cards(seq_len, size):
    return torch.arange(seq_len).view(-1, size).T


@wrong_order("chunk 2*size-1-r")
def not_mirrored(seq_len, size):
    return dealt(seq_len, size, lambda r: size + r)


@wrong_order("on no rank, or on two")
def off_by_one(seq_len, size):
    return dealt(seq_len, size, lambda r: 2 * size - 2 - r)


@wrong_order("early chunk comes first")
def late_chunk_first(seq_len, size):
    chunks = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([chunks[2 * size - 1 - r], chunks[r]]) for r in range(size)])


@wrong_order("A chunk stays in the order")
def late_chunk_backwards(seq_len, size):
    chunks = torch.arange(seq_len).view(2 * size, -1)
    late = chunks.flip(0, 1)
    return torch.stack([torch.cat([chunks[r], late[r]]) for r in range(size)])


@wrong_order("rank r should hold chunks r and 2*size-1-r")
def ranks_in_the_other_order(seq_len, size):
    return solutions_11.zigzag(seq_len, size).flip(0)


@wrong_order("Return a table with 2 rows")
def chunks_only(seq_len, size):
    return torch.arange(seq_len).view(2 * size, -1)


@wrong_order("48 tokens on 4 ranks")
def knows_only_two_ranks(seq_len, size):
    early, *middle, late = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([early, late]), torch.cat(middle)][:size])


EXERCISES = {"merge": wrong_merge, "ring_step": wrong_step, "zigzag": wrong_order}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_learners_solution_is_right(name):
    verdict = getattr(check, name)(getattr(solutions_11, name))
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_the_librarys_own_is_recognised(name):
    fn = {
        "merge": lambda a, b: library.merge(a, b),
        "ring_step": lambda *args: library.ring_step(*args),
        "zigzag": lambda seq_len, size: library.zigzag(seq_len, size),
    }[name]
    assert getattr(check, name)(fn).state == "still the library's"


@pytest.mark.parametrize(
    "name, fn, says",
    [(name, fn, says) for name, wrong in EXERCISES.items() for fn, says in wrong.answers],
    ids=[f"{name}-{fn}" for name, wrong in EXERCISES.items() for fn in wrong.names()],
)
def test_a_wrong_answer_gets_the_right_hint(name, fn, says):
    verdict = getattr(check, name)(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_and_skeletons_are_there(name, capsys):
    exercise = getattr(check, name)
    for show in (exercise.hint, lambda: exercise.hint(2), exercise.skeleton):
        show()
        assert capsys.readouterr().out.strip()
