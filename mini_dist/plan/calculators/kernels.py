"""How long the parts of one layer take on one device: kernels by roofline, and communication.

Letters: B batch, S sequence, D model, F ffn, N heads, K kv heads, H head dim, V vocab, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from ..config import Layout, ModelConfig
from .activations import tokens_of_micro_batch
from .collective_time import collective_seconds, message_seconds, worst_place
from .devices import FLASH_BACKWARD, FLASH_FORWARD, GEMM_FILL, KERNEL_SECONDS, Device
from .flops import score_flops
from .frameworks import Framework
from .machines import SLOWED, Hardware
from .parameters import every_second, layer_weights


def gemm_seconds(device: Device, m: float, n: float, k: float, fp8: bool = False) -> float:
    """Time a GEMM [m, k] x [k, n] in bf16 (or from fp8 to bf16): the slower of arithmetic and
    memory. A GEMM without elements, of an expert that got no token, only costs its launch."""
    if not m * n * k:
        return KERNEL_SECONDS
    moved = (1 if fp8 else 2) * (m * k + k * n) + 2 * m * n
    computed = gemm_arithmetic_seconds(device, m, n, k, fp8)
    return max(computed, moved / device.stream_bandwidth) + KERNEL_SECONDS


def gemm_arithmetic_seconds(
    device: Device, m: float, n: float, k: float, fp8: bool = False, slower: float = 1.0
) -> float:
    """Time the arithmetic of a GEMM. slower: how many times as long as in 16 bits a product takes.

    It is done in waves of one 128 x 256 tile per multiprocessor: the last wave takes as long as a
    full one. Filling and draining a tile takes as long as GEMM_FILL of the inner dimension in 16
    bits, and no longer where the products are slower.
    """
    if not m * n * k:
        return 0.0
    rate = (device.gemm_rate_fp8 if fp8 else device.gemm_rate) * k / (slower * k + GEMM_FILL)
    if device.cores:  # lying or standing tiles, whichever are fewer; thin matrices have thin tiles
        tiles = min(
            math.ceil(rows / 128) * math.ceil(columns / 256) for rows, columns in ((m, n), (n, m))
        )
        waves = math.ceil(tiles / device.cores)
        padded = waves * device.cores * min(m, 128) * min(n, 256)
        rate *= min(1.0, m * n / padded)
    return 2 * m * n * k / rate


def stream_seconds(device: Device, num_bytes: float) -> float:
    """Time a kernel that reads and writes `num_bytes` and hardly computes."""
    return num_bytes / device.stream_bandwidth + KERNEL_SECONDS


def together(compute: float, traffic: float) -> float:
    """Time a computation that overlaps with messages: as long as the longer, and a bit more.

    Collectives are kernels as well: while one runs, the computation gets SLOWED less of the device.
    """
    return max(traffic, compute + SLOWED * traffic)


# The parts of a layer during which it waits for others.
COMMUNICATION = ("tp collectives", "cp exchange", "ep all-to-all", "zero traffic")


@dataclass
class LayerTime:
    """Seconds of one layer and one micro-batch, forward and backward separately."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, forward: float, backward: float) -> None:
        self.forward[name] = self.forward.get(name, 0.0) + forward
        self.backward[name] = self.backward.get(name, 0.0) + backward


class LayerPiece(NamedTuple):
    """A rank's part of a layer and of a micro-batch."""

    moe: bool  # whether the layer has experts
    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    tokens: float  # of a micro-batch, b S/cp
    world: int  # devices of the whole job

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout, moe: bool) -> LayerPiece:
        tokens = tokens_of_micro_batch(config, layout)
        cuts = (layout.tp, layout.cp, layout.ep, layout.etp, layout.sequence_parallel)
        return cls(moe, *cuts, tokens, layout.world_size)

    @property
    def whole(self) -> float:
        """Return the tokens of the activations that tp does not shard."""
        return self.tokens / (self.tp if self.sequence_parallel else 1)


