"""Which layout: every way to put a model on n devices, those that fit, and the fastest of them.

    plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20)

Four steps, each of them visible in the answer: enumerate the layouts; drop those that do not fit,
with the reason; rank the rest by the closed form of step_time; simulate the pipelines among the
first 10, where their lists are not very long, and rank these again.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from ..config import Layout, ModelConfig
from ..fields import at_least, checks_kinds, whole
from ..schedule import SPLIT
from .bubble import hop_seconds, message_line
from .frameworks import Framework, framework
from .kernels import LayerPiece, head_seconds, layer_time
from .layouts import Search, layouts, short
from .lines import readable
from .machines import Hardware, hardware
from .memory import device_memory, peak_memory, states_of_all
from .models import model as model_preset
from .offload import lacks_room
from .plans import CLOSE, NEARLY_FULL, Candidate, Dropped, Plan, worth_simulating
from .step_time import step_time
from .timed_step import timed_step

USUAL = Search()
# What is tried, in this order, when nothing fits: each borrows more than the one before.
BORROWED = (
    dict(offload_optimizer=True, offload_overlaps=True),
    dict(offload_optimizer=True, offload_gradients=True, offload_overlaps=True),
    dict(
        offload_optimizer=True,
        offload_gradients=True,
        offload_parameters=True,
        offload_overlaps=True,
    ),
    dict(
        offload_optimizer=True,
        offload_gradients=True,
        offload_parameters=True,
        offload_to_files=True,
        offload_overlaps=True,
    ),
)
Fitted = tuple[list[Candidate], list[Dropped], list[Candidate]]  # fits, dropped, nearly fits


@checks_kinds
def plan(
    model: ModelConfig | str,
    machine: Hardware | str,
    num_devices: int,
    global_batch_tokens: float,
    *,
    how: str | Framework = "megatron-core",
    search: Search = USUAL,
) -> Plan:
    """The fastest layouts of `model` on `num_devices` of `machine`.

    `global_batch_tokens` is one optimizer step's batch; it must be a whole number of sequences.
    When nothing fits, it is tried with more and more of the model's states on the hosts, at last in
    files; `Plan.how` and its cautions say so.
    Raises ValueError when an argument is impossible, or when nothing fits (with the nearest miss).
    """
    config, machine, how = model_preset(model), hardware(machine), framework(how)
    whole("num_devices", num_devices)
    if not isinstance(search, Search):
        raise ValueError(f"search={search!r} is no Search: give one like Search(zero=(0, 1)).")
    sequences = at_least("global_batch_tokens", global_batch_tokens, 1) / config.seq_len
    if sequences < 1 or sequences != int(sequences):
        raise ValueError(
            f"global_batch_tokens={global_batch_tokens!r} is not a whole number of sequences of "
            f"seq_len={config.seq_len}: {max(1, round(sequences)) * config.seq_len} would be."
        )
    if search.max_tp is None:
        search = replace(search, max_tp=machine.devices_per_node)
    tried = list(layouts(config, num_devices, int(sequences), search))
    fit = _fit_best_first if search.fastest_of_axes else _fit
    fitting, dropped, nearly = fit(config, tried, machine, how)
    if not fitting:  # what does not fit may be borrowed
        for more in BORROWED if not how.own_runs else ():
            borrowing = how.replace(**more)
            fitting, _, nearly = fit(config, tried, machine, borrowing)
            if fitting:
                how = borrowing
                break
    if not fitting:
        raise ValueError(_nothing_fits(config, machine, how, num_devices, dropped))

    ranked = _fastest_first(fitting)
    top, num_simulated = _simulated(ranked[: search.num_simulated], config, machine, how)
    missed = _fastest_first(nearly)[:1]
    if search.num_simulated:  # else closed forms are compared with each other
        missed, _ = _simulated(missed, config, machine, how)
    return Plan(
        config,
        machine,
        how,
        num_devices,
        tuple(top + ranked[search.num_simulated :]),
        tuple(dropped),
        num_simulated,
        next((c for c in missed if CLOSE * c.time.seconds < (top or ranked)[0].time.seconds), None),
    )


def _fastest_first(candidates: list[Candidate]) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.time.seconds)


def _simulated(candidates, config, machine, how) -> tuple[list[Candidate], int]:
    """The same, ranked anew with pipelines simulated, and how many were."""
    played = [
        replace(c, time=step_time(config, c.layout, machine, how, simulate=True))
        if worth_simulating(c.layout)
        else c
        for c in candidates
    ]
    again = sum(one is not other for one, other in zip(played, candidates))
    return _fastest_first(played), again


def _fit(config: ModelConfig, tried: list[Layout], machine: Hardware, how: Framework) -> Fitted:
    """What fits, the rest with the reason, and of that what nearly fits."""
    can_cut, dropped = _can_cut(config, tried, how)
    found: Fitted = [], dropped, []
    for layout, states in zip(can_cut, states_of_all(config, can_cut, how)):
        _put_down(found, config, layout, states, machine, how)
    return found


def _fit_best_first(
    config: ModelConfig, tried: list[Layout], machine: Hardware, how: Framework
) -> Fitted:
    """Plan without many of the slower layouts: for each choice of axes only those whose time may be
    below all others' by a lower bound, until none is left."""
    can_cut, dropped = _can_cut(config, tried, how)
    states, bound = states_of_all(config, can_cut, how), _lower_bound(config, machine, how)
    by_axes: dict[tuple, list[tuple[float, int]]] = {}
    for number, layout in enumerate(can_cut):
        axes = layout.pp, layout.dp, layout.cp, layout.tp
        by_axes.setdefault(axes, []).append((bound(layout), number))
    looked_at: dict[int, Fitted] = {}
    for alike in by_axes.values():
        fastest = math.inf
        for least, number in sorted(alike):
            if least > fastest:
                break
            one = looked_at[number] = [], [], []
            if fits := _put_down(one, config, can_cut[number], states[number], machine, how):
                fastest = min(fastest, fits.time.seconds)
    found: Fitted = [], dropped, []
    for number in sorted(looked_at):  # in the order of _fit
        for every, one in zip(found, looked_at[number]):
            every += one
    return found


