"""How many texts at once, how fast, for how much: serving a model, from its sizes and a datasheet.

    server = Server("llama3-70b", "h100", tp=4)
    print(kv_bytes_a_token(server.config), largest_batch(server, 4096))
    print(decode_time(server, batch=64, context=2048))
    print(answer(server, batch=64, prompt=1024, new=256).dollars(2.5))

A decode step reads all weights, and the keys and values of all tokens so far, for one new token per
sequence, so memory decides its time. Prefill uses a weight for every token of the prompt, so
arithmetic decides. The constants are those for training (devices.py, machines.py). One choice was
made with the numbers below in view: products are not counted in waves of tiles. With waves, the
first token after a prompt of 128 came out up to four times too late.

Letters: B sequences, T tokens, D model, N heads, K kv heads, H head dim, E experts, L layers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..config import ModelConfig
from ..fields import at_least, checks_kinds, nearest_divisor, whole, whole_number
from .collective_time import collective_seconds
from .devices import FLASH_FORWARD, KERNEL_SECONDS, Device
from .flops import forward_flops, score_flops
from .kernels import stream_seconds
from .lines import Breakdown, Line
from .machines import Hardware, hardware
from .models import model
from .parameters import Weight, layer_weights, num_parameters, outer_weights


@checks_kinds
@dataclass(frozen=True)
class Server:
    """A model, cut by tensor parallelism over `tp` devices of a machine.

    weight_bytes, kv_bytes: of a number; 1 also computes in fp8 where the device can. memory_share:
    of a device's memory that weights and cache may fill. Raises ValueError in one sentence.
    """

    config: ModelConfig | str
    machine: Hardware | str
    tp: int = 1
    weight_bytes: float = 2
    kv_bytes: float = 2
    memory_share: float = 0.9

    def __post_init__(self):
        object.__setattr__(self, "config", model(self.config))
        object.__setattr__(self, "machine", hardware(self.machine))
        whole_number(self, "tp", at_least=1)
        if self.config.num_heads % self.tp:
            raise ValueError(f"tp={self.tp} does not divide num_heads={self.config.num_heads}.")
        kv_heads_a_device(self.config, self.tp)
        for field in ("weight_bytes", "kv_bytes"):
            at_least(field, getattr(self, field), 0.25)
        if not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share={self.memory_share} is no share: give 0.9.")

    @property
    def fp8(self) -> bool:
        return self.weight_bytes == 1 and self.machine.device.peak_flops_fp8 is not None


# --- memory --------------------------------------------------------------------------------------


def kv_heads_a_device(config: ModelConfig, tp: int) -> int:
    """K/t; with t > K each is held by t / K devices. ValueError where a head would be cut."""
    heads = config.num_kv_heads
    if whole("tp", tp) > 1 and heads % tp and tp % heads and not config.is_mla:
        raise ValueError(
            f"tp={tp} would cut a head of num_kv_heads={heads}: give {nearest_divisor(heads, tp)}."
        )
    return max(heads // tp, 1)


def kv_bytes_a_token(config: ModelConfig | str, kv_bytes: float = 2, tp: int = 1) -> Breakdown:
    """The bytes that one token takes in the cache of one device, all layers together.

    Latent attention keeps one latent and one rotated key a token, whole on every device
    (DeepSeek-V2, section 2.1). Raises ValueError if no device could have whole heads.
    """
    config = model(config)
    at_least("kv_bytes", kv_bytes, 0.25)
    heads = kv_heads_a_device(config, tp)
    if config.is_mla:
        numbers = config.kv_lora_rank + config.rope_head_dim
        line = Line(
            "latent and rotated key",
            config.num_layers * numbers * kv_bytes,
            "bytes",
            f"L (R_kv + R) bytes = {config.num_layers} * {numbers} * {kv_bytes:g}",
            "DeepSeek-V2, section 2.1",
        )
        return Breakdown("cache of a token", (line,))
    value = config.num_layers * heads * config.head_dim * kv_bytes
    formula = f"L K/t H bytes = {config.num_layers} * {heads:g} * {config.head_dim} * {kv_bytes:g}"
    lines = [Line(name, value, "bytes", formula, "Pope et al. 2022") for name in ("keys", "values")]
    return Breakdown("cache of a token", tuple(lines))


def kv_bytes_a_text(
    config: ModelConfig | str, tokens: float, kv_bytes: float = 2, tp: int = 1
) -> float:
    """Return the cache of a text with this many tokens on one device.

    A layer with a window keeps its last `window` tokens only, the others all of them.
    """
    config = model(config)
    at_least("tokens", tokens, 0)
    windowed = config.windowed_layers
    kept = (config.num_layers - windowed) * tokens + windowed * min(tokens, config.window)
    return kv_bytes_a_token(config, kv_bytes, tp).total * kept / config.num_layers


def cache_room(server: Server) -> Breakdown:
    """Bytes of each device that are left for keys and values; ValueError if the weights alone are
    more than it has."""
    has = server.machine.device.memory_bytes * server.memory_share
    weights = num_parameters(server.config) * server.weight_bytes / server.tp
    if weights > has:
        raise ValueError(
            f"the weights need {weights / 2**30:.0f} GiB on each of tp={server.tp} devices, and "
            f"{server.machine.device.name} gives {has / 2**30:.0f} GiB: give a larger tp."
        )
    lines = (
        Line("memory that may be filled", has, "bytes", f"{server.memory_share:.0%} of it"),
        Line("weights", -weights, "bytes", "P bytes / t"),
    )
    return Breakdown("left for keys and values", lines)


def cached_tokens(server: Server) -> int:
    """How many tokens' keys and values fit, of all sequences together (none beyond its window)."""
    each = kv_bytes_a_token(server.config, server.kv_bytes, server.tp).total
    return int(cache_room(server).total / each)


