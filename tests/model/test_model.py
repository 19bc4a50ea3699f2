import copy
import math
import pickle

import pytest
import torch
from torch.nn import functional

from mini_dist.model.data import decode, encode
from mini_dist.model.gpt import (
    GPT,
    MoE,
    explicit_attention,
    may_see,
    rotate,
    sdpa_attention,
)
from mini_dist.model.initial_values import initial_value
from mini_dist.model.loss import IGNORE_INDEX, token_loss
from mini_dist.model.routing import Routing, load_balance_loss, route, z_loss
from mini_dist.model.sampling import generate
from mini_dist.plan.calculators.parameters import num_parameters
from mini_dist.plan.config import ModelConfig

SMALL = ModelConfig(vocab_size=31, seq_len=12, d_model=16, num_layers=2, num_heads=4, d_ffn=24)
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "bias": False}
EXPERTS = {"num_experts": 4, "top_k": 2, "d_expert": 10}
VARIANTS = {
    "plain": SMALL,
    "gpt2": SMALL.replace(positions="learned", tied_embedding=True),
    "llama": SMALL.replace(**LLAMA, num_kv_heads=2),
    "multi-query": SMALL.replace(num_kv_heads=1),
    "wide heads": SMALL.replace(head_dim=6),
    "qwen2 biases": SMALL.replace(**LLAMA, qkv_bias=True),
    "layernorm without bias": SMALL.replace(bias=False),
    "experts": SMALL.replace(**EXPERTS, num_shared_experts=2),
    "swiglu experts after a dense layer": SMALL.replace(**LLAMA, **EXPERTS, first_dense_layers=1),
    "switch": SMALL.replace(num_experts=4, top_k=1),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


@pytest.fixture(autouse=True)
def same_draws_every_time():
    torch.manual_seed(0)


def lively(config, seed=0, **kwargs):
    """Make a float64 model with weights so large that every path affects the logits."""
    model = GPT(config, seed, dtype=torch.float64, **kwargs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            parameter.add_(0.3 * noise)
    return model


def some_tokens(config, batch=3, length=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length or config.seq_len)
    return torch.randint(config.vocab_size, shape, generator=generator)


def random_qkv(num_heads=4, num_kv_heads=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, n, 7, 6, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (num_heads, num_kv_heads, num_kv_heads)
    ]


# --- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("positions", ["none", "[S]", "[B, S]"])
def test_explicit_attention_is_sdpa_forward_and_backward(num_kv_heads, positions):
    shuffled = torch.stack([torch.randperm(7), torch.randperm(7)])
    given = {"none": None, "[S]": shuffled[0], "[B, S]": shuffled}[positions]
    q, k, v = random_qkv(num_kv_heads=num_kv_heads)
    explicit, fused = explicit_attention(q, k, v, given), sdpa_attention(q, k, v, given)
    torch.testing.assert_close(explicit, fused, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(explicit.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(explicit, (q, k, v), upstream),
        torch.autograd.grad(fused, (q, k, v), upstream),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_explicit_attention_is_a_weighted_mean_of_the_values_seen_so_far():
    q, k, v = random_qkv(num_heads=1, num_kv_heads=1)
    out = explicit_attention(q, k, v)
    for b in range(2):
        for s in range(7):
            products = [((q[b, 0, s] @ k[b, 0, t]) / math.sqrt(6)).exp() for t in range(s + 1)]
            mean = sum(w * v[b, 0, t] for t, w in enumerate(products)) / sum(products)
            torch.testing.assert_close(out[b, 0, s], mean)


@pytest.mark.parametrize("attend", [explicit_attention, sdpa_attention])
def test_attention_dropout_drops_weights_and_keeps_their_expected_sum(attend):
    q, k, _ = (t.detach() for t in random_qkv())
    ones = torch.ones_like(k)  # so the output is the sum of the weights
    sums = torch.stack([attend(q, k, ones, dropout=0.5) for _ in range(400)])
    assert (sums[:, :, :, 0] == 0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (sums[:, :, :, 0] == 2).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert sums.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.allclose(attend(q, k, ones), ones)


def test_may_see_looks_back_in_positions_not_in_places():
    q = torch.zeros(2, 1, 3, 4)
    assert may_see(q, None)[0, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert may_see(q, torch.tensor([5, 9, 2]))[0, 0].tolist() == [[1, 0, 1], [1, 1, 1], [0, 0, 1]]
    both = may_see(q, torch.tensor([[0, 1, 2], [2, 1, 0]]))
    assert both.shape == (2, 1, 3, 3)
    assert torch.equal(both[1, 0], both[0, 0].T)


@variants
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_the_future_does_not_change_past_logits(config, attention):
    model, tokens = lively(config, attention=attention), some_tokens(config)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-3


@variants
def test_the_past_changes_every_later_logit(config):
    # A mask that hides too much would pass the test above.
    model, tokens = lively(config), some_tokens(config)
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % config.vocab_size
    assert (model(tokens) - model(changed)).abs().amax(-1).min() > 1e-6


def test_attention_can_be_any_function():
    calls = []

    def spy(q, k, v, positions, dropout):
        calls.append((q.shape, k.shape, v.shape, positions, dropout))
        return explicit_attention(q, k, v, positions, dropout)

    config = SMALL.replace(num_kv_heads=2, dropout=0.25)
    model, tokens = lively(config, attention=spy), some_tokens(config, batch=3, length=5)
    positions = torch.arange(5)
    out = model.eval()(tokens, positions)
    assert calls == [((3, 4, 5, 4), (3, 2, 5, 4), (3, 2, 5, 4), positions, 0.0)] * 2
    torch.testing.assert_close(out, lively(config).eval()(tokens))
    model.train()(tokens)
    assert [call[-1] for call in calls[2:]] == [0.25, 0.25]


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_are_full_attention_with_kv_heads_repeated(num_kv_heads):
    H, repeats = SMALL.head_dim, 4 // num_kv_heads
    grouped = lively(SMALL.replace(num_kv_heads=num_kv_heads))
    full = lively(SMALL)
    weights = grouped.state_dict()
    for name in weights:
        if ".attn.k." in name or ".attn.v." in name:
            heads = weights[name].split(H)  # one entry per head: its rows or its bias
            weights[name] = torch.cat([head for head in heads for _ in range(repeats)])
    full.load_state_dict(weights)
    tokens = some_tokens(SMALL)
    torch.testing.assert_close(full(tokens), grouped(tokens), rtol=1e-12, atol=1e-12)


def test_attention_is_the_sum_of_its_heads_cut_out_by_rows():
    # Tensor parallelism relies on this: rows of q, k, v and columns of o belong to heads.
    config = SMALL.replace(num_kv_heads=2, bias=False)
    model, H = lively(config), config.head_dim
    whole = model.blocks[0].attn
    x = torch.randn(2, 5, config.d_model, dtype=torch.float64)
    parts = []
    for rank in range(2):  # two query heads and their key/value head
        part = copy.deepcopy(whole)
        queries, keys = slice(2 * H * rank, 2 * H * (rank + 1)), slice(H * rank, H * (rank + 1))
        part.q.weight.data = whole.q.weight[queries]
        part.k.weight.data, part.v.weight.data = whole.k.weight[keys], whole.v.weight[keys]
        part.o.weight.data = whole.o.weight[:, queries]
        parts.append(part(x))
    torch.testing.assert_close(sum(parts), whole(x), rtol=1e-12, atol=1e-12)


# --- positions ---------------------------------------------------------------------------------


def test_rotate_is_a_turn_in_the_complex_plane():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 40, 7])
    first, second = x.chunk(2, dim=-1)
    turns = positions[:, None] * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) * 2 / 8)
    turned = torch.complex(first, second) * torch.exp(1j * turns)
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotate(x, positions), expected, rtol=1e-12, atol=1e-12)


def test_rotated_products_depend_on_the_distance_only():
    q, k, _ = random_qkv()

    def products(shift_q, shift_k):
        positions = torch.arange(7)
        return rotate(q, positions + shift_q) @ rotate(k, positions + shift_k).mT

    torch.testing.assert_close(products(100, 100), products(0, 0))
    assert (products(101, 100) - products(0, 0)).abs().max() > 0.1


def test_rotate_keeps_its_input_type_and_angles_of_bf16_are_exact_enough():
    x = torch.randn(1, 1, 2, 8)
    far = torch.tensor([4096, 4097])  # bf16 could not tell them apart
    turned = rotate(x.bfloat16(), far)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), rotate(x, far), rtol=0.02, atol=0.02)


