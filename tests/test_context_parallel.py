"""A sequence cut over ranks gives what one process gives, sends what it says, and is balanced."""

import math
import sys

import cloudpickle
import pytest
import torch

from mini_dist import GPT, ModelConfig, launch
from mini_dist.context_parallel import (
    FORMS,
    KERNELS,
    Kernel,
    Partial,
    contiguous,
    make_attention,
    merge,
    num_scores,
    online_softmax,
    positions_here,
    shard,
    share_of_mean,
    sum_gradients,
    unshard,
    zigzag,
)
from mini_dist.context_parallel.placement import block_of
from mini_dist.model import IGNORE_INDEX, explicit_attention, token_loss

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

PLACEMENTS = {"contiguous": contiguous, "zigzag": zigzag}


def close(ours, theirs, atol=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- softmax in pieces ------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [1, 3, 16, 100])
def test_online_softmax_is_softmax_whatever_the_tile(tile):
    scores, values = random(2, 5, 16), random(2, 16, 4, seed=1)
    close(online_softmax(scores, values, tile), scores.softmax(-1) @ values)


def test_online_softmax_survives_scores_whose_exponentials_overflow():
    """In rising and in falling order: the largest score is met last, or first."""
    values = random(6, 2)
    for scores in (torch.linspace(-2000, 2000, 6), torch.linspace(2000, -2000, 6)):
        scores = scores.double()[None]
        close(online_softmax(scores, values, 2), scores.softmax(-1) @ values)


def part(scores, values):
    return Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))


def test_merging_partial_results_is_exact_in_any_order_and_grouping():
    scores, values = 300 * random(3, 12), random(12, 4, seed=1)  # of very different weight
    a, b, c = (part(scores[:, at], values[at]) for at in (slice(3), slice(3, 4), slice(4, 12)))
    whole = part(scores, values)
    for merged in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))):
        close(merged.out, whole.out)
        close(merged.lse, whole.lse)
    nothing = Partial(torch.zeros_like(a.out), torch.full_like(a.lse, -math.inf))
    close(merge(nothing, a).out, a.out)
    close(merge(a, nothing).lse, a.lse)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_and_their_backward_equal_the_formula(kernel, causal):
    """GQA, and a length that is no multiple of a tile."""
    q, k, v = (random(2, heads, 200, 8, seed=heads).requires_grad_() for heads in (4, 2, 2))
    positions = None if causal else torch.zeros(200)
    expected = explicit_attention(q, k, v, positions)
    d_out = random(2, 4, 200, 8, seed=9)
    expected.backward(d_out)
    with torch.no_grad():
        out, lse = KERNELS[kernel].forward(q, k, v, causal)
        close(out, expected)
        gradients = KERNELS[kernel].backward(d_out, q, k, v, out, lse, causal)
    for gradient, tensor in zip(gradients, (q, k, v)):
        close(gradient, tensor.grad)


def test_bfloat16_is_merged_in_float32():
    q, k, v = (random(1, 2, 64, 8, seed=s, dtype=torch.bfloat16) for s in range(3))
    for kernel in KERNELS.values():
        assert {t.dtype for t in kernel.forward(q, k, v, True)} == {torch.float32}


# -- who holds what, who computes what --------------------------------------------------------


