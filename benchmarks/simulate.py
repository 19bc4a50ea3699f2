"""Compare simulated steps with the planner's and with published ones, and measure their cost.

    python benchmarks/simulate.py [--json FILE] [--long]

The simulated function is ours: a GPT sharded by `parallelize`, in bf16, with unfused kernels, and
with tp's collectives not overlapped. The published runs are Megatron-LM's, which fuses norms,
activations, rotary positions and the optimizer, and hides some of tp's collectives behind matrix
products. In 2021 and 2022 its attention wrote all scores to memory. Ours does not, so those rows
say less. The simulation has no constants of its own, so none was chosen on these rows.

The tables come first: seconds simulated, planned, published. Then come the rows with bars, in
seconds of the whole call of `launch` on this machine.
"""

import random
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from _form import Case, main

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mini_dist import launch, parallelize
from mini_dist.plan.calculators import framework, hardware, model, peak_memory
from mini_dist.plan.calculators.published import korthikanti_2022, megatron_2021
from mini_dist.plan.calculators.step_time import step_time
from mini_dist.plan.config import Layout
from mini_dist.ranks.ledger.counting import Kernel
from mini_dist.ranks.simulation.calculated import CalculatedMachine
from mini_dist.ranks.simulation.player import begins

LLAMA_70B = Layout(
    pp=8, dp=16, tp=8, sequence_parallel=True, zero=1,
    num_micro_batches=16, schedule="interleaved", num_chunks=2,
)  # fmt: skip


def train(config, layout, steps, group):
    """Train our GPT on all axes for some steps, everything in bf16."""
    torch.set_default_dtype(torch.bfloat16)
    model = parallelize(config, layout, group, lambda tensors: torch.optim.AdamW(tensors))
    rows = layout.micro_batch_size * layout.num_micro_batches
    tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64, device=group.device)
    for _ in range(steps):
        model.step(tokens, tokens, max_norm=1.0)


def simulated(config, layout, machine, steps=1):
    """Simulate these steps. With several, `step_seconds` leaves out the first, in which the
    optimizer makes its states."""
    args, how = (config, layout, steps), {"ranks": "kinds", "timeout": 3600}
    return launch(train, layout.world_size, args, simulate=machine, **how)


def cpu_seconds(run) -> float:
    """CPU seconds of all ranks that ran."""
    return sum(cost.seconds for cost in run.costs)


# -- tables -------------------------------------------------------------------------------------


def published(long: bool):
    """Published runs of the sizes that a short benchmark affords; with `long`, all of them."""
    runs = [*korthikanti_2022(), *megatron_2021(), *simumax()]
    return [run for run in runs if long or work(run.config, run.layout) < 200]


def work(config, layout) -> int:
    """Layers times micro-batches that a rank goes through."""
    return config.num_layers // layout.pp * layout.num_micro_batches


def simumax():
    from planner import REFERENCE
    from planner import simumax as runs

    return [run for run, *_ in runs()] if REFERENCE.exists() else []


def compare(run) -> tuple[float, float]:
    """Print simulated, planned and published seconds of a step; return the first two."""
    config = run.config.replace(dropout=0.0)
    ours = simulated(config, run.layout, run.machine)
    planned = step_time(run.config, run.layout, run.machine, run.how).seconds
    seconds = ours.step_seconds
    print(
        f"{run.name:44} {seconds:8.3f} {seconds / run.seconds - 1:+7.1%} "
        f"{planned:8.3f} {planned / run.seconds - 1:+7.1%} {run.seconds:8.3f}"
        f" {cpu_seconds(ours):7.1f} {len(ours.costs):4}",
        flush=True,
    )
    return seconds, planned


