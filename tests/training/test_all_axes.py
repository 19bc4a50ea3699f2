"""Every layout has one process's losses and gradient norm, and the predicted bytes per axis."""

import re
import sys

import cloudpickle
import pytest
import torch

from mini_dist import GPT, Layout, ModelConfig, launch
from mini_dist.model.data import Batches, load_text
from mini_dist.model.loss import token_loss
from mini_dist.plan.calculators import step_volume

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest

STEPS, MAX_NORM = 5, 0.5
DENSE = dict(d_model=32, num_layers=4, num_heads=4, num_kv_heads=2, seq_len=32, vocab_size=256)
EXPERTS = dict(num_experts=4, top_k=2, d_expert=32, num_shared_experts=1, first_dense_layers=1)


def batches_of(config, rows, rank=0, size=1):
    return Batches(load_text(), batch_size=rows, seq_len=config.seq_len, rank=rank, size=size)


def adamw(tensors):
    return torch.optim.AdamW(tensors, lr=1e-2)


def one_process(config, rows, group):
    """The oracle: the plain model, the whole batch at once, torch's own clipping."""
    model = GPT(config, seed=0).double()
    optimizer, done = adamw(model.parameters()), []
    batches = batches_of(config, rows)
    for step in range(STEPS):
        inputs, targets = batches.batch(step)
        optimizer.zero_grad()
        loss = token_loss(model(inputs), targets).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        done.append((loss.item(), norm.item()))
    return done


def many_ranks(config, layout, options, group):
    from mini_dist.training.all_axes import parallelize

    torch.set_default_dtype(torch.float64)
    model = parallelize(config, layout, group, adamw, **options)
    batches = batches_of(config, layout.global_batch_size, model.mesh.index("dp"), layout.dp)
    done = [model.step(*batches.batch(step), max_norm=MAX_NORM) for step in range(STEPS)]
    return [(step.loss.item(), step.norm.item()) for step in done]


ORACLES = {}


def oracle(config, rows):
    if (config, rows) not in ORACLES:
        ORACLES[config, rows] = launch(one_process, 1, (config, rows)).results[0]
    return ORACLES[config, rows]


def layout_of(**sizes):
    return Layout(**{"micro_batch_size": 1, "num_micro_batches": 2, **sizes})


def name_of(case):
    return " ".join(f"{key}={value}" for key, value in case.items())


LAYOUTS = [
    dict(dp=2, zero=2, recompute="selective"),
    dict(tp=4),
    dict(tp=4, sequence_parallel=True, recompute="full"),
    dict(cp=2, dp=2, zero=3),
    dict(pp=2, dp=2, tp=2),
    dict(pp=2, dp=2, tp=2, zero=1, sequence_parallel=True),
    dict(cp=2, tp=2, dp=2),
    dict(cp=2, tp=2, dp=2, zero=3, sequence_parallel=True, recompute="full"),
    dict(pp=2, dp=2, zero=2, schedule="interleaved", num_chunks=2),
    dict(pp=2, dp=2, zero=1, schedule="zb_v", num_chunks=2),
    dict(pp=2, cp=2, zero=1, schedule="zb_h1", tp=2),
    dict(pp=4, tp=2, schedule="gpipe", num_micro_batches=4),
]

# These also run with a tied embedding. A pipeline with ZeRO-2 or 3 refuses it, see below.
TIED = [case for case in LAYOUTS if "pp" not in case or case.get("zero", 0) < 2]
CASES = [(case, False) for case in LAYOUTS] + [(case, True) for case in TIED]


@pytest.mark.parametrize(
    ("case", "tied"), CASES, ids=[name_of(case) + " tied" * tied for case, tied in CASES]
)
def test_every_layout_trains_what_one_process_trains(case, tied):
    layout, config = layout_of(**case), ModelConfig(**DENSE, tied_embedding=tied)
    expected = oracle(config, layout.global_batch_size)
    assert all(norm > MAX_NORM for _, norm in expected), "nothing would be clipped"
    for result in launch(many_ranks, layout.world_size, (config, layout, {})).results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("attention", ["all_gather", "ulysses"])
