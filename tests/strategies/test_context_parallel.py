"""A sequence sharded over ranks equals one process, sends the stated bytes and is balanced."""

import math
import sys

import cloudpickle
import pytest
import torch

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.model.gpt import explicit_attention
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.plan.calculators import step_volume
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.strategies.context_parallel import (
    FORMS,
    KERNELS,
    Partial,
    TileKernel,
    contiguous,
    make_attention,
    merge,
    num_scores,
    online_softmax,
    positions_here,
    ring_attention,
    run_ring_emulated,
    shard,
    share_of_mean,
    striped,
    sum_gradients,
    ulysses_attention,
    unshard,
    zigzag,
)
from mini_dist.strategies.context_parallel.placement import block_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest


def shuffled(seq_len, size, seed=0):
    """Return an arbitrary table: random tokens on each rank, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(seq_len, generator=generator).view(size, -1)


PLACEMENTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
TABLES = {**PLACEMENTS, "shuffled": shuffled}  # "shuffled" is not in the library


def register_shuffled():
    from mini_dist.strategies.context_parallel import PLACEMENTS  # the rank's copy, not the test's

    PLACEMENTS["shuffled"] = shuffled


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
    """In rising order the largest score comes last, in falling order it comes first."""
    values = random(6, 2)
    for scores in (torch.linspace(-2000, 2000, 6), torch.linspace(2000, -2000, 6)):
        scores = scores.double()[None]
        close(online_softmax(scores, values, 2), scores.softmax(-1) @ values)


def part(scores, values):
    return Partial(scores.softmax(-1) @ values, scores.logsumexp(-1))


def test_merging_partial_results_is_exact_in_any_order_and_grouping():
    scores, values = 300 * random(3, 12), random(12, 4, seed=1)  # weights differ greatly
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
    """Test GQA and a length that is not a multiple of a tile."""
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


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_take_any_staircase(kernel):
    """Each query sees the first keys, at least as many as the previous query, across tile borders,
    with fewer or more keys than queries."""
    for keys in (150, 200, 300):
        sees = torch.randint(1, keys + 1, (200,), generator=torch.Generator().manual_seed(keys))
        sees = sees.sort().values
        q = random(2, 4, 200, 8).requires_grad_()
        k, v = (random(2, 2, keys, 8, seed=seed).requires_grad_() for seed in (1, 2))
        allowed = torch.arange(keys) < sees[:, None]
        attention = torch.nn.functional.scaled_dot_product_attention
        expected = attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        d_out = random(2, 4, 200, 8, seed=9)
        expected.backward(d_out)
        with torch.no_grad():
            out, lse = KERNELS[kernel].forward(q, k, v, sees)
            close(out, expected)
            gradients = KERNELS[kernel].backward(d_out, q, k, v, out, lse, sees)
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
    assert striped(8, 2).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert striped(6, 3).tolist() == [[0, 3], [1, 4], [2, 5]]


def pairs_of(block, length):
    """Return the query-key pairs that a block covers, as a mask [length, length]."""
    computed = torch.zeros(length, length, dtype=torch.bool)
    if block is None:
        return computed
    rows, columns = torch.arange(length)[block.queries], torch.arange(length)[block.keys]
    inside = torch.ones(len(rows), len(columns), dtype=torch.bool)
    if isinstance(block.causal, torch.Tensor):
        assert block.causal.min() > 0  # every query has a key
        inside = torch.arange(len(columns)) < block.causal[:, None]
    elif block.causal:
        assert len(rows) == len(columns)
        inside = inside.tril()
    computed[rows[:, None], columns] = inside
    return computed


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("placement", [*PLACEMENTS, 0, 1, 2])
def test_blocks_hold_what_may_be_seen_and_nothing_else(placement, size):
    """Compare blocks with the mask entry by entry: exactly the allowed entries are inside. Numbers
    as placements are seeds of random tables."""
    random_table = isinstance(placement, int)
    positions = shuffled(48, size, placement) if random_table else PLACEMENTS[placement](48, size)
    for causal in (True, False):
        counts = num_scores(positions, causal)
        for rank in range(size):
            for source in range(size):
                allowed = positions[rank][:, None] >= positions[source][None, :]
                allowed |= not causal
                block = block_of(positions, rank, source, causal)
                assert torch.equal(pairs_of(block, 48 // size), allowed)
                assert (block.num_scores() if block else 0) == allowed.sum()
                assert counts[rank][(rank - source) % size] == allowed.sum()


def test_a_rank_may_hold_its_tokens_in_any_order():
    """Reversing each rank's zig-zag tokens leaves the counts of scores unchanged."""
    backwards = zigzag(48, 4).flip(1)
    assert num_scores(backwards) == num_scores(zigzag(48, 4))
    assert block_of(backwards, 1, 0).queries.tolist() == list(range(11, -1, -1))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_built_in_placements_need_no_mask_and_no_index(size):
    """Every block is a rectangle or a triangle that slices cut out, which is fast."""
    for placement in PLACEMENTS.values():
        positions = placement(48, size)
        for rank in range(size):
            for source in range(size):
                block = block_of(positions, rank, source)
                if block:
                    assert isinstance(block.queries, slice) and isinstance(block.keys, slice)
                    assert isinstance(block.causal, bool)
                    one_token = block.num_scores() == 1
                    is_triangle = placement is striped or rank == source
                    assert block.causal == is_triangle or one_token


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_striped_pieces_differ_by_the_diagonal_alone(size):
    """Every step is a triangle, with its diagonal if the keys' rank is not after ours."""
    piece = 48 // size
    with_diagonal = piece * (piece + 1) // 2
    expected = [
        [with_diagonal - (piece if step > rank else 0) for step in range(size)]
        for rank in range(size)
    ]
    assert num_scores(striped(48, size)) == expected
    assert sum(map(sum, expected)) == 48 * 49 // 2
    assert num_scores(striped(16, 4))[0] == [10, 6, 6, 6]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_every_rank_exactly_equal_work_in_every_step(size):
    S = 48
    work = num_scores(zigzag(S, size))
    assert all(row == work[0] for row in work)
    assert sum(map(sum, work)) == S * (S + 1) // 2  # every pair is counted once


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_contiguous_pieces_are_lopsided(size):
    """The last rank attends to all ranks' keys, the first only to its own, so the last has nearly
    2 cp - 1 times as much work. In every step but the first, some ranks work while others idle."""
    work = num_scores(contiguous(48, size))
    piece = 48 // size
    own = piece * (piece + 1) // 2
    assert [sum(row) for row in work] == [own + rank * piece**2 for rank in range(size)]
    for step in range(1, size):
        assert {row[step] for row in work} == {0, piece**2}
    assert sum(map(sum, work)) == 48 * 49 // 2