@variants
def test_without_positions_tokens_stand_in_order(config):
    model, tokens = lively(config), some_tokens(config)
    in_order = torch.arange(config.seq_len)
    torch.testing.assert_close(model(tokens), model(tokens, in_order))
    torch.testing.assert_close(model(tokens), model(tokens, in_order.expand(3, -1)))


@variants
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_tokens_may_be_moved_if_their_positions_move_along(config, attention):
    # Context parallelism relies on this: zigzag hands out tokens in another order.
    model, tokens = lively(config, attention=attention), some_tokens(config)
    orders = torch.stack([torch.randperm(config.seq_len) for _ in range(3)])
    while (orders[:, 0] == 0).any():  # move every first token, for the control below
        orders = torch.stack([torch.randperm(config.seq_len) for _ in range(3)])
    wanted = model(tokens).gather(1, orders[..., None].expand(-1, -1, config.vocab_size))
    moved = tokens.gather(1, orders)
    torch.testing.assert_close(model(moved, orders), wanted, rtol=1e-10, atol=1e-10)
    assert (model(moved) - wanted).abs().max() > 1e-2


def test_rotary_logits_do_not_change_when_all_positions_shift_learned_ones_do():
    for positions, same in (("rotary", True), ("learned", False)):
        config = SMALL.replace(positions=positions)
        model, tokens = lively(config), some_tokens(config, length=6)
        shifted = model(tokens, torch.arange(6) + 5)
        assert torch.allclose(shifted, model(tokens)) == same


