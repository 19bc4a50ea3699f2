"""Serving in plain functions: what is kept, where it lies, and two ways to have more for it.

    forward               only new tokens go through the model; Cache has the others' keys, values
    continue_text         prefill once, then decode: one token at a time
    place_tokens          where the keys and values of new tokens go: a block table
    paged_attention       the same attention over blocks that lie anywhere
    who_runs              who leaves and who comes in when blocks are few
    choose                a seed decides, whoever else is in the batch
    speculate, accept     a small model guesses, the large one checks all guesses at once
    decode_in_pipeline    who idles when one token goes through stages
    decode_in_stages      the same, done: each rank has some of the layers

engine.py does the same for many sequences at once, scheduler.py decides as `who_runs` does.
Legend: S new tokens, T tokens in the cache, N heads, K kv heads, H head dim, V vocab, L layers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from mini_dist.collectives import start, wait
from mini_dist.model.digits import at_least_float32
from mini_dist.model.gpt import GPT
from mini_dist.plan.config import ModelConfig
from mini_dist.strategies.context_parallel.ideas import Partial, merge

from .actions import ServingError

# --- keys and values are kept -------------------------------------------------------------------


class Cache:
    """The keys and values of one sequence: for each layer both [1, K, T, H], growing along T.

    A token's keys and values depend on the tokens before it only, so that no later one changes
    them (Pope et al. 2022, section 2.1): 2 L K H numbers a token, and never computed again.
    """

    def __init__(self, num_layers: int):
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers

    @property
    def length(self) -> int:
        return 0 if self.layers[0] is None else self.layers[0][0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for pair in self.layers if pair for each in pair)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append those of new tokens, [1, K, S, H], and return all of this layer."""
        if self.layers[layer] is not None:
            before_k, before_v = self.layers[layer]
            k, v = torch.cat([before_k, k], 2), torch.cat([before_v, v], 2)
        self.layers[layer] = k, v
        return k, v

    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        if length < self.length:
            self.layers = [(k[:, :, :length], v[:, :, :length]) for k, v in self.layers]


@contextmanager
def attending(model: GPT, functions: Sequence[Callable]) -> Iterator[None]:
    """Inside, layer i attends by functions[i], (q, k, v, positions, dropout) -> out."""
    layers = [block.attn for block in model.blocks]
    before = [attn.attend for attn in layers]
    for attn, function in zip(layers, functions, strict=True):
        attn.attend = function
    try:
        yield
    finally:
        for attn, function in zip(layers, before):
            attn.attend = function


@torch.no_grad()
def forward(model: GPT | Stage, tokens: Tensor, cache: Cache) -> Tensor:
    """The tokens [S] that follow on those in the cache -> logits [S, V]; the cache grows by S.

    Raises ServingError beyond the window of the model, whose positions end there, and for no token.
    """
    if not len(tokens):
        raise ServingError("there is no token to continue: give at least one.")
    if cache.length + len(tokens) > model.config.seq_len:
        raise ServingError(
            f"{cache.length} tokens in the cache and {len(tokens)} more are beyond the model's "
            f"window, seq_len={model.config.seq_len}: cut the text, or ask for less."
        )

    def attend_in(layer: int) -> Callable:
        def attend(q, k, v, positions, dropout):
            k, v = cache.extend(layer, k, v)  # [1, K, T + S, H]
            sees = torch.arange(k.shape[2]) <= positions[:, None]  # [S, T + S]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)

        return attend

    positions = torch.arange(cache.length, cache.length + len(tokens))
    with attending(model, [attend_in(layer) for layer in range(len(model.blocks))]):
        x = model.embed(tokens[None], positions)
        for block in model.blocks:
            x = block(x, positions)
        return model.head(x)[0]


def continue_text(model: GPT, tokens: Tensor, max_new_tokens: int) -> Tensor:
    """tokens [S] -> the same with max_new_tokens more, each the likeliest, as `generate` finds.

    Prefill: the whole prompt at once, many tokens for one reading of the weights. Decode: one token
    for each reading.
    """
    cache = Cache(len(model.blocks))
    logits = forward(model, tokens, cache)
    for step in range(max_new_tokens):
        new = logits[-1].argmax().view(1)
        tokens = torch.cat([tokens, new])
        if step < max_new_tokens - 1:
            logits = forward(model, new, cache)
    return tokens


# --- where they lie -----------------------------------------------------------------------------


