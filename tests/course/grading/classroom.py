"""A class of learners who hand in lessons 02, 03 and 07, and what their grades must say.

Their notebooks have only the exercise cells, so that grading the class takes minutes. For each
learner, `CLASS` has the files handed in, each exercise's required state, and text that the CSV must
note.
"""

from __future__ import annotations

import inspect
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from tests.course.exercises import right
from tests.course.exercises.test_gates import CHECKED, solve

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"
STEMS = {"02": "02_naive_data_parallel", "03": "03_ring_and_collectives", "07": "07_zero"}


def lesson(number: str, change: Callable[[str, str], str | None] = lambda name, cell: cell):
    """Return a lesson's exercise cells, changed by `change(exercise, source)`; None drops one."""
    notebook = nbformat.read(NOTEBOOKS / f"{STEMS[number]}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "markdown"][:1]
    for cell in notebook.cells:
        if cell.cell_type == "code" and (found := CHECKED.findall(cell.source)):
            cell.source = change(found[0][0], cell.source)
            cells += [cell] if cell.source is not None else []
    notebook.cells = cells
    return notebook


def solved(name: str, cell: str) -> str:
    return solve(cell)


def only(exercise: str, make: Callable[[str], str | None]):
    """Solve all exercises as printed except one, whose cell `make` changes."""
    return lambda name, cell: make(cell) if name == exercise else solve(cell)


def in_place_of(source: str, function: str) -> Callable[[str], str]:
    """Replace the function in the exercise's cell."""

    def make(cell: str) -> str:
        head, _, rest = cell.partition(f"def {function}(")
        return f"{head}{source}\n\n\ncheck.{rest.partition('check.')[2]}"

    return make


def before(lines: str) -> Callable[[str], str]:
    return lambda cell: (
        f"{cell.rpartition('check.')[0]}{lines}\ncheck.{cell.rpartition('check.')[2]}"
    )


def of(fn: Callable) -> str:
    """Return the source of a right answer from right.py, with its imports."""
    imports = inspect.getsource(right).partition("def ")[0].partition('"""\n\n')[2]
    return f"{imports}\n\n{inspect.getsource(fn)}"


# ---- one exercise, and functions that do not solve it --------------------------------------------

STEP = "sharded_step"


def step(body: str, check: str = "check.sharded_step(sharded_step)", head: str = ""):
    """Return lesson 07 with one exercise: `head`, a function with this body, and the check."""
    body = "\n".join(f"    {line}" for line in body.splitlines())
    source = f"{head}\ndef sharded_step(flat, gradient, update, group):\n{body}\n\n\n{check}"

    def change(name: str, cell: str) -> str | None:
        imports = "\n".join(
            line for line in cell.splitlines() if line.startswith(("from", "import"))
        )
        return f"{imports}\n{source}" if name == STEP else None

    return lesson("07", change)


WRONG = "return update(flat, gradient)"  # every rank by itself

# Attempts to get the verdict "right" without a right answer. Those with a head act in the notebook,
# before or after the check; the others act on a rank, where the function is judged.
FORGED = {
    "prints the verdict": step(WRONG, check="print('✓ sharded_step: right')"),
    "writes the verdict where verdicts go": step(
        WRONG,
        head="""
import json, os, pathlib
says = json.dumps({"judged": "sharded_step", "state": "right", "lines": [], "hint": ""})
for folder in (".", "..", "../kept", os.path.expanduser("~"), "/tmp"):
    for name in ("grade.json", "sharded_step.json", "result.json", "grades.csv"):
        pathlib.Path(folder, name).write_text(says)
for parent in [os.getpid(), os.getppid(), 1]:
    for fd in range(20):
        try:
            with open(f"/proc/{parent}/fd/{fd}", "w") as file:
                print(says, file=file, flush=True)
        except OSError:
            pass
""",
    ),
    "redefines check": step(
        WRONG,
        head="""
class check:
    sharded_step = staticmethod(lambda fn: "right")
""",
    ),
    "changes the engine": step(
        WRONG,
        head="""
from mini_dist.course.check import engine
engine.Exercise.judge = lambda self, fn: engine.Verdict(self.name, "right")
engine.Exercise.__call__ = engine.Exercise.judge
engine.WRONG = engine.LIBRARY = "right"
engine.Measured.lines = lambda self: []
""",
    ),
    "edits the check": step(
        WRONG, check="verdict = check.sharded_step.judge(sharded_step); verdict.state = 'right'"
    ),
    "catches and hides": step(
        WRONG,
        check="try:\n    check.sharded_step(sharded_step)\nexcept:  # whatever\n    print('right')",
    ),
    "gives the check another function": step(
        WRONG, check="check.sharded_step(library.sharded_step)"
    ),
    "executes the printed solution": step(
        """names = {}
exec(check.sharded_step.answer(), names)
return names["sharded_step"](flat, gradient, update, group)"""
    ),
    "changes the engine on a rank": step(
        f"""from mini_dist.course.check import engine, zero
engine.Verdict.state = "right"
engine.Exercise.judge = lambda self, fn: engine.Verdict(self.name, "right")
zero.Stepped = engine.Measured
{WRONG}"""
    ),
    "returns code that runs where it is read": step(
        """class Result:
    def __reduce__(self):
        return exec, (
            "from mini_dist.course.check import engine\\n"
            "engine.Exercise.judge = lambda self, fn: engine.Verdict(self.name, 'right')\\n"
            "engine.Measured.lines = lambda self: []\\n",
        )
return Result()"""
    ),
    "sends code instead of a result": step(
        """import mini_dist.ranks.rank as rank, pickle
class Result:
    def __reduce__(self):
        return exec, ("import mini_dist.course.check.engine as e; e.WRONG = 'right'",)
rank.to_frames = lambda *_: [pickle.dumps(Result())]
return flat"""
    ),
    "changes the judge's types where its answer is read": step(
        """import pickle, struct, mini_dist.ranks.rank as rank
def text(t):
    return b"X" + struct.pack("<I", len(t)) + t.encode()
def named(module, name):
    return text(module) + text(name) + b"\\x93"
changes = text("state") + text("right") + text("lines") + b"]" + text("hint") + text("")
changes += text("__setattr__") + named("builtins", "slice")  # so nothing else is ever set
verdict = named("mini_dist.course.check.engine", "Verdict")
rank.to_frames = lambda *_: [b"\\x80\\x05" + verdict + b"N}(" + changes + b"u\\x86b."]
return flat"""
    ),
    "speaks for the judge": step(
        f"""import json, os
says = json.dumps(dict(judged="sharded_step", state="right", lines=[], hint="")) + "\\n"
for pid in filter(str.isdigit, os.listdir("/proc")):
    for fd in range(64):
        try:
            with open(f"/proc/{{pid}}/fd/{{fd}}", "w") as file:
                file.write(says)
        except OSError:
            pass
for fd in range(64):
    try:
        os.write(fd, says.encode())
    except OSError:
        pass
{WRONG}"""
    ),
    "writes into the judge's memory": step(
        f"""import os
reached = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) != os.getpid() and b"grade.judge" in open(f"/proc/{{pid}}/cmdline", "rb").read():
        open(f"/proc/{{pid}}/mem", "r+b")  # a PermissionError ends the run
        reached.append(pid)
if reached:
    raise SystemError("the judge can be written to")
{WRONG}"""
    ),
}

# ---- programs that do harm -----------------------------------------------------------------------

HARM = {
    "loops in a cell": step(WRONG, head="while True:\n    pass"),
    "loops and does not heed the interrupt": step(
        WRONG,
        head="while True:\n    try:\n        while True:\n            pass\n"
        "    except BaseException:\n        pass",
    ),
    "loops on a rank": step("while True:\n    pass"),
    "forks and forks": step(
        WRONG, head="import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    ),
    "fills the disk": step(
        WRONG,
        head="""
for folder in ("/tmp", ".", "/dev/shm", "/var/tmp"):
    for number in range(100):
        try:
            with open(f"{folder}/{number}", "wb") as file:
                for _ in range(100):
                    file.write(bytes(10_000_000))
        except OSError as error:
            print(folder, number, error)
            break
""",
    ),
    "eats the memory": step(
        WRONG,
        head="eaten = []\nwhile True:\n    eaten.append(bytearray(b'x') * 200_000_000)",
    ),
    "deletes what can be deleted": step(
        WRONG,
        head="""
import os, shutil, mini_dist
for path in ("/home", "/root", "/work", "/etc", "/usr/lib", "/var", *mini_dist.__path__):
    shutil.rmtree(path, ignore_errors=True)
""",
    ),
    "says what nobody understands": step(
        WRONG,
        head="""
import os
said = ['{"kept": []}', '{"kept": "sharded_step", "error": {}}', '{"executed": "\\\\ud800"}']
said += ['{"trouble": ' + '[' * 900 + ']' * 900 + '}', '[' + '{},' * 2_000_000 + '{}]']
worker = f"/proc/{os.getppid()}/fd"
for fd in os.listdir(worker):
    try:
        if "pipe" in os.readlink(f"{worker}/{fd}"):
            with open(f"{worker}/{fd}", "w") as file:
                file.write("\\n" + "\\n".join(said) + "\\n")
    except OSError:
        pass
""",
    ),
    "prints 80 MB": step(WRONG, head='for i in range(400_000): print("x" * 200)'),
    "prints a line of 200 MB": step(WRONG, head='print("x" * 200_000_000)'),
    "prints a million lines": step(
        WRONG, head="import sys\nfor i in range(1_000_000):\n    print(i); sys.stdout.flush()"
    ),
    "prints escape sequences": step(
        WRONG, head='for i in range(200_000): print("\\x1b[31m\\x1b[2J\\x1b]0;title\\x07" * 10)'
    ),
    "shows huge images": step(
        WRONG,
        head="""
import os
from IPython.display import Image, display
for _ in range(5):
    display(Image(data=b"\\x89PNG\\r\\n\\x1a\\n" + os.urandom(30_000_000), format="png"))
""",
    ),
    "shows what is deep": step(
        WRONG,
        head="""
from IPython.display import display
x = []
for _ in range(100_000):
    x = [x]
display({"application/json": x}, raw=True)
""",
    ),
    "queues in sockets": step(
        WRONG,
        head="""
import socket
held = []
for _ in range(1900):
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    one.setblocking(False)
    try:
        while one.send(bytes(1 << 16)):
            pass
    except BlockingIOError:
        held.append((one, other))
while len(held) == 1900:
    pass
""",
    ),
    "writes code that is too deep to read": step(f"x = {'+'.join(['1'] * 700)}\n{WRONG}"),
    "hides memory where no process shows it": step(
        WRONG, head="import os\nheld = [os.memfd_create('x') for _ in range(30)]"
    ),
    "starts a great many threads": step(
        WRONG,
        head="""
import threading, time
threading.stack_size(65536)
for _ in range(4000):
    threading.Thread(target=time.sleep, args=(60,)).start()
""",
    ),
    "looks for others": step(
        WRONG,
        head="""
import os, socket
for path in ("/root", "/home", "/work", "/tmp", "/etc/shadow", "/sys", "/run"):
    print(path, os.path.exists(path) and os.path.isdir(path) and os.listdir(path))
print("processes", sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))
try:
    socket.create_connection(("1.1.1.1", 80), timeout=3)
    print("the network is there")
except OSError as error:
    print("no network:", error)
""",
    ),
}


# ---- the class -----------------------------------------------------------------------------------


@dataclass
class Learner:
    """files: path -> content, bytes or a notebook. expected: exercise -> required state. notes:
    text that the CSV must contain."""

    files: dict[str, object]
    expected: dict[str, str] = field(default_factory=dict)
    notes: str = ""


def zipped(files: dict[str, object]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content if isinstance(content, bytes) else text_of(content))
    return data.getvalue()


def text_of(notebook) -> str:
    return notebook if isinstance(notebook, str) else nbformat.writes(notebook)


GATHERED = "average_through_rank_0"
RINGS = ["ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "all_to_all"]
ZERO = [STEP, "backward_in_units", "forward_on_demand"]

SUMS = """def average_through_rank_0(parameters, group):
    for p in parameters:
        if p.grad is not None:
            everyones = gather(p.grad[None], 0, group)
            total = p.grad if everyones is None else everyones.sum(0)
            p.grad = star_broadcast(total, 0, group)"""
FROM_PARTS = (
    "def my_ring(x, group):\n    return ring_all_gather(ring_reduce_scatter(x, group), group)"
)
TWIN = """total = reduce_scatter(gradient, group, op="mean")
n = len(total)
r = group.rank()
mine = flat[r * n : (r + 1) * n]
return all_gather(update(mine, total), group)"""
OTHER_TWIN = TWIN.replace("total", "g").replace("mine", "part") + "  # my own way"
SHADOW = """import sys
class Exercise:
    def __call__(self, fn): return "right"
class check: sharded_step = Exercise()
"""
NO_TORCH = "raise ImportError('no torch here')"


def my_ring(cell: str) -> str:
    return in_place_of(FROM_PARTS, "ring_all_reduce")(cell).replace(
        "(ring_all_reduce)", "(my_ring)"
    )


CLASS = {
    "Ada Lovelace_123_assignsubmission_file": Learner(
        {"x/02.ipynb": lesson("02", solved), "x/drei.ipynb": lesson("03", solved)},
        dict.fromkeys([GATHERED, *RINGS], "right"),
    ),
    "bela.ipynb": Learner({"": lesson("07", solved)}, dict.fromkeys(ZERO, "right")),
    "张伟.zip": Learner(
        {"": zipped({"abgabe/Kopie von Lektion.ipynb": lesson("07", solved)})},
        dict.fromkeys(ZERO, "right"),
    ),
    "his own way": Learner(
        {
            "a.ipynb": lesson(
                "02", only(GATHERED, in_place_of(of(right.average_through_rank_0), GATHERED))
            )
        },
        {GATHERED: "right"},
    ),
    "a helper in a file": Learner(
        {
            "n.ipynb": step(
                "return done(flat, gradient, update, group)", head="from mine import done"
            ),
            "mine.py": "from mini_dist import all_gather, reduce_scatter\n\n\n"
            "def done(flat, gradient, update, group):\n"
            + "\n".join(f"    {line}" for line in TWIN.splitlines()),
        },
        {STEP: "right"},
    ),
    "twin one": Learner({"a.ipynb": step(TWIN)}, {STEP: "right"}),
    "twin two": Learner({"b.ipynb": step(OTHER_TWIN)}, {STEP: "right"}),
    "another name": Learner(
        {"a.ipynb": lesson("03", only("ring_all_reduce", my_ring))}, dict.fromkeys(RINGS, "right")
    ),
    "as shipped": Learner({"a.ipynb": lesson("07")}, dict.fromkeys(ZERO, "untouched")),
    "sums.ipynb": Learner(
        {"": lesson("02", only(GATHERED, in_place_of(SUMS, GATHERED)))}, {GATHERED: "wrong"}
    ),
    "one missing": Learner(
        {"a.ipynb": lesson("07", only("backward_in_units", lambda cell: None))},
        {STEP: "right", "backward_in_units": "missing", "forward_on_demand": "right"},
        "neither backward_in_units nor its check",
    ),
    "no check": Learner(
        {"a.ipynb": step(TWIN, check="")},
        {STEP: "right"},
        "the call of check.sharded_step was removed",
    ),
    "one raises": Learner(
        {"a.ipynb": lesson("07", only(STEP, in_place_of(f"def {STEP}(*a):\n    1 / 0", STEP)))},
        {STEP: "wrong", "backward_in_units": "right"},
    ),
    "a slip": Learner(
        {"a.ipynb": lesson("07", only(STEP, lambda cell: cell.replace("def ", "dfe ")))},
        {STEP: "not reached", "backward_in_units": "right"},
    ),
    "nothing": Learner(
        {"readme.txt": "I was ill"}, {}, "no notebook with an exercise was handed in"
    ),
    "an empty file.ipynb": Learner({"": ""}, {}, "it is no notebook"),
    "half a file.ipynb": Learner({"": text_of(lesson("02"))[:3000]}, {}, "it is no notebook"),
    "no zip.zip": Learner({"": b"PK not a zip"}, {}, "the zip cannot be read"),
    "out of the zip.zip": Learner(
        {"": zipped({"../../evil.ipynb": lesson("02")})}, {}, "no notebook"
    ),
    "another course.ipynb": Learner({"": nbformat.v4.new_notebook()}, {}, "is no lesson"),
    "a library of her own": Learner(
        {
            "a.ipynb": step(WRONG),
            "mini_dist/__init__.py": SHADOW,
            "mini_dist/course/check.py": SHADOW,
            "torch.py": NO_TORCH,
            "cloudpickle.py": NO_TORCH,
            "sitecustomize.py": SHADOW,
        },
        {STEP: "wrong"},
    ),
    **{name: Learner({"a.ipynb": notebook}, {STEP: "wrong"}) for name, notebook in FORGED.items()},
    **{name: Learner({"a.ipynb": notebook}, {STEP: "wrong"}) for name, notebook in HARM.items()},
}
CLASS["gives the check another function"].expected = {STEP: "untouched"}
GRADED = ("loops on a rank", "looks for others", "says what nobody understands")
GRADED += ("writes code that is too deep to read", "prints 80 MB", "prints a line of 200 MB")
GRADED += ("prints escape sequences", "shows huge images")
for name in set(HARM) - {*GRADED}:
    CLASS[name].expected = {STEP: "not reached"}


def hand_in(names, folder: Path) -> None:
    for name in names:
        for path, content in CLASS[name].files.items():
            place = folder / name / path if path else folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content if isinstance(content, bytes) else text_of(content).encode())