def test_order_is_known_from_one_kind_of_positions_only():
    # With learned positions zeroed, the last token sees a bag of tokens; rotary keeps the order.
    for positions, knows_order in (("rotary", True), ("learned", False)):
        model = lively(SMALL.replace(positions=positions, num_layers=1))
        if model.embed.position is not None:
            torch.nn.init.zeros_(model.embed.position.weight)
        tokens = torch.tensor([[1, 2, 3, 4, 5]])
        swapped = torch.tensor([[2, 1, 3, 4, 5]])
        same = torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1])
        assert same != knows_order


def test_tokens_longer_than_the_model_are_refused():
    with pytest.raises(ValueError, match="tokens are 13 long.*seq_len=12"):
        GPT(SMALL)(some_tokens(SMALL, length=13))


# --- parameters --------------------------------------------------------------------------------


def counted_by_hand(c: ModelConfig) -> int:
    D, H = c.d_model, c.head_dim

    def linear(inputs, outputs, bias):
        return inputs * outputs + (outputs if bias else 0)

    def mlp(width):
        into = 2 if c.activation == "swiglu" else 1
        return into * linear(D, width, c.bias) + linear(width, D, c.bias)

    norm = D * (2 if c.norm == "layernorm" and c.bias else 1)
    total = c.vocab_size * D * (1 if c.tied_embedding else 2) + norm
    total += c.seq_len * D if c.positions == "learned" else 0
    for layer in range(c.num_layers):
        total += 2 * norm
        total += linear(D, c.num_heads * H, c.qkv_bias)
        total += 2 * linear(D, c.num_kv_heads * H, c.qkv_bias)
        total += linear(c.num_heads * H, D, c.bias)
        if c.num_experts and layer >= c.first_dense_layers:
            total += D * c.num_experts + c.num_experts * mlp(c.d_expert)
            total += mlp(c.num_shared_experts * c.d_expert) if c.num_shared_experts else 0
        else:
            total += mlp(c.d_ffn)
    return total


@variants
def test_parameter_count_is_the_hand_count_and_the_calculators(config):
    count = GPT(config).num_parameters()
    assert count == counted_by_hand(config)
    assert count == num_parameters(config)


def test_gpt2_small_has_its_published_size():
    # Radford et al. 2019, as released: a number from outside this project.
    config = ModelConfig(
        vocab_size=50257, seq_len=1024, d_model=768, num_layers=12, num_heads=12,
        positions="learned", tied_embedding=True,
    )  # fmt: skip
    assert GPT(config, device="meta").num_parameters() == 124_439_808


