"""Megatron-LM's arguments as a Layout (megatron/training/arguments.py, as of Core 0.16)."""

from __future__ import annotations

import re
import shlex

from ..config import Layout
from ..fields import checks_kinds, nearest_divisor
from ..schedule import ScheduleError
from ..schedule.sizes import round_size
from .importing import Batch, Imported, alike, choice, integer, replicas

NUMBERS = (
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "expert-tensor-parallel-size"),
    *("micro-batch-size", "global-batch-size", "num-layers", "recompute-num-layers"),
    *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    "microbatch-group-size-per-virtual-pipeline-stage",
)
FLAGS = (
    *("sequence-parallel", "use-distributed-optimizer", "recompute-activations"),
    *("use-megatron-fsdp", "use-torch-fsdp2", "account-for-embedding-in-pipeline-split"),
    "account-for-loss-in-pipeline-split",
)
SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
CHOICES = {
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "data-parallel-sharding-strategy": tuple(SHARDED),
}
ATTENTION = ["core_attn"]  # what selective recomputes unless recompute-modules says otherwise
READ = {*NUMBERS, *FLAGS, *CHOICES, "recompute-modules"}
GONE = {  # Megatron-LM's own terms for some, and other programs' terms
    "batch-size": "micro-batch-size",
    "model-parallel-size": "tensor-model-parallel-size",
    "tensor-parallel-size": "tensor-model-parallel-size",
    "pipeline-parallel-size": "pipeline-model-parallel-size",
    "expert-parallel-size": "expert-model-parallel-size",
    "checkpoint-activations": "recompute-activations",
    "gradient-accumulation-steps": "global-batch-size",
}
CANNOT_SAY = {
    "rampup-batch-size": "the global batch grows to its size, and a Layout has one size",
    "pipeline-model-parallel-layout": "stages are laid out by hand, and a Layout cuts evenly",
    "decoder-first-pipeline-num-layers": "the first stage has its own size, a Layout cuts evenly",
    "decoder-last-pipeline-num-layers": "the last stage has its own size, a Layout cuts evenly",
    "optimizer-cpu-offload": "it is the Framework's: offload_optimizer=True",
    "num-distributed-optimizer-instances": "it shards in parts of dp, a Layout over all of it",
    "tp-comm-overlap": "it is the Framework's: overlaps_tensor=True",
    "overlap-moe-expert-parallel-comm": "messages of ep behind computation are not modelled",
    "fine-grained-activation-offloading": "activations stay on the device in a Layout",
    "cpu-offloading-num-layers": "activations stay on the device in a Layout",
    "use-tp-pp-dp-mapping": "ranks of one pipeline are neighbors, in a Layout those of dp are",
}
SLIP = 0.86  # above this similarity an unknown name is a misspelt known one


@checks_kinds
def from_megatron(arguments: str | list[str], world_size: int | None = None) -> Imported:
    """Read the layout from Megatron-LM arguments: a list of words, or a command line.

    A line that begins with torchrun also gives the world: --nnodes and --nproc-per-node.
    Raises ValueError for a contradiction, a misspelt argument or a wrong value, in one sentence.
    """
    launcher, words = _split(arguments)
    said, others = _parse(words)
    if world_size is None:
        world_size = _world(launcher)
    size = {name: said.get(f"{name}-model-parallel-size", 1) for name in ("tensor", "pipeline")}
    tp, pp, cp = size["tensor"], size["pipeline"], said.get("context-parallel-size", 1)
    dp = replicas(
        integer("world_size", world_size),
        {
            "tensor-model-parallel-size": tp,
            "pipeline-model-parallel-size": pp,
            "context-parallel-size": cp,
        },
    )
    if "micro-batch-size" not in said:
        raise ValueError("micro-batch-size is not given, and Megatron-LM has no default: give it.")
    names = ("global-batch-size", "micro-batch-size", "number of micro-batches")
    batch = Batch(said.get("global-batch-size"), said["micro-batch-size"], None, names)
    _, micro, accumulated = batch.solve(dp)
    cannot_say = [f"{name}: {CANNOT_SAY[name]}." for name in others if name in CANNOT_SAY]
    chunks = _chunks(said, pp)
    if chunks > 1:
        _check_groups(said, pp, accumulated, micro * dp, cannot_say)
    sequence_parallel = said.get("sequence-parallel", False)
    if sequence_parallel and tp == 1:
        cannot_say.append(
            "sequence-parallel needs tensor-model-parallel-size of 2 or more, and Megatron-LM turns"
            " it off without."
        )
    ep, etp = _experts(said, "num-experts" in others, tp, dp * cp)
    layout = Layout(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=tp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel and tp > 1,
        zero=_zero(said, pp, cannot_say),
        micro_batch_size=micro,
        num_micro_batches=accumulated,
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        **_recompute(said, pp * chunks, cannot_say),
    )
    passed_over = tuple(name for name in others if name not in CANNOT_SAY)
    return Imported(layout, tuple(cannot_say), passed_over)