def count_scores(placement, form, group):
    """Return how many query-key pairs the kernel really computed in each call."""
    from mini_dist.strategies.context_parallel import KERNELS  # the rank's copy, not the test's

    calls = []

    def counting(q, k, v, causal):
        rows, columns = q.shape[-2], k.shape[-2]
        if isinstance(causal, torch.Tensor):
            calls.append(int(causal.sum()))
        else:
            calls.append(rows * (rows + 1) // 2 if causal else rows * columns)
        return KERNELS["fused"].forward(q, k, v, causal)

    register_shuffled()
    KERNELS["counting"] = TileKernel(counting, None)
    q = k = v = torch.randn(1, 2, 12, 4)
    FORMS[form](q, k, v, group, placement=placement, kernel="counting")
    return calls


@pytest.mark.parametrize("form", ["ring", "all_gather"])
@pytest.mark.parametrize("placement", TABLES)
def test_what_a_run_computes_is_what_num_scores_says(placement, form):
    counted = launch(count_scores, 4, (placement, form)).results
    expected = num_scores(TABLES[placement](48, 4))
    assert counted == [[scores for scores in row if scores] for row in expected]
    if placement == "zigzag":
        assert all(row == counted[0] and len(row) == 4 for row in counted)


# -- one layer of attention ------------------------------------------------------------------

B, N, K, S, H = 2, 8, 4, 24, 4
WAYS = [
    (form, placement, {"kernel": kernel})
    for form in ("ring", "all_gather")
    for placement in TABLES
    for kernel in KERNELS
]
WAYS += [("ulysses", placement, {}) for placement in TABLES]


def whole(kv_heads=K):
    q, d_out = random(B, N, S, H), random(B, N, S, H, seed=3)
    k, v = random(B, kv_heads, S, H, seed=1), random(B, kv_heads, S, H, seed=2)
    return q, k, v, d_out


def cut_attention(ways, kv_heads, causal, group):
    """Return the unsharded output and gradients of q, k and v for each way."""
    register_shuffled()
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
    q, k, v, d_out = whole(1)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = explicit_attention(*inputs)
    out.backward(d_out)
    expected = [out.detach(), *(x.grad for x in inputs)]
    for results in launch(cut_attention, 3, (ways, 1, True)).results:
        for way, result in zip(ways, results):
            for ours, theirs in zip(result, expected):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12, msg=str(way))


