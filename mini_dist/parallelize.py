"""All axes together (lesson 15): one model on a grid of ranks, cut in every way of the course.

    layout = Layout(pp=2, dp=2, tp=2, sequence_parallel=True, zero=1, num_micro_batches=4)
    model = parallelize(config, layout, group, lambda tensors: AdamW(tensors, lr=1e-3))
    for step in range(steps):
        inputs, targets = batches.batch(step)        # [B/dp, S], the same on all ranks of a replica
        done = model.step(inputs, targets, max_norm=1.0)

`parallelize` is the list of the strategies, in the order in which they must come: each changes the
modules that it is given and knows nothing of the others. What they have to agree on is at the end
of this file: whose gradients are parts of one, and how often each element counts in the norm.

Sources: PTD-P (Narayanan et al. 2021), Megatron-core's five axes, Llama 3 (Grattafiori et al. 2024,
section 3.3). Legend: B batch, S sequence, D model; a replica is the pp*cp*tp ranks that share a
part of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .collectives import all_gather, all_reduce
from .config import Layout, ModelConfig
from .context_parallel import make_attention, positions_here, shard
from .data_parallel import Bucketed, Naive, Overlapped
from .expert_parallel import layers_with_experts, set_loss_scale, shard_experts
from .mesh import Mesh
from .model import MoE, TokenLoss, token_loss
from .ops import all_to_all
from .pipeline import GPTStage, Pipeline, cut_gpt, shared_parameter
from .precision import FULL, Precision
from .recompute import recompute_blocks
from .replicas import Replica
from .schedule import Schedule, build
from .tensor_parallel import (
    GPT_PLAN,
    SEQUENCE_AGAIN,
    TENSOR,
    Pair,
    ParallelMLP,
    add_up_parts_,
    shard_model,
    vocab_parallel_cross_entropy,
)
from .train import Step, accumulate, count_tokens, over_ranks, update
from .train import split as split_batch
from .zero import ZeRO1, ZeRO2, ZeRO3


def parallelize(
    config: ModelConfig,
    layout: Layout,
    group,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    *,
    seed: int = 0,
    attention: str = "ring",
    precision: Precision = FULL,
    **expert_options,
) -> ParallelModel:
    """The GPT of this config and seed, spread over `group` as `layout` says, ready to train.

    attention: how a cut sequence attends, "ring", "all_gather" or "ulysses". expert_options: those
    of ExpertParallel (capacity_factor, balance_loss, z_loss).
    Raises ValueError in one sentence for a layout that cannot work, with the nearest that does.
    """
    check(config, layout, group, precision)
    mesh = Mesh(group, **layout.axes, ep=layout.ep)
    schedule = schedule_of(layout)
    mine = schedule.stages_of[mesh.index("pp")]

    # cp cuts the sequence: attention asks the others, and tokens know where they stand.
    sequence = {}
    if layout.cp > 1:
        sequence["attention"] = make_attention(mesh["cp"], attention)
        sequence["positions"] = positions_here(config.seq_len, mesh["cp"])

    # pp cuts the layers.
    stages = cut_gpt(config, mine, schedule.num_stages, seed=seed, **sequence)

    for stage in stages.values():
        # tp cuts every matrix, and with sequence parallelism what it would leave whole.
        if layout.tp > 1:
            pair = SEQUENCE_AGAIN if layout.sequence_parallel else TENSOR
            shard_model(stage, PLAN, mesh["tp"], pair=pair)

        # ep spreads the experts.
        if any(isinstance(module, MoE) for module in stage.modules()):
            cutting_tokens = ("dp", "cp", "tp") if layout.sequence_parallel else ("dp", "cp")
            shard_experts(stage, mesh["ep"], balance_group=mesh[cutting_tokens], **expert_options)

        recompute_blocks(stage, layout.recompute)

    # dp cuts the batch. To a gradient it is all the same whether other tokens come from other rows
    # or from another part of the sequence, so cp belongs to the same group.
    replicas = replicate(stages, layout, mesh, make_optimizer)
    optimizer = Together(
        replica.optimizer if isinstance(replica, ZeRO1) else make_optimizer(replica.trained())
        for replica in replicas
    )
    return ParallelModel(config, layout, mesh, schedule, stages, replicas, optimizer, precision)


class ParallelModel(Replica):
    """What `parallelize` makes: one model for train.update, whatever it consists of here.

    stages: this rank's parts of the model, by number. replicas: what averages their gradients.
    """

    def __init__(
        self, config, layout, mesh, schedule, stages, replicas, optimizer, precision
    ) -> None:
        super().__init__(nn.ModuleList(replicas))
        self.config, self.layout, self.mesh, self.precision = config, layout, mesh, precision
        self.stages, self.replicas, self.optimizer = stages, replicas, optimizer
        self.group = mesh["dp", "cp"]
        self.holders = holders(stages, replicas, layout, mesh)
        self.pipeline = None
        self.share_of_loss = 1.0
        if layout.pp > 1:
            self.pipeline = Pipeline(
                schedule,
                {number: WithAutocast(self.replica_of(number), precision) for number in stages},
                mesh["pp"],
                loss_fn=self.weighted_loss,
                activation=self.activation(),
                shared=shared_parameter(stages, schedule.num_stages),
            )

    def step(self, inputs: Tensor, targets: Tensor, max_norm: float | None = None) -> Step:
        """One optimizer step on the global batch; what it returns is the same on all ranks.

        inputs, targets: [B/dp, S], B/dp = micro_batch_size * num_micro_batches: the rows of this
        rank's replica, given alike to all of its ranks.
        """
        layout = self.layout
        rows = layout.micro_batch_size * layout.num_micro_batches
        if tuple(inputs.shape) != (rows, self.config.seq_len):
            raise ValueError(
                f"inputs are {list(inputs.shape)}, but micro_batch_size * num_micro_batches = "
                f"{rows} rows of seq_len={self.config.seq_len} tokens make a step"
            )
        if layout.cp > 1:
            inputs, targets = (shard(x, self.mesh["cp"]) for x in (inputs, targets))
        micro_batches = split_batch(inputs, targets, layout.num_micro_batches)  # [b, S/cp] each
        tokens = over_ranks(self, count_tokens(micro_batches))
        self.zero_grad()
        # A rank's gradients of a sequence cut by tp are added up, where others are averaged.
        parts = layout.num_micro_batches * (layout.tp if layout.sequence_parallel else 1)
        for stage in self.stages.values():
            set_loss_scale(stage, self.precision.scale / parts)
        if self.pipeline is None:
            total = accumulate(self, micro_batches, tokens, self.precision, self.next_token_loss)
        else:
            # the schedule takes the mean over micro-batches, and the replicas that over ranks
            self.share_of_loss = layout.num_micro_batches * self.group.size() / tokens
            mean = self.pipeline.step(*map(list, zip(*micro_batches)))
            total = mean * tokens / self.group.size() / self.precision.scale
        norm, skipped = update(self, self.optimizer, max_norm, self.precision.scaler)
        return Step(over_ranks(self, total) / tokens, norm, skipped)

    # -- forward: only without a pipeline ------------------------------------------------------

    def forward(self, tokens: Tensor) -> Tensor:
        return self.replica_of(0)(tokens)

    def next_token_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> TokenLoss:
        return self.loss(model(inputs), targets)

    def loss(self, logits: Tensor, targets: Tensor) -> TokenLoss:
        """logits [b, S/cp, V], or [b, S/cp, V/tp] where the vocabulary is cut."""
        if self.layout.tp > 1:
            return vocab_parallel_cross_entropy(logits, targets, self.mesh["tp"])
        return token_loss(logits, targets)

    def weighted_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.loss(logits, targets).total * (self.share_of_loss * self.precision.scale)

    def replica_of(self, stage: int) -> Replica:
        return next(r for r in self.replicas if r.module is self.stages[stage])

    def activation(self) -> Tensor:
        """What goes from stage to stage: x [b, S/cp, D], with sequence parallelism S/(cp tp)."""
        cut = self.layout.cp * (self.layout.tp if self.layout.sequence_parallel else 1)
        shape = self.layout.micro_batch_size, self.config.seq_len // cut, self.config.d_model
        return torch.empty(shape, device="meta")

    # -- what a step asks of a replica: the same of all parts ------------------------------------

    @contextmanager
    def no_sync(self):
        with ExitStack() as all_of_them:
            for replica in self.replicas:
                all_of_them.enter_context(replica.no_sync())
            yield

    def zero_grad(self) -> None:
        for replica in self.replicas:
            replica.zero_grad()

    def finish(self) -> None:
        """Means over dp*cp; then, over tp, the sum of what its ranks know only in part.

        In this order, because what ZeRO has cut is an n-th of what there was to add up before.
        """
        for replica in self.replicas:
            replica.finish()
        if self.layout.tp > 1:
            for stage in self.stages.values():
                names = {parameter: name for name, parameter in stage.named_parameters()}
                add_up_parts_(
                    stage.sharding,
                    [
                        (names[parameter], gradient)
                        for parameter, gradient in self.gradients()
                        if parameter in names
                    ],
                )

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with the part of its gradient that this rank steps."""
        for replica in self.replicas:
            yield from pieces_of(replica)

    def grad_norm(self) -> Tensor:
        """Every element once: its square, shared among the ranks that hold it, summed over all."""
        squares = torch.zeros(())
        for parameter, gradient in self.gradients():
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            squares = squares.to(wide) + wide.pow(2).sum() / self.holders[parameter]
        return all_reduce(squares, self.mesh.group).sqrt()

    def trained(self) -> list[Tensor]:
        return [tensor for replica in self.replicas for tensor in replica.trained()]

    def share(self) -> None:
        for replica in self.replicas:
            replica.share()

    def names_in_whole(self) -> dict[Tensor, str]:
        """What each parameter here is called in the GPT of one process, for checkpoints."""
        names = {p: name for stage in self.stages.values() for name, p in stage.named_parameters()}
        tied = shared_parameter(self.stages, self.layout.num_stages)
        if tied is not None:
            names[tied] = "embed.token.weight"
        return names


