"""Check, without a GPU, that the library makes its tensors on its group's device.

Every recipe runs as one rank of a larger world on tensors without storage, where a tensor made on
another device raises (ranks/without_storage.py). tests/gpu/ repeats this on a GPU.
"""

import ast
import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from mini_dist import GPT, Layout, launch
from mini_dist import collectives as C
from mini_dist.collectives import ops
from mini_dist.model.data import Batches
from mini_dist.model.recompute import recompute_blocks
from mini_dist.model.recompute.ideas import forget_and_repeat
from mini_dist.model.sampling import generate
from mini_dist.plan.schedule import SCHEDULES, add_communication, build, gpipe
from mini_dist.ranks.without_storage import DeviceMismatch, NoValue, without_storage
from mini_dist.serving import Engine, Memory, Policy, Request
from mini_dist.serving.ideas import Cache, forward
from mini_dist.strategies import compression as K
from mini_dist.strategies.context_parallel import ideas as context_page
from mini_dist.strategies.context_parallel import make_attention, positions_here
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.expert_parallel import move_balance_biases
from mini_dist.strategies.offload import Lanes, activations_to_host
from mini_dist.strategies.pipeline import Pipeline, gpipe_step, run_list
from mini_dist.strategies.tensor_parallel import GPT_PLAN, init_weights_, shard_model
from mini_dist.strategies.train import split, train_step
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.strategies.zero import ideas as zero_page
from mini_dist.training.all_axes import parallelize
from mini_dist.training.checkpoint import Training
from mini_dist.training.trainer import Recipe, train
from tests.training.test_random_layouts import CONFIGS, DENSE, TEXT, random_layout, short

ROWS = 4
EXPERTS = CONFIGS["experts, sigmoid"].replace(num_layers=2)
SMALL = DENSE.replace(num_layers=2)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def batch_of(group, config=SMALL):
    return Batches(TEXT, ROWS, config.seq_len, device=group.device).batch(0)


def x_of(group, *shape):
    return torch.ones(*shape or (8, 6), device=group.device)


def check_all_on(device, *models, optimizers=()):
    """Check parameters, buffers, gradients and all optimizer states except single numbers."""
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    tensors += [t.grad for t in tensors if t.grad is not None]
    states = [s for each in optimizers for s in each.state.values()]
    tensors += [t for s in states for t in s.values() if isinstance(t, torch.Tensor) and t.dim()]
    assert tensors and {t.device for t in tensors} == {device}


# ---- the instrument -----------------------------------------------------------------------------


def test_a_tensor_made_on_the_wrong_device_raises_where_it_is_used():
    with without_storage(0, 2) as group:
        here, astray = x_of(group, 3, 3), torch.ones(3, 3)
        wrong = {
            "@": lambda: here @ astray,  # (torch's own meta kernels allow this and the next)
            "mul_": lambda: here.mul_(astray),
            "embedding": lambda: nn.functional.embedding(torch.tensor([0]), here),
            "cat": lambda: torch.cat([here, astray]),
            "index_add": lambda: here.index_add(0, torch.tensor([0]), here[:1]),
            "index_put": lambda: here.index_put((torch.tensor([0]),), astray[:1]),
        }
        for operation in wrong.values():
            with pytest.raises(DeviceMismatch, match=r"test_any_device.py, line \d+"):
                operation()
        here[:1] = astray[:1]  # a GPU allows this copy and the operations below
        assert (here + torch.ones(())).device == here[torch.tensor([0])].device == group.device


def test_whoever_asks_for_a_value_is_told_where():
    with without_storage(1, 2) as group:
        x = x_of(group, 3)
        for ask in (lambda: x[0].item(), lambda: bool(x[0] > 0), lambda: torch.equal(x, x)):
            with pytest.raises(NoValue, match=r"test_any_device.py, line \d+.* has no storage"):
                ask()
        assert x.cpu().is_meta  # a copy on the host has no values either


def test_a_wrong_device_in_the_library_would_be_found(monkeypatch):
    """Make three mistakes that a machine without a GPU never notices."""
    with without_storage(0, 2) as group:
        model = Naive(GPT(SMALL, device=group.device), group)
        with pytest.raises(DeviceMismatch):  # a batch left on the host
            model(Batches(TEXT, 4, 8).batch(0)[0])
    with without_storage(0, 2) as group:
        model = Naive(GPT(SMALL, device="cpu"), group)  # a model left on the host
        with pytest.raises(DeviceMismatch):
            model(batch_of(group)[0])
    monkeypatch.setattr("mini_dist.model.gpt.may_see", lambda q, _: torch.ones(8, 8, dtype=bool))
    with without_storage(0, 2) as group, pytest.raises(DeviceMismatch):  # a mask made on the host
        GPT(SMALL, device=group.device, attention="explicit")(batch_of(group)[0])


