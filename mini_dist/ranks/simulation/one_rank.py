"""What one rank of any world does, recorded in a process of this machine.

A worker (a rank of an ordinary launch) leaves its own world and becomes one rank of the simulated
world after another: its tensors have shapes and no storage, its groups send nothing.
"""

from __future__ import annotations

import gc
import linecache
import resource
import time
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from io import StringIO
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional

from ..autocast import AutocastWithoutStorage
from ..rank import seed_everything
from ..without_storage import without_storage
from .kinds import what_it_did
from .shortcut import Shortcut

aten = torch.ops.aten


def run_ranks(call: tuple, jobs: list[list], world_size: int, seed: int, group) -> list:
    """Be each rank of this worker's jobs in turn; return of each what it did in short, and
    all of it: what its recorder exports, (its result, what it printed); and what it took here.

    call: (fn, args, kwargs, pretend, cells): `cells` are the sources that no file holds, in which
    the names of `pretend` are looked for. jobs: for each worker its list of Job. group: of the
    workers.
    """
    mine = jobs[group.rank()]
    group.recorder.phases.unwatch()  # the simulated ranks have recorders of their own
    dist.destroy_process_group()
    fn, args, kwargs, pretend, cells = call
    linecache.cache.update(cells)
    found, outcomes = [], {}
    for job in mine:
        gc.collect()  # what the last rank left must not be counted as this one's
        began = time.process_time()
        seed_everything(seed + job.rank)
        rank = without_storage(job.rank, world_size, True, pretend, outcomes)
        with rank as simulated, what_torch_lacks():
            if job.shortcut:
                simulated.recorder.shortcut = Shortcut(simulated.recorder)
            with as_that_rank(job.rank, world_size), redirect_stdout(StringIO()) as printed:
                result = fn(*args, simulated, **kwargs)
        export = simulated.recorder.export()
        did = what_it_did(job.rank, export) if job.shortcut else None
        kept = (export, (result, printed.getvalue())) if job.keep else (None, None)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found.append((did, *kept, Cost(time.process_time() - began, most)))
    return found


class Cost(NamedTuple):
    """What a simulated rank took on this machine: CPU seconds, and the memory of its process."""

    seconds: float
    resident_bytes: int


class Job(NamedTuple):
    """A rank to be. shortcut: note collectives without their messages. keep: return all that it
    did, and not only a digest."""

    rank: int
    shortcut: bool = False
    keep: bool = True


@contextmanager
def as_that_rank(rank: int, world_size: int):
    """Tell which rank of the simulated world raised: the launch knows only the worker's number."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # (Python 3.11)
            error.add_note(f"(as rank {rank} of the {world_size:,} simulated ranks)")
        raise


@contextmanager
def what_torch_lacks():
    """Inside, torch has for tensors without storage what it has for those of a GPU: fused attention
    (we call the CPU's kernel, which saves the same tensors) and norm, autocast, and a module of the
    device.
    """
    attention, autocast = functional.scaled_dot_product_attention, torch.autocast
    rms_norm = functional.rms_norm

    def attend(q, *args, **kwargs):
        return fused_attention(q, *args, **kwargs) if q.is_meta else attention(q, *args, **kwargs)

    def norm(x, normalized_shape, weight=None, eps=None):
        if not x.is_meta:
            return rms_norm(x, normalized_shape, weight, eps)
        # On a GPU it is one kernel (torch 2.9), which moves and keeps what layer_norm's does.
        return functional.layer_norm(x, normalized_shape, weight)

    def cast(device_type, dtype=torch.bfloat16, enabled=True, **options):
        if device_type != "meta":
            return autocast(device_type, dtype=dtype, enabled=enabled, **options)
        return AutocastWithoutStorage(dtype) if enabled else nullcontext()

    replaced = [
        (functional, "scaled_dot_product_attention", attend),
        (functional, "rms_norm", norm),
        (torch, "autocast", cast),
        (torch, "meta", DeviceModule()),
        # DDP compares the shapes on all ranks, which it has received as values.
        (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *_: None),
    ]
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    replaced.append((FSDPParamGroup, "_validate_no_meta_params", lambda self: None))
    with ExitStack() as stack:
        for module, name, ours in replaced:
            stack.enter_context(mock.patch.object(module, name, ours, create=True))
        yield


class DeviceModule:
    """What FSDP2 and DTensor ask torch.cuda for, such as its streams; the CPU's do nothing."""

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0


def fused_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
