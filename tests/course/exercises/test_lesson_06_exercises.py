"""Lesson 06: answers that forget too little or the wrong thing are told what is still there."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from mini_dist import check
from mini_dist.collectives import all_reduce
from mini_dist.model import recompute
from mini_dist.strategies import precision
from mini_dist.strategies.data_parallel import flatten, mean, unflatten
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

forgotten = Wrong()


class Node(torch.autograd.Function):
    """The lesson's Forgetful; each faulty subclass changes one thing."""

    @staticmethod
    def forward(ctx, block, x):
        ctx.block, ctx.dice = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block(x)
        out.backward(grad)
        return None, x.grad


def again(ctx, x=None):
    """Run the block again with the same random numbers; return its output and its input."""
    x = (ctx.saved_tensors[0] if x is None else x).detach().requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng():
        torch.set_rng_state(ctx.dice)
        return ctx.block(x), x


@forgotten("73,728 bytes are kept for backward where the input's 8,192 do")
def keeps_everything(block, x):
    return block(x)


@forgotten("draw the same random numbers")
def the_lessons_own(block, x):
    return Node.apply(block, x)


@forgotten("perhaps forward's numbers once more")
def does_not_put_the_dice_back(block, x):
    class Careless(Node):
        @staticmethod
        def backward(ctx, grad):
            torch.set_rng_state(ctx.dice)
            return Node.backward(ctx, grad)

    return Careless.apply(block, x)


@forgotten("do not set a seed")
def sets_a_seed(block, x):
    class Seeded(Node):
        @staticmethod
        def forward(ctx, block, x):
            torch.manual_seed(1)
            return Node.forward(ctx, block, x)

        @staticmethod
        def backward(ctx, grad):
            torch.manual_seed(1)
            return Node.backward(ctx, grad)

    return Seeded.apply(block, x)


