# WRONG: "some targets are padding (`IGNORE_INDEX`)", and each rank's loss is its share of the mean over tokens ("a step first counts all tokens"): counts the tokens in the first step only. Shown by: the second call, if it has another number of padding targets than the first (any layout).
import torch

from mini_dist import Mesh, all_reduce, token_loss
from mini_dist.model.loss import IGNORE_INDEX
from mini_dist.plan.schedule import build
from mini_dist.strategies import context_parallel as cp
from mini_dist.strategies.data_parallel import Bucketed
from mini_dist.strategies.pipeline import Pipeline, cut_gpt
from mini_dist.strategies.tensor_parallel import GPT_PLAN, SEQUENCE, TENSOR, finish_gradients
from mini_dist.strategies.tensor_parallel import for_grad_norm, shard_model
from mini_dist.strategies.tensor_parallel import vocab_parallel_cross_entropy


def compose(config, layout, group):
    """A training step on the grid of `layout`: step(inputs, targets) -> (loss, norm)."""
    mesh = Mesh(group, **layout.axes)
    m, number = layout.num_micro_batches, mesh.index("pp")
    sequence = {}
    if layout.cp > 1:
        sequence["attention"] = cp.make_attention(mesh["cp"])
        sequence["positions"] = cp.positions_here(config.seq_len, mesh["cp"])
    stage = cut_gpt(config, [number], layout.pp, **sequence)[number]
    if layout.tp > 1:
        pair = SEQUENCE if layout.sequence_parallel else TENSOR
        shard_model(stage, GPT_PLAN, mesh["tp"], pair=pair)
    same = mesh["dp", "cp"]
    averaged = Bucketed(stage, same)
    parameters = list(stage.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    weight = None

    def loss_fn(logits, targets):
        if layout.tp > 1:
            return weight * vocab_parallel_cross_entropy(logits, targets, mesh["tp"]).total
        return weight * token_loss(logits, targets).total

    pieces = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    shape = layout.micro_batch_size, config.seq_len // pieces, config.d_model
    pipeline = Pipeline(
        build(layout.schedule, layout.pp, m),
        averaged,
        mesh["pp"],
        loss_fn=loss_fn,
        activation=torch.empty(shape, dtype=parameters[0].dtype),
    )

    def squares(some):
        return sum((p.grad.pow(2).sum() for p in some), torch.zeros((), dtype=parameters[0].dtype))

    def grad_norm():
        whole, cut = for_grad_norm(stage) if layout.tp > 1 else (parameters, {})
        total = squares(whole)
        for members, shards in cut.items():
            total = total + all_reduce(squares(shards), members)
        if layout.pp > 1:
            total = all_reduce(total, mesh["pp"])
        return total.sqrt()

    def step(inputs, targets):
        nonlocal weight
        if layout.cp > 1:
            inputs, targets = (cp.shard(x, mesh["cp"]) for x in (inputs, targets))
        if weight is None:  # once: all batches have the same shape
            tokens = all_reduce((targets != IGNORE_INDEX).sum(), same).item()
            weight = m * same.size() / tokens
        averaged.zero_grad()
        loss = all_reduce(pipeline.step(inputs, targets), same, op="mean")
        averaged.finish()
        if layout.tp > 1:
            finish_gradients(stage)
        norm = grad_norm()
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        for parameter in parameters:
            parameter.grad.mul_(scale)
        optimizer.step()
        return loss, norm

    return step
