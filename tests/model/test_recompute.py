"""Recomputation changes no gradient; it frees and costs what the calculator says."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mini_dist import GPT, Layout, ModelConfig
from mini_dist.model.loss import token_loss
from mini_dist.model.recompute import SavedBytes, forget_and_repeat, recompute_blocks, recomputed
from mini_dist.model.routing import load_balance_loss
from mini_dist.plan.calculators import framework, step_flops
from mini_dist.plan.calculators.activations import kept_of_layer

CONFIG = ModelConfig(d_model=64, num_layers=4, num_heads=4, seq_len=64)
TOKENS = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
MODES = ("none", "selective", "full")
SHAPES = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "experts": {"num_experts": 4, "top_k": 2, "d_expert": 64},
    "tied": {"tied_embedding": True, "positions": "learned"},
}


def gradients(model, seed=0):
    """Return the gradients of the loss (with routers, plus their balance) and the next draw."""
    torch.manual_seed(seed)
    routing = []
    loss = token_loss(model(TOKENS, None, routing), TOKENS).mean()
    (loss + sum(load_balance_loss(decision) for decision in routing)).backward()
    return [parameter.grad for parameter in model.parameters()], torch.rand(())


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention", ["sdpa", "explicit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_bit_of_a_gradient_changes(shape, attention, mode, every):
    """Dropout draws the same numbers twice, and the next random draw is unchanged."""
    config = CONFIG.replace(**SHAPES[shape])
    expected, next_draw = gradients(GPT(config, attention=attention))
    model = recompute_blocks(GPT(config, attention=attention), mode, every)
    found, our_next_draw = gradients(copy.deepcopy(model))  # a copy recomputes with its own weights
    assert all(map(torch.equal, found, expected))
    assert next_draw == our_next_draw
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_second_time_autocast_is_as_it_was_the_first_time(dtype):
    def under_autocast(model):
        with torch.autocast("cpu", dtype):
            loss = token_loss(model(TOKENS), TOKENS).mean()
        loss.backward()  # outside autocast, as usual
        return [parameter.grad for parameter in model.parameters()]

    expected = under_autocast(GPT(CONFIG))
    assert all(map(torch.equal, under_autocast(recompute_blocks(GPT(CONFIG), "full")), expected))
    assert not all(map(torch.equal, gradients(GPT(CONFIG))[0], expected)), "autocast does nothing"


def test_a_weight_used_inside_and_outside_under_one_autocast_gets_both_gradients():
    """The 16-bit copy of the weight made inside, without gradients, must not be reused."""
    weight = nn.Parameter(torch.randn(8, 8))
    x = torch.randn(2, 8, requires_grad=True)
    found = []
    for wrap in (lambda fn, _: fn, recomputed):
        with torch.autocast("cpu", torch.bfloat16):
            y = wrap(lambda x: x @ weight, [weight])(x) @ weight
        found.append(torch.autograd.grad(y.float().sum(), [weight])[0])
    # (Plain autograd adds up in 16 bits, ours in 32; one use alone would be far off.)
    torch.testing.assert_close(*found, rtol=0.02, atol=0.02)


def saved_bytes(model):
    """Return the bytes that blocks save for backward, without weights, each storage once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    x = model.embed(TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks:
            x = block(x)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(nbytes for place, nbytes in storages.items() if place not in weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, "sdpa"),
        ({}, "explicit"),
        ({"dropout": 0.1}, "explicit"),
        ({"positions": "learned"}, "sdpa"),
        ({"norm": "rmsnorm", "activation": "swiglu", "bias": False}, "sdpa"),
        ({"num_experts": 4, "top_k": 2, "d_expert": 256}, "sdpa"),
    ],
)
def test_blocks_keep_what_the_calculator_says(changes, attention, mode):
    """Allow 3 % (seen: 2 %): the calculator leaves out norm statistics, sines and cosines."""
    config = CONFIG.replace(**changes)
    how = framework("course").replace(flash_attention=attention == "sdpa")
    model = recompute_blocks(GPT(config, attention=attention), mode)
    layout = Layout(micro_batch_size=4, recompute=mode)
    moe = config.num_experts > 0
    each = kept_of_layer(config, layout, how, moe)  # bytes per token
    predicted = config.num_layers * TOKENS.numel() * each
    assert saved_bytes(model) == pytest.approx(predicted, rel=0.03)
    if mode == "full":
        assert saved_bytes(model) == predicted == 4 * 4 * TOKENS.numel() * config.d_model


