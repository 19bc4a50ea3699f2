"""The form all benchmarks share: alternating runs, medians, an exit status that shows misses."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks._form import Case, main, measure

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def recorder(log, name, values=None):
    values = iter(values) if values else None

    def call():
        log.append(name)
        return next(values) if values else None

    return call


def test_runs_alternate_and_so_does_who_goes_first():
    log = []
    measure(Case("c", recorder(log, "o"), recorder(log, "t"), repeats=4, warmup=1))
    assert "".join(log) == "to" + "ot" + "to" + "ot" + "to"


def test_medians_leave_out_the_warm_up_and_the_odd_one():
    ours = recorder([], "o", [999, 1, 2, 50])
    theirs = recorder([], "t", [999, 4, 4, 4])
    row = measure(Case("c", ours, theirs, bar=0.5, unit="bytes", repeats=3))
    assert (row["ours"], row["theirs"], row["unit"]) == (2, 4, "bytes")
    assert (row["ratio"], row["bar"], row["ok"]) == (0.5, 0.5, True)


def test_a_function_that_returns_nothing_is_timed_in_milliseconds():
    row = measure(Case("c", lambda: time.sleep(0.02), 5.0, bar=1.0, repeats=2, warmup=0))
    assert row["unit"] == "ms"
    assert 20 <= row["ours"] < 2000
    assert row["theirs"] == 5.0 and not row["ok"]  # A target given as a number is kept.


@pytest.mark.parametrize("ours, bar, status", [(1, 0.5, 0), (1.02, 0.5, 1), (9, None, 0)])
def test_the_exit_status_says_whether_every_bar_holds(ours, bar, status, tmp_path, capsys):
    def cases(long):
        yield Case("the case", lambda: ours, 2, bar=bar, unit="s", repeats=1)
        yield Case("another", lambda: 1, lambda: 2, bar=1, unit="s", repeats=1)

    out = tmp_path / "out.json"
    assert main(cases, "what it is", ["--json", str(out)]) == status
    printed = capsys.readouterr().out
    assert ("MISSED" in printed) == bool(status)
    written = json.loads(out.read_text())
    assert written["machine"]["cores"] >= 1 and written["machine"]["torch"]
    assert [row["case"] for row in written["rows"]] == ["the case", "another"]
    assert written["rows"][0]["ok"] is (status == 0)


def test_long_reaches_the_cases():
    seen = []

    def cases(long):
        seen.append(long)
        return []

    main(cases, "", [])
    main(cases, "", ["--long"])
    assert seen == [False, True]


HELP = """
import contextlib, io, json, runpy, sys
said = {}
for path in sys.argv[1:]:
    sys.argv, out, status = [path, "--help"], io.StringIO(), None
    sys.path.insert(0, path.rpartition("/")[0])
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code
    said[path] = status, out.getvalue()
print(json.dumps(said))
"""
PATHS = [path for path in sorted(BENCHMARKS.glob("*.py")) if path.name[0] != "_"]


@pytest.fixture(scope="module")
def helps():
    """Return (exit status, text) of every benchmark's --help; one process loads torch once."""
    command = [sys.executable, "-c", HELP, *map(str, PATHS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_benchmark_takes_the_form(path, helps):
    status, text = helps[str(path)]
    assert status == 0
    assert "--json FILE" in text and "--long" in text
