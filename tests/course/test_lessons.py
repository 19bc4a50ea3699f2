"""The lessons and their notebooks: built from one text, up to date, portable, really checked."""

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.selected import cases_to_run
from tools import build_notebooks as tool
from tools import minutes

ROOT = Path(__file__).resolve().parents[2]
LESSONS = tool.lessons(ROOT)
each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read(path):
    return nbformat.read(path, as_version=4)


# ---- this course's own lessons -------------------------------------------------------------------


def test_every_notebook_is_fresh():
    """If this fails, `make notebooks` rebuilds the notebooks it names."""
    stale = {path.relative_to(ROOT).as_posix(): why for path, why in tool.stale(ROOT).items()}
    assert not stale, f"run `make notebooks`: {stale}"


@each_lesson
def test_no_output_names_this_machine(path):
    tool.refuse(read(tool.notebook_of(path, ROOT)), pid="no pid to look for")


@each_lesson
def test_no_notebook_carries_widget_state(path):
    text = tool.notebook_of(path, ROOT).read_text(encoding="utf-8")
    assert "application/vnd.jupyter.widget" not in text


@each_lesson
def test_a_lesson_uses_only_markdown_that_shows_everywhere(path):
    """GitHub's alerts and MyST's directives are plain text in JupyterLab."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^> \[!", text, flags=re.MULTILINE), "a GitHub alert"
    assert not re.search(r"^(```|:::)\{", text, flags=re.MULTILINE), "a MyST directive"


@each_lesson
def test_source_that_a_lesson_shows_is_compared_with_the_library(path):
    """Otherwise a notebook could keep an old copy of the library's code unnoticed."""
    for cell in code_cells(read(tool.notebook_of(path, ROOT))):
        if re.search(r"^show\(", cell.source, flags=re.MULTILINE):
            assert "nbval-check-output" in cell.metadata.get("tags", []), cell.source


@each_lesson
def test_no_cell_is_kept_from_the_checks(path):
    for cell in code_cells(read(tool.notebook_of(path, ROOT))):
        tags = set(cell.metadata.get("tags", []))
        assert tags <= {"parameters", "nbval-check-output"}, cell.source


@each_lesson
def test_no_cell_ends_in_an_error(path):
    """Papermill, and any grader that uses it, treats even an expected error as a failure."""
    for cell in code_cells(read(tool.notebook_of(path, ROOT))):
        assert all(output.output_type != "error" for output in cell.outputs), cell.source


@each_lesson
def test_a_lesson_says_how_long_it_takes_and_its_core_is_an_hour_at_most(path):
    text = path.read_text(encoding="utf-8")
    if path.parent.name == "labs":
        assert re.search(r"\b\d+ minutes\b", text[:1500])
        return
    found = minutes.minutes_of(path)
    assert found["core"] <= 60
    assert f"*{minutes.stated(found)}. You need" in text[:1500]
    told = [str(found[part]) for part in ("core", "exercises") if found[part]]
    rows = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (row,) = [row for row in rows if row[:1] == "|" and f"notebooks/{path.stem}.ipynb" in row]
    assert row.endswith(f"| {' + '.join(told)} |")


def test_minutes_count_what_a_cell_shows_and_what_a_reader_is_asked(tmp_path):
    text = "# T\n\n```python\nshow(f)\n```\n\n```python\npredict('x')\n```\n"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show(f)")])
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="line\n" * 100)]
    path = tmp_path / "t.ipynb"
    nbformat.write(notebook, path)
    unbuilt, built = (minutes.minutes(text, where)["core"] for where in (None, path))
    assert (unbuilt, built) == (5, 15)  # 1 minute for the prediction, 10 for a hundred lines


def test_optional_sections_end_with_the_next_heading_of_their_level():
    text = "# T\n\none two\n\n## A (optional)\n\nthree\n\n### B\n\nfour\n\n## C\n\nfive\n"
    core, optional = minutes.core_and_optional(text)
    assert "three" in optional and "four" in optional
    assert "one two" in core and "five" in core and "three" not in core


def test_pictures_are_what_their_functions_draw():
    check = [sys.executable, ROOT / "tools" / "pictures", "--check"]
    run = subprocess.run(check, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@each_lesson
def test_a_lesson_has_a_drawing_and_says_what_it_shows(path):
    if path.parent.name != "labs":
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^!\[[^]]{20,}\]\(figures/\w+\.svg\)$", text, flags=re.M)


