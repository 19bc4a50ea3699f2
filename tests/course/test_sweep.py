"""python -m mini_dist.course.sweep: what it runs, what it skips, and which failures it reports."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from mini_dist.course import sweep

PARAMETERS = "n = 2\nmode = 'fast'\nfolder = 'nowhere'"
DECLARE = """from mini_dist.course.lab import Lab, choice, whole
lab = Lab("toy", n=whole(1, 8), mode=choice("fast", "slow", "die", "raise"))
p = lab.parameters()"""
WORK = """import os, time
if p.mode == "die":
    os._exit(9)
if p.mode == "slow":
    open(os.environ.get("TOY_WAITS", os.devnull), "w").close()
    time.sleep(60)
if p.mode == "raise":
    raise RuntimeError("no luck\\nat all")
path = lab.save({"square": p.n**2, "half": p.n / 2, "list": [1]})"""


def write(path, *cells):
    notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell{number}"
    notebook.cells[0].metadata.tags = ["parameters"]
    notebook.metadata.kernelspec = {
        "name": "python3", "language": "python", "display_name": "Python 3",
    }  # fmt: skip
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "toy.ipynb", PARAMETERS, DECLARE, WORK)


def run(*arguments):
    return sweep.main([str(argument) for argument in arguments])


def records(out):
    return json.loads((Path(out) / "sweep.json").read_text())


# ---- what is run ---------------------------------------------------------------------------------


def test_every_combination_is_run_and_the_table_holds_the_results(toy, capsys):
    assert run(toy, "-g", "n=1,3", "-g", "mode=fast", "--out", "out") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["n", "mode", "status", "took", "s", "square", "half"]
    assert [line.split()[:3] + line.split()[4:] for line in lines[1:]] == [
        ["1", "fast", "done", "1", "0.5"],
        ["3", "fast", "done", "9", "1.5"],
    ]
    assert [record["result"]["square"] for record in records("out")] == [1, 9]
    case = Path("out/mode=fast,n=3")
    assert sorted(p.name for p in case.iterdir()) == ["case.json", "notebook.ipynb", "result.json"]
    assert "n = 3" in (case / "notebook.ipynb").read_text()
    assert not Path("nowhere").exists()  # The lab wrote into its case's folder.


def case(parameters, result, status="done"):
    return sweep.Case(parameters, Path("x"), {}, "", status, seconds=12.3, result=result)


RESULTS = {
    "plan_sweep": {  # the lab's real results: a single table had 171 characters per line
        "layout": "pp=16 dp=16 tp=2, micro-batch 2 x 16, 8 chunks, recompute full",
        **dict.fromkeys(("seconds", "low", "high", "mfu", "memory_gib"), 12345.678),
        "tokens_per_second_per_gpu": 1234.5,
        "too_close_to_call": 12,
        "regret_on_a_tenth_of_the_network": 0.123,
    },
    "nothing": {},
    "many": {f"a_rather_long_name_{n}": n * 10**9 for n in range(30)},
    "long": {"n" * 200: "v" * 200, "line": "\n".join("abc")},
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("num_swept", [0, 2, 4, 12])
def test_a_table_fits_100_columns_and_leaves_nothing_out(result, num_swept):
    swept = [f"a_parameter_{n}" for n in range(num_swept)]
    parameters = dict.fromkeys(swept, "halving_doubling")
    cases = [case(parameters, result), case(parameters, {}, "failed"), case(parameters, result)]
    found = sweep.tables(cases, swept)
    lines = [line for table in found for line in str(table).splitlines()]
    assert max(map(len, lines)) <= 100
    heads = {name for table in found for name in table.head} - {"case"}
    assert heads == {sweep.clip(name) for name in [*swept, "status", "took s", *result]}
    assert all(len(str(table).splitlines()) == 4 for table in found)  # head and three rows
    for table in found:  # Failures come last in each table.
        if "status" in table.head:
            column = table.head.index("status")
            assert [row[column] for row in table.rows] == ["done", "done", "failed"]


def test_what_somebody_has_put_into_the_folder_of_a_case_stays_there(toy):
    for _ in range(2):
        assert run(toy, "-g", "n=1", "-p", "mode=fast", "--out", "out", "--fresh") == 0
        case = Path("out/mode=fast,n=1")
        (case / "notes.txt").write_text("what I saw")
    names = ["case.json", "notebook.ipynb", "notes.txt", "result.json"]
    assert run(toy, "-g", "n=1", "-p", "mode=raise", "--out", "out") == 1
    assert sorted(path.name for path in case.iterdir()) == names


def test_the_last_parameter_runs_fastest_and_fixed_ones_are_in_every_case():
    assert sweep.grid({"a": [1, 2], "b": ["x", "y"]}, {"c": True}) == [
        {"c": True, "a": 1, "b": "x"},
        {"c": True, "a": 1, "b": "y"},
        {"c": True, "a": 2, "b": "x"},
        {"c": True, "a": 2, "b": "y"},
    ]


@pytest.mark.parametrize(
    "text, value",
    [("4", 4), ("4.0", 4.0), ("1e-4", 1e-4), ("true", True), ("True", True), ("False", False),
     ("null", None), ("None", None), ("ring", "ring"), ('"4"', "4"), ("-1", -1), ("a b", "a b")],
)  # fmt: skip
def test_a_value_has_the_type_that_it_looks_like(text, value):
    assert sweep.read_value(text) == value and type(sweep.read_value(text)) is type(value)


def test_different_parameters_never_share_a_folder():
    values = [4, "4", 4.0, True, "True", "true", None, "a/b", "a,b", "a=b", "a%2Fb", "", "x" * 300]
    names = {sweep.case_name({"p": value}) for value in values}
    assert len(names) == len(values)
    assert all("/" not in name and len(name) < 200 for name in names)
    assert sweep.case_name({"b": 1, "a": 2}) == sweep.case_name({"a": 2, "b": 1}) == "a=2,b=1"


# ---- what fails ----------------------------------------------------------------------------------


def test_failures_are_told_apart_and_the_status_is_1(toy, capsys):
    assert run(toy, "-g", "mode=raise,die,fast", "-g", "n=2,99", "--out", "out") == 1
    found = {(r["parameters"]["mode"], r["parameters"]["n"]): r for r in records("out")}
    assert found["fast", 2]["status"] == "done"
    assert found["raise", 2]["error"] == "RuntimeError: no luck"
    assert found["die", 2]["error"] == "the kernel died"
    for mode in ("raise", "die", "fast"):
        assert found[mode, 99]["error"].startswith("ParameterError: n=99 is out of range")
    assert sum(record["status"] == "failed" for record in found.values()) == 5
    printed = capsys.readouterr().out
    assert "FAILED mode=die,n=2: the kernel died" in printed
    assert str(Path("out/mode=raise,n=2/notebook.ipynb")) in printed  # It has the traceback.
    assert "no luck" in Path("out/mode=raise,n=2/notebook.ipynb").read_text()


def test_a_kernel_that_does_not_start_fails_its_case_and_not_the_sweep(toy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jupyter_client.manager.KernelManager.start_kernel", no_kernel)
        patch.setattr("jupyter_client.manager.AsyncKernelManager.start_kernel", no_kernel)
        assert run(toy, "-g", "n=1,2", "--out", "out") == 1
    assert [r["error"] for r in records("out")] == ["RuntimeError: no kernel today"] * 2


async def no_kernel(*args, **kwargs):
    raise RuntimeError("no kernel today\nor tomorrow")


def test_a_cell_that_takes_too_long_is_a_failure(toy):
    assert run(toy, "-p", "mode=slow", "--out", "out", "--timeout", 1) == 1
    assert records("out")[0]["error"] == "a cell took longer than 1 s"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["toy.ipynb", "-g", "mod=1"], "mod is not a parameter of toy.ipynb: did you mean mode?"),
        (["toy.ipynb", "-p", "zzz=1"], "zzz is not a parameter of toy.ipynb: there are folder, "),
        (["toy.ipynb", "-g", "n"], "'n' gives no parameter a value: write NAME=VALUE."),
        (["toy.ipynb", "-g", "n="], "'n=' gives no parameter a value"),
        (["toy.ipynb", "-g", "n=[1]"], "'[1]' is more than one value"),
        (["toy.ipynb", "-g", "n=1", "-p", "n=2"], "n is both swept (-g) and fixed (-p)"),
        (["toy.ipynb", "-g", "n=1", "-g", "n=2"], "n is given twice: write all its values as -g n"),
        (["toy.ipynb", "-p", "folder=x"], "every case has a folder of its own: say where by --out"),
        (["gone.ipynb", "-g", "n=1"], "gone.ipynb does not exist"),
        (["text.ipynb", "-g", "n=1"], "text.ipynb cannot be read as a notebook"),
        (["plain.ipynb", "-g", "n=1"], "plain.ipynb has no parameters"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(toy, arguments, sentence, capsys):
    Path("text.ipynb").write_text("not a notebook")
    write(Path("plain.ipynb"), "# nothing here", "x = 1")
    with pytest.raises(SystemExit) as refused:
        run(*arguments, "--out", "out")
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not Path("out").exists()


# ---- what is not run again -----------------------------------------------------------------------


def age(path):
    return path.stat().st_mtime_ns


def test_what_is_done_stays_done_and_what_failed_or_changed_runs_again(toy, capsys):
    grid = ("-g", "mode=fast,raise", "--out", "out")
    assert run(toy, *grid) == 1
    done, failed = Path("out/mode=fast/case.json"), Path("out/mode=raise/notebook.ipynb")
    before = age(done), age(failed)
    capsys.readouterr()

    assert run(toy, *grid) == 1
    assert "1 of 2 cases were done before" in capsys.readouterr().out
    assert age(done) == before[0] and age(failed) > before[1]
    assert records("out")[0]["result"]["square"] == 4  # recalled, not lost

    write(toy, PARAMETERS, DECLARE, WORK.replace('raise RuntimeError("no luck\\nat all")', "pass"))
    assert run(toy, *grid) == 0
    assert age(done) > before[0]


def at_once(notebook, output, parameters, timeout):
    """Write the toy's result without starting a kernel."""
    n = parameters["n"]
    Path(parameters["folder"], "result.json").write_text(json.dumps({"result": {"square": n * n}}))
    return ""


