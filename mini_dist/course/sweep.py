"""Run a notebook for every combination of some parameters, and put the results in a table.

    mini-dist sweep work/labs/collectives_cost.ipynb \\
        -g algorithm=ring,tree -g world_size=2,4 -p repeats=3

Cases run one after the other, since two at a time would distort each other's timings. Each case is
a folder under --out, with the executed notebook and the lab's result.json and figures. When an
interrupted sweep is started again, it continues where it stopped. A case that is done runs again
only if its notebook or its parameters changed, or if --fresh is given; changes in a library do not
count. A record that cannot be read is reported, and its case runs again.

Exit status: 0 if all cases are done, 1 if any failed, 2 for wrong arguments, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import importlib.util
import itertools
import json
import logging
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Table

from .lab import FOLDER

WIDTH = 100  # characters per line that every terminal shows
LONGEST = 40  # characters of a value in a table
NOTEBOOK, CASE, RESULT = WRITTEN = "notebook.ipynb", "case.json", "result.json"


class Unreadable(ValueError):
    """A case.json or result.json that is damaged; the message names the file."""


def read_record(path: Path, **fields: type | tuple[type, ...]) -> dict[str, Any]:
    """Return the JSON object in a file; raise Unreadable if it lacks fields of these types."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON or not UTF-8
        raise Unreadable(f"{path} cannot be read ({error})") from None
    for name, kind in fields.items():
        if not isinstance(record, dict) or not isinstance(record.get(name), kind):
            raise Unreadable(f"{path} has no {name}")
    return record


@dataclass
class Case:
    """One combination. `status` is "waiting", "done" or "failed"; `result` the lab's own."""

    parameters: dict[str, Any]
    folder: Path
    where: dict[str, str]  # the parameter that makes a lab write into that folder
    fingerprint: str  # of the notebook's code and the parameters; if it changes, the case reruns
    status: str = "waiting"
    seconds: float = 0.0
    error: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def notebook(self) -> Path:
        return self.folder / NOTEBOOK

    def recall(self) -> None:
        """Take over the result of an earlier sweep, if it ran this very case to its end.

        Raises Unreadable for a damaged file.
        """
        with contextlib.suppress(FileNotFoundError):  # never run to its end
            record = read_record(self.folder / CASE, fingerprint=str, seconds=(int, float))
            if record["fingerprint"] == self.fingerprint:
                self.read_result()
                self.status, self.seconds = "done", record["seconds"]

    def read_result(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # not every notebook writes one
            self.result = read_record(self.folder / RESULT, result=dict)["result"]

    def run(self, notebook: Path, timeout: float) -> None:
        """Execute the notebook in a kernel of its own. Failures end up in `error`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in WRITTEN:  # of an earlier attempt; other files may be somebody's notes
            path = self.folder / name
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        start = time.monotonic()
        self.error = execute(notebook, self.notebook, {**self.where, **self.parameters}, timeout)
        self.seconds = round(time.monotonic() - start, 2)
        if not self.error:
            try:
                self.read_result()
            except Unreadable as error:
                self.error = str(error)
        self.status = "failed" if self.error else "done"
        if not self.error:
            record = {"fingerprint": self.fingerprint, "seconds": self.seconds}
            (self.folder / CASE).write_text(json.dumps(record), encoding="utf-8")


def execute(notebook: Path, output: Path, parameters: dict, timeout: float) -> str:
    """Run a notebook with papermill; return in one line what went wrong, or ""."""
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from nbclient.util import run_sync

    with tempfile.TemporaryDirectory() as private:
        kernel = AsyncKernelManager(  # without a port that others could talk to
            transport="ipc", connection_file=f"{private}/kernel.json"
        )
        try:
            papermill.execute_notebook(
                notebook.resolve(),
                output.resolve(),
                parameters,
                cwd=notebook.resolve().parent,  # as in JupyterLab
                progress_bar=False,
                execution_timeout=timeout,
                km=kernel,
            )
        except papermill.PapermillExecutionError as error:
            return f"{error.ename}: {error.evalue}".split("\n")[0]
        except DeadKernelError:
            return "the kernel died"
        except CellTimeoutError:
            return f"a cell took longer than {timeout:g} s"
        except Exception as error:  # a kernel that does not start: the next case may do better
            return f"{type(error).__name__}: {error}".split("\n")[0]
        finally:
            if kernel.has_kernel:
                run_sync(kernel.shutdown_kernel)(now=True)
    return ""


def grid(swept: dict[str, list], fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every combination; the last parameter varies fastest."""
    return [{**fixed, **dict(zip(swept, values))} for values in itertools.product(*swept.values())]


def case_name(parameters: dict[str, Any]) -> str:
    """Return a folder name made of the parameters; different parameters never share a folder."""

    def as_typed(value) -> str:
        plain = isinstance(value, str) and read_value(value) == value
        return quote(value if plain else json.dumps(value), safe="")

    name = ",".join(f"{key}={as_typed(parameters[key])}" for key in sorted(parameters))
    return name if len(name) <= 150 else hashlib.sha1(name.encode()).hexdigest()


def fingerprint(notebook: Path, parameters: dict[str, Any]) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps([code, sorted(parameters.items())]).encode()).hexdigest()


