"""Pipeline schedules: action lists, costs and refusals. Only one test needs torch."""

import csv
import itertools
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mini_dist.plan.schedule import (
    Action,
    Schedule,
    ScheduleError,
    Times,
    add_communication,
    build,
    dualpipe_v,
    forward_only,
    fuse_communication,
    gpipe,
    gradient_delay,
    interleaved,
    naive,
    one_f_one_b,
    peak_in_flight,
    pipedream,
    pipedream_2bw,
    simulate,
    timetable,
    validate,
    versions_held,
    zb_h1,
    zb_h2,
    zb_v,
)

# The published tables and how they were made; they exist only on the project's machines.
REFERENCE = Path("/work/shared/reference")
PUBLISHED = REFERENCE / "zerobubble_table5_table9_bubbles.csv"
MEASURED = REFERENCE / "zerobubble_table4_measured.csv"

SYNCHRONOUS = [naive, gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v]


def every_schedule(ranks=range(1, 6), micro_batches=range(1, 13)):
    """Yield the schedule of each builder for each size that it accepts."""
    builders = [*SYNCHRONOUS, pipedream, lambda p, m: interleaved(p, m, chunks=3)]
    builders.append(lambda p, m: pipedream_2bw(p, m, micro_batches_a_step=p))
    for build_one, p, m in itertools.product(builders, ranks, micro_batches):
        try:
            yield build_one(p, m)
        except ScheduleError:
            continue


# --- the notation -----------------------------------------------------------------------------


def test_an_action_prints_as_it_is_written():
    for text in ["1F0", "1B0", "1W0", "12F34", "0S3", "1F4@2", "1SEND_F0", "2RECV_B7"]:
        assert str(Action.parse(text)) == text
    assert Action.parse("12F34") == Action(stage=12, kind="F", micro=34)


@pytest.mark.parametrize("text", ["", "F0", "1F", "1X0", "1F0@", "-1F0", "1f0", "1F0 1B0"])
def test_what_is_no_action_is_refused_by_name(text):
    with pytest.raises(ScheduleError, match="not an action"):
        Action.parse(text)


def test_a_schedule_can_be_typed_and_reads_its_sizes_from_the_lists():
    schedule = Schedule("mine", ["0F0 0F1 3F0 3F1", ["1F0", "1F1", "2F0", "2F1"]])
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_micro_batches) == (2, 4, 2)
    assert schedule.stages_of == ((0, 3), (1, 2))
    assert [schedule.crosses(stage) for stage in range(3)] == [True, False, True]


def test_a_timetable_has_a_column_a_rank_and_marks_a_place():
    text = timetable(one_f_one_b(2, 2), marks=[(1, 2)])
    rows = [line.split() for line in text.splitlines()]
    assert rows == [
        ["rank", "0", "rank", "1"],
        ["0", "0F0", "1F0"],
        ["1", "0F1", "1B0"],
        ["2", "0B0", "1F1", "<--"],
        ["3", "0B1", "1B1"],
    ]


def test_schedules_need_no_torch():
    code = "import sys, mini_dist.plan.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- the orders -------------------------------------------------------------------------------


def test_every_schedule_can_run_with_and_without_its_communication():
    seen = 0
    for schedule in every_schedule():
        validate(schedule)
        validate(add_communication(schedule))
        validate(add_communication(schedule, early=2))
        validate(add_communication(forward_only(schedule)))
        seen += 1
    assert seen > 500


def test_1f1b_starts_each_backward_as_soon_as_it_can():
    assert [" ".join(map(str, actions)) for actions in one_f_one_b(3, 4).ranks] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_backwards_of_a_stage_come_in_the_order_of_its_forwards():
    """So every schedule adds gradients in the same order and gets the same bits."""
    for schedule in every_schedule():
        for rank, kind in itertools.product(range(schedule.num_ranks), "FBW"):
            for stage in schedule.stages_of[rank]:
                micros = [a.micro for a in schedule.actions(rank) if a[:2] == (stage, kind)]
                assert micros == sorted(micros)


