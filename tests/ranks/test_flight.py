"""Test the flight recorder with several threads per rank (overlap, background checkpoints)."""

import sys
import threading

from mini_dist.ranks.flight import ENTRIES, FlightRecorder, read


def test_operations_begun_by_several_threads_are_all_written_and_counted(tmp_path):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for attempt in range(20):
            path = str(tmp_path / f"flight-{attempt}")
            recorder = FlightRecorder(path)
            each = ENTRIES // 5  # so that none is overwritten

            def speak(name, recorder=recorder, each=each):
                for _ in range(each):
                    recorder.begin(f"collective {name}", "all_reduce", "all_reduce()", waits=False)

            threads = [threading.Thread(target=speak, args=(f"group{n}",)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            entries = read(path).entries
            assert [entry.number for entry in entries] == list(range(4 * each))
            for number in range(4):
                mine = [e.k for e in entries if e.channel == f"collective group{number}"]
                assert mine == list(range(1, each + 1))
    finally:
        sys.setswitchinterval(before)
