"""The layers of mini_dist: arrows point down only, and two files speak to torch.distributed.

L5  check  widgets  draw  sweep  replay  grade  elsewhere   views
L4  all_axes  train  checkpoint  trainer  full_state  serving  elastic
L3  the strategies                siblings: they never import each other
L2  ops  grad_norm  replicas  trainable  backend  emulate  watch  calculators  profile  preflight
    sharding
L1  mesh  collectives
L0  ranks  ledger         schedule  defaults  config  divides  lesson  lab  learner  course
                          model  routing  initial_values  loss  sampling  digits  data  vocabulary
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "mini_dist"

STRATEGIES = {
    *("data_parallel", "zero", "tensor_parallel", "context_parallel", "pipeline"),
    *("expert_parallel", "precision", "recompute", "compression", "asynchronous"),
    "offload",
}
LAYERS = [
    {"ranks", "ledger", "schedule", "defaults", "config", "fields", "divides", "lesson", "lab"}
    | {"learner", "course"}
    | {"model", "routing", "initial_values", "loss", "sampling", "digits", "data", "vocabulary"},
    {"mesh", "collectives"},
    {"ops", "grad_norm", "replicas", "trainable", "backend", "emulate", "watch", "calculators"}
    | {"profile", "preflight", "sharding"},
    STRATEGIES,
    {"all_axes", "train", "checkpoint", "trainer", "full_state", "serving", "elastic"},
    {"check", "widgets", "draw", "sweep", "replay", "grade", "elsewhere"},
]
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}
WITHOUT_RANKS = {"model", "routing", "initial_values", "loss", "sampling", "digits", "data"} | {
    "vocabulary"
}
WITHOUT_TORCH = {"config", "fields", "calculators", "schedule", "defaults"}

# torch is renaming its collectives, so few files may name them.
MAY_CALL_COLLECTIVES = {"collectives", "ops", "ranks", "ledger"}
COLLECTIVES = {
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier"),
    *("broadcast", "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("reduce_scatter_single", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("gather", "scatter", "all_to_all", "all_to_all_single", "broadcast_object_list"),
    *("all_gather_object", "gather_object", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "all_reduce_coalesced", "all_gather_coalesced"),
}


def module_of(path):
    """`mini_dist/strategies/zero.py` and `mini_dist/strategies/zero/shards.py` are both the module
    `zero`."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def files():
    return [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent != PACKAGE or path.stem != "__init__"
    ]


def imports(tree, path):
    """Full names that a file imports, relative ones resolved."""
    package = ["mini_dist", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{name.name}" for name in node.names)


def imported_siblings(tree, path):
    found = {name.split(".")[1] for name in imports(tree, path) if name.startswith("mini_dist.")}
    return (found & set(LEVEL)) - {module_of(path)}


def collective_calls(tree):
    """(line, name) of each use of a torch.distributed collective, however it was imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = ast.unparse(node.value)
            if owner == "dist" or owner.endswith(("torch.distributed", "distributed_c10d")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torch.distributed"
        ):
            yield from ((node.lineno, n.name) for n in node.names if n.name in COLLECTIVES)


def check(path, source):
    """What a file does that its layer does not allow, one line each."""
    tree, module = ast.parse(source), module_of(path)
    if module not in LEVEL:
        return [f"{module} is in no layer: give it one in design.md and here"]
    wrong = []
    for other in sorted(imported_siblings(tree, path)):
        if LEVEL[other] > LEVEL[module]:
            wrong.append(f"{module} imports {other}, which lies above it")
        elif module in STRATEGIES and other in STRATEGIES:
            wrong.append(f"{module} imports {other}: strategies meet in all_axes")
        elif module in WITHOUT_RANKS and other in ("ranks", "ledger"):
            wrong.append(f"{module} imports {other}: it knows nothing of ranks")
    names = list(imports(tree, path))
    if module in WITHOUT_TORCH and any(name.split(".")[0] == "torch" for name in names):
        wrong.append(f"{module} imports torch: calculators work without it")
    if module in WITHOUT_RANKS and any(name.startswith("torch.distributed") for name in names):
        wrong.append(f"{module} imports torch.distributed: it knows nothing of ranks")
    if module not in MAY_CALL_COLLECTIVES:
        wrong += [
            f"line {line}: dist.{name} outside collectives.py and ops.py"
            for line, name in collective_calls(tree)
        ]
    return wrong


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_arrows_point_down(path):
    assert check(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "file, source, why",
    [
        (
            "collectives.py",
            "from mini_dist.strategies.zero import shard",
            "imports zero, which lies above",
        ),
        ("collectives.py", "def f():\n    from . import draw", "imports draw, which lies above"),
        ("zero.py", "from .data_parallel import x", "strategies meet in all_axes"),
        ("pipeline/stages.py", "from ..zero import x", "strategies meet in all_axes"),
        ("calculators/memory.py", "import torch.nn", "calculators work without it"),
        ("model.py", "import torch.distributed as dist", "knows nothing of ranks"),
        (
            "zero.py",
            "import torch.distributed as dist\ndist.all_reduce(x)",
            "line 2: dist.all_reduce",
        ),
        ("zero.py", "import torch\ntorch.distributed.barrier()", "line 2: dist.barrier"),
        ("zero.py", "from torch.distributed import send as s", "line 1: dist.send"),
        ("novelty.py", "x = 1", "in no layer"),
    ],
)
def test_a_wrong_arrow_is_caught(file, source, why):
    assert any(why in line for line in check(PACKAGE / file, source))


@pytest.mark.parametrize(
    "file, source",
    [
        ("zero.py", "from mini_dist.collectives import all_gather\nall_gather(x, group)"),
        ("pipeline/stages.py", "from .cut import x\nfrom ..schedule import one_f_one_b"),
        ("collectives.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("zero.py", "import torch.distributed as dist\ndist.get_rank()"),
        ("draw.py", "import mini_dist.plan.schedule"),
    ],
)
def test_a_right_arrow_is_allowed(file, source):
    assert check(PACKAGE / file, source) == []
