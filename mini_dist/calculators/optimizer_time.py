"""How long the optimizer's step takes: its states are read and written once, wherever they are."""

from __future__ import annotations

from .kernels import stream_seconds
from .lines import Line
from .parameters import parameters_of_rank
from .replica_traffic import copies


def optimizer_line(config, layout, machine, how) -> Line:
    """One pass over gradients, states and parameters, of this rank's shard under ZeRO.

    Offloaded, the pass is the host's, over its own memory; before it gradients go there, and
    parameters come back after it (Ren et al. 2021, ZeRO-Offload, section 4).
    """
    held = parameters_of_rank(config, layout, 0)
    updated = sum(numel / (size if layout.zero else 1) for numel, size, _ in copies(held, layout))
    traffic = how.gradient_bytes + 2 * how.optimizer_bytes + how.parameter_bytes
    what = f"{traffic:g} bytes * {updated:.3g} parameters / "
    if not how.offload_optimizer:
        seconds = stream_seconds(machine.device, traffic * updated)
        return Line("optimizer", seconds, "s", f"{what}bandwidth", "states read and written once")
    there = 2 * how.activation_bytes
    seconds = machine.host_seconds(there * updated)
    seconds += machine.host_seconds(traffic * updated, memory=True)
    return Line(
        "optimizer",
        seconds,
        "s",
        f"{what}the host's memory + {there:g} bytes each there and back",
        "Ren et al. 2021 section 4",
    )
