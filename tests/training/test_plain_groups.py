"""Public functions do the same with a plain torch.distributed group as with a launch's group."""

import importlib
import inspect
import pkgutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

import mini_dist
from mini_dist import GPT, Layout, ModelConfig, collectives, launch
from mini_dist.collectives import ops
from mini_dist.collectives.backend import own_backend
from mini_dist.collectives.mesh import Mesh
from mini_dist.course.profile import profiled
from mini_dist.model.gpt import MLP, Attention, MoE
from mini_dist.model.loss import token_loss
from mini_dist.plan.schedule import add_communication, build, gpipe
from mini_dist.ranks.ledger.memory import held
from mini_dist.ranks.watch import WatchedGroup
from mini_dist.serving import Engine, Memory, decode_in_stages
from mini_dist.strategies import asynchronous as servers
from mini_dist.strategies import compression, data_parallel
from mini_dist.strategies import context_parallel as context
from mini_dist.strategies import expert_parallel as experts
from mini_dist.strategies import tensor_parallel as tensor
from mini_dist.strategies.offload import Lanes, Sides, activations_to_host
from mini_dist.strategies.pipeline import Pipeline, gpipe_step, run_list
from mini_dist.strategies.precision import LossScaler, scaled_step
from mini_dist.strategies.replicas import meet
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize
from mini_dist.training.checkpoint import Training, find, save
from mini_dist.training.elastic import (
    catch_up,
    check_members,
    furthest,
    invite,
    numbers,
    rebuild,
    regroup,
)
from mini_dist.training.full_state import full_state_dict
from mini_dist.training.preflight import inspect as inspected
from mini_dist.training.preflight import measure_link
from mini_dist.training.trainer import Recipe
from mini_dist.training.trainer import train as train_recipe

SMALL = ModelConfig(d_model=8, num_layers=2, num_heads=2, seq_len=8)
EXPERTS = SMALL.replace(num_experts=2, top_k=1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1)


def x_of(group, *shape):
    torch.manual_seed(group.rank())
    return torch.randn(*shape or (4, 6))


def tokens(rows=2):
    return torch.randint(0, 256, (rows, 8), generator=torch.Generator().manual_seed(3))


def gradients(module):
    return [parameter.grad for parameter in module.parameters()]


def around(function, group, *args, **kwargs):
    """Return a differentiable function's value and the gradient of its input."""
    x = x_of(group).requires_grad_()
    y = function(x, group, *args, **kwargs)
    y.square().sum().backward()
    return y, x.grad


# -- calls with a group ---------------------------------------------------------------------------


def of_x(function, *shape, **kwargs):
    return lambda group, folder: function(x_of(group, *shape), group=group, **kwargs)


def begun(function):
    return lambda group, folder: function(x_of(group, 8), group).wait()


def send_and_receive(group, folder):
    x = x_of(group)
    if group.rank() == 0:
        collectives.send(x, 1, group)
        return collectives.recv(x, 1, group)
    found = collectives.recv(x, 0, group)
    collectives.send(x, 0, group)
    return found


def started(group, folder):
    x, other = torch.zeros(3), 1 - group.rank()
    collectives.wait(collectives.start(group, [(x, other)], [(x_of(group, 3), other)]))
    return x


def averaged(wrapper):
    def call(group, folder):
        model = wrapper(GPT(SMALL, seed=group.rank()), group)
        token_loss(model(tokens()), tokens()).mean().backward()
        model.finish()
        return gradients(model)

    return call


def by_hand(function, *args):
    def call(group, folder):
        linear = nn.Linear(3, 2)
        linear.weight.grad, linear.bias.grad = x_of(group, 2, 3), x_of(group, 2)
        function(linear.parameters(), *args, group)
        return gradients(linear)

    return call


def overlapped(group, folder):
    linear = nn.Linear(3, 2)
    loss = linear(x_of(group, 4, 3)).square().sum()
    with ThreadPoolExecutor(1) as sender:
        buckets = [[p] for p in linear.parameters()][::-1]
        data_parallel.overlapped_backward(loss, buckets, sender, group)
    return gradients(linear)


def sharded(stage, group, folder, **options):
    torch.manual_seed(0)
    gpt = GPT(SMALL)
    model = stage(gpt, group, adamw, units=gpt.blocks, **options)
    token_loss(model(tokens()), tokens()).mean().backward()
    model.step(1.0)
    return full_state_dict(model, group), full_state_dict(model, group, rank=1)


