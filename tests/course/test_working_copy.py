"""The working copy: a learner's changes stay, everything else follows the course."""

import importlib.util
import json
import random
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from ipykernel.ipkernel import IPythonKernel

from mini_dist.course import working_copy

ROOT = Path(__file__).resolve().parents[2]


def notebook(name, *cells, **more):
    """Return a notebook of the course as JSON; with name="" it belongs to no course."""
    metadata = {"mini_dist": {"lesson": f"lessons/{name}.md"}} if name else {}
    cells = [{"cell_type": "code", "source": cell, "outputs": [], **more} for cell in cells]
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4})


def put(folder, **notebooks):
    for name, cell in notebooks.items():
        name = name.replace("__", "/")
        path = folder / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(notebook(name, cell))


def cells(path):
    return [cell["source"] for cell in json.loads(path.read_text())["cells"]]


def opened_in_jupyterlab(path, edit=None):
    """Save a notebook as JupyterLab does: with new language_info, outputs and counts."""
    found = json.loads(path.read_text())
    found["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}
    for number, cell in enumerate(found["cells"]):
        cell |= {"outputs": [{"text": "here"}], "execution_count": number, "metadata": {"x": 1}}
        cell["source"] = [edit or "".join(cell["source"])]
    path.write_text(json.dumps(found, indent=2))


@pytest.fixture
def folders(tmp_path):
    shipped, work = tmp_path / "notebooks", tmp_path / "work"
    put(shipped, **{"07_zero": "a", "08_torch": "b", "labs__sweep": "c"})
    (shipped / "mine.ipynb").write_text(notebook("", "my own"))
    working_copy.update(shipped, work)
    return shipped, work


def names(work):
    return sorted(path.relative_to(work).as_posix() for path in work.rglob("*.ipynb"))


def test_the_copy_has_the_course_s_notebooks_and_no_others(folders):
    shipped, work = folders
    assert names(work) == ["07_zero.ipynb", "08_torch.ipynb", "labs/sweep.ipynb"]
    assert cells(work / "07_zero.ipynb") == cells(shipped / "07_zero.ipynb")
    assert str(working_copy.update(shipped, work)) == "work/ is up to date"


def test_in_the_copy_nothing_counts_as_run_and_no_reveal_answers(tmp_path):
    shipped, work = tmp_path / "notebooks", tmp_path / "work"
    put(shipped, **{"07_zero": ""})
    found = json.loads((shipped / "07_zero.ipynb").read_text())
    stored = [{"output_type": "execute_result", "execution_count": 3, "data": {}, "metadata": {}}]
    sources = "1 + 1", "x = 2\nreveal('seconds', x)", "show(lesson.reveal)"
    found["cells"] = [
        {"cell_type": "code", "source": source, "outputs": stored, "execution_count": 3}
        for source in sources
    ] + [{"cell_type": "markdown", "source": "reveal(it)"}]
    (shipped / "07_zero.ipynb").write_text(json.dumps(found))
    working_copy.update(shipped, work)
    copy = json.loads((work / "07_zero.ipynb").read_text())
    *code, prose = copy["cells"]
    assert [len(cell["outputs"]) for cell in code] == [1, 0, 1] and "outputs" not in prose
    counts = [each["execution_count"] for cell in code for each in [cell, *cell["outputs"]]]
    assert counts == [None] * 5
    assert copy["metadata"]["language_info"] == IPythonKernel.language_info  # else: "unsaved"
    assert str(working_copy.update(shipped, work)) == "work/ is up to date"


def test_three_cases(folders):
    shipped, work = folders
    opened_in_jupyterlab(work / "07_zero.ipynb")
    opened_in_jupyterlab(work / "08_torch.ipynb", edit="my answer")
    put(shipped, **{"07_zero": "a2", "08_torch": "b2", "09_tensor": "d"})
    assert str(working_copy.update(shipped, work)).splitlines() == [
        "added: 09_tensor.ipynb",
        "new version: 07_zero.ipynb",
        "yours is kept: 08_torch.ipynb (the new version is 08_torch-new.ipynb)",
    ]
    assert cells(work / "07_zero.ipynb") == ["a2"]
    assert cells(work / "08_torch.ipynb") == [["my answer"]]
    assert cells(work / "08_torch-new.ipynb") == ["b2"]
    assert str(working_copy.update(shipped, work)) == "work/ is up to date"


def test_a_newer_version_replaces_the_one_beside_unless_the_learner_works_in_it(folders):
    shipped, work = folders
    opened_in_jupyterlab(work / "08_torch.ipynb", edit="my answer")
    for version in ("b2", "b3"):
        put(shipped, **{"08_torch": version})
        assert working_copy.update(shipped, work).kept == {"08_torch.ipynb": "08_torch-new.ipynb"}
    opened_in_jupyterlab(work / "08_torch-new.ipynb", edit="my other answer")
    put(shipped, **{"08_torch": "b4"})
    assert working_copy.update(shipped, work).kept == {"08_torch.ipynb": "08_torch-new2.ipynb"}
    assert cells(work / "08_torch-new.ipynb") == [["my other answer"]]


def test_who_puts_the_new_version_in_her_own_s_place_follows_the_course_again(folders):
    shipped, work = folders
    opened_in_jupyterlab(work / "08_torch.ipynb", edit="my answer")
    put(shipped, **{"08_torch": "b2"})
    working_copy.update(shipped, work)
    (work / "08_torch-new.ipynb").replace(work / "08_torch.ipynb")
    put(shipped, **{"08_torch": "b3"})
    assert working_copy.update(shipped, work).taken == ["08_torch.ipynb"]


def test_a_notebook_that_was_deleted_comes_again_and_one_that_is_gone_stays(folders):
    shipped, work = folders
    (work / "07_zero.ipynb").unlink()
    (shipped / "08_torch.ipynb").unlink()
    done = working_copy.update(shipped, work)
    assert (done.added, done.gone) == (["07_zero.ipynb"], ["08_torch.ipynb"])
    assert (work / "08_torch.ipynb").exists()
    assert str(working_copy.update(shipped, work)) == "work/ is up to date"


@pytest.mark.parametrize("manifest", [None, "", "[]", "{", '{"07_zero.ipynb": 3}', "[" * 100_000])
def test_without_its_hashes_nothing_is_overwritten(folders, manifest):
    shipped, work = folders
    path = work / working_copy.MANIFEST
    path.unlink() if manifest is None else path.write_text(manifest)
    put(shipped, **{"07_zero": "a2"})
    done = working_copy.update(shipped, work)
    assert done.kept == {"07_zero.ipynb": "07_zero-new.ipynb"} and done.taken == []
    assert str(working_copy.update(shipped, work)) == "work/ is up to date"


@pytest.mark.parametrize("damaged", ["", "no JSON", '{"cells": 3}', '{"cells": [{}]}', "[1]"])
def test_a_notebook_that_cannot_be_read_is_the_learner_s(folders, damaged):
    shipped, work = folders
    (work / "07_zero.ipynb").write_text(damaged)
    put(shipped, **{"07_zero": "a2"})
    assert working_copy.update(shipped, work).kept == {"07_zero.ipynb": "07_zero-new.ipynb"}
    assert (work / "07_zero.ipynb").read_text() == damaged


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_word_of_the_learner_is_lost(tmp_path, seed):
    """After random months of a course and a learner, each text she wrote is still in some file."""
    shipped, work, rng = tmp_path / "notebooks", tmp_path / "work", random.Random(seed)
    course_s = [f"0{n}_x" for n in range(4)]
    hers = set()
    for month in range(8):
        for name in rng.sample(course_s, 2):
            put(shipped, **{name: f"{name} {month}"})
        done = working_copy.update(shipped, work)
        assert str(working_copy.update(shipped, work)).endswith("up to date"), done
        for path in rng.sample(sorted(work.glob("*.ipynb")), 2):
            if rng.random() < 0.5:
                opened_in_jupyterlab(path)
            elif not any(text in path.read_text() for text in hers):
                hers.add(text := f"hers {month} {path.stem}")
                opened_in_jupyterlab(path, edit=text)
        if seed % 2 == 0 and rng.random() < 0.3:
            (work / working_copy.MANIFEST).unlink()
    working_copy.update(shipped, work)
    everything = "".join(path.read_text() for path in work.glob("*.ipynb"))
    assert hers and all(text in everything for text in hers)
    for name in course_s if seed % 2 else ():  # Without hashes, everything counts as hers.
        mine = work / f"{name}.ipynb"
        assert "hers" in mine.read_text() or flat(mine) == flat(shipped / mine.name)


def flat(path):
    return ["".join(source) for source in cells(path)]


def git(folder, *arguments):
    identity = ("-c", "user.name=x", "-c", "user.email=x@x")
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_what_a_learner_once_wrote_into_notebooks_itself_is_taken_for_hers(tmp_path):
    shipped, work = tmp_path / "notebooks", tmp_path / "work"
    put(shipped, **{"07_zero": "a", "08_torch": "b"})
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    opened_in_jupyterlab(shipped / "07_zero.ipynb", edit="my answer")
    opened_in_jupyterlab(shipped / "08_torch.ipynb")
    command = [
        sys.executable,
        "-m",
        "mini_dist.course.working_copy",
        "--shipped",
        shipped,
        "--work",
        work,
    ]

    def run(*more):
        return subprocess.run(
            [*command, *more], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert run("--once") == "work/ is yours: 2 notebooks. Work in this folder.\n"
    assert run("--once") == "1 notebooks have a new version. `make update` takes them.\n"
    assert run().startswith("left out: 07_zero.ipynb (somebody has changed the course's own file")
    git(tmp_path, "restore", "notebooks")
    put(shipped, **{"07_zero": "a2", "08_torch": "b2"})
    git(tmp_path, "commit", "-am", "second")
    assert run() == (
        "new version: 08_torch.ipynb\n"
        "yours is kept: 07_zero.ipynb (the new version is 07_zero-new.ipynb)\n"
    )
    assert cells(work / "07_zero.ipynb") == [["my answer"]]


def test_a_folder_without_the_course_and_a_file_in_the_copy_s_place_are_refused(tmp_path, capsys):
    (tmp_path / "work").write_text("mine")
    assert working_copy.main(["--shipped", str(tmp_path), "--work", str(tmp_path / "work")]) == 1
    assert "holds no notebook of the course" in capsys.readouterr().err
    assert working_copy.main(["--work", str(tmp_path / "work")]) == 1
    assert "work is not a folder" in capsys.readouterr().err


def test_an_update_in_another_folder_makes_no_second_copy(tmp_path, capsys):
    assert working_copy.main(["--work", str(tmp_path / "work")]) == 1
    assert "There is no folder" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_every_notebook_that_is_built_belongs_to_the_course():
    lessons = sorted(
        path.relative_to(ROOT / "lessons").with_suffix(".ipynb").as_posix()
        for folder in ("lessons", "lessons/zh")
        for path in [*(ROOT / folder).glob("[0-9]*.*"), *(ROOT / folder / "labs").glob("*.*")]
    )
    assert working_copy.notebooks() == lessons


def test_a_learner_s_own_files_are_no_pages_of_the_site(tmp_path):
    shipped = tmp_path / "notebooks"
    put(shipped, **{"07_zero": "a", "labs__sweep": "c"})
    shutil.copytree(shipped, shipped / "backup")
    (shipped / "07_mine.ipynb").write_text(notebook("", "my own"))
    (shipped / "07_zero-Copy1.ipynb").write_text(notebook("07_zero", "a"))
    (shipped / "no_json.ipynb").write_text("mine")
    (tmp_path / "site").mkdir()
    shutil.copy(ROOT / "site/conf.py", tmp_path / "site")
    spec = importlib.util.spec_from_file_location("conf", tmp_path / "site/conf.py")
    conf = importlib.util.module_from_spec(spec)
    before = [*sys.path]
    spec.loader.exec_module(conf)
    sys.path[:] = before

    def is_a_page(name):
        return any(fnmatch(name, pattern) for pattern in conf.include_patterns)

    pages = filter(
        is_a_page, (path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    )
    assert sorted(pages) == ["notebooks/07_zero.ipynb", "notebooks/labs/sweep.ipynb"]
    assert not any(map(is_a_page, ["notes.md", "docs/mine.md", "work/07_zero.ipynb", "README.md"]))
    assert is_a_page("TEACHING.md") and is_a_page("docs/cluster/README.md")
