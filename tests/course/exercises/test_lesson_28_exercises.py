"""Lesson 28: gradients must be right, and a thousand GPUs must average them in time."""

import sys
from datetime import timedelta
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import all_reduce
from mini_dist.strategies.data_parallel import Overlapped
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

wrong, right = Wrong(), Right("gradients_at_scale")


def backward(model, batches, loss_of):
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def with_grad(model):
    return [p for p in model.parameters() if p.grad is not None]


def divided(parameters, group):
    for p in parameters:
        p.grad /= group.size()


# ---- values -------------------------------------------------------------------------------------


@wrong("divide by group.size()")
def adds(model, batches, loss_of, group):
    backward(model, batches, loss_of)
    for p in with_grad(model):
        dist.all_reduce(p.grad, group=group)


@wrong("divide each loss by len(batches)")
def adds_micro_batches(model, batches, loss_of, group):
    for batch in batches:
        loss_of(model, batch).backward()
    for p in with_grad(model):
        p.grad = all_reduce(p.grad, group, op="mean")


@wrong("nothing was averaged")
def stays_alone(model, batches, loss_of, group):
    backward(model, batches, loss_of)


@wrong("such a .grad stays None")
def fills_with_zeros(model, batches, loss_of, group):
    backward(model, batches, loss_of)
    for p in trained(model):
        p.grad = all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group, op="mean")


@wrong("leave the averages there")
def leaves_nothing(model, batches, loss_of, group):
    backward(model, batches, loss_of)
    for p in model.parameters():
        p.grad = None


@wrong("ask p.requires_grad")
def hooks_what_is_frozen(model, batches, loss_of, group):
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: None)


def with_hooks(model, batches, loss_of, group, leave, remove=True):
    """Run the last backward with a hook on each parameter that calls leave(p)."""
    backward(model, batches[:-1], lambda *a: loss_of(*a) * (len(batches) - 1) / len(batches))
    hooks = [p.register_post_accumulate_grad_hook(leave) for p in trained(model)]
    (loss_of(model, batches[-1]) / len(batches)).backward()
    for hook in hooks if remove else ():
        hook.remove()


@wrong("a parameter that the last micro-batch does not use")
def forgets_who_was_used_earlier(model, batches, loss_of, group):
    under_way = []

    def leave(p):
        under_way.append((p, dist.all_reduce(p.grad, group=group, async_op=True)))

    with_hooks(model, batches, loss_of, group, leave)
    for p, work in under_way:
        work.wait()
        p.grad /= group.size()


def in_flight(model, batches, loss_of, group, remove=True, send=None):
    """Start the all-reduces correctly; the arguments can introduce mistakes."""
    under_way = {}

    def leave(p):
        under_way[p] = (send or dist.all_reduce)(p.grad, group=group, async_op=True)

    with_hooks(model, batches, loss_of, group, leave, remove)
    for p in trained(model):
        if p.grad is not None and p not in under_way:
            leave(p)
    return under_way


@wrong(".remove() them")
def leaves_hooks(model, batches, loss_of, group):
    for p, work in in_flight(model, batches, loss_of, group, remove=False).items():
        work.wait()
        p.grad /= group.size()


@wrong("not the mean over ranks and micro-batches")
def divides_before_it_waits(model, batches, loss_of, group):
    under_way = in_flight(model, batches, loss_of, group)
    divided([p for p in under_way if p.grad is not None], group)
    for p, work in under_way.items():
        work.wait()
        p.grad *= 1.5


@wrong("only gradients")
def steps_as_well(model, batches, loss_of, group):
    for p, work in in_flight(model, batches, loss_of, group).items():
        work.wait()
        p.grad /= group.size()
        p.data -= p.grad


@wrong("A barrier moves nothing")
def stops_at_a_barrier(model, batches, loss_of, group):
    dist.barrier(group=group)
    for p, work in in_flight(model, batches, loss_of, group).items():
        work.wait()
        p.grad /= group.size()


