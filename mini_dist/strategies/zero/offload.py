"""Where shards and optimizer states live: on the device, on the host, or in files.

What moves is in the ledger with its bytes, as `to_host`, `to_device_`, `to_file_`, `from_file_`.
This is ZeRO-Offload (Ren et al. 2021, section 3: states and step on the host; 2 + 2 bytes a
parameter move) and ZeRO-Infinity (Rajbhandari et al. 2021, section 5: in files) in miniature:
nothing here overlaps with anything, so a step is longer by all of these transfers. The tier of
mini_dist/strategies/offload hides them; it comes in by `offload=OverlappedOffload(...)` and has
the same methods.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_dist.ranks.ledger.recording import recorded

HOST = torch.device("cpu")


class OnDevice:
    """Nothing is offloaded: shards and states are where the parameters are."""

    keeps_last_units = False  # from forward to backward, which begins with them: ZeRO-3

    def __init__(self, group):
        self.group = group

    def keep(self, mine: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """What the optimizer steps for this part of the parameters: the part itself, if it can."""
        return nn.Parameter(mine.to(dtype))

    def fetch(self, mine: Tensor, shard: Tensor) -> None:
        """The shard's values will be asked for soon."""

    def fill_(self, mine: Tensor, shard: Tensor):
        """Put the shard's values where the parameters are; None, or what to wait for."""
        mine.copy_(shard)

    def gradient(self, part: Tensor) -> Tensor:
        """A shard's gradient, where it will be stepped."""
        return part

    def add_gradient(self, shard: Tensor, part: Tensor) -> None:
        """Add a micro-batch's to the shard's gradient."""
        part = self.gradient(part)
        shard.grad = part if shard.grad is None else shard.grad.add_(part)

    def show_gradients(self, shards: list[Tensor]) -> None:
        """From here on each shard's `grad` is all of its gradient."""

    def one_by_one(self, shards: list[Tensor]) -> Iterable[Tensor]:
        """The same while each is looked at, for who does not need them together."""
        return shards

    def forget_gradient(self, shard: Tensor) -> None:
        shard.grad = None

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Change how it steps, if need be."""

    @contextmanager
    def fetched(self, shard: Tensor, states: dict):
        """Inside, the shard and its states may be read and written."""
        yield


class OnHost(OnDevice):
    """Gradients go to the host and are stepped there, and stepped parameters come back."""

    def keep(self, mine, dtype):
        return nn.Parameter(on_host(mine, dtype))

    def fill_(self, mine, shard):
        to_device_(mine, shard, self.group)

    def gradient(self, part):
        return to_host(part, self.group)


class Files(OnHost):
    """Shards and states are in files, and in memory only while they are used, one by one."""

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
        """Step shard by shard: an optimizer passes over what has no gradient."""
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
        for name, tensor in self.large(shard, states).items():  # a first step makes new states
            to_file_(tensor, self.path(shard, name), self.group)

    def large(self, shard: Tensor, states: dict) -> dict[str, Tensor]:
        """All but single numbers, as AdamW's count of steps."""
        large = {k: v for k, v in states.items() if getattr(v, "shape", None) == shard.shape}
        return {"shard": shard, **large}

    def path(self, shard: Tensor, name: str) -> Path:
        return self.folder / f"{self.numbers[shard]}.{name}"


def tier_of(offload, group) -> OnDevice:
    """The tier of memory that `offload` names: None, "cpu", a folder, or one's own, by `of`."""
    if offload is None:
        return OnDevice(group)
    if hasattr(offload, "of"):
        return offload.of(group)
    return OnHost(group) if offload == "cpu" else Files(offload, group)


def on_host(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in the host's memory, also of what is there already."""
    return x.to(HOST, dtype, copy=True)


@recorded
def to_host(x: Tensor, group) -> Tensor:
    return on_host(x, x.dtype)


@recorded
def to_device_(mine: Tensor, shard: Tensor, group) -> None:
    mine.copy_(shard)


@recorded
def to_file_(tensor: Tensor, path: Path, group) -> None:
    """Write the tensor and give its memory back."""
    path.write_bytes(memory_of(tensor))
    tensor.untyped_storage().resize_(0)


@recorded
def from_file_(tensor: Tensor, path: Path, group) -> None:
    """Give the tensor its memory again, and its values."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    with path.open("rb") as file:
        found = file.readinto(memory_of(tensor))
    if found != tensor.nbytes:
        raise ValueError(f"{path} has {found} bytes of {tensor.nbytes}: it was cut off or replaced")


def memory_of(tensor: Tensor) -> ctypes.Array:
    """Its bytes. (NumPy's view of them would forbid to resize the storage ever after.)"""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
