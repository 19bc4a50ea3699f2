"""No public callable accepts an argument of another kind than annotated.

The test discovers the public callables, so a new function or field is covered at once: it checks
its kinds (`@checks_kinds`, or its `__post_init__`), or a list below names it and says why it need
not.
"""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
from pathlib import Path

import numpy
import pytest

import mini_dist
import mini_dist.collectives
import mini_dist.serving
from mini_dist import Layout, ModelConfig, launch
from mini_dist.plan.fields import KINDS, checks_kinds, of_kind, simple_kinds
from mini_dist.ranks.elastic import Elastic
from mini_dist.ranks.hosts import Hosts
from mini_dist.serving import Policy
from mini_dist.training.trainer import Recipe

WRONG = {
    "bool": ("no", 1, 0.0),
    "int": ("3", True, 2.5, math.nan),
    "float": ("0.1", True, math.nan),
    "str": (3, True, b"text"),
}

LOOSE = {"mesh", "backend", "emulate", "divides", "ops"}
# Modules whose arguments are checked elsewhere: by an exercise, a page or a grader.
OTHERS = {"check", "draw", "elsewhere", "grade", "replay", "widgets", "fields", "lesson"}
# These packages list public names in __all__; the arguments of the algorithms are not checked.
OTHERS |= {path.stem for path in Path(mini_dist.collectives.__path__[0]).glob("*.py")} - LOOSE
OTHERS |= {path.stem for path in Path(mini_dist.serving.__path__[0]).glob("*.py")}
RESULTS = {  # dataclasses that only the library creates
    *("Assignment",),
    *("Breakdown", "Candidate", "Case", "Found", "Largest", "Line", "Lost", "Metrics"),
    *("Move", "Placed", "Plan", "Progress", "Row", "Saved", "StepTime", "Block"),
    *("Batch", "Cost", "Dropped", "StageMessage", "VirtualArrival", "PublishedRun", "StageTime"),
    *("Took", "Weight", "SavedTensor", "HostReport", "MemoryBlock", "BlockProducts", "Stage"),
    *("TimedStep", "Finding"),
}
# These run for every message or every tensor of a layer, where a check would cost time.
HOT = {
    "check_tokens",
    "send",
    "recv",
    "exchange",
    "split_sizes",
    "positions_here",
    "explicit_attention",
}
INSIDE = {  # no underscore, but only the library calls them
    *("below_here", "is_beside", "put_beside", "tie_ends"),
    *("MLP", "Place", "Worker", "axis_groups", "balanced_ranges", "block_of", "catch_up"),
    *("check_divides", "check_micro_batches", "contiguous", "cosines_and_sines", "deliver"),
    *("execute", "initial_value", "inspect", "kept_of_layer", "layer_activations"),
    *("megatron_order", "num_scores", "order_on_hosts", "parse", "piece"),
    *("placements", "read", "read_value", "rotate", "scaled_step", "sdpa_attention"),
    *("serve_model", "shared_parameter", "striped", "unscale_", "update", "updates"),
    *("in_chinese", "picture_in_chinese", "drawn"),
    *("zigzag", "attend", "attend_backward", "fused_attend", "GPT", "readable"),
}
PAGES = (
    ".ideas",
    ".ops",
    ".ideas.cache",
    ".ideas.speculation",
    ".ideas.stages",
    ".slow_memory",
) + tuple(  # shown to learners verbatim
    f".collectives.{page}"
    for page in ("halving_doubling", "hierarchical", "pipelined_hierarchy", "pipelined_ring")
    + ("ring", "ring_by_hosts", "star_tree", "torus")
)


def public():
    """Yield (name, callable) for everything that a program is meant to call."""
    yield from (("launch", launch), ("Hosts", Hosts), ("Elastic", Elastic))
    for path in modules():
        module = importlib.import_module(path)
        for each in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{path}."):
            if not each.name.endswith("__main__"):
                yield from dataclasses_of(importlib.import_module(each.name))
        for name in getattr(module, "__all__", None) or vars(module):
            thing = getattr(module, name)
            home = getattr(thing, "__module__", "")
            own = home.startswith("mini_dist.") and (hasattr(module, "__all__") or home == path)
            if callable(thing) and own and not name.startswith("_"):
                yield name, thing


def modules():
    """Yield the packages and their direct modules, except those that are checked elsewhere."""
    for room in pkgutil.iter_modules(mini_dist.__path__, "mini_dist."):
        if room.name == "mini_dist.ranks":
            continue  # a program calls only launch, Hosts and Elastic
        yield room.name
        inside = [str(Path(mini_dist.__path__[0], room.name.rpartition(".")[2]))]
        for each in pkgutil.iter_modules(inside, f"{room.name}."):
            if each.name.rpartition(".")[2] not in OTHERS:
                yield each.name


def dataclasses_of(module):
    """Yield the dataclasses defined in `module`, exported or not."""
    for name, thing in vars(module).items():
        if dataclasses.is_dataclass(thing) and thing.__module__ == module.__name__:
            yield name, thing


