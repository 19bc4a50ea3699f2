"""Sharded matrices train as one process, send the papers' bytes and hold 1/t of the model."""

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.collectives import all_gather
from mini_dist.collectives.ops import all_reduce, copy
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.plan.calculators import step_volume
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.plan.calculators.memory import layer_activations
from mini_dist.ranks.ledger.memory import held
from mini_dist.ranks.older_torch import IS_OLDER
from mini_dist.strategies.grad_norm import clip_, grad_norm
from mini_dist.strategies.tensor_parallel import (
    GPT_PLAN,
    SEQUENCE,
    SEQUENCE_AGAIN,
    TENSOR,
    ColumnParallelLinear,
    Cut,
    Pair,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_linear,
    column_linears,
    finish_gradients,
    for_grad_norm,
    init_weights_,
    load_full_state_dict,
    shard_model,
    vocab_parallel_cross_entropy,
)
from mini_dist.training.full_state import full_state_dict

SMALL = ModelConfig(vocab_size=32, seq_len=8, d_model=16, num_layers=2, num_heads=4, d_ffn=24)
MODELS = {
    "plain": SMALL,
    "gpt2, grouped queries": SMALL.replace(
        positions="learned", tied_embedding=True, num_kv_heads=2
    ),
    "llama, one kv head": SMALL.replace(
        norm="rmsnorm", activation="swiglu", bias=False, num_kv_heads=1, qkv_bias=True
    ),
}
PAIRS = {"TP": TENSOR, "SP": SEQUENCE, "SP gathered again": SEQUENCE_AGAIN}
SIZES = [1, 2, 4]
STEPS, MAX_NORM = 5, 0.5

models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
pairs = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
sizes = pytest.mark.parametrize("size", SIZES)


def lively(config, **kwargs):
    """Return a float64 GPT in which every weight and bias matters."""
    model = GPT(config, seed=0, dtype=torch.float64, **kwargs)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            parameter.add_(0.3 * noise)
    return model


def batch(config, step, ignored=True):
    generator = torch.Generator().manual_seed(step)
    shape = (3, config.seq_len + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if ignored:
        targets[0, :5] = IGNORE_INDEX
    return inputs, targets


def equal(ours, whole, cut, message=""):
    """Compare in float64, where only the order of sums may make a difference."""
    expected = whole if cut is None else cut.piece(whole)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10, msg=message or None)


# --- training ----------------------------------------------------------------------------------


def train(config, pair, group):
    model = shard_model(lively(config), GPT_PLAN, group, pair=pair)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(STEPS):
        inputs, targets = batch(config, step)
        logits = model(inputs)
        loss = vocab_parallel_cross_entropy(logits, targets, group).mean()
        optimizer.zero_grad()
        loss.backward()
        finish_gradients(model)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        whole_logits = all_gather(logits.detach(), group, dim=-1)
        norm = grad_norm(*for_grad_norm(model))
        clip_(model.parameters(), norm, MAX_NORM)
        optimizer.step()
        seen.append((whole_logits, loss.detach(), norm))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return seen, gradients, weights, model.sharding.cuts, full_state_dict(model, group)


@pytest.fixture(scope="module")
def oracle():
    """Train each model in one process."""
    results = {}
    for config in MODELS.values():
        model, seen = lively(config), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            inputs, targets = batch(config, step)
            logits = model(inputs)
            loss = token_loss(logits, targets).mean()
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
            norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            seen.append((logits.detach(), loss.detach(), norm))
        results[config] = seen, gradients, model.state_dict()
    return results


@sizes
@pairs
@models
def test_training_equals_one_process(config, pair, size, oracle):
    """Compare logits, losses, norms, all gradients, and weights after 5 clipped AdamW steps."""
    seen, gradients, weights = oracle[config]
    for ours, our_gradients, our_weights, cuts, whole in launch(
        train, size, (config, pair)
    ).results:
        for (logits, loss, norm), (our_logits, our_loss, our_norm) in zip(seen, ours):
            equal(our_logits, logits, None)
            equal(our_loss, loss, None)
            equal(our_norm, norm, None)
        assert our_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            equal(our_gradients[name], gradient, cuts.get(name), f"gradient of {name}")
        for name in our_weights:
            equal(our_weights[name], weights[name], cuts.get(name), f"weight {name}")
        assert whole.keys() == weights.keys()
        for name, weight in weights.items():
            equal(whole[name], weight, None, f"full_state_dict of {name}")


