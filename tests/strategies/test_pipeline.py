"""Pipelines on real ranks equal one process in every bit, whatever the schedule."""

import gc
import weakref

import pytest
import torch
from torch import nn

from mini_dist import RankError, launch
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators.flops import forward_flops
from mini_dist.plan.calculators.parameters import split_layers
from mini_dist.plan.config import ModelConfig
from mini_dist.plan.schedule import (
    Schedule,
    ScheduleError,
    add_communication,
    build,
    fuse_communication,
    gpipe,
    one_f_one_b,
    peak_in_flight,
    pipedream,
    pipedream_2bw,
    versions_held,
    zb_v,
)
from mini_dist.strategies.grad_norm import clip_, grad_norm
from mini_dist.strategies.pipeline import (
    Pipeline,
    Stage,
    balanced_ranges,
    cut_gpt,
    layer_costs,
    layer_ranges,
    shared_parameter,
)

CONFIG = ModelConfig(vocab_size=40, seq_len=8, d_model=16, num_layers=12, num_heads=2)
MICRO_BATCH = 2
SEED = 3


def loss_fn(logits, targets):
    return token_loss(logits, targets).mean()


def batch(m, step=0):
    """Return tokens and targets of m micro-batches, [m * MICRO_BATCH, S] each."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 40, (m * MICRO_BATCH, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def activation(config=CONFIG):
    return torch.empty(MICRO_BATCH, config.seq_len, config.d_model, device="meta")


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks; two threads add in a different order
    yield
    torch.set_num_threads(threads)


def one_process(m, steps, config=CONFIG, clip=None):
    """Train the whole GPT on the micro-batches in order: the oracle's losses, grads, weights."""
    model = GPT(config, seed=SEED)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = batch(m, step)
        parts = []
        for x, y in zip(tokens.chunk(m), targets.chunk(m)):
            loss = loss_fn(model(x), y)
            (loss / m).backward()
            parts.append(loss.detach())
        losses.append(torch.stack(parts).mean())
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    named = dict(model.named_parameters())
    return losses, {n: (p.grad, p.detach()) for n, p in named.items()}


