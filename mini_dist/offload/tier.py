"""The tier for ZeRO whose transfers go on behind the computation (Ren et al. 2021, ZeRO-Offload;
Rajbhandari et al. 2021, ZeRO-Infinity).

    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=Overlapped(Lanes()))

Where things are: the shards that are stepped, their states and gradients on the host, or, with a
`folder`, shards and states in files, and on demand gradients and parameters, too. What the device
needs of a shard it copies from there, under ZeRO-3 a unit ahead.

    backward    a unit's gradients leave as soon as they are scattered, through one of two buffers
    step        unit by unit: read states ahead, step on the host, write them behind, and bring new
                parameters back, each beside the others
    early       the step of a unit begins in backward, as soon as its gradient is there
    delayed     the host steps while the next step computes: its parameters are one update late

Nothing of this changes a number, `delayed` excepted: the same optimizer steps the same gradients.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..ledger.recording import recorded
from .files import FileStore, OffloadError
from .lanes import Arrival, Lanes, to_device_, to_host_

BUFFERS = 2  # gradients that the device holds: one is made while the last one leaves


class Overlapped:
    """What `offload=` of a ZeRO stage may be, besides "cpu" and a folder.

    folder: of the files, or None for the host's memory. early: a shard is stepped in the backward
    of the last of `micro_batches`, with the settings of that moment; nobody can clip then, for the
    norm needs all gradients first.
    delayed: one step late (Ren et al. 2021, section 5.2); `tier.catch_up()` at the end.
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
        for kind, away in (("parameters", parameters_too), ("gradients", gradients_too)):
            if away and folder is None:
                raise ValueError(f"{kind}_too=True needs a folder to put the {kind} into")
        self.lanes, self.folder = lanes, folder
        self.parameters_too, self.gradients_too = parameters_too, gradients_too
        self.early, self.delayed, self.micro_batches = early, delayed, micro_batches

    def of(self, group) -> Tier:
        return Tier(self, group)


