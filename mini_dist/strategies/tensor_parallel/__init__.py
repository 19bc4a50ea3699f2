"""Tensor parallelism: each rank holds a shard of every matrix and computes a part of every layer.

    ideas.py           the page: all of it in plain functions, for lessons 09 and 10
    column_linears.py  the engine: one x times several matrices, in little memory
    layers.py          the sharded layers of a GPT: what the page does, for any model
    dropout.py         masks that are equal where x is replicated, and differ where x is sharded
    plan.py            a table of modules and their replacements; shard_model
    gradients.py       what is left to do after backward: partial gradients, one norm
    values.py          this rank's shards of a state dict, or of initial values

    model = shard_model(GPT(config), GPT_PLAN, group, pair=SEQUENCE)
    vocab_parallel_cross_entropy(model(tokens), targets, group).mean().backward()
    finish_gradients(model)

A pair of conjugate collectives (ops.py), given as `pair`, defines how x enters and leaves a region
of sharded matrices:

    TENSOR           x [B, S, D] is equal on all ranks          copy         all_reduce
    SEQUENCE         x [B, S/t, D] is sharded between regions   all_gather   reduce_scatter
    SEQUENCE_AGAIN   the same, gathered again in backward       all_gather   reduce_scatter

Elements sent per rank and block, both passes: 8 (t-1)/t BSD; SEQUENCE_AGAIN: 10 (t-1)/t BSD.
Sources: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.
"""

from .column_linears import SEQUENCE_AGAIN, ColumnLinears, column_linears
from .gradients import add_up_parts_, finish_gradients, for_grad_norm
from .ideas import (
    SEQUENCE,
    TENSOR,
    Pair,
    column_linear,
    row_linear,
    vocab_parallel_cross_entropy,
)
from .layers import (
    ColumnParallelLinear,
    Cut,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from .plan import GPT_PLAN, shard_model
from .values import init_weights_, load_full_state_dict

__all__ = [
    "GPT_PLAN",
    "SEQUENCE",
    "SEQUENCE_AGAIN",
    "TENSOR",
    "ColumnLinears",
    "ColumnParallelLinear",
    "Cut",
    "Pair",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "add_up_parts_",
    "column_linear",
    "column_linears",
    "finish_gradients",
    "for_grad_norm",
    "init_weights_",
    "load_full_state_dict",
    "row_linear",
    "shard_model",
    "vocab_parallel_cross_entropy",
]
