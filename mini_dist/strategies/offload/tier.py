"""The tier for ZeRO whose transfers go on behind the computation (Ren et al. 2021, ZeRO-Offload;
Rajbhandari et al. 2021, ZeRO-Infinity).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=OverlappedOffload(Lanes()))

Where things are: the shards that are stepped, their states and gradients on the host, or, with a
`folder`, shards and states in files, and on demand gradients and parameters, too. What the device
needs of a shard it copies from there, under ZeRO-3 a unit ahead.

    backward    a unit's gradients leave as soon as they are scattered (gradients.py)
    step        unit by unit: read states ahead, step on the host, write them behind (shelf.py), and
                bring new parameters back, each beside the others
    early       the step of a unit begins in backward, as soon as its gradient is there
    delayed     the host steps while the next step computes: its parameters are one update late

Nothing of this changes a number, `delayed` excepted: the same optimizer steps the same gradients.

Read `begin_step` first: it is one unit's step, with all that comes before and after it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mini_dist.plan.fields import checks_kinds

from .files import OffloadError
from .gradients import Gradients
from .lanes import Arrival, Lanes, to_device_
from .shelf import Shelf, give_room_back_, is_here, make_room_

SHARDS_IN_MEMORY = 2  # whose states are in files else: one is stepped, one is read or written


@checks_kinds
class OverlappedOffload:
    """What `offload=` of a ZeRO stage may be, besides "cpu" and a folder.

    folder: of the files, or None for the host's memory. early: a shard is stepped in the backward
    of the last of `micro_batches`, with the settings of that moment; nobody can clip then, for the
    norm needs all gradients first.
    delayed: one step late (Ren et al. 2021, section 5.2); `tier.catch_up()` at the end. So are
    errors of files, and an update whose file cannot be read is lost then.
    parameters_too: what the device takes of a shard is in files as well, and not on the host.
    gradients_too: so are gradients, from backward until they are stepped. A second micro-batch's is
    added to what is read back, and so a norm and clipping read and write them once more.
    """

    def __init__(
        self,
        lanes: Lanes,
        folder: str | Path | None = None,
        early: bool = False,
        delayed: bool = False,
        micro_batches: int = 1,
        parameters_too: bool = False,
        gradients_too: bool = False,
    ):
        if early and delayed:
            raise ValueError("early=True and delayed=True: a step cannot be early and late")
        if early and gradients_too:
            raise ValueError(
                "early=True and gradients_too=True: a gradient that is stepped as soon as it is "
                "there needs no file; give one of them"
            )
        if micro_batches != 1 and not early:
            raise ValueError(
                f"micro_batches={micro_batches} without early=True: how many there are matters "
                "only to a shard that is stepped in backward; leave it out"
            )
        for kind, away in (("parameters", parameters_too), ("gradients", gradients_too)):
            if away and folder is None:
                raise ValueError(f"{kind}_too=True needs a folder to put the {kind} into")
        self.lanes, self.folder = lanes, folder
        self.parameters_too, self.gradients_too = parameters_too, gradients_too
        self.early, self.delayed, self.micro_batches = early, delayed, micro_batches

    def of(self, group) -> Tier:
        return Tier(self, group)


class Tier:
    """The same on one rank: see mini_dist/strategies/zero/offload.py for what each method is asked
    for."""

    keeps_last_units = True  # or their way back would hide behind nothing

    def __init__(self, options: OverlappedOffload, group):
        self.options, self.lanes, self.group = options, options.lanes, group
        self.shelf, self.in_files = Shelf(options.folder, group), options.folder is not None
        # of each shard what its next use comes after: a gradient that arrives, a step
        self.under_way: dict[Tensor, list[Arrival]] = {}
        gradients_too = options.gradients_too
        self.gradients = Gradients(self.lanes, self.shelf, self.under_way, gradients_too, group)
        # of each shard (name, tensor): what the device takes; with `delayed` also what it will
        # take after the step that is under way, at the end of the list
        self.versions: dict[Tensor, list[tuple[str, Tensor]]] = {}
        self.fetches: dict[Tensor, tuple[Arrival, Tensor]] = {}  # copies that were begun ahead
        self.copies: dict[Tensor, Arrival] = {}  # the last copy to the device of each shard
        self.stepped: set[Tensor] = set()  # in this step already
        self.late: dict[Tensor, list[Arrival]] = {}  # steps that the device has not seen yet
        self.later: deque[Callable] = deque()  # with `delayed`, steps that wait for their turn
        self.written: deque[Arrival] = deque()  # of the last shards whose states were in memory
        self.optimizer: torch.optim.Optimizer | None = None

    # -- parameters ---------------------------------------------------------------------------

    def keep(self, mine: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """The shard that is stepped, on the host; and if it is not what the device takes, that."""
        shard = nn.Parameter(self.lanes.empty(mine, dtype).copy_(mine))
        self.under_way[shard] = []
        if dtype == mine.dtype and not self.options.delayed and not self.in_files:
            self.versions[shard] = [("published", shard)]
            return shard
        names = ("published", "published next") if self.options.delayed else ("published",)
        self.versions[shard] = [(name, self.lanes.empty(mine, mine.dtype)) for name in names]
        self.publish(shard)
        if self.in_files:
            self.write(shard)
        self.turn(shard)
        return shard

    @torch.no_grad()
    def publish(self, shard: Tensor) -> None:
        """Note what was stepped for the device, which takes it from the next `turn` on."""
        _, there = self.versions[shard][-1]
        if there is not shard:
            make_room_(there)
            there.copy_(shard.detach())

    def turn(self, shard: Tensor) -> None:
        """What was published last is what the device takes from now on."""
        self.versions[shard].reverse()

    def fill_(self, mine: Tensor, shard: Tensor) -> Arrival | None:
        """Begin to copy the shard to the device; returns the arrival, or None if it is there."""
        if shard in self.fetches:
            arrival, there = self.fetches.pop(shard)
            arrival.wait()
            mine.copy_(there)
            return None
        return self.begin_copy(mine, shard)

    def fetch(self, mine: Tensor, shard: Tensor) -> None:
        """Begin to bring the shard, before there is a place for the whole unit (n > 1)."""
        if self.group.size() > 1 and shard not in self.fetches:
            there = torch.empty_like(mine)
            self.fetches[shard] = self.begin_copy(there, shard), there

    def begin_copy(self, there: Tensor, shard: Tensor) -> Arrival:
        what, source = self.versions[shard][0]
        name = self.shelf.name(shard, what)
        after = [] if self.options.delayed else self.under_way[shard]
        if self.options.parameters_too:
            read = partial(self.look_at_parameters, source, name)
            after = [self.lanes.begin("read", read, there.nbytes, after)]

        def copy_it():
            to_device_(there, source, self.group)
            if name in self.shelf.away:
                give_room_back_(source)

        arrival = self.lanes.begin("to_device", copy_it, there.nbytes, after)
        self.copies[shard] = arrival
        self.begin_later(1)
        return arrival

    def look_at_parameters(self, source: Tensor, name: str) -> None:
        """In the middle of a pass through the model, which cannot go on without them."""
        if name not in self.shelf.away:  # they could not be written, and are in memory
            return
        try:
            self.shelf.look(source, name)
        except OffloadError as error:
            raise error.but(
                "The optimizer's shards and states are whole, but no parameter comes from there: "
                "go back to the last checkpoint"
            ) from error

    # -- gradients ----------------------------------------------------------------------------

    def add_gradient(self, shard: Tensor, part: Tensor) -> None:
        """Begin to bring a part of the mean gradient to the host; there it is added up."""
        self.begin_later()  # what is stepped is the last sum, not this one
        _, taken = self.versions[shard][0]
        self.gradients.add(shard, part.to(taken.dtype))
        if self.options.early and self.gradients.count[shard] % self.options.micro_batches == 0:
            self.step_early(shard)

    def step_early(self, shard: Tensor) -> None:
        """Not if a file is lost before anything is stepped: backward goes on, `step` says it."""
        if shard in self.stepped:
            raise ValueError(
                f"early=True with micro_batches={self.options.micro_batches}, and one more "
                "gradient came after its unit was stepped: give the backwards of a step"
            )
        try:
            if not self.stepped:
                self.check_files()
        except OffloadError:
            return
        self.step_shard(shard)

    def show_gradients(self, shards: Iterable[Tensor]) -> None:
        """Wait for all gradients, and let the shards have them, on the host."""
        self.before_clipping()
        self.gradients.show(shards)

    def one_by_one(self, shards: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each shard with its gradient, which is in memory only meanwhile."""
        self.before_clipping()
        return self.gradients.one_by_one(shards)

    def before_clipping(self) -> None:
        if self.options.early:
            raise ValueError(
                "early=True steps a unit before the norm of all gradients is known: give "
                "early=False, or no max_norm"
            )
        self.wait()

    def forget_gradient(self, shard: Tensor) -> None:
        """Raises RuntimeError if the gradient has stepped the shard in a backward that is over."""
        if self.options.early and self.stepped:
            raise RuntimeError(
                "early=True has stepped units in a backward whose step() never came, so they are a "
                "step ahead of the others: rebuild the model, or go back to the last checkpoint"
            )
        self.gradients.forget(shard)
        self.stepped.discard(shard)

    # -- the step -----------------------------------------------------------------------------

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step()` begins the step of each shard, in the order of forward. They are
        stepped by an optimizer of the host's own, which has one shard at a time and the states of
        the given one: so nobody else meets a half-changed list or gradient."""
        self.optimizer, self.of_host = optimizer, copy(optimizer)
        self.of_host.state = defaultdict(dict)
        self.order = [shard for group in optimizer.param_groups for shard in group["params"]]
        optimizer.step = self.step

    def step(self, *_) -> None:
        """Raises OffloadError. If a file is gone or cut off, before anything is stepped; if it
        cannot be read although it is there, when the others are stepped: in both cases a second
        call steps what is not stepped yet. If it cannot be written, when all are stepped. With
        `delayed` all of it a step later."""
        self.end_fetches()
        if self.options.delayed:
            self.catch_up()
        if self.options.gradients_too:
            self.let_all_arrive()
            if self.gradients.lost:
                raise self.gradients.lost
        if not self.stepped:  # else their files are changing at this moment
            self.check_files()
        for shard in self.order:
            if shard not in self.stepped:
                self.step_shard(shard)
        if not self.options.delayed:  # parameters come after the last gradient anyway
            self.gradients.let_go()
            if self.in_files:  # an error of a file is to be raised here
                self.let_all_arrive()
        self.stepped.clear()
        if not self.options.delayed:
            self.shelf.raise_failed()

    def step_shard(self, shard: Tensor) -> None:
        """With what there is now: the sum of gradients, and the settings."""
        gradient = self.gradients.sums.get(shard)
        if gradient is None:
            return
        self.stepped.add(shard)
        step = self.optimizer.state[shard], self.settings_of(shard)
        self.later.append(partial(self.begin_step, shard, gradient, *step))
        if not (self.options.delayed and self.options.parameters_too):
            self.begin_later()

    def begin_later(self, count: int | None = None) -> None:
        """Where parameters come from the same files as what a late step reads, it begins unit by
        unit, each behind the parameters of one unit: else forward would wait for all of it."""
        for _ in range(len(self.later) if count is None else min(count, len(self.later))):
            self.later.popleft()()

    def begin_step(self, shard: Tensor, gradient: Tensor, states: dict, settings: dict) -> None:
        """Begin to read what is in files, to step, to publish, and to write it."""
        after = list(self.under_way[shard])
        if shard in self.copies:  # begun ahead for a module that was not run, it may be under way
            after.append(self.copies.pop(shard))
        if self.in_files:
            after.append(self.begin_read(shard, gradient, after))
        step = partial(self.step_on_host, shard, gradient, states, settings)
        done = self.lanes.begin("host", step, self.passed_in_step(shard, gradient), after)
        self.under_way[shard] = [done]
        if self.in_files:
            self.under_way[shard].append(self.begin_write(shard, done))
        if self.options.delayed:
            self.late[shard] = self.under_way[shard]

    def begin_read(self, shard: Tensor, gradient: Tensor, after: list) -> Arrival:
        """Two shards' states are in memory, so this one's read waits for a write."""
        if len(self.written) == SHARDS_IN_MEMORY:
            after = [self.written.popleft(), *after]
        nbytes = self.bytes_in_files(shard) + gradient.nbytes * self.options.gradients_too
        return self.lanes.begin("read", partial(self.read, shard, gradient), nbytes, after)

    def begin_write(self, shard: Tensor, stepped: Arrival) -> Arrival:
        nbytes = self.bytes_in_files(shard)
        if self.options.parameters_too:
            nbytes += self.versions[shard][-1][1].nbytes
        self.written.append(
            self.lanes.begin("write", partial(self.write, shard), nbytes, [stepped])
        )
        return self.written[-1]

    def settings_of(self, shard: Tensor) -> dict:
        """Learning rate and so on, as they are now: a schedule may change them any time."""
        for group in self.optimizer.param_groups:
            if any(shard is each for each in group["params"]):
                return {name: value for name, value in group.items() if name != "params"}

    def step_on_host(self, shard: Tensor, gradient: Tensor, states: dict, settings: dict) -> None:
        twin = nn.Parameter(shard.detach())  # the same memory
        twin.grad = gradient
        self.of_host.param_groups = [{**settings, "params": [twin]}]
        self.of_host.state[twin] = states
        self.of_host.step()
        del self.of_host.state[twin]
        if self.gradients.name(shard) in self.shelf.away:
            give_room_back_(gradient)
        self.publish(shard)

    def passed_in_step(self, shard: Tensor, gradient: Tensor) -> int:
        """Bytes: gradient, shard and Adam's two moments are read, the last three are written; to
        publish, the shard is read once more and what the device takes is written."""
        _, there = self.versions[shard][-1]
        publish = 0 if there is shard else shard.nbytes + there.nbytes
        return gradient.nbytes + 6 * shard.nbytes + publish

    # -- one step late ------------------------------------------------------------------------

    def catch_up(self) -> None:
        """With `delayed`: wait until the host has stepped, and let the device have that from now
        on. Who ends here calls `refresh_parameters` of the model, too."""
        self.begin_later()
        try:
            for arrivals in self.late.values():
                for arrival in arrivals:
                    arrival.wait()
        except OffloadError:
            self.let_all_arrive()  # raises it with the number of units that it has met
        for shard in self.late:
            self.turn(shard)
        self.late.clear()
        self.shelf.raise_failed()

    # -- waiting ------------------------------------------------------------------------------

    def end_fetches(self) -> None:
        """What was begun ahead and nobody has asked for: its memory may be given back."""
        for arrival, _ in self.fetches.values():
            arrival.wait()
        self.fetches.clear()

    def wait(self) -> None:
        """Until nothing is under way. Raises what files have met, once."""
        self.let_all_arrive()
        self.shelf.raise_failed()

    def let_all_arrive(self) -> None:
        """Raises what was raised on the way, when nothing is under way any more."""
        self.begin_later()
        self.gradients.let_go()
        errors: dict[Tensor, Exception] = {}
        for shard, arrivals in self.under_way.items():
            for arrival in arrivals:
                try:
                    arrival.wait()
                except Exception as error:
                    errors[shard] = error
            self.under_way[shard] = []
        self.written.clear()
        self.stepped -= errors.keys()
        for shard in errors:
            self.late.pop(shard, None)
        for error in errors.values():
            if isinstance(error, OffloadError):
                raise error.but(self.not_stepped(len(errors))) from error
            raise error

    def not_stepped(self, count: int) -> str:
        """In words, what is intact if so many shards' files could not be read."""
        of = f"{count} of {len(self.under_way)} units"
        if self.options.delayed:  # the next gradients are in their place already
            return f"{of} miss the last step's update; go back to the last checkpoint"
        return (
            f"{of} are not stepped and are as they were, the others are stepped. When it can be "
            "read, model.optimizer.step() steps those, and model.refresh_parameters() follows"
        )

    # -- files --------------------------------------------------------------------------------

    def large(self, shard: Tensor) -> dict[str, Tensor]:
        """What of a shard is in files: itself and its states, but for single numbers, as AdamW's
        count of steps."""
        states = self.optimizer.state[shard] if self.optimizer else {}
        large = {k: v for k, v in states.items() if getattr(v, "shape", None) == shard.shape}
        return {"shard": shard, **large}

    def bytes_in_files(self, shard: Tensor) -> int:
        return sum(tensor.nbytes for tensor in self.large(shard).values())

    def check_files(self) -> None:
        """Before anything is stepped: all files are there, and whole."""
        try:
            self.shelf.check()
        except OffloadError as error:
            raise error.but(
                "Nothing was changed; put the file back, and model.optimizer.step() and "
                "model.refresh_parameters() go on, or go back to the last checkpoint"
            ) from error

    def read(self, shard: Tensor, gradient: Tensor | None = None) -> None:
        """What is to be stepped. Gradients stay in their files, to be stepped again perhaps."""
        for what, tensor in self.large(shard).items():
            self.shelf.get(tensor, self.shelf.name(shard, what))
        if gradient is not None and not is_here(gradient):
            self.shelf.look(gradient, self.gradients.name(shard))

    def write(self, shard: Tensor) -> None:
        what, published = self.versions[shard][-1]
        tensors = self.large(shard)
        if self.options.parameters_too:
            tensors[what] = published
        for what, tensor in tensors.items():
            if is_here(tensor):
                self.shelf.put(tensor, self.shelf.name(shard, what))

    @contextmanager
    def fetched(self, shard: Tensor, states: dict):
        """Inside, the shard and its states may be read and written; then the device takes them."""
        self.wait()
        if self.in_files:
            self.read(shard)
        yield
        if shard in self.copies:  # of what `publish` overwrites
            self.copies.pop(shard).on_host()
        self.publish(shard)
        if self.in_files:
            self.write(shard)
            self.wait()
        self.late.pop(shard, None)
        self.turn(shard)
