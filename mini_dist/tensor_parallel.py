"""Tensor parallelism: each rank holds a piece of every matrix and computes a piece of every layer.

    x ── enter ── W₁ cut by outputs ── GELU ── W₂ cut by inputs ── leave ── + bias
         copy       [F/t, D]          on F/t         [D, F/t]      reduce

Cut the first matrix of a pair by its outputs and the second by its inputs, and what lies between
needs no communication (Shoeybi et al. 2019, section 3). A GPT has two such pairs a block: up and
down of the MLP, and q, k, v and o of attention, where the cut runs between heads. Going in and out
of such a region costs one pair of conjugate collectives (ops.py):

    TENSOR           x [B, S, D] is alike on all ranks         copy         reduce
    SEQUENCE         x [B, S/t, D] is cut between regions      all_gather   reduce_scatter
    SEQUENCE_AGAIN   the same, gathered again in backward      all_gather   reduce_scatter

    model = shard_model(GPT(config), GPT_PLAN, group, pair=SEQUENCE)
    vocab_parallel_cross_entropy(model(tokens), targets, group).mean().backward()
    finish_gradients(model)

Legend: t ranks, B batch, S sequence, D model, F ffn, N heads, K kv heads, H head dim, V vocab.
Elements sent by a rank a block, forward and backward: 8 (t-1)/t BSD, SEQUENCE_AGAIN 10 (t-1)/t BSD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .collectives import all_gather, all_reduce, broadcast
from .collectives.messages import Members
from .model import IGNORE_INDEX, MLP, Attention, TokenLoss, at_least_float32, initial_value
from .ops import all_gather as gather_sequence
from .ops import copy, reduce
from .ops import reduce_scatter as scatter_sequence
from .replicas import gradient

# --- the pair: how x enters and leaves a region where the matrices are cut ---------------------


class Pair(NamedTuple):
    """enter and leave: (x, group) -> x, each the other's conjugate.

    With `gathers_again` each is called as the other's backward, too.
    """

    enter: Callable
    leave: Callable
    cuts_sequence: bool = False  # between regions a rank has S/t of the sequence
    gathers_again: bool = False  # backward gathers x again, instead of forward keeping it


SEQ = -2  # the dim of S in [B, S, D]
TENSOR = Pair(copy, reduce)
SEQUENCE = Pair(
    partial(gather_sequence, dim=SEQ), partial(scatter_sequence, dim=SEQ), cuts_sequence=True
)
SEQUENCE_AGAIN = SEQUENCE._replace(gathers_again=True)


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group, pair: Pair = TENSOR
) -> Tensor:
    """x [..., D] -> this rank's outputs [..., F/t], of weight [F/t, D]; backward adds up dx.

    ("Column", because Megatron writes y = xA: a column of A is an output. torch stores A
    transposed, so here they are rows.)
    """
    return column_linears(x, [(weight, bias)], group, pair)[0]


def column_linears(
    x: Tensor, parameters: list[tuple[Tensor, Tensor | None]], group, pair: Pair = TENSOR
) -> tuple[Tensor, ...]:
    """The same for several matrices that read one x, as q, k and v do: it enters once.

    parameters: weight and bias of each.
    """
    if not pair.gathers_again:
        x = pair.enter(x, group)
    return ColumnLinears.apply(x, group, pair, *chain(*parameters))


class ColumnLinears(torch.autograd.Function):
    """One x times several matrices; with `gathers_again` x is a shard, and nothing else is kept.

    Autograd would find the same gradients. But it would make a dx for each matrix and then add
    them, and hold x until dx is there.
    """

    clear_saved_tensors_on_access = True  # with these two, backward can let go of
    boxed_grads_call = True  # x and the dys as soon as it has used them

    @staticmethod
    def forward(ctx, x, group, pair, *parameters):  # weight, bias, weight, bias...
        weights, biases = parameters[::2], parameters[1::2]
        entered = pair.enter(x, group) if pair.gathers_again else x
        ys = tuple(functional.linear(entered, *each) for each in zip(weights, biases))
        dtype = ys[0].dtype  # under autocast it is narrower than x and the weights
        ctx.save_for_backward(x.to(dtype), *weights)
        ctx.group, ctx.pair = group, pair
        return ys

    @staticmethod
    @once_differentiable
    def backward(ctx, dys):
        x, *weights = ctx.saved_tensors
        needs_dx, _, _, *needed = ctx.needs_input_grad
        if ctx.pair.gathers_again:
            x = ctx.pair.enter(x, ctx.group)
        shape, dtype, x = x.shape, x.dtype, x.reshape(-1, x.shape[-1])  # [T, D]
        dys[:] = [dy.reshape(-1, dy.shape[-1]) for dy in dys]  # [T, F/t]
        gradients = []
        for dy, weight_needs, bias_needs in zip(dys, needed[::2], needed[1::2]):
            gradients.append(dy.T @ x if weight_needs else None)  # [F/t, D]
            gradients.append(dy.sum(0) if bias_needs else None)
        if not needs_dx:
            return None, None, None, *gradients
        del x, dy  # x and dx are never both in memory
        dx = dys.pop() @ weights.pop().to(dtype)
        while dys:
            torch.addmm(dx, dys.pop(), weights.pop().to(dtype), out=dx)
        dx = dx.view(shape)
        if ctx.pair.gathers_again:
            dx = ctx.pair.leave(dx, ctx.group)  # the backward of enter
        return dx, None, None, *gradients


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group, pair: Pair = TENSOR
) -> Tensor:
    """This rank's inputs x [..., F/t] -> the sum over ranks, [..., D], of weight [D, F/t].

    The bias [D] is whole on every rank and added after the sum: before it, it would count t times.
    """
    y = pair.leave(functional.linear(x, weight), group)
    return y if bias is None else y + bias


# --- the cut modules ---------------------------------------------------------------------------


class Cut(NamedTuple):
    """How a rank's piece follows from the whole parameter: number `part` of `parts` along `dim`."""

    dim: int
    parts: int  # fewer than there are ranks where neighbours hold the same piece
    part: int

    def piece(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.parts, self.dim)[self.part].contiguous()


