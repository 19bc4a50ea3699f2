"""Compare the costs of serving with the library's own caches and published numbers."""

import math
from statistics import median

import pytest
import torch

from mini_dist import GPT, ModelConfig
from mini_dist.plan.calculators import MODELS, Hardware, from_hugging_face, hardware, num_parameters
from mini_dist.plan.calculators.serving import (
    LOGS,
    Server,
    answer,
    cache_room,
    cached_tokens,
    curve,
    decode_floor,
    decode_time,
    kv_bytes_a_text,
    kv_bytes_a_token,
    largest_batch,
    prefill_flops,
    prefill_time,
    tensorrt_llm,
    vllm_on_l4,
)
from mini_dist.serving import Cache, Engine, Memory, forward

LLAMA = Server("llama3-8b", "h100")


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_bytes_of_a_token_are_those_of_the_librarys_caches(kv_heads):
    config = ModelConfig(d_model=64, num_layers=3, num_kv_heads=kv_heads)
    model, cache = GPT(config), Cache(3)
    forward(model, torch.arange(5), cache)
    each = kv_bytes_a_token(config, kv_bytes=4).total
    assert cache.nbytes == 5 * each
    assert Engine(model, Memory(6, 8), None).nbytes == 6 * 8 * each


def test_bytes_of_a_token_known_by_hand():
    assert kv_bytes_a_token("llama3-8b").total == 131_072
    assert kv_bytes_a_token("llama2-7b").total == 524_288
    assert kv_bytes_a_token("llama3-70b", tp=8).total == 80 * 2 * 128 * 2
    assert kv_bytes_a_token("llama3-70b", tp=16) == kv_bytes_a_token("llama3-70b", tp=8)
    assert kv_bytes_a_token("deepseek-v3").total == 61 * (512 + 64) * 2


# The relevant config.json keys of google/gemma-3-1b-it and mistralai/Mistral-7B-v0.1.
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 1152}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
GEMMA |= {"intermediate_size": 6912, "vocab_size": 262144, "max_position_embeddings": 32768}
GEMMA |= {"sliding_window": 512, "sliding_window_pattern": 6}
MISTRAL = {"model_type": "mistral", "num_hidden_layers": 32, "hidden_size": 4096}
MISTRAL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
MISTRAL |= {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096}


def test_a_layer_with_a_window_keeps_its_last_tokens_only():
    """Gemma 3 1B at 32,768 tokens by hand: 4 layers keep all of them, 22 keep 512."""
    gemma, a_token_and_layer = from_hugging_face(GEMMA, 32768), 2 * 1 * 256 * 2
    assert (gemma.windowed_layers, gemma.window) == (22, 512)
    assert kv_bytes_a_token(gemma).total == 26 * a_token_and_layer
    assert kv_bytes_a_text(gemma, 32768) == a_token_and_layer * (4 * 32768 + 22 * 512)
    assert kv_bytes_a_text(gemma, 500) == 500 * 26 * a_token_and_layer
    mistral = from_hugging_face(MISTRAL, 32768)
    for tokens, kept in ((1000, 1000), (4096, 4096), (32768, 4096)):
        assert kv_bytes_a_text(mistral, tokens) == kept * 131_072
        each = kv_bytes_a_text(mistral, tokens)
        server = Server(mistral, "h100")
        assert largest_batch(server, tokens) == int(cache_room(server).total / each)
    near, far = (decode_floor(server, 8, context) for context in (4096, 32768))
    assert near == far


@pytest.mark.parametrize(
    "more, windows",
    [
        ({"sliding_window": None}, (0, 0)),
        ({"layer_types": ["full_attention"] * 6 + ["sliding_attention"] * 20}, (20, 512)),
        ({"layer_types": ["full_attention"] * 26}, (0, 0)),
        ({"model_type": "gemma2", "sliding_window_pattern": None}, (13, 512)),
        ({"model_type": "qwen2"}, (0, 0)),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 21}, (5, 512)),
        ({"model_type": "phi3"}, (26, 512)),
    ],
)
def test_windows_are_read_as_transformers_reads_them(more, windows):
    config = from_hugging_face(GEMMA | more, 4096)
    assert (config.windowed_layers, config.window) == windows


