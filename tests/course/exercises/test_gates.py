"""The notebooks' exercise cells pass as shipped and when solved; a grader refuses unsolved cells.

Only these cells run, one notebook after another in one process. Each cell sees the state that its
notebook's earlier exercise cells left.
"""

import ast
import builtins
import dis
import re
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import nbformat
import pytest

from mini_dist import check
from tests.course.exercises import right, solutions
from tests.course.grading import only_data

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
CHECKED = re.compile(r"^check\.(\w+)\((\w+)\)$", flags=re.MULTILINE)  # check.NAME(function)

cloudpickle.register_pickle_by_value(solutions)
cloudpickle.register_pickle_by_value(right)


def exercise_cells(notebook: Path) -> list[str]:
    cells = nbformat.read(notebook, as_version=4).cells
    return [c.source for c in cells if c.cell_type == "code" and CHECKED.search(c.source)]


WITH_EXERCISES = [path for path in NOTEBOOKS if exercise_cells(path)]
each_notebook = pytest.mark.parametrize("notebook", WITH_EXERCISES, ids=lambda path: path.stem)


def solve(cell: str) -> str:
    """Return the cell with the printed solution in place of the function that it defines."""
    defined = {n.name: n for n in ast.parse(cell).body if isinstance(n, ast.FunctionDef)}
    lines = cell.splitlines()
    for _, name in CHECKED.findall(cell):
        node = defined[name]
        assert "YOUR TURN" in "\n".join(lines[node.lineno - 1 : node.end_lineno]), name
        lines[node.lineno - 1 : node.end_lineno] = check.exercises()[name].answer().splitlines()
    return "\n".join(lines)


def run(cells: list[str]) -> list[check.Verdict]:
    """Execute exercise cells as a notebook does; return the verdicts of their checks."""
    names = {"__name__": "exercise cells"}  # This is no module, so ranks get functions by value.
    verdicts = []
    for cell in cells:
        *body, last = ast.parse(cell).body
        exec(compile(ast.Module(body, []), "<exercise>", "exec"), names)
        verdicts.append(eval(compile(ast.Expression(last.value), "<exercise>", "eval"), names))
    return verdicts


def test_every_exercise_is_in_one_notebook_and_has_a_solution():
    found = [
        name
        for path in NOTEBOOKS
        for cell in exercise_cells(path)
        for name, _ in CHECKED.findall(cell)
    ]
    assert sorted(found) == sorted(check.exercises())
    for name in found:
        assert hasattr(solutions, name)


@each_notebook
def test_as_shipped_the_exercise_cells_pass(notebook, monkeypatch):
    monkeypatch.delenv("MINI_DIST_STRICT", raising=False)
    assert {verdict.state for verdict in run(exercise_cells(notebook))} == {"still the library's"}