def _experts(said: dict, has_experts: bool, tp: int, replicas: int) -> tuple[int, int]:
    """Return (ep, etp), whose groups divide the ranks of dp * cp * tp a second time."""
    ep = said.get("expert-model-parallel-size", 1)
    if ep == 1 and not has_experts:
        return 1, tp  # the other argument is of no use
    name = "expert-tensor-parallel-size"
    etp = said.get(name, tp)
    if tp % etp:
        raise ValueError(
            f"{name}={etp} does not divide tensor-model-parallel-size={tp}, and a Layout's etp "
            f"divides its tp: give {nearest_divisor(tp, etp)}."
        )
    if etp < tp and not said.get("sequence-parallel"):
        raise ValueError(
            f"tensor-model-parallel-size={tp} with experts needs sequence-parallel, says "
            "Megatron-LM: give that as well."
        )
    ranks = replicas * tp // etp
    if ranks % ep:
        whole = replicas * tp % ep == 0
        raise ValueError(
            f"expert-model-parallel-size={ep} with {name}={etp} does not divide the "
            f"{replicas * tp} ranks of a pipeline stage: give {nearest_divisor(ranks, ep)}"
            f"{f', or {name}=1' * whole}."
        )
    return ep, etp


def _chunks(said: dict, pp: int) -> int:
    """Return the virtual stages per rank."""
    layers, each = said.get("num-layers"), said.get("num-layers-per-virtual-pipeline-stage")
    chunks = said.get("num-virtual-stages-per-pipeline-rank")
    if each is not None and chunks is not None:
        raise ValueError(
            f"num-layers-per-virtual-pipeline-stage={each} and "
            f"num-virtual-stages-per-pipeline-rank={chunks} say the same thing: give one of them."
        )
    if each is not None:
        if layers is None:
            raise ValueError(
                f"num-layers-per-virtual-pipeline-stage={each} needs num-layers: give it as well."
            )
        ends = sum(
            said.get(f"account-for-{end}-in-pipeline-split", False) for end in ("embedding", "loss")
        )
        if (layers + ends) % (pp * each):
            raise ValueError(
                f"num-layers={layers}{f' + {ends} for the ends' if ends else ''} is not a multiple "
                f"of pipeline-model-parallel-size={pp} x num-layers-per-virtual-pipeline-stage="
                f"{each}: give a number of layers that is."
            )
        chunks = (layers + ends) // (pp * each)
    if (chunks or 1) > 1 and pp == 1:
        raise ValueError(
            f"{chunks} virtual stages need a pipeline: give pipeline-model-parallel-size of 2 or "
            "more, or no virtual stages."
        )
    return chunks or 1


def _check_groups(said: dict, pp: int, accumulated: int, each: int, cannot_say: list[str]) -> None:
    """Raise ValueError if Megatron-LM cannot interleave the micro-batches (core/pipeline_parallel/
    schedules.py), or a Layout cannot; `each`: sequences of a micro-batch on all ranks.
    """
    name = "microbatch-group-size-per-virtual-pipeline-stage"
    group = said.get(name, pp)
    if name not in said and accumulated % pp:
        raise ValueError(
            f"global-batch-size={accumulated * each} leaves {accumulated} micro-batches, "
            f"which pipeline-model-parallel-size={pp} does not divide as interleaving needs: give "
            f"global-batch-size={each * pp * max(1, round(accumulated / pp))}."
        )
    if accumulated < pp:
        raise ValueError(
            f"global-batch-size={accumulated * each} leaves {accumulated} micro-batches, fewer than"
            f" pipeline-model-parallel-size={pp}: give global-batch-size={each * pp}."
        )
    fits = [size for size in range(pp, accumulated + 1) if not 0 < accumulated % size < pp]
    if group not in fits:
        near = min(fits, key=lambda size: abs(size - group))
        raise ValueError(
            f"{name}={group} does not fit {accumulated} micro-batches, which pass in groups of at "
            f"least pipeline-model-parallel-size={pp}: give {near}."
        )
    try:
        rounds = round_size(pp, accumulated)
    except ScheduleError as error:
        raise ValueError(f"{name}={group} cannot be said by a Layout: {error}.") from None
    if group != rounds:
        cannot_say.append(
            f"{name}={group}: a Layout's micro-batches pass in groups of {rounds} here."
        )


def _zero(said: dict, pp: int, cannot_say: list[str]) -> int:
    distributed = said.get("use-distributed-optimizer", False)
    if said.get("use-torch-fsdp2"):
        for name, clash in (
            (f"pipeline-model-parallel-size={pp}", pp > 1),
            ("use-distributed-optimizer", distributed),
        ):
            if clash:
                raise ValueError(
                    f"use-torch-fsdp2 cannot be combined with {name}, says Megatron-LM: give "
                    "one of them."
                )
        return 3
    strategy = said.get("data-parallel-sharding-strategy", "no_shard")
    if said.get("use-megatron-fsdp"):
        return SHARDED[strategy]
    if SHARDED[strategy]:
        cannot_say.append(
            f"data-parallel-sharding-strategy={strategy} does nothing without use-megatron-fsdp."
        )
    return int(distributed)