def train(schedule, group, steps=1, config=CONFIG, recompute=False, balance="layers"):
    """Return this rank's losses and its parameters' gradients and values by their GPT names."""
    mine, n = schedule.stages_of[group.rank()], schedule.num_stages
    modules = cut_gpt(config, mine, n, seed=SEED, balance=balance)
    pipeline = Pipeline(
        schedule,
        modules,
        group,
        loss_fn=loss_fn,
        activation=activation(config),
        recompute=recompute,
        shared=shared_parameter(modules, n),
    )
    named = {name: p for module in modules.values() for name, p in module.named_parameters()}
    optimizer = optimizer_of(set(named.values()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(*batch(schedule.num_micro_batches, step)))
        optimizer.step()
    return losses, {name: (p.grad, p.detach()) for name, p in named.items()}


def train_each(cases, group):
    return [train(schedule, group, **options) for schedule, options in cases]


def assert_equal_in_bits(results, reference):
    losses, expected = reference
    seen = set()
    for rank_losses, parameters in results:
        assert all(torch.equal(a, b) for a, b in zip(rank_losses, losses, strict=True))
        for name, (grad, value) in parameters.items():
            assert torch.equal(grad, expected[name][0]), name
            assert torch.equal(value, expected[name][1]), name
        assert not seen & set(parameters), "a parameter lies on two ranks"
        seen |= set(parameters)
    assert seen == set(expected), "a parameter is nowhere"


NAMES = [
    ("naive", {}),
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved", {"chunks": 1}),
    ("interleaved", {"chunks": 2}),
    ("interleaved", {"chunks": 3}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zb_v", {}),
    ("dualpipe_v", {}),
]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_gradients_equal_one_process_in_bits_under_every_schedule(p):
    m = 8 if p != 3 else 6
    cases = [(build(name, p, m, **options), {}) for name, options in NAMES]
    reference = one_process(m, steps=1)
    for results in zip(*launch(train_each, p, args=(cases,)).results):
        assert_equal_in_bits(results, reference)


def test_five_steps_equal_one_process_in_bits():
    """A step leaves nothing to the next one: no gradient, no activation, no message."""
    cases = [(build(name, 4, 8, **options), {"steps": 5}) for name, options in NAMES[2::2]]
    reference = one_process(8, steps=5)
    for results in zip(*launch(train_each, 4, args=(cases,)).results):
        assert_equal_in_bits(results, reference)


def test_recomputing_changes_no_bit():
    cases = [(build(n, 2, 4, **o), {"recompute": True}) for n, o in [NAMES[2], NAMES[6], NAMES[9]]]
    reference = one_process(4, steps=1)
    for results in zip(*launch(train_each, 2, args=(cases,)).results):
        assert_equal_in_bits(results, reference)


def recomputing_some(group):
    schedule, modules = (
        build("interleaved", 1, 3, chunks=3),
        cut_gpt(CONFIG, range(3), 3, seed=SEED),
    )
    pipeline = Pipeline(schedule, modules, group, loss_fn=loss_fn, recompute={1})
    kept, forward = {}, pipeline.stages[2].forward

    def seen(micro, *args, **kwargs):  # after the last forward all three hold this micro-batch
        output = forward(micro, *args, **kwargs)
        kept.update({n: type(s.held[micro]).__name__ for n, s in pipeline.stages.items()})
        return output

    pipeline.stages[2].forward = seen
    pipeline.step(*batch(3))
    return kept, {n: p.grad for module in modules.values() for n, p in module.named_parameters()}


def test_recomputing_is_a_choice_for_each_stage():
    ((kept, gradients),) = launch(recomputing_some, 1).results
    assert kept == {0: "Held", 1: "InputsOnly", 2: "Held"}
    _, expected = one_process(3, 1)
    assert all(torch.equal(gradients[name], grad) for name, (grad, _) in expected.items())


def test_recomputing_draws_the_same_dropout_and_disturbs_no_draw_after_it():
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), torch.randn(4, 8)
    outcomes = []
    for recompute in (False, True):
        torch.manual_seed(0)
        stage = Stage(module, recompute=recompute)
        module.zero_grad()
        outputs = [stage.forward(i, [x], split=False, version=None) for i in range(2)]
        gradients = []
        for i in range(2):
            if recompute:
                stage.run_again(i)
            gradients.append(stage.backward(i, torch.ones(4, 8)))
        outcomes.append([*outputs, *gradients, module[0].weight.grad, torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes))
    assert not torch.equal(outcomes[0][0], outcomes[0][1])


def test_fewer_micro_batches_than_stages_and_uneven_stages():
    uneven = CONFIG.replace(num_layers=7)
    results = launch(train, 4, args=(one_f_one_b(4, 2),), kwargs={"config": uneven}).results
    assert_equal_in_bits(results, one_process(2, 1, uneven))
    assert_equal_in_bits(launch(train, 4, args=(zb_v(4, 4),)).results, one_process(4, 1))


def test_stages_balanced_by_cost_hold_the_same_model():
    results = launch(train, 3, args=(one_f_one_b(3, 4),), kwargs={"balance": "cost"}).results
    assert_equal_in_bits(results, one_process(4, 1))


def test_a_fused_schedule_and_one_of_the_learners_own_run_as_they_are():
    own = Schedule("mine", ["0F0 0F1 0B1 0B0", "1F1 1F0 1B1 1B0"])  # its second stage runs 1 first
    fused = fuse_communication(add_communication(one_f_one_b(2, 4)))
    cases = [(own, {}), (fused, {})]
    first, second = zip(*launch(train_each, 2, args=(cases,)).results)
    assert_equal_in_bits(second, one_process(4, 1))
    losses, expected = one_process(2, 1)
    for rank_losses, parameters in first:  # equal sums, added in another order
        assert torch.equal(rank_losses[0], losses[0])
        for name, (grad, _) in parameters.items():
            torch.testing.assert_close(grad, expected[name][0], rtol=1e-4, atol=1e-7)


def clipped(schedule, group):
    mine, n = schedule.stages_of[group.rank()], schedule.num_stages
    modules = cut_gpt(CONFIG, mine, n, seed=SEED)
    pipeline = Pipeline(schedule, modules, group, loss_fn=loss_fn, activation=activation())
    pipeline.step(*batch(schedule.num_micro_batches))
    named = {name: p for module in modules.values() for name, p in module.named_parameters()}
    norm = grad_norm(sharded={group: list(named.values())})
    clip_(named.values(), norm, 0.01)
    return {name: p.grad for name, p in named.items()}


def test_clipped_gradients_are_close():
    """They are not equal, because squared gradients are summed per stage, in another order."""
    _, expected = one_process(4, 1, clip=0.01)
    for gradients in launch(clipped, 3, args=(one_f_one_b(3, 4),)).results:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name][0])


