"""Exercises of lesson 15: the groups of a grid of ranks, and a training step on such a grid."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import mesh
from .. import parallelize as all_axes
from ..calculators import step_volume
from ..config import Layout, ModelConfig
from ..mesh import AXES, Grid, axis_groups
from ..model import GPT, IGNORE_INDEX, token_loss
from .exercise import Exercise, Line, Trial, calls_of

# --- who is in one group with whom ---------------------------------------------------------------

GRIDS = [dict(zip(AXES, sizes)) for sizes in ((1, 3, 1, 2), (4, 2, 1, 2), (2, 2, 2, 2))]


def call_with_sizes(fn: Callable, sizes: dict[str, int], group):
    with calls_of({"axis_groups", "groups"}, mesh) as called:
        returned = fn(**sizes)
    return returned, called


def judge_groups(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for trial in trials:
        answer, _ = trial.run.results[0]
        expected = axis_groups(**trial.case)
        shape = " x ".join(f"{axis} {size}" for axis, size in trial.case.items())
        if not isinstance(answer, dict) or set(answer) != set(AXES):
            has = f"keys {', '.join(map(str, answer))}" if isinstance(answer, dict) else answer
            lines.append(Line(shape, has, "a dict with keys " + ", ".join(AXES), False))
            return lines, "Return a dict: for each of pp, dp, cp, tp the list of its groups."
        for axis in AXES:
            mine = [list(ranks) for ranks in answer[axis]]
            ok = sorted(mine) == expected[axis]
            lines.append(Line(f"{shape}: {axis}", shortened(mine), shortened(expected[axis]), ok))
            hint = hint or ("" if ok else about_groups(axis, mine, expected, trial.case))
    return lines, hint


def about_groups(axis: str, mine, expected, sizes) -> str:
    everyone = sorted(rank for ranks in mine for rank in ranks)
    if everyone != list(range(Grid(**sizes).size)):
        return f"Along {axis} every rank is in exactly one group: yours hold {everyone}."
    other = next((a for a in AXES if a != axis and sorted(mine) == expected[a]), None)
    if other:
        return f"These are the groups along {other}: which axis is the outermost? pp, then dp."
    if any(len(ranks) != sizes[axis] for ranks in mine):
        return f"{axis}={sizes[axis]}, so each of its groups has {sizes[axis]} ranks."
    backwards = axis_groups(**dict(reversed(sizes.items())))
    if sorted(mine) == backwards[axis]:
        return "tp has to be innermost: rank + 1 is the next tp rank, so that tp stays in a node."
    if sorted(map(sorted, mine)) == expected[axis]:
        return "The groups are right, but a group lists its ranks in rising order."
    return (
        f"Along {axis}, ranks differ in {axis} only. rank = ((pp * DP + dp) * CP + cp) * TP + tp: "
        "how far apart are two neighbours along each axis?"
    )


def shortened(lists) -> str:
    text = str(lists)
    return text if len(text) <= 48 else text[:45] + "..."


# --- a step on the grid --------------------------------------------------------------------------

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=16, vocab_size=64)
STEPS, RATE, MAX_NORM = 3, 0.5, 0.5
LAYOUTS = [
    Layout(dp=2, cp=2, micro_batch_size=2),
    Layout(dp=2, tp=2, sequence_parallel=True, micro_batch_size=2),
    Layout(pp=2, dp=2, tp=2, micro_batch_size=1, num_micro_batches=2),
]


def sgd(tensors) -> torch.optim.Optimizer:
    """The optimizer of this exercise; without momentum a wrong gradient shows at once."""
    return torch.optim.SGD(tensors, lr=RATE)


def whole_batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """[B, S] twice. Rows end in padding, the second half's earlier: ranks' tokens differ."""
    generator = torch.Generator().manual_seed(step)
    shape = (rows, CONFIG.seq_len + 1)
    tokens = torch.randint(0, CONFIG.vocab_size, shape, generator=generator)
    targets = tokens[:, 1:].clone()
    targets[rows // 2 :, CONFIG.seq_len // 2 + 1 :] = IGNORE_INDEX
    return tokens[:, :-1], targets


def train(fn: Callable, layout: Layout, group):
    """Three steps by the learner's function; and by one process with the whole batch."""
    torch.set_default_dtype(torch.float64)
    dp = Grid(**layout.axes).place(group.rank())["dp"]
    batches = [whole_batch(step, layout.global_batch_size) for step in range(STEPS)]
    done = []
    with calls_of({"parallelize"}, all_axes) as called:
        step = fn(CONFIG, layout, group)
        group.recorder.phases.set("forward")  # what came before was setting up
        for batch in batches:
            loss, norm = step(*(x.chunk(layout.dp)[dp] for x in batch))
            done.append((float(loss), float(norm)))
    return (done, one_process(batches)), called