@each_lesson
def test_links_in_a_notebook_lead_somewhere(path):
    notebook = tool.notebook_of(path, ROOT)
    for cell in read(notebook).cells:
        if cell.cell_type == "markdown":
            for target in re.findall(r'\]\(([^)#\s]+)|src="([^"]+)"', cell.source):
                target = target[0] or target[1]
                if not re.match(r"[a-z]+:", target):
                    assert (notebook.parent / target).exists(), target


# ---- the build -----------------------------------------------------------------------------------

FIRST = """# First

A figure: ![ring](figures/ring.svg). See [the second](02_second.md#part), [code](../x.py),
[words](../WORDS.md), [a page](PAGE.md).

```python tags=["nbval-check-output"]
print("sum", sum(range(4)))
```

```python
import json
from mini_dist.course.lesson import raises

with raises(ValueError):
    json.loads("x")
```

```python
import traceback

try:
    json.loads("x")
except ValueError as error:
    print("".join(traceback.format_tb(error.__traceback__)[1:]))  # from the library's file on
```

```python
import base64
png = base64.b64encode(b"not really a picture").decode()
view = {"version_major": 2, "version_minor": 0, "model_id": "random"}
bundle = {"application/vnd.jupyter.widget-view+json": view, "image/png": png}
display(bundle, raw=True)
display({"application/vnd.jupyter.widget-view+json": view}, raw=True)
```

```console
$ not a cell
```
"""
SECOND = "# Second\n\n```python\nx = 1\n```\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build a course of two lessons once. Tests that change it take a copy."""
    root = tmp_path_factory.mktemp("course")
    (root / "lessons/labs").mkdir(parents=True)
    (root / "lessons/01_first.md").write_text(FIRST)
    (root / "lessons/02_second.md").write_text(SECOND)
    (root / "lessons/PAGE.md").write_text("# A page that is no lesson\n")
    (root / "lessons/labs/sweep.md").write_text(
        '# Sweep\n\n```python tags=["parameters"]\nlr = 0.1\n```\n\n'
        "[first](../01_first.md) ![ring](../figures/ring.svg)\n"
    )
    assert tool.main(["--root", str(root)]) == 0
    return root


@pytest.fixture
def course(built, tmp_path):
    return Path(shutil.copytree(built, tmp_path / "course"))


def whys(root):
    return {path.name: why for path, why in tool.stale(root).items()}


def test_a_built_course_is_not_stale_and_building_again_runs_nothing(course, capsys):
    assert whys(course) == {}
    assert tool.main(["--root", str(course), "--check"]) == 0
    assert tool.main(["--root", str(course)]) == 0
    assert "0 built, 0 failed, 3 up to date" in capsys.readouterr().out


def test_two_builds_of_a_lesson_are_the_same_bytes(course):
    before = (course / "notebooks/01_first.ipynb").read_bytes()
    assert tool.main(["--root", str(course), "--force", "01_first"]) == 0
    assert (course / "notebooks/01_first.ipynb").read_bytes() == before


def test_a_notebook_is_the_lesson_with_outputs_tags_and_links_that_work_from_there(course):
    first = read(course / "notebooks/01_first.ipynb")
    assert "(../lessons/figures/ring.svg)" in first.cells[0].source
    assert "(02_second.ipynb#part)" in first.cells[0].source
    assert "(../x.py)" in first.cells[0].source
    assert "(../WORDS.md), [a page](../lessons/PAGE.md)" in first.cells[0].source
    compared, raising, _, _ = code_cells(first)
    assert compared.metadata == {"tags": ["nbval-check-output"]}
    assert compared.outputs[0].text == "sum 6\n"
    assert raising.outputs[0].name == "stderr"
    assert raising.outputs[0].text == "JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n"
    assert "[Second →](02_second.ipynb)" in first.cells[-1].source
    assert (
        "[← First](01_first.ipynb)" in read(course / "notebooks/02_second.ipynb").cells[-1].source
    )
    lab = read(course / "notebooks/labs/sweep.ipynb")
    assert lab.cells[1].metadata.tags == ["parameters"]
    assert "(../01_first.ipynb)" in lab.cells[-1].source
    assert "(../../lessons/labs/../figures/ring.svg)" in lab.cells[-1].source


