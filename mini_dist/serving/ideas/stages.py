"""Page 3 of serving: decode with the layers split over ranks, and see which ranks idle.

    decode_in_pipeline  which stage computes when, in virtual time
    decode_in_stages    the same on real ranks, each of which holds some of the layers

Legend: S new tokens, D model, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from mini_dist.collectives import start, wait
from mini_dist.model.gpt import GPT
from mini_dist.plan.config import ModelConfig

from ..actions import ServingError
from .cache import Cache, forward


class Visit(NamedTuple):
    """One stage computing the next token of one group of sequences."""

    stage: int
    group: int
    token: int
    start: float
    end: float


def decode_in_pipeline(num_stages: int, num_groups: int, num_tokens: int) -> list[Visit]:
    """Return which stage computes when, if each takes time 1 per token of a group of sequences.

    A group's next token needs its previous one, which the last stage produces. So one group keeps
    one stage busy at a time: with p stages, m groups leave 1 - min(m, p) / p of the time idle.
    """
    free = [0.0] * num_stages  # when each stage becomes free
    ready = [0.0] * num_groups  # when each group's next token may begin
    visits = []
    for token in range(num_tokens):
        for group in range(num_groups):
            for stage in range(num_stages):
                start = max(free[stage], ready[group])
                free[stage] = ready[group] = start + 1
                visits.append(Visit(stage, group, token, start, start + 1))
    return visits


class ModelPart(NamedTuple):
    """Some of a model's layers, for `forward`; the first embeds, and the last has the head."""

    config: ModelConfig
    embed: Callable
    blocks: Sequence[Module]
    head: Callable


def stage_of(model: GPT, number: int, num_stages: int) -> ModelPart:
    """Return stage `number` of `num_stages`, with about equal numbers of layers. (A real server
    loads only these.) Raises ServingError for one stage, and for more stages than layers."""
    num_layers = len(model.blocks)
    if not 1 < num_stages <= num_layers:
        raise ServingError(
            f"{num_stages} stages of {num_layers} layers will not do: give 2 to {num_layers} ranks."
        )
    layers = slice(number * num_layers // num_stages, (number + 1) * num_layers // num_stages)
    embed = model.embed if number == 0 else lambda x, positions: x
    head = model.head if number == num_stages - 1 else lambda x: x
    return ModelPart(model.config, embed, model.blocks[layers], head)


def decode_in_stages(
    model: GPT, texts: Sequence[Tensor], max_new_tokens: int, group
) -> tuple[list[Tensor], list[Visit]]:
    """Continue texts, each its own group, with rank i as stage i; return this rank's visits and the
    texts, as far as this rank knows them (the first and the last rank do).

    Each stage sends x [S, D] of the new tokens to the next rank; the last sends its choice to the
    first. Each message carries the virtual time at which it was ready, if a visit takes 1. So the
    result measures which ranks idle, not how busy this machine is.
    """
    rank, last = group.rank(), group.size() - 1
    following = 0 if rank == last else rank + 1
    stage, width, texts = stage_of(model, rank, last + 1), model.config.d_model, list(texts)
    caches = [Cache(len(stage.blocks)) for _ in texts]
    free, visits, sent = torch.zeros(1), [], []

    def receive(message: Tensor, source: int) -> tuple[Tensor, Tensor]:
        ready = torch.empty(1)
        wait(start(group, receives=[(message, source), (ready, source)]))
        return message, ready

    for token in range(max_new_tokens + 1):
        for i, text in enumerate(texts):
            x, ready = text, torch.zeros(1)
            if rank == 0 and token > 0:
                x, ready = receive(text.new_empty(1), last)
                texts[i] = torch.cat([text, x])
            if token == max_new_tokens:
                continue  # only the first rank still had to receive a token
            if rank > 0:
                shape = len(text) if token == 0 else 1, width
                x, ready = receive(model.head.norm.weight.new_empty(shape), rank - 1)
            x = forward(stage, x, caches[i])  # [S, D], or logits [S, V]
            begin = torch.maximum(free, ready)
            free = begin + 1
            visits.append(Visit(rank, i, token, float(begin), float(free)))
            if rank == last:
                x = x[-1].argmax().view(1)
                texts[i] = torch.cat([text, x])
            messages = [(x.contiguous(), following), (free, following)]
            sent.append((messages, start(group, sends=messages)))  # do not wait for the receiver
    for _, handles in sent:
        wait(handles)
    return texts, visits