@pytest.mark.parametrize("name", ["case.json", "result.json"])
@pytest.mark.parametrize(
    "content, why",
    [
        (b"", "cannot be read (Expecting value"),
        (b'{"fingerprint": "ab', "cannot be read (Unterminated string"),
        (b"\xff\xfe{", "cannot be read ('utf-8' codec"),
        (b"[" * 100_000, "cannot be read ("),
        (b"[1]", "has no "),
        (b'{"lab": "toy"}', "has no "),
        (b'{"fingerprint": 1, "seconds": "2", "result": [3]}', "has no "),
        (None, "cannot be read ("),  # a folder
    ],
)
def test_a_record_that_cannot_be_read_is_named_and_its_case_runs_again(
    toy, name, content, why, capsys, monkeypatch
):
    monkeypatch.setattr(sweep, "execute", at_once)
    grid = ("-g", "n=2,3", "--out", "out")
    assert run(toy, *grid) == 0
    before = age(Path("out/n=3/case.json"))
    path = Path("out/n=2") / name
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    capsys.readouterr()
    assert run(toy, *grid) == 0
    printed = capsys.readouterr().out
    assert f"{path} {why}" in printed and ": its case runs again" in printed
    assert "1 of 2 cases were done before" in printed
    assert [record["result"]["square"] for record in records("out")] == [4, 9]
    assert age(Path("out/n=3/case.json")) == before


