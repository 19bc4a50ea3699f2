"""Using a parameter that ZeRO-3 has freed raises an error that says so, and never crashes."""

import copy
import io
import itertools
import pickle
import sys
import warnings

import cloudpickle
import pytest
import torch
from torch import nn

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.loss import token_loss
from mini_dist.strategies.zero import FreedError, ZeRO1, ZeRO2, ZeRO3

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8)


def adamw(shards):
    return torch.optim.AdamW(shards, lr=1e-2)


def wrap(group, seed=0, **options):
    gpt = GPT(CONFIG, seed=seed)
    return ZeRO3(gpt, group, adamw, units=gpt.blocks, **options)


def one_step(model):
    tokens = torch.arange(8).view(1, 8)
    loss = token_loss(model(tokens), tokens).mean()
    loss.backward()
    model.step()
    model.zero_grad()
    return loss.detach()


def as_file(x):
    torch.save(x, io.BytesIO())


READS = {
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "asarray": lambda p: __import__("numpy").asarray(p),
    "item": lambda p: p[0, 0].item(),
    "index": lambda p: p[0],
    "iterate": lambda p: list(p),
    "view": lambda p: p.view(-1),
    "transpose": lambda p: p.T,
    "add": lambda p: p + 1,
    "from the right": lambda p: torch.ones(1) @ p,
    "compare": lambda p: p == p,
    "bool": lambda p: bool(p),
    "dtype": lambda p: p.double(),
    "to": lambda p: p.to("cpu"),
    "data_ptr": lambda p: p.data_ptr(),
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
    "in a list": lambda p: torch.cat([torch.ones(1, p.shape[1]), p]),
    "in a keyword": lambda p: torch.add(torch.ones(1), other=p),
    "an inner operation": lambda p: torch.ops.aten.sum.default(p),
    "norm": lambda p: torch.nn.utils.get_total_norm([p]),
    "foreach": lambda p: torch._foreach_norm([p]),
    "vector": lambda p: torch.nn.utils.parameters_to_vector([p]),
    "allclose": lambda p: torch.allclose(p, p),
    "dlpack": lambda p: torch.from_dlpack(p),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: as_file(p),
    "shared memory": lambda p: p.share_memory_(),
    "another's copy_": lambda p: torch.empty(p.shape).copy_(p),
    "without gradients": lambda p: torch.no_grad()(lambda: p.sum())(),
}
WRITES = {
    "zero_": lambda p: p.zero_(),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "+=": lambda p: p.__iadd__(1),
    "[0] =": lambda p: p.__setitem__(0, 1.0),
    "out": lambda p: torch.ones(p.shape, out=p),
    "data.zero_": lambda p: p.data.zero_(),
    "data =": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "detach().zero_": lambda p: p.detach().zero_(),
    "normal_": lambda p: nn.init.normal_(p),
    "zeros_": lambda p: nn.init.zeros_(p),
    "xavier": lambda p: nn.init.xavier_uniform_(p),
}
OF_MODELS = {
    "state_dict": lambda model: model.state_dict(),
    "of the module": lambda model: model.module.state_dict(),
    "of a block": lambda model: model.module.blocks[0].state_dict(),
    "torch.save": as_file,
    "pickle": pickle.dumps,
    "deepcopy": lambda model: copy.deepcopy(model.module.blocks[0].ffn),
    "double": lambda model: model.double(),
    "to": lambda model: model.to("cpu"),
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm(list(model.parameters())),
    "load_state_dict": lambda model: model.module.load_state_dict(GPT(CONFIG).state_dict()),
}


def outcome(ask, of):
    try:
        return "returned", repr(ask(of))
    except Exception as error:
        return type(error).__name__, str(error)


def ask_all(moment, group):
    model = wrap(group)
    if moment == "after a step":
        one_step(model)
    parameter = model.module.blocks[0].ffn.up.weight
    with torch.no_grad():  # otherwise in-place writes fail for another reason
        asked = {name: outcome(ask, parameter) for name, ask in (READS | WRITES).items()}
    asked |= {name + " of a model": outcome(ask, model) for name, ask in OF_MODELS.items()}
    return asked, one_step(model)


@pytest.mark.parametrize("moment", ["at the beginning", "after a step"])
def test_reading_and_writing_are_errors_that_say_what_to_do(moment):
    """No access returns a value or ends the process, and training is unharmed."""
    _, loss = launch(ask_all, 1, ("at the beginning",)).results[0]
    for asked, ours in launch(ask_all, 2, (moment,)).results:
        assert len(asked) == len(READS) + len(WRITES) + len(OF_MODELS)
        for name, (kind, text) in asked.items():
            is_ours = kind == "FreedError" or (kind == "RuntimeError" and "load_state" in name)
            assert is_ours, (name, kind, text)
            assert "freed" in text and "model.gathered()" in text and "full_state_dict" in text
        if moment == "at the beginning":
            torch.testing.assert_close(ours, loss)