def through(make, pair, group):
    """Return this rank's part of a module's output for x [B, S, D] and of the gradient of x."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    dy = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    model = lively(SMALL.replace(num_kv_heads=2))
    expected, module = make(model), make(model)
    if group is None:
        x.requires_grad_()
        y = expected(x)
        y.backward(dy)
        return y.detach(), x.grad
    kinds = {"MLP": ParallelMLP, "Attention": ParallelAttention, "Block": None}
    kind = kinds[type(module).__name__]
    if kind is None:
        module.attn = ParallelAttention(module.attn, group, pair=pair)
        module.ffn = ParallelMLP(module.ffn, group, pair=pair)
    else:
        module = kind(module, group, pair=pair)
    if pair.cuts_sequence:
        x, dy = (t.chunk(group.size(), 1)[group.rank()] for t in (x, dy))
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(dy)
    return y.detach(), x.grad


@pytest.mark.parametrize("part", ["ffn", "attn", "block"])
@pairs
@sizes
def test_the_gradient_of_the_input_equals_one_process(size, pair, part):
    def make(model):
        block = model.blocks[0]
        return block if part == "block" else getattr(block, part)

    y, dx = through(make, None, None)
    for rank, found in enumerate(launch(through, size, (make, pair)).results):
        cut = Cut(1, size, rank) if pair.cuts_sequence else None
        equal(found[0], y, cut)
        equal(found[1], dx, cut)


# --- single linears ----------------------------------------------------------------------------


def linears(group):
    torch.manual_seed(0)
    column, row = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    hidden = ColumnParallelLinear(column, group)(x)
    ours = RowParallelLinear(row, group)(hidden)
    return hidden, column(x).detach(), ours, row(column(x)).detach()


@sizes
def test_column_then_row_needs_no_communication_between(size):
    run = launch(linears, size)
    for rank, (hidden, whole_hidden, y, whole_y) in enumerate(run.results):
        equal(hidden.detach(), whole_hidden, Cut(-1, size, rank))
        equal(y.detach(), whole_y, None)
    assert {comm.op for comm in run.ledger.calls()} == {"all_reduce"}
    assert len(run.ledger.calls(rank=0)) == 1


def pieces(group):
    model = shard_model(lively(MODELS["gpt2, grouped queries"]), GPT_PLAN, group)
    named = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: (tuple(p.shape), p.is_contiguous(), p.untyped_storage().nbytes() == p.nbytes, cut)
        for name, p in named.items()
        for cut in [model.sharding.cuts.get(name)]
    }, model.head.out.weight is model.embed.token.weight


def changes_of_memory(run):
    """Return the bytes held after each allocation of `run()`, minus those held before it."""
    from torch.profiler import profile

    with profile(profile_memory=True) as seen:
        run()
    events = seen.profiler.kineto_results.events()
    return list(accumulate(e.nbytes() for e in events if e.name() == "[memory]"))


def by_autograd(x, parameters, group, pair):
    entered = pair.enter(x, group)
    return [nn.functional.linear(entered, *each) for each in parameters]


@pairs
def test_backward_lets_go_of_x_before_dx_is_made(pair):
    """Backward holds two tensors of x's size at once, where autograd alone holds four."""
    if IS_OLDER and pair.gathers_again:
        pytest.skip("torch before 2.13 keeps every dy until backward returns")

    def job(group):
        rows, D, peaks = 2**12, 64, []  # the gathered x is 1 MiB; weights and ys are small
        leaf = torch.ones(1, rows // (group.size() if pair.cuts_sequence else 1), D)
        parameters = [(torch.ones(2, D, requires_grad=True), None) for _ in "qkv"]
        for multiply in (column_linears, by_autograd):

            def forward_and_backward(multiply=multiply):
                x = leaf.requires_grad_() * 1
                ys = multiply(x, parameters, group, pair)
                del x
                sum(y.sum() for y in ys).backward()

            forward_and_backward()
            leaf.grad = None
            peaks.append(max(changes_of_memory(forward_and_backward)) / 2**20)
        return peaks

    for ours, by_autograd_alone in launch(job, 2).results:
        assert ours < 2.2
        assert by_autograd_alone > 4


def test_frozen_matrices_get_no_gradient_and_an_input_without_one_sends_nothing():
    def job(group):
        x = torch.ones(2, 3, 4)
        frozen, trained = torch.ones(5, 4), torch.ones(5, 4, requires_grad=True)
        linears = [(frozen, None), (trained, None)]
        sum(y.sum() for y in column_linears(x, linears, group)).backward()
        sent = len([c for c in group.recorder.comms if c[0].endswith("all_reduce")])
        column_linear(x.requires_grad_(), frozen, None, group).sum().backward()
        return frozen.grad, trained.grad, sent, x.grad

    for frozen, trained, sent, dx in launch(job, 2).results:
        assert frozen is None
        assert torch.equal(trained, torch.full((5, 4), 6.0))
        assert not sent
        assert torch.equal(dx, torch.full((2, 3, 4), 10.0))  # 5 outputs on each of 2 ranks


@pairs
def test_under_autocast_products_and_what_is_kept_are_narrow_and_gradients_wide(pair):
    def job(group):
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        kept = []

        def note(saved):
            kept.append(saved.dtype)
            return saved

        with (
            torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved),
            torch.autocast("cpu", torch.bfloat16),
        ):
            (y,) = column_linears(x, [(weight, None)], group, pair)
        y.float().sum().backward()
        entered = pair.enter(x.detach(), group).bfloat16().float()
        expected = torch.ones(6, 1) @ entered.flatten(0, -2).sum(0, keepdim=True)
        return y.dtype, kept, weight.grad, expected, x.grad.dtype

    for dtype, kept, gradient, expected, of_x in launch(job, 2).results:
        assert dtype == torch.bfloat16
        assert kept[0] == torch.bfloat16
        assert gradient.dtype == of_x == torch.float32
        torch.testing.assert_close(gradient, expected, rtol=2e-2, atol=2e-2)


