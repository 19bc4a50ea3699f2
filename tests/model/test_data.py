import hashlib

import numpy as np
import pytest
import torch

from mini_dist.model.data import VOCAB_SIZE, Batches, decode, encode, load_text
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.plan.config import ModelConfig

# Byte i is i, so an input tells its position in the text.
COUNTING = torch.arange(251, dtype=torch.uint8)  # 25 samples of 10, and the last target


def epoch_of(batches, epoch=0):
    first = epoch * batches.steps_per_epoch
    return [batches.sample_indices(first + step) for step in range(batches.steps_per_epoch)]


def test_targets_are_the_next_byte():
    batches = Batches(COUNTING, batch_size=5, seq_len=10)
    for step in range(batches.steps_per_epoch):
        inputs, targets = batches.batch(step)
        assert inputs.shape == targets.shape == (5, 10)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs[:, 0], 10 * batches.sample_indices(step))


def test_an_epoch_has_every_byte_as_an_input_once():
    batches = Batches(COUNTING, batch_size=5, seq_len=10)
    seen = torch.cat([batches.batch(step)[0].flatten() for step in range(batches.steps_per_epoch)])
    assert seen.sort().values.tolist() == list(range(250))


@pytest.mark.parametrize("num_bytes, num_samples", [(249, 24), (250, 24), (251, 25), (252, 25)])
def test_the_last_sample_needs_a_last_target(num_bytes, num_samples):
    batches = Batches(COUNTING[:num_bytes], batch_size=1, seq_len=10)
    assert batches.num_samples == batches.steps_per_epoch == num_samples
    last = max(int(batches.batch(step)[1].max()) for step in range(num_samples))
    assert last == 10 * num_samples


@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("tail", ["drop", "pad"])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_ranks_share_the_samples_of_an_epoch(size, tail, epoch):
    ranks = [
        Batches(COUNTING, batch_size=12, seq_len=10, rank=rank, size=size, tail=tail)
        for rank in range(size)
    ]
    used = torch.cat([torch.cat(epoch_of(batches, epoch)) for batches in ranks]).sort().values
    assert len(used.unique()) == len(used)  # no sample twice
    assert len(used) == (24 if tail == "drop" else 25)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_the_ranks_rows_together_are_the_batch_of_one_process(tail):
    alone = Batches(COUNTING, batch_size=8, seq_len=10, tail=tail)
    ranks = [
        Batches(COUNTING, batch_size=8, seq_len=10, rank=rank, size=4, tail=tail)
        for rank in range(4)
    ]
    for step in range(2 * alone.steps_per_epoch):
        parts = [batches.batch(step) for batches in ranks]
        for mine, whole in zip(zip(*parts), alone.batch(step)):
            assert torch.equal(torch.cat(mine), whole)


def test_a_padded_tail_keeps_shapes_and_counts_every_token_once():
    ranks = [
        Batches(COUNTING, batch_size=8, seq_len=10, rank=rank, size=4, tail="pad")
        for rank in range(4)
    ]
    last = ranks[0].steps_per_epoch - 1  # 25 = 3 * 8 + 1: one sample for four ranks
    parts = [batches.batch(last) for batches in ranks]
    assert [targets.shape for _, targets in parts] == [(2, 10)] * 4
    assert [int((targets != IGNORE_INDEX).sum()) for _, targets in parts] == [10, 0, 0, 0]
    assert all(inputs.min() >= 0 and inputs.max() < VOCAB_SIZE for inputs, _ in parts)

    # With token_loss's sum and count, the epoch's loss counts every sample once.
    model = GPT(ModelConfig(d_model=16, num_layers=1, num_heads=2, seq_len=10)).double()
    losses = [
        token_loss(model(inputs), targets)
        for batches in ranks
        for inputs, targets in map(batches.batch, range(batches.steps_per_epoch))
    ]
    whole = COUNTING.long()
    expected = token_loss(model(whole[:-1].view(25, 10)), whole[1:].view(25, 10))
    assert sum(loss.num_tokens for loss in losses) == expected.num_tokens == 250
    torch.testing.assert_close(sum(loss.total for loss in losses), expected.total)


def test_a_full_last_batch_is_kept_by_both_tails():
    for tail in ("drop", "pad"):
        batches = Batches(COUNTING, batch_size=5, seq_len=10, tail=tail)
        assert batches.steps_per_epoch == 5
        assert (batches.batch(4)[1] != IGNORE_INDEX).all()