def test_fewer_micro_batches_than_ranks_and_one_rank_are_ordinary():
    assert peak_in_flight(one_f_one_b(4, 2)) == [2, 2, 2, 1]
    for builder in [naive, gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v]:
        assert simulate(builder(1, 5)).bubble == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: one_f_one_b(0, 4), "num_ranks=0 is too small: give 1 or more"),
        (lambda: gpipe(4, 2.5), r"num_micro_batches=2.5 is not a whole number"),
        (lambda: interleaved(4, 8, chunks=0), r"chunks=0"),
        (lambda: interleaved(4, 9), r"9 micro-batches in 2 rounds.*8 or 10 would work"),
        (lambda: dualpipe_v(4, 7), r"7 is too few, 8 or more would work"),
        (lambda: pipedream_2bw(4, 8, 3), r"8 in batches of 4 would work"),
        (lambda: pipedream_2bw(4, 9, 4), r"8 in batches of 4 would work"),
        (lambda: build("1f2b", 4, 8), r"unknown schedule '1f2b': there are naive, gpipe, 1f1b"),
        (lambda: build("1f1b", 4, 8, chunks=2), r"'1f1b' takes no options, and was given chunks"),
        (lambda: build("pipedream_2bw", 4, 8), r"takes micro_batches_a_step, and was given none"),
    ],
)
def test_what_cannot_be_built_says_what_could(call, says):
    with pytest.raises(ScheduleError, match=says):
        call()


def test_the_sizes_that_a_refusal_proposes_work_and_none_between_them_does():
    for p, m in itertools.product(range(1, 7), range(1, 30)):
        try:
            interleaved(p, m)
        except ScheduleError as error:
            below, above = map(int, str(error).split(";")[1].replace("or", "").split()[:2])
            assert below < m < above
            interleaved(p, below)
            interleaved(p, above)
            for between in range(below + 1, above):
                with pytest.raises(ScheduleError, match=f"; {below} or {above} would work"):
                    interleaved(p, between)
    assert interleaved(4, 10).num_micro_batches == 10  # two rounds of five, though p is 4


def test_every_round_size_that_leaves_no_round_below_p_runs_with_the_same_bubble():
    """Llama 3, section 3.3.2: every m works with some round size."""
    for p, m, v in itertools.product(range(1, 6), range(1, 20), (1, 2, 3)):
        least = min(p, m)
        for size in range(1, m + 2):
            rounds = [len(range(start, min(start + size, m))) for start in range(0, m, size)]
            if size <= m and min(rounds) >= least:
                schedule = interleaved(p, m, v, per_round=size)
                assert simulate(schedule).bubble == pytest.approx(
                    (p - 1) / (v * m + p - 1) if m >= p else simulate(interleaved(p, m, v)).bubble
                )
            else:
                with pytest.raises(ScheduleError) as refused:
                    interleaved(p, m, v, per_round=size)
                works = int(str(refused.value).split("per_round=")[2].split()[0])
                interleaved(p, m, v, per_round=works)
    assert interleaved(4, 8, 2, per_round=4) == interleaved(4, 8, 2)


def test_larger_rounds_hide_messages_and_hold_more():
    rounds = [simulate(interleaved(4, 16, 2, size), Times(comm=0.25)) for size in (4, 8, 16)]
    assert rounds[0].makespan > rounds[1].makespan >= rounds[2].makespan
    assert [timeline.peak_in_flight[0] for timeline in rounds] == [11, 15, 23]


# --- bubbles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(4, 8), (2, 3), (8, 8), (8, 32), (3, 1), (4, 2)])
def test_gpipe_and_1f1b_have_the_same_bubble(p, m):
    for schedule in [gpipe(p, m), one_f_one_b(p, m)]:
        timeline = simulate(schedule, Times(forward=1, backward=1.3, weight=0.7))
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)


def test_naive_keeps_one_rank_busy_at_a_time():
    assert simulate(naive(4, 8)).bubble == pytest.approx(3 / 4)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (4, 8, 3), (8, 16, 2), (2, 6, 4), (4, 4, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(p, m, v):
    timeline = simulate(interleaved(p, m, v))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))
    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (v * m))


