"""Lesson 06: whoever forgets too little, or not the right thing, is told what is still there."""

import sys

import cloudpickle
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mini_dist import check
from tests.exercises import solutions_06 as solutions
from tests.exercises.wrong import Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

forgotten = Wrong()


class Node(torch.autograd.Function):
    """The lesson's Forgetful; its faulty children change one thing."""

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


@forgotten("73,728 bytes are kept for backward where the input's 8,192 do")
def keeps_everything(block, x):
    return block(x)


@forgotten("throw the same dice")
def the_lessons_own(block, x):
    return Node.apply(block, x)


@forgotten("perhaps those of forward once more")
def does_not_put_the_dice_back(block, x):
    class Careless(Node):
        @staticmethod
        def backward(ctx, grad):
            torch.set_rng_state(ctx.dice)
            return Node.backward(ctx, grad)

    return Careless.apply(block, x)


@forgotten("no seed is to be set")
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


@forgotten("Another output than block(x)")
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


@pytest.mark.parametrize("fn, says", forgotten.answers, ids=forgotten.names())
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.forget_and_repeat.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


def test_the_solution_is_right():
    verdict = check.forget_and_repeat.judge(solutions.forget_and_repeat)
    assert verdict.state == "right", verdict


def test_dice_that_are_saved_like_the_input_are_right_too():
    def saved(block, x):
        class Saved(Node):
            @staticmethod
            def forward(ctx, block, x):
                ctx.block = block
                ctx.save_for_backward(x, torch.get_rng_state())
                return block(x)

            @staticmethod
            def backward(ctx, grad):
                x, dice = ctx.saved_tensors
                x = x.detach().requires_grad_()
                with torch.enable_grad(), torch.random.fork_rng():
                    torch.set_rng_state(dice)
                    out = ctx.block(x)
                wanted = [x, *ctx.block.parameters()]
                found = torch.autograd.grad(out, wanted, grad)
                for parameter, gradient in zip(wanted[1:], found[1:], strict=True):
                    parameter.grad = gradient
                return None, found[0]

        return Saved.apply(block, x)

    assert check.forget_and_repeat.judge(saved).state == "right"


def test_pytorchs_checkpoint_is_not_an_answer():
    verdict = check.forget_and_repeat.judge(
        lambda block, x: checkpoint(block, x, use_reentrant=False)
    )
    assert verdict.state == "wrong" and "library's checkpoint" in verdict.hint, verdict