@lru_cache(maxsize=4096)
def layer_time(
    config: ModelConfig, piece: LayerPiece, machine: Hardware, how: Framework
) -> LayerTime:
    """Time one layer without recompute, on one rank: what it computes and what it exchanges."""
    time = LayerTime()
    _add_matrices(time, config, piece, machine.device, how)
    _add_attention(time, config, piece, machine.device, how)
    _add_elementwise(time, config, piece, machine.device, how)
    _add_exchanges(time, config, piece, machine, how)
    return time


def _add_matrices(time, config, piece, device, how) -> None:
    """Backward multiplies twice: for the input's gradient and for the weights'."""
    for rows, k, n, copies, _ in matrices(config, piece):
        forward = gemm_seconds(device, rows, n, k, how.fp8)
        backward = gemm_seconds(device, rows, k, n, how.fp8)
        backward += gemm_seconds(device, k, n, rows, how.fp8)
        if how.fp8:  # each operand read in bf16, written in fp8, and transposed for backward
            forward += stream_seconds(device, 4 * (rows * k + k * n))
            backward += stream_seconds(device, 4 * rows * n)
        if not how.fused_weight_gradients:  # read the new and the old sum, write the sum
            backward += stream_seconds(device, 3 * how.reduce_bytes * k * n)
        time.add("matrices", copies * forward, copies * backward)


def _add_attention(time, config, piece, device, how) -> None:
    S, e, tp, tokens = config.seq_len, how.activation_bytes, piece.tp, piece.tokens
    flops = tokens / S * score_flops(config, S) / tp  # both products, all S scores a token
    if how.flash_attention:  # computes the causal half, and everything once more in backward
        rate = how.flash_speed * device.gemm_rate
        if how.flash_2 and device.flash_2_flops:
            rate = min(rate, how.flash_speed * device.flash_2_flops / FLASH_FORWARD)
        time.add(
            "attention",
            flops / 2 / (FLASH_FORWARD * rate) + KERNEL_SECONDS,
            2.5 * flops / 2 / (FLASH_BACKWARD * rate) + KERNEL_SECONDS,
        )
        return
    # Product, softmax, dropout, product: each reads and writes all scores.
    once = e * tokens * S * config.num_heads / tp / device.stream_bandwidth
    softmax, back = 2 * once, 3 * once
    if round(tokens * piece.cp / S * config.num_heads / tp) % how.softmax_heads:
        # Made fp32, scaled, masked, the softmax, made 16 bits: bytes a score read and written.
        softmax, back = 36 / e * once + 4 * KERNEL_SECONDS, 40 / e * once + 4 * KERNEL_SECONDS
    dropout = (2 + 1 / e) * once if config.dropout else 0.0  # in, out, and a mask of one byte
    time.add(
        "attention",
        max(flops / device.gemm_rate, 2 * once) + softmax + dropout + 3 * KERNEL_SECONDS,
        max(2 * flops / device.gemm_rate, 5 * once) + back + dropout + 5 * KERNEL_SECONDS,
    )


def _add_elementwise(time, config, piece, device, how) -> None:
    """Passes over memory, in tensors read and written: [whole, D], [tokens, F/t or N H/t]."""
    e, moe, tp, tokens, whole = how.activation_bytes, piece.moe, piece.tp, piece.tokens, piece.whole
    mask = 1 / e if config.dropout else 0
    model, heads = (
        e * config.d_model * whole,
        e * config.num_heads * (config.head_dim + config.rope_head_dim) / tp * tokens,
    )
    d_ffn = config.d_ffn if not moe else config.d_expert * config.top_k + config.d_shared
    hidden = e * tokens * d_ffn / tp
    gated = config.activation == "swiglu"
    forward = {
        "two norms": 2 * 2 * model,
        "two residuals": 2 * (3 + mask) * model,
        "activation": (3 if gated else 2) * hidden,
        "heads into rows": 2 * heads,
    }
    backward = {
        "two norms and residuals": 2 * 6 * model,
        "activation": (5 if gated else 3) * hidden,
        "dropout": 2 * (2 + mask) * model if config.dropout else 0,
    }
    if config.positions == "rotary":  # queries and keys turned, and turned back
        forward["rotary"] = backward["rotary"] = (
            2 * heads * (1 + config.num_kv_heads / config.num_heads)
        )
    if moe:  # token copies sorted by expert, and back with their weights
        forward["sorting"] = backward["sorting"] = 2 * 4 * config.top_k * model
    time.add("elementwise", _passes(device, how, forward), _passes(device, how, backward))