# --- what is sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "borders"), [("1f1b", 2), ("interleaved", 5), ("zb_v", 4)])
def test_each_border_between_ranks_carries_each_micro_batch_once_each_way(name, borders):
    run = launch(train, 3, args=(build(name, 3, 6),))
    message = MICRO_BATCH * CONFIG.seq_len * CONFIG.d_model * 4
    for phase in ("forward", "backward"):
        assert run.ledger.total_bytes(op="send", phase=phase) == 6 * borders * message
        assert len(run.ledger.calls(op="send", phase=phase)) == 6 * borders
    losses = 2 * 6 * 4  # six numbers, sent to both other ranks
    assert run.ledger.total_bytes(op="send", phase="step") == losses


# --- tied embedding ---------------------------------------------------------------------------


TIED = CONFIG.replace(tied_embedding=True)


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_a_tied_embedding_gets_both_gradients(name):
    """They are close, not equal: one process adds the head's and the embedding's by turns, two
    ranks (1F1B) add two sums, and a split backward (ZB-V) adds the head's later."""
    results = launch(train, 2, args=(build(name, 2, 4),), kwargs={"steps": 3, "config": TIED})
    losses, expected = one_process(4, 3, TIED)
    names = set()
    for rank_losses, parameters in results.results:
        torch.testing.assert_close(torch.stack(rank_losses), torch.stack(losses))
        for parameter, (grad, value) in parameters.items():
            parameter = parameter.replace("head.out.weight", "embed.token.weight")
            torch.testing.assert_close(grad, expected[parameter][0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(value, expected[parameter][1], rtol=1e-3, atol=1e-4)
            names.add(parameter)
    assert names == set(expected)


def test_both_copies_of_a_tied_embedding_stay_equal_in_bits():
    first, last = launch(
        train, 2, args=(one_f_one_b(2, 4),), kwargs={"steps": 3, "config": TIED}
    ).results
    for a, b in zip(first[1]["embed.token.weight"], last[1]["head.out.weight"]):
        assert torch.equal(a, b)


# --- cutting the model ------------------------------------------------------------------------


def test_layers_are_spread_as_evenly_as_they_can_be():
    """As in the calculators, leftover layers go to the middle stages, which have no head."""
    for num_layers, num_stages in [(10, 4), (7, 3), (5, 5), (12, 1), (9, 8)]:
        ranges = layer_ranges(CONFIG.replace(num_layers=num_layers), num_stages)
        assert [i for r in ranges for i in r] == list(range(num_layers))
        assert [len(r) for r in ranges] == split_layers(num_layers, num_stages)
    assert [len(r) for r in layer_ranges(CONFIG.replace(num_layers=10), 4)] == [2, 3, 3, 2]


@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_stages_with_positions_are_the_gpt_with_positions(kind):
    """A context-parallel rank needs this: its tokens are not at positions 0, 1, 2, ..."""
    config, positions = CONFIG.replace(positions=kind), torch.tensor([6, 7, 0, 1])
    x = tokens = torch.arange(8).view(2, 4)
    for stage in cut_gpt(config, range(3), 3, seed=SEED, positions=positions).values():
        x = stage(x)
    model = GPT(config, seed=SEED)
    assert torch.equal(x, model(tokens, positions))
    assert not torch.equal(x, model(tokens))


def test_a_balanced_cut_is_the_best_of_all_cuts():
    generator = torch.Generator().manual_seed(0)
    for parts in (1, 2, 3, 4):
        costs = torch.rand(8, generator=generator).tolist()
        found = balanced_ranges(costs, parts)
        assert [i for r in found for i in r] == list(range(8))
        worst = max(sum(costs[i] for i in r) for r in found)
        assert worst == pytest.approx(best_by_trying(costs, parts))


def best_by_trying(costs, parts):
    if parts == 1:
        return sum(costs)
    return min(
        max(sum(costs[:i]), best_by_trying(costs[i:], parts - 1))
        for i in range(1, len(costs) - parts + 2)
    )


def test_a_large_head_takes_layers_from_the_last_stage():
    config = CONFIG.replace(vocab_size=16 * 1024)
    assert layer_costs(config)[-1] > 10 * layer_costs(config)[0]
    by_layers, by_cost = (layer_ranges(config, 3, balance) for balance in ("layers", "cost"))
    assert [len(r) for r in by_layers] == [4, 4, 4]
    assert len(by_cost[-1]) == 1


def test_layer_costs_add_up_to_the_models():
    assert sum(layer_costs(CONFIG)) == forward_flops(CONFIG).total


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: layer_ranges(CONFIG, 13), "num_stages=13 is more than num_layers=12: 12 stages"),
        (lambda: layer_ranges(CONFIG, 2, "luck"), "balance='luck': 'layers' or 'cost'"),
    ],
)
def test_a_cut_that_cannot_be_says_what_could(call, says):
    with pytest.raises(ScheduleError, match=says):
        call()


