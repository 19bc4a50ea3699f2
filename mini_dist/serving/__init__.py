"""Room 7, serving: answer many requests at once from memory that is never enough.

It may import `strategies` and the rooms below them. Begin with `ideas/` (the cache and its blocks,
speculation, layers on several ranks), then `actions.py` (what a server does, as data),
`scheduler.py` (who runs next) and `engine.py`, which carries the actions out on a GPT.
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