def test_saved_bytes_follow_forward_and_backward():
    """`now` is what the hooks above count; in backward, a recomputed block comes and goes."""
    blocks = {"none": 0, "full": 0}
    for mode in blocks:
        model = recompute_blocks(GPT(CONFIG), mode)
        with SavedBytes(model) as saved:
            x = model.embed(TOKENS)
            for block in model.blocks:
                x = block(x)
            kept = saved.now
            x.sum().backward()
            assert saved.now == 0, "backward lets go of everything"
        del x
        blocks[mode] = saved.peak
        assert kept == pytest.approx(saved_bytes(model), abs=8 * TOKENS.numel())  # (token indices)
    # The peak is all inputs plus one block, whose input counts once.
    one = saved_bytes(GPT(CONFIG.replace(num_layers=1)))
    inputs = 4 * TOKENS.numel() * CONFIG.d_model * 4
    assert blocks["full"] == pytest.approx(inputs + one, rel=0.05)
    assert blocks["none"] == pytest.approx(4 * one, rel=0.01)


def test_every_second_block_keeps_the_mean_of_none_and_full():
    none, full, half = (
        saved_bytes(recompute_blocks(GPT(CONFIG), *how))
        for how in (("none",), ("full",), ("full", 2))
    )
    # Blocks 1 and 3 save the outputs of blocks 0 and 2 as input, so nothing counts twice.
    assert half == (none + full) / 2


@pytest.mark.parametrize("mode", MODES)
def test_the_second_forward_costs_what_the_calculator_says(mode):
    """FLOPs match exactly. (Explicit scores: torch's counter misses part of the fused kernel.)"""
    model = recompute_blocks(GPT(CONFIG, attention="explicit"), mode)
    with FlopCounterMode(display=False) as counter:
        token_loss(model(TOKENS), TOKENS).mean().backward()
    assert counter.get_total_flops() == step_flops(CONFIG, len(TOKENS), mode).total


def test_it_keeps_as_much_as_torchs_checkpoint_and_gives_the_same_gradients():
    """Compare with torch.utils.checkpoint in its recommended form, in one process."""
    config = CONFIG.replace(dropout=0.1)
    theirs = GPT(config)
    for block in theirs.blocks:
        forward = block.forward
        block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False)
    ours = recompute_blocks(GPT(config), "full")
    assert saved_bytes(ours) == saved_bytes(theirs)
    assert all(map(torch.equal, gradients(ours)[0], gradients(theirs)[0]))


def test_a_hook_on_a_shared_parameter_runs_once_when_all_uses_are_added_up():
    """A bucket sent after the first use would carry only half of the gradient."""
    weight, calls = nn.Parameter(torch.tensor(3.0)), []
    weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.item()))
    twice = recomputed(lambda x: x * weight, [weight])
    twice(twice(torch.tensor(2.0))).backward()  # (the inputs require no gradient)
    assert calls == [12.0]  # d/dw 2 w^2


def test_frozen_parameters_unused_outputs_and_one_inside_another():
    frozen = nn.Parameter(torch.tensor(5.0), requires_grad=False)
    used, unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(7.0))
    inner = recomputed(lambda x: x * used, [used])

    def outputs(x):
        return inner(x).exp() * frozen, x + 1, frozen * 2

    x = torch.tensor(0.5, requires_grad=True)
    y, _, constant = recomputed(outputs, [used, unused, frozen])(x)
    (y + constant).backward()
    assert used.grad == 0.5 * 5 * torch.tensor(1.0).exp()
    assert x.grad == 2 * 5 * torch.tensor(1.0).exp()
    assert unused.grad is None and frozen.grad is None


def test_without_gradients_it_is_the_function_itself():
    with torch.no_grad():
        assert recomputed(lambda x, y: x + y)(torch.ones(2), 1).tolist() == [2, 2]


def test_an_unknown_mode_and_no_blocks_are_refused():
    with pytest.raises(ValueError, match="recompute='some' is not known: give one of 'none'"):
        recompute_blocks(GPT(CONFIG), "some")
    with pytest.raises(ValueError, match="every=0 is too small"):
        recompute_blocks(GPT(CONFIG), "full", every=0)


@pytest.mark.parametrize("kind", ["numbers", "tokens"])
def test_parameters_have_their_gradients_where_x_needs_none(kind):
    torch.manual_seed(0)
    block, x = nn.Linear(4, 4), torch.randn(3, 4)
    if kind == "tokens":
        block, x = nn.Embedding(5, 4), torch.tensor([1, 2])
    (expected,) = torch.autograd.grad(block(x).square().sum(), [block.weight])
    forget_and_repeat(block, x).square().sum().backward()
    assert torch.equal(block.weight.grad, expected)
