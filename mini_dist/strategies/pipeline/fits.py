"""Check that schedule, stages, group and batch fit together; a ScheduleError says why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mini_dist.plan.schedule import Action, Schedule, ScheduleError


def stages_that_fit(
    schedule: Schedule, stages: Mapping[int, Any] | Callable, group, activation, optimizer, shared
) -> dict[int, Any]:
    """Return this rank's stages by number; raise ScheduleError if no Pipeline can use them."""
    rank, size = group.rank(), group.size()
    if schedule.num_ranks != size:
        raise ScheduleError(
            f"{schedule.name} is for {schedule.num_ranks} ranks, the group has {size}"
        )
    mine = schedule.stages_of[rank]
    stages = dict(stages) if isinstance(stages, Mapping) else {mine[0]: stages}
    if sorted(stages) != list(mine):
        raise ScheduleError(
            f"{schedule.name} puts stages {list(mine)} on rank {rank}, not {sorted(stages)}"
        )
    if size > 1 and activation is None:
        raise ScheduleError("activation: say shape and dtype of what goes between the stages")
    autograd = any(not hasattr(function, "backward") for function in stages.values())
    if schedule.asynchronous and optimizer is None and autograd:
        raise ScheduleError(f"{schedule.name} has optimizer steps: give the optimizer")
    if schedule.asynchronous and shared is not None:
        raise ScheduleError(
            f"{schedule.name} steps the first and the last stage at different moments: untie "
            "the embedding (tied_embedding=False)"
        )
    return stages


def micro_batches(batch: Tensor | Sequence[Tensor] | None, m: int, name: str) -> list[Tensor]:
    """Split a batch [B, ...] into m equal parts, or check a list of m parts of equal shape."""
    if batch is None:
        raise ScheduleError(f"{name} are needed on this rank")
    if isinstance(batch, Tensor):
        if len(batch) % m:
            works = [n for n in range(1, len(batch) + 1) if len(batch) % n == 0]
            raise ScheduleError(
                f"{name} of {len(batch)} rows do not split into {m} equal micro-batches; "
                f"{', '.join(map(str, works))} would work"
            )
        return list(batch.chunk(m))
    if len(batch) != m:
        raise ScheduleError(f"the schedule has {m} micro-batches, {name} {len(batch)}")
    for micro, part in enumerate(batch):
        if part.shape != batch[0].shape:
            raise ScheduleError(
                f"micro-batch {micro} of {name} is {list(part.shape)}, the first is "
                f"{list(batch[0].shape)}: all must have one shape (pad the smaller ones)"
            )
    return list(batch)


def check_message(value: Tensor, activation: Tensor, action: Action) -> None:
    """Check a message before it is sent: gloo hangs or crashes if the size is wrong."""
    if value.shape != activation.shape or value.dtype != activation.dtype:
        raise ScheduleError(
            f"{action}: stage {action.stage} made {list(value.shape)} {value.dtype}, but "
            f"activation says {list(activation.shape)} {activation.dtype}"
        )
