"""Compare our pipelines with torch.distributed.pipelining, and real clocks with the simulator.

Rows "step": one training step of the same GPT in the same stages on 4 ranks. Both take turns in the
same processes, so that other work on the machine affects both.
Rows "memory": the peak of bytes allocated during the first two steps (activations, receive buffers,
temporaries; not parameters and gradients), on the rank that needs most.
Rows "bubble": the largest difference, in percentage points, between the simulated bubble and one
measured with emulated devices; half a point is allowed. --long takes every m of 1...16 that the
schedule accepts.
Every run compares the losses of both sides.
"""

import sys

import torch
from _form import Case, in_turn, main, of_all_ranks, peak_allocated, step_cases

from mini_dist import launch
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import ModelConfig
from mini_dist.plan.schedule import SCHEDULES, ScheduleError, Timeline, Times, build, simulate
from mini_dist.strategies.pipeline import Pipeline, cut_gpt, run_emulated

RANKS, MICRO_BATCHES = 4, 8
CONFIG = ModelConfig(num_layers=8, d_model=128)
BATCH = 8  # sequences
BESIDE = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
}


def loss_fn(logits, targets):
    return token_loss(logits, targets).mean()


def data():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def our_step(schedule, modules, group):
    shape = (BATCH // MICRO_BATCHES, CONFIG.seq_len, CONFIG.d_model)
    activation = torch.empty(shape, device="meta")
    pipeline = Pipeline(schedule, modules, group, loss_fn=loss_fn, activation=activation)
    inputs, targets = data()
    return lambda: pipeline.step(inputs, targets).item()


def their_step(schedule, modules, group):
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    stages = [
        pipelining.PipelineStage(module, i, schedule.num_stages, torch.device("cpu"), group=group)
        for i, module in modules.items()
    ]
    kind = getattr(schedules, BESIDE[schedule_name(schedule)])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    runner = kind(stages[0] if single else stages, MICRO_BATCHES, loss_fn=loss_fn)
    inputs, targets = data()
    is_last = schedule.num_stages - 1 in modules

    def step():
        losses = []
        runner.step(
            *([inputs] if 0 in modules else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
        )
        return torch.stack(losses).mean().item() if is_last else None

    return step


def schedule_name(schedule):
    return next(name for name in BESIDE if build(name, RANKS, MICRO_BATCHES) == schedule)


def both_on_a_rank(name, rounds, group):
    """Run both steps in turn in the same processes; return medians of the slowest rank in ms."""
    schedule = build(name, RANKS, MICRO_BATCHES)
    steps, parameters = {}, {}
    for whose, make_step in (("ours", our_step), ("theirs", their_step)):
        modules = cut_gpt(CONFIG, schedule.stages_of[group.rank()], schedule.num_stages)
        parameters[whose] = [p for module in modules.values() for p in module.parameters()]
        steps[whose] = make_step(schedule, modules, group)
    ours, theirs = (step() for step in steps.values())  # the first step sets things up: not timed
    if theirs is not None:
        assert abs(ours - theirs) < 1e-5, (ours, theirs)

    def zero_gradients(whose):
        for parameter in parameters[whose]:
            parameter.grad.zero_()

    return in_turn(*steps.values(), rounds, group, zero_gradients)


def step_times(name, rounds):
    """Return the ms of each side."""
    return of_all_ranks(
        launch(both_on_a_rank, RANKS, args=(name, rounds), timeout=600, quiet=True).results
    )


def peak_on_a_rank(make_step, name, group):
    """Return the peak of bytes allocated in a first and a second step."""
    schedule = build(name, RANKS, MICRO_BATCHES)
    modules = cut_gpt(CONFIG, schedule.stages_of[group.rank()], schedule.num_stages)
    for module in modules.values():
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def make_and_train():
        step = make_step(schedule, modules, group)
        step()
        step()

    return peak_allocated(make_and_train) / 2**20


def peaks(make_step, name):
    run = launch(peak_on_a_rank, RANKS, args=(make_step, name), timeout=300, quiet=True)
    return run.results


def difference(name, p, m, unit=0.005, tries=8):
    """Return the points between the wall clock's bubble and the simulator's, the best of some
    tries, or None if the schedule does not take m.

    A try fails if the machine has no free core for some milliseconds just at the end.
    """
    times = Times(forward=unit, backward=1.2 * unit, weight=0.8 * unit, comm=0.1 * unit)
    options = {"micro_batches_a_step": p} if name == "pipedream_2bw" else {}
    try:
        schedule = build(name, p, m, **options)
    except ScheduleError:
        return None
    expected, best = simulate(schedule, times).bubble, float("inf")
    for _ in range(tries):
        ran = launch(run_emulated, p, args=(schedule, times), quiet=True)
        measured = Timeline.of_run(schedule, ran.results).bubble
        best = min(best, 100 * abs(measured - expected))
        if best < 0.25:
            break
    return best


def cases(long):
    for name in BESIDE:
        times = step_times(name, rounds=100 if long else 40)
        yield from step_cases(f"step, {name}, {RANKS} ranks, m={MICRO_BATCHES}", times, 1.0)
    for name in BESIDE:
        ours, theirs = max(peaks(our_step, name)), max(peaks(their_step, name))
        yield given(f"memory, {name}, {RANKS} ranks, m={MICRO_BATCHES}", ours, theirs, "MiB")
    for p in (4, 8):
        for name in SCHEDULES:
            accepted = {}
            for m in range(1, 17) if long else (1, 8, 16):
                points = difference(name, p, m)
                if points is not None:
                    accepted[m] = points
            sizes = ranges(sorted(accepted))
            worst = max(accepted.values())
            yield given(f"bubble, {name}, {p} ranks, m = {sizes}", worst, 0.5, "points")


def ranges(numbers):
    """Format [1, 2, 3, 8] as '1-3 8'."""
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def given(name, ours, theirs, unit):
    """Return a row whose two figures were measured together."""
    return Case(name, lambda: ours, theirs, bar=1.0, unit=unit, repeats=1, warmup=0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
