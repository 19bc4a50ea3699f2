"""The random generators of a rank, torch's, NumPy's and Python's, as tensors that can be saved."""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor

from .pieces import Piece, piece


def random_pieces(group) -> list[Piece]:
    """Return the state of this rank's generators, as tensors that belong to this rank alone."""
    return [piece(f"rank {group.rank()}/{kind}", t) for kind, t in random_state().items()]


def kind_of(piece: Piece) -> str:
    return piece.place.name.partition("/")[2]


def random_state() -> dict[str, Tensor]:
    """Return torch's, NumPy's and Python's state; float64 holds their 32-bit words and one
    float."""
    _, words, *rest = np.random.get_state()
    _, state, gauss = random.getstate()
    generators = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*words.tolist(), *rest], dtype=torch.float64),
        "python": torch.tensor([*state, math.nan if gauss is None else gauss], dtype=torch.float64),
    }
    if torch.cuda.is_initialized():
        generators["cuda"] = torch.cuda.get_rng_state()
    return generators


def set_random_state(generators: dict[str, Tensor]) -> None:
    for kind, tensor in generators.items():
        if kind == "torch":
            torch.set_rng_state(tensor)
        elif kind == "cuda":
            torch.cuda.set_rng_state(tensor)
        elif kind == "numpy":
            *words, position, has_gauss, gauss = tensor.tolist()
            words = np.array(words, dtype=np.uint32)
            np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
        else:
            *state, gauss = tensor.tolist()
            state = tuple(map(int, state))
            random.setstate((random.getstate()[0], state, None if math.isnan(gauss) else gauss))
