"""Strategies for two speeds keep the values of one speed and send the fewest uplink bytes."""

import functools

import pytest
import torch

from mini_dist import GPT, Batches, Mesh, ModelConfig, collectives, launch, load_text
from mini_dist.collectives import by_hosts, in_flight
from mini_dist.collectives.mesh import host_by_host
from mini_dist.model.loss import token_loss
from mini_dist.ranks.hosts import Hosts
from mini_dist.ranks.ledger import Ledger
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.strategies.zero.ideas import hybrid_step, weight_again

EMULATED = functools.partial(Hosts, emulated=True)
MAPS = {  # (number of ranks, hosts), with two ranks per host
    "neighbours": (4, EMULATED(2)),
    "dealt": (4, EMULATED(2, ranks="dealt")),
    "any map": (4, EMULATED(2, ranks=[1, 0, 0, 1])),
    "3 hosts, any map": (6, EMULATED(3, ranks=[2, 0, 1, 1, 0, 2])),
    "4 hosts": (8, EMULATED(4)),
    "4 hosts, dealt": (8, EMULATED(4, ranks="dealt")),
}
EVERY_MAP = pytest.mark.parametrize("size, hosts", MAPS.values(), ids=MAPS)


def values(rank, length):
    """Return integers, so that no order of summation rounds."""
    return torch.arange(2.0 * length).view(length, 2) * (rank + 1)


# -- collectives ----------------------------------------------------------------------------------


def every_way(length, group):
    """Run the hierarchical all-reduce, reduce-scatter and all-gather."""
    x = values(group.rank(), length)
    parts = x.tensor_split(group.size())
    sizes = [len(part) for part in parts]
    return (
        collectives.hierarchical_all_reduce(x, group),
        collectives.hierarchical_reduce_scatter(x, group),
        collectives.hierarchical_all_gather(parts[group.rank()], group, sizes=sizes),
    )


@EVERY_MAP
def test_values_are_those_of_one_level_for_every_map(size, hosts):
    def every_length(group):
        return [every_way(length, group) for length in LENGTHS]

    by_rank = launch(every_length, size, hosts=hosts).results
    for number, length in enumerate(LENGTHS):
        total = sum(values(rank, length) for rank in range(size))
        gathered = torch.cat([values(r, length).tensor_split(size)[r] for r in range(size)])
        for rank, found in enumerate(by_rank):
            reduced, scattered, whole = found[number]
            assert torch.equal(reduced, total)
            assert torch.equal(scattered, total.tensor_split(size)[rank])
            assert torch.equal(whole, gathered)


LENGTHS = 0, 1, 7, 16


