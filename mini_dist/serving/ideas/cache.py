"""Page 1 of serving: keep keys and values, in blocks that lie anywhere, and decide who may run.

    forward          only new tokens go through the model; Cache holds the others' keys and values
    continue_text    prefill once, then decode one token at a time
    place_tokens     where the keys and values of new tokens go: a block table
    paged_attention  the same attention over blocks that lie anywhere
    who_runs         who leaves and who comes in when there are too few free blocks

Legend: S new tokens, T tokens in the cache, N heads, K kv heads, H head dim, V vocab, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mini_dist.model.digits import at_least_float32
from mini_dist.model.gpt import GPT
from mini_dist.strategies.context_parallel.ideas import Partial, merge

from ..actions import ServingError

if TYPE_CHECKING:
    from .stages import ModelPart


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
        """Append keys and values of new tokens, [1, K, S, H]; return all of this layer."""
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
def forward(model: GPT | ModelPart, tokens: Tensor, cache: Cache) -> Tensor:
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
            sees = torch.arange(k.shape[2], device=k.device) <= positions[:, None]  # [S, T + S]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)

        return attend

    positions = torch.arange(cache.length, cache.length + len(tokens), device=tokens.device)
    with attending(model, [attend_in(layer) for layer in range(len(model.blocks))]):
        x = model.embed(tokens[None], positions)
        for block in model.blocks:
            x = block(x, positions)
        return model.head(x)[0]


def continue_text(model: GPT, tokens: Tensor, max_new_tokens: int) -> Tensor:
    """Continue tokens [S] by max_new_tokens, each the likeliest, as `generate` does.

    Prefill takes the whole prompt at once: many tokens for one reading of the weights. Decode takes
    one token per reading.
    """
    cache = Cache(len(model.blocks))
    logits = forward(model, tokens, cache)
    for step in range(max_new_tokens):
        new = logits[-1].argmax().view(1)
        tokens = torch.cat([tokens, new])
        if step < max_new_tokens - 1:
            logits = forward(model, new, cache)
    return tokens


def place_tokens(
    table: list[int], free: list[int], written: int, new: int, block_size: int
) -> tuple[list[int], list[int]]:
    """A table with room for `new` more tokens, and the place of each among all blocks' places.

    table: the blocks that a text has, of which `written` tokens are in use. free: blocks that
    nobody has; as few as possible are taken, from the first on.
    """
    needed = -(-(written + new) // block_size)
    table = table + free[: max(needed - len(table), 0)]  # it may have blocks in reserve
    places = []
    for i in range(written, written + new):
        block, rest = divmod(i, block_size)
        places.append(table[block] * block_size + rest)
    return table, places


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Sequence[int], length: int
) -> Tensor:
    """Attend from one token, q [N, H], to `length` tokens in scattered blocks -> [N, H].

    keys and values: all blocks, [blocks, block_size, K, H]; `table` lists this sequence's. The
    blocks are merged by the online softmax, as ring attention merges the parts of other ranks, so
    the order of blocks in memory does not matter (Kwon et al. 2023, section 4.1).
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