def test_four_ranks_and_eight_micro_batches():
    assert simulate(gpipe(4, 8)).bubble == pytest.approx(3 / 11)
    assert simulate(one_f_one_b(4, 8)).bubble == pytest.approx(3 / 11)
    assert simulate(interleaved(4, 8, 2)).bubble == pytest.approx(3 / 19)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (3, 12)])
def test_splitting_the_backward_leaves_a_third_of_the_bubble_or_none(p, m):
    """F, B and W take equally long, as in the figures of the zero-bubble paper."""
    assert simulate(zb_h1(p, m)).makespan == pytest.approx(3 * m + (p - 1))
    assert simulate(one_f_one_b(p, m)).makespan == pytest.approx(3 * m + 3 * (p - 1))
    late_start = simulate(zb_h2(p, max(m, 2 * p - 1)))
    assert late_start.bubble_over_longest_span == 0
    assert late_start.bubble > 0  # the corners of the parallelogram
    folded = simulate(zb_v(p, max(m, 2 * p)))
    assert all(
        spans[-1].end - spans[0].start == busy for spans, busy in zip(folded.spans, folded.busy)
    ), "each rank of the V works without a break"


def longest_span(timeline):
    return max(spans[-1].end - spans[0].start for spans in timeline.spans)


def with_holes(p, m):
    """Cut the V's lists for many micro-batches down to m, which fills no hole."""
    actions = zb_v(p, 2 * p - 1).ranks
    return Schedule("cut", [[a for a in each if a.micro < m] for each in actions])


@pytest.mark.parametrize(("p", "longest", "before"), [(2, 13, 14), (4, 27, 30), (8, 55, 62)])
def test_the_v_of_p_micro_batches_is_as_long_as_sail_sgs(p, longest, before):
    """Compare with the longest stage in github.com/sail-sg/zero-bubble at F = B = W = 1."""
    timeline = simulate(zb_v(p, p))
    assert longest_span(timeline) == timeline.makespan == longest
    assert longest_span(simulate(with_holes(p, p))) == before
    assert timeline.busy == (6 * p,) * p


@pytest.mark.parametrize("p", range(1, 10))
def test_the_v_idles_no_longer_than_its_first_rank_must(p):
    """Rank 0 runs m forwards, then waits until the first comes back, after 2p - 1 slots."""
    for m in range(1, 2 * p + 2):
        full = simulate(zb_v(p, m))
        cut = simulate(with_holes(p, m)) if m < 2 * p - 1 else full
        if m >= p:
            assert longest_span(full) == 6 * m + max(0, 2 * p - 1 - m)
        assert longest_span(full) <= longest_span(cut) and full.makespan <= cut.makespan
        held = zip(full.peak_in_flight, cut.peak_in_flight)
        assert all(after <= before for after, before in held), "it holds more than before"
        for mine, theirs in zip(full.schedule.ranks, cut.schedule.ranks):
            assert [a for a in mine if a.kind != "W"] == [a for a in theirs if a.kind != "W"]


def test_dualpipe_v_idles_as_its_authors_say():
    """Idle time is (p/2 - 1)(F&B + B - 3W) for p stages of the unfolded pipe, two per rank."""
    for p, m in [(2, 8), (4, 8), (4, 20), (8, 16)]:
        times = Times(forward=1, backward=1, weight=1)
        forward_and_backward, full_backward, weight = 3, 2, 1
        idle = (p - 1) * (forward_and_backward + full_backward - 3 * weight)
        assert simulate(dualpipe_v(p, m), times).makespan == 6 * m + idle / 2


# --- the published tables ---------------------------------------------------------------------


def published():
    if not PUBLISHED.exists():
        pytest.skip(f"the reference tables are not here ({PUBLISHED})")
    with open(MEASURED) as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        layers = {row["model"]: int(row["layers"]) for row in rows}
    with open(PUBLISHED) as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            times = [float(row[column]) for column in ("tf_ms", "tb_ms", "tw_ms", "tcomm_ms")]
            yield row, int(row["p"]), int(row["m"]), times, layers[row["model"]]


@pytest.mark.parametrize(
    ("builder", "column"), [(one_f_one_b, "1f1b"), (zb_h1, "zb_h1"), (zb_h2, "zb_h2")]
)
def test_published_bubble_rates_to_the_last_digit(builder, column):
    rows = list(published())
    assert len(rows) >= 9
    for row, p, m, times, _ in rows:
        timeline = simulate(builder(p, m), Times(*times))
        assert f"{timeline.bubble_over_longest_span:.4f}" == f"{float(row[column]):.4f}", row