class Parallel(nn.Module):
    """A module with pieces of parameters. `cuts`: name -> Cut, of those that are cut."""

    def __init__(self, group, pair: Pair):
        super().__init__()
        self.group, self.pair = group, pair
        self.cuts: dict[str, Cut] = {}

    def take(self, name: str, whole: nn.Parameter | None, dim: int | None, parts: int = 0):
        """Hold this rank's piece of `whole` as the parameter `name`; all of it if dim is None."""
        piece = whole
        if whole is not None and dim is not None:
            rank, size = self.group.rank(), self.group.size()
            self.cuts[name] = cut = Cut(dim, parts or size, rank * (parts or size) // size)
            piece = nn.Parameter(cut.piece(whole.detach()).clone(), whole.requires_grad)
        self.register_parameter(name, piece)


class ColumnParallelLinear(Parallel):
    """A linear cut by its outputs, see `column_linear`: [..., D] -> [..., F/t].

    parts: how many different pieces there are; with fewer than ranks, neighbours hold the same.
    Raises ValueError if they do not divide the outputs.
    """

    def __init__(self, linear: nn.Linear, group, *, pair: Pair = TENSOR, parts: int = 0):
        super().__init__(group, pair)
        check_divides("out_features", linear.out_features, parts or group.size())
        self.take("weight", linear.weight, 0, parts)  # [F/t, D]
        self.take("bias", linear.bias, 0, parts)  # [F/t]

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.group, self.pair)


