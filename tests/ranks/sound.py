"""Correct programs that look wrong to a careless watcher; none may raise an alarm.

`a_while` stands for computing while the parent reads the flight recorders several times.
"""

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn


def a_while():
    time.sleep(0.35)


def rank_0_computes_long(group):
    if group.rank() == 0:
        a_while()
    dist.all_reduce(torch.ones(2), group=group)


def send_that_is_waited_for_late(group):
    peer = 1 - group.rank()
    work = dist.isend(torch.ones(2), peer, group=group)
    a_while()
    received = torch.zeros(2)
    dist.recv(received, peer, group=group)
    work.wait()
    return received.tolist()


def exchange_in_a_batch(group):
    rank, size = group.rank(), group.size()
    received = torch.zeros(2)
    ops = [
        dist.P2POp(dist.isend, torch.full([2], rank), group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received.long(), group=group, group_peer=(rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops if rank else ops[::-1]):
        work.wait()
        a_while()


def asynchronous_collectives_waited_for_in_another_order(group):
    tensors = [torch.ones(2) for _ in range(3)]
    works = [dist.all_reduce(t, group=group, async_op=True) for t in tensors]
    if group.rank() == 0:
        a_while()
        works.reverse()
    for work in works:
        work.wait()


def more_in_flight_than_is_remembered(group):
    peer = 1 - group.rank()
    if group.rank() == 0:
        works = [dist.isend(torch.ones(i % 7 + 1), peer, group=group) for i in range(600)]
        a_while()
        for work in works:
            work.wait()
    else:
        a_while()
        for i in range(600):
            dist.recv(torch.ones(i % 7 + 1), peer, group=group)


def far_ahead_of_the_others(group):
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(400)]
    if group.rank() == 0:
        a_while()
    works += [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(400)]
    for work in works:
        work.wait()


def root_goes_on_before_all_have_received(group):
    """In a tree broadcast, the root sends only to its own children."""
    last = group.size() - 1
    if group.rank() == last:
        dist.recv(torch.ones(2), 0, group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
    else:
        dist.broadcast(torch.ones(2), 0, group=group)
        if group.rank() == 0:
            a_while()
            dist.send(torch.ones(2), last, group=group)


def receive_from_anybody_then_from_one(group):
    """The message that the first receive takes decides which messages the others get."""
    if group.rank() == 0:
        dist.send(torch.ones(2), 1, group=group)
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.ones(2), group=group)
        a_while()
        dist.recv(torch.ones(3), 0, group=group)


def a_server_that_is_asked_late_and_answers_late(group):
    """At times all ranks wait, but a request or an answer is in flight."""
    if group.rank() == 0:
        for _ in range(2 * (group.size() - 1)):
            worker = dist.recv(torch.ones(2), group=group)
            a_while()
            dist.send(torch.ones(2), worker, group=group)
    else:
        for _ in range(2):
            a_while()
            dist.send(torch.ones(2), 0, group=group)
            dist.recv(torch.ones(2), 0, group=group)


def receive_in_a_thread(group):
    peer = 1 - group.rank()
    if group.rank() == 0:
        receive = dict(target=dist.recv, args=(torch.ones(2), peer), kwargs=dict(tag=7))
        thread = threading.Thread(**receive)
        thread.start()
        a_while()
        dist.send(torch.ones(2), peer)
        thread.join()
    else:
        dist.recv(torch.ones(2), peer)
        dist.send(torch.ones(2), peer, tag=7)


def wait_with_a_limit(group):
    if group.rank() == 0:
        work = dist.irecv(torch.ones(2), 1, group=group)
        try:
            work.wait(timedelta(seconds=0.4))
        except RuntimeError:
            return "went on"


def tags_out_of_order(group):
    if group.rank() == 0:
        works = [dist.isend(torch.ones(tag), 1, group=group, tag=tag) for tag in (10, 11, 12)]
        for work in works:
            work.wait()
    else:
        for tag in (12, 10, 11):
            a_while()
            dist.recv(torch.ones(tag), 0, group=group, tag=tag)


def subgroups_with_work_of_their_own(group):
    """Use two mesh dims, with different shapes per group and some groups ahead of others."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    for _ in range(3):
        dist.all_reduce(torch.ones(2 + dp), group=mesh.get_group("tp"))
        if dp == 0:
            a_while()
        dist.all_reduce(torch.ones(5 + tp), group=mesh.get_group("dp"))


def groups_with_long_names(group):
    """torch names such a group by a hash of its ranks, 40 characters long."""
    local = dist.new_group([0, 1], use_local_synchronization=True)
    for tag in (1001, 1002):
        if group.rank() == 0:
            dist.send(torch.ones(tag), 1, group=local, tag=tag)
        else:
            dist.recv(torch.ones(tag), 0, group=local, tag=tag)


def objects_of_other_sizes(group):
    rank, size = group.rank(), group.size()
    everything = [None] * size
    dist.all_gather_object(everything, "x" * 10**rank, group=group)
    dist.broadcast_object_list([everything if rank == 0 else None], 0, group=group)
    dist.gather_object("y" * rank, [None] * size if rank == 0 else None, 0, group=group)
    return [len(text) for text in everything]


def all_to_all_with_uneven_splits(group):
    rank, size = group.rank(), group.size()
    splits = [rank + peer for peer in range(size)]
    sent = torch.ones(sum(splits))
    dist.all_to_all_single(torch.zeros(sum(splits)), sent, splits, splits, group=group)
    dist.all_to_all(list(torch.zeros(size, 0)), list(torch.zeros(size, 0)), group=group)


def group_destroyed_and_made_again(group):
    for width in (2, 3):
        local = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(width), group=local)
        dist.destroy_process_group(local)


def returns_while_others_still_work(group):
    dist.all_reduce(torch.ones(2), group=group)
    if group.rank() == 0:
        a_while()
    return group.rank()


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def torch_ddp(group):
    ddp = nn.parallel.DistributedDataParallel(model(), process_group=group, bucket_cap_mb=1e-4)
    optimizer = torch.optim.AdamW(ddp.parameters())
    for _ in range(3):
        if group.rank() == 0:
            a_while()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def torch_ddp_uneven_inputs(group):
    from torch.distributed.algorithms.join import Join

    ddp = nn.parallel.DistributedDataParallel(model(), process_group=group)
    with Join([ddp]):
        for _ in range(1 + group.rank()):
            ddp(torch.ones(2, 8)).sum().backward()
            a_while()


def torch_fsdp2(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    mesh = init_device_mesh("cpu", (group.size(),))
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    for _ in range(2):
        if group.rank() == 0:
            a_while()
        sharded(torch.ones(2, 8)).sum().backward()


def torch_dtensor(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (group.size(),))
    sharded = distribute_tensor(torch.ones(7, 3), mesh, [Shard(0)])
    if group.rank() == 0:
        a_while()
    sharded = sharded.redistribute(placements=[Shard(1)])
    return sharded.redistribute(placements=[Replicate()]).to_local().sum().item()


def torch_pipelining(group):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = group.rank(), group.size()
    layer = nn.Linear(8, 8)
    layer.register_forward_hook(lambda *_: time.sleep(0.1))
    stage = PipelineStage(layer, rank, size, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    if rank == 0:
        schedule.step(torch.ones(8, 8))
    elif rank == size - 1:
        schedule.step(target=torch.ones(8, 8))
    else:
        schedule.step()