def largest_batch(server: Server, tokens: int) -> int:
    """Return how many sequences with this many tokens fit at once."""
    each = kv_bytes_a_text(server.config, at_least("tokens", tokens, 1), server.kv_bytes, server.tp)
    return int(cache_room(server).total / each)


# --- time ----------------------------------------------------------------------------------------


def decode_floor(server: Server, batch: int, context: float) -> float:
    """Seconds for one token of every sequence if nothing but memory took time: bytes / bandwidth.

    context: tokens before it, on average. The datasheet's bandwidth: no server is faster.
    """
    whole("batch", batch)
    at_least("context", context, 0)
    weights = sum(each.bytes for each in _layers(server, batch)) / server.tp
    cache = batch * kv_bytes_a_text(server.config, context, server.kv_bytes, server.tp)
    return (weights + cache) / server.machine.device.memory_bandwidth


def decode_time(server: Server, batch: int, context: float) -> Breakdown:
    """One step that gives each of `batch` sequences its next token; context: tokens before it."""
    whole("batch", batch)
    at_least("context", context, 0)
    device = server.machine.device
    cache = batch * kv_bytes_a_text(server.config, context, server.kv_bytes, server.tp)
    layers = server.config.num_layers
    lines = _matrices(server, batch, batch)
    attention = layers * stream_seconds(device, cache / layers)
    lines.append(Line("keys and values", attention, "s", "B context bytes / bandwidth"))
    return Breakdown("a decode step", (*lines, _traffic(server, batch)))


def prefill_flops(server: Server, tokens: int, sequences: int = 1) -> Breakdown:
    """Return the FLOPs, of all devices together, for the prompts of these sequences, `tokens` each.

    The head sees the last token of each alone. Scores of layers with a window are counted whole.
    """
    whole("tokens", tokens)
    whole("sequences", sequences)
    lines = [
        replace(
            line,
            value=line.value * sequences / (tokens if line.name == "head" else 1),
            formula=f"B {line.formula}" + " / S: the last token" * (line.name == "head"),
        )
        for line in forward_flops(server.config, causal=True, seq_len=tokens)
    ]
    return Breakdown("FLOPs of a prefill", tuple(lines))