def test_the_sequence_may_be_put_together_in_other_ways(attention):
    layout, config = layout_of(cp=2, tp=2), ModelConfig(**{**DENSE, "num_kv_heads": 4})
    expected = oracle(config, layout.global_batch_size)
    options = {"attention": attention}
    for result in launch(many_ranks, 4, (config, layout, options)).results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


WITH_EXPERTS = [
    dict(dp=4, ep=2, zero=2),
    dict(tp=2, dp=2, ep=2, sequence_parallel=True, zero=1, recompute="full"),
    dict(dp=4, ep=2, zero=3, recompute="full"),
    dict(pp=2, dp=4, ep=2),
    dict(pp=2, dp=4, ep=2, zero=3),
    dict(pp=2, dp=2, cp=2, tp=2, ep=2, zero=1, sequence_parallel=True),  # 16 ranks, 5 axes
]
SPANNING_TP = [
    dict(tp=2, dp=2, ep=4, etp=1, sequence_parallel=True),  # whole experts, spread over all ranks
    dict(tp=4, ep=2, etp=2, sequence_parallel=True, zero=1),
    dict(tp=2, dp=2, ep=2, etp=1, sequence_parallel=True, zero=3),
    dict(tp=2, cp=2, pp=2, ep=1, etp=1, sequence_parallel=True, zero=2),
    dict(tp=2, dp=2, pp=2, ep=4, etp=1, sequence_parallel=True, recompute="full"),
]


@pytest.mark.parametrize("case", WITH_EXPERTS, ids=name_of)
def test_with_experts_too(case):
    check_with_experts(case)


@pytest.mark.parametrize("case", SPANNING_TP, ids=name_of)
def test_with_experts_that_span_tp(case):
    check_with_experts(case)


def check_with_experts(case):
    layout, config = layout_of(**case), ModelConfig(**DENSE, **EXPERTS)
    expected = oracle(config, layout.global_batch_size)
    for result in launch(many_ranks, layout.world_size, (config, layout, {})).results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def one_process_with_balance(config, layout, weight, group):
    """The oracle with a balance loss, the mean over micro-batches that span all replicas."""
    from mini_dist.model.routing import load_balance_loss

    model = GPT(config, seed=0).double()
    optimizer, done = adamw(model.parameters()), []
    m, size = layout.num_micro_batches, layout.micro_batch_size
    batches = batches_of(config, layout.global_batch_size)
    for step in range(STEPS):
        inputs, targets = batches.batch(step)  # by replica, then by micro-batch
        optimizer.zero_grad()
        total = 0.0
        for micro in range(m):
            rows = [r * m * size + micro * size + i for r in range(layout.dp) for i in range(size)]
            routing = []
            loss = token_loss(model(inputs[rows], routing=routing), targets[rows]).mean() / m
            (loss + weight * sum(map(load_balance_loss, routing)) / m).backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        done.append((total, norm.item()))
    return done


@pytest.mark.parametrize(
    "case",
    [
        dict(dp=2, cp=2, ep=2),
        dict(pp=2, dp=2, tp=2, ep=2, zero=1),
        dict(dp=2, tp=2, ep=2, zero=3, sequence_parallel=True),
        dict(dp=2, tp=2, ep=4, etp=1, sequence_parallel=True),
    ],
    ids=name_of,
)
def test_the_balance_loss_counts_alike_on_every_grid(case):
    layout, config = layout_of(**case), ModelConfig(**DENSE, **EXPERTS)
    weight = 0.5  # so large that leaving it out or scaling it wrong would be noticed
    expected = launch(one_process_with_balance, 1, (config, layout, weight)).results[0]
    plain = oracle(config, layout.global_batch_size)
    assert abs(expected[0][1] - plain[0][1]) > 1e-3, "the balance loss would not be seen"
    options = {"balance_loss": weight}
    for result in launch(many_ranks, layout.world_size, (config, layout, options)).results:
        torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


# ---- the norm, and values close to it ------------------------------------------------------------


def norms_by_other_rules(config, layout, group):
    """Return the norm, and what it would be if all ranks' elements counted or tp were ignored."""
    from mini_dist.collectives import all_reduce
    from mini_dist.training.all_axes import parallelize

    model = parallelize(config, layout, group, adamw)
    batches = batches_of(config, layout.global_batch_size, model.mesh.index("dp"), layout.dp)
    model.step(*batches.batch(0))
    right = model.grad_norm()
    squares = sum(gradient.pow(2).sum() for _, gradient in model.gradients())
    everyone = all_reduce(squares, group).sqrt()
    of_dp = all_reduce(squares, model.mesh["dp", "cp"]).sqrt()
    return right.item(), everyone.item(), of_dp.item()


