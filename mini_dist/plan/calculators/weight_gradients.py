"""The bytes of weight gradients that are computed but not yet accumulated."""

from __future__ import annotations

from functools import lru_cache

from .parameters import Cuts, layer_weights


def weight_gradients(config, layout, how, is_last) -> tuple[float, float]:
    """Bytes of weight gradients on their way: in a layer, and of the head at the loss."""
    if how.weight_gradients == "none":
        return 0.0, 0.0
    each = min(how.parameter_bytes, how.activation_bytes)
    largest, head = _gradient_sizes(config, layout, is_last)
    if how.weight_gradients == "largest":
        return each * max(largest, head), 0.0
    kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
    cuts = _cuts(layout)
    return each * sum(_matrix_sizes(config, cuts, moe)[1] for moe in kinds), each * head


def _cuts(layout) -> Cuts:
    """As if ep did not spread the experts: it leaves each one's matrices as they are."""
    return Cuts(layout.tp, 1, layout.etp)


def _gradient_sizes(config, layout, is_last: bool) -> tuple[float, float]:
    """Numbers of the largest matrix of a layer, and of the head where it is."""
    kinds = {config.is_moe_layer(0), config.is_moe_layer(config.num_layers - 1)}
    return (
        max(_matrix_sizes(config, _cuts(layout), moe)[0] for moe in kinds),
        config.vocab_size * config.d_model / layout.tp if is_last else 0.0,
    )


@lru_cache(maxsize=4096)
def _matrix_sizes(config, cuts, moe) -> tuple[float, float]:
    """Numbers of the largest matrix of a layer, and of one of each (experts share theirs)."""
    sizes = [
        float(weight.numel_per_rank(cuts, config.num_kv_heads)) / weight.experts
        for weight in layer_weights(config, moe)
        if weight.is_matmul
    ]
    return max(sizes), sum(sizes)
