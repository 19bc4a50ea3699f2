"""gloo for ranks that share a GPU: their tensors travel by way of the host's memory.

NCCL refuses two ranks on one GPU, and gloo's sends and receives take host memory only. So each
tensor on the GPU is copied to the host, gloo works on the copies, and `wait` copies what has
arrived back to the GPU. The copies make this slow: it is for correctness on a machine with one GPU.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.utils._pytree import tree_leaves, tree_map_only


class StagedWork:
    """The handle of a communication of host copies; `arrived`: [(tensor, its host copy)]."""

    def __init__(self, work, arrived: list[tuple[torch.Tensor, torch.Tensor]]):
        self.work, self.arrived = work, arrived

    def wait(self, timeout=timedelta(0)) -> bool:
        done = self.work.wait(timeout) if timeout else self.work.wait()
        arrived, self.arrived = self.arrived, []  # only once: the caller may change them later
        for tensor, copy in arrived:
            tensor.copy_(copy)
        return done

    def get_future(self):
        """A future that is done. (DDP asks for one, so with DDP every bucket waits for itself.)"""
        filled = [tensor for tensor, _ in self.arrived]
        self.wait()
        future = torch.futures.Future()
        future.set_result(filled)
        return future

    def is_completed(self) -> bool:
        """False until `wait` has copied what arrived."""
        return not self.arrived and self.work.is_completed()

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self):
        return self.work.exception()

    def _source_rank(self) -> int:
        return self.work._source_rank()


class Staged:
    """A process group whose calls work on host copies of the tensors that are on `kind`."""

    def __init__(self, gloo, kind: str):
        self.gloo, self.kind = gloo, kind

    def __getattr__(self, method: str):
        call = getattr(self.gloo, method)

        def by_way_of_the_host(*args):
            copies: dict[int, torch.Tensor] = {}  # by id: one copy of a tensor that comes twice

            def host_copy(tensor):
                if tensor.device.type != self.kind:
                    return tensor
                if id(tensor) not in copies:
                    copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
                return copies[id(tensor)]

            work = call(*tree_map_only(torch.Tensor, host_copy, args))
            # The first argument is what a call fills, except for a send.
            filled = [] if method == "send" else tree_leaves(args[:1])
            arrived = [(t, copies[id(t)]) for t in filled if id(t) in copies]
            return StagedWork(work, arrived) if work is not None else None

        return by_way_of_the_host