def test_a_tied_embedding_is_one_parameter_with_both_gradients():
    tied, untied = lively(SMALL.replace(tied_embedding=True)), lively(SMALL)
    assert tied.head.out.weight is tied.embed.token.weight
    assert tied.num_parameters() == untied.num_parameters() - SMALL.vocab_size * SMALL.d_model
    untied.load_state_dict(tied.state_dict())  # the same values, as two parameters
    tokens = some_tokens(SMALL)
    for model in (tied, untied):
        token_loss(model(tokens), tokens).mean().backward()
    both = untied.embed.token.weight.grad + untied.head.out.weight.grad
    assert untied.head.out.weight.grad.abs().min() > 0
    torch.testing.assert_close(tied.embed.token.weight.grad, both)


def test_a_copied_or_pickled_model_is_the_same_and_stays_tied():
    model, tokens = lively(SMALL.replace(tied_embedding=True)), some_tokens(SMALL)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.head.out.weight is twin.embed.token.weight
        assert torch.equal(twin(tokens), model(tokens))


def test_embed_blocks_and_head_are_the_whole_model():
    for config in (SMALL, VARIANTS["gpt2"].replace(tied_embedding=False)):
        model, tokens = lively(config), some_tokens(config)
        positions = torch.arange(config.seq_len).flip(0)
        x = model.embed(tokens, positions)
        for l in range(config.num_layers):
            assert x.shape == (3, config.seq_len, config.d_model)
            x = model.blocks[l](x, positions)
        assert torch.equal(model.head(x), model(tokens, positions))
        parts = (model.embed, *model.blocks, model.head)
        assert sum(p.numel() for part in parts for p in part.parameters()) == model.num_parameters()


# --- initial values ----------------------------------------------------------------------------


@variants
def test_each_parameter_is_drawn_from_its_name_alone(config):
    for name, parameter in GPT(config, seed=5).named_parameters():
        alone = initial_value(name, parameter.shape, config, seed=5)
        assert torch.equal(parameter, alone), name


def test_a_parameter_is_the_same_whatever_else_is_in_the_model():
    # Values drawn in sequence from one generator would differ from the second layer on.
    names = ["embed.token.weight", "blocks.1.attn.q.weight", "blocks.1.attn.v.weight",
             "head.out.weight"]  # fmt: skip
    plain = GPT(SMALL).state_dict()
    for other in (
        SMALL.replace(num_layers=5),
        SMALL.replace(positions="learned", **LLAMA),
        SMALL.replace(**EXPERTS),
    ):
        weights = GPT(other).state_dict()
        assert all(torch.equal(weights[name], plain[name]) for name in names)


def test_no_two_weights_and_no_two_seeds_share_values():
    first_rows = {
        (seed, name): tuple(parameter[0, :8].tolist())
        for seed in (0, 1)
        for name, parameter in GPT(VARIANTS["experts"], seed).named_parameters()
        if parameter.ndim == 2
    }
    assert len(set(first_rows.values())) == len(first_rows)


def test_initial_values_are_gpt2s():
    config = ModelConfig(num_layers=8, positions="learned", num_experts=2, top_k=1,
                         first_dense_layers=7)  # fmt: skip
    smaller = ("attn.o.weight", ".down.weight")
    for name, parameter in GPT(config).named_parameters():
        if parameter.ndim == 1:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
        else:
            std = 0.02 / 4 if name.endswith(smaller) else 0.02  # 4 = √(2 * 8)
            # The standard deviation of n draws is off by about std / √(2n).
            slack = 5 * std / math.sqrt(2 * parameter.numel())
            assert abs(parameter.std().item() - std) < slack, name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_making_a_model_neither_reads_nor_moves_the_random_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    weights = GPT(SMALL).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = GPT(SMALL).state_dict()
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_other_types_hold_the_same_values_rounded():
    single = GPT(SMALL).state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        for name, value in GPT(SMALL, dtype=dtype).state_dict().items():
            assert value.dtype == dtype
            assert torch.equal(value, single[name].to(dtype))


@variants
def test_a_meta_model_has_shapes_only_until_it_is_initialised(config):
    model, ready = GPT(config, device="meta"), GPT(config, seed=3)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.init_weights_(seed=3)
    weights, wanted = model.state_dict(), ready.state_dict()
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    assert model.num_parameters() == ready.num_parameters()  # still tied