def one_process(batches) -> list[tuple[float, float]]:
    model = GPT(CONFIG, seed=0)
    optimizer, done = sgd(model.parameters()), []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        done.append((loss.item(), norm.item()))
    return done


def judge_steps(trials: list[Trial]) -> tuple[list[Line], str]:
    lines, hint = [], ""
    for trial in trials:
        layout, results = trial.case, [answer for answer, _ in trial.run.results]
        name = " ".join(f"{axis} {n}" for axis, n in layout.axes.items() if n > 1)
        expected = results[0][1]
        wrong = [  # (step, 0 for the loss or 1 for the norm), in the order in which they are made
            (step, what)
            for step in range(STEPS)
            for what in (0, 1)
            if {round(done[step][what], 6) for done, _ in results}
            != {round(expected[step][what], 6)}
        ]
        for what, word in enumerate(("losses", "gradient norms")):
            rows = {tuple(round(pair[what], 4) for pair in done) for done, _ in results}
            right = tuple(round(pair[what], 4) for pair in expected)
            said = " or ".join(map(listed, sorted(rows)[:2]))
            ok = all(which != what for _, which in wrong)
            lines.append(Line(f"{name}: {word}", said, listed(right), ok))
        if wrong:
            hint = hint or about_values(layout, wrong[0], results, expected)
            break
        traffic, advice = judge_traffic(name, trial)
        lines += traffic
        hint = hint or advice
    return lines, hint


def listed(numbers) -> str:
    return " ".join(f"{number:.4f}" for number in numbers)


def about_values(layout: Layout, wrong, results, expected) -> str:
    step, what = wrong
    values = {round(done[step][what], 6) for done, _ in results}
    right = expected[step][what]
    if what == 0 and step == 0:
        if len(values) > 1:
            return (
                "The ranks report different losses: the loss of the batch is the sum over all its "
                "tokens, over dp, cp and micro-batches, divided by how many count. Who has other "
                "tokens? All of dp and cp: is each sum taken over both?"
            )
        micros = layout.num_micro_batches
        if micros > 1 and round(micros * min(values), 5) == round(right, 5):
            return (
                f"The loss is 1/{micros} of what it should be: a pipeline returns the *mean* of "
                f"its {micros} micro-batches, and each of these is already a share of the sum."
            )
        return (
            "All ranks agree, but on another loss. Rows end in padding, so ranks have different "
            "numbers of tokens: a mean of the ranks' means is not the mean. And with cp, do "
            "positions and targets move with their tokens?"
        )
    if what == 1:
        if len(values) > 1:
            if layout.cp > 1:
                return (
                    "The ranks have different norms. With cp, a rank has the gradients of its own "
                    "tokens only: is the mean taken over dp and cp together?"
                )
            return (
                "The ranks have different norms, so they would clip differently: sum over all that "
                "hold other parameters, tp for what for_grad_norm calls cut, and pp."
                + (
                    " And with sequence parallelism a norm's weight has seen S/tp of the tokens: "
                    "finish_gradients adds up."
                    if layout.sequence_parallel
                    else ""
                )
            )
        if step > 0 and values and min(values) > right:
            return (
                "The first norm is right, and a later one is too large: gradients of the step "
                "before are still there. Set them to zero first."
            )
        if values.pop() < right:
            return (
                "The norm is too small: part of the gradients is missing. Is the mean over dp "
                "*and* cp times the number of ranks, as the loss's share asks? Are the squares of "
                "the pieces added up over tp and pp?"
            )
        return (
            "The norm is too large: elements count more than once. What all ranks of a group hold "
            "alike (norms over tp, everything over dp and cp) counts once; or gradients are sums "
            "where means were wanted."
        )
    return (
        "Loss and norm of the first step are right, but then the ranks go elsewhere: did every "
        "rank clip by the same norm, and step all that it holds"
        + (
            "? With sequence parallelism, norms see S/tp of the tokens: finish_gradients adds up."
            if layout.sequence_parallel
            else "?"
        )
    )


