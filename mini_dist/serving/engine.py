"""Run a scheduler's actions on a GPT, for many sequences at once, on one rank or on several.

    engine = Engine(model, Memory(num_blocks=64, block_size=16), None)
    texts = engine.serve(requests, Policy(max_batch=8)).texts

All tokens of a step go through the linears as one batch, whatever sequence they belong to; only
attention distinguishes sequences (Yu et al. 2022, "selective batching", section 3.2). The page
attends block by block. Here all sequences with equally many new tokens attend in one call: their
blocks are gathered, shorter ones padded, and torch's kernel attends. For 16 sequences of 400
tokens, in blocks of 16, this takes 30 times less CPU time than one `paged_attention` after the
other (one thread).

Two more things make a token cheaper (8 texts, 4 layers of 256, one thread of a shared machine).
Tokens have no batch dim and prompts of one length attend in one call, which takes 917 torch
operators per token instead of 1,226. And the layers' matrices are stored inputs first: 0.94 of the
CPU time. Tried without success: queries, keys and values from one matrix (no gain), keys and values
in one tensor (no gain), weights packed by oneDNN (0.54 of the time of the products, but a private
operator of torch).

Under tensor parallelism (`shard_model` before) each rank has the keys and values of its heads.
Every rank runs the same scheduler, so no rank has to be told anything.

Legend: B sequences of a step, S tokens of a step, T tokens of a sequence, N heads, K kv heads,
H head dim, V vocab, L layers, t ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mini_dist.collectives import all_gather
from mini_dist.model.gpt import GPT, Attention, cosines_and_sines, turn

from .actions import Request, ServerAction, ServerStep, ServingError
from .ideas import choose, uniform
from .memory import Memory
from .scheduler import Policy, Scheduler, serve


class Served(NamedTuple):
    texts: dict[str, list[int]]  # sequence -> its new tokens
    steps: list[ServerStep]


class Engine:
    """A model, its blocks of keys and values [blocks, block_size, K/t, H] per layer, and texts.

    model: is set to eval, and its layers' matrices move in memory (`lay_inputs_first`), so it
    may round differently afterwards. memory: gives the number and size of blocks. group: the
    ranks that share the model's layers; None if it is not sharded. Every rank calls the same
    methods. Raises ServingError for actions that cannot be done.
    """

    def __init__(self, model: GPT, memory: Memory, group):
        self.model, self.group = lay_inputs_first(model.eval()), group
        self.memory = Memory(memory.num_blocks, memory.block_size, memory.host_blocks)
        attn = model.blocks[0].attn
        self.dtype, self.device = model.head.norm.weight.dtype, model.head.norm.weight.device
        heads = attn.k.weight.shape[0] // attn.head_dim  # K/t

        def blocks(number: int, device: torch.device | None = None) -> Tensor:
            shape = number, memory.block_size, heads, attn.head_dim
            return torch.zeros(len(model.blocks), *shape, dtype=self.dtype, device=device)

        self.keys, self.values = (blocks(memory.num_blocks, self.device) for _ in range(2))
        self.host_keys, self.host_values = (blocks(memory.host_blocks) for _ in range(2))
        self.requests: dict[str, tuple[Request, int]] = {}  # sequence -> its request, which sample
        self.tokens: dict[str, list[int]] = {}
        self.forks: dict[str, list[str]] = {}  # until its prompt has run

    @property
    def nbytes(self) -> int:
        """Return the bytes of the blocks on this rank."""
        return self.keys.nbytes + self.values.nbytes

    def serve(
        self,
        requests: Iterable[Request],
        policy: Policy | None = None,
        *,
        seconds: Callable[[list[ServerAction]], float] = lambda actions: 1.0,
        cancel: dict[str, float] | None = None,
    ) -> Served:
        """Answer requests; the result has the text of every request that was not canceled.

        seconds: how long a step took, as `scheduler.serve` asks; on several ranks it must return
        the same. Raises ServingError for requests that can never be served, before any has begun.
        """
        requests = list(requests)
        for request in requests:
            self.expect(request)
        memory = Memory(self.memory.num_blocks, self.memory.block_size, self.memory.host_blocks)
        scheduler = Scheduler(memory, policy)
        steps = serve(requests, scheduler, self.execute, seconds=seconds, cancel=cancel)
        texts = {
            name: self.tokens[name][len(request.prompt) :]
            for request in requests
            for name in request.sequences
            if name in self.tokens
        }
        return Served(texts, steps)

    def expect(self, request: Request) -> None:
        """Register a request by its name, so that actions can refer to it."""
        config = self.model.config
        if len(request.prompt) + request.max_new_tokens > config.seq_len:
            raise ServingError(
                f"request {request.name!r}: {len(request.prompt)} tokens of prompt and "
                f"max_new_tokens={request.max_new_tokens} are more than the model's window, "
                f"seq_len={config.seq_len}: cut the prompt, or ask for less."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < config.vocab_size:
            raise ServingError(
                f"request {request.name!r} has a token outside 0..{config.vocab_size - 1}."
            )
        for sample, name in enumerate(request.sequences):
            self.requests[name] = request, sample
        self.tokens[request.sequences[0]] = list(request.prompt)

    @torch.inference_mode()
    def execute(self, actions: Iterable[ServerAction]) -> list[str]:
        """Do the actions of a step; return the sequences that reached their `stop`."""
        self.memory.begin_step()
        batch = []
        for action in actions:
            self.memory.do(action)
            name, kind, first, last = action
            if kind == "RUN":
                batch.append(action)
            elif kind == "FORK":
                self.tokens[first] = list(self.tokens[name])
                self.forks.setdefault(name, []).append(first)
            else:
                self.move(kind, first, last)
        return self.run(batch) if batch else []

    def move(self, kind: str, first: int, last: int) -> None:
        """Move the content of a block as an action says; most actions move none."""
        pairs = (self.keys, self.host_keys), (self.values, self.host_values)
        for here, host in pairs:
            if kind == "COPY":
                here[:, last] = here[:, first]
            elif kind == "OUT":
                host[:, last] = here[:, first]
            elif kind == "IN":
                here[:, last] = host[:, first]

    def run(self, batch: list[ServerAction]) -> list[str]:
        """Execute all RUNs of a step as one batch; every sequence at its end gets a next token."""
        batch = sorted(batch, key=num_new)  # sequences with equally many tokens attend together
        logits = self.forward(batch)
        # (Without storage there are no values to compare, and any token will do.)
        likeliest = [0] * len(logits) if logits.is_meta else logits.argmax(-1).tolist()
        ended = []
        for row, (name, _, _, last) in enumerate(batch):
            if last < len(self.tokens[name]):
                continue  # a chunk of a prompt: more of it will come
            for each in (name, *self.forks.pop(name, [])):
                request, sample = self.requests[each]
                token = likeliest[row]
                if request.temperature > 0:
                    place = f"{sample}/{len(self.tokens[each]) - len(request.prompt)}"
                    u = uniform(request.seed, place)
                    token = choose(logits[row], request.temperature, u)
                self.tokens[each].append(token)
                if self.tokens[each][-1] == request.stop:
                    ended.append(each)
        return ended

    def forward(self, batch: list[ServerAction]) -> Tensor:
        """Return logits [B, V] after the last token of each RUN."""
        parts = [self.tokens[name][first:last] for name, _, first, last in batch]
        positions = [i for _, _, first, last in batch for i in range(first, last)]
        positions = torch.tensor(positions, device=self.device)
        ends = [end - 1 for end in accumulate(map(len, parts))]
        attending = self.attention_of_each_layer(batch, positions)
        with calling(zip((block.attn for block in self.model.blocks), attending, strict=True)):
            tokens = torch.tensor(sum(parts, []), device=self.device)
            x = self.model.embed(tokens, positions)  # [S, D]
            for block in self.model.blocks:
                x = block(x, positions)
            logits = self.model.head(x[ends])  # [B, V/t]
        if self.group is None or self.group.size() == 1:
            return logits
        return all_gather(logits.mT.contiguous(), self.group).mT  # of [V, B]

    def attention_of_each_layer(
        self, batch: list[ServerAction], positions: Tensor
    ) -> list[Callable]:
        """Return a step's replacement of `Attention.forward`: x [S, D] -> [S, D], over the
        blocks."""
        places, attn = Places(batch, self.memory, self.keys), self.model.blocks[0].attn
        cos, sin = (  # [S, 1, H/2], the same for all layers and heads
            angles.transpose(0, 1)
            for angles in cosines_and_sines(positions, attn.head_dim, self.dtype)
        )

        def attention_of(attn: Attention, keys: Tensor, values: Tensor) -> Callable:
            def attention(x: Tensor, positions: Tensor) -> Tensor:
                # [S, N/t, H], and twice [S, K/t, H]
                q, k, v = (y.unflatten(-1, (-1, attn.head_dim)) for y in attn.qkv(x))
                if attn.rotary:
                    heads = q.shape[1], k.shape[1]
                    q, k = turn(torch.cat([q, k], 1), cos, sin).split(heads, 1)
                return attn.o(places.attend(q, k, v, keys, values).flatten(1))

            return attention

        layers = (block.attn for block in self.model.blocks)
        return [attention_of(*each) for each in zip(layers, self.keys, self.values, strict=True)]


def lay_inputs_first(model: GPT) -> GPT:
    """Store each matrix [F, D] of the layers in memory as [D, F], with the same shape and values:
    then a few rows times its transpose are sums of rows that are contiguous."""
    for parameter in model.blocks.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.mT.contiguous().mT
    return model


@contextmanager
def calling(pairs: Iterable[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Replace the forward of each module by the paired function inside `with`."""
    modules = []
    for module, function in pairs:
        module.forward = function  # hides the one of its class
        modules.append(module)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


