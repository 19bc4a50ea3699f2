"""Which experts each token visits, and the losses that balance a router and keep its logits small.

Letters: E experts, T tokens, k experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mini_dist.plan.fields import checks_kinds

from .digits import at_least_float32


class Routing(NamedTuple):
    """A router's decision about T tokens. All fields but `experts` are float32 or better."""

    logits: Tensor  # [T, E]
    experts: Tensor  # [T, k] int64, the experts that each token visits
    weights: Tensor  # [T, k], the weight of each of these experts' answers
    probabilities: Tensor  # [T, E], rows sum to 1: the probability of each expert


@checks_kinds
def route(logits: Tensor, top_k: int, gate: str = "softmax", bias: Tensor | None = None) -> Routing:
    """Choose the k best experts for each token, [T, E] -> Routing.

    gate "softmax": with k > 1 the chosen probabilities are divided by their sum (Mixtral: Jiang et
    al. 2024, section 2.1). With k = 1 they are not (Switch: Fedus et al. 2021, section 2.1): the
    weight would be 1 whatever the logits, and the router would get no gradient.
    gate "sigmoid": each expert is scored alone, then as above; `bias` [E] is added only for the
    choice, so it changes routes but no gradient (DeepSeek-V3: 2024, section 2.1.2).
    """
    logits = at_least_float32(logits)  # Switch, section 2.4: bf16 makes routing unstable
    scores = logits.sigmoid() if gate == "sigmoid" else logits.softmax(-1)
    experts = (scores if bias is None else scores + bias).topk(top_k).indices
    weights = scores.gather(-1, experts)
    if top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    probabilities = scores / scores.sum(-1, keepdim=True) if gate == "sigmoid" else scores
    return Routing(logits, experts, weights, probabilities)


def load_balance_loss(routing: Routing) -> Tensor:
    """Compute E * sum over experts of (share of visits) * (mean probability): 1 if both are even,
    up to E if all tokens want one expert (Switch: Fedus et al. 2021, eq. 4-6, visits divided by
    T*k).

    Only the probabilities have a gradient. Over several ranks, average both factors first.
    """
    num_experts = routing.logits.shape[-1]
    visits = routing.experts.flatten().bincount(minlength=num_experts)  # [E]
    share = visits / routing.experts.numel()
    return num_experts * (share * routing.probabilities.mean(0)).sum()


def z_loss(routing: Routing) -> Tensor:
    """Compute the mean over tokens of logsumexp(logits)², which keeps router logits small (ST-MoE:
    Zoph et al. 2022, "router z-loss")."""
    return routing.logits.logsumexp(-1).square().mean()