def _passes(device, how, moved: dict[str, float]) -> float:
    """Time the passes. Unfused, about every second kernel reads what the one before wrote."""
    again = 1 if how.fused_activation else 2
    kernels = sum(
        2 if name.startswith("two") or name == "sorting" else 1
        for name, num_bytes in moved.items()
        if num_bytes
    )
    return again * (sum(moved.values()) / device.stream_bandwidth + kernels * KERNEL_SECONDS)


def _add_exchanges(time, config, piece, machine, how) -> None:
    moe, tp, cp, ep, etp, sequence_parallel, tokens, world = piece
    e = how.activation_bytes
    if tp > 1:  # once for the attention, once for the ffn, each way
        gathered = 1 if how.fp8 else e  # what a matrix multiplies in fp8 comes in fp8
        op = "reduce_scatter" if sequence_parallel else "all_reduce"
        gather = reduce = 0.0
        for share, ranks in _regions(config, piece):
            size = share * config.d_model * tokens
            gather += collective_seconds(machine, "all_gather", gathered * size, ranks, 1, world)
            reduce += collective_seconds(machine, op, e * size, ranks, 1, world)
        each = gather + reduce if sequence_parallel else reduce
        if how.overlaps_tensor and sequence_parallel:
            both = (
                _in_pieces(ways["matrices"], each, tp) for ways in (time.forward, time.backward)
            )
            time.add("tp collectives", *both)
        elif how.overlaps_tensor_backward:
            inputs, weights = _column_backward(config, piece, machine.device, how)
            waits = together(weights, reduce) - weights
            if sequence_parallel:
                again = 0.0 if how.keeps_gathered else gather
                waits += gather + together(inputs, again) - inputs
            time.add("tp collectives", each, waits)
        else:
            again = gather if sequence_parallel and not how.keeps_gathered else 0.0
            time.add("tp collectives", each, each + again)
    if cp > 1:  # keys and values go round behind the attention to the block that is here
        kv = 2 * e * config.num_kv_heads * config.head_dim / tp * tokens
        # all hops of a round last as long as the slowest: one between nodes, if there is any
        leaves = worst_place(cp, tp, machine.devices_per_node, world).nodes > 1
        ring = (cp - 1) * message_seconds(machine, kv, leaves)
        forward, backward = time.forward["attention"], time.backward["attention"]
        time.add(
            "cp exchange",
            together(forward, ring) - forward,
            together(backward, 2 * ring) - backward,
        )
    if moe and ep > 1:  # dispatch and combine, each way
        size = e * config.top_k * config.d_model * piece.whole
        pair = 2 * collective_seconds(machine, "all_to_all", size, ep, etp, world)
        time.add("ep all-to-all", pair, pair)


def _regions(config, piece) -> list[tuple[float, int]]:
    """(share of a micro-batch's tokens, ranks) of each region of a layer that these ranks cut."""
    regions = [(1.0, piece.tp)] * 2
    if piece.moe and piece.etp < piece.tp:
        if not config.num_shared_experts:
            del regions[1]
        if piece.etp > 1:  # the rows of etp ranks for their experts, a tp-th of the tokens each
            regions.append((piece.etp / piece.tp, piece.etp))
    return regions