def test_each_rank_holds_its_contiguous_piece_and_nothing_else():
    whole = dict(lively(MODELS["gpt2, grouped queries"]).named_parameters(remove_duplicate=False))
    for rank, (found, still_tied) in enumerate(launch(pieces, 4).results):
        assert still_tied
        for name, (shape, contiguous, alone, cut) in found.items():
            assert contiguous and alone, name
            if cut is not None:
                assert cut.part == rank * cut.parts // 4
                assert shape == tuple(cut.piece(whole[name]).shape)
        uncut = {name.split(".", 2)[-1] for name, (_, _, _, cut) in found.items() if cut is None}
        assert (
            uncut
            == {  # everything else is cut
                *("weight", "bias", "position.weight", "norm.weight", "norm.bias"),
                *("attn_norm.weight", "attn_norm.bias", "ffn_norm.weight", "ffn_norm.bias"),
                *("attn.o.bias", "ffn.down.bias"),
            }
            & uncut
        )
        parts = {name: cut.parts for name, (*_, cut) in found.items() if cut}
        assert parts["blocks.0.attn.k.weight"] == 2  # two kv heads for four ranks
        assert {n for n, p in parts.items() if p != 4} == {
            f"blocks.{i}.attn.{m}.{p}" for i in (0, 1) for m in "kv" for p in ("weight", "bias")
        }


# --- state dicts and initial values ------------------------------------------------------------


def in_and_out(config, on_meta, group):
    state = lively(config).state_dict()
    device = {"device": "meta"} if on_meta else {}
    model = shard_model(GPT(config, seed=1, dtype=torch.float64, **device), GPT_PLAN, group)
    load_full_state_dict(model, state)
    out = full_state_dict(model, group)
    return all(torch.equal(out[name], state[name]) for name in state) and out.keys() == state.keys()