@pytest.mark.parametrize("name", [name for name in VARIANTS if not VARIANTS[name].num_experts])
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_everything_is_computed_on_the_models_device(name, attention):
    # meta stands in for a GPU: mixing it with a CPU tensor is an error.
    # (Experts are left out, because routing needs values.)
    config = VARIANTS[name]
    model = GPT(config, attention=attention, device="meta")
    tokens = some_tokens(config).to("meta")
    for positions in (None, torch.arange(config.seq_len, device="meta")):
        logits = model(tokens, positions)
        assert logits.is_meta and logits.shape == (3, config.seq_len, config.vocab_size)


# --- training ----------------------------------------------------------------------------------


@variants
@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_every_parameter_gets_a_finite_gradient(config, attention):
    model, tokens = GPT(config, attention=attention), some_tokens(config)
    token_loss(model(tokens), tokens).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # A key's bias adds the same to all scores of a query (up to rotation), so softmax drops it.
        if not name.endswith("attn.k.bias") and ".experts." not in name:
            assert parameter.grad.abs().max() > 0, name


def test_a_few_steps_learn_a_batch_by_heart():
    model, tokens = GPT(SMALL), some_tokens(SMALL)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(SMALL.vocab_size)) < 0.1  # untrained: a uniform guess
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("attention", ["explicit", "sdpa"])
def test_dropout_acts_in_training_only(attention):
    dropping = lively(SMALL.replace(dropout=0.5), attention=attention)
    tokens = some_tokens(SMALL)
    assert not torch.allclose(dropping(tokens), dropping(tokens))
    torch.testing.assert_close(
        dropping.eval()(tokens), lively(SMALL, attention=attention)(tokens)
    )  # exact up to the choice of kernel


def test_dropout_acts_on_embedding_attention_and_both_branches():
    def zeros(x):
        return (x == 0).double().mean().item()

    model, tokens = lively(SMALL.replace(dropout=0.5)), some_tokens(SMALL)
    assert zeros(model.embed(tokens)) == pytest.approx(0.5, abs=0.15)

    x = torch.randn(4, 10, SMALL.d_model, dtype=torch.float64)
    block = model.blocks[0]
    assert not torch.equal(block.attn(x), block.attn(x))
    block.attn.dropout = 0.0
    # With one branch silenced, only the other is added to x, with half of it dropped.
    for silenced in ("attn.o", "ffn.down"):
        half_silent = copy.deepcopy(block)
        for parameter in half_silent.get_submodule(silenced).parameters():
            torch.nn.init.zeros_(parameter)
        assert zeros(half_silent(x) - x) == pytest.approx(0.5, abs=0.15)


def test_token_loss_counts_only_targets_that_are_not_ignored():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[1, IGNORE_INDEX, 4], [IGNORE_INDEX, IGNORE_INDEX, 0]])
    loss = token_loss(logits, targets)
    p = logits.softmax(-1)
    expected = -(p[0, 0, 1].log() + p[0, 2, 4].log() + p[1, 2, 0].log())
    assert loss.num_tokens == 3
    torch.testing.assert_close(loss.total, expected)
    torch.testing.assert_close(loss.mean(), expected / 3)
    total, num_tokens = loss
    assert total is loss.total and num_tokens is loss.num_tokens


def test_sums_of_uneven_parts_give_the_whole_loss_and_means_of_means_do_not():
    logits, targets = torch.randn(4, 6, 5, dtype=torch.float64), torch.randint(5, (4, 6))
    targets[0, 1:] = IGNORE_INDEX
    parts = [token_loss(logits[:1], targets[:1]), token_loss(logits[1:], targets[1:])]
    whole = token_loss(logits, targets)
    summed = sum(part.total for part in parts) / sum(part.num_tokens for part in parts)
    torch.testing.assert_close(summed, whole.mean())
    assert abs((parts[0].mean() + parts[1].mean()) / 2 - whole.mean()) > 1e-3


def test_a_loss_over_zero_tokens_is_zero_and_its_mean_is_refused():
    model, tokens = GPT(SMALL), some_tokens(SMALL)
    loss = token_loss(model(tokens), torch.full_like(tokens, IGNORE_INDEX))
    assert loss.total == 0 and loss.num_tokens == 0
    loss.total.backward()  # a rank without tokens still takes part in the backward pass
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="no target counts.*over all ranks"):
        loss.mean()