class Places:
    """Where the tokens of a batch are written, and what each of them reads; equal in all layers.

    RUNs of equally many tokens are adjacent in the batch: they attend together.
    """

    def __init__(self, batch: list[ServerAction], memory: Memory, keys: Tensor):
        size, write = memory.block_size, []
        for name, _, first, last in batch:
            table = memory.tables[name]
            write += [table[i // size] * size + i % size for i in range(first, last)]
        self.write = torch.tensor(write, device=keys.device)  # [S], slots over all blocks
        groups = groupby(batch, key=num_new)
        self.groups = [Together(list(runs), memory, keys) for _, runs in groups]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend: q [S, N/t, H], k and v [S, K/t, H] -> [S, N/t, H], over one layer's blocks, keys
        and values [blocks, block_size, K/t, H], into which k and v are written first."""
        for blocks, new in ((keys, k), (values, v)):
            blocks.view(-1, *new.shape[1:]).index_copy_(0, self.write, new)
        parts = q.split([group.num_rows for group in self.groups])
        outs = [group.attend(part, keys, values) for group, part in zip(self.groups, parts)]
        return torch.cat(outs)


class Together:
    """RUNs of equally many tokens s, as one call of torch's kernel. Shorter tables are padded to
    the longest, of n blocks; everything after a sequence's end is masked."""

    def __init__(self, runs: list[ServerAction], memory: Memory, keys: Tensor):
        self.num_runs, self.num_rows = len(runs), sum(map(num_new, runs))
        tables = [memory.tables[name][: memory.blocks_for(last)] for name, _, _, last in runs]
        longest = max(map(len, tables))
        blocks = [i for t in tables for i in t + [0] * (longest - len(t))]
        self.blocks = torch.tensor(blocks, device=keys.device)
        ends = torch.tensor([last for _, _, _, last in runs])
        stands = ends[:, None] + torch.arange(-num_new(runs[0]), 0)  # [B, s]
        sees = torch.arange(longest * memory.block_size) <= stands[:, None, :, None]
        # What the kernel adds to scores; from booleans it would compute this in every layer.
        mask = torch.zeros(sees.shape, dtype=keys.dtype).masked_fill_(~sees, -torch.inf)
        self.mask = mask.to(keys.device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [B * s, N/t, H] -> the same shape."""
        q = q.unflatten(0, (self.num_runs, -1)).transpose(1, 2)  # [B, N/t, s, H]
        k, v = self.read(keys), self.read(values)
        out = scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def read(self, blocks: Tensor) -> Tensor:
        """Return all tokens of the tables as if contiguous: [B, K/t, n * block_size, H]."""
        found = blocks.index_select(0, self.blocks)  # [B * n, block_size, K/t, H]
        return found.view(self.num_runs, -1, *found.shape[2:]).transpose(1, 2)


def num_new(run: ServerAction) -> int:
    """Return how many tokens a RUN sends through the model."""
    return run.last - run.first
