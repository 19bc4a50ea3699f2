"""Find the notebooks of a class in folders and zips, whatever they are called, and read them.

Nothing is unpacked: a zip's members are read up to a size, and only notebooks and Python files.
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .alike import MOST_SOURCE, NO_CODE

MOST_BYTES = 32 << 20  # of one file
MOST_FILES, MOST_IN_ALL = 500, 128 << 20  # of one submission, files and their bytes
PROGRESS = "mini_dist-progress.json"  # with or without a point in front, see ../learner.py
IGNORED = {".ipynb_checkpoints", "__MACOSX", ".git", "__pycache__", ".venv", "node_modules"}
MOST_PROGRESS = 1 << 20
OLD = "it is in nbformat {}, and nbformat 4 is read: open it in JupyterLab and save it there"
CHECKED = re.compile(r"^check\.(\w+)\((\w+)\)\s*(?:#.*)?$", flags=re.MULTILINE)


@dataclass
class Submission:
    """What one learner has handed in. problems: what could not be read, a sentence each."""

    learner: str
    notebooks: dict[str, str] = field(default_factory=dict)  # path -> text
    files: dict[str, str] = field(default_factory=dict)
    progress: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    room: int = MOST_IN_ALL


def find(where: Path, learner: str = "") -> list[Submission]:
    """One submission for each file or folder in `where`, a folder or a zip of them. learner: a
    regular expression that finds who it is in a path; its first group, if it has one."""
    found: dict[str, Submission] = {}
    for entry, path, content in read_all(where):
        who = re.sub(r"\.(ipynb|zip|py)$", "", entry)
        # In its own name first: what is inside of an entry has been named by the learner.
        named = learner and (re.search(learner, entry) or re.search(learner, f"{entry}/{path}"))
        if named:
            who = named[named.lastindex and 1 or 0]
        take(found.setdefault(who, Submission(who)), path, content)
    return list(found.values())


def read_all(where: Path) -> Iterator[tuple[str, str, bytes | str]]:
    """(entry, path in it, content), one after the other: never all of them at once."""
    if where.is_dir():
        for entry in sorted(where.iterdir()):
            nothing = entry.name not in IGNORED
            for path, content in read_path(entry) if nothing else ():
                yield entry.name, path, content
                nothing = False
            if nothing:
                yield entry.name, "", ""
    elif zipfile.is_zipfile(where):
        for path, content in read_zip(where, "", whole=True):
            entry, *inside = PurePosixPath(path).parts or (where.name,)
            yield entry, "/".join(inside) or entry, content
    else:
        raise ValueError(f"{where} is neither a folder nor a zip: give what the learners handed in")


def take(submission: Submission, path: str, content: bytes | str) -> None:
    """Put one file where it belongs; a text instead of bytes says why there is none."""
    if isinstance(content, str):
        submission.problems += [f"{path}: {content}" if path else content] * bool(content)
        return
    submission.room -= len(content)
    if submission.room < 0:
        told = "there is more than is read of one learner, and this is where reading ended"
        submission.problems += [f"{path}: {told}"] * (submission.room + len(content) >= 0)
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        submission.problems.append(f"{path} is no text in UTF-8")
        return
    if path.endswith(".ipynb"):
        while path in submission.notebooks:  # (who hands in twice, in two entries)
            path = f"{path.removesuffix('.ipynb')}+.ipynb"
        submission.notebooks[path] = text
    elif path.endswith(PROGRESS):
        try:
            if len(text) > MOST_PROGRESS:
                raise ValueError(f"more than {MOST_PROGRESS:,} letters")
            submission.progress = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            submission.problems.append(f"{path} cannot be read")
    else:
        submission.files[path] = text


def read_path(entry: Path) -> Iterator[tuple[str, bytes | str]]:
    """(path, content) of what is in a folder, a zip or a file; links of either kind
    are not read, since they may lead to a file of the teacher's."""
    if entry.is_symlink():
        yield entry.name, "is a link, and links are not followed"
    elif entry.is_dir():
        inside = [e for e in sorted(entry.iterdir()) if e.name not in IGNORED]
        if not inside:
            yield "", "the folder is empty"
        for each in inside[:MOST_FILES]:
            for path, content in read_path(each):
                packed = each.is_dir() or each.suffix == ".zip"
                yield f"{each.name}/{path}" if packed and path else path or each.name, content
    elif not entry.is_file():
        yield entry.name, "is no file"  # a pipe, which has no end
    elif (names := entry.stat().st_nlink) > 1:
        yield entry.name, f"is a hard link, to a file that has {names} names: hand in a copy"
    elif entry.suffix.lower() == ".zip":
        yield from read_zip(entry, "")
    elif wanted(entry.name):
        size = entry.stat().st_size
        try:
            small = size <= MOST_BYTES
            yield entry.name, entry.read_bytes() if small else f"is too large ({size >> 20} MB)"
        except OSError as error:
            yield entry.name, f"cannot be read ({error.strerror})"
    elif entry.suffix.lower() in (".rar", ".7z", ".gz", ".tar", ".xz", ".pdf", ".html"):
        yield entry.name, "is not read: hand in .ipynb or .zip"


