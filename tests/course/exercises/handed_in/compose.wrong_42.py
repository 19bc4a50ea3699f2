# WRONG: "It compares ... the bytes per axis with the formulas": without a pipeline the gradients are averaged after every micro-batch, so dp sends num_micro_batches times what the formula says (losses and norms are right). Shown by: Layout(dp=2, num_micro_batches=2). Right with one micro-batch, and with pp > 1.
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
    averaged, m = mesh["dp", "cp"], layout.num_micro_batches
    options = {}
    if layout.cp > 1:
        options = {
            "attention": cp.make_attention(mesh["cp"]),
            "positions": cp.positions_here(config.seq_len, mesh["cp"]),
        }
    number = mesh.index("pp")
    stage = cut_gpt(config, [number], layout.pp, **options)[number]
    if layout.tp > 1:
        pair = SEQUENCE if layout.sequence_parallel else TENSOR
        shard_model(stage, GPT_PLAN, mesh["tp"], pair=pair)
    model = Bucketed(stage, averaged)
    sgd = torch.optim.SGD(stage.parameters(), lr=0.5)
    share = {}

    def loss_of(logits, targets):
        if layout.tp > 1:
            found = vocab_parallel_cross_entropy(logits, targets, mesh["tp"])
        else:
            found = token_loss(logits, targets)
        return found.total * share["now"]

    if layout.pp > 1:
        parts = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        message = torch.empty(layout.micro_batch_size, config.seq_len // parts, config.d_model)
        schedule = build(layout.schedule, layout.pp, m)
        pipeline = Pipeline(schedule, model, mesh["pp"], loss_fn=loss_of, activation=message)

    def forward_and_backward(inputs, targets, tokens):
        if layout.pp > 1:
            share["now"] = m * averaged.size() / tokens
            mean = pipeline.step(inputs, targets)
            model.finish()
            return mean
        share["now"] = averaged.size() / tokens
        total = 0.0
        for x, y in zip(inputs.chunk(m), targets.chunk(m)):
            loss = loss_of(model(x), y)
            loss.backward()
            model.finish()  # as DDP does it: average after backward
            total = total + loss.detach()
        return total

    def add_up(parameters):
        return sum((p.grad.square().sum() for p in parameters), torch.zeros(()))

    def step(inputs, targets):
        if layout.cp > 1:
            inputs, targets = (cp.shard(x, mesh["cp"]) for x in (inputs, targets))
        tokens = int(all_reduce((targets != IGNORE_INDEX).sum(), averaged))
        model.zero_grad()
        loss = forward_and_backward(inputs, targets, tokens)
        if layout.tp > 1:
            finish_gradients(stage)
            whole, cut = for_grad_norm(stage)
            total = add_up(whole) + sum(all_reduce(add_up(c), g) for g, c in cut.items())
        else:
            total = add_up(stage.parameters())
        norm = all_reduce(total, mesh["pp"]).sqrt()
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        for p in stage.parameters():
            p.grad.mul_(scale)
        sgd.step()
        return all_reduce(loss, averaged) / averaged.size(), norm

    return step
