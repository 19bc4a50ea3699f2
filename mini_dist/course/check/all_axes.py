"""Exercises of lesson 15: the groups of a grid of ranks, and a training step on such a grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mini_dist.collectives import mesh
from mini_dist.collectives.mesh import AXES, Grid, axis_groups
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.plan.calculators import step_volume
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.training import all_axes

from . import answers
from .engine import Exercise, Line, Measured
from .measures import plain
from .watch import functions_of

# --- which ranks share a group -------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    pp: int
    dp: int
    cp: int
    tp: int

    @property
    def axes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items())


GRIDS = [(1, 3, 1, 2), (4, 2, 1, 2), (2, 2, 2, 2), (2, 3, 4, 5), (5, 4, 3, 2), (3, 1, 1, 1)]


def groups_trial(fn: Callable, sizes: Sizes, group):
    """Return (axis -> its groups as lists of ints, ""), or (None, what is wrong with the form)."""
    returned = fn(*sizes.axes.values())
    if not isinstance(returned, Mapping) or set(returned) != set(AXES):
        has = f"keys {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else returned
        return None, f"{has}"
    found = {axis: plain(in_lists(returned[axis])) for axis in AXES}
    for axis, lists in found.items():
        if not all(isinstance(ranks, list) and {*map(type, ranks)} <= {int} for ranks in lists):
            return None, f"{axis}: {shortened(returned[axis])}"
    return found, ""


def in_lists(groups) -> list:
    """Convert each group that is a tuple or a range to a list."""
    if not isinstance(groups, Iterable):
        return [groups]
    return [list(each) if isinstance(each, (tuple, range)) else each for each in groups]


def shortened(lists) -> str:
    text = str(lists)
    return text if len(text) <= 48 else text[:45] + "..."


class Groups(Measured):
    def measure(self):
        self.found, self.form = self.results[0]
        self.sizes = self.case.axes
        self.expected = axis_groups(**self.sizes)

    def lines(self) -> list[Line]:
        if self.found is None:
            wanted = f"a dict with keys {', '.join(AXES)}: lists of lists of ranks"
            return [Line(str(self.case), self.form, wanted, False)]
        return [
            Line(f"{self.case}: {axis}", shortened(mine), shortened(right), sorted(mine) == right)
            for axis, right in self.expected.items()
            for mine in [self.found[axis]]
        ]

    def mistake(self) -> str:
        if self.found is None:
            return (
                "Return a dict: for each of pp, dp, cp, tp the list of its groups, each of them a "
                "list of ranks in order."
            )
        axis = next(axis for axis in AXES if sorted(self.found[axis]) != self.expected[axis])
        mine = self.found[axis]
        count = Counter(rank for ranks in mine for rank in ranks)
        every = range(Grid(**self.sizes).size)
        off = [rank for rank in sorted({*every, *count}) if count[rank] != (rank in every)]
        if off:
            there = f"is in {count[off[0]]} of yours" if off[0] in every else "does not exist"
            return f"Along {axis}, every rank must be in exactly one group: rank {off[0]} {there}."
        other = next((a for a in AXES if a != axis and sorted(mine) == self.expected[a]), None)
        if other:
            return f"These are the groups along {other}: which axis is the outermost? pp, then dp."
        if any(len(ranks) != self.sizes[axis] for ranks in mine):
            return f"{axis}={self.sizes[axis]}, so each of its groups has {self.sizes[axis]} ranks."
        backwards = axis_groups(**dict(reversed(self.sizes.items())))
        if all(sorted(self.found[each]) == backwards[each] for each in AXES):
            return (
                "tp has to be innermost: rank + 1 is the next tp rank, so that tp stays in a node."
            )
        if sorted(map(sorted, mine)) == self.expected[axis]:
            return "The groups are right, but each group must list its ranks in rising order."
        return (
            f"Along {axis}, ranks differ in {axis} only. rank = ((pp * DP + dp) * CP + cp) * TP + "
            "tp: how far apart are two neighbors along each axis? (By the product of the sizes of "
            "the axes inside it.)"
        )


# --- a step on the grid --------------------------------------------------------------------------

CONFIG = ModelConfig(  # both tp ranks hold the key/value head
    d_model=16, num_layers=2, num_heads=2, num_kv_heads=1, seq_len=16, vocab_size=64
)
STEPS, RATE, MAX_NORM = 3, 0.5, 0.5  # only the first step's norm is above MAX_NORM
PUTS_TOGETHER = {all_axes.ideas.schedule_of, *functions_of(all_axes.fits)}  # answers may call these


@dataclass(frozen=True)
class Job:
    layout: Layout

    def __str__(self) -> str:
        axes = " ".join(f"{axis} {n}" for axis, n in self.layout.axes.items() if n > 1)
        return axes + " and sequence parallelism" * self.layout.sequence_parallel


JOBS = [
    Layout(dp=2, cp=2, micro_batch_size=2, num_micro_batches=2),
    Layout(pp=2, cp=2, tp=2, sequence_parallel=True, micro_batch_size=4, num_micro_batches=2),
    Layout(pp=2, tp=2, micro_batch_size=4, num_micro_batches=2),
    Layout(pp=2, micro_batch_size=4, num_micro_batches=2),
]


def whole_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [B, S]; half of the rows have padding, so ranks' counts differ; a
    step has more of it than the step before."""
    generator = torch.Generator().manual_seed(step)
    shape = (rows, CONFIG.seq_len + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    targets = tokens[:, 1:].clone()
    targets[rows // 2 :, CONFIG.seq_len // 2 + 1 - step :] = IGNORE_INDEX
    return tokens[:, :-1], targets


@dataclass
class Trained:
    """The (loss, norm) of each step, or a sentence about a wrong return value."""

    done: list[tuple[float, float]] = field(default_factory=list)
    instead: str = ""


def train(fn: Callable, job: Job, group) -> Trained:
    """Run STEPS steps of the learner's function."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layout, trained = job.layout, Trained()
        dp = Grid(**layout.axes).coordinates(group.rank())["dp"]
        step = fn(CONFIG, layout, group)
        if not callable(step):
            return Trained(instead=f"compose returned a {type(step).__name__}, no function step")
        group.recorder.phases.set("forward")  # calls before this count as setup
        for number in range(STEPS):
            batch = whole_batch(number, layout.global_batch_size)
            returned = step(*(x.chunk(layout.dp)[dp] for x in batch))
            try:
                loss, norm = returned
                trained.done.append((float(loss), float(norm)))
            except (TypeError, ValueError, RuntimeError):
                return Trained(instead=f"step returned a {type(returned).__name__}")
        return trained
    finally:
        torch.set_default_dtype(before)


def one_process(batches) -> list[tuple[float, float]]:
    """Return the (loss, norm) of each step if one process trains on the whole batches."""
    model = GPT(CONFIG, seed=0).double()
    optimizer, done = torch.optim.SGD(model.parameters(), lr=RATE), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        done.append((loss.item(), norm.item()))
    return done


def listed(numbers) -> str:
    return " ".join(f"{number:.4f}" for number in numbers)


class Steps(Measured):
    def measure(self):
        self.layout, self.grid = self.case.layout, Grid(**self.case.layout.axes)
        rows = self.layout.global_batch_size
        self.expected = one_process([whole_batch(step, rows) for step in range(STEPS)])
        self.instead = next((each.instead for each in self.results if each.instead), "")
        self.done = [each.done for each in self.results]
        self.wrong = [  # (step, 0 for the loss or 1 for the norm), in order
            (step, what)
            for step in range(STEPS * (not self.instead))
            for what in (0, 1)
            if self.values(step, what) != {round(self.expected[step][what], 6)}
        ]

    def values(self, step: int, what: int, ranks: Iterable[int] = ()) -> set[float]:
        chosen = [self.done[rank] for rank in ranks] or self.done
        return {round(done[step][what], 6) for done in chosen}

    def lines(self) -> list[Line]:
        if self.instead:
            return [Line(f"{self.case}: returned", self.instead, "step -> (loss, norm)", False)]
        lines = []
        for what, word in enumerate(("losses", "gradient norms")):
            rows = {tuple(round(pair[what], 4) for pair in done) for done in self.done}
            said = " or ".join(map(listed, sorted(rows)[:2]))
            right = listed(pair[what] for pair in self.expected)
            ok = all(which != what for _, which in self.wrong)
            lines.append(Line(f"{self.case}: {word}", said, right, ok))
        return lines + ([] if self.wrong else [*self.traffic(), *self.groups()])

    def mistake(self) -> str:
        if self.instead:
            return (
                f"{self.instead[0].upper()}{self.instead[1:]}: compose returns the function step, "
                "and step returns (loss, norm), two numbers."
            )
        if self.wrong:
            return self.about_values(*self.wrong[0])
        line = next(line for line in [*self.traffic(), *self.groups()] if not line.ok)
        axis = line.what.split()[-1]
        if "groups of" in line.what:
            return f"The order of the axes differs: {axis} joins the wrong ranks."
        sent, expected = self.sent_over(axis), self.predicted()[axis]
        said = (
            f"{'More' if sent > expected else 'Less'} was sent over {axis} than this layout needs. "
        )
        if axis == "pp" and self.layout.sequence_parallel:
            return said + (
                "With sequence parallelism a stage sends only its tp rank's tokens, "
                "[b, S/(cp tp), D] of a micro-batch: is shard_model given pair=SEQUENCE, and "
                "activation that shape?"
            )
        if axis == "pp" and sent < expected and self.layout.tp > 1:
            return said + (
                "This layout has no sequence parallelism: a stage sends all tokens of its "
                "part, [b, S/cp, D], and shard_model is given pair=TENSOR."
            )
        return said + (
            "Does every rank hold and compute its own part only? Do the groups match "
            "Mesh(group, **layout.axes)?"
        )

    def predicted(self) -> dict[str, float]:
        """Return the bytes over each axis; gradients are averaged over dp and cp together."""
        both = "*".join(axis for axis in ("dp", "cp") if self.layout.axes[axis] > 1)
        found: dict[str, float] = {}
        for rank in range(self.grid.size):
            place = self.grid.coordinates(rank)["pp"]
            for each in step_volume(CONFIG, self.layout, "course", place):
                axis = both if each.name == "dp" else each.name
                found[axis] = found.get(axis, 0) + STEPS * 2 * each.value  # float64
        return found

    def sent_over(self, axis: str) -> int:
        return sum(c.sent for c in self.run.ledger.leaves(axis=axis) if c.phase != "setup")

    def traffic(self) -> list[Line]:
        """Compare the bytes over each axis with the prediction. Attention and tp can be written in
        several ways, so their bounds are wide. Losses and norms add a few numbers elsewhere."""
        lines = []
        for axis, expected in self.predicted().items():
            least, most = (0.8, 1.6) if axis in ("cp", "tp") else (1, 1.1)
            sent = self.sent_over(axis)
            ok = least * expected <= sent <= most * expected
            what = f"{self.case}: bytes over {axis}"
            lines.append(Line(what, f"{sent:,}", f"about {expected:,.0f}", ok))
        return lines

    def groups(self) -> list[Line]:
        lines = []
        for axis, size in self.layout.axes.items():
            groups = {c.group for c in self.run.ledger.leaves(axis=axis)}
            right = self.grid.groups(axis)
            if size > 1 and not groups <= set(map(tuple, right)):
                lines.append(Line(f"{self.case}: groups of {axis}", min(groups), right[0], False))
        return lines

    def about_values(self, step: int, what: int) -> str:
        values, right = self.values(step, what), self.expected[step][what]
        swapped = {round(self.expected[step][1 - what], 6)}
        if values == swapped and self.values(step, 1 - what) == {round(right, 6)}:
            return "Loss and norm are swapped: step returns (loss, norm)."
        if step == 0:
            return (self.about_norms if what else self.about_losses)(step, values, right)
        if what == 1 and len(values) == 1 and min(values) > right:
            return (
                "The first norm is right, and a later one is too large: gradients of the step "
                "before are still there. Set them to zero first."
            )
        if what == 1:
            return self.about_norms(step, values, right)
        return (
            "Loss and norm of the first step are right, but not those of a later step: does every "
            "step count its own tokens, did every rank clip by the same norm (a norm below "
            f"{MAX_NORM} is left as it is), and step all that it holds"
            + "? With sequence parallelism, norm layers see S/tp of the tokens: finish_gradients "
            "adds their gradients up."
            * self.layout.sequence_parallel
            + "?" * (not self.layout.sequence_parallel)
        )

    def about_losses(self, step: int, values: set[float], right: float) -> str:
        if len(values) > 1:
            return (
                "The ranks report different losses: the loss of the batch is the sum over all its "
                "tokens, over dp, cp and micro-batches, divided by how many count. Which have "
                "other tokens? All of dp and cp: is each sum taken over both?"
            )
        micros = self.layout.num_micro_batches
        if micros > 1 and round(micros * min(values), 5) == round(right, 5):
            return (
                f"The loss is 1/{micros} of what it should be: a pipeline returns the *mean* of "
                f"its {micros} micro-batches, and each of these is already a share of the sum."
            )
        return (
            "All ranks agree, but on a wrong loss. Rows end in padding, so ranks have different "
            "numbers of tokens: a mean of the ranks' means is not the mean. And with cp, do "
            "positions and targets move with their tokens?"
        )

    def about_norms(self, step: int, values: set[float], right: float) -> str:
        apart = [
            axis
            for axis in AXES
            if any(len(self.values(step, 1, ranks)) > 1 for ranks in self.grid.groups(axis))
        ]
        if "cp" in apart or "dp" in apart:
            return (
                "The ranks have different norms. With cp, a rank has the gradients of its own "
                "tokens only: is the mean taken over dp and cp together?"
            )
        if apart:
            return (
                "The ranks have different norms, so they would clip differently. Sum the squares "
                "over the ranks that hold other parameters: over pp, and over tp for what "
                "for_grad_norm gives under tp's group."
                + " And with sequence parallelism a norm's weight has seen S/tp of the tokens: "
                "finish_gradients adds up." * self.layout.sequence_parallel
            )
        if min(values) < right:
            return (
                "The norm is too small: part of the gradients is missing. Does each rank's loss "
                "have the factor n = dp * cp, which the mean over dp *and* cp takes out again? Are "
                "the squares of the pieces added up over tp and pp?"
            )
        return (
            "The norm is too large: elements count more than once. What all ranks of a group hold "
            "alike (norms over tp, everything over dp and cp) counts once; or gradients are sums "
            "where means were wanted."
        )


EXERCISES = [
    Exercise(
        "groups_of_ranks",
        axis_groups,
        groups_trial,
        [(1, Sizes(*sizes)) for sizes in GRIDS],
        Groups,
        answer=(answers.groups_of_ranks,),
        refuses=functions_of(mesh) | {Grid.groups, Grid.coordinates},
        hints=[
            "Where is rank r? Divide by the innermost size: the remainder is its tp index, "
            "the quotient goes on to cp, then dp, then pp.",
            "Two ranks are in one group along an axis if all their other indices are equal: put "
            "rank by rank into a dict whose key is the tuple of the other indices.",
        ],
        skeleton="""def groups_of_ranks(pp, dp, cp, tp):
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}      # outermost first
    groups = {}
    for axis in sizes:
        lists = {}
        for rank in range(pp * dp * cp * tp):
            place = ...                                   # {"pp": ..., "dp": ..., ...}
            key = ...                                     # all of it but the index along `axis`
            lists.setdefault(key, []).append(rank)
        groups[axis] = list(lists.values())
    return groups""",
    ),
    Exercise(
        "compose",
        all_axes.parallelize,
        train,
        [(layout.world_size, Job(layout)) for layout in JOBS],
        Steps,
        answer=(answers.compose,),
        scales=False,
        refuses=functions_of(all_axes) - PUTS_TOGETHER,
        hints=[
            "Build from the outside in: Mesh(group, **layout.axes); cut_gpt for this rank's stage, "
            "with attention and positions if cp > 1; shard_model if tp > 1; Bucketed over "
            'mesh["dp", "cp"].',
            "A rank's micro-batch losses are n * (sum of its tokens' losses) / (tokens of all), "
            "with n = dp * cp, and times num_micro_batches in a Pipeline, which averages them: "
            "then the mean over the ranks is the mean over the tokens. finish(), then "
            "finish_gradients(stage) if tp > 1. For the norm, the squares of what "
            "for_grad_norm(stage) gives under tp's group are summed over tp, and all of them over "
            "pp.",
        ],
        skeleton="""def compose(config, layout, group):
    mesh = Mesh(group, **layout.axes)
    schedule = build(layout.schedule, layout.pp, layout.num_micro_batches)
    ...                                              # the stage: cut_gpt, shard_model
    averaged = Bucketed(stage, mesh["dp", "cp"])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    pipeline = Pipeline(schedule, averaged, mesh["pp"], loss_fn=..., activation=...)

    def step(inputs, targets):                       # [B/dp, S]
        ...                                          # this rank's part of the sequence
        averaged.zero_grad()
        loss = pipeline.step(inputs, targets)
        averaged.finish()
        norm = ...
        ...                                          # clip, step
        return loss, norm

    return step""",
    ),
]