# ---- time ---------------------------------------------------------------------------------------


@wrong("let a hook")
def after_backward(model, batches, loss_of, group):
    backward(model, batches, loss_of)
    for p in with_grad(model):
        p.grad = all_reduce(p.grad, group, op="mean")


@wrong("async_op=True, keep the handles")
def waits_in_the_hook(model, batches, loss_of, group):
    done = set()

    def leave(p):
        dist.all_reduce(p.grad, group=group)
        done.add(p)

    with_hooks(model, batches, loss_of, group, leave)
    for p in trained(model):
        if p.grad is not None and p not in done:
            leave(p)
    divided(with_grad(model), group)


@wrong("only their sum travels, with the last micro-batch")
def each_micro_batch(model, batches, loss_of, group):
    sums = dict.fromkeys(trained(model), 0)
    for batch in batches:
        under_way = in_flight(model, [batch], loss_of, group)
        for p, work in under_way.items():
            work.wait()
            sums[p] = sums[p] + p.grad / (len(batches) * group.size())
        model.zero_grad()
    for p, total in sums.items():
        p.grad = total if torch.is_tensor(total) else None


@wrong("travel as float32")
def as_float32(model, batches, loss_of, group):
    def send(grad, group, async_op):
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        work = dist.all_reduce(wide, group=group, async_op=True)
        return work, wide

    for p, (work, wide) in in_flight(model, batches, loss_of, group, send=send).items():
        work.wait()
        p.grad.copy_(wide / group.size())


@wrong("complete late")
def in_one_bucket(model, batches, loss_of, group):
    used = [p for p in trained(model) if p is not getattr(model, "spare", None)]
    under_way, parameters, ready = [], used, {}

    def leave(p):
        ready[p] = None
        if len(ready) == len(parameters):
            flat = torch.cat([q.grad.flatten() for q in ready])
            under_way.append((dist.all_reduce(flat, group=group, async_op=True), flat))

    with_hooks(model, batches, loss_of, group, leave)
    for p in parameters:
        if p.grad is not None and p not in ready:
            leave(p)
    for work, flat in under_way:
        work.wait()
        for p, part in zip(ready, flat.split([q.numel() for q in ready])):
            p.grad.copy_(part.view_as(p) / group.size())


@wrong("a value")
def looks_at_a_value(model, batches, loss_of, group):
    for p, work in in_flight(model, batches, loss_of, group).items():
        work.wait()
        p.grad /= group.size()
        assert p.grad.norm().item() < 1e9