@forgotten("tensors from inside the block that live on: 2")
def records_in_forward_already(block, x):
    class Recorded(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.out = block(ctx.x)
            return ctx.out.detach()

        @staticmethod
        def backward(ctx, grad):
            ctx.out.backward(grad)
            return None, ctx.x.grad

    return Recorded.apply(block, x)


@forgotten("tensors from inside the block that live on: 1")
def keeps_the_mask_in_ctx(block, x):
    class Cached(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.middle = block, block[:3](x)
            ctx.save_for_backward(x)
            return block(x)

    return Cached.apply(block, x)


@forgotten("The block ran 2 times in forward")
def runs_it_twice_at_once(block, x):
    dice = torch.get_rng_state()
    with torch.no_grad():
        block(x)
    torch.set_rng_state(dice)
    return solutions.forget_and_repeat(block, x)


@forgotten("parameters have no gradient")
def asks_for_the_gradient_of_x_only(block, x):
    class OnlyX(Node):
        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad(), torch.random.fork_rng():
                torch.set_rng_state(ctx.dice)
                out = ctx.block(x)
            return None, torch.autograd.grad(out, x, grad)[0]

    return OnlyX.apply(block, x)


@forgotten("backward through the graph a second time")
def does_not_detach(block, x):
    class Attached(Node):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            x.retain_grad()
            with torch.enable_grad():
                out = ctx.block(x)
            out.backward(grad)
            return None, x.grad

    return Attached.apply(block, x)


@forgotten("The output is not block(x)")
def normalizes_in_forward(block, x):
    return Node.apply(block, x / x.norm())


@forgotten("Wrong gradients")
def forgets_the_factor_from_above(block, x):
    class Unweighted(Node):
        @staticmethod
        def backward(ctx, grad):
            return Node.backward(ctx, torch.ones_like(grad))

    return Unweighted.apply(block, x)


@forgotten("does not require grad")
def forgets_to_record(block, x):
    class Unrecorded(Node):
        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.block(x)
            out.backward(grad)
            return None, x.grad

    return Unrecorded.apply(block, x)


@forgotten("are gone: other micro-batches")
def overwrites_the_gradients(block, x):
    class Overwritten(Node):
        @staticmethod
        def backward(ctx, grad):
            out, x = again(ctx)
            wanted = [x, *ctx.block.parameters()]
            found = torch.autograd.grad(out, wanted, grad)
            for parameter, gradient in zip(wanted[1:], found[1:]):
                parameter.grad = gradient
            return None, found[0]

    return Overwritten.apply(block, x)


@forgotten("are gone: other micro-batches")
def zeroes_the_gradients(block, x):
    class Zeroed(Node):
        @staticmethod
        def backward(ctx, grad):
            ctx.block.zero_grad()
            out, x = again(ctx)
            out.backward(grad)
            return None, x.grad

    return Zeroed.apply(block, x)


@forgotten("in ctx, in a list, as a copy")
def hides_a_copy_in_ctx(block, x):
    class Hidden(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.dice = block, torch.get_rng_state()
            ctx.save_for_backward(x)
            for layer in block[:-1]:
                x = layer(x)
            ctx.hidden = [x.clone()]
            torch.set_rng_state(ctx.dice)
            return block(ctx.to_save[0])

    return Hidden.apply(block, x)


KEPT = []


@forgotten("in ctx, in a list, as a copy")
def keeps_a_list_of_its_own(block, x):
    layers = list(block)

    class Listed(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.dice = block, torch.get_rng_state()
            ctx.save_for_backward(x)
            KEPT.append(torch.nn.functional.linear(x, layers[0].weight))
            return block(x)

    return Listed.apply(block, x)


@forgotten("Each use of a block must save its own state")
def keeps_the_dice_with_the_block(block, x):
    class Shared(Node):
        @staticmethod
        def forward(ctx, block, x):
            block.dice = torch.get_rng_state()
            return Node.forward(ctx, block, x)

        @staticmethod
        def backward(ctx, grad):
            ctx.dice = ctx.block.dice
            out, x = again(ctx)
            out.backward(grad)
            return None, x.grad

    return Shared.apply(block, x)


@forgotten("Wrong gradients")
def keeps_the_input_in_half(block, x):
    class Half(Node):
        @staticmethod
        def forward(ctx, block, x):
            out = Node.forward(ctx, block, x)
            ctx.save_for_backward(x.bfloat16().to(x))
            return out

        @staticmethod
        def backward(ctx, grad):
            out, x = again(ctx)
            out.backward(grad)
            return None, x.grad

    return Half.apply(block, x)


@forgotten("library's Recompute.forward")
def derives_from_the_librarys_node(block, x):
    class Mine(recompute.Recompute):
        pass

    parameters = list(block.parameters())
    return Mine.apply(block, (x,), len(parameters), x, *parameters)


@pytest.mark.parametrize("fn, says", forgotten.answers, ids=forgotten.names())
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.forget_and_repeat.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


right_answers = Right("forget_and_repeat")
right_answers(solutions.forget_and_repeat)


@right_answers
def saves_the_dice_like_the_input(block, x):
    class Saved(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block = block
            ctx.save_for_backward(x, torch.get_rng_state())
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            x, ctx.dice = ctx.saved_tensors
            out, x = again(ctx, x)
            wanted = [x, *ctx.block.parameters()]
            found = torch.autograd.grad(out, wanted, grad)
            for parameter, gradient in zip(wanted[1:], found[1:], strict=True):
                before = parameter.grad
                parameter.grad = gradient if before is None else before + gradient
            return None, found[0]

    return Saved.apply(block, x)


@right_answers
def asks_torch_func_for_the_gradients(block, x):
    class Pulled(Node):
        @staticmethod
        def backward(ctx, grad):
            x, named = ctx.saved_tensors[0], dict(ctx.block.named_parameters())

            def run(values, x):
                return torch.func.functional_call(ctx.block, values, (x,))

            with torch.random.fork_rng():
                torch.set_rng_state(ctx.dice)
                _, pull = torch.func.vjp(run, {n: p.detach() for n, p in named.items()}, x)
            gradients, grad_of_x = pull(grad)
            for name, parameter in named.items():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad += gradients[name]
            return None, grad_of_x

    return Pulled.apply(block, x)


@right_answers
def parameters_are_inputs_of_the_node(block, x):
    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *parameters):
            ctx.block, ctx.dice = block, torch.get_rng_state()
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            out, x = again(ctx)
            return torch.autograd.grad(out, [x, *block.parameters()], grad)

    return Whole.apply(x, *block.parameters())


@right_answers
def puts_the_dice_back_by_hand(block, x):
    class ByHand(Node):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.dice, ctx.x = block, torch.get_rng_state(), x.detach().clone()
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            now = torch.get_rng_state()
            torch.set_rng_state(ctx.dice)
            x = ctx.x.requires_grad_()
            with torch.enable_grad():
                out = ctx.block(x)
            torch.set_rng_state(now)
            torch.autograd.backward(out, grad)
            return None, x.grad

    return ByHand.apply(block, x)


@pytest.mark.parametrize("fn", right_answers.answers, ids=lambda fn: fn.__name__)
def test_a_right_answer_is_right(fn):
    verdict = check.forget_and_repeat.judge(fn)
    assert verdict.state == "right", verdict


def test_pytorchs_checkpoint_is_not_an_answer():
    verdict = check.forget_and_repeat.judge(
        lambda block, x: checkpoint(block, x, use_reentrant=False)
    )
    assert verdict.state == "wrong" and "library's checkpoint" in verdict.hint, verdict


# ---- scaled_step --------------------------------------------------------------------------------

wrong_step, right_step = Wrong(), Right("scaled_step")
right_step(solutions.scaled_step)


def averaged(parameters, scaler, group, op="mean"):
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op=op) / scaler.scale


def norm_of(parameters):
    return torch.cat([p.grad.flatten() for p in parameters]).norm()


def clip(parameters, max_norm):
    norm = norm_of(parameters)
    for p in parameters:
        p.grad *= (max_norm / norm).clamp(max=1)


def skip(scaler):
    scaler.scale, scaler.good_steps = scaler.scale / scaler.factor, 0


def count(scaler):
    scaler.good_steps += 1
    if scaler.good_steps == scaler.growth_interval:
        scaler.scale, scaler.good_steps = scaler.scale * scaler.factor, 0


def finish(parameters, optimizer, scaler, max_norm):
    """Finish the step correctly, given averaged and unscaled gradients."""
    if not norm_of(parameters).isfinite():
        skip(scaler)
        return
    clip(parameters, max_norm)
    optimizer.step()
    count(scaler)


@wrong_step("or nan, and rank 0 steps while another skips")
def each_asks_its_own(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    overflowed = not norm_of(parameters).isfinite()
    averaged(parameters, scaler, group)
    if overflowed:
        return skip(scaler)
    clip(parameters, max_norm)
    optimizer.step()
    count(scaler)


@wrong_step("the others wait for its all-reduce forever")
def leaves_the_others_alone(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    if not norm_of(parameters).isfinite():
        return skip(scaler)
    averaged(parameters, scaler, group)
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("was made with an inf or nan")
def asks_for_inf_only(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    if any(p.grad.isinf().any() for p in parameters):
        return skip(scaler)
    clip(parameters, max_norm)
    optimizer.step()
    count(scaler)


@wrong_step("not even one of zeros")
def steps_with_zeros(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    good = norm_of(parameters).isfinite()
    if good:
        clip(parameters, max_norm)
    else:
        for p in parameters:
            p.grad.zero_()
    optimizer.step()
    count(scaler) if good else skip(scaler)


@wrong_step("First divide by scaler.scale, then take the norm")
def clips_before_it_unscales(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean")
    if not norm_of(parameters).isfinite():
        return skip(scaler)
    clip(parameters, max_norm)
    for p in parameters:
        p.grad /= scaler.scale
    optimizer.step()
    count(scaler)


@wrong_step("still belong to the scaled loss")
def never_unscales(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean")
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("Nothing is clipped")
def never_clips(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    finish(parameters, optimizer, scaler, 1e9)


@wrong_step("in which no gradient overflowed")  # A zero norm gives 0 * inf.
def always_clips(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    norm = norm_of(parameters)
    if norm.isfinite():
        for p in parameters:
            p.grad *= max_norm / norm
    finish(parameters, optimizer, scaler, 1e9)


@wrong_step("Each rank clips its own gradient")
def clips_before_it_averages(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad /= scaler.scale
    clip(parameters, max_norm)
    for p in parameters:
        p.grad = all_reduce(p.grad, group, op="mean")
    finish(parameters, optimizer, scaler, 1e9)


@wrong_step("steps with sums")
def steps_with_sums(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group, op="sum")
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("the ranks drift apart")
def never_averages(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    bad = torch.tensor(float(not norm_of(parameters).isfinite()))
    bad = all_reduce(bad, group, op="max")
    for p in parameters:
        p.grad /= scaler.scale
    if bad:
        return skip(scaler)
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("that / scaler.factor, once")
def never_halves(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    if norm_of(parameters).isfinite():
        finish(parameters, optimizer, scaler, max_norm)


@wrong_step("begins again at 0")
def goes_on_counting_after_an_overflow(parameters, optimizer, scaler, max_norm, group):
    parameters, good = list(parameters), scaler.good_steps
    averaged(parameters, scaler, group)
    overflowed = not norm_of(parameters).isfinite()
    finish(parameters, optimizer, scaler, max_norm)
    if overflowed:
        scaler.good_steps = good + 1


@wrong_step("growth_interval=2 of them in a row")
def grows_a_step_late(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    if not norm_of(parameters).isfinite():
        return skip(scaler)
    clip(parameters, max_norm)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps > scaler.growth_interval:
        scaler.scale, scaler.good_steps = scaler.scale * scaler.factor, 0


@wrong_step("growth_interval=2 of them in a row")
def never_begins_to_count_again(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    if not norm_of(parameters).isfinite():
        return skip(scaler)
    clip(parameters, max_norm)
    optimizer.step()
    scaler.good_steps += 1
    if scaler.good_steps >= scaler.growth_interval:
        scaler.scale *= scaler.factor


@wrong_step("stepped 2 times")
def steps_twice(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    if norm_of(parameters).isfinite():
        optimizer.step()
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("A barrier moves nothing")
def meets_first(parameters, optimizer, scaler, max_norm, group):
    dist.barrier(group=group)
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("average each gradient once")
def averages_twice(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    for p in parameters:
        p.grad = mean(p.grad, group)
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("numbers travel in the dtype")
def sends_half(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        p.grad = all_reduce(p.grad.bfloat16(), group, op="mean").to(p) / scaler.scale
    finish(parameters, optimizer, scaler, max_norm)


@wrong_step("Begin with parameters = list(parameters)")
def goes_through_them_twice(parameters, optimizer, scaler, max_norm, group):
    averaged(parameters, scaler, group)
    own = [p for each in optimizer.param_groups for p in each["params"]]
    if all(p.grad.isfinite().all() for p in own):
        norm = norm_of(own)
        for p in parameters:
            p.grad *= (max_norm / norm).clamp(max=1)
        optimizer.step()
        return count(scaler)
    skip(scaler)


@wrong_step("library's LossScaler.adjust")
def lets_the_scaler_do_it(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    averaged(parameters, scaler, group)
    good = norm_of(parameters).isfinite()
    if good:
        clip(parameters, max_norm)
        optimizer.step()
    scaler.adjust(not good)


@right_step
def in_one_flat_bucket(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    flat = flatten(parameters) / scaler.scale
    unflatten(mean(flat, group), parameters)
    finish(parameters, optimizer, scaler, max_norm)


@right_step
def asks_with_a_flag(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    bad = torch.tensor(sum(int((~p.grad.isfinite()).sum()) for p in parameters))
    bad = all_reduce(bad, group) > 0
    averaged(parameters, scaler, group)
    if bad:
        skip(scaler)
    else:
        clip(parameters, max_norm)
        optimizer.step()
        count(scaler)


@right_step
def with_torchs_clipping(parameters, optimizer, scaler, max_norm, group):
    parameters = list(parameters)
    for p in parameters:
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size() * scaler.scale
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    if norm.isfinite():
        optimizer.step()
    scaler.good_steps = scaler.good_steps + 1 if norm.isfinite() else 0
    if not norm.isfinite():
        scaler.scale /= scaler.factor
    elif scaler.good_steps == scaler.growth_interval:
        scaler.scale, scaler.good_steps = scaler.scale * scaler.factor, 0


@right_step
def clips_by_the_scaled_norm_and_limit(parameters, optimizer, scaler, max_norm, group):
    parameters, total = list(parameters), 0.0
    for p in parameters:
        p.grad = all_reduce(p.grad / group.size(), group)
        total += p.grad.square().sum().item()
    norm = total**0.5
    if norm != norm or norm == float("inf"):
        return skip(scaler)
    factor = 1 / scaler.scale
    if norm > max_norm * scaler.scale:
        factor = max_norm / norm
    for p in parameters:
        p.grad = p.grad * factor
    optimizer.step()
    count(scaler)


@pytest.mark.parametrize("fn, says", wrong_step.answers, ids=wrong_step.names())
def test_a_wrong_scaled_step_is_refused_with_the_hint_that_names_the_mistake(fn, says):
    verdict = check.scaled_step.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("fn", right_step.answers, ids=lambda fn: fn.__name__)
def test_a_right_scaled_step_is_right(fn):
    verdict = check.scaled_step.judge(fn)
    assert verdict.state == "right", verdict


def test_the_librarys_step_is_known():
    def under_another_name(*args):
        precision.scaled_step(*args)

    assert check.scaled_step.judge(under_another_name).state == "still the library's"