def test_a_text_without_windows_is_its_tokens():
    for name in [name for name, config in MODELS.items() if not config.windowed_layers]:
        assert kv_bytes_a_text(name, 1000) == 1000 * kv_bytes_a_token(name).total


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.name} {log.gib}")
def test_tokens_in_a_cache_are_those_of_vllms_logs(log):
    """They agree as closely as the two decimals of the log's GiB allow."""
    assert abs(log.predicted / log.tokens - 1) < 0.006 / log.gib


def test_what_fits_is_what_the_weights_leave():
    room = cache_room(LLAMA)
    assert room["weights"] == -2 * num_parameters(LLAMA.config)
    assert cached_tokens(LLAMA) == int(room.total / 131_072)
    assert largest_batch(LLAMA, 8192) == 56
    assert largest_batch(Server("llama3-8b", "h100", kv_bytes=1), 8192) == 113


def test_a_decode_step_is_never_faster_than_memory_and_near_it_for_one_sequence():
    for name in ("llama3-8b", "llama2-7b", "mixtral-8x7b"):
        for tp in (1, 2, 8):
            server = Server(name, "h200", tp)
            for batch in (1, 16, 300):
                assert decode_time(server, batch, 700).total > decode_floor(server, batch, 700)
    weights = 2 * (num_parameters(LLAMA.config) - 128256 * 4096)  # the embedding is looked up
    found = decode_floor(LLAMA, 1, 0) * LLAMA.machine.device.memory_bandwidth
    assert found == pytest.approx(weights, rel=1e-3)


def test_of_many_experts_one_token_reads_few_and_many_tokens_read_all():
    server = Server("mixtral-8x7b", "b200")
    bandwidth = server.machine.device.memory_bandwidth
    experts = 32 * 8 * 3 * 4096 * 14336 * 2
    one, many = (decode_floor(server, batch, 0) * bandwidth for batch in (1, 200))
    assert many - one == pytest.approx(experts * 6 / 8, rel=1e-3)


def test_prefill_is_arithmetic():
    peak = LLAMA.machine.device.peak_flops
    flops = prefill_flops(LLAMA, 4096)
    norms = (2 * 32 + 1) * 4096
    matrices = 2 * 4096 * (num_parameters(LLAMA.config) - 2 * 128256 * 4096 - norms)
    scores = 32 * 4096**2 * 32 * 2 * 128  # products with keys and with values; half is masked
    assert flops.total == matrices + scores + 2 * 128256 * 4096  # logits of the last token
    assert prefill_flops(LLAMA, 4096, 3).total == 3 * flops.total
    assert prefill_flops(Server("llama3-8b", "h100", 8), 4096) == flops  # over all devices
    assert 1.0 < prefill_time(LLAMA, 4096).total / (flops.total / peak) < 2.2


def test_a_step_without_tokens_has_no_flops_to_wait_for():
    for name in ("llama3-8b", "mixtral-8x7b"):
        server = Server(name, "h200", 4)
        assert prefill_time(server, 0).total < prefill_time(server, 1).total


def test_beyond_the_length_of_training_is_said():
    with pytest.warns(UserWarning, match="8193 tokens are more than seq_len=8192"):
        answer(LLAMA, 1, 8000, 193)


def test_tensor_parallelism_cuts_reading_and_adds_messages():
    two = decode_time(Server("llama3-8b", "h100", 2), 4, 1000)
    one = decode_time(LLAMA, 4, 1000)
    assert one["all-reduces"] == 0 < two["all-reduces"]
    assert one.total / 2 < two.total < one.total


def test_more_at_once_is_more_tokens_and_a_longer_wait():
    points = curve(LLAMA, 1024, 256)
    speeds = [point.tokens_a_second for _, point in points]
    waits = [point.next_token for _, point in points]
    assert speeds == sorted(speeds) and waits == sorted(waits)
    assert points[-1][0] == largest_batch(LLAMA, 1280)
    assert points[0][1].dollars(3.6) == pytest.approx(1e3 / speeds[0])
    assert answer(LLAMA, 8, 1024, 256).tokens == 8 * 256


