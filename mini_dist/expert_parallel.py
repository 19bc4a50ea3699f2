"""Expert parallelism: each rank holds some of the experts, and tokens travel to those they visit.

A layer with experts has far more weights than a token uses. Every rank routes its own tokens
(`route` of model.py), sends a copy of each to the ranks of the experts that it chose, and gets the
answers back: two all-to-alls, called dispatch and combine, and two more in backward.

    shard_experts(model, mesh["ep"], balance_group=mesh["dp", "cp"], balance_loss=0.01)

puts an ExpertParallel in the place of each MoE of a GPT, or of a pipeline stage. From top to
bottom: choose which copies travel (`choose_copies`), `dispatch` and `combine` them, the layer,
then what keeps the experts evenly loaded.

Gradients. The router and the shared expert are like any other parameter: every rank has them and
the gradients of its own tokens; their mean over dp*cp is the gradient of the batch. An expert gets
gradients from the tokens of all ranks of its ep group. In backward the layer divides them by the
size of that group, so that they, too, only want the mean over who holds the same experts:
mesh["edp"].

With sequence parallelism a rank routes its part of the sequence, so balance_group has tp in it, too
(and the layers' own losses count 1/tp: over tp, gradients are added up). See parallelize.py.

Legend: T tokens of this rank, k experts a token visits, E experts, n ranks of the group; a *copy*
is one token for one of its experts, so there are k T before any are dropped.
Sources: GShard (Lepikhin et al. 2020, sections 2.2 and 3.1), Switch (Fedus et al. 2021, section 2).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .collectives import all_reduce, all_to_all
from .ledger.recording import recorded
from .model import MoE, Routing, at_least_float32, route, z_loss
from .ops import all_to_all as all_to_all_with_gradient

# --- which copies travel -------------------------------------------------------------------------


class Copies(NamedTuple):
    """The copies of tokens that travel, those for expert 0 first, then expert 1, ..."""

    token: Tensor  # [copies] which token each one is
    slot: Tensor  # [copies] which of its token's k choices
    counts: Tensor  # [E] how many go to each expert


def choose_copies(experts: Tensor, num_experts: int, capacity: int | None = None) -> Copies:
    """Sort the copies by expert, and drop what is more than `capacity` for one expert.

    experts [T, k]. All first choices come before all second ones, and a choice's tokens in their
    order, so it is the late tokens' last choices that are dropped (GShard, algorithm 1).
    """
    num_tokens = experts.shape[0]
    wanted = experts.T.flatten()  # [k T], first choices first
    order = wanted.argsort(stable=True)  # [k T]: by expert, and within one as they stood
    counts = wanted.bincount(minlength=num_experts)  # [E]
    if capacity is not None:
        first = counts.cumsum(0) - counts  # where each expert's copies begin
        place = torch.arange(len(order), device=order.device) - first[wanted[order]]
        order = order[place < capacity]
        counts = counts.clamp(max=capacity)
    return Copies(order % num_tokens, order // num_tokens, counts)


def capacity_of(capacity_factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Copies that each rank may send to one expert: its even share, times the factor, rounded up
    (Switch, eq. 3, where tokens choose one expert)."""
    return math.ceil(capacity_factor * num_tokens * top_k / num_experts)


# --- there and back ------------------------------------------------------------------------------


