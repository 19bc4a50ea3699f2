"""Devices: each datasheet's peaks beside the best that was ever measured on the device.

A Device is data that you may edit: `hardware("h100").replace(device={"memory_bytes": 40e9})`.

Sources.  [acc] stas00/ml-engineering, compute/accelerator (vendors' datasheets, collected);
[mamf] the same, "maximum achievable matmul FLOPS": the best GEMM found by search; [simumax]
MooreThreads/SimuMax, configs/system: single kernels and collectives timed on an A100-PCIe and a
B200 node; [scaling-book] jax-ml/scaling-book, TPUs; [sheet] the vendor's datasheet; [driver] what
nvidia-smi or PyTorch printed, in a public issue; [here] measured on this machine. [copy] The
vendor's document as public repositories and manuals repeat it: we compared copies in November 2026
and could not open the document itself.

Vendors like to print peaks for matrices of which half is zero. Every peak here is the dense one.
The constants of kernels come from timings of single kernels. Constants that were chosen with whole
runs in view are listed in chosen.py.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ..fields import checks_kinds

# Where nobody measured a GEMM ceiling: the median of [mamf]'s bf16 ratios, measured / datasheet
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


@checks_kinds
@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    # Dense bf16, FLOP/s: the datasheet. V100 and T4 have no bf16 units, so theirs is fp16: the
    # calculators ask for 16 bits only, and what fp16 needs besides, loss scaling, costs next to
    # nothing.
    peak_flops: float
    gemm_flops: float | None  # the best GEMM measured, FLOP/s; None: nobody did
    memory_bytes: float  # what the driver reports, a little below the name
    memory_bandwidth: float  # bytes/s: the datasheet
    sustained_flops: float | None = None  # large GEMMs of training, FLOP/s; None: nobody timed them
    cores: int | None = None  # multiprocessors, each with one 128 x 256 tile; None: no such grid
    peak_flops_fp8: float | None = None
    gemm_flops_fp8: float | None = None  # the best GEMM measured in fp8
    flash_2_flops: float | None = None  # FlashAttention 2 forward, where later ones are faster
    # Products in float32 without TF32: the datasheet. Without it, the simulation takes TF32's rate.
    peak_flops_fp32: float | None = None
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
            "peak_flops_fp32",
            "flash_2_flops",
        ):
            value = getattr(self, field)
            if value is not None and not (is_number(value) and value > 0):
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


def is_number(value) -> bool:
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
    peak_flops_fp32=19.5 * T,
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
    peak_flops_fp32=19.5 * T,
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
    peak_flops_fp32=67 * T,
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
    peak_flops_fp32=67 * T,
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
# We assume that it sustains the same share of its best GEMM as the B200.
GB200 = Device(
    "GB200",
    2500 * T,
    1822 * T,
    186 * GB,
    8.0 * T,
    1125 / 1745 * 1822 * T,
    peak_flops_fp8=5000 * T,
    gemm_flops_fp8=3615.6 * T,
    source="[acc] [mamf]",
)
# Export versions. A800 and H800 compute at the rates of the A100 and H100, over slower NVLink
# (NVIDIA's statement of November 2022 [copy]; DeepSeek-AI 2025, arXiv:2505.09343).
A800 = A100_80.replace(name="A800 SXM 80GB", source="as the A100: NVIDIA, November 2022 [copy]")
H800 = H100.replace(name="H800 SXM", source="as the H100: arXiv:2505.09343")
# We found no page of NVIDIA's for the H20. Several third-party tables of the HGX H20 agree on these
# figures, and so does huggingface.co/hardware/h20 (96 GB, 148 TFLOP/s).
H20 = Device(
    "H20 SXM",
    148 * T,
    None,
    96 * GB,
    4.0 * T,
    cores=78,
    peak_flops_fp8=296 * T,
    peak_flops_fp32=44 * T,
    source="[copy] HGX H20",
)
MI300X = Device(
    "MI300X",
    1300 * T,
    668.4 * T,
    192 * GB,
    5.3 * T,
    peak_flops_fp8=2610 * T,
    peak_flops_fp32=163.4 * T,
    source="[acc] [mamf]",
)
L40S = Device(
    "L40S",
    362 * T,
    None,
    48 * GB,
    0.864 * T,
    peak_flops_fp8=733 * T,
    peak_flops_fp32=91.6 * T,
    source="[acc] [sheet]",
)
# Its datasheet prints 242 (bf16) and 485 TFLOP/s (fp8) with sparsity. nvidia-smi reports 23,034 MiB
# here and 23,028 on the A10G (modal-labs/modal-client PR 2797).
L4 = Device(
    "L4",
    121 * T,
    None,
    22.5 * GIB,
    0.3 * T,
    peak_flops_fp8=242.5 * T,
    peak_flops_fp32=30.3 * T,
    source="[copy] [driver]",
)
# The card is made for AWS: its datasheet prints 70 TFLOP/s, or 140 with sparsity. An A10 has 125.
A10G = Device("A10G", 70 * T, None, 22.5 * GIB, 0.6 * T, cores=80, source="[copy] [driver]")
# These rates are for sums in fp32, which training needs. Sums in fp16 are twice as fast on GeForce
# cards. Copies of NVIDIA's Ada and RTX Blackwell white papers give the rates. PyTorch's "total
# capacity" is printed in ali-vilab/VGen issue 104 and Wan-Video/Wan2.1 issue 465.
RTX_4090 = Device(
    "RTX 4090",
    165.2 * T,
    None,
    23.64 * GIB,
    1.008 * T,
    cores=128,
    peak_flops_fp8=330.3 * T,
    peak_flops_fp32=82.6 * T,
    source="[copy] [driver]",
)
RTX_5090 = Device(
    "RTX 5090",
    209.5 * T,
    None,
    31.37 * GIB,
    1.792 * T,
    cores=170,
    peak_flops_fp8=419 * T,
    peak_flops_fp32=104.8 * T,
    source="[copy] [driver]",
)
# T4 and V100 compute in fp16. PyTorch sees 14.74 GiB on Colab's T4. Copies give 320 GB/s, and one
# says 300.
T4 = Device(
    "T4",
    65 * T,
    None,
    14.74 * GIB,
    0.32 * T,
    cores=40,
    peak_flops_fp32=8.1 * T,
    source="[copy] [driver]",
)
V100 = Device(
    "V100 SXM 32GB",
    125 * T,
    None,
    31.7 * GIB,
    0.9 * T,
    cores=80,
    peak_flops_fp32=15.7 * T,
    source="[sheet]",
)
TPU_V4 = Device("TPU v4", 275 * T, None, 32 * GIB, 1.2 * T, source="[acc] [scaling-book]")
TPU_V5P = Device("TPU v5p", 459 * T, None, 95 * GB, 2.76 * T, source="[acc] [scaling-book]")
TPU_V5E = Device("TPU v5e", 197 * T, None, 16 * GB, 0.82 * T, source="[acc] [scaling-book]")
# Google's page "TPU v6e" (read November 2026). It lists int8 at twice bf16, and no fp8.
TPU_V6E = Device("TPU v6e", 918 * T, None, 32 * GB, 1.638 * T, source="[sheet] [scaling-book]")
# The 910B3 of the Atlas 800T A2, fp16. Huawei's guide gives 376 TFLOP/s for the 910B2, and other
# 910Bs have less.
ASCEND_910B = Device(
    "Ascend 910B3", 313 * T, None, 64 * GB, 1.6 * T, source="[copy] Atlas 800T A2 user guide"
)
# Two cores of a shared machine, float32 (there is no bf16 unit).
LAPTOP = Device(
    "2 CPU cores",
    0.15 * T,
    0.1 * T,
    24 * GIB,
    20 * GB,
    0.08 * T,
    peak_flops_fp32=0.15 * T,
    source="[here], rough",
)
