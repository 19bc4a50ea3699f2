"""Activation recomputation: forget what forward kept for backward, and compute it again then.

    none        keep everything
    selective   forget the core of attention, whose scores grow with S^2 and cost little to repeat
                (Korthikanti et al. 2022, section 5)
    full        keep only the input of a block: a third more arithmetic (Chen et al. 2016)

    recompute_blocks(gpt, "full")               # every block
    recompute_blocks(gpt, "full", every=2)      # blocks 0, 2, 4, ...; the others keep all
    y = recomputed(fn, parameters)(x)           # whatever fn is: several blocks, half a block

What is computed the second time must be the same: random numbers are drawn from the state of the
first time (dropout), and autocast is as it was then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor

from .config import RECOMPUTE
from .model import GPT, Block, Routing


class Recompute(torch.autograd.Function):
    """A function as one node of the graph, which keeps its inputs and nothing else.

    Its parameters are inputs of the node, too. So their gradients go the usual way, and a hook on
    a parameter runs once, when all uses are added up. (Calling backward inside backward, as the
    simplest version does, adds to .grad once a use, and sends half a gradient off.)
    """

    @staticmethod
    def forward(ctx, fn, args, num_parameters, *tensors):
        """tensors: those among `args`, then the parameters that fn uses."""
        inputs = tensors[: len(tensors) - num_parameters]
        ctx.fn, ctx.parameters = fn, tensors[len(inputs) :]
        ctx.args = [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.places = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.then = Surroundings(inputs[0].device)
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
                args[place] = tensor.view_as(tensor)  # no leaf: hooks on modules may refuse those
            outputs = ctx.fn(*args)
        outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        asked = [(out, g) for out, g in zip(outputs, grads) if g is not None and out.requires_grad]
        outputs, grads = zip(*asked)
        wanted = [t for t, need in zip([*inputs, *ctx.parameters], needed) if need]
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
        return None, None, None, *(next(found) if need else None for need in needed)


def recomputed(fn: Callable, parameters: Iterable[Tensor] = ()) -> Callable:
    """A function like `fn` whose intermediate results are forgotten, and made again in backward.

    fn: takes positional arguments, one of them a tensor, and returns a tensor or a tuple of them.
    parameters: all that fn uses and that shall get a gradient.
    """
    parameters = list(parameters)

    def call(*args):
        inputs = [arg for arg in args if isinstance(arg, Tensor)]
        return Recompute.apply(fn, args, len(parameters), *inputs, *parameters)

    return call


def recompute_blocks(model: GPT, mode: str, every: int = 1) -> GPT:
    """Make a model's blocks 0, every, 2 * every, ... recompute; returns the model.

    mode: "none", "selective" (the core of attention) or "full" (the whole block).
    A block keeps its place, its name and its hooks: only its `forward` is another.
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
    """Block.forward, recomputed. What its router decided is an output like any other: appended
    to a list in the first run, it would have no gradient."""

    def run(x, positions):
        decided: list[Routing] = []
        out = type(block).forward(block, x, positions, decided)
        return out, *(tensor for decision in decided for tensor in decision)

    out, *decided = recomputed(run, block.parameters())(x, positions)
    if routing is not None and decided:
        routing.append(Routing(*decided))
    return out


class Surroundings:
    """What a computation depends on besides its arguments: random state, autocast."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cpu_random = torch.get_rng_state()
        if device.type == "cuda":
            self.gpu_random = torch.cuda.get_rng_state(device)
        self.is_autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type)

    @contextmanager
    def restored(self):
        """Inside, as it was when this was made; afterwards as if nothing had been drawn."""
        devices = [self.device] if self.device.type == "cuda" else []
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.is_autocast)
        with torch.random.fork_rng(devices), autocast:
            torch.set_rng_state(self.cpu_random)
            if devices:
                torch.cuda.set_rng_state(self.gpu_random, self.device)
            yield


class SavedBytes:
    """Counts what autograd keeps for backward, while forward and backward run inside.

        with SavedBytes(model) as saved:
            loss(model(inputs)).backward()
        saved.now, saved.peak               # bytes

    Each storage counts once, parameters not at all: they are there anyway.
    """

    def __init__(self, model: torch.nn.Module):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.holders: dict[int, int] = {}  # place of a storage -> how often it is saved
        self.now = self.peak = 0

    def __enter__(self) -> SavedBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: Kept(tensor, self), lambda kept: kept.tensor
        )
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)


class Kept:
    """A tensor that autograd keeps, until autograd drops this."""

    def __init__(self, tensor: Tensor, saved: SavedBytes):
        self.tensor, self.saved = tensor, saved
        storage = tensor.untyped_storage()
        self.place, self.nbytes = storage.data_ptr(), storage.nbytes()
        if self.place not in saved.parameters:
            saved.holders[self.place] = saved.holders.get(self.place, 0) + 1
            if saved.holders[self.place] == 1:
                saved.now += self.nbytes
                saved.peak = max(saved.peak, saved.now)

    def __del__(self):
        if self.place not in self.saved.parameters:
            self.saved.holders[self.place] -= 1
            if self.saved.holders[self.place] == 0:
                del self.saved.holders[self.place]
                self.saved.now -= self.nbytes
