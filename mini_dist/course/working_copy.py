"""Make and update a learner's own copy of the course's notebooks.

    mini-dist update                                # bring what is new into work/ (make update)
    python -m mini_dist.course.working_copy --once  # make work/ if it is not there (mini-dist lab)

The notebooks of the course come with the checkout or, after `pip install`, with the package. They
change with each release, and JupyterLab writes into every notebook that it opens. So a learner
opens a copy, the *working copy*, in the current folder. A file in it, `.shipped.json`, holds a hash
of each notebook as it was shipped. When the course brings a new version of a notebook, the hash
tells which of three cases holds:

    nobody has changed the notebook       the new version takes its place
    the learner has changed it            it stays, and the new version is added next to it
    the notebook is new                   it is added

A notebook counts as changed if its cells differ, in their text, number or order. Outputs do not
count, so a notebook that was only run takes the new version.

In the copy, no cell counts as run, and what a `reveal` printed is left out, because it would answer
the question above it. The metadata says about Python what the kernel will say, or JupyterLab would
call every notebook changed as soon as it is open.

Notebooks link to `../docs/` and show figures of `../lessons/figures/`. A checkout has both there.
Elsewhere both are put beside the working copy, by the same three cases.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
IS_INSTALLED = (PACKAGE / "shipped").is_dir()  # a wheel; pyproject.toml says what it takes along
COURSE = PACKAGE / "shipped" if IS_INSTALLED else PACKAGE.parent
NOTEBOOKS = COURSE / "notebooks"
WORK = Path("work")
MANIFEST = ".shipped.json"
LINKED = ("docs", "lessons/figures")  # folders of the course to which notebooks link
FOR_TEACHERS = "wrong_answers.md"  # the usual mistakes, and the hints that they get
REVEALS = re.compile(r"^\s*reveal\(", re.MULTILINE)
NEW = "-new"  # after the stem of a new version, next to a notebook that the learner has changed


# ---- what belongs to the course ------------------------------------------------------------------


def notebooks(folder: Path = NOTEBOOKS) -> list[str]:
    """Return the names of the course's notebooks in a folder, such as "labs/plan_sweep.ipynb".

    The build writes into each notebook from which lesson it comes. A learner's own notebook has no
    such entry, and a copy under another name has the entry of the original.
    """
    found = sorted(path.relative_to(folder) for path in folder.rglob("*.ipynb"))
    return [name.as_posix() for name in found if belongs(folder / name, name)]


def beside(shipped: Path, work: Path) -> list[str]:
    """Return what notebooks link to, as "../docs/glossary.md"; [] if `work` is in the checkout."""
    course = shipped.parent
    if course.resolve() == work.parent.resolve():
        return []
    found = sorted(path for folder in LINKED for path in (course / folder).rglob("*.*"))
    found = [path for path in found if path.name != FOR_TEACHERS]
    names = [path.relative_to(course).as_posix() for path in found if path.is_file()]
    return [f"../{name}" for name in names if "__pycache__" not in name]


def belongs(path: Path, name: Path) -> bool:
    """Return whether the notebook in a file is the one that the course calls `name`.

    A translated notebook is in a folder with the name of its language: "zh/12_pipeline.ipynb".
    """
    try:
        stamp = json.loads(path.read_bytes())["metadata"]["mini_dist"]
        lesson = Path(stamp["lesson"]).relative_to("lessons")
        return name == Path(stamp.get("language", ""), lesson).with_suffix(".ipynb")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # the file may hold anything
        return False


def digest(content: bytes) -> str:
    """Return a hash of a notebook's cells without outputs, or of the bytes of any other file."""
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        cells = [
            [cell["cell_type"], "".join(cell["source"]), cell.get("attachments", {})]
            for cell in json.loads(content)["cells"]
        ]
        content = json.dumps(cells, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def _to_open(content: bytes, name: str) -> bytes:
    """Return a file as a learner opens it first: a notebook that nobody has run, a page that links
    to the copy's notebooks."""
    if name.endswith(".md"):
        return content.replace(b"](../notebooks/", f"](../{WORK}/".encode())
    if not name.endswith(".ipynb"):
        return content
    notebook = json.loads(content)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        cell["execution_count"] = None
        if REVEALS.search("".join(cell["source"])):
            cell["outputs"] = []
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = None
    notebook["metadata"]["language_info"] = kernels_language()
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


@cache
def kernels_language() -> dict:
    """Return what a kernel of this Python says about its language, and JupyterLab writes down."""
    if importlib.util.find_spec("ipykernel") is None:
        return {"name": "python"}
    from ipykernel.ipkernel import IPythonKernel

    return dict(IPythonKernel.language_info)


# ---- the working copy ----------------------------------------------------------------------------


@dataclass
class Update:
    """What an update of a working copy did, by the names of the notebooks."""

    work: Path
    added: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)  # nobody had changed the former version
    kept: dict[str, str] = field(default_factory=dict)  # changed -> the new version next to it
    left: list[str] = field(default_factory=list)  # changed in the shipped folder itself
    gone: list[str] = field(default_factory=list)  # no longer shipped

    def __str__(self) -> str:
        lines = [f"added: {name}" for name in self.added]
        lines += [f"new version: {name}" for name in self.taken]
        lines += [
            f"yours is kept: {name} (the new version is {beside})"
            for name, beside in self.kept.items()
        ]
        lines += [
            f"left out: {name} (somebody has changed the course's own file; "
            f"`git restore notebooks/{name}` brings it back)"
            for name in self.left
        ]
        lines += [f"no longer part of the course, but kept: {name}" for name in self.gone]
        return "\n".join(lines or [f"{self.work.name}/ is up to date"])