def test_a_widget_leaves_its_picture_and_nothing_else(course):
    notebook = read(course / "notebooks/01_first.ipynb")
    outputs = code_cells(notebook)[3].outputs
    assert [set(output.data) for output in outputs] == [{"image/png"}]
    assert "widgets" not in notebook.metadata


def test_a_traceback_names_files_without_this_machines_folders(course):
    notebook = read(course / "notebooks/01_first.ipynb")
    traceback = code_cells(notebook)[2].outputs[0].text
    assert "json/decoder.py" in traceback
    assert sys.base_prefix not in traceback


@pytest.mark.parametrize("name", ["00_start_here", "05_fast_data_parallel", "labs/two_gpus"])
def test_with_an_address_a_notebook_begins_with_a_cell_that_installs_only_what_is_missing(
    name, monkeypatch
):
    lesson = ROOT / f"lessons/{name}.md"
    before = tool.convert(lesson, ROOT)
    monkeypatch.setattr(tool, "REPOSITORY", "somebody/a_course")
    badge, install, *rest = tool.convert(lesson, ROOT).cells
    assert [cell.source for cell in rest] == [cell.source for cell in before.cells]
    assert f"/github/somebody/a_course/blob/main/notebooks/{name}.ipynb)" in badge.source
    assert "--no-deps git+https://github.com/somebody/a_course " in install.source
    ran, here = [], install.source.replace("%pip install", "ran.append(1) #")
    exec(here, {"ran": ran})
    exec(here.replace('"mini_dist"', '"not_installed_anywhere"'), {"ran": ran})
    assert ran == [1], "only where the course is not installed"


def test_an_edited_lesson_is_stale_and_the_build_brings_it_back(course):
    (course / "lessons/02_second.md").write_text(SECOND.replace("x = 1", "x = 2"))
    assert list(whys(course)) == ["02_second.ipynb"]
    assert tool.main(["--root", str(course), "--check"]) == 1
    assert tool.main(["--root", str(course)]) == 0
    assert whys(course) == {}


def test_a_new_title_makes_the_neighbours_stale(course):
    (course / "lessons/02_second.md").write_text(SECOND.replace("# Second", "# Last"))
    assert set(whys(course)) == {"01_first.ipynb", "02_second.ipynb"}


def test_a_lesson_without_notebook_and_a_notebook_without_lesson_are_reported(course):
    (course / "lessons/02_second.md").rename(course / "lessons/03_third.md")
    found = whys(course)
    assert found["03_third.ipynb"] == "not built yet"
    assert "is gone" in found["02_second.ipynb"]


@pytest.mark.parametrize(
    "edit, why",
    [
        (lambda nb: nb.cells[1].update(source="print('sum 6')"), "source"),
        (lambda nb: nb.cells[1].metadata.update(tags=[]), "metadata"),
        (lambda nb: nb.cells[1].update(id="other"), "id"),
        (lambda nb: nb.cells[1].update(execution_count=None), "not executed"),
        (lambda nb: nb.cells.pop(), "cells"),
    ],
)
def test_a_notebook_edited_by_hand_is_stale_though_its_stamp_is_right(edit, why, course):
    path = course / "notebooks/01_first.ipynb"
    notebook = read(path)
    edit(notebook)
    nbformat.write(notebook, path)
    assert why in whys(course)["01_first.ipynb"]


def test_a_lesson_that_fails_is_named_and_its_old_notebook_stays(course, capsys):
    before = (course / "notebooks/02_second.ipynb").read_bytes()
    (course / "lessons/02_second.md").write_text("# Second\n\n```python\n1 / 0\n```\n")
    (course / "lessons/03_third.md").write_text(f"# Third\n\n```python\n{RAISES_NOTHING}\n```\n")
    (course / "lessons/04_fourth.md").write_text(
        "# Fourth\n\n```python\nimport os\nos.getpid()\n```"
    )
    assert tool.main(["--root", str(course), "02_second", "03_third", "04_fourth"]) == 1
    printed = capsys.readouterr().out
    assert "02_second.ipynb: NOT BUILT" in printed and "ZeroDivisionError" in printed
    assert "must raise an error but raised nothing" in printed
    assert "the output holds the kernel's process id" in printed
    assert (course / "notebooks/02_second.ipynb").read_bytes() == before
    assert not (course / "notebooks/03_third.ipynb").exists()


