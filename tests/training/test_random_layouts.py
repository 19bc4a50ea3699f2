"""Train in random layouts, one after the other, each from the previous layout's checkpoint.

Every step equals one process's step, and every rank holds that process's values. Memory is
poisoned before: a value that is neither computed nor set shows as NaN.
"""

import random
import sys
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from torch import nn

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.model.data import Batches
from mini_dist.model.loss import token_loss
from mini_dist.strategies.pipeline import layer_ranges
from mini_dist.strategies.precision import FULL
from mini_dist.training.all_axes.fits import check_fits

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

ROWS, STEPS, MAX_NORM, BALANCE = 8, 3, 0.5, 1e-2  # rows per step, steps per layout
DENSE = ModelConfig(
    vocab_size=64, seq_len=8, d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, d_ffn=16
)
EXPERTS = dict(num_experts=4, top_k=2, d_expert=8, num_shared_experts=1, first_dense_layers=1)
CONFIGS = {
    "tied": DENSE.replace(tied_embedding=True, positions="learned"),
    "untied": DENSE,
    "tied experts": DENSE.replace(tied_embedding=True, **EXPERTS),
    "tied experts, sigmoid": DENSE.replace(tied_embedding=True, router="sigmoid", **EXPERTS),
    "experts, sigmoid": DENSE.replace(router="sigmoid", **EXPERTS),
}
TEXT = torch.randint(0, 64, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


# --- the oracle ---------------------------------------------------------------------------------


def one_process(config, steps, max_norm=MAX_NORM):
    """Return the plain GPT's [(losses and norms of STEPS steps, state dict after them)]."""
    model = GPT(config, seed=0).double()
    optimizer, batches, done = adamw(model.parameters()), Batches(TEXT, ROWS, config.seq_len), []
    for step in range(steps):
        inputs, targets = batches.batch(step)
        optimizer.zero_grad()
        routing = []
        loss = token_loss(model(inputs, routing=routing), targets).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        biases = [b for name, b in model.named_buffers() if name.endswith("balance_bias")]
        for bias, decision in zip(biases, routing):
            visits = decision.experts.flatten().bincount(minlength=len(bias)).double()
            bias += BALANCE * (visits.mean() - visits).sign()
        if step % STEPS == 0:
            done.append(([], None))
        numbers = [*done[-1][0], (loss.item(), norm.item())]
        done[-1] = numbers, {name: t.clone() for name, t in model.state_dict().items()}
    return done


# --- on the ranks -------------------------------------------------------------------------------


def poison_memory():
    """Fill new memory with NaN (integers: the largest value) until it is set."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty and the like
    resize = torch.UntypedStorage.resize_

    def poisoned(storage, size):
        before = storage.nbytes()
        resize(storage, size)
        if size > before:
            torch.tensor([], dtype=torch.uint8).set_(storage)[before:].fill_(255)  # all bits 1: NaN
        return storage

    torch.UntypedStorage.resize_ = poisoned


def named_values(model, training):
    """Yield what this rank holds, by name: parameters, buffers, shards, optimizer states."""
    for tensor, key, value in training.states():
        yield f"state {key} of {list(tensor.shape)}", value
    for part in model.parts:
        yield from part.module.named_buffers()
        yield from ((f"shard {i}", shard) for i, shard in enumerate(part.tensors_to_step()))
    for piece in training.pieces():
        yield str(piece.place), piece.tensor


def check_values(when, model, training):
    for name, tensor in named_values(model, training):
        if not bool(tensor.isfinite().all()):
            raise AssertionError(f"{name} is not finite {when}")


def walk_on(directory, config, layout, first, group):
    """Run STEPS steps from step `first`; return losses, norms and every piece this rank holds."""
    from mini_dist.strategies.expert_parallel import layers_with_experts, move_balance_biases
    from mini_dist.training.all_axes import parallelize
    from mini_dist.training.checkpoint import Training

    poison_memory()
    torch.set_default_dtype(torch.float64)
    model = parallelize(config, layout, group, adamw)
    optimizers = model.optimizer.optimizers
    training = Training(model.parts, optimizers, group, names=model.names_in_whole())
    check_values("after parallelize", model, training)
    saved = training.resume(directory)
    if (saved.step if saved else 0) != first:
        raise AssertionError(f"resumed {saved}, not step {first}")
    place = {"rank": model.mesh.index("dp"), "size": layout.dp}
    batches, done = Batches(TEXT, ROWS, config.seq_len, **place), []
    stages = nn.ModuleList(model.stages.values())
    for step in range(first, first + STEPS):
        loss, norm, _ = model.step(*batches.batch(step), max_norm=MAX_NORM)
        if config.router == "sigmoid" and layers_with_experts(stages):
            move_balance_biases(stages, BALANCE)
        done.append((loss.item(), norm.item()))
        check_values(f"after step {step}", model, training)
    training.save(directory, first + STEPS)
    pieces = [(p.place, p.tensor.detach().clone()) for p in training.pieces()]
    return done, [(place, tensor) for place, tensor in pieces if "/" not in place.name]


# --- layouts ------------------------------------------------------------------------------------


def random_layout(draw, config):
    """Draw any layout of up to 8 ranks that fits the config and ROWS rows per step."""
    while True:
        sizes = {axis: draw.choice((1, 2, 2, 4)) for axis in ("pp", "dp", "cp", "tp")}
        sizes["ep"] = draw.choice((1, 2, 4)) if config.num_experts else 1
        schedule = draw.choice(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v"))
        recompute = draw.choice(("none", "selective", "full"))
        per_replica = ROWS // sizes["dp"]
        micro_batch_size = draw.choice([n for n in (1, 2, 4) if n <= per_replica])
        try:
            layout = Layout(
                **sizes,
                schedule=schedule,
                num_chunks=2 if schedule in ("interleaved", "zb_v", "dualpipe_v") else 1,
                sequence_parallel=draw.random() < 0.5 and sizes["tp"] > 1,
                zero=draw.choice((0, 1, 2, 3)),
                recompute=recompute,
                recompute_every=1 if recompute == "none" else draw.choice((1, 2)),
                micro_batch_size=micro_batch_size,
                num_micro_batches=per_replica // micro_batch_size,
                etp=draw.choice((None, 1, 2)) if config.num_experts else None,
            )
            group = SimpleNamespace(size=lambda size=layout.world_size: size)
            check_fits(config, layout, group, FULL)
            layer_ranges(config, layout.num_stages)
        except ValueError:
            continue
        if 1 < layout.world_size <= 8:
            return layout


def v_with_tp(schedule):
    return Layout(pp=2, tp=2, schedule=schedule, num_chunks=2, num_micro_batches=ROWS)


FOUND = {  # bugs found by others: wrong numbers without an error
    "a tied embedding at the ends of a V": ("tied", [v_with_tp("zb_v"), v_with_tp("dualpipe_v")]),
    "a buffer without a value": ("experts, sigmoid", [Layout(tp=2), Layout(pp=2)]),
}


def short(layout):
    plain = asdict(Layout())
    return " ".join(f"{k}={v}" for k, v in asdict(layout).items() if v != plain[k])


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        metafunc.parametrize("number", range(60 if metafunc.config.getoption("long") else 3))


@pytest.mark.parametrize("walk", FOUND)
def test_what_was_found_is_one_process_now(walk, tmp_path):
    same_as_one_process(*FOUND[walk], tmp_path)


def test_a_training_goes_from_layout_to_layout_and_is_one_process(number, tmp_path):
    draw = random.Random(number)
    name = draw.choice(list(CONFIGS))
    same_as_one_process(name, [random_layout(draw, CONFIGS[name]) for _ in range(3)], tmp_path)


def micro_batches_fit(layout):
    return layout.replace(num_micro_batches=ROWS // layout.dp // layout.micro_batch_size)


def same_as_one_process(name, layouts, tmp_path):
    config = CONFIGS[name]
    expected = one_process(config, STEPS * len(layouts))
    for number, layout in enumerate(map(micro_batches_fit, layouts)):
        try:
            job = str(tmp_path), config, layout, STEPS * number
            results = launch(walk_on, layout.world_size, job).results
            compare(results, *expected[number])
        except Exception as error:
            raise AssertionError(f"{name}, layout {number}, {short(layout)}: {error}") from error


def compare(results, numbers, whole):
    """Check every rank's losses and norms, and each piece that any rank holds of a tensor."""
    first = {}
    for done, pieces in results:
        torch.testing.assert_close(done, numbers, rtol=1e-9, atol=1e-12)
        for place, tensor in pieces:
            assert torch.equal(tensor, first.setdefault(place, tensor)), f"ranks differ in {place}"
            box = tuple(slice(a, a + n) for a, n in zip(place.offset, place.size))
            right = whole[place.name][box].reshape(-1)[place.start : place.stop]
            off = (tensor.reshape(-1) - right).abs().max().item() if place.numel else 0.0
            assert off < 1e-9, f"{place} is off by {off}"
    names = set(whole)
    if torch.equal(whole["head.out.weight"], whole["embed.token.weight"]):  # saved once
        names.remove("head.out.weight")
    assert {place.name for place in first} == names


# --- wrappers outside any Layout ----------------------------------------------------------------


def wrappers(folder):
    """Return name -> (make, is it exact) for every form of every strategy that wraps a module."""
    from mini_dist.strategies.compression import (
        Compressed,
        OneBit,
        PowerSGD,
        Quantized,
        half,
        int8,
        sign,
    )
    from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
    from mini_dist.strategies.offload import Lanes
    from mini_dist.strategies.offload import OverlappedOffload as Behind
    from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3

    def averaged(kind, **options):
        return lambda model, group: kind(model, group, **options)

    def sharded(stage, **options):
        def make(model, group):
            return stage(model, group, adamw, units=list(model.blocks), **options)

        return make

    cases = {kind.__name__: (averaged(kind), True) for kind in (Naive, Bucketed, Overlapped)}
    lossy = {"half": half(), "one bit": OneBit(), "power": PowerSGD(rank=2)}
    lossy |= {"int8": Compressed(int8()), "sign": Compressed(sign())}
    cases |= {f"Overlapped, {n}": (averaged(Overlapped, reduce=r), False) for n, r in lossy.items()}
    for stage in (ZeRO1, ZeRO2, ZeRO3):
        name = stage.__name__
        cases[name] = sharded(stage), True
        cases[f"{name}, cpu"] = sharded(stage, offload="cpu"), True
        cases[f"{name}, files"] = sharded(stage, offload=f"{folder}/{name}"), True
        cases[f"{name}, behind"] = sharded(stage, offload=Behind(Lanes())), True
        cases[f"{name}, quantized"] = sharded(stage, messages=Quantized()), False
        cases[f"{name}, float32"] = sharded(stage, master_dtype=torch.float32), False
    return cases


def under_each_wrapper(folder, group):
    """Return name -> (losses, is it still tied, embedding) after STEPS steps in poisoned memory."""
    from mini_dist.strategies.train import train_step
    from mini_dist.strategies.zero import ZeRO3

    poison_memory()
    torch.set_default_dtype(torch.float64)
    config, found = CONFIGS["tied"], {}
    batches = Batches(TEXT, ROWS, config.seq_len, rank=group.rank(), size=group.size())
    for name, (make, _) in wrappers(folder).items():
        model = make(GPT(config, seed=0, dtype=torch.float64), group)
        optimizer = model.optimizer if hasattr(model, "optimizer") else adamw(model.parameters())
        losses = [
            train_step(model, optimizer, [batches.batch(step)]).loss.item() for step in range(STEPS)
        ]
        with model.gathered() if isinstance(model, ZeRO3) else nullcontext():
            gpt = model.module
            tied = gpt.head.out.weight is gpt.embed.token.weight
            embedding = gpt.embed.token.weight.detach().clone()
        found[name] = losses, tied, embedding
    return found


def test_a_tied_embedding_stays_one_under_every_wrapper(tmp_path):
    config = CONFIGS["tied"]
    exact = {name: is_exact for name, (_, is_exact) in wrappers(tmp_path).items()}
    (numbers, _), *_ = one_process(config, STEPS, max_norm=float("inf"))
    expected = [loss for loss, _ in numbers]
    here, there = launch(under_each_wrapper, 2, (str(tmp_path),)).results
    for name, (losses, tied, embedding) in here.items():
        assert tied and there[name][1], f"{name}: two parameters of one"
        assert torch.equal(embedding, there[name][2]), f"{name}: ranks differ"
        assert embedding.isfinite().all(), name
        close = dict(rtol=1e-9 if exact[name] else 0.1)
        torch.testing.assert_close(losses, expected, **close, atol=0, msg=name)


def made_from_nothing(config, group):
    from mini_dist.strategies.tensor_parallel import init_weights_, shard_model
    from mini_dist.training.all_axes.experts_cut import plan

    poison_memory()
    model = init_weights_(shard_model(GPT(config, device="meta"), plan(group), group), seed=0)
    return {name: (t, model.sharding.cuts.get(name)) for name, t in model.state_dict().items()}


def test_a_sharded_model_on_the_meta_device_gets_values_for_its_buffers_too():
    config = CONFIGS["tied experts, sigmoid"]
    whole = GPT(config, seed=0).state_dict()
    for state in launch(made_from_nothing, 2, (config,)).results:
        assert state.keys() == whole.keys()
        for name, (tensor, cut) in state.items():
            assert torch.equal(tensor, cut.piece(whole[name]) if cut else whole[name]), name
