"""The learner's own device in an explorer: its memory, peak and bandwidths."""

from __future__ import annotations

from mini_dist.plan.calculators import hardware
from mini_dist.plan.calculators.devices import Device
from mini_dist.plan.calculators.machines import Hardware

from ..lab import real

MINE = "my device"
CONTROLS = {  # GiB, dense bf16 TFLOP/s, GB/s of its memory, GB/s of its port between nodes
    "my_gib": real(1.0, 1000.0, "GiB", log=True),
    "my_tflops": real(1.0, 10_000.0, "TFLOP/s", log=True),
    "my_memory_gb_s": real(10.0, 20_000.0, "GB/s", log=True),
    "my_network_gb_s": real(0.1, 1000.0, "GB/s", log=True),
}
START = dict(my_gib=24.0, my_tflops=165.0, my_memory_gb_s=1000.0, my_network_gb_s=1.5)


def machine_of(gpu: str, my_gib=START["my_gib"], my_tflops=START["my_tflops"],
               my_memory_gb_s=START["my_memory_gb_s"],
               my_network_gb_s=START["my_network_gb_s"]) -> Hardware:  # fmt: skip
    """Return the machine of that name, or one with the learner's device.

    What no control sets (8 devices per node, links inside the node, the host) is the H100's.
    """
    if gpu != MINE:
        return hardware(gpu)
    device = Device(MINE, 1e12 * my_tflops, None, 2**30 * my_gib, 1e9 * my_memory_gb_s)
    return hardware("h100").replace(
        name=MINE, device=device, network_bandwidth=1e9 * my_network_gb_s, source="yours"
    )


def controls(*names: str) -> dict:
    """Return the declarations of these controls."""
    return {name: CONTROLS[name] for name in names}


def shown_if_mine(*names: str) -> dict:
    """Show these controls while the learner's device is chosen."""
    return dict.fromkeys(names, lambda values: values["gpu"] == MINE)
