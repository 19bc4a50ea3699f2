"""The sharded layers of a GPT: each does what its function in ideas.py does, for any model.

Beyond the page, they handle gated MLPs, grouped queries, rotary positions, dropout and frozen
parameters. x enters a region by the engine in column_linears.py.

Legend: t ranks, B batch, S sequence, D model, F ffn, N heads, K kv heads, H head dim, V vocab.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from mini_dist.collectives.divides import check_divides
from mini_dist.model.gpt import MLP, Attention
from mini_dist.plan.fields import checks_kinds

from . import ideas
from .column_linears import column_linears
from .dropout import attend_with_own_dropout
from .ideas import TENSOR, Pair


class Cut(NamedTuple):
    """How a rank's shard is cut from the whole parameter: number `part` of `parts` along `dim`."""

    dim: int
    parts: int  # fewer than there are ranks if neighbors hold the same shard
    part: int

    def piece(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.parts, self.dim)[self.part].contiguous()


class HoldsPieces(nn.Module):
    """A module with sharded parameters. `cuts`: name -> Cut, for the parameters that are
    sharded."""

    def __init__(self, group, pair: Pair):
        super().__init__()
        self.group, self.pair = group, pair
        self.cuts: dict[str, Cut] = {}

    def hold_piece(self, name: str, whole: nn.Parameter | None, dim: int, parts: int = 0) -> None:
        """Register this rank's shard of `whole` as parameter `name`. None, such as the bias of a
        linear without bias, stays None. parts: the number of different shards; 0: one per rank."""
        if whole is None:
            self.register_parameter(name, None)
            return
        rank, size = self.group.rank(), self.group.size()
        parts = parts or size
        self.cuts[name] = cut = Cut(dim, parts, rank * parts // size)
        piece = cut.piece(whole.detach()).clone()
        self.register_parameter(name, nn.Parameter(piece, whole.requires_grad))


# --- linears -----------------------------------------------------------------------------------


class ColumnPiece(HoldsPieces):
    """A rank's shard of a linear that is cut by outputs: weight [F/t, D], bias [F/t] or None.

    It has no forward: `enter_once` multiplies x by several shards, so that x enters only once.
    parts: the number of different shards; if fewer than ranks, neighbors hold the same one.
    Raises ValueError if `parts` does not divide the outputs.
    """

    def __init__(self, linear: nn.Linear, group, *, pair: Pair = TENSOR, parts: int = 0):
        super().__init__(group, pair)
        check_divides(parts or group.size(), linear.out_features, "out_features")
        self.hold_piece("weight", linear.weight, 0, parts)
        self.hold_piece("bias", linear.bias, 0, parts)


def enter_once(x: Tensor, *pieces: ColumnPiece) -> tuple[Tensor, ...]:
    """Let x enter the region, and multiply it: [B, S, D] or [B, S/t, D] -> each [B, S, F/t]."""
    linears = [(piece.weight, piece.bias) for piece in pieces]
    return column_linears(x, linears, pieces[0].group, pieces[0].pair)


@checks_kinds
class ColumnParallelLinear(ColumnPiece):
    """`ideas.column_linear` as a module, for a linear that is the only reader of its x: [..., D] ->
    [..., F/t]."""

    def forward(self, x: Tensor) -> Tensor:
        return enter_once(x, self)[0]


class RowParallelLinear(HoldsPieces):
    """`ideas.row_linear` as a module, with either pair: [..., F/t] -> [..., D]; the bias is whole.

    Raises ValueError if the number of ranks does not divide the inputs.
    """

    def __init__(self, linear: nn.Linear, group, *, pair: Pair = TENSOR):
        super().__init__(group, pair)
        check_divides(group.size(), linear.in_features, "in_features")
        self.hold_piece("weight", linear.weight, 1)  # [D, F/t]
        self.register_parameter("bias", linear.bias)  # [D], whole

    def forward(self, x: Tensor) -> Tensor:
        y = self.pair.leave(functional.linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


# --- the two regions of a block -----------------------------------------------------------------


class ParallelMLP(MLP):
    """`ideas.mlp` as a module, with or without a gate: [B, S, D] -> [B, S, D].

    Raises ValueError if t does not divide F.
    """

    def __init__(self, mlp: MLP, group, *, pair: Pair = TENSOR):
        nn.Module.__init__(self)
        if not isinstance(mlp, MLP):
            raise ValueError(
                f"a {type(mlp).__name__} is no MLP: experts are spread by expert_parallel"
            )
        check_divides(group.size(), mlp.up.out_features, "d_ffn")
        self.gate = None if mlp.gate is None else ColumnPiece(mlp.gate, group, pair=pair)
        self.up = ColumnPiece(mlp.up, group, pair=pair)  # [F/t, D]
        self.down = RowParallelLinear(mlp.down, group, pair=pair)  # [D, F/t]

    def gate_and_up(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        if self.gate is None:
            return None, *enter_once(x, self.up)
        return enter_once(x, self.gate, self.up)


class ParallelAttention(Attention):
    """`ideas.attention` as a module: N/t of the heads, [B, S, D] -> [B, S, D].

    Key and value heads are sharded as well if there are enough. With t > K each is replicated on
    t/K neighbors, whose query heads read it; `finish_gradients` sums the gradients from these
    ranks. Raises ValueError if t does not divide N, or if neither of t and K divides the other.
    """

    def __init__(self, attn: Attention, group, *, pair: Pair = TENSOR):
        nn.Module.__init__(self)
        t, H = group.size(), attn.head_dim
        num_heads, num_kv_heads = attn.q.out_features // H, attn.k.out_features // H
        check_divides(t, num_heads, "num_heads")
        if num_kv_heads % t and t % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} on {t} ranks: one must divide the other, else a "
                "rank's query heads would read parts of two ranks' key/value heads"
            )
        parts = min(num_kv_heads, t)
        self.q = ColumnPiece(attn.q, group, pair=pair)  # [N/t * H, D]
        self.k = ColumnPiece(attn.k, group, pair=pair, parts=parts)  # [K/t * H, D], or one head
        self.v = ColumnPiece(attn.v, group, pair=pair, parts=parts)
        self.o = RowParallelLinear(attn.o, group, pair=pair)  # [D, N/t * H]
        self.head_dim, self.rotary, self.dropout = H, attn.rotary, attn.dropout
        self.attend = attend_with_own_dropout(attn.attend, group)

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return enter_once(x, self.q, self.k, self.v)


# --- embeddings --------------------------------------------------------------------------------


class VocabParallelEmbedding(HoldsPieces):
    """`ideas.embedding` as a module: tokens [B, S] -> x [B, S, D] (SEQUENCE: [B, S/t, D]).

    Raises ValueError if the number of ranks does not divide the vocabulary.
    """

    def __init__(self, embedding: nn.Embedding, group, *, pair: Pair = TENSOR):
        super().__init__(group, pair)
        check_divides(group.size(), embedding.num_embeddings, "vocab_size")
        self.hold_piece("weight", embedding.weight, 0)  # [V/t, D]

    def forward(self, tokens: Tensor) -> Tensor:
        return ideas.embedding(tokens, self.weight, self.group, self.pair)


class SequenceCutEmbedding(nn.Module):
    """The learned positions of this rank's part of the sequence: positions [S] -> [S/t, D].

    Every rank holds the whole table.
    """

    def __init__(self, embedding: nn.Embedding, group):
        super().__init__()
        self.group, self.weight = group, embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        mine = positions.chunk(self.group.size(), -1)[self.group.rank()]
        return functional.embedding(mine, self.weight)