def test_placements_by_hand():
    assert contiguous(8, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert zigzag(8, 2).tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert zigzag(8, 4).tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_hold_what_may_be_seen_and_nothing_else(placement, size):
    """Against the mask, entry by entry: what is inside a block is allowed, what is outside not."""
    positions = PLACEMENTS[placement](48, size)
    for rank in range(size):
        for source in range(size):
            allowed = positions[rank][:, None] >= positions[source][None, :]
            computed = torch.zeros_like(allowed)
            block = block_of(positions, rank, source)
            if block:
                inside = computed[block.queries, block.keys]
                inside |= torch.ones_like(inside).tril() if block.causal else True
                assert block.num_scores() == computed.sum()
            assert torch.equal(computed, allowed)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_exactly_equal_work_in_every_step(size):
    S = 48
    work = num_scores(zigzag(S, size))
    assert all(row == work[0] for row in work)
    assert sum(map(sum, work)) == S * (S + 1) // 2  # each pair once


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_contiguous_pieces_are_lopsided(size):
    """The last rank computes with every rank's keys, the first with its own: nearly 2 cp - 1 times
    as much. In every step but the first somebody works whose neighbour idles."""
    work = num_scores(contiguous(48, size))
    piece = 48 // size
    own = piece * (piece + 1) // 2
    assert [sum(row) for row in work] == [own + rank * piece**2 for rank in range(size)]
    for step in range(1, size):
        assert {row[step] for row in work} == {0, piece**2}
    assert sum(map(sum, work)) == 48 * 49 // 2


def count_scores(placement, form, group):
    """Pairs of query and key that the kernel was really called for, per call."""
    from mini_dist.context_parallel import KERNELS  # the ranks' own, not the test's

    calls = []

    def counting(q, k, v, causal):
        rows, columns = q.shape[-2], k.shape[-2]
        calls.append(rows * (rows + 1) // 2 if causal else rows * columns)
        return KERNELS["fused"].forward(q, k, v, causal)

    KERNELS["counting"] = Kernel(counting, None)
    q = k = v = torch.randn(1, 2, 12, 4)
    FORMS[form](q, k, v, group, placement=placement, kernel="counting")
    return calls


@pytest.mark.parametrize("form", ["ring", "all_gather"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_run_computes_is_what_num_scores_says(placement, form):
    counted = launch(count_scores, 4, (placement, form)).results
    expected = num_scores(PLACEMENTS[placement](48, 4))
    assert counted == [[scores for scores in row if scores] for row in expected]
    if placement == "zigzag":
        assert all(row == counted[0] and len(row) == 4 for row in counted)


# -- one layer of attention ------------------------------------------------------------------

B, N, K, S, H = 2, 8, 4, 24, 4
WAYS = [
    (form, placement, {"kernel": kernel})
    for form in ("ring", "all_gather")
    for placement in PLACEMENTS
    for kernel in KERNELS
]
WAYS += [("ulysses", placement, {}) for placement in PLACEMENTS]


def whole(kv_heads=K):
    q, d_out = random(B, N, S, H), random(B, N, S, H, seed=3)
    k, v = random(B, kv_heads, S, H, seed=1), random(B, kv_heads, S, H, seed=2)
    return q, k, v, d_out


def cut_attention(ways, kv_heads, causal, group):
    """Output and gradients of q, k and v, whole again, for each way."""
    results = []
    for form, placement, options in ways:
        q, k, v, d_out = (shard(x, group, placement, dim=2) for x in whole(kv_heads))
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = FORMS[form](*inputs, group, placement=placement, causal=causal, **options)
        out.backward(d_out)
        pieces = [out.detach(), *(x.grad for x in inputs)]
        results.append([unshard(piece, group, placement, dim=2) for piece in pieces])
    return results


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 8])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_cut_attention_and_its_gradients_equal_one_process(size, kv_heads, causal):
    q, k, v, d_out = whole(kv_heads)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = explicit_attention(*inputs, None if causal else torch.zeros(S))
    out.backward(d_out)
    expected = [out.detach(), *(x.grad for x in inputs)]
    for results in launch(cut_attention, size, (WAYS, kv_heads, causal)).results:
        for way, result in zip(WAYS, results):
            for name, ours, theirs in zip(("out", "d_q", "d_k", "d_v"), result, expected):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=f"{way} {name}")


def test_three_ranks_and_multi_query_work_in_the_ring():
    ways = [way for way in WAYS if way[0] != "ulysses"]
    q, k, v, _ = whole(1)
    expected = explicit_attention(q, k, v)
    for results in launch(cut_attention, 3, (ways, 1, True)).results:
        for out, *_ in results:
            close(out, expected)


# -- the model in training --------------------------------------------------------------------

CONFIG = ModelConfig(
    d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4, seq_len=S, vocab_size=50
)
GROUPED = CONFIG.replace(num_heads=8, num_kv_heads=4, head_dim=4, activation="swiglu")
LEARNED = CONFIG.replace(positions="learned", tied_embedding=True)
STEPS = 5


def batch(step):
    """Tokens and targets; the ends of the sequences do not count, as in a padded batch."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 50, (3, S + 1), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    for row, ignored in enumerate((0, 5, 11)):
        targets[row, S - ignored :] = IGNORE_INDEX
    return inputs, targets


OPTIMIZERS = {
    "float64 AdamW": (torch.float64, lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "float32 SGD": (torch.float32, lambda p: torch.optim.SGD(p, lr=0.1)),
    "float32 AdamW": (torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-2)),
}


def train_whole(config, optimizer, steps=STEPS):
    dtype, make = OPTIMIZERS[optimizer]
    gpt = GPT(config, attention="explicit", dtype=dtype)
    step_, losses = make(gpt.parameters()), []
    for step in range(steps):
        inputs, targets = batch(step)
        x = gpt.embed(inputs)
        x.retain_grad()
        h = x
        for block in gpt.blocks:
            h = block(h)
        logits = gpt.head(h)
        loss = token_loss(logits, targets).mean()
        step_.zero_grad()
        loss.backward()
        if step == 0:
            first = logits.detach(), x.grad, [p.grad.clone() for p in gpt.parameters()]
        step_.step()
        losses.append(loss.detach())
    return first, torch.stack(losses), [p.detach() for p in gpt.parameters()]


def train_cut(ways, config, optimizer, group):
    return [train_one_way(form, placement, config, optimizer, group) for form, placement in ways]


def train_one_way(form, placement, config, optimizer, group):
    dtype, make = OPTIMIZERS[optimizer]
    gpt = GPT(config, attention=make_attention(group, form, placement), dtype=dtype)
    positions = positions_here(S, group, placement)
    step_, losses = make(gpt.parameters()), []
    for step in range(STEPS):
        inputs, targets = (shard(x, group, placement) for x in batch(step))
        x = gpt.embed(inputs, positions)
        x.retain_grad()
        h = x
        for block in gpt.blocks:
            h = block(h, positions)
        logits = gpt.head(h)
        loss = share_of_mean(token_loss(logits, targets), group)
        step_.zero_grad()
        loss.backward()
        sum_gradients(gpt.parameters(), group)
        if step == 0:
            whole_again = [unshard(t, group, placement) for t in (logits.detach(), x.grad)]
            first = *whole_again, [p.grad.clone() for p in gpt.parameters()]
        step_.step()
        losses.append(loss.detach())
    return first, torch.stack(losses), [p.detach() for p in gpt.parameters()]


BOTH = [(form, placement) for form in FORMS for placement in PLACEMENTS]


@pytest.mark.parametrize("config", [CONFIG, GROUPED, LEARNED], ids=["mha", "gqa", "learned"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_training_equals_one_process(size, config):
    """Logits, gradients at the embedding, every weight's gradient, losses and weights: float64."""
    first, losses, weights = train_whole(config, "float64 AdamW")
    ranks = launch(train_cut, size, (BOTH, config, "float64 AdamW")).results
    for number, way in enumerate(BOTH):
        total = sum(rank[number][1] for rank in ranks)
        close(total, losses, atol=1e-10)  # the ranks' parts add up to the mean
        for rank in ranks:
            logits, d_x, gradients = rank[number][0]
            close(logits, first[0], atol=1e-10)
            close(d_x, first[1], atol=1e-10)
            for ours, theirs in zip(gradients, first[2]):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10, msg=str(way))
            for ours, theirs in zip(rank[number][2], weights):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-8, msg=str(way))


def test_training_in_float32_equals_one_process():
    """SGD's weights. AdamW divides by a root of tiny numbers, so of it the losses only."""
    _, losses, weights = train_whole(GROUPED, "float32 SGD")
    ranks = launch(train_cut, 4, (BOTH, GROUPED, "float32 SGD")).results
    for number in range(len(BOTH)):
        close(sum(rank[number][1] for rank in ranks), losses, atol=1e-5)
        for ours, theirs in zip(ranks[0][number][2], weights):
            close(ours, theirs, atol=1e-6)
    _, losses, _ = train_whole(GROUPED, "float32 AdamW")
    ranks = launch(train_cut, 4, (BOTH, GROUPED, "float32 AdamW")).results
    for number in range(len(BOTH)):
        close(sum(rank[number][1] for rank in ranks), losses, atol=1e-4)
