"""A simulated run is the real run without its values: the same bytes, the same memory."""

import gc
import linecache
import math
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from mini_dist import GPT, Layout, launch
from mini_dist.collectives import all_reduce, exchange, ring_all_reduce
from mini_dist.model.data import Batches
from mini_dist.plan.calculators import framework, hardware, model, peak_memory
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.config import ModelConfig
from mini_dist.ranks.diagnose import RankError
from mini_dist.ranks.ledger.counting import Begin, Enter, Kernel, Leave, Wait
from mini_dist.ranks.ledger.memory import MemoryRecord
from mini_dist.ranks.simulation.kinds import Axis, axes_of, what_it_did
from mini_dist.strategies import compression as K
from mini_dist.strategies.context_parallel import make_attention, positions_here
from mini_dist.strategies.data_parallel import Bucketed, Naive, ring_mean
from mini_dist.strategies.precision import Precision
from mini_dist.strategies.train import split, train_step
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

SMALL = ModelConfig(vocab_size=64, seq_len=16, d_model=32, num_layers=4, num_heads=8)
TEXT = torch.arange(4000) % 64


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def batch_of(group, rows=4):
    return Batches(TEXT, rows, SMALL.seq_len, device=group.device).batch(0)


def wrapped(kind, *options, **named) -> Callable:
    def train(group):
        model = kind(GPT(SMALL, device=group.device), group, *options, **named)
        optimizer = getattr(model, "optimizer", None) or adamw(model.parameters())
        for _ in range(2):
            train_step(model, optimizer, split(*batch_of(group), 2), max_norm=1.0)

    return train


def on_all_axes(**axes) -> Callable:
    def train(group):
        dp = group.size() // math.prod(axes.get(axis, 1) for axis in ("pp", "cp", "tp"))
        cut = Layout(num_micro_batches=4, dp=dp, **axes)
        model = parallelize(SMALL, cut, group, adamw)
        model.step(*batch_of(group, 4), max_norm=1.0)

    return train


def in_context(form) -> Callable:
    def train(group):
        model = GPT(SMALL, device=group.device, attention=make_attention(group, form))
        positions = positions_here(SMALL.seq_len, group).to(group.device)
        inputs = batch_of(group)[0][:, : SMALL.seq_len // group.size()]
        model(inputs, positions).sum().backward()

    return train


CHUNKS = {"interleaved": 2, "dualpipe_v": 2}
STRATEGIES = {kind.__name__: wrapped(kind) for kind in (Naive, Bucketed)}
STRATEGIES |= {stage.__name__: wrapped(stage, adamw) for stage in (ZeRO1, ZeRO2, ZeRO3)}
STRATEGIES |= {
    "ring mean": wrapped(Bucketed, ring_mean),
    "half": wrapped(Bucketed, K.half()),
    "tp": on_all_axes(tp=4),
    "sp, zero": on_all_axes(tp=2, sequence_parallel=True, zero=1),
    "cp": on_all_axes(cp=2, zero=3),
    "recompute": on_all_axes(tp=2, recompute="full"),
    "ring attention": in_context("ring"),
    "ulysses": in_context("ulysses"),
}
STRATEGIES |= {
    name: on_all_axes(pp=2, schedule=name, num_chunks=CHUNKS.get(name, 1))
    for name in ("1f1b", "interleaved", "zb_h2", "dualpipe_v")
}


def pytest_generate_tests(metafunc):
    if "both" in metafunc.fixturenames:
        sizes = [4, 8] if metafunc.config.getoption("long") else [4]
        cases = [(name, size) for name in STRATEGIES for size in sizes]
        metafunc.parametrize("both", cases, indirect=True, ids=lambda case: f"{case[0]}-{case[1]}")


@pytest.fixture
def both(request):
    """The same training on this many ranks, run and simulated."""
    name, size = request.param
    how = dict(world_size=size, timeout=300)
    real = launch(STRATEGIES[name], memory=True, **how)
    return name, real, launch(STRATEGIES[name], simulate="h100", **how)


def rows_of(run, rank: int):
    return [
        # A sender thread has whatever phase the main thread is in at that moment.
        (c.op, c.axis, c.dtype, c.nbytes, c.phase if c.own_thread else "", c.sent_to)
        for c in run.ledger.comms
        if c.rank == rank
    ]


# Ring attention has a fused kernel only on a CPU. On a simulated GPU it works tile by tile, and one
# tile's scores are up to 2.8 % of these small models' memory.
IN_TILES = {"cp", "ring attention"}


def test_messages_and_the_peak_of_memory_are_those_of_a_real_run(both):
    name, real, simulated = both
    for rank in range(real.world_size):
        assert rows_of(simulated, rank) == rows_of(real, rank) != [], rank
        held, simulated_peak = (run.ledger.memory[rank].peak_bytes() for run in (real, simulated))
        # Counts in a real run, such as the number of targets, take a few bytes on the host.
        assert abs(simulated_peak - held) <= (0.03 * held if name in IN_TILES else 128), rank


# ---- one rank of each kind -----------------------------------------------------------------------


IN_BF16 = framework("course").replace(
    parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, activation_bytes=2
)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=8, sequence_parallel=True, zero=1, num_micro_batches=2),
        Layout(dp=2, num_micro_batches=1),
        Layout(tp=2, sequence_parallel=True, zero=3, num_micro_batches=2),  # alone in ZeRO's group
        Layout(dp=32, tp=8, sequence_parallel=True, zero=3, recompute="full"),
        Layout(pp=4, dp=8, tp=4, sequence_parallel=True, zero=1, num_micro_batches=8),
    ],
    ids=lambda layout: " ".join(f"{axis}{size}" for axis, size in layout.axes.items()),
)
def test_a_step_of_llama_holds_what_the_planner_says(layout):
    config = model("llama3-8b").replace(num_layers=4 * layout.pp, seq_len=4096)

    def train(group):
        torch.set_default_dtype(torch.bfloat16)
        ours = parallelize(config, layout, group, adamw)
        rows = layout.micro_batch_size * layout.num_micro_batches
        tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64, device=group.device)
        for _ in range(2):
            ours.step(tokens, tokens, max_norm=1.0)

    run = launch(train, layout.world_size, simulate="h100", ranks="kinds", timeout=300)
    phases = ("forward", "backward", "step")
    most = max(rank.peak_bytes(phase) for rank in run.ledger.memory for phase in phases)
    # The norm is one kernel, as on a GPU, and keeps what layer_norm's does.
    planned = peak_memory(config.replace(norm="layernorm"), layout, IN_BF16)
    assert most == pytest.approx(planned.total, rel=1e-3)


