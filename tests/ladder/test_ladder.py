"""Every rung reaches the losses of one process, and sends and holds what it reports.

One launch per number of ranks runs all rungs, each under its name in the ledger, and also
the library's page or engine that does the same.
"""

import ast
import functools
import re
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from mini_dist import launch
from mini_dist.collectives import ring_all_reduce
from mini_dist.plan.schedule import build
from mini_dist.plan.schedule.simulate import peak_in_flight
from mini_dist.ranks.ledger.recording import recorded
from mini_dist.strategies.context_parallel import ideas as context_parallel
from mini_dist.strategies.expert_parallel import ideas as expert_parallel
from mini_dist.strategies.tensor_parallel import ideas as tensor_parallel
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3

HERE = Path(__file__).parents[2] / "ladder"
PATHS = {int(path.name[:2]): path for path in sorted(HERE.glob("[0-9][0-9]_*.py"))}
LADDER = runpy.run_path(str(HERE / "__main__.py"), run_name="ladder")
RUNGS = LADDER["read_rungs"]()
STEPS = 10
CASES = [(rung, size) for size in (2, 4) for rung in range(1, 13)] + [(13, 4), (13, 8)]


def load(rung: int) -> dict:
    return runpy.run_path(str(PATHS[rung]))


def under_name(name: str, function):
    """Let the ledger count what `function(group)` sends under this name."""

    def named(group):
        return function(group)

    named.__name__ = name
    return recorded(named)


# -- what the ranks do ----------------------------------------------------------------------------


