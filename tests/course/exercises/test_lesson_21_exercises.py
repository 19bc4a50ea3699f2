"""Lesson 21: doctors that guess, look at one number only, or take symptoms for causes."""

import copy
import statistics
from collections import Counter

import numpy
import pytest

from mini_dist import check
from mini_dist.course.check import sick_runs, slow_clinic
from mini_dist.course.profile import PARTS, Timeline, diagnose_slow
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

solved = solutions.diagnose_slow
wrong = Wrong()


@wrong("return (disease, rank), not None")
def says_nothing(record):
    return None


@wrong("the disease is one of 'input stall'")
def knows_another_word(record):
    return "flu", None


@wrong("a number, or None where no single one is at fault, not '0'")
def gives_the_rank_as_text(record):
    disease, rank = solved(record)
    return disease, None if rank is None else str(rank)


@wrong("our function raised KeyError")
def asks_for_what_is_not_there(record):
    return {}[record.size]


@wrong("you say straggler. Nothing is wrong with it")
def sees_a_straggler_everywhere(record):
    if solved(record)[0] == "healthy":
        waits = [parts["waiting"] for parts in record.went.seconds]
        return "straggler", waits.index(min(waits))
    return solved(record)


@wrong("Look whom the others wait for")
def blames_the_network(record):
    """A straggler's table has waiting as its largest number, which some call communication."""
    disease, rank = solved(record)
    return ("buckets too small", None) if disease == "straggler" else (disease, rank)


@wrong("straggler it is, but not on rank")
def blames_who_waits_most(record):
    disease, rank = solved(record)
    if disease == "straggler":
        waits = [parts["waiting"] for parts in record.went.seconds]
        return disease, waits.index(max(waits))
    return disease, rank


@wrong("it is, but not on rank 1")
def takes_rank_0_for_the_healthy_one(record):
    disease, rank = solved(record)
    alike = "another batch size", "unsynchronised seeds", "save on one rank"
    return (disease, 1) if disease in alike and rank == 0 else (disease, rank)


@wrong("how many samples has each in a step?")
def looks_at_times_first(record):
    """A rank with fewer samples than the others waits, and looks like a straggler."""
    went = record.went
    if not record.waiting and max(p["waiting"] for p in went.seconds) > 0.1 * went.step[0]:
        return "straggler", min(range(record.size), key=lambda r: went.seconds[r]["waiting"])
    return solved(record)


@wrong("No sample should be read by two")
def never_looks_at_samples(record):
    disease, rank = solved(record)
    return ("healthy", None) if disease == "unsynchronised seeds" else (disease, rank)


@wrong("looks at its loss now and then")
def takes_any_sync_for_a_disease(record):
    disease, rank = solved(record)
    syncs = any(span.kind == "sync" for spans in record.timeline.spans for span in spans)
    return ("host sync", None) if disease == "healthy" and syncs else (disease, rank)


@wrong("memory leak it is, but not on rank 0")
def says_one_rank_where_all_leak(record):
    disease, rank = solved(record)
    return (
        disease,
        0 if rank is None and disease != "healthy" and disease == "memory leak" else rank,
    )


@wrong("input stall it is, but not on no single rank")
def averages_over_the_ranks(record):
    disease, rank = solved(record)
    return disease, None if disease == "input stall" else rank


@wrong("memory leak it is, but not on no single rank")
def looks_at_rank_0_only(record):
    disease, rank = solved(record)
    return (disease, None) if disease == "memory leak" else (disease, rank)


@wrong("Look at each rank's own losses")
def averages_losses_over_steps(record):
    if not record.waiting:
        means = [statistics.median(s.loss for s in steps) for steps in record.steps]
        if solved(record)[0] == "bad shard" and max(means) < 20 * min(means):
            return "healthy", None
    return solved(record)


@wrong("save on one rank it is, but not on rank 0")
def takes_rank_0_for_the_saver(record):
    disease, rank = solved(record)
    return (disease, 0) if disease == "save on one rank" else (disease, rank)


@wrong("it is, but not on rank")
def names_the_rank_of_the_patient(record):
    """Answer as if the lesson's patients were learned by heart."""
    disease, rank = solved(record)
    return disease, rank if rank is None else OF_PATIENTS[disease] or 0


OF_PATIENTS = {sick.disease: sick.rank for sick in slow_clinic.patients().values()}
IN_ORDER = [(sick.disease, sick.rank) for sick in slow_clinic.asked().values()]
CALLS = []


@wrong("you say")
def counts_its_calls(record):
    """Return the answers in the order in which the judge asks."""
    CALLS.append(1)
    return IN_ORDER[(len(CALLS) - 1) % len(IN_ORDER)]


@wrong("it is, but not on")
def goes_by_the_size(record):
    disease, rank = solved(record)
    return disease, {3: 0, 4: 1}.get(record.size) if rank is not None else None


@wrong("the record is changed")
def empties_the_record(record):
    found = solved(record)
    record.waiting["seen"] = "yes"
    return found


@pytest.mark.parametrize("fn, says", wrong.answers, ids=wrong.names())
def test_a_wrong_doctor_is_told_what_speaks_against_it(fn, says):
    verdict = check.diagnose_slow.judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


def test_no_hint_names_the_right_disease():
    """The exception is a healthy run, whose hint must say so."""
    for sick in slow_clinic.unseen():
        for disease in sick_runs.DISEASES:
            if disease != sick.disease and sick.disease != "healthy":
                assert sick.disease not in slow_clinic.mistake(sick, (disease, None))


@pytest.mark.parametrize("disease", sick_runs.DISEASES)
def test_who_always_says_the_same_is_refused(disease):
    for rank in (None, 0):
        assert check.diagnose_slow.judge(lambda record, r=rank: (disease, r)).state == "wrong"


