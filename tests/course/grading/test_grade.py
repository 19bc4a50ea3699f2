"""`python -m mini_dist.course.grade` grades a class whose programs may attack grades or host.

Grading a learner takes several seconds, so a few learners represent the class of forty.
`pytest --long tests/course/grading` grades the whole class of classroom.py, with all its ways to
forge a grade and its programs that do harm. .github/workflows/weekly.yml runs it.
"""

import base64
import csv
import json
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import cloudpickle
import pytest

from mini_dist.course.grade import __main__ as command
from mini_dist.course.grade import cgroups, grading, judge, sandbox, usage
from mini_dist.course.grade.sandbox import Limits
from mini_dist.course.grade.submissions import Cell, Submission, lessons
from tests.course.grading.classroom import CLASS, FORGED, HARM, STEP, hand_in, step, text_of
from tests.course.grading.only_data import from_frames
from tests.selected import cases_to_run

SAMPLE = ("no check", "nothing", "returns code that runs where it is read", "redefines check")
SAMPLE += ("changes the engine on a rank", "speaks for the judge", "prints 80 MB")
OPTIONS = "--cell 60 --timeout 240 --memory 3 --disk 0.1 --jobs 2".split()


@pytest.fixture(scope="module")
def apart():
    if why := sandbox.why_not_apart():
        pytest.skip(f"there is no sandbox here: {why}")


def listing(folder):
    return {path: path.stat().st_size for path in folder.rglob("*")}


def grade(names, folder):
    """Grade these learners and return the CSV's rows by learner."""
    hand_in(names, folder / "submissions")
    before = listing(folder / "submissions")
    assert command.main([str(folder / "submissions"), "--out", str(folder / "out"), *OPTIONS]) == 0
    assert listing(folder / "submissions") == before
    with (folder / "out/grades.csv").open(encoding="utf-8-sig") as file:
        return {row["learner"]: row for row in csv.DictReader(file)}


def assert_stands(name, rows):
    row, learner = rows[re.sub(r"\.(ipynb|zip)$", "", name)], CLASS[name]
    stands = {column[3:]: state for column, state in row.items() if column[:2].isdigit()}
    assert {n: stands.get(n) for n in learner.expected} == learner.expected
    assert learner.notes in row["notes"]
    if name in FORGED or name in HARM:
        assert row["right"] == "0"


@pytest.fixture(scope="module")
def graded(apart, tmp_path_factory, request):
    """Grade the learners of SAMPLE that the tests of this run ask for."""
    folder = tmp_path_factory.mktemp("class")
    asked = cases_to_run(request, "name") | {"no check", "nothing"}
    return folder, grade([name for name in SAMPLE if name in asked], folder)


@pytest.mark.parametrize("name", SAMPLE)
def test_every_exercise_stands_as_it_must(name, graded):
    assert_stands(name, graded[1])


@pytest.mark.parametrize("name", [name for name in CLASS if name not in SAMPLE])
def test_so_it_does_for_the_rest_of_the_class(name, request, tmp_path):
    if not request.config.getoption("long"):
        pytest.skip("pytest --long grades the whole class")
    request.getfixturevalue("apart")
    assert_stands(name, grade([name], tmp_path))


def test_a_page_says_for_each_learner_what_was_measured(graded):
    folder, _ = graded
    page = (folder / "out/no_check/index.html").read_text()
    assert f"{STEP}: right" in page and "bytes sent by all ranks</td><td>480</td>" in page
    assert "the call of check.sharded_step was removed" in page
    assert (folder / "out/no_check/1-07_zero.ipynb").is_file()


def test_the_same_command_again_runs_nothing_again(graded, monkeypatch, capsys):
    folder, _ = graded
    names = list((folder / "submissions").iterdir())
    monkeypatch.setattr(command, "grade", None)  # calling it would fail
    before = (folder / "out/grades.csv").read_bytes()
    assert (
        command.main([*map(str, (folder / "submissions", "--out", folder / "out")), *OPTIONS]) == 0
    )
    assert f"{len(names)} of {len(names)} were graded before" in capsys.readouterr().out
    assert (folder / "out/grades.csv").read_bytes() == before