def in_bfloat16(form, kernel, placement, group):
    register_shuffled()
    q, k, v, d_out = (shard(x, group, placement, dim=2).bfloat16() for x in whole())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = FORMS[form](*inputs, group, placement=placement, kernel=kernel)
    out.backward(d_out)
    gradients = [x.grad for x in inputs]
    return [unshard(t.detach(), group, placement, dim=2) for t in (out, *gradients)]


@pytest.mark.parametrize("form", ["ring", "all_gather"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("placement", ["zigzag", "shuffled"])
def test_bfloat16_in_bfloat16_out_with_its_own_precision(placement, kernel, form):
    """The bound allows for rounding inputs and results to 2^-8, and for a few sums."""
    q, k, v, d_out = whole()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = explicit_attention(*inputs)
    out.backward(d_out)
    results = launch(in_bfloat16, 4, (form, kernel, placement)).results[0]
    for ours, theirs in zip(results, (out.detach(), *(x.grad for x in inputs))):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).abs().max() < 0.03 * theirs.abs().max()


# -- the model in training --------------------------------------------------------------------

CONFIG = ModelConfig(
    d_model=16, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=4, seq_len=S, vocab_size=50
)
GROUPED = CONFIG.replace(num_heads=8, num_kv_heads=4, head_dim=4, activation="swiglu")
LEARNED = CONFIG.replace(positions="learned", tied_embedding=True)
STEPS = 5


def batch(step):
    """Return tokens and targets; sequence ends are ignored, as in a padded batch."""
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


def sharp_gpt(config, attention, dtype=torch.float64):
    """Scale up q and k: with initial weights attention is nearly a mean, which hides mistakes."""
    gpt = GPT(config, attention=attention, dtype=dtype)
    with torch.no_grad():
        for block in gpt.blocks:
            block.attn.q.weight.mul_(20)
            block.attn.k.weight.mul_(20)
    return gpt


def train_whole(config, optimizer, steps=STEPS):
    dtype, make = OPTIMIZERS[optimizer]
    gpt = sharp_gpt(config, "explicit", dtype)
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
    gpt = sharp_gpt(config, make_attention(group, form, placement), dtype)
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


def shares(group):
    """Return the error without any target, then this rank's share if rank 0 has three targets."""
    targets = torch.full((1, 4), IGNORE_INDEX)
    try:
        share_of_mean(token_loss(torch.zeros(1, 4, 5), targets), group)
    except ValueError as error:
        said = str(error)
    if group.rank() == 0:
        targets[0, 1:] = 2
    return said, share_of_mean(token_loss(torch.zeros(1, 4, 5), targets), group).item()


def test_a_rank_without_targets_has_no_share_and_a_batch_without_any_is_refused():
    said, parts = zip(*launch(shares, 2).results)
    assert set(said) == {"no target of any rank counts: all are IGNORE_INDEX=-100"}
    assert parts == pytest.approx((math.log(5), 0.0))


BOTH = [(form, placement) for form in FORMS for placement in PLACEMENTS]


@pytest.mark.parametrize(
    "size, config",
    [(1, GROUPED), (2, CONFIG), (2, GROUPED), (4, CONFIG), (4, GROUPED), (4, LEARNED)],
    ids=["1-gqa", "2-mha", "2-gqa", "4-mha", "4-gqa", "4-learned"],
)
def test_training_equals_one_process(size, config):
    """In float64, compare logits, gradients at the embedding and of weights, losses and weights."""
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
    """Compare weights for SGD. AdamW divides by roots of tiny numbers, so compare only losses."""
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


# -- bytes, order, memory ---------------------------------------------------------------------

WIDE, FEW = 9, 3  # heads of the next runs: no other tensor is as large as keys and values


def forward_and_backward(form, options, tokens_here, group):
    register_shuffled()
    q, k, v = (torch.randn(1, heads, tokens_here, 4).requires_grad_() for heads in (WIDE, FEW, FEW))
    group.recorder.phases.set("forward")
    out = FORMS[form](q, k, v, group, **options)
    group.recorder.phases.set("between")
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("placement", TABLES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ring_sends_keys_and_values_cp_minus_1_times_a_pass(size, placement):
    """Forward sends K and V; backward sends K, V and their gradients, whose local share stays."""
    run = launch(forward_and_backward, size, ("ring", {"placement": placement}, 8))
    own = 2 * FEW * 8 * 4 * 4  # bytes of a rank's K and V
    for rank in range(size):
        assert run.ledger.total_bytes(phase="forward", rank=rank) == (size - 1) * own
        assert run.ledger.total_bytes(phase="backward", rank=rank) == 2 * (size - 1) * own
    after = {(comm.rank, peer) for comm in run.ledger.leaves() for peer in comm.sent_to}
    assert after == ({(rank, (rank + 1) % size) for rank in range(size)} if size > 1 else set())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gathering_sends_the_rings_bytes(size):
    run = launch(forward_and_backward, size, ("all_gather", {}, 8))
    own = 2 * FEW * 8 * 4 * 4
    for rank in range(size):
        assert run.ledger.total_bytes(phase="forward", rank=rank) == (size - 1) * own
        assert (
            run.ledger.total_bytes(op="all_gather", phase="backward", rank=rank) == (size - 1) * own
        )
        assert run.ledger.total_bytes(phase="backward", rank=rank) == 2 * (size - 1) * own


def ulysses_of_8_heads(group):
    q, k, v = (torch.randn(B, heads, S // group.size(), H).requires_grad_() for heads in (N, K, K))
    group.recorder.phases.set("forward")
    out = ulysses_attention(q, k, v, group)
    group.recorder.phases.set("between")
    out.backward(torch.ones_like(out))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ulysses_sends_less_the_more_ranks_there_are(size):
    run = launch(ulysses_of_8_heads, size)
    q, kv = (B * heads * S // size * H * 4 for heads in (N, K))
    expected = (2 * q + 2 * kv) * (size - 1) // size  # q, out, k, v; (cp-1)/cp of each
    for rank in range(size):
        for phase in ("forward", "backward"):
            assert run.ledger.total_bytes(phase=phase, rank=rank) == expected


def gpt_step(config, recompute, group):
    gpt = GPT(config, attention=make_attention(group))
    inputs, targets = (shard(x, group) for x in batch(0))
    positions = positions_here(S, group)
    x = gpt.embed(inputs, positions)
    for block in gpt.blocks:
        if recompute == "full":
            x = torch.utils.checkpoint.checkpoint(block, x, positions, use_reentrant=False)
        else:
            x = block(x, positions)
    token_loss(gpt.head(x), targets).total.backward()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_calculator_predicts_the_bytes_of_a_run(size, recompute):
    layout = Layout(cp=size, micro_batch_size=3, recompute=recompute)
    how = FRAMEWORKS["megatron-core"].replace(activation_bytes=4)
    run = launch(gpt_step, size, (GROUPED, recompute))
    for rank in range(size):
        assert run.ledger.total_bytes(rank=rank) == step_volume(GROUPED, layout, how)["cp"]


def when_kernels_ran(group):
    import time

    from mini_dist.strategies.context_parallel import KERNELS

    spans = {"forward": [], "backward": []}

    def timed(kind):
        def run(*args):
            began = time.time()
            result = KERNELS["fused"]._asdict()[kind](*args)
            spans[kind].append((began, time.time()))
            return result

        return run

    KERNELS["timed"] = TileKernel(timed("forward"), timed("backward"))
    forward_and_backward("ring", {"kernel": "timed"}, 256, group)
    return spans


def test_keys_travel_while_others_are_computed_with():
    """A whole kernel call fits between the start of each hop and the wait for it."""
    size = 4
    run = launch(when_kernels_ran, size)
    for rank, spans in enumerate(run.results):
        for phase, messages_a_step in (("forward", 1), ("backward", 2)):
            sends = [
                comm for comm in run.ledger.leaves(phase=phase, rank=rank) if comm.op == "send"
            ]
            assert len(sends) == messages_a_step * (size - 1)
            for began, ended in spans[phase][:-1]:  # no hop follows the last block of keys
                assert any(send.start <= began and ended <= send.end for send in sends)
        # Two gradients are still in flight while the last block is computed.
        began, ended = run.results[rank]["backward"][-1]
        sends = run.ledger.leaves(phase="backward", rank=rank)
        assert any(comm.start <= began and ended <= comm.end for comm in sends)


def memory_of(form, size, tokens_here, **options):
    return launch(forward_and_backward, size, (form, options, tokens_here), memory=True).ledger


def test_peak_memory_is_the_same_for_any_length_a_rank_and_any_number_of_ranks():
    """The peak is proportional to S/cp, and equal for 8 and 4 ranks. (With 2 it is a little lower:
    a rank sends only its own keys and values, which it holds in any case.)"""
    peaks = {
        (size, tokens): [m.peak_bytes() / tokens for m in memory_of("ring", size, tokens).memory]
        for size, tokens in [(4, 256), (4, 512), (8, 256)]
    }
    assert max(peaks[4, 256]) == max(peaks[4, 512])
    assert max(peaks[8, 256]) == max(peaks[4, 256])
    gathered = memory_of("all_gather", 8, 256).memory[0].peak_bytes() / 256
    assert gathered > 1.5 * max(peaks[8, 256])  # the control: gathering does grow with cp


def test_there_are_never_scores_of_a_whole_sequence():
    """The ledger sees our own kernel's scores: one tile per head, whatever the length."""
    for tokens in (256, 512):
        for memory in memory_of("ring", 2, tokens, kernel="explicit").memory:
            largest = max(change for *_, change in memory.events)
            assert largest == max(WIDE * 128 * 128 * 4, WIDE * tokens * 4 * 4)


def live_at_most(memory, nbytes, phase):
    """Return the largest number of storages of this size that were alive at once."""
    live = most = 0
    for _, now, _, change in memory.events:
        live += (change == nbytes) - (change == -nbytes)
        if now == phase:
            most = max(most, live)
    return most


@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_rank_of_a_ring_ever_holds_all_keys_and_values(size):
    """A rank holds its own inputs, those it sends and those it receives: three ranks' inputs for
    any number of ranks. (With two ranks: both ranks' inputs, and the copy being sent.)"""
    own = 2 * FEW * 64 * 4 * 4  # bytes of a rank's K and V
    for memory in memory_of("ring", size, 64).memory:
        assert live_at_most(memory, own, "forward") == 2
        assert all(change <= 1.5 * own for *_, change in memory.events)  # q: 9 heads, K, V: 3 each
    gathered = memory_of("all_gather", size, 64).memory[0]
    assert live_at_most(gathered, size * own, "forward") >= 1


# -- on emulated devices ----------------------------------------------------------------------

SECONDS_A_SCORE = 1e-5


def emulated(placement, hop):
    arguments = (PLACEMENTS[placement](48, 4), SECONDS_A_SCORE, hop)
    return launch(run_ring_emulated, 4, arguments).results


def test_on_emulated_devices_zigzag_has_no_gap_and_contiguous_waits_for_the_last():
    """Hops shorter than a step cost nothing, so a rank ends after the time of its scores."""
    steps = num_scores(zigzag(48, 4))[0]
    for rank, done in enumerate(emulated("zigzag", 1e-5)):
        assert [interval.name for interval in done] == [(rank - step) % 4 for step in range(4)]
        assert done[-1].end == pytest.approx(sum(steps) * SECONDS_A_SCORE)
    for rank, done in enumerate(emulated("striped", 1e-5)):
        # Hops come from a neighbor that has one diagonal more or less to compute per step.
        work = sum(num_scores(striped(48, 4))[rank])
        assert done[-1].end == pytest.approx(work * SECONDS_A_SCORE)
    work = [sum(row) for row in num_scores(contiguous(48, 4))]
    ends = [done[-1].end for done in emulated("contiguous", 1e-5)]
    assert ends == pytest.approx([scores * SECONDS_A_SCORE for scores in work])


def test_on_emulated_devices_a_slow_hop_shows():
    """Every rank then waits for keys: the run takes three hops and the last block."""
    last = num_scores(zigzag(48, 4))[0][-1]
    for done in emulated("zigzag", 5e-3):
        assert done[-1].end == pytest.approx(3 * 5e-3 + last * SECONDS_A_SCORE)


# -- what cannot work -------------------------------------------------------------------------


def refused(group):
    size = group.size()
    x = torch.randn(1, 4, 6, 4)
    with pytest.raises(ValueError, match="cp=4 must divide seq_len=10: 8 or 12 would do"):
        positions_here(10, group, "contiguous")
    with pytest.raises(ValueError, match=r"2\*cp=8 .* must divide seq_len=12: 8 or 16 would"):
        shard(torch.zeros(1, 12), group, "zigzag")
    with pytest.raises(ValueError, match=r"2\*cp=8 .* must divide seq_len=20"):
        ring_attention(x[:, :, :5], x[:, :, :5], x[:, :, :5], group)
    with pytest.raises(ValueError, match=r"2 key/value heads .* whole to cp=4 ranks .* cp=2 would"):
        ulysses_attention(x, x[:, :2], x[:, :2], group)
    six = torch.randn(1, 6, 6, 4)
    with pytest.raises(ValueError, match=r"6 key/value heads .* cp=4 ranks .* cp=3 or cp=6 would"):
        ulysses_attention(six, six, six, group)
    for attention in FORMS.values():  # with 3 a kernel would drop a head, with 8 divide by 0
        with pytest.raises(ValueError, match=r"3 key/value heads .* 4 query heads: 2 or 4 would"):
            attention(x, x[:, :3], x[:, :3], group)
        with pytest.raises(ValueError, match=r"8 key/value heads .* 4 query heads: 4 would work"):
            attention(x, torch.cat([x, x], 1), torch.cat([x, x], 1), group)
    with pytest.raises(ValueError, match="placement='zig-zag' is unknown.*'zigzag'"):
        ring_attention(x, x, x, group, placement="zig-zag")
    from mini_dist.strategies.context_parallel import PLACEMENTS

    for wrong in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 4]], [[0, 1], [2, -3]]):
        PLACEMENTS["wrong"] = lambda seq_len, size, table=wrong: torch.tensor(table)
        with pytest.raises(ValueError, match=r"placement='wrong' gave a table .* of 0\.\.15 once"):
            positions_here(16, group, "wrong")
    with pytest.raises(ValueError, match="kernel='flash' is unknown.*'fused'"):
        ring_attention(x, x, x, group, kernel="flash")
    with pytest.raises(ValueError, match="form='rings' is unknown"):
        make_attention(group, "rings")
    attention = make_attention(group)
    with pytest.raises(ValueError, match="but the model was given none: pass positions_here"):
        attention(x, x, x)
    with pytest.raises(ValueError, match=r"but the model was given \[0, 1, 2, 3\]"):
        attention(x, x, x, torch.arange(6))
    with pytest.raises(ValueError, match="dropout=0.1"):
        attention(x, x, x, positions_here(6 * size, group), 0.1)


def test_what_cannot_work_is_refused_in_a_sentence():
    launch(refused, 4)


def test_wrong_positions_and_means_of_means_would_be_noticed():
    """As negative controls, the tolerances above are tight enough to catch both mistakes."""
    rank_0, rank_1 = launch(two_mistakes, 2).results
    positions, mean_of_means = rank_0
    first, losses, _ = train_whole(CONFIG, "float64 AdamW", steps=1)
    assert (positions - first[0]).abs().max() > 1e-3
    assert abs((mean_of_means + rank_1[1]) / 2 - losses[0]) > 1e-4


def two_mistakes(group):
    attention = make_attention(group)
    here = positions_here(S, group)
    gpt = sharp_gpt(CONFIG, lambda q, k, v, _, dropout: attention(q, k, v, here, dropout))
    inputs, targets = (shard(x, group) for x in batch(0))
    with torch.no_grad():
        left_behind = unshard(gpt(inputs), group)  # rotary positions 0..S/cp-1 on every rank
        right = gpt(inputs, here)
        return left_behind, token_loss(right, targets).mean()


# -- scale, log-sum-exp -----------------------------------------------------------------------


def with_scale(ways, scale, return_lse, group):
    """Return the unsharded output, log-sum-exp and gradients of a loss of both for each way."""
    register_shuffled()
    results = []
    for form, placement, options in ways:
        q, k, v, d_out = (shard(x, group, placement, dim=2) for x in whole())
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = FORMS[form](*inputs, group, placement=placement, scale=scale, **options)
        lse = None
        if return_lse:
            options = {**options, "scale": scale, "return_lse": True, "placement": placement}
            out, lse = FORMS[form](*inputs, group, **options)
        loss = (out * d_out).sum()
        if lse is not None:
            loss = loss + (lse.sin() * d_out[..., 0]).sum()
        loss.backward()
        pieces = [out.detach(), *(x.grad for x in inputs)]
        pieces += [lse.detach().unsqueeze(-1)] if return_lse else []
        results.append([unshard(piece, group, placement, dim=2) for piece in pieces])
    return results


def expected_with(scale, return_lse):
    q, k, v, d_out = whole()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    scores = q @ keys.mT * (H**-0.5 if scale is None else scale)
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    out, lse = scores.softmax(-1) @ values, scores.logsumexp(-1)
    loss = (out * d_out).sum()
    if return_lse:
        loss = loss + (lse.sin() * d_out[..., 0]).sum()
    loss.backward()
    pieces = [out.detach(), *(x.grad for x in inputs)]
    return pieces + ([lse.detach().unsqueeze(-1)] if return_lse else [])


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2, 1.7])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_any_scale_and_the_log_sum_exp_with_its_gradient(size, scale, return_lse):
    """Test all forms and kernels; Ulysses uses torch's attention, which returns no log-sum-exp."""
    ways = [
        way
        for way in WAYS
        if not (way[0] == "ulysses" and (return_lse or K % size))
        if not (way[1] == "zigzag" and S % (2 * size))
    ]
    expected = expected_with(scale, return_lse)
    assert len(expected) == 4 + return_lse
    for results in launch(with_scale, size, (ways, scale, return_lse)).results:
        for way, result in zip(ways, results, strict=True):
            for ours, theirs in zip(result, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11, msg=str(way))


