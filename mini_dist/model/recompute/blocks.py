"""Recomputation for real blocks: several inputs, GPUs, autocast, parameters with hooks.

The page (ideas.py) calls backward inside backward, which adds to a parameter's .grad once per use.
Here the parameters are inputs of the graph's node, so their gradients arrive as usual, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType

import torch
from torch import Tensor

from mini_dist.plan.config import RECOMPUTE
from mini_dist.plan.fields import checks_kinds

from ..gpt import GPT, Block
from ..routing import Routing


class Recompute(torch.autograd.Function):
    """A function as one node of the graph, which saves only its inputs.

    Its parameters are also inputs of the node. So their gradients arrive as usual, and a hook on
    a parameter runs once, after all uses are summed. (Calling backward inside backward, as the
    simplest version does, adds to .grad once per use, so a hook would send half a gradient.)
    """

    @staticmethod
    def forward(ctx, fn, args, num_parameters, *tensors):
        """Run fn. tensors: those among `args`, then the parameters that fn uses."""
        inputs = tensors[: len(tensors) - num_parameters]
        ctx.fn, ctx.parameters = fn, tensors[len(inputs) :]
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.then = Surroundings(inputs)
        return fn(*args)

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[3:]
        inputs = [
            saved.detach().requires_grad_(need) for saved, need in zip(ctx.saved_tensors, needed)
        ]
        args = list(ctx.args)
        with torch.enable_grad(), ctx.then.restored():
            for place, tensor in zip(ctx.places, inputs):
                args[place] = tensor.view_as(tensor)  # not a leaf: hooks may reject leaves
            outputs = ctx.fn(*args)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        asked = [(out, g) for out, g in zip(outputs, grads) if g is not None and out.requires_grad]
        outputs, grads = zip(*asked)
        wanted = [t for t, need in zip([*inputs, *ctx.parameters], needed) if need]
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)


def recomputed(fn: Callable, parameters: Iterable[Tensor] = ()) -> Callable:
    """Wrap `fn` so that its intermediate results are dropped, and computed again in backward.

    fn: takes positional arguments, one of them a tensor, and returns a tensor or a tuple of them.
    parameters: all parameters of fn that need a gradient.
    """
    parameters = list(parameters)

    def call(*args):
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        return Recompute.apply(fn, args, len(parameters), *inputs, *parameters)

    return call


@checks_kinds
def recompute_blocks(model: GPT, mode: str, every: int = 1) -> GPT:
    """Make a model's blocks 0, every, 2 * every, ... recompute; return the model.

    mode: "none", "selective" (the core of attention) or "full" (the whole block).
    A block keeps its position, its name and its hooks: only its `forward` changes.
    """
    if mode not in RECOMPUTE:
        known = ", ".join(map(repr, RECOMPUTE))
        raise ValueError(f"recompute={mode!r} is not known: give one of {known}")
    if every < 1:
        raise ValueError(f"every={every} is too small: 1 is every block, 2 every second one")
    for block in list(model.blocks.children())[::every]:
        if mode == "selective":
            block.attn.attend = recomputed(block.attn.attend)
        elif mode == "full":
            block.forward = MethodType(forward_recomputed, block)
    return model


def forward_recomputed(
    block: Block,
    x: Tensor,
    positions: Tensor | None = None,
    routing: list[Routing] | None = None,
) -> Tensor:
    """Run Block.forward with recomputation. The router's decision is an output like any other: if
    the first run appended it to a list, it would have no gradient."""

    def run(x, positions):
        decided: list[Routing] = []
        out = type(block).forward(block, x, positions, decided)
        return out, *(tensor for decision in decided for tensor in decision)

    out, *decided = recomputed(run, block.parameters())(x, positions)
    if routing is not None and decided:
        routing.append(Routing(*decided))
    return out


@contextmanager
def all_of(contexts):
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Surroundings:
    """What a computation depends on besides its arguments: random state and autocast."""

    def __init__(self, inputs: Sequence[Tensor]):
        self.device = inputs[0].device
        self.cpu_random = torch.get_rng_state()
        self.on_gpu = inputs[0].is_cuda
        if self.on_gpu:
            self.gpu_random = torch.cuda.get_rng_state(self.device)
        if inputs[0].is_meta:  # there autocast is a function mode (ranks/autocast.py)
            modes = torch.overrides._get_current_function_mode_stack()
            self.autocast = partial(all_of, modes)
        else:
            kind = self.device.type
            is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            self.autocast = partial(torch.autocast, kind, dtype, enabled=is_on)

    @contextmanager
    def restored(self):
        """Restore the surroundings inside `with`; afterwards no random numbers have been drawn."""
        devices = [self.device] if self.on_gpu else []
        with torch.random.fork_rng(devices), self.autocast():
            torch.set_rng_state(self.cpu_random)
            if devices:
                torch.cuda.set_rng_state(self.gpu_random, self.device)
            yield
