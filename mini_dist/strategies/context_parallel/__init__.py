"""Context parallelism: one sequence on many ranks, each with S/cp of its tokens.

Norms, linears, MLPs and the loss treat each token on its own. Only attention looks at other tokens,
so only attention communicates.

    placement.py       which tokens each rank holds: contiguous, zig-zag, striped; who sees whom
    ideas.py           softmax in pieces, merged exactly
    tiles.py           attention tile by tile; backward recomputes the tiles
    ring.py            queries stay, keys and values travel: memory O(S/cp)
    all_gather.py      keys and values fetched at once
    ulysses.py         all-to-all: shard heads instead of tokens during attention
    train.py           tokens, positions, targets, loss and gradients of a sharded sequence
    emulated.py        the ring on devices that take a given time

    positions = positions_here(S, group, "zigzag")
    model = GPT(config, attention=make_attention(group, "ring", "zigzag"))
    logits = model(shard(tokens, group, "zigzag"), positions)             # [B, S/cp, V]
    share_of_mean(token_loss(logits, shard(targets, group, "zigzag")), group).backward()
    sum_gradients(model.parameters(), group)
"""

from .all_gather import all_gather_attention
from .emulated import run_ring_emulated
from .ideas import Partial, merge, online_softmax
from .placement import PLACEMENTS, ScoreBlock, block_of, contiguous, num_scores, striped, zigzag
from .ring import add_block, ring_attention, ring_step
from .tiles import (
    KERNELS,
    TileKernel,
    attend,
    attend_backward,
    fused_attend,
    fused_attend_backward,
)
from .train import (
    FORMS,
    make_attention,
    positions_here,
    shard,
    share_of_mean,
    sum_gradients,
    unshard,
)
from .ulysses import ulysses_attention

__all__ = [
    "FORMS",
    "KERNELS",
    "PLACEMENTS",
    "Partial",
    "ScoreBlock",
    "TileKernel",
    "add_block",
    "all_gather_attention",
    "attend",
    "attend_backward",
    "block_of",
    "contiguous",
    "fused_attend",
    "fused_attend_backward",
    "make_attention",
    "merge",
    "num_scores",
    "online_softmax",
    "positions_here",
    "ring_attention",
    "ring_step",
    "run_ring_emulated",
    "shard",
    "share_of_mean",
    "striped",
    "sum_gradients",
    "ulysses_attention",
    "unshard",
    "zigzag",
]
