"""What has to be saved of a training run, and what a training loop needs for it:

    training = Training(model, optimizer, group)
    saved = training.resume("checkpoints")               # None: there is nothing yet
    for step in range(saved.step if saved else 0, steps):
        train_step(model, optimizer, batches.batch(step))
        if (step + 1) % 100 == 0:
            training.save("checkpoints", step + 1)       # the number of completed steps

Saved are parameters and buffers, the optimizer's state of each parameter (AdamW: exp_avg,
exp_avg_sq, step; SGD: momentum_buffer), each rank's random generators, and the number of steps. The
position in the data follows from that number (see data.py). Learning rates and other settings
belong to the program; anything else that it needs after a restart goes into `extra`.

`resume` and `save` take the directory's lock: as long as the Training exists, no other process can
save into it. To read a directory while another process trains there, `find(directory, group)` needs
no lock: `find(...).load(Training(model, (), group).pieces(), group)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mini_dist.plan.fields import checks_kinds
from mini_dist.strategies.trainable import Trainable

from .background import Background
from .files import check_numbers, save, share_out, together
from .lock import Lock
from .manifest import CheckpointError, check_form
from .pieces import Piece, Place, piece
from .protocol import ShardedUnit
from .random_state import kind_of, random_pieces, set_random_state
from .reading import Saved, find

COUNTS = ("step", "mu_product")  # optimizer states that are one number for any parameter
WHOLE = slice(None)
EXTRA = {"optimizers": [str], "extra": dict}  # what a Training saves besides tensors


@checks_kinds
class Training:
    """The state of a training run on this rank, to be saved and resumed.

    models: a module, a module wrapped by a data-parallel strategy, or all modules of this rank.
        Parameters sharded by ZeRO and tensor_parallel are saved as they are (see protocol.py).
    optimizers: theirs; a ZeRO brings its own.
    names: names of parameters in the whole model, where they differ from those in the module.
    background: write during training, see `save`. All ranks of `group` make one.

    Raises ValueError for an optimizer of parameters that are in no model.
    """

    def __init__(
        self,
        models: nn.Module | Iterable[nn.Module],
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        group,
        *,
        names: dict[Tensor, str] | None = None,
        background: bool = False,
    ):
        self.models = [models] if isinstance(models, nn.Module) else list(models)
        one = isinstance(optimizers, torch.optim.Optimizer)
        optimizers = [optimizers] if one else list(optimizers)
        optimizers += [model.optimizer for model in self.models if hasattr(model, "optimizer")]
        self.optimizers = list(dict.fromkeys(optimizers))
        self.group, self.names, self.background = group, names or {}, background
        self.pending: Background | None = None
        self.locks: dict[Path, Lock] = {}
        if background:
            # Its own group can communicate while the training uses others.
            members = dist.get_process_group_ranks(group)
            self.group = dist.new_group(members, use_local_synchronization=True)
        shards = [unit.shard for model in self.models for unit in getattr(model, "units", ())]
        known = {*self.places(), *shards}
        for optimizer in self.optimizers:
            for tensor in stepped(optimizer):
                if tensor not in known:
                    raise ValueError(
                        f"an optimizer steps a tensor of shape {list(tensor.shape)} that is in "
                        "none of the models: give the models that its parameters are from"
                    )

    def save(
        self,
        directory: str | Path,
        step: int,
        extra: dict | None = None,
        keep: int | None = 2,
    ) -> None:
        """Save the training's state after `step` steps; every rank calls it. See `files.save`.

        In the background: copy what this rank has to write and return. The next save and `resume`
        wait until it is on the disk, and a program can: `wait`. Errors are raised then, or at the
        latest when the launched function has returned or the program ends.
        """
        check_numbers(step, keep)
        self.wait()
        self.lock(directory)
        extra = {"optimizers": self.kinds(), "extra": extra or {}}
        with self.fetched():
            pieces = self.pieces() + random_pieces(self.group)
            if not self.background:
                save(directory, step, pieces, self.group, extra, keep)
                return
            mine, tensors = share_out(pieces, self.group)
            mine = [replace(each, tensor=each.tensor.detach().cpu().clone()) for each in mine]
        job = (directory, step, mine, tensors, self.group, extra, keep)
        self.pending = Background(job, self.locks.get(Path(directory)))

    def wait(self) -> None:
        """Return when the last save is on the disk."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()

    def lock(self, directory: str | Path) -> None:
        """Take the lock. Raises CheckpointError on all ranks if another process may save there."""
        directory = Path(directory)
        if self.group.rank() == 0 and directory not in self.locks:
            self.locks[directory] = Lock(directory)
        lock = self.locks.get(directory)
        together(lambda: lock and lock.take(), self.group)

    def resume(
        self,
        directory: str | Path,
        step: int | None = None,
        *,
        check: Callable[[dict], None] | None = None,
    ) -> Saved | None:
        """Load the newest complete checkpoint (see `find`); None if there is none yet.

        Other ranks, with another sharding, may have saved it. Random generators continue where
        they were if the number of ranks is the same; otherwise ranks keep their current ones.
        check: called with the saved `extra` before anything is loaded; may raise.
        """
        self.wait()
        self.lock(directory)
        saved = find(directory, self.group, step)
        if saved is None:
            return None
        try:
            check_form(saved.extra, EXTRA, "extra")
        except ValueError as error:
            raise CheckpointError(f"{saved.folder} is of no Training: {error}") from None
        theirs, ours = saved.extra["optimizers"], self.kinds()
        if theirs != ours:
            raise ValueError(
                f"{saved.folder} was saved with {', '.join(theirs) or 'no optimizer'}, this "
                f"training has {', '.join(ours) or 'none'}: the states of the one mean nothing to "
                "the other"
            )
        if check:
            check(saved.extra["extra"])
        generators = [p for p in random_pieces(self.group) if p.place.name in saved.tensors]
        generators = generators if saved.world_size == self.group.size() else []
        with self.fetched():
            self.make_states(saved)
            load(saved, self.pieces(), generators, self.group)
        set_random_state({kind_of(p): p.tensor for p in generators})
        for model in self.models:
            if isinstance(model, Trainable):
                model.refresh_parameters()
        saved.extra = saved.extra["extra"]
        return saved

    # --- what there is ---

    def held(self) -> dict[Tensor, list[tuple[slice, Piece]]]:
        """Return each tensor of this rank with its pieces and their slices: all of a parameter, or
        the parts of parameters that are in a ZeRO shard."""
        places = self.places()
        held, sharded = {}, set()
        for model in self.models:
            for unit in getattr(model, "units", ()):
                held[unit.shard] = list(pieces_of_shard(unit, places))
                sharded.update(unit.parameters)
        for tensor, place in places.items():
            if tensor not in sharded:
                held[tensor] = [(WHOLE, Piece(place, tensor))]
        return held

    def places(self) -> dict[Tensor, Place]:
        """Return each parameter's and buffer's place in the whole model: all of a tensor, or the
        box that tp gave this rank. If two models have it, the first one names it."""
        places = {}
        for model in self.models:
            module = getattr(model, "module", model)  # without the strategy's wrapper
            saved = module.state_dict(keep_vars=True).keys()  # (reads no values)
            buffers = [(name, b) for name, b in module.named_buffers() if name in saved]
            cuts = module.sharding.cuts if hasattr(module, "sharding") else {}
            for name, tensor in [*module.named_parameters(), *buffers]:
                shape, offset, cut = list(tensor.shape), [0] * tensor.dim(), cuts.get(name)
                if cut:
                    shape[cut.dim] *= cut.parts
                    offset[cut.dim] = tensor.shape[cut.dim] * cut.part
                place = piece(self.names.get(tensor, name), tensor, shape, offset).place
                places.setdefault(tensor, place)
        return places

    def pieces(self) -> list[Piece]:
        """Return all tensors and their optimizer states; a state is sharded like its parameter."""
        held = self.held()
        pieces = [part for parts in held.values() for _, part in parts]
        for tensor, key, value in self.states():
            for where, part in held[tensor]:
                name = f"{part.place.name}/{key}"
                if is_count(key, value.shape, tensor.shape):
                    pieces.append(piece(name, value))
                elif value.shape == tensor.shape:
                    value_there = value if where is WHOLE else value[where]
                    pieces.append(Piece(replace(part.place, name=name), value_there))
                else:
                    raise ValueError(
                        f"{name} has shape {list(value.shape)}: it cannot be saved, not being one "
                        f"number, nor one for each of {list(tensor.shape)}"
                    )
        return pieces

    def states(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for optimizer in self.optimizers:
            for tensor, states in optimizer.state.items():
                for key, value in states.items():
                    if value is not None:  # (as SGD's momentum_buffer without momentum)
                        is_tensor = isinstance(value, Tensor)  # (the state itself, no copy)
                        yield tensor, key, value if is_tensor else torch.tensor(value)

    def make_states(self, saved: Saved) -> None:
        """Give the optimizers the saved states, with the right shapes, to be filled."""
        held = self.held()
        for optimizer in self.optimizers:
            for tensor in stepped(optimizer):
                states = optimizer.state[tensor]
                states.clear()
                for _, part in held[tensor][:1]:  # (none in a shard of padding only)
                    for key, (shape, dtype) in saved.states.get(part.place.name, {}).items():
                        count = is_count(key, shape, part.place.shape)
                        like = torch.zeros((), dtype=dtype) if count else tensor.detach()
                        states[key] = torch.zeros_like(like)

    def fetched(self) -> ExitStack:
        """Load what a ZeRO has offloaded to files into memory inside `with`."""
        stack = ExitStack()
        for model in self.models:
            for unit in getattr(model, "units", ()):
                states = model.optimizer.state[unit.shard]
                stack.enter_context(model.tier.fetched(unit.shard, states))
        return stack

    def kinds(self) -> list[str]:
        return sorted({type(optimizer).__name__ for optimizer in self.optimizers})


def pieces_of_shard(
    unit: ShardedUnit, places: dict[Tensor, Place]
) -> Iterator[tuple[slice, Piece]]:
    """Return the parts of parameters that are in a unit's shard; padding belongs to none."""
    for parameter, of_parameter, in_shard in unit.parameters_in_shard():
        if of_parameter.start < of_parameter.stop:
            place = replace(places[parameter], start=of_parameter.start, stop=of_parameter.stop)
            yield in_shard, Piece(place, unit.shard.detach()[in_shard])


def stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def is_count(key: str, shape, of) -> bool:
    return key in COUNTS or (len(shape) == 0 and len(of) > 0)


def load(saved: Saved, pieces: list[Piece], generators: list[Piece], group) -> None:
    """Fill the pieces; a value that several parameters share must be the same for all."""
    apart = [replace(p, tensor=p.tensor.clone()) if not p.place.shape else p for p in pieces]
    saved.load(apart + generators, group)
    shared: dict[Tensor, Piece] = {}
    for ours, loaded in zip(pieces, apart):
        if ours is not loaded:
            first = shared.setdefault(ours.tensor, loaded)
            if not torch.equal(first.tensor, loaded.tensor):
                raise ValueError(
                    f"{first.place} is {first.tensor.item():g} and {loaded.place} is "
                    f"{loaded.tensor.item():g}, but here one optimizer state stands for both"
                )
            with torch.no_grad():
                ours.tensor.copy_(loaded.tensor)
