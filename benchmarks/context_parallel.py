"""Compare our context parallelism with torch's ring attention, on the same blocks and kernel.

Theirs: the templates under torch.distributed.tensor.experimental's context_parallel, driven with
the CPU kernel (context_parallel() itself does not run on a CPU), with both of their ways to rotate
keys and values: "ring" (all-to-all to the next rank) and "all-gather". The case is one attention
layer on 4 ranks: zig-zag, causal, grouped query heads, float32, forward and backward. Every run
compares the outputs and gradients of both sides.

Rows "step": the slowest rank's time; both sides take turns in the same processes.
Rows "bytes": the bytes that all ranks send. In their ring, gradients of keys and values make cp
hops, all the way around. Ours skip the first hop, because a rank's share of its own gradients need
not travel. In their gathered form the gradients still make cp hops in addition to the gathered
keys; ours are one reduce-scatter.
Rows "memory": the peak of allocated bytes above the starting level, on the rank that needs most.
"""

import sys

import torch
from _form import Case, in_turn, main, of_all_ranks, peak_allocated, step_cases

from mini_dist import launch
from mini_dist.strategies.context_parallel import FORMS

RANKS = 4
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


def inputs(tokens, group):
    """Return q, k, v and the gradient of the output for this rank's tokens."""
    generator = torch.Generator().manual_seed(group.rank())
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, n, tokens, HEAD_DIM, generator=generator) for n in heads]


def our_step(form, tokens, group):
    *qkv, d_out = inputs(tokens, group)
    qkv = [x.requires_grad_() for x in qkv]

    def step():
        out = FORMS[form](*qkv, group, placement="zigzag")
        return out.detach(), *torch.autograd.grad(out, qkv, d_out)

    return step


def their_step(form, tokens, group):
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    rotate = {
        "ring": theirs._RotateMethod.ALL_TO_ALL,
        "all_gather": theirs._RotateMethod.ALL_GATHER,
    }
    theirs._cp_options.rotate_method = rotate[form]
    theirs._cp_options.enable_load_balance = True
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    q, k, v, d_out = inputs(tokens, group)

    def step():
        out, lse = theirs._templated_ring_attention(
            group, 2, forward, q, k, v, is_causal=True, dropout_p=0.0
        )
        gradients = theirs._templated_ring_attention_backward(
            *(group, 2, backward, d_out, "grad_out", q, k, v, out, lse, True), dropout_p=0.0
        )
        return out, *gradients

    return step


SIDES = {"ours": our_step, "theirs": their_step}


def both_on_a_rank(form, tokens, rounds, group):
    """Return the seconds of each round, ours and theirs in turn; check that results agree."""
    ours, theirs = (make_step(form, tokens, group) for make_step in SIDES.values())
    for our, their in zip(ours(), theirs()):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-4)
    return in_turn(ours, theirs, rounds, group)


def step_times(form, tokens, rounds):
    """Return the ms of each side."""
    return of_all_ranks(
        launch(both_on_a_rank, RANKS, (form, tokens, rounds), timeout=600, quiet=True).results
    )


def one_step(side, form, tokens, group):
    SIDES[side](form, tokens, group)()


def bytes_sent(side, form, tokens):
    return launch(one_step, RANKS, (side, form, tokens), quiet=True).ledger.total_bytes() / 2**20


def peak_on_a_rank(side, form, tokens, group):
    """Return the peak of bytes allocated in a second step, above the bytes held before it."""
    step = SIDES[side](form, tokens, group)
    step()
    return peak_allocated(step) / 2**20


def peak(side, form, tokens):
    return max(launch(peak_on_a_rank, RANKS, (side, form, tokens), timeout=300, quiet=True).results)


def cases(long):
    for form in ("ring", "all_gather"):
        for tokens in (256, 1024, 2048) if long else (256, 1024):
            where = f"{form}, S={RANKS * tokens}"
            times = step_times(form, tokens, rounds=25 if long else 15)
            yield from step_cases(f"step, {where}", times, 1.0)
            yield given(f"bytes, {where}", *(bytes_sent(s, form, tokens) for s in SIDES), "MiB")
            yield given(f"memory, {where}", *(peak(side, form, tokens) for side in SIDES), "MiB")


def given(name, ours, theirs, unit):
    """Return a row whose two figures were measured together."""
    return Case(name, lambda: ours, theirs, bar=1.0, unit=unit, repeats=1, warmup=0)


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))