@pytest.mark.parametrize("on_meta", [False, True])
@models
@sizes
def test_a_full_state_dict_comes_out_as_it_went_in(size, config, on_meta):
    assert all(launch(in_and_out, size, (config, on_meta)).results)


def initialised(config, group):
    model = shard_model(GPT(config, device="meta"), GPT_PLAN, group)
    return full_state_dict(init_weights_(model, seed=3), group)


@models
def test_a_model_made_from_nothing_has_the_values_of_one_process(config):
    expected = GPT(config, seed=3).state_dict()
    for state in launch(initialised, 4, (config,)).results:
        assert all(torch.equal(state[name], expected[name]) for name in expected)


# --- dropout -----------------------------------------------------------------------------------


def dropped(pair, group):
    """Return the outputs of blocks, and dropout's masks inside attention and between blocks."""
    inside = []

    def attend(q, k, v, positions, dropout):
        inside.append(torch.rand(8) < dropout)
        return q

    model = GPT(SMALL.replace(dropout=0.4), attention=attend)
    model = shard_model(model, GPT_PLAN, group, pair=pair)
    blocks = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, y: blocks.append(y.detach()))
    model(batch(SMALL, 0)[0])
    between = model.blocks[0].dropout(torch.ones(64))
    after = torch.rand(4)
    model.eval()
    model(batch(SMALL, 0)[0])
    return blocks[:2], inside[:2], between, after, torch.equal(torch.rand(4), after), inside[2:]


@pairs
def test_dropout_is_alike_where_the_tensor_is_and_differs_where_it_is_cut(pair):
    (a, b) = launch(dropped, 2, (pair,)).results
    if not pair.cuts_sequence:
        assert all(torch.equal(x, y) for x, y in zip(a[0], b[0])), "copies of x drift apart"
    assert not any(torch.equal(x, y) for x, y in zip(a[1], b[1])), "heads drop alike"
    assert not torch.equal(a[1][0], a[1][1]), "layers drop alike"
    assert torch.equal(a[2], b[2]) == (not pair.cuts_sequence)
    assert 0 < (a[2] == 0).sum() < 64
    assert torch.equal(a[3], b[3]), "the ranks' random states drift apart"
    assert not any(mask.any() for mask in a[5]), "dropout in eval mode"


def recomputed(pair, again, group):
    model = shard_model(
        GPT(SMALL.replace(dropout=0.4), attention="explicit", dtype=torch.float64),
        *(GPT_PLAN, group),
        pair=pair,
    )
    block = model.blocks[0]
    shape = (2, 8 // group.size() if pair.cuts_sequence else 8, 16)
    torch.manual_seed(5)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=False) if again else block(x)
    y.square().sum().backward()
    return x.grad


@pairs
def test_a_recomputed_forward_drops_the_same(pair):
    once, again = (launch(recomputed, 2, (pair, again)).results for again in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(once, again))


# --- bytes -------------------------------------------------------------------------------------

RING = Pair(partial(copy, algorithm="ring"), partial(all_reduce, algorithm="ring"))
CONFIG = ModelConfig(vocab_size=64, seq_len=16, d_model=32, num_layers=3, num_heads=4)
B = 2


def forward_backward(config, pair, group):
    model = shard_model(GPT(config), GPT_PLAN, group, pair=pair)
    tokens = torch.zeros(B, config.seq_len, dtype=torch.int64)
    model(tokens).square().sum().backward()