def read_zip(
    source: Path | io.BytesIO, prefix: str, whole: bool = False, left: dict | None = None
) -> Iterator[tuple[str, bytes | str]]:
    """(path, content) of what is in a zip and in zips inside of it. whole: it is the whole class's,
    each learner has an entry. left: of each of them, how many files and bytes are still read."""
    left = {} if left is None else left
    try:
        archive = zipfile.ZipFile(source)
        members = [m for m in archive.infolist() if not m.is_dir()]
    except Exception as error:  # zipfile raises many types for what is no zip
        yield prefix, f"the zip cannot be read ({error})"
        return
    for member in members:
        parts = PurePosixPath(member.filename.replace("\\", "/")).parts
        if not parts or IGNORED & set(parts) or ".." in parts or parts[0] == "/":
            continue
        path, packed = prefix + "/".join(parts), parts[-1].lower().endswith(".zip") and not prefix
        room = left.setdefault(parts[0] if whole else "", [MOST_FILES, MOST_IN_ALL])
        if not (packed or wanted(path)) or room[0] <= 0:
            continue
        try:
            with archive.open(member) as file:
                content = file.read(MOST_BYTES + 1)
        except Exception as error:  # encrypted, for example, or damaged: zlib and lzma have theirs
            yield path, f"cannot be read ({error})"
            continue
        room[:] = room[0] - 1, room[1] - len(content)
        if len(content) > MOST_BYTES or room[1] < 0:
            room[0] = 0
            yield path, "the zip holds too much, and this is where reading ended"
        elif packed:
            yield from read_zip(io.BytesIO(content), f"{path}/", left={"": room})
        else:
            yield path, content


def wanted(path: str) -> bool:
    return path.endswith((".ipynb", ".py", PROGRESS))


# ---- which lesson it is, and what is in it -------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    id: str
    kind: str
    source: str


@dataclass
class Lesson:
    """A notebook of the course as shipped."""

    stem: str
    title: str
    cells: list[Cell]
    functions: dict[str, str]  # exercise -> its function's name there

    @property
    def ids(self) -> set[str]:
        return {cell.id for cell in self.cells}


def read_cells(text: str) -> list[Cell]:
    """ValueError for what is no notebook."""
    try:
        found = json.loads(text)
        if "cells" not in found and "worksheets" in found:
            raise ValueError(OLD.format(found.get("nbformat", 3)))
        return [
            Cell(str(c.get("id", "")), c["cell_type"], "".join(c.get("source", "")))
            for c in found["cells"]
        ]
    except KeyError as error:
        raise ValueError(f"it is no notebook (it has no {error})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no notebook (it is no JSON: {error})") from None
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no notebook ({type(error).__name__}: {error})") from None


def lessons(folder: Path) -> list[Lesson]:
    found = []
    for path in sorted(folder.glob("[0-9]*.ipynb")):
        cells = read_cells(path.read_text(encoding="utf-8"))
        code = "\n".join(cell.source for cell in cells if cell.kind == "code")
        found.append(Lesson(path.stem, title_of(cells), cells, dict(CHECKED.findall(code))))
    return found


def title_of(cells: list[Cell]) -> str:
    text = "\n".join(cell.source for cell in cells if cell.kind == "markdown")
    return next(iter(re.findall(r"^# (.+)", text, flags=re.MULTILINE)), "").strip()


def which_lesson(cells: list[Cell], known: list[Lesson]) -> Lesson | None:
    """By what is in it: the ids of its cells, its title, the exercises that it checks. Its name
    says nothing: learners and platforms rename files."""
    ids = {cell.id for cell in cells} - {""}
    code = "\n".join(cell.source for cell in cells if cell.kind == "code")
    title = title_of(cells)
    used = set(re.findall(r"\bcheck\.(\w+)", code)) | set(re.findall(r"^def (\w+)", code, re.M))

    def likeness(lesson: Lesson) -> tuple:
        names = {*lesson.functions, *lesson.functions.values()}
        return len(ids & lesson.ids), title == lesson.title, len(used & names)

    best = max(known, key=likeness, default=None)
    return best if best and any(likeness(best)) else None


@dataclass
class Written:
    """What stands in a notebook for one exercise. source: the function; note: what is odd."""

    source: str = ""
    missing: bool = False
    as_shipped: bool = False
    note: str = ""


def written(cells: list[Cell], lesson: Lesson, exercise: str) -> Written:
    name = lesson.functions[exercise]
    code = [cell.source for cell in cells if cell.kind == "code"]
    (shipped,) = [
        c.source for c in lesson.cells if (exercise, name) in CHECKED.findall(c.source)
    ] or [""]
    called = [cell for cell in code if re.search(rf"\bcheck\.{exercise}\b *\(", cell)]
    argument = {fn for cell in called for found, fn in CHECKED.findall(cell) if found == exercise}
    defined = definitions(code, {name, *argument})
    if shipped in code:
        return Written(defined[-1] if defined else "", as_shipped=True)
    if not defined and not called:
        return Written(missing=True, note=f"neither {name} nor its check is in the notebook")
    note = ""
    if not called:
        note = f"the call of check.{exercise} was removed"
    elif not argument:
        note = f"the call of check.{exercise} was edited"
    return Written(defined[-1] if defined else "", note=note)


def definitions(cells: list[str], names: set[str]) -> list[str]:
    """Return the last definition of these names in each cell that has one.

    No more than MOST_SOURCE letters are parsed.
    """
    found, left = [], MOST_SOURCE
    for cell in cells:
        if not any(f" {name}" in cell for name in names):  # (a cell of data need not be parsed)
            continue
        cell, left = cell[:left], left - len(cell[:left])
        try:
            nodes = ast.parse(re.sub(r"^[%!].*", "", cell, flags=re.MULTILINE)).body
        except NO_CODE:
            continue
        kinds = (ast.FunctionDef, ast.ClassDef)
        nodes = [node for node in nodes if isinstance(node, kinds) and node.name in names]
        found += [ast.get_source_segment(cell, node) or "" for node in nodes[-1:]]
    return found