def random_layouts(number: int):
    """Layouts of Llama 3 8B and 70B, drawn at random among those that fit the model."""
    draw = random.Random("simulate")
    while number:
        name = draw.choice(["llama3-8b", "llama3-70b"])
        pp, tp, dp = draw.choice([1, 2, 4]), draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 8, 32])
        layout = Layout(
            pp=pp, tp=tp, dp=dp, sequence_parallel=tp > 1,
            zero=draw.choice([0, 1]) if pp > 1 else draw.choice([0, 1, 3]),
            num_micro_batches=pp * draw.choice([1, 2]), recompute=draw.choice(["none", "full"]),
        )  # fmt: skip
        config = model(name).replace(num_layers=4 * pp, seq_len=4096)
        number -= 1
        yield name, config, layout


# The planner's framework for the program that is simulated. Its bytes are counted in the operators
# of one step: AdamW and clipping move 62 bytes per parameter (12 of them are the planner's own
# pass), and the loss 36 per logit.
EAGER = framework("fsdp").replace(
    name="ours", parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, around_step=50,
    loss_traffic=36, host_seconds=0, flash_2=False, copies_units=False, overlaps_parameters=False,
)  # fmt: skip
# Its memory is that of our program, in bf16. The simulated norm is one kernel, as on a GPU, which
# keeps what layer_norm's keeps; torch's for CPUs keeps the normalized inputs as well.
OURS = framework("course").replace(
    name="ours in bf16", parameter_bytes=2, gradient_bytes=2, optimizer_bytes=4, activation_bytes=2
)  # fmt: skip
WHY = {
    "attention": "the same kernel",
    "matrix products": "q, k, v, gate and up are five products here, and two in the planner",
    "optimizer": "the planner zeroes gradients; ours are freed",
    "other kernels": "81 elementwise kernels per layer, not 22; gradients added and put in buckets",
    "waiting for messages": "ZeRO-1 hides none of its gradients; embedding and head send, too",
}


def parts_of(run, planned, config, layout) -> dict[str, tuple[float, float]]:
    """Seconds of a step of rank 0 by part: (simulated, planned)."""
    h100 = CalculatedMachine(hardware("h100"))
    events = [event for _, event in run.ledger.programs[0]]
    last = max(place for place, begun in enumerate(begins(events)) if begun)
    ours = defaultdict(float)
    for event in events[last:]:
        if isinstance(event, Kernel):
            ours["step" if event.phase == "step" else event.kind] += h100.kernel_seconds(event)
    lines = defaultdict(float, {line.name: line.value for line in planned.breakdown})
    tokens = config.seq_len * layout.micro_batch_size * layout.num_micro_batches
    logits = tokens * config.vocab_size / layout.tp
    loss = EAGER.loss_traffic * logits / h100.machine.device.stream_bandwidth
    theirs = {
        "attention": (ours["attention"], lines["attention"]),
        "matrix products": (ours["product"], lines["matrices"] + lines["head and loss"] - loss),
        "optimizer": (ours["step"], lines["optimizer"]),
        "other kernels": (ours["stream"], lines["elementwise"] + loss),
    }
    known = [sum(side) for side in zip(*theirs.values())]
    waits = run.step_seconds - known[0], planned.seconds - known[1]
    return theirs | {"waiting for messages": waits}


def bytes_in_steps(run) -> int:
    """The most that a rank holds in a step. (Before, it makes its stage whole, then cuts it.)"""
    phases = ("forward", "backward", "step")
    return max(rank.peak_bytes(phase) for rank in run.ledger.memory for phase in phases)