def test_tokens_and_targets_outside_the_vocabulary_are_refused():
    model, tokens = GPT(SMALL), some_tokens(SMALL)
    last = SMALL.vocab_size - 1
    for wrong, works in ((last + 1, f"vocab_size={last + 2} or more"), (-1, "tokens from 0 up")):
        bad = tokens.clone()
        bad[0, 1] = wrong
        outside = f"{wrong} lies outside the vocabulary, 0..{last}"
        with pytest.raises(ValueError, match=f"^input token {outside}: .*{works}"):
            model(bad)
        with pytest.raises(ValueError, match=f"^target {outside}: "):
            token_loss(model(tokens), bad)
    assert model(tokens[:0]).shape == (0, tokens.shape[1], last + 1)  # no tokens, nothing to refuse


def test_the_loss_is_computed_in_float32_or_better():
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    rounded = logits.bfloat16()
    assert token_loss(rounded, targets).total.dtype == torch.float32
    assert token_loss(rounded, targets).total == token_loss(rounded.float(), targets).total
    assert token_loss(logits.double(), targets).total.dtype == torch.float64


@variants
def test_a_bf16_model_and_an_autocast_model_train(config):
    tokens = some_tokens(config)
    wanted = token_loss(GPT(config)(tokens), tokens).mean()
    for autocast in (False, True):
        model = GPT(config, dtype=None if autocast else torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = token_loss(model(tokens), tokens).mean()
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=0.01, atol=0)
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# --- experts -----------------------------------------------------------------------------------


def one_token_at_a_time(moe, x, top_k):
    """Compute the papers' formula without sorting, indexing or batching."""

    def mlp(m, token):
        up = token @ m.up.weight.T + m.up.bias
        if m.gate is None:
            hidden = functional.gelu(up)
        else:
            hidden = functional.silu(token @ m.gate.weight.T + m.gate.bias) * up
        return hidden @ m.down.weight.T + m.down.bias

    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = moe.router.weight @ token
        chosen = logits.tolist()
        chosen = sorted(range(len(chosen)), key=lambda e: -chosen[e])[:top_k]
        # Softmax over the chosen logits equals their probabilities divided by their sum.
        weights = logits.softmax(-1)[chosen] if top_k == 1 else logits[chosen].softmax(-1)
        row = sum(w * mlp(moe.experts[e], token) for w, e in zip(weights, chosen))
        rows.append(row if moe.shared is None else row + mlp(moe.shared, token))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("num_shared_experts", [0, 2])
def test_moe_is_one_token_at_a_time_forward_and_backward(top_k, activation, num_shared_experts):
    config = SMALL.replace(num_experts=4, top_k=top_k, d_expert=10, activation=activation,
                           num_shared_experts=num_shared_experts)  # fmt: skip
    moe = lively(config).blocks[0].ffn
    assert isinstance(moe, MoE)
    x = torch.randn(2, 9, config.d_model, dtype=torch.float64, requires_grad=True)
    ours, theirs = moe(x), one_token_at_a_time(moe, x, top_k)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = [x, *moe.parameters()]
    upstream = torch.randn_like(ours)
    for mine, wanted, leaf in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream, allow_unused=True, materialize_grads=True),
        leaves,
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-10, atol=1e-11)
        assert leaf is not moe.router.weight or mine.abs().max() > 1e-3


def test_equal_experts_answer_as_one_mlp_would():
    moe = lively(SMALL.replace(**EXPERTS)).blocks[0].ffn
    for expert in moe.experts:
        expert.load_state_dict(moe.experts[0].state_dict())
    x = torch.randn(2, 5, SMALL.d_model, dtype=torch.float64)
    torch.testing.assert_close(moe(x), moe.experts[0](x))


def test_route_takes_the_most_probable_experts():
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.1, 0.2]], dtype=torch.float64))
    one, two = route(logits, 1), route(logits, 2)
    assert one.experts.tolist() == [[1], [0]]
    torch.testing.assert_close(one.weights, torch.tensor([[0.5], [0.7]], dtype=torch.float64))
    assert two.experts.tolist() == [[1, 2], [0, 2]]
    expected = torch.tensor([[5 / 9, 4 / 9], [7 / 9, 2 / 9]], dtype=torch.float64)
    torch.testing.assert_close(two.weights, expected)
    assert route(logits.bfloat16(), 2).weights.dtype == torch.float32