SPOILT_UNTIL = """
# Times

```python
from pathlib import Path
from mini_dist.course.lesson import calm
tries = Path("tries.txt")
tries.write_text((tries.read_text() if tries.exists() else "") + "x")
calm(len(tries.read_text()) >= {}, "the longest is below 3 medians")
```
"""


@pytest.mark.parametrize("needed", [1, 3, 9])
def test_a_notebook_whose_times_are_spoilt_is_run_again_and_at_last_refused(needed, course, capsys):
    (course / "lessons/05_times.md").write_text(SPOILT_UNTIL.format(needed))
    status = tool.main(["--root", str(course), "05_times"])
    tries = len((course / "notebooks/tries.txt").read_text())
    assert (status, tries) == ((0, needed) if needed <= tool.ATTEMPTS else (1, tool.ATTEMPTS))
    assert ("below 3 medians does not hold" in capsys.readouterr().out) == bool(status)


def one_cell(text, **metadata):
    """Return a notebook with one executed cell that printed `text`."""
    cell = new_code_cell("show it", execution_count=1, metadata=metadata)
    if text:
        cell.outputs = [new_output("stream", text=text)]
    return new_notebook(cells=[cell])


@pytest.mark.parametrize(
    "text",
    [
        "saved in /tmp/run/x.json",
        "/tmp/ipykernel_77/12.py:3: UserWarning",
        "File \x1b[32m/home/ann/mini_dist/x.py:3\x1b[39m",
        "~/mini_dist/x.py",
        "/dev/shm/store",
        "<function f at 0x7f1b2c3d4e5f>",
        "killed pid 4321",
        "rank 0 is 999123",
    ],
)
def test_an_output_that_names_this_machine_is_refused(text):
    with pytest.raises(tool.BuildError, match="the output holds"):
        tool.refuse(one_cell(text), pid=999123)


@pytest.mark.parametrize(
    "text",
    [
        "1/2",
        "mini_dist/strategies/zero.py:12",
        "0.999123 s",
        "a/tmp/b",
        "3 + 4 / 5",
        "0x10",
        "~ 40 %",
    ],
)
def test_an_honest_output_is_not_refused(text):
    tool.refuse(one_cell(text), pid=999123)


def test_an_error_that_a_grader_would_take_for_a_failure_is_refused():
    with pytest.raises(tool.BuildError, match="write `with raises"):
        tool.refuse(one_cell("1 / 0", tags=["raises-exception"]), pid=1)


def test_a_cell_tagged_for_comparison_must_show_something_to_compare():
    with pytest.raises(tool.BuildError, match="no text to compare"):
        tool.refuse(one_cell("", tags=["nbval-check-output"]), pid=1)


# ---- nbval, hardened -----------------------------------------------------------------------------

