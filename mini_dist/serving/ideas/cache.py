"""Page 1 of serving: cache keys and values, in blocks anywhere in memory, and decide who runs.

    forward          runs only new tokens through the model; Cache holds all other keys and values
    continue_text    prefills once, then decodes one token at a time
    place_tokens     says where the keys and values of new tokens go: a block table
    paged_attention  attends over blocks that are scattered in memory
    who_runs         decides who is preempted and who is admitted when free blocks run short

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

    A token's keys and values depend only on the tokens before it, so later tokens never change
    them (Pope et al. 2022, section 2.1). They take 2 L K H numbers per token, computed once.
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
        """Append keys and values of new tokens, [1, K, S, H]; return all of this layer's."""
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
    """Make layer i attend by functions[i], (q, k, v, positions, dropout) -> out, inside `with`."""
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
    """Run tokens [S] that follow the cached ones -> logits [S, V]; the cache grows by S.

    Raises ServingError for no tokens, and for tokens beyond seq_len, where positions end.
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
    """Continue tokens [S] by max_new_tokens, always with the likeliest token, as `generate` does.

    Prefill runs the whole prompt at once and reads the weights once for many tokens. Decode reads
    them once per token.
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
    """Return a block table with room for `new` more tokens, and each new token's slot.

    table: the text's blocks, in which `written` tokens are stored. free: unused blocks;
    as few as possible are taken, in order. A slot is an index over all blocks' slots.
    """
    needed = -(-(written + new) // block_size)
    table = table + free[: max(needed - len(table), 0)]  # the table may already have spare blocks
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
    """Decide which texts are preempted and which are admitted before the next step: two name lists.

    A running text needs blocks for all its tokens. If too few are free, the text admitted last is
    preempted and frees its blocks. So the first always advances, and every text finishes
    (Kwon et al. 2023, section 4.5). If none is preempted, waiting texts are admitted in order.
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
