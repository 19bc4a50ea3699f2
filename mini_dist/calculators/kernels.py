"""How long the parts of one layer last on one device: kernels by roofline, collectives as rings.

Letters: B batch, S sequence, D model, F ffn, N heads, K kv heads, H head dim, V vocab, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from ..config import Layout, ModelConfig
from .flops import score_flops
from .frameworks import Framework
from .links import Link
from .machines import (
    COLLECTIVE_SECONDS,
    FLASH_BACKWARD,
    FLASH_FORWARD,
    GEMM_FILL,
    KERNEL_SECONDS,
    Device,
    Hardware,
)
from .parameters import layer_weights


def gemm_seconds(device: Device, m: float, n: float, k: float) -> float:
    """A bf16 GEMM [m, k] x [k, n]: the slower of arithmetic and memory.

    The arithmetic is done in waves of one 128 x 256 tile a multiprocessor: the last wave is as
    long as a full one.  Filling and draining costs GEMM_FILL of the inner dimension.
    """
    rate = device.gemm_rate * k / (k + GEMM_FILL)
    if device.cores:  # lying or standing tiles, whichever are fewer; thin matrices have thin tiles
        tiles = min(
            math.ceil(rows / 128) * math.ceil(columns / 256) for rows, columns in ((m, n), (n, m))
        )
        waves = math.ceil(tiles / device.cores)
        padded = waves * device.cores * min(m, 128) * min(n, 256)
        rate *= min(1.0, m * n / padded)
    moved = 2 * (m * k + k * n + m * n)
    return max(2 * m * n * k / rate, moved / device.stream_bandwidth) + KERNEL_SECONDS


def stream_seconds(device: Device, num_bytes: float) -> float:
    """A kernel that reads and writes `num_bytes` and hardly computes."""
    return num_bytes / device.stream_bandwidth + KERNEL_SECONDS


def collective_seconds(
    machine: Hardware, op: str, num_bytes: float, size: int, stride: int = 1
) -> float:
    """A ring over `size` devices that stand `stride` apart in rank.

    NCCL runs as many rings as there are ways out of a node: a group with k members in each node
    gets k network ports, until the links inside the node are the narrower. An all-to-all is no
    ring: what a device sends to other nodes is its own, and leaves by its own port.
    """
    if size == 1 or not num_bytes:
        return 0.0
    inside = max(1, min(size, machine.devices_per_node // stride))
    nodes = math.ceil(size / inside)
    link = machine.node_link(op)
    bandwidth, latency = link.bandwidth, link.latency
    if nodes > 1:
        network = machine.network_link(nodes)
        if op == "all_to_all":  # all at once, and the links inside work beside the ports
            inner = link.seconds((inside - 1) / size * num_bytes)
            outer = network.seconds((size - inside) / size * num_bytes)
            return COLLECTIVE_SECONDS + max(inner, outer)
        bandwidth = min(bandwidth, inside * network.bandwidth) if inside > 1 else network.bandwidth
        latency += (nodes - 1) / (size - 1) * network.latency  # of the mean step round the ring
    steps = (size - 1) * (2 if op == "all_reduce" else 1)
    return COLLECTIVE_SECONDS + Link(latency, bandwidth).seconds(num_bytes / size, rounds=steps)


# The parts of a layer during which it waits for others.
COMMUNICATION = ("tp collectives", "cp exchange", "ep all-to-all", "zero traffic")


@dataclass
class LayerTime:
    """Seconds of one layer and one micro-batch, forward and backward apart."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, forward: float, backward: float) -> None:
        self.forward[name] = self.forward.get(name, 0.0) + forward
        self.backward[name] = self.backward.get(name, 0.0) + backward


@lru_cache(maxsize=4096)
def layer_time(
    config: ModelConfig,
    machine: Hardware,
    how: Framework,
    moe: bool,
    tp: int,
    cp: int,
    ep: int,
    micro_batch_size: int,
    sequence_parallel: bool,
) -> LayerTime:
    """One layer without recompute, on one rank: what it computes and what it exchanges."""
    tokens = micro_batch_size * config.seq_len / cp
    whole = tokens / (tp if sequence_parallel else 1)  # rows of what tp does not cut
    time = LayerTime()
    _add_matrices(time, config, machine.device, how, moe, tp, ep, tokens)
    _add_attention(time, config, machine.device, how, tp, cp, tokens)
    _add_elementwise(time, config, machine.device, how, moe, tp, tokens, whole)
    _add_exchanges(time, config, machine, how, moe, (tp, cp, ep), sequence_parallel, tokens, whole)
    return time


def _add_matrices(time, config, device, how, moe, tp, ep, tokens) -> None:
    """Backward multiplies twice: for the input's gradient and for the weights'."""
    for rows, k, n, copies in _matrices(config, moe, tp, ep, tokens):
        forward = gemm_seconds(device, rows, n, k)
        backward = gemm_seconds(device, rows, k, n) + gemm_seconds(device, k, n, rows)
        if not how.fused_weight_gradients:  # read the new and the old sum, write the sum
            backward += stream_seconds(device, 3 * how.reduce_bytes * k * n)
        time.add("matrices", copies * forward, copies * backward)


