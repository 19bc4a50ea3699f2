"""The pipeline's page and its engine agree in losses, gradients, bytes and message order."""

import pytest
import torch

from mini_dist import launch
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import ModelConfig
from mini_dist.plan.schedule import add_communication, gpipe, naive, one_f_one_b
from mini_dist.strategies.pipeline import Pipeline, cut_gpt, gpipe_step, run_list

CONFIG = ModelConfig(vocab_size=40, seq_len=8, d_model=16, num_layers=4, num_heads=2)
ROWS, M = 2, 6
SHAPE = (ROWS, CONFIG.seq_len, CONFIG.d_model)


def loss_fn(logits, targets):
    return token_loss(logits, targets).mean()


def batch():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (M * ROWS, 9), generator=generator)
    return tokens[:, :-1].chunk(M), tokens[:, 1:].chunk(M)


def page_gpipe(schedule, stage, group):
    return gpipe_step(stage, *batch(), loss_fn, SHAPE, group)


def page_list(schedule, stage, group):
    actions = add_communication(schedule).ranks[group.rank()]
    return run_list(actions, stage, *batch(), loss_fn, SHAPE, group)


def engine(schedule, stage, group):
    activation = torch.empty(SHAPE, device="meta")
    return Pipeline(schedule, stage, group, loss_fn=loss_fn, activation=activation).step(*batch())


def engine_without_early_receives(schedule, stage, group):
    return engine(add_communication(schedule), stage, group)


def step(by, schedule, group):
    """Take two steps that accumulate gradients; return loss, gradients by name, and messages."""
    (stage,) = cut_gpt(CONFIG, [group.rank()], group.size(), seed=3).values()
    already = len(group.recorder.comms)
    by(schedule, stage, group)
    loss = by(schedule, stage, group)
    rows = [row[:5] for row in group.recorder.comms[already:]]
    messages = [(op, peer, nbytes) for op, _, _, nbytes, peer in rows if op in ("send", "recv")]
    return loss, {name: p.grad for name, p in stage.named_parameters()}, messages


def all_ways(group):
    """Return {(page, schedule): [results of the page, of the engine with each receive right before
    its use as in the page, and of the engine as it is]}."""
    found = {}
    for page, build in [(page_gpipe, gpipe)] + [
        (page_list, b) for b in (naive, gpipe, one_f_one_b)
    ]:
        ways = (page, engine_without_early_receives, engine)
        schedule = build(group.size(), M)
        found[page.__name__, build.__name__] = [step(by, schedule, group) for by in ways]
    return found


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_page_and_engine_do_the_same(p):
    for rank, found in enumerate(launch(all_ways, p).results):
        for page, same_list, as_it_is in found.values():
            assert_equal_values(page, same_list)
            assert_equal_values(page, as_it_is)
            # Losses are compared without order: the engine sends them early, the page last.
            assert sorted(page[2]) == sorted(same_list[2]) == sorted(as_it_is[2])
            assert between_stages(page) == between_stages(same_list)
            for op in ("send", "recv"):  # receives start earlier, in equal order
                assert of_kind(op, page) == of_kind(op, as_it_is)
            borders = (rank > 0) + (rank < p - 1)
            assert len(between_stages(page)) == 2 * 2 * M * borders  # two steps, both ways


def assert_equal_values(one, other):
    (loss, gradients, _), (other_loss, others, _) = one, other
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


def between_stages(way):
    return [message for message in way[2] if message[2] != M * 4]  # not the six losses of 4 bytes


def of_kind(op, way):
    return [message for message in between_stages(way) if message[0] == op]


class Turned(torch.autograd.Function):
    """Make outputs and their gradients strided tensors without changing their values."""

    @staticmethod
    def forward(ctx, x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    @staticmethod
    def backward(ctx, dy):
        return dy.transpose(0, 1).contiguous().transpose(0, 1)


def of_strided(group):
    """Return losses with plain stages and with ones whose outputs and gradients are strided."""
    (stage,) = cut_gpt(CONFIG, [group.rank()], group.size(), seed=3).values()
    rank, last = group.rank(), group.size() - 1

    def turned(x):
        y = stage(x if rank == 0 else Turned.apply(x))
        return y if rank == last else Turned.apply(y)

    return [page_list(one_f_one_b(group.size(), M), each, group) for each in (stage, turned)]


def test_what_a_stage_sends_need_not_be_contiguous():
    for plain, turned in launch(of_strided, 3).results:
        assert torch.equal(plain, turned)
