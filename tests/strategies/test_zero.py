"""ZeRO trains as one process does, holds 1/n of the states, and sends the stated bytes."""

import pytest
import torch
from torch import nn

from mini_dist import GPT, ModelConfig, launch
from mini_dist.model.data import Batches
from mini_dist.model.loss import token_loss
from mini_dist.model.recompute import recompute_blocks
from mini_dist.plan.calculators import layer_activations, model_states, num_parameters
from mini_dist.plan.config import Layout
from mini_dist.ranks.ledger.memory import held
from mini_dist.strategies.zero import ZeRO1, ZeRO2, ZeRO3

CONFIG = ModelConfig(d_model=16, num_layers=3, num_heads=2, seq_len=8, tied_embedding=True)
TEXT = torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
STEPS, BATCH = 5, 12
STAGES = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def wrap(stage, group, make_optimizer=adamw, seed=0, dtype=None, **options):
    gpt = GPT(CONFIG, seed=seed, dtype=dtype)
    return STAGES[stage](gpt, group, make_optimizer, units=gpt.blocks, **options)


def train(model, steps, group, accumulation=1, max_norm=None):
    """Train on this rank's rows; return the losses and the last norm."""
    batches = Batches(TEXT, BATCH, CONFIG.seq_len, rank=group.rank(), size=group.size())
    losses = []
    for step in steps:
        inputs, targets = batches.batch(step)
        micro_batches = zip(inputs.tensor_split(accumulation), targets.tensor_split(accumulation))
        losses.append(torch.zeros(()))
        for x, y in micro_batches:
            loss = token_loss(model(x), y).mean() * (len(x) / len(inputs))
            loss.backward()
            losses[-1] = losses[-1] + loss.detach()
        norm = model.step(max_norm)
        model.zero_grad()
    return losses, norm


def whole_parameters(model):
    for unit in model.units:
        unit.gather()
    return [p.detach().clone() for p in model.module.parameters()]


# -- equal to one process -------------------------------------------------------------------------

WAYS = {"float64, AdamW": (torch.float64, adamw), "float32, SGD": (torch.float32, sgd)}
CASES = [(way, k, clip) for way in WAYS for k in (1, 3) for clip in (None, 0.5)]


def train_all_cases(stage, group):
    results = []
    for way, accumulation, max_norm in CASES:
        dtype, make_optimizer = WAYS[way]
        # Ranks start with different weights; wrapping must make them equal.
        model = wrap(stage, group, make_optimizer, seed=group.rank(), dtype=dtype)
        losses, norm = train(model, range(STEPS), group, accumulation, max_norm)
        results.append((whole_parameters(model), losses, norm))
    return results


def train_alone(dtype, make_optimizer, max_norm, steps=STEPS):
    gpt = GPT(CONFIG, seed=0, dtype=dtype)
    optimizer = make_optimizer(gpt.parameters())
    batches = Batches(TEXT, BATCH, CONFIG.seq_len)
    for step in range(steps):
        x, y = batches.batch(step)
        optimizer.zero_grad()
        token_loss(gpt(x), y).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(gpt.parameters(), max_norm or torch.inf)
        optimizer.step()
    return gpt, optimizer, norm


@pytest.fixture(scope="module")
def oracle():
    return {(way, clip): train_alone(*WAYS[way], clip) for way in WAYS for clip in (None, 0.5)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_training_equals_one_process(stage, size, oracle):
    """Compare with and without accumulation and clipping, on all ranks."""
    for results in launch(train_all_cases, size, (stage,)).results:
        for (way, _, max_norm), (parameters, _, norm) in zip(CASES, results):
            gpt, _, expected_norm = oracle[way, max_norm]
            exact = 1e-9 if way.startswith("float64") else 1e-5  # only rounding
            for ours, theirs in zip(parameters, gpt.parameters()):
                torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=exact)
            if max_norm:
                torch.testing.assert_close(norm, expected_norm.to(norm), rtol=exact, atol=0)


