"""train_step is one process's step, for a single model and for averaged ones."""

import itertools

import pytest
import torch
from torch import nn

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.data import Batches
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.model.recompute import recompute_blocks
from mini_dist.strategies import zero
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.precision import FULL, LossScaler, Precision
from mini_dist.strategies.train import split, train_step

CONFIG = ModelConfig(
    vocab_size=256, d_model=16, num_layers=3, num_heads=2, seq_len=8, tied_embedding=True
)
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
STEPS, BATCH = 5, 12
KINDS = {"naive": Naive, "bucketed": Bucketed, "overlapped": Overlapped}
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread as on the ranks, because two threads add in a different order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(step, rank=0, size=1):
    """Return rows with 8, 7, ..., 1 valid targets: ranks and micro-batches have unequal counts."""
    batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=rank, size=size)
    inputs, targets = batches.batch(step)
    for row in range(len(targets)):
        counting = 8 - (rank * len(targets) + row + step) % 8
        targets[row, counting:] = IGNORE_INDEX
    return inputs, targets


def wrap(kind, gpt, group):
    if kind == "alone":
        return gpt
    return KINDS[kind](gpt, group, **({} if kind == "naive" else {"bucket_bytes": 20_000}))


def train(kind, cases, group=None, dtype=torch.float64, optimizer="adamw"):
    """Return [(losses, norms, parameters)] per case. Ranks start unequal; wrapping must fix it."""
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    found = []
    for accumulation, max_norm, recompute in cases:
        gpt = recompute_blocks(GPT(CONFIG, seed=rank, dtype=dtype), *recompute)
        model = wrap(kind, gpt, group)
        stepped = OPTIMIZERS[optimizer](model.parameters())
        done = []
        for step in range(STEPS):
            micro_batches = split(*batch(step, rank, size), accumulation)
            done.append(train_step(model, stepped, micro_batches, max_norm=max_norm))
        losses, norms, _ = zip(*done)
        found.append((losses, norms, [p.detach() for p in gpt.parameters()]))
    return found


def alone(max_norm, dtype=torch.float64, optimizer="adamw"):
    """Train the oracle in plain torch: one process, whole batches, nothing from train.py."""
    model = GPT(CONFIG, seed=0, dtype=dtype)
    stepped = OPTIMIZERS[optimizer](model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(step)
        stepped.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        limit = float("inf") if max_norm is None else max_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit))
        stepped.step()
        losses.append(loss.detach())
    return losses, norms, [p.detach() for p in model.parameters()]


CASES = list(itertools.product((1, 3), (None, 0.5), (("none",), ("full", 2))))
close = dict(rtol=0, atol=1e-10)  # float64: only rounding


def compare(found, cases, dtype=torch.float64, optimizer="adamw", **tolerance):
    oracles = {max_norm: alone(max_norm, dtype, optimizer) for _, max_norm, _ in cases}
    for (losses, norms, parameters), case in zip(found, cases):
        expected_losses, expected_norms, expected = oracles[case[1]]
        torch.testing.assert_close(losses, tuple(expected_losses), **tolerance)
        torch.testing.assert_close(parameters, expected, **tolerance)
        if case[1] is None:
            assert norms == (None,) * STEPS, "nobody asked for it"
        else:
            assert max(expected_norms) > case[1], "nothing was clipped"
            torch.testing.assert_close(norms, tuple(expected_norms), **tolerance)


def test_a_model_alone_trains_as_plain_torch_does():
    compare(train("alone", CASES), CASES, **close)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_train_the_model_of_one_process(kind, size):
    """Test with and without accumulation, clipping, recomputation; token counts are unequal."""
    run = launch(train, size, (kind, CASES))
    for found in run.results:
        compare(found, CASES, **close)
        for (_, _, parameters), (_, _, first) in zip(found, run.results[0]):
            assert all(map(torch.equal, parameters, first)), "ranks agree bitwise"