def quantized(group, folder):
    return sharded(ZeRO3, group, folder, messages=compression.Quantized(8, 8))


def saved(group, folder, background=False):
    gpt = GPT(SMALL)
    training = Training(gpt, adamw(gpt.parameters()), group, background=background)
    training.save(folder, 3)
    with torch.no_grad():
        gpt.embed.token.weight.zero_()
    return training.resume(folder).step, list(gpt.parameters())


def saved_in_pieces(group, folder):
    pieces = Training(nn.Linear(2, 2), [], group).pieces()
    return save(folder, 1, pieces, group).name, find(folder, group).step


def on_axes(config, layout):
    def call(group, folder):
        model = parallelize(config, layout, group, adamw)
        rows = layout.micro_batch_size * layout.num_micro_batches
        done = model.step(tokens(rows), tokens(rows), max_norm=1.0)
        return done.loss, done.norm

    return call


def attention(function, **options):
    def call(group, folder):
        q, k, v = (x_of(group, 1, 2, 4, 8) for _ in range(3))
        return function(q, k, v, group, **options)

    return call


def served(group, folder):
    if group.rank() == 0:
        table = torch.zeros(4, 2)
        servers.serve(table, lambda values, gradients: values - gradients, 1, None, group)
        return table
    rows = torch.tensor([1, 2])
    found = servers.pull(torch.zeros(2, 2), rows, 0, group)
    servers.push(torch.ones(2, 2), rows, 0, group)
    servers.leave(0, group)
    return found


def worked(group, folder):
    sgd = partial(torch.optim.SGD, lr=0.1)
    if group.rank() == 0:
        return len(servers.serve_model(nn.Linear(2, 2), sgd, 1, None, group))
    with servers.Worker(nn.Linear(2, 2), 1, group) as model:
        for _ in range(2):
            model.pull()
            model(torch.ones(2)).sum().backward()
            model.push()
    return list(model.parameters())


def apart(group, folder):
    model = mini_dist.strategies.trainable.Trainable(nn.Linear(2, 2))
    diloco = servers.DiLoCo(model, group, 1)
    with torch.no_grad():
        model.module.weight += group.rank()
    diloco.step()
    return list(model.parameters())


def in_stages(run):
    def call(group, folder):
        torch.manual_seed(group.rank())
        stage, inputs = nn.Linear(2, 2), list(torch.ones(2, 3, 2))
        loss = run(stage, inputs, inputs, nn.functional.mse_loss, (3, 2), group)
        return loss, gradients(stage)

    return call


def listed(stage, inputs, targets, loss_fn, shape, group):
    actions = add_communication(gpipe(2, 2)).ranks[group.rank()]
    return run_list(actions, stage, inputs, targets, loss_fn, shape, group)


def scheduled(stage, inputs, targets, loss_fn, shape, group):
    like = torch.empty(shape, device="meta")
    pipeline = Pipeline(build("1f1b", 2, 2), stage, group, loss_fn=loss_fn, activation=like)
    return pipeline.step(inputs, targets)


def scaled(group, folder):
    linear = nn.Linear(2, 2)
    linear.weight.grad, linear.bias.grad = x_of(group, 2, 2), x_of(group, 2)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    scaled_step(linear.parameters(), optimizer, LossScaler(), 1.0, group)
    return list(linear.parameters())


def dispatched(group, folder):
    x, counts = x_of(group, 4, 3), torch.tensor([1, 3])
    arrived, how = experts.dispatch(x, counts, group)
    return experts.combine(arrived * 2, how, group)


def moe(make):
    def call(group, folder):
        torch.manual_seed(0)
        layer = make(group)
        return layer(x_of(group, 1, 4, 8))

    return call


def cut(make, out_of=lambda y: y):
    """Call a tensor-parallel module with the same input on all ranks."""

    def call(group, folder):
        torch.manual_seed(0)
        module = make(group)
        return out_of(module(torch.ones(1, 4, 8)))

    return call


def whole_model(group, folder):
    gpt = tensor.shard_model(GPT(SMALL), tensor.GPT_PLAN, group)
    return gpt(tokens())


def serving(group, folder):
    gpt = GPT(SMALL).eval()
    return decode_in_stages(gpt, [torch.tensor([1, 2])], 2, group)[0]


def engine(group, folder):
    return Engine(GPT(SMALL), Memory(8, 4), group).group.size()


def inspect_folder(group, folder):
    Path(folder).mkdir(parents=True, exist_ok=True)
    return len(inspected(folder, group))


