"""Which phase of training a rank is in, as observed from autograd and the modules."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Phases:
    """Which phase of training a rank is in: setup, forward, backward or step.

    Forward is inside any Module's forward; backward is inside autograd's engine; step is from the
    end of backward, through the optimizer, to the next forward. `set` names a phase by hand. What
    another thread does for the rank belongs to the phase in which it was asked to (`during`), not
    to the one that the rank has reached meanwhile.
    """

    def __init__(self):
        self.changes: list[tuple[float, str]] = []
        self._depth = 0
        self._asked = threading.local()  # `phase`: of the task that this thread works on
        self._hooks = []
        self.set("setup")

    def set(self, phase: str) -> None:
        self.current = phase
        self.changes.append((time.time(), phase))

    @contextmanager
    def during(self, phase: str):
        """Work for what was asked for in this phase, in another thread."""
        self._asked.phase = phase
        try:
            yield
        finally:
            del self._asked.phase

    @property
    def now(self) -> str:
        if phase := getattr(self._asked, "phase", None):
            return phase
        in_engine = torch._C._current_graph_task_id() != -1
        return "backward" if in_engine else self.current

    def watch(self) -> None:
        """Follow every Module and optimizer of this process, until `unwatch`."""
        module = torch.nn.modules.module
        self._hooks = [
            module.register_module_forward_pre_hook(self._enter_module),
            module.register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(lambda *_: self.set("step")),
        ]

    def unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module, inputs) -> None:
        self._depth += 1
        if self._depth == 1 and self.now != "backward" and self.current != "forward":
            self.set("forward")

    def _leave_module(self, module, inputs, output) -> None:
        self._depth -= 1
        if self._depth == 0 and self.now != "backward":
            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._enter_backward)

    @torch.utils.hooks.unserializable_hook  # a rank may return an output; the hook stays behind
    def _enter_backward(self, grad) -> None:
        if self.current == "forward":
            self.set("backward")
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self.set("step"))