def prefill_time(server: Server, tokens: int, sequences: int = 1) -> Breakdown:
    """Time the prompts of this many sequences, `tokens` each, and their first new tokens. Scores of
    layers with a window are counted in full."""
    whole("tokens", tokens, at_least=0)
    whole("sequences", sequences)
    rate = server.machine.device.gemm_rate * FLASH_FORWARD
    flops = score_flops(server.config, tokens, causal=True) * sequences / server.tp
    lines = _matrices(server, tokens * sequences, sequences)
    scores = server.config.num_layers * (flops / rate + KERNEL_SECONDS)
    lines.append(Line("attention scores", scores, "s", "FLOPs / (the kernel's rate)"))
    return Breakdown("prefill", (*lines, _traffic(server, tokens * sequences)))


class Product(NamedTuple):
    """A matrix, how many like it are used in a step, and on how many tokens each."""

    weight: Weight
    times: float
    tokens: float
    bytes: float


def _layers(server: Server, tokens: int, logits: int | None = None) -> list[Product]:
    """Every matrix that tokens pass. Of E experts, T tokens that choose k of them evenly and
    independently visit E (1 - (1 - k/E)^T)."""
    config, products = server.config, []
    dense, moe = config.num_layers - config.num_moe_layers, config.num_moe_layers
    for copies, weights in (
        (dense, layer_weights(config)),
        (moe, layer_weights(config, moe=True) if moe else []),
        (1, outer_weights(config, "last")),
    ):
        for weight in weights:
            if not weight.is_matmul:
                continue
            rows = (logits or tokens) if weight.kind == "head" else tokens
            visited, each = 1.0, float(rows)
            if weight.experts > 1:
                share = weight.visits / weight.experts
                visited = weight.experts * (1 - (1 - share) ** rows)
                each = rows * weight.visits / visited if rows else 0.0
            size = weight.numel / weight.experts * visited * server.weight_bytes
            products.append(Product(weight, copies * visited, each, copies * size))
    return products


def _matrices(server: Server, tokens: int, logits: int) -> list[Line]:
    """Time each matrix by a roofline. No waves of tiles, as `gemm_seconds` has them for the large
    products of training: with few tiles, libraries split the inner dimension as well."""
    device, seconds = server.machine.device, {}
    rate = device.gemm_rate_fp8 if server.fp8 else device.gemm_rate
    for product in _layers(server, tokens, logits):
        weight = product.weight
        numbers = weight.shape[0] * weight.shape[1] / (1 if weight.cut == "none" else server.tp)
        read = numbers * server.weight_bytes / device.stream_bandwidth
        arithmetic = 2 * product.tokens * numbers / rate
        one = max(read, arithmetic) + KERNEL_SECONDS
        seconds[weight.kind] = seconds.get(weight.kind, 0.0) + product.times * one
    formula = "the slower of reading it and of its FLOPs"
    return [Line(kind, value, "s", formula, "devices.py") for kind, value in seconds.items()]


def _traffic(server: Server, tokens: int) -> Line:
    """Time two all-reduces of [T, D] per layer, in 2 bytes."""
    num_bytes = 2 * tokens * server.config.d_model
    one = collective_seconds(server.machine, "all_reduce", num_bytes, server.tp)
    seconds = 2 * server.config.num_layers * one
    return Line("all-reduces", seconds, "s", "2 L all-reduces of T D", "Shoeybi et al. 2019")


# --- all of an answer ----------------------------------------------------------------------------


class Answers(NamedTuple):
    """A batch of equal requests, from their prompts to their last tokens."""

    first_token: float  # s
    next_token: float  # s, on average
    seconds: float
    tokens: int  # new ones of all
    devices: int

    @property
    def tokens_a_second(self) -> float:
        """Return new tokens per second and device."""
        return self.tokens / self.seconds / self.devices

    def dollars(self, dollars_an_hour: float) -> float:
        """For a million new tokens, at a price of one device."""
        at_least("dollars_an_hour", dollars_an_hour, 0)
        return dollars_an_hour / 3600 / self.tokens_a_second * 1e6


