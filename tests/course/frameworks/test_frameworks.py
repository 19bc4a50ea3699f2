"""Other programs do the run with equal losses, the bytes of their settings and stored results.

Run `make frameworks` in an environment with `pip install -e '.[frameworks]'`. Elsewhere each part
is skipped, and the skip says what is missing.
"""

from __future__ import annotations

import json

import pytest

from mini_dist import GPT
from mini_dist.course.check.frameworks import Settings
from mini_dist.course.elsewhere import (
    in_deepspeed,
    in_megatron,
    in_torch,
    in_torchft,
    in_torchtitan,
    ours,
    run,
)
from mini_dist.course.elsewhere.kept import is_installed, path_of

SIZES = tuple(parameter.numel() for parameter in GPT(run.CONFIG).parameters())


@pytest.fixture(scope="module")
def reference() -> dict[str, dict]:
    return {row["name"]: row for row in ours.runs() + in_torch.runs()[:1]}


def fresh(fn):
    """Return the result of a function that is decorated with `kept`; skip if it cannot run."""
    for module in fn.needs:
        if not is_installed(module):
            pytest.skip(f"{module} is not installed ({fn.how})")
    return fn()


def kept_of(fn):
    return json.loads(path_of(fn).read_text())["result"]


def same_losses(row, other) -> bool:
    return all(abs(a - b) < 1e-5 for a, b in zip(row["losses"], other["losses"], strict=True))


def like_what_was_kept(rows, fn) -> None:
    for row, before in zip(rows, kept_of(fn), strict=True):
        assert row["name"] == before["name"]
        assert same_losses(row, before)
        assert row["sent"] == pytest.approx(before["sent"], rel=1e-3), row["name"]


def numbers(row) -> float:
    """Return what a step sends, in units of (n-1) Psi float32 numbers."""
    return row["sent"] / 4 / (run.RANKS - 1) / run.PSI


def test_deepspeed_trains_the_same_and_sends_what_its_settings_say(reference):
    rows = {row["name"]: row for row in fresh(in_deepspeed.runs)}
    like_what_was_kept(rows.values(), in_deepspeed.runs)
    for name, row in rows.items():
        assert same_losses(row, reference["DDP"]) == (name != "clipping not mentioned"), name
    for name, wanted in (
        ("ZeRO-1, as shipped", 3),
        ("ZeRO-2, as shipped", 3),
        ("ZeRO-3, as shipped", 2),
        ("ZeRO-2, plain", 2),
        ("ZeRO-2, plain, offload", 2),
        ("ZeRO-3, threshold 0", 2),
        ("ZeRO-3, bare", 3),
    ):
        assert numbers(rows[name]) == pytest.approx(wanted, abs=0.002), name
    assert rows["ZeRO-1, as shipped"]["peak"] > 2e9 > 1e7 > rows["ZeRO-2, plain"]["peak"]
    for name in ("pp 4", "pp 2 x dp 2"):
        assert rows[name]["sent"] == pytest.approx(reference[name]["sent"], rel=1e-3)


def test_the_exercise_says_what_deepspeed_sends():
    """Compare each of `knobs` with the formula that is the oracle of lesson 22's check."""
    apart = ("use_multi_rank_bucket_allreduce", False)
    scattered = ("reduce_scatter", False)
    limit = "stage3_param_persistence_threshold"
    cases = {
        "0": ((("stage", 0),), 1),
        "0, k=2": ((("stage", 0),), 2),
        "1, k=2": ((("stage", 1),), 2),
        "2, k=2": ((("stage", 2),), 2),
        "1, apart, k=2": ((("stage", 1), apart), 2),
        "2, apart, k=2": ((("stage", 2), apart), 2),
        "2, reduce_scatter=False": ((("stage", 2), scattered), 1),
        "2, apart, reduce_scatter=False": ((("stage", 2), apart, scattered), 1),
        "3, bare, k=2": ((("stage", 3), (limit, 0)), 2),
        "3, threshold 5000": ((("stage", 3), (limit, 5000)), 1),
        "3, k=2": ((("stage", 3),), 2),
    }
    rows = {row["name"]: row for row in fresh(in_deepspeed.knobs)}
    # The formula does not cover this case: what is reused soon stays, whatever its size.
    assert set(rows) - set(cases) == {"3, threshold 0, k=2"}
    assert numbers(rows["3, threshold 0, k=2"]) == pytest.approx(4, abs=0.002)
    for name, (zero, k) in cases.items():
        formula = Settings(zero, k, run.RANKS, SIZES).sent()
        assert rows[name]["sent"] == pytest.approx(formula, rel=1e-3), name


def test_deepspeed_runs_our_exports():
    found = fresh(in_deepspeed.exports)
    assert found == kept_of(in_deepspeed.exports)
    for stage, engine in enumerate(found.values()):
        assert engine["stage"] == stage and engine["clipping"] == 0
        assert engine["global"] == engine["micro"] * engine["accumulated"] * run.RANKS
        assert engine["steps"] == 2 and engine["falls"]


def test_megatron_sends_over_each_axis_what_we_send(reference):
    rows = fresh(in_megatron.grids)
    like_what_was_kept(rows, in_megatron.grids)
    for row in rows:
        mine = reference[row["name"]]
        assert same_losses(row, mine)
        assert row["sent"] == pytest.approx(mine["sent"], rel=1e-3), row["name"]


def test_torchtitan_trains_the_same(reference):
    rows = fresh(in_torchtitan.grids)
    like_what_was_kept(rows, in_torchtitan.grids)
    for row in rows:
        assert same_losses(row, reference["DDP"])


def test_torchtitan_builds_its_config_from_our_exports():
    assert fresh(in_torchtitan.exports) == kept_of(in_torchtitan.exports)


def test_torchft_trains_the_same_past_the_ledger(reference):
    (row,) = fresh(in_torchft.runs)
    like_what_was_kept([row], in_torchft.runs)
    assert same_losses(row, reference["DDP"])
    assert row["sent"] == 0  # the ledger does not see torchft's own groups
    assert row["on_sockets"] is None or row["on_sockets"] > reference["DDP"]["sent"]


def test_torchft_goes_on_when_one_comes_one_is_killed_and_the_killed_one_heals():
    story = fresh(in_torchft.one_comes_one_dies)
    assert story["took_part"] == [3, 4, 3, 4]
    assert len(story["weights"]) == 4 and len(set(story["weights"])) == 1
    assert story["healed_in"] == 1
    assert story["exits"] == [0, 0, 0, 0, -9]
