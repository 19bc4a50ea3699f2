"""One function returns the unsharded model's state dict, whatever strategy sharded it."""

import pytest
import torch
from torch import nn

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.collectives.mesh import Mesh
from mini_dist.strategies.data_parallel import Bucketed, Naive, Overlapped
from mini_dist.strategies.expert_parallel import shard_experts
from mini_dist.strategies.pipeline import cut_gpt
from mini_dist.strategies.tensor_parallel import GPT_PLAN, shard_model
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3
from mini_dist.training.all_axes import parallelize
from mini_dist.training.full_state import full_state_dict

CONFIG = ModelConfig(
    d_model=16, num_layers=4, num_heads=4, num_kv_heads=2, seq_len=8, tied_embedding=True
)
EXPERTS = CONFIG.replace(num_experts=4, top_k=2, d_expert=16)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def same(state, expected):
    """Check names, dtypes and, to the last bit, values."""
    assert state.keys() == expected.keys(), state.keys() ^ expected.keys()
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name


def data_parallel(strategy, gpt, group):
    return strategy(gpt, group), group


def zero(stage, options, gpt, group):
    return stage(gpt, group, adamw, units=gpt.blocks, **options), group


def tensor_parallel(gpt, group):
    return shard_model(gpt, GPT_PLAN, group), group


def tensor_parallel_and_zero(gpt, group):
    mesh = Mesh(group, dp=2, tp=2)
    gpt = shard_model(gpt, GPT_PLAN, mesh["tp"])
    return ZeRO3(gpt, mesh["dp"], adamw, units=gpt.blocks), group


def alone(gpt, group):
    return gpt, group


WAYS = {
    "one process's module": alone,
    "naive": lambda *args: data_parallel(Naive, *args),
    "bucketed": lambda *args: data_parallel(Bucketed, *args),
    "overlapped": lambda *args: data_parallel(Overlapped, *args),
    "zero 1": lambda *args: zero(ZeRO1, {}, *args),
    "zero 2": lambda *args: zero(ZeRO2, {}, *args),
    "zero 3": lambda *args: zero(ZeRO3, {}, *args),
    "zero 3, on the host": lambda *args: zero(ZeRO3, {"offload": "cpu"}, *args),
    "zero 3, float64 shards": lambda *args: zero(ZeRO3, {"master_dtype": torch.float64}, *args),
    "tp": tensor_parallel,
    "tp, zero 3": tensor_parallel_and_zero,
}


def whole_in_every_way(config, group):
    expected = GPT(config, seed=3).state_dict()
    for name, make in WAYS.items():
        if "tp, zero" in name and group.size() != 4:
            continue
        if name.startswith("tp") and (config.num_experts or group.size() == 3):
            continue  # (the plan is for dense layers; 3 doesn't divide the heads)
        model, ranks = make(GPT(config, seed=3), group)
        same(full_state_dict(model, ranks), expected)
        for rank in (0, group.size() - 1):
            state = full_state_dict(model, ranks, rank=rank)
            assert (state is None) == (group.rank() != rank)
            if state is not None:
                same(state, expected)
                GPT(config, seed=4).load_state_dict(state)  # strict


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace(tied_embedding=False), EXPERTS])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_strategy_gives_the_model_that_went_in(size, config):
    launch(whole_in_every_way, size, (config,))


def in_files(folder, group):
    gpt = GPT(CONFIG, seed=3)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, offload=folder)
    same(full_state_dict(model, group), GPT(CONFIG, seed=3).state_dict())


def test_shards_in_files_are_read(tmp_path):
    launch(in_files, 2, (str(tmp_path),))


def stages_and_experts(group):
    untied = CONFIG.replace(tied_embedding=False)
    mine = [group.rank(), 3 - group.rank()]  # a V
    stages = cut_gpt(untied, mine, 4, seed=3)
    same(full_state_dict(stages.values(), group), GPT(untied, seed=3).state_dict())
    experts = shard_experts(GPT(EXPERTS, seed=3), group)
    same(full_state_dict(experts, group), GPT(EXPERTS, seed=3).state_dict())


def test_pipeline_stages_and_spread_experts_too():
    launch(stages_and_experts, 2)