def _can_cut(config, tried, how) -> tuple[list[Layout], list[Dropped]]:
    can_cut, dropped = [], []
    for layout in tried:
        try:
            how.check(config, layout.check(config))
            can_cut.append(layout)
        except ValueError as error:
            dropped.append(Dropped(layout, "the model cannot be cut so", str(error)))
    return can_cut, dropped


def _put_down(found: Fitted, config, layout, states, machine, how) -> Candidate | None:
    """Into what fits, is dropped, or is dropped and nearly fits; the candidate if it fits."""
    fitting, dropped, nearly = found
    limit = machine.device.memory_bytes
    if device_memory(states, how) > limit:
        what = f"{readable(states, 'bytes')} of model states alone"
        dropped.append(Dropped(layout, "memory", f"{what}, for {readable(limit, 'bytes')}"))
        return None
    if lacking := lacks_room(config, layout, machine, how):
        dropped.append(Dropped(layout, "memory", lacking))
        return None
    waterfall = peak_memory(config, layout, how)
    needed = device_memory(waterfall.total, how)
    if needed > limit:
        largest = max(waterfall, key=lambda line: line.value)
        what = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
        dropped.append(Dropped(layout, "memory", f"{what}, most of it {largest.name}"))
    if NEARLY_FULL * needed > limit:
        return None
    timed = Candidate(layout, waterfall, needed, step_time(config, layout, machine, how))
    (nearly if needed > limit else fitting).append(timed)
    return None if needed > limit else timed


def _lower_bound(config: ModelConfig, machine: Hardware, how: Framework):
    """A function of a layout: no step takes fewer seconds.

    The slowest rank computes at least the mean of all, m times, and 1F1B waits for the others once.
    Messages between stages come on top. What waits for ZeRO, for gradients or for the host is left
    out, as is the optimizer.
    """
    moe_layers = config.num_moe_layers
    kinds = (True, moe_layers), (False, config.num_layers - moe_layers)
    known: dict[tuple, tuple[float, float]] = {}
    ways: dict[tuple, list[float]] = {}

    def all_layers(layout) -> tuple[float, float]:
        """Forward and backward of one micro-batch: the layers, and with backward the head."""
        experts = layout.ep, layout.etp
        sizes = layout.tp, layout.cp, *experts, layout.sequence_parallel, layout.micro_batch_size
        if sizes not in known:
            pieces = [(n, LayerPiece.of(config, layout, moe)) for moe, n in kinds if n]
            times = [(n, layer_time(config, piece, machine, how)) for n, piece in pieces]
            head = head_seconds(config, pieces[0][1], machine.device, how)
            known[sizes] = (
                sum(n * sum(time.forward.values()) for n, time in times),
                sum(n * sum(time.backward.values()) for n, time in times) + sum(head),
            )
        return known[sizes]

    def messages(layout) -> float:
        if (key := (*layout.axes.values(), layout.micro_batch_size)) not in ways:
            ways[key] = hop_seconds(timed_step(config, layout, machine, how))
        return message_line(layout, how, ways[key], math.inf, math.inf)[0]

    def bound(layout: Layout) -> float:
        forward, backward = all_layers(layout)
        if layout.recompute == "full":
            backward += forward / layout.recompute_every
        waits = (layout.pp - 1) / layout.num_chunks if layout.schedule not in SPLIT else 0.0
        computed = (layout.num_micro_batches + waits) * (forward + backward) / layout.pp
        rounding = 1 - 1e-9
        return rounding * (computed + (messages(layout) if layout.pp > 1 else 0.0))

    return bound


def _nothing_fits(config, machine, how, num_devices, dropped) -> str:
    if not dropped:
        return (
            f"num_devices={num_devices} leaves no layout whose replicas share the batch evenly:"
            " give more sequences in a batch, or a number of devices with more divisors."
        )
    needs = {
        drop.layout: device_memory(peak_memory(config, drop.layout, how).total, how)
        for drop in dropped
        if drop.reason == "memory"
    }
    if not needs:
        ((why, count),) = Counter(drop.detail for drop in dropped).most_common(1)
        return (
            f"No layout of num_devices={num_devices} cuts the model. Of {len(dropped)} tried, "
            f"{count} fail because {why}"
        )
    best = min(needs, key=needs.__getitem__)
    return (
        f"num_devices={num_devices} of {machine.name} is too few: the nearest layout, "
        f"{short(best)}, needs {readable(needs[best], 'bytes')} of "
        f"{readable(machine.device.memory_bytes, 'bytes')}; give more devices or larger ones."
    )