# --- stages that are not the GPT --------------------------------------------------------------


def loss_of_one_third(dtype, group):
    stage = (lambda x: x) if group.rank() == 0 else (lambda x: (x / 3).sum())
    activation = torch.empty(1, dtype=dtype, device="meta")
    return Pipeline(gpipe(2, 1), stage, group, activation=activation).evaluate(
        [torch.ones(1, dtype=dtype)]
    )


def test_the_loss_is_told_in_the_precision_of_the_activations():
    for dtype in (torch.float32, torch.float64):
        for loss in launch(loss_of_one_third, 2, args=(dtype,)).results:
            assert torch.equal(loss, torch.ones((), dtype=dtype) / 3)


def any_callable(schedule, group):
    weight = torch.full((3,), 2.0, requires_grad=True)
    stage = (lambda x: x * weight) if group.rank() == 0 else (lambda x: (x * weight).sum())
    pipeline = Pipeline(schedule, stage, group, activation=torch.empty(3, device="meta"))
    loss = pipeline.step([torch.ones(3), 3 * torch.ones(3)])
    return loss.item(), weight.grad.tolist()


def test_a_stage_is_any_callable():
    # loss = mean over micro-batches x of sum(x w w'), with w = w' = 2
    assert launch(any_callable, 2, args=(gpipe(2, 2),)).results == [(24.0, [4.0] * 3)] * 2


def evaluates(schedule, group):
    mine, n = schedule.stages_of[group.rank()], schedule.num_stages
    modules = cut_gpt(CONFIG, mine, n, seed=SEED)
    pipeline = Pipeline(schedule, modules, group, loss_fn=loss_fn, activation=activation())
    loss = pipeline.evaluate(*batch(schedule.num_micro_batches))
    held = [stage.held for stage in pipeline.stages.values()]
    grads = [p.grad for module in modules.values() for p in module.parameters()]
    return loss, any(held), any(grad is not None for grad in grads)


