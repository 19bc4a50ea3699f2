"""A lab's parameters: which values are refused, with which message; and its result on disk."""

import json
import math
import platform
import time
from datetime import datetime

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from mini_dist.course.lab import Lab, ParameterError, choice, flag, real, text, whole

GOOD = dict(algorithm="ring", world_size=4, rate=0.5, overlap=True, name="mine", folder="out")


@pytest.fixture
def lab():
    return Lab(
        "toy",
        algorithm=choice("ring", "tree"),
        world_size=whole(1, 8, "ranks"),
        rate=real(0, 1),
        overlap=flag(),
        name=text(),
    )


# ---- what a value may be -------------------------------------------------------------------------


def test_good_values_come_back_unchanged_and_by_name(lab):
    p = lab.parameters(GOOD)
    assert vars(p) == GOOD
    assert lab.parameters({**GOOD, "rate": 1}).rate == 1  # an int is a number
    assert lab.parameters({**GOOD, "world_size": 8}).world_size == 8  # the ends are allowed
    assert lab.parameters({**GOOD, "world_size": 1}).world_size == 1


@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("overlap", "true", "overlap='true' is a string: give True or False."),
        ("overlap", 1, "overlap=1 is an int: give True or False."),
        ("overlap", None, "overlap=None is no value: give True or False."),
        ("world_size", "4", "world_size='4' is a string: give a whole number from 1 to 8 ranks."),
        ("world_size", 4.0, "world_size=4.0 is a float: give a whole number from 1 to 8 ranks."),
        ("world_size", True, "world_size=True is a bool: give a whole number from 1 to 8 ranks."),
        ("world_size", 9, "world_size=9 is out of range: give a whole number from 1 to 8 ranks."),
        ("world_size", 0, "world_size=0 is out of range: give a whole number from 1 to 8 ranks."),
        ("rate", "1e-4", "rate='1e-4' is a string: give a number from 0 to 1."),
        ("rate", True, "rate=True is a bool: give a number from 0 to 1."),
        ("rate", math.nan, "rate=nan is out of range: give a number from 0 to 1."),
        ("rate", -0.1, "rate=-0.1 is out of range: give a number from 0 to 1."),
        ("rate", [0.1], "rate=[0.1] is a list: give a number from 0 to 1."),
        ("algorithm", "rnig", "algorithm='rnig' is not known: give 'ring' or 'tree' "
                              "(did you mean ring?)."),
        ("algorithm", 3, "algorithm=3 is not known: give 'ring' or 'tree'."),
        ("name", "", "name='' is an empty string: give some text."),
        ("name", 7, "name=7 is an int: give some text."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_one_sentence(lab, name, value, sentence):
    with pytest.raises(ParameterError) as refused:
        lab.parameters({**GOOD, name: value})
    assert str(refused.value) == sentence


def test_a_choice_tells_1_from_true_and_from_1_point_0():
    lab = Lab("toy", level=choice(1, 2))
    assert lab.parameters({"level": 1, "folder": "out"}).level == 1
    for value in (True, 1.0, "1"):
        with pytest.raises(ParameterError, match="is not known: give 1 or 2"):
            lab.parameters({"level": value, "folder": "out"})


def test_an_unknown_name_is_refused_with_the_nearest_and_a_missing_one_is_named(lab):
    with pytest.raises(ParameterError, match=r"algoritm='ring' is not .*did you mean algorithm\?"):
        lab.parameters({**GOOD, "algoritm": "ring"})
    without = {name: value for name, value in GOOD.items() if name != "rate"}
    with pytest.raises(ParameterError, match="rate is missing"):
        lab.parameters(without)


def test_a_parameter_must_be_declared_by_what_is_allowed():
    with pytest.raises(TypeError, match=r"world_size=4 says nothing about what is allowed"):
        Lab("toy", world_size=4)


# ---- in a notebook -------------------------------------------------------------------------------

DECLARE = """
from mini_dist.course.lab import Lab, whole, choice
lab = Lab("toy", n=whole(1, 8), mode=choice("a", "b"))
vars(lab.parameters())
"""
CELL = "n = 2\nmode = 'a'\nfolder = 'out'"


def run(*cells):
    """Run the cells; return what the last cell shows, or raise its exception."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(notebook, timeout=60, store_widget_state=False).execute()
    return notebook.cells[-1].outputs[-1].data["text/plain"]


def test_values_are_those_of_the_parameters_cell_and_of_papermills_below_it():
    injected = "# Parameters\nn = 5\n"
    # Other cells may assign any other names.
    other = "import math\nk = math.pi\nhelper = n * 2"
    assert run(CELL, injected, other, DECLARE) == "{'n': 5, 'mode': 'a', 'folder': 'out'}"


@pytest.mark.parametrize(
    "cells",
    [
        ("n = 2\nmode = 'a'\nfolder = 'out'\nmood = 'b'",),  # a typo
        (CELL, "# Parameters\nmood = 'b'\n"),  # papermill -p mood b
    ],
    ids=["by hand", "by papermill"],
)
def test_an_unknown_name_beside_the_parameters_is_refused(cells):
    with pytest.raises(CellExecutionError, match=r"mood='b' is not a parameter.*did you mean mode"):
        run(*cells, DECLARE)


def test_a_mended_cell_counts_and_so_does_a_value_that_was_tried_in_between():
    wrong = CELL + "\nmood = 'b'"
    assert run(wrong, CELL, "n = 3", DECLARE) == "{'n': 3, 'mode': 'a', 'folder': 'out'}"


def test_outside_a_notebook_parameters_must_be_given(lab):
    with pytest.raises(ValueError, match="not in a notebook: call parameters"):
        lab.parameters()


# ---- the result ----------------------------------------------------------------------------------


class Drawn:
    """A stub with a Drawing's save()."""

    def save(self, path):
        path.write_text("<svg/>")


def test_a_run_that_fails_leaves_no_former_result_in_its_place(lab, tmp_path):
    given = {**GOOD, "folder": str(tmp_path)}
    for seconds in (1, 2):
        lab.parameters(given)
        lab.save({"seconds": seconds}, curve=Drawn())
    lab.parameters(given)  # This run then fails.
    assert not (tmp_path / "result.json").exists() and not (tmp_path / "curve.svg").exists()
    kept = [json.loads((tmp_path / f"run-{n}" / "result.json").read_text()) for n in (1, 2)]
    assert [record["result"]["seconds"] for record in kept] == [1, 2]
    assert (tmp_path / "run-2" / "curve.svg").exists()


@pytest.mark.parametrize("foreign", ['{"figures": ["../photo.png"]}', "[1]", '{"a": 1}', "no JSON"])
def test_what_no_lab_wrote_stays_where_it_is(foreign, lab, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    for path in (folder / "holiday.png", tmp_path / "photo.png"):
        path.write_bytes(b"mine")
    (folder / "result.json").write_text(foreign)
    lab.parameters({**GOOD, "folder": str(folder)})
    assert (folder / "holiday.png").exists() and (tmp_path / "photo.png").exists()
    assert (folder / "run-1" / "result.json").read_text() == foreign


def test_a_refused_parameter_leaves_no_former_result_either(lab, tmp_path):
    given = {**GOOD, "folder": str(tmp_path)}
    lab.parameters(given)
    lab.save({"seconds": 1})
    with pytest.raises(ParameterError):
        lab.parameters({**given, "world_size": 9})
    assert not (tmp_path / "result.json").exists()


def test_the_result_is_json_beside_its_figures(lab, tmp_path):
    folder = tmp_path / "new" / "case"
    lab.parameters({**GOOD, "folder": str(folder)})
    path = lab.save({"seconds": 0.25, "rounds": [1, 2]}, curve=Drawn())
    assert path == folder / "result.json"
    record = json.loads(path.read_text())
    run = record.pop("run")
    assert record == {
        "lab": "toy",
        "parameters": {name: value for name, value in GOOD.items() if name != "folder"},
        "result": {"seconds": 0.25, "rounds": [1, 2]},
        "figures": ["curve.svg"],
    }
    assert sorted(p.name for p in folder.iterdir()) == ["curve.svg", "result.json"]
    assert [*run] == ["date", "seconds", "versions", "machine"]
    assert abs(datetime.fromisoformat(run["date"]).timestamp() - time.time()) < 60
    assert 0 <= run["seconds"] < 60
    assert {"python", "mini_dist", "torch"} <= run["versions"].keys()
    assert run["machine"]["processor"] and run["machine"]["cores"] >= 1
    assert platform.node() not in path.read_text().split(
        '"'
    )  # The record does not name the computer.


def test_it_says_where_it_wrote_from_here_and_elsewhere_in_full(lab, tmp_path, capsys, monkeypatch):
    lab.parameters({**GOOD, "folder": str(tmp_path)})
    lab.save({}, curve=Drawn())
    assert capsys.readouterr().out == f"written: {tmp_path.resolve()}/result.json, curve.svg\n"
    monkeypatch.chdir(tmp_path)
    lab.parameters({**GOOD, "folder": "runs/toy"})
    lab.save({})
    assert capsys.readouterr().out == "written: runs/toy/result.json\n"
    assert (tmp_path / "runs/toy/result.json").exists()


@pytest.mark.parametrize("folder", ["..", "../../runs/toy", "runs/../../toy", "./../toy"])
def test_a_folder_that_leads_out_of_the_current_one_is_refused(lab, tmp_path, folder, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    with pytest.raises(ParameterError, match="leads out of the current folder: give a folder"):
        lab.parameters({**GOOD, "folder": folder})
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


@pytest.mark.parametrize("folder", ["runs", "..runs", "a/../runs", "./runs"])
def test_a_folder_below_the_current_one_is_not(lab, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    lab.parameters({**GOOD, "folder": folder})
    assert lab.save({}).resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, object()])
def test_a_result_that_json_cannot_hold_is_refused_and_writes_nothing(lab, tmp_path, value):
    lab.parameters({**GOOD, "folder": str(tmp_path)})
    with pytest.raises(ValueError, match="the result of lab 'toy' does not fit in JSON"):
        lab.save({"seconds": value}, curve=Drawn())
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_saved_before_the_parameters_are_checked(lab):
    with pytest.raises(ValueError, match="no parameters were checked yet"):
        lab.save({"seconds": 1})