class RowParallelLinear(Parallel):
    """A linear cut by its inputs, see `row_linear`: [..., F/t] -> [..., D]; the bias is whole.

    Raises ValueError if the number of ranks does not divide the inputs.
    """

    def __init__(self, linear: nn.Linear, group, *, pair: Pair = TENSOR):
        super().__init__(group, pair)
        check_divides("in_features", linear.in_features, group.size())
        self.take("weight", linear.weight, 1)  # [D, F/t]
        self.take("bias", linear.bias, None)  # [D]

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.bias, self.group, self.pair)


class ParallelMLP(MLP):
    """The MLP on F/t of its hidden features: [B, S, D] -> [B, S, D], one pair of collectives."""

    def __init__(self, mlp: MLP, group, *, pair: Pair = TENSOR):
        nn.Module.__init__(self)
        if not isinstance(mlp, MLP):
            raise ValueError(
                f"a {type(mlp).__name__} is no MLP: experts are spread by expert_parallel.py"
            )
        check_divides("d_ffn", mlp.up.out_features, group.size())
        self.group, self.pair = group, pair
        column = partial(ColumnParallelLinear, group=group, pair=pair)
        self.gate = None if mlp.gate is None else column(mlp.gate)
        self.up = column(mlp.up)
        self.down = RowParallelLinear(mlp.down, group, pair=pair)

    def project(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        parameters = [(linear.weight, linear.bias) for linear in linears]
        return column_linears(x, parameters, self.group, self.pair)


class ParallelAttention(Attention):
    """Attention on N/t of its heads: [B, S, D] -> [B, S, D], one pair of collectives.

    Key and value heads are cut, too, while there are enough. With t > K each is held by the t/K
    neighbours whose query heads read it; `finish_gradients` adds up what they find. Raises
    ValueError if t does not divide N, or neither of t and K divides the other.
    """

    def __init__(self, attn: Attention, group, *, pair: Pair = TENSOR):
        nn.Module.__init__(self)
        t, H = group.size(), attn.head_dim
        num_heads, num_kv_heads = attn.q.out_features // H, attn.k.out_features // H
        check_divides("num_heads", num_heads, t)
        if num_kv_heads % t and t % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} on {t} ranks: one must divide the other, else a "
                "rank's query heads would read parts of two ranks' key/value heads"
            )
        self.group, self.pair = group, pair
        column = partial(ColumnParallelLinear, group=group, pair=pair)
        self.q = column(attn.q)  # [N/t * H, D]
        self.k = column(attn.k, parts=min(num_kv_heads, t))  # [K/t * H, D], or one head
        self.v = column(attn.v, parts=min(num_kv_heads, t))
        self.o = RowParallelLinear(attn.o, group, pair=pair)  # [D, N/t * H]
        self.head_dim, self.rotary, self.dropout = H, attn.rotary, attn.dropout
        self.attend = drawing_its_own(attn.attend, group)

    def project(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        parameters = [(linear.weight, linear.bias) for linear in linears]
        return column_linears(x, parameters, self.group, self.pair)


class VocabParallelEmbedding(Parallel):
    """An embedding cut by its rows: tokens [B, S] -> x [B, S, D] (SEQUENCE: [B, S/t, D]).

    A rank looks up the tokens that it has and contributes zeros for the others.
    """

    def __init__(self, embedding: nn.Embedding, group, *, pair: Pair = TENSOR):
        super().__init__(group, pair)
        check_divides("vocab_size", embedding.num_embeddings, group.size())
        self.take("weight", embedding.weight, 0)  # [V/t, D]

    def forward(self, tokens: Tensor) -> Tensor:
        row, is_mine = rows_of(tokens, len(self.weight), self.group)
        x = functional.embedding(row, self.weight).masked_fill(~is_mine[..., None], 0)
        return self.pair.leave(x, self.group)


def rows_of(tokens: Tensor, rows: int, group) -> tuple[Tensor, Tensor]:
    """Where this rank's rows of the vocabulary have each token (0 if not), and whether they do."""
    row = tokens - group.rank() * rows
    is_mine = (row >= 0) & (row < rows)
    return row.where(is_mine, 0), is_mine


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, group) -> TokenLoss:
    """`token_loss` of logits whose vocabulary is cut: [..., V/t], targets [...] alike on all ranks.

    Sends three numbers a token instead of V: the largest of all ranks' logsumexps, and two sums.
    Targets of IGNORE_INDEX do not count; others outside 0..V-1 raise ValueError.
    """
    logits = at_least_float32(logits)
    counts = targets != IGNORE_INDEX
    if bool(((targets < 0) | (targets >= logits.shape[-1] * group.size()))[counts].any()):
        raise ValueError(
            f"a target lies outside the vocabulary, 0..{logits.shape[-1] * group.size() - 1}, "
            f"and is not IGNORE_INDEX={IGNORE_INDEX}"
        )
    row, is_mine = rows_of(targets, logits.shape[-1], group)
    at_target = logits.gather(-1, row[..., None]).squeeze(-1).masked_fill(~is_mine, 0)
    # The softmax's denominator is the sum over ranks of exp(logsumexp): scaled, it cannot overflow.
    mine = logits.logsumexp(-1)  # [...]
    highest = all_reduce(mine.detach(), group, op="max")
    denominator, at_target = reduce(torch.stack([(mine - highest).exp(), at_target]), group)
    loss = highest + denominator.log() - at_target
    return TokenLoss(loss.masked_fill(~counts, 0).sum(), counts.sum())


