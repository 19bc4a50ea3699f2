"""Compressed means: their values, their bytes, and that what is left out is not lost."""

from functools import partial

import pytest
import torch
from torch import nn

from mini_dist import GPT, ModelConfig, RankError, launch
from mini_dist.collectives import all_reduce, in_flight
from mini_dist.collectives.mesh import Mesh
from mini_dist.model.loss import token_loss
from mini_dist.ranks.hosts import Hosts, hosts_of
from mini_dist.strategies.compression import (
    BLOCK,
    Compressed,
    OneBit,
    PowerSGD,
    Quantized,
    dequantize,
    half,
    half_mean,
    int8,
    majority,
    one_bit_mean,
    pack,
    power_mean,
    quantize,
    quantized_all_gather,
    quantized_mean,
    quantized_reduce_scatter,
    quantized_reduce_scatter_by_nodes,
    random_k,
    random_k_mean,
    sign,
    sign_mean,
    top_k,
    top_k_mean,
    unpack,
    vote,
    with_feedback,
)
from mini_dist.strategies.compression.sharded import (
    begin_by_hosts,
    begin_quantized_all_gather_,
    begin_quantized_reduce_scatter,
    decode,
    encode,
)
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3

SIZES = [1, 2, 3, 4]
N, K = 1000, 30


def vector(rank, length=N, dtype=torch.float32):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=dtype)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


MEANS = {
    "half": half_mean,
    "int8": lambda x, group: quantized_mean(x, seeded(group.rank()), group),
    "int8, nearest": lambda x, group: quantized_mean(x, None, group),
    "sign": sign_mean,
    "top-k": lambda x, group: top_k_mean(x, K, group),
    "random-k": lambda x, group: random_k_mean(x, K, seeded(), group),
}


def found_and_sent(name, group):
    return MEANS[name](vector(group.rank()), group)


def expected(name, size):
    """Compute the mean and the part of each rank's x that went into it, in one process."""
    xs = [vector(rank) for rank in range(size)]
    if name == "half":
        sent = [(x.bfloat16() / size).float() * size for x in xs]
    elif name == "sign":
        sent = [x.abs().mean() * torch.where(x >= 0, 1.0, -1.0) for x in xs]
    elif name == "top-k":
        sent = [x.where(x.abs() >= x.abs().sort().values[-K], 0.0) for x in xs]
    elif name == "random-k":
        kept = torch.zeros(N)
        kept[torch.randperm(N, generator=seeded())[:K]] = 1.0
        sent = [x * kept for x in xs]
    return sum(sent) / size, sent


@pytest.mark.parametrize("name", [name for name in MEANS if "int8" not in name])
@pytest.mark.parametrize("size", SIZES)
def test_the_mean_of_what_each_rank_sent_is_on_all_ranks(name, size):
    mean, sent = expected(name, size)
    room = dict(rtol=2**-7, atol=2**-7) if name == "half" else dict(rtol=1e-5, atol=1e-6)
    results = launch(found_and_sent, size, (name,)).results
    for rank, (found, of_mine) in enumerate(results):
        assert torch.equal(found, results[0][0])
        torch.testing.assert_close(found, mean, **room)
        torch.testing.assert_close(of_mine, sent[rank], rtol=1e-6, atol=0)


def bytes_a_rank(name, size):
    """Return the bytes that a rank sends with rings, averaged over the ranks."""
    ring = 2 * (size - 1) / size
    padded = N + -N % (size * BLOCK)
    return {
        "half": ring * 2 * N,
        "int8": ring * padded * (1 + 4 / BLOCK),
        "int8, nearest": ring * padded * (1 + 4 / BLOCK),
        "sign": (size - 1) * (N / 8 + 4),
        "top-k": (size - 1) * 8 * K,
        "random-k": ring * 4 * K,
    }[name]


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("size", SIZES)
def test_what_travels_is_what_the_docstring_says(name, size):
    sent = launch(found_and_sent, size, (name,)).ledger.total_bytes()
    said = size * bytes_a_rank(name, size)
    if size == 3:  # a gather this small folds to two ranks to save a round: 7/6 of a ring's
        assert said - 4 < sent <= 7 / 6 * said
    else:
        assert sent == pytest.approx(said, rel=1e-12)


