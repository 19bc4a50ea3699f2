"""Which sequence has which blocks: one record for scheduler, engine and figure, without tensors.

Memory for keys and values is divided into blocks of equally many tokens. A sequence has a block
table: its tokens 0..size-1 are in the table's first block, the next ones in the second, wherever
these are. So no memory is reserved that may never be used, and any sequence can use any free
block (Kwon et al. 2023, PagedAttention, section 4).
"""

from __future__ import annotations

from collections.abc import Iterable

from mini_dist.plan.fields import checks_kinds, whole

from .actions import ServerAction, ServingError


@checks_kinds(error=ServingError)
class Memory:
    """`num_blocks` blocks of `block_size` tokens, and `host_blocks` slots for contents on the host.

    tables: sequence -> its blocks in order. written: sequence -> how many of its positions hold
    keys and values. users: block -> how many tables contain it. free: blocks in no table, the one
    that has been free for longest first. Raises ServingError for sizes below 1.
    """

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0):
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("host_blocks", host_blocks, 0),
        ):
            whole(name, value, least, error=ServingError)
        self.num_blocks, self.block_size, self.host_blocks = num_blocks, block_size, host_blocks
        self.tables: dict[str, list[int]] = {}
        self.written: dict[str, int] = {}
        self.hosted: dict[str, list[int]] = {}  # sequence -> slots on the host, in order
        self.users = [0] * num_blocks
        self.free = dict.fromkeys(range(num_blocks))  # (a dict keeps its order)
        self.free_places = dict.fromkeys(range(host_blocks))
        self.ran: set[str] = set()  # in this step

    def blocks_for(self, positions: int) -> int:
        return -(-positions // self.block_size)

    def step(self, actions: Iterable[ServerAction]) -> None:
        """Do all actions of one step."""
        self.begin_step()
        for action in actions:
            self.do(action)

    def begin_step(self) -> None:
        self.ran.clear()

    def do(self, action: ServerAction) -> None:
        """Change the record by one action. Raises ServingError if it cannot be done."""
        sequence, kind, first, last = action
        getattr(self, f"_{kind.lower()}")(action, sequence, first, last)

    def _refuse(self, action: ServerAction, why: str):
        raise ServingError(f"`{action}` cannot be done: {why}.")

    def _use(self, action: ServerAction, block: int) -> None:
        """Give a free block its first user."""
        if block not in self.free:
            known = 0 <= block < self.num_blocks
            self._refuse(action, f"block {block} is {'in use' if known else 'not there'}")
        del self.free[block]
        self.users[block] = 1

    def _leave(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free[block] = None

    def _rest(self, action: ServerAction, sequence: str) -> list[int]:
        """Return the table of a sequence that does not run in this step."""
        if sequence in self.ran:
            self._refuse(action, f"{sequence} runs in this step, and needs its blocks")
        if sequence not in self.tables:
            self._refuse(action, f"{sequence} has no blocks")
        return self.tables[sequence]

    def _take(self, action, sequence, block, _):
        self._use(action, block)
        self.tables.setdefault(sequence, []).append(block)
        self.written.setdefault(sequence, 0)

    def _share(self, action, sequence, block, _):
        table = self.tables.setdefault(sequence, [])
        if self.written.setdefault(sequence, 0) != len(table) * self.block_size:
            self._refuse(action, "full blocks can only follow full blocks")
        if block in self.free:
            self._use(action, block)
        else:
            self.users[block] += 1
        table.append(block)
        self.written[sequence] += self.block_size

    def _copy(self, action, sequence, old, new):
        table = self.tables.get(sequence, [])
        if old not in table:
            self._refuse(action, f"block {old} is not {sequence}'s")
        self._use(action, new)
        table[table.index(old)] = new
        self._leave(old)

    def _fork(self, action, sequence, child, _):
        if child in self.tables:
            self._refuse(action, f"{child} is there already")
        self.tables[child] = list(self.tables[sequence])
        self.written[child] = self.written[sequence]
        for block in self.tables[child]:
            self.users[block] += 1

    def _run(self, action, sequence, first, last):
        table = self.tables.get(sequence, [])
        if first != self.written.get(sequence, 0) or last <= first:
            self._refuse(action, f"{self.written.get(sequence, 0)} tokens of {sequence} are cached")
        if last > len(table) * self.block_size:
            self._refuse(action, f"{sequence} has {len(table)} blocks of {self.block_size}")
        for block in table[first // self.block_size : self.blocks_for(last)]:
            if self.users[block] > 1:
                self._refuse(action, f"others read block {block}, in which it would write")
        self.written[sequence] = last
        self.ran.add(sequence)

    def _out(self, action, sequence, block, place):
        table = self._rest(action, sequence)
        if not table or table[0] != block:
            self._refuse(action, f"block {block} is not the first that {sequence} still has")
        if place not in self.free_places:
            self._refuse(action, f"place {place} on the host is not free")
        del self.free_places[place]
        self.hosted.setdefault(sequence, []).append(place)
        self._leave(table.pop(0))

    def _in(self, action, sequence, place, block):
        if self.hosted.get(sequence, [None])[0] != place:
            self._refuse(action, f"place {place} is not the next that {sequence} has there")
        self._use(action, block)
        self.tables[sequence].append(block)
        self.free_places[self.hosted[sequence].pop(0)] = None
        if not self.hosted[sequence]:
            del self.hosted[sequence]

    def _drop(self, action, sequence, *_):
        # The last block goes first: the beginnings of texts, which others may share, stay longer.
        for block in reversed(self._rest(action, sequence)):
            self._leave(block)
        for place in self.hosted.pop(sequence, []):
            self.free_places[place] = None
        del self.tables[sequence], self.written[sequence]

    _free = _drop

    @property
    def used(self) -> int:
        """Return the number of blocks that are in a table."""
        return self.num_blocks - len(self.free)

    @property
    def unused_share(self) -> float:
        """Return the share of slots in used blocks that hold no token: what is wasted."""
        if not self.used:
            return 0.0
        filled: dict[int, int] = {}
        for sequence, table in self.tables.items():
            for i, block in enumerate(table):
                here = min(max(self.written[sequence] - i * self.block_size, 0), self.block_size)
                filled[block] = max(filled.get(block, 0), here)
        return 1 - sum(filled.values()) / (len(filled) * self.block_size)
