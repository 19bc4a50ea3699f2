"""The executor on emulated devices: a schedule's timeline, measured by the wall clock."""

from __future__ import annotations

import torch

from mini_dist.collectives.emulate import Clock, EmulatedDevice, EmulatedStage, wall_spans
from mini_dist.plan.schedule import Schedule, Span, Times

from .execute import Pipeline


def run_emulated(schedule: Schedule, times: Times, group) -> list[Span]:
    """Run a schedule with durations from `times` (seconds); return this rank's spans of work.

        run = launch(run_emulated, schedule.num_ranks, args=(schedule, times))
        timeline = Timeline.of_run(schedule, run.results)

    Durations from a few milliseconds on are kept accurately, whatever else the machine does.
    """
    return wall_spans(emulate(schedule, times, group))


def emulate(schedule: Schedule, times: Times, group) -> EmulatedDevice:
    """Run a schedule; return the device, which has the virtual and real times of all its work."""
    clock = Clock()
    device = EmulatedDevice(clock)
    stages = {
        stage: EmulatedStage(stage, schedule, times, device)
        for stage in schedule.stages_of[group.rank()]
    }
    moment = torch.empty(1, dtype=torch.float64, device="meta")
    pipeline = Pipeline(schedule, stages, group, activation=moment)
    clock.start(group)
    pipeline.step([torch.zeros(1)] * schedule.num_micro_batches)
    return device
