"""Asynchronous training of any model: parameters on servers, or steps between two averages.

        if group.rank() < 2:                                       # two servers; the others work
        return serve_model(GPT(config), sgd, 2, bound, group)
    with Worker(GPT(config), 2, group) as model:
        for inputs, targets in batches:
            model.pull()
            loss(model(inputs), targets).backward()
            model.push()

    model = ZeRO3(gpt, inside, adamw, units=gpt.blocks)     # `inside`: the ranks of one cluster
    diloco = DiLoCo(model, across, every=50)                # `across`: one rank of each cluster
    for inputs, targets in batches:
        ...
        model.step()
        diloco.step()

The servers compute the same numbers as `serve` in ideas.py: all parameters are one flat vector,
dealt to the servers element by element. In DiLoCo, each rank averages its tensors with the ranks
that hold the same tensors in other clusters, so tensors that are sharded inside a cluster stay
sharded. It stores two more copies of them: the last average and the momentum. The result
is the one of `outer_step`, with one message per average and as few passes over memory as possible.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from mini_dist.collectives import all_reduce
from mini_dist.plan.fields import checks_kinds
from mini_dist.ranks.membership import RanksChanged, is_elastic, numbers, regroup

from ..trainable import Trainable
from .ideas import Applied, dealt, leave, pull_dealt, push_dealt, serve


def check_servers(num_servers: int, group) -> None:
    if not 1 <= num_servers < group.size():
        raise ValueError(
            f"num_servers={num_servers} of {group.size()} ranks: give 1 or more, and leave at "
            "least one rank to work"
        )


def flat(module: nn.Module) -> Tensor:
    """Return all trainable parameters as one vector [N]."""
    return torch.cat([p.detach().flatten() for p in trained(module)])


def trained(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def serve_model(
    module: nn.Module,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    num_servers: int,
    bound: int | None,
    group,
) -> list[Applied]:
    """Serve, on ranks 0 to num_servers - 1, a share of the module's parameters to the other ranks,
    and step them with the optimizer at every push, until all workers have left.

    The module's values are the initial ones, so they must be equal on all servers. bound: as in
    `serve`. In an elastic run the server continues when a worker dies, whose push may be lost;
    in the result, workers have their rank in the run. Raises ValueError if there is no worker,
    and ServerLost if a server dies.
    """
    check_servers(num_servers, group)
    share = nn.Parameter(dealt(flat(module), group.rank(), num_servers).clone())
    steps = optimizer([share])

    def update(values: Tensor, gradients: Tensor) -> Tensor:
        share.grad = gradients
        steps.step()
        return share.data

    if not is_elastic(group):
        return serve(share.data, update, group.size() - num_servers, bound, group)
    applied: list[Applied] = []
    while True:
        noting = Noting(group, applied)

        def noted_update(values: Tensor, gradients: Tensor, noting: Noting = noting) -> Tensor:
            noting.add_update()
            return update(values, gradients)

        try:
            serve(share.data, noted_update, group.size() - num_servers, bound, noting)
            return applied
        except RanksChanged as news:
            group = without_the_dead(news, num_servers, group)
            if group.size() == num_servers:
                return applied


class Noting:
    """A server's group in an elastic run: it keeps what the server has done if an error interrupts
    it."""

    def __init__(self, group, applied: list[Applied]):
        self.group, self.applied = group, applied
        self.numbers = numbers(group)
        self.pulled: dict[int, int] = {}  # how many updates had been made when a worker last pulled
        self.source = 0

    def __getattr__(self, name: str):
        return getattr(self.group, name)

    def send(self, tensors, to, tag):
        self.pulled[to] = len(self.applied)
        return self.group.send(tensors, to, tag)

    def recv(self, tensors, source, tag):
        self.source = source
        return self.group.recv(tensors, source, tag)

    def add_update(self) -> None:
        stale = len(self.applied) - self.pulled.get(self.source, 0)
        self.applied.append(Applied(self.numbers[self.source], stale))


class ServerLost(RuntimeError):
    """A server has died, and the parameters that it stored are lost."""


def without_the_dead(news: RanksChanged, num_servers: int, group):
    """Return the group of the survivors. Raises ServerLost if a server is not among them."""
    lost = [each for each in news.lost if each.rank < num_servers]
    if lost:
        raise ServerLost(
            f"a server is gone, and with it the parameters that it kept: {lost[0]}. Start again "
            "from a checkpoint"
        ) from None
    return regroup(group)


class Worker(Trainable):
    """A model whose parameters are on servers (`serve_model`): it computes gradients on a copy.

    At the end of its `with` block it leaves the servers, after an exception as well. If the
    exception is caught outside, this rank no longer works, and the others continue without it.
    Raises ValueError as `serve_model`.
    """

    def __init__(self, module: nn.Module, num_servers: int, group):
        super().__init__(module)
        check_servers(num_servers, group)
        self.num_servers, self.servers_and_workers = num_servers, group

    @torch.no_grad()
    def pull(self) -> None:
        """Copy the servers' parameters, and clear the gradients. Raises ServerLost if a server
        died."""
        parameters, before = trained(self.module), flat(self.module)
        values = self.until_done(
            lambda: pull_dealt(before, None, self.num_servers, self.servers_and_workers)
        )
        for parameter, part in zip(parameters, values.split([p.numel() for p in parameters])):
            parameter.copy_(part.view_as(parameter))
            parameter.grad = None

    @torch.no_grad()
    def push(self) -> None:
        """Push the gradients once. In an elastic run the push may be lost if a rank dies at that
        moment. Raises FloatingPointError if one is not finite, and ServerLost."""
        parts = [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in trained(self.module)
        ]
        try:
            push_dealt(torch.cat(parts), self.num_servers, self.servers_and_workers)
        except RanksChanged as news:
            self.go_on(news)

    def leave(self) -> None:
        self.until_done(
            lambda: [leave(k, self.servers_and_workers) for k in range(self.num_servers)]
        )

    def until_done(self, ask: Callable):
        """Ask the servers; if a rank dies meanwhile, the survivors ask again."""
        while True:
            try:
                return ask()
            except RanksChanged as news:
                self.go_on(news)

    def go_on(self, news: RanksChanged) -> None:
        group = self.servers_and_workers
        self.servers_and_workers = without_the_dead(news, self.num_servers, group)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None or not issubclass(kind, ServerLost):
            self.leave()


@checks_kinds
class DiLoCo:
    """Average the changes made in `every` steps (Douillard et al. 2023).

    lr and beta: of the outer step; lr=1 and beta=0 make it local SGD. start: average after each of
    this many first steps, as post-local SGD does (Lin et al. 2020). fragments: split the model into
    this many parts that take turns, each averaged once in `every` steps. delay: the average travels
    in the background for this many steps, in which nothing else may be sent in this group.
    keep: the share of this rank's own values that is mixed into the arriving average; by default
    0.5 with a delay, else 0 (delay and keep: Douillard et al. 2025, Streaming DiLoCo). reduce:
    (flat, group) -> mean, or an object whose `of_bucket(tensors)` makes such a function, as in the
    wrappers of data_parallel; it may overwrite its argument. Raises ValueError for options outside
    their range, and FloatingPointError, on all ranks, if the average is not finite.
    """

    def __init__(
        self,
        model: Trainable,
        group,
        every: int,
        lr: float = 0.7,
        beta: float = 0.9,
        *,
        start: int = 0,
        fragments: int = 1,
        delay: int = 0,
        keep: float | None = None,
        reduce: Callable[..., Tensor] | None = None,
    ):
        if every < 1:
            raise ValueError(f"every={every}: there is at least 1 step between two averages")
        if lr <= 0 or not 0 <= beta < 1:
            raise ValueError(f"lr={lr}, beta={beta}: give lr above 0, and beta from 0 to below 1")
        self.tensors = model.tensors_to_step()
        most = min(every, len(self.tensors))
        if not 1 <= fragments <= most:
            raise ValueError(
                f"fragments={fragments}: {len(self.tensors)} tensors and {every} steps between two "
                f"averages make 1 to {most} fragments"
            )
        if not 0 <= delay < every:
            raise ValueError(
                f"delay={delay}: an average is there before the next, 0 to {every - 1}"
            )
        if keep is None:
            keep = 0.5 if delay else 0.0
        if start < 0 or not 0 <= keep <= 1:
            raise ValueError(f"start={start}, keep={keep}: give start from 0, and keep from 0 to 1")
        self.model, self.group, self.every = model, group, every
        self.start, self.delay, self.steps = start, delay, 0
        parts = [self.tensors[place::fragments] for place in range(fragments)]
        make = getattr(reduce, "of_bucket", lambda tensors: reduce or mean)
        self.fragments = [Fragment(part, lr, beta, keep, make(part), group) for part in parts]
        self.sender = None
        if delay:
            self.sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="across")

    @torch.no_grad()
    def step(self) -> None:
        """Count one step; call it after each step of the optimizer."""
        self.steps += 1
        alone = self.steps - self.start  # steps since the ranks may differ
        for place, fragment in enumerate(self.fragments):
            turn = place * self.every // len(self.fragments)
            if alone <= 0:
                fragment.average()
            elif (alone - turn) % self.every == 0:
                fragment.leave(self.sender)
            if fragment.under_way and alone > 0 and (alone - turn) % self.every == self.delay:
                fragment.arrive()
        self.model.refresh_parameters()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for averages that are still in flight; call it once, after the last step."""
        for fragment in self.fragments:
            if fragment.under_way:
                fragment.arrive()
        self.model.refresh_parameters()


