"""Compare overlapped offload with its bound, the calculator, and FSDP2's CPUOffloadPolicy.

Rows "emulated step": one step of a GPT on one rank with ZeRO-3, on devices that compute LAYER
seconds per layer, over a link of the stated bandwidth, in virtual time (the same on every machine).
Ours uses lanes. Theirs is the bound: the larger of the computing time and the time of the busiest
lane. "in order" is the same program without lanes, with no bar.
"against the bound with ends": the same step. Theirs is computing plus what this schedule leaves
exposed at its ends, from `ends` (a formula with no fitted constant): the last gradients' way out,
the first units' step and their way back. The ends do not grow with the number of layers, so their
share is ends / (3 ms * layers) of a step.
"against any schedule": theirs is computing plus the part that no schedule of whole units can hide,
from `no_less`. With 16 blocks as units this part alone is 5 % at 250 MB/s and 6 % at 200 MB/s, so
the rows of blocks have no bar there. Smaller units have smaller ends. "halves" makes attention and
MLP separate units and gathers two of them ahead; that holds fewer bytes than two blocks. (With one
ahead the smaller unit cannot hide the larger one: 1.15 at 200 MB/s.) With 64 layers, blocks do as
well.
"against the bound of each pass": at 150 MB/s a block's parameters need 1.33 ms and its forward
takes 1 ms. Both passes together are longer than the transfers, but forward cannot use backward's
time, because the parameters that it needs are stepped after backward. So 64 layers miss 1.05 of the
whole step's bound: they reach 1.14; with two ahead 1.13, one step late 1.13, both 1.13, halves 1.20
(two ahead). To be within 1.05, 12 of the 64 blocks would have to stay on the device from one step
to the next, which means borrowing less. Theirs is the longer of computing and parameter transfer in
each pass, from `of_passes`. At 100 MB/s the link is the bound in both passes, and 64 layers hide
the computing.
"files": states in files, or everything in files, on a disk as fast as the link, in time or one step
late. In time has no bar: a step ends when everything is written, and the bound does not include
that. One step late hides the writing. At 1,000 MB/s with everything in files it reaches 1.07,
because forward's parameters come through the same lane as the states of the running update (with
all its reads started at once: 1.32).
Rows "bytes" and "held": the bytes moved, and the peak of gathered parameters and of gradients on
the device, compared with the lines of `calculators.peak_memory` for them.
Rows "peak": the peak of device and host over two whole steps, from every allocation and release of
a tensor, compared with the calculator (device and host are the same memory here; offload/sides.py
tells them apart). A difference of 1 % in either direction is a failure.
Rows "fragments": the share that the toy allocator reserves beyond the memory in use when it replays
recorded training steps of one length, compared with the share that the calculator assumes for all
frameworks (FRAGMENTATION). With a GPU, PyTorch's own allocator gets the same requests.
Rows "CPU Adam": the calculator's times compared with published times. The calculator was chosen on
the larger two; for the smallest it says 16 % too much. The bar holds for all three.
Rows "step": real threads on this machine, against FSDP2 with CPUOffloadPolicy, in turn in the same
processes. (Device and host are the same memory here, so both sides copy without need.) The rows
give medians of the slowest rank, and the processor time of all ranks, which a busy machine disturbs
less.
"""

import sys
import tempfile

import torch
from _form import Case, in_turn, main, of_all_ranks, step_cases

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators import framework, host_memory, num_parameters, peak_memory
from mini_dist.plan.calculators.frameworks import FRAGMENTATION
from mini_dist.plan.calculators.links import Link
from mini_dist.plan.calculators.offload import CPU_ADAM, cpu_adam_seconds
from mini_dist.plan.config import Layout
from mini_dist.strategies.offload import EmulatedLanes, Lanes, OverlappedOffload, Sides, requests
from mini_dist.strategies.offload.allocator import lost, on_a_gpu
from mini_dist.strategies.zero import ZeRO3

