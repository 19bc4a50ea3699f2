"""How long the optimizer's step takes: passes over states and gradients, wherever they are."""

from __future__ import annotations

from .kernels import stream_seconds
from .lines import Line
from .parameters import parameters_of_rank
from .replica_traffic import copies


def optimizer_line(config, layout, machine, how) -> Line:
    """Passes over gradients, states and parameters, of this rank's shard under ZeRO; and over all
    gradients that it holds, to set them to zero.

    Offloaded, the pass is the host's, over its own memory; before it gradients go there, and
    parameters come back after it (Ren et al. 2021, ZeRO-Offload, section 4).
    """
    held = parameters_of_rank(config, layout, 0)
    updated = sum(numel / (size if layout.zero else 1) for numel, size, _ in copies(held, layout))
    traffic = how.gradient_bytes + 2 * how.optimizer_bytes + how.parameter_bytes
    zeroed = how.gradient_bytes * (float(held.total) if layout.zero < 2 else updated)
    around = how.around_step * updated + zeroed
    if not how.offload_optimizer:
        seconds = stream_seconds(machine.device, traffic * updated + around)
        formula = f"({traffic:g} + {how.around_step:g}) bytes * {updated:.3g} parameters + zeroing"
        return Line("optimizer", seconds, "s", formula, "states and gradients read and written")
    there = 2 * how.activation_bytes
    seconds = machine.host_seconds(there * updated) + stream_seconds(machine.device, around)
    seconds += machine.host_seconds(traffic * updated, memory=True)
    return Line(
        "optimizer",
        seconds,
        "s",
        f"{traffic:g} bytes * {updated:.3g} parameters / the host's memory + {there:g} bytes each "
        "there and back",
        "Ren et al. 2021 section 4",
    )
