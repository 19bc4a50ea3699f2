"""Token files and streams: every sample once per epoch, the same batches on any number of ranks."""

import threading
import time

import numpy as np
import pytest
import torch

from mini_dist import launch
from mini_dist.training.stream import (
    END_OF_DOCUMENT,
    TokenStream,
    next_samples,
    prefetched,
    write_tokens,
)

DOCUMENTS = ["a short one", "ä longer one " * 9, "", "b" * 200, "the last"]


class Ranks:
    """A group that sends nothing."""

    device = torch.device("cpu")

    def __init__(self, rank=0, size=1):
        self.index, self.many = rank, size

    def rank(self):
        return self.index

    def size(self):
        return self.many


def tokens_of(documents) -> list[int]:
    return [t for document in documents for t in [*document.encode(), END_OF_DOCUMENT]]


def order(epoch: int) -> list[int]:
    return np.random.default_rng(epoch).permutation(11).tolist()


@pytest.mark.parametrize("tokens_per_file", [1, 7, 50, 10_000])
def test_files_hold_all_documents_in_order(tmp_path, tokens_per_file):
    files = write_tokens(iter(DOCUMENTS), tmp_path, tokens_per_file)
    read = [np.fromfile(file, "<u2") for file in files]
    assert [t for one in read for t in one.tolist()] == tokens_of(DOCUMENTS)
    assert all(len(one) == tokens_per_file for one in read[:-1])


def test_a_folder_with_files_is_not_written_to(tmp_path):
    write_tokens(DOCUMENTS, tmp_path, 100)
    with pytest.raises(ValueError, match="has 4 files of tokens: give an empty folder"):
        write_tokens(DOCUMENTS, tmp_path, 100)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("position", [0, 5, 9, 20, 11 * 10**9])
def test_the_ranks_together_have_one_process_batch(size, position):
    whole = [order(n // 11)[n % 11] for n in range(position, position + 7)]
    came = [next_samples(position, 7, 11, order, Ranks(rank, size)) for rank in range(size)]
    assert [s for samples, _ in came for s in samples] == whole
    assert {after for _, after in came} == {position + 7}
    assert max(len(s) for s, _ in came) - min(len(s) for s, _ in came) <= 1


def test_a_batch_may_be_longer_than_an_epoch():
    samples, after = next_samples(4, 30, 11, order, Ranks())
    assert samples == [order(n // 11)[n % 11] for n in range(4, 34)] and after == 34


def test_an_order_is_drawn_once_in_a_call():
    drawn = []
    next_samples(5, 20, 11, lambda epoch: drawn.append(epoch) or order(epoch), Ranks())
    assert sorted(drawn) == [0, 1, 2]


def test_each_sample_is_what_the_files_say(tmp_path):
    write_tokens(DOCUMENTS, tmp_path, 101)
    stream = TokenStream(tmp_path, batch_size=4, seq_len=8, group=Ranks())
    tokens, expected = tokens_of(DOCUMENTS), []
    for start in range(0, len(tokens), 101):
        file = tokens[start : start + 101]
        expected += [file[i : i + 9] for i in range(0, len(file) - 8, 8)]
    assert [stream.sample(n).tolist() for n in range(stream.num_samples)] == expected


def test_an_epoch_has_every_sample_once_and_the_next_another_order(tmp_path):
    write_tokens(DOCUMENTS, tmp_path, 101)
    stream = TokenStream(tmp_path, batch_size=4, seq_len=8, group=Ranks())
    first, second = stream.order(0).tolist(), stream.order(1).tolist()
    assert sorted(first) == sorted(second) == list(range(stream.num_samples)) and first != second
    assert TokenStream(tmp_path, 4, 8, Ranks(), seed=1).order(0).tolist() not in (first, second)


def two_worlds(folder, position, steps, group):
    stream, rows = TokenStream(folder, 6, 8, group), []
    for _ in range(steps):
        inputs, targets, position = stream.batch(position)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        rows.append(inputs)
    return rows, position


def test_a_run_goes_on_exactly_on_another_number_of_ranks(tmp_path):
    write_tokens(DOCUMENTS, tmp_path, 101)

    def run(size, position, steps):
        came = launch(two_worlds, size, (tmp_path, position, steps)).results
        return [torch.cat(rows) for rows in zip(*(rows for rows, _ in came))], came[0][1]

    alone, _ = run(1, 0, 9)
    before, position = run(2, 0, 4)
    after, _ = run(4, position, 5)  # 6 samples on 4 ranks
    assert all(torch.equal(a, b) for a, b in zip(alone, before + after))


def test_only_what_a_batch_touches_is_read(tmp_path):
    stream = TokenStream(*_written(tmp_path), seq_len=8, group=Ranks())
    assert all(isinstance(file, np.memmap) for file in stream.files)


def _written(folder):
    write_tokens(DOCUMENTS, folder, 101)
    return folder, 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"folder": "no-such-folder"}, "no-such-folder has no .*tokens files"),
        ({"seq_len": 101}, "has 101 tokens, but one sample of seq_len=101 needs 102"),
        ({"batch_size": 0}, "batch_size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, change, message):
    write_tokens(DOCUMENTS, tmp_path, 101)
    given = {"folder": tmp_path, "batch_size": 4, "seq_len": 8, "group": Ranks()} | change
    with pytest.raises(ValueError, match=message):
        TokenStream(**given)


# ---- prefetched ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers, ahead", [(1, 1), (1, 5), (3, 2), (4, 9)])
def test_results_come_in_order(workers, ahead):
    def slow_when_even(n):
        time.sleep(0.002 * (n % 2 == 0))
        return n * n

    came = prefetched(slow_when_even, iter(range(9)), workers=workers, ahead=ahead)
    assert list(came) == [n * n for n in range(9)]


def test_it_loads_ahead_and_no_further():
    loaded = []
    batches = prefetched(lambda n: loaded.append(n) or n, range(9), ahead=2)
    assert next(batches) == 0
    batches.close()  # waits for loads that have begun
    assert set(loaded) <= {0, 1, 2}


def test_workers_load_at_the_same_time():
    meet = threading.Barrier(3, timeout=5)
    assert list(prefetched(lambda n: meet.wait() >= 0, range(3), workers=3, ahead=3)) == [True] * 3


def test_an_error_comes_when_its_result_is_due():
    batches = prefetched(lambda n: 1 // (n - 2), range(5), ahead=3)
    assert [next(batches), next(batches)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(batches)


def test_no_thread_is_left_when_the_caller_stops_early():
    batches = prefetched(lambda n: n, range(100), workers=2, ahead=4)
    next(batches)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("prefetch")]