def test_what_a_thread_returned_goes_with_its_last_user():
    def in_a_thread(group):
        with ThreadPoolExecutor(1) as pool:
            made = [pool.submit(torch.ones, 1000, device=group.device) for _ in range(3)]
            returned = [weakref.ref(future.result()) for future in made]
        gc.disable()  # It would find a circle.
        del made
        alive = [each() is not None for each in returned]
        gc.enable()
        return alive

    assert launch(in_a_thread, 1, simulate="h100").results == [[False] * 3]


def test_a_rank_of_each_kind_stands_for_the_others():
    """Simulating all ranks, or one rank of each kind, gives the same seconds, bytes and memory."""
    train = on_all_axes(pp=2, tp=2, sequence_parallel=True, zero=1)
    every, few = (
        launch(train, 8, simulate="h100", ranks=ranks, timeout=300) for ranks in ("all", "kinds")
    )
    assert few.seconds == pytest.approx(every.seconds, rel=1e-3)
    assert few.peak_memory == every.peak_memory
    assert len(few.ledger.kinds.firsts()) < 8
    for axis in ("pp", "dp"):
        assert few.ledger.total_bytes(axis=axis) == every.ledger.total_bytes(axis=axis)


def test_a_thread_that_sends_early_or_late_makes_no_other_kind():
    """A bucket is sent from its own thread while tp's all-reduce runs in the main thread."""

    def export(order: str) -> dict:
        numbers = {thread: number for number, thread in enumerate(order)}
        program = [(thread, Begin(numbers[thread], 0)) for thread in order]
        events = Enter, Wait, Leave
        program += [(thread, event(numbers[thread])) for thread in "ab" for event in events]
        row = ("all_reduce", "world", "float32", 64, None)
        groups, memory = {"world": [0, 1]}, MemoryRecord([], [])
        return dict(program=program, comms=[row, row], groups=groups, axes={}, memory=memory)

    one, other = (what_it_did(0, export(order)) for order in ("ab", "ba"))
    assert one.alike(other)


def test_axes_are_read_off_the_groups_of_rank_0():
    groups = {"0": list(range(24)), "a": [0, 1], "b": [0, 2, 4, 6], "c": [0, 2], "d": [0, 8, 16]}
    names = {"0": "world", "a": "tp", "b": "dp", "c": "ep", "d": "pp"}
    axes = [Axis("tp", 1, 2), Axis("dp", 2, 4), Axis("pp", 8, 3)]
    assert axes_of(groups, names, 24) == axes


