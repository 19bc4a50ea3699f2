"""How long the optimizer's step takes: passes over states and gradients, wherever they are."""

from __future__ import annotations

from .kernels import stream_seconds
from .lines import Line, readable
from .parameters import copies
from .timed_step import TimedStep


def optimizer_line(step: TimedStep, behind: tuple[float, float]) -> Line:
    """Time passes over gradients, states and parameters of this rank's shard under ZeRO, and over
    all gradients that it holds, to zero them.

    If offloaded, the pass is the host's, over its own memory; gradients are sent there before, and
    parameters come back afterwards (Ren et al. 2021, ZeRO-Offload, section 4).
    """
    layout, machine, how = step.layout, step.machine, step.how
    held = step.ranks[0].held
    updated = sum(numel / (size if layout.zero else 1) for numel, size, _ in copies(held, layout))
    traffic = passed_in_step(how)
    zeroed = how.gradient_bytes * (float(held.total) if layout.zero < 2 else updated)
    around = how.around_step * updated + zeroed
    if not how.offload_optimizer:
        seconds = stream_seconds(machine.device, traffic * updated + around)
        formula = f"({traffic:g} + {how.around_step:g}) bytes * {updated:.3g} parameters + zeroing"
        return Line("optimizer", seconds, "s", formula, "states and gradients read and written")
    there = 2 * how.activation_bytes
    if how.offload_overlaps:
        return _pipelined(step, updated, traffic, around, behind)
    seconds = machine.host_seconds(there * updated) + stream_seconds(machine.device, around)
    seconds += machine.host_adam_seconds(traffic * updated)
    formula = f"{traffic:g} bytes * {updated:.3g} parameters / the host's memory + {there:g} bytes"
    formula += " each there and back"
    if how.offload_to_files:
        seconds += _states_seconds(machine, how, updated)
        seconds += 2 * gradients_leave(layout, how) * _gradients_seconds(machine, how, updated)
        formula += ", and states through files"
    return Line("optimizer", seconds, "s", formula, "Ren et al. 2021 section 4")


def passed_in_step(how) -> float:
    """Return bytes per parameter: gradients are read, states read and written, parameters
    written."""
    return how.gradient_bytes + 2 * how.optimizer_bytes + how.parameter_bytes


def gradients_leave(layout, how) -> int:
    """How often in a step: a device that shall hold none lets go of each micro-batch's. In files
    the first is written, each later one added to what is read, and the sum read to be stepped."""
    return layout.num_micro_batches if how.offload_gradients else 1


def _states_seconds(machine, how, updated) -> float:
    """They are read from files and written."""
    return 2 * how.optimizer_bytes * updated / machine.file_bandwidth


def _gradients_seconds(machine, how, updated) -> float:
    """To read or write those that are in files."""
    in_files = how.offload_to_files and how.offload_gradients
    return how.gradient_bytes * updated / machine.file_bandwidth if in_files else 0.0


def _pipelined(step: TimedStep, updated, traffic, around, behind) -> Line:
    """The slowest of the host's arithmetic, the way back and the files, layer by layer, and one
    layer's way through the others; before it what backward does not hide of the gradients' way.

    behind: seconds of the computation that the last gradients leave behind, and of the whole step.
    """
    machine, how, num_layers = step.machine, step.how, step.config.num_layers
    one_way = machine.host_seconds(how.activation_bytes * updated)
    parts = {
        "the host's arithmetic": machine.host_adam_seconds(traffic * updated),
        "parameters on their way back": one_way,
    }
    if how.offload_to_files:
        parts["files"] = _states_seconds(machine, how, updated)
        parts["files"] += _gradients_seconds(machine, how, updated)
    slowest = max(parts, key=parts.__getitem__)
    rest = sum(parts.values()) - parts[slowest]
    last = parts[slowest] + rest / num_layers
    # The last micro-batch's gradients leave: over the link, and to where the others' sum is.
    passes = 2 if gradients_leave(step.layout, how) > 1 else 1
    out = max(one_way, passes * _gradients_seconds(machine, how, updated))
    leaving = max(0.0, out - behind[0]) + out / num_layers
    if how.offload_delayed:
        last = max(0.0, last - behind[1])
    return Line(
        "optimizer",
        leaving + last + stream_seconds(machine.device, around),
        "s",
        f"gradients {readable(leaving, 's')} + {slowest} {readable(parts[slowest], 's')}"
        + " behind the next step" * how.offload_delayed,
        "Ren et al. 2021 section 5",
    )