def test_a_sigmoid_gate_scores_each_expert_alone_and_its_bias_only_chooses():
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.float64)
    score = [1 / (1 + math.exp(-value)) for value in (0.0, 2.0, 1.0)]
    free = route(logits, 2, "sigmoid")
    assert free.experts.tolist() == [[1, 2]]
    expected = torch.tensor([[score[1], score[2]]], dtype=torch.float64) / (score[1] + score[2])
    torch.testing.assert_close(free.weights, expected)
    pushed = route(logits, 2, "sigmoid", torch.tensor([1.0, 0.0, 0.0]))
    assert pushed.experts.tolist() == [[0, 1]]
    # The weights come from the scores without the bias.
    expected = torch.tensor([[score[0], score[1]]], dtype=torch.float64) / (score[0] + score[1])
    torch.testing.assert_close(pushed.weights, expected)
    torch.testing.assert_close(pushed.probabilities.sum(-1), torch.ones(1, dtype=torch.float64))
    one = route(logits, 1, "sigmoid")
    assert one.weights.item() == pytest.approx(score[1])


def test_the_balance_bias_is_a_buffer_that_starts_at_zero():
    model = GPT(SMALL.replace(**EXPERTS, router="sigmoid"), device="meta")
    model.init_weights_(0)
    bias = model.blocks[0].ffn.balance_bias
    assert torch.equal(bias, torch.zeros(EXPERTS["num_experts"]))
    assert "blocks.0.ffn.balance_bias" in model.state_dict()
    assert not any("bias" in name for name, _ in model.blocks[0].ffn.router.named_parameters())
    tokens = some_tokens(SMALL)
    routing = []
    with torch.no_grad():
        bias[2] = 5.0  # above any sigmoid, so every token visits expert 2
        model(tokens, routing=routing)
    assert (routing[0].experts == 2).any(-1).all()


def test_an_expert_without_visitors_gets_a_zero_gradient():
    model = lively(SMALL.replace(num_experts=4, top_k=1))
    tokens = some_tokens(SMALL)
    moe = model.blocks[0].ffn
    torch.nn.init.zeros_(moe.router.weight)  # equal probabilities: all tokens go to one
    routing = []
    token_loss(model(tokens, routing=routing), tokens).mean().backward()
    visited = set(routing[0].experts.flatten().tolist())
    assert len(visited) == 1
    for e, expert in enumerate(moe.experts):
        assert (expert.up.weight.grad.abs().max() > 0) == (e in visited)


def test_the_routing_list_gets_one_entry_for_each_layer_with_experts():
    config = SMALL.replace(**EXPERTS, num_layers=3, first_dense_layers=1)
    model, tokens = lively(config), some_tokens(config)
    routing = []
    torch.testing.assert_close(model(tokens, routing=routing), model(tokens))
    assert len(routing) == config.num_moe_layers == 2
    for decision in routing:
        assert decision.logits.shape == (3 * config.seq_len, 4)
        assert decision.experts.shape == decision.weights.shape == (3 * config.seq_len, 2)
    assert not torch.equal(routing[0].logits, routing[1].logits)


def test_load_balance_loss_is_1_when_even_and_number_of_experts_when_all_want_one():
    even = torch.eye(4, dtype=torch.float64).repeat(3, 1) * 5
    assert load_balance_loss(route(even, 1)).item() == pytest.approx(1)
    assert load_balance_loss(route(even, 4)).item() == pytest.approx(1)
    greedy = torch.zeros(12, 4, dtype=torch.float64)
    greedy[:, 2] = 50
    assert load_balance_loss(route(greedy, 1)).item() == pytest.approx(4)


def test_load_balance_loss_is_shares_times_mean_probabilities():
    probabilities = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4]], dtype=torch.float64)
    routing = route(probabilities.log(), 2)  # visits: 0 and 1, 0 and 2
    expected = 3 * (2 / 4 * 0.55 + 1 / 4 * 0.2 + 1 / 4 * 0.25)
    assert load_balance_loss(routing).item() == pytest.approx(expected)


