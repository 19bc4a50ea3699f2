"""Emulated devices: virtual times are exact, and ranks really sleep until them."""

import time

import pytest
import torch

from mini_dist import launch
from mini_dist.collectives.emulate import Clock, EmulatedAllReduce, EmulatedDevice, EmulatedLink
from mini_dist.plan.calculators import links
from mini_dist.plan.schedule import (
    ScheduleError,
    Timeline,
    Times,
    dualpipe_v,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)
from mini_dist.strategies.pipeline import run_emulated
from mini_dist.strategies.pipeline.emulated import emulate


def test_a_device_does_one_thing_at_a_time_and_waits_for_its_inputs():
    device = EmulatedDevice(Clock())
    assert device.run(0.002) == 0.002
    assert device.run(0.002) == 0.004  # starts when the device is free
    assert device.run(0.002, ready=0.010) == 0.012  # starts when the input is ready
    assert [(d.start, d.end) for d in device.done] == [(0, 0.002), (0.002, 0.004), (0.010, 0.012)]


def test_a_device_sleeps_until_the_end_of_what_it_does():
    clock = Clock()
    EmulatedDevice(clock).run(0.02)
    assert clock.now() >= 0.02


def test_lateness_does_not_add_up():
    """After a rank oversleeps, its next work still starts on schedule."""
    device = EmulatedDevice(Clock())
    time.sleep(0.01)  # as if another process had the core
    assert [device.run(0.004) for _ in range(3)] == pytest.approx([0.004, 0.008, 0.012])
    assert device.done[0].woke >= 0.01


def test_a_link_carries_one_message_after_another():
    link = EmulatedLink(latency=1.0, bytes_per_second=10)
    assert link.send(20, ready=0.0) == 3.0
    assert link.send(20, ready=0.0) == 5.0  # waits for the first transfer, not its latency
    assert link.send(20, ready=10.0) == 13.0


def clock_of(group):
    clock = Clock()
    clock.start(group)
    return clock.origin, clock.now()


def averaged_twice(group):
    """Average with the ring's duration, then with a given duration."""
    clock, speed = Clock(), links.Link(latency=1e-4, bandwidth=1e6)
    clock.start(group)
    ends = []
    for seconds in (None, lambda num_bytes, size: 1e-6 * num_bytes * size):
        reduce = EmulatedAllReduce(EmulatedDevice(clock), speed, seconds)
        ends.append(reduce(torch.zeros(100, dtype=torch.float64), group).max().item())
    return ends


def test_an_average_takes_as_long_as_a_ring_or_as_it_is_told():
    for ring, told in launch(averaged_twice, 2).results:
        assert ring == pytest.approx(2 * (1e-4 + 400 / 1e6))
        assert told == pytest.approx(1e-6 * 800 * 2)


def test_all_ranks_read_the_same_clock():
    origins, moments = zip(*launch(clock_of, 3).results)
    assert len(set(origins)) == 1
    assert min(moments) < 0  # time 0 is still to come


def emulate_all(schedules, times, group):
    return [emulate(schedule, times, group).done for schedule in schedules]


@pytest.mark.parametrize("p", [1, 4, 8])
def test_what_runs_is_what_the_simulator_says(p):
    """Every schedule runs the same actions at the same virtual times.

    (benchmarks/pipeline.py compares the wall clock.)
    """
    times = Times(forward=1e-4, backward=1.3e-4, weight=0.8e-4, comm=0.2e-4, step=0.1e-4)
    builders = [naive, gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v, pipedream]
    builders.append(lambda p, m: pipedream_2bw(p, m, micro_batches_a_step=p))
    schedules = []
    for builder in builders:
        for m in (1, 3, 2 * p):
            try:
                schedules.append(builder(p, m))
            except ScheduleError:
                continue
    runs = launch(emulate_all, p, args=(schedules, times)).results
    for i, schedule in enumerate(schedules):
        expected = simulate(schedule, times)
        for rank in range(p):
            ran, simulated = runs[rank][i], expected.spans[rank]
            assert [done.name for done in ran] == [span.action for span in simulated]
            assert [done.start for done in ran] == pytest.approx([s.start for s in simulated])
            assert [done.end for done in ran] == pytest.approx([s.end for s in simulated])
            assert all(done.woke >= done.end for done in ran), "somebody did not sleep"


def test_a_measured_timeline_starts_at_zero_and_keeps_the_stated_lengths():
    schedule, times = one_f_one_b(2, 4), Times(forward=2e-3, backward=2e-3, weight=2e-3)
    run = launch(run_emulated, 2, args=(schedule, times))
    timeline = Timeline.of_run(schedule, run.results)
    assert min(span.start for spans in timeline.spans for span in spans) == 0
    assert timeline.busy == pytest.approx(simulate(schedule, times).busy)
    last = max(span.end for spans in run.results for span in spans)  # on the ranks' shared clock
    assert last >= simulate(schedule, times).makespan