def tables(long: bool) -> None:
    head = f"{'published':44} {'simulated':>8} {'':7} {'planner':>7} {'':7} {'measured':>8}"
    print(head + f" {'CPU s':>7} {'ran':>4}")
    errors = defaultdict(list)  # theirs has fused attention, as ours has -> errors
    for run in published(long):
        pair = compare(run)
        fused = framework(run.how).flash_attention
        errors[fused].append([abs(each / run.seconds - 1) for each in pair])
    for fused, rows in errors.items():
        for name, each in zip(("simulated", "planner"), zip(*rows)):
            which = "fused attention, as ours" if fused else "attention that makes scores"
            print(f"{len(rows)} rows with {which}: mean error, {name}: {statistics.mean(each):.1%}")
    print("\nrandom layouts of Llama 3, 4 layers per stage: simulated, planner for our program")
    parts, off = defaultdict(list), defaultdict(list)
    for name, config, layout in random_layouts(200 if long else 6):
        run = simulated(config, layout, "h100", steps=2)
        planned = step_time(config, layout, "h100", EAGER)
        ours, theirs = run.step_seconds, planned.seconds
        held = bytes_in_steps(run)
        known = peak_memory(config.replace(norm="layernorm"), layout, OURS).total
        off["time"].append(ours / theirs - 1)
        off["memory"].append(held / known - 1)
        axes = " ".join(f"{axis} {size}" for axis, size in layout.axes.items())
        print(f"{name:11} {axes} zero {layout.zero} {layout.recompute:5} "
              f"{ours:8.3f} s {theirs:8.3f} {ours / theirs - 1:+7.1%} "
              f"{held / 1e9:7.2f} GB {known / 1e9:7.2f} {held / known - 1:+8.2%}",
              flush=True)  # fmt: skip
        if layout.pp == 1 and layout.recompute == "none":
            for part, pair in parts_of(run, planned, config, layout).items():
                parts[part].append((*pair, theirs))
    for what, all_of_them in off.items():
        close = sum(abs(each) <= 0.05 for each in all_of_them)
        print(f"{what}: mean {statistics.mean(all_of_them):+.2%}, {min(all_of_them):+.2%} to "
              f"{max(all_of_them):+.2%}, {close} of {len(all_of_them)} within 5 %")  # fmt: skip
    print(f"\nwithout pipeline and recomputation, {len(parts['attention'])} layouts:")
    print(f"{'part':24} {'simulated / planned':>19} {'of the step':>12}")
    for part, rows in parts.items():
        ours, theirs, whole = map(sum, zip(*rows))
        ratio = f"{ours / theirs:.3f}" if theirs else "-"
        print(f"{part:24} {ratio:>19} {(ours - theirs) / whole:>+12.1%}  {WHY[part]}")


def curve():
    """Four layers of 8B, tp 8, on more and more replicas."""
    config = model("llama3-8b").replace(num_layers=4)
    for dp in (1, 8, 64, 512, 4096, 12_288):
        run = simulated(config, Layout(tp=8, dp=dp, sequence_parallel=True, zero=1), "h100")
        most = max(cost.resident_bytes for cost in run.costs) / 1e9
        cost = (
            f"{cpu_seconds(run):6.1f} CPU s, {len(run.costs)} ranks run, {most:.2f} GB per process"
        )
        print(f"{8 * dp:7,} ranks: {cost}, a step of {run.step_seconds:.3f} s", flush=True)


def cases(long: bool):
    tables(long)
    print()
    curve()
    print()
    jobs = {
        "8B on 64, FSDP": (model("llama3-8b"), Layout(dp=64, zero=3), 5),
        "70B on 1,024": (model("llama3-70b"), LLAMA_70B, 20),
    }
    if long:
        wide = Layout(
            pp=16, dp=128, tp=8, sequence_parallel=True, zero=1,
            num_micro_batches=16, schedule="interleaved", num_chunks=4,
        )  # fmt: skip
        jobs["405B on 16,384"] = (model("llama3-405b"), wide, 60)
    for name, (config, layout, seconds) in jobs.items():
        began = time.perf_counter()
        run = simulated(config, layout, "h100")
        took = time.perf_counter() - began
        print(run.title(), f"a step of {run.step_seconds:.3f} s;",
              f"planner {step_time(config, layout).seconds:.3f} s;",
              f"{cpu_seconds(run):.1f} CPU s", flush=True)  # fmt: skip
        most = max(cost.resident_bytes for cost in run.costs) / 1e9
        yield Case(f"{name}: seconds", lambda took=took: took, seconds, 1.0, "s", 1, 0)
        yield Case(f"{name}: GB per process", lambda most=most: most, 2, 1.0, "GB", 1, 0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
