"""Test launch in torchrun's world: its deadline holds, and a silent host is named.

Two processes on two hosts have torchrun's environment; test_cluster.py runs torchrun itself.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SILENT = (
    r"^RankError: rank 0 of 2 \(host 0\): host 1 \(rank 1, 10\.77\.0\.2\) has not answered for "
    r"1[5-9] s\. Its cable is pulled, a switch between is off, or the host itself is\."
)
LATE = (
    r"^RankTimeout: rank {0} of 2 \(host {0}\): not done after 10 s, the timeout of this launch\."
)
ALONE = r" It has not joined the others\. \(GLOO_SOCKET_IFNAME, how gloo gets out: lo\)"
FAULTS = {  # launch timeout; fewest seconds until the ranks end; what the ranks say
    "pulls": (
        *(3600, 15, SILENT + r" (recv|send) of 2,000 bytes with rank 1 began [\d.]+ s ago and is "),
        r"^RankError: rank 1 of 2 \(host 1\): host 0 \(rank 0, 10\.77\.0\.1\) has not answered",
    ),
    "idle": (
        *(3600, 15, SILENT + r" recv of 4,000 bytes with rank 1 began [\d.]+ s ago and is not "),
        r"^RankError: rank 1 of 2 .* It waits for nobody\.\n(.*\n)*?.* in idle\n    time\.sleep",
    ),
    "large": (
        *(3600, 15, SILENT + r" send of 100,000,000 bytes with rank 1 began [\d.]+ s ago and is "),
        r"^RankError: rank 1 of 2 .* recv of 100,000,000 bytes with rank 0 began ",
    ),
    "goes on": (
        *(10, 10, LATE.format(0) + r" (recv|send) of 2,000 bytes with rank 1 began [\d.]+ s ago "),
        LATE.format(1) + r" It waits for nobody\.\n(.*\n)*?.* in steps\n    time\.sleep\(600\)",
    ),
    "wrong interface": (
        *(10, 0, r"RankError: rank [01] of 2 \(host [01]\): .*Connection refused.*" + ALONE),
        LATE.format("[01]") + ALONE,
    ),
}


def ends(fault, timeout):
    """Return what the two ranks said, and rank -> (exit status, seconds from its start)."""
    command = [sys.executable, "-m", "tests.ranks.as_torchrun", fault, str(timeout)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if "no hosts on this machine" in done.stderr:
        pytest.skip(done.stderr.strip())
    told = re.findall(r"^rank (\d) ended with (\d+) after ([\d.]+) s$", done.stdout, re.M)
    assert len(told) == 2, done.stderr[-3000:]
    return done.stderr, {int(rank): (int(code), float(took)) for rank, code, took in told}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_under_torchrun_ends_every_rank_with_a_sentence_and_within_its_time(fault):
    timeout, soonest, *sentences = FAULTS[fault]
    said, ended = ends(fault, timeout)
    for sentence in sentences:
        assert re.search(sentence, said, re.M), said[-3000:]
    for code, seconds in ended.values():
        assert code == 1 and soonest < seconds < soonest + 25  # 4 s are enough on a quiet machine


def test_a_rank_that_is_only_late_is_waited_for():
    said, ended = ends("late", 200)
    assert [code for code, _ in ended.values()] == [0, 0] and "Rank" not in said
    assert ended[1][1] >= 20
