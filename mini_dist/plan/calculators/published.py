"""Published runs to compare predictions with, and the papers' small tables of formulas.

Each table says what is measured and what is a formula; this file holds only these two kinds of
numbers. No prediction is computed from them: plans.py only uses them to tell how far a plan
extrapolates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import Layout, ModelConfig
from .flops import model_flops, step_flops
from .frameworks import Framework, framework
from .lines import readable
from .machines import Hardware, hardware
from .memory import device_memory, peak_memory
from .models import model as model_preset
from .parameters import num_parameters
from .step_time import step_time


@dataclass(frozen=True)
class PublishedRun:
    """A training run that somebody measured."""

    name: str
    config: ModelConfig
    layout: Layout
    machine: str | Hardware
    how: str | Framework
    seconds: float  # an optimizer step
    source: str

    def predicted(self):
        """The StepTime that we say it takes."""
        return step_time(self.config, self.layout, self.machine, self.how)

    def __str__(self):
        ours, machine = self.predicted(), hardware(self.machine)
        needed = device_memory(peak_memory(self.config, self.layout, self.how).total, self.how)
        limit = machine.device.memory_bytes
        sizes = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
        return (
            f"{self.name} on {self.layout.world_size} {machine.name}: measured "
            f"{self.seconds:.4g} s a step, we say {ours.seconds:.4g} s "
            f"({ours.seconds / self.seconds - 1:+.1%}; {self.source})"
            + f"; we call it too large: {sizes}"
            * (needed > limit)
        )


def gpt(heads: int, hidden: int, layers: int, seq_len: int = 2048) -> ModelConfig:
    """The GPTs of the Megatron papers: vocabulary 51200, dropout, learned positions."""
    return ModelConfig(
        vocab_size=51200,
        seq_len=seq_len,
        d_model=hidden,
        num_layers=layers,
        num_heads=heads,
        positions="learned",
        tied_embedding=True,
        dropout=0.1,
    )


def _pipeline(chunks: int) -> dict:
    return {"schedule": "interleaved", "num_chunks": chunks} if chunks > 1 else {}


def megatron_2021() -> list[PublishedRun]:
    """Narayanan et al. 2021, table 1, measured: weak scaling on Selene, full recompute.

    The paper prints TFLOP/s; the time follows by its equation 3.  Micro-batches and chunks are
    from Megatron-LM's examples/academic_paper_scripts/sc21/run_table_1.sh.
    """
    rows = [  # name, heads, hidden, layers, tp, pp, dp, global batch, micro-batch, chunks, TFLOP/s
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 32, 512, 16, 1, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 32, 512, 16, 1, 142),
        ("18B", 48, 6144, 40, 8, 1, 32, 1024, 8, 1, 135),
        ("39B", 64, 8192, 48, 8, 2, 32, 1536, 4, 1, 138),
        ("76B", 80, 10240, 60, 8, 4, 32, 1792, 2, 3, 140),
        ("145B", 96, 12288, 80, 8, 8, 24, 2304, 2, 2, 148),
        ("310B", 128, 16384, 96, 8, 16, 15, 2160, 1, 2, 155),
        ("530B", 128, 20480, 105, 8, 35, 9, 2520, 1, 3, 163),
        ("1T", 160, 25600, 128, 8, 64, 6, 3072, 1, 1, 163),
    ]
    runs = []
    for name, heads, hidden, layers, tp, pp, dp, batch, micro, chunks, tflops in rows:
        config = gpt(heads, hidden, layers)
        layout = Layout(
            pp=pp,
            dp=dp,
            tp=tp,
            micro_batch_size=micro,
            recompute="full",
            num_micro_batches=batch // dp // micro,
            **_pipeline(chunks),
        )
        seconds = step_flops(config, batch, "full").total / (layout.world_size * tflops * 1e12)
        runs.append(
            PublishedRun(
                f"Megatron {name}",
                config,
                layout,
                "a100-80",
                "megatron-2021",
                seconds,
                "Narayanan et al. 2021, table 1",
            )
        )
    return runs


def megatron_2021_against_zero_3() -> tuple[list[PublishedRun], list[PublishedRun]]:
    """Narayanan et al. 2021, table 2, measured: strong scaling on Selene by tp 8 and a pipeline,
    and by DeepSpeed's ZeRO-3 of that spring alone, both with full recompute.

    Looked at after the model was written, and nothing was changed for it.  The paper prints
    TFLOP/s.  Not told: the pipeline's chunks; one is assumed.
    """
    models = {"175B": (96, 12288, 96, 12), "530B": (128, 20480, 105, 35)}  # ..., layers, pp
    pipelines = [  # name, global batch, GPUs, micro-batch, TFLOP/s
        ("175B", 1536, 384, 1, 153),
        ("175B", 1536, 768, 1, 149),
        ("175B", 1536, 1536, 1, 141),
        ("530B", 2240, 560, 1, 171),
        ("530B", 2240, 1120, 1, 167),
        ("530B", 2240, 2240, 1, 159),
    ]
    sharded = [
        ("175B", 1536, 384, 4, 144),
        ("175B", 1536, 768, 2, 88),
        ("175B", 1536, 1536, 1, 44),
        ("530B", 2560, 640, 4, 138),
        ("530B", 2240, 1120, 2, 98),
        ("530B", 2240, 2240, 1, 48),
    ]

    def run(row, zero: int) -> PublishedRun:
        name, batch, gpus, micro, tflops = row
        heads, hidden, layers, pp = models[name]
        config, cut = gpt(heads, hidden, layers), 1 if zero else 8 * pp
        layout = Layout(
            pp=1 if zero else pp,
            dp=gpus // cut,
            tp=1 if zero else 8,
            zero=zero,
            micro_batch_size=micro,
            num_micro_batches=batch // (gpus // cut) // micro,
            recompute="full",
        )
        how = "megatron-deepspeed" if zero else "megatron-2021"
        seconds = step_flops(config, batch, "full").total / (gpus * tflops * 1e12)
        source = "Narayanan et al. 2021, table 2"
        return PublishedRun(f"Megatron {name}", config, layout, "a100-80", how, seconds, source)

    return [run(row, 0) for row in pipelines], [run(row, 3) for row in sharded]


def korthikanti_2022() -> list[PublishedRun]:
    """Korthikanti et al. 2022, table 5, measured: full against selective recompute."""
    rows = [  # name, heads, hidden, layers, tp, pp, chunks, batch, micro-batch, s full, s selective
        ("22B", 64, 6144, 48, 8, 1, 1, 4, 4, 1.42, 1.1),
        ("175B", 96, 12288, 96, 8, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 128, 20480, 105, 8, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 160, 25600, 128, 8, 64, 1, 512, 1, 94.42, 71.49),
    ]
    runs = []
    for name, heads, hidden, layers, tp, pp, chunks, batch, micro, full, selective in rows:
        for recompute, seconds in (("full", full), ("selective", selective)):
            layout = Layout(
                pp=pp,
                tp=tp,
                sequence_parallel=recompute == "selective",
                micro_batch_size=micro,
                num_micro_batches=batch // micro,
                recompute=recompute,
                **_pipeline(chunks),
            )
            runs.append(
                PublishedRun(
                    f"{name}, {recompute} recompute",
                    gpt(heads, hidden, layers),
                    layout,
                    "a100-80",
                    "megatron-2022",
                    seconds,
                    "Korthikanti et al. 2022, table 5",
                )
            )
    return runs


# llm-foundry's FSDP1 with a Triton kernel of the first FlashAttention: half the speed of the
# second (Dao 2023), chosen with its own table in view (chosen.py).
MPT = framework("fsdp1").replace(name="fsdp1, the first FlashAttention", flash_speed=0.5)


def mpt(heads: int, hidden: int, layers: int, seq_len: int) -> ModelConfig:
    """MosaicML's models: no biases, learned positions, a tied head."""
    return ModelConfig(
        vocab_size=50368,
        seq_len=seq_len,
        d_model=hidden,
        num_layers=layers,
        num_heads=heads,
        positions="learned",
        bias=False,
        tied_embedding=True,
    )


