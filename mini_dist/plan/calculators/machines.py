"""Machines: datasheet peaks, the best measurements, and the links between them.

Everything is data that you may edit: `hardware("h100").replace(devices_per_node=4)`.

Sources.  [acc] stas00/ml-engineering, compute/accelerator (vendors' datasheets, collected);
[mamf] the same, "maximum achievable matmul FLOPS": the best GEMM found by search; [simumax]
MooreThreads/SimuMax, configs/system: single kernels and collectives timed on an A100-PCIe and a
B200 node; [scaling-book] jax-ml/scaling-book, TPUs; [sheet] the vendor's datasheet; [hf] Hugging
Face's Ultra-Scale Playbook, 256 MB messages; [here] measured on this machine.

This file has the constants of kernels and links, which come from timings of single kernels
or single collectives.  chosen.py lists the constants that were chosen with whole runs in view.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

from ..fields import checks_kinds
from .links import Hierarchy, Link

# Without a measured GEMM ceiling: the median of [mamf]'s bf16 ratios, measured / datasheet
# (0.51 ... 0.97).
ASSUMED_GEMM_FRACTION = 0.786
# And where nobody timed the shapes of training: the A100's, H100's and B200's ratios of those to
# the best shape are 0.95, 0.87 and 0.64 (the hotter the chip, the less it sustains).
ASSUMED_SUSTAINED_FRACTION = 0.85
# Large GEMMs lose K / (K + 180), filling and draining a tile: read off [simumax]'s A100 timings
# at K = 512 ... 8192.
GEMM_FILL = 180
# [simumax] causal attention kernels at head dim 128, FLOP/s of the half that is computed over the
# sustained GEMM rate: A100 0.79 forward, 0.65 backward; B200 0.96, 0.80.  Nearer the A100's.
FLASH_FORWARD, FLASH_BACKWARD = 0.80, 0.68
# FlashAttention 2, written for the A100's instructions, gets 35 % of an H100's datasheet forward
# (Shah et al. 2024, arXiv:2407.08608, abstract); backward as much less as above: assumed.
FLASH_2_HOPPER = 0.35
# [simumax] streaming kernels get 0.75 (A100) and 0.67 (B200) of the datasheet's bandwidth.
STREAM_FRACTION = 0.72
# A kernel's own start and end on the device: assumed.
KERNEL_SECONDS = 5e-6
# NCCL in a node, share of the datasheet's rate: [simumax] on B200 0.74 for all-reduce, 0.67 for
# all-gather and reduce-scatter, 0.60 for all-to-all; reports of nccl-tests on 8 x A100 say 230-235
# of 300 GB/s for all-reduce (not timed here).  A plain send: assumed.
NODE_FRACTIONS = {
    "all_reduce": 0.75,
    "all_gather": 0.67,
    "reduce_scatter": 0.67,
    "all_to_all": 0.60,
    "send": 0.80,
}
# Between nodes: reports of nccl-tests over 200 Gb/s InfiniBand say 22-24 of 25 GB/s a port.
NETWORK_FRACTION = 0.92
# While a collective runs, kernels take longer: on average 18.9 % (Lee et al. 2025,
# arXiv:2507.03114: FSDP and pipelines, A100, H100, MI210, MI250, with and without overlap).
SLOWED = 0.189
# A collective of almost nothing on 8 devices takes 22 or 25 us [simumax]: a start, and 7 or 14 of
# the shortest steps below.
COLLECTIVE_SECONDS = 18.5e-6
MEASURED_BYTES = 256e6  # in the timings of `Hardware.by_nodes`
# Of a message over a link: assumed.
NODE_LATENCY, NETWORK_LATENCY = 1e-6, 8e-6
# A ring's step by NCCL's protocols LL, LL128 and Simple: how many of these latencies, inside a node
# and between nodes, and the share of the link that is data (NCCL, src/graph/tuning.cc at 01afd20:
# 0.47, 1.9, 3.4 us over NVLink; 2.7, 4.0, 9.6 over a network; a quarter, 120 of 128, all).
PROTOCOLS = ((0.47, 2.7 / 8, 0.25), (1.9, 4.0 / 8, 0.92), (3.4, 9.6 / 8, 1.0))
# To the host: 16 lanes of PCIe 4 or 5, and of 8 devices the two sockets' 8 channels of DDR4-3200
# (DGX A100 datasheet) or DDR5-4800 (DGX H100). What copies get of PCIe: as a plain send. What Adam
# gets of the memory: chosen on DeepSpeed's CPU-Adam on a DGX-2 (`CPU_ADAM` in offload.py), which
# gets 0.43 with 4 and with 10 billion parameters and 0.50 with one.
HOST_ADAM_FRACTION = 0.43
PCIE_4, PCIE_5 = 32e9, 64e9
DDR4_HOST, DDR5_HOST = 2 * 8 * 25.6e9 / 8, 2 * 8 * 38.4e9 / 8
# One device's share of the host's memory and of the disks in the node: 2 TB, and 8 drives of
# 3.84 TB (DGX A100 640GB and DGX H100 datasheets). What a drive reads or writes: assumed.
HOST_BYTES, FILE_BYTES, FILE_BANDWIDTH = 2e12 / 8, 30.7e12 / 8, 3e9


@checks_kinds
@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    peak_flops: float  # dense bf16, FLOP/s: the datasheet
    gemm_flops: float | None  # the best GEMM measured, FLOP/s; None: nobody did
    memory_bytes: float  # what the driver reports, a little below the name
    memory_bandwidth: float  # bytes/s: the datasheet
    sustained_flops: float | None = None  # large GEMMs of training, FLOP/s; None: nobody timed them
    cores: int | None = None  # multiprocessors, each with one 128 x 256 tile; None: no such grid
    peak_flops_fp8: float | None = None
    gemm_flops_fp8: float | None = None  # the best GEMM measured in fp8
    flash_2_flops: float | None = None  # FlashAttention 2 forward, where later ones are faster
    source: str = ""

    def __post_init__(self):
        for field in (
            "peak_flops",
            "gemm_flops",
            "memory_bytes",
            "memory_bandwidth",
            "cores",
            "sustained_flops",
            "peak_flops_fp8",
            "gemm_flops_fp8",
            "flash_2_flops",
        ):
            value = getattr(self, field)
            if value is not None and not (_is_number(value) and value > 0):
                raise ValueError(
                    f"{field}={value!r} of device {self.name!r} is not above 0: give "
                    "it in FLOP/s, bytes or bytes/s."
                )

    @property
    def gemm_ceiling(self) -> float:
        return self.gemm_flops or ASSUMED_GEMM_FRACTION * self.peak_flops

    @property
    def gemm_rate(self) -> float:
        """FLOP/s of a large GEMM in the middle of a long run: the roof of the time model."""
        return self.sustained_flops or ASSUMED_SUSTAINED_FRACTION * self.gemm_ceiling

    @property
    def gemm_rate_fp8(self) -> float:
        """The same in fp8: the ceiling, sustained as much as in bf16 (assumed)."""
        if self.peak_flops_fp8 is None:
            raise ValueError(f"device {self.name!r} has no peak_flops_fp8: give it, or fp8=False.")
        ceiling = self.gemm_flops_fp8 or ASSUMED_GEMM_FRACTION * self.peak_flops_fp8
        return ceiling * self.gemm_rate / self.gemm_ceiling

    @property
    def stream_bandwidth(self) -> float:
        return STREAM_FRACTION * self.memory_bandwidth

    def replace(self, **changes) -> Device:
        return dataclasses.replace(self, **changes)


@checks_kinds
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
    # Measured with all devices of as many nodes in one ring, 256 MB: (nodes, bus bandwidth in
    # bytes/s of an all-reduce, of an all-gather or reduce-scatter); one node first.
    by_nodes: tuple[tuple[int, float, float], ...] = ()
    # One device's share of the way to its host, and of the host's memory: bytes/s, as sold.
    host_bandwidth: float = PCIE_4
    host_memory_bandwidth: float = DDR4_HOST
    host_memory_bytes: float = HOST_BYTES
    file_bytes: float = FILE_BYTES  # of its node's disks; 0: there are none
    file_bandwidth: float = FILE_BANDWIDTH  # read or written, bytes/s
    dollars_per_hour: float | None = None  # of one device: yours to fill in, prices move
    source: str = ""

    def __post_init__(self):
        for field in (
            *("devices_per_node", "node_bandwidth", "network_bandwidth"),
            *("host_bandwidth", "host_memory_bandwidth", "host_memory_bytes", "file_bandwidth"),
        ):
            value = getattr(self, field)
            if not _is_number(value) or value <= 0:
                raise ValueError(
                    f"{field}={value!r} of {self.name!r} is not above 0: give "
                    f"{_UNITS.get(field, 'bytes/s')}."
                )
        for field in ("node_latency", "network_latency", "dollars_per_hour", "file_bytes"):
            value = getattr(self, field)
            if value is not None and (not _is_number(value) or value < 0):
                raise ValueError(
                    f"{field}={value!r} of {self.name!r} is negative or no number: give 0 or more."
                )

        counts = [row[0] for row in self.by_nodes]
        if counts and (counts != sorted(set(counts)) or counts[-1] < 2):
            raise ValueError(
                f"by_nodes of {self.name!r} has rows of {counts} nodes: give a row for each number "
                "of nodes, in order, and one above 1."
            )

    def node_link(self, op: str = "all_reduce") -> Link:
        """What `op` really gets inside a node."""
        return Link(self.node_latency, NODE_FRACTIONS[op] * self.node_bandwidth)

    def network_link(self, nodes: int = 2) -> Link:
        """What a device gets of the network; of a ring over that many nodes, if it was timed."""
        latency = self.step_seconds(nodes) if self.by_nodes else self.network_latency
        return Link(latency, NETWORK_FRACTION * self.network_bandwidth)

    def step_seconds(self, nodes: int) -> float:
        """What a step of a ring over `nodes` nodes was measured to take besides its bytes.

        An all-gather over n devices is a ring of n - 1 steps, and in each of them the ports between
        nodes begin and end a message.  On `h100-hf` a step loses 30 to 45 us so, whether 2 nodes
        take part or 64: its bandwidth falls as nodes join because the ring has more steps.
        """
        link, steps = self.node_link("all_gather"), []
        for count, _, rate in self._across():
            each = MEASURED_BYTES / (count * self.devices_per_node)
            steps.append((count, max(self.node_latency, each / rate - each / link.bandwidth)))
        return _between(steps, nodes)

    def tree_bandwidth(self, nodes: int) -> float:
        """Bus bandwidth that an all-reduce over all devices of `nodes` nodes was measured to get.

        Beyond a few nodes NCCL reduces along trees, in pieces of one size however many take part.
        """
        return _between([(count, rate) for count, rate, _ in self._across()], nodes)

    def _across(self) -> list[tuple[int, float, float]]:
        return [row for row in self.by_nodes if row[0] > 1]

    def host_seconds(self, num_bytes: float) -> float:
        """Bytes to the host or from it."""
        return num_bytes / (NODE_FRACTIONS["send"] * self.host_bandwidth)

    def host_adam_seconds(self, num_bytes: float) -> float:
        """Bytes that the optimizer's step passes over in the host's memory."""
        return num_bytes / (HOST_ADAM_FRACTION * self.host_memory_bandwidth)

    def links(self, nodes: int = 2) -> Hierarchy:
        """Both, as `calculators.costs` takes them."""
        return Hierarchy(
            self.devices_per_node, self.node_link("all_reduce"), self.network_link(nodes)
        )

    def replace(self, **changes) -> Hardware:
        """A copy with some fields changed; `device` may be given as a dict of its changes."""
        if isinstance(changes.get("device"), dict):
            changes["device"] = self.device.replace(**changes["device"])
        return dataclasses.replace(self, **changes)


_UNITS = {"devices_per_node": "a count", "host_memory_bytes": "bytes"}


def _between(points: list[tuple[int, float]], nodes: int) -> float:
    """A number that was measured on some numbers of nodes, straight in log2 between them."""
    if nodes <= points[0][0]:
        return points[0][1]
    for (n0, value0), (n1, value1) in zip(points, points[1:]):
        if nodes <= n1:
            return value0 + (value1 - value0) * math.log2(nodes / n0) / math.log2(n1 / n0)
    return points[-1][1]


def hardware(name: str | Hardware) -> Hardware:
    """The machine of that name; ValueError names the nearest ones when there is none.

    A Hardware is what it is.
    """
    if isinstance(name, Hardware):
        return name
    if isinstance(name, str) and name in HARDWARE:
        return HARDWARE[name]
    near = difflib.get_close_matches(str(name).lower(), HARDWARE, n=3, cutoff=0.3) or sorted(
        HARDWARE
    )
    raise ValueError(
        f"hardware={name!r} is not known: did you mean {', '.join(near)}? "
        "Any other machine is a Hardware(...) by hand."
    )


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


T, GB = 1e12, 1e9
GIB = 2**30
# Name, datasheet, best GEMM, memory, bandwidth, GEMMs of training, multiprocessors.
# A100 training GEMMs: 0.775 of the datasheet on a PCIe card whose best is 0.811 [simumax], that
# share of the SXM's best; the profiled weight gradients of Qi et al. 2023 table 9 are 238-251.
A100_40 = Device(
    "A100 SXM 40GB",
    312 * T,
    271.2 * T,
    39.4 * GIB,
    1.555 * T,
    259 * T,
    108,
    source="[sheet] [mamf] [simumax]",
)
A100_80 = Device(
    "A100 SXM 80GB",
    312 * T,
    271.2 * T,
    79.2 * GIB,
    2.039 * T,
    259 * T,
    108,
    source="[acc] [mamf] [simumax]",
)
# 0.70 of the datasheet, a population average rather than one machine's timing [simumax].
H100 = Device(
    "H100 SXM",
    989 * T,
    794.5 * T,
    79.6 * GIB,
    3.35 * T,
    692 * T,
    132,
    1979 * T,
    1402.6 * T,
    FLASH_2_HOPPER * 989 * T,
    source="[acc] [mamf] [simumax]",
)
H200 = Device(
    "H200 SXM",
    989 * T,
    794.5 * T,
    141 * GB,
    4.8 * T,
    692 * T,
    132,
    1979 * T,
    1453.4 * T,
    FLASH_2_HOPPER * 989 * T,
    source="[acc] [mamf] [simumax]",
)
# 0.49-0.51 of the datasheet for 4096 x 8192 x 57344 and the like, timed on a node [simumax].
B200 = Device(
    "B200 SXM",
    2250 * T,
    1745 * T,
    180 * GB,
    8.0 * T,
    1125 * T,
    148,
    4500 * T,
    3432.5 * T,
    source="[acc] [mamf] [simumax]",
)
MI300X = Device(
    "MI300X", 1300 * T, 668.4 * T, 192 * GB, 5.3 * T, peak_flops_fp8=2610 * T, source="[acc] [mamf]"
)
L40S = Device(
    "L40S", 362 * T, None, 48 * GB, 0.864 * T, peak_flops_fp8=733 * T, source="[acc] [sheet]"
)
V100 = Device("V100 SXM 32GB", 125 * T, None, 31.7 * GIB, 0.9 * T, cores=80, source="[sheet]")
TPU_V4 = Device("TPU v4", 275 * T, None, 32 * GIB, 1.2 * T, source="[acc] [scaling-book]")
TPU_V5P = Device("TPU v5p", 459 * T, None, 95 * GB, 2.76 * T, source="[acc] [scaling-book]")
TPU_V5E = Device("TPU v5e", 197 * T, None, 16 * GB, 0.82 * T, source="[acc] [scaling-book]")
# Two cores of a shared machine, float32 (there is no bf16 unit).
LAPTOP = Device(
    "2 CPU cores", 0.15 * T, 0.1 * T, 24 * GIB, 20 * GB, 0.08 * T, source="[here], rough"
)

NEW_HOST = {"host_bandwidth": PCIE_5, "host_memory_bandwidth": DDR5_HOST}

HARDWARE = {
    # 8 x 200 Gb/s InfiniBand a node (DGX A100; Selene, Narayanan et al. 2021 section 5).
    "a100-80": Hardware("a100-80", A100_80, 8, 300 * GB, 25 * GB, source="DGX A100 datasheet"),
    "a100-40": Hardware("a100-40", A100_40, 8, 300 * GB, 25 * GB, source="DGX A100 datasheet"),
    # 4 x 100 Gb/s Omni-Path a node (BigScience Workshop 2022 section 3.4).
    "jean-zay": Hardware(
        "jean-zay", A100_80, 8, 300 * GB, 6.25 * GB, source="BigScience Workshop 2022"
    ),
    # 8 x 400 Gb/s a node (DGX H100, DGX H200, DGX B200 datasheets).
    "h100": Hardware("h100", H100, 8, 450 * GB, 50 * GB, **NEW_HOST, source="DGX H100 datasheet"),
    "h200": Hardware("h200", H200, 8, 450 * GB, 50 * GB, **NEW_HOST, source="DGX H200 datasheet"),
    "b200": Hardware("b200", B200, 8, 900 * GB, 50 * GB, **NEW_HOST, source="DGX B200 datasheet"),
    "mi300x": Hardware("mi300x", MI300X, 8, 448 * GB, 50 * GB, source="[acc]"),
    # PCIe 4 x16 and one 100 Gb/s port for four cards.
    "l40s": Hardware("l40s", L40S, 4, 32 * GB, 3.1 * GB, source="[sheet]"),
    # 16 a node, 1.5 TB and 30 TB (DGX-2 datasheet: 8 drives of 3.84 TB), 8 x 100 Gb/s InfiniBand;
    # NVMe of the whole node as ZeRO-Infinity states it, 28 GB/s (Rajbhandari et al. 2021).
    "dgx-2": Hardware(
        "dgx-2",
        V100,
        16,
        150 * GB,
        6.25 * GB,
        host_bandwidth=16e9,
        host_memory_bandwidth=2 * 6 * 21.3e9 / 16,
        host_memory_bytes=1.5e12 / 16,
        file_bytes=30.7e12 / 16,
        file_bandwidth=28e9 / 16,
        source="DGX-2 datasheet",
    ),
    # A torus has no nodes: the 'node' is a cube or plane whose links are all direct, 2 links an
    # axis; between slices the data centre's network (scaling-book, "TPU networking").
    "tpu-v4": Hardware("tpu-v4", TPU_V4, 64, 2 * 45 * GB, 6.25 * GB, source="[scaling-book]"),
    "tpu-v5p": Hardware("tpu-v5p", TPU_V5P, 64, 2 * 90 * GB, 6.25 * GB, source="[scaling-book]"),
    "tpu-v5e": Hardware("tpu-v5e", TPU_V5E, 16, 2 * 45 * GB, 3.1 * GB, source="[scaling-book]"),
    "laptop": Hardware("laptop", LAPTOP, 4, 2 * GB, 0.1 * GB, 1e-4, 1e-3, source="[here], rough"),
    # The cluster of the playbook's sweep, with its timings of collectives [hf].
    "h100-hf": Hardware(
        "h100-hf",
        H100,
        8,
        450 * GB,
        50 * GB,
        **NEW_HOST,
        source="[hf]",
        by_nodes=(
            (1, 436.0 * GB, 249.8 * GB),
            (2, 361.8 * GB, 184.6 * GB),
            (4, 160.1 * GB, 119.0 * GB),
            (8, 99.6 * GB, 69.0 * GB),
            (16, 84.7 * GB, 55.0 * GB),
            (32, 64.9 * GB, 28.0 * GB),
            (64, 32.9 * GB, 11.0 * GB),
        ),
    ),
}
