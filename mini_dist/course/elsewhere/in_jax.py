"""JAX: what its compiler, XLA, inserts for the shardings of lesson 23, read from the compiled text.

XLA gets the program for one device and the shardings of its inputs and outputs (GSPMD, Xu et
al. 2021).  One CPU pretends to be eight devices, which needs a flag that is read when JAX starts,
so each function here starts its own Python.  The results are data: rows of (op, N, ranks per group,
bytes sent by all devices together).  N and the bytes of a collective are counted as in
sharding/moves.py: the output of an all-gather, the input of the others; rings.

    compiled()       XLA's collectives for each of the STRATEGIES (sharding/strategies.py)
    blocks()         for an MLP: column and row, data parallel and sharded gradients, a wrong hint
    executed()       whether each device's piece of the STRATEGIES' results is right; its memory
    over_gloo()      four real processes and one psum: the bytes on their sockets
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

from mini_dist.collectives.sharding.notation import Placed, parse
from mini_dist.collectives.sharding.strategies import MESH, SIZES, STRATEGIES

from .kept import kept

DEVICES = 8
RANKS = 4  # of over_gloo
NUMBERS = 1 << 20


@kept("jax")
def compiled() -> dict[str, list]:
    """Of each of STRATEGIES what XLA inserted: rows (op, N, ranks in a group, bytes by all)."""
    return in_a_python("compiled")


@kept("jax")
def executed() -> dict[str, list]:
    """Run each of STRATEGIES on the virtual devices with integers: return [whether every device has
    its piece of NumPy's result, bytes per device by memory_analysis()]."""
    return in_a_python("executed")


@kept("jax")
def blocks() -> dict[str, list]:
    """Of whole programs: an MLP's forward, and the gradients of its weights."""
    return in_a_python("blocks")


@kept("jax")
def over_gloo() -> dict[str, list | int]:
    """A psum of NUMBERS float32 by RANKS real processes: what the kernel counted on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start_python("rank", str(rank), str(port)) for rank in range(RANKS)]
    sent = [answer(process) for process in started]
    return {"sent": sent, "ring": 2 * (RANKS - 1) * 4 * NUMBERS // RANKS}


# ---- a Python of its own -------------------------------------------------------------------------


def in_a_python(*arguments: str):
    return answer(start_python(*arguments))


def start_python(*arguments: str) -> subprocess.Popen:
    devices = 1 if arguments[0] == "rank" else DEVICES
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def answer(process: subprocess.Popen):
    """What it printed last, as data. Raises RuntimeError with what it complained of."""
    out, complaint = process.communicate(timeout=300)
    if process.returncode:
        raise RuntimeError(f"JAX ended with {process.returncode}: {complaint[-2000:]}")
    return json.loads(out.splitlines()[-1])


# ---- reading the compiled text -------------------------------------------------------------------

COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8}


def collectives_in(text: str) -> list[list]:
    """[op, N, ranks in a group, bytes sent by all] of each collective in compiled text."""
    rows = []
    for line in text.splitlines():
        found = re.search(rf"= (.*?) ({COLLECTIVES})(-start)?\(", line)
        if found:
            op, nbytes = found[2].replace("-", "_"), bytes_in(found[1])
            if op == "collective_permute":
                pairs = re.findall(r"\{(\d+),(\d+)\}", line.partition("source_target_pairs=")[2])
                rows.append([op, nbytes, 2, nbytes * sum(a != b for a, b in pairs)])
                continue
            n = group_size(line)
            nbytes *= n if op == "reduce_scatter" else 1
            passes = 2 if op == "all_reduce" else 1
            rows.append([op, nbytes, n, passes * (n - 1) * nbytes * DEVICES // n])
    return rows


def bytes_in(shapes: str) -> int:
    """Of `f32[16,256]{1,0}`, or of all in `(f32[4], f32[4])`."""
    total = 0
    for dtype, numbers in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        count = 1
        for number in filter(None, numbers.split(",")):
            count *= int(number)
        total += count * BYTES[dtype]
    return total


def group_size(line: str) -> int:
    """From `replica_groups={{0,1},{2,3}}`, `[4,2]<=[8]` or `mesh['a'=2,'b'=4] {'a'}`.

    Raises ValueError for a form that is none of these.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*? \{('.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", found[1])}
        size = 1
        for name in re.findall(r"'\w+'", found[2]):
            size *= sizes[name]
        return size
    raise ValueError(f"no groups of ranks are known from {line.strip()!r}")


def spec_of(placed: Placed) -> list:
    """The arguments of a PartitionSpec: for each dim None, or its axes."""
    return [axes or None for _, axes in placed.cuts]


# ---- inside of that Python -----------------------------------------------------------------------


def jax_mesh(axes: dict[str, int]):
    import jax
    import numpy as np

    devices = np.array(jax.devices()).reshape(*axes.values())
    return jax.sharding.Mesh(devices, tuple(axes))


def _compiled() -> dict[str, list]:
    return {name: collectives_in(program.as_text()) for name, program, *_ in programs()}


def _executed() -> dict[str, list]:
    import jax
    import numpy as np

    found, dice = {}, np.random.default_rng(0)
    for name, program, letters, args in programs():
        wholes = [dice.integers(-8, 9, arg.shape).astype(np.float32) for arg in args]
        y = program(*(jax.device_put(x, arg.sharding) for x, arg in zip(wholes, args)))
        wanted = np.einsum(letters, *wholes)
        right = [np.array_equal(part.data, wanted[part.index]) for part in y.addressable_shards]
        said = program.memory_analysis()
        parts = said.argument_size_in_bytes, said.output_size_in_bytes, said.temp_size_in_bytes
        found[name] = [all(right), sum(parts)]
    return found


def programs():
    """(name, compiled program, letters of its einsum, what goes in) of each of STRATEGIES."""
    import jax
    from jax.numpy import einsum, float32
    from jax.sharding import NamedSharding, PartitionSpec

    for name, axes, text in STRATEGIES:
        inputs, result = parse(text, axes)
        mesh = jax_mesh(axes)
        shard = {p: NamedSharding(mesh, PartitionSpec(*spec_of(p))) for p in (*inputs, result)}
        letters = ",".join("".join(each.dims) for each in inputs) + "->" + "".join(result.dims)
        args = [
            jax.ShapeDtypeStruct([SIZES[d] for d in each.dims], float32, sharding=shard[each])
            for each in inputs
        ]
        program = jax.jit(lambda *xs, how=letters: einsum(how, *xs), out_shardings=shard[result])
        yield name, program.lower(*args).compile(), letters, args


def _blocks() -> dict[str, list]:
    import jax
    from jax.numpy import float32
    from jax.sharding import NamedSharding, PartitionSpec

    mesh, (B, D, F) = jax_mesh(MESH), (SIZES[d] for d in "BDF")

    def placed(shape, *spec):
        where = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, float32, sharding=where)

    def mlp(x, v, w):
        return jax.nn.gelu(x @ v) @ w

    def gradients(weights, x, y):
        return jax.grad(lambda ws: ((mlp(x, *ws) - y) ** 2).mean())(weights)

    def read(function, *args, **more):
        return collectives_in(jax.jit(function, **more).lower(*args).compile().as_text())

    every = ("dp", "tp")
    x = placed((B, D), "dp", None)
    weights = placed((D, F)), placed((F, D))
    cut = placed((D, F), every, None), placed((F, D), every, None)
    x8 = placed((B, D), every, None)
    return {
        "MLP, column then row": read(
            mlp, x, placed((D, F), None, "tp"), placed((F, D), "tp", None)
        ),
        "MLP, both by columns": read(
            mlp, x, placed((D, F), None, "tp"), placed((F, D), None, "tp")
        ),
        "gradients, weights whole": read(gradients, weights, x8, x8),
        "gradients, weights cut by 8": read(
            gradients, cut, x8, x8, out_shardings=tuple(each.sharding for each in cut)
        ),
    }


def _rank(rank: str, port: str) -> int:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", RANKS, int(rank))
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from mini_dist.ranks.ledger.wire import wire_bytes

    mesh = jax_mesh({"r": RANKS})
    cut = NamedSharding(mesh, PartitionSpec("r"))
    x = jax.make_array_from_process_local_data(cut, np.ones(NUMBERS, np.float32))
    psum = jax.jit(
        jax.shard_map(
            lambda v: jax.lax.psum(v, "r"),
            mesh=mesh,
            in_specs=PartitionSpec("r"),
            out_specs=PartitionSpec(),
        )
    )
    jax.block_until_ready(psum(x))  # connections and compiling are not counted
    before = wire_bytes()
    jax.block_until_ready(psum(x))
    return wire_bytes()[0] - before[0] if before else 0


if __name__ == "__main__":
    print(json.dumps(globals()[f"_{sys.argv[1]}"](*sys.argv[2:])))