class Normed(nn.Module):
    """A frozen parameter, buffers of several dtypes, an unsaved buffer, a matrix without rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 2), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def with_buffers(group):
    torch.manual_seed(0)
    module = Normed()
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    units = [module.norm, module.linear]
    same(full_state_dict(ZeRO3(module, group, adamw, units=units), group), expected)


def test_buffers_and_frozen_parameters_are_in_it():
    launch(with_buffers, 3)


GRIDS = [
    (CONFIG, Layout(dp=2, pp=2, num_micro_batches=2)),
    (CONFIG, Layout(pp=2, tp=2, zero=1, sequence_parallel=True, num_micro_batches=2)),
    (CONFIG, Layout(dp=2, cp=2, zero=3)),
    (CONFIG, Layout(dp=2, tp=2, zero=3)),
    (CONFIG, Layout(pp=2, dp=2, schedule="zb_v", num_chunks=2, num_micro_batches=2)),
    (
        CONFIG.replace(tied_embedding=False),
        Layout(pp=2, dp=2, zero=3, schedule="interleaved", num_chunks=2, num_micro_batches=2),
    ),
    (EXPERTS, Layout(dp=2, ep=2, zero=2)),
    (EXPERTS.replace(tied_embedding=False), Layout(pp=2, dp=2, ep=2, zero=3, num_micro_batches=2)),
    (EXPERTS, Layout(dp=2, tp=2, ep=2, sequence_parallel=True)),
]


def on_a_grid(config, layout, group):
    model = parallelize(config, layout, group, adamw, seed=3)
    same(full_state_dict(model, group), GPT(config, seed=3).state_dict())
    rows = layout.micro_batch_size * layout.num_micro_batches
    generator = torch.Generator().manual_seed(model.mesh.index("dp"))
    tokens = torch.randint(0, 256, (rows, config.seq_len), generator=generator)
    loss = model.step(tokens, tokens).loss
    return loss, full_state_dict(model, group, rank=0)


@pytest.mark.parametrize("config, layout", GRIDS)
def test_what_parallelize_returns_before_and_after_a_step(config, layout):
    """After a step, the names are those of one process and every tensor has changed a little."""
    _, state = launch(on_a_grid, layout.world_size, (config, layout)).results[0]
    single = Layout(micro_batch_size=1, num_micro_batches=1)
    same_names = launch(on_a_grid, 1, (config, single)).results[0][1]
    assert state.keys() == same_names.keys()
    started = GPT(config, seed=3).state_dict()
    for name, tensor in state.items():
        change = (tensor - started[name]).abs().max()
        assert 0 < change < 0.03, name  # one step of AdamW with lr=1e-2, everywhere


def cut_in_two(group):
    model = shard_model(GPT(CONFIG, seed=3), GPT_PLAN, group)
    half = Mesh(group, dp=2, tp=1)["tp"]  # this rank alone
    with pytest.raises(ValueError, match="the ranks together hold .* the others are lost"):
        full_state_dict(model, half)
    with pytest.raises(ValueError, match="rank=2 is not one of the 2 ranks"):
        full_state_dict(model, group, rank=2)


def test_parts_that_nobody_has_are_not_made_up():
    launch(cut_in_two, 2)


def bytes_sent(rank, group):
    model = ZeRO3(GPT(CONFIG.replace(tied_embedding=False), seed=3), group, adamw)
    group.recorder.phases.set("whole")
    full_state_dict(model, group, rank=rank)
    return [tuple(unit.shard.shape) for unit in model.units]


def test_each_part_is_sent_once_to_who_needs_it():
    """This leaves out the messages in which ranks describe their parts."""
    size = 4
    run = launch(bytes_sent, size, (0,))
    numel = sum(t.numel() for t in GPT(CONFIG.replace(tied_embedding=False)).state_dict().values())
    sent = [c for c in run.ledger.leaves(phase="whole") if c.op == "send"]
    of_floats = [c for c in sent if c.dtype == "float32"]
    assert sum(c.sent for c in of_floats) == 4 * numel * (size - 1) // size
    assert all(tuple(c.sent_to) == (0,) for c in of_floats)