@wrong("let a hook")
def scattered_and_gathered(model, batches, loss_of, group):
    """Send as many bytes as an all-reduce, but half of them after backward."""
    under_way, n = {}, group.size()

    def leave(p):
        flat = torch.nn.functional.pad(p.grad.flatten(), (0, -p.numel() % n))
        mine = flat.new_empty(len(flat) // n)
        work = dist.reduce_scatter_tensor(mine, flat, group=group, async_op=True)
        under_way[p] = mine, flat, work

    with_hooks(model, batches, loss_of, group, leave)
    for p in trained(model):
        if p.grad is not None and p not in under_way:
            leave(p)
    gathers = []
    for mine, flat, work in under_way.values():
        work.wait()
        mine /= n
        gathers.append(dist.all_gather_into_tensor(flat, mine, group=group, async_op=True))
    for work, (p, (_, flat, _)) in zip(gathers, under_way.items()):
        work.wait()
        p.grad = flat[: p.numel()].view_as(p)


# ---- right --------------------------------------------------------------------------------------


@right
def in_buckets_of_a_quarter_of_a_gigabyte(model, batches, loss_of, group):
    *earlier, last = batches
    for batch in earlier:
        (loss_of(model, batch) / len(batches)).backward()
    bucket, under_way, left = [], [], set()

    def send():
        flat = torch.cat([p.grad.flatten() for p in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        under_way.append((list(bucket), flat, work))
        left.update(bucket)
        bucket.clear()

    def ready(p):
        bucket.append(p)
        if sum(q.grad.nbytes for q in bucket) > 1 << 28:
            send()

    hooks = [
        p.register_post_accumulate_grad_hook(ready) for p in model.parameters() if p.requires_grad
    ]
    (loss_of(model, last) / len(batches)).backward()
    while hooks:
        hooks.pop().remove()
    waiting = {*left, *bucket}
    bucket += [p for p in model.parameters() if p.grad is not None and p not in waiting]
    if bucket:
        send()
    for parameters, flat, work in under_way:
        work.wait()
        flat /= group.size()
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = part.view_as(p)


@right
def divides_in_the_loss(model, batches, loss_of, group):
    share = 1 / (len(batches) * group.size())
    handles, seen = [], set()
    for number, batch in enumerate(batches):
        hooks = []
        if number == len(batches) - 1:
            for p in model.parameters():
                if p.requires_grad:

                    def leave(p):
                        seen.add(p)
                        handles.append(dist.all_reduce(p.grad, group=group, async_op=True))

                    hooks.append(p.register_post_accumulate_grad_hook(leave))
        (share * loss_of(model, batch)).backward()
        [hook.remove() for hook in hooks]
    for p in model.parameters():
        if p.grad is not None and p not in seen:
            handles.append(dist.all_reduce(p.grad, group=group, async_op=True))
    [handle.wait() for handle in handles]


@right
def waits_by_a_future_and_with_a_timeout(model, batches, loss_of, group):
    handles, seen = [], set()
    backward(model, batches[:-1], lambda *args: loss_of(*args) * (len(batches) - 1) / len(batches))

    def leave(p):
        seen.add(p)
        p.grad /= group.size()
        handles.append(dist.all_reduce(p.grad, group=group, async_op=True))

    hooks = [p.register_post_accumulate_grad_hook(leave) for p in trained(model)]
    (loss_of(model, batches[-1]) / len(batches)).backward()
    [hook.remove() for hook in hooks]
    [leave(p) for p in with_grad(model) if p not in seen]
    first, *rest = handles
    first.get_future().wait()
    [handle.wait(timeout=timedelta(seconds=60)) for handle in rest]


@wrong("one all_reduce of it is still under way")
def waits_for_all_but_the_first(model, batches, loss_of, group):
    """The first all-reduce is done by the time anyone looks, but the function doesn't ensure it."""
    backward(model, batches, loss_of)
    divided(with_grad(model), group)
    first, *rest = (dist.all_reduce(p.grad, group=group, async_op=True) for p in with_grad(model))
    [handle.wait() for handle in rest]


@pytest.mark.parametrize("fn, says", wrong.answers, ids=wrong.names())
def test_a_known_mistake_is_refused_and_named(fn, says):
    verdict = check.gradients_at_scale.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("fn", right.answers)
def test_a_right_answer_may_look_otherwise(fn):
    verdict = check.gradients_at_scale.judge(fn)
    assert verdict.state == "right", verdict


def by_the_wrapper(model, batches, loss_of, group):
    model = Overlapped(model, group)
    with model.no_sync():
        backward(model, batches[:-1], loss_of)
    (loss_of(model, batches[-1]) / len(batches)).backward()
    model.finish()


def test_the_library_s_wrapper_is_not_the_learner_s_work():
    verdict = check.gradients_at_scale.judge(by_the_wrapper)
    assert verdict.state == "wrong" and "write that part yourself" in verdict.hint, verdict


def test_the_printed_solution_is_right_and_the_lesson_says_what_it_takes():
    text = (Path(__file__).parents[3] / "lessons/28_the_same_cell.md").read_text()
    verdict = check.gradients_at_scale.judge(solutions.gradients_at_scale)
    assert verdict.state == "right", verdict
    after = check.gradients_at_scale.judge(after_backward)
    for each, words in ((after, "takes {} as long"), (verdict, "our solution takes {}")):
        assert words.format(each.lines[-1].measured) in text
