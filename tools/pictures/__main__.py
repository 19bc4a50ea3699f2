"""Draw the lessons' pictures anew: python tools/pictures [--check]

Each function of a lesson_NN.py here returns a Board, which becomes lessons/figures/FUNCTION.svg.
--check writes nothing. A picture that is not what its function draws fails, and so does one that
no function draws.
"""

import importlib
import inspect
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent.parent / "lessons" / "figures"


def drawn() -> dict[str, str]:
    """{name: SVG} of all pictures."""
    sys.path.insert(0, str(HERE))
    pictures = {}
    for file in sorted(HERE.glob("lesson_*.py")):
        module = importlib.import_module(file.stem)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == file.stem and not name.startswith("_"):
                pictures[name] = function().svg()
    return pictures


def main() -> int:
    stale, pictures = 0, drawn()
    for path in sorted(FIGURES.glob("*.svg")):
        if path.stem not in pictures:
            print(f"{path.name} is drawn by no function of tools/pictures")
            stale += 1
    for name, svg in pictures.items():
        path = FIGURES / f"{name}.svg"
        if path.exists() and path.read_text() == svg:
            continue
        if "--check" in sys.argv:
            print(f"{path.name} is not what tools/pictures draws: python tools/pictures")
            stale += 1
        else:
            path.write_text(svg)
            print(f"wrote {path}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