def test_the_ledger_is_that_of_a_real_run():
    def step(group):
        model = ZeRO3(GPT(SMALL, device=group.device), group, adamw)
        train_step(model, model.optimizer, [batch_of(group)], max_norm=1.0)

    rows = [(c.op, c.dtype, c.nbytes, c.phase) for c in launch(step, 2).ledger.comms if c.rank == 1]
    with without_storage(1, 2) as group:
        step(group)
        found = [(row[0], row[2], row[3], row[7]) for row in group.recorder.comms]
    assert found == rows and len(found) > 50


def test_one_world_at_a_time():
    with without_storage(0, 2), pytest.raises(RuntimeError, match="a rank of another world"):
        with without_storage(0, 2):
            pass
    assert launch(lambda group: group.size(), 2).results == [2, 2]  # nothing of that world is left


# ---- the model and the collectives --------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_model_trains_and_generates(name, recompute):
    config = CONFIGS[name].replace(num_layers=2)
    with without_storage(0, 1) as group:
        model = recompute_blocks(GPT(config, device=group.device), recompute)
        optimizer = adamw(model.parameters())
        inputs, targets = batch_of(group, config)
        done = train_step(model, optimizer, split(inputs, targets, 2), max_norm=1.0)
        assert done.loss.device == done.norm.device == group.device
        check_all_on(group.device, model, optimizers=[optimizer])
        assert generate(model, inputs, 2, temperature=0).shape == (ROWS, config.seq_len + 2)
        x = x_of(group, 2, 4).requires_grad_()
        forget_and_repeat(nn.Linear(4, 4, device=group.device), x).sum().backward()


def test_experts_on_one_device_choose_by_values():
    """Without values, the routes are unknown. (ExpertParallel spreads the visits evenly.)"""
    config = CONFIGS["tied experts"].replace(num_layers=2)
    with without_storage(0, 1) as group, pytest.raises(NoValue, match=r"gpt.py, line \d+"):
        GPT(config, device=group.device)(batch_of(group, config)[0])


COLLECTIVES = {
    name: (lambda x, group, function=function: function(x, group))
    for name, function in vars(C).items()
    if name.endswith(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))
    and not name.startswith(("hierarchical", "torus", "pipelined_h", "begin"))
}
COLLECTIVES |= {
    "broadcast": lambda x, group: C.broadcast(x, 0, group),
    "reduce": lambda x, group: C.reduce(x, 0, group),
    "gather": lambda x, group: C.gather(x, 0, group),
    "exchange": lambda x, group: C.exchange(x, 2, 0, group),
    "torus": lambda x, group: C.torus_all_reduce(x, group, columns=2),
    "hierarchical": lambda x, group: C.hierarchical_all_reduce(x, group, nodes=2),
}


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_answer_on_the_device_of_what_they_get(rank):
    with without_storage(rank, 4) as group:
        for name, function in COLLECTIVES.items():
            if name == "exchange" and rank != 1:
                continue
            out = function(x_of(group), group)
            outs = out if isinstance(out, list | tuple) else [out]
            assert all(t is None or t.device == group.device for t in outs), name
        assert len(COLLECTIVES) > 15
        for function in (ops.all_gather, ops.reduce_scatter, ops.split, ops.copy, ops.all_reduce):
            x = x_of(group).requires_grad_()
            dim = {} if function in (ops.copy, ops.all_reduce) else {"dim": 0}
            function(x, group, **dim).sum().backward()
            assert x.grad.device == group.device


# ---- every strategy that wraps a module ----------------------------------------------------------


def averaged(kind, **options):
    return lambda model, group: kind(model, group, **options)


def sharded(stage, **options):
    return lambda model, group: stage(model, group, adamw, units=list(model.blocks), **options)


