"""Exercises of lesson 24: a block table, who runs when blocks are short, the cache of a real model.

No ranks are needed. The block table is judged by the texts that a model generates through it, and
by which blocks were taken and how many. The choice is judged situation by situation.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from mini_dist import serving
from mini_dist.model.gpt import GPT
from mini_dist.model.sampling import generate
from mini_dist.plan.calculators.serving import kv_bytes_a_token
from mini_dist.plan.config import ModelConfig
from mini_dist.serving import ideas, memory, scheduler
from mini_dist.serving.ideas import Text

from . import answers
from .engine import Exercise, Line, Measured, line
from .measures import plain
from .watch import functions_of

# ---- a block table -------------------------------------------------------------------------------

CONFIG = ModelConfig(
    vocab_size=32, seq_len=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2
)
NEW = 7  # generated tokens per text


@lru_cache
def tiny_model() -> GPT:
    model = GPT(CONFIG, dtype=torch.float64).eval()
    with torch.no_grad():  # layers that outweigh the embedding, so that texts vary
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if name.startswith("blocks") and "norm" not in name else 1)
    return model


@dataclass(frozen=True)
class Texts:
    """Prompts of these lengths, continued in turn. chunk: prompt tokens per call; 0 means all."""

    lengths: tuple[int, ...]
    block_size: int
    chunk: int = 0
    spare: int = 0  # blocks that each text has before its first token

    def __str__(self) -> str:
        chunks = f", prompts in chunks of {self.chunk}" * (self.chunk > 0)
        spare = f", {self.spare} blocks of each in reserve" * (self.spare > 0)
        return f"{len(self.lengths)} texts, blocks of {self.block_size}{chunks}{spare}"

    def prompts(self) -> list[list[int]]:
        rng = random.Random(1)
        return [[rng.randrange(CONFIG.vocab_size) for _ in range(n)] for n in self.lengths]

    @property
    def num_blocks(self) -> int:
        each = (max(self.spare, -(-(n + NEW) // self.block_size)) for n in self.lengths)
        return 2 + sum(each)


@dataclass
class Written:
    """The result of a function that places tokens."""

    texts: list[list[int]] = field(default_factory=list)
    taken: int = 0  # blocks that were not free, or twice in a table, or lost from it
    more: int = 0  # the most blocks in a table beyond what its tokens need
    lost: int = 0  # tokens without a slot in the table's blocks
    shape: str = ""  # what is wrong with what was returned


def write(fn, case: Texts, group) -> Written:
    """Continue the texts in turn: write each token where `fn` says, and read it by its table."""
    size, found = case.block_size, Written()
    free = list(range(case.num_blocks))
    random.Random(2).shuffle(free)
    shape = CONFIG.num_layers, case.num_blocks * size, CONFIG.num_kv_heads, CONFIG.head_dim
    keys, values = torch.full((2, *shape), torch.nan, dtype=torch.float64)
    texts, tables = case.prompts(), [[free.pop() for _ in range(case.spare)] for _ in case.lengths]
    written, ends = [0] * len(texts), [n + NEW for n in case.lengths]
    while any(len(text) < end for text, end in zip(texts, ends)):
        for i, text in enumerate(texts):
            if len(text) == ends[i]:
                continue
            new = len(text) - written[i]
            new = min(new, case.chunk) if case.chunk else new
            came = plain(fn(list(tables[i]), list(free), written[i], new, size))
            found.shape = malformed(came)
            if found.shape:
                return found
            table, places = map(list, came)
            fresh = table[len(tables[i]) :]
            found.taken += table[: len(tables[i])] != tables[i] or len({*fresh}) < len(fresh)
            found.taken += sum(block not in free for block in fresh)
            needed = max(len(tables[i]), -(-(written[i] + new) // size))
            found.more = max(found.more, len(table) - needed)
            inside = {block * size + j for block in table for j in range(size)}
            inside &= set(range(case.num_blocks * size))
            found.lost += abs(new - len(places)) + sum(place not in inside for place in places)
            if found.taken or found.lost or len(table) * size < written[i] + new:
                found.lost += len(table) * size < written[i] + new
                return found
            free = [block for block in free if block not in fresh]
            tables[i] = table
            tokens = text[written[i] : written[i] + new]
            logits = run(tokens, places, table, size, written[i], keys, values)
            written[i] += new
            if written[i] == len(text):
                text.append(int(logits[-1].argmax()))
            if len(text) == ends[i]:
                free += tables[i]  # this text has ended, so others may use its blocks
    found.texts = texts
    return found


def malformed(came) -> str:
    if not isinstance(came, (tuple, list)) or len(came) != 2:
        return f"A {type(came).__name__} came back: return two lists, the table and the places."
    for part, what in zip(came, ("table", "places")):
        if not isinstance(part, (list, tuple, range)):
            return f"The {what} came as {type(part).__name__}: give a list of whole numbers."
        for each in part:
            if not isinstance(each, int):
                kind = type(each).__name__
                return f"In the {what} there is a {kind}, {each!r}: give a list of whole numbers."
    return ""


def run(tokens, places, table, size, first, keys, values):
    last = first + len(tokens)
    row = torch.tensor([table[i // size] * size + i % size for i in range(last)])

    def attend_in(layer):
        def attend(q, k, v, positions, dropout):
            for where, new in ((keys, k), (values, v)):
                where[layer, torch.tensor(places)] = new[0].transpose(0, 1)
            k, v = (t[layer, row].transpose(0, 1)[None] for t in (keys, values))
            sees = torch.arange(last) <= positions[:, None]
            return scaled_dot_product_attention(q, k, v, sees, enable_gqa=True)

        return attend

    model, positions = tiny_model(), torch.arange(first, last)
    with torch.no_grad(), ideas.attending(model, map(attend_in, range(CONFIG.num_layers))):
        x = model.embed(torch.tensor(tokens)[None], positions)
        for block in model.blocks:
            x = block(x, positions)
        return model.head(x)[0]


class Table(Measured):
    def measure(self):
        self.found = self.results[0]
        self.expected = [
            generate(tiny_model(), torch.tensor(prompt), NEW, temperature=0).tolist()
            for prompt in self.case.prompts()
        ]

    def lines(self) -> list[Line]:
        found = self.found
        right = sum(a == b for a, b in zip(found.texts, self.expected))
        return [
            line("blocks taken that were not free", found.taken, 0),
            line("tokens without a slot in their table", found.lost, 0),
            line("blocks more than the tokens need", max(found.more, 0), 0),
            line(f"{self.case}: texts as without a cache", right, len(self.expected)),
        ]

    def mistake(self) -> str:
        found = self.found
        if found.shape:
            return found.shape
        if found.taken:
            return (
                "A block was taken that is in use, or the same one twice, or the table lost one "
                "that it had: keep what is there, and append blocks from `free`, each once."
            )
        if found.lost:
            return (
                "Not every new token has a place in its table's blocks. Position i is in the block "
                "table[i // block_size], and i % block_size places into it; return one place for "
                "each of the `new` positions from `written` on."
            )
        if found.more > 0:
            return (
                f"{found.more} blocks more than the tokens need: take one only when the last is "
                "full, that is while len(table) * block_size < written + new."
            )
        return (
            "The texts are wrong: keys and values are not where the table says. Position i goes "
            "to table[i // block_size] * block_size + i % block_size."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "IndexError" not in error:
            return ""
        return (
            "the table has no such entry. Position i, counted from the text's first token, is in "
            "its block i // block_size; all blocks up to position written + new - 1 have "
            "to be in the table first.\n"
        )


# ---- who runs ------------------------------------------------------------------------------------


class Situation(NamedTuple):
    running: list[Text]  # in the order of admission
    waiting: list[Text]
    free: int


@dataclass(frozen=True)
class Day:
    """A run of a small server; the learner gets each of its situations."""

    seed: int
    num_blocks: int = 12
    block_size: int = 4
    made: int = 0  # situations at random instead, with any number of a text's blocks missing

    def __str__(self) -> str:
        special = ", situations at random" * bool(self.made)
        return f"{self.num_blocks} blocks of {self.block_size}{special}"

    def make(self, rng: random.Random) -> Situation:
        texts, running = [], rng.randint(0, 4)
        for place, name in enumerate("abcdef"):
            tokens = rng.randint(1, 18)
            most = -(-tokens // self.block_size) if place < running else 0
            texts.append(Text(name, tokens, rng.randint(0, most)))
        return Situation(texts[:running], texts[running:], rng.randint(0, self.num_blocks))

    def situations(self) -> list[Situation]:
        rng = random.Random(self.seed)
        if self.made:
            return [self.make(rng) for _ in range(self.made)]
        prompts = [rng.randint(1, 18) for _ in range(14)]
        most = self.num_blocks * self.block_size
        ends = [min(prompt + rng.randint(2, 20), most) for prompt in prompts]
        waiting = [Text(chr(ord("a") + i), prompt, 0) for i, prompt in enumerate(prompts)]
        end_of = {text.name: end for text, end in zip(waiting, ends)}
        running, free, found = [], self.num_blocks, []
        while waiting or running:
            found.append(Situation(list(running), list(waiting), free))
            leave, come = ideas.who_runs(*found[-1], self.block_size)
            back = [text for text in running if text.name in leave]
            free += sum(text.blocks for text in back)
            running = [text for text in running if text.name not in leave]
            running += [text for text in waiting if text.name in come]
            waiting = [t._replace(blocks=0) for t in back] + [
                text for text in waiting if text.name not in come
            ]
            free -= sum(missing(text, self.block_size) for text in running)
            running = [
                text._replace(tokens=text.tokens + 1, blocks=-(-text.tokens // self.block_size))
                for text in running
            ]
            gone = [text for text in running if text.tokens >= end_of[text.name]]
            free += sum(text.blocks for text in gone)
            running = [text for text in running if text not in gone]
        return found


def missing(text: Text, block_size: int) -> int:
    return -(-text.tokens // block_size) - text.blocks


def choices(fn, case: Day, group) -> list:
    found = []
    for situation in case.situations():
        running, waiting = map(list, situation[:2])
        found.append(plain(fn(running, waiting, situation.free, case.block_size)))
    return found


class Choices(Measured):
    def measure(self):
        size, self.wrong = self.case.block_size, {}
        for situation, came in zip(self.case.situations(), self.results[0]):
            if kind := self.kind_of(situation, came, size):
                self.wrong.setdefault(kind, situation)

    @staticmethod
    def kind_of(situation: Situation, came, size: int) -> str:
        """Return what is wrong with a choice; "" if nothing is."""
        running, waiting, free = situation
        if not (
            isinstance(came, (tuple, list))
            and len(came) == 2
            and all(isinstance(part, (tuple, list, set, frozenset)) for part in came)
            and all(isinstance(name, str) for part in came for name in part)
        ):
            return "shape"
        if any(len(set(part)) < len(part) for part in came):
            return "twice"
        leave, come = map(set, came)
        must_leave, may_come = map(set, ideas.who_runs(*situation, size))
        stay = [text for text in running if text.name not in leave]
        free += sum(text.blocks for text in running if text.name in leave)
        needed = sum(missing(text, size) for text in stay)
        coming = sum(missing(text, size) for text in waiting if text.name in come)
        if not leave <= {t.name for t in running} or not come <= {t.name for t in waiting}:
            return "strangers"
        if needed > free:
            return "short"
        if leave != must_leave:
            return "too many leave" if len(leave) > len(must_leave) else "another leaves"
        if come and leave:
            return "comes where somebody left"
        if needed + coming > free:
            return "too many come"
        if come != may_come:
            return "overtaken" if len(come) >= len(may_come) or come - may_come else "few come"
        return ""

    def lines(self) -> list[Line]:
        asked = len(self.results[0])
        return [line(f"{self.case}: kinds of wrong choices in {asked} situations",
                     len(self.wrong), 0)]  # fmt: skip

    def mistake(self) -> str:
        kind = min(self.wrong, key=list(WRONG_CHOICES).index)
        running, waiting, free = self.wrong[kind]
        told = f"{free} free; running {self.told(running)}; waiting {self.told(waiting[:3])}"
        return f"{WRONG_CHOICES[kind]} The first such situation: {told}."

    @staticmethod
    def told(texts: list[Text]) -> str:
        told = ", ".join(f"{t.name} ({t.tokens} tokens, {t.blocks} blocks)" for t in texts)
        return told or "nobody"


WRONG_CHOICES = {  # the likeliest mistakes first
    "shape": "Return two lists of names: who leaves, and who comes in.",
    "twice": "A name is in a list twice: each text leaves or comes in once.",
    "strangers": "A text leaves that does not run, or one comes in that does not wait.",
    "short": "There are too few blocks: a text needs enough for all its tokens, minus the blocks "
    "that it has, and a text that leaves frees all its blocks.",
    "another leaves": "A text leaves that came before one that stays: the last to come "
    "leaves first, so that the first one always advances.",
    "too many leave": "More leave than necessary: check after each one whether the blocks suffice, "
    "with its freed blocks and without its needs.",
    "comes where somebody left": "A text comes in while another has to leave: it would soon "
    "have to leave itself.",
    "too many come": "More come in than there are blocks: running texts get theirs first.",
    "overtaken": "A text comes in before another that has waited longer: if the first does not "
    "fit, the others also wait. Otherwise a long prompt would never get in.",
    "few come": "A text waits although there is room, once all running texts have their blocks.",
}

# ---- the cache of a real model -------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """The parts of a config.json that matter here, and the question about it."""

    name: str
    settings: tuple[tuple[str, int | str], ...]
    tokens: int
    bytes_a_number: int
    tp: int
    numbers: int  # cached per token and device, calculated by hand

    def __str__(self) -> str:
        devices = f" on {self.tp} devices" if self.tp > 1 else ""
        return f"{self.name}, {self.tokens:,} tokens{devices}"


def ask(fn, case: Real, group):
    return plain(fn(dict(case.settings), case.tokens, case.bytes_a_number, case.tp))


class Cache(Measured):
    def measure(self):
        case = self.case
        self.expected = case.numbers * case.tokens * case.bytes_a_number
        self.found = self.results[0]

    def lines(self) -> list[Line]:
        return [line(f"{self.case}: bytes", self.found, self.expected)]

    def mistake(self) -> str:
        case, found = self.case, self.found
        settings = dict(case.settings)
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            return f"A {type(found).__name__} came back: return the number of bytes."
        ratio = found / self.expected
        heads = settings.get("num_attention_heads", settings.get("n_head"))
        kv_heads = settings.get("num_key_value_heads", heads)
        told = f"{found:,} bytes, and there are {self.expected:,}. "
        if kv_heads < heads and ratio == heads / kv_heads and case.tp == 1:
            return (
                f"{ratio:g} times too many, which is num_attention_heads={heads} over "
                f"num_key_value_heads={kv_heads}: the cache has key/value heads only, and each is "
                "as long as one of the attention heads."
            )
        on_a_device = max(kv_heads // case.tp, 1)
        if case.tp > 1 and ratio in (kv_heads / on_a_device, kv_heads / case.tp / on_a_device, 0):
            return told + (
                f"The key/value heads are spread over tp={case.tp} devices; a device has at least "
                "one whole head, because heads are not split."
            )
        if (
            settings.get("head_dim")
            and ratio * settings["head_dim"] * heads == settings["hidden_size"]
        ):
            return told + (
                f"A head has head_dim={settings['head_dim']} numbers if config.json says so; "
                "hidden_size / num_attention_heads only if it does not."
            )
        if ratio == 0.5 and case.bytes_a_number == 2:
            return (
                "This is half of it. Keys and values are cached, and a number has bytes_a_number."
            )
        return told + (
            "2 (keys and values) * layers * key/value heads of a device * numbers of a head * "
            "tokens * bytes of a number."
        )

    @staticmethod
    def raised(error: str) -> str:
        if "KeyError" not in error and "NoneType" not in error:
            return ""
        return (
            "a config.json need not have every key: without num_key_value_heads there are as many "
            "as num_attention_heads, without head_dim it is hidden_size / num_attention_heads. "
            "GPT-2 calls them n_layer, n_head and n_embd.\n"
        )


def llama(hidden: int, layers: int, heads: int, ffn: int, **more: int) -> tuple:
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    sizes |= dict(intermediate_size=ffn, vocab_size=128256, max_position_embeddings=8192)
    return tuple({"model_type": "llama", **sizes, **more}.items())


LLAMA_8B = llama(4096, 32, 32, 14336, num_key_value_heads=8)
LLAMA_70B = llama(8192, 80, 64, 28672, num_key_value_heads=8)
OPEN_LLAMA = llama(3200, 26, 32, 8640)  # neither num_key_value_heads nor head_dim
QWEN = (*llama(1024, 28, 16, 3072, num_key_value_heads=8, head_dim=128), ("model_type", "qwen3"))
MISTRAL = (  # its window limits attention; the cache here saves all tokens
    *llama(4096, 32, 32, 14336, num_key_value_heads=8),
    *dict(model_type="mistral", sliding_window=4096, max_position_embeddings=32768).items(),
)
NEMO = llama(5120, 40, 32, 14336, num_key_value_heads=8, head_dim=128)  # not 5,120 / 32
GPT_2 = tuple(
    dict(
        model_type="gpt2", vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12
    ).items()
)
GPT_2_MEDIUM = (*GPT_2, *dict(n_embd=1024, n_layer=24, n_head=16).items())
REAL = [
    (1, Real("Llama 3 8B", LLAMA_8B, 8192, 2, 1, 2 * 32 * 8 * 128)),
    (1, Real("GPT-2", GPT_2, 1000, 4, 1, 2 * 12 * 12 * 64)),
    (1, Real("OpenLLaMA 3B", OPEN_LLAMA, 2048, 2, 1, 2 * 26 * 32 * 100)),
    (1, Real("Qwen3 0.6B", QWEN, 4096, 2, 1, 2 * 28 * 8 * 128)),
    (1, Real("Mistral 7B", MISTRAL, 40_000, 2, 1, 2 * 32 * 8 * 128)),
    (1, Real("Llama 3 70B", LLAMA_70B, 4096, 1, 4, 2 * 80 * 2 * 128)),
    (1, Real("Llama 3 70B", LLAMA_70B, 100, 2, 16, 2 * 80 * 1 * 128)),
    (1, Real("Mistral Nemo", NEMO, 1000, 2, 1, 2 * 40 * 8 * 128)),
    (1, Real("GPT-2 medium", GPT_2_MEDIUM, 1000, 4, 3, 2 * 24 * 5 * 64)),
]

EXERCISES = [
    Exercise(
        "place_tokens",
        ideas.place_tokens,
        write,
        [
            (1, Texts((9, 3), 4)),
            (1, Texts((1, 8, 5), 3)),
            (1, Texts((13, 6), 4, chunk=5)),
            (1, Texts((2, 5), 1)),
            (1, Texts((4,), 32)),
            (1, Texts((5, 2), 4, spare=3)),
        ],
        Table,
        refuses=functions_of(memory) | functions_of(serving.engine),
        hints=[
            "First make the table long enough: how many blocks hold written + new tokens? Take the "
            "missing ones from `free`, and no more.",
            "Then each position i from written to written + new - 1: which entry of the table is "
            "its block, and how far into the block does it go?",
        ],
        skeleton="""\