def ask_harmless(group):
    model = wrap(group)
    parameters = dict(model.module.named_parameters())
    plain = dict(GPT(CONFIG, seed=0).named_parameters())
    assert parameters.keys() == plain.keys()
    for name, p in parameters.items():
        theirs = plain[name]
        assert isinstance(p, nn.Parameter) and torch.is_tensor(p)
        assert p.shape == theirs.shape == p.size() and p.dim() == p.ndim == theirs.ndim
        assert p.numel() == torch.numel(p) == theirs.nelement() and len(p) == len(theirs)
        assert p.dtype == theirs.dtype and p.device == theirs.device and p.layout == theirs.layout
        assert p.stride() == theirs.stride() and p.nbytes == theirs.nbytes
        assert p.is_floating_point() and p.is_leaf and p.requires_grad and p.is_contiguous()
        assert not p.is_cuda and not p.is_sparse and not p.is_meta and p.element_size() == 4
        assert p.grad is None and p.grad_fn is None and p._version is not None
        assert p in {p} and hash(p) == id(p)
        for text in (repr(p), str(p), f"{p}", f"{p!r:>90}"):
            assert f"{list(p.shape)}, torch.float32, freed by ZeRO-3" in text
        zeros = torch.zeros_like(p)
        assert type(zeros) is torch.Tensor and torch.equal(zeros, torch.zeros(p.shape))
        assert p.new_ones(2).tolist() == [1, 1] and p.untyped_storage().nbytes() == 0
        p.grad = torch.ones(p.shape)
        assert p.grad.sum() == p.numel()
        p.grad = None
        p.requires_grad_(False)
        p.requires_grad = True
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.values())
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # an optimizer over them has nothing to do
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    str(model), model.train(), model.eval(), model.zero_grad()
    first = one_step(model), one_step(model)
    assert type(next(model.module.parameters())).__name__ == "Freed"
    return first


def test_shapes_gradients_and_lists_of_parameters_stay_as_they_were():
    alone = launch(ask_harmless, 1).results[0]
    for losses in launch(ask_harmless, 3).results:
        torch.testing.assert_close(losses, alone)


def during_a_step(group):
    """Check that a parameter is ordinary in its unit's forward and backward."""
    model, seen = wrap(group), []

    def look(block, *_):
        weight = block.ffn.up.weight
        seen.append((type(weight), type(model.module.blocks[1].attn.q.weight).__name__))
        assert torch.equal(weight.clone(), weight) and weight.sum() != 0

    def in_backward(block, inputs, output):
        output.register_hook(lambda _: look(block))

    model.module.blocks[0].register_forward_pre_hook(look)
    model.module.blocks[0].register_forward_hook(in_backward)
    one_step(model)
    return seen


def test_a_unit_that_computes_has_its_parameters_and_one_on_its_way_not_yet():
    for seen in launch(during_a_step, 2).results:
        assert [cls for cls, _ in seen] == [nn.Parameter, nn.Parameter]
        assert seen[0][1] == "Freed"


# -- gathered -------------------------------------------------------------------------------------


def look_inside(options, group):
    model, plain = wrap(group, **options), GPT(CONFIG, seed=0)
    with model.gathered() as module:
        assert module is model.module
        state = module.state_dict()
        for name, tensor in plain.state_dict().items():
            assert torch.equal(state[name], tensor)
        file = io.BytesIO()
        torch.save(state, file)
        kept = module.blocks[0].ffn.up.weight.detach()
        tokens = torch.arange(8).view(1, 8)
        torch.testing.assert_close(module(tokens), plain(tokens))  # the units' hooks also run
        assert type(module.blocks[0].ffn.up.weight) is nn.Parameter
        with model.gathered():
            pass
        assert module.head.norm.weight.sum() == 16
    assert torch.equal(kept, plain.blocks[0].ffn.up.weight)  # a view outlives the gathering
    assert model.module.head.norm.weight.sum() == 16  # after a forward the root stays, as usual
    model.refresh_parameters()
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    with pytest.raises(FreedError):
        model.module.blocks[0].ffn.up.weight.sum()
    before = [unit.shard.untyped_storage().nbytes() for unit in model.units]
    with pytest.raises(KeyError), model.gathered():
        raise KeyError
    with pytest.raises(FreedError):
        model.module.head.norm.weight.sum()
    assert before == [unit.shard.untyped_storage().nbytes() for unit in model.units]
    assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in model.units)
    return one_step(model), one_step(model)


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"offload": "files"}])
def test_inside_gathered_parameters_are_those_of_one_process(options, tmp_path):
    if options.get("offload") == "files":
        options = {"offload": str(tmp_path)}
    alone = launch(look_inside, 1, ({},)).results[0]
    for losses in launch(look_inside, 3, (options,)).results:
        torch.testing.assert_close(losses, alone)