# --- the strategies' meeting points ------------------------------------------------------------


def schedule_of(layout: Layout) -> Schedule:
    options = {"chunks": layout.num_chunks} if layout.schedule == "interleaved" else {}
    return build(layout.schedule, layout.pp, layout.num_micro_batches, **options)


def parallel_ffn(ffn: nn.Module, group, *, pair) -> nn.Module:
    """For the tensor-parallel plan: an MLP is cut; of experts each is, and the router stays whole.

    Where the sequence is cut, a rank routes and dispatches its own part of it.
    """
    if not isinstance(ffn, MoE):
        return ParallelMLP(ffn, group, pair=pair)
    ffn.experts = nn.ModuleList(
        ParallelMLP(expert, group, pair=visitors() if pair.cuts_sequence else TENSOR)
        for expert in ffn.experts
    )
    if ffn.shared is not None:
        ffn.shared = ParallelMLP(ffn.shared, group, pair=pair)
    return ffn


PLAN = {**GPT_PLAN, "blocks.*.ffn": parallel_ffn}


def visitors() -> Pair:
    """How the rows [r, D] that tp ranks have for an expert enter and leave it: gathered from all,
    [R, D], and added up for each. Like SEQUENCE, but that r differs from rank to rank.

    An all-to-all does it: to send everyone the same is to gather, to add up what comes is to sum.
    """
    rows: list[int] = []  # of each rank, in this forward

    def enter(x: Tensor, group) -> Tensor:
        nonlocal rows
        mine = torch.tensor([len(x)], device=x.device)
        rows = all_gather(mine, group).tolist()
        return all_to_all(x.repeat(group.size(), 1), group, [len(x)] * group.size(), rows)

    def leave(y: Tensor, group) -> Tensor:
        mine = rows[group.rank()]
        terms = all_to_all(y, group, rows, [mine] * group.size())  # [t r, D]
        return terms.view(group.size(), mine, y.shape[-1]).sum(0)

    return Pair(enter, leave)