def tables(cases: list[Case], swept: list[str]) -> list[Table]:
    """Return tables with a row per case: swept parameters, status, and plain values of the result.

    Columns that do not fit into WIDTH characters go into further tables, which repeat the first
    columns. Long strings are cut; sweep.json has them whole.
    """
    cases = sorted(cases, key=lambda case: case.status != "done")  # failures last
    plain = (int, float, str, bool)
    results = [
        key for case in cases for key, value in case.result.items() if isinstance(value, plain)
    ]
    columns = [(name, [case.parameters[name] for case in cases]) for name in swept]
    columns.append(("status", [case.status for case in cases]))
    columns.append(("took s", [round(case.seconds, 1) for case in cases]))
    first = len(columns)
    for name in dict.fromkeys(results):
        columns.append((name, [case.result.get(name, "") for case in cases]))
    columns = [(clip(name), [clip(value) for value in values]) for name, values in columns]
    if width(columns[:first]) > WIDTH - LONGEST - 2:  # no room for a result next to them
        columns.insert(0, ("case", list(range(1, len(cases) + 1))))
        first = 1
    repeated, rest = columns[:first], columns[first:]
    parts, part = [], [*repeated]
    for column in rest:
        if width([*part, column]) > WIDTH:
            parts.append(part)
            part = [*repeated]
        part.append(column)
    return [as_table(part) for part in [*parts, part]]


def clip(value: Any) -> Any:
    if isinstance(value, str):
        value = " ".join(value.splitlines())
        return value if len(value) <= LONGEST else value[: LONGEST - 1] + "…"
    return value


def as_table(columns: list[tuple[str, list]]) -> Table:
    return Table([name for name, _ in columns], list(zip(*(values for _, values in columns))))


def width(columns: list[tuple[str, list]]) -> int:
    return max(map(len, repr(as_table(columns)).splitlines()), default=0)


# ---- the command line ----------------------------------------------------------------------------


def read_value(text: str) -> Any:
    """Read 4, 1e-4, true and null as JSON, and True, False and None as Python; else a string."""
    if text in PYTHON_WORDS:
        return PYTHON_WORDS[text]
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, (list, dict)):
        raise ValueError(f"{text!r} is more than one value: give numbers, true, false or strings.")
    return value


PYTHON_WORDS = {"True": True, "False": False, "None": None}


