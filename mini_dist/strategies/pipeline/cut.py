"""Cut the GPT into stages: which layers go where, and a Module for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from mini_dist.model.gpt import Block, Embed, Head
from mini_dist.model.initial_values import initial_value, named_tensors
from mini_dist.plan.calculators.flops import score_flops
from mini_dist.plan.calculators.parameters import layer_weights, outer_weights, split_layers
from mini_dist.plan.config import ModelConfig
from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.schedule import ScheduleError


@checks_kinds
class GPTStage(nn.Module):
    """Some layers of the GPT; the first stage also embeds, and the last also has the head.

    Tokens [B, S] or x [B, S, D] -> x [B, S, D] or logits [B, S, V]. Parameters have the names and
    initial values that they have in the GPT of the same config and seed. `positions` [S]: this
    rank's positions if it holds a part of the sequence (context parallelism). `device`: of
    parameters and positions, torch's default device if not given.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: range,
        *,
        seed: int = 0,
        attention: str | Callable = "sdpa",
        positions: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        device = torch.get_default_device() if device is None else device
        self.config, self.layers = config, layers
        self.positions = None if positions is None else positions.to(device)
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        with torch.device("meta"):
            self.embed = Embed(config) if self.is_first else None
            self.blocks = nn.ModuleDict({str(i): Block(config, i, attention) for i in layers})
            self.head = Head(config) if self.is_last else None
        self.to_empty(device=device)
        with torch.no_grad():
            for name, tensor in named_tensors(self):
                if config.tied_embedding and name == "head.out.weight":
                    name = "embed.token.weight"  # two copies of one parameter start equal
                tensor.copy_(initial_value(name, tensor.shape, config, seed))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x, self.positions)
        for block in self.blocks.values():
            x = block(x, self.positions)
        return x if self.head is None else self.head(x)


@checks_kinds
def cut_gpt(
    config: ModelConfig,
    stages: Sequence[int],
    num_stages: int,
    *,
    balance: str = "layers",
    seed: int = 0,
    attention: str | Callable = "sdpa",
    positions: Tensor | None = None,
    device: torch.device | str | None = None,
) -> dict[int, GPTStage]:
    """Build the modules of these stages (a rank's chunks: `schedule.stages_of[rank]`).

    balance: "layers", an equal number if possible, or "cost", which counts the head's work as
    well. positions: see GPTStage. A tied embedding is one parameter if the first and last stage
    are both here, else two copies: see `shared_parameter`. Raises ScheduleError for more stages
    than layers.
    """
    ranges = layer_ranges(config, num_stages, balance)
    modules = {
        stage: GPTStage(
            config,
            ranges[stage],
            seed=seed,
            attention=attention,
            positions=positions,
            device=device,
        )
        for stage in stages
    }
    tie_ends(modules, num_stages)
    return modules


def tie_ends(modules: dict[int, GPTStage], num_stages: int) -> None:
    """Make a tied embedding one parameter again if the first and the last stage are both here.

    Call it after anything that replaces the stages' parameters, such as `shard_model`.
    """
    first, last = modules.get(0), modules.get(num_stages - 1)
    if first and last and first.config.tied_embedding:
        last.head.out.weight = first.embed.token.weight


def shared_parameter(modules: dict[int, GPTStage], num_stages: int) -> nn.Parameter | None:
    """Return this rank's copy of a tied embedding that is on two ranks, or None."""
    first, last = modules.get(0), modules.get(num_stages - 1)
    module = first or last
    if module is None or not module.config.tied_embedding or (first and last):
        return None
    return first.embed.token.weight if first else last.head.out.weight


@checks_kinds
def layer_ranges(config: ModelConfig, num_stages: int, balance: str = "layers") -> list[range]:
    """Return the layers of each stage: consecutive, at least one per stage."""
    if num_stages > config.num_layers:
        raise ScheduleError(
            f"num_stages={num_stages} is more than num_layers={config.num_layers}: "
            f"{config.num_layers} stages or fewer would work"
        )
    if balance == "layers":
        ends = list(accumulate(split_layers(config.num_layers, num_stages)))
        return [range(a, b) for a, b in zip([0, *ends], ends)]
    if balance == "cost":
        return balanced_ranges(layer_costs(config), num_stages)
    raise ScheduleError(f"balance={balance!r}: 'layers' or 'cost' would work")


def layer_costs(config: ModelConfig) -> list[float]:
    """Return the forward FLOPs per sequence of each layer; the last layer's include the head's.

    The embedding is a look-up and costs nothing. Each backward costs twice as much.
    """
    S = config.seq_len
    matmul = lambda weights: sum(2 * S * w.numel_visited for w in weights if w.is_matmul)  # noqa: E731
    costs = [
        matmul(layer_weights(config, moe=config.is_moe_layer(layer))) + score_flops(config, S)
        for layer in range(config.num_layers)
    ]
    costs[-1] += matmul(outer_weights(config, "last"))
    return costs


def balanced_ranges(costs: Sequence[float], parts: int) -> list[range]:
    """Cut a list of costs into consecutive parts so that the largest part is as small as possible.

    Among equally good cuts it takes the one with the smallest sum of squares.
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[stop]: (worst part, sum of squares, where the parts begin) for the items before `stop`
    best = {0: (0.0, 0.0, ())}
    for _ in range(parts):
        best = {
            stop: min(
                (max(worst, part), squares + part**2, (*starts, start))
                for start, (worst, squares, starts) in best.items()
                if start < stop
                for part in [total[stop] - total[start]]
            )
            for stop in range(1, len(costs) + 1)
            if min(best) < stop
        }
    starts = best[len(costs)][2]
    return [range(a, b) for a, b in zip(starts, (*starts[1:], len(costs)))]