def _column_backward(config, piece, device, how) -> tuple[float, float]:
    """Time the GEMMs that overlap with communication of column-cut matrices in backward: for the
    input's gradient, while the input is gathered again, and for the weights', while it is
    reduced."""
    inputs = weights = 0.0
    for shape in matrices(config, piece):
        if shape.column:
            inputs += shape.copies * gemm_seconds(device, shape.rows, shape.k, shape.n, how.fp8)
            weights += shape.copies * gemm_seconds(device, shape.k, shape.n, shape.rows, how.fp8)
    return inputs, weights


def _in_pieces(matrices: float, traffic: float, tp: int) -> float:
    """Return what is left of messages that travel in tp pieces, each during the previous one's
    matrix (Wang et al. 2023, "Overlap communication with dependent computation via
    decomposition")."""
    behind = traffic * (tp - 1) / tp
    return traffic / tp + together(matrices, behind) - matrices


class Gemm(NamedTuple):
    """A layer's matrix, [rows, k] x [k, n], and how many of them; `column`: tp cuts its columns."""

    rows: float
    k: float
    n: float
    copies: float
    column: bool


@lru_cache(maxsize=4096)
def matrices(config: ModelConfig, piece: LayerPiece) -> tuple[Gemm, ...]:
    """Each GEMM of a layer; q, k, v and gate, up are one each."""
    shapes: dict[tuple, Gemm] = {}
    for weight in layer_weights(config, piece.moe):
        if not weight.is_matmul:
            continue
        shape = _gemm(config, piece, weight)
        joined = {"k": "q", "v": "q", "up": "gate" if config.activation == "swiglu" else "up"}
        key = (weight.kind, joined.get(weight.name, weight.name))
        if key in shapes:
            shapes[key] = shapes[key]._replace(n=shapes[key].n + shape.n)
        else:
            shapes[key] = shape
    return tuple(shapes.values())


def _gemm(config, piece, weight) -> Gemm:
    """Return this rank's part of the product with one weight."""
    k, n = weight.shape
    cut = piece.etp if weight.experts > 1 else piece.tp
    if weight.cut == "row":
        k /= cut
    elif weight.cut == "column":
        n /= cut
    elif weight.cut == "kv":
        n /= min(piece.tp, config.num_kv_heads)
    rows, copies = piece.tokens, 1.0
    if weight.experts > 1:  # balanced: the token copies spread evenly over the local experts
        copies = weight.experts / piece.ep
        rows = piece.tokens * weight.visits / copies * piece.etp / piece.tp
    return Gemm(rows, k, n, copies, cut > 1 and weight.cut in ("column", "kv"))


def every_second_seconds(
    config: ModelConfig, piece: LayerPiece, machine: Hardware, how: Framework
) -> float:
    """Forward of every second matrix, and of all that is no matrix and no attention, once more."""
    time = layer_time(config, piece, machine, how)
    seconds = time.forward["elementwise"]
    for weight in every_second(config, piece.moe):
        rows, k, n, copies, _ = _gemm(config, piece, weight)
        seconds += copies * gemm_seconds(machine.device, rows, n, k, how.fp8)
    if piece.tp > 1 and piece.sequence_parallel:  # what was reduced is kept
        seconds += time.forward["tp collectives"] / 2
    return seconds


def head_seconds(
    config: ModelConfig, piece: LayerPiece, device: Device, how: Framework
) -> tuple[float, float]:
    """The head and the loss on one micro-batch, forward and backward."""
    tokens, D, V = piece.tokens, config.d_model, config.vocab_size / piece.tp
    loss = stream_seconds(device, how.loss_traffic / 2 * tokens * V)
    return (
        gemm_seconds(device, tokens, V, D) + loss,
        gemm_seconds(device, tokens, D, V) + gemm_seconds(device, V, D, tokens) + loss,
    )
