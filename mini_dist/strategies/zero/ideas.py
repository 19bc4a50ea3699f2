"""ZeRO in a few functions (Rajbhandari et al. 2020, section 5): what is sharded over the ranks?

    sharded_step        ZeRO-1: the optimizer's states
    backward_in_units   ZeRO-2: also the gradients
    forward_on_demand   ZeRO-3: also the parameters

and two for hosts with slow links between them:

    hybrid_step         HSDP, MiCS: shard inside a host, replicate between hosts
    weight_again        hpZ: keep a second copy, sharded inside a host, to gather for backward

stages.py handles what real models also need.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mini_dist.collectives import all_gather, all_reduce, reduce_scatter
from mini_dist.ranks.ledger.recording import recorded


@recorded
def sharded_step(flat: Tensor, gradient: Tensor, update: Callable, group) -> Tensor:
    """Step with ZeRO-1: each rank updates 1/n of the parameters and stores only their states.

    flat [L]: the parameters, equal on all ranks. gradient [L]: this rank's. update: (shard [L/n],
    mean gradient [L/n]) -> new shard, elementwise. Returns the new parameters [L]; n
    divides L. Sends 2 (n-1)/n L elements per rank, as an all-reduce does.
    """
    shard = flat.chunk(group.size())[group.rank()]
    mean = reduce_scatter(gradient, group, op="mean")
    return all_gather(update(shard, mean), group)


@recorded
def backward_in_units(loss: Tensor, units: list[list[Tensor]], group) -> list[Tensor]:
    """Run backward with ZeRO-2: reduce-scatter and free a unit's gradients as soon as it has all.

    units: each unit's parameters, equal on all ranks; each gets a gradient and has none yet.
    Returns, for each unit, this rank's part [L/n] of the mean gradient, flattened; n divides every
    L.
    """
    parts: list[Tensor] = [torch.empty(0)] * len(units)
    hooks = []

    def scatter_when_complete(number: int, unit: list[Tensor]) -> Callable:
        def gradient_is_ready(_):
            if all(parameter.grad is not None for parameter in unit):
                whole = torch.cat([parameter.grad.flatten() for parameter in unit])
                for parameter in unit:
                    parameter.grad = None
                parts[number] = reduce_scatter(whole, group, op="mean")

        return gradient_is_ready

    for number, unit in enumerate(units):
        hook = scatter_when_complete(number, unit)
        hooks += [p.register_post_accumulate_grad_hook(hook) for p in unit]
    loss.backward()
    for handle in hooks:
        handle.remove()
    return parts


@recorded
def forward_on_demand(x: Tensor, layers: list[Callable], shards: list[Tensor], group) -> Tensor:
    """Run forward with ZeRO-3: gather a layer's weight when it is needed, and free it afterwards.

    layers: functions (x, weight [L]) -> x. shards: each layer's part [L/n] on this rank. This is
    forward only: to train, backward gathers each weight again and reduce-scatters its gradient,
    3 (n-1)/n L elements per rank in all (unit.py).
    """
    for layer, shard in zip(layers, shards):
        weight = all_gather(shard, group)
        x = layer(x, weight)
        del weight  # otherwise two weights would be resident until the next one has arrived
    return x


@recorded
def hybrid_step(flat: Tensor, gradient: Tensor, update: Callable, across, group) -> Tensor:
    """Step with HSDP: ZeRO-1 inside a host, all-reduce between ranks with the same index in hosts.

    group: the k ranks of this host. across: the h ranks, one per host, that hold the same shard.
    The rest is as in `sharded_step`; k divides L. A rank sends 2 (h-1)/h L/k elements to other
    hosts and 2 (k-1)/k L inside. (FSDP: Zhao et al. 2023, section 3.2.2; MiCS: Zhang et al. 2022.)
    """
    shard = flat.chunk(group.size())[group.rank()]
    mean = reduce_scatter(gradient, group, op="mean")
    mean = all_reduce(mean, across, op="mean")
    return all_gather(update(shard, mean), group)


@recorded
def weight_again(shard: Tensor, inside, group) -> tuple[Tensor, Callable]:
    """Gather a weight from all n ranks, and keep enough of it to gather it again in the host (hpZ).

    shard [L/n]: this rank's shard, of `group`. inside: the k ranks of `group` on this host. Returns
    the weight [L], for forward, and a function that gathers it again, for backward. That function
    holds [L/k] and sends nothing out of the host. k divides L. (ZeRO++: Wang et al. 2023, section
    3.2.)
    """
    weight = all_gather(shard, group)
    second = weight.chunk(inside.size())[inside.rank()].clone()
    return weight, lambda: all_gather(second, inside)