# ---- right answers -------------------------------------------------------------------------------

right = Right("diagnose_slow")


@right
def with_numbers_of_numpy(record):
    disease, rank = solved(record)
    return [disease, None if rank is None else numpy.int64(rank)]


@right
def by_the_timeline_alone(record):
    """Take times from spans instead of the table, and medians as limits."""
    disease, _ = solved(record)
    if disease not in ("straggler", "host sync", "healthy"):
        return solved(record)
    work = []
    for spans, steps in zip(record.timeline.spans, record.timeline.steps):
        busy = [s.end - s.start for s in spans if s.kind == "compute"]
        work.append(sum(busy) / len(steps))
    if max(work) > 1.2 * statistics.median(work):
        return "straggler", work.index(max(work))
    syncs = sum(s.kind == "sync" for s in record.timeline.spans[0])
    return ("host sync" if syncs > len(record.steps[0]) / 2 else "healthy"), None


@right
def as_a_table_of_rules(record):
    ranks = range(record.size)
    went = record.went

    def most(values, factor, floor=0.0):
        middle = statistics.median(values)
        return [r for r in ranks if values[r] > max(factor * middle, floor)]

    def share(part):
        return [went.seconds[r][part] / went.step[r] for r in ranks]

    def where(found):
        return None if len(found) == record.size else found[0]

    if record.waiting:
        names = Counter(record.waiting.values())
        (rare,) = [name for name, times in names.items() if times == 1]
        return "save on one rank", [r for r in ranks if record.waiting[r] == rare][0]
    counts = [len(record.steps[r][0].samples) for r in ranks]
    if len(set(counts)) > 1:
        return "another batch size", counts.index(min(counts, key=counts.count))
    reads = [[i for step in record.steps[r] for i in step.samples] for r in ranks]
    times = Counter(i for mine in reads for i in mine)
    twice = [sum(times[i] > 1 for i in mine) for mine in reads]
    if max(twice):
        return "unsynchronised seeds", twice.index(max(twice))
    if jumps := most([max(s.loss for s in record.steps[r]) for r in ranks], 10):
        return "bad shard", jumps[0]
    if leaks := [r for r in ranks if record.steps[r][-1].held > 1.5 * record.steps[r][2].held]:
        return "memory leak", where(leaks)
    if hungry := [r for r in ranks if share("data")[r] > 0.1]:
        return "input stall", where(hungry)
    if record.messages(0) > 16:
        return "buckets too small", None
    if max(share("waiting")) > 0.1:
        return "straggler", share("waiting").index(min(share("waiting")))
    return ("host sync" if min(share("host")) > 0.12 else "healthy"), None


@right
def by_who_is_waited_for(record):
    disease, rank = solved(record)
    if disease == "straggler":
        whom = Counter()
        for waited in record.went.waited:
            whom.update(waited)
        rank = whom.most_common(1)[0][0]
    return disease, rank


@pytest.mark.parametrize("fn", right.answers, ids=lambda fn: fn.__name__)
def test_other_ways_to_find_it_are_right(fn):
    verdict = check.diagnose_slow.judge(fn)
    assert verdict.state == "right", verdict


# ---- the clinic itself ---------------------------------------------------------------------------


def test_every_disease_is_among_the_patients_and_among_the_unseen():
    assert {s.disease for s in slow_clinic.patients().values()} == set(sick_runs.DISEASES)
    assert {s.disease for s in slow_clinic.unseen()} == set(sick_runs.DISEASES)
    assert not set(slow_clinic.unseen()) & set(slow_clinic.patients().values())


def test_the_librarys_doctor_finds_what_the_patients_have():
    for name, sick in slow_clinic.patients().items():
        assert diagnose_slow(slow_clinic.visit(name)) == (sick.disease, sick.rank)


def test_a_record_is_the_same_again():
    """Virtual times, values and held bytes do not depend on the machine's load."""
    sick = slow_clinic.unseen()[1]
    first = sick_runs.run(sick)
    sick_runs.RECORDS.pop(sick)
    assert vars(sick_runs.run(sick)) == vars(first)


def test_all_of_an_emulated_step_is_explained():
    for sick in slow_clinic.unseen():
        record = sick_runs.run(sick)
        assert record.went.unexplained == pytest.approx(0, abs=1e-9)
        for parts, step in zip(record.went.seconds, record.went.step):
            assert set(parts) == set(PARTS) and sum(parts.values()) == pytest.approx(step)


def test_a_healthy_training_learns_and_a_visit_is_a_copy():
    record = slow_clinic.visit("healthy")
    losses = [statistics.mean(step.loss for step in at) for at in zip(*record.steps)]
    assert statistics.mean(losses[-4:]) < 0.8 * statistics.mean(losses[:4])
    record.steps.clear()
    assert len(slow_clinic.visit("healthy").steps) == 4


def test_an_unknown_patient_is_told():
    with pytest.raises(KeyError, match="no patient 'Z'; there are A, B, C, D, E, F, G, H, I"):
        slow_clinic.visit("Z")


kept = copy.copy(slow_clinic.unseen())


def test_who_brings_the_runs_along_is_refused():
    verdict = check.diagnose_slow.judge(lambda record: [(s.disease, s.rank) for s in kept][0])
    assert verdict.state == "wrong" and "uses kept, which was there" in verdict.hint


@pytest.mark.parametrize("fn", [diagnose_slow, lambda record: diagnose_slow(record)])
def test_as_shipped_it_is_still_the_librarys(fn):
    assert check.diagnose_slow.judge(fn).state == "still the library's"


def test_a_timeline_without_anything_is_unexplained():
    record = sick_runs.Record(1, [[]], Timeline([[(0, 1), (1, 2), (2, 3)]], [[]]))
    assert record.went.unexplained == 1