def _recompute(said: dict, num_stages: int, cannot_say: list[str]) -> dict:
    kind = "selective" if said.get("recompute-activations") else said.get("recompute-granularity")
    modules = said.get("recompute-modules", ATTENTION)
    if kind == "selective" and modules != ATTENTION:
        cannot_say.append(
            f"recompute-modules={' '.join(modules)}: a Layout's selective recomputes core_attn."
        )
    if kind != "full":
        return {"recompute": kind or "none"}
    method, count = said.get("recompute-method"), said.get("recompute-num-layers", 1)
    if method is None:
        raise ValueError(
            "recompute-granularity=full needs recompute-method: give uniform, with "
            "recompute-num-layers=1."
        )
    if method == "uniform":
        if count > 1:
            cannot_say.append(
                f"recompute-num-layers={count}, uniform: one input is kept for {count} layers, and "
                "a Layout keeps one for each."
            )
        return {"recompute": "full"}
    if "num-layers" not in said:
        raise ValueError(
            f"recompute-num-layers={count} of a stage needs num-layers: give it as well."
        )
    of_stage = -(-said["num-layers"] // num_stages)
    ways = range(1, of_stage + 1)
    every = min(ways, key=lambda every: abs(-(-of_stage // every) - count))
    if -(-of_stage // every) != min(count, of_stage):
        cannot_say.append(
            f"recompute-num-layers={count} of a stage's {of_stage}: the nearest recompute_every="
            f"{every} recomputes {-(-of_stage // every)}."
        )
    return {"recompute": "full", "recompute_every": every}


def _parse(words: list[str]) -> tuple[dict, list[str]]:
    """Return ({name: value} of known arguments, names of the rest)."""
    said: dict[str, object] = {}
    others: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if "$" in word:
            raise ValueError(f"{word!r} is a shell variable: give what it stands for.")
        if not re.match(r"--[A-Za-z]", word):
            raise ValueError(f"{word!r} stands where an argument should: give one, like --bf16.")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and index < len(words) and not re.match(r"--[A-Za-z]", words[index]):
            values.append(words[index])
            index += 1
        if name in GONE:
            raise ValueError(f"--{name} is not an argument of Megatron-LM: give --{GONE[name]}.")
        if name not in READ:
            near = alike(name, (*READ, *CANNOT_SAY), SLIP)
            if near and near not in name:
                raise ValueError(f"--{name} is not an argument of Megatron-LM: give --{near}.")
            others.append(name)
            continue
        found = _value(name, values)
        if said.get(name, found) != found:
            raise ValueError(f"--{name} is given as {said[name]} and as {found}: give it once.")
        said[name] = found
    return said, others


def _value(name: str, values: list[str]) -> object:
    if name in FLAGS:
        if values:
            raise ValueError(
                f"--{name} takes no value, and {values[0]!r} follows it: leave "
                f"{'the argument' if values[0].lower() in ('false', '0') else 'that'} out."
            )
        return True
    if name == "recompute-modules":  # written as words, or as one list in brackets
        return sorted(" ".join(values).strip("[]").split())
    if len(values) != 1:
        raise ValueError(f"--{name} takes one value, not {values}: give one.")
    if "$" in values[0]:
        raise ValueError(f"--{name} {values[0]} is a shell variable: give what it stands for.")
    if name in CHOICES:
        return choice(name, values[0], CHOICES[name])
    if re.fullmatch(r"[+-]?\d+", values[0]):
        return integer(name, int(values[0]))
    raise ValueError(f"{name}={values[0]} is not a whole number: give an int, 1 or more.")


def _split(arguments: str | list[str]) -> tuple[list[str], list[str]]:
    """Return (the launcher's words, the program's), divided at the first .py file."""
    if isinstance(arguments, str):
        try:
            words = shlex.split(re.sub(r"\\\r?\n", " ", arguments), comments=True)
        except ValueError as error:
            raise ValueError(f"the command line does not parse: {error}.") from None
    elif isinstance(arguments, (list, tuple)):
        words = [str(word) for word in arguments]
    else:
        raise ValueError(f"{arguments!r} is neither a command line nor a list of words: give one.")
    for index, word in enumerate(words):
        if word.endswith(".py"):
            return words[:index], words[index + 1 :]
    return [], words


def _world(launcher: list[str]) -> int:
    """Return the number of ranks that torchrun starts."""
    plain = " ".join(launcher).replace("_", "-").replace("=", " ")
    found = {name: re.search(rf"--{name} (\S+)", plain) for name in ("nnodes", "nproc-per-node")}
    if found["nproc-per-node"] is None:
        raise ValueError("No argument says how many ranks there are: give world_size.")
    sizes = [match.group(1) if match else "1" for match in found.values()]
    for name, value in zip(found, sizes):
        if not value.isdigit():
            raise ValueError(f"{name}={value} is no number of its own: give world_size.")
    return int(sizes[0]) * int(sizes[1])
