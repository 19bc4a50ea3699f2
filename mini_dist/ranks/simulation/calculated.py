"""A machine that is not here: its kernels by roofline, its links as stated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mini_dist.plan.calculators import Hardware
from mini_dist.plan.calculators.collective_time import collective_seconds
from mini_dist.plan.calculators.devices import FLASH_BACKWARD, FLASH_FORWARD, KERNEL_SECONDS
from mini_dist.plan.calculators.kernels import gemm_arithmetic_seconds
from mini_dist.plan.calculators.links import Link

from ..ledger.counting import Host, Kernel

TF32 = 2  # times as long as bf16 (A100: 156 of 312 TFLOP/s; H100: 494.5 of 989)

NATIVE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # others: as one message


@dataclass
class CalculatedMachine:
    """A machine for the replay: how long a kernel takes, and which link joins two ranks.

    wider: as if every side of every matrix were that many times longer: bytes grow with its
    square, FLOPs with its cube. So a small run shows what a large model of that program would do.
    slowed: how much longer kernels take beside a collective, as a share of its time (SLOWED).
    launch_seconds: what the host takes for each kernel; it runs ahead and never waits for one.
    stragglers: rank -> how many times as long its kernels take. slow_links: rank -> how many times
    as long what its node sends to other nodes, or gets from them, takes; a collective goes on at
    the pace of its slowest link.
    """

    machine: Hardware
    wider: float = 1.0
    slowed: float = 0.0
    launch_seconds: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self):
        size = self.machine.devices_per_node
        self.slow_nodes = {rank // size: factor for rank, factor in self.slow_links.items()}

    @property
    def peak_flops(self) -> float:
        return self.machine.device.peak_flops

    def kernel_seconds(self, kernel: Kernel) -> float:
        device, w = self.machine.device, self.wider
        nbytes, flops = w**2 * kernel.nbytes, w**3 * kernel.flops
        slower, moved = self.slower(kernel.arithmetic), nbytes / device.stream_bandwidth
        if kernel.kind == "product" and kernel.shape:
            batch, m, n, k = kernel.shape
            one = gemm_arithmetic_seconds(device, w * m, w * n, w * k, slower=slower)
            return max(batch * one, moved) + KERNEL_SECONDS
        if kernel.kind == "attention":
            speed = FLASH_BACKWARD if kernel.name.endswith("backward") else FLASH_FORWARD
            computed = flops / 2 if kernel.causal else flops
            return max(slower * computed / (speed * device.gemm_rate), moved) + KERNEL_SECONDS
        # On a GPU torch's optimizers update all tensors in a few kernels ("foreach").
        start = 0.0 if kernel.phase == "step" else KERNEL_SECONDS
        return max(slower * flops / device.gemm_rate, moved) + start

    def slower(self, arithmetic: str) -> float:
        """How many times as long as in 16 bits a product takes."""
        device = self.machine.device
        if arithmetic == "fp32" and device.peak_flops_fp32:
            return device.peak_flops / device.peak_flops_fp32
        return 1 if arithmetic == "16 bits" else TF32

    def host_seconds(self, host: Host) -> float:
        return 0.0

    def busy_seconds(self, op: str, nbytes: float) -> float:
        return 0.0  # network cards carry messages, and the devices compute

    def link(self, source: int, target: int) -> Link:
        size = self.machine.devices_per_node
        if source // size == target // size:
            return self.machine.node_link("send")
        return self.between_nodes((source, target)).network_link()

    def between_nodes(self, ranks: tuple[int, ...]) -> Hardware:
        """The machine as these ranks see its network: that of the slowest of their nodes."""
        if not self.slow_nodes:
            return self.machine
        nodes = {rank // self.machine.devices_per_node for rank in ranks}
        factor = max(self.slow_nodes.get(node, 1.0) for node in nodes)
        return self.machine.replace(
            network_bandwidth=self.machine.network_bandwidth / factor,
            by_nodes=tuple(
                (count, *(rate / factor if count > 1 else rate for rate in rates))
                for count, *rates in self.machine.by_nodes
            ),
        )

    def message_seconds(self, nbytes: int, source: int, target: int) -> float:
        return self.link(source, target).seconds(self.wider**2 * nbytes)

    def collective_seconds(self, op: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        """nbytes: of the whole tensor, as calculators.costs counts."""
        nbytes *= self.wider**2
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if op in NATIVE:
            return collective_seconds(self.between_nodes(ranks), op, nbytes, len(ranks), stride)
        far = max(ranks, key=lambda rank: rank // self.machine.devices_per_node)
        rounds = math.ceil(math.log2(len(ranks))) if len(ranks) > 1 else 0
        return self.link(ranks[0], far).seconds(nbytes if op != "barrier" else 0, rounds)
