"""Measure what autograd saves for backward."""

from __future__ import annotations

import torch
from torch import Tensor


class SavedBytes:
    """Count what autograd saves for backward, while forward and backward run inside `with`.

        with SavedBytes(model) as saved:
            loss(model(inputs)).backward()
        saved.now, saved.peak               # bytes

    Each storage counts once. Parameters do not count, because they exist anyway.
    """

    def __init__(self, model: torch.nn.Module):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.holders: dict[int, int] = {}  # address of a storage -> number of saves
        self.now = self.peak = 0

    def __enter__(self) -> SavedBytes:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: KeptTensor(tensor, self), lambda kept: kept.tensor
        )
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)


class KeptTensor:
    """A tensor that autograd saves, until autograd drops this object."""

    def __init__(self, tensor: Tensor, saved: SavedBytes):
        self.tensor, self.saved = tensor, saved
        storage = tensor.untyped_storage()
        self.place, self.nbytes = storage.data_ptr(), storage.nbytes()
        if self.place not in saved.parameters:
            saved.holders[self.place] = saved.holders.get(self.place, 0) + 1
            if saved.holders[self.place] == 1:
                saved.now += self.nbytes
                saved.peak = max(saved.peak, saved.now)

    def __del__(self):
        if self.place not in self.saved.parameters:
            self.saved.holders[self.place] -= 1
            if self.saved.holders[self.place] == 0:
                del self.saved.holders[self.place]
                self.saved.now -= self.nbytes