def judge_traffic(name: str, trial: Trial) -> tuple[list[Line], str]:
    """Right values the wrong way: everything everywhere, or the axes in another order."""
    layout, ledger = trial.case, trial.run.ledger
    lines, hint, grid = [], "", Grid(**layout.axes)
    predicted: dict[str, float] = {}
    for rank in range(grid.size):
        for line in step_volume(CONFIG, layout, "course", grid.place(rank)["pp"]):
            predicted[line.name] = predicted.get(line.name, 0) + STEPS * 2 * line.value  # float64
    both = "*".join(axis for axis in ("dp", "cp") if layout.axes[axis] > 1)
    predicted[both] = predicted.pop("dp")
    for axis, expected in predicted.items():
        sent = sum(c.sent for c in ledger.leaves(axis=axis) if c.phase != "setup")
        ok = 0.8 * expected <= sent <= 1.6 * expected
        lines.append(Line(f"{name}: bytes over {axis}", f"{sent:,}", f"about {expected:,.0f}", ok))
        if not ok and not hint:
            hint = (
                f"{'More' if sent > expected else 'Less'} was sent over {axis} than this layout "
                "needs. Does every rank hold and compute its own part only? Are the groups those "
                "of Mesh(group, **layout.axes)?"
            )
    for axis, size in layout.axes.items():
        groups = {c.group for c in ledger.leaves(axis=axis)}
        ok = groups <= {tuple(ranks) for ranks in grid.groups(axis)}
        if size > 1 and not ok:
            lines.append(
                Line(f"{name}: groups of {axis}", sorted(groups)[0], grid.groups(axis)[0], False)
            )
            hint = hint or f"The axes have another order: {axis} joins the wrong ranks."
    return lines, hint


class Watched(Exercise):
    """The ledger cannot see who set things up, so trials are watched: a rank returns
    (what came of it, the library's functions that it called)."""

    def used(self, trials: list[Trial]) -> set[str]:
        called = any(called for trial in trials for _, called in trial.run.results)
        return {self._solution.__name__} if called else set()


EXERCISES = [
    Watched(
        "groups_of_ranks",
        solution=Grid.groups,
        trial=call_with_sizes,
        cases=[(1, sizes) for sizes in GRIDS],
        judge=judge_groups,
        hints=[
            "Where does rank r sit? Divide by the innermost size: the remainder is its tp index, "
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
    Watched(
        "compose",
        solution=all_axes.parallelize,
        trial=train,
        cases=[(layout.world_size, layout) for layout in LAYOUTS],
        judge=judge_steps,
        hints=[
            "Build from the outside in: Mesh(group, **layout.axes); cut_gpt for this rank's stage, "
            "with attention and positions if cp > 1; shard_model if tp > 1; Bucketed over "
            'mesh["dp", "cp"].',
            "The loss of a rank is n * (sum of its tokens' losses) / (tokens of all), n = dp * cp: "
            "then the mean over the ranks is the mean over the tokens. finish(), then "
            "finish_gradients(stage) if tp > 1. For the norm, what for_grad_norm(stage) calls cut "
            "is summed over tp, and both over pp.",
        ],
        skeleton="""def compose(config, layout, group):
    mesh = Mesh(group, **layout.axes)
    schedule = build(layout.schedule, layout.pp, layout.num_micro_batches)
    ...                                              # the stage: cut_gpt, shard_model
    replica = Bucketed(stage, mesh["dp", "cp"])
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    pipeline = Pipeline(schedule, replica, mesh["pp"], loss_fn=..., activation=...)

    def step(inputs, targets):                       # [B/dp, S]
        ...                                          # this rank's part of the sequence
        replica.zero_grad()
        loss = pipeline.step(inputs, targets)
        replica.finish()
        norm = ...
        ...                                          # clip, step
        return loss, norm

    return step""",
    ),
]