class Trip(NamedTuple):
    """How the copies went, so that the answers find the way back."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    by_expert: Tensor  # [arrived] order that sorts the rows as they came by expert
    visitors: list[int]  # rows for each of this rank's experts


@recorded
def dispatch(x: Tensor, counts: Tensor, group) -> tuple[Tensor, Trip]:
    """Send each row to the rank of its expert; rank r has the experts r E/n ... (r+1) E/n - 1.

    x [copies, D] sorted by expert, counts [E] -> [arrived, D], sorted by this rank's experts, those
    of one expert in the order of the ranks they came from. Sends the counts first, 8 E/n bytes to
    each other rank: how many rows come from whom is known to nobody beforehand.
    """
    theirs = all_to_all(counts, group).view(group.size(), -1)  # [n, E/n]: from rank r for expert e
    sent = counts.view(group.size(), -1).sum(1).tolist()
    received = theirs.sum(1).tolist()
    arrived = all_to_all_with_gradient(x, group, sent, received)  # by rank, then by expert
    local = torch.arange(theirs.shape[1], device=x.device).repeat(group.size())  # 0 1 0 1 ...
    by_expert = local.repeat_interleave(theirs.flatten()).argsort(stable=True)
    return arrived[by_expert], Trip(sent, received, by_expert, theirs.sum(0).tolist())


@recorded
def combine(answers: Tensor, trip: Trip, group) -> Tensor:
    """Send every answer back to where its row came from: the inverse of `dispatch`.

    answers [arrived, D] -> [copies, D], in the order that `dispatch` was given.
    """
    as_they_came = torch.empty_like(trip.by_expert)
    as_they_came[trip.by_expert] = torch.arange(len(answers), device=answers.device)
    return all_to_all_with_gradient(answers[as_they_came], group, trip.received, trip.sent)


# --- the layer -----------------------------------------------------------------------------------


class ExpertParallel(nn.Module):
    """What an MoE computes, with its experts spread over a group: x [B, S, D] to x [B, S, D].

    Parameters keep the names that they have in the MoE: `experts.5` is expert 5 of all.

    moe: the layer whose router, shared expert and experts are used; the other ranks' are let go.
    capacity_factor: the copies that a rank may send to one expert, in units of the even share; what
        is more is dropped and goes on by the residual connection only. None drops nothing.
    balance_loss, z_loss: what these losses count for in the whole. They are added in backward, so
        they work in any pipeline stage; the loss that a model returns is without them.
    balance_group: the ranks whose tokens are balanced together, `group` unless given.
    Raises ValueError if the ranks do not divide the experts.
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
        bias = moe.balance_bias  # in bf16 small moves of it would be rounded away
        self.register_buffer("balance_bias", None if bias is None else at_least_float32(bias))
        self.group, self.num_experts, self.capacity_factor = group, num_experts, capacity_factor
        self.balance_group = balance_group or group
        self.balance_loss, self.z_loss, self.loss_scale = balance_loss, z_loss, 1.0
        self.load: Load | None = None  # of the last micro-batch
        self.visits_of_step = torch.zeros(num_experts, dtype=torch.int64)  # see move_balance_biases

    def forward(self, x: Tensor, routing: list[Routing] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)  # [T, D]
        decision = route(self.router(tokens), self.top_k, self.gate, self.balance_bias)
        if routing is not None:
            routing.append(decision)
        copies = choose_copies(decision.experts, self.num_experts, self.capacity(len(tokens)))

        arrived, trip = dispatch(tokens[copies.token], copies.counts, self.group)
        answers = combine(self.ask_experts(arrived, trip.visitors), trip, self.group)

        weighted = answers * decision.weights[copies.token, copies.slot, None]  # [copies, D]
        out = torch.zeros_like(tokens).index_add(0, copies.token, weighted.to(tokens.dtype))
        if self.shared is not None:
            out = out + self.shared(tokens)
        return self.with_losses(out, decision, copies).view_as(x)

    def capacity(self, num_tokens: int) -> int | None:
        """Copies that this rank may send to one expert, None for any number."""
        if self.capacity_factor is None:
            return None
        return capacity_of(self.capacity_factor, num_tokens, self.top_k, self.num_experts)

    def ask_experts(self, arrived: Tensor, visitors: list[int]) -> Tensor:
        """Each expert answers its rows, [arrived, D] -> [arrived, D].

        One after the other, so that the algorithm can be read; on a GPU one grouped matrix
        product does all. An expert without visitors runs too, on [0, D]: its gradients are zeros.
        """
        size = self.group.size()
        arrived = scale_gradient(arrived, size)
        answers = [
            expert(rows) for expert, rows in zip(self.experts.values(), arrived.split(visitors))
        ]
        # what lies between the two scalings, the experts' weights, gets an n-th of its gradient
        return scale_gradient(torch.cat(answers), 1 / size)

    def with_losses(self, out: Tensor, decision: Routing, copies: Copies) -> Tensor:
        """Count who visits whom, on all ranks of balance_group, and attach the losses to `out`."""
        loss, visits = balance_loss(decision, self.balance_group)
        kept = visits  # by all ranks, if nothing can be dropped
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


