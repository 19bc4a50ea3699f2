"""The check before a long run reports what is wrong with hosts and links, and nothing else."""

import dataclasses

import pytest

from mini_dist import launch
from mini_dist.training import preflight
from mini_dist.training.preflight import GIB, HostReport, Limits, inspect, main, problems

WELL = [
    HostReport(
        rank,
        f"node{rank}",
        {"python": "3.12.1", "torch": "2.13.0"},
        disk_bytes=100 * GIB,
        writable=True,
        memory_bytes=64 * GIB,
        gpus=8,
        latency=2e-5 * (1 + 0.1 * rank),
        bandwidth=20e9 * (1 - 0.05 * rank),
        offset=1e-3 * rank,
    )
    for rank in range(4)
]


def told(rank=0, **changes):
    reports = list(WELL)
    reports[rank] = dataclasses.replace(reports[rank], **changes)
    return problems(reports, Limits())


def test_of_hosts_that_are_well_nothing_is_said():
    assert problems(WELL, Limits()) == []
    alone = dataclasses.replace(WELL[0], latency=None, bandwidth=None, offset=None)
    assert problems([alone], Limits()) == []


@pytest.mark.parametrize(
    "rank, changes, says",
    [
        (2, {"versions": {"python": "3.12.1", "torch": "2.12.0"}}, "rank 2 has 2.12.0"),
        (1, {"versions": {"python": "3.12.1"}}, "torch is not the same everywhere"),
        (3, {"gpus": 7}, "numbers of GPUs differ: [8, 8, 8, 7]"),
        (1, {"writable": False}, "rank 1 on node1 cannot write"),
        (0, {"disk_bytes": 9 * GIB}, "rank 0 on node0 has 9.0 GiB of disk, and 10.0 are wanted"),
        (2, {"memory_bytes": GIB // 2}, "has 0.5 GiB of memory left"),
        (3, {"offset": -2.0}, "the clock of node0 (rank 0) is -2000 ms from that of node3"),
        (2, {"bandwidth": 1e9}, "link from rank 2 to rank 3 carries 1.00 GB/s"),
        (3, {"latency": 5e-3}, "a message from rank 3 to rank 0 takes 5000 us"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_and_nothing_else(rank, changes, says):
    (problem,) = told(rank, **changes)
    assert says in problem and problem.endswith(".")


def test_a_clock_is_only_as_well_known_as_the_round_trip_is_short():
    slow = [dataclasses.replace(r, latency=3.0) for r in WELL]
    slow[1] = dataclasses.replace(slow[1], offset=2.0)
    assert problems(slow, Limits()) == []


def test_ranks_here_are_alike_and_everyone_knows_all_reports(tmp_path):
    run = launch(inspect, 3, (str(tmp_path / "not/yet"),))
    assert run.results[0] == run.results[1] == run.results[2]
    reports = run.results[0]
    assert [r.rank for r in reports] == [0, 1, 2]
    assert len({(r.host, tuple(r.versions.items())) for r in reports}) == 1
    for report in reports:
        assert report.writable and report.disk_bytes > 0 and report.memory_bytes > 0
        assert report.latency > 0 and report.bandwidth > 0
        # All ranks share one clock, so the offset is only the error of the round trip.
        assert abs(report.offset) < 1


def test_one_rank_has_no_link():
    (report,) = launch(inspect, 1, (".",)).results[0]
    assert report.latency is report.bandwidth is report.offset is None


@pytest.mark.parametrize("found, status", [([], 0), (["the link is cut."], 1)])
def test_the_exit_status_tells_a_job_script(found, status, monkeypatch, capsys):
    monkeypatch.setattr(preflight, "problems", lambda reports, limits: found)
    assert main(["--ranks", "2"]) == status
    told = capsys.readouterr().out
    assert ("ready" in told.splitlines()) == (status == 0)
    assert ("NOT READY: the link is cut." in told) == (status == 1)