def different(group):
    """Rank 0 computes more than any other rank."""
    x = torch.ones(8, 8, device=group.device)
    for _ in range(3 if group.rank() == 0 else 1):
        x = x @ x
    all_reduce(x, group)


def test_a_root_is_a_kind_of_its_own():
    run = launch(different, 32, simulate="h100")
    assert run.ledger.kinds.firsts() == [0, 1] and run.ledger.kinds.sizes() == [1, 31]


# ---- virtual time --------------------------------------------------------------------------------


def by_hand_and_by_name(group):
    x = torch.ones(1 << 20, device=group.device)
    exchange(x, (group.rank() + 1) % 4, (group.rank() - 1) % 4, group)
    ring_all_reduce(x, group)


def test_messages_take_the_links_time_and_collectives_that_of_the_machines_library():
    run = launch(by_hand_and_by_name, 4, simulate="h100")
    h100 = hardware("h100")
    took = {comm.op: comm.end - comm.start for comm in run.ledger.calls(rank=0)}
    assert took["send"] == pytest.approx(h100.node_link("send").seconds(4 << 20))
    assert took["ring_all_reduce"] == pytest.approx(
        collective_seconds(h100, "all_reduce", 4 << 20, 4)
    )
    assert run.ledger.total_bytes() == 4 * ((4 << 20) + 2 * 3 * (1 << 20))


def in_bf16(dtype, group):
    x = torch.ones(4096, 4096, device=group.device)
    weight = torch.nn.Parameter(torch.ones_like(x))
    with Precision(dtype).autocast(group.device.type):
        y = functional.linear(x, weight)
    (y.float() ** 2).sum().backward()
    return str(y.dtype), str(weight.grad.dtype)


def test_autocast_takes_products_to_the_tensor_cores():
    full, half = (launch(in_bf16, 1, (d,), simulate="h100") for d in (None, torch.bfloat16))
    assert half.results == [("torch.bfloat16", "torch.float32")]
    products = [sum(s.end - s.start for s in r.spans if s.kind == "product") for r in (full, half)]
    slower = 989 / 67  # float32 without TF32; filling a tile takes as long (GEMM_FILL)
    assert products[0] / products[1] == pytest.approx(
        (slower * 4096 + 180) / (4096 + 180), rel=0.05
    )


def many_kernels(group):
    x = torch.ones(8, device=group.device)
    for _ in range(99):
        x = x + 1


def test_a_slow_host_sets_the_pace():
    at_once, slow = (launch(many_kernels, 1, simulate="h100", host_us=us) for us in (0.0, 50.0))
    assert (
        slow.seconds == pytest.approx(100 * 50e-6, rel=0.01)
        and at_once.seconds < 0.2 * slow.seconds
    )


def hands_over(group):
    """A thread does the work that forward asked for after the optimizer's step has begun."""
    layer, late = torch.nn.Linear(4, 4, device=group.device), threading.Event()
    optimizer, pool = torch.optim.SGD(layer.parameters()), ThreadPoolExecutor(1)

    class Asks(torch.nn.Module):
        def forward(self, x):
            self.asked = pool.submit(lambda: late.wait() and all_reduce(x * 2, group))
            return layer(x)

    asks = Asks()
    asks(torch.ones(2, 4, device=group.device)).sum().backward()
    optimizer.step()
    late.set()
    asks.asked.result()


def test_what_another_thread_does_late_belongs_to_the_phase_that_asked_for_it():
    run = launch(hands_over, 2, simulate="h100")
    assert {comm.phase for comm in run.ledger.comms} == {"forward"}
    events = [event for thread, event in run.ledger.programs[0] if thread]
    assert {event.phase for event in events if isinstance(event, Kernel)} == {"forward"}


def a_step_in_shards(group):
    config = ModelConfig(d_model=1024, num_layers=2, num_heads=8, seq_len=1024)  # so rings carry it
    layout = Layout(tp=4, micro_batch_size=2, sequence_parallel=True)
    model = parallelize(config, layout, group, torch.optim.AdamW)
    tokens = torch.zeros(2, 1024, dtype=torch.int64, device=group.device)
    model.step(tokens, tokens)


def test_a_rank_that_stands_for_others_takes_as_long_as_with_them():
    """This includes collectives whose result has another memory order and is copied later."""
    runs = [launch(a_step_in_shards, 4, simulate="h100", ranks=how) for how in ("all", "kinds")]
    assert runs[0].step_seconds == pytest.approx(runs[1].step_seconds, rel=1e-6)