RANKS = 2
CONFIG = ModelConfig(num_layers=16, d_model=64, num_heads=4, seq_len=32)
REAL = ModelConfig(num_layers=4, d_model=256)
FRAGMENTED = ModelConfig(num_layers=4, d_model=512, num_heads=8)
LAYER = 0.001, 0.002
LATENCY = 1e-5
MANY = 64  # layers
MEGABYTES = 30_000, 10_000, 3_000, 1_000, 300, 100  # per second
ENDS_TELL = 250, 200  # where the ends of blocks are more than 5 % of 16 layers
DEEP_ONLY = 150, 100  # where a block's parameters need longer than its forward
STEPS = 4
AWAY = dict(offload_optimizer=True, offload_gradients=True, offload_parameters=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def step_of(config, model, optimizer_step, zero_grad, group, sequences=2):
    generator = torch.Generator().manual_seed(group.rank())
    tokens = torch.randint(
        0, config.vocab_size, (sequences, config.seq_len + 1), generator=generator
    )

    def step():
        token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean().backward()
        optimizer_step()
        zero_grad()

    return step


def halves_of(gpt):
    return [half for block in gpt.blocks for half in (block.attn, block.ffn)]


def computes(lanes, parts):
    """Divide a block's LAYER seconds among its parts in proportion to their matrices."""
    elements = [sum(p.numel() for p in part.parameters()) for part in parts]
    for part, own in zip(parts, elements):
        share = own / (elements[0] + elements[1])
        lanes.computes([part], *(share * seconds for seconds in LAYER))


def emulated(megabytes, in_order, options, layers, halves, group):
    """Return the ms of a step, and each lane's part of it."""
    link = Link(LATENCY, 1e6 * megabytes)
    host = Link(0.0, 1e7 * megabytes)
    speeds = {"to_host": link, "to_device": link, "host": host, "read": link, "write": link}
    lanes = EmulatedLanes(speeds, in_order)
    config = CONFIG.replace(num_layers=layers)
    gpt = GPT(config)
    units, ahead = (halves_of(gpt), 2) if halves else (gpt.blocks, 1)
    if halves:
        computes(lanes, units)
    else:
        lanes.computes(units, *LAYER)
    units, offload = (gpt.embed, *units, gpt.head), OverlappedOffload(lanes, **options)
    model = ZeRO3(gpt, group, adamw, units=units, offload=offload, prefetch=ahead)
    step, overs = step_of(config, model, model.step, model.zero_grad, group), []
    for _ in range(STEPS):
        step()
        overs.append(lanes.now)
    busy = {}
    for span in lanes.log:
        busy[span.lane] = busy.get(span.lane, 0.0) + (span.end - span.start) / STEPS
    return 1e3 * (overs[-1] - overs[0]) / (STEPS - 1), {lane: 1e3 * s for lane, s in busy.items()}


def of_units(config):
    """Return the bytes of a block, of the embedding, and of the head."""
    gpt = GPT(config)
    return [
        4 * sum(p.numel() for p in m.parameters()) for m in (gpt.blocks[0], gpt.embed, gpt.head)
    ]


def of_passes(megabytes, layers):
    """Return the ms of computing, or of transfers if a block's parameters need longer than it
    computes."""
    comes = LATENCY + of_units(CONFIG)[0] / (1e6 * megabytes)
    return 1e3 * layers * sum(max(seconds, comes) for seconds in LAYER)


def no_less(megabytes):
    """Return the ms of a step that no schedule of whole units hides.

    The first block's gradients are the last ones made, and its parameters are among the first ones
    used. In between, the gradients go to the host, are added (2 times their bytes pass) and stepped
    (7 times), and the parameters come back.
    """
    link, host = 1e6 * megabytes, 1e7 * megabytes
    block, _, _ = of_units(CONFIG)
    return 1e3 * (2 * (LATENCY + block / link) + 9 * block / host)


def ends(megabytes, early):
    """Return the ms of a step in which this schedule lets the device wait although the link is fast
    enough.

    After backward the first block's and the embedding's gradients leave, and the host adds both (2
    times their bytes pass). It steps the embedding (7 times), which comes back, and then the first
    block. Early, it steps the block as soon as its gradients have arrived.
    """
    link, host, a = 1e6 * megabytes, 1e7 * megabytes, LATENCY
    block, embedding, _ = of_units(CONFIG)
    arrived = a + block / link, a + (block + embedding) / link
    host_is_free = arrived[0] + (9 if early else 2) * block / host
    stepped = max(arrived[1], host_is_free) + 9 * embedding / host
    block_is_stepped = host_is_free if early else stepped + 7 * block / host
    block_may_come = max(stepped + a + embedding / link, block_is_stepped)
    return 1e3 * (block_may_come + a + block / link)


def ours(group):
    gpt = GPT(REAL)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=OverlappedOffload(Lanes()))
    return step_of(REAL, model, model.step, model.zero_grad, group)


