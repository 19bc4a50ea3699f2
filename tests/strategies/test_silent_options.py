"""Options that another option switches off are refused in a sentence, or documented.

This tests classes that need ranks; tests/plan/calculators/test_silent_options.py tests the others.
Every option of a class is changed alone and with each other option, in training on two ranks. If
the second option then no longer changes what is computed, sent or copied, or when, the pair must be
in DOCUMENTED with its reason.
"""

import sys
from itertools import combinations

import cloudpickle
import pytest
import torch

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.data import Batches
from mini_dist.strategies.asynchronous import DiLoCo
from mini_dist.strategies.compression import Compressed, OneBit, PowerSGD, Quantized, int8
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.expert_parallel import ExpertParallel
from mini_dist.strategies.offload import EmulatedLanes, OverlappedOffload
from mini_dist.strategies.train import train_step
from mini_dist.strategies.zero import ZeRO1, ZeRO3

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

CONFIG = ModelConfig(vocab_size=64, seq_len=8, d_model=16, num_layers=2, num_heads=4, d_ffn=16)
EXPERTS = CONFIG.replace(num_experts=4, top_k=2, d_expert=8)
TEXT = torch.randint(0, 64, (500,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
STEPS, REFUSED = 4, "refused"


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


class Averages:
    """Run DiLoCo after each step."""

    def __init__(self, model, group, **options):
        alone = torch.distributed.new_group()  # with a delay nothing else may be sent in its group
        self.average = DiLoCo(model, alone, every=2, **options)
        self.delay, self.finish = self.average.delay, self.average.finish

    def __call__(self):
        self.average.step()
        return ()


# ---- classes: (model, group, folder, options) -> (a model to train, what follows each step) ------


def of_zero3(gpt, group, folder, options):
    return ZeRO3(gpt, group, adamw, list(gpt.blocks), **options), tuple


def of_files(gpt, group, folder, options):
    lanes = EmulatedLanes({})
    offload = OverlappedOffload(lanes, folder, **options)
    model = ZeRO1(gpt, group, adamw, list(gpt.blocks), offload=offload)
    return model, lambda: [(each.lane, each.nbytes) for each in lanes.log]


def of_messages(gpt, group, folder, options):
    return of_zero3(gpt, group, folder, {"messages": Quantized(**options)})


def of_reduce(kind):
    def make(gpt, group, folder, options):
        return Overlapped(gpt, group, reduce=kind(**options)), tuple

    return make


def of_buckets(gpt, group, folder, options):
    return Bucketed(gpt, group, **options), tuple


def of_experts(gpt, group, folder, options):
    halves = [torch.distributed.new_group([rank]) for rank in range(group.size())]
    if options.get("balance_group"):
        options = options | {"balance_group": halves[group.rank()]}
    for block in gpt.blocks:
        block.ffn = ExpertParallel(block.ffn, group, **options)
    whole = [p for name, p in gpt.named_parameters() if ".experts." in name]
    return Naive(gpt, group, ignored=whole), tuple


def of_diloco(gpt, group, folder, options):
    model = Naive(gpt, group)
    model.sync = False
    return model, Averages(model, group, **options)


CLASSES = {
    "ZeRO3": (
        CONFIG,
        of_zero3,
        dict(master_dtype=torch.float64, offload="cpu", prefetch=0, messages=Quantized()),
    ),
    "OverlappedOffload in files": (
        CONFIG,
        of_files,
        dict(early=True, delayed=True, parameters_too=True, gradients_too=True),
    ),
    "Quantized": (CONFIG, of_messages, dict(parameters=4, gradients=None, seed=1)),
    "Compressed": (CONFIG, of_reduce(lambda **o: Compressed(int8(), **o)), dict(feedback=False)),
    "PowerSGD": (
        CONFIG,
        of_reduce(lambda **o: PowerSGD(**{"rank": 2, **o})),
        dict(rank=1, feedback=False, seed=1),
    ),
    "Bucketed": (CONFIG, of_buckets, dict(bucket_bytes=100, reduce=OneBit())),
    "ExpertParallel": (
        EXPERTS,
        of_experts,
        dict(
            **dict(capacity_factor=0.5, balance_loss=0.1, z_loss=0.1, averaged_over=1.0),
            balance_group=True,
        ),
    ),
    "DiLoCo": (
        CONFIG,
        of_diloco,
        dict(lr=0.5, beta=0.5, start=1, fragments=2, delay=1, keep=0.25, reduce=Compressed(int8())),
    ),
}

# class -> {(option that is set, option that it switches off)}, and the sentence that says so.
DOCUMENTED = {
    "Quantized": {("gradients", "seed")},  # "of the lots by which gradients are rounded"
}


# ---- on the ranks --------------------------------------------------------------------------------


def sets_of(toggles):
    return [(), *((name,) for name in toggles), *combinations(toggles, 2)]


def come_to(folder, name, chosen, group):
    """Train; return all that is observable: losses, parameters, messages, before which block."""
    config, make, toggles = CLASSES[name]
    gpt, seen, sent = GPT(config, seed=0), [], group.recorder.comms
    try:
        model, after = make(gpt, group, folder, {option: toggles[option] for option in chosen})
    except (ValueError, TypeError):
        return REFUSED
    first, by_threads = len(sent), getattr(after, "delay", 0)
    for block in gpt.blocks if not by_threads else ():
        block.register_forward_pre_hook(lambda *_: seen.append(len(sent) - first))
    optimizer = model.optimizer if hasattr(model, "optimizer") else adamw(model.parameters())
    batches = Batches(TEXT, 4, config.seq_len, rank=group.rank(), size=group.size())
    for step in range(STEPS):
        loss = train_step(model, optimizer, [batches.batch(step)]).loss.item()
        seen += [loss, *after()]
        seen += [t.tolist() for t in model.tensors_to_step() if t.untyped_storage().size()]
    getattr(after, "finish", list)()
    return seen, sorted((row[0], row[3]) for row in sent[first:])


def come_to_all(folder, group):
    return {
        (name, chosen): come_to(f"{folder}/{name}, {', '.join(chosen)}", name, chosen, group)
        for name, (_, _, toggles) in CLASSES.items()
        for chosen in sets_of(toggles)
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(come_to_all, 2, (str(tmp_path_factory.mktemp("files")),)).results[0]


@pytest.mark.parametrize("name", CLASSES)
def test_no_option_switches_another_off_in_silence(name, found):
    toggles = CLASSES[name][2]
    works = [each for each in toggles if found[name, (each,)] not in (found[name, ()], REFUSED)]
    switched_off = {
        (one, other)
        for one in works
        for other in works
        if one != other
        and found[name, tuple(each for each in toggles if each in (one, other))]
        == found[name, (one,)]
    }
    assert switched_off == DOCUMENTED.get(name, set())
    assert len(works) == len(toggles)  # each option alone has an effect
