"""An MoE layer of a GPT whose experts are distributed over a group of ranks.

Gradients. The router and the shared expert are like any other parameter: every rank holds them and
the gradients from its own tokens; the mean over dp*cp is the gradient of the batch. An expert gets
gradients from the tokens of all ranks of its ep group. In backward the layer divides them by the
size of that group, so the rest is also a mean, over the ranks that hold the same experts:
mesh["edp"].

With sequence parallelism a rank routes its part of the sequence, so balance_group includes tp as
well (and the layers' own losses count 1/tp, because gradients are summed over tp). If the ep group
spans tp ranks, their tokens' gradients are summed too, so averaged_over is smaller. See all_axes.

Legend: T tokens per rank, E experts; a *copy* is one token on its way to one of its experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce, all_to_all, split_sizes
from mini_dist.collectives.ops import all_to_all as all_to_all_with_gradient
from mini_dist.model.digits import at_least_float32
from mini_dist.model.gpt import MoE
from mini_dist.model.routing import Routing, route, z_loss
from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.ledger.recording import recorded

from .balance import AttachLoss, Load
from .ideas import (
    Copies,
    Dispatched,
    balance_loss,
    capacity_of,
    choose_copies,
    combine,
    dispatch,
)


@checks_kinds
class ExpertParallel(nn.Module):
    """Compute what an MoE computes, with its experts distributed: x [B, S, D] to x [B, S, D].

    Parameters keep the names that they have in the MoE: `experts.5` is expert 5 of all.

    moe: the layer whose router, shared expert and experts are used; other ranks' experts are freed.
    capacity_factor: how many copies a rank may send to one expert, as a multiple of the even share.
        Dropped copies contribute nothing; their tokens keep the residual. None drops nothing.
    balance_loss, z_loss: weights of these losses in the total. They are added in backward, so
        they work in any pipeline stage; the loss that a model returns excludes them.
    balance_group: the ranks whose tokens are balanced together, `group` by default.
    averaged_over: the divisor of an expert's gradients, the size of `group` by default.
    Raises ValueError if the number of ranks does not divide the experts.
    """

    def __init__(
        self,
        moe: MoE,
        group,
        *,
        capacity_factor: float | None = None,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        balance_group=None,
        averaged_over: float | None = None,
    ):
        super().__init__()
        rank, size, num_experts = group.rank(), group.size(), len(moe.experts)
        if num_experts % size:
            works = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"{size} ranks do not divide num_experts={num_experts}: spread the experts over "
                f"{', '.join(works)} ranks"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(
                f"capacity_factor={capacity_factor} would drop everything: give 1.0 for the even "
                "share, more to drop less, None to drop nothing"
            )
        mine = range(rank * num_experts // size, (rank + 1) * num_experts // size)
        self.router, self.shared, self.top_k, self.gate = (
            moe.router,
            moe.shared,
            moe.top_k,
            moe.gate,
        )
        self.experts = nn.ModuleDict({str(e): moe.experts[e] for e in mine})
        bias = moe.balance_bias  # in bf16 small changes of it would be rounded away
        self.register_buffer("balance_bias", None if bias is None else at_least_float32(bias))
        self.group, self.num_experts, self.capacity_factor = group, num_experts, capacity_factor
        self.balance_group = balance_group or group
        self.averaged_over = averaged_over or size
        self.balance_loss, self.z_loss, self.loss_scale = balance_loss, z_loss, 1.0
        self.load: Load | None = None  # of the last micro-batch
        self.visits_of_step = torch.zeros(num_experts, dtype=torch.int64)  # see move_balance_biases

    def forward(self, x: Tensor, routing: list[Routing] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)  # [T, D]
        decision = route(self.router(tokens), self.top_k, self.gate, self.balance_bias)
        if routing is not None:
            routing.append(decision)
        copies = choose_copies(decision.experts, self.num_experts, self.capacity(len(tokens)))

        send_off = dispatch_evenly if tokens.is_meta else dispatch
        arrived, dispatched = send_off(tokens[copies.token], copies.counts, self.group)
        answers = combine(
            self.run_experts(arrived, dispatched.rows_per_expert), dispatched, self.group
        )

        weighted = answers * decision.weights[copies.token, copies.slot, None]  # [copies, D]
        out = torch.zeros_like(tokens).index_add(0, copies.token, weighted.to(tokens.dtype))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return self.with_losses(out, decision, copies).view_as(x)

    def capacity(self, num_tokens: int) -> int | None:
        """Return how many copies this rank may send to one expert, None for any number."""
        if self.capacity_factor is None:
            return None
        return capacity_of(self.capacity_factor, num_tokens, self.top_k, self.num_experts)

    def run_experts(self, arrived: Tensor, rows_per_expert: list[int]) -> Tensor:
        """Let each expert answer its rows, [arrived, D] -> [arrived, D].

        The experts run one after the other, for readability; on a GPU a grouped matrix product
        computes all at once. An expert without rows runs as well, on [0, D]: its gradients are
        zeros.
        """
        arrived = scale_gradient(arrived, self.averaged_over)
        answers = [
            expert(rows)
            for expert, rows in zip(self.experts.values(), arrived.split(rows_per_expert))
        ]
        # the experts' weights, between the two scalings, get 1/n of their gradient
        return scale_gradient(torch.cat(answers), 1 / self.averaged_over)

    def with_losses(self, out: Tensor, decision: Routing, copies: Copies) -> Tensor:
        """Count visits per expert on all ranks of balance_group, and attach the losses to `out`."""
        loss, visits = balance_loss(decision, self.balance_group)
        kept = visits  # over all ranks, if nothing can be dropped
        if self.capacity_factor is not None:
            kept = all_reduce(copies.counts, self.balance_group)
        self.load = Load(visits, kept)
        if not torch.is_grad_enabled():
            return out
        self.visits_of_step = self.visits_of_step.to(visits.device) + visits
        if self.balance_loss:
            out = AttachLoss.apply(out, self.balance_loss * loss, self.loss_scale)
        if self.z_loss:
            out = AttachLoss.apply(out, self.z_loss * z_loss(decision), self.loss_scale)
        return out


@recorded
def dispatch_evenly(x: Tensor, counts: Tensor, group) -> tuple[Tensor, Dispatched]:
    """Send what `dispatch` would send if every expert got equally many rows, for tensors without
    storage: their counts have no values to read."""
    size = group.size()
    all_to_all(counts, group)
    sent = split_sizes(len(x), size)
    received = [sent[group.rank()]] * size
    arrived = all_to_all_with_gradient(x, group, sent, received)
    as_they_came = torch.arange(len(arrived), device=x.device)
    rows_per_expert = split_sizes(len(arrived), len(counts) // size)
    return arrived, Dispatched(sent, received, as_they_came, rows_per_expert)


def shard_experts(model: nn.Module, group, **options) -> nn.Module:
    """Distribute the experts of every MoE in `model` over `group`; return the model, changed.

    options: for ExpertParallel. Raises ValueError if there is no MoE, or if the number of ranks
    does not divide the experts.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, MoE)
    ]
    if not places:
        raise ValueError("this model has no layer with experts: give its config num_experts")
    for parent, name, moe in places:
        setattr(parent, name, ExpertParallel(moe, group, **options))
    return model


