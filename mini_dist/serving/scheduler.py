"""Which sequences run next, and which are preempted: a policy, and the actions that follow.

    memory = Memory(num_blocks=64, block_size=16)
    steps = plan(requests, Scheduler(memory, Policy(max_batch=8)))

Static batching waits until all sequences have ended before it admits others. Continuous batching
decides anew before every step (Yu et al. 2022, Orca, section 3.1). A long prompt is cut into chunks
that run together with the others' next tokens, so that nobody waits for it (Agrawal et al. 2024,
Sarathi-Serve, section 4). If blocks run out, the sequence that came last is preempted and comes
back later (Kwon et al. 2023, section 4.5).

A scheduler knows lengths, not texts: it never asks the model anything. It learns the end of a text
only when it is reached, so it cannot know how many blocks a request will need.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mini_dist.plan.fields import checks_kinds, whole

from .actions import Request, ServerAction, ServerStep, ServingError
from .memory import Memory

PREEMPTIONS = ("recompute", "swap")


@checks_kinds(error=ServingError)
@dataclass(frozen=True)
class Policy:
    """How a server decides. The defaults are the usual choices: continuous batching, paged blocks.

    max_batch: sequences that run at once. max_tokens: per step; longer prompts are cut into chunks
    (None: never). static: admit none before all have ended. reserve: tokens for which a
    request gets blocks at the start, as if memory had to be contiguous (0: none in advance).
    preempt: "recompute" or "swap". share: reuse blocks with the same beginning of a text.
    """

    max_batch: int = 16
    max_tokens: int | None = None
    static: bool = False
    reserve: int = 0
    preempt: str = "recompute"
    share: bool = True

    def __post_init__(self):
        whole("max_batch", self.max_batch, error=ServingError)
        whole("reserve", self.reserve, 0, error=ServingError)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, error=ServingError)
        if self.preempt not in PREEMPTIONS:
            known = " or ".join(map(repr, PREEMPTIONS))
            raise ServingError(f"preempt={self.preempt!r} is not known: give {known}.")


class Growing:
    """A sequence: its request, its number of known tokens (prompt and chosen ones), and the
    hashes of the prompt's full blocks."""

    def __init__(self, name: str, request: Request, hashes: Sequence[bytes]):
        self.name, self.request, self.known = name, request, len(request.prompt)
        self.hashes = hashes

    @property
    def has_ended(self) -> bool:
        return self.known == len(self.request.prompt) + self.request.max_new_tokens


