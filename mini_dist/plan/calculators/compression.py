"""Gradients in fewer bits: what is sent, what compressing costs, and on which links it pays.

The methods are implemented in mini_dist/strategies/compression, and the bytes sent are those that
its docstrings state.  The device's work is counted as memory traffic of a plain implementation: one
kernel per operation, float32 gradients, with feedback if the method uses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..config import ModelConfig
from ..fields import at_least, checks_kinds
from .links import Link
from .parameters import layer_weights, outer_weights

BLOCK = 256  # elements that share a scale, as in mini_dist/strategies/compression
INT8, INT4 = 1 + 4 / BLOCK, 1 / 2 + 4 / BLOCK  # bytes per element

# Bytes of memory read and written per element, 24 of them for feedback (x + error, x - sent).
TOUCHED = {
    "half": 12,  # to 16 bits, and back
    "int8": 15,  # to codes, to numbers that are added, to codes and numbers again
    "sign": 40,  # its size, its signs, and the result
    "vote": 10,
    "one_bit": 40,
    "top_k": 48,  # a selection goes over |x| about four times
    "random_k": 36,
    "power": 36,  # three products with the matrix
}


@checks_kinds
@dataclass(frozen=True)
class Compression:
    """A method by its name, with its share (top_k, random_k) or rank (power).

    gradient_bits: of a code in ZeRO's scatters, 8 or 4 (int8; parameters have 8, as ZeRO++ sends
    them). by_hosts: send these in two hops, inside each node first; the second rounding of sums is
    not counted. Raises ValueError for an unknown name, a share outside 0...1, a rank below 1, other
    bits, and for 4 bits or two hops with a method other than int8.
    """

    name: str
    share: float = 0.01
    rank: int = 4
    gradient_bits: int = 8
    by_hosts: bool = False

    def __post_init__(self):
        if self.name not in TOUCHED:
            raise ValueError(
                f"compression={self.name!r} is not known: give {', '.join(map(repr, TOUCHED))}."
            )
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share!r} is no part of all elements: give 0.01, say.")
        at_least("rank", self.rank, 1)
        bits = self.gradient_bits
        if bits != 8 and (bits != 4 or self.name != "int8"):
            raise ValueError(
                f"gradient_bits={bits!r} with {self.name!r}: give 8, or 4 with 'int8'."
            )
        if self.by_hosts and self.name != "int8":
            raise ValueError(
                f"by_hosts=True with {self.name!r}: two hops are for the codes of 'int8'."
            )

    def messages(
        self, numel: float, size: int, shapes: Iterable[tuple[int, int]] = ()
    ) -> list[tuple[str, float]]:
        """Return the collectives over `size` ranks for `numel` gradients: (op, bytes of the whole
        tensor).

        shapes: for "power" the matrices among them; large ones are sent as thin matrices.
        """
        N, n = numel, size
        k = max(1, round(self.share * N))
        thin = {(a, b): 2 * self.rank * (a + b) < a * b for a, b in shapes}
        large = [each for each in shapes if thin[each]]
        rest = N - sum(a * b for a, b in large)
        return {
            "half": [("all_reduce", 2 * N)],
            "int8": [("all_to_all", INT8 * N), ("all_gather", INT8 * N)],
            "sign": [("all_gather", n * (N / 8 + 4))],
            "vote": [("all_to_all", N / 8), ("all_gather", N / 8)],
            "one_bit": [("all_to_all", N / 8 + 4 * n), ("all_gather", N / 8 + 4 * n)],
            "top_k": [("all_gather", n * 8 * k)],
            "random_k": [("all_reduce", 4 * k)],
            "power": [
                ("all_reduce", 4 * (rest + self.rank * sum(a for a, _ in large))),
                ("all_reduce", 4 * self.rank * sum(b for _, b in large)),
            ],
        }[self.name]

    def sent(self, numel: float, size: int, shapes: Iterable[tuple[int, int]] = ()) -> float:
        """Return the bytes that a rank sends, on average over the ranks."""
        passes = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}
        share = (size - 1) / size
        return sum(passes[op] * share * b for op, b in self.messages(numel, size, list(shapes)))

    def ring_seconds(self, numel: float, size: int, link: Link, shapes=()) -> float:
        """Return the time of the messages over equal links, each collective as a ring (a direct
        all-to-all takes as long). Compressing itself is not included."""
        rounds = {"all_reduce": 2, "all_gather": 1, "all_to_all": 1}
        return sum(
            link.seconds(num_bytes / size, rounds=rounds[op] * (size - 1))
            for op, num_bytes in self.messages(numel, size, list(shapes))
        )

    def touched(self, zero: int, num_micro_batches: int) -> float:
        """Return the bytes of memory traffic per element and step on a rank.  ZeRO's units: 6 for a
        scatter, codes to send and codes to add (5 with 4 bits), and 3 for a gather, codes to 16
        bits."""
        m, scatter = num_micro_batches, 4 + self.gradient_bits / 4
        units = {1: scatter + 3, 2: scatter * m + 3, 3: (scatter + 2 * 3) * m}
        return units[zero] if zero else TOUCHED[self.name]


def shapes_of_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the shapes of all matrices of a dense model."""
    layers = config.num_layers * layer_weights(config)
    outer = [*outer_weights(config, "first"), *outer_weights(config, "last")]
    return [w.shape for w in (*layers, *outer) if len(w.shape) == 2 and w.name != "tied head"]


@checks_kinds
def pays_below(saved_bytes: float, extra_seconds: float) -> float:
    """Return the bandwidth (bytes per second) at which the time saved on the link equals the cost:
    (saved bytes) / (extra seconds), if nothing overlaps. Latency is neglected."""
    return saved_bytes / extra_seconds if extra_seconds > 0 else float("inf")
