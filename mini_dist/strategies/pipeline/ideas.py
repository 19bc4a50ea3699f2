"""A pipeline in two functions: GPipe, and one that runs any list of actions (lesson 12).

Each rank has one stage, a consecutive range of the model's layers: rank 0 has the first layers, and
rank p - 1 the last. A stage sends its output x [b, S, D] to the next rank and receives the gradient
of x from there: b·S·D elements each way per micro-batch. The last rank computes the losses.

`execute.py` does the same for real models: several stages per rank, recomputation, split
backwards, asynchronous schedules, NCCL. Its first lines list the other differences.

Legend: p ranks, m micro-batches of b sequences in a step, S positions, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mini_dist.collectives import recv, send, star_broadcast, start, wait
from mini_dist.plan.schedule import Action


def gpipe_step(
    stage: Callable, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss_fn, shape, group
) -> Tensor:
    """Run all forwards, then all backwards (GPipe; Huang et al. 2019, section 2.2).

    stage: this rank's layers. inputs, targets: the m micro-batches; only the first rank reads
    inputs, and only the last reads targets. loss_fn: (output of the last stage, target) -> scalar.
    shape: [b, S, D], of the messages between ranks. Returns the mean loss, the same on all ranks,
    and adds its gradients to the parameters' .grad. (The micro-batches have equally many tokens, so
    the mean of their losses is the mean over all tokens.)
    """
    rank, last, m = group.rank(), group.size() - 1, len(inputs)
    xs, ys, losses = [], [], torch.empty(m, device=inputs[0].device)
    like = torch.empty(shape, device=inputs[0].device)  # shape and dtype of a message

    for micro in range(m):  # all forwards
        if rank == 0:
            x = inputs[micro]
        else:  # requires_grad_, because the previous rank will need the gradient of x
            x = recv(like, rank - 1, group).requires_grad_()
        y = stage(x)
        if rank == last:
            y = loss_fn(y, targets[micro])
            losses[micro] = y.detach()
        else:
            send(y.detach(), rank + 1, group)
        xs.append(x)
        ys.append(y)  # y holds everything that its backward needs

    for x, y in zip(xs, ys):  # all backwards
        if rank == last:
            dy = torch.full_like(y, 1 / m)  # the step's loss is the mean of m losses
        else:
            dy = recv(like, rank + 1, group)
        y.backward(dy)  # computes the gradients of x and of this stage's parameters
        if rank > 0:
            send(x.grad, rank - 1, group)

    return star_broadcast(losses, last, group).mean()


def run_list(
    actions: Sequence[Action],
    stage: Callable,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn,
    shape,
    group,
) -> Tensor:
    """Execute this rank's list of actions: the same step, in the order of the list.

    actions: this rank's, including sends and receives (`add_communication(schedule).ranks[rank]`).
    The rest is as in `gpipe_step`. A send is only started. In 1F1B two neighbors send to each other
    at the same time; if each waited until the other received, both would wait forever.
    """
    rank, last, m = group.rank(), group.size() - 1, len(inputs)
    x = dict(enumerate(inputs)) if rank == 0 else {}  # {micro-batch: tensor}, like y and dy
    y, dy, losses = {}, {}, torch.empty(m, device=inputs[0].device)
    like = torch.empty(shape, device=inputs[0].device)  # shape and dtype of a message
    sends = []  # handles, which hold their tensors; a send whose handle is dropped may be lost
    for _stage, kind, micro, _version in actions:
        if kind == "RECV_F":
            x[micro] = recv(like, rank - 1, group).requires_grad_()
        elif kind == "F":
            y[micro] = stage(x[micro])
            if rank == last:
                y[micro] = loss_fn(y[micro], targets[micro])
                losses[micro] = y[micro].detach()
                dy[micro] = torch.full_like(y[micro], 1 / m)
        elif kind == "SEND_F":
            sends += start(group, sends=[(y[micro].detach().contiguous(), rank + 1)])
        elif kind == "RECV_B":
            dy[micro] = recv(like, rank + 1, group)
        elif kind == "B":
            y.pop(micro).backward(dy.pop(micro))
        elif kind == "SEND_B":
            sends += start(group, sends=[(x.pop(micro).grad.contiguous(), rank - 1)])
    wait(sends)
    return star_broadcast(losses, last, group).mean()
