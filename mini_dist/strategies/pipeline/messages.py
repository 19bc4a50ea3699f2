"""Sends and receives in flight: no rank blocks in a send, and no tensor is kept longer than needed.

gloo may lose a send whose handle is dropped before a wait, but waiting at once would block the
rank. The lists tell when a message must have been received: if our peer sends us something
that comes later in its list than the action that used our message, then our message has arrived,
and waiting for it takes no time. So we wait for sends when something comes back from their peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mini_dist.collectives.messages import runs_in_order
from mini_dist.plan.schedule import Action
from mini_dist.plan.schedule.action import Key, receive_of, send_of

from .plan import RankPlan


@dataclass
class StageMessage:
    work: Any  # the handle of torch.distributed
    tensor: Tensor
    used_at: int = 0  # of a send: index in the peer's list of the action that uses it


class Messages:
    """The messages of one run of a list, on one rank."""

    def __init__(self, plan: RankPlan, group, device: torch.device) -> None:
        self.schedule, self.place = plan.schedule, plan.place
        self.group, self.device = group, device
        self.in_order = runs_in_order(group)
        self.sent: dict[int, list[StageMessage]] = {}  # peer -> sends that were not waited for yet
        self.awaited: dict[Key, StageMessage] = {}  # started receives, by the matching sends
        self.started: list[StageMessage] = []  # since `together` was entered

    def send(self, action: Action, value: Tensor) -> None:
        receive, value = receive_of(action), value.contiguous()
        peer = self.schedule.rank_of[receive.stage]
        work = self.group.send([value], peer, self._tag(action))
        used_at = self.place[receive.stage, action.kind[-1], action.micro]
        message = StageMessage(work, value, used_at)
        self.sent.setdefault(peer, []).append(message)
        self.started.append(message)

    def receive(self, action: Action, buffer: Tensor) -> None:
        send = send_of(action)
        peer = self.schedule.rank_of[send.stage]
        message = StageMessage(self.group.recv([buffer], peer, self._tag(send)), buffer)
        self.awaited[send.key] = message
        self.started.append(message)

    def _tag(self, send: Action) -> int:
        """Return a unique tag per message, because the two ends may start several in different
        orders."""
        number = send.micro * self.schedule.num_stages + send.stage
        return 1 + 2 * number + (send.kind == "SEND_B")  # collectives use tag 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Combine everything started inside `with` into one operation on NCCL, not on gloo."""
        self.started.clear()
        if not self.in_order:
            yield
            return
        self.group._start_coalescing(self.device)
        yield
        work = self.group._end_coalescing(self.device)
        for message in self.started:
            message.work = work

    def take(self, send: Action) -> Tensor:
        """Return what this action of another rank sent; wait until it has arrived."""
        message = self.awaited.pop(send.key)
        message.work.wait()
        peer, now = self.schedule.rank_of[send.stage], self.place[send.key]
        self._let_go(peer, lambda sent: sent.used_at < now)
        return message.tensor

    def finish_sends(self) -> None:
        for peer in self.sent:
            self._let_go(peer, lambda sent: True)

    def _let_go(self, peer: int, has_arrived: Callable[[StageMessage], bool]) -> None:
        sent = self.sent.get(peer, [])
        for message in filter(has_arrived, sent):
            message.work.wait()
        self.sent[peer] = [message for message in sent if not has_arrived(message)]