def profile(group, folder):
    with profiled(group):
        x_of(group)


def lifted(group, folder):
    gpt = GPT(SMALL)
    with activations_to_host(Lanes(), group, gpt.parameters()):
        loss = token_loss(gpt(tokens()), tokens()).mean()
    loss.backward()
    return gradients(gpt)


def recipe(group, folder):
    small = Recipe(model=SMALL, layout=Layout(dp=2), steps=2)
    return [metrics.loss for metrics in train_recipe(small, group)]


NO_DIM = (ops.copy, ops.all_reduce, ops.all_to_all)
C, K, D, T = collectives, compression, data_parallel, tensor
CALLS = {
    **{
        f"collectives.{function.__name__}": of_x(function)
        for function in (C.all_gather, C.all_reduce, C.all_to_all, C.reduce_scatter)
        + (C.doubling_all_reduce, C.halving_doubling_all_reduce, C.pairwise_all_to_all)
        + (C.pipelined_ring_all_reduce, C.recursive_doubling_all_gather, C.ring_all_gather)
        + (C.recursive_halving_reduce_scatter, C.ring_all_reduce, C.ring_reduce_scatter)
        + (C.ring_by_hosts_all_gather, C.ring_by_hosts_all_reduce, C.star_all_reduce)
        + (C.ring_by_hosts_reduce_scatter, C.stars_all_reduce, C.tree_all_reduce)
    },
    **{
        f"collectives.{function.__name__}": of_x(function, root=1)
        for function in (C.broadcast, C.gather, C.reduce, C.star_broadcast, C.star_reduce)
        + (C.tree_broadcast, C.tree_reduce)
    },
    **{
        f"collectives.{function.__name__}": of_x(function, nodes=2)
        for function in (C.hierarchical_all_gather, C.hierarchical_all_reduce)
        + (C.hierarchical_reduce_scatter, C.pipelined_hierarchical_all_reduce)
    },
    "collectives.scatter": lambda group, folder: C.scatter(x_of(group), 0, group),
    "collectives.torus_all_reduce": of_x(C.torus_all_reduce, columns=2),
    "collectives.barrier": lambda group, folder: C.barrier(group),
    "collectives.begin_all_gather_": begun(C.begin_all_gather_),
    "collectives.begin_reduce_scatter": begun(C.begin_reduce_scatter),
    "collectives.exchange": lambda group, _: C.exchange(
        x_of(group), 1 - group.rank(), 1 - group.rank(), group
    ),
    "collectives.send": send_and_receive,
    "collectives.recv": send_and_receive,
    "collectives.start": started,
    "collectives.device_of": lambda group, folder: str(C.device_of(group)),
    **{
        f"ops.{function.__name__}": lambda group, folder, function=function: around(
            function, group, **({} if function in NO_DIM else {"dim": 0})
        )
        for function in (ops.copy, ops.all_reduce, ops.split, ops.join, ops.all_gather)
        + (ops.reduce_scatter, ops.all_to_all)
    },
    "compression.half_mean": of_x(K.half_mean),
    "compression.majority": of_x(K.majority, 16),
    "compression.sign_mean": of_x(K.sign_mean, 16),
    "compression.vote": of_x(K.vote, 16),
    "compression.one_bit_mean": of_x(K.one_bit_mean, 16, left=0.0),
    "compression.top_k_mean": of_x(K.top_k_mean, 16, k=2),
    "compression.random_k_mean": lambda group, _: K.random_k_mean(
        x_of(group, 16), 2, torch.Generator().manual_seed(0), group
    ),
    "compression.power_mean": lambda group, _: K.power_mean(x_of(group), torch.ones(6, 1), group),
    "compression.with_feedback": lambda group, _: K.with_feedback(
        K.sign_mean, x_of(group, 16), 0.0, group
    ),
    **{
        f"compression.{function.__name__}": lambda group, _, function=function, more=more: function(
            x_of(group, 2048), torch.Generator().manual_seed(0), *more, group
        )
        for function, more in [(K.quantized_mean, ()), (K.quantized_reduce_scatter, ())]
        + [(K.quantized_all_gather, ()), (K.quantized_reduce_scatter_by_nodes, (1,))]
    },
    "data_parallel.Naive": averaged(D.Naive),
    "data_parallel.Bucketed": averaged(D.Bucketed),
    "data_parallel.Overlapped": averaged(D.Overlapped),
    "data_parallel.average_in_buckets": by_hand(D.average_in_buckets, 1000),
    "data_parallel.average_through_rank_0": by_hand(D.average_through_rank_0),
    "data_parallel.overlapped_backward": overlapped,
    **{
        f"data_parallel.{function.__name__}": of_x(function)
        for function in (D.mean, D.mean_, D.ring_mean, D.backend_mean_)
    },
    "zero.ZeRO1": partial(sharded, ZeRO1),
    "zero.ZeRO2": partial(sharded, ZeRO2, offload="cpu"),
    "zero.ZeRO3": partial(sharded, ZeRO3),
    "zero.Files": lambda group, folder: sharded(ZeRO1, group, folder, offload=folder),
    "zero.Unit": quantized,
    "full_state.full_state_dict": partial(sharded, ZeRO3),
    "checkpoint.Training": saved,
    "checkpoint.Training in the background": partial(saved, background=True),
    "checkpoint.save": saved_in_pieces,
    "checkpoint.find": saved_in_pieces,
    "all_axes.parallelize": on_axes(SMALL, Layout(tp=2)),
    "mesh.Mesh": on_axes(SMALL, Layout(pp=2, num_micro_batches=2)),
    "mesh.host_by_host": lambda group, _: Mesh(group, by_hosts=True, dp=2)["dp"].size(),
    "context_parallel.make_attention": on_axes(SMALL, Layout(cp=2)),
    "context_parallel.ring_attention": attention(context.ring_attention),
    "context_parallel.all_gather_attention": attention(context.all_gather_attention),
    "context_parallel.ulysses_attention": attention(context.ulysses_attention),
    "context_parallel.ring_step": attention(context.ring_attention, placement="contiguous"),
    "context_parallel.positions_here": lambda group, _: context.positions_here(8, group),
    "context_parallel.shard": lambda group, _: context.shard(tokens(), group),
    "context_parallel.unshard": lambda group, _: context.unshard(
        context.shard(tokens(), group), group
    ),
    "context_parallel.share_of_mean": lambda group, _: context.share_of_mean(
        token_loss(x_of(group, 1, 2, 4), torch.zeros(1, 2, dtype=torch.int64)), group
    ),
    "context_parallel.sum_gradients": by_hand(context.sum_gradients),
    "expert_parallel.ExpertParallel": moe(
        lambda group: experts.ExpertParallel(MoE(EXPERTS), group)
    ),
    "expert_parallel.shard_experts": on_axes(EXPERTS, Layout(dp=2, ep=2)),
    "expert_parallel.dispatch": dispatched,
    "expert_parallel.combine": dispatched,
    "tensor_parallel.ColumnParallelLinear": cut(
        lambda group: T.ColumnParallelLinear(nn.Linear(8, 4), group, pair=T.TENSOR)
    ),
    "tensor_parallel.ParallelMLP": cut(
        lambda group: T.ParallelMLP(MLP(SMALL, 16), group, pair=T.TENSOR)
    ),
    "tensor_parallel.ParallelAttention": cut(
        lambda group: T.ParallelAttention(Attention(SMALL), group, pair=T.TENSOR)
    ),
    "tensor_parallel.shard_model": whole_model,
    "asynchronous.serve": served,
    "asynchronous.pull": served,
    "asynchronous.push": served,
    "asynchronous.leave": served,
    "asynchronous.serve_model": worked,
    "asynchronous.Worker": worked,
    "asynchronous.DiLoCo": apart,
    "asynchronous.outer_step": lambda group, _: servers.outer_step(
        torch.zeros(3), x_of(group, 3), torch.zeros(3), 0.7, 0.9, group
    ),
    "asynchronous.shared": lambda group, _: servers.shared(torch.arange(3.0), group).clone(),
    "elastic.check_members": lambda group, _: check_members(group),
    "elastic.furthest": lambda group, _: furthest(group.rank(), group),
    "elastic.rebuild": lambda group, _: rebuild(x_of(group), group.rank(), [], group)[1:],
    "elastic.catch_up": lambda group, _: catch_up(Training(nn.Linear(2, 2), [], group), 1, group),
    "pipeline.gpipe_step": in_stages(gpipe_step),
    "pipeline.run_list": in_stages(listed),
    "pipeline.Pipeline": in_stages(scheduled),
    "precision.scaled_step": scaled,
    "preflight.inspect": inspect_folder,
    "preflight.measure_link": lambda group, _: len(measure_link(group)),
    "profile.profiled": profile,
    "replicas.broadcast_state": averaged(D.Naive),
    "replicas.meet": lambda group, _: meet(group),
    "serving.decode_in_stages": serving,
    "serving.Engine": engine,
    "offload.activations_to_host": lifted,
    "trainer.train": recipe,
    "watch.WatchedGroup": lambda group, _: C.all_reduce(x_of(group), WatchedGroup(group)),
}

