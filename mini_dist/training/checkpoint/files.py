"""Checkpoints on disk: sharded, atomic, checksummed, and readable for any sharding.

    checkpoints/
        latest                       the checkpoint to resume from; edit it to go back further
        lock                         held by the training that saves here (lock.py)
        step-00000100/
            manifest.json            for each tensor: dtype, shape, which part is in which file
            rank-00000.safetensors   rank 0's file; rank-00001... are the other ranks'
        step-00000200.writing/       a save in progress, or one that was killed
        step-00000100.replaced/      from an older run, while step 100 is saved again

A save is complete when `latest` names it, and by then all of it is on the disk: a checkpoint exists
as a whole or not at all. Later damage (a flipped bit, a truncated file, a missing folder) is
detected before anything is loaded (reading.py), by a SHA-256 of each file in the manifest, and of
the manifest in itself and in `latest`.

The format is safetensors: bytes with a JSON header. Reading it runs no code, unlike unpickling
(torch.load without weights_only executes what is in the file), and any part can be mapped into
memory without the rest.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from mini_dist.collectives import all_gather
from mini_dist.collectives.messages import device_for_numbers
from mini_dist.plan.fields import checks_kinds

from .manifest import (
    DTYPES,
    FORMAT,
    CheckpointError,
    Latest,
    digest,
    file_name,
    folder_name,
    name_of,
    read_manifest,
    sealed,
    sha256,
    steps_in,
    stored_places,
)
from .pieces import Piece, Place, inside


@checks_kinds
def save(
    directory: str | Path,
    step: int,
    pieces: list[Piece],
    group,
    extra: dict | None = None,
    keep: int | None = None,
) -> Path:
    """Write the pieces of all ranks as the checkpoint of `step`; return its directory.

    All ranks of the group call it, on one file system. One rank writes what several ranks hold.
    extra: any data that JSON can represent. keep: how many checkpoints to keep; None keeps
    all.

    Raises ValueError if the pieces are not whole tensors together or `step` or `keep` is invalid,
    and CheckpointError on all ranks if one cannot write.
    """
    check_numbers(step, keep)
    mine, tensors = share_out(pieces, group)
    return write(directory, step, mine, tensors, group, extra, keep)


def check_numbers(step: int, keep: int | None) -> None:
    for name, value, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if not least <= value < 10**18:
            also = ", or None for all" if name == "keep" else ""
            raise ValueError(f"{name}={value!r} cannot be: give a whole number from {least}{also}")


def share_out(pieces: list[Piece], group) -> tuple[list[Piece], dict]:
    """Divide the writing: return this rank's pieces, and the manifest's entry for each tensor."""
    held = {piece.place: piece for piece in pieces if piece.place.numel}
    known = [(p.name, p.shape, p.where, name_of(held[p].tensor.dtype)) for p in held]
    tensors, holders = {}, {}
    for rank, places in enumerate(tell_all(known, group)):
        for name, shape, where, dtype in places:
            if dtype not in DTYPES:
                raise ValueError(
                    f"{name} is {dtype}, which safetensors cannot store: cast it first"
                )
            about = tensors.setdefault(name, {"dtype": dtype, "shape": shape, "pieces": []})
            if (about["dtype"], about["shape"]) != (dtype, shape):
                raise ValueError(
                    f"{name} is {about['dtype']}{about['shape']} on one rank and {dtype}{shape} on "
                    f"rank {rank}: all must mean the same tensor"
                )
            holders.setdefault(Place(name, shape, *where), []).append(rank)
    mine, load = [], [0] * group.size()
    for place, ranks in holders.items():
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += place.numel
        tensors[place.name]["pieces"].append([file_name(writer), *place.where])
        if writer == group.rank():
            mine.append(held[place])
    check_whole(tensors)
    return mine, tensors


def check_whole(tensors: dict) -> None:
    """Raise ValueError if the pieces of a tensor do not cover it."""
    seen = set()  # a parameter and its states are sharded alike: check once
    for name, about in tensors.items():
        places = stored_places(name, about)
        geometry = (tuple(about["shape"]), *(place.where for place in places))
        if geometry in seen or len(places) == 1 == places[0].numel:
            continue
        seen.add(geometry)
        whole = (0,) * len(about["shape"]), tuple(about["shape"])
        missing = np.ones(about["shape"], dtype=bool)
        for place in places:
            for block in place.blocks():
                missing[inside(block, whole)] = False
        if missing.any():
            raise ValueError(
                f"the ranks together hold {missing.size - missing.sum():,} of the "
                f"{missing.size:,} elements of {name} {about['shape']}: the others are lost"
            )


def write(directory, step: int, mine: list[Piece], tensors: dict, group, extra, keep) -> Path:
    """Write the files, flush them to the disk, and only then let `latest` name the checkpoint."""
    extra = json.loads(json.dumps(extra or {}))  # as it will be read, or an error on all ranks
    final = Path(directory) / folder_name(step)
    writing = beside(final, "writing")
    first = group.rank() == 0
    try:
        together(lambda: make_empty(writing) if first else None, group)
        path = writing / file_name(group.rank())
        shards = together(lambda: write_shard(path, mine) if mine else None, group)
        manifest = {
            "format": FORMAT,
            "step": operator.index(step),
            "world_size": group.size(),
            "extra": extra,
            "files": {file_name(rank): shard for rank, shard in enumerate(shards) if shard},
            "tensors": tensors,
        }
        together(lambda: put_in_place(writing, final, manifest, keep) if first else None, group)
    except CheckpointError:
        if first and writing not in saved_as_writing(final.parent):  # or a full disk stays full
            shutil.rmtree(writing, ignore_errors=True)
        raise
    return final


def make_empty(writing: Path) -> None:
    for saved in saved_as_writing(writing.parent):  # killed before the last rename
        rename(saved, saved.with_suffix(""))
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def write_shard(path: Path, pieces: list[Piece]) -> dict:
    """Write one rank's file; return its manifest entry."""
    tensors = {str(piece.place): piece.tensor.detach().contiguous() for piece in pieces}
    for key, tensor in tensors.items():
        if tensor.dim() == 0:  # one step count may belong to several parameters
            tensors[key] = tensor.clone()
    save_file(tensors, path)
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def put_in_place(writing: Path, final: Path, manifest: dict, keep: int | None) -> None:
    write_text(writing / "manifest.json", sealed(manifest))
    flush(writing)
    flush(writing.parent)
    latest = put_first(final.parent, manifest, keep)  # from here on it is saved
    rename(writing, final)
    remove_all_but(latest, final)


