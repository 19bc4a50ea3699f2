"""Tensor parallelism: each rank holds a piece of every matrix and computes a piece of every layer.

    ideas.py           the page: all of it in plain functions, for lessons 09 and 10
    column_linears.py  the engine: one x times several matrices, in little memory
    layers.py          the layers of a GPT, cut: what the page does, for any model
    dropout.py         masks that are alike where x is, and differ where x is cut
    plan.py            a table of modules and what they become; shard_model
    gradients.py       what is left to do after backward: partial gradients, one norm
    values.py          this rank's pieces of a state dict, or of initial values

    model = shard_model(GPT(config), GPT_PLAN, group, pair=SEQUENCE)
    vocab_parallel_cross_entropy(model(tokens), targets, group).mean().backward()
    finish_gradients(model)

How x enters and leaves a region where the matrices are cut is one pair of conjugate collectives
(ops.py), given as `pair`:

    TENSOR           x [B, S, D] is alike on all ranks         copy         all_reduce
    SEQUENCE         x [B, S/t, D] is cut between regions      all_gather   reduce_scatter
    SEQUENCE_AGAIN   the same, gathered again in backward      all_gather   reduce_scatter

Elements sent by a rank a block, forward and backward: 8 (t-1)/t BSD, SEQUENCE_AGAIN 10 (t-1)/t BSD.
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
