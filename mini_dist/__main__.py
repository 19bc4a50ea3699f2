"""The command `mini-dist`, which is also `python -m mini_dist`.

    mini-dist lab          copy the notebooks to work/, here, and open JupyterLab on the first one
    mini-dist update       bring new versions of the notebooks into work/, and say what was done
    mini-dist doctor       say what this machine lacks for the course, and how to get it
    mini-dist progress     show which lessons you opened and which exercises are right
    mini-dist sweep        run a lab for every combination of some parameters
    mini-dist grade        grade what a class has handed in
    mini-dist certificate  make a page to print for each learner of a graded class

`mini-dist COMMAND --help` lists a command's own arguments. `lab` passes its arguments on to
JupyterLab, as in `mini-dist lab --no-browser --port 9000`.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from . import __version__

COMMANDS = {  # the module that each runs, as `python -m` would
    "lab": "jupyterlab",
    "update": "mini_dist.course.working_copy",
    "doctor": "mini_dist.course.doctor",
    "progress": "mini_dist.course.learner",
    "sweep": "mini_dist.course.sweep",
    "grade": "mini_dist.course.grade",
    "certificate": "mini_dist.course.grade.certificate",
}
WITHOUT_ARGUMENTS = ("doctor", "progress")
FIRST_LESSON = "/lab/tree/work/00_start_here.ipynb"
DEFAULTS = Path(__file__).parent / "course/jupyter"  # for JupyterLab
AS_ROOT = (
    "JupyterLab runs as root only if you allow it: mini-dist lab --allow-root, or "
    "make lab LAB_ARGS=--allow-root. If others use this machine, log in as another user instead."
)


def main() -> None:
    """Run the command that sys.argv names; exit with its status, or with 2 if there is none."""
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__.strip())
    elif command == "--version":
        print(f"mini_dist {__version__}")
    elif command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        print(
            f"mini-dist has no command {command!r}{meant}: {', '.join(COMMANDS)}", file=sys.stderr
        )
        sys.exit(2)
    elif arguments and command in WITHOUT_ARGUMENTS:
        print(next(line.strip() for line in __doc__.splitlines() if f" {command} " in line))
        if not {*arguments} & {"-h", "--help"}:
            sys.exit(f"mini-dist {command} takes no arguments, but got {arguments[0]!r}")
    else:
        if command == "lab":
            arguments = [*open_first_lesson(), *arguments]
            if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in arguments:
                sys.exit(AS_ROOT)
        sys.argv = [f"mini-dist {command}", *arguments]
        runpy.run_module(COMMANDS[command], run_name="__main__", alter_sys=True)


def open_first_lesson() -> list[str]:
    """Make the working copy; return the arguments that make JupyterLab show the first lesson, and
    nothing in front of it: by default JupyterLab asks whether it may fetch its news.

    The lesson is JupyterLab's default address and not its argument: the address that JupyterLab
    prints then leads there too, which is what people on WSL2 and remote machines open.
    """
    from .course import working_copy

    if importlib.util.find_spec("jupyterlab") is None:
        sys.exit("JupyterLab is not installed in this environment: pip install jupyterlab")
    if status := working_copy.main(["--once"]):
        sys.exit(status)
    theirs = os.environ.get("JUPYTER_CONFIG_PATH")  # a user's own settings count for more
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [theirs, str(DEFAULTS)]))
    return [f"--LabApp.default_url={FIRST_LESSON}"]


if __name__ == "__main__":
    main()
