"""Machines: the devices of devices.py in nodes, and the links between them.

Everything is data that you may edit: `hardware("h100").replace(devices_per_node=4)`.

Sources.  devices.py explains [acc], [simumax], [scaling-book], [sheet], [copy] and [here]; [hf]
Hugging Face's Ultra-Scale Playbook, 256 MB messages; [aws] EC2's instance types.

This file has the constants of links, which come from timings of single collectives. chosen.py lists
the constants that were chosen with whole runs in view.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass

from ..fields import checks_kinds
from .devices import (
    A10G,
    A100_40,
    A100_80,
    A800,
    ASCEND_910B,
    B200,
    GB,
    GB200,
    H20,
    H100,
    H200,
    H800,
    L4,
    L40S,
    LAPTOP,
    MI300X,
    RTX_4090,
    RTX_5090,
    T4,
    TPU_V4,
    TPU_V5E,
    TPU_V5P,
    TPU_V6E,
    V100,
    Device,
    is_number,
)
from .links import Hierarchy, Link

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
PCIE_3, PCIE_4, PCIE_5 = 16e9, 32e9, 64e9
DDR4_HOST, DDR5_HOST = 2 * 8 * 25.6e9 / 8, 2 * 8 * 38.4e9 / 8
# One device's share of the host's memory and of the disks in the node: 2 TB, and 8 drives of
# 3.84 TB (DGX A100 640GB and DGX H100 datasheets). What a drive reads or writes: assumed.
HOST_BYTES, FILE_BYTES, FILE_BANDWIDTH = 2e12 / 8, 30.7e12 / 8, 3e9


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
            if not is_number(value) or value <= 0:
                raise ValueError(
                    f"{field}={value!r} of {self.name!r} is not above 0: give "
                    f"{_UNITS.get(field, 'bytes/s')}."
                )
        for field in ("node_latency", "network_latency", "dollars_per_hour", "file_bytes"):
            value = getattr(self, field)
            if value is not None and (not is_number(value) or value < 0):
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


NEW_HOST = {"host_bandwidth": PCIE_5, "host_memory_bandwidth": DDR5_HOST}
WORKSTATION = {
    "host_memory_bytes": 64e9,
    "file_bytes": 0.5e12,
    "source": "arXiv:2512.15306; network, host and disk assumed",
}

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
    # One NVLink domain of 72, and a ConnectX-7 for each GPU (MLCommons inference 6.1, Crusoe's
    # GB200 system) at 400 Gb/s as in DGX H100. Two GPUs share a Grace CPU: 900 GB/s of NVLink-C2C
    # in both directions, 480 GB of LPDDR5X at 512 GB/s. Disks: as in DGX H100, assumed.
    "gb200": Hardware(
        "gb200",
        GB200,
        72,
        900 * GB,
        50 * GB,
        host_bandwidth=900e9 / 2 / 2,
        host_memory_bandwidth=512e9 / 2,
        host_memory_bytes=480e9 / 2,
        source="[acc] [copy] GB200 NVL72",
    ),
    # NVLink of 400 GB/s in both directions. Network and host: as in DGX A100, assumed.
    "a800": Hardware("a800", A800, 8, 200 * GB, 25 * GB, source="[copy] NVIDIA, November 2022"),
    # DeepSeek-AI 2025 (arXiv:2505.09343): NVLink cut from 900 to 400 GB/s in both directions, and
    # 8 x 400 Gb/s per node. Their V3 report measures 160 GB/s over NVLink. Host: as in DGX H100,
    # assumed.
    "h800": Hardware("h800", H800, 8, 200 * GB, 50 * GB, **NEW_HOST, source="arXiv:2505.09343"),
    # NVLink as the H100's; network and host: as in DGX H100, assumed.
    "h20": Hardware("h20", H20, 8, 450 * GB, 50 * GB, **NEW_HOST, source="[copy] HGX H20"),
    "mi300x": Hardware("mi300x", MI300X, 8, 448 * GB, 50 * GB, source="[acc]"),
    # PCIe 4 x16 and one 100 Gb/s port for four cards.
    "l40s": Hardware("l40s", L40S, 4, 32 * GB, 3.1 * GB, source="[sheet]"),
    # g4dn.12xlarge has 4 GPUs, 50 Gb/s, 192 GiB and 900 GB. (For Kaggle's two T4s, replace
    # devices_per_node by 2.) AWS publishes no bandwidth of the hosts' memory: we assume the share
    # of a DGX A100 here and in the next two machines.
    "t4": Hardware(
        "t4",
        T4,
        4,
        PCIE_3,
        6.25 * GB / 4,
        host_bandwidth=PCIE_3,
        host_memory_bytes=192 * 2**30 / 4,
        file_bytes=900e9 / 4,
        source="[aws]",
    ),
    # g6.48xlarge and g5.48xlarge have 8 GPUs, 100 Gb/s, 768 GiB, and disks of 7.52 and 7.6 TB.
    "l4": Hardware(
        "l4",
        L4,
        8,
        PCIE_4,
        12.5 * GB / 8,
        host_memory_bytes=768 * 2**30 / 8,
        file_bytes=7.52e12 / 8,
        source="[aws]",
    ),
    "a10g": Hardware(
        "a10g",
        A10G,
        8,
        PCIE_4,
        12.5 * GB / 8,
        host_memory_bytes=768 * 2**30 / 8,
        file_bytes=7.6e12 / 8,
        source="[aws]",
    ),
    # A workstation of four cards, as in LLMQ (arXiv:2512.15306). Assumed: full PCIe lanes for each
    # card, 10 Gb/s Ethernet, 64 GB of host memory and half a TB of disk for each card.
    "rtx-4090": Hardware("rtx-4090", RTX_4090, 4, PCIE_4, 1.25 * GB / 4, **WORKSTATION),
    "rtx-5090": Hardware(
        "rtx-5090", RTX_5090, 4, PCIE_5, 1.25 * GB / 4, **WORKSTATION | {"host_bandwidth": PCIE_5}
    ),
    # DGX-1: six NVLinks a GPU in a hybrid cube mesh, 4 x 100 Gb/s InfiniBand, 512 GB of DDR4-2133
    # on two sockets of four channels, four SSDs of 1.92 TB. (dgx-2, below, has 16 behind switches.)
    "v100": Hardware(
        "v100",
        V100,
        8,
        150 * GB,
        6.25 * GB,
        host_bandwidth=PCIE_3,
        host_memory_bandwidth=2 * 4 * 17.1e9 / 8,
        host_memory_bytes=512e9 / 8,
        file_bytes=4 * 1.92e12 / 8,
        file_bandwidth=1e9 / 2,  # SATA: assumed
        source="[copy] DGX-1 datasheet",
    ),
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
    # Google's page "TPU v6e" (November 2026): 8 chips and 1,536 GiB a host, PCIe 5.
    "tpu-v6e": Hardware(
        "tpu-v6e",
        TPU_V6E,
        16,
        2 * 90 * GB,
        12.5 * GB,
        host_bandwidth=32e9,
        host_memory_bytes=1536 * 2**30 / 8,
        source="[sheet] [scaling-book]",
    ),
    # 8 NPUs, each linked to each of the others (7 links of 56 GB/s, which we take to be both
    # directions together: assumed), a 200 Gb/s RoCE port for each, four sockets of 8 channels.
    "ascend-910b": Hardware(
        "ascend-910b",
        ASCEND_910B,
        8,
        7 * 56 * GB / 2,
        25 * GB,
        host_memory_bandwidth=4 * 8 * 25.6e9 / 8,
        source="[copy] Atlas 800T A2 user guide (Huawei, EDOC1100317202)",
    ),
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