def test_evaluating_runs_forwards_only_and_every_rank_knows_the_loss():
    expected = one_process(4, 1)[0][0]
    for schedule in [one_f_one_b(2, 4), zb_v(2, 4)]:
        for loss, held, grads in launch(evaluates, 2, args=(schedule,)).results:
            assert torch.equal(loss, expected)
            assert not held and not grads


# --- what is held -----------------------------------------------------------------------------


def activations_held(schedule, group, recompute=False):
    """Return the most micro-batches held, those held at the end, and the same for messages."""
    mine, n = schedule.stages_of[group.rank()], schedule.num_stages
    modules = cut_gpt(CONFIG, mine, n, seed=SEED)
    pipeline = Pipeline(
        schedule, modules, group, loss_fn=loss_fn, activation=activation(), recompute=recompute
    )
    most, unsent = [0], [0]

    def watch(stage):
        forward = stage.forward

        def counted(*args, **kwargs):
            output = forward(*args, **kwargs)
            late = [len(s.held) + len(s.later) for s in pipeline.stages.values()]
            most[0] = max(most[0], sum(late))
            unsent[0] = max(unsent[0], sum(map(len, pipeline.messages.sent.values())))
            return output

        stage.forward = counted

    for stage in pipeline.stages.values():
        watch(stage)
    pipeline.step(*batch(schedule.num_micro_batches))
    left = sum(len(s.held) + len(s.later) for s in pipeline.stages.values())
    return most[0], left, unsent[0], sum(map(len, pipeline.messages.sent.values()))


def held_under_each(schedules, group):
    return [activations_held(schedule, group) for schedule in schedules]


def test_a_run_holds_what_the_list_says_and_leaves_nothing():
    names = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v"]
    schedules = [*(build(name, 4, 8) for name in names), zb_v(4, 4)]
    found = zip(*launch(held_under_each, 4, args=(schedules,)).results)
    for schedule, results in zip(schedules, found, strict=True):
        assert [most for most, _, _, _ in results] == peak_in_flight(schedule), schedule.name
        assert all(left == 0 and kept == 0 for _, left, _, kept in results), schedule.name


def test_the_ledger_sees_the_bytes_of_what_is_held_and_of_nothing_more():
    """Inner stages, which are alike, hold one micro-batch's bytes per micro-batch in the list.

    (Between B and W a split backward holds less: only linears' inputs and their gradients.)
    """
    thin = {"config": CONFIG.replace(num_layers=4)}

    def held(schedule):
        memory = launch(train, 4, args=(schedule,), kwargs=thin, memory=True).ledger.memory
        return [memory[rank].peak_bytes(kind="activations") for rank in (1, 2)]

    unit = held(gpipe(4, 1))  # with one micro-batch all schedules are this list
    for schedule in (gpipe(4, 6), one_f_one_b(4, 6)):
        found = [most / one for most, one in zip(held(schedule), unit, strict=True)]
        assert found == pytest.approx(peak_in_flight(schedule)[1:3], rel=0.1), schedule.name


def test_recomputing_holds_one_micro_batch_whole_and_only_the_inputs_of_the_others():
    """The second forward also counts: a micro-batch is held whole during its backward."""
    thin = {"config": CONFIG.replace(num_layers=4)}

    def held(schedule, **options):
        run = launch(train, 4, args=(schedule,), kwargs={**thin, **options}, memory=True)
        return [run.ledger.memory[rank].peak_bytes(kind="activations") for rank in (1, 2)]

    whole, an_input = held(gpipe(4, 1)), activation().nbytes
    for schedule in (gpipe(4, 6), one_f_one_b(4, 6)):
        for rank, found in zip((1, 2), held(schedule, recompute=True)):
            waiting = peak_in_flight(schedule)[rank] - 1
            expected = whole[rank - 1] + waiting * an_input
            assert found == pytest.approx(expected, rel=0.1), schedule.name


