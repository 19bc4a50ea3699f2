"""Machines: datasheet peaks beside the best that was ever measured, and the links between them.

Everything is data that one may edit: `hardware("h100").replace(devices_per_node=4)`.

Sources.  [acc] stas00/ml-engineering, compute/accelerator (vendors' datasheets, collected);
[mamf] the same, "maximum achievable matmul FLOPS": the best GEMM found by search; [scaling-book]
jax-ml/scaling-book, TPUs; [sheet] the vendor's datasheet; [hf] Hugging Face's Ultra-Scale Playbook,
measured with 256 MB messages; [here] measured on this machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

from .links import Hierarchy, Link

# Where nobody measured a GEMM ceiling: the median of [mamf]'s bf16 ratios, measured / datasheet
# (17 accelerators: 0.51 ... 0.97).
ASSUMED_GEMM_FRACTION = 0.786
# What ordinary streaming kernels get of the datasheet's memory bandwidth: BabelStream-like copies
# reach 0.85-0.93 on A100 and H100; fused elementwise kernels with masks a little less.
STREAM_FRACTION = 0.85
# What NCCL's ring gets of a link's datasheet rate with large messages: nccl-tests on 8 x A100
# with NVSwitch print 230-235 GB/s of 300 (0.78); 200 Gb/s InfiniBand 22-24 GB/s of 25 (0.92).
NODE_LINK_FRACTION = 0.78
NETWORK_FRACTION = 0.92
# One step of a ring in NCCL: nccl-tests' small messages take 20-30 us for 14 steps in a node,
# and 5-10 us more for each step over a network.
NODE_LATENCY = 2e-6
NETWORK_LATENCY = 8e-6


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    peak_flops: float  # dense bf16, FLOP/s: the datasheet
    gemm_flops: float | None  # the best GEMM measured, FLOP/s; None: nobody did
    memory_bytes: float  # what the driver reports, a little below the name
    memory_bandwidth: float  # bytes/s: the datasheet
    cores: int  # streaming multiprocessors, compute units: how many tiles run at once
    source: str = ""
    peak_flops_fp8: float | None = None

    def __post_init__(self):
        for field in ("peak_flops", "gemm_flops", "memory_bytes", "memory_bandwidth", "cores",
                      "peak_flops_fp8"):
            value = getattr(self, field)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(f"{field}={value!r} of device {self.name!r} is not above 0: give "
                                 "it in FLOP/s, bytes or bytes/s.")

    @property
    def gemm_ceiling(self) -> float:
        return self.gemm_flops or ASSUMED_GEMM_FRACTION * self.peak_flops

    @property
    def stream_bandwidth(self) -> float:
        return STREAM_FRACTION * self.memory_bandwidth

    def replace(self, **changes) -> Device:
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Hardware:
    """Devices in nodes, nodes in a network.  Links are one device's, one direction, as sold."""

    name: str
    device: Device
    devices_per_node: int
    node_bandwidth: float  # bytes/s
    network_bandwidth: float  # bytes/s
    node_latency: float = NODE_LATENCY
    network_latency: float = NETWORK_LATENCY
    # Measured: {nodes: fraction of the network's rate that a collective over them got}.
    by_nodes: tuple[tuple[int, float], ...] = ()
    dollars_per_hour: float | None = None  # of one device: yours to fill in, prices move
    source: str = ""

    def __post_init__(self):
        for field in ("devices_per_node", "node_bandwidth", "network_bandwidth"):
            value = getattr(self, field)
            if not _is_number(value) or value <= 0:
                raise ValueError(f"{field}={value!r} of {self.name!r} is not above 0: give "
                                 f"{'a count' if field == 'devices_per_node' else 'bytes/s'}.")
        for field in ("node_latency", "network_latency", "dollars_per_hour"):
            value = getattr(self, field)
            if value is not None and (not _is_number(value) or value < 0):
                raise ValueError(f"{field}={value!r} of {self.name!r} is negative or no number: "
                                 "give 0 or more.")

    @property
    def node_link(self) -> Link:
        """What a collective really gets inside a node."""
        return Link(self.node_latency, NODE_LINK_FRACTION * self.node_bandwidth)

    def network_link(self, nodes: int = 2) -> Link:
        """What a collective over that many nodes really gets per device."""
        return Link(self.network_latency,
                    NETWORK_FRACTION * self.network_bandwidth * self.network_fraction(nodes))

    def network_fraction(self, nodes: int) -> float:
        """From `by_nodes`, straight between the measured points in log2 of nodes; 1 if none."""
        points = sorted(self.by_nodes)
        if not points or nodes <= points[0][0]:
            return points[0][1] if points else 1.0
        for (n0, f0), (n1, f1) in zip(points, points[1:]):
            if nodes <= n1:
                share = math.log2(nodes / n0) / math.log2(n1 / n0)
                return f0 * (f1 / f0) ** share
        return points[-1][1]

    def links(self, nodes: int = 2) -> Hierarchy:
        return Hierarchy(self.devices_per_node, self.node_link, self.network_link(nodes))

    def replace(self, **changes) -> Hardware:
        """A copy with some fields changed; `device` may be given as a dict of its changes."""
        if isinstance(changes.get("device"), dict):
            changes["device"] = self.device.replace(**changes["device"])
        return dataclasses.replace(self, **changes)


