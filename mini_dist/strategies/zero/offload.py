"""Where shards and optimizer states are stored: on the device, on the host, or in files.

The ledger records transfers with their bytes, as `to_host`, `to_device_`, `to_file_`, `from_file_`.
This is a small ZeRO-Offload (Ren et al. 2021, section 3: states and step on the host; 2 + 2 bytes
per parameter move) and ZeRO-Infinity (Rajbhandari et al. 2021, section 5: in files). Nothing here
overlaps, so a step is longer by all of these transfers. The tier in mini_dist/strategies/offload
hides them; `offload=OverlappedOffload(...)` selects it, and it has the same methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_dist.ranks.devices import HOST
from mini_dist.ranks.ledger.recording import recorded


class OnDevice:
    """No offloading: shards and states are where the parameters are."""

    keeps_last_units = False  # ZeRO-3: from forward to backward, which begins with them

    def __init__(self, group):
        self.group = group

    def keep(self, mine: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """Return what the optimizer steps for this part of the parameters: the part, if
        possible."""
        return nn.Parameter(mine.to(dtype))

    def fetch(self, mine: Tensor, shard: Tensor) -> None:
        """Announce that the shard's values will be needed soon."""

    def fill_(self, mine: Tensor, shard: Tensor):
        """Copy the shard's values to the parameters; return None, or something to wait for."""
        mine.copy_(shard)

    def gradient(self, part: Tensor) -> Tensor:
        """Return a shard's gradient in the memory in which it will be stepped."""
        return part

    def add_gradient(self, shard: Tensor, part: Tensor) -> None:
        """Add a micro-batch's gradient to the shard's."""
        part = self.gradient(part)
        shard.grad = part if shard.grad is None else shard.grad.add_(part)

    def show_gradients(self, shards: list[Tensor]) -> None:
        """Make each shard's `grad` its whole gradient from now on."""

    def one_by_one(self, shards: list[Tensor]) -> Iterable[Tensor]:
        """Yield each shard with its gradient, for callers that need only one at a time."""
        return shards

    def forget_gradient(self, shard: Tensor) -> None:
        shard.grad = None

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Change how the optimizer steps, if necessary."""

    @contextmanager
    def fetched(self, shard: Tensor, states: dict):
        """Make the shard and its states readable and writable inside `with`."""
        yield


class OnHost(OnDevice):
    """Gradients go to the host and are stepped there; stepped parameters come back."""

    def keep(self, mine, dtype):
        return nn.Parameter(on_host(mine, dtype))

    def fill_(self, mine, shard):
        to_device_(mine, shard, self.group)

    def gradient(self, part):
        return to_host(part, self.group)


class Files(OnHost):
    """Shards and states are in files, and in memory one by one only during use."""

    def __init__(self, folder: str | Path, group):
        super().__init__(group)
        if Path(folder).is_file():
            raise ValueError(f"offload={str(folder)!r} is a file: give a directory, or 'cpu'")
        self.folder = Path(folder) / f"rank{group.rank()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.numbers: dict[Tensor, int] = {}  # of the shards

    def keep(self, mine, dtype):
        shard = super().keep(mine, dtype)
        self.numbers[shard] = len(self.numbers)
        to_file_(shard, self.path(shard, "shard"), self.group)
        return shard

    def fill_(self, mine, shard):
        from_file_(shard, self.path(shard, "shard"), self.group)
        super().fill_(mine, shard)
        shard.untyped_storage().resize_(0)

    def take_over(self, optimizer):
        """Step shard by shard: an optimizer skips shards without a gradient."""
        step_those_with_gradients = optimizer.step

        def step(*_):
            gradients = {shard: shard.grad for shard in self.numbers}
            for shard in gradients:
                shard.grad = None
            for shard, gradient in gradients.items():
                shard.grad = gradient
                with self.fetched(shard, optimizer.state[shard]):
                    step_those_with_gradients()
                shard.grad = None
            for shard, gradient in gradients.items():
                shard.grad = gradient

        optimizer.step = step

    @contextmanager
    def fetched(self, shard, states):
        for name, tensor in self.large(shard, states).items():
            from_file_(tensor, self.path(shard, name), self.group)
        yield
        for name, tensor in self.large(shard, states).items():  # a first step creates states
            to_file_(tensor, self.path(shard, name), self.group)

    def large(self, shard: Tensor, states: dict) -> dict[str, Tensor]:
        """Return all states but single numbers, such as AdamW's count of steps."""
        large = {k: v for k, v in states.items() if getattr(v, "shape", None) == shard.shape}
        return {"shard": shard, **large}

    def path(self, shard: Tensor, name: str) -> Path:
        return self.folder / f"{self.numbers[shard]}.{name}"


def tier_of(offload, group) -> OnDevice:
    """Return the memory tier for `offload`: None, "cpu", a folder, or an object with `of`."""
    if offload is None:
        return OnDevice(group)
    if hasattr(offload, "of"):
        return offload.of(group)
    return OnHost(group) if offload == "cpu" else Files(offload, group)


def on_host(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy to the host's memory, even if x is already there."""
    return x.to(HOST, dtype, copy=True)


@recorded
def to_host(x: Tensor, group) -> Tensor:
    return on_host(x, x.dtype)


@recorded
def to_device_(mine: Tensor, shard: Tensor, group) -> None:
    mine.copy_(shard)


@recorded
def to_file_(tensor: Tensor, path: Path, group) -> None:
    """Write the tensor and free its memory."""
    path.write_bytes(memory_of(tensor))
    tensor.untyped_storage().resize_(0)


@recorded
def from_file_(tensor: Tensor, path: Path, group) -> None:
    """Allocate the tensor's memory again and read its values."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    with path.open("rb") as file:
        found = file.readinto(memory_of(tensor))
    if found != tensor.nbytes:
        raise ValueError(f"{path} has {found} bytes of {tensor.nbytes}: it was cut off or replaced")


def memory_of(tensor: Tensor) -> ctypes.Array:
    """Return its bytes. (NumPy's view would forbid resizing the storage from then on.)"""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