def mpt_h100() -> list[PublishedRun]:
    """llm-foundry, scripts/train/benchmarking/README.md at 061f2c7, "H100 80GB BF16": every row.

    Compared after the model was written, and nothing was changed for it.  The table of its A100s
    had been in view; the speed of its attention comes from there.
    """
    models = {  # heads, hidden, layers
        "760m": (12, 1536, 24),
        "1b": (16, 2048, 24),
        "3b": (20, 2560, 32),
        "7b": (32, 4096, 32),
        "13b": (40, 5120, 40),
        "30b": (56, 7168, 48),
        "70b": (64, 8192, 80),
    }
    rows = [  # model, sequence, GPUs, micro-batch, micro-batches, tokens/s, recompute
        ("70b", 2048, 64, 8, 4, 66523, "full"),
        ("70b", 2048, 32, 2, 16, 28242, "full"),
        ("30b", 8192, 8, 1, 21, 11072, "full"),
        ("30b", 4096, 8, 1, 21, 14419, "full"),
        ("30b", 2048, 32, 14, 3, 73860, "full"),
        ("30b", 2048, 16, 10, 3, 36209, "full"),
        ("30b", 2048, 8, 3, 21, 16022, "full"),
        ("30b", 1024, 8, 6, 21, 16672, "full"),
        ("13b", 32768, 8, 1, 3, 15812, "full"),
        ("13b", 16384, 8, 3, 3, 23881, "full"),
        ("13b", 4096, 8, 10, 3, 37740, "full"),
        ("13b", 2048, 64, 2, 1, 307209, "none"),
        ("13b", 2048, 32, 2, 1, 153960, "none"),
        ("13b", 2048, 16, 2, 1, 76280, "none"),
        ("13b", 2048, 8, 2, 1, 38336, "none"),
        ("13b", 1024, 8, 40, 3, 44019, "full"),
        ("7b", 65536, 8, 1, 2, 15654, "full"),
        ("7b", 32768, 8, 2, 2, 26550, "full"),
        ("7b", 8192, 8, 8, 2, 55481, "full"),
        ("7b", 4096, 8, 16, 2, 68893, "full"),
        ("7b", 2048, 8, 6, 1, 85144, "none"),
        ("7b", 1024, 8, 64, 2, 81628, "full"),
        ("3b", 65536, 8, 1, 2, 26099, "full"),
        ("3b", 32768, 8, 3, 6, 46984, "full"),
        ("3b", 16384, 8, 1, 6, 89223, "none"),
        ("3b", 8192, 8, 3, 6, 132626, "none"),
        ("3b", 4096, 8, 5, 6, 167712, "none"),
        ("3b", 2048, 64, 6, 3, 1441663, "none"),
        ("3b", 2048, 32, 6, 3, 736701, "none"),
        ("3b", 2048, 16, 10, 3, 386285, "none"),
        ("3b", 1024, 8, 20, 6, 216369, "none"),
        ("3b", 512, 8, 40, 6, 223721, "none"),
        ("1b", 65536, 8, 1, 2, 44050, "full"),
        ("1b", 32768, 8, 1, 4, 96203, "none"),
        ("1b", 16384, 8, 2, 4, 157194, "none"),
        ("1b", 8192, 8, 3, 4, 233256, "none"),
        ("1b", 4096, 8, 7, 4, 308282, "none"),
        ("1b", 2048, 64, 20, 1, 2841754, "none"),
        ("1b", 2048, 32, 20, 1, 1444183, "none"),
        ("1b", 2048, 16, 20, 1, 736596, "none"),
        ("1b", 2048, 8, 14, 1, 363645, "none"),
        ("1b", 1024, 8, 18, 4, 391287, "none"),
        ("1b", 512, 8, 56, 4, 418201, "none"),
        ("760m", 32768, 8, 1, 2, 130333, "none"),
        ("760m", 16384, 8, 3, 2, 222521, "none"),
        ("760m", 8192, 8, 6, 2, 334602, "none"),
        ("760m", 4096, 8, 12, 2, 443674, "none"),
        ("760m", 2048, 32, 24, 1, 2175091, "none"),
        ("760m", 2048, 16, 24, 1, 1096819, "none"),
        ("760m", 2048, 8, 24, 2, 505177, "none"),
        ("760m", 1024, 8, 48, 2, 628648, "none"),
        ("760m", 512, 8, 96, 2, 669998, "none"),
    ]
    runs = []
    for name, seq_len, gpus, size, micros, speed, recompute in rows:
        config = mpt(*models[name], seq_len)
        cut = {"micro_batch_size": size, "num_micro_batches": micros, "recompute": recompute}
        layout = Layout(dp=gpus, zero=3, **cut)
        seconds = layout.global_batch_size * seq_len / speed
        runs.append(
            PublishedRun(f"MPT-{name}", config, layout, "h100", MPT, seconds, "llm-foundry, H100")
        )
    return runs