# The library functions that a printed solution may use: steps that the lesson gave or that an
# earlier exercise was about. None of them does what the exercise asks.
MAY_USE = {
    "groups_of_ranks": "",
    "compose": "all_reduce context_parallel Bucketed Mesh IGNORE_INDEX token_loss Pipeline cut_gpt "
    "build GPT_PLAN SEQUENCE TENSOR finish_gradients for_grad_norm shard_model "
    "vocab_parallel_cross_entropy",
    "diagnoses": "",
    "ring_reduce_scatter": "exchange check_rows reduction",
    "ring_all_gather": "exchange check_sizes",
    "ring_all_reduce": "ring_all_gather ring_reduce_scatter split_sizes",
    "doubling_all_reduce": "exchange recv send power_of_two reduction",
    "all_to_all": "exchange check_splits",
    "merge": "Partial",
    "ring_step": "ScoreBlock TileKernel Partial start wait add_block",
    "zigzag": "HOST check_divides",
    "average_through_rank_0": "gather star_broadcast",
    "dispatch": "all_to_all Dispatched",
    "combine": "all_to_all Dispatched",
    "balance_loss": "all_reduce Routing",
    "average_in_buckets": "flatten mean unflatten",
    "overlapped_backward": "flatten mean unflatten",
    "forget_and_repeat": "",
    "gpipe": "Action Schedule check_sizes",
    "offsets": "",
    "read_ahead": "",
    "one_f_one_b": "Action Schedule check_sizes",
    "add_communication": "Action Schedule ScheduleError needs",
    "less_bubble": "",
    "layout_for_70b": "Layout",
    "place_tokens": "",
    "who_runs": "Text",
    "cache_bytes": "",
    "column_linear": "ops",
    "row_linear": "ops",
    "copy": "all_reduce",
    "differentiable_all_reduce": "all_reduce",
    "vocab_parallel_cross_entropy": "IGNORE_INDEX TokenLoss at_least_float32 collectives "
    "find_rows ops",
    "sequence_parallel_mlp": "ops",
    "scaled_step": "all_reduce LossScaler",
    "shard_and_step": "token_loss",
    "my_all_reduce": "exchange",
    "sharded_step": "all_gather reduce_scatter",
    "backward_in_units": "reduce_scatter",
    "forward_on_demand": "all_gather",
    "diagnose_slow": "",
    "all_reduce_on_hosts": "Members ring_all_gather ring_all_reduce ring_reduce_scatter "
    "split_sizes",
    "order_on_hosts": "Grid uplink_bytes",
    "find_exchanged": "",
    "gradients_at_scale": "",
    "next_samples": "",
    "tiled_attention": "SlowMemory",
    "my_plan": "Layout",
    "my_strategy": "begin_all_gather_ begin_reduce_scatter",
    "my_training": "Overlapped train_step Training",
    "two_faults": "",
    "deepspeed_bytes": "",
    "rebuild": "all_gather broadcast Members",
    "patience": "check_silences",
    "shares": "check_seconds",
    "serve": "Applied PULL PUSH next_request recv send",
    "push_touched": "push",
    "outer_step": "all_reduce",
    "round_by_lot": "",
    "top_k_with_feedback": "all_gather",
    "one_all_reduce": "",
    "summa_step": "broadcast",
    "missing_collective": "",
    "power_mean": "all_reduce check_rank",
}


@pytest.mark.parametrize("name", sorted(check.exercises()))
def test_a_printed_solution_does_the_asked_work_itself(name):
    """It is one definition plus imports, and imports from the library only what MAY_USE allows."""
    tree = ast.parse(check.exercises()[name].answer())
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    (definition,) = [node for node in tree.body if node not in imports]
    assert definition.name == name and not definition.decorator_list
    assert definition.end_lineno - definition.lineno < 70
    ours = [node for node in imports if getattr(node, "module", "").startswith("mini_dist")]
    assert {alias.name for node in ours for alias in node.names} <= {*MAY_USE[name].split()}