# These need a launch's group and say so.
REFUSED = {
    "backend.own_backend": (own_backend, "records nothing: give the group of a launch"),
    "offload.Sides": (lambda group: Sides({}, group), "does not record memory"),
    "ledger.held": (held, "does not record memory"),
    **{
        f"elastic.{function.__name__}": (function, "this run is not elastic")
        for function in (numbers, regroup, invite)
    },
}
# These are tested above under another name, take no group, or are about emulated devices.
ELSEWHERE = {
    *("full_state.deliver", "preflight.gather_objects", "watch.watched", "ledger.Comm"),
    *("asynchronous.Arrivals", "context_parallel.run_ring_emulated", "pipeline.run_emulated"),
    *("asynchronous.pull_dealt", "asynchronous.push_dealt", "asynchronous.push_touched"),
    *("expert_parallel.balance_loss", "tensor_parallel.RowParallelLinear"),
    *("tensor_parallel.VocabParallelEmbedding", "tensor_parallel.column_linear"),
    *("tensor_parallel.column_linears", "tensor_parallel.row_linear"),
    "tensor_parallel.vocab_parallel_cross_entropy",
}


def plain_data(value):
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, value)


def call_all(names, folder, group):
    plain = dist.new_group(backend="gloo")
    assert not hasattr(plain, "recorder") and not hasattr(plain, "device")
    found = {}
    for number, name in enumerate(names):
        pair = []
        for each in (group, plain):
            torch.manual_seed(0)
            pair.append(plain_data(CALLS[name](each, f"{folder}/{number}/{len(pair)}")))
        found[name] = pair
    return found