def later() -> list[PublishedRun]:
    """Runs of other clusters and other programs, predicted as they are.

    No constant of the time was chosen with Llama 3 or BLOOM in view; MPT's table was in view for
    the speed of its attention, and BLOOM's for the share of memory lost to fragments. Anything that
    the papers do not say is assumed here, with a note.
    """
    llama = model_preset("llama3-405b")
    runs = []
    for gpus, dp, micros, tflops in ((8192, 64, 32, 430), (16384, 128, 16, 400)):
        # Not told: micro-batch size and chunks a rank.  1, and 4 chunks of two layers.
        layout = Layout(
            pp=16,
            dp=dp,
            tp=8,
            sequence_parallel=True,
            zero=1,
            num_micro_batches=micros,
            **_pipeline(4),
        )
        seconds = model_flops(llama, layout.global_batch_size) / (gpus * tflops * 1e12)
        source = "Llama 3 herd 2024, table 4; chunks assumed"
        name = f"Llama 3 405B, {gpus:,} GPUs"
        runs.append(PublishedRun(name, llama, layout, "h100", "megatron-core", seconds, source))
    bloom = model_preset("bloom-176b")
    layout = Layout(
        pp=12,
        dp=8,
        tp=4,
        zero=1,
        micro_batch_size=2,
        num_micro_batches=128,
        recompute="full",
    )
    # "About 150 TFLOP/s" counts what is recomputed, as Megatron's logs do.
    seconds = step_flops(bloom, 2048, "full").total / (384 * 150e12)
    source = "BigScience 2022, about 150 TFLOP/s a GPU"
    runs.append(
        PublishedRun("BLOOM-176B", bloom, layout, "jean-zay", "megatron-deepspeed", seconds, source)
    )
    rows = [  # name, heads, hidden, layers, sequence, GPUs, micro-batch, micro-batches, tokens/s
        ("MPT-7B", 32, 4096, 32, 8192, 8, 8, 2, 25655),
        ("MPT-30B", 56, 7168, 48, 2048, 8, 3, 21, 7330),
        ("MPT-70B", 64, 8192, 80, 2048, 64, 8, 4, 26274),
    ]
    for name, heads, hidden, layers, seq_len, gpus, size, micros, speed in rows:
        config = mpt(heads, hidden, layers, seq_len)
        layout = Layout(
            dp=gpus,
            zero=3,
            micro_batch_size=size,
            num_micro_batches=micros,
            recompute="full",
        )
        seconds = layout.global_batch_size * seq_len / speed
        source = "llm-foundry, scripts/train/benchmarking"
        runs.append(PublishedRun(name, config, layout, "a100-80", MPT, seconds, source))
    return runs


