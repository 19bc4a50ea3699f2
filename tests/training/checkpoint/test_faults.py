"""Run a fixed sample of benchmarks/checkpoint_faults.py; check that its judge can refuse."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mini_dist import launch
from mini_dist.training.checkpoint import reading

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def test_a_sample_of_damaged_checkpoints_and_killed_trainings(tmp_path):
    command = [sys.executable, BENCHMARKS / "checkpoint_faults.py", "--json", tmp_path / "json"]
    done = subprocess.run(
        [*command, "--seed", "1", "--corruptions", "48", "--kills", "4"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "json").read_text())
    assert sum(results["found"].values()) == 48 and results["kills"] >= 4
    assert {"newest", "older, and said so", "refused"} <= results["found"].keys()


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import checkpoint_faults

    return checkpoint_faults


def careless(directory, layout, states, log, mistake, group):
    """Run the cases with a reader that makes a mistake."""
    import _damage
    import checkpoint_faults as faults

    if mistake == "takes what is there":
        reading.damage = lambda *_: None
    elif mistake == "says nothing":
        find = reading.find

        def silent(*args):
            saved = find(*args)
            saved.refused.clear()
            return saved

        faults.Training.resume.__globals__["find"] = silent
    elif mistake == "begins anew":
        faults.Training.resume.__globals__["find"] = lambda *_: None
    kinds = [_damage.flip_a_bit, _damage.overwrite_a_range, _damage.delete_a_folder]
    cases = [(number, [kinds[number % 3]]) for number in range(12)]
    return faults.resume_all(directory, layout, states, cases, 0, log, group)


@pytest.mark.parametrize("mistake", ["none", "takes what is there", "says nothing", "begins anew"])
def test_a_careless_reader_is_found_out(mistake, faults, tmp_path):
    layout, where = faults.LAYOUTS["dp 2"], str(tmp_path / "saved")
    states = faults.whole_states(launch(faults.write_all, 2, (where, layout)).results)
    job = (where, layout, states, str(tmp_path / "log"), mistake)
    said = launch(careless, 2, job).results[0]
    assert any(each.startswith("WRONG") for each in said) == (mistake != "none")


def test_a_loss_that_differs_in_the_last_bit_is_found_out(faults, tmp_path, monkeypatch):
    right = {number: {float(number).hex()} for number in range(faults.LAST)}
    wrong = {**right, 3: {*right[3], (3 + 2**-50).hex()}}
    monkeypatch.setattr(faults, "undisturbed", lambda name: right)
    for losses, expected in ((right, 0), (wrong, 1), ({0: right[0]}, 1), ("a sentence", 1)):
        result = losses if isinstance(losses, str) else (losses, 5)
        monkeypatch.setattr(faults, "killed_training", lambda *_, result=result: result)
        monkeypatch.setattr(faults, "count_lines", lambda *_: faults.LAST)
        here = tmp_path / str(random.random())
        here.mkdir()
        assert len(faults.all_kills(5, 0, here)[2]) == expected