def train_sharded(stage, cases, group):
    """Return (losses, norms) per case; ZeRO has its own optimizer."""
    found = []
    for accumulation, max_norm, recompute in cases:
        gpt = recompute_blocks(GPT(CONFIG, seed=group.rank(), dtype=torch.float64), *recompute)
        model = getattr(zero, f"ZeRO{stage}")(gpt, group, OPTIMIZERS["adamw"], units=gpt.blocks)
        done = []
        for step in range(STEPS):
            micro_batches = split(*batch(step, group.rank(), group.size()), accumulation)
            done.append(train_step(model, model.optimizer, micro_batches, max_norm=max_norm))
        found.append([[each[i] for each in done] for i in (0, 1)])
    return found


@pytest.mark.parametrize(("stage", "size"), [(1, 2), (2, 3), (3, 2), (3, 4)])
def test_the_same_step_trains_a_sharded_model(stage, size):
    """A wrong parameter would show in the losses and norms of five steps in float64."""
    for found in launch(train_sharded, size, (stage, CASES)).results:
        for (losses, norms), (_, max_norm, _) in zip(found, CASES):
            expected_losses, expected_norms, _ = alone(max_norm)
            torch.testing.assert_close(losses, expected_losses, **close)
            if max_norm is not None:
                torch.testing.assert_close(norms, expected_norms, **close)