def place_tokens(
    table: list[int], free: list[int], written: int, new: int, block_size: int
) -> tuple[list[int], list[int]]:
    """A table with room for `new` more tokens, and the place of each among all blocks' places.

    table: the blocks that a text has, of which `written` tokens are in use. free: blocks that
    nobody has; as few as possible are taken, from the first on.
    """
    needed = -(-(written + new) // block_size)
    table = table + free[: needed - len(table)]
    places = []
    for i in range(written, written + new):
        block, rest = divmod(i, block_size)
        places.append(table[block] * block_size + rest)
    return table, places


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Sequence[int], length: int
) -> Tensor:
    """Attention of one token, q [N, H], over `length` tokens in blocks that lie anywhere -> [N, H].

    keys and values: all blocks, [blocks, block_size, K, H]; `table` says which are this sequence's.
    Block by block, and merged by the online softmax, as ring attention merges what comes from other
    ranks: where a block lies does not matter (Kwon et al. 2023, section 4.1).
    """
    block_size, repeats = keys.shape[1], len(q) // keys.shape[2]
    merged = None
    for i, block in enumerate(table[: -(-length // block_size)]):
        filled = min(block_size, length - i * block_size)
        k, v = (each[block, :filled].repeat_interleave(repeats, 1) for each in (keys, values))
        scores = torch.einsum("nh,tnh->nt", q, k) / math.sqrt(q.shape[-1])
        lse = at_least_float32(scores).logsumexp(-1)  # [N]
        out = torch.einsum("nt,tnh->nh", (scores - lse[:, None]).exp(), v)
        part = Partial(out[None, :, None], lse[None, :, None])  # [1, N, 1, H], [1, N, 1]
        merged = part if merged is None else merge(merged, part)
    return merged.out[0, :, 0]


# --- who may stay -------------------------------------------------------------------------------


class Text(NamedTuple):
    """A text that runs or waits: how many of its tokens are known, and how many blocks it has."""

    name: str
    tokens: int
    blocks: int


def who_runs(
    running: list[Text], waiting: list[Text], free: int, block_size: int
) -> tuple[list[str], list[str]]:
    """Who leaves and who comes in before the next step, each a list of names.

    A running text needs blocks for all its tokens. Where the free ones do not suffice, the last to
    come leaves, and gives its blocks back: so the first one always gets on, and everybody does in
    the end (Kwon et al. 2023, section 4.5). Where nobody leaves, those that wait come in, in order.
    """

    def missing(text: Text) -> int:
        return -(-text.tokens // block_size) - text.blocks

    stay, leave, come = list(running), [], []
    while sum(map(missing, stay)) > free:
        last = stay.pop()
        free += last.blocks
        leave.append(last.name)
    free -= sum(map(missing, stay))
    for text in waiting:
        if leave or missing(text) > free:
            break
        free -= missing(text)
        come.append(text.name)
    return leave, come


# --- the next token -----------------------------------------------------------------------------


def uniform(seed: int | str, place: int | str) -> float:
    """A random number in [0, 1) that the seed and the place decide, and nothing drawn before."""
    return random.Random(f"{seed}/{place}").random()


def choose(logits: Tensor, temperature: float, u: float) -> int:
    """The next token after logits [V]: the likeliest at temperature 0, else the one at which the
    probabilities, added up from the first token on, pass u."""
    if temperature == 0:
        return int(logits.argmax())
    return pick((logits.double() / temperature).softmax(-1), u)


def pick(probabilities: Tensor, u: float) -> int:
    """The place at which probabilities [V], which need not add up to 1, pass the share u."""
    sums = probabilities.double().cumsum(-1)
    return int((sums <= u * sums[-1]).sum().clamp(max=len(sums) - 1))


# --- a small model guesses ----------------------------------------------------------------------


def accept(p: Tensor, q: Tensor, guesses: Sequence[int], us: Sequence[float]) -> list[int]:
    """Which guesses of a draft model stand, and the one token that follows on them.

    q [g, V]: the probabilities from which the draft drew its g guesses. p [g + 1, V]: the target's
    at the same places and at the next one. us: 2 (g + 1) numbers in [0, 1). Guess x stands with
    probability min(1, p(x) / q(x)); the first that falls is replaced by a draw from max(0, p - q).
    What comes out is distributed exactly as if the target had drawn it (Leviathan et al. 2023,
    section 2.3 and appendix A.1), however bad the draft is.
    """
    for i, guess in enumerate(guesses):
        if us[2 * i] * float(q[i, guess]) >= float(p[i, guess]):
            return [*guesses[:i], pick((p[i] - q[i]).clamp(min=0), us[2 * i + 1])]
    return [*guesses, pick(p[-1], us[2 * len(guesses)])]


class Speculated(NamedTuple):
    tokens: Tensor  # [S + max_new_tokens]
    forwards: int  # of the target
    accepted: int  # guesses that stood


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

    The draft guesses num_guesses tokens, one after the other. One forward of the target looks at
    all of them: a weight is read once for many tokens, as in prefill. At temperature 0 the result
    is the target's own text; else `accept` keeps its distribution. Raises ServingError if the two
    have not one vocabulary.
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
            known = torch.cat([tokens, torch.tensor(guesses, dtype=tokens.dtype)])
            q.append(probabilities(forward(draft, known[caches[1].length :], caches[1])[-1]))
            guesses.append(pick(q[-1], uniform(seed, f"guess {place + i}")))
        known = torch.cat([tokens, torch.tensor(guesses, dtype=tokens.dtype)])
        logits = forward(target, known[caches[0].length :], caches[0])
        p = probabilities(logits[-len(guesses) - 1 :])
        us = [uniform(seed, f"{place}: {i}") for i in range(2 * len(guesses) + 2)]
        new = accept(p, torch.stack(q) if q else p[:0], guesses, us)
        tokens = torch.cat([tokens, torch.tensor(new, dtype=tokens.dtype)])
        forwards, accepted = forwards + 1, accepted + len(new) - 1
        for cache in caches:  # the keys and values of guesses that fell are wrong
            cache.cut(len(tokens) - 1)
    return Speculated(tokens, forwards, accepted)


# --- stages -------------------------------------------------------------------------------------


class Visit(NamedTuple):
    """A stage at work on the next token of one group of sequences."""

    stage: int
    group: int
    token: int
    start: float
    end: float


def decode_in_pipeline(num_stages: int, num_groups: int, num_tokens: int) -> list[Visit]:
    """Who computes when, if each stage takes 1 for a token of a group of sequences.

    A group's next token needs its last one, which comes out of the last stage. So one group keeps
    one stage busy at a time: of p stages, m groups leave 1 - min(m, p) / p of the time idle.
    """
    free = [0.0] * num_stages  # when each stage is
    ready = [0.0] * num_groups  # when each group's next token may begin
    visits = []
    for token in range(num_tokens):
        for group in range(num_groups):
            for stage in range(num_stages):
                start = max(free[stage], ready[group])
                free[stage] = ready[group] = start + 1
                visits.append(Visit(stage, group, token, start, start + 1))
    return visits


class Stage(NamedTuple):
    """Some of a model's layers, as `forward` reads them; only the ends embed and have the head."""

    config: ModelConfig
    embed: Callable
    blocks: Sequence[Module]
    head: Callable


def stage_of(model: GPT, number: int, num_stages: int) -> Stage:
    """Stage `number` of `num_stages`, of about as many layers each; a real server loads only these.
    Raises ServingError for one stage, and for more than there are layers."""
    num_layers = len(model.blocks)
    if not 1 < num_stages <= num_layers:
        raise ServingError(
            f"{num_stages} stages of {num_layers} layers will not do: give 2 to {num_layers} ranks."
        )
    layers = slice(number * num_layers // num_stages, (number + 1) * num_layers // num_stages)
    embed = model.embed if number == 0 else lambda x, positions: x
    head = model.head if number == num_stages - 1 else lambda x: x
    return Stage(model.config, embed, model.blocks[layers], head)


def decode_in_stages(
    model: GPT, texts: Sequence[Tensor], max_new_tokens: int, group
) -> tuple[list[Tensor], list[Visit]]:
    """Continue texts, each a group of its own, with rank i as stage i; returns them, as far as this
    rank learns of them (the first and the last do), and its visits.

    x [S, D] of a text's new tokens goes on to the next rank, and the last one's choice back to the
    first. With each message travels the moment at which it was ready, if a visit takes 1: so it is
    measured who idles, and not how busy this machine is.
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
                continue  # only the first rank still had something to learn
            if rank > 0:
                shape = len(text) if token == 0 else 1, width
                x, ready = receive(torch.empty(shape, dtype=model.head.norm.weight.dtype), rank - 1)
            x = forward(stage, x, caches[i])  # [S, D], or logits [S, V]
            begin = torch.maximum(free, ready)
            free = begin + 1
            visits.append(Visit(rank, i, token, float(begin), float(free)))
            if rank == last:
                x = x[-1].argmax().view(1)
                texts[i] = torch.cat([text, x])
            messages = [(x.contiguous(), following), (free, following)]
            sent.append((messages, start(group, sends=messages)))  # nobody waits for a receiver
    for _, handles in sent:
        wait(handles)
    return texts, visits