def averages(group):
    x = torch.ones(1 << 24, device=group.device)  # 64 MB
    for _ in range(4):
        x = all_reduce(x * 2 + 1, group)


@pytest.mark.parametrize("size", [4, 1024])
def test_a_straggler_delays_all_by_what_it_takes_longer(size):
    """All ranks wait for it in each all-reduce, whichever rank it is."""
    alone = launch(averages, 1, simulate="h100").seconds
    plain = launch(averages, size, simulate="h100").seconds
    for rank in (0, size // 2 - 1, size - 1):
        slow = launch(averages, size, simulate="h100", stragglers={rank: 3.0}).seconds
        assert slow - plain == pytest.approx(2 * alone, rel=0.05)


def test_a_slow_link_slows_what_leaves_its_node_and_nothing_else():
    def seconds(size, **slow):
        return launch(averages, size, simulate="h100", **slow).seconds

    assert seconds(4, slow_links={3: 4.0}) == seconds(4)  # four ranks of one node
    alone, plain, slow = seconds(1), seconds(64), seconds(64, slow_links={20: 4.0})
    assert 3 < (slow - alone) / (plain - alone) < 4  # its bytes take four times as long
    assert seconds(64, slow_links={18: 4.0}) == pytest.approx(slow, rel=1e-9)  # the same node


# ---- values do not exist -------------------------------------------------------------------------


def asks(group):
    loss = torch.ones(3, device=group.device).sum()
    print("rank", group.rank())
    return loss.item()


def test_who_asks_for_a_value_is_told_the_line_and_what_helps():
    with pytest.raises(RankError, match=r"line \d+: `return loss.item\(\)` .*pretend="):
        launch(asks, 2, simulate="h100", quiet=True)
    run = launch(asks, 2, simulate="h100", pretend={"loss": 5.0}, quiet=True)
    assert run.results == [5.0, 5.0] and run.outputs == ["rank 0\n", "rank 1\n"]


def test_a_cell_s_line_is_known_though_no_file_holds_it():
    """Like IPython, compile the cell under a name and give linecache the text."""
    loss = "    loss = torch.ones(3, device=group.device)\n"
    text = f"def stops(group):\n{loss}    return loss.sum().item()\n"
    linecache.cache["<cell 7>"] = (len(text), None, text.splitlines(True), "<cell 7>")
    cell = {"__name__": "__main__", "torch": torch}
    exec(compile(text, "<cell 7>", "exec"), cell)
    try:
        run = launch(cell["stops"], 2, simulate="h100", pretend={"loss": 5.0})
        assert run.results == [5.0, 5.0]
        with pytest.raises(RankError, match=r"NoValue: line 3: `return loss.sum\(\).item\(\)`"):
            launch(cell["stops"], 2, simulate="h100")
    finally:
        del linecache.cache["<cell 7>"]


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(simulate="h1000"), "did you mean h100"),
        (dict(simulate="h100", ranks="some"), "ranks='some'"),
        (dict(simulate="h100", device="cpu"), "cannot be combined with"),
        (dict(ranks="all"), "are of simulated runs"),
        (dict(stragglers={0: 2.0}), "are of simulated runs"),
        (dict(simulate="h100", stragglers={4: 2.0}), "names rank 4: there are 0 to 3"),
        (dict(simulate="h100", slow_links={0: 0.5}), r"slow_links\[0\]=0.5 is too small"),
        (dict(simulate="h100", stragglers=[1]), "is no dict: give ranks and factors"),
        (dict(simulate="h100", world_size=0), "at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        launch(asks, **wrong)


def test_torchs_collectives_are_in_flight_while_a_simulated_rank_computes():
    """This includes the collectives that torch's fake group copies by itself."""

    def products(begin, group):
        x = torch.empty(64 * 100_000, device=group.device)
        part, a = x.new_empty(100_000), x.new_empty(4096, 4096)
        work = begin(x, part, group) if begin else None
        for _ in range(4):
            a @ a
        if work:
            work.wait()

    def scatter(whole, part, group):
        return dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)

    def gather(whole, part, group):
        return dist.all_gather_into_tensor(whole, part, group=group, async_op=True)

    nothing, *others = (
        launch(products, 64, (begin,), simulate="h100", quiet=True)
        for begin in (None, scatter, gather)
    )
    for run in others:
        assert not any(span.kind == "wait" for span in run.spans)
        assert run.seconds < 1.25 * nothing.seconds