class Fragment:
    """Tensors that are averaged together: their flat values at the last average, and the
    momentum."""

    def __init__(self, tensors: list[Tensor], lr, beta, keep, reduce, group):
        self.tensors, self.group, self.reduce = tensors, group, reduce
        self.lr, self.beta, self.keep = lr, beta, keep
        self.before = self.now()
        self.momentum = torch.zeros_like(self.before) if beta else None
        self.under_way: Callable[[], Tensor] | None = None  # returns the mean change

    def now(self) -> Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in self.tensors])

    def put(self, values: Tensor) -> None:
        sizes = [tensor.numel() for tensor in self.tensors]
        for tensor, part in zip(self.tensors, values.split(sizes)):
            tensor.copy_(part.view_as(tensor))

    def changed(self) -> Tensor:
        now = self.now()
        return torch.sub(self.before, now, out=now)

    def average(self) -> None:
        self.before -= check_finite(self.reduce(self.changed(), self.group))
        self.put(self.before)

    def leave(self, sender: ThreadPoolExecutor | None) -> None:
        """Start to average the changes: in the background if there is a sender."""
        if sender:
            self.under_way = sender.submit(self.reduce, self.changed(), self.group).result
        else:
            change = self.reduce(self.changed(), self.group)
            self.under_way = lambda: change

    def arrive(self) -> None:
        """Take the outer step with the mean change."""
        step, self.under_way = check_finite(self.under_way()), None
        if self.momentum is not None:
            self.momentum.mul_(self.beta).add_(step)
            step.add_(self.momentum, alpha=self.beta)
        self.before.sub_(step, alpha=self.lr)
        self.put(self.before.lerp(self.now(), self.keep) if self.keep else self.before)


def mean(change: Tensor, group) -> Tensor:
    return all_reduce(change, group).div_(group.size())


def check_finite(change: Tensor) -> Tensor:
    if not change.sum().isfinite():
        raise FloatingPointError(
            "the mean change of the ranks is inf or nan, and would be in all that follows: look "
            "for the first rank whose loss was, or lower its learning rate"
        )
    return change