# -- int8 -----------------------------------------------------------------------------------------


def test_rounding_by_lot_is_right_on_the_average_and_rounding_to_the_nearest_is_not():
    x, lots = torch.full((1, BLOCK), 0.3), seeded()
    x[0, 0] = 127.0  # so the scale is 1, and 0.3 lies between 0 and 1
    total = sum(dequantize(*quantize(x, lots)) for _ in range(2000)) / 2000
    assert (total - x).abs().max() < 0.06  # 5 standard deviations of the mean of 2000 draws
    assert not dequantize(*quantize(x))[0, 1:].any()
    codes, scale = quantize(x, lots)
    assert codes.dtype == torch.int8 and codes[0, 0, 0] == 127 and scale.item() == 1.0
    assert set(codes[0, 0, 1:].tolist()) == {0, 1}


def test_zeros_and_the_largest_numbers_are_exact():
    assert not dequantize(*quantize(torch.zeros(2, 2 * BLOCK))).any()
    x = torch.zeros(1, BLOCK)
    x[0, :2] = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(dequantize(*quantize(x)), x)


@pytest.mark.parametrize("name, steps", [("int8", 1.0), ("int8, nearest", 0.5)])
@pytest.mark.parametrize("size", SIZES)
def test_int8_means_are_equal_on_all_ranks_and_off_by_two_roundings_at_most(size, name, steps):
    results = launch(found_and_sent, size, (name,)).results
    xs = torch.stack([vector(rank) for rank in range(size)])
    step = 1.0001 * steps * xs.abs().max() / 127
    for rank, (found, sent) in enumerate(results):
        assert torch.equal(found, results[0][0])
        assert (found - xs.mean(dim=0)).abs().max() <= 2 * step
        assert (sent - xs[rank]).abs().max() <= step


def in_one_and_two_hops(ranks_per_node, group):
    x, lots = vector(group.rank(), 4 * group.size() * BLOCK), seeded(group.rank())
    one, _ = quantized_reduce_scatter(x, lots, group)
    return one, quantized_reduce_scatter_by_nodes(x, lots, ranks_per_node, group)


@pytest.mark.parametrize("nodes, per_node", [(2, 2), (3, 2), (2, 3), (1, 3), (3, 1)])
def test_in_two_hops_a_node_s_mean_leaves_it_and_not_every_rank_s(nodes, per_node):
    size = nodes * per_node
    run = launch(in_one_and_two_hops, size, (per_node,))
    xs = torch.stack([vector(rank, 4 * size * BLOCK) for rank in range(size)])
    step = xs.abs().max() / 127
    for rank, hops in enumerate(run.results):
        mean = xs.mean(0).chunk(size)[rank]
        for found, roundings in zip(hops, (1, 2)):
            assert (found - mean).abs().max() <= 1.0001 * roundings * step
    one, two = (
        sum(
            nbytes
            for comm in run.ledger.leaves(op=op)
            for to, nbytes in comm.sent_to.items()
            if to // per_node != comm.rank // per_node
        )
        for op in ("quantized_reduce_scatter", "quantized_reduce_scatter_by_nodes")
    )
    codes = 4 * size * BLOCK * (1 + 4 / BLOCK)
    assert one == size * (size - per_node) / size * codes and two == one / per_node


def test_each_rank_draws_lots_of_its_own():
    first, second = launch(sent_by_the_engine, 2).results
    assert not torch.equal(first, second)


def sent_by_the_engine(group):
    """Return what int8 leaves out of an x that is equal on all ranks."""
    x = vector(0)
    _, left_out = with_feedback(int8(), x, 0.0, group)
    return left_out