def global_names(code) -> set[str]:
    """Return the global names that a function, and all functions inside it, look up."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return own.union(*(global_names(c) for c in code.co_consts if isinstance(c, type(code))))


@pytest.mark.parametrize("name", sorted(check.exercises()))
def test_a_printed_solution_brings_every_name_along_into_a_kernel_where_nothing_else_has_run(name):
    fn = solutions.paste(name)
    assert global_names(fn.__code__) <= {*fn.__globals__, *dir(builtins)}


OTHERS = sorted(name for name in vars(right) if name in check.exercises())


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_is_right(name):
    assert check.exercises()[name].judge(getattr(right, name)).state == "right"


class ForTheWorld(ast.NodeTransformer):
    """Replace the group by all ranks of the job wherever it is used."""

    def visit_Name(self, node):
        world = ast.parse("__import__('torch').distributed.group.WORLD", mode="eval").body
        return world if node.id == "group" and isinstance(node.ctx, ast.Load) else node


def of_the_world(name: str) -> str:
    tree = ForTheWorld().visit(ast.parse(check.exercises()[name].answer()))
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.parametrize(
    "name", [n for n in sorted(check.exercises()) if "WORLD" in of_the_world(n)]
)
def test_who_speaks_to_the_world_instead_of_the_group_is_refused(name):
    cell = {"__name__": "__main__"}
    exec(of_the_world(name), cell)
    verdict = check.exercises()[name].judge(cell[name])
    assert verdict.state == "wrong" and "Right as long as the group is the whole" in verdict.hint


@each_notebook
def test_with_solutions_a_grader_passes_them(notebook, monkeypatch):
    """So does a grader that accepts only plain data from the ranks (mini_dist.course.grade)."""
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    monkeypatch.setattr("mini_dist.ranks.launch.from_frames", only_data.from_frames)
    cells = [solve(cell) for cell in exercise_cells(notebook)]
    assert {verdict.state for verdict in run(cells)} == {"right"}


@each_notebook
def test_as_shipped_a_grader_refuses_each_of_them(notebook, monkeypatch):
    monkeypatch.setenv("MINI_DIST_STRICT", "1")
    cells = exercise_cells(notebook)
    imports = "\n".join(  # a cell may use what an earlier exercise cell has imported
        line for cell in cells for line in cell.splitlines() if re.match(r"(from|import) ", line)
    )
    for cell in cells:
        with pytest.raises(check.CheckFailed, match="still the library's"):
            run([f"{imports}\n{cell}"])


# ---- the rest of the lesson ----------------------------------------------------------------------


def binds(statement: ast.stmt) -> set[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def reads(tree: ast.AST) -> set[str]:
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def changes(statement: ast.stmt) -> set[str]:
    """Return the names that this statement updates in place: it still needs their old values."""
    found = set()
    for node in ast.walk(statement):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                found.add(target.value.id)
            if isinstance(node, ast.AugAssign) and isinstance(target, ast.Name):
                found.add(target.id)
    return found


def is_a_guess(statement: ast.stmt) -> bool:
    """Return whether it is predict(...), without which a later reveal(...) raises."""
    call = getattr(statement, "value", None)
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "predict"


def with_what_it_needs(statements: list[ast.stmt], last: ast.Module, given: str) -> ast.Module:
    """Put the earlier statements that a cell needs in front of it; `given` is already defined."""
    needed, kept = reads(last) - {given}, []
    for statement in reversed(statements):
        stays = changes(statement)
        guessed = is_a_guess(statement) and "reveal" in reads(last)
        if (binds(statement) | stays) & needed or guessed:
            kept.insert(0, statement)
            needed = (needed - binds(statement)) | (reads(statement) | stays) - {given}
    return ast.Module([*kept, *last.body], [])


def uses() -> Iterator[tuple[str, int, ast.Module]]:
    """Yield (exercise, cell number, program) of later cells that call the learner's function."""
    for path in WITH_EXERCISES:
        cells = nbformat.read(path, as_version=4).cells
        trees = []
        for cell in cells:
            if cell.cell_type == "code" and not re.search(r"^[!%]", cell.source, re.MULTILINE):
                trees.append((ast.parse(cell.source), CHECKED.findall(cell.source)))
        for at, (_, checked) in enumerate(trees):
            for name, function in checked:
                for later in range(at + 1, len(trees)):
                    last, before = trees[later][0], [s for t, _ in trees[:later] for s in t.body]
                    if function in reads(last) and function not in binds_in(last):
                        yield name, later, with_what_it_needs(before, last, function)


def binds_in(tree: ast.Module) -> set[str]:
    return set().union(*map(binds, tree.body))


USES = [
    pytest.param(name, answer, program, id=f"{name}-{kind}-{number}")
    for name, number, program in uses()
    for kind, answer in (("printed", getattr(solutions, name)), ("other", getattr(right, name, 0)))
    if answer
]


@pytest.mark.parametrize("name, answer, program", USES)
def test_a_right_answer_runs_the_later_cells_that_use_it(name, answer, program):
    names = {"__name__": "exercise cells", name: answer}
    exec(compile(program, f"<cells that use {name}>", "exec"), names)