def _add_attention(time, config, device, how, tp, cp, tokens) -> None:
    S, e = config.seq_len, how.activation_bytes
    flops = tokens / S * score_flops(config, S) / tp  # both products, all S scores a token
    if how.flash_attention:  # computes the causal half, and everything once more in backward
        rate = how.flash_speed * device.gemm_rate
        time.add(
            "attention",
            flops / 2 / (FLASH_FORWARD * rate) + KERNEL_SECONDS,
            2.5 * flops / 2 / (FLASH_BACKWARD * rate) + KERNEL_SECONDS,
        )
        return
    # Product, softmax, dropout, product: each reads and writes all scores.
    once = e * tokens * S * config.num_heads / tp / device.stream_bandwidth
    dropout = (2 + 1 / e) * once if config.dropout else 0.0  # in, out, and a mask of one byte
    time.add(
        "attention",
        max(flops / device.gemm_rate, 2 * once) + 2 * once + dropout + 3 * KERNEL_SECONDS,
        max(2 * flops / device.gemm_rate, 5 * once) + 3 * once + dropout + 5 * KERNEL_SECONDS,
    )


def _add_elementwise(time, config, device, how, moe, tp, tokens, whole) -> None:
    """Passes over memory, in tensors read and written: [whole, D], [tokens, F/t or N H/t]."""
    e = how.activation_bytes
    mask = 1 / e if config.dropout else 0
    model, heads = (
        e * config.d_model * whole,
        e * config.num_heads * (config.head_dim + config.rope_head_dim) / tp * tokens,
    )
    d_ffn = (
        config.d_ffn if not moe else config.d_expert * (config.top_k + config.num_shared_experts)
    )
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
    """Unfused, about every second kernel reads again what the one before wrote."""
    again = 1 if how.fused_activation else 2
    kernels = sum(
        2 if name.startswith("two") or name == "sorting" else 1
        for name, num_bytes in moved.items()
        if num_bytes
    )
    return again * (sum(moved.values()) / device.stream_bandwidth + kernels * KERNEL_SECONDS)


def _add_exchanges(time, config, machine, how, moe, axes, sequence_parallel, tokens, whole) -> None:
    (tp, cp, ep), e = axes, how.activation_bytes
    if tp > 1:  # once for the attention, once for the ffn, each way
        ops = ("all_gather", "reduce_scatter") if sequence_parallel else ("all_reduce",)
        each = sum(collective_seconds(machine, op, e * config.d_model * tokens, tp) for op in ops)
        time.add("tp collectives", 2 * each, 2 * each)
    if cp > 1:  # keys and values go round behind the attention to the block that is here
        kv = 2 * e * config.num_kv_heads * config.head_dim / tp * tokens
        # all hops of a round last as long as the slowest: one between nodes, if there is any
        in_a_node = cp * tp <= machine.devices_per_node
        stride = tp if in_a_node else machine.devices_per_node
        ring = (cp - 1) * collective_seconds(machine, "send", 2 * kv, 2, stride)
        time.add(
            "cp exchange",
            max(0.0, ring - time.forward["attention"]),
            max(0.0, 2 * ring - time.backward["attention"]),
        )
    if moe and ep > 1:  # dispatch and combine, each way
        pair = 2 * collective_seconds(
            machine, "all_to_all", e * config.top_k * config.d_model * whole, ep, tp
        )
        time.add("ep all-to-all", pair, pair)


def _matrices(config, moe, t, ep, tokens) -> list[tuple[float, float, float, float]]:
    """(rows, inner, columns, copies) of each GEMM; q, k, v and gate, up are one each."""
    shapes: dict[tuple, list] = {}
    for weight in layer_weights(config, moe):
        if not weight.is_matmul:
            continue
        k, n = weight.shape
        k, n = (k / t, n) if weight.cut == "row" else (k, n)
        if weight.cut == "column":
            n /= t
        elif weight.cut == "kv":
            n /= min(t, config.num_kv_heads)
        rows, copies = tokens, 1.0
        if weight.experts > 1:  # balanced: the token copies spread evenly over the local experts
            copies = weight.experts / ep
            rows = tokens * weight.visits / copies
        joined = {"k": "q", "v": "q", "up": "gate" if config.activation == "swiglu" else "up"}
        key = (weight.kind, joined.get(weight.name, weight.name))
        if key in shapes:
            shapes[key][2] += n
        else:
            shapes[key] = [rows, k, n, copies]
    return [tuple(shape) for shape in shapes.values()]


def head_seconds(
    config: ModelConfig, machine: Hardware, how: Framework, layout: Layout
) -> tuple[float, float]:
    """The head and the loss on one micro-batch, forward and backward."""
    tokens = layout.micro_batch_size * config.seq_len / layout.cp
    D, V, device = config.d_model, config.vocab_size / layout.tp, machine.device
    loss = stream_seconds(device, how.loss_traffic / 2 * tokens * V)
    return (
        gemm_seconds(device, tokens, V, D) + loss,
        gemm_seconds(device, tokens, D, V) + gemm_seconds(device, V, D, tokens) + loss,
    )