def update(shipped: Path, work: Path, committed: dict[str, bytes] | None = None) -> Update:
    """Bring the notebooks of the folder `shipped` into the working copy, and say what was done.

    A notebook that the learner has deleted is added again. committed: notebooks that somebody has
    changed in `shipped` itself, as the course has them. Raises ValueError if `work` is no folder or
    there are no notebooks in `shipped`.
    """
    names = notebooks(shipped)
    if not names:
        raise ValueError(f"{shipped} holds no notebook of the course: give the folder notebooks/.")
    if work.exists() and not work.is_dir():
        raise ValueError(f"{work} is not a folder: move it away, or work in another folder.")
    names += beside(shipped, work)
    known, done = read_manifest(work), Update(work)
    for name in names:
        new, mine = _to_open((shipped / name).read_bytes(), name), work / name
        original = digest((committed or {}).get(name, new))
        if not mine.exists():
            write(mine, new)
            done.added.append(name)
        elif digest(new) != original:  # somebody changed the shipped notebook
            done.left.append(name)
            continue
        elif known.get(name) != original:
            current = digest(mine.read_bytes())
            if current == known.get(name):
                write(mine, new)
                done.taken.append(name)
            elif current != original:
                done.kept[name] = put_beside(work, name, new, known)
        known[name] = original
    done.gone = [name for name in known if name not in names and not is_beside(name)]
    for name in done.gone:
        del known[name]
    write(work / MANIFEST, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())
    return done


def news(shipped: Path, work: Path) -> list[str]:
    """Return the notebooks whose newest version the working copy has not had yet."""
    known = read_manifest(work)
    return [
        name
        for name in notebooks(shipped)
        if known.get(name) != digest((shipped / name).read_bytes())
    ]


def put_beside(work: Path, name: str, content: bytes, known: dict[str, str]) -> str:
    """Write a new version next to the learner's notebook; return its name.

    An earlier new version gives way to this one, unless the learner has changed it as well.
    """
    path, number = Path(name), 1
    while True:
        beside = path.with_stem(f"{path.stem}{NEW}{number if number > 1 else ''}").as_posix()
        there = work / beside
        if not there.exists() or digest(there.read_bytes()) in (known.get(beside), digest(content)):
            write(there, content)
            known[beside] = digest(content)
            return beside
        number += 1


def is_beside(name: str) -> bool:
    return Path(name).stem.rstrip("0123456789").endswith(NEW)


def read_manifest(work: Path) -> dict[str, str]:
    """Return the hashes of what was shipped. Without them, every notebook counts as changed."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((work / MANIFEST).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {name: known for name, known in found.items() if isinstance(known, str)}
    return {}


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def changed_in_place(shipped: Path) -> dict[str, bytes]:
    """Return the notebooks of a git checkout that differ from its last commit, as committed.

    Before there was a working copy, learners wrote into notebooks/ itself. An update must not take
    such a notebook for the course's, and later overwrite it.
    """
    if shutil.which("git") is None:
        return {}

    def git(*arguments: str) -> bytes:
        said = subprocess.run(["git", "-C", shipped, *arguments], capture_output=True)
        return said.stdout if said.returncode == 0 else b""

    names = git("diff", "--name-only", "--relative", "-z", "HEAD", "--", ".")
    names = os.fsdecode(names).split("\0")
    committed = {name: git("show", f"HEAD:./{name}") for name in names if name}
    return {name: content for name, content in committed.items() if content}


# ---- the command ---------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mini-dist update",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--once", action="store_true", help="leave a working copy as it is")
    parser.add_argument("--shipped", type=Path, default=NOTEBOOKS, help="the course's notebooks")
    parser.add_argument("--work", type=Path, default=WORK, help="the working copy")
    options = parser.parse_args(argv)
    if options.once and (options.work / MANIFEST).exists():
        if found := news(options.shipped, options.work):
            command = "mini-dist update" if IS_INSTALLED else "make update"
            print(f"{len(found)} notebooks have a new version. `{command}` takes them.")
        return 0
    if not options.once and not options.work.exists():
        print(
            f"There is no folder {options.work} here. Go to the folder in which you ran "
            "`mini-dist lab`, or run that first.",
            file=sys.stderr,
        )
        return 1
    try:
        done = update(options.shipped, options.work, changed_in_place(options.shipped))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.once:
        added = [name for name in done.added if name.endswith(".ipynb")]
        print(f"{options.work.name}/ is yours: {len(added)} notebooks. Work in this folder.")
    else:
        print(done)
    return 0


if __name__ == "__main__":
    sys.exit(main())
