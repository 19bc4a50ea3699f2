"""Build the notebooks: lessons/*.md -> notebooks/*.ipynb, executed, outputs kept.

    python tools/build_notebooks.py                  rebuild what is stale
    python tools/build_notebooks.py 03_ring --force  rebuild one whatever its state
    python tools/build_notebooks.py --check          list what is stale, run nothing

The lesson is the only text; a notebook is never edited by hand. The same lesson gives the same
notebook, byte for byte, as far as its outputs allow: cell ids come from their place, no timing and
no widget state is kept, and an output that names this machine (a path, a pid, an address in memory)
is refused.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jupytext
import nbformat
from ipykernel.kernelspec import RESOURCES, get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parent.parent
STAMP = "mini_dist"  # our key in a notebook's metadata
SETTINGS = {"build": 1, "cell_timeout_s": 60, "notebook_limit_s": 90}  # part of every stamp
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

# Where the course is on GitHub, as "owner/name". Once maintainers set it, each notebook begins with
# a badge for Colab and a cell that installs the course where it is not. "" leaves both out.
REPOSITORY = ""
COLAB = "https://colab.research.google.com"
BADGE = (
    f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
    f"({COLAB}/github/{{repository}}/blob/main/notebooks/{{notebook}})"
)
INSTALL = """\
import importlib.util

if importlib.util.find_spec("mini_dist") is None:  # On Colab and Kaggle, which have torch already.
    %pip install --quiet --no-deps git+https://github.com/{repository} cloudpickle safetensors"""


class BuildError(Exception):
    """A lesson that cannot become a notebook, and why."""


class Spoilt(BuildError):
    """Times in a notebook break the rule that their cell states."""


# ---- from Markdown to cells ----------------------------------------------------------------------


def lessons(root):
    """The lessons under `root`, NN_topic.md, in reading order; labs after them."""
    labs = sorted((root / "lessons/labs").glob("*.md"))
    return sorted((root / "lessons").glob("[0-9][0-9]_*.md")) + labs


def notebook_of(lesson, root):
    """Where the notebook of a lesson lives."""
    return (root / "notebooks" / lesson.relative_to(root / "lessons")).with_suffix(".ipynb")


def title(lesson):
    """A lesson's first heading."""
    heading = re.search(r"^# +(.+)$", lesson.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if not heading:
        raise BuildError(f"{lesson.name} has no title: expected a line '# Title'")
    return heading.group(1).strip()


def navigation(lesson, root):
    """The last line of a lesson's notebook: links to its neighbours. Labs have none."""
    if lesson.parent.name == "labs":
        return None
    course = [path for path in lessons(root) if path.parent == lesson.parent]
    here = course.index(lesson)
    links = []
    if here > 0:
        before = course[here - 1]
        links.append(f"[← {title(before)}]({before.stem}.ipynb)")
    if here + 1 < len(course):
        after = course[here + 1]
        links.append(f"[{title(after)} →]({after.stem}.ipynb)")
    return " · ".join(links) or None


def relink(markdown, lesson, root):
    """Links as seen from notebooks/: lessons become notebooks, figures and other pages stay."""
    up = "../../lessons/labs/" if lesson.parent.name == "labs" else "../lessons/"

    def to_notebook(link):
        target = (lesson.parent / f"{link[1]}.md").resolve()
        if target in lessons(root):
            return f"]({link[1]}.ipynb{link[2]})"
        inside = target.is_relative_to(root / "lessons")
        return f"]({up}{link[1]}.md{link[2]})" if inside else link[0]

    markdown = re.sub(r'(\]\(|src=")((?:\.\./)?figures/)', rf"\1{up}\2", markdown)
    return re.sub(r"\]\(([\w./-]+)\.md((?:#[^)]*)?)\)", to_notebook, markdown)


FIRST = "00_start_here"
IN_CHINESE = f"[中文](zh/{FIRST}.ipynb)"  # below the first lesson's title


def front_door(lesson, root):
    """What a notebook begins with, for people who open it alone, on Colab or Kaggle."""
    if not REPOSITORY:
        return []
    notebook = lesson.relative_to(root / "lessons").with_suffix(".ipynb").as_posix()
    badge = BADGE.format(repository=REPOSITORY, notebook=notebook)
    install = nbformat.v4.new_code_cell(INSTALL.format(repository=REPOSITORY))
    return [nbformat.v4.new_markdown_cell(badge), install]


def convert(lesson, root):
    """A lesson as a notebook without outputs, stamped."""
    text, links = lesson.read_text(encoding="utf-8"), navigation(lesson, root)
    try:
        notebook = jupytext.reads(text, fmt="md")
    except Exception as error:  # a half-written YAML header, mostly; a lesson needs none
        raise BuildError(f"{lesson.name} is not a jupytext Markdown file: {error}") from error
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, lesson, root)
    if lesson.stem == FIRST:
        top = notebook.cells[0]
        top.source = top.source.replace("\n", f"\n\n{IN_CHINESE}\n", 1)
    notebook.cells[:0] = front_door(lesson, root)
    if links:
        notebook.cells.append(nbformat.v4.new_markdown_cell(f"---\n{links}"))
    for index, cell in enumerate(notebook.cells):
        place = f"{lesson.stem}:{index}:{cell.cell_type}"
        cell.id = hashlib.sha1(place.encode()).hexdigest()[:16]
        tags = cell.metadata.get("tags")
        hidden = cell.metadata.get("jupyter")
        cell.metadata = nbformat.from_dict(
            {key: value for key, value in (("tags", tags), ("jupyter", hidden)) if value}
        )
    stamp = hashlib.sha256(json.dumps([text, links, SETTINGS]).encode()).hexdigest()
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": KERNELSPEC,
            "language_info": {"name": "python"},
            STAMP: {"lesson": lesson.relative_to(root).as_posix(), "hash": stamp},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


