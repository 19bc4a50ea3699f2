"""Exercises of lesson 08: a step with FSDP2, and a ring that computes the sums of PyTorch's DDP.

(torch.distributed.fsdp takes a second to import, so only the function that shards imports it.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from mini_dist import collectives
from mini_dist.collectives.backend import own_backend
from mini_dist.model.gpt import GPT
from mini_dist.model.loss import token_loss
from mini_dist.plan.config import ModelConfig
from mini_dist.strategies import data_parallel

from .answers import my_all_reduce
from .engine import NO_BARRIER, Exercise, Line, Measured, line, on_ranks, too_few_bytes
from .watch import functions_of

LR = 0.5
CALLS = ("all_gather", "reduce_scatter")


def shard_and_step(gpt, micro_batches, group):
    """One step of SGD, lr=0.5, with FSDP2: returns this rank's mean loss; a rank keeps its shards.

    gpt: whole, alike on all ranks. micro_batches: this rank's, [(inputs [B, S], targets [B, S])].
    The units are the blocks, and the root for the rest; all of them are freed after forward.
    Gradients are the mean over all micro-batches of all ranks, scattered with the last of them.
    """
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for module in (*gpt.blocks, gpt):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
    total, k = 0.0, len(micro_batches)
    for number, (inputs, targets) in enumerate(micro_batches):
        gpt.set_requires_gradient_sync(number == k - 1)
        loss = token_loss(gpt(inputs), targets).mean() / k
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


# ---- a step with FSDP2 --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    micro_batches: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.micro_batches} micro-batches, {self.blocks} blocks"

    def gpt(self) -> GPT:
        shape = dict(d_model=12, num_heads=2, seq_len=6, vocab_size=10)
        return GPT(ModelConfig(num_layers=self.blocks, **shape))

    def batches(self, rank: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(0, 10, (self.micro_batches, 2, 7), generator=generator)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]


@dataclass(eq=False)
class Stepped:
    """What a rank has afterwards, by the parameters' names."""

    loss: float | None
    parts: dict[str, Tensor]
    sharded: dict[str, bool]
    forwards: int
    was_sharded: bool  # by fully_shard, though parameters may be whole again


def step_trial(fn, case: Step, group):
    gpt, forwards = case.gpt(), []
    gpt.register_forward_pre_hook(lambda *_: forwards.append(1))
    loss = fn(gpt, case.batches(group.rank()), group)
    is_number = isinstance(loss, (int, float)) or isinstance(loss, Tensor) and loss.numel() == 1
    named = {name.removeprefix("module."): p for name, p in gpt.named_parameters()}
    return Stepped(
        float(loss) if is_number else None,
        {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in named.items()},
        {name: hasattr(p, "_local_tensor") for name, p in named.items()},
        len(forwards),
        hasattr(gpt, "set_reshard_after_backward"),
    )


