"""Text from a model: one token after the other, drawn from its predicted probabilities.

Letters: B batch, S sequence, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mini_dist.plan.fields import checks_kinds

from .digits import at_least_float32
from .gpt import GPT


@checks_kinds
@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, max_new_tokens: int, *, temperature: float = 1.0, seed: int = 0
) -> Tensor:
    """Continue tokens [S] or [B, S] by sampling; each new token runs the whole window again.

    temperature: 0 takes the likeliest token. Returns max_new_tokens more tokens, int64.
    """
    if not tokens.shape[-1]:
        raise ValueError("tokens are empty: give at least one token to continue.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: give 0 for the likeliest token, or more.")
    was_training = model.training
    model.eval()
    # (Logits without storage draw nothing, and torch has no generator for them.)
    generator = None if tokens.is_meta else torch.Generator(tokens.device).manual_seed(seed)
    batch = tokens.long().reshape(-1, tokens.shape[-1])  # [B, S]
    for _ in range(max_new_tokens):
        logits = model(batch[:, -model.config.seq_len :])[:, -1]  # [B, V]
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)  # [B, 1]
        else:
            probabilities = (at_least_float32(logits) / temperature).softmax(-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
        batch = torch.cat([batch, new], dim=1)
    model.train(was_training)
    return batch.reshape(*tokens.shape[:-1], -1)
