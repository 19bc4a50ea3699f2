"""Borrowed memory: how much of the host's and of files, what moves, and how large a model
fits on few devices.

    host_memory(config, layout, how)        what a device's share of the host must hold
    file_memory(config, layout, how)        and of the disks, which can hold gradients [Infinity]
    traffic(config, layout, how)            what goes over the link and through files in a step
    intensity(...)                          FLOPs for each byte that moves: does it hide?
    largest_model("dgx-2", 1, "host")       how many layers of a width fit, and what limits them

The time that it costs is in optimizer_time.py and stage_time.py.

Sources: [Offload] Ren et al. 2021, ZeRO-Offload; [Infinity] Rajbhandari et al. 2021, ZeRO-Infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Layout, ModelConfig
from ..fields import checks_kinds
from .activations import cut_of_whole, tokens_of_micro_batch
from .flops import model_flops
from .frameworks import Framework, framework
from .lines import Breakdown, Line, readable
from .machines import Hardware, hardware
from .memory import device_memory, peak_memory
from .optimizer_time import gradients_leave, passed_in_step
from .parameters import (
    HeldParameters,
    copies,
    held_by_layer,
    held_outside,
    num_parameters,
    parameters_of_rank,
)

# What is borrowed, by the name of the tier that the last of it is in.
TIERS = {
    "device": {},
    "host: states": dict(offload_optimizer=True, offload_gradients=True),
    "host: all": dict(offload_optimizer=True, offload_gradients=True, offload_parameters=True),
    "files": dict(
        offload_optimizer=True,
        offload_gradients=True,
        offload_parameters=True,
        offload_to_files=True,
    ),
}


def _shard(config, layout) -> float:
    """Parameters that a rank steps."""
    return _part_of(parameters_of_rank(config, layout, 0), layout)


def _part_of(held: HeldParameters, layout: Layout) -> float:
    """Of parameters that a rank computes with, those that it steps: experts are shared among edp
    ranks, all others among dp * cp."""
    return sum(numel / (ways if layout.zero else 1) for numel, ways, _ in copies(held, layout))


def _largest_layer(config, layout) -> float:
    """Parameters of a rank's shard of its largest layer."""
    kinds = {False, True} if 0 < config.num_moe_layers < config.num_layers else {_has_moe(config)}
    return max(_part_of(held_by_layer(config, layout, moe), layout) for moe in kinds)


def _has_moe(config) -> bool:
    return config.num_moe_layers > 0


def _units(config, layout) -> tuple[float, float, float]:
    """Parameters of a rank's shards of the units that our engine makes: of what is outside the
    layers, of a layer without its experts, and of one expert."""
    held = held_by_layer(config, layout, _has_moe(config))
    layer = _part_of(HeldParameters(dense=held.dense), layout)
    experts = _part_of(HeldParameters(experts=held.experts), layout)
    here = config.num_experts / layout.ep
    outside = _part_of(held_outside(config, layout, 0), layout)
    return outside, layer, experts / here if experts else 0.0


def stays(config, layout) -> float:
    """Parameters of a rank's shards of what forward leaves on the device for backward: the last two
    layers, the last two experts, and what is outside the layers."""
    outside, layer, expert = _units(config, layout)
    return min(2, config.num_layers) * layer + outside + 2 * expert


def host_memory(config: ModelConfig, layout: Layout, how: str | Framework) -> Breakdown:
    """Bytes of the host for one device. Files need room for two layers that are on their way."""
    how, shard = framework(how), _shard(config, layout)
    passing = 2 * _largest_layer(config, layout) if how.offload_to_files else shard
    where = "2 layers of " if how.offload_to_files else ""
    lines = []
    if how.offload_optimizer:
        k = how.optimizer_bytes
        lines.append(Line("optimizer", k * passing, "bytes", f"{k:g} P, {where}a shard"))
    if how.offload_gradients:
        g = how.gradient_bytes
        lines.append(Line("gradients", g * passing, "bytes", f"{g:g} P, {where}a shard"))
    if how.offload_parameters:
        e = how.activation_bytes
        lines.append(Line("parameters", e * passing, "bytes", f"{e:g} P, {where}a shard"))
    if how.own_runs and how.offload_optimizer:  # offload/gradients.py: two arrive, and AdamW's
        outside, layer, expert = _units(config, layout)
        unit, g = max(outside, layer), how.gradient_bytes
        arrive, formula = 2 * g * (unit + expert), f"2 * {g:g} P_unit"  # experts on their own
        lines.append(Line("gradients that arrive", arrive, "bytes", formula))
        temporary = 8 * max(unit, expert)
        lines.append(Line("optimizer's temporaries", temporary, "bytes", "2 * 4 P_unit"))
        if not how.offload_parameters:  # the stepped copy, in addition to the device's
            e = how.parameter_bytes
            lines.append(Line("shards", e * passing, "bytes", f"{e:g} P, {where}a shard"))
    if how.offload_activations:
        size = how.activation_bytes * config.d_model * tokens_of_micro_batch(config, layout)
        size *= config.num_layers / layout.pp / cut_of_whole(layout)
        lines.append(Line("activations", size, "bytes", "e D tokens a layer"))
    return Breakdown("a device's share of the host", tuple(lines))