def test_the_norm_counts_neither_copies_nor_own_pieces_only():
    layout, config = layout_of(dp=2, tp=2, zero=1), ModelConfig(**DENSE)
    right, everyone, of_dp = launch(norms_by_other_rules, 4, (config, layout)).results[0]
    assert everyone > 1.01 * right and of_dp < 0.99 * right


# ---- bytes ---------------------------------------------------------------------------------------


def train(config, layout, steps, group):
    from mini_dist.training.all_axes import parallelize

    model = parallelize(config, layout, group, adamw)
    batches = batches_of(config, layout.global_batch_size, model.mesh.index("dp"), layout.dp)
    for step in range(steps):
        model.step(*batches.batch(step), max_norm=MAX_NORM)
    return model.mesh.index("pp")


def bytes_of_a_step(config, layout):
    """Return all ranks' bytes per axis in one step: two steps' bytes minus one step's.

    Single numbers (norm, loss, token counts) are left out.
    """
    total = {}
    for steps, sign in ((2, 1), (1, -1)):
        run = launch(train, layout.world_size, (config, layout, steps))
        for leaf in run.ledger.leaves():
            if leaf.sent > 8:
                total[leaf.axis] = total.get(leaf.axis, 0) + sign * leaf.sent
    return {axis: number for axis, number in total.items() if number}, run.results


@pytest.mark.parametrize(
    "case",
    [
        dict(dp=2, zero=3),
        dict(pp=2, dp=2, zero=3),
        dict(tp=2),
        dict(pp=2, dp=2, tp=2, zero=1, sequence_parallel=True),
        dict(cp=2, tp=2, dp=2),
        dict(pp=2, cp=2, dp=2, zero=2),
    ],
    ids=name_of,
)
def test_bytes_by_axis_equal_the_calculators(case):
    layout, config = layout_of(**case), ModelConfig(**DENSE)
    measured, pp_ranks = bytes_of_a_step(config, layout)
    predicted = {}
    for pp_rank in pp_ranks:
        for line in step_volume(config, layout, "course", pp_rank):
            predicted[line.name] = predicted.get(line.name, 0) + line.value
    dp = "*".join(axis for axis in ("dp", "cp") if getattr(layout, axis) > 1)
    if dp and dp != "dp":
        predicted[dp] = predicted.get(dp, 0) + predicted.pop("dp")
    if layout.tp > 1:  # the calculator says that it leaves these out
        each = 4 * 2 * (layout.tp - 1)  # bytes per number all-reduced, over a tp group's ranks
        tokens = layout.num_micro_batches * layout.micro_batch_size * config.seq_len // layout.cp
        predicted["tp"] += each * 3 * tokens * layout.dp * layout.cp  # the loss: three per token
        if layout.sequence_parallel:  # norms and biases after the sums, summed over tp
            whole = config.num_layers * (2 * 2 + 2) * config.d_model + 2 * config.d_model
            shards = layout.dp * layout.cp if layout.zero else 1
            predicted["tp"] += each * whole * layout.dp * layout.cp // shards
    assert measured == predicted