def test_published_interleaved_rates_within_half_a_point():
    """As in the paper, each layer is a chunk, and embedding and head count as one layer each."""
    for row, p, m, (forward, backward, weight, comm), layers in published():
        chunks, rest = divmod(layers + 2, p)
        assert rest == 0
        times = Times(forward / chunks, backward / chunks, weight / chunks, comm)
        rate = simulate(interleaved(p, m, chunks), times).bubble_over_longest_span
        assert abs(rate - float(row["1f1b_i"])) < 0.005, row


def test_the_published_rates_are_not_the_closed_form():
    """A simulator that ignores communication would not pass the tests above."""
    gaps = []
    for row, p, m, (forward, backward, weight, _), _ in published():
        silent = simulate(one_f_one_b(p, m), Times(forward, backward, weight, 0))
        assert silent.bubble == pytest.approx((p - 1) / (m + p - 1))
        gaps.append(abs(silent.bubble - float(row["1f1b"])))
    assert min(gaps) > 0.005


# --- times ------------------------------------------------------------------------------------


def test_a_message_delays_its_receiver_and_nobody_else():
    timeline = simulate(one_f_one_b(2, 1), Times(forward=1, backward=1, weight=1, comm=0.5))
    assert [(str(s.action), s.start, s.end) for spans in timeline.spans for s in spans] == [
        ("0F0", 0, 1),
        ("0B0", 5, 7),
        ("1F0", 1.5, 2.5),
        ("1B0", 2.5, 4.5),
    ]


def test_stages_on_one_rank_pass_on_without_a_message():
    """At the bottom of the V, stages p-1 and p are neighbors on the same rank."""
    spans = {str(s.action): s for s in simulate(zb_v(2, 1), Times(comm=10)).spans[1]}
    assert spans["2F0"].start == spans["1F0"].end
    assert spans["1B0"].start == spans["2B0"].end


def test_uneven_stages_run_at_the_pace_of_the_slowest():
    even = simulate(one_f_one_b(4, 100), Times(forward=1, backward=1, weight=1))
    slow = simulate(one_f_one_b(4, 100), Times(forward=[1, 1, 2, 1], backward=1, weight=1))
    assert slow.makespan - even.makespan == pytest.approx(100, abs=4)


def test_adding_communication_changes_no_time():
    """The simulator waits for the same producers with or without explicit messages."""
    times = Times(forward=1, backward=1.2, weight=0.8, comm=0.3, step=0.1)
    for schedule in every_schedule(ranks=range(1, 5), micro_batches=[4, 8]):
        plain = simulate(schedule, times)
        added = add_communication(schedule)
        for passed in [added, fuse_communication(added), add_communication(schedule, early=2)]:
            assert simulate(passed, times).spans == plain.spans


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (Times(forward=[1, 1, 1]), "Times.forward has 3 values and the schedule 2 stages"),
        (Times(weight=-1), "Times.weight=-1: a time is zero or more"),
        (Times(comm=float("nan")), "Times.comm=nan: a time is zero or more"),
    ],
)
def test_impossible_times_are_refused(times, says):
    with pytest.raises(ScheduleError, match=says.replace(".", r"\.")):
        simulate(one_f_one_b(2, 2), times)


def test_the_timeline_prints_who_is_idle_when():
    assert str(simulate(one_f_one_b(2, 2))).splitlines() == [
        "1F1B: makespan 9, bubble 33.3%, in flight [2, 1]",
        "rank 0 |F0 F1 .  .  B0 -- .  B1 --",
        "rank 1 |.  F0 B0 -- F1 B1 -- .  .",
    ]


# --- activations in flight --------------------------------------------------------------------


def test_activations_in_flight_on_four_ranks_and_eight_micro_batches():
    assert peak_in_flight(gpipe(4, 8)) == [8, 8, 8, 8]
    assert peak_in_flight(one_f_one_b(4, 8)) == [4, 3, 2, 1]
    assert peak_in_flight(interleaved(4, 8, 2)) == [11, 9, 7, 5]
    assert peak_in_flight(naive(4, 8)) == [1, 1, 1, 1]


