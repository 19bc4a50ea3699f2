"""The work of a model, in floating-point operations, and how long that takes.

A matrix of P numbers costs 2 P operations per token forward (a multiplication and an addition) and
twice that backward: 6 P.  Attention scores come on top: they grow with the sequence, not with P.

Conventions, because published utilisations differ by them:
* model FLOPs: forward + backward, what the mathematics needs; MFU divides them by time and peak.
* hardware FLOPs: also what recomputation repeats; HFU (Korthikanti et al. 2022 section 6.3).
* `causal=False` counts all S^2 scores, as the Megatron papers and PaLM (appendix B) do, although
  half of them are masked; `causal=True` counts the half that a good kernel computes.
* The embedding is a table look-up: no FLOPs.  6 * (all parameters) counts it nevertheless.
"""

from __future__ import annotations

from functools import lru_cache

from ..config import RECOMPUTE, ModelConfig
from ..fields import at_least, checks_kinds
from .lines import Breakdown, Line
from .machines import Hardware, hardware
from .models import model as model_preset
from .parameters import layer_weights, num_active_parameters, outer_weights

YEAR = 365.25 * 86400


@checks_kinds
@lru_cache(maxsize=256)
def forward_flops(
    config: ModelConfig | str, causal: bool = False, seq_len: int | None = None
) -> Breakdown:
    """Return the FLOPs of one sequence's forward pass, by kind of module (Narayanan et al.
    2021)."""
    config = model_preset(config)
    S = config.seq_len if seq_len is None else seq_len
    dense, moe = config.num_layers - config.num_moe_layers, config.num_moe_layers
    kinds: dict[str, float] = {}
    for copies, weights in (
        (dense, layer_weights(config)),
        (moe, layer_weights(config, moe=True) if moe else []),
        (1, outer_weights(config, "last")),
    ):
        for weight in weights:
            if weight.is_matmul:
                kinds[weight.kind] = (
                    kinds.get(weight.kind, 0) + copies * 2 * S * weight.numel_visited
                )
    lines = [
        Line(kind, flops, "FLOP", "2 S * matrix numbers a token meets", "PaLM appendix B")
        for kind, flops in kinds.items()
    ]
    lines.append(
        Line(
            "attention scores",
            config.num_layers * score_flops(config, S, causal),
            "FLOP",
            "L 2 S^2 N (H_qk + H_v)" + (" / 2" if causal else ""),
            "Narayanan et al. 2021 appendix",
        )
    )
    return Breakdown("forward FLOPs of one sequence", tuple(lines))


def score_flops(config: ModelConfig, seq_len: int, causal: bool = False) -> float:
    """Return the FLOPs of Q K^T and of scores times V, one layer, one sequence, forward."""
    qk_dim = config.head_dim + config.rope_head_dim
    flops = 2 * seq_len**2 * config.num_heads * (qk_dim + config.v_head_dim)
    return flops / 2 if causal else flops


@checks_kinds
def step_flops(
    config: ModelConfig | str, sequences: int, recompute: str = "none", causal: bool = False
) -> Breakdown:
    """Return the FLOPs of one optimizer step on `sequences` sequences: forward, backward,
    recomputed.

    The total is the hardware FLOPs; `model_flops` excludes recomputation.  `config` may be a
    model's name.  Raises ValueError for an unknown name, and for fewer than 0 sequences.
    """
    config = model_preset(config)
    at_least("sequences", sequences, 0)
    if recompute not in RECOMPUTE:
        raise ValueError(
            f"recompute={recompute!r} is not known: give one of {', '.join(map(repr, RECOMPUTE))}."
        )
    forward = forward_flops(config, causal)
    again = {
        "none": 0.0,
        "selective": forward["attention scores"],
        "full": forward.total - forward["head"],
    }[recompute]
    return Breakdown(
        f"FLOPs of a step of {sequences} sequences",
        (
            Line(
                "forward", sequences * forward.total, "FLOP", "sum of the modules", "forward_flops"
            ),
            Line(
                "backward",
                2 * sequences * forward.total,
                "FLOP",
                "2 * forward",
                "gradients of inputs and of weights",
            ),
            Line(
                "recomputed",
                sequences * again,
                "FLOP",
                {
                    "none": "nothing",
                    "selective": "attention scores",
                    "full": "forward of all layers",
                }[recompute],
                "Korthikanti et al. 2022 section 5",
            ),
        ),
    )


@checks_kinds
def model_flops(config: ModelConfig | str, sequences: int, causal: bool = False) -> float:
    """Return the FLOPs of one optimizer step that the mathematics needs: MFU counts these."""
    return step_flops(config, sequences, "none", causal).total


@checks_kinds
def training_time(
    model: ModelConfig | float,
    tokens: float,
    num_devices: int = 1,
    machine: Hardware | str = "a100-80",
    utilisation: float = 1.0,
) -> Breakdown:
    """Return how long `tokens` tokens take, by 6 P T: the back-of-the-envelope estimate.

    `model` is a ModelConfig or a number of parameters.  GPT-3 (175e9 parameters, 300e9 tokens) on
    one A100 is 32 years *at the datasheet's peak*. `utilisation` is the model's share (MFU): a run
    that recomputes uses 8 P T of hardware FLOPs, so 45 % of the peak there is an MFU of 34 %.
    """
    machine = hardware(machine) if isinstance(machine, str) else machine
    if not 0 < utilisation <= 1:
        raise ValueError(
            f"utilisation={utilisation!r} is not a share of the peak: give a number "
            "above 0 and at most 1, such as 0.45."
        )
    parameters = num_active_parameters(model) if isinstance(model, ModelConfig) else model
    for field, value in (("model", parameters), ("tokens", tokens), ("num_devices", num_devices)):
        if not value > 0:
            raise ValueError(f"{field}={value!r} is too small: give a number above 0.")
    peak = machine.device.peak_flops
    flops = 6 * parameters * tokens
    seconds = flops / (num_devices * peak * utilisation)
    lines = [
        Line(
            "parameters", parameters, "parameters", "those that a token meets", "parameter_counts"
        ),
        Line("work", flops, "FLOP", "6 P T", "Kaplan et al. 2020 section 2.1"),
        Line(
            "peak",
            num_devices * peak,
            "FLOP/s",
            f"{num_devices} * {peak / 1e12:g} TFLOP/s",
            machine.device.source,
        ),
        Line("utilisation", utilisation, "", "of the peak", "assumed: measure your own"),
        Line("time", seconds, "s", "work / (peak * utilisation)", ""),
        Line("days", seconds / 86400, "days", "time / 86400 s", ""),
        Line("years", seconds / YEAR, "years", "time / 365.25 days", ""),
    ]
    if machine.dollars_per_hour is not None:
        lines.append(
            Line(
                "cost",
                machine.dollars_per_hour * num_devices * seconds / 3600,
                "dollars",
                "price * devices * hours",
                "dollars_per_hour",
            )
        )
    return Breakdown("training time", tuple(lines))