# By datasheet the NVL has 835 TFLOP/s in bf16 at 400 W, the SXM 989 at 700 W.
LIMITED = (835 + (989 - 835) * (500 - 400) / (700 - 400)) / 989


def torchtitan_2024() -> list[PublishedRun]:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1, 3, 4 and 5.

    Looked at after the model was written.  Since then what the source says of these runs was built
    in, and nothing was fitted to them: slower memory, fp32 reduces, selective checkpointing by
    operators, no resharding in a pipeline, FlashAttention 2.  Their limit of 500 W is said here: by
    the file's own note the peak lies between the SXM's and the NVL's.  Not said there: how many
    chunks interleaving had, and into how many micro-batches the 32 sequences of a replica were cut.
    The defaults of pipelining_utils.py are 2 chunks, and as many micro-batches as stages.
    """
    slower = {"memory_bytes": 96e9, "memory_bandwidth": 2.4e12}
    slower["sustained_flops"] = LIMITED * hardware("h100").device.gemm_rate
    machine = hardware("h100").replace(device=slower)
    eager = framework("torchtitan")
    compiled = eager.replace(name="torchtitan, compiled", fused_activation=True)
    fp8 = compiled.replace(name="torchtitan, compiled, fp8", fp8=True)
    async_tp = fp8.replace(name="the same, async TP", overlaps_tensor=True)
    fsdp = {"zero": 3, "micro_batch_size": 2, "recompute": "selective"}
    two = {"dp": 32, "tp": 8, "sequence_parallel": True, "zero": 3, "micro_batch_size": 16}
    three = {"pp": 8, "dp": 8, "tp": 8, "sequence_parallel": True, "zero": 3}
    three |= {"micro_batch_size": 4, "num_micro_batches": 8}
    two_chunks = {**_pipeline(2), "micro_batch_size": 2, "num_micro_batches": 16}
    again = {"recompute": "full"}
    rows = [  # model, program, layout, tokens/s a GPU
        ("llama3-8b", eager, {"dp": 8, **fsdp}, 5762),
        ("llama3-8b", compiled, {"dp": 8, **fsdp}, 6667),
        ("llama3-8b", fp8, {"dp": 8, **fsdp}, 8532),
        ("llama3-8b", eager, {"dp": 128, **fsdp}, 5605),
        ("llama3-8b", compiled, {"dp": 128, **fsdp}, 6514),
        ("llama3-8b", fp8, {"dp": 128, **fsdp}, 8380),
        ("llama3-70b", fp8, {**two, **again}, 829),
        ("llama3-70b", async_tp, {**two, **again}, 876),
        ("llama3-405b", async_tp, {**three, **again}, 100),
        ("llama3-405b", async_tp, {**three, **again, **two_chunks}, 128),
    ]
    runs = []
    for name, how, cut, speed in rows:
        config, layout = model_preset(name), Layout(**cut)
        tokens = layout.global_batch_size * config.seq_len
        seconds = tokens / (speed * layout.world_size)
        runs.append(
            PublishedRun(f"{name}, {how.name}", config, layout, machine, how, seconds, "torchtitan")
        )
    return runs


def torchtitan_2025() -> list[PublishedRun]:
    """torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md: 32 and 64 H200.

    Looked at after all of the above, and nothing was changed since.  Parameters were gathered in
    fp8 there, here they are in bf16.
    """
    how = framework("torchtitan").replace(
        name="torchtitan, compiled, fp8", fused_activation=True, fp8=True
    )
    runs = []
    for dp, speed in ((32, 10938), (64, 10753)):
        layout = Layout(dp=dp, zero=3, micro_batch_size=2, recompute="selective")
        config = model_preset("llama3-8b")
        seconds = layout.global_batch_size * config.seq_len / (speed * dp)
        runs.append(
            PublishedRun("Llama 3.1 8B", config, layout, "h200", how, seconds, "torchtitan, H200")
        )
    return runs


def nemo_h100() -> list[PublishedRun]:
    """NVIDIA's performance summaries of NeMo 24.07 and 25.09 (the last two rows): DGX H100, fp8.

    We assume that `tp_comm_overlap` is on, as in NeMo's recipes, and ZeRO-1. No constant was chosen
    with these rows in view. But they led us to a wrong term: messages of an interleaved pipeline
    were counted as if nothing hid them, while `simulate` hides most of them.
    """
    fp8 = framework("megatron-core").replace(name="NeMo, fp8", fp8=True, overlaps_tensor=True)
    rows = [  # GPUs, sequences, micro-batch, length, tp, pp, cp, chunks, tokens/s per GPU
        ("gpt3-175b", 128, 256, 1, 2048, 4, 8, 1, 6, 716),
        ("gpt3-175b", 512, 2048, 2, 2048, 4, 8, 1, 6, 825),
        ("llama2-7b", 8, 128, 1, 4096, 1, 1, 1, 1, 16934),
        ("llama2-13b", 16, 128, 1, 4096, 1, 4, 1, 10, 8715),
        ("llama2-70b", 64, 128, 1, 4096, 4, 4, 1, 20, 1728),
        ("llama3-8b", 8, 128, 1, 8192, 1, 1, 2, 1, 12273),
        ("llama3-70b", 64, 128, 1, 8192, 4, 4, 2, 5, 1524),
        ("llama3-70b", 64, 128, 1, 8192, 4, 8, 1, 5, 1619),
        ("llama3-405b", 1024, 512, 1, 8192, 8, 8, 2, 8, 302),
    ]
    runs = []
    for name, gpus, sequences, size, length, tp, pp, cp, chunks, speed in rows:
        config = gpt(96, 12288, 96) if name == "gpt3-175b" else model_preset(name)
        # (The 126 layers of 405B, embedding and head share 64 chunks of two.)
        config = config.replace(seq_len=length, dropout=0.0)
        dp = gpus // (tp * pp * cp)
        layout = Layout(
            pp=pp,
            dp=dp,
            cp=cp,
            tp=tp,
            sequence_parallel=tp > 1,
            zero=1,
            micro_batch_size=size,
            num_micro_batches=sequences // (dp * size),
            **_pipeline(chunks),
        )
        seconds = sequences * length / (speed * gpus)
        runs.append(PublishedRun(name, config, layout, "h100", fp8, seconds, "NVIDIA NeMo"))
    return runs


def nearest(config: ModelConfig, machine: Hardware, num_devices: int) -> PublishedRun:
    """The published run most like this one: in size, in number of devices, on the same device."""
    size = math.log(num_parameters(config))

    def distance(run: PublishedRun) -> float:
        return (
            abs(math.log(num_parameters(run.config)) - size)
            + abs(math.log(run.layout.world_size / num_devices)) / 2
            + (hardware(run.machine).device.name != machine.device.name)
        )

    return min(megatron_2021() + korthikanti_2022() + later(), key=distance)


def alike(layout: Layout, machine: Hardware) -> list[PublishedRun]:
    """The runs on such devices whose parameters were sharded (ZeRO-3) where the layout's are."""
    return [
        run
        for run in megatron_2021() + korthikanti_2022() + later() + torchtitan_2024()
        if (run.layout.zero == 3) == (layout.zero == 3)
        and hardware(run.machine).device.name == machine.device.name
    ]


