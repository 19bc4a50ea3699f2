"""Test launch(device=...): where tensors go, which calls are refused, what carries messages."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mini_dist import Hosts, launch
from mini_dist.collectives import ring_all_reduce, send
from mini_dist.collectives.messages import recv_any
from mini_dist.ranks.devices import choose_device, default_device
from mini_dist.ranks.ledger.staged import Staged


@pytest.fixture
def one_gpu(monkeypatch):
    """Make launch see one GPU; no rank is ever started."""
    monkeypatch.setattr(importlib.import_module("mini_dist.ranks.launch"), "count_gpus", lambda: 1)


# ---- the argument --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, num_ranks, num_gpus, chosen",
    [
        (None, 4, 0, "cpu"),
        (None, 4, 3, "cpu"),
        (None, 4, 4, "cuda"),
        ("cpu", 4, 8, "cpu"),
        ("cuda", 4, 4, "cuda"),
        ("cuda:0", 4, 1, "cuda:0"),
        ("cuda:1", 4, 2, "cuda:1"),
    ],
)
def test_what_is_asked_for_is_chosen_where_the_gpus_suffice(device, num_ranks, num_gpus, chosen):
    assert choose_device(device, num_ranks, num_gpus) == chosen


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("is_asked", [False, True])
def test_only_a_gpu_that_was_asked_for_is_the_default_device(device, is_asked):
    found = default_device(torch.device(device), is_asked)
    assert found == (torch.device(device) if is_asked and device != "cpu" else None)


def test_fewer_gpus_than_ranks_are_refused_with_nccls_words_and_what_works(one_gpu):
    with pytest.raises(ValueError) as refused:
        launch(print, 4, device="cuda")
    assert str(refused.value) == (
        'device="cuda" for 4 ranks: this machine has 1 GPU, and NCCL refuses two ranks on one GPU '
        '("Duplicate GPU detected"); give world_size=1, or device="cuda:0", where all ranks share '
        "one GPU and gloo carries their messages"
    )


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(device="cuda:1"), 'this machine has 1 GPU, counted from 0; "cuda:0" is the last one'),
        (dict(device="gpu"), 'device=\'gpu\': give "cpu", "cuda"'),
        (dict(device="cuda", hosts=Hosts(1)), "NCCL does not use the cables between our hosts"),
        (dict(device="cuda", elastic=True), "NCCL cannot go on without a rank that died"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options, words, one_gpu):
    with pytest.raises(ValueError) as refused:
        launch(print, 1, **options)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused_and_none_is_the_cpu():
    with pytest.raises(ValueError, match="torch finds no GPU on this machine"):
        launch(print, 2, device="cuda")
    assert launch(lambda group: group.device, 2).results == [torch.device("cpu")] * 2


# ---- what carried the messages -------------------------------------------------------------------


def sum_of_ones(group):
    x = torch.ones(3, device=group.device)
    dist.all_reduce(x, group=group)
    return ring_all_reduce(x, group)


def test_title_and_ledger_say_what_carried_the_messages():
    run = launch(sum_of_ones, 2, device="cpu")
    assert run.title() == "2 ranks on cpu, gloo"
    assert run.ledger.carriers() == ["gloo"]
    for comm in run.ledger.comms:  # a ring's messages have a carrier, the ring itself does not
        assert comm.carrier == ("gloo" if comm.is_leaf else None)


def test_a_run_that_sent_nothing_says_so():
    run = launch(lambda group: group.rank(), 2, device="cpu")
    assert run.title() == "2 ranks on cpu, nothing sent" and run.ledger.carriers() == []


def test_a_table_names_the_carrier_where_gloo_is_not_alone():
    run = launch(sum_of_ones, 2)
    assert run.ledger.table().title == "bytes sent"
    run.ledger.comms[0].carrier = "NCCL"
    assert run.ledger.table().title == "bytes sent, by NCCL and gloo"
    assert run.title() == "2 ranks on cpu, NCCL and gloo"


# ---- ranks that share a GPU ----------------------------------------------------------------------
# No GPU is needed to check copying through the host: here the tensors to copy are on the CPU.


def every_operation(staged, group):
    """Return name -> this rank's result, for each torch.distributed operation and for DDP."""
    if staged:
        group.inner, group.is_staged = Staged(group.inner, "cpu"), True
    rank, size = group.rank(), group.size()
    mine = torch.arange(2.0) + 10 * rank
    rows = torch.arange(2.0 * size) + 100 * rank
    found = {}

    def note(name, out, work=None):
        if work is not None:
            work.wait()
        found[name] = [each.clone() for each in out] if isinstance(out, list) else out.clone()

    for name in ("all_reduce", "broadcast", "reduce"):
        x = mine.clone()
        root = () if name == "all_reduce" else (1,)
        note(name, x, getattr(dist, name)(x, *root, group=group, async_op=True))
    parts = [torch.zeros(2) for _ in range(size)]
    note("all_gather", parts, dist.all_gather(parts, mine, group=group))
    whole = torch.zeros(2 * size)
    note("all_gather_into", whole, dist.all_gather_into_tensor(whole, mine, group=group))
    whole = torch.zeros(2 * size)
    part = whole.chunk(size)[rank]  # a view of the output, as in FSDP2
    part.copy_(mine)
    note("all_gather_in_place", whole, dist.all_gather_into_tensor(whole, part, group=group))
    part = torch.zeros(2)
    note("reduce_scatter", part, dist.reduce_scatter_tensor(part, rows, group=group, async_op=True))
    both = rows.clone()
    part = both.chunk(size)[rank]
    note("reduce_scatter_in_place", part, dist.reduce_scatter_tensor(part, both, group=group))
    out = torch.zeros(2 * size)
    note("all_to_all", out, dist.all_to_all_single(out, rows, group=group, async_op=True))
    gathered = [torch.zeros(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, gathered, 0, group=group)
    if rank == 0:
        note("gather", gathered)
    out = torch.zeros(2)
    dist.scatter(out, list(rows.split(2)) if rank == 0 else None, 0, group=group)
    note("scatter", out)
    dist.barrier(group)
    note("ring", ring_all_reduce(torch.arange(7.0) + rank, group))
    if rank == 0:
        arrived = sorted([recv_any(mine, group) for _ in range(size - 1)], key=lambda each: each[1])
        note("recv_any", [each for each, _ in arrived])
    else:
        send(mine, 0, group)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
    model(torch.ones(4, 3) * (rank + 1)).square().mean().backward()
    note("DDP", [p.grad for p in model.parameters()])
    return found


def test_by_way_of_the_host_everything_arrives_as_without():
    plain, staged = launch(every_operation, 3, (False,)), launch(every_operation, 3, (True,))
    assert plain.results[0].keys() >= {"gather", "recv_any", "DDP"}
    for here, there in zip(plain.results, staged.results):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
    assert plain.ledger.total_bytes() == staged.ledger.total_bytes() > 0


def write_and_wait(group):
    """Return what a rank sees of a message before and after `wait`."""
    group.inner, group.is_staged = Staged(group.inner, "cpu"), True
    x = torch.full((2,), float(group.rank()))
    if group.rank() == 0:
        handle = group.send([x], 1, 0)
        x.fill_(7.0)  # too late, because the copy is sent
        handle.wait()
        return x
    handle = group.recv([x], 0, 0)
    before = x.clone()
    handle.wait()
    return before, x


def test_what_arrives_is_there_after_the_wait_and_a_send_copies_nothing_back():
    sender, (before, arrived) = launch(write_and_wait, 2).results
    assert sender.tolist() == [7.0, 7.0]
    assert before.tolist() == [1.0, 1.0] and arrived.tolist() == [0.0, 0.0]