def test_with_experts_tp_ranks_send_each_copy_once():
    """With sequence parallelism, tp cuts routed rows too, so ep carries only 1/t of the bytes."""
    config, ep = ModelConfig(**DENSE, **EXPERTS), {}
    for sequence_parallel in (False, True):
        layout = layout_of(dp=2, tp=2, ep=2, sequence_parallel=sequence_parallel)
        measured, _ = bytes_of_a_step(config, layout)
        tokens = layout.num_micro_batches * layout.micro_batch_size * config.seq_len
        moe_layers = config.num_layers - config.first_dense_layers
        predicted = {line.name: line.value for line in step_volume(config, layout, "course")}
        predicted["tp"] = 4 * predicted["tp"] + 2 * 8 * 3 * tokens  # as above: the loss
        if sequence_parallel:  # norms, biases after sums and routers, summed over tp
            D, E = config.d_model, config.num_experts
            layer = 2 * 2 * D + D
            whole = config.num_layers * layer + 2 * D + config.first_dense_layers * D
            whole += moe_layers * (E * D + E // 2 * D + D)
            predicted["tp"] += 2 * 8 * whole
        assert measured["tp"] == predicted["tp"]
        # Before each dispatch, a rank sends the counts of two experts to the other rank.
        counts = layout.num_micro_batches * moe_layers * 4 * 8 * config.num_experts // 2
        ep[sequence_parallel] = measured["ep"] - counts
    assert ep[True] * 2 == ep[False] > 0


@pytest.mark.parametrize(
    "case", [dict(tp=2, dp=2, ep=4, etp=1), dict(tp=4, ep=2, etp=2)], ids=name_of
)
def test_bytes_of_experts_that_span_tp_equal_the_calculators(case):
    """Every token visits every expert, so the bytes do not depend on the router."""
    config = ModelConfig(**DENSE, **EXPERTS, bias=False).replace(top_k=4, num_kv_heads=4)
    layout = layout_of(**case, sequence_parallel=True, zero=1)
    measured, _ = bytes_of_a_step(config, layout)
    D, E, m = config.d_model, config.num_experts, layout.num_micro_batches
    tokens, moe_layers = m * config.seq_len, config.num_layers - config.first_dense_layers
    lines = {line.name: line.value for line in step_volume(config, layout, "course")}
    predicted = {name: layout.world_size * value for name, value in lines.items()}
    # The calculator leaves out three numbers per token for the loss, and summing routers and norms.
    each = 4 * 2 * (layout.tp - 1)
    whole = (2 * config.num_layers + 1) * D + moe_layers * E * D
    predicted["tp"] += each * (3 * tokens * layout.dp + whole)
    # Before the rows, the ranks send row counts per expert. (A single number is left out above.)
    if layout.ep < E:
        predicted["ep"] += layout.world_size * m * moe_layers * 8 * E // layout.ep * (layout.ep - 1)
    # They also sum up how many tokens of all ranks visited each expert.
    everyone = "dp*tp" if layout.dp > 1 else "tp"
    visits = m * moe_layers * 2 * (layout.dp * layout.tp - 1) * 8 * E
    predicted[everyone] = predicted.get(everyone, 0) + visits
    assert measured == predicted


# ---- random numbers ------------------------------------------------------------------------------


def dropped(layout, group):
    from mini_dist.training.all_axes import parallelize

    config = ModelConfig(**DENSE, dropout=0.5)
    model = parallelize(config, layout, group, adamw)
    x = torch.zeros(1, 32, dtype=torch.long)
    with torch.no_grad():
        return (model.stages[0].embed(x) == 0).flatten().tolist()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_alike_where_tensors_are_and_else_differs(sequence_parallel):
    layout = layout_of(dp=2, tp=2, sequence_parallel=sequence_parallel)
    a, b, c, _ = launch(dropped, 4, (layout,)).results  # ranks 0, 1 share a replica; 2 is another
    assert (a == b) is not sequence_parallel
    assert a != c and 0 < sum(a) < len(a)


# ---- precision -----------------------------------------------------------------------------------


def in_16_bits(dtype, scale, layout, group):
    from mini_dist.strategies.precision import LossScaler, Precision
    from mini_dist.training.all_axes import parallelize

    precision = Precision(dtype, LossScaler(scale) if dtype == torch.float16 else None)
    config = ModelConfig(**DENSE)
    model = parallelize(config, layout, group, adamw, precision=precision)
    batches = batches_of(config, layout.global_batch_size, model.mesh.index("dp"), layout.dp)
    before = [tensor.detach().clone() for tensor in model.tensors_to_step()]
    done = model.step(*batches.batch(0), max_norm=MAX_NORM)
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.tensors_to_step()))
    return done.loss.item(), done.norm.item(), done.skipped, moved