def in_float32(kind, optimizer, group):
    return train(kind, CASES[-1:], group, torch.float32, optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_sgd_agrees_in_parameters_adamw_only_in_losses(kind):
    """AdamW divides a gradient by its own size, so even rounding noise makes a full step."""
    run = launch(in_float32, 3, (kind, "sgd"))
    compare(run.results[0], CASES[-1:], torch.float32, "sgd", rtol=0, atol=1e-5)
    run = launch(in_float32, 3, (kind, "adamw"))
    losses, expected = run.results[0][0][0], alone(0.5, torch.float32)[0]
    torch.testing.assert_close(losses, tuple(expected), rtol=0, atol=2e-4)


def test_adamw_makes_steps_of_rounding_noise():
    """This is why only losses are compared above. With learned positions a key bias shifts all
    scores of a query equally. Softmax ignores the shift, so the bias's true gradient is zero."""
    largest = {}
    for dtype in (torch.float64, torch.float32):
        model = GPT(CONFIG.replace(positions="learned"), dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
        train_step(model, optimizer, [batch(0)])
        biases = [block.attn.k.bias for block in model.blocks]  # they start at zero
        moved = max(bias.detach().abs().max() for bias in biases)
        largest[dtype] = max(bias.grad.abs().max() for bias in biases), moved
    assert largest[torch.float64][0] < 1e-18, "zero, but for rounding"
    noise, moved = largest[torch.float32]
    assert noise > 1e-14 and moved > 1e5 * noise


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_sends_two_models_less_two_parts_and_two_numbers(kind, size):
    """Micro-batches, recomputation, clipping and the norm add no bytes here."""
    run = launch(train, size, (kind, CASES))
    steps = STEPS * len(CASES)
    gradients = 8 * GPT(CONFIG).num_parameters()  # float64; the tied embedding once
    reduced = [c for c in run.ledger.leaves(op="all_reduce") if c.dtype == "float64"]
    tokens = [c for c in run.ledger.leaves(op="all_reduce") if c.dtype == "int64"]
    losses = 8  # one float64 per step, as large as the token count
    sent = sum(comm.sent for comm in reduced)
    assert sent == steps * 2 * (size - 1) * (gradients + losses)
    assert sum(comm.sent for comm in tokens) == steps * 2 * (size - 1) * 8


# ---- unequal shares -----------------------------------------------------------------------------


def shares(kind, group):
    """Give rank 0 two micro-batches, rank 1 one without a valid target, and rank 2 none."""
    model = wrap(kind, GPT(CONFIG, dtype=torch.float64), group)
    inputs, targets = batch(0)
    mine = [split(inputs, targets, 2), [(inputs, torch.full_like(targets, IGNORE_INDEX))], []]
    done = train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), mine[group.rank()])
    return done.loss, list(model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_may_have_other_numbers_of_micro_batches_and_tokens_even_none(kind):
    model = GPT(CONFIG, dtype=torch.float64)
    inputs, targets = batch(0)
    loss = token_loss(model(inputs), targets).mean()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for our_loss, parameters in launch(shares, 3, (kind,)).results:
        torch.testing.assert_close(our_loss, loss.detach(), **close)
        torch.testing.assert_close(parameters, list(model.parameters()), **close)


def uneven_tail(group):
    """17 samples in batches of 12: the last batch of the epoch has 5 rows for 4 ranks."""
    batches = Batches(TEXT[: 17 * 8 + 1], 12, 8, rank=group.rank(), size=group.size(), tail="pad")
    model = Overlapped(GPT(CONFIG, dtype=torch.float64), group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = range(batches.steps_per_epoch)
    return [train_step(model, optimizer, [batches.batch(step)]).loss for step in steps]


def test_the_uneven_tail_of_an_epoch_counts_as_much_as_it_has():
    four, one = launch(uneven_tail, 4).results, launch(uneven_tail, 1).results[0]
    assert len(one) == 2
    for losses in four:
        torch.testing.assert_close(losses, one, **close)


def test_a_step_without_a_target_is_refused():
    model = GPT(CONFIG)
    optimizer = torch.optim.SGD(model.parameters())
    nothing = torch.full((2, 8), IGNORE_INDEX)
    for micro_batches in ([], [(torch.zeros(2, 8, dtype=torch.long), nothing)]):
        with pytest.raises(ValueError, match="no target of any rank counts"):
            train_step(model, optimizer, micro_batches)


# ---- precision ----------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def skipping(kind, group):
    """Make rank 1's gradients overflow in step 1; return what this rank did, and its scales."""
    scaler = LossScaler(scale=2.0**10, growth_interval=2)
    gpt = GPT(CONFIG)
    if kind == "overlapped":
        model = Overlapped(gpt, group)
        optimizer = sgd(model.parameters())
    else:  # the overflow is in one rank's shard, and the others cannot see it
        model = zero.ZeRO2(gpt, group, sgd, units=gpt.blocks)
        optimizer = model.optimizer
    seen = []
    for step in range(5):
        before = [p.detach().clone() for p in gpt.parameters()]

        def loss(model, inputs, targets, step=step):
            found = token_loss(model(inputs), targets)
            if (step, group.rank()) == (1, 1):  # one element of one gradient: inf
                first = gpt.blocks[0].attn.q.weight[0, 0]
                found = found._replace(total=found.total + 1e38 * 1e3 * first)
            return found

        done = train_step(
            model,
            optimizer,
            [batch(step, group.rank(), 2)],
            precision=Precision(torch.float16, scaler),
            loss=loss,
        )
        moved = not all(map(torch.equal, before, gpt.parameters()))
        seen.append((done.skipped, moved, scaler.scale))
    return seen, [p.detach() for p in gpt.parameters()]


@pytest.mark.parametrize("kind", ["overlapped", "zero2"])
def test_an_overflow_on_one_rank_makes_all_skip_shrink_and_grow_together(kind):
    (first, parameters), (second, theirs) = launch(skipping, 2, (kind,)).results
    assert first == second
    assert first == [
        (False, True, 1024.0),
        (True, False, 512.0),  # nothing moved, not even by momentum
        (False, True, 512.0),
        (False, True, 1024.0),  # two good steps in a row
        (False, True, 1024.0),
    ]
    assert all(map(torch.equal, parameters, theirs))
    assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("precision", [Precision(torch.bfloat16), Precision(scaler=LossScaler())])
def test_scaling_by_a_power_of_two_changes_no_bit_and_16_bits_change_some(precision):
    found = []
    for each in (FULL, precision):
        model = GPT(CONFIG)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(2):
            done = train_step(model, optimizer, [batch(step)], max_norm=0.5, precision=each)
        found.append((done.loss, done.norm, *(p.detach() for p in model.parameters())))
    same = all(map(torch.equal, *found))
    assert same == (precision.dtype is None)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0.01, atol=0)
