"""What training frameworks add to the mathematics: every assumption about them, in one place.

A Framework is data that you may edit: `framework("fsdp").replace(offload_optimizer=True)`.

Sources: [ZeRO] Rajbhandari et al. 2020; [K22] Korthikanti et al. 2022; [N21] Narayanan et al. 2021;
[code] the framework's own source.  chosen.py lists what was chosen with published sweeps in view.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from ..config import Layout, ModelConfig
from ..fields import checks_kinds, whole


@checks_kinds(infinite=("bucket",))
@dataclass(frozen=True)
class Framework:
    """What a training framework does beyond the mathematics: the assumptions.

    The bytes per parameter are in the order of ZeRO's 2 + 2 + K.  `loss_bytes` are the bytes per
    logit alive at the loss.  `outside` and `fragmentation` are what the device holds beyond the
    allocator's own count: the CUDA context and NCCL's buffers, and blocks too small to reuse.
    """

    name: str
    parameter_bytes: float = 2
    gradient_bytes: float = 2
    optimizer_bytes: float = 12  # K: fp32 copy and Adam's two moments
    # Of the shard that ZeRO-1 and 2 step in addition to the whole, on the device; often part of K.
    shard_bytes: float = 0
    activation_bytes: float = 2
    mask_bytes: float = 1  # per element of dropout; torch on a CPU saves a full-width factor
    flash_attention: bool = True
    # Fused elementwise kernels: gate, up and their product are saved, but not silu(gate), and
    # memory is read and written half as often.
    fused_activation: bool = True
    keeps_gathered: bool = False  # saves what sequence parallelism gathered for a matrix
    # What `recompute="selective"` recomputes: "scores" (Megatron), or "operators": all except the
    # attention and every second matrix (torchtitan).
    selective: str = "scores"
    loss_bytes: float = 4
    # The same, instead of loss_bytes, if tp shards the vocabulary; 0: as many.
    loss_bytes_cut: float = 0
    weight_gradients: str = "none"  # in addition to gradients: "none", "largest", "one_layer"
    # This library's runs: moments.py goes through its step, so the loss's bytes, prefetch and
    # backward are the engine's own.
    own_runs: bool = False
    prefetch: int = 1  # layers whose parameters ZeRO-3 gathers ahead
    plain_modules: bool = False  # torch's, unfused: see activations._plain_modules
    backward: bool = True  # count one layer's backward at the peak
    outside: float = 0.0  # bytes
    fragmentation: float = 0.0  # share of the allocator's count
    offload_optimizer: bool = False  # to the host
    offload_activations: bool = False  # what full recomputation saves goes to the host
    offload_gradients: bool = False  # to where they are stepped, one layer at a time
    offload_parameters: bool = False  # on the device only while their layer computes
    # The optimizer's states (and parameters, if they are offloaded) are in files, not on the host.
    offload_to_files: bool = False
    # For offloading: gradients leave during backward, and in the step, states, arithmetic and
    # parameters overlap. Without this, one comes after the other.
    offload_overlaps: bool = False
    offload_delayed: bool = False  # the host steps during the next step: one update late
    # What the time depends on.
    # fp8 for the layers' matrices, as in Transformer Engine and torchao, and for what sequence
    # parallelism gathers for them; for nothing else.
    fp8: bool = False
    fused_weight_gradients: bool = True  # summed inside the GEMM, not in a separate pass
    # With flash_attention only: 0.5 for the first FlashAttention (Dao 2023: the second is twice as
    # fast); and whether it is the second, on a chip that has faster ones.
    flash_speed: float = 1.0
    flash_2: bool = False
    loss_traffic: float = 24  # bytes moved per logit, forward and backward
    reduce_bytes: float = 4  # per gradient on the wire
    # Bytes moved around the optimizer's own pass, per number stepped: gradients are read for
    # their norm (4) and clipped (8), the new parameter is copied into 16 bits (6).
    around_step: float = 18
    # Bytes per parameter that ZeRO's units gather, and per gradient that they scatter, if these are
    # rounded for sending: ZeRO++.
    unit_gather_bytes: float = 0
    unit_scatter_bytes: float = 0
    unit_scatter_by_nodes: bool = False  # in two hops, inside each node first
    # Data-parallel traffic overlaps with computation: gradients (and under ZeRO-3 parameters) with
    # the backward; what ZeRO-1 and 2 have stepped, with the next forward.
    overlaps_gradients: bool = True
    overlaps_parameters: bool = False
    # In an interleaved pipeline a rank computes while its messages travel. (Megatron-LM does so
    # unless --no-overlap-p2p-communication is given: arguments.py [code], read in November 2026.)
    overlaps_messages: bool = True
    # In the backward of a column-cut matrix its input is gathered again (unless it was saved)
    # during the GEMM for the input's gradient; that gradient is reduced during the weights' GEMM.
    overlaps_tensor_backward: bool = False
    # Under sequence parallelism a tensor's pieces are gathered and reduced during its matrix: async
    # TP (torchtitan), userbuffers (Transformer Engine). An option of both, off by default. It hides
    # everything that overlaps_tensor_backward hides.
    overlaps_tensor: bool = False
    # Gradients that travel in one message: a bucket is closed once it has this many, and no tensor
    # is split (DDP, Megatron's buffers). inf: all at once.
    bucket: float = math.inf
    bucket_a_rank: float = 0.0  # and at least this many per replica
    # Under ZeRO-3 in a pipeline parameters stay whole from the first micro-batch's forward to the
    # last one's backward, and gradients are accumulated until then.
    whole_in_pipeline: bool = False
    copies_units: bool = False  # ZeRO-2, 3: a unit goes through a flat buffer, in and out
    # Python and launches for one layer's forward; backward is twice that.  Read off where sweeps
    # stop getting faster as the work shrinks: 4.4-4.6 ms per layer (nanotron on H100 hosts, no
    # recomputation), 3.5 ms (Megatron-DeepSpeed on A100 hosts, fused kernels, recomputation: four
    # such parts).
    host_seconds: float = 1.5e-3
    # Megatron's fused softmax takes this many heads at a time (fused_softmax.py [code]). If the
    # b N/t heads of a micro-batch are not a multiple of it, five kernels replace one.
    softmax_heads: int = 1
    source: str = ""

    def __post_init__(self):
        for field in (
            "parameter_bytes",
            "gradient_bytes",
            "optimizer_bytes",
            "shard_bytes",
            "activation_bytes",
            "mask_bytes",
            "loss_bytes",
            "loss_bytes_cut",
            "prefetch",
            "outside",
            "fragmentation",
            "unit_gather_bytes",
            "unit_scatter_bytes",
            "flash_speed",
            "loss_traffic",
            "reduce_bytes",
            "around_step",
            "host_seconds",
            "bucket",
            "bucket_a_rank",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise ValueError(
                    f"{field}={value!r} of framework {self.name!r} is negative or no "
                    "number: give 0 or more."
                )
        whole(f"softmax_heads of framework {self.name!r}", self.softmax_heads)
        if not self.offload_optimizer and (
            self.offload_gradients or self.offload_parameters or self.offload_to_files
        ):
            raise ValueError(
                f"framework {self.name!r} offloads something, but offload_optimizer=False: the "
                "optimizer's states, which are the most and are used the least, go first."
            )
        if self.unit_scatter_by_nodes and not self.unit_scatter_bytes:
            raise ValueError(
                f"unit_scatter_by_nodes=True of framework {self.name!r} needs "
                "unit_scatter_bytes: two hops are for gradients that are sent as codes."
            )
        if self.weight_gradients not in ("none", "largest", "one_layer"):
            raise ValueError(
                f"weight_gradients={self.weight_gradients!r} is not known: give "
                "'none', 'largest' or 'one_layer'."
            )
        if self.selective not in ("scores", "operators"):
            raise ValueError(
                f"selective={self.selective!r} is not known: give 'scores' or 'operators'."
            )

    def check(self, config: ModelConfig, layout: Layout) -> None:
        """Raise ValueError for what this program does not run, beyond what `layout.check`
        raises."""
        if self.own_runs and layout.num_stages > config.num_layers:
            raise ValueError(
                f"pp*num_chunks={layout.num_stages} leaves stages of num_layers="
                f"{config.num_layers} without a layer, and this library's pipeline has one in "
                f"each: give at most {config.num_layers}."
            )

    def more_launches(self, config: ModelConfig, layout: Layout) -> float:
        """Return the host's seconds for the four kernels that an unfused softmax adds, forward or
        backward, in proportion to the LAUNCHES of a layer's forward."""
        heads = layout.micro_batch_size * config.num_heads // layout.tp
        if self.flash_attention or heads % self.softmax_heads == 0:
            return 0.0
        return 4 / LAUNCHES * self.host_seconds

    def in_every_micro_batch(self, layout: Layout) -> bool:
        """Return whether ZeRO-2's reduces and ZeRO-3's gathers happen in each micro-batch, or
        once."""
        once = self.whole_in_pipeline and layout.zero == 3 and layout.pp > 1
        return layout.zero >= 2 and not once

    def replace(self, **changes) -> Framework:
        return dataclasses.replace(self, **changes)