def part(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of a parameter that FSDP2 leaves on a rank."""
    parts = whole.chunk(size)
    return parts[rank] if rank < len(parts) else whole[:0]


class ShardedStep(Measured):
    def measure(self):
        k, case, gpt = self.case.micro_batches, self.case, self.case.gpt()
        self.before = {name: p.detach().clone() for name, p in gpt.named_parameters()}
        batches = [case.batches(rank) for rank in range(self.size)]
        each = [[token_loss(gpt(x), y).mean() for x, y in of_rank] for of_rank in batches]
        self.losses = [sum(of_rank).item() / k for of_rank in each]
        (sum(map(sum, each)) / (k * self.size)).backward()
        self.gradients = {name: p.grad for name, p in gpt.named_parameters()}
        calls = (self.run.ledger.calls(rank=rank) for rank in range(self.size))
        asked = [Counter(call.op for call in each) for each in calls]
        self.asked = next((each for each in asked if each != asked[0]), asked[0])
        self.units = case.blocks + 1
        alone = self.size == 1  # so there is nothing to gather
        self.gathers, self.scatters = (0, 0) if alone else (2 * k * self.units, self.units)
        rows = [(-(-len(p) // self.size) * self.size, p[0].numel()) for p in self.before.values()]
        self.whole = 4 * sum(n * width for n, width in rows)  # with FSDP2's padding
        self.wanted = (self.size - 1) * self.whole * (2 * k + 1)
        self.held = sum(part(p, 0, self.size).numel() for p in self.before.values())

    def lines(self) -> list[Line]:
        held = sum(each.numel() for each in self.results[0].parts.values())
        others = sorted({*self.asked} - {*CALLS})
        near = (
            rank.loss is not None and abs(rank.loss - loss) < 1e-5
            for rank, loss in zip(self.results, self.losses)
        )
        return [
            on_ranks("one process's parameters on", self.stepped(1)),
            on_ranks("right mean losses on", near),
            line("parameters that rank 0 holds", held, self.held),
            line("gathers by a rank", self.asked["all_gather"], self.gathers),
            line("scatters by a rank", self.asked["reduce_scatter"], self.scatters),
            *[line("other calls", ", ".join(others), "none")] * bool(others),
            line("bytes sent by all ranks", self.sent, self.wanted),
        ]

    def stepped(self, factor: float, near: float = 1e-5) -> list[bool]:
        """Return for each rank whether its step used this many times the gradient."""
        oks = []
        for number, rank in enumerate(self.results):
            ok = rank.parts.keys() == self.before.keys()
            for name in self.before if ok else ():
                whole = self.before[name] - LR * factor * self.gradients[name]
                wanted = part(whole, number, self.size) if rank.sharded[name] else whole
                found = rank.parts[name]
                ok &= found.shape == wanted.shape and torch.allclose(found, wanted, atol=near)
            oks.append(bool(ok))
        return oks

    def mistake(self) -> str:
        k = self.case.micro_batches
        forwards = max((rank.forwards for rank in self.results), key=lambda n: abs(n - k))
        if forwards != k:
            return (
                f"{forwards} forwards were made of {k} micro-batches: one forward and one backward "
                "of each, so that the activations of one are there at a time."
            )
        return (
            self.mistake_in_units()
            or self.mistake_in_other_calls()
            or self.mistake_in_parameters()
            or self.mistake_in_losses()
            or self.mistake_in_calls()
            or (self.sent < self.wanted and too_few_bytes(self.sent, self.wanted))
            or f"Right, but {self.sent:,} bytes were sent where {self.wanted:,} do."
        )

    def mistake_in_units(self) -> str:
        sharded = self.results[0].sharded
        if self.results[0].was_sharded and not all(sharded.values()):
            return (
                "Some parameters are whole at the end. What is gathered for backward is to be "
                "freed after it: set_reshard_after_backward(True), which is so from the start."
            )
        if not any(sharded.values()):
            return (
                "The parameters are whole on every rank: fully_shard(module, mesh=mesh) cuts those "
                "of a module."
            )
        whole = [name for name, is_cut in sharded.items() if not is_cut]
        if whole:
            return (
                f"{whole[0]} is whole on every rank, and {len(whole)} of {len(sharded)} are. After "
                "the blocks shard gpt itself: the root takes what is in no other unit."
            )
        return ""

    def mistake_in_other_calls(self) -> str:
        others = {*self.asked} - {*CALLS}
        if not others or self.size == 1:
            return ""
        return (
            f"There was a call of {' and '.join(sorted(others))}: FSDP2 gathers and scatters by "
            "itself, and nothing else is to be sent."
        )

    def mistake_in_parameters(self) -> str:
        k = self.case.micro_batches
        if all(self.stepped(1)):
            return ""
        if all(self.stepped(0)) and self.size > 1 and not self.asked["reduce_scatter"]:
            return (
                "No parameter has moved, and no gradient was scattered: with the last micro-batch "
                "it has to be gpt.set_requires_gradient_sync(True)."
            )
        if all(self.stepped(0)):
            return (
                "No parameter has moved. fully_shard replaces the parameters, so an optimizer that "
                "was made before holds the old ones: make it afterwards, and step it."
            )
        for factor, words in ((k, "micro-batches"), (self.size, "ranks")):
            if factor > 1 and all(self.stepped(factor)):
                return (
                    f"That is a step with {factor} times the gradient: the mean is over {words}, "
                    "too. FSDP2 averages over ranks; divide each loss by the number of "
                    "micro-batches."
                )
            if factor > 1 and all(self.stepped(1 / factor)):
                return (
                    f"That is a step with the gradient over {factor}: the mean over {words} was "
                    "taken twice."
                )
        if self.sent < self.wanted and all(self.stepped(1, 0.02)):
            return too_few_bytes(self.sent, self.wanted)
        if self.size > 1 and self.asked["reduce_scatter"] == k * self.scatters > self.scatters:
            return (
                "Wrong parameters, and gradients were scattered after each micro-batch: add up "
                "all ranks' losses, and make one step at the end."
            )
        return (
            "Wrong parameters: one step, SGD with lr=0.5, on the mean loss of all micro-batches of "
            "all ranks."
        )

    def mistake_in_losses(self) -> str:
        k = self.case.micro_batches
        found = [rank.loss for rank in self.results]
        if None in found:
            return "Return the mean of this rank's losses, a number: on some rank there is none."

        def are(wanted: list[float]) -> bool:
            return all(abs(a - b) < 1e-5 for a, b in zip(found, wanted))

        if are(self.losses):
            return ""
        if are([k * loss for loss in self.losses]):
            return "The loss that you return is the sum over micro-batches: return the mean."
        if are([sum(self.losses) / self.size] * self.size):
            return "That is the mean loss of all ranks: return this rank's own, without a message."
        return "Return the mean loss of all of this rank's micro-batches."

    def mistake_in_calls(self) -> str:
        k, gathers, scatters = self.case.micro_batches, *(self.asked[op] for op in CALLS)
        if scatters == k * self.scatters > self.scatters:
            return (
                f"Right, but gradients are scattered after each of the {k} micro-batches. "
                "set_requires_gradient_sync(False) leaves them where they are, until the last."
            )
        if scatters != self.scatters:
            return (
                f"{scatters} scatters are not one for each of {self.units} units: every block is "
                "one, by itself, and the root is one."
            )
        if gathers == k * (2 * self.units - 1):
            return (
                "Right, but the root stays whole from forward to backward, as it does where "
                "nobody says otherwise: reshard_after_forward=True, for the root as well."
            )
        if gathers < self.gathers:
            return (
                f"{gathers} gathers where {self.gathers} are to be: some unit was not freed after "
                "forward, or not after backward. reshard_after_forward=True for each of them."
            )
        if gathers != self.gathers:
            return f"{gathers} gathers: each of {self.units} units twice a micro-batch is enough."
        return ""


# ---- a ring under DDP ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Net:
    width: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"DDP around two linears of width {self.width}, {self.dtype}".replace("torch.", "")

    def build(self) -> list[nn.Module]:
        """Return two nets. The second is a little wider, so that its buckets have new lengths."""
        return [self.net(width) for width in (self.width, self.width + 1)]

    def net(self, width: int) -> nn.Module:
        net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(torch.linspace(-1, 1 + i, p.numel()).view_as(p))
        return net.to(self.dtype)

    def batches(self, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return list(torch.randn(STEPS, 4, 3, generator=generator).to(self.dtype))


STEPS = 2  # in the first one DDP sends everything in one bucket


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def ddp_trial(fn, case: Net, group):
    def asked(x, group):
        try:
            total = fn(x, group)
        except RecursionError:
            raise ValueError(
                "an all-reduce of this group is your function: build it from exchange(...)"
            ) from None
        if isinstance(total, Tensor) and total.dtype is not x.dtype:
            raise ValueError(f"a bucket of {x.dtype} came back in {total.dtype}: keep its dtype")
        return total

    ring = own_backend(group, all_reduce=asked)
    found = []
    for net in case.build():  # a bucket per parameter; some have fewer elements than ranks
        ddp = DistributedDataParallel(net, process_group=ring, bucket_cap_mb=1e-6)
        found += [gradients(ddp, x) for x in case.batches(group.rank())]
    return found


class UnderDDP(Measured):
    def measure(self):
        nets, ranks = self.case.build(), [self.case.batches(rank) for rank in range(self.size)]
        everyones = [[gradients(net, x) for net in nets for x in of_rank] for of_rank in ranks]
        self.means = [
            [sum(each) / self.size for each in zip(*of_step)] for of_step in zip(*everyones)
        ]
        self.of_barriers = len([*self.run.ledger.leaves(op="barrier")])
        leaves = [c for c in self.run.ledger.leaves() if c.op == "send"]
        self.carried = sum(c.sent for c in leaves)
        nbytes = sum(p.nbytes for net in nets for p in net.parameters())
        self.wanted = STEPS * 2 * (self.size - 1) * nbytes
        self.peers = max(
            len({p for c in leaves if c.rank == r for p in c.peers}) for r in range(self.size)
        )

    def are(self, factor: float = 1) -> list[bool]:
        """Return for each rank whether all gradients are this many times the mean."""
        return [
            all(
                torch.allclose(a, factor * b, atol=1e-5)
                for of in zip(found, self.means)
                for a, b in zip(*of)
            )
            for found in self.results
        ]

    def lines(self) -> list[Line]:
        return [
            on_ranks("mean gradients on", self.are()),
            *[line("messages of barriers", self.of_barriers, 0)] * bool(self.of_barriers),
            line("ranks that a rank sends to", self.peers, min(1, self.size - 1)),
            line("bytes in your messages, all ranks", self.carried, self.wanted),
        ]

    def mistake(self) -> str:
        if self.size > 1 and all(self.are(1 / self.size)):
            return (
                "Every gradient is divided by the number of ranks twice: return the sum, DDP "
                "divides by itself."
            )
        if not all(self.are()):
            return (
                "DDP's gradients are wrong. It asks for sums of flat buckets of any length: of "
                "5 numbers on 4 ranks one has 2. Parts as tensor_split makes them, and "
                "exchange(..., like=a part as long as what arrives)."
            )
        if self.of_barriers:
            return NO_BARRIER
        if not self.carried and self.size > 1:
            return "Right, but nothing went through your exchange: who has carried the gradients?"
        if self.carried < self.wanted:
            return too_few_bytes(self.carried, self.wanted)
        if self.carried > self.wanted:
            return (
                f"Right, but {self.carried:,} bytes were sent where {self.wanted:,} do: in a ring "
                "parts go round, twice n-1 of them, not whole buckets, and nothing is padded."
            )
        return (
            f"Right, but a rank sends to {self.peers} others: in a ring it knows the next one only."
        )


# A ring may use these functions; a barrier has a hint of its own.
MESSAGES = functions_of(collectives.messages) | {unwrap(collectives.barrier)}

EXERCISES = [
    Exercise(
        "shard_and_step",
        shard_and_step,
        step_trial,
        [(4, Step(3, 2)), (2, Step(1, 1)), (3, Step(2, 1)), (1, Step(2, 1))],
        ShardedStep,
        hints=[
            "The order: a mesh of the group, fully_shard each block, fully_shard gpt, the "
            "optimizer. Then forward and backward of each micro-batch, and one step.",
            "DeviceMesh.from_group(group, 'cpu'); fully_shard(module, mesh=mesh, "
            "reshard_after_forward=True); before each forward "
            "gpt.set_requires_gradient_sync(is this the last?); each loss over their number.",
        ],
        skeleton="""\
def shard_and_step(gpt, micro_batches, group):
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in ...:                               # blocks first
        fully_shard(module, mesh=mesh, reshard_after_forward=...)
    optimizer = ...
    total, k = 0.0, len(micro_batches)
    for number, (inputs, targets) in enumerate(micro_batches):
        gpt.set_requires_gradient_sync(...)
        loss = token_loss(gpt(inputs), targets).mean() / k
        ...
    optimizer.step()
    return total""",
        changes=["gpt"],
        again=False,
        scales=False,
    ),
    Exercise(
        "my_all_reduce",
        collectives.ring_all_reduce,
        ddp_trial,
        [(4, Net(5)), (2, Net(4)), (3, Net(7, torch.float64)), (1, Net(2))],
        UnderDDP,
        hints=[
            "Lesson 03: n-1 rounds in which a part is passed on and grows, n-1 in which it is "
            "passed on and kept. What you wrote there will do, in one function or in three.",
            "DDP's buckets are flat, of any length: parts = list(x.tensor_split(size)), the last "
            "ones may be shorter. exchange(part, right, left, group, like=parts[which arrives]).",
        ],
        skeleton="""\
def my_all_reduce(x, group):
    rank, size = group.rank(), group.size()
    right, left = ..., ...
    parts = list(x.tensor_split(size))
    for k in range(size - 1):                        # add up
        to_send, to_add = (rank - k) % size, ...
        parts[to_add] = parts[to_add] + exchange(
            parts[to_send], right, left, group, like=parts[to_add]
        )
    for k in range(size - 1):                        # and hand round
        ...
    return torch.cat(parts)""",
        refuses=functions_of(collectives, data_parallel) - MESSAGES,
        answer=(my_all_reduce,),
    ),
]