@pytest.mark.parametrize("case", [dict(dp=2, zero=2), dict(pp=2, tp=2), dict(cp=2, zero=3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_come_close_to_32(case, dtype):
    layout = layout_of(**case)
    loss, norm = oracle(ModelConfig(**DENSE), layout.global_batch_size)[0]
    for result in launch(in_16_bits, layout.world_size, (dtype, 128.0, layout)).results:
        assert result[0] == pytest.approx(loss, rel=0.01)
        assert result[1] == pytest.approx(norm, rel=0.05)
        assert result[2:] == (False, True)


def test_an_overflow_anywhere_is_skipped_everywhere():
    layout = layout_of(pp=2, dp=2, tp=2)
    for _, norm, skipped, moved in launch(in_16_bits, 8, (torch.float16, 2.0**40, layout)).results:
        assert skipped and not moved and norm != pytest.approx(0)


# ---- impossible layouts --------------------------------------------------------------------------


def refused(config, layout, options, group):
    from mini_dist.training.all_axes import parallelize

    try:
        parallelize(config, layout, group, adamw, **options)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("config", "case", "sentence"),
    [
        ({}, dict(dp=4), r"multiply|dp=2 would fit"),
        ({}, dict(tp=2, num_micro_batches=1, sequence_parallel=True, cp=3), "does not divide"),
        ({}, dict(pp=2, zero=2, schedule="zb_h1"), "take zero=1, or schedule='1f1b'"),
        ({"tied_embedding": True}, dict(pp=2, zero=3), "take zero=1, or tied_embedding=False"),
        ({"dropout": 0.1}, dict(cp=2), "take dropout=0, or cp=1"),
        ({}, dict(dp=2, ep=2), "needs a model with experts"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(config, case, sentence):
    config, layout = ModelConfig(**{**DENSE, **config}), layout_of(**case)
    for said in launch(refused, 2, (config, layout, {})).results:
        assert re.search(sentence, said) and "\n" not in said


def test_a_batch_of_another_size_is_refused():
    def wrong_batch(group):
        from mini_dist.training.all_axes import parallelize

        model = parallelize(ModelConfig(**DENSE), layout_of(dp=2), group, adamw)
        tokens = torch.zeros(3, 32, dtype=torch.long)
        try:
            model.step(tokens, tokens)
        except ValueError as error:
            return str(error)

    for said in launch(wrong_batch, 2).results:
        assert "2 rows of seq_len=32 tokens make a step" in said


# ---- impossible tokens and targets ---------------------------------------------------------------

OUTSIDE = "lies outside the vocabulary, 0..255"
WRONG = {  # what is wrong -> the message on every rank
    "an input token too large": f"input token 256 {OUTSIDE}: vocab_size=257 or more would hold it",
    "an input token below 0": f"input token -1 {OUTSIDE}: give tokens from 0 up",
    "a target too large": f"target 300 {OUTSIDE}: vocab_size=301 or more would hold it",
    "a target below 0": f"target -2 {OUTSIDE}: -100 means it does not count",
    "no target": "no target of any rank counts: all are IGNORE_INDEX=-100",
}


def wrong_batch(what, config, rows):
    inputs = torch.zeros(rows, config.seq_len, dtype=torch.long)
    targets = inputs.clone()
    if what == "no target":
        return inputs, targets.fill_(-100)
    (inputs if "input" in what else targets)[0, 1] = int(re.search(r"-?\d+", WRONG[what])[0])
    return inputs, targets


def what_is_said(layouts, group):
    from mini_dist.training.all_axes import parallelize

    config, said = ModelConfig(**DENSE), {}
    for layout in layouts:
        model = parallelize(config, layout, group, adamw)
        for what in WRONG:
            try:
                said[layout, what] = str(model.step(*wrong_batch(what, config, 2)))
            except ValueError as error:
                said[layout, what] = str(error)
        x = torch.ones(2, config.seq_len, dtype=torch.long)
        said[layout, "a clean step"] = bool(model.step(x, x, MAX_NORM).loss.isfinite())
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_tokens_and_targets_that_cannot_be_are_refused_alike_by_all_ranks_of_any_layout(size):
    cases = [dict(tp=2), dict(tp=2, sequence_parallel=True), dict(pp=2), dict(cp=2), dict(dp=2)]
    layouts = [layout_of(**case) for case in (cases if size == 2 else [{}])]
    for said in launch(what_is_said, size, (layouts,)).results:
        for (layout, what), sentence in said.items():
            assert sentence == WRONG.get(what, True), layout