# Assumed, in round numbers: the CUDA context of a torch process with its kernels loaded (about
# 0.5 GiB) and NCCL's channel buffers for the few communicators of a 3D layout (about 1 GiB); and
# a tenth of the allocator's peak lost to blocks too small to reuse. The tenth was picked with
# nanotron's sweep and BLOOM's 59 GB in view, so neither is an independent test of it: with 0 the
# benchmark misses 16.7 % of nanotron's crashes instead of 13.2 %, and BLOOM comes out 16.7 % low
# instead of 8.7 %.
# For comparison, benchmarks/offload.py prints what offload/allocator.py loses in a replayed step.
CUDA_OUTSIDE = 1.5 * 2**30
# Kernels of a layer's forward in Megatron-LM (transformer.py, 2021 [code]): 2 norms, 4 matrices,
# 2 products with scores, softmax, its dropout, heads into rows, gelu, 2 residuals, 2 all-reduces.
LAUNCHES = 16
FRAGMENTATION = 0.10

FRAMEWORKS = {
    # The papers' own accounting and nothing else.
    "formula": Framework(
        "formula", flash_attention=False, backward=False, around_step=0, source="[ZeRO] [K22]"
    ),
    # fp16 gradients, accumulated in a separate pass, all-reduced after the last backward; softmax
    # and its fp32 logits saved by the vocab-parallel loss.
    "megatron-2021": Framework(
        "megatron-2021",
        flash_attention=False,
        loss_bytes=6,
        weight_gradients="largest",
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        fused_weight_gradients=False,
        reduce_bytes=2,
        around_step=32,  # optimizer.py: and made fp32 (6), unscaled and checked (8)
        overlaps_gradients=False,
        overlaps_messages=False,
        host_seconds=0.9e-3,
        softmax_heads=4,
        source="[N21], Megatron-LM 2021 [code]",
    ),
    # The same with the sum inside the weight gradient's GEMM, in fp32.
    "megatron-2022": Framework(
        "megatron-2022",
        gradient_bytes=4,
        flash_attention=False,
        loss_bytes=6,
        weight_gradients="largest",
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        around_step=26,  # and unscaled and checked
        overlaps_gradients=False,
        overlaps_messages=False,
        overlaps_tensor_backward=True,  # [K22] 4.2.2; layers.py, LinearWithGradAccumulation...
        host_seconds=0.9e-3,
        softmax_heads=4,
        source="[K22], Megatron-LM 2022 [code]",
    ),
    # Transformer Engine adds weight gradients into the fp32 buffer inside the GEMM, and gives
    # autograd a dummy for each distinct weight shape of a layer, which it keeps ([code]
    # get_dummy_wgrad); the fused loss turns bf16 logits into their gradient in place.
    "megatron-core": Framework(
        "megatron-core",
        gradient_bytes=4,
        loss_bytes=2,
        weight_gradients="one_layer",
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        # A usual choice, not the default: --overlap-param-gather, and --overlap-grad-reduce for
        # gradients, are off unless given (arguments.py [code]).
        overlaps_parameters=True,
        overlaps_tensor_backward=True,  # tensor_parallel/layers.py
        bucket=40e6,  # distributed_data_parallel.py
        bucket_a_rank=1e6,
        source="Megatron-Core with TE [code]",
    ),
    # DeepSpeed's BF16Optimizer keeps the bf16 gradients and their fp32 sums ([code]).
    "megatron-deepspeed": Framework(
        "megatron-deepspeed",
        gradient_bytes=6,
        flash_attention=False,
        loss_bytes=6,
        weight_gradients="largest",
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        fused_weight_gradients=False,
        overlaps_gradients=False,
        host_seconds=0.9e-3,
        softmax_heads=4,
        source="BigScience's Megatron-DeepSpeed [code]",
    ),
    # bf16 gradients and their fp32 sums (Ultra-Scale Playbook, "Memory for weights, gradients
    # and optimizer states"); a loss in eager torch: bf16 logits, their fp32 copy, the softmax and
    # its gradient, and silu(gate) saved; F.linear saves the gathered input ([code] functional.py).
    "nanotron": Framework(
        "nanotron",
        gradient_bytes=6,
        fused_activation=False,
        keeps_gathered=True,
        loss_bytes=14,
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        flash_2=True,  # flash_attn_varlen_func
        overlaps_tensor_backward=True,  # functional.py, _ColumnLinearAsyncCommunication
        fused_weight_gradients=False,  # gradient_accumulator.py: fp32_grad.add_(half_param.grad)
        bucket=25 * 2**20 / 2,  # 25 MiB of bf16, as DDP has it
        source="nanotron [code]",
    ),
    # FSDP2 with a bf16 policy: fp32 parameters and gradients are what is sharded.
    "fsdp": Framework(
        "fsdp",
        parameter_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        fused_activation=False,
        loss_bytes=10,
        weight_gradients="largest",
        outside=CUDA_OUTSIDE,
        fragmentation=FRAGMENTATION,
        reduce_bytes=2,
        around_step=12,  # its parameters are fp32
        flash_2=True,  # scaled_dot_product_attention
        overlaps_parameters=True,
        copies_units=True,  # _fsdp_collectives.py: split_with_sizes_copy, chunk_cat
        source="torch.distributed.fsdp.fully_shard [code]",
    ),
    # This course's own runs: everything in fp32; torch's attention kernel for CPUs.
    "course": Framework(
        "course",
        parameter_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        activation_bytes=4,
        mask_bytes=4,
        fused_activation=False,
        loss_bytes=12,
        own_runs=True,
        plain_modules=True,
        around_step=0,
        source="mini_dist/model/gpt.py and zero/",
    ),
}
# FSDP1 gathers right into a unit's flat parameter ([code] _flat_param.py).
FRAMEWORKS["fsdp1"] = FRAMEWORKS["fsdp"].replace(
    name="fsdp1",
    copies_units=False,
    source="torch.distributed.fsdp.FullyShardedDataParallel [code]",
)
# Of December 2024, with the defaults of its config_manager.py and parallelize_llama.py [code].
FRAMEWORKS["torchtitan"] = FRAMEWORKS["fsdp"].replace(
    name="torchtitan",
    reduce_bytes=4,  # training.mixed_precision_reduce
    keeps_gathered=True,  # by a DTensor's redistribute, once
    # train.py drops the logits before backward: what is left is log_softmax, its gradient and its
    # input's gradient, in fp32; loss_parallel makes one more.
    loss_bytes=12,
    loss_bytes_cut=16,
    selective="operators",  # activation_checkpoint.selective_ac_option = "op"
    whole_in_pipeline=True,
    source="torchtitan [code]",
)


def framework(name: str | Framework) -> Framework:
    if isinstance(name, Framework):
        return name
    if not isinstance(name, str) or name not in FRAMEWORKS:
        raise ValueError(
            f"framework={name!r} is not known: give one of "
            f"{', '.join(FRAMEWORKS)}, or a Framework(...)."
        )
    return FRAMEWORKS[name]