def file_memory(config: ModelConfig, layout: Layout, how: str | Framework) -> Breakdown:
    """Bytes of files for one device."""
    how, shard = framework(how), _shard(config, layout)
    if not how.offload_to_files:
        return Breakdown("a device's share of files", ())
    lines = [Line("optimizer", how.optimizer_bytes * shard, "bytes", f"{how.optimizer_bytes:g} P")]
    if how.offload_gradients:
        g = how.gradient_bytes
        lines.append(Line("gradients", g * shard, "bytes", f"{g:g} P"))
    if how.offload_parameters:
        e = how.activation_bytes
        lines.append(Line("parameters", e * shard, "bytes", f"{e:g} P"))
    return Breakdown("a device's share of files", tuple(lines))


def traffic(config: ModelConfig, layout: Layout, how: str | Framework) -> Breakdown:
    """Bytes that one device moves in a step: to the host and back, and through files."""
    how, shard, m = framework(how), _shard(config, layout), layout.num_micro_batches
    lines = []
    if how.offload_optimizer:
        e, times = how.activation_bytes, gradients_leave(layout, how)
        lines.append(
            Line("gradients to the host", times * e * shard, "bytes", f"{times} * {e:g} P")
        )
        back = 2 * m if how.offload_parameters else 1
        value, formula = back * e * shard, f"{back} * {e:g} P"
        if how.own_runs and how.offload_parameters:  # root and last units stay for backward
            value -= m * e * stays(config, layout)
            formula += f" - {m} * {e:g} (2 P_layer + P_outside{' + 2 P_expert' * _has_moe(config)})"
        lines.append(Line("parameters back", value, "bytes", formula))
    if how.offload_to_files:
        k = how.optimizer_bytes
        lines.append(Line("states read and written", 2 * k * shard, "bytes", f"2 * {k:g} P"))
        if how.offload_gradients:
            g, n = how.gradient_bytes, 2 * gradients_leave(layout, how)
            lines.append(Line("gradients through files", n * g * shard, "bytes", f"{n} * {g:g} P"))
        if how.offload_parameters:
            e = how.activation_bytes
            value = lines[1].value + e * shard  # read whenever they go back, written once
            lines.append(Line("parameters through files", value, "bytes", "as back, and written"))
    return Breakdown("bytes that move in a step", tuple(lines))


def intensity(config: ModelConfig, layout: Layout, how: str | Framework) -> float:
    """Return one device's FLOPs per step for each byte over its link to the host ([Infinity]
    section 4.1). Transfers are hidden if this is above the peak FLOP/s over the link's bytes/s."""
    moved = sum(line.value for line in traffic(config, layout, how) if "files" not in line.name
                and "states" not in line.name)  # fmt: skip
    flops = model_flops(config, layout.global_batch_size) / layout.world_size
    return flops / moved if moved else float("inf")


def lacks_room(config, layout, machine: Hardware, how: Framework) -> str:
    """Return which part of the host or of files is too small for this, or ""."""
    if not how.offload_optimizer:
        return ""
    tiers = (
        ("the host", host_memory(config, layout, how).total, machine.host_memory_bytes),
        ("files", file_memory(config, layout, how).total, machine.file_bytes),
    )
    for where, needed, room in tiers:
        if needed > room:
            return f"{readable(needed, 'bytes')} of {readable(room, 'bytes')} of {where}"
    return ""


def borrowed(how: Framework) -> str:
    """Say in words what is not on the device."""
    kinds = ["the optimizer's states"]
    kinds += ["gradients"] * how.offload_gradients + ["parameters"] * how.offload_parameters
    where = "in files" if how.offload_to_files else "on the hosts"
    said = " and ".join([", ".join(kinds[:-1]), kinds[-1]] if kinds[:-1] else kinds)
    return f"{said} are {where}"


