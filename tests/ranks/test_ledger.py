"""Test the ledger: it lists every communication once, with the right number of bytes."""

import itertools
import json
import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mini_dist import launch
from mini_dist.collectives import ring_all_reduce
from mini_dist.collectives.mesh import Mesh
from mini_dist.course.profile import profiled
from mini_dist.ranks.ledger.flow import flow, split
from mini_dist.ranks.ledger.memory import held
from mini_dist.ranks.ledger.steps import messages
from mini_dist.ranks.older_torch import IS_OLDER
from mini_dist.strategies.data_parallel import Overlapped

N = 4  # ranks

# torch is renaming these two functions.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def policies(group):
    """Return {thread name: scheduling policies} of a rank with a subgroup, and its main policy."""
    mesh = Mesh(group, a=2, b=2)
    mesh["a"].barrier().wait()
    found = {}
    for task in Path("/proc/self/task").iterdir():
        found.setdefault((task / "comm").read_text().strip(), set()).add(
            os.sched_getscheduler(int(task.name))
        )
    return found, os.sched_getscheduler(0)


@pytest.mark.skipif(IS_OLDER, reason="before torch 2.13, gloo does not name its loop's thread")
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="needs SCHED_BATCH")
def test_gloos_threads_do_not_take_a_core_from_a_rank_that_computes():
    """Otherwise a message sometimes takes 2.7 ms.

    The thread then spins for a lock whose owner it has pushed off its core.
    """
    for threads, main in launch(policies, N).results:
        assert main == os.SCHED_OTHER
        for name in ("gloo_tcp_loop", "pt_gloo_runloop"):
            assert threads[name] == {os.SCHED_BATCH}, name


def refused(group):
    def refuse(*_):
        raise PermissionError("not in this sandbox")

    os.sched_setscheduler = refuse  # (a rank is its own process and ends with its run)
    return dist.get_world_size(dist.new_group([0, 1]))


def test_a_sandbox_that_refuses_it_changes_nothing_else():
    assert launch(refused, 2).results == [2, 2]


# ---- bytes of native collectives -----------------------------------------------------------------

