"""Lesson 15: wrong groups of ranks and wrong compositions get a hint that names the mistake."""

import itertools
import sys
from collections import defaultdict

import cloudpickle
import numpy
import pytest
import torch

from mini_dist import check
from mini_dist.collectives.mesh import Grid
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

groups_wrong = Wrong()


def with_sizes(pp, dp, cp, tp):
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}


@groups_wrong("tp has to be innermost")
def outermost_last(pp, dp, cp, tp):
    sizes = dict(reversed(with_sizes(pp, dp, cp, tp).items()))
    return in_order(sizes)


def in_order(sizes):
    """Build the groups correctly for any order of the axes, outermost first."""
    groups = {}
    for axis in sizes:
        lists, number = {}, 1
        for size in sizes.values():
            number *= size
        for rank in range(number):
            place, left = {}, rank
            for name in reversed(sizes):
                left, place[name] = divmod(left, sizes[name])
            del place[axis]
            lists.setdefault(tuple(place.items()), []).append(rank)
        groups[axis] = list(lists.values())
    return groups


@groups_wrong("which axis is the outermost")
def dp_before_pp(pp, dp, cp, tp):
    groups = solutions.groups_of_ranks(pp, dp, cp, tp)
    return {**groups, "tp": groups["dp"], "dp": groups["tp"]}


@groups_wrong("every rank must be in exactly one group")
def only_the_first_group(pp, dp, cp, tp):
    return {k: v[:1] for k, v in solutions.groups_of_ranks(pp, dp, cp, tp).items()}


@groups_wrong("each of its groups has 3 ranks")
def dp_of_everyone(pp, dp, cp, tp):
    groups = solutions.groups_of_ranks(pp, dp, cp, tp)
    return {**groups, "dp": [list(range(pp * dp * cp * tp))]}


@groups_wrong("Return a dict")
def without_axes_of_one(pp, dp, cp, tp):
    groups, sizes = solutions.groups_of_ranks(pp, dp, cp, tp), with_sizes(pp, dp, cp, tp)
    return {axis: lists for axis, lists in groups.items() if sizes[axis] > 1}


@groups_wrong("rising order")
def falling(pp, dp, cp, tp):
    groups = solutions.groups_of_ranks(pp, dp, cp, tp)
    return {axis: [ranks[::-1] for ranks in lists] for axis, lists in groups.items()}


def with_strides(pp, dp, cp, tp, strides):
    ranks, sizes = range(pp * dp * cp * tp), with_sizes(pp, dp, cp, tp)
    return {
        axis: [
            list(range(rank, rank + strides[axis] * size, strides[axis]))
            for rank in ranks
            if rank // strides[axis] % size == 0
        ]
        for axis, size in sizes.items()
    }


@groups_wrong("Along pp, every rank must be in exactly one group: rank 120 does not exist")
def with_a_stride_of_two_for_tp(pp, dp, cp, tp):
    strides = {"pp": 2 * cp * tp if dp > 1 else cp * tp, "dp": cp * tp, "cp": tp, "tp": 1}
    return with_strides(pp, dp, cp, tp, strides)


@groups_wrong("every rank must be in exactly one group")
def counting_tp_as_two(pp, dp, cp, tp):
    strides = {"pp": dp * cp * 2, "dp": cp * 2, "cp": 2, "tp": 1}
    return with_strides(pp, dp, cp, tp, strides)


@groups_wrong("Return a dict")
def returns_nothing(pp, dp, cp, tp):
    solutions.groups_of_ranks(pp, dp, cp, tp)


@groups_wrong("each of them a list of ranks in order")
def flat_lists(pp, dp, cp, tp):
    groups = solutions.groups_of_ranks(pp, dp, cp, tp)
    return {axis: [rank for ranks in lists for rank in ranks] for axis, lists in groups.items()}


@groups_wrong("each of them a list of ranks in order")
def none_for_an_axis_of_one(pp, dp, cp, tp):
    groups, sizes = solutions.groups_of_ranks(pp, dp, cp, tp), with_sizes(pp, dp, cp, tp)
    return {axis: lists if sizes[axis] > 1 else None for axis, lists in groups.items()}


@groups_wrong("each of them a list of ranks in order")
def in_sets(pp, dp, cp, tp):
    groups = solutions.groups_of_ranks(pp, dp, cp, tp)
    return {axis: list(map(set, lists)) for axis, lists in groups.items()}


@groups_wrong("the library's Grid.coordinates")
def asks_the_grid(pp, dp, cp, tp):
    grid, groups = Grid(pp=pp, dp=dp, cp=cp, tp=tp), {}
    for axis in with_sizes(pp, dp, cp, tp):
        lists = {}
        for rank in range(grid.size):
            place = grid.coordinates(rank)
            place.pop(axis)
            lists.setdefault(str(place), []).append(rank)
        groups[axis] = list(lists.values())
    return groups


