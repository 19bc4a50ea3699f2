"""Page 2 of serving: choose the next token from a seed, and let a small model guess several.

    uniform, choose, pick  the seed and the position decide, whatever else is in the batch
    accept                 decides which guesses of a draft model are accepted
    speculate              lets a draft guess; the target checks all guesses in one forward

Legend: S tokens, V vocab, g guesses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mini_dist.model.gpt import GPT

from ..actions import ServingError
from .cache import Cache, forward


def uniform(seed: int | str, place: int | str) -> float:
    """Return a random number in [0, 1) that depends only on seed and place, not on other draws."""
    return random.Random(f"{seed}/{place}").random()


def choose(logits: Tensor, temperature: float, u: float) -> int:
    """Return the next token for logits [V]: the likeliest at temperature 0, else the first token at
    which the cumulative probability passes u."""
    if temperature == 0:
        return int(logits.argmax())
    return pick((logits.double() / temperature).softmax(-1), u)


def pick(probabilities: Tensor, u: float) -> int:
    """Return the index where the cumulative sum of probabilities [V] passes u times the total."""
    sums = probabilities.double().cumsum(-1)
    return int((sums <= u * sums[-1]).sum().clamp(max=len(sums) - 1))


def accept(p: Tensor, q: Tensor, guesses: Sequence[int], us: Sequence[float]) -> list[int]:
    """Return the draft model's accepted guesses, and the one token that follows them.

    q [g, V]: the probabilities from which the draft drew its g guesses. p [g + 1, V]: the target's
    at the same positions and the next one. us: 2 (g + 1) numbers in [0, 1). Guess x is accepted
    with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from max(0, p
    - q). However bad the draft is, the result has exactly the target's distribution (Leviathan et
    al. 2023, section 2.3 and appendix A.1).
    """
    for i, guess in enumerate(guesses):
        if us[2 * i] * float(q[i, guess]) >= float(p[i, guess]):
            return [*guesses[:i], pick((p[i] - q[i]).clamp(min=0), us[2 * i + 1])]
    return [*guesses, pick(p[-1], us[2 * len(guesses)])]


class Speculated(NamedTuple):
    tokens: Tensor  # [S + max_new_tokens]
    forwards: int  # of the target
    accepted: int  # guesses


def speculate(
    target: GPT,
    draft: GPT,
    tokens: Tensor,
    max_new_tokens: int,
    num_guesses: int = 4,
    temperature: float = 0.0,
    seed: int = 0,
) -> Speculated:
    """Continue tokens [S] as the target would, in fewer of its forwards.

    The draft guesses num_guesses tokens, one after the other. One forward of the target checks all
    of them: each weight is read once for many tokens, as in prefill. At temperature 0 the result is
    the target's own text; otherwise `accept` preserves its distribution. Raises ServingError if the
    two vocabularies differ.
    """
    if draft.config.vocab_size != target.config.vocab_size:
        raise ServingError(
            f"the draft's vocab_size={draft.config.vocab_size} is not the target's "
            f"{target.config.vocab_size}: give a draft that was trained with the same tokens."
        )

    def probabilities(logits: Tensor) -> Tensor:
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        return (logits.double() / temperature).softmax(-1)

    caches = [Cache(len(model.blocks)) for model in (target, draft)]
    end, forwards, accepted = len(tokens) + max_new_tokens, 0, 0
    while len(tokens) < end:
        place = len(tokens)
        guesses, q = [], []
        for i in range(min(num_guesses, end - place - 1)):
            known = torch.cat([tokens, tokens.new_tensor(guesses)])
            q.append(probabilities(forward(draft, known[caches[1].length :], caches[1])[-1]))
            guesses.append(pick(q[-1], uniform(seed, f"guess {place + i}")))
        known = torch.cat([tokens, tokens.new_tensor(guesses)])
        logits = forward(target, known[caches[0].length :], caches[0])
        p = probabilities(logits[-len(guesses) - 1 :])
        us = [uniform(seed, f"{place}: {i}") for i in range(2 * len(guesses) + 2)]
        new = accept(p, torch.stack(q) if q else p[:0], guesses, us)
        tokens = torch.cat([tokens, tokens.new_tensor(new)])
        forwards, accepted = forwards + 1, accepted + len(new) - 1
        for cache in caches:  # remove the keys and values of rejected guesses
            cache.cut(len(tokens) - 1)
    return Speculated(tokens, forwards, accepted)