def test_zero_bubble_memory_is_what_the_papers_table_says():
    for p in (2, 4, 8):
        m = 4 * p
        assert peak_in_flight(zb_h1(p, m)) == [p] * p
        assert peak_in_flight(zb_h2(p, m)) == [2 * p - 1] * p
        assert peak_in_flight(zb_v(p, m)) == [2 * p] * p  # of half-size stages, which is p
        assert max(peak_in_flight(dualpipe_v(p, m))) == 2 * p + 1  # of half-size stages, plus one


def test_the_memory_profile_starts_and_ends_empty_and_peaks_where_the_list_says():
    for schedule in [one_f_one_b(3, 5), zb_h2(3, 5), zb_v(3, 5), dualpipe_v(2, 5)]:
        timeline = simulate(schedule, Times(comm=0.2))
        for rank, peak in enumerate(timeline.peak_in_flight):
            profile = timeline.in_flight(rank)
            assert profile[0] == (0.0, 0) and profile[-1][1] == 0
            assert profile[-1][0] == timeline.spans[rank][-1].end
            assert max(held for _, held in profile) == peak
            assert [t for t, _ in profile] == sorted(t for t, _ in profile)
            grows = {t for (t, now), (_, before) in zip(profile[1:], profile) if now > before}
            starts = {s.start for s in timeline.spans[rank] if s.action.kind == "F"}
            assert grows == starts, "activations take memory from the start of their forward on"


def test_in_flight_agrees_with_the_timeline_counted_moment_by_moment():
    """The oracle knows only intervals: held from the start of F to the end of B (or W)."""
    for schedule in [one_f_one_b(4, 8), interleaved(4, 8), zb_h1(4, 8), dualpipe_v(3, 8)]:
        timeline = simulate(schedule)
        for rank, spans in enumerate(timeline.spans):
            start = {s.action[::2][:2]: s.start for s in spans if s.action.kind == "F"}
            end = {s.action[::2][:2]: s.end for s in spans if s.action.kind != "F"}  # W replaces B
            moments = sorted(start.values())
            peak = max(sum(start[k] <= t < end[k] for k in start) for t in moments)
            assert peak == timeline.peak_in_flight[rank]


# --- communication ----------------------------------------------------------------------------


def test_messages_follow_their_producer_and_precede_their_consumer():
    assert [str(a) for a in add_communication(one_f_one_b(3, 2)).ranks[1]] == (
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1"
    ).split()


def test_early_receives_are_started_that_many_computations_before():
    actions = list(map(str, add_communication(one_f_one_b(3, 4), early=1).ranks[1]))
    assert actions[:6] == ["1RECV_F0", "1RECV_F1", "1F0", "1SEND_F0", "1RECV_B0", "1F1"]
    assert add_communication(one_f_one_b(3, 4)) == add_communication(one_f_one_b(3, 4), early=0)


def receives(schedule, early):
    """Return (messages sent before their receive is posted, the most receives open on a rank).

    A receive is posted when the computation before it ends; a message leaves when its producer
    ends.
    """
    spans = simulate(schedule, Times(comm=0.1)).spans
    over = {span.action.key: span.end for rank in spans for span in rank}
    with_messages, too_late, most = add_communication(schedule, early), 0, 0
    for rank in range(schedule.num_ranks):
        free, waiting = 0.0, set()
        for stage, kind, micro, _ in with_messages.actions(rank):
            if kind.startswith("RECV"):
                source = (stage - 1 if kind == "RECV_F" else stage + 1, kind[-1], micro)
                too_late += free > over[source]
                waiting.add((stage, kind[-1], micro))
                most = max(most, len(waiting))
            elif not kind.startswith("SEND"):
                free = over[stage, kind, micro]
                waiting.discard((stage, kind, micro))
    return too_late, most