@pytest.mark.parametrize("length", [1, 7, 8, 9, 64])
def test_bits_are_packed_eight_a_byte_and_come_back(length):
    bits = torch.rand(3, length) > 0.5
    packed = pack(bits)
    assert packed.dtype == torch.uint8 and packed.shape == (3, -(-length // 8))
    assert torch.equal(unpack(packed, length), bits)


# -- one bit --------------------------------------------------------------------------------------


def votes(xs, group):
    return majority(xs[group.rank()], group)


@pytest.mark.parametrize("size", [*SIZES, 5])
def test_the_majority_is_what_most_ranks_say_in_a_bit_there_and_a_bit_back(size):
    xs = [vector(rank) for rank in range(size)]
    run = launch(votes, size, (xs,))
    ups = sum((x >= 0).int() for x in xs)
    for found in run.results:
        assert torch.equal(found, run.results[0])
        assert set(found.tolist()) <= {-1.0, 1.0}
        decided = 2 * ups != size
        assert torch.equal(found[decided] > 0, (2 * ups > size)[decided])
    padded = N + -N % (8 * size)
    said = 2 * (size - 1) * padded / 8
    assert said <= run.ledger.total_bytes() <= (7 / 6 if size in (3, 5) else 1) * said


def test_a_tie_goes_as_the_rank_that_counts_has_voted():
    """If ties always went up or always down, noise would push the parameters one way."""
    ones = torch.ones(64)
    found = launch(votes, 2, ([ones, -ones],)).results[0]
    assert torch.equal(found, torch.cat([ones[:32], -ones[:32]]))


def one_bit_steps(steps, group):
    error, left, total = torch.zeros(N), 0.0, torch.zeros(N)
    for step in range(steps):
        x = vector(10 * step + group.rank()) + error
        mean, sent, left = one_bit_mean(x, left, group)
        error, total = x - sent, total + mean
    return total, error, left


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_bit_both_ways_loses_nothing_but_what_is_kept_on_both_sides(size):
    run = launch(one_bit_steps, size, (20,))
    totals, errors, lefts = zip(*run.results)
    whole = sum(vector(10 * step + rank) for step in range(20) for rank in range(size)) / size
    kept = sum(errors) / size + torch.cat(lefts)[:N]
    torch.testing.assert_close(totals[0] + kept, whole, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert size == 1 or torch.cat(lefts)[:N].abs().max() > 0.1
    said = 20 * 2 * (size - 1) * ((N + -N % (8 * size)) / 8 + 4 * size)
    assert said <= run.ledger.total_bytes() <= (7 / 6 if size == 3 else 1) * said


# -- feedback -------------------------------------------------------------------------------------


def steps_with_feedback(name, steps, group):
    generator = seeded()
    means = {**MEANS, "random-k": lambda x, group: random_k_mean(x, K, generator, group)}
    error, total = torch.zeros(N), torch.zeros(N)
    for step in range(steps):
        found, error = with_feedback(means[name], vector(10 * step + group.rank()), error, group)
        total += found
    return total, error


@pytest.mark.parametrize("name", ["sign", "top-k", "random-k"])
@pytest.mark.parametrize("size", [1, 3])
def test_what_was_left_out_is_all_that_is_missing(name, size):
    """The received sum plus the mean of what is left out equals the sum of the means."""
    results = launch(steps_with_feedback, size, (name, 20)).results
    whole = sum(vector(10 * step + rank) for step in range(20) for rank in range(size)) / size
    left_out = sum(error for _, error in results) / size
    torch.testing.assert_close(results[0][0] + left_out, whole, rtol=1e-4, atol=1e-4)
    assert left_out.abs().max() > 0.1


# -- PowerSGD -------------------------------------------------------------------------------------


def powers(rows, columns, rank_of_x, r, steps, group):
    """Run the power method on the mean of the ranks' matrices."""
    parts = [torch.randn(s, rank_of_x, generator=seeded(group.rank())) for s in (rows, columns)]
    x = parts[0] @ parts[1].T
    q = torch.randn(columns, r, generator=seeded())
    for _ in range(steps):
        found, q = power_mean(x, q, group)
    return x, found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_mean_of_low_rank_comes_through_whole_and_others_as_their_largest_parts(size):
    results = launch(powers, size, (12, 20, 1, size, 2)).results
    mean = sum(x for x, _ in results) / size
    for _, found in results:
        assert torch.equal(found, results[0][1])
        torch.testing.assert_close(found, mean, rtol=1e-3, atol=1e-4)

    results = launch(powers, size, (12, 20, 12, 3, 60)).results
    u, s, vh = torch.linalg.svd(sum(x for x, _ in results) / size, full_matrices=False)
    best = u[:, :3] * s[:3] @ vh[:3]
    torch.testing.assert_close(results[0][1], best, rtol=1e-2, atol=1e-2)


def test_thin_matrices_travel_and_nothing_else():
    sent = launch(powers, 4, (16, 32, 4, 2, 5)).ledger.total_bytes()
    assert sent == 5 * 2 * 3 * 4 * 2 * (16 + 32)


# -- in the wrappers ------------------------------------------------------------------------------


def model_of(group):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 16))


def data_of(group):
    generator = seeded(100 + group.rank())
    return torch.randn(8, 24, generator=generator), torch.randn(8, 16, generator=generator)


def gradients(wrapper, reduce, steps, group):
    model = wrapper(model_of(group), group, reduce)
    inputs, targets = data_of(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        model.finish()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters()], [p.detach() for p in model.parameters()]


REDUCES = {
    "half": half,
    "int8": lambda: Compressed(int8()),
    "sign": lambda: Compressed(sign()),
    "one bit": OneBit,
    "vote": lambda: vote,
    "top-k": lambda: Compressed(top_k(0.1)),
    "random-k": lambda: Compressed(random_k(0.1)),
    "power": lambda: PowerSGD(2),
}


def trained(wrapper, name, group):
    return gradients(wrapper, REDUCES[name](), 3, group)


@pytest.mark.parametrize("name", REDUCES)
def test_every_wrapper_keeps_ranks_equal_and_a_state_for_each_bucket(name):
    for wrapper in (Naive, Bucketed, Overlapped):
        results = launch(trained, 2, (wrapper, name)).results
        for mine, theirs in zip(results[0][1], results[1][1]):
            assert torch.equal(mine, theirs)


def with_hook(kind, group):
    """Take three compressed steps with torch's DistributedDataParallel and one of its hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(model_of(group), process_group=group)
    if kind == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:
        state = power.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=2
        )
        model.register_comm_hook(state, power.powerSGD_hook)
        # DDP rebuilds its buckets after the first step; only then are their indices final.
    inputs, targets = data_of(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if kind == "power" else 0.1)
    for step in range(5 if kind == "power" else 3):
        if kind == "power" and step == 2:
            q = PowerSGD(2).of_bucket([*model.parameters()][::-1])
            state.q_memory_dict[0] = torch.cat([x.flatten() for x in first_q(q)])
            state.p_memory_dict[0] = torch.empty(2 * (40 + 16))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [p.grad.clone() for p in model.parameters()]


def first_q(reduce):
    """Return a bucket's first q per matrix; with_hook has [16, 40], then [40, 24]."""
    bucket = reduce.__self__
    return [bucket.random_q(torch.empty(sides)) for sides in bucket.sides.values()]


def half_gradients(group):
    return gradients(Overlapped, half(torch.float16), 3, group)[0]


def test_fp16_is_torchs_hook_bit_by_bit():
    ours, theirs = launch(half_gradients, 2), launch(with_hook, 2, ("fp16",))
    for mine, other in zip(ours.results[0], theirs.results[0]):
        assert torch.equal(mine, other)


def power_gradients(group):
    model = Overlapped(model_of(group), group, PowerSGD(2))
    inputs, targets = data_of(group)
    for _ in range(3):
        model.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        model.finish()
    return [p.grad.clone() for p in model.parameters()]


def test_powersgd_is_torchs_hook_from_the_same_q():
    """Three steps on equal gradients include feedback and the warm start."""
    ours, theirs = launch(power_gradients, 2), launch(with_hook, 2, ("power",))
    for mine, other in zip(ours.results[0], theirs.results[0]):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def by_page_and_engine(group):
    """Reduce two large matrices and a bias by both for three steps, and a vector in 16 bits."""
    shapes = [(40, 24), (40,), (24, 32)]
    engine, other = (PowerSGD(2).of_bucket([torch.empty(s) for s in shapes]) for _ in range(2))
    qs = first_q(other)
    errors = [torch.zeros(shape) for shape in (shapes[0], shapes[2])]
    pairs = []
    for step in range(3):
        parts = vector(10 * step + group.rank(), 960 + 40 + 768).split([960, 40, 768])
        found = engine(torch.cat(parts), group).split([960, 40, 768])
        for i, (part, mine) in enumerate(((parts[0], found[0]), (parts[2], found[2]))):
            whole = part.view(errors[i].shape) + errors[i]
            page, qs[i] = power_mean(whole, qs[i], group)
            errors[i] = whole - page
            pairs.append((page.flatten(), mine))
        pairs.append((all_reduce(parts[1], group, op="mean"), found[1]))
    x = vector(group.rank())
    return pairs, (half_mean(x, group)[0], half()(x.clone(), group))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_page_and_engine_find_the_same_means(size):
    for pairs, halves in launch(by_page_and_engine, size).results:
        for page, engine in pairs:
            torch.testing.assert_close(page, engine, rtol=1e-4, atol=1e-5)
        room = 0 if size < 3 else 2**-7  # ring and star add three terms in different orders
        torch.testing.assert_close(*halves, rtol=room, atol=room)


# -- units of ZeRO --------------------------------------------------------------------------------


def by_page_and_in_flight(group):
    """Gather and reduce-scatter n * 2 blocks by the page and by ZeRO's messages."""
    size, rank = group.size(), group.rank()
    whole = vector(rank, size * 2 * BLOCK)
    mine = whole.chunk(size)[rank].clone()
    gathers = quantized_all_gather(mine, None, group), whole.clone()
    gathers = gathers[0], begin_quantized_all_gather_(gathers[1], 8, group).wait()
    page, _ = quantized_reduce_scatter(whole, seeded(rank), group)
    codes_in_order = seeded(rank)
    in_flight = begin_quantized_reduce_scatter(whole, 8, codes_in_order, group).wait() / size
    return gathers, (page, in_flight)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_zero_sends_in_flight_is_what_the_page_sends(size):
    run = launch(by_page_and_in_flight, size)
    for gathers, scatters in run.results:
        assert torch.equal(*gathers) and torch.equal(gathers[0], run.results[0][0][0])
        torch.testing.assert_close(*scatters, rtol=1e-5, atol=1e-6)  # sums in another order
    page, in_flight = (
        sum(comm.sent for op in ops for comm in run.ledger.leaves(op=op)) for ops in OPS
    )
    assert in_flight == size * (size - 1) * 2 * 2 * (BLOCK + 4)
    assert in_flight <= page <= (7 / 6 if size == 3 else 1) * in_flight


OPS = [
    ("quantized_all_gather", "quantized_reduce_scatter"),
    ("begin_quantized_all_gather_", "begin_quantized_reduce_scatter"),
]


def two_hops_of_page_and_engine(group):
    """Reduce-scatter n * 2 blocks between hosts with equal numbers of ranks."""
    size, rank = group.size(), group.rank()
    whole, per_host = vector(rank, size * 2 * BLOCK), hosts_of(group).count(0)
    page = quantized_reduce_scatter_by_nodes(whole, seeded(rank), per_host, group)
    return page, begin_by_hosts(whole, 8, seeded(rank), group).wait() / size


def on_hosts(number, ranks="neighbours"):
    return Hosts(number, ranks=ranks, emulated=True)


@pytest.mark.parametrize("number, size", [(2, 4), (2, 6), (3, 6), (1, 2), (2, 2)])
def test_in_two_hops_the_engine_sends_what_the_page_sends(number, size):
    run = launch(two_hops_of_page_and_engine, size, hosts=on_hosts(number))
    for page, engine in run.results:
        torch.testing.assert_close(engine, page, rtol=1e-5, atol=1e-6)  # sums in another order
    page, engine = "quantized_reduce_scatter_by_nodes", "begin_by_hosts"
    of_page, of_engine = (run.ledger.total_bytes(op=op) for op in (page, engine))
    assert of_engine == of_page
    assert run.ledger.out_of(op=engine) == run.ledger.out_of(op=page)
    once = size * (size - size // number) // (size // number) * 2 * (BLOCK + 4)
    assert run.ledger.out_of(op=engine) == ([once // number] * number if number > 1 else [0])


def scatter_by_hosts(length, bits, group):
    whole = vector(group.rank(), group.size() * length)
    return begin_by_hosts(whole, bits, seeded(group.rank()), group).wait()


@pytest.mark.parametrize("length", [1, 3 * BLOCK + 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_two_hops_go_by_the_hosts_wherever_their_ranks_are(bits, length):
    hosts = on_hosts(3, ranks=[2, 0, 1, 1, 0, 2])
    run = launch(scatter_by_hosts, 6, (length, bits), hosts=hosts)
    xs = torch.stack([vector(rank, 6 * length) for rank in range(6)])
    step = xs.abs().max() / (2 ** (bits - 1) - 1)
    for rank, found in enumerate(run.results):
        exact = xs.sum(0).chunk(6)[rank]
        # Each rank's codes add an error of a step, and each host's, with sums twice as large, two.
        assert (found - exact).abs().max() <= 1.001 * (6 + 3 * 2 + 3) * step
    message = -(-bits * length // 8) + 4 * -(-length // BLOCK)
    assert run.ledger.out_of() == [2 * 2 * message] * 3  # two ranks per host, two other hosts
    assert run.ledger.total_bytes() == 6 * (3 + 2) * message


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 1001])
def test_codes_are_whole_numbers_of_the_scale_in_as_many_bits_as_are_said(bits, length):
    """Each decoded value is within half a code of the original."""
    x, most = vector(1, length), 2 ** (bits - 1) - 1
    message = encode(x, bits)
    blocks = -(-length // BLOCK)
    assert message.dtype == torch.uint8 and len(message) == -(-bits * length // 8) + 4 * blocks
    scale = torch.stack([part.abs().max() for part in x.split(BLOCK)]) / most
    scale = scale.repeat_interleave(BLOCK)[:length]
    codes = decode(message, length, bits) / scale
    torch.testing.assert_close(codes, (x / scale).round(), rtol=1e-5, atol=1e-5)
    assert codes.abs().max().round() == most


def test_the_mean_of_many_codes_in_4_bits_is_the_number():
    x, lots = vector(1, 300), seeded()
    mean = sum(decode(encode(x, 4, lots), 300, 4) for _ in range(4000)) / 4000
    assert (mean - x).abs().max() < 5 * (x.abs().max() / 7) / 2 / 4000**0.5


TINY = ModelConfig(num_layers=2, d_model=32, num_heads=2, vocab_size=64, seq_len=16)


def zero_steps(stage, messages, steps, group):
    torch.manual_seed(0)
    gpt = GPT(TINY)
    model = stage(
        gpt, group, lambda s: torch.optim.SGD(s, lr=0.1), units=gpt.blocks, messages=messages
    )
    generator, losses = seeded(group.rank()), []
    for _ in range(steps):
        tokens = torch.randint(0, 64, (4, 17), generator=generator)
        loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:]).mean()
        loss.backward()
        model.step()
        model.zero_grad()
        losses.append(loss.item())
    shards = torch.cat([unit.shard.detach() for unit in model.units])
    return losses, shards, sum(unit.flat.numel() for unit in model.units)


def plain_zero(stage, steps, group):
    return zero_steps(stage, in_flight, steps, group)


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
@pytest.mark.parametrize("gradients", [8, 4])
def test_zero_in_codes_sends_what_their_bits_say_and_stays_near(stage, gradients):
    plain = launch(plain_zero, 2, (stage, 3))
    run = launch(zero_steps, 2, (stage, Quantized(8, gradients), 3))
    for (losses, shards, _), (exact, whole, _) in zip(run.results, plain.results):
        assert losses == pytest.approx(exact, rel=0.01)
        assert not torch.equal(shards, whole)
        torch.testing.assert_close(shards, whole, rtol=0, atol=0.01)
    sent, dense = (
        sum(c.sent for c in each.ledger.leaves() if c.phase != "setup") for each in (run, plain)
    )
    least = {8: 1, 4: 0.75 if stage is not ZeRO3 else 5 / 6}[gradients]  # ZeRO-3 gathers twice
    assert least / 4 < sent / dense < (least + 4 / BLOCK) / 4 * 1.05  # the last block is short


def zero_on_hosts(stage, kind, group):
    """Train on two hosts of two ranks: uncompressed, in codes, or in codes by hosts."""
    messages = in_flight if kind == "plain" else Quantized(8, 4, by_hosts=kind != "straight")
    inside = Mesh(group, by_hosts=True, across=2, inside=2)["inside"]
    more = {"inside": inside} if kind == "ZeRO++" else {}
    return zero_steps(partial(stage, **more), messages, 3, group)


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
@pytest.mark.parametrize("ranks", ["neighbours", "dealt"])
def test_by_hosts_zero_in_codes_stays_near_and_lets_half_as_much_out_of_a_host(stage, ranks):
    plain, straight, by_hosts = (
        launch(zero_on_hosts, 4, (stage, kind), hosts=on_hosts(2, ranks))
        for kind in ("plain", "straight", "by hosts")
    )
    for (losses, shards, _), (exact, whole, _) in zip(by_hosts.results, plain.results):
        assert losses == pytest.approx(exact, rel=0.01)
        torch.testing.assert_close(shards, whole, rtol=0, atol=0.01)
    one, two = (crossing(run.ledger) for run in (straight, by_hosts))
    assert two == one / 2


def crossing(ledger):
    """Return the bytes that leave hosts, without the model's initial broadcast."""
    return sum(ledger.out_of()) - sum(ledger.out_of(phase="setup"))


def test_all_of_zero_plus_plus_sends_between_hosts_a_gather_of_bytes_and_a_scatter_of_halves():
    """Plain ZeRO-3 sends three times the parameters in 4 bytes out of a host. With codes per block
    of each rank's part and hpZ, one gather in 8 bits and one scatter in 4 remain."""
    plain, codes = (
        launch(zero_on_hosts, 4, (ZeRO3, kind), hosts=on_hosts(2)) for kind in ("plain", "ZeRO++")
    )
    numel = codes.results[0][2]
    for (losses, _, _), (exact, _, _) in zip(codes.results, plain.results):
        assert losses == pytest.approx(exact, rel=0.01)
    least = 3 * numel * (1 + 1 / 2)  # three steps; each rank's parts cross an uplink once per step
    assert least < crossing(codes.ledger) < least * (1 + 8 / BLOCK) * 1.02
    assert crossing(codes.ledger) < crossing(plain.ledger) / 8


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
def test_steps_that_are_smaller_than_a_code_are_not_lost(stage):
    """The optimizer steps uncompressed shards; the codes are only a copy."""
    results = launch(small_steps, 2, (stage,)).results
    for moved, wanted in results:
        torch.testing.assert_close(moved, wanted, rtol=1e-3, atol=1e-7)


def small_steps(stage, group):
    layer = nn.Linear(64, 64, bias=False)
    nn.init.constant_(layer.weight, 1.0)  # so a code is 1/127
    messages = Quantized(gradients=None)
    model = stage(layer, group, lambda s: torch.optim.SGD(s, lr=1e-4), messages=messages)
    before = model.units[0].shard.detach().clone()
    for _ in range(10):
        model(torch.eye(64)).sum().backward()  # every gradient is 1
        model.step()
        model.zero_grad()
    moved = model.units[0].shard.detach() - before
    return moved, torch.full_like(moved, -1e-3)


def nan_in_zero(group):
    layer = nn.Linear(4, 4)
    optimizer = lambda shards: torch.optim.SGD(shards, lr=0.1)  # noqa: E731
    model = ZeRO2(layer, group, optimizer, messages=Quantized())
    model(torch.full((1, 4), float("nan"))).sum().backward()


# -- bad input ------------------------------------------------------------------------------------


def test_bad_input_gets_one_sentence():
    for k in (0, N + 1):
        with pytest.raises(RankError, match=f"k={k} of {N} elements"):
            launch(top_k_of_rank, 2, (k,))
    for share in (0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"share={share}"):
            top_k(share)
        with pytest.raises(ValueError, match=f"share={share}"):
            random_k(share)
    with pytest.raises(ValueError, match="rank=0"):
        PowerSGD(0)
    with pytest.raises(RankError, match="rank=8: no matrix of this model has a rank above 5"):
        reduced_first(8, [(5, 9), (4, 20), (30,)])
    reduced_first(8, [(30,)])  # no matrix, so nothing to factor
    reduced_first(8, [(8, 9), (1, 9)])
    with pytest.raises(ValueError, match="gradients=2: give 8 or 4 bits"):
        Quantized(gradients=2)
    with pytest.raises(ValueError, match="parameters=False"):
        Quantized(False)
    with pytest.raises(RankError, match=r"q has 5 columns, but a matrix \[4, 9\] has rank 4"):
        launch(powers, 2, (4, 9, 2, 5, 1))
    with pytest.raises(RankError, match="nodes of 2, 1 ranks: who has no partner"):
        launch(scatter_by_hosts, 3, (4, 8), hosts=on_hosts(2))


def top_k_of_rank(k, group):
    return top_k_mean(vector(0), k, group)


def feed_nan(name, group):
    reduce = REDUCES[name]()
    if hasattr(reduce, "of_bucket"):
        reduce = reduce.of_bucket([torch.empty(40, 40)])
    reduce(torch.full((1600,), float("nan")), group)


@pytest.mark.parametrize("name", [name for name in REDUCES if name != "half"])
def test_a_gradient_that_is_not_finite_is_never_fed_back(name):
    with pytest.raises(RankError, match="FloatingPointError: a gradient is inf or nan"):
        launch(feed_nan, 2, (name,))


def test_a_gradient_that_is_not_finite_has_no_code():
    with pytest.raises(RankError, match="a gradient is inf or nan"):
        launch(nan_in_zero, 2)


def reduced_first(rank, shapes):
    """Reduce a model's first gradients on one rank, each in its own bucket as in `Naive`."""
    launch(reduces_first, 1, (rank, shapes), quiet=True)


def reduces_first(rank, shapes, group):
    power = PowerSGD(rank)
    reduces = [power.of_bucket([torch.empty(shape)]) for shape in shapes]
    for shape, reduce in zip(shapes, reduces):
        reduce(torch.ones(shape).flatten(), group)