SYMMETRIC = ["all_reduce", "reduce_scatter", "all_gather", "barrier"]
ROOTED = ["broadcast", "reduce", "gather", "scatter"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("nbytes", [0, 4, 28, 4000])
@pytest.mark.parametrize("op", SYMMETRIC + ROOTED)
def test_what_is_sent_is_received_by_the_one_it_was_sent_to(op, nbytes, size):
    root = size - 1 if op in ROOTED else None
    flows = [flow(op, nbytes, "float32", root, me, size) for me in range(size)]
    for me in range(size):
        assert me not in flows[me][0], "nobody sends to itself"
        for peer, count in flows[me][0].items():
            assert flows[peer][1].get(me, 0) == count


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_native_collective_counts_the_least_that_has_to_move(size):
    nbytes = 4 * 1001  # not a multiple of most sizes
    whole = {
        "all_reduce": 2 * (size - 1) * nbytes,
        "reduce_scatter": (size - 1) * nbytes,
        "all_gather": size * (size - 1) * nbytes,
        "broadcast": (size - 1) * nbytes,
        "reduce": (size - 1) * nbytes,
        "gather": (size - 1) * nbytes,
        "scatter": (size - 1) * nbytes,
    }
    for op, total in whole.items():
        flows = [flow(op, nbytes, "float32", 0, me, size)[0] for me in range(size)]
        assert sum(sum(sent.values()) for sent in flows) == total, op


def test_parts_are_whole_elements_and_differ_by_one_at_most():
    assert split(4 * 10, 4, 4) == [12, 12, 8, 8]
    assert split(0, 4, 3) == [0, 0, 0]


def test_an_unknown_collective_is_an_error_not_zero_bytes():
    with pytest.raises(ValueError, match="no volume is known for the collective 'all_magic'"):
        flow("all_magic", 4, "float32", None, 0, 2)


# ---- every communication is recorded -------------------------------------------------------------


def raw_calls(group):
    rank, size = group.rank(), group.size()
    x = torch.ones(1000)
    dist.all_reduce(x)
    dist.broadcast(x, 1)
    dist.reduce(x, 2)
    all_gather_single(torch.empty(size * 1000), x)
    dist.all_gather([torch.empty(1000) for _ in range(size)], x)
    reduce_scatter_single(torch.empty(250), x)
    dist.gather(x, [torch.empty(1000) for _ in range(size)] if rank == 0 else None, 0)
    dist.scatter(x, [torch.ones(1000) for _ in range(size)] if rank == 3 else None, 3)
    rows = [1, 2, 3, 4]
    sent, received = torch.ones(sum(rows)), torch.empty(size * rows[rank])
    dist.all_to_all_single(received, sent, [rows[rank]] * size, rows)
    dist.barrier()
    handle = dist.isend(x, (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)
    handle.wait()


def test_raw_calls_are_recorded_with_their_least_volume():
    run = launch(raw_calls, N)
    seen = [(comm.op, comm.sent) for comm in run.ledger.calls(rank=1)]
    kb = 4000
    assert seen == [
        ("all_reduce", 2 * 3 * kb // 4),
        ("broadcast", kb),
        ("reduce", kb),
        ("all_gather", 3 * kb),
        ("all_gather", 3 * kb),
        ("reduce_scatter", 3 * kb // 4),
        ("gather", kb),
        ("scatter", 0),
        ("all_to_all", 4 * (1 + 3 + 4)),
        ("barrier", 0),
        ("send", kb),
        ("recv", 0),
    ]
    assert run.ledger.total_bytes(op="reduce") == 3 * kb
    ours = run.ledger.calls(op="all_reduce", rank=0)[0]
    assert (ours.dtype, ours.nbytes, ours.axis, ours.group) == (
        "float32",
        kb,
        "world",
        (0, 1, 2, 3),
    )
    assert ours.peers == (1, 3)
    assert run.ledger.span[0][0] <= ours.start <= ours.end <= run.ledger.span[0][1]


def uses_ddp(group):
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()


def test_ddps_reducer_is_seen_in_backward():
    run = launch(uses_ddp, N)
    gradients = 4 * (64 * 64 + 64)
    assert run.ledger.total_bytes("all_reduce", phase="backward") == 2 * 2 * (N - 1) * gradients


def uses_fsdp2(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    mesh = init_device_mesh("cpu", (group.size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 64)).sum().backward()


def test_fsdp2_gathers_in_forward_and_backward_and_scatters_gradients():
    run = launch(uses_fsdp2, N)
    layer = 4 * 64 * 64
    each_way = (N - 1) * layer  # summed over ranks, for one gather of one layer
    assert run.ledger.total_bytes("all_gather", phase="forward") == 2 * each_way
    # In backward, the parameters are gathered again and the gradients are reduce-scattered.
    assert run.ledger.total_bytes("reduce_scatter", phase="backward") == 2 * each_way
    assert run.ledger.total_bytes("all_gather", phase="backward") >= each_way


def uses_dtensor(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (group.size(),))
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model(torch.ones(2, 16, requires_grad=True)).sum().backward()


def test_dtensors_tensor_parallel_reduces_once_forward_and_once_backward():
    run = launch(uses_dtensor, N)
    activations = 4 * 2 * 16
    assert run.ledger.total_bytes("all_reduce", phase="forward") == 2 * (N - 1) * activations
    assert run.ledger.total_bytes("all_reduce", phase="backward") == 2 * (N - 1) * activations


def uses_pipelining(group):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, size = group.rank(), group.size()
    stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, target: out.sum())
    inputs = (torch.ones(4, 8),) if rank == 0 else ()
    schedule.step(*inputs, target=torch.zeros(4) if rank == size - 1 else None)


def test_torchs_pipelining_sends_each_activation_and_its_gradient():
    run = launch(uses_pipelining, 2)
    micro = 4 * 2 * 8
    sent = [c for c in run.ledger.leaves("send") if c.dtype == "float32" and c.nbytes == micro]
    assert [c.rank for c in sent].count(0) == 2, "two activations to the right"
    assert [c.rank for c in sent].count(1) == 2, "two gradients to the left"


# ---- nothing is counted twice --------------------------------------------------------------------


def our_ring(group):
    return ring_all_reduce(torch.ones(1000), group)


def test_a_collective_of_ours_is_the_parent_of_its_sends_and_adds_nothing():
    run = launch(our_ring, N)
    (call,) = run.ledger.calls(rank=0)
    assert call.op == "ring_all_reduce" and not call.is_leaf
    assert call.sent == 2 * (N - 1) * 4000 // N
    assert run.ledger.total_bytes() == 2 * (N - 1) * 4000
    assert run.ledger.total_bytes("ring_all_reduce") == run.ledger.total_bytes("send")
    half = run.ledger.total_bytes("ring_reduce_scatter")
    assert half == run.ledger.total_bytes() // 2, "nested collectives are found by name, too"
    rows = run.ledger.table().rows
    assert [row[0] for row in rows] == ["ring_all_reduce", "total"]
    assert rows[-1][-1] == run.ledger.total_bytes()


def test_our_sends_are_what_the_kernel_saw_up_to_headers():
    run = launch(big_ring, N)
    if run.ledger.wire_bytes[0] is None:
        pytest.skip("this system does not count the bytes of a socket")
    for rank in range(N):
        counted = run.ledger.total_bytes(rank=rank)
        sent, _ = run.ledger.wire_bytes[rank]
        assert counted <= sent <= 1.01 * counted


def big_ring(group):
    ring_all_reduce(torch.ones(1 << 18), group)


def native_reduce_scatter(group):
    n = group.size()
    dist.reduce_scatter(torch.empty(1 << 16), list(torch.ones(n, 1 << 16)))


def test_gloos_reduce_scatter_puts_twice_its_volume_on_the_wire():
    run = launch(native_reduce_scatter, N)
    if run.ledger.wire_bytes[0] is None:
        pytest.skip("this system does not count the bytes of a socket")
    on_the_wire = sum(sent for sent, _ in run.ledger.wire_bytes)
    assert on_the_wire / run.ledger.total_bytes() == pytest.approx(2, rel=0.02)


# ---- phases and axes -----------------------------------------------------------------------------


class Talks(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.linear, self.group = nn.Linear(4, 4), group

    def forward(self, x):
        dist.all_reduce(torch.ones(1), group=self.group)
        out = self.linear(x)
        out.register_hook(lambda grad: dist.all_reduce(torch.ones(2), group=self.group))
        return out


def talks_in_every_phase(group):
    dist.all_reduce(torch.ones(4), group=group)
    model = Talks(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(3), group=group)
        optimizer.step()


def test_each_communication_knows_its_phase():
    run = launch(talks_in_every_phase, 2)
    phases = {comm.nbytes // 4: comm.phase for comm in run.ledger.comms}
    assert phases == {4: "setup", 1: "forward", 2: "backward", 3: "step"}
    assert len(run.ledger.calls(phase="backward", rank=0)) == 2
    names = [phase for _, phase in run.ledger.phases[0]]
    assert names[:4] == ["setup", "forward", "backward", "step"]


def along_axes(group):
    mesh = Mesh(group, dp=2, tp=2)
    dist.all_reduce(torch.ones(5), group=mesh["dp"])
    dist.all_reduce(torch.ones(7), group=mesh["tp"])
    unnamed = dist.new_group([0, 3])
    if group.rank() in (0, 3):
        dist.all_reduce(torch.ones(9), group=unnamed)


def test_bytes_are_told_apart_by_axis():
    run = launch(along_axes, 4)
    assert run.ledger.total_bytes(axis="dp") == 4 * 2 * 2 * 5
    assert run.ledger.total_bytes(axis="tp") == 4 * 2 * 2 * 7
    assert run.ledger.total_bytes(axis="ranks 0,3") == 4 * 2 * 9
    traffic = run.ledger.traffic()
    assert traffic[0][2] > 0 and traffic[0][1] > 0 and traffic[1][2] == 0


TRACE_EVENT = {  # the fields of each kind of event, after Google's "Trace Event Format" (2016)
    "type": "object",
    "required": ["ph", "pid", "tid", "name"],
    "properties": {
        "ph": {"enum": ["X", "M", "s", "f"]},
        "pid": {"type": "integer", "minimum": 0},
        "tid": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "minLength": 1},
        "ts": {"type": "number", "minimum": 0},
        "dur": {"type": "number", "minimum": 0},
        "cat": {"type": "string"},
        "args": {"type": "object"},
    },
    "allOf": [
        {
            "if": {"properties": {"ph": {"const": kind}}},
            "then": {"required": needs, "properties": more},
        }
        for kind, needs, more in (
            ("X", ["ts", "dur", "args"], {}),
            ("M", ["args"], {"name": {"enum": ["process_name", "thread_name"]}}),
            ("s", ["ts", "id", "cat"], {}),
            ("f", ["ts", "id", "cat", "bp"], {"bp": {"const": "e"}}),
        )
    ],
}
TRACE = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "minItems": 1, "items": TRACE_EVENT}},
}


def overlapped(group):
    model = Overlapped(nn.Sequential(nn.Linear(D, F), nn.Linear(F, D)), group, bucket_bytes=1000)
    model(torch.randn(B, D)).square().mean().backward()
    model.finish()


def seen_by_the_profiler(group):
    with profiled(group) as profile:
        for _ in range(2):
            with profile.step(), profile.region("all of it"):
                overlapped(group)
    return profile.spans


def written_trace(fn, folder):
    run = launch(fn, 3)
    spans = run.results if fn is seen_by_the_profiler else ()
    run.ledger.to_chrome_trace(folder / "trace.json", spans)
    return run, json.loads((folder / "trace.json").read_text())


TRACED = [our_ring, overlapped, seen_by_the_profiler]


@pytest.mark.parametrize("fn", TRACED)
def test_a_trace_for_the_browser_holds_every_communication_and_an_arrow_a_message(fn, tmp_path):
    run, trace = written_trace(fn, tmp_path)
    import jsonschema  # Takes 1.2 s, on every rank if it were at the top.

    jsonschema.validate(trace, TRACE)
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(e["cat"] in ("collectives", "messages") for e in slices) == len(run.ledger.comms)
    tails, heads = (
        {event["id"]: event for event in events if event["ph"] == ph} for ph in ("s", "f")
    )
    found = messages(run.ledger)
    assert set(tails) == set(heads) == set(range(len(found)))
    assert [(tails[i]["pid"], heads[i]["pid"]) for i in tails] == [
        (message.source, message.target) for message in found
    ]
    assert all(tails[i]["ts"] <= heads[i]["ts"] for i in tails)


def test_a_trace_holds_the_spans_of_the_profiler_on_each_ranks_own_lanes(tmp_path):
    run, trace = written_trace(seen_by_the_profiler, tmp_path)
    for rank, spans in enumerate(run.results):
        drawn = [e for e in trace["traceEvents"] if e["pid"] == rank and e.get("cat") == "program"]
        assert sorted(e["name"] for e in drawn) == sorted(span.name for span in spans)
        assert sum("addmm" in e["name"] for e in drawn) == 2 * 2  # two layers, two steps


@pytest.mark.parametrize("fn", TRACED)
def test_slices_of_a_lane_are_apart_or_inside_each_other(fn, tmp_path):
    """Otherwise a viewer cuts the slices or draws them in the wrong place."""
    run, _ = written_trace(fn, tmp_path)
    lanes = {}
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            place = event["ts"], event["ts"] + event["dur"]
            lanes.setdefault((event["pid"], event["tid"]), []).append(place)
    for slices in lanes.values():
        slices.sort(key=lambda slice: (slice[0], -slice[1]))  # same start: the longer first
        for (a, b), (c, d) in itertools.combinations(slices, 2):
            room = 1e-3  # microseconds, for rounding
            assert c >= b - room or d <= b + room, (a, b, c, d)


def test_the_ledger_knows_which_communication_another_thread_made():
    calls = launch(overlapped, 2).ledger.calls
    assert {call.own_thread for call in calls(op="broadcast")} == {True}
    reduced = [call for call in calls() if "all_reduce" in call.op]
    assert reduced and not any(call.own_thread for call in reduced)


# ---- memory --------------------------------------------------------------------------------------

D, F, B = 100, 400, 64
PARAMETERS = 4 * (D * F + F + F * D + D)


def mlp_step(group):
    model = nn.Sequential(nn.Linear(D, F), nn.ReLU(), nn.Linear(F, D))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(B, D)
    memory = {}
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        memory["after backward"] = held(group)
        optimizer.step()
        optimizer.zero_grad()
        memory["after the step"] = held(group)
    del loss
    return memory


def test_memory_of_an_mlp_is_what_one_works_out_by_hand():
    run = launch(mlp_step, 2, memory=True)
    after_backward, after_step = run.results[0].values()
    one_percent = dict(rel=0.01)
    assert after_backward["parameters"] == PARAMETERS
    assert after_backward["gradients"] == PARAMETERS
    # AdamW has two moments per parameter, and a step counter (4 bytes) for each of 4 tensors.
    assert after_backward["optimizer state"] == pytest.approx(2 * PARAMETERS, **one_percent)
    assert after_backward["activations"] <= 8, "freed ones are gone; the loss is left"
    assert after_step["gradients"] == 0

    memory = run.ledger.memory[0]
    # ReLU's output [B, F] is saved for backward. (The first linear layer's output is freed after
    # ReLU.) The two [B, D] tensors of the loss are also alive at the peak.
    kept = 4 * B * F
    peak = memory.peak("forward")
    assert peak["parameters"] == PARAMETERS
    assert kept < peak["activations"] <= 2 * kept + 8
    assert peak["other"] == 4 * B * D, "the input"
    assert memory.peak_bytes(kind="gradients") == PARAMETERS
    assert memory.peak_bytes() == sum(memory.peak().values())


def views_and_slices(group):
    whole = torch.zeros(1000)
    parts = whole.view(10, 100), whole[:500], whole.detach(), whole.t()
    before = sum(held(group).values())
    del whole, parts
    return before, sum(held(group).values())


def test_a_storage_is_counted_once_whatever_looks_at_it_and_gone_with_the_last():
    assert launch(views_and_slices, 1, memory=True).results == [(4000, 0)]


def resized(group):
    x = torch.zeros(1000)
    x.untyped_storage().resize_(0)  # how FSDP frees parameters
    freed = sum(held(group).values())
    x.untyped_storage().resize_(4000)
    return freed, sum(held(group).values())


def test_a_storage_that_is_emptied_in_place_counts_nothing():
    assert launch(resized, 1, memory=True).results == [(0, 4000)]


def buffers(group):
    model = nn.BatchNorm1d(256)
    model(torch.zeros(2, 256))
    return held(group)


def test_buffers_have_a_kind_of_their_own():
    (kinds,) = launch(buffers, 1, memory=True).results
    assert kinds["buffers"] == 4 * 256 * 2 + 8  # mean, variance, number of batches (int64)
    assert kinds["parameters"] == 4 * 256 * 2


def asks_without_memory(group):
    with pytest.raises(ValueError, match="memory=True"):
        held(group)


def test_asking_for_memory_that_is_not_recorded_is_an_error():
    launch(asks_without_memory, 1)
    assert launch(asks_without_memory, 1).ledger.memory == [None]


def test_peaks_of_a_phase_lie_below_the_peak_of_the_run():
    memory = launch(mlp_step, 1, memory=True).ledger.memory[0]
    peaks = [memory.peak_bytes(phase) for phase in ("setup", "forward", "backward", "step")]
    assert max(peaks) == memory.peak_bytes()
    assert all(math.isfinite(peak) and peak > 0 for peak in peaks)