def judged():
    """Yield (id, callable, argument, kinds) for each argument that has to be checked."""
    seen = set()
    for name, thing in public():
        is_exempt = name in RESULTS | HOT | INSIDE or thing.__module__.endswith(PAGES)
        if is_exempt or thing in seen or (isinstance(thing, type) and issubclass(thing, Exception)):
            continue
        seen.add(thing)
        try:
            parameters = inspect.signature(thing).parameters.values()
        except (TypeError, ValueError):
            continue
        for parameter in parameters:
            kinds = simple_kinds(parameter.annotation)
            variable = (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if kinds and parameter.kind not in (*variable, parameter.POSITIONAL_ONLY):
                yield f"{name}.{parameter.name}", thing, parameter.name, kinds


JUDGED = list(judged())
CALLS = list(dict.fromkeys(thing for _, thing, *_ in JUDGED))


def wrong_values(kinds):
    found = WRONG[kinds[0]]
    if "int" in kinds and "str" in kinds:
        return [each for each in found if not isinstance(each, (int, str)) or each is True]
    return found if "None" in kinds else (*found, None)


def test_the_look_around_finds_what_there_is():
    names = {name for name, *_ in JUDGED}
    assert len(names) > 300
    assert {"launch.network", "Policy.static", "Layout.tp", "Recipe.text", "DiLoCo.keep"} <= names


@pytest.mark.parametrize(
    "call", list({thing: 0 for _, thing, *_ in JUDGED}), ids=lambda call: call.__name__
)
def test_no_argument_of_another_kind_is_taken(call):
    """A wrong kind is refused before a missing argument, so we need not give the others."""
    for name, thing, argument, kinds in JUDGED:
        if thing is not call:
            continue
        for value in wrong_values(kinds):
            try:
                thing(**{argument: value, **needed(thing, argument)})
            except (TypeError, ValueError) as error:
                said = str(error)
            else:
                said = "nothing"
            wanted = rf"{argument}={re.escape(repr(value))} is not"
            assert re.search(wanted, said), f"{name}={value!r}: {said}"
            assert "\n" not in said


def needed(thing, argument):
    """Return what else to give: only a Recipe needs its model, for its __post_init__."""
    return {"model": ModelConfig()} if thing is Recipe and argument != "model" else {}


def test_what_is_exempt_is_there():
    """The lists name nothing that no longer exists."""
    names = {name for name, _ in public()}
    assert RESULTS | HOT | INSIDE <= names | {"explicit_attention"}, (
        RESULTS | HOT | INSIDE
    ) - names


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Hosts(True), "number=True is not a whole number"),
        (lambda: Hosts(2, emulated="no"), "emulated='no' is not True or False"),
        (lambda: Elastic(silence=True), "silence=True is not a finite number"),
        (lambda: Policy(static=1), "static=1 is not True or False"),
        (lambda: Policy(static="no", share="False"), "static='no' is not True or False"),
        (lambda: Recipe(ModelConfig(), learning_rate=math.inf), "learning_rate=inf is not a fin"),
        (lambda: Recipe(ModelConfig(), text=""), "text='' names nothing"),
        (lambda: Recipe(ModelConfig(), max_norm=0), "max_norm=0 would stop all learning"),
        (lambda: Recipe(ModelConfig(), weight_decay=-0.1), "weight_decay=-0.1 is negative"),
        (lambda: Recipe("gpt"), "model='gpt' is not a ModelConfig"),
        (lambda: Recipe(ModelConfig(), layout=8), "layout=8 is not a Layout"),
        (lambda: ModelConfig(num_shared_experts=None), "num_shared_experts=None is not a whole"),
        (lambda: launch(print, network="no"), "network='no' is not True or False"),
        (lambda: launch(print, timeout=True), "timeout=True is not a finite number"),
        (lambda: launch(print, seed=True), "seed=True is not a whole number"),
        (lambda: launch(print, memory="no"), "memory='no' is not True or False"),
        (lambda: launch(print, elastic="no"), "elastic must be True, False or an Elastic"),
    ],
)
def test_the_values_that_were_taken_before(make, says):
    with pytest.raises((ValueError, TypeError), match=re.escape(says)):
        make()


def test_what_is_of_its_kind_passes_and_numpys_integers_become_plain():
    @checks_kinds(infinite=("seconds",))
    def call(count: int, flag: bool = False, /, *rest: int, seconds: float = 1.0, **sizes: int):
        return count, flag, rest, seconds, sizes

    given = call(numpy.int64(3), True, 4, seconds=math.inf, a=numpy.int8(1), flag=2)
    assert given == (3, True, (4,), math.inf, {"a": 1, "flag": 2})
    assert type(given[0]) is int and type(given[-1]["a"]) is int
    for wrong in (lambda: call(3, a="1"), lambda: call(3, seconds=math.nan), lambda: call("3")):
        with pytest.raises(ValueError, match="is not a"):
            wrong()
    assert of_kind("x", 10**400, ("float",)) == 10**400  # finite, though too large for a float
    assert of_kind("x", numpy.float32(0.5), ("float",)) == 0.5
    assert simple_kinds("int | None") == ("int", "None")
    assert simple_kinds("Layout | int") == simple_kinds("None") == ()
    assert set(KINDS) == {"bool", "int", "float", "str"}


def test_a_class_is_checked_as_its_init_is_and_copies_are_too():
    assert dataclasses.replace(Layout(), dp=2) == Layout(dp=2)
    with pytest.raises(ValueError, match="dp='2' is not a whole number"):
        dataclasses.replace(Layout(), dp="2")