def answer(server: Server, batch: int, prompt: int, new: int) -> Answers:
    """`batch` requests that begin together: prefill, then new - 1 decode steps.

    Decode time is linear in the context, so the mean context gives the mean step (a little too
    much where a window is passed in between). Raises ValueError if they do not fit; warns beyond
    seq_len, the length of training.
    """
    for field, value in (("batch", batch), ("prompt", prompt), ("new", new)):
        whole(field, value)
    if prompt + new > server.config.seq_len:
        warnings.warn(
            f"{prompt + new} tokens are more than seq_len={server.config.seq_len}, the length of "
            "training: give a config with a longer one if the model reads so far.",
            stacklevel=2,
        )
    fits = largest_batch(server, prompt + new)
    if batch > fits:
        raise ValueError(
            f"batch={batch} of {prompt + new} tokens each is more than fits: give {fits} at most."
        )
    first = prefill_time(server, prompt, batch).total
    step = decode_time(server, batch, prompt + new / 2).total
    return Answers(first, step, first + (new - 1) * step, batch * new, server.tp)


def curve(server: Server, prompt: int, new: int) -> list[tuple[int, Answers]]:
    """Try batches 1, 2, 4 ... up to the largest that fits: more tokens per second, each later."""
    most = largest_batch(server, prompt + new)
    if not most:
        raise ValueError(f"not one request of {prompt + new} tokens fits: give a larger tp.")
    batches = sorted({min(2**k, most) for k in range(most.bit_length() + 1)})
    return [(batch, answer(server, batch, prompt, new)) for batch in batches]


# --- compared with others' measurements ----------------------------------------------------------


class Measured(NamedTuple):
    """A published number, and what it was measured on. One of the last three is not 0."""

    server: Server
    batch: int
    prompt: int
    new: int
    tokens_a_second: float = 0.0  # of a device
    first_token: float = 0.0  # s
    next_token: float = 0.0  # s, after a prompt of this many tokens

    @property
    def predicted(self) -> float:
        if self.first_token:
            return prefill_time(self.server, self.prompt).total
        if self.next_token:
            return decode_time(self.server, self.batch, self.prompt).total
        fitted = Server(**{**vars(self.server), "memory_share": 1.0})
        return answer(fitted, self.batch, self.prompt, self.new).tokens_a_second

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / (self.first_token or self.next_token or self.tokens_a_second) - 1


def tensorrt_llm() -> list[Measured]:
    """NVIDIA, TensorRT-LLM v0.6.1 (H100, A100) and v0.5 (L40S, first tokens), docs/source/
    performance.md at commit 138f96d: fixed batches of equal requests. H100 and L40S: weights and
    cache in fp8. LLaMA 7B and 70B, of the tables' four models. The 70B is Llama 2's.
    The H100's table is per GPU; the A100's, which does not say, is read the same way.
    """
    fp8 = {"weight_bytes": 1, "kv_bytes": 1}
    throughput = [  # model, machine, tp, batch, prompt, new, tokens per second and device
        *(("llama2-7b", "h100", 1, *row) for row in _H100_7B),
        ("llama2-70b", "h100", 2, 1024, 128, 128, 2657),
        ("llama2-70b", "h100", 4, 480, 128, 2048, 1486),
        ("llama2-70b", "h100", 2, 96, 2048, 128, 306),
        ("llama2-70b", "h100", 2, 64, 2048, 2048, 547),
        ("llama2-7b", "l40s", 1, 64, 128, 128, 3240),
        ("llama2-7b", "l40s", 1, 64, 128, 2048, 1622),
        ("llama2-7b", "l40s", 1, 32, 2048, 128, 581),
        ("llama2-7b", "l40s", 1, 16, 2048, 2048, 531),
        ("llama2-7b", "a100-80", 1, 384, 128, 128, 5586),
        ("llama2-7b", "a100-80", 1, 60, 128, 2048, 1928),
        ("llama2-7b", "a100-80", 1, 52, 2048, 128, 591),
        ("llama2-7b", "a100-80", 2, 64, 2048, 2048, 782),
        ("llama2-70b", "a100-80", 4, 1280, 128, 128, 670),
        ("llama2-70b", "a100-80", 4, 240, 128, 2048, 525),
        ("llama2-70b", "a100-80", 4, 120, 2048, 128, 79),
    ]
    first = [  # model, machine, tp, prompt, ms
        ("llama2-7b", "h100", 1, 128, 7),
        ("llama2-7b", "h100", 1, 2048, 36),
        ("llama2-70b", "h100", 4, 128, 26),
        ("llama2-70b", "h100", 4, 2048, 109),
        ("llama2-7b", "l40s", 1, 128, 14),
        ("llama2-7b", "l40s", 1, 2048, 73),
        ("llama2-7b", "a100-80", 1, 128, 16),
        ("llama2-7b", "a100-80", 1, 2048, 133),
        ("llama2-70b", "a100-80", 4, 128, 47),
        ("llama2-70b", "a100-80", 4, 2048, 377),
    ]

    def server(name, machine, tp):
        return Server(name, machine, tp, **({} if machine == "a100-80" else fp8))

    return [
        *(
            Measured(server(name, machine, tp), batch, prompt, new, speed)
            for name, machine, tp, batch, prompt, new, speed in throughput
        ),
        *(
            Measured(server(name, machine, tp), 1, prompt, 1, 0, ms / 1e3)
            for name, machine, tp, prompt, ms in first
        ),
    ]