def place_tokens(table, free, written, new, block_size):
    needed = ...                            # blocks that hold written + new tokens
    table = table + free[: ...]             # what is there stays
    places = []
    for i in range(written, written + new):
        block, rest = divmod(i, block_size)
        places.append(...)                  # block_size places a block, in all blocks' places
    return table, places""",
    ),
    Exercise(
        "who_runs",
        ideas.who_runs,
        choices,
        [
            (1, Day(0)),
            (1, Day(3, 9, 3)),
            (1, Day(5, 40, 1)),
            (1, Day(7, 8, 8)),
            (1, Day(9, made=60)),
        ],
        Choices,
        refuses=functions_of(scheduler),
        hints=[
            "A text needs ceil(tokens / block_size) blocks and has text.blocks. Begin with the "
            "texts that run: are there enough free blocks for all they need?",
            "If not, the last one leaves: it needs no more blocks, and those that it had are "
            "free. Ask again. Only if no text left, look at those that wait, in order, until the "
            "first one that does not fit.",
        ],
        skeleton="""\
def who_runs(running, waiting, free, block_size):
    def missing(text):
        return -(-text.tokens // block_size) - text.blocks

    stay, leave, come = list(running), [], []
    while ...:                              # the blocks do not suffice
        last = stay.pop()
        ...
    for text in waiting:
        ...
    return leave, come                      # lists of names""",
    ),
    Exercise(
        "cache_bytes",
        kv_bytes_a_token,
        ask,
        REAL,
        Cache,
        answer=(answers.cache_bytes,),
        hints=[
            "One token stores, in each layer, a key and a value for each key/value head, each as "
            "long as a head. How many heads, how long: config.json says, or says it indirectly.",
            "num_key_value_heads, else num_attention_heads; head_dim, else hidden_size over "
            "num_attention_heads. On tp devices each has its share of the heads, at least one.",
        ],
        skeleton="""\
def cache_bytes(config, tokens, bytes_a_number, tp):
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = ...
    kv_heads = ...
    head_dim = ...
    on_a_device = ...                       # key/value heads
    return 2 * ...""",
    ),
]