def float32_losses(stage, group):
    model = wrap(stage, group)
    losses, _ = train(model, range(STEPS), group)
    return losses


def test_losses_of_float32_with_adamw_are_those_of_one_process():
    """Its parameters differ: if the true gradient is zero, AdamW takes a full step of rounding
    noise, because it divides by the gradient's own size."""
    alone = launch(float32_losses, 1, (1,)).results[0]
    for stage in STAGES:
        ranks = launch(float32_losses, 4, (stage,)).results
        mean = torch.stack([torch.stack(losses) for losses in ranks]).mean(0)
        torch.testing.assert_close(mean, torch.stack(alone), rtol=1e-5, atol=0)


def train_with(stage, options, prepare, group):
    gpt = prepare(GPT(CONFIG, seed=0, dtype=torch.float64))
    model = STAGES[stage](gpt, group, adamw, units=gpt.blocks, **options)
    train(model, range(STEPS), group, accumulation=2)
    return whole_parameters(model)


def full(gpt):
    return recompute_blocks(gpt, "full")


def checkpoint(gpt):
    """Apply torch's own recomputation, inside which a block's hooks run a second time."""
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args):
            return checkpoint(self.block, *args, use_reentrant=False)

    units = list(gpt.blocks)
    whole = partial(GPT.forward, gpt)

    def forward(*args):
        kept, gpt.blocks = gpt.blocks, wrapped
        try:
            return whole(*args)
        finally:
            gpt.blocks = kept

    wrapped = nn.ModuleList(map(Checkpointed, units))
    gpt.forward = forward
    return gpt


@pytest.mark.parametrize("prepare", [full, checkpoint])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_zero_3_with_recomputation_equals_one_process(prepare, prefetch, oracle):
    run = launch(train_with, 3, (3, {"prefetch": prefetch}, prepare))
    for ours, theirs in zip(run.results[0], oracle["float64, AdamW", None][0].parameters()):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-9)


class Branches(nn.Module):
    """Every rank uses a different branch, none uses the last; one parameter is frozen."""

    def __init__(self, branches):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 5, dtype=torch.float64) for _ in range(branches))
        self.frozen = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mean", torch.randn(5, dtype=torch.float64))

    def forward(self, x, branch):
        return self.branches[branch](x) + self.frozen + self.mean


def train_branches(stage, group):
    rank, size = group.rank(), group.size()
    module = Branches(size + 1)  # each rank draws its own
    x = torch.ones(2, 3, dtype=torch.float64)
    model = STAGES[stage](module, group, sgd)
    started = [p.detach().clone() for p in whole_parameters(model)], module.mean.clone()
    for branch in (rank, (rank + 1) % size):
        model(x, branch).square().mean().backward()
    model.step()
    return started, whole_parameters(model)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_may_use_different_parameters_of_a_unit(stage):
    size = 3
    run = launch(train_branches, size, (stage,))
    (started, mean), trained = run.results[0]
    alone = Branches(size + 1)
    for parameter, value in zip(alone.parameters(), started):
        parameter.data = value.clone()
    alone.mean = mean
    x = torch.ones(2, 3, dtype=torch.float64)
    (2 / size * sum(alone(x, branch).square().mean() for branch in range(size))).backward()
    sgd(p for p in alone.parameters() if p.requires_grad).step()
    for ours, theirs in zip(trained, alone.parameters()):
        torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)
    for other, parameters in run.results[1:]:
        assert all(map(torch.equal, parameters, trained))
        assert torch.equal(other[1], mean)


# -- parameters without a module -----------------------------------------------------------------


def two_layers(x, weights):
    first, bias, second = weights
    return torch.tanh(x @ first + bias) @ second


