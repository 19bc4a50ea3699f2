"""Setup: one list of dependencies everywhere, and a clear message when setup cannot work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
README = (ROOT / "README.md").read_text()
EXTRAS = PROJECT["optional-dependencies"]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = {
    pin.name.lower(): pin
    for line in LINES
    if not line.startswith("#")
    for pin in [Requirement(line)]
}


def named(requirements):
    return {Requirement(line).name.lower(): Requirement(line) for line in requirements}


def make(*args):
    return subprocess.run(["make", *args], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("extra", ["the library", *EXTRAS])
def test_every_dependency_has_a_tested_version_that_its_range_admits(extra):
    for name, wanted in named(EXTRAS.get(extra, PROJECT["dependencies"])).items():
        if name == "triton":  # A CUDA build of torch pins its own version.
            assert name not in PINS
            continue
        (pin,) = PINS[name].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), f"{wanted} does not admit {pin.version}"


def test_torch_is_pinned_for_every_python():
    assert str(PINS["torch"]) == "torch==2.13.0"


def test_conda_installs_the_same_list():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert {re.split("[=<>]", line)[0] for line in conda} == {"python", "pip"}
    assert "-e .[lab,test]" in pip["pip"]
    assert "--constraint constraints.txt" in pip["pip"]
    options = [line for line in pip["pip"] if not line.startswith("-")]
    assert options == [], f"pyproject.toml is the one list: move {options} there"


def test_make_test_asks_for_the_extras_that_conda_installs():
    assert "pip install -c constraints.txt -e '.[lab,test]'" in make("-n", "-B", "test").stdout


def test_an_old_python_is_refused_in_one_sentence(tmp_path):
    old = tmp_path / "python3.8"
    script = (
        "import sys; sys.version_info = (3, 8, 18); sys.version = '3.8.18 (old)'; exec(sys.argv[2])"
    )
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{script}" "$@"\n')
    old.chmod(0o755)
    run = make("lab", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert run.returncode != 0
    assert "mini_dist needs Python 3.10 or newer" in run.stderr
    assert "3.8.18" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_the_chosen_torch_is_installed_before_anything_asks_for_torch():
    steps = make("-n", "-B", "lab", "TORCH=cpu").stdout.splitlines()
    chosen = [i for i, step in enumerate(steps) if "download.pytorch.org/whl/cpu torch" in step]
    rest = [i for i, step in enumerate(steps) if "-e '.[lab]'" in step]
    assert chosen and rest and chosen[0] < rest[0]
    assert "download.pytorch.org" not in make("-n", "-B", "lab").stdout


def test_the_lab_opens_the_learner_s_copy_which_git_ignores():
    assert "python -m mini_dist lab --port 9000" in make("-n", "lab", "LAB_ARGS=--port 9000").stdout
    assert "python -m mini_dist update" in make("-n", "update").stdout
    ignored = subprocess.run(["git", "check-ignore", "-q", "work/00_start_here.ipynb"], cwd=ROOT)
    assert ignored.returncode in (0, 128)  # 128: this is not a git checkout


def test_ci_runs_what_the_readme_says():
    assert re.search(r"^make test\b", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE)
    assert "make test" in (ROOT / "README.md").read_text()
    assert "bash .ci/run" in (ROOT / ".github/workflows/ci.yml").read_text()


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    told = set(re.findall(r"\bmake ([a-z]\w*)", (ROOT / "README.md").read_text()))
    assert told >= {"lab", "test"}
    assert told <= targets


def test_the_readme_lists_every_lesson_and_every_room():
    for lesson in (ROOT / "lessons").glob("[0-9][0-9]_*.md"):
        assert f"(notebooks/{lesson.stem}.ipynb)" in README, f"{lesson.name} is not in the table"
    for link in re.findall(r"\]\(([^)#\s]+)", README):
        assert re.match(r"https?:", link) or (ROOT / link).exists(), link


def test_readme_linter_docstrings_and_tests_name_the_same_eight_rooms_in_the_same_order():
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    rooms = next(each["layers"] for each in contracts if each["type"] == "layers")
    assert re.findall(r"^\| `(\w+)/` \|", README, flags=re.MULTILINE) == rooms
    for number, room in enumerate(reversed(rooms), 1):
        head = (ROOT / f"mini_dist/{room}/__init__.py").read_text()
        assert head.startswith(f'"""Room {number}, {room}: '), room
        assert "Begin with" in head or "Read in this order" in head, room
    for folder, more in {"mini_dist": set(), "tests": {"ladder", "gpu"}}.items():
        found = {path.parent.name for path in (ROOT / folder).glob("*/*.py")}
        assert found == {*rooms, *more}, folder


def test_every_strategy_stands_in_the_contract_that_keeps_strategies_apart():
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    apart = next(each["modules"] for each in contracts if each["type"] == "independence")
    folders = (ROOT / "mini_dist/strategies").glob("*/__init__.py")
    assert sorted(apart) == sorted(f"mini_dist.strategies.{each.parent.name}" for each in folders)


def test_the_licence_is_the_one_that_the_package_names():
    assert PROJECT["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "TERMS AND CONDITIONS" in text