@dataclass(frozen=True)
class Largest:
    """The largest model of a family that fits, and what keeps a larger one out."""

    config: ModelConfig
    parameters: float
    layout: Layout
    how: Framework
    limit: str  # what the next larger one has no room for
    machine: Hardware  # with all of the node's host and files for the devices that are used


@checks_kinds
def largest_model(
    machine: Hardware | str,
    num_devices: int = 1,
    tier: str = "device",
    *,
    width: int | None = None,
    seq_len: int = 1024,
    micro_batch_size: int = 1,
    how: str | Framework = "megatron-2021",
) -> Largest:
    """The deepest GPT of one width that fits on `num_devices` under ZeRO-3 (one device: alone).

    tier: "device"; "host: states" (ZeRO-Offload); "host: all", "files" (ZeRO-Infinity). width: of
    the model; None takes 2,048 up to 4 billion parameters, 4,096 up to 20, 8,192 up to 200,
    then 25,600, as in the papers' tables. Blocks are recomputed. Raises ValueError for an
    unknown tier, and if not even one layer fits.
    """
    if tier not in TIERS:
        raise ValueError(f"tier={tier!r} is not known: give {', '.join(map(repr, TIERS))}.")
    machine, how = hardware(machine), framework(how).replace(**TIERS[tier])
    alone = machine.devices_per_node / min(num_devices, machine.devices_per_node)
    shared = ("host_memory_bytes", "host_memory_bandwidth", "file_bytes", "file_bandwidth")
    machine = machine.replace(  # the devices that are used share what the node has
        **{name: alone * getattr(machine, name) for name in shared}
    )
    layout = Layout(
        dp=num_devices,
        zero=3 if num_devices > 1 else 0,
        micro_batch_size=micro_batch_size,
        recompute="full",
    )

    def gpt(layers: int, width: int) -> ModelConfig:
        heads = width // 128
        return ModelConfig(50257, seq_len, width, layers, heads, tied_embedding=True)

    def lacks(config: ModelConfig) -> str:
        if lacking := lacks_room(config, layout, machine, how):
            return lacking.split(" of ")[-1]
        needed = device_memory(peak_memory(config, layout, how).total, how)
        return "the device" if needed > machine.device.memory_bytes else ""

    best: Largest | None = None
    for wide, most in ((2048, 4e9), (4096, 2e10), (8192, 2e11), (25600, float("inf"))):
        if width is not None:
            wide, most = width, float("inf")
        if lacks(gpt(1, wide)):
            break
        low, high = 1, 2  # `low` fits
        while not lacks(gpt(high, wide)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if lacks(gpt(middle, wide)) else (middle, high)
        config = gpt(low, wide)
        found = float(num_parameters(config))
        if best is None or found > best.parameters or wide == width:
            best = Largest(config, found, layout, how, lacks(gpt(high, wide)), machine)
        if found <= most:
            break
    if best is None:
        raise ValueError(
            f"not even one layer fits on {num_devices} of {machine.name}: give a smaller width."
        )
    return best


# (machine, devices, tier) -> billions of parameters that were trained, and where it says so.
PUBLISHED = (
    ("dgx-2", 1, "device", 1.4, "[Offload] abstract: the largest with PyTorch alone"),
    ("dgx-2", 1, "host: states", 13, "[Offload] abstract: over 13 billion on a single GPU"),
    ("dgx-2", 16, "host: states", 70, "[Offload] abstract: over 70, with model parallelism"),
    # Looked at after the model was written; nothing was changed for it. No limit: they say that
    # these train efficiently with 1.5 TB of host memory, and not that no more fit.
    ("dgx-2", 1, "host: all", 40, "DeepSpeed's news of 2021-03-08: over 40 on a single GPU"),
    ("dgx-2", 16, "files", 1000, "[Infinity] abstract: a trillion, fine-tuned on a DGX-2"),
)

# (parameters, seconds of a step) of DeepSpeed's CPU-Adam on all of a DGX-2's host: Ren et al. 2021,
# table 4. Two public restatements of the paper were read, not the paper: one has these rows, the
# other says of the same table that it is 6.4 times faster than PyTorch's at 1 billion.
CPU_ADAM = ((1e9, 0.22), (4e9, 1.03), (10e9, 2.57))


def cpu_adam_seconds(machine: Hardware | str, parameters: float) -> float:
    """Return the seconds of a step with this many parameters on a node's whole host, none
    hidden."""
    machine = hardware(machine)
    passed = passed_in_step(framework("megatron-2021")) * parameters
    return machine.host_adam_seconds(passed / machine.devices_per_node)