@pytest.mark.parametrize("pair, passes", [(RING, 8), (SEQUENCE, 8), (SEQUENCE_AGAIN, 10)])
@sizes
def test_bytes_a_rank_a_block_are_the_papers(size, pair, passes):
    """Bytes are 8 (t-1)/t BSD (Shoeybi et al. 2019, section 3), plus an all-gather per region
    where backward gathers again (Korthikanti et al. 2022, section 4.2.2)."""
    sent = {}
    for layers in (1, 3):
        run = launch(forward_backward, size, (CONFIG.replace(num_layers=layers), pair))
        sent[layers] = [
            sum(run.ledger.total_bytes(rank=rank, phase=p) for p in ("forward", "backward"))
            for rank in range(size)
        ]
    elements = B * CONFIG.seq_len * CONFIG.d_model * (size - 1) / size
    for one, three in zip(sent[1], sent[3]):
        assert three - one == 2 * passes * elements * 4

    how = FRAMEWORKS["course"].replace(keeps_gathered=pair is SEQUENCE)
    layout = Layout(tp=size, sequence_parallel=pair is not RING, micro_batch_size=B)
    assert size == 1 or set(sent[3]) == {step_volume(CONFIG, layout, how)["tp"]}


def test_the_star_of_small_tensors_sends_as_much_in_all():
    """`algorithm="auto"` uses the star for them: rank 0 sends more, the others less."""
    sent = []
    for pair in (RING, TENSOR):
        run = launch(forward_backward, 4, (CONFIG, pair))
        sent.append(sum(run.ledger.total_bytes(phase=p) for p in ("forward", "backward")))
    assert sent[0] == sent[1]


def loss_alone(vocab, group):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, vocab, generator=generator)
    mine = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
    targets = torch.randint(0, vocab, (2, 8), generator=generator)
    targets[1, 3:] = IGNORE_INDEX
    del logits
    loss = vocab_parallel_cross_entropy(mine, targets, group)
    loss.mean().backward()
    return loss, mine.grad


@sizes
@pytest.mark.parametrize("vocab", [8, 1024])
def test_cross_entropy_sends_three_numbers_a_token_whatever_the_vocabulary(size, vocab):
    run = launch(loss_alone, size, (vocab,))
    assert run.ledger.total_bytes() == 2 * (size - 1) * 3 * (2 * 8) * 4

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, vocab, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocab, (2, 8), generator=generator)
    targets[1, 3:] = IGNORE_INDEX
    expected = token_loss(logits, targets)
    expected.mean().backward()
    for rank, (loss, gradient) in enumerate(run.results):
        assert loss.num_tokens == expected.num_tokens == 11
        torch.testing.assert_close(loss.total, expected.total)
        torch.testing.assert_close(gradient, logits.grad.chunk(size, -1)[rank])


WEIGHTS = torch.linspace(-1, 1, 16).view(2, 8)  # weights of the tokens' losses, some negative


def reductions(group):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 24, (2, 8), generator=generator)
    targets[1, 3:] = IGNORE_INDEX
    found = {}
    for reduction in ("none", "sum", "mean"):
        mine = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, targets, group, reduction=reduction)
        (loss * WEIGHTS if reduction == "none" else loss).sum().backward()
        found[reduction] = loss.detach(), mine.grad
    with pytest.raises(ValueError, match="reduction='average' is none of 'none', 'sum', 'mean'"):
        vocab_parallel_cross_entropy(mine, targets, group, reduction="average")
    with pytest.raises(ValueError, match="no target counts"):
        nothing = torch.full_like(targets, IGNORE_INDEX)
        vocab_parallel_cross_entropy(mine, nothing, group, reduction="mean")
    return found


@sizes
def test_losses_of_single_tokens_and_their_gradients_are_torchs(size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, 24, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 24, (2, 8), generator=generator)
    targets[1, 3:] = IGNORE_INDEX
    for found in launch(reductions, size).results:
        for reduction, (loss, _) in found.items():
            expected = nn.functional.cross_entropy(
                logits.movedim(-1, 1), targets, ignore_index=IGNORE_INDEX, reduction=reduction
            )
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for rank, found in enumerate(launch(reductions, size).results):
        for reduction, (_, gradient) in found.items():
            whole = logits.clone().requires_grad_()
            loss = nn.functional.cross_entropy(
                whole.movedim(-1, 1), targets, ignore_index=IGNORE_INDEX, reduction=reduction
            )
            (loss * WEIGHTS if reduction == "none" else loss).sum().backward()
            expected = whole.grad.chunk(size, -1)[rank]
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def large_logits(group):
    mine = torch.full((1, 2, 4), 1e4 * (1 + group.rank())).requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, torch.tensor([[0, 7]]), group)
    loss.total.backward()
    return loss.total.item(), bool(mine.grad.isfinite().all())


