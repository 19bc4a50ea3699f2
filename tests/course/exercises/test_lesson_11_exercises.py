"""Lesson 11: mistakes in merging, passing on or dealing out get a hint that names them."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import barrier, exchange, recv, send, start, wait
from mini_dist.strategies import context_parallel as library
from mini_dist.strategies.context_parallel import Partial
from mini_dist.strategies.context_parallel.ring import add_block
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

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
    return Partial(library.Partial(*solutions.merge(a, b)).out, a.lse + b.lse)


@wrong_merge("covers only the larger one")
def keeps_the_larger_lse(a, b):
    return Partial(solutions.merge(a, b).out, torch.maximum(a.lse, b.lse))


@wrong_merge("The next merge needs it")
def forgets_the_logarithm(a, b):
    return Partial(solutions.merge(a, b).out, a.lse.exp() + b.lse.exp())


@wrong_merge("overflows for large scores")
def exponentiates_what_may_be_900(a, b):
    of_a, of_b = a.lse.exp()[..., None], b.lse.exp()[..., None]
    out = (of_a * a.out + of_b * b.out) / (of_a + of_b)
    return Partial(out, torch.log(a.lse.exp() + b.lse.exp()))


@wrong_merge("over no keys at all: There is inf or nan")
def divides_by_what_may_be_nothing(a, b):
    difference = torch.log(a.lse.exp() / b.lse.exp())  # 0 / 0 if both are far below 0
    share_b = 1 / (1 + (a.lse - b.lse).exp())
    lse = b.lse - share_b.log()
    return Partial(torch.lerp(a.out, b.out, share_b[..., None]), lse + 0 * difference.nan_to_num())


@wrong_merge("wrote into a or b")
def writes_into_a(a, b):
    merged = solutions.merge(a, b)
    a.out.copy_(merged.out)
    return merged


@wrong_merge("Return a pair")
def returns_the_output_only(a, b):
    return solutions.merge(a, b).out


@wrong_merge("the first over no keys at all: There is inf or nan")
def divides_by_as_share(a, b):
    shrink = (b.lse - a.lse).exp()  # e^inf where a covers no keys
    out = (a.out + shrink[..., None] * b.out) / (1 + shrink)[..., None]
    return Partial(out, torch.logaddexp(a.lse, b.lse))


@wrong_merge("There is inf or nan")
def overflows_in_float32_only(a, b):
    top = torch.maximum(a.lse, b.lse) if a.lse.dtype == torch.float64 else 0
    of_a, of_b = (a.lse - top).exp(), (b.lse - top).exp()
    total = (of_a + of_b).log() + top
    out = (of_a[..., None] * a.out + of_b[..., None] * b.out) / (of_a + of_b)[..., None]
    return Partial(out, total)


@wrong_merge("each for some queries")
def knows_only_a_whole_empty_side(a, b):
    if (a.lse == -torch.inf).all():
        return b
    more = b.lse - a.lse
    return Partial(
        torch.lerp(a.out, b.out, more.sigmoid()[..., None]),
        a.lse + torch.nn.functional.softplus(more),
    )


@wrong_merge("Right to seven digits only")
def in_float32(a, b):
    of_a, of_b = (Partial(*(tensor.float() for tensor in part)) for part in (a, b))
    return Partial(*(tensor.double() for tensor in solutions.merge(of_a, of_b)))


@wrong_merge("the dtype of a and b")
def returns_float32(a, b):
    return Partial(*(tensor.float() for tensor in solutions.merge(a, b)))


@wrong_merge("give the weight one with [..., None]")
def forgets_the_head_dim(a, b):
    lse = torch.logaddexp(a.lse, b.lse)
    return Partial(torch.lerp(a.out, b.out, (b.lse - lse).exp()), lse)


@wrong_merge("out = (e^lse_a out_a + e^lse_b out_b)")
def with_shares_of_the_largest(a, b):
    share = (b.lse - torch.maximum(a.lse, b.lse)).exp()[..., None]
    return Partial(torch.lerp(a.out, b.out, share), torch.logaddexp(a.lse, b.lse))


@wrong_merge("Return a pair")
def returns_nothing(a, b):
    solutions.merge(a, b)


right_merge = Right("merge")


@right_merge
def by_a_sigmoid(a, b):
    share = torch.sigmoid(b.lse - a.lse).unsqueeze(-1)
    return Partial(a.out + share * (b.out - a.out), torch.logaddexp(a.lse, b.lse))


@right_merge
def by_a_softmax_over_the_two(a, b):
    both = torch.stack([a.lse, b.lse])
    out = torch.einsum("pbns,pbnsh->bnsh", both.softmax(0), torch.stack([a.out, b.out]))
    return out, both.logsumexp(0)


@right_merge
def with_the_larger_taken_out(a, b):
    top = torch.maximum(a.lse, b.lse)
    of_a, of_b = torch.exp(a.lse - top), torch.exp(b.lse - top)
    total = of_a + of_b
    out = ((of_a / total) * a.out.movedim(-1, 0) + (of_b / total) * b.out.movedim(-1, 0)).movedim(
        0, -1
    )
    return [out, top + total.log()]


@right_merge
def in_double_whatever_comes(a, b):
    lse = torch.logaddexp(a.lse.double(), b.lse.double())
    shares = [(part.lse - lse).exp().unsqueeze(-1) for part in (a, b)]
    out = shares[0] * a.out + shares[1] * b.out
    return Partial(out.to(a.out.dtype), lse.to(a.lse.dtype))


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


@wrong_step("runs the other way")
def sends_to_the_rank_before(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    handles = start(group, receives=[(arriving, after)], sends=[(kv, before)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


@wrong_step("got its own keys and values back")
def returns_the_old_ones(total, q, kv, block, kernel, group):
    return solutions.ring_step(total, q, kv, block, kernel, group)[0], kv


@wrong_step("Return two things, in this order")
def returns_them_in_the_other_order(*args):
    return solutions.ring_step(*args)[::-1]


@wrong_step("Return two things, in this order")
def returns_the_attention_only(*args):
    return solutions.ring_step(*args)[0]


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
    total, kv = solutions.ring_step(None, q, kv, block, kernel, group)
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
    return solutions.ring_step(total, q, kv, block, kernel, group)


@wrong_step("backend's own all_gather")
def the_backends_all_gather(total, q, kv, block, kernel, group):
    parts = [torch.empty_like(kv) for _ in range(group.size())]
    dist.all_gather(parts, kv, group=group)
    return add_block(total, q, kv, block, kernel), parts[group.rank() - 1]


@wrong_step("everyone sends first and waits for a receiver")
def sends_first(total, q, kv, block, kernel, group):
    send(kv, neighbours(group)[0], group)
    return total, kv


@wrong_step("block is None")
def passes_on_only_what_it_attends_to(total, q, kv, block, kernel, group):
    if block is None:
        return total, kv
    return solutions.ring_step(total, q, kv, block, kernel, group)


@wrong_step("block is None")
def sends_only_what_it_attends_to(total, q, kv, block, kernel, group):
    """The next rank waits for the block in vain."""
    if block is None:
        return total, recv(kv, neighbours(group)[1], group)
    return solutions.ring_step(total, q, kv, block, kernel, group)


@wrong_step("nothing travels while the kernel works")
def waits_before_the_kernel(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    wait(start(group, receives=[(arriving, before)], sends=[(kv, after)]))
    return add_block(total, q, kv, block, kernel), arriving


@wrong_step("nothing travels while the kernel works")
def starts_after_the_kernel(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    total = add_block(total, q, kv, block, kernel)
    wait(start(group, receives=[(arriving, before)], sends=[(kv, after)]))
    return total, arriving


@wrong_step("nothing travels while the kernel works")
def receives_after_the_kernel(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    leaving = start(group, sends=[(kv, after)])
    total = add_block(total, q, kv, block, kernel)
    arriving = recv(kv, before, group)
    wait(leaving)
    return total, arriving


@wrong_step("nothing travels while the kernel works")
def joins_its_thread_before_the_kernel(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    came = []
    thread = threading.Thread(target=lambda: came.append(exchange(kv, after, before, group)))
    thread.start()
    thread.join()
    return add_block(total, q, kv, block, kernel), came[0]


@wrong_step("Only 1,152 bytes were sent where 4,608 are needed")
def sends_16_bits(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv, dtype=torch.bfloat16)
    handles = start(group, receives=[(arriving, before)], sends=[(kv.bfloat16(), after)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving.to(kv.dtype)


@wrong_step("in the dtype that it has")
def sends_64_bits(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    leaving, arriving = kv.double(), torch.empty_like(kv, dtype=torch.float64)
    handles = start(group, receives=[(arriving, before)], sends=[(leaving, after)])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving.to(kv.dtype)


@wrong_step("A barrier moves nothing")
def waits_for_everyone(total, q, kv, block, kernel, group):
    total, arriving = solutions.ring_step(total, q, kv, block, kernel, group)
    dist.barrier(group=group)
    return total, arriving


@wrong_step("A barrier moves nothing")
def waits_for_everyone_by_our_barrier(total, q, kv, block, kernel, group):
    barrier(group)
    return solutions.ring_step(total, q, kv, block, kernel, group)


@wrong_step("wait(handles) after add_block")
def waits_for_what_arrives_only(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.empty_like(kv)
    receive, _ = start(group, receives=[(arriving, before)], sends=[(kv, after)])
    total = add_block(total, q, kv, block, kernel)
    receive.wait()
    return total, arriving


@wrong_step("library's Hop")
def uses_the_hop_of_the_backward(total, q, kv, block, kernel, group):
    hop = library.ring.Hop(kv, group)
    total = add_block(total, q, kv, block, kernel)
    return total, hop.arrived()


@wrong_step("Return two things, in this order")
def returns_nothing_of_a_step(*args):
    solutions.ring_step(*args)


right_step = Right("ring_step")


@right_step
def sends_in_a_thread(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(exchange, kv, after, before, group)
        total = add_block(total, q, kv, block, kernel)
        return total, came.result()


@right_step
def attends_in_a_thread(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    merged = []
    worker = threading.Thread(
        target=lambda: merged.append(add_block(total, q, kv, block, kernel)), daemon=True
    )
    worker.start()
    came = exchange(kv, after, before, group)
    worker.join()
    return merged[0], came


@right_step
def keys_and_values_apart(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = [torch.empty_like(part) for part in kv]
    handles = start(group, [(part, before) for part in arriving], [(part, after) for part in kv])
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, torch.stack(arriving)


@right_step
def with_torchs_own_messages(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = kv.new_empty(kv.shape)
    receive = dist.irecv(arriving, group=group, group_src=before)
    send_it = dist.isend(kv, group=group, group_dst=after)
    total = add_block(total, q, kv, block, kernel)
    for work in (send_it, receive):
        work.wait()
    return [total, arriving]


@right_step
def from_any_source(total, q, kv, block, kernel, group):
    after = neighbours(group)[0]
    arriving = torch.empty_like(kv)
    handles = [group.recv_anysource([arriving], 0), group.send([kv], after, 0)]
    total = add_block(total, q, kv, block, kernel)
    wait(handles)
    return total, arriving


@right_step
def merges_by_itself(total, q, kv, block, kernel, group):
    after, before = neighbours(group)
    arriving = torch.zeros_like(kv)
    handles = start(group, sends=[(kv.clone(), after)]) + start(
        group, receives=[(arriving, before)]
    )
    if block is not None:
        rows, columns = block.queries, block.keys
        part = kernel.forward(
            q[:, :, rows], kv[0][:, :, columns], kv[1][:, :, columns], block.causal
        )
        if total is not None:
            out, lse = total.out.clone(), total.lse.clone()
            merged = solutions.merge(Partial(out[:, :, rows], lse[:, :, rows]), part)
            out[:, :, rows], lse[:, :, rows] = merged
            part = Partial(out, lse)
        total = part
    wait(handles)
    return total, arriving


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
    return solutions.zigzag(seq_len, size).flip(0)


@wrong_order("Return a table with 2 rows")
def chunks_only(seq_len, size):
    return torch.arange(seq_len).view(2 * size, -1)


@wrong_order("96 tokens on 12 ranks")
def knows_only_two_ranks(seq_len, size):
    early, *middle, late = torch.arange(seq_len).view(2 * size, -1)
    return torch.stack([torch.cat([early, late]), torch.cat(middle)][:size])


@wrong_order("Positions are whole numbers")
def as_floats(seq_len, size):
    return solutions.zigzag(seq_len, size).float()


@wrong_order("Positions are whole numbers")
def divides_with_a_rest(seq_len, size):
    n = seq_len / (2 * size)
    starts = [(r * n, (2 * size - 1 - r) * n) for r in range(size)]
    return [[start + i for start in pair for i in range(int(n))] for pair in starts]


@wrong_order("Return a table with 2 rows")
def returns_no_table(seq_len, size):
    solutions.zigzag(seq_len, size)


@wrong_order("Return a table with 2 rows")
def returns_one_flat_list(seq_len, size):
    return solutions.zigzag(seq_len, size).flatten().tolist()


@wrong_order("10 tokens on 5 ranks")
def knows_only_chunks_of_two_and_more(seq_len, size):
    length = max(seq_len // (2 * size), 2)
    chunks = torch.arange(2 * size * length).view(2 * size, -1)
    return torch.cat([chunks[:size], chunks.flip(0)[:size]], dim=1)


@wrong_order("early chunk comes first")
def pairs_of_two_from_both_ends(seq_len, size):
    length = seq_len // (2 * size)
    late = [seq_len - 1 - torch.arange(r * length, (r + 1) * length) for r in range(size)]
    early = torch.arange(seq_len // 2).view(size, -1)
    return torch.cat([early, torch.stack(late)], 1)


right_order = Right("zigzag")


@right_order
def lists_of_numbers(seq_len, size):
    n = seq_len // (2 * size)
    return [
        [*range(r * n, (r + 1) * n), *range(seq_len - (r + 1) * n, seq_len - r * n)]
        for r in range(size)
    ]


@right_order
def tuples_of_numpys_numbers(seq_len, size):
    chunks = np.arange(seq_len).reshape(2 * size, -1)
    return tuple(tuple(np.concatenate([chunks[r], chunks[-1 - r]])) for r in range(size))


@right_order
def a_list_of_tensors(seq_len, size):
    chunks = torch.arange(seq_len).chunk(2 * size)
    return [torch.cat([chunks[r], chunks[~r]]) for r in range(size)]


@right_order
def by_who_owns_each_position(seq_len, size):
    chunk = torch.arange(seq_len, dtype=torch.int32) // (seq_len // (2 * size))
    owner = torch.minimum(chunk, 2 * size - 1 - chunk)
    return owner.argsort(stable=True).view(size, -1)


@right_order
def an_array(seq_len, size):
    first, second = np.split(np.arange(seq_len).reshape(2 * size, -1), 2)
    return np.hstack([first, second[::-1]])


EXERCISES = {"merge": wrong_merge, "ring_step": wrong_step, "zigzag": wrong_order}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_learners_solution_is_right(name):
    verdict = getattr(check, name)(getattr(solutions, name))
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


RIGHT = [(each.name, fn) for each in (right_merge, right_step, right_order) for fn in each.answers]


@pytest.mark.parametrize("name, fn", RIGHT, ids=[f"{name}-{fn.__name__}" for name, fn in RIGHT])
def test_another_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_hints_and_skeletons_are_there(name, capsys):
    exercise = getattr(check, name)
    for show in (exercise.hint, lambda: exercise.hint(2), exercise.skeleton):
        show()
        assert capsys.readouterr().out.strip()
