"""Compare what the simulation and the planner say of a GPU with a GPU.

    python benchmarks/on_a_gpu.py [--json FILE] [--long]

One function runs twice: on this machine's GPU (`device="cuda"`), and on the same kind of GPU that
is not here (`simulate=`). Rows: kernels by themselves, training steps, and the peak memory of the
same steps. Kernels are timed by CUDA events, the median of REPEATS after a warm-up, with the
second-level cache overwritten before each; steps by the host's clock between two synchronizations,
the median of STEPS. A GPU that the planner does not know is refused. `--long` adds nothing.

Simulated / measured - 1 in November 2026, torch 2.11 (no constant was chosen on these rows):

                                     H100 SXM       H200
    peak bytes, six models           -1.2 ... -0.2 %, mean 0.6 %
    GPT 125M, 350M, 1.5B, bf16       -23 -22  -4    -33 -18  -4 %   of a step's seconds
    Llama, 1B and 4 layers of 8B     +9  +8         +5  +4 %
    GPT 125M in float32              +59            +60 %

In four of the six models the peak differs by 67 to 70 MB: cuBLAS's two workspaces of 32 MiB, which
a simulation does not have. Small models are slower than simulated because the attention of a head
of 64 takes twice the roofline's time. In float32 a weight's gradient has fewer tiles than the GPU
has multiprocessors; cuBLAS divides the inner dimension, which the planner's formula does not know.
This comparison found three errors in the simulation, which are mended: float32 counted as TF32, a
tensor that is read twice counted twice, RMS norm as ten kernels. (H100: 28 November 2026.)
"""

import statistics
import sys
import time
from pathlib import Path

import torch
from _form import Case, main
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mini_dist import GPT, ModelConfig, launch
from mini_dist.plan.calculators import model
from mini_dist.strategies.train import train_step

REPEATS, STEPS, WARM_UP = 20, 7, 3
BF16 = torch.bfloat16


# -- kernels ------------------------------------------------------------------------------------


def products(device):
    """Rows x columns x inner: layers of 125M to 70B models, whole and in eighths, and a decode."""
    shapes = [(8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (8192, 1024, 8192)]
    shapes += [(8192, 768, 768), (8192, 50304, 768), (4096, 4096, 4096), (1024, 1024, 1024)]
    for m, n, k in [*shapes, (16, 8192, 8192)]:
        a = torch.randn(m, k, device=device, dtype=BF16)
        b = torch.randn(n, k, device=device, dtype=BF16)
        yield f"product {m} x {n} x {k}", lambda a=a, b=b: a @ b.T
    a = torch.randn(4096, 4096, device=device)
    yield "product 4096 x 4096 x 4096, float32", lambda: a @ a


def attentions(device):
    shapes = [(8, 12, 1024, 64), (2, 32, 4096, 128), (1, 8, 32768, 128)]
    for shape, dtype in [*((shape, BF16) for shape in shapes), (shapes[0], torch.float32)]:
        q, k, v = (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seed = torch.ones_like(out)
        name = "attention " + " x ".join(map(str, shape)) + ", float32" * (dtype != BF16)

        def forward(q=q, k=k, v=v):
            with torch.no_grad():
                functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def backward(out=out, inputs=(q, k, v), seed=seed):
            torch.autograd.grad(out, inputs, seed, retain_graph=True)

        yield f"{name}, forward", forward
        yield f"{name}, backward", backward


def on_elements(device):
    x = torch.randn(8192, 4096, device=device, dtype=BF16)
    weight = torch.ones(4096, device=device, dtype=BF16)
    logits = torch.randn(4096, 50304, device=device)
    targets = torch.zeros(4096, device=device, dtype=torch.int64)
    yield "x + x, 8192 x 4096", lambda: x + x
    yield "gelu, 8192 x 4096", lambda: functional.gelu(x)
    yield "layer_norm, 8192 x 4096", lambda: functional.layer_norm(x, (4096,), weight, weight)
    yield "rms_norm, 8192 x 4096", lambda: functional.rms_norm(x, (4096,), weight)
    yield "cross_entropy, 4096 x 50304, float32", lambda: functional.cross_entropy(logits, targets)
    yield "to float32, 8192 x 4096", lambda: x.float()


def kernels(device):
    for family in (products, attentions, on_elements):
        yield from family(device)


def seconds_of_kernels(group):
    """name -> seconds on this GPU."""
    cache = torch.empty(256 << 20, dtype=torch.int8, device=group.device)
    found = {}
    for name, kernel in kernels(group.device):
        taken = []
        for _ in range(WARM_UP + REPEATS):
            cache.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            kernel()
            ended.record()
            ended.synchronize()
            taken.append(1e-3 * began.elapsed_time(ended))
        found[name] = statistics.median(taken[WARM_UP:])
    return found


def one_kernel(wanted, group):
    kernel = next(kernel for name, kernel in kernels(group.device) if name == wanted)
    group.recorder.phases.set("measured")
    kernel()


def simulated_kernel(name, machine):
    run = launch(one_kernel, 1, (name,), simulate=machine)
    began = min(at for at, phase in run.ledger.phases[0] if phase != "setup")
    return run.seconds - began


# -- steps --------------------------------------------------------------------------------------

LLAMA = dict(norm="rmsnorm", activation="swiglu", positions="rotary", bias=False)
CONFIGS = {  # name -> config, rows, dtype
    "GPT 125M": (model("gpt2").replace(dropout=0.0), 8, BF16),
    "GPT 350M": (model("gpt2-medium").replace(dropout=0.0), 8, BF16),
    "GPT 1.5B": (model("gpt2-xl").replace(dropout=0.0), 4, BF16),
    "GPT 125M, float32": (model("gpt2").replace(dropout=0.0), 8, torch.float32),
    "Llama 3 8B, 4 layers, 8192 tokens": (
        model("llama3-8b").replace(num_layers=4, seq_len=8192), 1, BF16,
    ),
    "Llama-like 1B, 2048 tokens": (
        ModelConfig(
            vocab_size=32000, d_model=2048, num_layers=16, num_heads=32, num_kv_heads=8,
            d_ffn=5632, seq_len=2048, **LLAMA,
        ), 4, BF16,
    ),
}  # fmt: skip


def steps_on_a_gpu(config, rows, dtype, group):
    """(median seconds of a step, peak bytes of the last one)"""
    gpt = GPT(config, device=group.device, dtype=dtype)
    optimizer = torch.optim.AdamW(gpt.parameters())
    tokens = torch.randint(config.vocab_size, (rows, config.seq_len), device=group.device)
    taken = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        train_step(gpt, optimizer, [(tokens, tokens)])
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_UP:]), torch.cuda.max_memory_allocated()