def test_large_logits_do_not_overflow():
    logits = torch.tensor([1e4] * 4 + [2e4] * 4).expand(1, 2, 8)
    expected = token_loss(logits, torch.tensor([[0, 7]])).total.item()
    for total, finite in launch(large_logits, 2).results:
        assert total == pytest.approx(expected) and finite


def with_large_vocabulary(group):
    config = ModelConfig(vocab_size=8192, seq_len=32, d_model=8, num_layers=1, num_heads=4)
    model = shard_model(GPT(config), GPT_PLAN, group)
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    group.recorder.phases.set("under test")
    vocab_parallel_cross_entropy(model(tokens), tokens, group).mean().backward()
    return 4 * 32 * 8192 * 4


def test_no_rank_ever_holds_the_full_logits():
    run = launch(with_large_vocabulary, 4, memory=True)
    for full, memory in zip(run.results, run.ledger.memory):
        most = max(change for _, phase, _, change in memory.events if phase != "setup")
        assert most == full / 4


# --- memory ------------------------------------------------------------------------------------

# The paper counts learned positions, GELU, F = 4 D, dropout and explicit attention.
PAPER = ModelConfig(
    vocab_size=64, seq_len=64, d_model=64, num_heads=4, positions="learned", dropout=0.1
)


def activations(config, pair, dtype, group):
    model = GPT(config, attention="explicit", dtype=dtype)
    model = shard_model(model, GPT_PLAN, group, pair=pair)
    tokens = torch.zeros(8, config.seq_len, dtype=torch.int64)
    logits = model(tokens)
    return held(group)["activations"], logits.shape


def of_a_layer(pair, dtype, size, config=PAPER):
    found = []
    for layers in (1, 3):
        args = (config.replace(num_layers=layers), pair, dtype)
        found.append([result[0] for result in launch(activations, size, args, memory=True).results])
    return [(three - one) / 2 for one, three in zip(*found)]


# Bytes per layer in units of s b h, on t ranks, with x = a s / h and m bytes per element of a
# dropout mask (Korthikanti et al. 2022, table 2, where m = 1). The terms, with 2 bytes per number:
#   4 inputs of the two norms, 2 m masks of the two residual dropouts       between the regions
#   2 input of q, k, v; 2 input of the MLP                                  the gathered inputs
#   2 q, 2 k, 2 v, 2 input of o; 8 before and 8 after GELU                  /t, inside
#   x times: 2 softmax, m mask of its dropout, 2 output of the dropout      /t, inside
PAPERS = {
    "TP": lambda t, x, m: (4 + 2 * m) + 4 + 24 / t + (4 + m) * x / t,
    "SP": lambda t, x, m: (4 + 2 * m) / t + 4 + 24 / t + (4 + m) * x / t,
    "SP gathered again": lambda t, x, m: ((4 + 2 * m) + 4 + 24 + (4 + m) * x) / t,
}


def test_the_terms_add_up_to_the_papers_table():
    for t in (1, 2, 8):
        for x in (0, 3.5, 80):
            assert PAPERS["TP"](t, x, 1) == pytest.approx(10 + 24 / t + 5 * x / t)
            assert PAPERS["SP"](t, x, 1) == pytest.approx(4 + 30 / t + 5 * x / t)
            assert PAPERS["SP gathered again"](t, x, 1) == pytest.approx((34 + 5 * x) / t)


@pytest.mark.parametrize("name", PAIRS)
@sizes
def test_activations_of_a_layer_are_the_papers(size, name):
    """Compare in bfloat16, as in the paper, within 3%. torch's dropout on a CPU saves its mask in
    the dtype of x, so m = 2. The paper omits the statistics of two LayerNorms, two numbers per
    token each, and a bool mask [S, S] that batch and heads share."""
    s, b, h, a = PAPER.seq_len, 8, PAPER.d_model, PAPER.num_heads
    expected = s * b * h * PAPERS[name](size, a * s / h, 2)
    for measured in of_a_layer(PAIRS[name], torch.bfloat16, size):
        assert measured == pytest.approx(expected, rel=0.03)
        between = b * s / (1 if name == "TP" else size)
        assert measured == expected + between * 2 * 2 * 2 + s * s  # to the byte