def theirs(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    gpt, mesh = GPT(REAL), init_device_mesh("cpu", (group.size(),))
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = adamw(gpt.parameters())
    return step_of(REAL, gpt, optimizer.step, optimizer.zero_grad, group)


def both_in_turn(rounds, group):
    steps = [make(group) for make in (ours, theirs)]
    for step in steps:
        for _ in range(3):
            step()
    return in_turn(*steps, rounds, group)


def counted(group):
    """Return the peak bytes of parameters and of gradients, and the bytes of each unit."""
    gpt = GPT(CONFIG)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=OverlappedOffload(EmulatedLanes({})))
    most = 0

    def look(*_):
        nonlocal most
        most = max(most, sum(unit.flat.untyped_storage().nbytes() for unit in model.units))

    for block in gpt.blocks:
        block.register_forward_pre_hook(look)
    step = step_of(CONFIG, model, model.step, model.zero_grad, group)
    add, gradients = model.tier.add_gradient, []

    def look_at_gradients(shard, part):
        leaving = sum(each.nbytes for _, each in model.tier.gradients.leaving)
        gradients.append(part.nbytes + leaving)
        add(shard, part)

    model.tier.add_gradient = look_at_gradients
    step()
    return most, max(gradients), [unit.flat.nbytes for unit in model.units]


def whole_steps(config, sequences, group):
    """Return the peak bytes of device and host in two steps, with blocks and a root as units."""
    gpt, lanes = GPT(config), Sides({}, group)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=OverlappedOffload(lanes))
    step = step_of(config, model, model.step, model.zero_grad, group, sequences)
    for _ in range(2):
        step()
    return lanes.peaks()


def peaks():
    how = framework("course").replace(**AWAY)
    for what, config, sequences in (
        ("the loss is the fullest", CONFIG, 2),
        ("gradients are", REAL, 1),
    ):
        found = launch(whole_steps, 1, (config, sequences), memory=True).results[0]
        layout = Layout(zero=3, micro_batch_size=sequences)
        said = {
            "device": peak_memory(config, layout, how).total,
            "host": host_memory(config, layout, how).total,
        }
        for side, nbytes in found.items():
            assert said[side] <= 1.01 * nbytes, (what, side, said[side], nbytes)
            yield given(f"peak, {side}, where {what}", nbytes / 1e6, said[side] / 1e6, "MB", 1.01)


def three_steps(group):
    """Run three steps of equal length on one device, as in most trainings, without offload."""
    gpt = GPT(FRAGMENTED)
    optimizer = adamw(gpt.parameters())
    step = step_of(FRAGMENTED, gpt, optimizer.step, optimizer.zero_grad, group, sequences=8)
    for _ in range(3):
        step()


def fragments():
    asked = requests(launch(three_steps, 1, memory=True).ledger.memory[0])
    assumed = 100 * FRAGMENTATION
    for name, expandable in (("segments", False), ("expandable segments", True)):
        found = 100 * lost(asked, expandable=expandable)
        yield given(f"fragments, {name}, against the assumed share", found, assumed, "%")
    if torch.cuda.is_available():
        held, reserved = map(max, zip(*on_a_gpu(asked)))
        found = 100 * (reserved / held - 1)
        name = "fragments, PyTorch's allocator, against the assumed share"
        yield given(name, found, assumed, "%")


def adam():
    for parameters, published in CPU_ADAM:
        title = f"CPU Adam, {parameters / 1e9:.0f} billion on a DGX-2"
        yield given(title, cpu_adam_seconds("dgx-2", parameters), published, "s", 1.2)