# ZeRO (Rajbhandari et al. 2020) table 1, a formula: GB per device at K = 12 when the optimizer,
# also the gradients, also the parameters are sharded.  Cells as printed: some rounded, some cut
# off.
ZERO_TABLE_1 = [  # billion parameters, dp, P_os, P_os+g, P_os+g+p
    (7.5, 1, "120", "120", "120"),
    (7.5, 4, "52.5", "41.3", "30"),
    (7.5, 16, "35.6", "21.6", "7.5"),
    (7.5, 64, "31.4", "16.6", "1.88"),
    (7.5, 256, "30.4", "15.4", "0.47"),
    (7.5, 1024, "30.1", "15.1", "0.12"),
    (128, 1, "2048", "2048", "2048"),
    (128, 4, "896", "704", "512"),
    (128, 16, "608", "368", "128"),
    (128, 64, "536", "284", "32"),
    (128, 256, "518", "263", "8"),
    (128, 1024, "513", "257", "2"),
    (1000, 1, "16000", "16000", "16000"),
    (1000, 4, "7000", "5500", "4000"),
    (1000, 16, "4750", "2875", "1000"),
    (1000, 64, "4187", "2218", "250"),
    (1000, 256, "4046", "2054", "62.5"),
    (1000, 1024, "4011", "2013", "15.6"),
]