def test_receives_two_computations_early_wait_for_their_messages():
    """The executor therefore posts receives two computations early, at the cost of buffers.

    With one, a few messages wait for their receiver instead; with none, half of them or more.
    """
    for schedule, least in [(gpipe(4, 8), 1), (one_f_one_b(4, 8), 2), (zb_h1(4, 8), 2)]:
        assert [receives(schedule, early)[0] == 0 for early in range(3)] == [
            early >= least for early in range(3)
        ]
    assert [receives(one_f_one_b(4, 8), early) for early in range(4)] == [
        (21, 1),
        (3, 2),
        (0, 3),
        (0, 4),
    ]
    assert receives(interleaved(4, 8), 2)[0] <= 0.05 * 112  # only a few messages


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (4, 8, 2), (4, 8, 3)])
def test_chunks_multiply_the_messages(p, m, v):
    actions = add_communication(interleaved(p, m, v)).all_actions
    sends = sum(action.kind.startswith("SEND") for action in actions)
    assert sends == 2 * m * (v * p - 1)


def test_the_bottom_of_a_v_sends_nothing():
    kinds = [a for a in add_communication(zb_v(3, 6)).actions(2) if a.kind.startswith("SEND")]
    assert {(a.stage, a.kind) for a in kinds} == {(2, "SEND_B"), (3, "SEND_F")}


def test_sends_that_wait_deadlock_1f1b_until_they_are_fused():
    unfused = add_communication(one_f_one_b(4, 8))
    validate(unfused)  # fine if sends do not wait
    with pytest.raises(ScheduleError, match="deadlock: rank 0 at 0SEND_F3 waits for 1RECV_F3"):
        validate(unfused, rendezvous=True)
    fused = fuse_communication(unfused)
    validate(fused, rendezvous=True)
    assert "(0SEND_F3;0RECV_B0)" in map(str, fused.ranks[0])