LOSSY = {"half": K.half(), "one bit": K.OneBit(), "power": K.PowerSGD(rank=2)}
ALONE = {"sign": K.sign(), "int8": K.int8(), "top": K.top_k(0.1), "random": K.random_k(0.1)}
LOSSY |= {name: K.Compressed(mean) for name, mean in ALONE.items()}
WRAPPERS = {kind.__name__: averaged(kind) for kind in (Naive, Bucketed, Overlapped)}
WRAPPERS |= {f"Overlapped, {name}": averaged(Overlapped, reduce=r) for name, r in LOSSY.items()}
WRAPPERS |= {stage.__name__: sharded(stage) for stage in (ZeRO1, ZeRO2, ZeRO3)}
WRAPPERS |= {
    "ZeRO3, float64 states": sharded(ZeRO3, master_dtype=torch.float64),
    "ZeRO2, quantized": sharded(ZeRO2, messages=K.Quantized()),
    "ZeRO1, on the host": sharded(ZeRO1, offload="cpu"),
    "ZeRO3, on the host": sharded(ZeRO3, offload="cpu"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_every_wrapper_trains(name):
    with without_storage(1, 3) as group:
        model = WRAPPERS[name](GPT(SMALL, device=group.device), group)
        optimizer = model.optimizer if hasattr(model, "optimizer") else adamw(model.parameters())
        micro_batches = split(*batch_of(group), 2)
        for _ in range(2):
            train_step(model, optimizer, micro_batches, max_norm=1.0)
        with model.gathered() if isinstance(model, ZeRO3) else nullcontext():
            check_all_on(group.device, model.module, optimizers=[optimizer])


def test_the_pages_of_zero_and_context_parallel():
    with without_storage(1, 2) as group:
        flat = x_of(group, 8)
        zero_page.sharded_step(flat, flat, lambda shard, mean: shard - mean, group)
        linear = nn.Linear(4, 4, bias=False, device=group.device)
        zero_page.backward_in_units(linear(x_of(group, 2, 4)).sum(), [[linear.weight]], group)
        q = x_of(group, 1, 2, 4, 8)
        total = context_page.ring_attention(q, q, q, group)
        gradients = context_page.ring_attention_backward(q, q, q, q, total, group)
        assert {t.device for t in (*total, *gradients)} == {group.device}


@pytest.mark.parametrize("form", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_context_parallel_in_every_form_and_placement(form, placement):
    with without_storage(1, 2) as group:
        attention = make_attention(group, form, placement)
        model = GPT(SMALL, device=group.device, attention=attention)
        positions = positions_here(SMALL.seq_len, group, placement).to(group.device)
        inputs = batch_of(group)[0][:, : SMALL.seq_len // 2]
        model(inputs, positions).sum().backward()
        check_all_on(group.device, model)


def test_a_sharded_model_is_made_where_it_is_asked_for():
    with without_storage(0, 2) as group:
        model = shard_model(GPT(SMALL, device="meta"), GPT_PLAN, group)
        init_weights_(model, 0, group.device)
        model(batch_of(group)[0]).sum().backward()
        check_all_on(group.device, model)


def test_saved_activations_go_to_the_host_and_come_back():
    with without_storage(0, 1) as group:
        model = GPT(SMALL.replace(d_model=64), device=group.device)
        with activations_to_host(Lanes(), group, model.parameters()):
            loss = model(batch_of(group)[0]).sum()
        loss.backward()
        check_all_on(group.device, model)


@pytest.mark.parametrize("run", ["page of GPipe", "page of any list", *SCHEDULES])
def test_a_pipeline_runs_on_the_device_of_its_stages(run):
    chunks = 2 if run in ("interleaved", "zb_v", "dualpipe_v") else 1
    shape, m = (2, 4), 4
    for rank in (0, 1):
        with without_storage(rank, 2) as group:
            xs = list(x_of(group, m, *shape))
            loss_fn = nn.functional.mse_loss
            if run.startswith("page"):
                stage = nn.Linear(4, 4, device=group.device)
                how = (stage, xs, xs, loss_fn, shape, group)
                if run == "page of GPipe":
                    loss = gpipe_step(*how)
                else:
                    loss = run_list(add_communication(gpipe(2, m)).ranks[rank], *how)
                modules = [stage]
            else:
                options = {
                    "interleaved": {"chunks": 2},
                    "pipedream_2bw": {"micro_batches_a_step": 2},
                }
                options = options.get(run, {})
                schedule = build(run, 2, m, **options)
                stages = {n: nn.Linear(4, 4, device=group.device) for n in schedule.stages_of[rank]}
                like = torch.empty(shape, device="meta")
                modules = list(stages.values())
                parameters = [p for module in modules for p in module.parameters()]
                optimizer = adamw(parameters) if schedule.asynchronous else None
                pipeline = Pipeline(
                    schedule, stages, group, loss_fn=loss_fn, activation=like, optimizer=optimizer
                )
                loss = pipeline.step(xs, xs)
            assert loss.device == group.device and len(modules) == chunks
            check_all_on(group.device, *modules)


# ---- all axes: every layout of a sampled grid ----------------------------------------------------


def layouts(number):
    draw = random.Random(f"any device {number}")
    for name in CONFIGS:
        yield name, random_layout(draw, CONFIGS[name]), draw


@pytest.mark.parametrize("number", range(2))
def test_all_axes_train_in_every_sampled_layout(number):
    for name, layout, draw in layouts(number):
        rank = draw.randrange(layout.world_size)
        try:
            with without_storage(rank, layout.world_size) as group:
                model = parallelize(CONFIGS[name], layout, group, adamw)
                rows = layout.micro_batch_size * layout.num_micro_batches
                # The batch is made on the host: a model of all axes takes tokens from any device.
                inputs, targets = Batches(TEXT, rows, CONFIGS[name].seq_len).batch(0)
                inputs, targets = inputs.to(group.device), targets.to(group.device)
                done = model.step(inputs, targets, max_norm=1.0)
                stages = nn.ModuleList(model.stages.values())
                if "sigmoid" in name and layout.zero < 3:
                    with_experts = [m for m in stages.modules() if hasattr(m, "visits_of_step")]
                    if with_experts:
                        move_balance_biases(stages)
                assert done.loss.device == done.norm.device == group.device
                check_all_on(group.device, stages, optimizers=model.optimizer.optimizers)
        except Exception as error:
            raise AssertionError(f"{name}, rank {rank}, {short(layout)}: {error}") from error


# ---- whole runs: trainer, checkpoint, serving ----------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_trainer_trains(precision, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(TEXT.tolist()))
    layout = Layout(dp=2, tp=2, zero=1, num_micro_batches=2)
    recipe = Recipe(SMALL, layout, steps=2, text=str(text), precision=precision, checkpoints=None)
    with without_storage(3, 4) as group:
        history = train(recipe, group)
    assert [metrics.step for metrics in history] == [0, 1]
    assert all(metrics.loss != metrics.loss for metrics in history)  # nan: there is no value
    assert all(metrics.bytes_sent["tp"] > 0 for metrics in history)


def trained(group, device):
    model = ZeRO1(GPT(SMALL, device=device), group, adamw)
    train_step(model, model.optimizer, [Batches(TEXT, ROWS, SMALL.seq_len, device=device).batch(0)])
    return model, Training(model, model.optimizer, group)


def test_a_checkpoint_is_loaded_to_where_the_model_is(tmp_path):
    launch(lambda group: trained(group, group.device)[1].save(tmp_path, 1), 1)
    with without_storage(0, 1) as group:
        model, training = trained(group, group.device)
        saved = training.resume(tmp_path)
        assert saved.step == 1
        check_all_on(group.device, model, optimizers=[model.optimizer])
        assert {piece.tensor.device for piece in training.pieces() if piece.tensor.dim()} == {
            group.device
        }


def test_serving_answers_where_the_model_is():
    with without_storage(0, 2) as group:
        model = shard_model(GPT(SMALL, device="meta"), GPT_PLAN, group)
        engine = Engine(model, Memory(num_blocks=8, block_size=4), group)
        requests = [Request("a", [1, 2, 3], max_new_tokens=2), Request("b", [4], max_new_tokens=3)]
        served = engine.serve(requests, Policy(max_batch=2))
        assert [len(served.texts[name]) for name in "ab"] == [2, 3]
        assert engine.keys.device == engine.values.device == group.device
        page = GPT(SMALL, device=group.device)
        logits = forward(page, torch.zeros(3, dtype=torch.int64, device=group.device), Cache(2))
        assert logits.device == group.device


# ---- no device is hard-coded ---------------------------------------------------------------------

ROOT = Path(__file__).parents[2] / "mini_dist"
BELOW_COURSE = ("serving", "training", "strategies", "collectives", "model", "ranks")
# These files name a device, for the given reason.
NAMED = {
    "ranks/devices.py": "decides where tensors belong",
    "ranks/arguments.py": "refuses what NCCL cannot do",
    "ranks/launch.py": "waits for GPU memory to be free",
    "ranks/rank.py": "a rank on a GPU makes it the current one",
    "ranks/torchrun.py": "as rank.py",
    "ranks/simulation/simulate.py": "ranks without storage run on the host",
    "ranks/transport.py": "results come back to the parent on the host",
    "ranks/without_storage.py": "registers the group for tensors on the host, too",
    "ranks/ledger/group.py": "gloo and NCCL are registered for a kind of device each",
    "ranks/ledger/staged.py": "copies tensors to the host for gloo",
    "collectives/messages.py": "a group of torch without a GPU carries host tensors",
    "strategies/zero/offload.py": "the tier in the host's memory",
    "strategies/offload/allocator.py": "measures PyTorch's allocator for CUDA",
    "training/checkpoint/random_state.py": "the generator's name in a checkpoint",
}


def devices_named(path: Path) -> list[str]:
    """Return the device names among a file's strings, without docstrings and sentences."""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return [s for s in strings if isinstance(s, str) and s.partition(":")[0] in ("cpu", "cuda")]


def test_below_course_no_device_is_called_by_its_name():
    files = [path for room in BELOW_COURSE for path in (ROOT / room).rglob("*.py")]
    naming = {str(path.relative_to(ROOT)) for path in files if devices_named(path)}
    assert naming - set(NAMED) == set(), "make it on the device of a tensor that is there"
    assert set(NAMED) - naming == set(), "these exceptions are not needed any more"