# Korthikanti et al. 2022 figure 1, formulas: GiB per device on the first stage, parameters and
# optimizer (18 bytes for each of 12 L h^2), activations with tp only, with selective recompute and
# sequence parallel; and figure 7: activations in % of tp only.
KORTHIKANTI_FIGURE_1 = {
    "22B": (45.5625, 59.25, 9.5625),
    "175B": (45.5625, 66.84375, 12.3515625),
    "530B": (31.640625, 114.0234375, 23.076171875),
    "1T": (32.958984375, 131.25, 26.5625),
}
KORTHIKANTI_FIGURE_7 = {  # sequence parallel, selective, both, full
    "22B": (66.84, 49.42, 16.18, 7.64),
    "175B": (62.04, 56.53, 18.49, 8.71),
    "530B": (58.31, 62.04, 20.27, 9.42),
    "1T": (58.31, 62.04, 20.27, 9.42),
}

# Qi et al. 2023 tables 5 and 9: bubble rates computed from profiled milliseconds.
ZERO_BUBBLE_RATES = [  # name, p, m, 1F1B, interleaved, ZB-H1, ZB-H2, T_F, T_B, T_W, T_comm
    ("1.5B", 8, 24, 0.2431, 0.1055, 0.1585, 0.1083, 18.522, 18.086, 9.337, 0.601),
    ("1.5B", 8, 32, 0.1985, 0.0818, 0.1242, 0.0837, 18.513, 18.086, 9.331, 0.626),
    ("1.5B", 8, 64, 0.124, 0.0443, 0.0674, 0.0444, 18.546, 18.097, 9.321, 0.762),
    ("6.2B", 8, 24, 0.2347, 0.0808, 0.1323, 0.0698, 29.718, 29.444, 19.927, 0.527),
    ("6.2B", 8, 32, 0.1898, 0.0628, 0.1045, 0.0559, 29.802, 29.428, 19.53, 0.577),
    ("6.2B", 8, 64, 0.1091, 0.032, 0.0554, 0.0294, 29.935, 29.621, 19.388, 0.535),
    ("14.6B", 16, 48, 0.2552, 0.1104, 0.1397, 0.0672, 11.347, 11.248, 8.132, 0.377),
    ("14.6B", 16, 64, 0.2082, 0.0852, 0.1088, 0.0516, 11.307, 11.254, 8.101, 0.379),
    ("14.6B", 16, 128, 0.1251, 0.0445, 0.0576, 0.0266, 11.325, 11.308, 8.109, 0.378),
    ("28.3B", 32, 96, 0.2646, 0.1493, 0.1421, 0.0641, 10.419, 10.207, 7.715, 0.408),
    ("28.3B", 32, 128, 0.2168, 0.1164, 0.1106, 0.049, 10.408, 10.204, 7.703, 0.408),
    ("28.3B", 32, 256, 0.1352, 0.0624, 0.0594, 0.0257, 10.402, 10.248, 7.698, 0.46),
]