def read_assignments(texts: list[str]) -> dict[str, str]:
    """Return {NAME: VALUE}; raise ValueError unless each text is NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ValueError(f"{text!r} gives no parameter a value: write NAME=VALUE.")
        if name in found:
            raise ValueError(f"{name} is given twice: write all its values as -g {name}=V1,V2.")
        found[name] = value
    return found


def plan(notebook: Path, swept: dict[str, list], fixed: dict[str, Any], out: Path) -> list[Case]:
    """Return the cases of a sweep; raise ValueError for a name that the notebook does not know."""
    names = parameter_names(notebook)
    for name in [*swept, *fixed]:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(names))}."
            raise ValueError(f"{name} is not a parameter of {notebook.name}: {hint}")
        if name in swept and name in fixed:
            raise ValueError(f"{name} is both swept (-g) and fixed (-p): give it once.")
        if name == FOLDER:
            raise ValueError("every case has a folder of its own: say where by --out.")
    cases = []
    for parameters in grid(swept, fixed):
        folder = out / case_name(parameters)
        where = {FOLDER: str(folder.resolve())} if FOLDER in names else {}
        cases.append(Case(parameters, folder, where, fingerprint(notebook, parameters)))
    return cases


def parameter_names(notebook: Path) -> set[str]:
    if not notebook.is_file():
        raise ValueError(f"{notebook} does not exist: give the path of a notebook.")
    import papermill

    try:
        names = set(papermill.inspect_notebook(notebook))
    except Exception as error:  # a file that is no notebook may raise anything
        raise ValueError(f"{notebook} cannot be read as a notebook: {error}") from None
    if not names:
        raise ValueError(f"{notebook} has no parameters: tag the cell that sets them `parameters`.")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mini-dist sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument(
        "-g",
        "--grid",
        action="append",
        default=[],
        metavar="NAME=V1,V2,...",
        help="try each of these values (several -g: every combination)",
    )
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="the same value in every case",
    )
    parser.add_argument("--out", type=Path, help="where the cases go (default: runs/NOTEBOOK)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a cell may take (600)")
    parser.add_argument("--fresh", action="store_true", help="run also what is done")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("papermill") is None:
        parser.error("papermill is not installed in this environment: pip install papermill")
    out = options.out or Path("runs") / options.notebook.stem
    try:
        fixed = read_assignments(options.parameter)
        fixed = {name: read_value(value) for name, value in fixed.items()}
        swept = {
            name: [read_value(value) for value in dict.fromkeys(values.split(","))]
            for name, values in read_assignments(options.grid).items()
        }
        cases = plan(options.notebook, swept, fixed, out)
    except ValueError as error:
        parser.error(str(error))  # exit status 2
    if not options.fresh:
        for case in cases:
            try:
                case.recall()
            except Unreadable as error:
                print(f"{error}: its case runs again")
    return run(cases, options.notebook, list(swept), out, options.timeout)


@checks_kinds(infinite=("timeout",))
def run(cases: list[Case], notebook: Path, swept: list[str], out: Path, timeout: float) -> int:
    from tqdm import tqdm

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # the table shows failures
    interrupted = threading.Event()

    def interrupt(number, frame):
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    recalled = sum(case.status == "done" for case in cases)
    if recalled:
        print(f"{recalled} of {len(cases)} cases were done before")
    waiting = [case for case in cases if case.status == "waiting"]
    try:
        with tqdm(waiting, unit="case", initial=recalled, total=len(cases)) as bar:
            for case in bar:
                bar.set_postfix_str(case.folder.name)
                case.run(notebook, timeout)
                if interrupted.is_set():  # papermill turned the interrupt into an error
                    case.status, case.error = "waiting", ""
                    break
    except KeyboardInterrupt:
        interrupted.set()
    finally:
        signal.signal(signal.SIGINT, before)
    print(*tables(cases, swept), sep="\n\n")
    for case in cases:
        if case.error:
            print(f"FAILED {case.folder.name}: {case.error}\n       see {case.notebook}")
    keys = ("parameters", "status", "seconds", "error", "result")
    records = [{key: getattr(case, key) for key in keys} for case in cases]
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.json").write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    if interrupted.is_set():
        print("interrupted: the same command goes on from here")
        return 130
    return 1 if any(case.error for case in cases) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first case
        sys.exit(130)