def change_inside(options, group):
    model = wrap(group, **options)
    other = GPT(CONFIG, seed=5)
    with model.gathered() as module:
        module.load_state_dict(other.state_dict())
        with torch.no_grad():
            module.blocks[1].ffn.up.weight.zero_()
            module.blocks[1].ffn.up.weight.data[0] += 2.0
    with model.gathered() as module:
        mine = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    expected = other.state_dict()
    expected["blocks.1.ffn.up.weight"].zero_()[0] += 2.0
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name
    one_step(model)
    shards = [unit.shard.dtype for unit in model.units]
    assert set(shards) == {options.get("master_dtype", torch.float32)}


@pytest.mark.parametrize(
    "options", [{}, {"offload": "cpu"}, {"offload": "files"}, {"master_dtype": torch.float64}]
)
def test_what_is_written_inside_gathered_stays(options, tmp_path):
    if options.get("offload") == "files":
        options = {"offload": str(tmp_path)}
    launch(change_inside, 3, (options,))


def unchanged_master(group):
    """Count changes in float32 shards, which gathered shows in bfloat16 and must not round."""
    gpt = GPT(CONFIG, seed=0, dtype=torch.bfloat16)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks, master_dtype=torch.float32)
    for _ in range(2):
        one_step(model)
    before = [unit.shard.detach().clone() for unit in model.units]
    assert any((shard.bfloat16().float() != shard).any() for shard in before)
    with model.gathered() as module, torch.no_grad():
        module.head.norm.weight[0] = 3.0
    changed = sum(int((a != u.shard).sum()) for a, u in zip(before, model.units))
    return changed


def test_gathered_changes_in_the_shards_what_was_changed_and_nothing_else():
    assert sum(launch(unchanged_master, 3).results) == 1


def gathered_in_the_middle(of, group):
    """Train with gathered() entered and left at these points; the losses must not depend on it."""
    model, losses, total = wrap(group), [], torch.zeros(())
    tokens = torch.arange(8).view(1, 8)

    def forward():
        losses.append(token_loss(model(tokens), tokens).mean())

    def backward():
        losses[-1].backward()

    def step():
        model.step(max_norm=1.0)
        model.zero_grad()

    doing = {"forward": forward, "backward": backward, "step": step}
    for _ in range(2):
        for name in doing:
            if name == of[0]:
                inside = model.gathered()
                module = inside.__enter__()
                total = total + sum(p.detach().sum() for p in module.parameters())
            doing[name]()
            if name == of[1]:
                inside.__exit__(None, None, None)
    losses.append(one_step(model))
    return [loss.detach() for loss in losses]


MIDDLES = [*itertools.combinations_with_replacement(("forward", "backward", "step"), 2)]


@pytest.mark.parametrize("of", MIDDLES, ids="-".join)
def test_gathered_may_begin_and_end_anywhere_in_a_step(of):
    """Tensors that autograd saved stay valid inside and after it, and the root stays in place."""
    alone = launch(gathered_in_the_middle, 1, ((None, None),)).results[0]
    assert alone[2] < alone[1] < alone[0]
    for ours in launch(gathered_in_the_middle, 2, (of,)).results:
        torch.testing.assert_close(ours, alone)


# -- hooks ----------------------------------------------------------------------------------------


class Pair(nn.Module):
    """A unit that returns a dict of two tensors that are used at different times."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"sum": [self.one(x) + self.other(x)], "twice": self.other(self.one(x))}


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pair, self.head = nn.Embedding(10, 4), Pair(), nn.Linear(4, 1)

    def forward(self, tokens):
        both = self.pair(self.embed(tokens))
        return self.head(both["sum"][0] * both["twice"].tanh())


def with_embedding(stage, group):
    torch.manual_seed(0)
    tower = Tower()
    if stage is None:
        optimizer = adamw(tower.parameters())
    else:
        units = [tower.embed, tower.pair]
        model = stage(tower, group, adamw, units=units)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            loss = (tower if stage is None else model)(torch.arange(10)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if stage is None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                model.step()
                model.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2, ZeRO3])
def test_units_without_a_gradient_of_their_input_and_with_any_output_warn_of_nothing(stage):
    """An embedding's inputs are integers, and a dict is not a tuple of tensors. Every warning is an
    error, and training equals one process."""
    alone = launch(with_embedding, 1, (None,)).results[0]
    assert alone[2] < alone[0]
    for losses in launch(with_embedding, 2, (stage,)).results:
        torch.testing.assert_close(losses, alone)


def pipeline_with_zero_3(group):
    from mini_dist import Layout
    from mini_dist.training.all_axes import parallelize

    layout = Layout(pp=2, dp=2, zero=3, num_micro_batches=2)
    model = parallelize(CONFIG, layout, group, adamw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens = torch.arange(16).view(2, 8)
        model.step(tokens, tokens)
        model.step(tokens, tokens)


def test_a_pipeline_of_zero_3_stages_warns_of_nothing():
    launch(pipeline_with_zero_3, 4)