def given(name, ours, theirs, unit, bar=None):
    return Case(name, lambda: ours, theirs, bar=bar, unit=unit, repeats=1, warmup=0)


def steps(megabytes, name, in_order=False, early=False, layers=CONFIG.num_layers, halves=False):
    options = {"early": early}
    work = (megabytes, in_order, options, layers, halves)
    taken, busy = launch(emulated, 1, work).results[0]
    lane = max(busy, key=busy.get)
    title = f"emulated step, {megabytes:,} MB/s, {name}"
    passes = of_passes(megabytes, layers)
    hides = passes <= 1.02 * busy[lane]  # Otherwise a pass is longer than its part of the bound.
    deep = halves or layers == MANY or megabytes not in (*ENDS_TELL, *DEEP_ONLY)
    bar = 1.05 if hides and deep and not in_order else None
    yield given(f"{title} (bound: {lane})", taken, busy[lane], "ms", bar)
    if in_order or halves or lane != "device":
        return
    with_ends = passes + ends(megabytes, early)
    yield given(f"{title}, against the bound with ends", taken, with_ends, "ms", 1.001)
    if hides:
        least, bar = passes + no_less(megabytes), 1.02 if deep else None
        yield given(f"{title}, against any schedule", taken, least, "ms", bar)
    else:
        yield given(f"{title}, against the bound of each pass", taken, passes, "ms", 1.05)


def through_files(megabytes):
    everything = {"parameters_too": True, "gradients_too": True}
    for name, options in (
        ("states, in time", {}),
        ("states, one step late", {"delayed": True}),
        ("everything, in time", everything),
        ("everything, one step late", {"delayed": True, **everything}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            options = {"folder": folder, **options}
            work = (megabytes, False, options, CONFIG.num_layers, False)
            taken, busy = launch(emulated, 1, work).results[0]
        lane = max(busy, key=busy.get)
        title = f"emulated step, {megabytes:,} MB/s, files, {name} (bound: {lane})"
        hides = "delayed" in options and ("parameters_too" not in options or megabytes > 1_000)
        yield given(title, taken, busy[lane], "ms", 1.05 if hides else None)


def cases(long):
    for megabytes in MEGABYTES:
        yield from steps(megabytes, "with lanes")
        yield from steps(megabytes, "early", early=True)
        yield from steps(megabytes, "in order", in_order=True)
    for megabytes in ENDS_TELL:
        yield from steps(megabytes, "with lanes")
    for megabytes in (300, *ENDS_TELL):
        yield from steps(megabytes, "with lanes, halves", halves=True)
    for megabytes in (*ENDS_TELL, *DEEP_ONLY):
        yield from steps(megabytes, f"with lanes, {MANY} layers", layers=MANY)
    for megabytes in (10_000, 1_000):
        yield from through_files(megabytes)
    run = launch(counted, 1)
    most, gradients, (root, *blocks) = run.results[0]
    twice = sum(blocks[:-2])  # The last two stay on the device from forward to backward.
    for op, expected in (
        ("to_host_", root + sum(blocks)),
        ("to_device_", root + sum(blocks) + twice),
    ):
        moved = sum(comm.nbytes for comm in run.ledger.calls(op=op)) / 1e6
        yield given(f"bytes, {op}", moved, expected / 1e6, "MB", 1.0)
    assert root + sum(blocks) == 4 * num_parameters(CONFIG)
    floats = dict(activation_bytes=4, parameter_bytes=4, gradient_bytes=4)
    how = framework("megatron-core").replace(**floats, **AWAY)
    lines = peak_memory(CONFIG, Layout(zero=3), how)
    for name, held, line in (
        ("parameters", most, "unsharded parameters"),
        ("gradients", gradients, "gradients on their way"),
    ):
        yield given(f"held, {name}", held / 1e6, lines[line] / 1e6, "MB", 1.01)
    yield from peaks()
    yield from fragments()
    yield from adam()
    results = launch(both_in_turn, RANKS, (60 if long else 25,), timeout=600).results
    yield from step_cases("step", of_all_ranks(results), 1.0)
    yield from step_cases("step, CPU of all", of_all_ranks(results, sum, 1), 1.0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