@pytest.mark.parametrize("part", range(4))
def test_a_plain_group_does_what_a_recorded_one_does(part, tmp_path):
    run = launch(call_all, 2, (list(CALLS)[part::4], str(tmp_path)))
    for found in run.results:
        for name, (recorded, plain) in found.items():
            assert recorded == plain, name


def test_what_needs_a_launch_says_so():
    def ask(group):
        plain = dist.new_group(backend="gloo")
        found = {}
        for name, (function, _) in REFUSED.items():
            try:
                function(plain)
            except (ValueError, RuntimeError) as error:
                found[name] = str(error)
        return found

    for found in launch(ask, 2).results:
        assert all(says in found[name] for name, (_, says) in REFUSED.items()), found


def public_functions_of_a_group():
    for module in pkgutil.iter_modules(mini_dist.__path__):
        if module.name in ("check", "grade", "widgets", "draw", "elsewhere"):
            continue
        package = importlib.import_module(f"mini_dist.{module.name}")
        for name in getattr(package, "__all__", vars(package)):
            what = getattr(package, name)
            if callable(what) and getattr(what, "__module__", "").startswith(package.__name__):
                with suppress(ValueError, TypeError):  # builtins have no signature
                    if "group" in inspect.signature(what).parameters:
                        yield f"{module.name}.{name}"


def test_no_function_is_left_out():
    """Every public function of a group is called with a plain group or listed here."""
    assert set(public_functions_of_a_group()) <= {*CALLS, *REFUSED, *ELSEWHERE}


def test_an_own_program_without_a_launch(tmp_path):
    """Use torch.distributed's own init and its default group."""
    program = """
import sys
import torch, torch.distributed as dist
from mini_dist import GPT, ModelConfig
from mini_dist.training.checkpoint import Training
from mini_dist.training.full_state import full_state_dict
from mini_dist.strategies.zero import ZeRO3

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
group = dist.group.WORLD
gpt = GPT(ModelConfig(d_model=8, num_layers=1, num_heads=2, seq_len=8), seed=rank)
model = ZeRO3(gpt, group, lambda shards: torch.optim.AdamW(shards), units=gpt.blocks)
training = Training(model, [], group)
training.save(folder + "/saved", 1)
assert training.resume(folder + "/saved").step == 1
torch.save(full_state_dict(model, group), f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(rank)])
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    expected = GPT(ModelConfig(d_model=8, num_layers=1, num_heads=2, seq_len=8)).state_dict()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