class Prefixes:
    """Which block holds the keys and values of which beginning of a text, by its hash.

    A block's hash covers its tokens and the previous hash, so it represents everything that the
    tokens have seen. An unused block keeps its content until it is taken.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Return one hash for each full block."""
        found, before = [], b""
        for i in range(0, len(tokens) - self.block_size + 1, self.block_size):
            part = repr(tokens[i : i + self.block_size]).encode()
            before = hashlib.sha256(before + part).digest()
            found.append(before)
        return found

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the beginning of a text with these hashes, as far as they
        exist."""
        blocks = []
        for each in hashes:
            if each not in self.block_of:
                break
            blocks.append(self.block_of[each])
        return blocks

    def remember(self, hashes: Sequence[bytes], table: Sequence[int]) -> None:
        """Note that the first blocks of a table hold the beginning with these hashes."""
        for each, block in zip(hashes, table):
            if each not in self.block_of and block not in self.hash_of:
                self.block_of[each], self.hash_of[block] = block, each

    def forget(self, block: int) -> None:
        """Forget a block, because something else will be written into it."""
        self.block_of.pop(self.hash_of.pop(block, None), None)


class Scheduler:
    """Decide step by step; `memory` is its own record, which nobody else may change."""

    def __init__(self, memory: Memory, policy: Policy | None = None):
        self.memory, self.policy = memory, policy or Policy()
        self.waiting: list[Growing] = []  # in order of arrival
        self.running: list[Growing] = []  # in order of admission
        self.ended: list[Growing] = []  # still have their blocks
        self.prefixes = Prefixes(memory.block_size)
        # Of the current step:
        self.actions: list[ServerAction] = []
        self.budget: float = 0  # tokens that it can still take
        self.came_short = False  # a sequence had to be preempted

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.running or self.ended)

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ServingError if it could not run even alone."""
        self.refuse_what_never_fits(request)
        hashes = self.prefixes.hashes(request.prompt)
        self.waiting.append(Growing(request.sequences[0], request, hashes))

    def refuse_what_never_fits(self, request: Request) -> None:
        memory, policy = self.memory, self.policy
        positions = max(request.positions, policy.reserve)
        if memory.blocks_for(positions) > memory.num_blocks:
            raise ServingError(
                f"request {request.name!r} can grow to {positions} tokens, which need "
                f"{memory.blocks_for(positions)} blocks of {memory.block_size}, and there are "
                f"{memory.num_blocks}: it would never fit."
            )
        if request.samples > policy.max_batch:
            raise ServingError(
                f"request {request.name!r} has samples={request.samples}, and max_batch="
                f"{policy.max_batch} run at once: it would never fit."
            )
        if request.samples > 1 and policy.reserve:
            raise ServingError(
                f"request {request.name!r} has samples={request.samples}, which share blocks: "
                "give a policy with reserve=0."
            )

    def end(self, name: str) -> None:
        """End a sequence early: its text reached `stop`."""
        self.ended += [each for each in self.running if each.name == name]
        self.running = [each for each in self.running if each.name != name]

    def cancel(self, name: str) -> None:
        """Cancel a request that nobody wants any more: remove it, wherever it is."""
        gone = [each for each in self.running + self.waiting if each.request.name == name]
        self.waiting = [each for each in self.waiting if each not in gone]
        self.running = [each for each in self.running if each not in gone]
        self.ended += [each for each in gone if each.name in self.memory.tables]

    def step(self) -> list[ServerAction]:
        """Return the next step; an empty list if there is nothing to do."""
        self.actions, self.came_short = [], False
        self.memory.begin_step()
        self.budget = math.inf if self.policy.max_tokens is None else self.policy.max_tokens
        self._give_back()
        # Next tokens before prompts: a user who has begun to read must not wait.
        for sequence in sorted(self.running, key=lambda each: self._left(each) > 1):
            if sequence in self.running:
                self._go_on(sequence)
        if not self.came_short and not (self.policy.static and self.running):
            self._let_in()
        self.ended += [each for each in self.running if each.has_ended]
        self.running = [each for each in self.running if not each.has_ended]
        return self.actions

    # --- the parts of a step -------------------------------------------------------------------

    def _do(self, sequence: Growing, kind: str, first=0, last=0) -> None:
        action = ServerAction(sequence.name, kind, first, last)
        self.memory.do(action)
        self.actions.append(action)

    def _give_back(self) -> None:
        if self.policy.static and self.running:
            return  # the memory belongs to the batch until all have ended
        for sequence in self.ended:
            self._do(sequence, "FREE")
        self.ended = []

    def _left(self, sequence: Growing) -> int:
        """Return the known tokens that have no keys and values yet."""
        return sequence.known - self.memory.written.get(sequence.name, 0)

    def _go_on(self, sequence: Growing) -> None:
        """Run as many tokens of an admitted sequence as the step can still take."""
        tokens = min(self._left(sequence), self.budget)
        while tokens and self._blocks_to_write(sequence, tokens) > len(self.memory.free):
            self.came_short = True
            others = [each for each in self.running if each.name not in self.memory.ran]
            last = others[-1]
            self._preempt(last)
            if last is sequence:
                return
        if tokens:
            self._run(sequence, tokens)

    def _blocks_to_write(self, sequence: Growing, tokens: int) -> int:
        """Return how many free blocks this needs: new ones, and a copy of a block that others
        read."""
        memory = self.memory
        table, written = memory.tables[sequence.name], memory.written[sequence.name]
        shared = table[written // memory.block_size :]
        copies = sum(memory.users[block] > 1 for block in shared)
        return max(0, memory.blocks_for(written + tokens) - len(table)) + copies

    def _run(self, sequence: Growing, tokens: int) -> None:
        memory, name = self.memory, sequence.name
        first = memory.written[name]
        for block in memory.tables[name][first // memory.block_size :]:
            if memory.users[block] > 1:
                self._do(sequence, "COPY", block, self._free_block())
        for _ in range(self._blocks_to_write(sequence, tokens)):
            self._do(sequence, "TAKE", self._free_block())
        self._do(sequence, "RUN", first, first + tokens)
        self.budget -= tokens
        if self.policy.share and not self.policy.reserve:
            full = sequence.hashes[: (first + tokens) // memory.block_size]
            self.prefixes.remember(full, memory.tables[name])
        if first + tokens < sequence.known:
            return
        began = sequence.known == len(sequence.request.prompt)
        sequence.known += 1
        for child in sequence.request.sequences[1:]:
            if began and name == sequence.request.sequences[0]:
                self._do(sequence, "FORK", child)
                forked = Growing(child, sequence.request, sequence.hashes)
                forked.known = sequence.known
                self.running.append(forked)

    def _free_block(self) -> int:
        block = next(iter(self.memory.free))
        self.prefixes.forget(block)
        return block

    def _preempt(self, sequence: Growing) -> None:
        """Preempt a sequence; it waits in front of all that have not begun."""
        table = list(self.memory.tables[sequence.name])
        if self.policy.preempt == "swap" and len(table) <= len(self.memory.free_places):
            for block in table:
                self._do(sequence, "OUT", block, next(iter(self.memory.free_places)))
        else:
            self._do(sequence, "DROP")
        self.running.remove(sequence)
        self.waiting.insert(0, sequence)

    def _let_in(self) -> None:
        """Admit waiting sequences in order, until one does not fit."""
        while self.waiting and self.budget:
            sequence = self.waiting[0]
            begins = sequence.known == len(sequence.request.prompt)
            if len(self.running) + (sequence.request.samples if begins else 1) > (
                self.policy.max_batch
            ):
                return
            came_in = self._swap_in(sequence) or self._begin(sequence)
            if not came_in:
                return
            self.waiting.pop(0)
            self.running.append(sequence)
            self._run(sequence, min(self._left(sequence), self.budget))

    def _swap_in(self, sequence: Growing) -> bool:
        places = list(self.memory.hosted.get(sequence.name, []))
        to_write = self.memory.blocks_for(sequence.known)
        if not places or to_write > len(self.memory.free):
            return False
        for place in places:
            self._do(sequence, "IN", place, self._free_block())
        return True

    def _begin(self, sequence: Growing) -> bool:
        """Assign its first blocks: those that already hold its beginning, and all that is
        reserved."""
        memory, policy, request = self.memory, self.policy, sequence.request
        if sequence.name in memory.hosted:
            return False  # it waits to be swapped in
        reserved = memory.blocks_for(max(policy.reserve, request.positions)) * bool(policy.reserve)
        shared = []
        if policy.share and not policy.reserve:
            # except the last token: at least one has to run
            full = (len(request.prompt) - 1) // memory.block_size
            shared = self.prefixes.find(sequence.hashes[:full])
        left = sequence.known - len(shared) * memory.block_size
        tokens = len(shared) * memory.block_size + min(left, self.budget)
        new = max(memory.blocks_for(tokens), reserved) - len(shared)
        if new + sum(block in memory.free for block in shared) > len(memory.free):
            return False
        for block in shared:
            self._do(sequence, "SHARE", block)
        for _ in range(new):
            self._do(sequence, "TAKE", self._free_block())
        return True


def serve(
    requests: Iterable[Request],
    scheduler: Scheduler,
    execute: Callable[[list[ServerAction]], Iterable[str]],
    seconds: Callable[[list[ServerAction]], float] = lambda actions: 1.0,
    cancel: dict[str, float] | None = None,
) -> list[ServerStep]:
    """Let requests arrive, step until all have been answered, and return what was done.

    execute: does the actions, and returns the sequences that reached their `stop`. seconds: how
    long the step took, asked after it (1 by default: the clock counts steps). cancel: request ->
    time at which all of its samples are canceled. Raises ServingError, before the first step,
    for a request that can never fit and for an unknown name in `cancel`.
    """
    coming = sorted(requests, key=lambda request: request.arrival)
    names = [name for request in coming for name in request.sequences]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ServingError(f"two requests are called {twice[0]!r}: give each its own name.")
    for request in coming:
        scheduler.refuse_what_never_fits(request)
    cancel, clock, steps = dict(cancel or {}), 0.0, []
    known = [request.name for request in coming]
    if unknown := [name for name in cancel if name not in known]:
        raise ServingError(
            f"cancel={{{unknown[0]!r}: ...}} is no request's name: give one of {', '.join(known)}."
        )
    if never := [name for name, when in cancel.items() if math.isnan(when)]:
        raise ServingError(f"cancel={{{never[0]!r}: nan}} is no time: give a number.")
    while coming or scheduler.is_busy:
        while coming and coming[0].arrival <= clock:
            scheduler.add(coming.pop(0))
        for name in [name for name, when in cancel.items() if when <= clock]:
            scheduler.cancel(name)
            coming = [request for request in coming if request.name != name]
            del cancel[name]
        actions = scheduler.step()
        if not actions and scheduler.is_busy:
            raise ServingError(f"nobody can go on at {clock:g}, and nobody has ended.")
        if not actions:
            clock = coming[0].arrival if coming else clock
            continue
        for name in execute(actions):
            scheduler.end(name)
        start, clock = clock, clock + seconds(actions)
        steps.append(ServerStep(start, clock, tuple(actions)))
    return steps


def plan(requests: Iterable[Request], scheduler: Scheduler, **how) -> list[ServerStep]:
    """Return the steps without a model: no sequence reaches a `stop`. how: as in `serve`."""
    return serve(requests, scheduler, lambda actions: (), **how)