def replicate(
    stages: dict[int, GPTStage], layout: Layout, mesh: Mesh, make_optimizer: Callable
) -> list[Replica]:
    """Wrap every stage for its dp*cp ranks, and its experts for the edp ranks that have the same.

    A tied embedding whose two ends are both here is the first stage's.
    """
    replicas: list[Replica] = []
    taken: set[Tensor] = set()
    for stage in stages.values():
        layers = layers_with_experts(stage)
        experts = nn.ModuleList(expert for layer in layers for expert in layer.experts.values())
        elsewhere = taken | set(experts.parameters())
        units = list(stage.blocks.values())
        if layout.pp > 1:
            # Micro-batches overlap in a stage, so nothing can stay from the start of one's forward
            # to the end of its backward: embedding and head are units, too, and there is no root.
            units = [unit for unit in (stage.embed, *units, stage.head) if unit is not None]
        if layout.pp > 1 and layout.zero == 3:
            # the embedding's forward has no input with a gradient: its hook is meant to run still
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
        wrap = partial(strategy(layout), make_optimizer=make_optimizer)
        replicas.append(wrap(stage, mesh["dp", "cp"], units=units, ignored=elsewhere))
        if len(experts):
            replicas.append(wrap(experts, mesh["edp"], units=experts, ignored=()))
        taken |= set(stage.parameters())
    return replicas