def test_load_balance_loss_pushes_tokens_off_the_crowded_expert():
    logits = torch.zeros(6, 3, dtype=torch.float64)
    logits[:4, 0], logits[4, 1], logits[5, 2] = 1.0, 1.0, 1.0
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(load_balance_loss(route(logits, 1)), logits)
    assert (gradient[:, 0] > 0).all() and (gradient[:, 1:] < 0).all()


def test_z_loss_is_the_mean_square_of_the_logsumexp():
    logits = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    expected = (math.log(math.e + math.e**2) ** 2 + math.log(2) ** 2) / 2
    assert z_loss(route(logits, 1)).item() == pytest.approx(expected)


def test_both_balance_losses_reach_the_router_and_nothing_after_it():
    config = SMALL.replace(**EXPERTS, num_layers=1)
    model, routing = lively(config), []
    model(some_tokens(config), routing=routing)
    (decision,) = routing
    assert isinstance(decision, Routing)
    (load_balance_loss(decision) + z_loss(decision)).backward()
    assert model.blocks[0].ffn.router.weight.grad.abs().max() > 0
    assert model.embed.token.weight.grad.abs().max() > 0
    assert model.head.out.weight.grad is None
    assert model.blocks[0].ffn.experts[0].up.weight.grad is None


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"positions": "alibi"}, "positions='alibi'.*Give positions='rotary' or 'learned'"),
        ({"qk_norm": True}, "qk_norm=True.*Give qk_norm=False"),
        ({"embedding_norm": True}, "embedding_norm=True.*Give embedding_norm=False"),
        ({"kv_lora_rank": 8, "rope_head_dim": 4}, "kv_lora_rank=8.*Give kv_lora_rank=0"),
    ],
)
def test_a_config_that_only_the_calculators_know_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GPT(SMALL.replace(**fields))


@pytest.mark.parametrize("attention", ["flash", None])
def test_an_unknown_attention_is_refused_with_those_that_exist(attention):
    with pytest.raises(ValueError, match=f"attention is {attention!r}.*explicit.*sdpa"):
        GPT(SMALL, attention=attention)


# --- sampling ----------------------------------------------------------------------------------


def test_generate_continues_what_it_is_given():
    model = lively(SMALL)
    start = some_tokens(SMALL, batch=2, length=4)
    longer = generate(model, start, 20, seed=1)  # past seq_len, so the window slides
    assert longer.shape == (2, 24) and longer.dtype == torch.int64
    assert torch.equal(longer[:, :4], start)
    assert longer.max() < SMALL.vocab_size
    assert torch.equal(generate(model, start[0], 0), start[0])


def test_generate_is_decided_by_its_seed_and_leaves_the_random_state_alone():
    model, start = lively(SMALL.replace(dropout=0.5)), some_tokens(SMALL, batch=1, length=4)[0]
    before = torch.get_rng_state()
    first, again, other = (generate(model, start, 12, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training  # unchanged, though sampling disables dropout


def test_generate_at_temperature_zero_takes_the_likeliest_token():
    model, start = lively(SMALL), some_tokens(SMALL, batch=2, length=4)
    out = generate(model, start, 6, temperature=0)
    predicted = model(out[:, :-1]).argmax(-1)
    assert torch.equal(out[:, 4:], predicted[:, 3:])


def test_generate_samples_in_proportion_to_the_probabilities():
    model = lively(SMALL)
    start = some_tokens(SMALL, batch=1, length=4).expand(4000, -1)
    for temperature in (1.0, 0.5):
        drawn = generate(model, start, 1, temperature=temperature)[:, -1]
        share = drawn.bincount(minlength=SMALL.vocab_size) / 4000
        p = (model(start[:1])[0, -1] / temperature).softmax(-1)
        assert ((share - p).abs() < 5 * (p * (1 - p) / 4000).sqrt() + 1e-3).all()


def test_text_goes_through_the_model_and_back():
    config = ModelConfig(d_model=16, num_layers=1, num_heads=2)
    out = decode(generate(GPT(config), encode("The "), 5, temperature=0))
    assert out.startswith("The ")


def test_generate_refuses_nothing_to_continue_and_a_negative_temperature():
    with pytest.raises(ValueError, match="tokens are empty"):
        generate(GPT(SMALL), encode(""), 3)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(GPT(SMALL), encode("\1"), 3, temperature=-1)
