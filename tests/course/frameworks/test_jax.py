"""The stored JAX results are what JAX does: XLA's collectives and their exact bytes."""

import json

import pytest

pytest.importorskip("jax")

from mini_dist.collectives.sharding import product
from mini_dist.collectives.sharding.strategies import MESH, SIZES, STRATEGIES
from mini_dist.course.elsewhere import in_jax
from mini_dist.course.elsewhere.kept import path_of


def kept(fn):
    return json.loads(path_of(fn).read_text())["result"]


@pytest.fixture(scope="module")
def compiled():
    return in_jax.compiled()


def test_the_kept_expressions_are_what_xla_inserts(compiled):
    assert compiled == kept(in_jax.compiled)


def test_the_kept_runs_are_right_on_every_device():
    found = in_jax.executed()
    assert found == kept(in_jax.executed)
    assert all(right for right, _ in found.values())


def test_the_kept_blocks_are_what_xla_inserts():
    found = in_jax.blocks()
    assert found == kept(in_jax.blocks)
    B, D, dp = SIZES["B"], SIZES["D"], MESH["dp"]
    ((op, nbytes, ranks, _),) = found["MLP, column then row"]  # exactly one
    assert (op, nbytes, ranks) == ("all_reduce", B * D * 4 // dp, MESH["tp"])
    assert not any(op == "reduce_scatter" for rows in found.values() for op, *_ in rows)


@pytest.mark.parametrize("name, axes, expression", STRATEGIES)
def test_only_with_a_permutation_xla_sends_less_than_the_rules(name, axes, expression, compiled):
    least = product(expression, axes, **SIZES).sent
    permutes = any(op == "collective_permute" for op, *_ in compiled[name])
    assert sum(sent for *_, sent in compiled[name]) >= least or permutes


def test_a_psum_of_real_processes_sends_what_a_ring_does():
    found = in_jax.over_gloo()
    if not any(found["sent"]):
        pytest.skip("no kernel counts the bytes of a socket here")
    assert all(found["ring"] <= sent < 1.01 * found["ring"] for sent in found["sent"])
