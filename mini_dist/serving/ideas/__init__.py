"""The pages of serving, in plain functions for one sequence: cache.py, speculation.py, stages.py.

engine.py does the same for many sequences at once, and scheduler.py decides as `who_runs` does.
"""

from .cache import (
    Cache,
    Text,
    attending,
    continue_text,
    forward,
    paged_attention,
    place_tokens,
    who_runs,
)
from .speculation import Speculated, accept, choose, pick, speculate, uniform
from .stages import ModelPart, Visit, decode_in_pipeline, decode_in_stages, stage_of

__all__ = [
    "Cache",
    "ModelPart",
    "Speculated",
    "Text",
    "Visit",
    "accept",
    "attending",
    "choose",
    "continue_text",
    "decode_in_pipeline",
    "decode_in_stages",
    "forward",
    "paged_attention",
    "pick",
    "place_tokens",
    "speculate",
    "stage_of",
    "uniform",
    "who_runs",
]
