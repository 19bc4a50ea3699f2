"""Change or leave out every key of every family: the weights match those of transformers.

The counts are stored in elsewhere/kept/in_transformers.counts.json (tests/course/frameworks
compares them with a fresh run if transformers is installed).
"""

import json
import random
import warnings

import pytest

from mini_dist.course.elsewhere.in_transformers import counts
from mini_dist.course.elsewhere.kept import path_of
from mini_dist.plan.calculators import from_hugging_face, num_parameters
from mini_dist.plan.calculators.families import DEFAULTS, FAMILIES

KEPT = json.loads(path_of(counts).read_text())["result"]


def read(settings):
    """Return (weights, layers with a window, the window), or the error message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sizes are left out on purpose
        try:
            learned = settings["model_type"] == "gpt2"
            config = from_hugging_face(settings, None if learned else 4096)
        except ValueError as error:
            return str(error)
    return num_parameters(config), config.windowed_layers, config.window


def cases(family):
    for line in KEPT[family]["cases"]:
        changes, *numbers = line.rsplit(" ", 3)
        yield json.loads(changes), tuple(map(int, numbers))


# Parts of the errors that refuse a change of the weights that ModelConfig cannot express.
REASONS = (
    "changes the weights in a way ModelConfig cannot say",
    "does not divide num_heads",
    "are two names of one size",
    "decides the shape of the weights",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_key_is_read_as_transformers_reads_it_or_refused_by_name(family):
    refused, total = 0, 0
    for changes, right in cases(family):
        ours = read({"model_type": family, **changes})
        if isinstance(ours, str):
            assert any(reason in ours for reason in REASONS), (changes, ours)
            assert len(changes) > 1, (changes, ours)  # A config of defaults must be read.
        else:
            assert ours == right, changes
        refused, total = refused + isinstance(ours, str), total + 1
    assert refused < 0.6 * total


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_that_transformers_does_not_read_changes_nothing(family):
    _, (base, usual), *_ = cases(family)
    for line in KEPT[family]["ignored"]:
        ((key, value),) = json.loads(line).items()
        ours = read({"model_type": family, **base, key: value})
        assert ours == usual or (value is None and key in DEFAULTS[family]), (key, value, ours)


JUNK = (None, True, -1, 0, 3, 7.5, "8", "auto", [], [2], {}, {"a": 1}, float("nan"))


def test_whatever_a_key_holds_it_is_a_model_or_one_sentence():
    """Read 600 configs, each with junk in two keys of its family."""
    dice = random.Random(0)
    for _ in range(600):
        family = dice.choice(sorted(FAMILIES))
        keys = dice.sample(sorted(DEFAULTS[family]), 2)
        settings = {"model_type": family} | {key: dice.choice(JUNK) for key in keys}
        ours = read(settings)
        if isinstance(ours, str):
            assert ours.endswith(".") and "\n" not in ours, (settings, ours)