def train_rung(rung: int, group):
    """Return losses, what the rung reports, what is held after backward, and leaked references.

    Held are the elements of parameters and of gradients; the references are to the group.
    """
    backward, made, alive = torch.Tensor.backward, [], []
    references = sys.getrefcount(group)

    def watched(loss, *args, **kwargs):
        backward(loss, *args, **kwargs)
        parameters = [p for p in (reference() for reference in made) if p is not None]
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}
        gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        alive.append((sum(storages.values()) // 4, gradients // 4))

    def note(module, name, parameter):
        if parameter is not None:
            made.append(weakref.ref(parameter))

    hook = register_module_parameter_registration_hook(note)
    torch.Tensor.backward = watched
    try:
        losses, held = load(rung)["train"]("cpu", group)
    finally:
        torch.Tensor.backward = backward
        hook.remove()
    return losses, held, alive[-1], sys.getrefcount(group) - references


def step_engine(engine, group):
    """Run two steps of the library's ZeRO on the ladder's model; the ledger names the second."""
    block = load(6)["Block"]
    head = nn.Linear(32, 128, bias=False)
    gpt = nn.Sequential(nn.Embedding(128, 32), *(block() for _ in range(5)), nn.RMSNorm(32), head)
    model = engine(gpt, group, torch.optim.Adam, units=list(gpt))

    def step(group):
        model(torch.zeros(2, 16, dtype=torch.int64)).sum().backward()
        model.step(None)
        model.zero_grad()

    step(group)
    under_name(engine.__name__, step)(group)


def block_by_the_page(block, x, group, pair):
    """Compute a block of rung 7 or 8 with the library's page on tensor parallelism."""
    q, k, v = block.qkv.weight.unflatten(0, (-1, 3, 8)).unbind(1)  # [N/tp, H, D] each
    qkv = [(weight.flatten(0, 1), None) for weight in (q, k, v)]
    y, out = block.norm1(x), (block.out.weight, None)
    x = x + tensor_parallel.attention(y, qkv, out, 8, group, pair)
    up, down = (block.up.weight, None), (block.down.weight, None)
    return x + tensor_parallel.mlp(block.norm2(x), up, down, group, pair)


def results_of(function, x, block) -> list[torch.Tensor]:
    """Return a block's output and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    block.zero_grad()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in block.parameters())]


def compare_blocks(rung: int, pair, group):
    module = load(rung)
    torch.manual_seed(1)
    block, x = module["shard"](module["Block"](), group), torch.randn(2, 16, 32)
    if pair.cuts_sequence:
        x = x.chunk(group.size(), dim=1)[group.rank()]
    page = results_of(lambda x: block_by_the_page(block, x, group, pair), x, block)
    return list(zip(results_of(block, x, block), page))


def compare_rings(group):
    torch.manual_seed(group.rank())
    x = torch.randn(103)
    ours = x.clone()
    load(2)["ring_all_reduce"](ours, group)
    return [(ours, ring_all_reduce(x, group))]


def compare_ring_attention(group):
    torch.manual_seed(group.rank())
    q, k, v = torch.randn(3, 2, 4, 16 // group.size(), 8).unbind()
    page = context_parallel.ring_attention(q, k, v, group).out
    return [(load(9)["ring_attention"](q, k, v, group), page)]


def visit_by_the_page(block, x, choice, group):
    order = choice.argsort()
    here, way_back = expert_parallel.dispatch(x[order], choice.bincount(minlength=4), group)
    parts = here.split(way_back.rows_per_expert)
    y = torch.cat([expert(part) for expert, part in zip(block.experts, parts)])
    return expert_parallel.combine(y, way_back, group)[order.argsort()]


def compare_experts(group):
    torch.manual_seed(1)
    block = load(12)["Block"]()
    each = 4 // group.size()
    block.group, block.experts = group, block.experts[each * group.rank() :][:each]
    torch.manual_seed(group.rank())
    x, choice = torch.randn(20, 32), torch.randint(4, (20,))
    ours = under_name("visit_ranks", lambda group: block.visit_ranks(x, choice))(group)
    page = under_name("visit_page", lambda group: visit_by_the_page(block, x, choice, group))(group)
    return [(ours, page)]


def all_rungs(rungs: list[int], group):
    """Return {rung: what train_rung returned}, and the pairs of results to compare."""
    torch.set_num_threads(1)
    trained = {
        rung: under_name(f"rung_{rung}", lambda group, rung=rung: train_rung(rung, group))(group)
        for rung in rungs
    }
    pairs = {}
    if 1 in rungs:
        for engine in (ZeRO1, ZeRO2, ZeRO3):
            step_engine(engine, group)
        pairs = {
            2: compare_rings(group),
            7: compare_blocks(7, tensor_parallel.TENSOR, group),
            8: compare_blocks(8, tensor_parallel.SEQUENCE, group),
            9: compare_ring_attention(group),
            12: compare_experts(group),
        }
    return trained, pairs


# -- what they are compared with ------------------------------------------------------------------


@functools.cache
def run_of(size: int):
    rungs = [rung for rung, n in CASES if n == size]
    return launch(all_rungs, size, args=(rungs,), timeout=240)


@pytest.fixture(scope="module")
def one_process():
    losses, held = load(0)["train"]()
    with_experts, _ = load(12)["train"]("cpu", None)
    return losses, with_experts, held


@pytest.mark.parametrize(("rung", "size"), CASES)
def test_losses_are_those_of_one_process(rung, size, one_process):
    losses, with_experts, _ = one_process
    shares = [trained[rung][0] for trained, _ in run_of(size).results]
    expected = with_experts if rung == 12 else losses
    assert len(expected) == STEPS
    assert [sum(share) for share in zip(*shares)] == pytest.approx(expected, abs=1e-5)


def test_three_axes_of_one_rank_are_one_process(one_process):
    ((losses, *_),) = launch(train_rung, 1, (13,)).results
    assert losses == pytest.approx(one_process[0], abs=1e-5)


@pytest.mark.parametrize(("rung", "size"), CASES)
def test_each_rank_sends_the_bytes_of_the_formula(rung, size):
    for rank, (trained, _) in enumerate(run_of(size).results):
        sent = run_of(size).ledger.total_bytes(op=f"rung_{rung}", rank=rank)
        assert sent == STEPS * trained[rung][1]["bytes sent per step"] > 0


@pytest.mark.parametrize(("rung", "size"), CASES)
def test_nothing_keeps_the_group(rung, size):
    """Otherwise its threads outlive it and may call Python after its exit, which aborts."""
    assert [trained[rung][3] for trained, _ in run_of(size).results] == [0] * size


@pytest.mark.parametrize(("rung", "size"), CASES)
def test_what_is_sharded_is_gone(rung, size, one_process):
    """Check the rung's own count and what parameters really hold after backward."""
    whole = one_process[2]["parameters"]
    _, held, alive, _ = run_of(size).results[0][0][rung]
    held = {key: held[key] for key in ("parameters", "gradients", "optimizer")}
    shard = whole // size
    if rung in (1, 2, 3, 9):
        assert held == {"parameters": whole, "gradients": whole, "optimizer": 2 * whole}
        assert alive == (whole, whole)
    elif rung == 4:
        assert held == {"parameters": whole, "gradients": whole + shard, "optimizer": 2 * shard}
        assert alive == (whole, whole)
    elif rung == 5:
        assert held == {"parameters": whole, "gradients": shard, "optimizer": 2 * shard}
        assert alive == (whole, 0)
    elif rung == 6:
        assert held == {"parameters": shard, "gradients": shard, "optimizer": 2 * shard}
        assert alive == (0, 0)
    else:  # A rank holds one part of the model, with its gradients and states.
        assert held["parameters"] < whole or rung == 12
        assert held["gradients"] == held["parameters"] == held["optimizer"] // 2
        assert alive == (held["parameters"], held["gradients"])


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_the_model_are_the_model(size, one_process):
    """Stages add up to the model; so do slices, apart from what every rank holds."""
    whole = one_process[2]["parameters"]
    held = [trained for trained, _ in run_of(size).results]
    for rung in (10, 11):
        assert sum(trained[rung][1]["parameters"] for trained in held) == whole
    in_blocks = 5 * (3 + 1 + 4 + 4) * 32 * 32  # elements of qkv, out, up and down
    for rung in (7, 8):
        assert held[0][rung][1]["parameters"] == whole - in_blocks + in_blocks // size


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rung", [2, 7, 8, 9, 12])
def test_values_are_those_of_the_librarys_page(rung, size):
    for _, pairs in run_of(size).results:
        for ours, page in pairs[rung]:
            torch.testing.assert_close(ours, page, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_are_those_of_the_librarys_engine(size):
    ledger = run_of(size).ledger
    for rank, (trained, _) in enumerate(run_of(size).results):
        for rung, engine in {4: "ZeRO1", 5: "ZeRO2", 6: "ZeRO3"}.items():
            engine_sent = ledger.total_bytes(op=engine, rank=rank)
            assert trained[rung][1]["bytes sent per step"] == engine_sent
        visits = [ledger.total_bytes(op=f"visit_{by}", rank=rank) for by in ("ranks", "page")]
        assert visits[0] == visits[1] > 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rung", "name"), [(10, "gpipe"), (11, "1f1b")])
def test_pipelines_follow_the_librarys_schedule(rung, name, size):
    """They send the same messages in the same order and save as many micro-batches."""
    schedule = build(name, size, 8)
    peaks = [trained[rung][1]["micro-batches saved"] for trained, _ in run_of(size).results]
    assert peaks == peak_in_flight(schedule)
    for rank in range(size):
        wanted = {"F": rank + 1, "B": rank - 1}
        expected = [wanted[action.kind] for action in schedule.actions(rank)]
        leaves = run_of(size).ledger.leaves(op=f"rung_{rung}", rank=rank)
        sent = [comm.peers[0] for comm in leaves if comm.op == "send"]
        assert sent == STEPS * [peer for peer in expected if 0 <= peer < size]


# -- how the ladder is written --------------------------------------------------------------------


def test_rungs_are_small():
    assert list(RUNGS) == list(range(14))
    assert max(len(rung.lines) for rung in RUNGS.values()) <= 150


@pytest.mark.parametrize("number", range(1, 14))
def test_a_rung_changes_few_lines_of_an_earlier_one(number):
    base = RUNGS[number].base
    assert base < number
    assert sum(LADDER["changes"](RUNGS[base], RUNGS[number])) <= 60


def test_the_readme_explains_each_rung_and_the_diff_begins_with_it():
    ideas = LADDER["read_ideas"]()
    assert sorted(ideas) == sorted(RUNGS)[1:]
    shown = LADDER["show_diff"](RUNGS[3], RUNGS[4], colored=False)
    assert shown.index(ideas[4]) < shown.index("+class Unit:")


@pytest.mark.parametrize("number", range(14))
def test_a_rung_imports_torch_and_the_standard_library_only(number):
    for node in ast.walk(ast.parse("\n".join(RUNGS[number].lines))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}


def test_the_readme_shows_the_ladder():
    readme = (HERE.parent / "README.md").read_text()
    for number, rung in RUNGS.items():
        added, removed = (0, 0)
        if rung.base is not None:
            added, removed = LADDER["changes"](RUNGS[rung.base], rung)
        change = "" if rung.base is None else f"+{added} −{removed} from {rung.base}"
        row = f"| [{rung.name}](ladder/{rung.name}.py) | {change} | {rung.lesson} |"
        assert row in readme, f"rung {number} wants this row in README.md:\n{row}"


def test_the_difference_of_two_rungs_is_shown():
    command = [sys.executable, str(HERE)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(rung.lesson in listed for rung in RUNGS.values())
    shown = LADDER["show_diff"](RUNGS[10], RUNGS[11], colored=True)
    added, removed = (re.findall(f"(?m)^\033\\[{color}m", shown) for color in ("32", "31"))
    assert (len(added), len(removed)) == LADDER["changes"](RUNGS[10], RUNGS[11])
    refused = subprocess.run([*command, "3", "40"], capture_output=True, text=True)
    assert refused.returncode == 1 and "0 to 13" in refused.stderr


# -- how it is started ----------------------------------------------------------------------------


def check_output(text: str, num_ranks: int):
    pairs = re.findall(r"step \d+  loss ([\d.]+)  one process ([\d.]+)", text)
    assert len(pairs) == STEPS
    for loss, expected in pairs:
        assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    assert len(re.findall(r"(?m)^rank \d+  .*bytes sent per step.*optimizer", text)) == num_ranks


def test_a_rung_starts_its_own_ranks():
    command = [sys.executable, str(PATHS[4]), "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    check_output(run.stdout, 2)


def test_a_rung_joins_the_ranks_of_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(PATHS[4])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    check_output(run.stdout, 2)