# --- what is neither cut nor alike: positions and dropout --------------------------------------


class SequenceCutEmbedding(nn.Module):
    """The learned positions of this rank's part of the sequence: positions [S] -> [S/t, D]."""

    def __init__(self, embedding: nn.Embedding, group):
        super().__init__()
        self.group, self.weight = group, embedding.weight

    def forward(self, positions: Tensor) -> Tensor:
        mine = positions.chunk(self.group.size(), -1)[self.group.rank()]
        return functional.embedding(mine, self.weight)


class SequenceCutDropout(nn.Dropout):
    """Dropout of a tensor of which each rank has another part: masks differ from rank to rank."""

    def __init__(self, dropout: nn.Dropout, group):
        super().__init__(dropout.p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        with own_random_numbers(self.group):
            return super().forward(x)


@contextmanager
def own_random_numbers(group) -> Iterator[None]:
    """Draw other random numbers than the other ranks; afterwards go on alike.

    Their seed is drawn from the state that the ranks share, so whoever restores that state, as
    activation checkpointing does, gets them again.
    """
    seed = int(torch.randint(2**62, ())) + group.rank()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def drawing_its_own(attend: Callable, group) -> Callable:
    """Heads are cut, so dropout inside attention must differ from rank to rank."""

    def attend_with_own_dropout(q, k, v, positions, dropout):
        if not dropout:
            return attend(q, k, v, positions, dropout)
        with own_random_numbers(group):
            return attend(q, k, v, positions, dropout)

    return attend_with_own_dropout


# --- a whole model by a table ------------------------------------------------------------------


def sequence_cut(make: Callable) -> Callable:
    """For the plan: a module that only sequence parallelism replaces."""
    return lambda module, group, *, pair: make(module, group) if pair.cuts_sequence else module


GPT_PLAN = {
    "embed.token": VocabParallelEmbedding,
    "embed.position": sequence_cut(SequenceCutEmbedding),
    "embed.dropout": sequence_cut(SequenceCutDropout),
    "blocks.*.attn": ParallelAttention,
    "blocks.*.ffn": ParallelMLP,
    "blocks.*.dropout": sequence_cut(SequenceCutDropout),
    "head.out": ColumnParallelLinear,  # gives logits [B, S, V/t]
}


@dataclass
class Sharding:
    """What `shard_model` did, kept as `model.sharding`: the functions below read it."""

    group: object
    pair: Pair
    tied: list[list[str]]  # full names of parameters that are one
    cuts: dict[str, Cut] = field(default_factory=dict)  # full parameter name -> Cut


def shard_model(
    model: nn.Module, plan: dict[str, Callable], group, *, pair: Pair = TENSOR
) -> nn.Module:
    """Replace modules of `model` by their parallel forms and return it; each rank keeps its pieces.

    plan: name of a module, `*` for any -> how, a function (module, group, pair=...) -> module. A
    name that leads to None (a stage without a head) is passed over. All ranks pass equal models:
    made from one seed, or on the meta device, with `init_weights_` or `load_full_state_dict` to
    follow. With dropout the ranks' random state becomes rank 0's. Parameters that were one (a tied
    embedding) stay one. Raises ValueError for sizes that do not divide, for ranks with different
    models, and for a name that leads nowhere.
    """
    check_equal(model, group)
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        share_random_state(model, group)
    tied = names_of_tied(model)
    for pattern, how in plan.items():
        for parent, name in find(model, pattern):
            setattr(parent, name, how(getattr(parent, name), group, pair=pair))
    model.sharding = Sharding(group, pair, tied)
    for prefix, module in model.named_modules():
        if isinstance(module, Parallel):
            model.sharding.cuts |= {f"{prefix}.{name}": cut for name, cut in module.cuts.items()}
    tie(model)
    return model


@torch.no_grad()
def finish_gradients(model: nn.Module) -> None:
    """Add up what ranks know of a gradient only in part; call it after the last backward of a step.

    These are key/value heads that several ranks hold, and with SEQUENCE all whole parameters
    (norms, the biases of `o` and `down`, positions): each rank used them on its part of the
    sequence. One all-reduce a dtype and set of ranks.
    """
    sharding = model.sharding
    partial_gradients = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and len(who_adds_up(sharding, name)) > 1:
            parameter.grad = gradient(parameter)  # zeros, where only others have one
            partial_gradients.append((name, parameter.grad))
    add_up_parts_(sharding, partial_gradients)


@torch.no_grad()
def add_up_parts_(sharding: Sharding, gradients: Iterable[tuple[str, Tensor]]) -> None:
    """The same for (parameter name, its gradient or an equal part of it on all ranks), in place."""
    parts: dict[tuple, list[Tensor]] = {}
    for name, part in gradients:
        holders = who_adds_up(sharding, name)
        if len(holders) > 1:
            parts.setdefault((holders, part.dtype), []).append(part)
    for (holders, _), mine in parts.items():
        flat = torch.cat([part.flatten() for part in mine])
        total = all_reduce(flat, Members(sharding.group, holders))
        for part, summed in zip(mine, total.split([part.numel() for part in mine])):
            part.copy_(summed.view_as(part))


def who_adds_up(sharding: Sharding, name: str) -> tuple[int, ...]:
    """The ranks whose gradients of this parameter are parts of one; this rank alone if none are."""
    rank, size, cut = sharding.group.rank(), sharding.group.size(), sharding.cuts.get(name)
    if cut is None:
        return tuple(range(size)) if sharding.pair.cuts_sequence else (rank,)
    sharers = size // cut.parts  # neighbours that hold the same piece
    return tuple(range(cut.part * sharers, (cut.part + 1) * sharers))


def for_grad_norm(model: nn.Module) -> tuple[list[nn.Parameter], dict]:
    """The arguments of `grad_norm`: parameters that are whole, and those that are cut.

    A piece that several ranks hold is given by the first of them only, so that it counts once.
    """
    sharding = model.sharding
    whole, cut = [], []
    for name, parameter in model.named_parameters():
        if name not in sharding.cuts:
            whole.append(parameter)
        elif sharding.group.rank() == who_adds_up(sharding, name)[0]:
            cut.append(parameter)
    return whole, {sharding.group: cut}


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the whole model, on every rank: the same whatever the number of ranks."""
    sharding, whole = model.sharding, {}
    size = sharding.group.size()
    for name, piece in model.state_dict().items():
        cut = sharding.cuts.get(name)
        if cut is None:
            whole[name] = piece.clone()
        else:  # every rank's piece, of those that several hold the first
            everyones = all_gather(piece[None], sharding.group)
            whole[name] = torch.cat([*everyones[:: size // cut.parts]], cut.dim)
    return whole


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Give each rank its pieces of a whole model's state dict; strict, as `load_state_dict` is."""
    cuts = model.sharding.cuts
    if any(parameter.is_meta for parameter in model.parameters()):
        make_memory(model, next(iter(state.values())).device)
    model.load_state_dict(
        {name: cuts[name].piece(t) if name in cuts else t for name, t in state.items()}
    )


@torch.no_grad()
def init_weights_(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Give a sharded GPT, perhaps on the meta device, the values it would have in one process.

    Each whole parameter is drawn, cut and dropped before the next: no rank ever holds the model.
    """
    make_memory(model, device)
    for name, parameter in model.named_parameters():
        cut, shape = model.sharding.cuts.get(name), list(parameter.shape)
        if cut:
            shape[cut.dim] *= cut.parts
        whole = initial_value(name, tuple(shape), model.config, seed)
        parameter.copy_(cut.piece(whole) if cut else whole)
    return model


# --- small print -------------------------------------------------------------------------------


def check_divides(what: str, number: int, ranks: int) -> None:
    if number % ranks:
        near = [n for n in (number // ranks * ranks, -(-number // ranks) * ranks) if n]
        raise ValueError(
            f"the number of ranks, {ranks}, must divide {what}={number}: "
            f"{' or '.join(map(str, near))} would do"
        )


def check_equal(model: nn.Module, group) -> None:
    """Pieces of different models fit together without a word, so look before."""
    parameters = list(model.parameters())
    if group.size() == 1 or not parameters or parameters[0].is_meta:
        return
    sums = torch.stack([p.detach().double().sum() for p in parameters]).sum().reshape(1)
    everyones = all_gather(sums.to(parameters[0].device), group)
    if not bool((everyones == everyones[0]).all()):
        raise ValueError(
            "the ranks' models differ, and their pieces would not fit: make them from one seed"
        )


def share_random_state(model: nn.Module, group) -> None:
    """Go on from one seed, drawn by rank 0: what ranks hold alike must be dropped out alike."""
    device = next(model.parameters()).device
    seed = torch.randint(2**62, (1,), device=None if device.type == "meta" else device)
    torch.manual_seed(int(broadcast(seed, 0, group)))


def find(model: nn.Module, pattern: str) -> list[tuple[nn.Module, str]]:
    """(parent, name) of each module that the pattern names, but for those that are None."""
    places = [(None, "", model)]
    for component in pattern.split("."):
        parents, places = [module for *_, module in places], []
        for parent in parents:
            names = [name for name in parent._modules if fnmatchcase(name, component)]
            if not names and not hasattr(parent, component):
                raise ValueError(
                    f"the plan names {pattern!r}, but there is no {component!r} in a "
                    f"{type(parent).__name__}: it has {', '.join(parent._modules) or 'no modules'}"
                )
            places += [(parent, name, getattr(parent, name)) for name in names]
        places = [place for place in places if place[-1] is not None]
    return [(parent, name) for parent, name, _ in places]


def names_of_tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def tie(model: nn.Module) -> None:
    """Make one parameter of those that were one before they were cut."""
    cuts = model.sharding.cuts
    for first, *others in model.sharding.tied:
        for other in others:
            if cuts.get(first) != cuts.get(other):
                raise ValueError(
                    f"{first} and {other} are one parameter, but the plan cuts them differently"
                )
            module, _, name = other.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(first))


def make_memory(model: nn.Module, device: torch.device | str) -> None:
    model.to_empty(device=device)
    tie(model)  # to_empty made two parameters of one