@pytest.mark.parametrize("name", PAIRS)
@sizes
def test_activations_of_a_layer_are_the_calculators(size, name):
    """Compare in float32 with the course's list of saved activations, within 3% as above."""
    how = FRAMEWORKS["course"].replace(flash_attention=False, keeps_gathered=name == "SP")
    layout = Layout(tp=size, sequence_parallel=name != "TP")
    expected = sum(s.bytes_per_token for s in layer_activations(PAPER, layout, how))
    for measured in of_a_layer(PAIRS[name], torch.float32, size):
        assert measured == pytest.approx(8 * PAPER.seq_len * expected, rel=0.03)


# --- what is refused ---------------------------------------------------------------------------


def refusals(group):
    def refuses(message, config=SMALL, plan=GPT_PLAN, pair=TENSOR, seed=0):
        with pytest.raises(ValueError, match=message):
            shard_model(GPT(config, seed), plan, group, pair=pair)

    refuses("ranks, 3, must divide vocab_size=32: 30 or 33 would do")
    refuses("must divide num_heads=4: 3 or 6", SMALL.replace(vocab_size=33))
    six = SMALL.replace(vocab_size=33, num_heads=6, head_dim=4)
    refuses("num_kv_heads=2 on 3 ranks: one must divide the other", six.replace(num_kv_heads=2))
    refuses("must divide d_ffn=25", six.replace(d_ffn=25))
    refuses("MoE is no MLP", six.replace(num_experts=2, top_k=1))
    refuses("no 'atn' in a Block", six, {"blocks.*.atn": ParallelAttention})
    refuses("no 'heat' in a GPT", six, {"heat": ColumnParallelLinear})
    refuses("the ranks' models differ", six, seed=group.rank())
    tied = six.replace(tied_embedding=True)
    refuses("are one parameter, but the plan cuts", tied, {"embed.token": VocabParallelEmbedding})
    with pytest.raises(ValueError, match="must divide in_features=8"):
        RowParallelLinear(nn.Linear(8, 6), group)
    model = shard_model(GPT(six), GPT_PLAN, group, pair=SEQUENCE)
    with pytest.raises(ValueError, match=r"ranks, 3, must divide x.shape\[-2\]=8: 6 or 9 would"):
        model(batch(six, 0)[0])
    with pytest.raises(ValueError, match="input token 33 lies outside the vocabulary, 0..32"):
        model.embed.token(torch.tensor([[33]]))
    with pytest.raises(ValueError, match="target 6 lies outside the vocabulary, 0..5"):
        vocab_parallel_cross_entropy(torch.zeros(1, 2), torch.tensor([6]), group)


def test_sizes_that_do_not_divide_are_refused_with_the_number_that_must():
    launch(refusals, 3)


# -- infinities stay where they are -------------------------------------------------------------


def look_up(group):
    """Token 0 has an infinite row, and token 5's gradient is infinite."""
    whole = nn.Embedding(8, 4)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(32.0).view(8, 4))
        whole.weight[0] = torch.inf
    cut = VocabParallelEmbedding(whole, group)
    x = cut(torch.tensor([[1, 5, 7]]))
    x.backward(torch.tensor([1.0, torch.inf, 1.0]).view(1, 3, 1).expand_as(x))
    return x.detach(), whole.weight.detach(), all_gather(cut.weight.grad, group)


def test_a_row_that_is_not_finite_touches_only_the_tokens_that_read_it():
    for x, weight, gradient in launch(look_up, 2).results:
        torch.testing.assert_close(x, weight[[1, 5, 7]][None], rtol=0, atol=0)
        of_rows = [0, 1, 0, 0, 0, torch.inf, 0, 1]
        assert torch.equal(gradient, torch.tensor(of_rows)[:, None].expand(8, 4))
