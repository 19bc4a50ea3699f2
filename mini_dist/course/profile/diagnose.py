"""From the record of a run to what is wrong with it: what must be alike, then what takes time."""

from __future__ import annotations

from statistics import mode


def diagnose_slow(record) -> tuple[str, int | None]:
    """(disease, rank), the rank None where no single one is at fault.

    record: a `Record` of check/sick_runs.py, which has the names of the diseases. First what has
    stopped, then what ranks should have alike, then where the time went.
    """

    def odd_one_out(values: list) -> int | None:
        """The rank whose value is another than most ranks have; None if all have the same."""
        return next((rank for rank, value in enumerate(values) if value != mode(values)), None)

    if record.waiting:
        return "save on one rank", odd_one_out([record.waiting[r] for r in range(record.size)])

    # What each rank has read, seen and kept.
    read = [{sample for step in steps for sample in step.samples} for steps in record.steps]
    if (rank := odd_one_out([len(samples) for samples in read])) is not None:
        return "another batch size", rank
    shared = [sum(len(mine & other) for other in read) - len(mine) for mine in read]
    if any(shared):  # all have some in common with the one that draws by another seed
        return "unsynchronised seeds", shared.index(max(shared))
    losses = [max(step.loss for step in steps) for steps in record.steps]
    if max(losses) > 20 * min(losses):
        return "bad shard", losses.index(max(losses))
    held = [[step.held for step in steps] for steps in record.steps]
    grows = [max(mine) > 2 * min(mine) for mine in held]
    if any(grows):
        return "memory leak", None if all(grows) else grows.index(True)

    # Where the time went, as shares of a step.
    went = record.went
    shares = [
        {part: seconds / step for part, seconds in parts.items()}
        for parts, step in zip(went.seconds, went.step)
    ]
    data = [share["data"] > 0.15 for share in shares]
    if any(data):
        return "input stall", None if all(data) else data.index(True)
    waits = [share["waiting"] for share in shares]
    if max(waits) > 0.15:
        return "straggler", waits.index(min(waits))
    if min(share["communication"] for share in shares) > 0.25:
        return "buckets too small", None
    if min(share["host"] for share in shares) > 0.15:
        return "host sync", None
    return "healthy", None
