"""Which layout: every way to put a model on n devices, those that fit, and the fastest of them.

    plan("llama3-70b", "h100", 1024, global_batch_tokens=4 * 2**20)

Four steps, each of them visible in the answer: enumerate the layouts; drop those that do not fit,
with the reason; rank the rest by the closed form of step_time; simulate the pipelines among the
first 10, where their lists are not very long, and rank these again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ..config import Layout, ModelConfig
from .bubble import num_simulated_actions
from .frameworks import Framework, framework
from .layouts import Search, layouts, short
from .lines import Breakdown, readable
from .machines import Hardware, hardware
from .memory import device_memory, peak_memory, states_of_all
from .models import model as model_preset
from .numbers import at_least
from .offload import lacks_room
from .plans import CLOSE, NEARLY_FULL, Candidate, Dropped, Plan
from .step_time import step_time

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
MOST_ACTIONS = 10_000  # of a simulation, about 0.1 s; there the closed form is as good
Needed = tuple[Layout, Breakdown, float]  # a layout, its waterfall, bytes on the device


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
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices={num_devices!r} is not a number of devices: give 1 or more.")
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
    fitting, dropped, nearly = _fit(config, tried, machine, how)
    if not fitting:  # what does not fit may be borrowed
        for more in BORROWED if not how.own_runs else ():
            borrowing = how.replace(**more)
            fitting, _, nearly = _fit(config, tried, machine, borrowing)
            if fitting:
                how = borrowing
                break
    if not fitting:
        raise ValueError(_nothing_fits(config, machine, how, num_devices, dropped))

    ranked = _by_time(fitting, config, machine, how)
    top, num_simulated = _simulated(ranked[: search.num_simulated], config, machine, how)
    missed, _ = _simulated(_by_time(nearly, config, machine, how)[:1], config, machine, how)
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


def _by_time(fits, config, machine, how) -> list[Candidate]:
    timed = [Candidate(*fit, step_time(config, fit[0], machine, how)) for fit in fits]
    return sorted(timed, key=lambda c: c.time.seconds)


def _simulated(candidates, config, machine, how) -> tuple[list[Candidate], int]:
    """The same, ranked anew with pipelines simulated, and how many were."""
    played = [
        replace(c, time=step_time(config, c.layout, machine, how, simulate=True))
        if c.layout.pp > 1 and num_simulated_actions(c.layout) <= MOST_ACTIONS
        else c
        for c in candidates
    ]
    again = sum(one is not other for one, other in zip(played, candidates))
    return sorted(played, key=lambda c: c.time.seconds), again


def _fit(
    config: ModelConfig, tried: list[Layout], machine: Hardware, how: Framework
) -> tuple[list[Needed], list[Dropped], list[Needed]]:
    """What fits, the rest with the reason, and of that what nearly fits."""
    fitting, dropped, nearly = [], [], []
    limit = machine.device.memory_bytes
    can_cut = []
    for layout in tried:
        try:
            how.check(config, layout.check(config))
            can_cut.append(layout)
        except ValueError as error:
            dropped.append(Dropped(layout, "the model cannot be cut so", str(error)))
    at_least = states_of_all(config, can_cut, how) if can_cut else []
    for layout, states in zip(can_cut, at_least):
        if device_memory(states, how) > limit:
            what = f"{readable(states, 'bytes')} of model states alone"
            dropped.append(Dropped(layout, "memory", f"{what}, for {readable(limit, 'bytes')}"))
            continue
        lacking = lacks_room(config, layout, machine, how)
        if lacking:
            dropped.append(Dropped(layout, "memory", lacking))
            continue
        waterfall = peak_memory(config, layout, how)
        needed = device_memory(waterfall.total, how)
        if needed > limit:
            largest = max(waterfall, key=lambda line: line.value)
            what = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
            dropped.append(Dropped(layout, "memory", f"{what}, most of it {largest.name}"))
            if NEARLY_FULL * needed <= limit:
                nearly.append((layout, waterfall, needed))
        else:
            fitting.append((layout, waterfall, needed))
    return fitting, dropped, nearly


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