def shard_experts(model: nn.Module, group, **options) -> nn.Module:
    """Spread the experts of every MoE in `model` over `group`; returns the model, changed.

    options: those of ExpertParallel. Raises ValueError if there is no MoE, or if the ranks do not
    divide the experts.
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
    """x as it is; its gradient times `factor`."""
    return x if factor == 1 else ScaleGradient.apply(x, factor)


# --- balance -------------------------------------------------------------------------------------


class Load(NamedTuple):
    """How busy the experts of a layer were, over all ranks of its balance group."""

    visits: Tensor  # [E] copies that tokens wanted to send to each expert
    kept: Tensor  # [E] copies that went

    @property
    def drop_rate(self) -> float:
        """Share of the copies that were dropped."""
        return 1 - self.kept.sum().item() / self.visits.sum().item()

    @property
    def imbalance(self) -> float:
        """The busiest expert's copies, in units of the mean: 1 if all are alike. The others wait
        for it, so this is how much longer the experts take than they need."""
        return self.kept.max().item() / self.kept.double().mean().item()


@recorded
def balance_loss(decision: Routing, group) -> tuple[Tensor, Tensor]:
    """E * sum over experts of (share of visits) * (mean probability), for one of several ranks.

    Returns it, and the visits [E] of the tokens of all ranks. The mean of this over the ranks is
    the loss of the whole batch (`load_balance_loss` of model.py, Switch eq. 4), and the mean of
    its gradients that loss's gradient: it is linear in the probabilities, so these stay at home,
    and only the visits are summed over the ranks. With a rank's own visits it would be another
    loss: one that wants every rank's tokens spread evenly, and not only all together.
    """
    num_experts = decision.probabilities.shape[1]
    visits = all_reduce(decision.experts.flatten().bincount(minlength=num_experts), group)  # [E]
    share = visits / visits.sum()
    return num_experts * (share * decision.probabilities.mean(0)).sum(), visits


class AttachLoss(torch.autograd.Function):
    """x as it is; in backward, `loss` times `scale` counts as if it had been added to the total.

    So that a layer deep in a pipeline can have a loss of its own (Megatron-core's
    MoEAuxLossAutoScaler does the same)."""

    @staticmethod
    def forward(ctx, x, loss, scale):
        ctx.gradient = torch.full_like(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.gradient, None


def set_loss_scale(model: nn.Module, scale: float) -> None:
    """What the layers' own losses are multiplied by, as whoever calls backward does with the main
    loss: 1 / number of micro-batches, times the loss scale of fp16."""
    for layer in layers_with_experts(model):
        layer.loss_scale = scale


@torch.no_grad()
def move_balance_biases(model: nn.Module, rate: float = 1e-3) -> None:
    """After a step, make crowded experts less and idle ones more attractive, by `rate` each.

    For gate "sigmoid": the bias decides who is chosen and has no gradient, so balance adds none to
    the model's (Wang et al. 2024, algorithm 1; DeepSeek-V3). Counts the forwards with gradients
    since the last call, over all ranks of the balance group, so the ranks stay alike. Raises
    ValueError if no layer has such a bias.
    """
    layers = [layer for layer in layers_with_experts(model) if layer.balance_bias is not None]
    if not layers:
        raise ValueError("no layer has a balance bias: give the config router='sigmoid'")
    for layer in layers:
        visits = layer.visits_of_step.double()
        layer.balance_bias += rate * (visits.mean() - visits).sign().to(layer.balance_bias)
        layer.visits_of_step = torch.zeros_like(layer.visits_of_step)