def from_a_list(stage, way, group):
    """Return the parameters after three steps on this rank's rows, and the norms."""
    torch.manual_seed(group.rank())  # all ranks must get rank 0's weights
    weights = [nn.Parameter(torch.randn(shape).double()) for shape in ((4, 5), (5,), (5, 1))]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 4, generator=generator).double().chunk(group.size())[group.rank()]
    matrices, bias = [weights[0], weights[2]], [weights[1]]

    def decay_of_matrices(shards):
        groups = [{"params": shards[:1]}, {"params": shards[1:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.5)

    if stage is None:
        optimizer = adamw(weights)
        if way == "units":
            optimizer = decay_of_matrices([*matrices, *bias])
            optimizer.param_groups[0]["params"] = matrices
            optimizer.param_groups[1]["params"] = bias
    elif way == "units":
        model = stage(weights, group, decay_of_matrices, units=[matrices, bias])
    else:
        model = stage((w for w in weights), group, adamw)
    norms = []
    for _ in range(3):
        two_layers(rows, weights).square().mean().backward()
        if stage is None:
            norms.append(nn.utils.clip_grad_norm_(weights, 0.1))
            optimizer.step()
            optimizer.zero_grad()
        else:
            norms.append(model.step(max_norm=0.1))
            model.zero_grad()
    return [w.detach() for w in weights], norms


@pytest.mark.parametrize("way", ["a list", "units"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", [ZeRO1, ZeRO2])
def test_a_list_of_parameters_is_trained_as_by_one_process(stage, size, way):
    """The parameters are passed as to torch's ZeroRedundancyOptimizer; lists as units are parameter
    groups with their own settings."""
    expected = launch(from_a_list, 1, (None, way)).results[0]
    for found in launch(from_a_list, size, (stage, way)).results:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


# -- bytes ----------------------------------------------------------------------------------------


def one_step(stage, k, prepare, max_norm, group):
    gpt = prepare(GPT(CONFIG, seed=0))
    model = STAGES[stage](gpt, group, adamw, units=gpt.blocks)
    group.recorder.phases.set("setup is over")
    train(model, [0], group, accumulation=k, max_norm=max_norm)
    return [unit.flat.numel() for unit in model.units]


def as_it_is(gpt):
    return gpt


@pytest.mark.parametrize("k, prepare", [(1, as_it_is), (3, as_it_is), (3, full)])
@pytest.mark.parametrize("n", [3, 4])
def test_bytes_a_step_are_the_papers(k, n, prepare):
    """Bytes are those of Rajbhandari et al. 2020, section 7, per micro-batch; the root's are as
    documented. Recomputation adds none; clipping adds the all-reduce of one number."""
    for stage in STAGES:
        run = launch(one_step, n, (stage, k, prepare, 1.0))
        padded = [4 * numel for numel in run.results[0]]  # bytes; the root is the first unit
        root, blocks = padded[0], sum(padded[1:])
        factor = {1: (2, 2), 2: (k + 1, k + 1), 3: (3 * k, 2 * k)}[stage]
        expected = (n - 1) * (factor[0] * blocks + factor[1] * root)  # over all ranks
        after_setup = [c for c in run.ledger.leaves() if c.phase != "setup"]
        norm = [c for c in after_setup if "all_reduce" in [outer.op for outer in c.within()]]
        assert sum(c.sent for c in after_setup) - sum(c.sent for c in norm) == expected
        assert {c.nbytes for c in norm} == {4}


def test_gradients_leave_during_backward_in_zero_2_and_after_it_in_zero_1():
    phases = {}
    for stage in (1, 2):
        run = launch(one_step, 2, (stage, 1, as_it_is, None))
        phases[stage] = {c.phase for c in run.ledger.calls(op="begin_reduce_scatter")}
    assert phases == {1: {"step"}, 2: {"backward"}}


# -- memory ---------------------------------------------------------------------------------------

EVEN = CONFIG.replace(tied_embedding=False, num_layers=6)  # 4 divides all units: no padding


def what_is_held(stage, group):
    gpt = GPT(EVEN, seed=0)
    model = STAGES[stage](gpt, group, adamw, units=gpt.blocks)
    for step in range(2):
        inputs, targets = Batches(TEXT, 8, EVEN.seq_len).batch(step)
        model.zero_grad()
        token_loss(model(inputs), targets).mean().backward()
        after_backward = held(group)
        model.step()
    return after_backward, [unit.flat.nbytes for unit in model.units]


def test_model_states_are_the_calculators_to_the_byte():
    """They include the 4 bytes in which AdamW counts the steps of each shard."""
    n, whole = 4, num_parameters(EVEN)
    for stage in STAGES:
        kinds, units = launch(what_is_held, n, (stage,), memory=True).results[0]
        assert sum(units) == 4 * whole
        states = model_states(whole, n, stage, 4, 4, 8)
        assert kinds["parameters"] == states["parameters"]
        assert kinds["gradients"] == states["gradients"]
        assert kinds["optimizer state"] == states["optimizer"] + 4 * len(units)


def test_the_papers_row_comes_out_of_the_same_function():
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 GPUs, K = 12."""
    total = [model_states(7.5e9, 64, stage).total / 1e9 for stage in (0, 1, 2, 3)]
    assert total == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def most_at_once(memory, *kinds):
    held = most = 0
    for _, _, kind, change in memory.events:
        held += change * (kind in kinds)
        most = max(most, held)
    return most


def test_zero_2_never_holds_the_full_gradient():
    """Gradients in flight are included; ZeRO-1 does hold all of it at the end of backward."""
    for stage in (1, 2, 3):
        run = launch(what_is_held, 4, (stage,), memory=True)
        root, *blocks = run.results[0][1]
        most = most_at_once(run.ledger.memory[0], "gradients")
        if stage == 1:
            assert most >= sum(blocks) + root
        else:
            part = (sum(blocks) + root) / 4
            assert most <= part + root + 2 * blocks[0]


def which_are_here(stage, prefetch, group):
    """Return which units' parameters are in memory in each block's forward and backward."""
    gpt = GPT(EVEN, seed=0)
    options = {"prefetch": prefetch} if stage == 3 else {}
    model = STAGES[stage](gpt, group, adamw, units=gpt.blocks, **options)
    seen = {"forward": [], "backward": []}

    def look(phase):
        here = [unit.flat.untyped_storage().nbytes() > 0 for unit in model.units]
        seen[phase].append([i for i, is_here in enumerate(here) if is_here])

    def look_in_backward(block, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda _: look("backward"))

    for block in gpt.blocks:
        block.register_forward_pre_hook(lambda *_: look("forward"))
        block.register_forward_hook(look_in_backward)
    inputs, targets = Batches(TEXT, 8, EVEN.seq_len).batch(0)
    token_loss(model(inputs), targets).mean().backward()
    look("backward")
    model.step()
    return seen


def test_zero_3_holds_the_root_the_unit_that_computes_and_the_next():
    root, forward = 0, [[0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5], [0, 5, 6], [0, 6]]
    backward = [[0, 5, 6], [0, 4, 5], [0, 3, 4], [0, 2, 3], [0, 1, 2], [0, 1], []]
    for seen in launch(which_are_here, 2, (3, 1)).results:
        assert seen == {"forward": forward, "backward": backward}
    for seen in launch(which_are_here, 2, (3, 0)).results:
        assert seen["forward"] == [[root, unit] for unit in range(1, 7)]
        assert seen["backward"] == [*([root, unit] for unit in range(6, 0, -1)), []]
    for seen in launch(which_are_here, 2, (2, None)).results:
        assert seen["forward"] == [list(range(7))] * 6


LARGE = ModelConfig(num_layers=6, d_model=128, seq_len=32)  # parameters outweigh activations


def train_large(group):
    gpt = GPT(LARGE, seed=0)
    model = ZeRO3(gpt, group, adamw, units=gpt.blocks)
    for _ in range(2):
        tokens = torch.zeros(1, LARGE.seq_len, dtype=torch.long)
        token_loss(model(tokens), tokens).mean().backward()
        model.step()
        model.zero_grad()
    return [unit.flat.nbytes for unit in model.units]


def test_zero_3_peaks_at_states_two_units_gradients_in_flight_and_activations():
    """The peak is when a block's gradients have arrived and the previous ones are complete."""
    run = launch(train_large, 4, memory=True)
    root, block, *_ = run.results[0]
    memory = run.ledger.memory[0]
    states = model_states(num_parameters(LARGE), 4, 3, 4, 0, 8).total + 4 * 7
    parameters = root + 2 * block  # besides the shards: the computing unit and the next
    here = memory.peak_bytes("backward", "parameters")
    assert here == root + 2 * block + (root + 6 * block) / 4
    in_flight = block + 3 / 4 * block  # this rank's, and parts from the others
    complete = block + 4 * LARGE.vocab_size * LARGE.d_model  # the next block's, and the head's
    a_token = sum(s.bytes_per_token for s in layer_activations(LARGE, Layout(), "course"))
    activations = LARGE.seq_len * (LARGE.num_layers - 2) * a_token
    expected = states + parameters + in_flight + complete + activations
    assert memory.peak_bytes() == pytest.approx(expected, rel=0.02)


# -- two precisions -------------------------------------------------------------------------------


def train_bfloat16(stage, group):
    gpt = GPT(EVEN, seed=0, dtype=torch.bfloat16)
    model = STAGES[stage](gpt, group, adamw, units=gpt.blocks, master_dtype=torch.float32)
    for step in range(2):
        inputs, targets = Batches(TEXT, 8, EVEN.seq_len).batch(step)
        model.zero_grad()
        token_loss(model(inputs), targets).mean().backward()
        model.step()
    kinds = held(group) if group.recorder.memory else None
    shards = [unit.shard.detach().clone() for unit in model.units]
    return shards, [p.float() for p in whole_parameters(model)], kinds


def bfloat16_alone(group):
    gpt = GPT(EVEN, seed=0, dtype=torch.bfloat16)
    master = [p.detach().float().requires_grad_() for p in gpt.parameters()]
    optimizer = adamw(master)
    for step in range(2):
        inputs, targets = Batches(TEXT, 8, EVEN.seq_len).batch(step)
        gpt.zero_grad()
        token_loss(gpt(inputs), targets).mean().backward()
        for wide, narrow in zip(master, gpt.parameters()):
            wide.grad = narrow.grad.float()
        optimizer.step()
        with torch.no_grad():
            for wide, narrow in zip(master, gpt.parameters()):
                narrow.copy_(wide)
    return [p.detach().float() for p in gpt.parameters()]


def test_a_float32_master_is_stepped_and_rounded_to_a_bfloat16_copy():
    alone = launch(bfloat16_alone, 1).results[0]
    for stage in STAGES:  # all ranks see the same rows: means of equal numbers are exact
        for shards, parameters, _ in launch(train_bfloat16, 4, (stage,)).results:
            assert {shard.dtype for shard in shards} == {torch.float32}
            assert all(map(torch.equal, parameters, alone))


def test_what_two_precisions_hold():
    """Parameters are bfloat16; master, shards' gradients and moments are float32."""
    n, whole = 4, num_parameters(EVEN)
    for stage in (2, 3):
        *_, kinds = launch(train_bfloat16, n, (stage,), memory=True).results[0]
        states = model_states(whole, n, stage, 2, 4, 8 + 4)
        copy = states["parameters"] if stage == 2 else 0  # ZeRO-3 makes the copy on demand
        assert kinds["parameters"] == copy + 4 * whole / n
        assert kinds["gradients"] == states["gradients"]
        assert kinds["optimizer state"] == 8 * whole / n + 4 * 7


# -- offload --------------------------------------------------------------------------------------


def train_offloaded(stage, offload, group):
    model = wrap(stage, group, dtype=torch.float64, offload=offload)
    train(model, range(3), group, accumulation=2)
    kinds = held(group) if group.recorder.memory else None
    return whole_parameters(model), [unit.shard.numel() * 8 for unit in model.units], kinds


@pytest.mark.parametrize("stage", STAGES)
def test_offload_changes_where_states_are_and_no_number(stage, tmp_path):
    at_home, *_ = launch(train_offloaded, 3, (stage, None)).results[0]
    for offload in ("cpu", tmp_path):
        for parameters, *_ in launch(train_offloaded, 3, (stage, offload)).results:
            assert all(map(torch.equal, parameters, at_home))


def moved(run, op):
    return sum(comm.nbytes for comm in run.ledger.calls(op=op, rank=0))


def test_what_offload_moves_is_in_the_ledger(tmp_path):
    steps, k = 3, 2
    run = launch(train_offloaded, 4, (1, "cpu"))
    shards = sum(run.results[0][1])
    assert moved(run, "to_host") == steps * shards  # ZeRO-1 offloads gradients once per step
    assert moved(run, "to_device_") == steps * shards
    assert moved(launch(train_offloaded, 4, (2, "cpu")), "to_host") == steps * k * shards

    run = launch(train_offloaded, 4, (2, tmp_path))
    states = 3 * shards  # the shard and AdamW's two moments; a first step has no moments to read
    assert moved(run, "to_file_") == shards + steps * states
    assert moved(run, "from_file_") == shards + (steps - 1) * states + steps * shards
    assert run.ledger.total_bytes(op="to_file_") == 0  # files are not messages


def test_states_in_files_take_the_memory_of_one_unit(tmp_path):
    run = launch(train_offloaded, 4, (3, tmp_path), memory=True)
    _, shards, kinds = run.results[0]
    counters = 4 * len(shards)
    assert kinds["optimizer state"] == counters and kinds["parameters"] == 0
    peak = run.ledger.memory[0].peak_bytes(kind="optimizer state")
    assert peak <= 2 * max(shards) + counters
    files = sum(file.stat().st_size for file in (tmp_path / "rank0").iterdir())
    assert files == 3 * sum(shards)


def cut_a_file(folder, group):
    model = wrap(1, group, offload=folder)
    train(model, [0], group)
    (folder / f"rank{group.rank()}" / "0.exp_avg").write_bytes(b"short")
    with pytest.raises(ValueError, match="0.exp_avg has 5 bytes of .* cut off or replaced"):
        train(model, [1], group)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    launch(cut_a_file, 2, (tmp_path,))


# -- what cannot work -----------------------------------------------------------------------------


def bad_inputs(file, group):
    with pytest.raises(ValueError, match="LBFGS cannot be sharded.*AdamW"):
        ZeRO1(nn.Linear(2, 2), group, torch.optim.LBFGS)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        ZeRO2(nn.ReLU(), group, adamw)
    linear = nn.Linear(2, 2)
    decay = [{"params": [linear.weight]}, {"params": [linear.bias], "weight_decay": 0.0}]
    with pytest.raises(ValueError, match="with 1 shards, one a unit, and its optimizer steps 2"):
        ZeRO1(linear, group, lambda shards: torch.optim.AdamW(decay))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="0.weight to 1.bias are torch.float32 and torch.float64"):
        ZeRO3(mixed, group, adamw)
    with pytest.raises(ValueError, match="is a file: give a directory, or 'cpu'"):
        ZeRO1(nn.Linear(2, 2), group, adamw, offload=file)
    with pytest.raises(ValueError, match="ZeRO3 gathers .* forward begins, .* take ZeRO2"):
        ZeRO3(linear.parameters(), group, adamw)
    with pytest.raises(ValueError, match="a list of them has none"):
        ZeRO3(linear, group, adamw, units=[[linear.weight]])
    with pytest.raises(ValueError, match="number 1 of the list is a Tensor: give Parameters"):
        ZeRO1([linear.weight, torch.zeros(2, requires_grad=True)], group, adamw)
    model = wrap(1, group)
    with pytest.raises(ValueError, match="max_norm=0 would clip everything"):
        model.step(max_norm=0)


def test_what_cannot_work_is_refused_in_a_sentence(tmp_path):
    file = tmp_path / "file"
    file.touch()
    launch(bad_inputs, 2, (str(file),))
