"""All ranks with all ranks: the all-to-all, and the barrier, an all-to-all without data."""

from __future__ import annotations

import torch

from .messages import check_rows, collective, exchange, split_sizes


@collective
def pairwise_all_to_all(
    x: torch.Tensor,
    group,
    input_splits: list[int] | None = None,
    output_splits: list[int] | None = None,
) -> torch.Tensor:
    """Send the d-th part of x to rank d; return the received parts, in rank order.

    x: [sum(input_splits), ...] -> [sum(output_splits), ...]. `input_splits[d]`: rows for rank d;
    `output_splits[s]`: rows from rank s, which is rank s's input_splits[r]. Without splits, all
    ranks have equally many rows and cut them as evenly as possible. n-1 rounds: in round k every
    rank sends to the rank k further on, so no rank receives from two at once.
    """
    rank, size = group.rank(), group.size()
    input_splits, output_splits = check_splits(x, input_splits, output_splits, group)
    parts = x.split(input_splits)
    received = x.new_empty(sum(output_splits), *x.shape[1:])
    places = received.split(output_splits)
    places[rank].copy_(parts[rank])
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        exchange(parts[to], to, source, group, out=places[source])
    return received


@collective
def barrier(group) -> None:
    """Return only when all ranks have called it, after ceil(log2 n) rounds of empty messages.

    After round k a rank knows of the 2^k ranks before it (Hensgen, Finkel and Manber 1988).
    """
    rank, size, known = group.rank(), group.size(), 1
    while known < size:
        exchange(torch.empty(0), (rank + known) % size, (rank - known) % size, group)
        known *= 2


def check_splits(x, input_splits, output_splits, group) -> tuple[list[int], list[int]]:
    rank, size = group.rank(), group.size()
    check_rows(x)
    if (input_splits is None) != (output_splits is None):
        raise ValueError("give both input_splits and output_splits, or neither")
    if input_splits is None:
        even = split_sizes(len(x), size)
        return even, [even[rank]] * size
    if len(input_splits) != size or sum(input_splits) != len(x) or min(input_splits) < 0:
        raise ValueError(
            f"input_splits={input_splits} does not cut {len(x)} rows for {size} ranks: give "
            f"{size} numbers of rows, {len(x)} in all"
        )
    if len(output_splits) != size or output_splits[rank] != input_splits[rank]:
        raise ValueError(
            f"output_splits={output_splits}: give {size} numbers of rows, of which number {rank}, "
            f"what this rank keeps, is {input_splits[rank]} as in input_splits"
        )
    return list(input_splits), list(output_splits)