# ---- what is stale -------------------------------------------------------------------------------


def why_stale(lesson, root):
    """Why a lesson's notebook must be rebuilt, in a few words, or None."""
    path = notebook_of(lesson, root)
    if not path.exists():
        return "not built yet"
    try:
        fresh = convert(lesson, root)
    except BuildError as error:
        return str(error)
    built = nbformat.read(path, as_version=4)
    if built.metadata.get(STAMP, {}).get("hash") != fresh.metadata[STAMP]["hash"]:
        return "the lesson (or a neighbour's title, or the build) changed since it was built"
    if len(built.cells) != len(fresh.cells):
        return f"{len(built.cells)} cells, the lesson has {len(fresh.cells)}: edited by hand?"
    for index, (have, want) in enumerate(zip(built.cells, fresh.cells, strict=True)):
        for key in ("id", "cell_type", "source", "metadata"):
            if have.get(key) != want.get(key):
                return f"cell {index} differs from the lesson in its {key}: edited by hand?"
        if have.cell_type == "code" and have.source.strip() and not have.execution_count:
            return f"cell {index} was not executed"
    return None


def stale(root):
    """{path of the notebook: why}, for lessons to build and for notebooks whose lesson is gone."""
    found = {}
    for lesson in lessons(root):
        if why := why_stale(lesson, root):
            found[notebook_of(lesson, root)] = why
    for path in sorted((root / "notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        source = nbformat.read(path, as_version=4).metadata.get(STAMP, {}).get("lesson")
        if source and not (root / source).exists():
            found[path] = f"its lesson {source} is gone: delete it"
    return found


# ---- execution -----------------------------------------------------------------------------------


class ThisPython(KernelSpecManager):
    """Every kernel is the Python that runs the build, whatever kernels the user has installed."""

    def get_kernel_spec(self, kernel_name):
        return KernelSpec(resource_dir=RESOURCES, **get_kernel_dict())


def execute(notebook, folder):
    """Run the cells in a kernel of its own, in `folder`; return the kernel's pid."""
    pid = []
    with tempfile.TemporaryDirectory() as private:
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=ThisPython(),
            transport="ipc",  # no port, so two builds cannot take each other's
            connection_file=f"{private}/kernel.json",
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=SETTINGS["cell_timeout_s"],
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            coalesce_streams=True,
            store_widget_state=False,
            on_cell_start=lambda **_: pid or pid.append(manager.provisioner.pid),
        )
        # no start-up files of the user's, and nothing of a test run that this build is part of
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MPLBACKEND"))}
        client.execute(env={**env, "IPYTHONDIR": private}, cleanup_kc=True)
    return pid[0] if pid else None


def clean(notebook, root):
    """Take out of the outputs what belongs to this machine or to a live page."""
    # a traceback shows files of the library: name them as the reader knows them
    home = str(Path.home())
    prefixes = [f"{root}/", f"{sys.base_prefix}/"]
    prefixes += [f"~{path.removeprefix(home)}" for path in prefixes if path.startswith(home)]

    def shorten(value):
        if isinstance(value, str):
            for prefix in prefixes:
                value = value.replace(prefix, "")
            return value
        if isinstance(value, list):
            return [shorten(item) for item in value]
        if isinstance(value, dict):
            return {key: shorten(item) for key, item in value.items()}
        return value

    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        # nbclient keeps the kernel's transient bookkeeping in the cell; a reader needs none of it
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            for key in ("text", "evalue", "traceback"):
                if key in output:
                    output[key] = shorten(output[key])
            for kind in list(output.get("data", {})):
                if not kind.startswith("image/") or kind == "image/svg+xml":
                    output.data[kind] = shorten(output.data[kind])
        cell.outputs = [o for o in cell.outputs if o.output_type != "display_data" or o.data]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})


NOTHING_RAISED = (
    "was expected here, but nothing was raised"  # as mini_dist.course.lesson.raises says it
)
SPOILT = "A busy machine has spoilt these times"  # as mini_dist.course.lesson.calm says it
ATTEMPTS = 4  # at a notebook whose times are spoilt
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LOCAL = {
    "a path of this machine": (
        r"(?<![\w./])(?:~|/(?:tmp|var/tmp|dev/shm|home|root|work|Users|private|opt))/[\w.-]+"
    ),
    "a temporary file name": r"ipykernel_\d+|<ipython-input-",
    "a process id": r"\bpid\W{0,3}\d+",
    "an address in memory": r"\bat 0x[0-9a-fA-F]{6,}",
}