def layers_with_experts(model: nn.Module) -> list[ExpertParallel]:
    return [module for module in model.modules() if isinstance(module, ExpertParallel)]


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged; multiply its gradient by `factor`."""
    return x if factor == 1 else ScaleGradient.apply(x, factor)


@checks_kinds
def set_loss_scale(model: nn.Module, scale: float) -> None:
    """Set the factor of the layers' own losses to the main loss's factor at the call of backward:
    1 / number of micro-batches, times the loss scale of fp16."""
    for layer in layers_with_experts(model):
        layer.loss_scale = scale


@contextmanager
def visits_of_whole_steps(modules: Iterable[nn.Module]):
    """Wrap one training step. If it ends in an exception, the layers discard its visits."""
    before = [(layer, layer.visits_of_step) for m in modules for layer in layers_with_experts(m)]
    try:
        yield
    except BaseException:
        for layer, visits in before:
            layer.visits_of_step = visits
        raise


@checks_kinds
@torch.no_grad()
def move_balance_biases(model: nn.Module, rate: float = 1e-3) -> None:
    """Make crowded experts less attractive and idle ones more so, by `rate` each, after a step.

    For sigmoid routers: the bias affects which experts are chosen and has no gradient, so balancing
    does not change the model's gradients (Wang et al. 2024, algorithm 1; DeepSeek-V3). Counts
    forwards with gradients since the last call, over all ranks of the balance group, so the ranks
    stay equal. A step that ended in an exception counts, except inside `visits_of_whole_steps`,
    which a ParallelModel uses. Raises ValueError if no layer has such a bias.
    """
    layers = [layer for layer in layers_with_experts(model) if layer.balance_bias is not None]
    if not layers:
        raise ValueError("no layer has a balance bias: give the config router='sigmoid'")
    for layer in layers:
        visits = layer.visits_of_step.double()
        layer.balance_bias += rate * (visits.mean() - visits).sign().to(layer.balance_bias)
        layer.visits_of_step = torch.zeros_like(layer.visits_of_step)