right_groups = Right("groups_of_ranks")


@right_groups
def by_strides(pp, dp, cp, tp):
    strides = {"pp": dp * cp * tp, "dp": cp * tp, "cp": tp, "tp": 1}
    return with_strides(pp, dp, cp, tp, strides)


@right_groups
def by_turning_a_block_of_ranks(pp, dp, cp, tp):
    """Return tensors whose last dim holds an axis's groups."""
    ranks = torch.arange(pp * dp * cp * tp).view(pp, dp, cp, tp)
    return {
        axis: ranks.movedim(i, -1).reshape(-1, ranks.shape[i])
        for i, axis in enumerate(with_sizes(pp, dp, cp, tp))
    }


@right_groups
def in_tuples_of_numpys_numbers(pp, dp, cp, tp):
    ranks = numpy.arange(pp * dp * cp * tp).reshape(pp, dp, cp, tp)
    names = [*with_sizes(pp, dp, cp, tp)]
    return {
        axis: tuple(map(tuple, numpy.moveaxis(ranks, names.index(axis), -1).reshape(-1, size)))
        for axis, size in with_sizes(pp, dp, cp, tp).items()
    }


@right_groups
def by_places_and_from_the_last_group_to_the_first(pp, dp, cp, tp):
    sizes, groups = with_sizes(pp, dp, cp, tp), {}
    places = list(itertools.product(*map(range, sizes.values())))
    for i, axis in enumerate(sizes):
        alike = defaultdict(list)
        for rank, place in enumerate(places):
            alike[place[:i] + place[i + 1 :]].append(rank)
        groups[axis] = [alike[key] for key in sorted(alike, reverse=True)]
    return groups


@pytest.mark.parametrize("fn", right_groups.answers, ids=lambda fn: fn.__name__)
def test_groups_found_in_another_way_are_right(fn):
    verdict = check.groups_of_ranks.judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize(("fn", "hint"), groups_wrong.answers, ids=groups_wrong.names())
def test_wrong_groups_get_the_right_hint(fn, hint):
    verdict = check.groups_of_ranks.judge(fn)
    assert verdict.state == "wrong" and hint in verdict.hint, verdict


# ---- compose: the right solution with one line changed -------------------------------------------


def changed(*pairs):
    source = check.compose.answer()
    for old, new in pairs:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    names = {"__name__": "a learner's cell"}
    exec(source, names)
    return names["compose"]


LINES = {
    "cp left out of the gradient's group": (
        "over dp and cp together",
        ('averaged = Bucketed(stage, mesh["dp", "cp"])', 'averaged = Bucketed(stage, mesh["dp"])'),
    ),
    "mean of means": (
        "report different losses|mean of the ranks' means",
        (
            'tokens = all_reduce((targets != IGNORE_INDEX).sum(), mesh["dp", "cp"])',
            "tokens = (targets != IGNORE_INDEX).sum() * layout.dp * layout.cp",
        ),
    ),
    "sum for mean": (
        "too large",
        ("weight[0] = n * layout", "weight[0] = n * n * layout"),
        ('mesh["dp", "cp"]) / n', 'mesh["dp", "cp"]) / n / n'),
    ),
    "targets stay where they were": (
        "move with their tokens",
        (
            'inputs, targets = (cp.shard(x, mesh["cp"]) for x in (inputs, targets))',
            'inputs = cp.shard(inputs, mesh["cp"])\n'
            '            targets = cp.shard(targets, mesh["cp"], "contiguous")',
        ),
    ),
    "norm counts copies": (
        "too large",
        (
            'norm = all_reduce(squares, mesh["pp"]).sqrt()',
            "norm = all_reduce(squares, group).sqrt()",
        ),
    ),
    "norm of a stage": (
        "different norms",
        ('norm = all_reduce(squares, mesh["pp"]).sqrt()', "norm = squares.sqrt()"),
    ),
    "norm of own pieces": (
        "different norms|too small",
        ('squares = all_reduce(mine, mesh["tp"])', "squares = mine"),
    ),
    "micro-batches averaged twice": (
        "1/2 of what it should be",
        ("weight[0] = n * layout.num_micro_batches / tokens", "weight[0] = n / tokens"),
    ),
    "gradients of the step before": (
        "Set them to zero first",
        ("        averaged.zero_grad()\n", ""),
    ),
    "norm gradients not added up": (
        "finish_gradients adds up",
        ("            finish_gradients(stage)\n", ""),
    ),
    "no sequence parallelism": (
        "is shard_model given pair=SEQUENCE",
        ("pair=SEQUENCE if layout.sequence_parallel else TENSOR", "pair=TENSOR"),
        ("cut = layout.cp * (layout.tp if layout.sequence_parallel else 1)", "cut = layout.cp"),
    ),
    "an activation as if nothing cut it": (
        "activation",
        ("config.seq_len // cut, config.d_model", "config.seq_len, config.d_model"),
    ),
    "an activation as if cp did not cut it": (
        "activation",
        (
            "cut = layout.cp * (layout.tp if layout.sequence_parallel else 1)",
            "cut = layout.tp if layout.sequence_parallel else 1",
        ),
    ),
    "every gradient halved": (
        "a norm below 0.5 is left as it is",
        ("p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))", "p.grad *= 0.5"),
    ),
    "every gradient scaled to the largest norm": (
        "a norm below 0.5 is left as it is",
        ("min(1.0, 0.5 / (norm.item() + 1e-6))", "0.5 / (norm.item() + 1e-6)"),
    ),
    "swapped": ("Loss and norm are swapped", ("return loss, norm", "return norm, loss")),
    "nothing from step": (
        "Step returned a NoneType",
        ("        return loss, norm", "        pass"),
    ),
    "nothing from compose": ("Compose returned a NoneType", ("    return step", "    pass")),
    "gradients averaged twice": (
        "More was sent over dp*cp",
        (
            "        averaged.finish()\n",
            "        averaged.finish()\n"
            "        for p in stage.parameters():\n"
            "            p.grad = all_reduce(p.grad, mesh['dp', 'cp'], op='mean')\n",
        ),
    ),
    "no clipping": (
        "clip by the same norm",
        ("p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))", "pass"),
    ),
}