L4 = Hardware(
    "l4",
    Device("L4", 121e12, None, 24e9, 0.3e12, peak_flops_fp8=242e12, source="NVIDIA's datasheet"),
    devices_per_node=1,
    node_bandwidth=32e9,
    network_bandwidth=3.1e9,
)
QWEN3_4B = ModelConfig(
    vocab_size=151936,
    seq_len=32768,
    d_model=2560,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ffn=9728,
    activation="swiglu",
    norm="rmsnorm",
    bias=False,
    qk_norm=True,
    tied_embedding=True,
)


def vllm_on_l4() -> list[Measured]:
    """vLLM 0.25.1, Qwen3 4B on an L4, batch 1: docs/features/quantization/quantized_kvcache.md.

    The time per token at several context lengths, with the cache in 16 bits and in 8; weights in
    16. "2k" is read as 2,048. Compared after the formulas were written; nothing was changed since.
    """
    rows = [(2048, 29.1, 29.4), (8192, 26.4, 27.9), (16384, 23.6, 26.2), (32768, 19.4, 23.4)]
    return [
        Measured(Server(QWEN3_4B, L4, kv_bytes=kv_bytes), 1, context, 1, next_token=1 / speed)
        for context, *speeds in rows
        for kv_bytes, speed in zip((2, 1), speeds)
    ]


class Log(NamedTuple):
    """What vLLM says at its start: the memory that is left for the cache, and the tokens in it."""

    name: str
    config: ModelConfig | str
    kv_bytes: int
    gib: float
    tokens: int
    source: str

    @property
    def predicted(self) -> float:
        return self.gib * 2**30 / kv_bytes_a_token(self.config, self.kv_bytes).total


LLAMA_ISSUE, QWEN_PAGE = "vLLM issue 10517, RTX 3090", "vLLM docs, quantized_kvcache.md, L4"
LOGS = [  # GPU blocks of 16 tokens in the first two
    Log("Llama 3.1 8B", "llama3-8b", 2, 3.81, 16 * 1952, LLAMA_ISSUE),
    Log("Llama 3.1 8B", "llama3-8b", 2, 2.89, 16 * 1478, LLAMA_ISSUE),
    Log("Qwen3 4B", QWEN3_4B, 2, 11.47, 83_488, QWEN_PAGE),
    Log("Qwen3 4B, fp8", QWEN3_4B, 1, 11.47, 166_992, QWEN_PAGE),
]

_H100_7B = [  # batch, prompt, new, tokens per second
    (768, 128, 128, 19694),
    (112, 128, 2048, 6818),
    (80, 2048, 128, 2244),
    (48, 2048, 2048, 2740),
]