def test_a_receive_that_stands_too_early_deadlocks_only_where_it_is_brought_to_its_end():
    schedule = Schedule("mine", ["0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])
    validate(schedule)
    with pytest.raises(ScheduleError, match="rank 0 at 0RECV_B0 waits for 1SEND_B0"):
        validate(schedule, rendezvous=True)


def test_fused_communication_runs_in_list_order_for_every_schedule():
    for schedule in every_schedule():
        fused = fuse_communication(add_communication(schedule))
        validate(fused, rendezvous=True)
        for rank in range(schedule.num_ranks):  # computations keep their order
            left = [a for a in fused.actions(rank) if "_" not in a.kind]
            assert left == list(schedule.actions(rank))


def test_communication_is_added_once():
    with pytest.raises(ScheduleError, match="has its sends and receives already"):
        add_communication(add_communication(gpipe(2, 2)))


# --- what is refused --------------------------------------------------------------------------


def lists(schedule):
    return [list(actions) for actions in schedule.ranks]


def places(schedule):
    return [(rank, i) for rank, row in enumerate(schedule.ranks) for i in range(len(row))]


def refusal(ranks, mixed=False):
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule("mine", ranks, mixed))
    return str(caught.value)


def test_every_missing_action_is_refused_and_named():
    for schedule in [
        gpipe(2, 3),
        one_f_one_b(3, 4),
        interleaved(2, 4),
        zb_h1(3, 4),
        add_communication(one_f_one_b(2, 2)),
        dualpipe_v(2, 4),
    ]:
        for rank, place in places(schedule):
            ranks = lists(schedule)
            gone = ranks[rank].pop(place)
            if gone.kind == "W" and schedule.mixed:
                validate(Schedule("now a full backward", ranks, mixed=True))
                continue
            said = refusal(ranks, schedule.mixed)
            assert f"{gone} is missing" in said
            assert "rank 0" in said and "<--" in said


def test_every_doubled_action_is_refused_and_both_places_marked():
    schedule = zb_h1(2, 3)
    for rank, place in places(schedule):
        ranks = lists(schedule)
        ranks[rank].append(ranks[rank][place])
        said = refusal(ranks)
        assert f"{ranks[rank][place]} stands 2 times" in said
        assert said.count(f"{ranks[rank][place]} <--") == 2


def test_a_deadlock_names_who_waits_for_whom():
    said = refusal(["0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"])
    assert "deadlock" in said
    assert "rank 0 at 0B0 waits for 1B0" in said
    assert "rank 1 at 1F1 waits for 0F1" in said
    assert [line.split() for line in said.splitlines()[2:4]] == [
        ["0", "0F0", "1F1", "<--"],
        ["1", "0B0", "<--", "1F0"],
    ]


def test_every_swap_that_validate_lets_pass_can_run():
    """Swap two random actions of a rank; the oracle runs the lists by brute force."""
    draw, ran, stuck = random.Random(0), 0, 0
    for _ in range(300):
        ranks = lists(one_f_one_b(3, 4))
        row = draw.choice(ranks)
        i, j = draw.sample(range(len(row)), 2)
        row[i], row[j] = row[j], row[i]
        runs = brute_force(ranks)
        ran, stuck = ran + runs, stuck + (not runs)
        if runs:
            validate(Schedule("swapped", ranks))
        else:
            assert "deadlock" in refusal(ranks)
    assert ran > 20 and stuck > 20


def brute_force(ranks):
    """Return whether these F and B lists, one stage per rank, can finish (without the library)."""
    todo, done, last = [list(map(str, row)) for row in ranks], set(), len(ranks) - 1
    while any(todo):
        before = len(done)
        for stage, row in enumerate(todo):
            if not row:
                continue
            kind, micro = row[0][1], row[0][2:]
            if kind == "F":
                ok = stage == 0 or f"{stage - 1}F{micro}" in done
            else:
                ok = f"{stage}F{micro}" in done
                ok = ok and (stage == last or f"{stage + 1}B{micro}" in done)
            if ok:
                done.add(row.pop(0))
        if len(done) == before:
            return False
    return True


def test_a_backward_before_its_forward_is_a_deadlock_of_one_rank():
    assert "rank 0 at 0B0 waits for 0F0" in refusal(["0B0 0F0"])
    assert "rank 0 at 0W0 waits for 0B0" in refusal(["0F0 0W0 0B0"])


def test_a_stage_on_two_ranks_is_refused():
    said = refusal(["0F0 0B0", "1F0 1B0 0F1 0B1 1F1 1B1"])
    assert "0F1 is on rank 1, but stage 0 lives on rank 0" in said
    assert said.count("<--") == 2


def test_a_message_that_nobody_needs_is_refused():
    ranks = lists(add_communication(one_f_one_b(2, 1)))
    ranks[1].append("1SEND_F0")
    assert "1SEND_F0 has no other end" in refusal(ranks)


def test_an_empty_schedule_is_refused():
    assert "no actions" in refusal([])


# --- weight versions --------------------------------------------------------------------------


def test_pipedream_stashes_one_version_less_on_each_rank():
    assert versions_held(pipedream(4, 12)) == [4, 3, 2, 1]
    assert gradient_delay(pipedream(4, 12)) == [3, 2, 1, 0]
    assert [str(a) for a in pipedream(2, 4).ranks[0]] == (
        "0F0@0 0F1@0 0B0@0 0S0 0F2@1 0B1@0 0S1 0F3@2 0B2@1 0S2 0B3@2 0S3".split()
    )


def test_2bw_holds_two_versions_and_is_one_step_late_everywhere():
    for p, size in [(4, 4), (4, 6), (2, 2)]:
        schedule = pipedream_2bw(p, 4 * size, size)
        assert versions_held(schedule) == [2] * p
        assert gradient_delay(schedule) == [1] * p
        versions = {a.micro: a.version for a in schedule.all_actions if a.kind == "F"}
        assert all(versions[a.micro] == a.version for a in schedule.all_actions if a.kind == "F")


def test_synchronous_schedules_hold_one_version():
    assert versions_held(one_f_one_b(4, 8)) == [1] * 4
    assert not one_f_one_b(4, 8).asynchronous


def test_asynchronous_schedules_have_no_bubble_after_filling():
    long = simulate(pipedream(4, 400))
    assert long.makespan == 3 * 400 + 3 * 3


def test_a_backward_on_other_weights_than_its_forward_is_refused():
    ranks = lists(pipedream(2, 4))
    i = [str(a) for a in ranks[0]].index("0B1@0")
    ranks[0][i] = "0B1@1"
    said = refusal(ranks)
    assert "0B1@1 uses other weights than 0F1@0 did" in said and "<--" in said


def test_a_forward_cannot_use_weights_that_are_not_there_yet():
    ranks = lists(pipedream(2, 2))
    ranks[1][0], ranks[1][1] = "1F0@1", "1B0@1"
    assert "rank 1 at 1F0@1 waits for 1S0" in refusal(ranks)


# --- compared with PyTorch --------------------------------------------------------------------


def test_order_is_what_pytorch_executes():
    """Compare the calls that its schedules make on a rank's stages, not its display tables."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules as theirs

    def v_shape(rank, p):
        return [rank, 2 * p - 1 - rank]

    def loop(chunks):
        return lambda rank, p: [rank + p * c for c in range(chunks)]

    pairs = [
        (gpipe, theirs.ScheduleGPipe, loop(1)),
        (one_f_one_b, theirs.Schedule1F1B, loop(1)),
        (lambda p, m: interleaved(p, m, 2), theirs.ScheduleInterleaved1F1B, loop(2)),
        (lambda p, m: interleaved(p, m, 3), theirs.ScheduleInterleaved1F1B, loop(3)),
        (zb_h1, theirs.ScheduleInterleavedZeroBubble, loop(1)),
        (zb_v, theirs.ScheduleZBVZeroBubble, v_shape),
        (dualpipe_v, theirs.ScheduleDualPipeV, v_shape),
    ]
    compared = 0
    for (ours, their_class, layout), p, m in itertools.product(pairs, (2, 3, 4), (1, 4, 8, 10)):
        try:
            schedule = ours(p, m)
        except ScheduleError:  # they refuse what we refuse
            with pytest.raises(ValueError):
                executed_by_pytorch(their_class, layout(0, p), p, m, rank=0)
            continue
        for rank in range(p):
            try:
                executed = executed_by_pytorch(their_class, layout(rank, p), p, m, rank)
            except ValueError:
                # Only theirs refuse these: zb_h1 follows interleaved 1F1B, and 1F1B needs m >= p.
                assert (ours is zb_h1 and m % max(1, m // p)) or (ours is one_f_one_b and m < p)
                break
            compared += 1
            mine = list(schedule.actions(rank))
            for i, (stage, kind, micro, _) in enumerate(mine):
                if kind == "B" and (stage, micro) in schedule.split:
                    mine[i] = f"{stage}I{micro}"  # their letter for half a backward
            if ours is zb_v and m < 2 * p - 1:  # theirs idles where ours runs Ws
                mine = [action for action in mine if "W" not in str(action)]
                executed = [action for action in executed if "W" not in action]
            assert list(map(str, mine)) == executed, (schedule.name, p, m, rank)
    assert compared > 150


def executed_by_pytorch(schedule_class, stage_indices, p, m, rank):
    """Run one rank of a PyTorch schedule on stages that only record their calls."""
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torch.distributed.pipelining.stage import _PipelineStageBase

    calls = []

    class Stage(_PipelineStageBase):
        def __init__(self, index):
            self.stage_index, self.num_stages = index, p * len(stage_indices)
            self.group_size, self.group_rank, self.group = p, rank, None
            self.submod = None
            self.stage_index_to_group_rank = {}

        def _no_messages(self, micro):
            return []

        get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages

        def forward_one_chunk(self, micro, *args, **kwargs):
            calls.append(f"{self.stage_index}F{micro}")

        def backward_one_chunk(self, micro, *args, full_backward=True, **kwargs):
            calls.append(f"{self.stage_index}{'B' if full_backward else 'I'}{micro}")

        def backward_weight_one_chunk(self, micro, **kwargs):
            calls.append(f"{self.stage_index}W{micro}")

        def ignore(self, *args, **kwargs):
            pass

        set_local_fwd_input = set_local_bwd_input = get_local_bwd_output = ignore
        perform_reduce_grad = ignore

    Stage.__abstractmethods__ = frozenset()  # the rest prepares buffers that are not used
    stages = [Stage(index) for index in stage_indices]
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(stages[0] if single else stages, m)
    schedule._initialize_stage = schedule._initialize_stages = lambda *args, **kwargs: None
    schedule._step_microbatches([()] * m, [{}] * m)
    return calls
