"""Offloading for ZeRO with transfers that overlap with the computation (Ren et al. 2021,
ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=OverlappedOffload(Lanes()))

The shards to be updated, their states and gradients are on the host. With a `folder`, shards and
states are in files, and on request gradients and parameters as well. The device copies what it
needs of a shard from there, under ZeRO-3 one unit ahead.

    backward    a unit's gradients are copied out as soon as they are scattered (gradients.py)
    step        unit by unit, and overlapped: read the next states, step on the host, write the
                last states (shelf.py), and copy new parameters back
    early       a unit's step begins during backward, as soon as its gradient has arrived
    delayed     the host steps during the next step: its parameters lack one update

Only `delayed` changes any number: otherwise the same optimizer steps with the same gradients.

Read `begin_step` first: it is one unit's step, with everything before and after it.
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

SHARDS_IN_MEMORY = 2  # for states in files: one is stepped, one is read or written


@checks_kinds
class OverlappedOffload:
    """An `offload=` of a ZeRO stage, instead of "cpu" or a folder.

    folder: of the files, or None for the host's memory. early: step a shard in the backward of the
    last of `micro_batches`, with the settings of that moment; clipping is then impossible, because
    the norm needs all gradients first.
    delayed: one step late (Ren et al. 2021, section 5.2); call `tier.catch_up()` at the end. Errors
    of files are also late, and an update whose file cannot be read is then lost.
    parameters_too: parameters for the device are in files as well, not on the host.
    gradients_too: so are gradients, from backward until the step. A second micro-batch's gradient
    is added to what is read back, so a norm and clipping read and write them once more.
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
    """Offloading on one rank; mini_dist/strategies/zero/offload.py says what each method has to
    do."""

    keeps_last_units = True  # otherwise nothing would overlap with their copies back

    def __init__(self, options: OverlappedOffload, group):
        self.options, self.lanes, self.group = options, options.lanes, group
        self.shelf, self.in_files = Shelf(options.folder, group), options.folder is not None
        # shard -> what its next use waits for: a gradient that arrives, a step
        self.under_way: dict[Tensor, list[Arrival]] = {}
        gradients_too = options.gradients_too
        self.gradients = Gradients(self.lanes, self.shelf, self.under_way, gradients_too, group)
        # shard -> (name, tensor) pairs: the parameters for the device; with `delayed`, the last
        # pair is what the device will get after the step that is in flight
        self.versions: dict[Tensor, list[tuple[str, Tensor]]] = {}
        self.fetches: dict[Tensor, tuple[Arrival, Tensor]] = {}  # copies that were begun ahead
        self.copies: dict[Tensor, Arrival] = {}  # each shard's last copy to the device
        self.stepped: set[Tensor] = set()  # in this step already
        self.late: dict[Tensor, list[Arrival]] = {}  # steps that the device has not seen yet
        self.later: deque[Callable] = deque()  # steps that wait for their turn, with `delayed`
        self.written: deque[Arrival] = deque()  # of the last shards whose states were in memory
        self.optimizer: torch.optim.Optimizer | None = None

    # -- parameters ---------------------------------------------------------------------------

    def keep(self, mine: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """Keep the shard on the host, and a second copy if the device gets something else."""
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
        """Note an updated shard for the device, which uses it from the next `turn` on."""
        _, there = self.versions[shard][-1]
        if there is not shard:
            make_room_(there)
            there.copy_(shard.detach())

    def turn(self, shard: Tensor) -> None:
        """Switch the device to what was published last."""
        self.versions[shard].reverse()

    def fill_(self, mine: Tensor, shard: Tensor) -> Arrival | None:
        """Begin to copy the shard to the device; return the arrival, or None if it is there."""
        if shard in self.fetches:
            arrival, there = self.fetches.pop(shard)
            arrival.wait()
            mine.copy_(there)
            return None
        return self.begin_copy(mine, shard)

    def fetch(self, mine: Tensor, shard: Tensor) -> None:
        """Begin to copy the shard before memory for the whole unit is allocated (n > 1)."""
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
        """Load parameters in the middle of a pass through the model, which needs them to
        continue."""
        if name not in self.shelf.away:  # in memory because their write failed
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
        """Begin to copy a part of the mean gradient to the host, where it is summed."""
        self.begin_later()  # they step the last sum, not this one
        _, taken = self.versions[shard][0]
        self.gradients.add(shard, part.to(taken.dtype))
        if self.options.early and self.gradients.count[shard] % self.options.micro_batches == 0:
            self.step_early(shard)

    def step_early(self, shard: Tensor) -> None:
        """Step in backward, except if a file is lost: then backward continues, and `step`
        raises."""
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
        """Wait for all gradients, and attach them to the shards, on the host."""
        self.before_clipping()
        self.gradients.show(shards)

    def one_by_one(self, shards: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield each shard with its gradient, which is in memory only during that time."""
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
        """Raise RuntimeError if a backward that is over has already stepped with the gradient."""
        if self.options.early and self.stepped:
            raise RuntimeError(
                "early=True has stepped units in a backward whose step() never came, so they are a "
                "step ahead of the others: rebuild the model, or go back to the last checkpoint"
            )
        self.gradients.forget(shard)
        self.stepped.discard(shard)

    # -- the step -----------------------------------------------------------------------------

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` begin the step of each shard, in the order of forward. A separate
        host optimizer does the steps, with one shard at a time and the given optimizer's states, so
        that nobody else sees a half-changed list or gradient."""
        self.optimizer, self.of_host = optimizer, copy(optimizer)
        self.of_host.state = defaultdict(dict)
        self.order = [shard for group in optimizer.param_groups for shard in group["params"]]
        optimizer.step = self.step

    def step(self, *_) -> None:
        """Step all shards. Raises OffloadError: before any step if a file is gone or cut off; after
        the other steps if a file exists but cannot be read (in both cases a second call steps the
        remaining shards); after all steps if a file cannot be written. With `delayed`, all of this
        happens one step later."""
        self.end_fetches()
        if self.options.delayed:
            self.catch_up()
        if self.options.gradients_too:
            self.let_all_arrive()
            if self.gradients.lost:
                raise self.gradients.lost
        if not self.stepped:  # else their files are being changed now
            self.check_files()
        for shard in self.order:
            if shard not in self.stepped:
                self.step_shard(shard)
        if not self.options.delayed:  # parameters follow the last gradient anyway
            self.gradients.let_go()
            if self.in_files:  # file errors must be raised here
                self.let_all_arrive()
        self.stepped.clear()
        if not self.options.delayed:
            self.shelf.raise_failed()

    def step_shard(self, shard: Tensor) -> None:
        """Step with the current sum of gradients and the current settings."""
        gradient = self.gradients.sums.get(shard)
        if gradient is None:
            return
        self.stepped.add(shard)
        step = self.optimizer.state[shard], self.settings_of(shard)
        self.later.append(partial(self.begin_step, shard, gradient, *step))
        if not (self.options.delayed and self.options.parameters_too):
            self.begin_later()

    def begin_later(self, count: int | None = None) -> None:
        """Begin the late steps. If parameters come from the files that a late step reads, begin
        unit by unit, each after one unit's parameters; otherwise forward would wait for all of
        it."""
        for _ in range(len(self.later) if count is None else min(count, len(self.later))):
            self.later.popleft()()

    def begin_step(self, shard: Tensor, gradient: Tensor, states: dict, settings: dict) -> None:
        """Begin to read a shard's files, to step, to publish, and to write."""
        after = list(self.under_way[shard])
        if shard in self.copies:  # begun ahead for a module that did not run; may be in flight
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
        """Begin a read. Two shards' states are in memory, so this waits for a write."""
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
        """Return the current learning rate and so on, which a schedule may change at any time."""
        for group in self.optimizer.param_groups:
            if any(shard is each for each in group["params"]):
                return {name: value for name, value in group.items() if name != "params"}

    def step_on_host(self, shard: Tensor, gradient: Tensor, states: dict, settings: dict) -> None:
        twin = nn.Parameter(shard.detach())  # shares the memory
        twin.grad = gradient
        self.of_host.param_groups = [{**settings, "params": [twin]}]
        self.of_host.state[twin] = states
        self.of_host.step()
        del self.of_host.state[twin]
        if self.gradients.name(shard) in self.shelf.away:
            give_room_back_(gradient)
        self.publish(shard)

    def passed_in_step(self, shard: Tensor, gradient: Tensor) -> int:
        """Return bytes of memory traffic: gradient, shard and Adam's two moments are read, the last
        three are written; publishing reads the shard again and writes what the device uses."""
        _, there = self.versions[shard][-1]
        publish = 0 if there is shard else shard.nbytes + there.nbytes
        return gradient.nbytes + 6 * shard.nbytes + publish

    # -- one step late ------------------------------------------------------------------------

    def catch_up(self) -> None:
        """With `delayed`: wait until the host has stepped, and give the device the result. At the
        end of training, call the model's `refresh_parameters` as well."""
        self.begin_later()
        try:
            for arrivals in self.late.values():
                for arrival in arrivals:
                    arrival.wait()
        except OffloadError:
            self.let_all_arrive()  # raises it with the number of failed units
        for shard in self.late:
            self.turn(shard)
        self.late.clear()
        self.shelf.raise_failed()

    # -- waiting ------------------------------------------------------------------------------

    def end_fetches(self) -> None:
        """Wait for copies that were begun ahead and never used: then their memory may be freed."""
        for arrival, _ in self.fetches.values():
            arrival.wait()
        self.fetches.clear()

    def wait(self) -> None:
        """Wait until nothing is in flight. Raises file errors, once."""
        self.let_all_arrive()
        self.shelf.raise_failed()

    def let_all_arrive(self) -> None:
        """Wait until nothing is in flight, then raise what was raised on the way."""
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
        """Say in words what is intact if this many shards' files could not be read."""
        of = f"{count} of {len(self.under_way)} units"
        if self.options.delayed:  # the next gradients are already in their place
            return f"{of} miss the last step's update; go back to the last checkpoint"
        return (
            f"{of} are not stepped and are as they were, the others are stepped. When it can be "
            "read, model.optimizer.step() steps those, and model.refresh_parameters() follows"
        )

    # -- files --------------------------------------------------------------------------------

    def large(self, shard: Tensor) -> dict[str, Tensor]:
        """Return the parts of a shard that go to files: itself and its states, except single
        numbers such as AdamW's count of steps."""
        states = self.optimizer.state[shard] if self.optimizer else {}
        large = {k: v for k, v in states.items() if getattr(v, "shape", None) == shard.shape}
        return {"shard": shard, **large}

    def bytes_in_files(self, shard: Tensor) -> int:
        return sum(tensor.nbytes for tensor in self.large(shard).values())

    def check_files(self) -> None:
        """Check, before anything is stepped, that all files exist and are complete."""
        try:
            self.shelf.check()
        except OffloadError as error:
            raise error.but(
                "Nothing was changed; put the file back and continue with model.optimizer.step() "
                "and model.refresh_parameters(), or go back to the last checkpoint"
            ) from error

    def read(self, shard: Tensor, gradient: Tensor | None = None) -> None:
        """Read what the step needs. Gradients stay in their files, in case the step is repeated."""
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
        """Make the shard and its states readable and writable inside `with`, then update the
        device."""
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