def merged_with_more(group):
    """Attend to a second text after the first, as if both were one row of scores."""
    q, k, v, d_out = (shard(x, group, dim=2) for x in whole())
    more_k, more_v = random(B, N, 5, H, seed=7), random(B, N, 5, H, seed=8)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    here = Partial(*ring_attention(*inputs, group, return_lse=True))
    scores = q @ more_k.mT * H**-0.5
    out = merge(here, Partial(scores.softmax(-1) @ more_v, scores.logsumexp(-1))).out
    out.backward(d_out)
    return [unshard(x, group, dim=2) for x in (out.detach(), *(x.grad for x in inputs))]


def test_what_is_returned_merges_with_attention_to_other_keys():
    q, k, v, d_out = whole()
    more_k, more_v = random(B, N, 5, H, seed=7), random(B, N, 5, H, seed=8)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(N // K, dim=1) for x in (k, v))
    keys, values = torch.cat([keys, more_k], 2), torch.cat([values, more_v], 2)
    hidden = torch.cat([torch.ones(S, S).triu(1), torch.zeros(S, 5)], 1).bool()
    out = (q @ keys.mT * H**-0.5).masked_fill(hidden, -math.inf).softmax(-1) @ values
    out.backward(d_out)
    expected = [out.detach(), *(x.grad for x in inputs)]
    for results in launch(merged_with_more, 4).results:
        for ours, theirs in zip(results, expected, strict=True):
            close(ours, theirs)


def dtypes_of_lse(group):
    x = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    found = [FORMS[f](x, x, x, group, return_lse=True)[1] for f in ("ring", "all_gather")]
    sum(lse.sum() for lse in found).backward()  # the loss is only the log-sum-exp
    return [lse.dtype for lse in found], [list(lse.shape) for lse in found], x.grad.abs().sum() > 0


def test_the_log_sum_exp_is_in_float32_at_least():
    for result in launch(dtypes_of_lse, 2).results:
        assert result == ([torch.float32] * 2, [[1, 2, 4]] * 2, True)


# -- the page ---------------------------------------------------------------------------------


def page_and_engine(group):
    """Return outputs and gradients by the page and by the engine, from the same shards."""
    from mini_dist.strategies.context_parallel import ideas

    q, k, v, d_out = (shard(x, group, "contiguous", dim=2) for x in whole(N))
    group.recorder.phases.set("page")
    total = ideas.ring_attention(q, k, v, group)
    by_page = [total.out, *ideas.ring_attention_backward(d_out, q, k, v, total, group)]
    group.recorder.phases.set("engine")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*inputs, group, placement="contiguous", kernel="explicit")
    group.recorder.phases.set("engine")
    out.backward(d_out)
    return by_page, [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_page_of_ring_attention_is_its_engine_in_values_bytes_and_order(size):
    run = launch(page_and_engine, size)
    for by_page, by_engine in run.results:
        for ours, engines in zip(by_page, by_engine):
            close(ours, engines)
    for rank in range(size):
        own = 2 * B * N * (S // size) * H * 8  # bytes of a rank's K and V in float64
        assert run.ledger.total_bytes(phase="page", rank=rank) == 3 * (size - 1) * own
        sent = [(c.sent_to, c.nbytes) for c in run.ledger.leaves() if c.rank == rank and c.sent_to]
        half = len(sent) // 2
        assert sent[:half] == sent[half:]