@pytest.mark.parametrize("mistake", LINES)
def test_a_wrong_composition_gets_the_right_hint(mistake):
    hints, *pairs = LINES[mistake]
    verdict = check.compose.judge(changed(*pairs))
    assert verdict.state == "wrong"
    assert any(hint in verdict.hint for hint in hints.split("|")), verdict


OTHERWISE = {
    "one flat gradient": [
        ("averaged = Bucketed(stage", "averaged = Naive(stage"),
        ("import Bucketed", "import Naive"),
    ],
    "gathers for attention": [
        ('make_attention(mesh["cp"])', 'make_attention(mesh["cp"], "all_gather")')
    ],
    "torch's clipping by hand": [
        (
            "        for p in stage.parameters():\n"
            "            p.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))\n",
            "        torch._foreach_mul_([p.grad for p in stage.parameters()],"
            " (0.5 / (norm + 1e-6)).clamp(max=1).item())\n",
        ),
        ("return loss, norm", "return [loss.item(), norm.item()]"),
    ],
    "gathers again in backward": [
        ("pair=SEQUENCE if", "pair=SEQUENCE_AGAIN if"),
        ("SEQUENCE, TENSOR", "SEQUENCE_AGAIN, TENSOR"),
    ],
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_a_step_composed_otherwise_is_right(way):
    verdict = check.compose.judge(changed(*OTHERWISE[way]))
    assert verdict.state == "right", verdict


def test_no_line_is_called_right_whose_numbers_are_wrong():
    _, old_and_new = LINES["cp left out of the gradient's group"]
    verdict = check.compose.judge(changed(old_and_new))
    right = {line.what: line.measured == line.expected for line in verdict.lines}
    assert right == {line.what: line.ok for line in verdict.lines}


def everything_everywhere(config, layout, group):
    """The numbers are right, but every rank gathers the batch and trains the whole model alone."""
    from mini_dist import GPT
    from mini_dist.collectives import all_gather
    from mini_dist.collectives.mesh import Mesh
    from mini_dist.model.loss import token_loss

    mesh, model = Mesh(group, **layout.axes), GPT(config)

    def step(inputs, targets):
        inputs, targets = (all_gather(x, mesh["dp"]) for x in (inputs, targets))
        model.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.5 * p.grad
        return loss, norm

    return step


def test_the_whole_model_on_every_rank_is_no_composition():
    verdict = check.compose.judge(everything_everywhere)
    assert verdict.state == "wrong" and "hold and compute its own part only" in verdict.hint


def test_the_librarys_own_are_recognised():
    from mini_dist.collectives.mesh import axis_groups
    from mini_dist.training.all_axes import parallelize

    def groups_of_ranks(pp, dp, cp, tp):
        return axis_groups(pp=pp, dp=dp, cp=cp, tp=tp)

    def compose(config, layout, group):
        model = parallelize(config, layout, group, lambda t: torch.optim.SGD(t, lr=0.5))
        return lambda inputs, targets: model.step(inputs, targets, max_norm=0.5)[:2]

    for fn in (groups_of_ranks, compose):
        assert getattr(check, fn.__name__).judge(fn).state == "still the library's"


def test_the_learners_solutions_are_right():
    for name in ("groups_of_ranks", "compose"):
        verdict = getattr(check, name).judge(getattr(solutions, name))
        assert verdict.state == "right", verdict
