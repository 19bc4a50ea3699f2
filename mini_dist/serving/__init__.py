"""Room 7, serving: answer many requests at once from memory that is never enough.

It may import `strategies` and the rooms below them.

Read in this order:
    ideas/        three pages: the cache and its blocks, speculation, layers on several ranks
    actions.py    requests, and what a server does: lists of actions
    memory.py     blocks and block tables: who has what
    scheduler.py  the policy: who runs next, who has to leave
    engine.py     the actions, done on a GPT: all sequences as one batch, on one rank or several
    measures.py   what a list of steps comes to
    int8.py       weights of one byte

    memory = Memory(num_blocks=64, block_size=16)
    served = Engine(model, memory, None).serve([Request("a", prompt, 20)], Policy(max_batch=8))
    measure(served.steps, requests, memory)
"""

from .actions import Request, ServerAction, ServerStep, ServingError, num_tokens
from .engine import Engine, Served
from .ideas import (
    Cache,
    Text,
    accept,
    choose,
    continue_text,
    decode_in_pipeline,
    decode_in_stages,
    forward,
    paged_attention,
    pick,
    place_tokens,
    speculate,
    uniform,
    who_runs,
)
from .int8 import Int8Linear, weight_bytes, with_int8_weights
from .measures import Result, measure, replayed, token_times
from .memory import Memory
from .scheduler import Policy, Scheduler, plan, serve

__all__ = [
    "Cache",
    "Engine",
    "Int8Linear",
    "Memory",
    "Policy",
    "Request",
    "Result",
    "Scheduler",
    "Served",
    "ServerAction",
    "ServerStep",
    "ServingError",
    "Text",
    "accept",
    "choose",
    "continue_text",
    "decode_in_pipeline",
    "decode_in_stages",
    "forward",
    "measure",
    "num_tokens",
    "paged_attention",
    "pick",
    "place_tokens",
    "plan",
    "replayed",
    "serve",
    "speculate",
    "token_times",
    "uniform",
    "weight_bytes",
    "who_runs",
    "with_int8_weights",
]
