"""Explorers: thin views over calculators/ and schedule/. Everything they show is computed there."""

from .explorer import Explorer
from .model_needs import memory_and_time

__all__ = ["Explorer", "memory_and_time"]