class Tier:
    """The same on one rank: see mini_dist/zero/offload.py for what each method is asked for."""

    keeps_last_units = True  # or their way back would hide behind nothing

    def __init__(self, options: Overlapped, group):
        self.options, self.lanes, self.group = options, options.lanes, group
        folder = options.folder
        self.files = FileStore(Path(folder) / f"rank{group.rank()}") if folder else None
        self.numbers: dict[Tensor, int] = {}  # of the shards
        self.published: dict[Tensor, Tensor] = {}  # what the device takes of a shard
        self.gradients: dict[Tensor, Tensor] = {}  # on the host, added up
        self.came: dict[Tensor, int] = {}  # how many gradients of micro-batches
        self.ready: dict[Tensor, list] = {}  # what is under way with a shard: gradient, step
        self.leaving: deque = deque()  # gradients that the device still holds
        self.buffers: dict[torch.dtype, deque] = {}  # (host memory, what its last use is over with)
        self.fetches: dict[Tensor, tuple] = {}
        self.copies: dict[Tensor, Arrival] = {}  # the last copy to the device of each shard
        self.written: deque = deque()  # the last shards whose states were in memory
        self.stepped: set[Tensor] = set()  # in this step already
        self.optimizer: torch.optim.Optimizer | None = None
        self.failed: list[OffloadError] = []
        self.lost: OffloadError | None = None  # a part of this step's gradients is gone
        self.in_files: set[str] = set()

    # -- parameters ---------------------------------------------------------------------------

    def keep(self, mine: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """The shard that is stepped, on the host; and if it is not what the device takes, that."""
        shard = nn.Parameter(self.lanes.empty(mine, dtype).copy_(mine))
        self.numbers[shard], self.ready[shard] = len(self.numbers), []
        same = dtype == mine.dtype and not self.options.delayed and self.files is None
        host = shard if same else self.lanes.empty(mine, mine.dtype).copy_(mine)
        self.published[shard] = host
        if self.files:
            self.write(shard)
        return shard

    def fill_(self, mine: Tensor, shard: Tensor):
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

    def begin_copy(self, there: Tensor, shard: Tensor):
        source = self.published[shard]
        after = [] if self.options.delayed else self.ready[shard]
        name, files = self.name(shard, "published"), self.options.parameters_too
        if files:
            read = partial(self.published_back, source, name)
            after = [self.lanes.begin("read", read, there.nbytes, after)]

        def work():
            to_device_(there, source, self.group)
            if files:
                source.untyped_storage().resize_(0)

        self.copies[shard] = self.lanes.begin("to_device", work, there.nbytes, after)
        return self.copies[shard]

    def published_back(self, source: Tensor, name: str) -> None:
        """In the middle of a pass through the model, which cannot go on without it."""
        try:
            from_file_(source, name, self.files, self.group)
        except OffloadError as error:
            raise error.but(
                "The optimizer's shards and states are whole, but no parameter comes from there: "
                "go back to the last checkpoint"
            ) from error

    @torch.no_grad()
    def publish(self, shard: Tensor) -> None:
        """What was stepped is from now on what the device takes."""
        there = self.published[shard]
        if there is not shard:
            there.untyped_storage().resize_(there.numel() * there.element_size())
            there.copy_(shard.detach())

    # -- gradients ----------------------------------------------------------------------------

    def add_gradient(self, shard: Tensor, part: Tensor) -> None:
        """Begin to bring a part of the mean gradient to the host; there it is added up."""
        part = part.to(self.published[shard].dtype)
        pool = self.buffers.setdefault(part.dtype, deque([None] * BUFFERS))
        last = pool.popleft()
        buffer, before = last or (None, [])
        if buffer is None or buffer.numel() < part.numel():
            buffer = self.lanes.empty(part, part.dtype)
        host, group = buffer[: part.numel()], self.group
        there = self.lanes.begin(
            "to_host", lambda: to_host_(host, part, group), part.nbytes, before
        )
        self.leaving.append((there, part))
        while len(self.leaving) >= BUFFERS:  # with the next one the device shall not hold more
            self.leaving.popleft()[0].wait()
        first = shard not in self.gradients
        if first:
            self.gradients[shard] = self.lanes.empty(shard, shard.dtype)
            self.came[shard] = 0
        total, after = self.gradients[shard], [there]
        add = total.copy_ if first else total.add_
        if self.options.gradients_too and not first:
            back = partial(self.gradient_back, shard, total)
            after.append(self.lanes.begin("read", back, total.nbytes, self.ready[shard]))
        passed = (2 if first else 3) * host.nbytes
        over = self.lanes.begin("host", lambda: add(host), passed, after)
        if self.options.gradients_too:  # after the last step has read the file that is overwritten
            leave, before = (
                partial(self.put, total, self.name(shard, "gradient")),
                self.ready[shard],
            )
            over = self.lanes.begin("write", leave, total.nbytes, [over, *before])
        pool.append((buffer, [over]))
        self.ready[shard] = [*self.ready[shard], over]
        self.came[shard] += 1
        if self.options.early and self.came[shard] % self.options.micro_batches == 0:
            if shard in self.stepped:
                raise ValueError(
                    f"early=True with micro_batches={self.options.micro_batches}, and one more "
                    "gradient came after its unit was stepped: give the backwards of a step"
                )
            if self.may_be_early():
                self.step_shard(shard)

    def may_be_early(self) -> bool:
        """Not if a file is lost before anything is stepped: backward goes on, `step` says it."""
        try:
            if not self.stepped:
                self.check_files()
            return True
        except OffloadError:
            return False

    def gradient_back(self, shard: Tensor, total: Tensor) -> None:
        """In backward, to add to it. If its file is gone the step cannot be made any more."""
        try:
            self.get(total, self.name(shard, "gradient"))
        except OffloadError as error:
            total.untyped_storage().resize_(total.nbytes)  # backward goes on
            self.lost = error.but(
                "The sum of this step's gradients was in it. Parameters and states are as they "
                "were: zero_grad(), and repeat the step"
            )

    def show_gradients(self, shards: Iterable[Tensor]) -> None:
        """Wait for all gradients, and let the shards have them, on the host."""
        for shard in self.one_by_one(shards):
            self.in_files.discard(self.name(shard, "gradient"))  # from here on it may be changed

    def one_by_one(self, shards: Iterable[Tensor]) -> Iterator[Tensor]:
        """Each shard with its gradient, for who clips; one that is in a file is in memory
        meanwhile, and is written again if it was changed."""
        if self.options.early:
            raise ValueError(
                "early=True steps a unit before the norm of all gradients is known: give "
                "early=False, or no max_norm"
            )
        self.wait()
        self.check_gradients()
        changed = False  # by clipping
        for shard in shards:
            shard.grad = gradient = self.gradients.get(shard)
            name = self.name(shard, "gradient")
            if name not in self.in_files:
                before = gradient is not None and gradient._version
                yield shard
                changed |= gradient is not None and gradient._version != before
                continue
            try:
                get = partial(self.get, gradient, name)
                self.lanes.begin("read", get, gradient.nbytes).wait()
            except OffloadError as error:
                if not changed:
                    raise
                raise error.but(
                    "Some gradients are clipped and some are not. Parameters and states are as "
                    "they were: zero_grad(), and repeat the step"
                ) from error
            self.in_files.add(name)
            before = gradient._version
            yield shard
            changed |= gradient._version != before
            if gradient._version != before:
                put = partial(self.put, gradient, name)
                self.lanes.begin("write", put, gradient.nbytes).wait()
            elif name in self.in_files:
                gradient.untyped_storage().resize_(0)

    def forget_gradient(self, shard: Tensor) -> None:
        self.gradients.pop(shard, None)
        self.in_files.discard(self.name(shard, "gradient"))
        self.lost = shard.grad = None
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
        call steps what is not stepped yet. If it cannot be written, when all are stepped."""
        self.fetches.clear()
        if self.options.delayed:
            self.catch_up()
        if self.options.gradients_too:
            self.check_gradients()
        if not self.stepped:  # else their files are changing at this moment
            self.check_files()
        for shard in self.order:
            if shard not in self.stepped:
                self.step_shard(shard)
        if not self.options.delayed:  # parameters come after the last gradient anyway
            self.let_go()
        waits = self.files and not self.options.delayed  # an error of a file is to be raised here
        if waits:
            self.let_all_arrive()
        self.stepped.clear()
        if waits:
            self.wait()

    def catch_up(self) -> None:
        """With `delayed`: let the device have what was stepped meanwhile. Who ends here calls
        `refresh_parameters` of the model, too."""
        self.wait()
        for shard in self.numbers:
            if shard in self.copies:  # one that was begun ahead may not have been waited for
                self.copies.pop(shard).on_host()
            with self.fetched(shard, {}):
                pass

    def step_shard(self, shard: Tensor) -> None:
        """Begin to read what is in files, to step, and to write it."""
        gradient = self.gradients.get(shard)
        if gradient is None:
            return
        self.stepped.add(shard)
        twin = nn.Parameter(shard.detach())  # the same memory
        twin.grad = gradient
        groups = [  # with the settings of now
            {**group, "params": [twin]}
            for group in self.optimizer.param_groups
            if any(shard is each for each in group["params"])
        ]
        states, name = self.optimizer.state[shard], self.name(shard, "gradient")

        def step():
            self.of_host.param_groups, self.of_host.state[twin] = groups, states
            self.of_host.step()
            del self.of_host.state[twin]
            if name in self.in_files:
                gradient.untyped_storage().resize_(0)
            if not self.options.delayed:
                self.publish(shard)

        after = self.ready[shard]
        if self.files:  # two shards' states are in memory: this one's read waits for a write
            free = [self.written.popleft()] if len(self.written) == BUFFERS else []
            size = self.bytes_in_files(shard) + gradient.nbytes * self.options.gradients_too
            read = partial(self.read, shard, gradient)
            after = [*after, self.lanes.begin("read", read, size, [*free, *after])]
        # gradient, shard and Adam's two moments are read, the last three written
        passed = gradient.nbytes + 6 * shard.numel() * shard.element_size()
        done = self.lanes.begin("host", step, passed, after)
        self.ready[shard] = [done]
        if self.files:
            size = self.bytes_in_files(shard)
            # With `delayed` the next forward may be taking `published` now, and it has not changed.
            write = partial(self.write, shard, published=not self.options.delayed)
            self.written.append(self.lanes.begin("write", write, size, [done]))
            self.ready[shard].append(self.written[-1])

    def wait(self) -> None:
        """Until nothing is under way. Raises what files have met, once."""
        self.let_all_arrive()
        if self.failed:
            failed, self.failed = self.failed, []
            raise failed[0]

    def let_all_arrive(self) -> None:
        """Raises what was raised on the way, when nothing is under way any more."""
        self.let_go()
        errors: dict[Tensor, Exception] = {}
        for shard, arrivals in self.ready.items():
            for arrival in arrivals:
                try:
                    arrival.wait()
                except Exception as error:
                    errors[shard] = error
            arrivals.clear()
        self.written.clear()
        self.stepped -= errors.keys()
        for error in errors.values():
            if isinstance(error, OffloadError):
                raise error.but(self.not_stepped(len(errors))) from error
            raise error

    def not_stepped(self, count: int) -> str:
        """In words, what is intact if so many shards' files could not be read."""
        of = f"{count} of {len(self.ready)} units"
        if self.options.delayed:  # the next gradients are in their place already
            return f"{of} miss the last step's update; go back to the last checkpoint"
        return (
            f"{of} are not stepped and are as they were, the others are stepped. When it can be "
            "read, model.optimizer.step() steps those, and model.refresh_parameters() follows"
        )

    def let_go(self) -> None:
        """Wait until the device holds no gradient that is on its way."""
        while self.leaving:
            self.leaving.popleft()[0].wait()

    # -- files --------------------------------------------------------------------------------

    def large(self, shard: Tensor) -> dict[str, Tensor]:
        """What of a shard is in files: itself and its states, but for single numbers, as AdamW's
        count of steps."""
        states = self.optimizer.state[shard] if self.optimizer else {}
        large = {k: v for k, v in states.items() if getattr(v, "shape", None) == shard.shape}
        if self.options.parameters_too:
            large["published"] = self.published[shard]
        return {"shard": shard, **large}

    def bytes_in_files(self, shard: Tensor) -> int:
        large = self.large(shard).items()
        return sum(t.numel() * t.element_size() for what, t in large if what != "published")

    def name(self, shard: Tensor, what: str) -> str:
        return f"{self.numbers[shard]}.{what}"

    def check_files(self) -> None:
        """Before anything is stepped: all files are there, and whole."""
        try:
            for name in sorted(self.in_files):
                self.files.check(name)
        except OffloadError as error:
            raise error.but(
                "Nothing was changed; put the file back, and model.optimizer.step() and "
                "model.refresh_parameters() go on, or go back to the last checkpoint"
            ) from error

    def check_gradients(self) -> None:
        """They are there, and all that leave have left."""
        self.let_all_arrive()
        if self.lost:
            raise self.lost

    def read(self, shard: Tensor, gradient: Tensor | None = None) -> None:
        """What is to be stepped. Gradients stay in their files, to be stepped again perhaps."""
        for what, tensor in self.large(shard).items():
            if what != "published":
                self.get(tensor, self.name(shard, what))
        if gradient is not None and not gradient.untyped_storage().nbytes():
            from_file_(gradient, self.name(shard, "gradient"), self.files, self.group)

    def write(self, shard: Tensor, published: bool = True) -> None:
        for what, tensor in self.large(shard).items():
            if tensor.untyped_storage().nbytes() and (published or what != "published"):
                self.put(tensor, self.name(shard, what))

    def get(self, tensor: Tensor, name: str) -> None:
        """What is not there since it could not be written is in memory."""
        if name in self.in_files:
            from_file_(tensor, name, self.files, self.group)
            self.in_files.discard(name)

    def put(self, tensor: Tensor, name: str) -> None:
        """What cannot be written stays in memory, and nothing is lost: see `wait`."""
        try:
            to_file_(tensor, name, self.files, self.group)
            self.in_files.add(name)
        except OffloadError as error:
            self.in_files.discard(name)
            self.failed.append(error)

    @contextmanager
    def fetched(self, shard: Tensor, states: dict):
        """Inside, the shard and its states may be read and written."""
        self.wait()
        if self.files:
            self.read(shard)
        yield
        self.publish(shard)
        if self.files:
            self.write(shard)
            self.wait()


@recorded
def to_file_(tensor: Tensor, name: str, files: FileStore, group) -> None:
    """Write the tensor and give its memory back."""
    files.write(name, tensor)
    tensor.untyped_storage().resize_(0)


@recorded
def from_file_(tensor: Tensor, name: str, files: FileStore, group) -> None:
    """Give the tensor its memory again, and its values; neither, if they cannot be read."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    try:
        files.read(name, tensor)
    except OffloadError:
        tensor.untyped_storage().resize_(0)
        raise
