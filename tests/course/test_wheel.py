"""The wheel is the whole course: an empty folder without a checkout gets to a running lesson.

The wheel is installed into a separate environment that finds all other packages in this one, so a
launch there runs the installed library with this environment's torch.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest

from mini_dist.course import learner, working_copy

pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")

ROOT = Path(__file__).resolve().parents[2]
LESSON = "00_start_here.ipynb"
NOT_SHIPPED = ("benchmarks/", "mini_dist/")  # Links to code work only in the checkout.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the `bin` folder of an environment with the wheel and no path to this checkout."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(home))
    python = home / "bin/python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", str(wheel))
    (site,) = home.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # Python ignores .pth files in those.
    return home / "bin"


@pytest.fixture
def learner_s(tmp_path, monkeypatch):
    """Set up an empty folder and the environment of a learner's shell."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [*os.environ]:
        if name.startswith(("PYTEST_", "PYTHONPATH", "JPY_", "JUPYTER_")) or name == "MPLBACKEND":
            monkeypatch.delenv(name)
    return tmp_path / "here"


def run(*command, **how):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_notebook_lesson_and_figure_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    for folder, pattern in {
        "notebooks": "*.ipynb",
        "lessons": "*.md",
        "lessons/figures": "*",
    }.items():
        for path in (ROOT / folder).glob(pattern):
            if path.is_file():
                assert f"mini_dist/shipped/{path.relative_to(ROOT)}" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mini_dist"}


def test_the_doctor_of_an_installed_course_starts_ranks(installed, learner_s):
    told = run(str(installed / "mini-dist"), "doctor")
    assert re.search(r"^ok  ranks .* 1 \+ 2 = 3 ", told, re.MULTILINE), told
    lines = re.findall(r"^(?:ok|--|NO)  (\S+)", told, re.MULTILINE)
    assert len(lines) == len(told.splitlines()), "one line each"
    assert {"Python", "torch", "cores", "/dev/shm", "namespaces", "fonts", "GPU"} <= {*lines}


def test_progress_of_an_installed_course_knows_all_lessons_and_exercises(installed, learner_s):
    exercises = sum(map(len, learner.lessons().values()))
    told = run(str(installed / "mini-dist"), "progress")
    assert told.startswith(
        f"0 of {len(learner.lessons())} lessons opened, 0 of {exercises} exercises right"
    )
    version = run(str(installed / "python"), "-m", "mini_dist", "--version")
    assert version == f"mini_dist {run(str(installed / 'python'), '-c', VERSION)}"


VERSION = "import importlib.metadata as m, mini_dist; print(mini_dist.__version__); " + (
    "assert m.version('mini_dist') == mini_dist.__version__ and 'shipped' in "
    "str(__import__('mini_dist.course.working_copy').course.working_copy.NOTEBOOKS)"
)


def test_an_empty_folder_becomes_a_course_in_which_every_link_leads_somewhere(installed, learner_s):
    told = run(str(installed / "python"), "-m", "mini_dist.course.working_copy", "--once")
    assert told.startswith("work/ is yours")
    assert run(str(installed / "mini-dist"), "update") == "work/ is up to date\n"
    work = learner_s / "work"
    found = [path.relative_to(work).as_posix() for path in work.rglob("*.ipynb")]
    assert sorted(found) == working_copy.notebooks(ROOT / "notebooks")
    for name in found:
        cells = json.loads((work / name).read_text())["cells"]
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in {*re.findall(r"\]\((\.\./[^)#\s]+)", text)}:
            there = (work / name).parent.joinpath(link).exists()
            assert there or link.lstrip("./").startswith(NOT_SHIPPED), f"{name} links to {link}"
    docs = learner_s / "docs"
    links = re.findall(r"\]\((\.\./work/[^)#\s]+)", (docs / "glossary.md").read_text())
    assert len(links) > 20 and all((docs / link).exists() for link in links)
    assert not (docs / "wrong_answers.md").exists()  # the teacher's


@pytest.mark.parametrize("command", ["doctor", "progress"])
def test_a_command_without_arguments_refuses_some_and_describes_itself(installed, command):
    program = str(installed / "mini-dist")
    assert run(program, command, "--help").startswith(f"mini-dist {command} ")
    refused = subprocess.run([program, command, "x"], capture_output=True, text=True)
    assert refused.returncode == 1 and "takes no arguments" in refused.stderr


def test_the_command_opens_jupyterlab_on_the_first_lesson(installed, learner_s):
    with socket.socket() as free:  # If another process takes the port, JupyterLab tries the next.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(installed / "mini-dist"), "lab", "--no-browser", "--allow-root"]
    command += [f"--port={port}", "--IdentityProvider.token=learner"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"(http://(?:localhost|127\.0\.0\.1):\d+)(/lab/tree\S*)", line):
                break
        else:
            raise AssertionError("".join(said))
        assert "work/ is yours" in "".join(said)
        assert found[2].startswith(f"/lab/tree/work/{LESSON}")
        address = f"{found[1]}/api/contents/work/{LESSON}?token=learner"
        assert answered(address, server)["type"] == "notebook"
    finally:
        server.send_signal(signal.SIGTERM)
        server.stdout.close()
        server.wait(60)


def answered(address, server):
    """Return the server's answer; it prints its address shortly before it listens there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError(f"nothing answers at {address}")


def test_the_first_lesson_runs_where_only_the_wheel_is(installed, learner_s, request):
    if not request.config.getoption("long"):
        pytest.skip("half a minute: --long runs it")
    run(str(installed / "python"), "-m", "mini_dist.course.working_copy", "--once")
    path = learner_s / "work" / LESSON
    run(str(installed / "python"), "-m", "papermill", "--cwd", "work", str(path), "out.ipynb")
    cells = json.loads(Path("out.ipynb").read_text())["cells"]
    assert "hello, I am rank 3 of 4" in str([cell.get("outputs") for cell in cells])