def test_a_result_that_a_notebook_leaves_half_written_fails_its_case(toy, capsys, monkeypatch):
    def breaks_off(notebook, output, parameters, timeout):
        at_once(notebook, output, parameters, timeout)
        if parameters["n"] == 2:
            Path(parameters["folder"], "result.json").write_text("{")
        return ""

    monkeypatch.setattr(sweep, "execute", breaks_off)
    assert run(toy, "-g", "n=2,3", "--out", "out") == 1
    assert "FAILED n=2: out/n=2/result.json cannot be read (" in capsys.readouterr().out
    assert [record["status"] for record in records("out")] == ["failed", "done"]
    assert not Path("out/n=2/case.json").exists()  # The case will run again.


def test_fresh_runs_everything(toy):
    assert run(toy, "-p", "n=3", "--out", "out") == 0
    before = age(Path("out/n=3/case.json"))
    assert run(toy, "-p", "n=3", "--out", "out", "--fresh") == 0
    assert age(Path("out/n=3/case.json")) > before


@pytest.mark.skipif(sys.platform != "linux", reason="finds the kernels in /proc")
def test_an_interrupted_sweep_says_130_leaves_no_kernel_and_goes_on_from_there(toy):
    command = [
        sys.executable,
        "-m",
        "mini_dist.course.sweep",
        toy,
        "-g",
        "mode=fast,slow",
        "--out",
        "out",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "TOY_WAITS": os.path.abspath("waits")},
    )
    deadline = time.monotonic() + 50  # This is before the cell ends by itself.
    while not os.path.exists("waits"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    children = kernels_of(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "interrupted: the same command goes on from here" in printed
    assert "slow  waiting" in printed
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline, "a kernel outlived the sweep"
        time.sleep(0.1)
    kept = age(Path("out/mode=fast/case.json"))
    assert run(toy, "-g", "mode=fast", "--out", "out") == 0
    assert age(Path("out/mode=fast/case.json")) == kept


def kernels_of(pid):
    """Search all processes by parent: Linux's list of children may miss some while one exits."""
    return [child.pid for child in psutil.Process(pid).children()]
