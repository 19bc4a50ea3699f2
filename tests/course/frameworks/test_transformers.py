"""The stored counts equal what transformers builds; `pip install transformers` to check.

`python tools/keep.py in_transformers` regenerates the counts in a minute or two.
"""

import importlib.metadata
import json

import pytest

pytest.importorskip("transformers")

from mini_dist.course.elsewhere import in_transformers
from mini_dist.course.elsewhere.kept import path_of
from mini_dist.plan.calculators.families import DEFAULTS, NONE, VERSION, WINDOWS

IS_TESTED = importlib.metadata.version("transformers") == VERSION
pytestmark = pytest.mark.skipif(not IS_TESTED, reason=f"kept is transformers {VERSION}")
# These keys are not read as fields of the class, but by other code or from extra keywords.
BESIDE = ("moe_layer_freq", "seq_length", "head_dim", "sliding_window_pattern")


def test_the_counts_are_those_that_were_kept():
    kept = json.loads(path_of(in_transformers.counts).read_text())["result"]
    assert in_transformers.counts() == kept


@pytest.mark.parametrize("family", DEFAULTS)
def test_the_defaults_are_those_of_the_class(family):
    theirs = in_transformers.keys_of(family)
    for key, default in DEFAULTS[family].items():
        if key in BESIDE and key not in theirs:
            continue
        if default == NONE or default == []:
            default = None if key in theirs else "absent"
        in_class = theirs.get(key, "absent")
        if key == "tie_word_embeddings" and family in in_transformers.INSIDE:
            continue  # the text model's class alone does not decide
        assert in_class == default or (key in WINDOWS and in_class is None), (key, in_class)
