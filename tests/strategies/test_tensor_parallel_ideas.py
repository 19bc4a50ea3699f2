"""The page of tensor parallelism (ideas.py) equals the layers in values, gradients and messages.
test_tensor_parallel.py compares the layers, and thereby the page, with one process."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch

from mini_dist import GPT, ModelConfig, launch
from mini_dist.strategies.tensor_parallel import (
    SEQUENCE,
    SEQUENCE_AGAIN,
    TENSOR,
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    ideas,
)

CONFIG = ModelConfig(
    vocab_size=16, seq_len=8, d_model=16, num_layers=1, num_heads=4, d_ffn=24, positions="learned"
)
SIZES = [1, 2, 4]
B, S, D = 2, CONFIG.seq_len, CONFIG.d_model

sizes = pytest.mark.parametrize("size", SIZES)
pairs = pytest.mark.parametrize("pair", [TENSOR, SEQUENCE], ids=["TP", "SP"])


def block(bias):
    """Return a block in which all parameters matter, including biases."""
    config = CONFIG.replace(bias=bias, qkv_bias=bias)
    made, generator = GPT(config).blocks[0], torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def this_ranks(x, pair, group):
    return x.chunk(group.size(), 1)[group.rank()] if pair.cuts_sequence else x


def run(function, parameters, pair, autocast, group):
    """Return y, the gradients of x and the parameters, and forward's and backward's messages."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(B, S, D, generator=generator) for _ in "xy")
    x, dy = (this_ranks(t, pair, group).clone() for t in (x, dy))
    for leaf in (x, *parameters):
        leaf.grad = None
    messages, start = group.recorder.comms, len(group.recorder.comms)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = function(x.requires_grad_())
    middle = len(messages)
    y.backward(dy.to(y.dtype))
    # Messages are (op, group, dtype, bytes, peer), in the order in which they began.
    sent = [[row[:5] for row in rows] for rows in (messages[start:middle], messages[middle:])]
    return y.detach(), x.grad, [leaf.grad for leaf in parameters], sent


def page_of(module, group, pair):
    """Return the page's function for a sharded module, and its parameters."""

    def pieces(linear):
        return linear.weight, linear.bias

    if isinstance(module, ParallelMLP):
        linears = [pieces(module.up), pieces(module.down)]
        function = partial(ideas.mlp, up=linears[0], down=linears[1])
    else:
        qkv, o = [pieces(module.q), pieces(module.k), pieces(module.v)], pieces(module.o)
        linears = [*qkv, o]
        function = partial(ideas.attention, qkv=qkv, o=o, head_dim=CONFIG.head_dim)
    parameters = [each for linear in linears for each in linear if each is not None]
    return partial(function, group=group, pair=pair), parameters


def page_and_layer(pair_of_layer, group):
    """Run both, for MLP and attention, with and without bias and autocast."""
    found = {}
    pair = SEQUENCE if pair_of_layer.cuts_sequence else TENSOR
    for kind, bias, autocast in product(("ffn", "attn"), (True, False), (False, True)):
        parallel = {"ffn": ParallelMLP, "attn": ParallelAttention}[kind]
        layer = parallel(getattr(block(bias), kind), group, pair=pair_of_layer)
        page, parameters = page_of(layer, group, pair)
        assert len(parameters) == len(list(layer.parameters()))
        found[kind, bias, autocast] = [
            run(function, parameters, pair, autocast, group) for function in (page, layer)
        ]
    return found


def bits_equal(ours, others):
    return ours.dtype == others.dtype and torch.equal(ours, others)


@pairs
@sizes
def test_page_and_layers_are_equal_to_the_last_bit_and_send_the_same_messages(size, pair):
    """Attention's dx is the exception: the layer adds the products of q, k and v one by one inside
    addmm, while autograd rounds each product before adding it."""
    for found in launch(page_and_layer, size, (pair,)).results:
        for (kind, bias, autocast), (page, layer) in found.items():
            case = f"{kind}, bias {bias}, autocast {autocast}"
            assert bits_equal(page[0], layer[0]), case
            for ours, others in zip(page[2], layer[2]):
                assert bits_equal(ours, others), case
            if kind == "ffn":
                assert bits_equal(page[1], layer[1]), case
            else:
                bound = {"rtol": 2e-2, "atol": 5e-2} if autocast else {"rtol": 1e-5, "atol": 1e-5}
                torch.testing.assert_close(page[1], layer[1], **bound)
            assert page[3] == layer[3], case
            assert size == 1 or all(sum(row[3] for row in rows) for rows in page[3])


@sizes
def test_gathering_again_changes_no_bit_and_adds_one_gather_of_x_in_backward(size):
    """Only the layers gather again. Under autocast they gather the 16-bit x and sum the 16-bit dx:
    other bits and fewer bytes, so the test there compares values within a bound."""
    for found in launch(page_and_layer, size, (SEQUENCE_AGAIN,)).results:
        for (kind, bias, autocast), (page, layer) in found.items():
            case = f"{kind}, bias {bias}, autocast {autocast}"
            assert bits_equal(page[0], layer[0]), case
            assert page[3][0] == layer[3][0], case
            if autocast:
                torch.testing.assert_close(page[1], layer[1], rtol=2e-2, atol=5e-2)
                continue
            for ours, others in zip(page[2], layer[2]):
                assert bits_equal(ours, others), case
            if kind == "ffn":
                assert bits_equal(page[1], layer[1]), case
            (gather_x, _), (gather_dy, scatter_dx) = (halves(rows) for rows in page[3])
            assert layer[3][1] == gather_dy + gather_x + scatter_dx, case


def halves(rows):
    """Split the rows of an all-gather from those of the reduce-scatter that follows."""
    border = [row[0] for row in rows].index("reduce_scatter")
    return rows[:border], rows[border:]


def single(group):
    """Compare column_linear, row_linear and embedding with their modules."""
    made = block(True).ffn
    column, row = ColumnParallelLinear(made.up, group), RowParallelLinear(made.down, group)
    table = VocabParallelEmbedding(GPT(CONFIG).embed.token, group)
    tokens = torch.arange(2 * 8).view(2, 8)
    parameters = [*column.parameters(), *row.parameters()]

    def by_page(x):
        return ideas.row_linear(
            ideas.column_linear(x, column.weight, column.bias, group), row.weight, row.bias, group
        )

    ours, theirs = (
        run(f, parameters, TENSOR, False, group) for f in (by_page, lambda x: row(column(x)))
    )
    looked_up = torch.equal(ideas.embedding(tokens, table.weight, group), table(tokens))
    return ours, theirs, looked_up


@sizes
def test_single_linears_and_the_embedding_are_their_modules(size):
    for (y, dx, gradients, sent), (y2, dx2, gradients2, sent2), looked_up in launch(
        single, size
    ).results:
        assert torch.equal(y, y2) and torch.equal(dx, dx2) and looked_up
        assert all(map(torch.equal, gradients, gradients2))
        assert sent == sent2
