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
from .plans import Candidate, Dropped, Plan
from .step_time import step_time

USUAL = Search()
MOST_ACTIONS = 10_000  # of a simulation, about 0.1 s; there the closed form is as good


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
    Raises ValueError when an argument is impossible, or when nothing fits (with the nearest miss).
    """
    config, machine, how = model_preset(model), hardware(machine), framework(how)
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices={num_devices!r} is not a number of devices: give 1 or more.")
    sequences = at_least("global_batch_tokens", global_batch_tokens, 1) / config.seq_len
    if sequences < 1 or sequences != int(sequences):
        raise ValueError(
            f"global_batch_tokens={global_batch_tokens!r} is not a whole number of sequences of "
            f"seq_len={config.seq_len}: {max(1, round(sequences)) * config.seq_len} would be."
        )
    if search.max_tp is None:
        search = replace(search, max_tp=machine.devices_per_node)
    tried = list(layouts(config, num_devices, int(sequences), search))
    fitting, dropped = _fit(config, tried, machine, how)
    if not fitting:
        raise ValueError(_nothing_fits(config, machine, how, num_devices, dropped))

    ranked = sorted(
        (
            Candidate(layout, waterfall, needed, step_time(config, layout, machine, how))
            for layout, waterfall, needed in fitting
        ),
        key=lambda c: c.time.seconds,
    )
    top = ranked[: search.num_simulated]
    played = [c.layout.pp > 1 and num_simulated_actions(c.layout) <= MOST_ACTIONS for c in top]
    top = [
        replace(c, time=step_time(config, c.layout, machine, how, simulate=True)) if play else c
        for c, play in zip(top, played)
    ]
    top.sort(key=lambda c: c.time.seconds)
    return Plan(
        config,
        machine,
        how,
        num_devices,
        tuple(top + ranked[search.num_simulated :]),
        tuple(dropped),
        sum(played),
    )


def _fit(
    config: ModelConfig, tried: list[Layout], machine: Hardware, how: Framework
) -> tuple[list[tuple[Layout, Breakdown, float]], list[Dropped]]:
    """(layout, waterfall, device bytes) of what fits, and the rest with the reason."""
    fitting: list[tuple[Layout, Breakdown, float]] = []
    dropped: list[Dropped] = []
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
        waterfall = peak_memory(config, layout, how)
        needed = device_memory(waterfall.total, how)
        if needed > limit:
            largest = max(waterfall, key=lambda line: line.value)
            what = f"{readable(needed, 'bytes')} of {readable(limit, 'bytes')}"
            dropped.append(Dropped(layout, "memory", f"{what}, most of it {largest.name}"))
        else:
            fitting.append((layout, waterfall, needed))
    return fitting, dropped


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