@EVERY_MAP
def test_on_the_uplinks_a_hierarchy_sends_what_the_formula_says_whatever_the_map(size, hosts):
    ledger = launch(every_way, size, (48,), hosts=hosts).ledger
    nbytes, h = 48 * 2 * 4, hosts.number
    for op, halves in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        assert ledger.out_of(op=f"hierarchical_{op}") == [halves * nbytes * (h - 1) // h] * h


# -- the fast hierarchy ---------------------------------------------------------------------------


def in_pieces(length, op, group):
    """All-reduce in pieces, and piece by piece with the page; check that x is unchanged."""
    dice = torch.Generator().manual_seed(group.rank())
    x = torch.randn(length, 2, generator=dice, dtype=torch.float64)
    before, many = x.clone(), max(1, round(x.nbytes / 40))
    fast = collectives.pipelined_hierarchical_all_reduce(x, group, op=op, piece_bytes=40)
    pieces = [
        collectives.hierarchical_all_reduce(piece, group, op=op)
        for piece in x.flatten().tensor_split(many)
    ]
    return torch.equal(x, before), fast, torch.cat(pieces).view(x.shape)


@EVERY_MAP
@pytest.mark.parametrize("op", ["sum", "max"])
def test_in_pieces_a_hierarchy_gives_the_bits_of_the_page_piece_by_piece(size, hosts, op):
    def every_length(group):
        return [in_pieces(length, op, group) for length in LENGTHS]

    by_rank = launch(every_length, size, hosts=hosts).results
    for found in by_rank:
        for (unchanged, fast, page), (_, first, _) in zip(found, by_rank[0]):
            assert unchanged and torch.equal(fast, page) and torch.equal(fast, first)


@EVERY_MAP
def test_in_pieces_as_many_bytes_pass_each_uplink_in_as_many_more_messages(size, hosts):
    def both(group):
        x = values(group.rank(), 48)
        collectives.hierarchical_all_reduce(x, group)
        collectives.pipelined_hierarchical_all_reduce(x, group, piece_bytes=x.nbytes // 2)

    ledger = launch(both, size, hosts=hosts).ledger
    page, fast = "hierarchical_all_reduce", "pipelined_hierarchical_all_reduce"
    assert ledger.out_of(op=fast) == ledger.out_of(op=page)
    assert ledger.total_bytes(op=fast) == ledger.total_bytes(op=page)
    messages = {op: len(list(ledger.leaves(op=op))) for op in (page, fast)}
    assert messages[fast] == 2 * messages[page]


def test_while_a_piece_is_on_the_uplink_another_is_inside_its_node():
    def both(group):
        x = values(group.rank(), 48)
        collectives.hierarchical_all_reduce(x, group)
        collectives.pipelined_hierarchical_all_reduce(x, group, piece_bytes=x.nbytes // 2)

    ledger = launch(both, 4, hosts=MAPS["neighbours"][1]).ledger

    def at_once(op, rank):
        messages = list(ledger.leaves(op=op, rank=rank))
        crossing = [m for m in messages if any(crosses(rank, peer, ledger) for peer in m.peers)]
        inside = [m for m in messages if m not in crossing]
        assert crossing and inside
        return any(a.start < b.end and b.start < a.end for a in crossing for b in inside)

    for rank in range(4):
        assert at_once("pipelined_hierarchical_all_reduce", rank)
        assert not at_once("hierarchical_all_reduce", rank)


def crosses(rank, peer, ledger):
    return ledger.hosts[rank] != ledger.hosts[peer]


def by_auto(numel, group):
    x = torch.ones(numel)
    collectives.all_reduce(x, group)
    collectives.all_gather(x, group)
    collectives.reduce_scatter(x, group)


@pytest.mark.parametrize("hosts, chosen", [(MAPS["dealt"][1], "hierarchical"), (None, None)])
def test_auto_takes_the_hierarchy_where_there_are_hosts(hosts, chosen):
    ops = {comm.op for comm in launch(by_auto, 4, (4096,), hosts=hosts).ledger.comms}
    found = {op for op in ops if op.startswith("hierarchical")}
    three = {f"hierarchical_{op}" for op in ("all_reduce", "all_gather", "reduce_scatter")}
    assert found == (three if chosen else set())


def test_auto_takes_pieces_where_there_are_two_and_more():
    def large(group):
        collectives.all_reduce(torch.ones(1 << 19), group)

    ops = {comm.op for comm in launch(large, 4, hosts=MAPS["dealt"][1]).ledger.comms}
    assert "pipelined_hierarchical_all_reduce" in ops and "hierarchical_all_reduce" not in ops


def auto_of_all_three(length, group):
    """Run all three; parts unlike tensor_split's also work: rank r gathers r * length rows."""
    x = values(group.rank(), group.size() * length)
    reduced = collectives.all_reduce(x, group)
    scattered = collectives.reduce_scatter(x, group)
    odd = collectives.reduce_scatter(x[1:], group)
    even = collectives.all_gather(x[:length], group)
    sizes = [rank * length for rank in range(group.size())]
    uneven = collectives.all_gather(x[: sizes[group.rank()]], group, sizes)
    return reduced, scattered, odd, even, uneven


@pytest.mark.parametrize("ranks", [[0, 1, 0], [1, 0, 2, 1, 1, 0]])
def test_on_hosts_of_unequal_size_auto_lets_a_ring_leave_each_host_once(ranks):
    size, length, uneven = len(ranks), 600, EMULATED(max(ranks) + 1, ranks=ranks)
    run = launch(auto_of_all_three, size, (length,), hosts=uneven)
    xs = [values(rank, size * length) for rank in range(size)]
    total = sum(xs)
    for rank, found in enumerate(run.results):
        expected = (
            total,
            total.tensor_split(size)[rank],
            total[1:].tensor_split(size)[rank],
            torch.cat([x[:length] for x in xs]),
            torch.cat([x[: r * length] for r, x in enumerate(xs)]),
        )
        assert all(map(torch.equal, found, expected))

    def halves(group):
        x = torch.ones(size * length)
        collectives.reduce_scatter(x, group)
        collectives.all_gather(x[:length], group)

    whole = launch(
        lambda g: collectives.all_reduce(torch.ones(size * length), g), size, hosts=uneven
    )
    parts = launch(halves, size, hosts=uneven).ledger
    half = [4 * length * (size - 1)] * uneven.number  # (n-1)/n N through one link of each host
    assert whole.ledger.out_of() == [2 * nbytes for nbytes in half]
    assert parts.out_of(op="reduce_scatter") == parts.out_of(op="all_gather") == half


def test_hosts_of_unequal_size_have_no_hierarchy():
    uneven = EMULATED(2, ranks=[0, 1, 0])
    with pytest.raises(Exception, match=r"nodes of 2, 1 ranks: who has no partner"):
        launch(lambda g: collectives.hierarchical_all_reduce(torch.ones(9), g), 3, hosts=uneven)


def test_a_rank_whose_own_part_is_empty_chooses_as_the_others():
    def gather(group):
        sizes = [0, 300_000, 1, 0]
        return len(collectives.all_gather(torch.ones(sizes[group.rank()]), group, sizes))

    for hosts in (None, EMULATED(2)):
        assert launch(gather, 4, hosts=hosts).results == [300_001] * 4


def flights_of_both(messages, group):
    """Return what `messages` gathers and scatters, if a rank's own part is 2 numbers."""
    whole = torch.zeros(2 * group.size())
    whole.chunk(group.size())[group.rank()].fill_(group.rank() + 1)
    gathered = messages.begin_all_gather_(whole, group).wait().clone()
    return gathered, messages.begin_reduce_scatter(gathered * (group.rank() + 1), group).wait()


@EVERY_MAP
def test_collectives_in_flight_by_hosts_give_the_same_for_half_of_the_uplink(size, hosts):
    ours, theirs = (launch(flights_of_both, size, (m,), hosts=hosts) for m in (by_hosts, in_flight))
    for one, other in zip(ours.results, theirs.results):
        assert all(map(torch.equal, one, other))
    assert ours.ledger.total_bytes() == theirs.ledger.total_bytes()
    once = 8 * (size - 2)  # (h-1)/h N: parts of 8 bytes for all ranks on other hosts
    assert ours.ledger.out_of() == [2 * once] * hosts.number
    assert theirs.ledger.out_of() == [2 * 2 * once] * hosts.number


@pytest.mark.parametrize("size, columns", [(1, 1), (4, 2), (6, 3), (6, 2), (8, 2)])
def test_a_torus_sums_and_keeps_both_of_its_axes_busy(size, columns):
    def job(length, group):
        return collectives.torus_all_reduce(values(group.rank(), length), group, columns)

    for length in (0, 1, 24):
        run = launch(job, size, (length,))
        total = sum(values(rank, length) for rank in range(size))
        assert all(torch.equal(result, total) for result in run.results)
    assert run.ledger.total_bytes() == 2 * (size - 1) * length * 8
    traffic = run.ledger.traffic()
    pairs = [(r, p) for r in range(size) for p in range(size) if r // columns == p // columns]
    along_rows = sum(traffic[r][p] for r, p in pairs)
    if columns**2 == size:
        assert along_rows == run.ledger.total_bytes() / 2


# -- training -------------------------------------------------------------------------------------

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8, tied_embedding=False)
TEXT = load_text()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrap(kind, stage, gpt, group):
    """Wrap in HSDP, MiCS, hpZ or plain ZeRO, on hosts of 2 ranks."""
    if group.size() == 1:
        return stage(gpt, group, sgd, units=gpt.blocks)
    if kind == "MiCS":  # shards over two hosts, replicas on two others
        mesh = Mesh(group, by_hosts=True, replicas=group.size() // 4, shards=4)
        more = dict(replicas=mesh["replicas"], messages=by_hosts)
        return stage(gpt, mesh["shards"], sgd, units=gpt.blocks, **more)
    mesh = Mesh(group, by_hosts=True, across=group.size() // 2, inside=2)
    if kind == "HSDP":
        return stage(gpt, mesh["inside"], sgd, units=gpt.blocks, replicas=mesh["across"])
    if kind == "hpZ":
        return stage(gpt, group, sgd, units=gpt.blocks, inside=mesh["inside"])
    more = {"messages": by_hosts} if kind == "by hosts" else {}
    return stage(gpt, group, sgd, units=gpt.blocks, **more)


def train(kind, stage, accumulation, group):
    # The first rank of a group broadcasts its parameters; with a mesh, the mesh's first rank.
    order = host_by_host(group) if kind in ("HSDP", "MiCS") else group
    gpt = GPT(CONFIG, seed=order.rank()).double()
    model = wrap(kind, stage, gpt, group)
    batches = Batches(TEXT, 24, CONFIG.seq_len, rank=group.rank(), size=group.size())
    losses = []
    for step in range(3):
        model.zero_grad()
        inputs, targets = batches.batch(step)
        for micro in range(accumulation):
            part = slice(micro, None, accumulation)
            loss = token_loss(model(inputs[part]), targets[part]).mean() / accumulation
            loss.backward()
        model.step(max_norm=1.0)
        losses.append(loss.item())
    if stage is ZeRO3:
        with model.gathered():
            return losses, [p.detach().clone() for p in gpt.parameters()]
    return losses, [p.detach().clone() for p in gpt.parameters()]


@functools.cache
def alone():
    return launch(train, 1, ("ZeRO", ZeRO1, 1)).results[0][1]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
def test_hsdp_trains_as_one_process(stage, accumulation):
    for _, parameters in launch(train, 4, ("HSDP", stage, accumulation), hosts=EMULATED(2)).results:
        torch.testing.assert_close(parameters, alone(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "kind, where",
    [
        *[("hpZ", "neighbours"), ("by hosts", "neighbours")],
        *[(kind, "3 hosts, any map") for kind in ("HSDP", "hpZ", "by hosts")],
        ("MiCS", "4 hosts, dealt"),
    ],
)
def test_zero_3_in_all_ways_for_two_speeds_trains_as_one_process(kind, where):
    size, hosts = MAPS[where]
    accumulation = 1 if size == 8 else 2  # (3 rows per rank cannot be halved)
    for _, parameters in launch(train, size, (kind, ZeRO3, accumulation), hosts=hosts).results:
        torch.testing.assert_close(parameters, alone(), rtol=1e-9, atol=1e-12)


def one_step(kind, accumulation, group):
    gpt = GPT(CONFIG, seed=0)
    model = wrap(kind, ZeRO3, gpt, group)
    sent = len(group.recorder.comms)
    for micro in range(accumulation):
        inputs, targets = Batches(TEXT, 8, CONFIG.seq_len).batch(micro)
        token_loss(model(inputs), targets).mean().backward()
    model.step()
    return sent, [unit.flat.numel() for unit in model.units]


def after(run, sent) -> Ledger:
    """Return the ledger without the messages of the setup."""
    kept = [[c for c in run.ledger.comms if c.rank == r][n:] for r, (n, _) in enumerate(sent)]
    return Ledger(sum(kept, []), [], [], run.ledger.span, hosts=run.ledger.hosts)


def step_and_bytes(kind, k, size, hosts):
    """Return bytes out of each host for k micro-batches and a step, the root's and the blocks'."""
    run = launch(one_step, size, (kind, k), hosts=hosts)
    root, *blocks = run.results[0][1]
    return after(run, run.results).out_of(), 4 * root, 4 * sum(blocks)


@pytest.mark.parametrize("where", ["neighbours", "3 hosts, any map"])
@pytest.mark.parametrize("k", [1, 3])
def test_what_each_strategy_sends_out_of_a_host_is_the_formula(k, where):
    """N is the model's bytes; the root, which is gathered once per backward, is counted apart."""
    size, hosts = MAPS[where]
    h = hosts.number
    for kind, formula in {
        # A rank sends its part, or a term, to both ranks of each other host: 2(h-1)/h N.
        "ZeRO": lambda blocks, root: 2 * k * (3 * blocks + 2 * root),
        "by hosts": lambda blocks, root: k * (3 * blocks + 2 * root),
        # One gather per step from all ranks, the others from second shards; plus the scatters.
        "hpZ": lambda blocks, root: 2 * (1 + k) * (blocks + root),
        # An all-reduce of the shards, once per step: 2(h-1)/h N.
        "HSDP": lambda blocks, root: 2 * (blocks + root),
    }.items():
        out, root, blocks = step_and_bytes(kind, k, size, hosts)
        assert sum(out) == (h - 1) * formula(blocks, root), kind
        assert max(out) - min(out) <= (h > 2) * 200  # 3 may not divide a ring's shard


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("where", ["4 hosts", "4 hosts, dealt"])
def test_mics_shards_over_several_hosts_and_averages_once_a_step(where, k):
    """With shards over h = 2 hosts, a collective by hosts sends (h-1)/h N. Then each of a host's 2
    ranks averages its N/4 with the one other replica, which adds N/2 for any k."""
    out, root, blocks = step_and_bytes("MiCS", k, *MAPS[where])
    assert out == [(k * (3 * blocks + 2 * root) + blocks + root) // 2] * 4


def pages(group):
    """Run both pages for 12 numbers, on 2 hosts of 2 ranks."""
    mesh = Mesh(group, across=2, inside=2)
    flat, gradient = torch.arange(12.0), torch.full((12,), group.rank() + 1.0)
    stepped = hybrid_step(flat, gradient, lambda p, g: p - g, mesh["across"], mesh["inside"])
    shard = flat.chunk(4)[group.rank()]
    weight, again = weight_again(shard, mesh["inside"], group)
    return stepped, weight, again()


def test_the_pages_do_what_they_say_and_the_bytes_are_the_engines():
    run = launch(pages, 4, hosts=EMULATED(2))
    for stepped, weight, again in run.results:
        assert torch.equal(stepped, torch.arange(12.0) - 2.5)
        assert torch.equal(weight, torch.arange(12.0)) and torch.equal(again, weight)
    assert run.ledger.out_of(op="hybrid_step") == [12 * 4] * 2  # N, as in the engine's HSDP
    again = run.ledger.calls(op="all_gather", rank=0)  # without the gather inside the page
    assert [peers for c in again for peers in c.sent_to] == [1]  # rank 1, on the same host