def two_steps(config, rows, dtype, group):
    gpt = GPT(config, device=group.device, dtype=dtype)
    optimizer = torch.optim.AdamW(gpt.parameters())
    tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64, device=group.device)
    for _ in range(2):  # the optimizer makes its states in the first one
        train_step(gpt, optimizer, [(tokens, tokens)])


def a_launch(group):
    """Seconds that the host takes to launch a kernel: many small ones in a row."""
    x = torch.ones(8, device=group.device)
    for _ in range(2):  # the second counts
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(2000):
            x = x + 1
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / 2000


def the_machine() -> str:
    """The planner's name of this GPU; ends the program where there is none or it has none."""
    if not torch.cuda.is_available():
        sys.exit("this compares with a GPU, and torch sees none here")
    gpu = torch.cuda.get_device_name()
    known = {"H100": "h100", "H200": "h200", "A100": "a100"}
    for theirs, ours in known.items():
        if theirs in gpu:
            return ours
    sys.exit(f"the planner does not know {gpu!r}; it knows {', '.join(known)}")


def row(name: str, simulated: float, measured: float, unit: str) -> Case:
    return Case(name, lambda: simulated, measured, None, unit, 1, 0)


def cases(long: bool):
    machine = the_machine()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: simulated, measured")
    (found,) = launch(seconds_of_kernels, 1, device="cuda", timeout=300).results
    for name, took in found.items():
        yield row(name, 1e6 * simulated_kernel(name, machine), 1e6 * took, "us")
    (host,) = launch(a_launch, 1, device="cuda").results
    print(f"the host launches a kernel in {1e6 * host:.2f} us")
    for name, (config, rows, dtype) in CONFIGS.items():
        job = (config, rows, dtype)
        ((took, peak),) = launch(steps_on_a_gpu, 1, job, device="cuda", timeout=300).results
        run = launch(two_steps, 1, job, simulate=machine, host_us=1e6 * host, timeout=300)
        yield row(f"{name}: a step", 1e3 * run.step_seconds, 1e3 * took, "ms")
        yield row(f"{name}: peak memory", run.peak_memory[0], float(peak), "bytes")


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