def test_a_batch_depends_on_its_step_and_on_nothing_else():
    straight = Batches(COUNTING, batch_size=6, seq_len=10, rank=1, size=2, seed=7)
    wanted = [straight.batch(step) for step in range(10)]
    torch.manual_seed(99)
    np.random.seed(99)
    resumed = Batches(COUNTING, batch_size=6, seq_len=10, rank=1, size=2, seed=7)
    for step in (9, 0, 5, 5, 3):  # past an epoch's end and back
        for mine, theirs in zip(resumed.batch(step), wanted[step]):
            assert torch.equal(mine, theirs)


def test_drawing_batches_leaves_the_random_states_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    Batches(COUNTING, batch_size=5, seq_len=10).batch(3)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


def test_writing_into_a_batch_does_not_change_the_next():
    batches = Batches(COUNTING, batch_size=5, seq_len=10)
    before = batches.sample_indices(0).clone()
    batches.sample_indices(0).zero_()
    batches.batch(0)[0].zero_()
    assert torch.equal(batches.sample_indices(0), before)


def test_every_epoch_and_every_seed_has_an_order_of_its_own():
    def order(seed, epoch):
        batches = Batches(COUNTING, batch_size=5, seq_len=10, seed=seed)
        return tuple(torch.cat(epoch_of(batches, epoch)).tolist())

    orders = {order(seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9  # seed + epoch would give 5
    assert tuple(range(25)) not in orders


def test_the_tail_that_is_dropped_differs_between_epochs():
    batches = Batches(COUNTING, batch_size=12, seq_len=10)
    dropped = {25 * 24 // 2 - int(torch.cat(epoch_of(batches, epoch)).sum()) for epoch in range(8)}
    assert len(dropped) > 1


def test_a_text_just_long_enough_works_and_one_byte_less_is_refused():
    assert Batches(COUNTING[:41], batch_size=4, seq_len=10).steps_per_epoch == 1
    with pytest.raises(ValueError, match="text has 40 bytes, but 41 are needed"):
        Batches(COUNTING[:40], batch_size=4, seq_len=10)
    assert Batches(COUNTING[:11], batch_size=4, seq_len=10, tail="pad").steps_per_epoch == 1
    with pytest.raises(ValueError, match="text has 10 bytes, but 11 are needed"):
        Batches(COUNTING[:10], batch_size=4, seq_len=10, tail="pad")
    with pytest.raises(ValueError, match="text has 0 bytes"):
        Batches(encode(""), batch_size=4, seq_len=10)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch_size": 6, "size": 4}, "batch_size is 6.*4 ranks.*nearest that works is (4|8)"),
        ({"batch_size": 1, "size": 4}, "batch_size is 1.*nearest that works is 4"),
        ({"batch_size": 0}, "batch_size=0 is too small: give 1 or more"),
        ({"batch_size": 4.0}, "batch_size=4.0 is not a whole number"),
        ({"seq_len": 0}, "seq_len=0 is too small"),
        ({"size": 0}, "size=0 is too small"),
        ({"rank": 4, "size": 4}, r"rank is 4: with size=4 it must be in 0\.\.3"),
        ({"rank": -1, "size": 4}, "rank is -1"),
        ({"seed": -1}, "seed=-1 is too small"),
        ({"tail": "keep"}, "tail is 'keep': it must be 'drop' or 'pad'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_by_name(wrong, message):
    with pytest.raises(ValueError, match=message):
        Batches(COUNTING, **{"batch_size": 4, "seq_len": 10, **wrong})


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step is -1"):
        Batches(COUNTING, batch_size=5, seq_len=10).batch(-1)


def test_encode_and_decode_are_inverse_for_any_text():
    for text in ("", "plain", "分布式训练 – Ελληνικά", "line\r\nline\0"):
        tokens = encode(text)
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == list(text.encode("utf-8"))
        assert decode(tokens) == text


def test_decode_marks_bytes_that_are_no_text():
    assert decode(torch.tensor([72, 105, 255])) == "Hi\ufffd"


def test_the_course_has_one_text_under_every_python_and_it_is_long_enough():
    """The bytes must not change: every loss that a lesson shows was computed from them."""
    tokens = load_text()
    assert hashlib.sha256(bytes(tokens.tolist())).hexdigest().startswith("71f2ff5d99bdc1f9")
    assert tokens.dtype == torch.uint8 and tokens.ndim == 1
    assert len(tokens) > 300_000
    assert 'The "assert" statement' in decode(tokens)
    Batches(tokens, batch_size=64, seq_len=1024)


def test_any_file_can_be_the_text_byte_for_byte(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"one\r\ntwo\xff")
    for given in (path, str(path)):
        assert load_text(given).tolist() == list(b"one\r\ntwo\xff")


def test_an_empty_or_missing_file_is_named(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.txt is empty \(0 bytes\)"):
        load_text(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        load_text(tmp_path / "missing.txt")