def strategy(layout: Layout) -> Callable[..., Replica]:
    if layout.zero:
        return {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}[layout.zero]

    def average(module, group, *, make_optimizer, units, ignored) -> Replica:
        if group.size() == 1:
            return Naive(module, group, ignored=ignored)  # nothing travels: no buckets, no copies
        # a schedule has many last backwards
        averaging = Overlapped if layout.pp == 1 else Bucketed
        return averaging(module, group, ignored=ignored)

    return average


def pieces_of(replica: Replica) -> Iterator[tuple[Tensor, Tensor]]:
    """(parameter, gradient of the part of it that this rank steps), an empty part included."""
    if not isinstance(replica, ZeRO1):
        yield from ((p, p.grad) for p in replica.trained() if p.grad is not None)
        return
    for unit in replica.units:
        start, length = unit.group.rank() * unit.shard.numel(), unit.shard.numel()
        place = -start  # of the parameter's first element, counted from the shard's
        for parameter, size in zip(unit.parameters, unit.sizes):
            part = slice(*(min(max(edge, 0), length) for edge in (place, place + size)))
            yield parameter, unit.shard.grad[part]
            place += size


def holders(stages, replicas, layout: Layout, mesh: Mesh) -> dict[Tensor, int]:
    """How many ranks of the whole job step the same elements as this one, for each parameter."""
    copies: dict[Tensor, int] = {}
    for replica in replicas:
        alike = 1 if layout.zero else replica.group.size()
        copies |= dict.fromkeys(replica.module.parameters(), alike)
    if layout.tp > 1:
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                cut = stage.sharding.cuts.get(name)
                copies[parameter] *= layout.tp // cut.parts if cut else layout.tp
    tied = shared_parameter(stages, layout.num_stages)
    if tied is not None:
        copies[tied] *= 2
    return copies


class WithAutocast(nn.Module):
    """A stage that computes in the precision of the step."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module, self.precision = module, precision

    def forward(self, x: Tensor) -> Tensor:
        with self.precision.autocast(x.device.type):
            return self.module(x)


class Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def set_learning_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate


# --- what cannot work ----------------------------------------------------------------------------


def check(config: ModelConfig, layout: Layout, group, precision: Precision) -> None:
    """Raise ValueError for what no strategy could find out alone."""
    layout.check(config)
    if layout.world_size != group.size():
        raise ValueError(
            f"pp*dp*cp*tp = {layout.world_size}, but the group has {group.size()} ranks: "
            f"{nearest(layout, group.size())}"
        )
    splits = layout.schedule.startswith(("zb_", "dualpipe"))
    if layout.pp > 1 and splits and layout.zero >= 2:
        raise ValueError(
            f"zero={layout.zero} scatters gradients when autograd has them, but {layout.schedule} "
            "computes those of weights later by itself: take zero=1, or schedule='1f1b'"
        )
    if layout.pp > 1 and splits and precision.dtype is not None:
        raise ValueError(
            f"{layout.schedule} multiplies weight gradients in the parameters' dtype, not in "
            f"{precision.dtype}: take schedule='1f1b', or full precision"
        )
    if layout.pp > 1 and config.tied_embedding and layout.zero >= 2:
        raise ValueError(
            f"zero={layout.zero} gives a gradient away before the other end of a tied embedding "
            "has added its part: take zero=1, or tied_embedding=False"
        )
    if config.dropout and layout.cp > 1:
        raise ValueError(
            f"dropout={config.dropout} in attention needs the whole row of scores, which cp="
            f"{layout.cp} never has: take dropout=0, or cp=1"
        )


def nearest(layout: Layout, ranks: int) -> str:
    """What the size of dp would have to be, if any would do."""
    others = layout.world_size // layout.dp
    if ranks % others == 0:
        return f"dp={ranks // others} would fit"
    return f"the axes other than dp multiply to {others}, which must divide the number of ranks"
