"""Compare the calculators' memory and time with a GPU."""

import time

import pytest
import torch

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.model.data import Batches, load_text
from mini_dist.plan.calculators import peak_memory, step_time
from mini_dist.strategies.train import train_step
from mini_dist.training.all_axes import parallelize

GPT_50M = ModelConfig(vocab_size=256, d_model=512, num_layers=16, num_heads=8, seq_len=1024)
GPT_350M = GPT_50M.replace(d_model=1024, num_layers=24, num_heads=16)
LLAMA_LIKE = ModelConfig(
    **dict(vocab_size=256, d_model=1024, num_layers=12, num_heads=16, num_kv_heads=4, d_ffn=2816),
    **dict(seq_len=2048, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False),
)
MEMORY = {
    "50M": (GPT_50M, Layout(micro_batch_size=8)),
    "50M, full recomputation": (GPT_50M, Layout(micro_batch_size=8, recompute="full")),
    "50M, 4 micro-batches": (GPT_50M, Layout(micro_batch_size=4, num_micro_batches=4)),
    "350M": (GPT_350M, Layout(micro_batch_size=4)),
    "350M, selective": (GPT_350M, Layout(micro_batch_size=4, recompute="selective")),
    "Llama-like": (LLAMA_LIKE, Layout(micro_batch_size=2)),
}


def peak_of_steps(config, layout, group):
    """Return the peak memory of the second step, when the optimizer has its states."""
    model = parallelize(config, layout, group, lambda p: torch.optim.AdamW(p, foreach=False))
    rows = layout.micro_batch_size * layout.num_micro_batches
    batches = Batches(load_text(), rows, config.seq_len, device=group.device)
    model.step(*batches.batch(0))
    torch.cuda.reset_peak_memory_stats()
    model.step(*batches.batch(1))
    return torch.cuda.max_memory_allocated()


def on_cuda(config, layout):
    """Return by how many bytes CUDA differs from the CPU kernels that the calculator knows.

    (torch 2.11, float32: cuBLAS's workspaces, and what kernels save for a layer's backward.)
    """
    x = 4 * layout.micro_batch_size * config.seq_len * config.d_model  # bytes of [B, S, D]
    layers = config.num_layers if layout.recompute == "none" else 0
    more = 2 * (32 << 20)  # Hopper: one workspace per thread (forward, backward)
    more -= layers * x  # attention writes its result by token: no copy is saved
    if config.norm == "rmsnorm":
        more -= (2 * layers + 1) * x  # one kernel that saves only its input
    if config.num_kv_heads != config.num_heads:  # keys and values are copied for every query head
        more += 2 * layers * x * (1 - config.num_kv_heads / config.num_heads)
    return more


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_what_the_allocator_counts(name, figure):
    config, layout = MEMORY[name]
    (measured,) = launch(peak_of_steps, 1, (config, layout), device="cuda").results
    predicted = peak_memory(config, layout, "course").total + on_cuda(config, layout)
    figure(f"memory, {name}", {"measured": measured, "predicted": predicted})
    assert predicted == pytest.approx(measured, rel=0.02)


TIMED = {
    "125M": ModelConfig(vocab_size=50304, d_model=768, num_layers=12, num_heads=12, seq_len=1024),
    "350M": ModelConfig(vocab_size=50304, d_model=1024, num_layers=24, num_heads=16, seq_len=1024),
    "1.3B": ModelConfig(vocab_size=50304, d_model=2048, num_layers=24, num_heads=16, seq_len=1024),
}


def seconds_of_a_step(config, rows, group):
    """Return the median of ten steps, with parameters and AdamW's states in bf16, too."""
    model = GPT(config, device=group.device, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = Batches(load_text(), rows, config.seq_len, device=group.device)
    seconds = []
    for step in range(15):
        torch.cuda.synchronize()
        began = time.perf_counter()
        train_step(model, optimizer, [batches.batch(step)])
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[5:])[5]


@pytest.mark.parametrize("name", TIMED)
def test_a_step_lasts_about_as_long_as_the_planner_says(name, figure):
    """Allow a factor of two: the planner knows real frameworks, but this is plain torch."""
    config, rows = TIMED[name], 8
    machine = "h200" if "H200" in torch.cuda.get_device_name() else "h100"
    (measured,) = launch(seconds_of_a_step, 1, (config, rows), device="cuda").results
    predicted = step_time(config, Layout(micro_batch_size=rows), machine, "fsdp")
    figure(
        f"seconds of a step, {name}",
        {"measured": measured, "predicted": predicted.seconds}
        | {"low": predicted.low, "high": predicted.high},
    )
    assert 0.5 < measured / predicted.seconds < 2