RAISES_NOTHING = "from mini_dist.course.lesson import raises\nwith raises(OSError):\n    pass"
BAD = {
    "good": [("print(1)", {"text": "1\n", "tags": ["nbval-check-output"]})],
    "untagged output may differ": [("print(1)", {"text": "2\n"})],
    "swallows the interrupt": [
        ("import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass", {}),
        ("time.sleep(60)", {}),  # This cell must not wait for its own limit too.
    ],
    "raises only the interrupt": [
        (
            "import time\nfrom mini_dist.course.lesson import raises\n"
            "with raises(KeyboardInterrupt):\n    time.sleep(60)",
            {},
        )
    ],
    "never stops printing": [
        (
            "import time\nwhile True:\n    try:\n        time.sleep(0.2); print(0)\n"
            "    except KeyboardInterrupt:\n        pass",
            {},
        )
    ],
    "kernel dies": [("import os\nos._exit(3)", {}), ("print(1)", {})],
    "raises nothing": [(RAISES_NOTHING, {})],
    "raises": [(RAISES_NOTHING.replace("pass", "open('gone')"), {})],
    "raises another error": [(RAISES_NOTHING.replace("pass", "1 / 0"), {})],
    "raises, compared": [
        (
            RAISES_NOTHING.replace("pass", "raise OSError('no')"),
            {"text": "OSError: yes\n", "tags": ["nbval-check-output"]},
        )
    ],
    "tagged output differs": [("print(1)", {"text": "2\n", "tags": ["nbval-check-output"]})],
    "tagged but never executed": [("print(1)", {"count": None, "tags": ["nbval-check-output"]})],
    # On a quiet machine four cells are enough and the rest don't run; FairClock allows more.
    "slow as a whole": [("import time\ntime.sleep(2.5)", {})] * 20,
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory, request):
    """Run pytest on the notebooks in BAD; return {name: text of its failures}."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copy(ROOT / "conftest.py", folder)
    asked = cases_to_run(request, "name") & set(BAD)
    for name, cells in ((name, BAD[name]) for name in BAD if name in asked):
        notebook = new_notebook()
        for source, how in cells:
            cell = new_code_cell(source, execution_count=how.get("count", 1))
            cell.metadata["tags"] = how.get("tags", [])
            if "text" in how:
                cell.outputs = [new_output("stream", text=how["text"])]
            notebook.cells.append(cell)
        nbformat.write(notebook, folder / f"{name.replace(' ', '_')}.ipynb")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env"]
        + ["--nbval-cell-timeout=3", "--notebook-limit=9.5", "--junitxml=report.xml"]
        + ["-n2", "--dist=loadfile", "-q", "-p", "no:cacheprovider", "."],
        cwd=folder,
        env=env,
        capture_output=True,
        timeout=200,
    )
    found = dict.fromkeys(asked, "")
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        name = case.get("classname").removesuffix(".ipynb").replace("_", " ")
        for bad in [*case.iter("failure"), *case.iter("error")]:
            found[name] += bad.text
    return found


@pytest.mark.parametrize("name", ["good", "untagged output may differ", "raises"])
def test_nbval_passes_a_good_notebook(name, verdicts):
    assert verdicts[name] == ""


@pytest.mark.parametrize(
    "name, why",
    [
        ("swallows the interrupt", "overran its limit and swallowed the interrupt"),
        ("raises only the interrupt", "overran its limit"),
        ("never stops printing", "Timeout of 3 seconds"),
        ("kernel dies", "the kernel died while it ran this cell"),
        ("raises nothing", "must raise an error but raised nothing"),
        ("raises another error", "ZeroDivisionError"),
        ("raises, compared", "Cell outputs differ"),
        ("tagged output differs", "Cell outputs differ"),
        ("tagged but never executed", "was never executed"),
        ("slow as a whole", "The whole notebook may take 9.5 s"),
    ],
)
def test_nbval_fails_a_bad_notebook(name, why, verdicts):
    assert why in verdicts[name]


# ---- the root conftest's other parts -------------------------------------------------------------


@pytest.fixture
def root_conftest(pytestconfig):
    plugins = pytestconfig.pluginmanager.get_plugins()
    return next(each for each in plugins if hasattr(each, "FairClock"))


def test_a_limit_waits_longer_on_a_machine_that_others_use(root_conftest, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(root_conftest.time, "monotonic", lambda: now[0])
    for ready, seconds in ((0.0, 10.0), (4.0, 10.0), (40.0, 1.0)):
        clock = root_conftest.FairClock()
        clock.ready = lambda ready=ready: ready
        now[0] += 10.0
        assert clock.now() == pytest.approx(seconds), ready


def test_a_sample_keeps_every_test_and_another_seed_keeps_other_cases(tmp_path):
    cases = "import pytest\n@pytest.mark.parametrize('x', range(30))\ndef test_many(x): pass\n"
    (tmp_path / "test_toy.py").write_text(cases + "def test_alone(): pass\n")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    command = [sys.executable, "-m", "pytest", "--collect-only", "--sample", "--sample-seed"]

    def chosen(seed):
        result = subprocess.run([*command, seed], cwd=tmp_path, capture_output=True, text=True)
        assert f"--sample-seed {seed}" in result.stdout
        return {line for line in result.stdout.splitlines() if "<Function" in line}

    first, again, other = chosen("a"), chosen("a"), chosen("b")
    assert first == again != other
    assert len(first) == len(other) == 4 + 1  # an eighth of 30 cases, and the test without cases
