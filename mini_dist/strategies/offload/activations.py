"""Saved activations on the host (Rajbhandari et al. 2020, section 6.1, "P_a+cpu").

    with activations_to_host(lanes, group, model.parameters()):
        loss = model(x).mean()
    loss.backward()

With full recomputation the saved activation is a block's input, [B, S, D] per block. Each is copied
out during the forward of its block and copied back during another block's backward. Arithmetic
grows with D^2 and the bytes with D, so wide models hide the copies. Under tensor parallelism all tp
ranks save the same input. Sequence parallelism already saves 1/tp on each rank, as P_a does (lesson
10): between its regions a rank has only [B, S/tp, D], so only that part goes to the host.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mini_dist.plan.fields import checks_kinds

from .lanes import Lanes, to_device_, to_host_

SMALL = 2**12  # bytes: smaller tensors stay
LEAVING = 2  # copies in flight at a time: until they end the device holds the tensors


@checks_kinds
@contextmanager
def activations_to_host(lanes: Lanes, group, parameters=()):
    """Move tensors that autograd saves inside `with` to the host. In backward, each comes back
    while the tensor before it is used. parameters: saved tensors that are not activations."""
    known = {p.untyped_storage()._cdata for p in parameters}
    order: list[AwayTensor] = []
    leaving: deque[AwayTensor] = deque()

    def let_go(left_over: int) -> None:
        while len(leaving) > left_over:
            leaving.popleft().let_go()

    def leave(x: Tensor):
        if x.nbytes < SMALL or x.untyped_storage()._cdata in known or isinstance(x, nn.Parameter):
            return x
        let_go(LEAVING - 1)
        kept = AwayTensor(x, lanes, len(order), group)
        order.append(kept)
        leaving.append(kept)
        return kept

    def back(kept):
        if isinstance(kept, Tensor):
            return kept
        let_go(0)
        kept.begin_back()
        if kept.number and not (before := order[kept.number - 1]).was_used:
            before.begin_back()
        return kept.take()

    with torch.autograd.graph.saved_tensors_hooks(leave, back):
        yield


class AwayTensor:
    """One tensor away from the device."""

    def __init__(self, x: Tensor, lanes: Lanes, number: int, group):
        self.lanes, self.number, self.group, self.like = lanes, number, group, x.device
        self.host, self.there, self.was_used = lanes.empty(x, x.dtype), None, False
        self.x = x  # otherwise its memory could be reused while the copy is in flight
        self.left = lanes.begin("to_host", lambda: to_host_(self.host, x, group), x.nbytes)

    def let_go(self) -> None:
        self.left.wait()
        self.x = None

    def begin_back(self) -> None:
        if self.there is None:
            self.there = torch.empty_like(self.host, device=self.like)
            self.arrival = self.lanes.begin(
                "to_device",
                lambda: to_device_(self.there, self.host, self.group),
                self.host.nbytes,
                [self.left],
            )

    def take(self) -> Tensor:
        self.arrival.wait()
        there, self.there, self.was_used = self.there, None, True
        return there