def texts(output):
    """Every piece of text an output shows."""
    if output.output_type == "stream":
        yield output.text
    elif output.output_type == "error":
        yield output.evalue
        yield from output.traceback
    for kind, value in output.get("data", {}).items():
        if not kind.startswith("image/") or kind == "image/svg+xml":
            yield value if isinstance(value, str) else json.dumps(value)


def refuse(notebook, pid):
    """Raise BuildError where a cell breaks a promise that the course makes to its readers."""
    local = {**LOCAL, "the kernel's process id": rf"(?<![\w.]){pid}(?![\w.])"}
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        where = f"cell {index} ({(cell.source.strip().splitlines() or ['empty'])[0]!r})"
        tags = cell.metadata.get("tags", [])
        if "raises-exception" in tags:  # fails under papermill, so for a grader
            raise BuildError(f"{where} is tagged raises-exception: write `with raises(...):`")
        shown = [text for output in cell.outputs for text in texts(output)]
        if "nbval-check-output" in tags and not shown:
            raise BuildError(f"{where} is tagged nbval-check-output but shows no text to compare")
        if any(NOTHING_RAISED in text for text in shown):
            raise BuildError(f"{where} must raise an error but raised nothing")
        if any(SPOILT in text for text in shown):
            raise Spoilt(f"{where}: {shown[-1].strip()}")
        for text in shown:
            for what, pattern in local.items():
                if found := re.search(pattern, ANSI.sub("", text)):
                    raise BuildError(f"{where}: the output holds {what}: {found.group()!r}")


def build(lesson, root):
    """Make one lesson's notebook, again if something else kept the machine busy meanwhile; return
    the seconds that the last attempt ran."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return build_once(lesson, root)
        except Spoilt:
            if attempt == ATTEMPTS:
                raise


def build_once(lesson, root):
    """Convert, execute, clean, check and write one lesson's notebook; return the seconds it ran."""
    path = notebook_of(lesson, root)
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = convert(lesson, root)
    start = time.monotonic()
    try:
        pid = execute(notebook, path.parent)
    except CellExecutionError as error:
        raise BuildError(str(error)) from None
    except Exception as error:  # a dead kernel, a timeout: nbclient has its own types for each
        raise BuildError(f"{type(error).__name__}: {error}") from None
    seconds = time.monotonic() - start
    clean(notebook, root)
    refuse(notebook, pid)
    nbformat.validate(notebook)
    text = nbformat.writes(notebook)
    partial = path.with_suffix(".partial")
    partial.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    partial.replace(path)  # an interrupted build leaves the old notebook
    return seconds


def report(lesson, root):
    """`build` for a worker process: (seconds, None) or (None, what went wrong)."""
    try:
        return build(lesson, root), None
    except BuildError as error:
        return None, str(error)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="lessons to build, e.g. 03_ring (default: all)")
    parser.add_argument("--check", action="store_true", help="list stale notebooks, run nothing")
    parser.add_argument("--force", action="store_true", help="build also what is not stale")
    parser.add_argument("--jobs", type=int, default=2, help="notebooks at a time (default 2)")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    root = options.root.resolve()

    course = lessons(root)
    unknown = set(options.names) - {lesson.stem for lesson in course}
    if unknown:
        known = ", ".join(lesson.stem for lesson in course)
        parser.error(f"no lesson called {', '.join(sorted(unknown))}; there are {known}")
    out_of_date = stale(root)
    if options.check:
        for path, why in out_of_date.items():
            print(f"{path.relative_to(root)}: {why}")
        return 1 if out_of_date else 0

    chosen = [lesson for lesson in course if not options.names or lesson.stem in options.names]
    todo = [path for path in chosen if options.force or notebook_of(path, root) in out_of_date]
    failed = 0
    with ProcessPoolExecutor(max_workers=options.jobs) as workers:
        running = [(lesson, workers.submit(report, lesson, root)) for lesson in todo]
        for lesson, future in running:
            seconds, error = future.result()
            name = notebook_of(lesson, root).relative_to(root)
            if error:
                failed += 1
                print(f"{name}: NOT BUILT\n{error}\n", flush=True)
            else:
                slow = seconds > SETTINGS["notebook_limit_s"]
                print(f"{name}: {seconds:.1f} s{' (too slow for CI)' if slow else ''}", flush=True)
    gone = [path for path in out_of_date if not any(path == notebook_of(x, root) for x in course)]
    for path in gone:
        print(f"{path.relative_to(root)}: {out_of_date[path]}")
    print(f"{len(todo) - failed} built, {failed} failed, {len(chosen) - len(todo)} up to date")
    return 1 if failed or gone else 0


if __name__ == "__main__":
    sys.exit(main())