def hardware(name: str) -> Hardware:
    """The machine of that name; ValueError names the nearest ones when there is none."""
    if name in HARDWARE:
        return HARDWARE[name]
    near = difflib.get_close_matches(str(name).lower(), HARDWARE, n=3, cutoff=0.3) \
        or sorted(HARDWARE)
    raise ValueError(f"hardware={name!r} is not known: did you mean {', '.join(near)}? "
                     "Any other machine is a Hardware(...) by hand.")


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


T, GB = 1e12, 1e9
GIB = 2**30
A100_40 = Device("A100 SXM 40GB", 312 * T, 271.2 * T, 39.4 * GIB, 1.555 * T, 108, "[sheet] [mamf]")
A100_80 = Device("A100 SXM 80GB", 312 * T, 271.2 * T, 79.2 * GIB, 2.039 * T, 108, "[acc] [mamf]")
H100 = Device("H100 SXM", 989 * T, 794.5 * T, 79.6 * GIB, 3.35 * T, 132, "[acc] [mamf]", 1979 * T)
H200 = Device("H200 SXM", 989 * T, 794.5 * T, 141 * GB, 4.8 * T, 132, "[acc] [mamf]", 1979 * T)
B200 = Device("B200 SXM", 2250 * T, 1745 * T, 180 * GB, 8.0 * T, 148, "[acc] [mamf]", 4500 * T)
MI300X = Device("MI300X", 1300 * T, 668.4 * T, 192 * GB, 5.3 * T, 304, "[acc] [mamf]", 2610 * T)
L40S = Device("L40S", 362 * T, None, 48 * GB, 0.864 * T, 142, "[acc] [sheet]", 733 * T)
TPU_V4 = Device("TPU v4", 275 * T, None, 32 * GIB, 1.2 * T, 8, "[acc] [scaling-book]")
TPU_V5P = Device("TPU v5p", 459 * T, None, 95 * GB, 2.76 * T, 8, "[acc] [scaling-book]")
TPU_V5E = Device("TPU v5e", 197 * T, None, 16 * GB, 0.82 * T, 4, "[acc] [scaling-book]")
# Two cores of a shared machine, float32 (there is no bf16 unit): numpy's matmul of 2048 x 2048.
LAPTOP = Device("2 CPU cores", 0.15 * T, 0.1 * T, 24 * GIB, 20 * GB, 2, "[here], rough")

HARDWARE = {
    # 8 x 200 Gb/s InfiniBand a node (DGX A100; Selene, Narayanan et al. 2021 section 5).
    "a100-80": Hardware("a100-80", A100_80, 8, 300 * GB, 25 * GB, source="DGX A100 datasheet"),
    "a100-40": Hardware("a100-40", A100_40, 8, 300 * GB, 25 * GB, source="DGX A100 datasheet"),
    # 8 x 400 Gb/s a node (DGX H100, DGX H200, DGX B200 datasheets).
    "h100": Hardware("h100", H100, 8, 450 * GB, 50 * GB, source="DGX H100 datasheet"),
    "h200": Hardware("h200", H200, 8, 450 * GB, 50 * GB, source="DGX H200 datasheet"),
    "b200": Hardware("b200", B200, 8, 900 * GB, 50 * GB, source="DGX B200 datasheet"),
    "mi300x": Hardware("mi300x", MI300X, 8, 448 * GB, 50 * GB, source="[acc]"),
    # PCIe 4 x16 and one 100 Gb/s port for four cards.
    "l40s": Hardware("l40s", L40S, 4, 32 * GB, 3.1 * GB, source="[sheet]"),
    # A torus has no nodes: the 'node' is a cube or plane whose links are all direct, 2 links an
    # axis; between slices the data centre's network (scaling-book, "TPU networking").
    "tpu-v4": Hardware("tpu-v4", TPU_V4, 64, 2 * 45 * GB, 6.25 * GB, source="[scaling-book]"),
    "tpu-v5p": Hardware("tpu-v5p", TPU_V5P, 64, 2 * 90 * GB, 6.25 * GB, source="[scaling-book]"),
    "tpu-v5e": Hardware("tpu-v5e", TPU_V5E, 16, 2 * 45 * GB, 3.1 * GB, source="[scaling-book]"),
    "laptop": Hardware("laptop", LAPTOP, 4, 2 * GB, 0.1 * GB, 1e-4, 1e-3, source="[here], rough"),
    # The cluster of the playbook's sweep: what was left of the network fell steeply with nodes.
    # all-reduce bus bandwidth there, over that of 2 nodes: it is a fact of that cluster.
    "h100-hf": Hardware(
        "h100-hf", H100, 8, 450 * GB, 50 * GB, source="[hf]",
        by_nodes=((2, 1.0), (4, 160.1 / 361.8), (8, 99.6 / 361.8), (16, 84.7 / 361.8),
                  (32, 64.9 / 361.8), (64, 32.9 / 361.8))),
}