def test_what_was_sent_is_let_go_while_the_pipeline_runs():
    """At most the warm-up's messages are held; without freeing it would be all 24."""
    for _, _, unsent, _ in launch(activations_held, 3, args=(one_f_one_b(3, 12),)).results:
        assert unsent <= 6


def test_a_split_backward_leaves_the_linears_and_only_them():
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4, bias=False))
    stage = Stage(module)
    x = torch.randn(3, 4)
    y = stage.forward(0, [x], split=True, version=None)
    dx = stage.backward(0, torch.ones_like(y))
    assert dx.shape == x.shape
    assert [p.grad is None for p in module.parameters()] == [False, False, True, True, True]
    stage.weight(0)
    reference = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), reference))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_activations_are_gone_after_the_backward_without_a_garbage_collector(split, recompute):
    """Weight gradients leak if they hold tensors whose graph holds the weight gradients."""
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    stage, saved = Stage(module, recompute=recompute), []

    def pack(tensor):
        saved.append(weakref.ref(tensor))
        return tensor

    gc.disable()
    try:
        x = torch.randn(3, 4)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = stage.forward(0, [x], split=split, version=None)
        if recompute:
            stage.run_again(0)
        stage.backward(0, torch.ones_like(y))
        stage.weight(0)
        alive = [ref() for ref in saved if ref() is not None]
        weights = {p.data_ptr() for p in module.parameters()}
        assert [t for t in alive if t.data_ptr() not in weights] == []
    finally:
        gc.enable()


# --- asynchronous -----------------------------------------------------------------------------


def train_asynchronously(schedule, group):
    mine, n = schedule.stages_of[group.rank()], schedule.num_stages
    (module,) = cut_gpt(CONFIG, mine, n, seed=SEED).values()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    pipeline = Pipeline(
        schedule, module, group, loss_fn=loss_fn, activation=activation(), optimizer=optimizer
    )
    (stage,) = pipeline.stages.values()
    held, step = [], stage.step

    def counted(keep):
        held.append(len(stage.versions.stash))
        step(keep)
        held.append(len(stage.versions.stash))

    stage.step = counted
    pipeline.step(*batch(schedule.num_micro_batches))
    memory = {w.data_ptr() for v in stage.versions.stash.values() for w in v.values()}
    alone = len(memory) == len(list(module.parameters()))
    return {n: p.detach() for n, p in module.named_parameters()}, max(held), alone