def test_published_throughput_and_first_tokens():
    """Only one choice was fitted (see the module docstring); errors on the 70B are large."""
    of_7b = [run for run in tensorrt_llm() if run.server.config == MODELS["llama2-7b"]]
    of_70b = [run for run in tensorrt_llm() if run not in of_7b]
    speeds = [abs(run.error) for run in of_7b if not run.first_token]
    assert len(speeds) == 12 and median(speeds) < 0.1 and max(speeds) < 0.2
    speeds = [run.error for run in of_70b if not run.first_token]
    assert len(speeds) == 7 and min(speeds) > 0 and max(speeds) < 1.4
    first = [run.error for run in tensorrt_llm() if run.first_token]
    assert len(first) == 10 and -0.5 < min(first) and max(first) < 0  # host time is not counted


def test_published_next_tokens():
    errors = [run.error for run in vllm_on_l4()]
    assert len(errors) == 8 and median(map(abs, errors)) < 0.25 and max(map(abs, errors)) < 0.3


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: Server("llama3-8b", "h100", tp=5), "tp=5 does not divide num_heads=32"),
        (lambda: Server("llama3-8b", "h100", tp=0), "tp=0 is too small"),
        (lambda: Server("llama3-8b", "h100", weight_bytes=0), "weight_bytes=0 is too small"),
        (lambda: Server("llama3-8b", "h100", memory_share=2), "memory_share=2 is no share"),
        (lambda: cache_room(Server("llama3-70b", "h100")), "give a larger tp"),
        (lambda: answer(LLAMA, 1000, 8000, 192), "give 56 at most"),
        (lambda: curve(LLAMA, 500_000, 1), "not one request"),
        (lambda: Server("llama4", "h100"), "is not known"),
        (lambda: Server(ModelConfig(num_heads=12, d_model=96, num_kv_heads=4), "h100", 6), "cut a"),
        (lambda: kv_bytes_a_token("llama3-8b", tp=3), "tp=3 would cut a head of num_kv_heads=8"),
        (lambda: kv_bytes_a_token("llama3-8b", tp=0), "tp=0 is too small"),
        (lambda: kv_bytes_a_token("llama3-8b", -2), "kv_bytes=-2 is too small"),
        (lambda: kv_bytes_a_text("llama3-8b", -1), "tokens=-1 is too small"),
        (lambda: largest_batch(LLAMA, -1), "tokens=-1 is too small"),
        (lambda: largest_batch(LLAMA, 0), "tokens=0 is too small"),
        (lambda: decode_time(LLAMA, -1, 10), "batch=-1 is too small"),
        (lambda: decode_time(LLAMA, 1, math.nan), "context=nan is no number"),
        (lambda: decode_floor(LLAMA, 0, 10), "batch=0 is too small"),
        (lambda: prefill_time(LLAMA, -5), "tokens=-5 is too small"),
        (lambda: prefill_time(LLAMA, 5, 0), "sequences=0 is too small"),
        (lambda: prefill_flops(LLAMA, 0), "tokens=0 is too small"),
        (lambda: answer(LLAMA, 1, 10, 0), "new=0 is too small"),
        (lambda: answer(LLAMA, 0, 10, 1), "batch=0 is too small"),
        (lambda: answer(LLAMA, 1, 1.5, 1), "prompt=1.5 is not a whole number"),
        (lambda: answer(LLAMA, 1, 10, 1).dollars(-2), "dollars_an_hour=-2 is too small"),
        (lambda: ModelConfig(windowed_layers=2), "windowed_layers=2 with window=0"),
        (lambda: ModelConfig(windowed_layers=5, window=8), "give at most num_layers=4"),
    ],
)
def test_bad_input_is_one_sentence(make, why):
    with pytest.raises(ValueError, match=why):
        make()


def test_4_bits_are_read_faster_and_computed_as_fast():
    four, sixteen = (Server("llama3-8b", "a100-80", weight_bytes=n) for n in (0.5, 2))
    assert decode_time(four, 1, 0)["ffn"] < 0.4 * decode_time(sixteen, 1, 0)["ffn"]
    assert prefill_time(four, 4096)["ffn"] == prefill_time(sixteen, 4096)["ffn"]


def test_a_machine_by_hand_will_do():
    slow = hardware("h100").replace(device={"memory_bandwidth": 1e12})
    assert isinstance(slow, Hardware)
    assert decode_floor(Server("llama3-8b", slow), 1, 10) == pytest.approx(
        3.35 * decode_floor(LLAMA, 1, 10)
    )