def test_without_a_sandbox_nothing_runs_unless_one_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "why_not_apart", lambda: "macOS has no namespaces")
    (tmp_path / "x" / "ann").mkdir(parents=True)
    with pytest.raises(SystemExit):
        command.main([str(tmp_path / "x"), "--out", str(tmp_path / "out")])
    assert "could read, change and delete your files" in " ".join(capsys.readouterr().err.split())
    assert command.may_run(without_sandbox=True) is False


def test_an_empty_folder_is_nothing_to_grade(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert "is empty: give what the learners handed in" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("waits", ["", "sleep 0.2; "])
def test_where_unshare_fails_at_once_this_is_said(tmp_path, monkeypatch, waits, status):
    """It never reads the job; "[Errno 32] Broken pipe" once made grading impossible."""
    (tmp_path / "unshare").write_text(f"#!/bin/sh\n{waits}echo not permitted >&2; exit {status}\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sandbox, "environment", lambda folder: dict(os.environ))
    for _ in range(2):
        sandbox.why_not_apart.cache_clear()
        assert ("not permitted" if status else "no sandbox came up") in sandbox.why_not_apart()
    sandbox.why_not_apart.cache_clear()


@pytest.mark.parametrize(
    "platform, limits",
    [("linux", "Only time, memory, the number"), ("darwin", "Only time and the size of a file")],
)
def test_what_holds_without_a_sandbox_is_said_of_this_system(platform, limits, monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "why_not_apart", lambda: "no namespaces")
    monkeypatch.setattr(sandbox.sys, "platform", platform)
    assert command.may_run(without_sandbox=True) is False
    assert limits in capsys.readouterr().out


def test_where_no_system_lists_the_family_its_group_ends_with_the_grader(tmp_path):
    """macOS is like that. `sleep` has lost its parent, so it is not a child of the first process;
    it holds the pipe open as long as it lives."""
    lines = [
        "import os, subprocess, sys",
        "from mini_dist.course.grade import inside",
        "sys.platform = 'darwin'",
        "subprocess.run('sleep 90 &', shell=True)",
        "inside.end_with_the_grader()",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    process = subprocess.Popen(
        command, **pipes, env=sandbox.environment(str(tmp_path)), start_new_session=True
    )
    process.communicate(timeout=60)


# ---- the sandbox ---------------------------------------------------------------------------------


def test_a_sandbox_that_lasts_too_long_is_ended_with_all_that_it_started(apart):
    before = usage.family(os.getpid())
    found = sandbox.run("probe", {}, Limits(seconds=0), apart=True)
    assert found.cut_short == "it took longer than 0 s"
    assert usage.family(os.getpid()) == before


def probe(**job):
    (said,) = sandbox.run("probe", job, Limits(disk=64 << 20), apart=True).messages
    assert said.pop("apart")
    return said


def test_it_shows_the_library_and_no_file_of_anybody(apart, tmp_path):
    secret, library = tmp_path / "grades.csv", sandbox.__file__
    secret.write_text("ada,3")
    homes = ["/root/.bashrc", "/etc/shadow", "/run", "/sys", "/var/spool"]
    assert probe(read=[str(secret), library, *homes])["read"] == [library]


def test_nothing_of_the_host_can_be_written_to(apart, tmp_path):
    paths = [f"{os.path.dirname(sandbox.__file__)}/x.py", "/usr/x", "/bin/x", f"{sys.prefix}/x"]
    assert probe(write=[*paths, "/tmp/x", "x", "/dev/shm/x"])["write"] == [
        *("/tmp/x", "x", "/dev/shm/x")
    ]
    assert not any(map(os.path.exists, [*paths, "/tmp/x", "/dev/shm/x"]))


def test_who_is_root_cannot_change_the_kernel_or_its_devices_by_being_root(apart):
    """/proc/sys checks the user outside, not capabilities; core_pattern would run a program."""
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/sysrq-trigger"]
    assert probe(write=[*paths, "/dev/null"])["write"] == ["/dev/null"]
    before = os.stat("/dev/null").st_mode
    assert probe(chmod=["/dev/null", *paths])["chmod"] == []
    assert os.stat("/dev/null").st_mode == before


def test_memory_that_no_process_shows_is_refused(apart):
    assert probe(memfd=True) == {"memfd": False}


def test_the_kernel_makes_it_no_semaphores_no_queues_and_no_odd_sockets(apart):
    """Their memory is counted nowhere: 0.8 GB in semaphores went unseen."""
    families = [socket.AF_UNIX, socket.AF_INET, 38, 40]  # AF_ALG, AF_VSOCK
    said = probe(queues=True, families=families, buffer=4 << 20)
    assert said["queues"] == [] and said["families"] == families[:2]
    assert said["buffer"] < usage.OF_A_SOCKET


HIDDEN = {"sockets": 500, "tables": 64 << 30, "pipes": 2000}


@pytest.mark.parametrize("kind", HIDDEN)
def test_memory_that_the_kernel_holds_for_it_counts(apart, kind):
    """1,900 pairs of sockets once queued 3.7 GB under --memory 2. Here 500 reach 0.1 GB."""
    most = {"sockets": 100 << 20, "tables": 100 << 20, "pipes": 40 << 20}[kind]
    said = sandbox.run("probe", {kind: HIDDEN[kind]}, Limits(30, memory=most), apart=True)
    assert "GB of memory, up to 0." in said.cut_short and "in the kernel" in said.cut_short


@pytest.fixture
def group():
    if cgroups.where_groups_go() is None:
        pytest.skip("this process may make no cgroup that limits memory")
    group = cgroups.group_of(100 << 20)
    yield group
    group.remove()
    assert not group.path.exists()


def hold(kind, number):
    """Return a command that holds this memory, as `probe` does."""
    held = f"probe.{kind}({number})"
    return [sys.executable, "-c", f"from mini_dist.course.grade import probe; held = {held}"]


@pytest.mark.parametrize(
    "held", [("fill_sockets", 500), ("touch_pages", 64 << 30), ("fill_pipes", 1900)]
)
def test_a_cgroup_counts_what_the_kernel_holds(group, held):
    """It counts messages in Unix sockets and pipes, and page tables (measured on cgroup v1)."""
    done = subprocess.run(group.entered(hold("fill_sockets", 5)), cwd=sandbox.COURSE)
    assert done.returncode == 0 and not group.went_beyond()
    done = subprocess.run(group.entered(hold(*held)), cwd=sandbox.COURSE)
    assert done.returncode == -9 and group.went_beyond()


def test_a_cgroup_bounds_what_no_look_at_processes_shows(apart, group):
    """Sockets in flight belong to no process, because their ends are closed. Nothing is left."""
    limits = Limits(60, memory=80 << 20, disk=20 << 20)
    before = sorted(group.path.parent.iterdir())
    said = sandbox.run("probe", {"in_flight": 800}, limits, apart=True)
    assert said.cut_short.endswith("GB of memory, with what the kernel holds for it")
    assert sorted(group.path.parent.iterdir()) == before


V2_FILES = {"cgroup.controllers": "cpu memory", "cgroup.subtree_control": "", "cgroup.procs": ""}


def v2_tree(folder, **files):
    folder.mkdir(parents=True)
    for name, text in (V2_FILES | files).items():
        (folder / name).write_text(text)
    return folder


def test_in_v2_memory_is_handed_down_only_from_a_group_without_other_processes(tmp_path):
    """Use folders that look like cgroup v2, because we had no machine with it."""
    mine = str(os.getpid())
    for number, (files, hands) in enumerate(
        [
            ({"cgroup.subtree_control": "memory"}, True),
            ({"cgroup.procs": f"{mine}\n1\n"}, False),
            ({"cgroup.procs": mine, "cgroup.controllers": "cpu"}, False),
        ]
    ):
        assert cgroups.hands_down_memory(v2_tree(tmp_path / str(number), **files)) is hands
    folder = v2_tree(tmp_path / "alone", **{"cgroup.procs": mine})
    (folder / "mini_dist-grader").mkdir()
    assert cgroups.hands_down_memory(folder)
    assert (folder / "mini_dist-grader/cgroup.procs").read_text() == "0"
    assert (folder / "cgroup.subtree_control").read_text() == "+memory"


OWN = {
    "v1": ("4:memory:/a/b", "1 1 0:1 / /cg/memory rw - cgroup cgroup rw,memory", "/cg/memory/a/b"),
    "v1, of a container": (
        "4:memory:/docker/1",
        "1 1 0:1 /docker/1 /cg/memory ro - cgroup cgroup rw,memory",
        "/cg/memory",
    ),
    "v2": ("0::/user/1", "1 1 0:1 / /cg rw - cgroup2 cgroup rw", "/cg/user/1"),
}


@pytest.mark.parametrize("kind", OWN)
def test_the_own_group_is_found_in_each_hierarchy(kind, tmp_path):
    groups, mounts, folder = OWN[kind]
    (tmp_path / "cgroup").write_text(f"1:cpu:/\n{groups}\n")
    (tmp_path / "mountinfo").write_text(f"2 1 0:2 / /proc rw - proc proc rw\n{mounts}\n")
    (found,) = cgroups.own_groups(tmp_path)
    assert found == (cgroups.V1 if "memory" in groups else cgroups.V2, Path(folder))


def test_its_processes_have_a_limit(apart):
    """`--long` also tries a fork bomb of a few hundred processes, which slows the host."""
    found = sandbox.run("probe", {}, Limits(processes=1), apart=True)
    assert found.cut_short == "it started more than 1 processes"


def test_its_files_have_a_limit(apart):
    assert probe(fill=32 << 20)["fill"] and not probe(fill=80 << 20)["fill"]


def test_it_does_not_reach_the_hosts_loopback(apart):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert probe(connect=server.getsockname()[1]) == {"connect": False}


def test_the_sandbox_that_was_started_early_is_a_new_one(apart):
    """It has seen no other job, its time begins with its own job, and at the end it is gone."""
    before = usage.family(os.getpid())
    slot = sandbox.Slot(Limits(seconds=5, disk=64 << 20), apart=True)
    (first,) = slot.run("probe", {"write": ["/tmp/x", "x"]}, then="probe").messages
    early = slot.ahead["probe"]
    time.sleep(5.5)
    found = slot.run("probe", {"read": ["/tmp/x", "x", "/usr"]}, then="probe")
    assert first == {"apart": True, "write": ["/tmp/x", "x"]} and early.process.poll() is not None
    assert found.messages == [{"apart": True, "read": ["/usr"]}] and not found.cut_short
    folder = slot.ahead["probe"].folder.name
    slot.ahead["probe"].process.kill()
    slot.ahead["probe"].process.wait()
    assert slot.run("probe", {}, then="probe").messages == [{"apart": True}]
    assert not os.path.exists(folder)  # the folder of the one that died
    folder = slot.ahead["probe"].folder.name
    slot.close()
    assert usage.family(os.getpid()) == before and not os.path.exists(folder)


@pytest.mark.parametrize("apart_", [True, False])
def test_time_is_enforced_by_the_sandbox_itself(apart, apart_, monkeypatch):
    """The limit holds even if the grader is busy; here the grader watches nothing."""
    monkeypatch.setattr(sandbox, "wait", lambda process, *_: "" if process.wait(30) else "")
    began = time.monotonic()
    found = sandbox.run("probe", {"pipes": 0}, Limits(seconds=1), apart=apart_)
    assert found.cut_short == "it took longer than 1 s" and time.monotonic() - began < 15


def test_without_a_sandbox_the_limits_hold_all_the_same():
    found = sandbox.run("probe", {}, Limits(processes=0), apart=False)
    assert found.cut_short == "it started more than 0 processes"
    assert sandbox.run("probe", {}, Limits(), apart=False).messages == [{"apart": False}]


def heard(*parts):
    """Return what is heard from a worker that writes these parts, and the seconds it takes."""
    read, write = os.pipe()
    said = sandbox.Said()
    began = time.monotonic()
    with os.fdopen(read, "rb") as pipe:
        thread = threading.Thread(target=sandbox.listen, args=(pipe, said))
        thread.start()
        with os.fdopen(write, "wb") as out:
            for part in parts:
                out.write(part)
        thread.join()
    return said.messages, time.monotonic() - began


def carried(payload, **message):
    return json.dumps({"bytes": len(payload)} | message).encode() + b"\n" + payload


def test_a_payload_is_passed_on_unread():
    payload = b'{"cell": 5}\n' + b"[" * 1000
    messages, _ = heard(carried(payload, executed=True), b'{"cell": 1}\n')
    assert messages == [{"bytes": len(payload), "executed": True, "payload": payload}, {"cell": 1}]


MB = 1 << 20
FLOODS = {
    "one line of 200 MB": [b"x" * MB] * 200,
    "half a gigabyte in lines": [b'{"cell": 1}' + b" " * (MB // 8) + b"\n"] * 4096,
    "a million small messages": [b'{"cell": 2}\n' * 10_000] * 100,
    "what is large when it is read": [b'{"x": [' + b"{}," * 30 * MB + b"1]}\n"],
    "deep JSON": [b"[" * 900_000 + b"\n", b'{"x":' * 90_000 + b"\n"],
    "a payload of 200 MB": [b'{"bytes": %d}\n' % (200 * MB), *[b"x" * MB] * 200],
    "a payload of less than nothing": [b'{"bytes": -1}\n', *[b"x" * MB] * 20],
    "quotes that end nowhere": [b'"\\' * MB * 10],
}


@pytest.mark.parametrize("name", FLOODS)
def test_what_a_worker_says_is_cut_while_it_is_read(name):
    """It takes little memory and time; a regular expression once hung on a message of 64 MB."""
    tracemalloc.start()
    messages, seconds = heard(b'{"cell": 1}\n', *FLOODS[name])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert messages[0] == {"cell": 1}
    assert most < 64 * MB and seconds < 30, (most / MB, seconds)


def slot_that_says(monkeypatch, *said):
    monkeypatch.setattr(sandbox.Slot, "run", lambda *_, **__: sandbox.Said([*said]))
    return sandbox.Slot(Limits(), apart=True)


def messages(monkeypatch, *said):
    slot = slot_that_says(monkeypatch, *said)
    (lesson,) = (each for each in lessons(sandbox.COURSE / "notebooks") if each.stem[:2] == "07")
    notebook = grading.Notebook("a.ipynb", lesson.stem)
    run = grading.run(notebook, "", CELLS, Submission("ada"), lesson, slot)
    return run, notebook


CELLS = [Cell("", "code", source) for source in ("", "a = 1", "b = 2")]
CELLS.insert(2, Cell("", "markdown", "# b"))


def test_a_notebook_may_say_anything_and_no_more_than_its_own_grading_suffers(monkeypatch):
    odd = [{"kept": []}, {"kept": {}}, {"trouble": [[]]}, {"cell": "x"}, {"executed": True}, {}]
    odd += [{"executed": True, "payload": [1]}, {"kept": "x", "payload": "x"}]
    assert messages(monkeypatch, *odd) == (
        ({}, b""),
        grading.Notebook("a.ipynb", "07_zero"),
    )


@pytest.mark.parametrize(
    "last, place",
    [(-1, "in code cell [1]"), (1, "in code cell [2]"), (3, "after its last cell")],
)
def test_a_notebook_that_was_cut_short_says_in_which_cell(last, place):
    assert grading.where(CELLS, last) == place


def test_where_the_grader_fails_for_one_learner_the_others_are_graded(tmp_path, monkeypatch):
    for name in ("ada", "bela"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "x.txt").write_text("")

    def fails(submission, *_, **__):
        if submission.learner == "ada":
            raise RuntimeError("half of a pair: \ud800")
        return grading.Record(submission.learner, "", problems=["seen"])

    monkeypatch.setattr(command, "grade", fails)
    monkeypatch.setattr(command, "may_run", lambda _: True)
    assert command.main([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out/grades.csv").read_text(encoding="utf-8-sig")
    assert "bela,0,0,,seen" in text and "the grader failed: RuntimeError" in text
    assert not (tmp_path / "out/ada/grade.json").exists()  # so it is tried again


def test_of_one_lesson_no_more_than_three_notebooks_run(tmp_path, monkeypatch):
    slot = slot_that_says(monkeypatch, {"executed": True, "payload": b"\xff"})
    submission = Submission("ada", {f"{n}.ipynb": text_of(step("")) for n in range(5)})
    known = lessons(sandbox.COURSE / "notebooks")
    record = grading.grade(submission, known, tmp_path, slot, done=lambda path: None)
    assert len(record.notebooks) == 3 and len(record.problems) == 2
    assert "4.ipynb did not run" in record.problems[1]


# ---- the judge -----------------------------------------------------------------------------------


def refuses(data) -> bool:
    try:
        from_frames([data])
    except judge.NotData:
        return True
    return False


def test_a_record_of_a_trial_is_data():
    import torch

    from mini_dist import Layout
    from mini_dist.course.check.fast_data_parallel import Left
    from mini_dist.plan.schedule import one_f_one_b
    from mini_dist.ranks.rank import Report

    for value in (Report("returned"), Layout(dp=2), one_f_one_b(2, 2), torch.float32, {1, 2}):
        assert not refuses(pickle.dumps(value)), value
    assert judge.is_data(Left.__module__, Left.__name__)


@pytest.mark.parametrize(
    "value",
    [exec, os.system, print, getattr, type, command.main, pickle.loads, lambda: 1, judge.Sealed],
    ids=lambda value: value.__qualname__,
)
def test_a_function_is_not(value):
    assert refuses(cloudpickle.dumps(value))


@pytest.mark.parametrize(
    "module, name",
    [("mini_dist.course.check.engine", "Verdict"), ("mini_dist.ranks.rank", "Report")],
)
def test_an_answer_changes_no_type(module, name):
    """BUILD, pickle's last step for an instance, would also change a type."""

    def text(t):
        return b"X" + struct.pack("<I", len(t)) + t.encode()

    for state in (b"N}" + text("state") + text("right") + b"s\x86", b"}"):
        data = b"\x80\x05" + text(module) + text(name) + b"\x93" + state + b"b."
        with pytest.raises(judge.NotData, match="would change a type"):
            judge.read(data)


def test_the_judge_reads_what_is_data_as_pickle_does():
    from mini_dist.ranks.rank import Report

    data = pickle.dumps([Report("returned", ledger={"comms": [1.5, None]}), {1: (2, b"3")}])
    assert judge.read(data) == pickle.loads(data)


def test_a_name_within_a_name_is_not():
    assert not judge.is_data(
        "mini_dist.course.check.fast_data_parallel", "Left.__init__.__globals__"
    )


def test_a_sealed_function_is_opened_by_who_unpickles_it_and_not_before():
    opened = []
    data = pickle.dumps(judge.Sealed("f", cloudpickle.dumps(opened)))
    assert pickle.loads(data) == [] and "call" in str(
        pytest.raises(RuntimeError, judge.Sealed("f", b""))
    )


def test_the_clinic_is_judged_by_what_its_answers_say(apart):
    """Its answers come from another process, not from a rank, and are trusted no more."""
    from tests.course.exercises import solutions

    job = {
        "answers": {"diagnoses": base64.b64encode(cloudpickle.dumps(solutions.diagnoses)).decode()}
    }
    (said,) = sandbox.run("judge", job, Limits(), apart=True).messages
    assert (said["judged"], said["state"]) == ("diagnoses", "right"), json.dumps(said)


@pytest.mark.parametrize("name", ["missing_collective", "diagnose_slow"])
def test_what_is_answered_on_no_rank_is_asked_on_one_by_a_grader(name):
    """The judging process unpickles no function, so a rank calls it instead."""
    from tests.course.exercises import solutions

    verdict = judge.judge(name, cloudpickle.dumps(getattr(solutions, name)))
    assert verdict.state == "right", verdict
