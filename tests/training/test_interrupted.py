"""A caught exception in forward or backward leaves nothing behind.

After `zero_grad()`, the next step is as if nothing had been raised, or says to rebuild the model.
"""

import pytest
import torch

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.model.data import Batches
from mini_dist.model.recompute import recompute_blocks
from mini_dist.ranks.diagnose import RankError
from mini_dist.strategies.compression import Compressed, OneBit, Quantized, half, top_k
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.expert_parallel import layers_with_experts, move_balance_biases
from mini_dist.strategies.offload import Lanes
from mini_dist.strategies.offload import OverlappedOffload as Behind
from mini_dist.strategies.train import split, train_step
from mini_dist.strategies.trainable import Trainable
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize

CONFIG = ModelConfig(d_model=16, num_layers=3, num_heads=2, seq_len=8)
EXPERTS = CONFIG.replace(num_experts=4, top_k=2)
SIGMOID = EXPERTS.replace(router="sigmoid")
TEXT = torch.randint(0, 256, (2000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
WAYS = "forward", "backward", "finish"


class Oops(Exception):
    pass


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed == ["backward"]:
            raise Oops
        return grad, None


def lay_charge(model, place=None):
    """Make a middle block, or block `place`, raise; the list it returns says in which phase."""
    armed = []

    def go_off(_, inputs, output):
        if armed == ["forward"]:
            raise Oops
        return Raise.apply(output, armed)

    kinds = "MLP", "ParallelMLP", "ExpertParallel"
    places = [module for module in model.modules() if type(module).__name__ in kinds]
    places[len(places) // 2 if place is None else place].register_forward_hook(go_off)
    for part in model.modules():
        charge_finish(part, armed)
    return armed


def charge_finish(part, armed):
    """Make the sending of gradients raise after some of them have been sent."""

    def or_raise(send):
        def sending(*args):
            if armed == ["finish"]:
                raise Oops
            return send(*args)

        return sending

    if hasattr(part, "reduces"):
        part.reduces[-1] = or_raise(part.reduces[-1])
    for unit in getattr(part, "units", [])[:1]:
        unit.begin_scatter = or_raise(unit.begin_scatter)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


# -- each strategy in turn: a model, and a function for one step -----------------------------------


def averaged(wrapper, group, **options):
    model = wrapper(GPT(CONFIG), group, bucket_bytes=2000, **options)
    return model, adamw(model.tensors_to_step())


def plain(group):
    model = Trainable(recompute_blocks(GPT(CONFIG), "full"))
    return model, adamw(model.tensors_to_step())


def naive(group, **options):
    model = Naive(GPT(CONFIG), group, **options)
    return model, adamw(model.tensors_to_step())


def sharded(stage, group, dtype=None, recompute="none", **options):
    gpt = recompute_blocks(GPT(CONFIG, dtype=dtype), recompute)
    model = stage(gpt, group, adamw, units=gpt.blocks, **options)
    return model, model.optimizer


LISTED = {
    "alone": plain,
    "naive": naive,
    "naive half": lambda group: naive(group, reduce=half()),
    "naive top k": lambda group: naive(group, reduce=Compressed(top_k(0.1))),
    "bucketed": lambda group: averaged(Bucketed, group),
    "bucketed one bit": lambda group: averaged(Bucketed, group, reduce=OneBit()),
    "overlapped": lambda group: averaged(Overlapped, group),
    "overlapped half": lambda group: averaged(Overlapped, group, reduce=half()),
    "zero 1": lambda group: sharded(ZeRO1, group),
    "zero 2": lambda group: sharded(ZeRO2, group),
    "zero 3": lambda group: sharded(ZeRO3, group),
    "zero 3 recomputed": lambda group: sharded(ZeRO3, group, recompute="full"),
    "zero 3 prefetch": lambda group: sharded(ZeRO3, group, prefetch=2),
    "zero 3 hpz": lambda group: sharded(ZeRO3, group, inside=group),
    "zero 3 quantized": lambda group: sharded(ZeRO3, group, messages=Quantized(8, None)),
    "zero 1 qgZ": lambda group: sharded(ZeRO1, group, messages=Quantized(None, 4)),
    "zero 2 qgZ": lambda group: sharded(ZeRO2, group, messages=Quantized(None, 8)),
    "zero 3 qgZ": lambda group: sharded(ZeRO3, group, messages=Quantized(8, 4)),
    "zero 1 master": lambda group: sharded(
        ZeRO1, group, torch.bfloat16, master_dtype=torch.float32
    ),
    "zero 2 master": lambda group: sharded(
        ZeRO2, group, torch.bfloat16, master_dtype=torch.float32
    ),
    "zero 3 master": lambda group: sharded(
        ZeRO3, group, torch.bfloat16, master_dtype=torch.float32
    ),
    "zero 1 host": lambda group: sharded(ZeRO1, group, offload="cpu"),
    "zero 2 host": lambda group: sharded(ZeRO2, group, offload="cpu"),
    "zero 3 host": lambda group: sharded(ZeRO3, group, offload="cpu"),
    "zero 2 behind": lambda group: sharded(ZeRO2, group, offload=Behind(Lanes())),
    "zero 3 behind": lambda group: sharded(ZeRO3, group, offload=Behind(Lanes())),
    "zero 3 delayed": lambda group: sharded(ZeRO3, group, offload=Behind(Lanes(), delayed=True)),
}
KEEP_WHAT_IS_LEFT_OUT = "naive top k", "bucketed one bit"  # once sent, it cannot be taken back
WITHOUT_FINISH = {"alone", *KEEP_WHAT_IS_LEFT_OUT}  # "alone" sends nothing
LAYOUTS = {
    "tp": (CONFIG, Layout(tp=2, num_micro_batches=2)),
    "tp sequence zero 3": (CONFIG, Layout(tp=2, sequence_parallel=True, zero=3)),
    "cp": (CONFIG, Layout(cp=2, num_micro_batches=2)),
    "cp zero 2": (CONFIG, Layout(cp=2, zero=2, num_micro_batches=2)),
    "ep": (EXPERTS, Layout(dp=2, ep=2, num_micro_batches=2)),
    "ep sigmoid": (SIGMOID, Layout(dp=2, ep=2, num_micro_batches=2)),
    "ep zero 3": (EXPERTS, Layout(dp=2, ep=2, zero=3, num_micro_batches=2)),
}


def listed(name, group):
    model, optimizer = LISTED[name](group)
    batches = Batches(TEXT, 8, CONFIG.seq_len, rank=group.rank(), size=group.size())

    def step(number):
        return train_step(model, optimizer, split(*batches.batch(number), 2), max_norm=1.0)

    return model, step


def laid_out(name, group):
    config, layout = LAYOUTS[name]
    model = parallelize(config, layout, group, adamw)
    rows = layout.num_micro_batches * layout.micro_batch_size
    batches = Batches(
        TEXT, rows * layout.dp, config.seq_len, rank=model.mesh.index("dp"), size=layout.dp
    )

    def step(number):
        done = model.step(*batches.batch(number), max_norm=1.0)
        if config.router == "sigmoid":
            move_balance_biases(model, 1e-2)
        return done

    return model, step


def train(make, name, way, group):
    """Return losses, norms and expert visits of 4 steps, and the routers' final biases.

    If `way` is given, the third step is first interrupted in this way.
    """
    model, step = make(name, group)
    armed, found = lay_charge(model), []
    for number in range(4):
        if way and number == 2:
            armed.append(way)
            with pytest.raises(Oops):
                step(number)
            armed.clear()
        done = step(number)
        visits = [layer.visits_of_step.tolist() for layer in layers_with_experts(model)]
        found.append((done.loss.item(), done.norm.item(), visits))
    biases = [b.tolist() for name, b in model.named_buffers() if name.endswith("balance_bias")]
    return [*found, biases]


def train_in_all_ways(make, name, ways, group):
    torch.manual_seed(0)
    return [train(make, name, way, group) for way in (None, *ways)]


@pytest.mark.parametrize("name", [*LISTED, *LAYOUTS])
def test_the_next_step_is_as_if_nothing_had_been_raised(name):
    make = listed if name in LISTED else laid_out
    ways = [way for way in WAYS if way != "finish" or name not in WITHOUT_FINISH]
    for untouched, *broken_off in launch(train_in_all_ways, 2, (make, name, ways)).results:
        for way, found in zip(ways, broken_off, strict=True):
            assert found == untouched, way


# -- on one rank only ------------------------------------------------------------------------------


def break_off_on_rank_0(make, name, way, group):
    model, step = make(name, group)
    armed = lay_charge(model)
    for number in range(3):
        if number == 1 and group.rank() == 0:
            armed.append(way)
            with pytest.raises(Oops):
                step(number)
            armed.clear()
        step(number)


SENDERS = ["naive", "overlapped", "zero 1 qgZ", "zero 2", "zero 3 qgZ", "zero 3 behind"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*SENDERS, "tp", "cp", "ep", "ep zero 3"])
def test_a_rank_that_repeats_a_step_alone_is_told_so_at_once(name, way):
    """The other ranks wait for different messages, and wrong messages never get through."""
    make = listed if name in LISTED else laid_out
    with pytest.raises(RankError, match="the ranks do not agree|deadlock: ranks 0 and 1 wait"):
        launch(break_off_on_rank_0, 2, (make, name, way), timeout=300)


# -- models that must be rebuilt say so ------------------------------------------------------------


def rebuilt(kind, group):
    """Return the error that the first use after an exception raises."""
    if kind == "pipeline":
        model = parallelize(CONFIG, Layout(pp=2, num_micro_batches=2), group, adamw)
        group.rank() == 0 and lay_charge(model).append("forward")
        batch = Batches(TEXT, 2, CONFIG.seq_len).batch(0)
        if group.rank() == 1:
            return ""  # it would wait for rank 0's message
        with pytest.raises(Oops):
            model.step(*batch)
        with pytest.raises(RuntimeError) as error:
            model.step(*batch)
        return str(error.value)
    if kind in KEEP_WHAT_IS_LEFT_OUT:
        model, step = listed(kind, group)
        lay_charge(model).append("finish")
        with pytest.raises(Oops):
            step(0)
        with pytest.raises(RuntimeError) as error:
            step(0)
        return str(error.value)
    if kind == "feedback":
        model, _ = averaged(Overlapped, group, reduce=OneBit())
    else:
        model, _ = sharded(ZeRO2, group, offload=Behind(Lanes(), early=True))
    lay_charge(model, 0).append("backward")  # so late that some gradients have already left
    inputs, _ = Batches(TEXT, 4, CONFIG.seq_len).batch(0)
    with pytest.raises(Oops):
        model(inputs).square().mean().backward()
    with pytest.raises(RuntimeError) as error:
        model.zero_grad()
    return str(error.value)


@pytest.mark.parametrize("kind", ["pipeline", "feedback", "early", *KEEP_WHAT_IS_LEFT_OUT])
def test_what_cannot_go_on_says_that_it_must_be_rebuilt(kind):
    assert "rebuild the model" in launch(rebuilt, 2, (kind,)).results[0]


def go_on_without_zero_grad(stage, group):
    model, _ = sharded(stage, group)
    armed = lay_charge(model)
    inputs, _ = Batches(TEXT, 4, CONFIG.seq_len).batch(0)
    armed.append("backward")
    with pytest.raises(Oops):
        model(inputs).square().mean().backward()
    armed.clear()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        model(inputs).square().mean().backward()
        model.step()
    with pytest.raises(RuntimeError, match="call zero_grad"):
        model.step()


@pytest.mark.parametrize("stage", [ZeRO2, ZeRO3])
def test_without_zero_grad_zero_raises(stage):
    launch(go_on_without_zero_grad, 2, (stage,))