def delayed_gradients(p, m, size, version_of):
    """Train the oracle on whole models: in micro-batch k, stage r's forward and backward use the
    stage's weights of version `version_of(r, k)`. It steps after every `size` micro-batches.

    It follows the papers' update rules and contains no schedule.
    """
    ranges = layer_ranges(CONFIG, p)
    owner = {}
    for name, _ in GPT(CONFIG, seed=SEED).named_parameters():
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        if layer is None:
            owner[name] = 0 if name.startswith("embed") else p - 1
        else:
            owner[name] = next(r for r in range(p) if layer in ranges[r])
    model = GPT(CONFIG, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    weights = [{n: q.detach().clone() for n, q in model.named_parameters()}]  # by version
    tokens, targets = batch(m)
    for k, (x, y) in enumerate(zip(tokens.chunk(m), targets.chunk(m))):
        mixed = {
            n: weights[version_of(owner[n], k)][n].clone().requires_grad_() for n in weights[0]
        }
        loss = loss_fn(torch.func.functional_call(model, mixed, (x,)), y)
        (loss / size).backward()
        for n, q in model.named_parameters():
            q.grad = mixed[n].grad if q.grad is None else q.grad + mixed[n].grad
        if k % size == size - 1:
            optimizer.step()
            optimizer.zero_grad()
            weights.append({n: q.detach().clone() for n, q in model.named_parameters()})
    return weights[-1]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pipedream_equals_explicitly_delayed_gradients_in_bits(p):
    schedule = pipedream(p, 7)
    expected = delayed_gradients(p, 7, 1, lambda r, k: max(0, k - (p - 1 - r)))
    results = launch(train_asynchronously, p, args=(schedule,)).results
    for rank, (weights, held, alone) in enumerate(results):
        assert all(torch.equal(w, expected[n]) for n, w in weights.items())
        assert held == versions_held(schedule)[rank]
        assert alone, "old versions are still in memory"


@pytest.mark.parametrize(("p", "size"), [(2, 2), (3, 4)])
def test_2bw_equals_gradients_delayed_by_one_step_in_bits(p, size):
    schedule = pipedream_2bw(p, 4 * size, size)
    expected = delayed_gradients(p, 4 * size, size, lambda r, k: max(0, k // size - 1))
    for weights, held, _ in launch(train_asynchronously, p, args=(schedule,)).results:
        assert all(torch.equal(w, expected[n]) for n, w in weights.items())
        assert held == 2


def test_the_oracle_of_delayed_gradients_knows_no_delay_when_there_is_none():
    """Without delay it must be plain training, or the two tests above would prove nothing."""
    model = GPT(CONFIG, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tokens, targets = batch(3)
    for x, y in zip(tokens.chunk(3), targets.chunk(3)):
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    undelayed = delayed_gradients(2, 3, 1, lambda r, k: k)
    delayed = delayed_gradients(2, 3, 1, lambda r, k: max(0, k - (1 - r)))
    assert all(torch.equal(q, undelayed[n]) for n, q in model.named_parameters())
    assert not all(torch.equal(delayed[n], undelayed[n]) for n in delayed)


# --- what is refused --------------------------------------------------------------------------


def misused(how, group):
    schedule = one_f_one_b(2, 4)
    kwargs = {"loss_fn": loss_fn, "activation": activation()}
    mine = schedule.stages_of[group.rank()]
    inputs = batch(4)
    if how == "ranks":
        schedule = one_f_one_b(3, 4)
    if how == "optimizer":
        schedule = pipedream(2, 4)
    modules = cut_gpt(CONFIG, mine, 2, seed=SEED)
    if how == "stages":
        modules = {5: modules[mine[0]]}
    if how == "activation":
        del kwargs["activation"]
    if how == "shape":
        kwargs["activation"] = torch.empty(MICRO_BATCH, 8, 32, device="meta")
    if how == "batch":
        inputs = [x[:6] for x in inputs]
    if how == "uneven batch":
        inputs = [list(x[:7].split([2, 2, 2, 1])) for x in batch(4)]
    if how == "too few":
        inputs = [list(x.chunk(2)) for x in batch(4)]
    Pipeline(schedule, modules, group, **kwargs).step(*inputs)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ranks", "1F1B is for 3 ranks, the group has 2"),
        ("stages", r"1F1B puts stages \[0\] on rank 0, not \[5\]"),
        ("activation", "activation: say shape and dtype"),
        ("shape", r"stage 0 made \[2, 8, 16\] torch.float32, but activation says \[2, 8, 32\]"),
        ("batch", r"6 rows do not split into 4 equal micro-batches; 1, 2, 3, 6 would work"),
        (
            "uneven batch",
            r"micro-batch 3 of (inputs|targets) is \[1, 8\], the first is \[2, 8\]: all must",
        ),
        ("too few", r"the schedule has 4 micro-batches, .* 2"),
        ("optimizer", "PipeDream has optimizer steps: give the optimizer"),
    ],
)
def test_misuse_is_told_in_one_sentence(how, says):
    with pytest.raises(RankError, match=says):
        launch(misused, 2, args=(how,), quiet=True)
