"""Right and wrong ways to send one tensor and receive another.

The solutions of lessons 03 and 04 here take such a way as their argument `swap`."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from mini_dist.collectives import barrier, exchange, recv, send, start, wait

# -- the solutions ----------------------------------------------------------------------------


def scatter_sums(x, group, swap=exchange):
    rank, size = group.rank(), group.size()
    chunks = x.tensor_split(size)
    moving = chunks[rank - 1].clone()
    for k in range(2, size + 1):
        mine = chunks[rank - k]
        moving = swap(moving, (rank + 1) % size, (rank - 1) % size, group, like=mine) + mine
    return moving


def gather_parts(x, group, swap=exchange):
    rank, size = group.rank(), group.size()
    parts = {rank: x}
    for k in range(1, size):
        x = swap(x, (rank + 1) % size, (rank - 1) % size, group, like=x)
        parts[(rank - k) % size] = x
    return torch.cat([parts[r] for r in range(size)])


def sum_all(x, group, swap=exchange):
    return gather_parts(scatter_sums(x, group, swap), group, swap)


def sum_pairs(x, group, swap=exchange):
    total, distance = x.clone(), 1
    while distance < group.size():
        partner = group.rank() ^ distance
        total = total + swap(total, partner, partner, group, like=total)
        distance *= 2
    return total


def transpose(x, group, swap=exchange):
    rank, size = group.rank(), group.size()
    parts = list(x.tensor_split(size))
    result = list(parts)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        result[source] = swap(parts[to], to, source, group, like=parts[to])
    return torch.cat(result)


SOLUTIONS = {
    "ring_reduce_scatter": scatter_sums,
    "ring_all_gather": gather_parts,
    "ring_all_reduce": sum_all,
    "doubling_all_reduce": sum_pairs,
    "all_to_all": transpose,
}

# -- wrong ways, with the hint they must get --------------------------------------------------


def in_dtype(dtype, instead_of):
    def swap(x, to, source, group, like):
        if x.dtype not in instead_of:
            return exchange(x, to, source, group, like=like)
        return exchange(x.to(dtype), to, source, group, like=like.to(dtype)).to(x.dtype)

    return swap


def with_a_barrier(x, to, source, group, like):
    dist.barrier(group)
    return exchange(x, to, source, group, like=like)


def with_the_librarys_barrier(x, to, source, group, like):
    came = exchange(x, to, source, group, like=like)
    barrier(group)
    return came


def tells_its_length_first(x, to, source, group, like):
    (length,) = exchange(torch.tensor([x.numel()]), to, source, group)
    assert length == like.numel()
    return exchange(x, to, source, group, like=like)


def drops_the_handle(x, to, source, group, like):
    dist.isend(x.contiguous(), group_dst=to, group=group)
    return recv(like, source, group)


def forgets_to_wait_for_its_send(x, to, source, group, like):
    receiving, sending = start(
        group, [(came := torch.empty(like.shape, dtype=like.dtype), source)], [(x.contiguous(), to)]
    )
    receiving.wait()
    return came


def sends_before_it_receives(x, to, source, group, like):
    send(x, to, group)
    return recv(like, source, group)


def does_not_wait_for_what_comes(x, to, source, group, like):
    came = torch.zeros(like.shape, dtype=like.dtype)
    _, sending = start(group, [(came, source)], [(x.contiguous(), to)])
    sending.wait()
    return came


WRONG = {
    "float32": (in_dtype(torch.float32, [torch.float64]), "bytes were sent where"),
    "half": (in_dtype(torch.float16, [torch.float64]), "bytes were sent where"),
    "bfloat16": (in_dtype(torch.bfloat16, [torch.float64]), "In 16 bits they lose digits"),
    "doubles": (in_dtype(torch.float64, [torch.int64]), "x is int64, and you send float64"),
    "wide": (in_dtype(torch.float32, [torch.bfloat16]), "x is bfloat16, and you send float32"),
    "barrier": (with_a_barrier, "A barrier moves nothing"),
    "librarys_barrier": (with_the_librarys_barrier, "A barrier moves nothing"),
    "length": (tells_its_length_first, "so do not send it"),
    "dropped": (drops_the_handle, "is still under way"),
    "no_wait_for_send": (forgets_to_wait_for_its_send, "one send of it is still under way"),
    "no_wait_for_recv": (does_not_wait_for_what_comes, "one recv of it is still under way"),
    "deadlock": (sends_before_it_receives, "everyone sends first"),
}

# -- right ways -------------------------------------------------------------------------------


def sends_from_a_thread(x, to, source, group, like):
    sending = threading.Thread(target=send, args=(x, to, group))
    sending.start()
    came = recv(like, source, group)
    sending.join()
    return came


def receives_in_an_executor(x, to, source, group, like):
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(recv, like, source, group)
        send(x, to, group)
        return came.result()


def with_torchs_own_messages(x, to, source, group, like):
    came = torch.empty(like.shape, dtype=like.dtype)
    sending = dist.isend(x.contiguous(), group_dst=to, group=group)
    dist.recv(came, group_src=source, group=group)
    sending.wait()
    return came


def as_a_batch(x, to, source, group, like):
    came = torch.empty(like.shape, dtype=like.dtype)
    both = [
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=to),
        dist.P2POp(dist.irecv, came, group=group, group_peer=source),
    ]
    wait(dist.batch_isend_irecv(both))
    return came


def from_any_source(x, to, source, group, like):
    """Right if only one rank sends to this one; gloo can't receive an empty tensor from any."""
    came = torch.empty(like.shape, dtype=like.dtype)
    sending = dist.isend(x.contiguous(), group_dst=to, group=group)
    dist.recv(came, group=group, group_src=None if came.numel() else source)
    sending.wait()
    return came


RIGHT = [
    sends_from_a_thread,
    receives_in_an_executor,
    with_torchs_own_messages,
    as_a_batch,
    from_any_source,
]
