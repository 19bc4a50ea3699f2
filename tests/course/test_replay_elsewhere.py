"""A run replayed on another machine: the run's bytes and order, the machine's rates and links."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import launch
from mini_dist.collectives import all_reduce, recv, send
from mini_dist.collectives.emulate import Clock, EmulatedDevice, EmulatedStage
from mini_dist.course.replay import (
    CalculatedMachine,
    MeasuredMachine,
    elsewhere,
    measure_here,
    replay,
)
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators import costs, hardware, step_flops
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.calculators.kernels import gemm_seconds
from mini_dist.plan.config import Layout, ModelConfig
from mini_dist.plan.schedule import Times, build, simulate
from mini_dist.ranks.ledger.counting import Host, Kernel, Stated
from mini_dist.strategies.data_parallel import Bucketed, Overlapped, ring_mean
from mini_dist.strategies.pipeline import Pipeline
from mini_dist.training.all_axes import parallelize

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

SMALL = ModelConfig(num_layers=2, d_model=64, num_heads=4, seq_len=32)


class Stopwatch:
    """A machine on which every kernel and every byte takes one second, with no latency."""

    name, peak_flops = "stopwatch", 1.0

    def __init__(self, kernel=1.0, byte=1.0, host=0.0, busy=0.0):
        self.kernel, self.byte, self.host, self.busy = kernel, byte, host, busy

    def kernel_seconds(self, kernel):
        return self.kernel

    def host_seconds(self, host):
        return self.host * host.operators

    def busy_seconds(self, op, nbytes):
        return self.busy

    def link(self, source, target):
        return "the only one"

    def message_seconds(self, nbytes, source, target):
        return self.byte * nbytes

    def collective_seconds(self, op, nbytes, ranks):
        return self.byte * nbytes


def train(kind, steps, group):
    model = GPT(SMALL)
    if kind == "ddp":
        replica = torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, bucket_cap_mb=0.1
        )
    elif group.size() > 1:
        replica = {"bucketed": Bucketed, "overlapped": Overlapped}[kind](
            model, group, reduce=ring_mean, bucket_bytes=100_000
        )
    else:
        replica = model
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 33))
    for _ in range(steps):
        optimizer.zero_grad()
        token_loss(replica(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        if hasattr(replica, "finish"):
            replica.finish()
        optimizer.step()


# ---- what is counted -----------------------------------------------------------------------------


def test_flops_of_a_step_are_the_formulas():
    run = launch(train, 1, ("alone", 2), count=True)
    measured = replay(run, "h100").flops
    # The formula counts attention in backward as twice that in forward. The flash kernel also
    # recomputes the scores, which is one of its five products.
    formula = step_flops(SMALL, 4).total
    scores = 4 * 32 * 32 * 64 * 2 * SMALL.num_layers  # FLOPs to compute all scores once
    assert measured == formula + scores


def test_kernels_touch_what_they_read_and_write_and_views_nothing():
    def work(group):
        x = torch.ones(10, 20)
        y = x.t().view(20, 10)[:5]
        return y + 1, x @ x.t()

    (program,) = launch(work, 1, count=True).ledger.programs
    kernels = [event for _, event in program if isinstance(event, Kernel)]
    assert [k.name for k in kernels] == ["fill_", "add", "mm"] or [k.name for k in kernels] == [
        "ones",
        "add",
        "mm",
    ]
    assert kernels[1].nbytes == 4 * (50 + 50) and kernels[1].flops == 0
    assert kernels[2].flops == 2 * 10 * 20 * 10 and kernels[2].shape == (1, 10, 10, 20)


@pytest.mark.parametrize("kind", ["bucketed", "overlapped", "ddp"])
def test_counting_changes_no_byte(kind):
    plain, counted = (launch(train, 2, (kind, 2), count=c) for c in (False, True))
    assert counted.ledger.traffic() == plain.ledger.traffic()
    for machine in ("h100", "a100-80"):
        for nodes in (1, 2):
            assert replay(counted, machine, nodes=nodes).total_bytes == plain.ledger.total_bytes()


def train_fsdp2(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = GPT(SMALL), DeviceMesh.from_group(group, "cpu")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 256, (4, 33))
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens[:, :-1]).square().mean().backward()
        optimizer.step()


def train_dtensor(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = DeviceMesh.from_group(group, "cpu")
    linear = [torch.nn.Linear(*sides, bias=False) for sides in ((64, 128), (128, 64))]
    model = torch.nn.Sequential(*linear)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(32, 64, requires_grad=True)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("program", [train_fsdp2, train_dtensor])
def test_torchs_own_sharding_is_counted_and_played_and_no_byte_changes(program):
    plain, counted = (launch(program, 2, count=c) for c in (False, True))
    assert counted.ledger.traffic() == plain.ledger.traffic()
    native, slow = replay(counted, "h100"), replay(counted, Stopwatch(kernel=0.0))
    assert native.total_bytes == slow.total_bytes == plain.ledger.total_bytes()
    # Each byte takes a second, so a rank that needs a collective waits for all of it.
    collectives = [comm for comm in counted.ledger.leaves(rank=0) if comm.phase != "setup"]
    assert len(native.steps) == 2 and slow.exposed > 0
    assert slow.seconds >= sum(comm.nbytes for comm in collectives) / 2


def test_flops_of_dtensors_are_those_of_a_ranks_parts():
    counted = launch(train_dtensor, 2, count=True)
    # Two products in forward, four in backward, each 32 x 64 x 128; each of two ranks does half.
    assert replay(counted, "h100").flops == 6 * 2 * 32 * 64 * 128


def test_an_uncounted_run_is_refused():
    run = launch(train, 1, ("alone", 1))
    with pytest.raises(ValueError, match="launch it with count=True"):
        replay(run, "h100")
    counted = launch(train, 1, ("alone", 1), count=True)
    with pytest.raises(ValueError, match="nodes=2 does not divide the 1 ranks"):
        replay(counted, "h100", nodes=2)
    with pytest.raises(ValueError, match="did you mean"):
        replay(counted, "h1000")


# ---- how it is played ----------------------------------------------------------------------------


def ring(numel, group):
    all_reduce(torch.ones(numel), group, algorithm="ring")


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_takes_the_formulas_time(size):
    run = launch(ring, size, (60 * 1000,), count=True)
    machine = CalculatedMachine(hardware("h100").replace(devices_per_node=size))
    machine.kernel_seconds = lambda kernel: 0.0
    link = machine.link(0, 1)
    expected = costs.all_reduce(4 * 60 * 1000, size, "ring", link, 4).seconds
    assert replay(run, machine_of(machine)).seconds == pytest.approx(expected)


def machine_of(machine):
    machine.name = "a machine"
    return machine


def test_a_native_collective_takes_the_planners_time():
    def native(group):
        dist.all_reduce(torch.empty(1000, 1000), group=group)

    run = launch(native, 4, count=True)
    h100 = hardware("h100").replace(devices_per_node=2)
    expected = collective_seconds(h100, "all_reduce", 4e6, 4, 1)
    assert replay(run, "h100", nodes=2).seconds == pytest.approx(expected)


def product(dtype, precision, group):
    torch.set_float32_matmul_precision(precision)
    return (torch.empty(512, 256, dtype=dtype) @ torch.empty(256, 1024, dtype=dtype)).shape


def test_a_matrix_takes_the_rooflines_time_and_is_slower_in_float32():
    def seconds(dtype, precision="highest", **options):
        return replay(launch(product, 1, (dtype, precision), count=True), "h100", **options).seconds

    device, start = hardware("h100").device, 5e-6  # Kernel launches take no longer in float32.
    in_bf16 = gemm_seconds(device, 512, 1024, 256)
    assert seconds(torch.bfloat16) == pytest.approx(in_bf16)
    filled = 1 + 180 / 256  # Filling and draining a tile takes as long as in bf16.
    for precision, slower in (("high", 2), ("highest", 989 / 67)):
        expected = (in_bf16 - start) * (slower + filled - 1) / filled + start
        assert seconds(torch.float32, precision) == pytest.approx(expected)
    wide = seconds(torch.bfloat16, wider=8)
    assert wide == pytest.approx(gemm_seconds(device, 4096, 8192, 2048))


def test_what_is_read_twice_moves_once_and_what_is_overwritten_is_not_read():
    def kernels(group):
        x = torch.zeros(1000)
        y = x + x
        x.copy_(y)
        x.zero_()

    run = launch(kernels, 1, count=True)
    found = [(e.name, e.nbytes) for _, e in run.ledger.programs[0] if isinstance(e, Kernel)]
    assert found[-3:] == [("add", 8000), ("copy_", 8000), ("zero_", 4000)]


@pytest.mark.parametrize(
    "operator, read, written",  # elements of 4 bytes
    [
        (lambda x, i: x.sum(), 200, 1),  # A number comes out, but all of x goes in.
        (lambda x, i: torch.linalg.vector_norm(x), 200, 1),
        (lambda x, i: torch.zeros_like(x), 0, 200),
        (lambda x, i: x.new_ones(5, 5), 0, 25),
        (lambda x, i: torch.nn.functional.embedding(i, x), 2 * 3 + 3 * 20, 3 * 20),
        (lambda x, i: x.index_select(0, i), 2 * 3 + 3 * 20, 3 * 20),
        (lambda x, i: x.gather(1, i[:, None]), 2 * 3 + 3, 3),
        (lambda x, i: x.index_add_(0, i, torch.empty(3, 20)), 2 * 3 + 60 + 60, 60),
        (lambda x, i: x.add_(1), 200, 200),
    ],
)
def test_what_an_operator_touches_is_counted_and_nothing_else(operator, read, written):
    def work(group):
        operator(torch.empty(10, 20), torch.empty(3, dtype=torch.int64).zero_())

    (program,) = launch(work, 1, count=True).ledger.programs
    *_, last = [event for _, event in program if isinstance(event, Kernel)]
    assert last.nbytes == 4 * (read + written)


def test_inside_a_node_and_between_nodes():
    def pass_on(group):
        rank, x = group.rank(), torch.empty(1000)
        if rank > 0:
            recv(x, rank - 1, group)
        if rank < 3:
            send(x, rank + 1, group)

    run = launch(pass_on, 4, count=True)
    h100 = hardware("h100")
    near, far = h100.node_link("send").seconds(4000), h100.network_link().seconds(4000)
    assert replay(run, "h100").seconds == pytest.approx(3 * near)
    assert replay(run, "h100", nodes=2).seconds == pytest.approx(2 * near + far)
    assert replay(run, "h100", nodes=4).seconds == pytest.approx(3 * far)


def test_a_rank_waits_for_the_slower_one_and_that_is_exposed():
    def uneven(group):
        x = torch.ones(4)
        if group.rank() == 0:
            for _ in range(5):
                x = x + 1
            send(x, 1, group)
        else:
            recv(x, 0, group)

    run = launch(uneven, 2, count=True)
    played = replay(run, Stopwatch())  # 1 + 5 kernels, then 16 bytes
    assert played.seconds == 6 + 16
    waits = sorted((s.rank, s.start, s.end) for s in played.spans if s.kind == "wait")
    assert waits == [(0, 6, 22), (1, 1, 22)]  # An empty buffer costs nothing.
    assert played.exposed == (16 + 21) / 2


def test_overlapped_hides_what_bucketed_exposes():
    """The links are just fast enough to finish each bucket before the next is ready."""
    exposed, seconds = {}, {}
    for kind in ("bucketed", "overlapped", "ddp"):
        played = replay(launch(train, 2, (kind, 3), count=True), Stopwatch(byte=1e-4))
        exposed[kind], seconds[kind] = played.exposed, played.seconds
    gradients = 4 * sum(p.numel() for p in GPT(SMALL).parameters())
    assert exposed["bucketed"] == pytest.approx(1e-4 * gradients, rel=0.02)
    assert exposed["overlapped"] < 0.6 * exposed["bucketed"]
    assert exposed["ddp"] < 0.9 * exposed["bucketed"]
    assert seconds["overlapped"] < seconds["bucketed"]


def test_on_a_machine_without_network_cards_messages_take_the_cores_time():
    """Hidden messages cost core time; while all ranks wait for a message, core time is free."""
    for kind in ("bucketed", "overlapped", "ddp"):
        run = launch(train, 2, (kind, 2), count=True)
        cards, cores = (replay(run, Stopwatch(byte=1e-4, busy=busy)) for busy in (0.0, 0.01))
        longer = cores.seconds - cards.seconds
        assert longer == pytest.approx(0, abs=1e-9) if kind == "bucketed" else longer > 0.009


def test_the_hosts_time_is_noted_and_takes_its_turn_with_the_kernels():
    run = launch(train, 1, ("alone", 3), count=True)
    host = [event for _, event in run.ledger.programs[0] if isinstance(event, Host)]
    kernels = [event for _, event in run.ledger.programs[0] if isinstance(event, Kernel)]
    assert sum(event.operators for event in host) > len(kernels)  # views are also operators
    assert sum(event.seconds for event in host) > 0
    only_kernels, only_host, both = (
        replay(run, Stopwatch(kernel=kernel, host=host)).seconds
        for kernel, host in ((1.0, 0.0), (0.0, 0.5), (1.0, 0.5))
    )
    assert both == pytest.approx(only_kernels + only_host) and only_host > 0.5 * len(kernels) / 3


def test_what_was_overlapped_waits_where_it_is_used_even_on_slow_links():
    for kind in ("overlapped", "ddp"):
        run = launch(train, 2, (kind, 2), count=True)
        fast, slow = (replay(run, Stopwatch(byte=b)) for b in (0.0, 1.0))
        gradients = 4 * sum(p.numel() for p in GPT(SMALL).parameters())
        assert slow.seconds > gradients and slow.exposed > 0.9 * (slow.seconds - fast.seconds)


def test_steps_are_counted_and_a_later_one_is_taken():
    two, four = (replay(launch(train, 2, ("bucketed", n), count=True), "h100") for n in (2, 4))
    assert (len(two.steps), len(four.steps)) == (2, 4)
    assert four.seconds == pytest.approx(two.seconds, rel=1e-6)
    assert two.flops == four.flops
    assert two.mfu == pytest.approx(two.flops / (two.seconds * 2 * 989e12))


def test_steps_of_a_pipeline_are_found_though_its_phases_alternate():
    layout = Layout(pp=2, dp=2, zero=1, num_micro_batches=4)
    config = SMALL.replace(num_layers=4)

    def train(steps, group):
        made = parallelize(config, layout, group, lambda p: torch.optim.AdamW(p))
        for _ in range(steps):
            tokens = torch.randint(0, 256, (4, 33))
            made.step(tokens[:, :-1], tokens[:, 1:])

    two, three = (replay(launch(train, 4, (n,), count=True), "h100") for n in (2, 3))
    assert (len(two.steps), len(three.steps)) == (2, 3)
    scores = 8 * 32 * 32 * 64 * 2 * config.num_layers  # the recomputed scores, as above
    assert three.flops == step_flops(config, 8).total + scores
    assert three.steps[-1][1] - three.steps[-1][0] < 1.2 * two.steps[-1][1] / 2


# ---- this machine --------------------------------------------------------------------------------


def all_kinds(group):
    """Run every kind of communication that a ledger can record, twice, and a kernel."""
    part, whole = torch.ones(500), torch.ones(1000)
    for _ in range(2):
        all_reduce(whole * 2, group, algorithm="ring")
        dist.all_reduce(whole, group=group)
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.all_gather([part, part.clone()], part, group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.all_to_all_single(torch.empty(1000), whole, group=group)
        dist.broadcast(whole, 0, group=group)
        dist.reduce(whole, 0, group=group)
        dist.barrier(group=group)


def test_this_machines_rates_are_found_for_all_that_a_run_did():
    run = launch(all_kinds, 2, count=True)
    here = measure_here(run, repeats=2)
    whole = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
    assert set(here.communications) == {
        ("message", 2000), ("barrier", 0), *((op, 4000) for op in whole)
    }  # fmt: skip
    played = replay(run, here)
    assert played.seconds > 0 and played.total_bytes == run.ledger.total_bytes()
    kernels = {span.name for span in played.spans if span.kind == "stream"}
    assert "mul" in kernels and all(seconds > 0 for seconds in here.kernels.values())


def test_what_counting_took_is_taken_off_the_host():
    here = MeasuredMachine(kernels={}, communications={}, operator=2.0, event=3.0)
    assert here.host_seconds(Host(seconds=20.0, operators=4)) == 20 - 4 * 2 - 3
    assert here.host_seconds(Host(seconds=1.0, operators=4)) == 0


# ---- an emulated pipeline ------------------------------------------------------------------------


class StatedStage(EmulatedStage):
    """An emulated stage that does not sleep but notes how long it would have slept."""

    def __init__(self, *args, counter):
        super().__init__(*args)
        self.counter = counter

    def _run(self, kind, micro, ready=0.0):
        self.counter.note(Stated(kind, self.durations[self.stage, kind, micro]))
        return 0.0


def run_stated(schedule, times, group):
    device = EmulatedDevice(Clock())
    stages = {
        stage: StatedStage(stage, schedule, times, device, counter=group.recorder.counter)
        for stage in schedule.stages_of[group.rank()]
    }
    moment = torch.empty(1, dtype=torch.float64, device="meta")
    pipeline = Pipeline(schedule, stages, group, activation=moment)
    pipeline.step([torch.zeros(1)] * schedule.num_micro_batches)


class Hops(Stopwatch):
    """Activations (here one float64, `moment`) take `comm` seconds; other messages take no time."""

    def __init__(self, comm):
        super().__init__(kernel=0.0, byte=0.0)
        self.comm = comm

    def message_seconds(self, nbytes, source, target):
        return self.comm if nbytes == 8 else 0.0


@pytest.mark.parametrize("comm", [0.0, 0.25])
@pytest.mark.parametrize(
    "name, options", [("gpipe", {}), ("1f1b", {}), ("interleaved", {"chunks": 2}), ("zb_h1", {})]
)
def test_an_emulated_pipeline_has_the_simulators_bubble(name, options, comm):
    schedule = build(name, 4, 8, **options)
    times = Times(forward=1.0, backward=1.0, weight=1.0, comm=comm)
    played = replay(launch(run_stated, 4, (schedule, times), count=True), Hops(comm))
    timeline = simulate(schedule, times)
    assert played.seconds == pytest.approx(timeline.makespan)
    busy = sum(span.end - span.start for span in played.spans if span.kind == "stated")
    assert 1 - busy / (4 * played.seconds) == pytest.approx(timeline.bubble)


# ---- how it is shown -----------------------------------------------------------------------------


def test_elsewhere_is_three_machines_and_the_worse_network_is_slower():
    table = elsewhere(launch(train, 2, ("bucketed", 2), count=True))
    machines = [row[0] for row in table.rows]
    assert machines == [
        "2 x H100 SXM",
        "2 x H100 SXM on 2 nodes",
        "2 x A100 SXM 80GB on 2 nodes, 10 Gb/s",
    ]
    assert "this program elsewhere" in repr(table)


def test_the_timeline_shows_every_rank():
    played = replay(launch(train, 2, ("bucketed", 2), count=True), "h100")
    picture = played.timeline()
    (panel,) = picture.panels
    assert panel.yticks == {0: "rank 0", 1: "rank 1"} and len(panel.marks) > 4
    assert "H100" in repr(played) and "<table>" in played._repr_html_()
