"""Lesson 09: mistakes in sharding a layer, a pair or the loss get a hint that names them."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from mini_dist import check, collectives
from mini_dist.collectives import all_reduce, ops, recv, ring_all_reduce, send
from mini_dist.model.loss import IGNORE_INDEX, TokenLoss
from mini_dist.strategies import tensor_parallel
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

linear = functional.linear

# -- column -----------------------------------------------------------------------------------

column = Wrong()


@column("does nothing forward and adds up backward")
def enters_without_copy(x, weight, bias, group):
    return linear(x, weight, bias)


@column("a rank keeps the outputs of its own rows")
def gathers_the_outputs(x, weight, bias, group):
    return ops.join(linear(ops.copy(x, group), weight, bias), group, dim=-1)


@column("The bias is missing")
def column_without_bias(x, weight, bias, group):
    return linear(ops.copy(x, group), weight)


@column("its own: nothing is to be added")
def copies_the_weight(x, weight, bias, group):
    return linear(ops.copy(x, group), ops.copy(weight, group), bias)


@column("nothing else")
def adds_up_forward(x, weight, bias, group):
    return ops.all_reduce(linear(x, weight, bias), group)


@column("No gradient reaches x")
def column_detaches(x, weight, bias, group):
    return linear(x.detach(), weight, bias)


@column("Forward needs none")
def column_gathers_what_all_have(x, weight, bias, group):
    return linear(ops.all_gather(ops.split(x, group, dim=-1), group, dim=-1), weight, bias)


@column("x [2, 3, ...]")  # torch.mm takes only matrices.
def column_of_matrices_only(x, weight, bias, group):
    if x.dim() == 1:
        return linear(ops.copy(x, group), weight, bias)
    y = torch.mm(ops.copy(x, group), weight.T)
    return y if bias is None else y + bias


@column("numbers were rounded on the way")
def column_adds_up_in_float32(x, weight, bias, group):
    copied = x.view_as(x)
    copied.register_hook(lambda dx: all_reduce(dx.float(), group).to(dx.dtype))
    return linear(copied, weight, bias)


@column("The result is float32")
def column_in_float32(x, weight, bias, group):
    bias = None if bias is None else bias.float()
    return linear(ops.copy(x, group).float(), weight.float(), bias)


@column("A barrier moves nothing")
def column_waits_for_all(x, weight, bias, group):
    collectives.barrier(group)
    return linear(ops.copy(x, group), weight, bias)


@column("A barrier moves nothing")
def column_waits_for_all_in_the_backend(x, weight, bias, group):
    dist.barrier(group)
    return linear(ops.copy(x, group), weight, bias)


@column("Right, but 0 bytes were sent in forward and 3456 in backward")
def column_adds_up_twice(x, weight, bias, group):
    x = ops.copy(x, group)
    x.register_hook(lambda dx: ops.all_reduce(dx, group) / group.size())
    return linear(x, weight, bias)


@column("it is no tensor")
def column_returns_two(x, weight, bias, group):
    return linear(ops.copy(x, group), weight, bias), bias


right_column = Right("column_linear")


@right_column
def column_with_its_own_backward(x, weight, bias, group):
    class Column(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return linear(x, weight, bias)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            rows = dy.reshape(-1, dy.shape[-1])
            dx = all_reduce(dy @ weight, group, algorithm="ring")
            dbias = None if bias is None else rows.sum(0)
            return dx, rows.T @ x.reshape(-1, x.shape[-1]), dbias

    return Column.apply(x, weight, bias)


@right_column
def column_with_a_hook(x, weight, bias, group):
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda dx: all_reduce(dx, group))
    y = x @ weight.T
    return y if bias is None else y + bias


@right_column
def column_by_einsum(x, weight, bias, group):
    y = torch.einsum("...d,fd->...f", ops.copy(x, group), weight)
    return y if bias is None else bias + y


@right_column
def column_output_by_output(x, weight, bias, group):
    x = ops.copy(x, group)
    y = torch.stack([(x * row).sum(-1) for row in weight], -1)
    return y if bias is None else y + bias


# -- row --------------------------------------------------------------------------------------

row = Wrong()


@row("The bias is there 4 times")
def bias_before_the_sum(x, weight, bias, group):
    return ops.all_reduce(linear(x, weight, bias), group)


@row("The bias gets its gradient on some ranks only")
def bias_on_rank_0(x, weight, bias, group):
    return ops.all_reduce(linear(x, weight, bias if group.rank() == 0 else None), group)


@row("The bias is missing")
def row_without_bias(x, weight, bias, group):
    return ops.all_reduce(linear(x, weight), group)


@row("one summand of the result")
def keeps_its_summand(x, weight, bias, group):
    return linear(x, weight, bias)


@row("are not differentiable")
def adds_up_behind_autograds_back(x, weight, bias, group):
    y = all_reduce(linear(x, weight), group)
    return y if bias is None else y + bias


@row("Nothing is added")
def row_copies_x(x, weight, bias, group):
    y = ops.all_reduce(linear(ops.copy(x, group), weight), group)
    return y if bias is None else y + bias


@row("every rank needs the whole sum")
def row_scatters(x, weight, bias, group):
    return ops.reduce_scatter(linear(x, weight), group, dim=-1)


@row("x [2, 3, ...]")
def row_of_matrices_only(x, weight, bias, group):
    y = ops.all_reduce(x @ weight.T if x.dim() == 1 else torch.mm(x, weight.T), group)
    return y if bias is None else y + bias


@row("numbers were rounded on the way")
def row_sends_halves(x, weight, bias, group):
    y = ops.all_reduce(linear(x, weight).float(), group).to(x.dtype)
    return y if bias is None else y + bias


@row("one all-reduce forward is enough")
def row_adds_up_twice(x, weight, bias, group):
    y = linear(x, weight)
    y = passed_on(y, all_reduce(all_reduce(y.detach(), group) / group.size(), group))
    return y if bias is None else y + bias


@row("one all-reduce forward is enough")
def row_gathers_summands(x, weight, bias, group):
    y = ops.join(linear(x, weight)[None], group, dim=0)
    total = y.sum(0) if y.requires_grad else y
    return total if bias is None else total + bias


@row("864 in backward: one all-reduce forward is enough")
def row_scatters_and_joins(x, weight, bias, group):
    y = ops.join(ops.reduce_scatter(linear(x, weight), group, dim=-1), group, dim=-1)
    return y if bias is None else y + bias


@row("A barrier moves nothing")
def row_waits_for_all(x, weight, bias, group):
    y = ops.all_reduce(linear(x, weight), group)
    collectives.barrier(group)
    return y if bias is None else y + bias


right_row = Right("row_linear")


@right_row
def row_by_the_backend(x, weight, bias, group):
    y = linear(x, weight)
    total = y.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    y = y + (total - y).detach()
    return y if bias is None else y + bias


def passed_on(y, total):
    """Return the value of total with the gradient of y."""
    return y + (total - y).detach()


@right_row
def row_with_a_gradient_passed_on(x, weight, bias, group):
    y = linear(x, weight)
    y = passed_on(y, all_reduce(y.detach(), group))
    return y if bias is None else y + bias


@right_row
def row_through_a_root(x, weight, bias, group):
    y = linear(x, weight)
    total = collectives.reduce(y.detach(), 0, group)
    total = collectives.broadcast(torch.zeros_like(y) if total is None else total, 0, group)
    y = passed_on(y, total)
    return y if bias is None else y + bias


@right_row
def row_with_a_share_of_the_bias(x, weight, bias, group):
    """Add 1/n of the bias's value to each summand, and its gradient after the sum."""
    share = None if bias is None else bias.detach() / group.size()
    y = ops.all_reduce(linear(x, weight, share), group)
    return y if bias is None else y + (bias - bias.detach())


