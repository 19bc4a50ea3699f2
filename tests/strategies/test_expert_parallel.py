"""Experts distributed over ranks equal one process's MoE and send no more than they must."""

import functools
import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import GPT, ModelConfig, launch
from mini_dist.collectives import all_reduce
from mini_dist.collectives.mesh import Mesh
from mini_dist.model.gpt import MoE
from mini_dist.model.loss import token_loss
from mini_dist.model.recompute import recompute_blocks
from mini_dist.model.routing import load_balance_loss, z_loss
from mini_dist.plan.calculators import step_volume
from mini_dist.plan.calculators.frameworks import FRAMEWORKS
from mini_dist.plan.config import Layout
from mini_dist.strategies.expert_parallel import (
    ExpertParallel,
    capacity_of,
    choose_copies,
    combine,
    dispatch,
    layers_with_experts,
    move_balance_biases,
    set_loss_scale,
    shard_experts,
)
from mini_dist.strategies.pipeline.stage import Stage

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

CONFIG = ModelConfig(
    vocab_size=32, seq_len=8, d_model=16, num_layers=3, num_heads=2, d_expert=12,
    num_experts=4, top_k=2, first_dense_layers=1,
)  # fmt: skip
BATCH = 4


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, CONFIG.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def lively(config):
    """Return a GPT with weights ten times as large, so that routers' choices differ."""
    model = GPT(config, seed=3, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return model


# --- the oracle: one process, one token at a time ------------------------------------------------


def one_token_at_a_time(moe, num_groups, capacity_factor):
    """Return the papers' MoE. Tokens come in groups; a group may send `capacity` copies to an
    expert: first all first choices in token order, then all second choices, ..."""

    def forward(x, routing=None):
        found = []
        MoE.forward(moe, x, found)  # only its decision is used
        (decision,) = found
        if routing is not None:
            routing.append(decision)
        tokens = x.flatten(0, -2)
        out = [torch.zeros_like(token) for token in tokens]
        per_group = len(tokens) // num_groups
        for first in range(0, len(tokens), per_group):
            room = [math.inf] * CONFIG.num_experts
            if capacity_factor is not None:
                even = per_group * moe.top_k / CONFIG.num_experts
                room = [math.ceil(capacity_factor * even)] * CONFIG.num_experts
            for slot in range(moe.top_k):
                for t in range(first, first + per_group):
                    expert = decision.experts[t, slot].item()
                    if room[expert] > 0:
                        room[expert] -= 1
                        answer = moe.experts[expert](tokens[t])
                        out[t] = out[t] + answer * decision.weights[t, slot]
        out = torch.stack(out)
        return (out if moe.shared is None else out + moe.shared(tokens)).view_as(x)

    return forward


def one_process(config, num_groups, capacity_factor):
    """Return the whole batch's gradients by name, and the routers' decisions."""
    model = lively(config)
    for block in model.blocks:
        if isinstance(block.ffn, MoE):
            block.ffn.forward = one_token_at_a_time(block.ffn, num_groups, capacity_factor)
    inputs, targets = batch()
    routing = []
    loss = token_loss(model(inputs, routing=routing), targets).mean()
    for decision in routing:
        loss = loss + 0.1 * load_balance_loss(decision) + 0.01 * z_loss(decision)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, routing


# --- equal to one process ------------------------------------------------------------------------


def gradients(cases, ep, group):
    """Return the averaged gradients of one step over all ranks for each case, and the loads."""
    mesh = Mesh(group, dp=group.size(), ep=ep)
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    found = {}
    for case, (config, capacity_factor) in cases.items():
        model = shard_experts(
            lively(config), mesh["ep"], capacity_factor=capacity_factor, balance_loss=0.1,
            z_loss=0.01, balance_group=mesh["dp"],
        )  # fmt: skip
        token_loss(model(inputs), targets).mean().backward()
        means = {}
        for name, parameter in model.named_parameters():
            over = mesh["edp"] if ".experts." in name else mesh["dp"]
            means[name] = all_reduce(parameter.grad, over, op="mean")
        found[case] = means, [layer.load for layer in layers_with_experts(model)]
    return found


CASES = {
    "dropless": (CONFIG, None),
    "capacity 1": (CONFIG, 1.0),
    "capacity 0.3, one choice": (CONFIG.replace(top_k=1), 0.3),
    "a shared expert": (CONFIG.replace(num_shared_experts=2), 1.1),
    "sigmoid": (CONFIG.replace(router="sigmoid", top_k=3), 0.75),
}


@functools.cache
def oracle(case, num_groups):
    config, capacity_factor = CASES[case]
    return one_process(config, num_groups, capacity_factor)


@pytest.mark.parametrize("size, ep", [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
def test_every_gradient_equals_that_of_one_process(size, ep):
    """Compare with and without drops, including the gate's gradients and both losses'."""
    run = launch(gradients, size, (CASES, ep))
    for case in CASES:
        expected, routing = oracle(case, num_groups=size)
        seen = set()
        for result in run.results:
            means, loads = result[case]
            for name, mean in means.items():
                where = f"{name} in {case}"
                assert torch.allclose(mean, expected[name], rtol=1e-9, atol=1e-12), where
                seen.add(name)
            for load, decision in zip(loads, routing):
                visits = decision.experts.flatten().bincount(minlength=CONFIG.num_experts)
                assert torch.equal(load.visits, visits)
                assert (load.drop_rate > 0) == (case != "dropless"), case
        assert seen == set(expected)  # every expert is on some rank
        gate = expected["blocks.1.ffn.router.weight"]
        assert gate.abs().max() > 1e-4  # the compared gradients are not all 0


def test_drops_of_other_groups_are_other_gradients():
    """As a control, counting capacity over all ranks together would fail the test above."""
    apart, together = (oracle("capacity 1", groups)[0] for groups in (4, 1))
    name = "blocks.1.ffn.router.weight"
    assert not torch.allclose(apart[name], together[name], rtol=1e-3)


def test_the_dropless_oracle_is_the_plain_model():
    model = lively(CONFIG)
    inputs, targets = batch()
    routing = []
    loss = token_loss(model(inputs, routing=routing), targets).mean()
    (loss + sum(0.1 * load_balance_loss(r) + 0.01 * z_loss(r) for r in routing)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, oracle("dropless", 4)[0][name])


def what_a_rank_holds(group):
    model = shard_experts(GPT(CONFIG, device="meta"), group).init_weights_(5)
    whole = dict(GPT(CONFIG, seed=5).named_parameters())
    same = all(torch.equal(p, whole[name]) for name, p in model.named_parameters())
    return [name for name, _ in model.named_parameters() if "experts" in name], same


def test_a_rank_holds_its_experts_only_under_the_names_and_with_the_values_of_the_whole():
    run = launch(what_a_rank_holds, 2)
    for rank, (names, same) in enumerate(run.results):
        assert same
        assert {name.split(".experts.")[1].split(".")[0] for name in names} == {
            str(2 * rank), str(2 * rank + 1),
        }  # fmt: skip


# --- which copies travel -------------------------------------------------------------------------


def test_copies_are_sorted_by_expert_and_late_last_choices_are_dropped():
    experts = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
    everything = choose_copies(experts, 4)
    assert everything.counts.tolist() == [4, 3, 1, 0]
    assert everything.token.tolist() == [0, 1, 3, 2, 2, 0, 3, 1]
    assert everything.slot.tolist() == [0, 0, 0, 1, 0, 1, 1, 1]
    kept = choose_copies(experts, 4, capacity=2)
    assert kept.counts.tolist() == [2, 2, 1, 0]
    assert kept.token.tolist() == [0, 1, 2, 0, 1]  # expert 1: token 2's first choice, then token 0
    assert choose_copies(experts, 4, capacity=0).token.tolist() == []


def test_capacity_is_the_even_share_times_the_factor_rounded_up():
    assert capacity_of(1.0, num_tokens=64, top_k=2, num_experts=8) == 16
    assert capacity_of(1.25, num_tokens=10, top_k=1, num_experts=4) == 4  # 3.125


# --- there and back ------------------------------------------------------------------------------

COUNTS = {  # row r: what rank r sends to each of 4 experts
    "even": [[1, 1, 1, 1]] * 2,
    "uneven": [[3, 0, 2, 1], [0, 5, 1, 0]],
    "one rank sends nothing": [[0, 0, 0, 0], [2, 1, 0, 3]],
    "one rank gets nothing": [[2, 1, 0, 0], [4, 0, 0, 0]],
    "nothing at all": [[0, 0, 0, 0], [0, 0, 0, 0]],
}


def there_and_back(counts, group):
    rank = group.rank()
    mine = torch.tensor(counts[rank])
    expert = torch.arange(4).repeat_interleave(mine)
    number = torch.arange(len(expert))
    rows = torch.stack([torch.full_like(expert, rank), expert, number], 1).double()
    x = rows.clone().requires_grad_()
    arrived, dispatched = dispatch(x, mine, group)
    back = combine(arrived * 3, dispatched, group)
    upstream = torch.arange(back.numel()).view_as(back).double()
    (gradient,) = torch.autograd.grad(back, x, upstream)
    return rows, arrived.detach(), dispatched.rows_per_expert, back.detach(), upstream, gradient


@pytest.mark.parametrize("name", COUNTS)
def test_rows_reach_the_rank_of_their_expert_and_their_answers_come_home(name):
    counts = COUNTS[name]
    run = launch(there_and_back, 2, (counts,))
    everyone = torch.cat([result[0] for result in run.results])
    for rank, (rows, arrived, rows_per_expert, back, upstream, gradient) in enumerate(run.results):
        experts = [2 * rank, 2 * rank + 1]
        assert rows_per_expert == [sum(row[e] for row in counts) for e in experts]
        # Rows are sorted by expert, then by source rank, in the source rank's order.
        wanted = [row for e in experts for row in everyone.tolist() if row[1] == e]
        assert arrived.tolist() == wanted
        assert torch.equal(back, 3 * rows)
        assert torch.equal(gradient, 3 * upstream)


# --- bytes ---------------------------------------------------------------------------------------


def one_step(config, options, group):
    model = shard_experts(lively(config), group, **options)
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    routing = []
    token_loss(model(inputs, routing=routing), targets).mean().backward()
    return [decision.experts for decision in routing]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_bytes_are_the_copies_that_leave_the_rank_four_times_and_the_counts(size, capacity_factor):
    run = launch(one_step, size, (CONFIG, dict(capacity_factor=capacity_factor)))
    per_rank = CONFIG.num_experts // size
    for rank, decisions in enumerate(run.results):
        copies = 0
        for experts in decisions:
            sent = experts.flatten().bincount(minlength=CONFIG.num_experts)
            if capacity_factor is not None:
                sent = sent.clamp(max=math.ceil(capacity_factor * len(experts) * 2 / 4))
            copies += sum(n for e, n in enumerate(sent.tolist()) if e // per_rank != rank)
        counts = len(decisions) * (size - 1) * per_rank * 8  # int64
        row = CONFIG.d_model * 8  # float64
        # Each layer has [counts, dispatch, combine]; backward has the reverse, without the counts.
        forward, backward = (
            [c for c in run.ledger.comms if (c.op, c.phase, c.rank) == ("all_to_all", phase, rank)]
            for phase in ("forward", "backward")
        )
        assert len(forward) == 3 * len(decisions) and len(backward) == 2 * len(decisions)
        assert sum(comm.sent for comm in forward[0::3]) == counts
        assert sum(comm.sent for comm in forward[1::3]) == copies * row
        assert sum(comm.sent for comm in backward[0::2]) == copies * row  # gradients of answers
        # This rank receives the answers and the gradients of the rows that it sent.
        assert sum(comm.received for comm in forward[2::3]) == copies * row
        assert sum(comm.received for comm in backward[1::2]) == copies * row


class EvenRouter(torch.nn.Module):
    """Token t chooses experts t, t+1, ..., so every rank sends equally many to each expert."""

    def forward(self, tokens):
        wanted = torch.arange(len(tokens))[:, None] + torch.arange(CONFIG.top_k)
        logits = torch.zeros(len(tokens), CONFIG.num_experts, dtype=tokens.dtype)
        return logits.scatter(1, wanted % CONFIG.num_experts, 5.0)


def one_balanced_step(group):
    model = shard_experts(lively(CONFIG), group)
    for layer in layers_with_experts(model):
        layer.router = EvenRouter()
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    token_loss(model(inputs), targets).mean().backward()


@pytest.mark.parametrize("size", [2, 4])
def test_with_even_routing_the_calculators_formula_is_the_runs_bytes(size):
    run = launch(one_balanced_step, size)
    layout = Layout(dp=size, ep=size, micro_batch_size=BATCH // size)
    how = FRAMEWORKS["megatron-core"].replace(activation_bytes=8)  # float64
    formula = step_volume(CONFIG, layout, how)["ep"]
    counts = CONFIG.num_moe_layers * (size - 1) * CONFIG.num_experts // size * 8
    for rank in range(size):
        sent = run.ledger.total_bytes(op="all_to_all", rank=rank)
        assert sent - counts == formula


def dispatch_by_torch(counts, group):
    """Compare our dispatch with torch's differentiable collective."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    rank, size = group.rank(), group.size()
    mine = torch.tensor(counts[rank])
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    splits = [m.view(size, -1).sum(1).tolist() for m in (mine, theirs)]
    x = torch.randn(sum(counts[rank]), 3, generator=torch.Generator().manual_seed(rank))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    upstream = torch.randn(sum(splits[1]), 3, generator=torch.Generator().manual_seed(9))
    arrived, dispatched = dispatch(ours, mine, group)
    by_rank = all_to_all_single_autograd(theirs, splits[1], splits[0], group)
    (arrived * upstream[dispatched.by_expert]).sum().backward()
    (by_rank * upstream).sum().backward()
    return torch.equal(arrived, by_rank[dispatched.by_expert]), torch.equal(ours.grad, theirs.grad)


def test_torchs_all_to_all_carries_the_same_rows_and_gradients():
    run = launch(dispatch_by_torch, 2, (COUNTS["uneven"],))
    assert run.results == [(True, True)] * 2


# --- balance -------------------------------------------------------------------------------------


def everyone_wants_expert_2(capacity_factor, group):
    model = shard_experts(lively(CONFIG), group, capacity_factor=capacity_factor)
    for layer in layers_with_experts(model):
        layer.top_k, layer.router = 1, AllTo(2)
    inputs, _ = (part.chunk(group.size())[group.rank()] for part in batch())
    model(inputs)
    return [layer.load for layer in layers_with_experts(model)]


class AllTo(torch.nn.Module):
    def __init__(self, expert):
        super().__init__()
        self.expert = expert

    def forward(self, tokens):
        logits = torch.zeros(len(tokens), CONFIG.num_experts, dtype=tokens.dtype)
        logits[:, self.expert] = 9.0
        return logits


def test_a_router_that_wants_one_expert_shows_and_capacity_bounds_it():
    tokens = BATCH * CONFIG.seq_len
    for load in launch(everyone_wants_expert_2, 4, (None,)).results[3]:
        assert load.visits.tolist() == load.kept.tolist() == [0, 0, tokens, 0]
        assert (load.imbalance, load.drop_rate) == (4.0, 0.0)
    run = launch(everyone_wants_expert_2, 4, (1.25,))
    for load in run.results[3]:
        # Each of 4 ranks has 8 tokens; the even share is 2, times 1.25 and rounded up is 3.
        assert load.kept.tolist() == [0, 0, 4 * 3, 0]
        assert load.drop_rate == pytest.approx(1 - 12 / 32)
    # The rank of expert 2 receives no more than that.
    counts, rows = 3 * 1 * 8, 3 * 3 * CONFIG.d_model * 8
    dispatched = run.ledger.calls(op="dispatch", rank=2)
    assert {comm.received for comm in dispatched} == {counts + rows}


def balance_gradients(balance, group):
    """Return the router's gradients from the balance loss alone, averaged over the ranks."""
    model = shard_experts(lively(CONFIG), group, balance_loss=balance)
    inputs, _ = (part.chunk(group.size())[group.rank()] for part in batch())
    routing = []
    out = model(inputs, routing=routing)
    (0 * out.sum()).backward(retain_graph=True)  # only the attached losses contribute
    attached = layers_with_experts(model)[-1].router.weight.grad
    model.zero_grad()
    load_balance_loss(routing[-1]).backward()  # only this rank's tokens
    alone = layers_with_experts(model)[-1].router.weight.grad
    return [all_reduce(g, group, op="mean") for g in (attached, balance * alone)]


def test_the_balance_loss_is_that_of_the_whole_batch_not_the_mean_of_the_ranks():
    model, routing = lively(CONFIG), []
    model(batch()[0], routing=routing)
    (0.5 * load_balance_loss(routing[-1])).backward()
    whole = model.blocks[-1].ffn.router.weight.grad
    attached, alone = launch(balance_gradients, 4, (0.5,)).results[0]
    torch.testing.assert_close(attached, whole, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(alone, whole, rtol=1e-2)


def micro_batches_or_one(count, group):
    model = shard_experts(lively(CONFIG), group, balance_loss=0.3, z_loss=0.2)
    set_loss_scale(model, 1 / count)
    for layer in layers_with_experts(model):
        layer.router.weight.data.zero_()  # all tokens get one decision, so losses add up evenly
    inputs, targets = batch()
    for x, y in zip(inputs.chunk(count), targets.chunk(count)):
        (token_loss(model(x), y).mean() / count).backward()
    return layers_with_experts(model)[0].router.weight.grad


def test_the_layers_losses_are_scaled_like_the_main_loss():
    one, four = (launch(micro_batches_or_one, 1, (count,)).results[0] for count in (1, 4))
    torch.testing.assert_close(one, four, rtol=1e-9, atol=1e-12)


def two_micro_batches(group):
    model = shard_experts(lively(CONFIG), group, balance_loss=0.3)
    set_loss_scale(model, 1 / 2)
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    for x, y in zip(inputs.chunk(2), targets.chunk(2)):
        (token_loss(model(x), y).mean() / 2).backward()
    return all_reduce(layers_with_experts(model)[0].router.weight.grad, group, op="mean")


def test_visits_are_counted_per_micro_batch_over_all_ranks():
    model = lively(CONFIG)
    inputs, targets = batch()
    for rows in ([0, 2], [1, 3]):  # each rank's first sequence, then each rank's second
        routing = []
        loss = token_loss(model(inputs[rows], routing=routing), targets[rows]).mean()
        ((loss + sum(0.3 * load_balance_loss(decision) for decision in routing)) / 2).backward()
    for gradient in launch(two_micro_batches, 2).results:
        torch.testing.assert_close(
            gradient, model.blocks[1].ffn.router.weight.grad, rtol=1e-9, atol=1e-12
        )


def as_a_stage(split, group):
    """Run the pipeline's Stage forward and backward, with weight gradients deferred or not."""
    layer = ExpertParallel(lively(CONFIG).blocks[1].ffn, group, balance_loss=0.1)
    stage = Stage(layer)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    y = stage.forward(0, [x], split=split, version=None)
    dx = stage.backward(0, torch.ones_like(y))
    stage.weight(0)
    return dx, {name: p.grad for name, p in layer.named_parameters()}


def test_a_backward_in_two_halves_gives_the_same_gradients():
    """Deferred weight gradients bypass every hook of a parameter."""
    whole, halves = (launch(as_a_stage, 2, (split,)).results for split in (False, True))
    for (dx, grads), (later_dx, later) in zip(whole, halves):
        torch.testing.assert_close(dx, later_dx)
        assert grads.keys() == later.keys()
        for name in grads:
            torch.testing.assert_close(grads[name], later[name])


def recomputed_or_not(mode, group):
    model = shard_experts(lively(CONFIG), group, balance_loss=0.1, z_loss=0.01)
    recompute_blocks(model, mode)
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    token_loss(model(inputs), targets).mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_recomputation_sends_again_and_attaches_the_losses_once():
    """The discarded forward also routes, dispatches and combines."""
    plain, full = (launch(recomputed_or_not, 2, (mode,)) for mode in ("none", "full"))
    for mine, theirs in zip(plain.results, full.results):
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-12, atol=1e-14)
    sent = [run.ledger.total_bytes(op="dispatch", rank=0) for run in (plain, full)]
    assert sent[1] == 2 * sent[0] > 0


def bias_moves(steps, group):
    config = CONFIG.replace(router="sigmoid", top_k=1)
    model = shard_experts(lively(config), group)
    inputs, targets = (part.chunk(group.size())[group.rank()] for part in batch())
    found = []
    for _ in range(steps):
        token_loss(model(inputs), targets).mean().backward()
        layer = layers_with_experts(model)[0]
        found.append((layer.load.visits.tolist(), layer.balance_bias.clone()))
        move_balance_biases(model, rate=0.02)
    return found


def test_biases_move_tokens_from_crowded_experts_to_idle_ones():
    run = launch(bias_moves, 2, (40,))
    found = run.results[0]
    visits, _ = found[0]
    _, bias = found[1]
    mean = BATCH * CONFIG.seq_len / CONFIG.num_experts
    assert bias.sign().tolist() == [(v < mean) - (v > mean) for v in visits]
    assert max(found[-1][0]) < max(visits)
    for (mine, mine_bias), (theirs, theirs_bias) in zip(*run.results):
        assert mine == theirs and torch.equal(mine_bias, theirs_bias)


# --- what is refused -----------------------------------------------------------------------------


def bad_inputs(group):
    with pytest.raises(ValueError, match="3 ranks do not divide num_experts=4: .* 1, 2, 4 ranks"):
        shard_experts(GPT(CONFIG), group)
    divisible = CONFIG.replace(num_experts=3)
    with pytest.raises(ValueError, match="capacity_factor=0 would drop everything"):
        shard_experts(GPT(divisible), group, capacity_factor=0)
    with pytest.raises(ValueError, match="no layer with experts: give its config num_experts"):
        shard_experts(GPT(ModelConfig(d_model=16, num_heads=2)), group)
    with pytest.raises(ValueError, match="no layer has a balance bias: .* router='sigmoid'"):
        move_balance_biases(shard_experts(GPT(divisible), group))


def test_what_cannot_work_is_refused_in_a_sentence():
    launch(bad_inputs, 3)