def put_first(directory: Path, manifest: dict, keep: int | None) -> Latest:
    """Let `latest` name this checkpoint, before the ones that it follows."""
    step, present = manifest["step"], steps_in(directory)
    seals = {step: digest(manifest)}
    for number, seal in last_known(directory).with_older(present).seals.items():
        if number < step and number in present and len(seals) != keep:
            seals[number] = seal
    latest = Latest(seals, left={number for number in present if number > step})
    writing = directory / "latest.writing"
    write_text(writing, latest.text())
    writing.replace(directory / "latest")
    flush(directory)
    return latest


def rename(writing: Path, final: Path) -> None:
    """Rename the folder; an existing one is moved aside. At any time the checkpoint that `latest`
    names exists, as .writing or under its own name."""
    if final.exists():  # saved before, by a run that was then resumed from an earlier step
        old = beside(final, "replaced")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    writing.rename(final)
    flush(final.parent)


def remove_all_but(latest: Latest, final: Path) -> None:
    """Remove older checkpoints that `latest` does not list, and the remains of killed saves."""
    for number in steps_in(final.parent):
        if number < latest.step and number not in latest.seals:
            folder = final.with_name(folder_name(number))
            shutil.rmtree(beside(folder, "replaced"), ignore_errors=True)
            folder.rename(beside(folder, "replaced"))  # half of a checkpoint would look damaged
    for left in final.parent.glob("step-*.*"):
        ours = re.fullmatch(r"step-\d{8,}\.(replaced|writing)", left.name)
        if ours:  # and not, for example, somebody's step-100.backup
            shutil.rmtree(left, ignore_errors=True)


def saved_as_writing(directory: Path) -> list[Path]:
    """Return complete saves that still have the name of a save in progress: the one that `latest`
    names, or, without a latest, all complete ones."""
    try:
        latest = Latest.read(directory)
        seals = {latest.step: latest.seals[latest.step]}
    except ValueError:
        seals = {}
    saved = []
    for writing in directory.glob("step-*.writing"):
        manifest, _ = read_manifest(writing)
        if manifest and writing.name == f"{folder_name(manifest['step'])}.writing":
            is_named = seals.get(manifest["step"]) == digest(manifest)
            if is_named if seals else not writing.with_suffix("").exists():
                saved.append(writing)
    return saved


def last_known(directory: Path) -> Latest:
    try:
        return Latest.read(directory)
    except ValueError:  # none yet, or an unreadable one, which `find` reports
        return Latest()


def beside(folder: Path, what: str) -> Path:
    return folder.with_name(f"{folder.name}.{what}")


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    flush(path)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a directory's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- small things --------------------------------------------------------------------------------


def tell_all(message, group) -> list:
    """Return every rank's message (any data that JSON can represent), in rank order."""
    text = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
    data = torch.from_numpy(text.copy()).to(device_for_numbers(group))
    sizes = all_gather(torch.tensor([len(data)], device=data.device), group).tolist()
    everyones = all_gather(data, group, sizes).split(sizes)
    return [json.loads(each.cpu().numpy().tobytes()) for each in everyones]


def together(do: Callable, group, what: str = "write") -> list:
    """Call `do` on every rank; return all results. CheckpointError on all if one fails."""
    try:
        mine = do(), None
    except CheckpointError as error:
        mine = None, str(error)
    except Exception as error:  # whatever it is, the others must not wait for this rank
        mine = None, f"cannot {what}: {error}"
    everyones = tell_all(mine, group)
    raise_first([problem for _, problem in everyones])
    return [result for result, _ in everyones]


def raise_first(problems: list, kind: type[Exception] = CheckpointError) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise kind(f"rank {rank}: {problem}")