@right_row
def row_with_its_own_backward(x, weight, bias, group):
    class Row(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return ring_all_reduce(x @ weight.T, group)

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            return dy @ weight, torch.einsum("...d,...f->df", dy, x)

    y = Row.apply(x, weight)
    return y if bias is None else y + bias


# -- the pair ---------------------------------------------------------------------------------

pair_copy, pair_reduce = Wrong(), Wrong()


def function(forward, backward):
    """Return a differentiable function of (x, group), given its forward and backward."""

    def call(x, group):
        class Pair(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return forward(x, group)

            @staticmethod
            def backward(ctx, dy):
                return backward(dy, group)

        return Pair.apply(x)

    return call


def as_it_is(x, group):
    return x.clone()


@pair_copy("its gradient is the sum of all their dy")
def copy_that_is_an_identity(x, group):
    return function(as_it_is, as_it_is)(x, group)


@pair_copy("divided by the number of ranks")
def copy_that_averages(x, group):
    return function(as_it_is, lambda dy, group: all_reduce(dy, group, op="mean"))(x, group)


@pair_copy("copy changes nothing in forward")
def copy_that_adds_up(x, group):
    return function(all_reduce, all_reduce)(x, group)


@pair_copy("some rank it is no tensor")
def copy_that_returns_nothing(x, group):
    function(as_it_is, all_reduce)(x, group)


@pair_reduce("4 times too large")
def reduce_both_ways(x, group):
    return function(all_reduce, all_reduce)(x, group)


@pair_reduce("No gradient comes back")
def reduce_without_autograd(x, group):
    return all_reduce(x, group)


@pair_reduce("wrote into its input")
def reduce_in_place(x, group):
    def in_place(x, group):
        return x.copy_(all_reduce(x, group))

    return function(in_place, as_it_is)(x, group)


@pair_reduce("divided by the number of ranks")
def reduce_that_shares_the_gradient(x, group):
    return function(all_reduce, lambda dy, group: dy / group.size())(x, group)


@pair_reduce("The result is the sum")
def reduce_to_a_mean(x, group):
    return function(lambda x, group: all_reduce(x, group, op="mean"), as_it_is)(x, group)


@pair_copy("an invalid gradient")
def copy_that_flattens_dy(x, group):
    return function(as_it_is, lambda dy, group: all_reduce(dy.flatten(), group))(x, group)


@pair_copy("numbers were rounded on the way")
def copy_that_adds_up_in_half(x, group):
    def in_half(dy, group):
        return all_reduce(dy.bfloat16(), group).to(dy.dtype)

    return function(as_it_is, in_half)(x, group)


@pair_copy("more than one all-reduce takes")
def copy_that_averages_a_sum(x, group):
    def twice(dy, group):
        return all_reduce(all_reduce(dy, group), group) / group.size()

    return function(as_it_is, twice)(x, group)


@pair_copy("A barrier moves nothing")
def copy_that_waits_for_all(x, group):
    def waits(dy, group):
        collectives.barrier(group)
        return all_reduce(dy, group)

    return function(as_it_is, waits)(x, group)


@pair_copy("library's Copy.forward: write that part")
def copy_by_the_library_s_class(x, group):
    return ops.Copy.apply(x, group, "auto")


@pair_reduce("an invalid gradient")
def reduce_that_flattens_dy(x, group):
    return function(all_reduce, lambda dy, group: dy.flatten())(x, group)


@pair_reduce("numbers were rounded on the way")
def reduce_in_float32(x, group):
    def in_float32(x, group):
        return all_reduce(x.float(), group).to(x.dtype)

    return function(in_float32, as_it_is)(x, group)


@pair_reduce("A barrier moves nothing")
def reduce_that_waits_for_all(x, group):
    def waits(x, group):
        collectives.barrier(group)
        return all_reduce(x, group)

    return function(waits, as_it_is)(x, group)


@pair_reduce("library's")
def reduce_by_the_library_s_class(x, group):
    return ops.AllReduce.apply(x, group, "auto")


@pair_reduce("it is no tensor")
def reduce_that_returns_a_list(x, group):
    return [function(all_reduce, as_it_is)(x, group)]


right_copy, right_reduce = Right("copy"), Right("differentiable_all_reduce")


@right_copy
def copy_with_a_hook(x, group):
    y = x.view_as(x)
    if y.requires_grad:
        y.register_hook(lambda dy: all_reduce(dy, group))
    return y


def through_rank_0(x, group):
    x = x.contiguous()
    total = collectives.reduce(x, 0, group)
    return collectives.broadcast(x if total is None else total, 0, group)


@right_copy
def copy_through_a_root(x, group):
    return function(as_it_is, through_rank_0)(x, group)


@right_copy
def copy_of_which_the_partner_is_the_library_s(x, group):
    return function(as_it_is, ops.all_reduce)(x, group)


@right_copy
def copy_by_a_ring(x, group):
    return function(lambda x, _: x.view_as(x), ring_all_reduce)(x, group)


@right_copy
def copy_by_hand(x, group):
    def by_hand(dy, group):
        total = dy.clone(memory_format=torch.contiguous_format)
        for r in range(1, group.size()):
            if group.rank() == r:
                send(total, 0, group)
                total = recv(torch.empty_like(total), 0, group)
        if group.rank() == 0:
            others = [recv(torch.empty_like(total), r, group) for r in range(1, group.size())]
            total = total + sum(others)
            for r in range(1, group.size()):
                send(total, r, group)
        return total

    return function(as_it_is, by_hand)(x, group)


@right_reduce
def reduce_with_a_gradient_passed_on(x, group):
    return passed_on(x, all_reduce(x.detach(), group))


@right_reduce
def reduce_divides_before_it_sums(x, group):
    n = group.size()
    return function(lambda x, group: all_reduce(x / n, group) * n, as_it_is)(x, group)


@right_reduce
def reduce_through_a_root(x, group):
    return function(through_rank_0, as_it_is)(x, group)


@right_reduce
def reduce_gathers_at_the_last_rank(x, group):
    def gathers(x, group):
        last = group.size() - 1
        everyones = collectives.gather(x[None].contiguous(), last, group)
        total = x.contiguous() if everyones is None else everyones.sum(0)
        return collectives.star_broadcast(total, last, group)

    return function(gathers, lambda dy, _: dy)(x, group)


# -- the loss ---------------------------------------------------------------------------------

loss = Wrong()


def cross_entropy(logits, targets, group, highest=None, add=ops.all_reduce, ignored=IGNORE_INDEX):
    """Compute the right loss; the arguments can replace parts with wrong ones."""
    width = logits.shape[-1]
    if highest is None:
        highest = all_reduce(logits.detach().amax(-1), group, op="max")
    logits = logits - highest[..., None]
    local = targets - group.rank() * width
    mine = (0 <= local) & (local < width)
    at_target = logits.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0]
    at_target = at_target.where(mine, 0)
    exp_sum, at_target = add(torch.stack([logits.exp().sum(-1), at_target]), group)
    losses = exp_sum.log() - at_target
    counts = targets != ignored
    return TokenLoss(losses[counts].sum(), counts.sum())


@loss("more than three numbers a token")
def gathers_the_logits(logits, targets, group):
    logits = ops.join(logits, group, dim=-1).flatten(0, -2)
    total = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
    return TokenLoss(total, (targets != IGNORE_INDEX).sum())


@loss("their sums do not fit together")
def subtracts_its_own_maximum(logits, targets, group):
    return cross_entropy(logits, targets, group, highest=logits.detach().amax(-1))


@loss("exp overflows")
def subtracts_nothing(logits, targets, group):
    zero = collectives.all_reduce(logits.detach().amax(-1), group, op="max") * 0
    return cross_entropy(logits, targets, group, highest=zero)


@loss("fewer than three numbers per token")
def sends_no_maximum(logits, targets, group):
    return cross_entropy(logits, targets, group, highest=torch.zeros(()))


@loss("a sum over ranks has to be one that autograd knows")
def adds_up_without_autograd(logits, targets, group):
    return cross_entropy(logits, targets, group, add=all_reduce)


@loss("Targets of IGNORE_INDEX do not count")
def counts_what_is_ignored(logits, targets, group):
    return cross_entropy(logits, targets, group, ignored=-1)


@loss("The ranks have different losses")
def keeps_its_part_of_the_sum(logits, targets, group):
    highest = all_reduce(logits.detach().amax(-1), group, op="max")

    def add(sums, group):
        ops.all_reduce(sums, group)
        return sums

    return cross_entropy(logits, targets, group, highest=highest, add=add)


@loss("That is the mean")
def returns_the_mean(logits, targets, group):
    total, num_tokens = cross_entropy(logits, targets, group)
    return TokenLoss(total / num_tokens, num_tokens)


@loss("Return TokenLoss")
def returns_the_total_only(logits, targets, group):
    return cross_entropy(logits, targets, group).total


@loss("counted once a rank")
def adds_up_the_counts(logits, targets, group):
    total, num_tokens = cross_entropy(logits, targets, group)
    return TokenLoss(total, all_reduce(num_tokens, group))


@loss("The result is float32")
def loss_in_float32(logits, targets, group):
    return cross_entropy(logits.float(), targets, group)


@loss("numbers were rounded on the way")
def loss_sends_float32(logits, targets, group):
    def add(sums, group):
        return ops.all_reduce(sums.float(), group).to(sums.dtype)

    return cross_entropy(logits, targets, group, add=add)


@loss("A barrier moves nothing")
def loss_waits_for_all(logits, targets, group):
    collectives.barrier(group)
    return cross_entropy(logits, targets, group)


@loss("Return TokenLoss")
def loss_returns_three(logits, targets, group):
    return (*cross_entropy(logits, targets, group), targets)


@loss("Return TokenLoss")
def loss_counts_nothing(logits, targets, group):
    return cross_entropy(logits, targets, group).total, None


@loss("one number")
def loss_of_each_token(logits, targets, group):
    whole = ops.join(logits, group, dim=-1)
    losses = functional.cross_entropy(whole.flatten(0, -2), targets.flatten(), reduction="none")
    return TokenLoss(losses, (targets != IGNORE_INDEX).sum())


@loss("more than three numbers a token")
def sends_a_maximum_twice(logits, targets, group):
    highest = all_reduce(logits.detach().amax(-1), group, op="max")
    return cross_entropy(logits, targets, group, highest=all_reduce(highest, group, op="max"))


@loss("library's embedding")
def asks_the_library_for_a_part(logits, targets, group):
    tensor_parallel.ideas.embedding(targets.clamp(min=0), logits.flatten(0, -2).T, group)
    return cross_entropy(logits, targets, group)


right_loss = Right("vocab_parallel_cross_entropy")


@right_loss
def loss_with_its_own_backward(logits, targets, group):
    """The gradient of a logit is its share of the sum of exp, minus 1 for the target."""
    width, counts = logits.shape[-1], targets != IGNORE_INDEX
    local = targets - group.rank() * width
    here = (local >= 0) & (local < width)

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            highest = all_reduce(logits.amax(-1), group, op="max")
            shifted = logits - highest[..., None]
            of_target = torch.zeros_like(highest)
            of_target[here] = shifted[here].gather(-1, local[here][:, None])[:, 0]
            total = all_reduce(shifted.exp().sum(-1), group)
            of_target = all_reduce(of_target, group)
            share = shifted.exp() / total[..., None]
            share[here, local[here]] -= 1
            ctx.save_for_backward(share * counts[..., None])
            return (total.log() - of_target)[counts].sum()

        @staticmethod
        def backward(ctx, dy):
            return ctx.saved_tensors[0] * dy

    return TokenLoss(Loss.apply(logits), int(counts.sum()))


@right_loss
def loss_of_sums_one_by_one(logits, targets, group):
    tokens = logits.reshape(-1, logits.shape[-1])
    wanted = targets.reshape(-1)
    words = torch.arange(tokens.shape[1]) + group.rank() * tokens.shape[1]
    here = (wanted[:, None] == words).to(tokens.dtype)
    highest = all_reduce(tokens.detach().max(dim=1).values, group, op="max")
    tokens = tokens - highest[:, None]
    total = ops.all_reduce(tokens.exp().sum(1), group)
    at_target = ops.all_reduce((tokens * here).sum(1), group)
    counts = (wanted != IGNORE_INDEX).to(tokens.dtype)
    return TokenLoss(((total.log() - at_target) * counts).sum(), counts.sum())


@right_loss
def loss_of_logsumexps(logits, targets, group):
    mine = logits.logsumexp(-1)
    highest = all_reduce(mine.detach(), group, op="max")
    place = (targets - group.rank() * logits.shape[-1]).unsqueeze(-1)
    here = torch.where(torch.arange(logits.shape[-1]) == place, logits, 0).sum(-1)
    both = ops.all_reduce(torch.stack([(mine - highest).exp(), here], -1), group)
    losses = highest + both[..., 0].log() - both[..., 1]
    losses = torch.where(targets == IGNORE_INDEX, 0, losses)
    return losses.sum(), (targets != IGNORE_INDEX).sum().item()


@right_loss
def loss_through_a_root(logits, targets, group):
    highest = through_rank_0_max(logits.detach().amax(-1), group)

    def add(sums, group):
        return passed_on(sums, through_rank_0(sums.detach(), group))

    return cross_entropy(logits, targets, group, highest=highest, add=add)


def through_rank_0_max(x, group):
    highest = collectives.reduce(x, 0, group, op="max")
    return collectives.broadcast(x if highest is None else highest, 0, group)


RIGHT = [
    (right.name, fn)
    for right in (right_column, right_row, right_copy, right_reduce, right_loss)
    for fn in right.answers
]


@pytest.mark.parametrize("name, fn", RIGHT, ids=[fn.__name__ for _, fn in RIGHT])
def test_an_unusual_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


# ---------------------------------------------------------------------------------------------

EXERCISES = {
    "column_linear": column,
    "row_linear": row,
    "copy": pair_copy,
    "differentiable_all_reduce": pair_reduce,
    "vocab_parallel_cross_entropy": loss,
}


@pytest.mark.parametrize(
    "name, fn, says",
    [(name, *answer) for name, wrong in EXERCISES.items() for answer in wrong.answers],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_answer_is_refused_with_the_hint_that_names_it(name, fn, says):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def as_shipped(name):
    home = {"copy": ops.copy, "differentiable_all_reduce": ops.all_reduce}

    def cell(*args):
        return home.get(name, getattr(tensor_parallel, name, None))(*args)

    return cell


@pytest.mark.parametrize("name", EXERCISES)
def test_the_library_s_own_is_called_so(name):
    assert getattr(check, name).judge(as_shipped(name)).state == "still the library's"
