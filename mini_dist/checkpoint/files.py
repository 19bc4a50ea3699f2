"""Checkpoints on disk: sharded, atomic, checksummed, and readable however the ranks cut the model.

    checkpoints/
        latest                       the directory to resume from; edit it to go back further
        step-00000100/
            manifest.json            of each tensor: dtype, shape, which part is in which file
            rank-00000.safetensors   what rank 0 wrote; rank-00001... what the others did
        step-00000200.writing/       a save that is under way, or that was killed

A directory gets its final name when everything in it is on the disk: a checkpoint is there as a
whole or not at all. What has changed since (a flipped bit, a cut file) is found by the SHA-256 of
each file in the manifest and of the manifest in itself, before anything is loaded.

safetensors is the format: bytes with a JSON header. Reading one runs no code, as unpickling does
(torch.load without weights_only executes what is in the file), and any part can be mapped into
memory without the rest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..collectives import all_gather
from .pieces import Piece, Place, copy_common, inside, meet

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or none of those that are there is whole."""


# --- save ----------------------------------------------------------------------------------------


def save(
    directory: str | Path,
    step: int,
    pieces: list[Piece],
    group,
    extra: dict | None = None,
    keep: int | None = None,
) -> Path:
    """Write the pieces of all ranks as the checkpoint of `step`; return its directory.

    All ranks of the group call it, on one file system. What several ranks hold alike is written by
    one of them. extra: anything that JSON can say. keep: remove all but so many checkpoints.

    Raises ValueError if the pieces are not whole tensors together, CheckpointError on all ranks if
    one cannot write.
    """
    mine, tensors = share_out(pieces, group)
    return write(directory, step, mine, tensors, group, extra, keep)


def share_out(pieces: list[Piece], group) -> tuple[list[Piece], dict]:
    """Who writes what: my part of the pieces, and of each tensor what the manifest says."""
    held = {piece.place: piece for piece in pieces if piece.place.numel}
    known = [(p.name, p.shape, p.where, name_of(held[p].tensor.dtype)) for p in held]
    tensors, holders = {}, {}
    for rank, places in enumerate(tell_all(known, group)):
        for name, shape, where, dtype in places:
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
    """Raise ValueError if the pieces of a tensor leave something of it out."""
    seen = set()  # a parameter and its states are cut alike: look once
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
    """Write, make sure that it is on the disk, and only then give it its name."""
    extra = json.loads(json.dumps(extra or {}))  # as it will be read, or an error on all ranks
    final = Path(directory) / f"step-{step:08d}"
    writing = final.with_name(f"{final.name}.writing")
    first = group.rank() == 0
    together(lambda: make_empty(writing) if first else None, group)
    path = writing / file_name(group.rank())
    shards = together(lambda: write_shard(path, mine) if mine else None, group)
    manifest = {
        "format": FORMAT,
        "step": step,
        "world_size": group.size(),
        "extra": extra,
        "files": {file_name(rank): shard for rank, shard in enumerate(shards) if shard},
        "tensors": tensors,
    }
    together(lambda: put_in_place(writing, final, manifest, keep) if first else None, group)
    return final


def make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)  # what a killed save has left
    directory.mkdir(parents=True)


def write_shard(path: Path, pieces: list[Piece]) -> dict:
    """One rank's file; what the manifest says of it."""
    tensors = {str(piece.place): piece.tensor.detach().contiguous() for piece in pieces}
    for key, tensor in tensors.items():
        if tensor.dim() == 0:  # one count of steps may stand for several parameters
            tensors[key] = tensor.clone()
    save_file(tensors, path)
    flush(path)
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def put_in_place(writing: Path, final: Path, manifest: dict, keep: int | None) -> None:
    write_text(writing / "manifest.json", sealed(manifest))
    flush(writing)
    if final.exists():  # saved before, by a run that was then resumed from an earlier step
        old = final.with_name(f"{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        writing.rename(final)
        shutil.rmtree(old)
    else:
        writing.rename(final)
    flush(final.parent)  # a latest that names nothing would be worse than an old one
    latest = final.parent / "latest"
    write_text(latest.with_name("latest.writing"), f"{final.name}\n")
    latest.with_name("latest.writing").replace(latest)
    flush(final.parent)
    if keep is not None:
        before = [step for step in steps_in(final.parent) if step <= manifest["step"]]
        for step in before[keep:]:
            shutil.rmtree(final.with_name(f"step-{step:08d}"), ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    flush(path)


def flush(path: Path) -> None:
    """Wait until it is on the disk: of a file its bytes, of a directory its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- find and load -------------------------------------------------------------------------------


@dataclass
class Saved:
    """A checkpoint that is whole.

    step: as saved. extra: as given to `save`. world_size: of the ranks that wrote it. refused:
    the newer ones that are not whole, step -> why.
    """

    folder: Path
    step: int
    extra: dict
    world_size: int
    refused: dict[int, str]
    tensors: dict = field(repr=False)

    def load(self, pieces: list[Piece], group) -> None:
        """Fill the pieces of every rank, however they are cut, casting to their dtype.

        Raises ValueError on all ranks, with nothing changed, for a tensor that the checkpoint does
        not have or has in another shape, and for one that no rank asks for (states, whose names
        have a "/", may be left).
        """
        wanted = {piece.place.name for piece in pieces}
        raise_first(tell_all(self.unlike(pieces), group), ValueError)
        asked = set().union(*tell_all(sorted(wanted), group))
        left = [name for name in self.tensors if name not in asked and "/" not in name]
        if left:
            raise ValueError(
                f"{self.folder.name} is of another model: it has {left[0]} "
                f"{self.tensors[left[0]]['shape']}, which this model lacks"
            )
        files = {}
        for piece in pieces:
            self.fill(piece, files)
        tell_all(None, group)  # nobody writes to this directory while others read

    def unlike(self, pieces: list[Piece]) -> str | None:
        for piece in pieces:
            place = piece.place
            if place.name not in self.tensors:
                return (
                    f"{self.folder.name} is of another model: it has no {place.name} "
                    f"{list(place.shape)}, which this model has"
                )
            shape = self.tensors[place.name]["shape"]
            if tuple(shape) != place.shape:
                return (
                    f"{self.folder.name} is of another model: its {place.name} is {shape}, "
                    f"this model's {list(place.shape)}"
                )
        return None

    @torch.no_grad()
    def fill(self, piece: Piece, files: dict) -> None:
        """Copy what each stored piece has of this one; only the pages that it needs are read."""
        name = piece.place.name
        for entry, source in zip(
            self.tensors[name]["pieces"], stored_places(name, self.tensors[name])
        ):
            if meet(piece.place, source):
                path = self.folder / entry[0]
                if path not in files:
                    files[path] = safe_open(path, "pt")
                copy_common(piece, Piece(source, files[path].get_tensor(str(source))))

    @cached_property
    def states(self) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """What was saved of each parameter besides itself, as exp_avg: shape and dtype."""
        states = {}
        for name, about in self.tensors.items():
            owner, slash, key = name.rpartition("/")
            if slash:
                shape, dtype = tuple(about["shape"]), getattr(torch, about["dtype"])
                states.setdefault(owner, {})[key] = shape, dtype
        return states


def find(directory: str | Path, group, step: int | None = None) -> Saved | None:
    """The newest checkpoint that is whole, up to the one that `latest` names; None if there are
    none at all. All ranks of the group call it: each checks a share of the files.

    step: this one and no other. Raises CheckpointError if there are some, but none is whole.
    """
    directory = Path(directory)
    steps = tell_all(to_try(directory) if step is None else [step], group)[0]
    refused = {}
    for number in steps:
        folder = directory / f"step-{number:08d}"
        manifest, problem = read_manifest(folder)
        problems = [p for p in tell_all(problem or damage(folder, manifest, group), group) if p]
        if not problems:
            fields = {key: manifest[key] for key in ("step", "extra", "world_size", "tensors")}
            return Saved(folder, refused=refused, **fields)
        refused[number] = problems[0]
        if group.rank() == 0 and number != steps[-1]:
            warnings.warn(
                f"{folder} is refused: {problems[0]}. Trying the one before.", stacklevel=2
            )
    if refused:
        reasons = "; ".join(f"step {number}: {why}" for number, why in refused.items())
        raise CheckpointError(f"no checkpoint in {directory} is whole: {reasons}")
    return None


def to_try(directory: Path) -> list[int]:
    """Newest first, from `latest` on; without a readable `latest`, all."""
    steps = steps_in(directory)
    latest = directory / "latest"
    named = re.fullmatch(rb"step-(\d+)\s*", latest.read_bytes()) if latest.is_file() else None
    return [step for step in steps if not named or step <= int(named[1])]


def steps_in(directory: Path) -> list[int]:
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in Path(directory).glob("step-*")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def read_manifest(folder: Path) -> tuple[dict | None, str | None]:
    """The manifest, or what is wrong with it."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        seal = manifest.pop("sha256")  # (which a list cannot do)
    except FileNotFoundError:
        return None, "it has no manifest.json"
    except (OSError, ValueError, KeyError, TypeError):
        return None, "manifest.json cannot be read"
    if seal != digest(manifest):
        return None, "manifest.json has changed since it was written"
    if manifest["format"] != FORMAT:
        return None, f"its format is {manifest['format']}, this version reads {FORMAT}"
    return manifest, None


def damage(folder: Path, manifest: dict, group) -> str | None:
    """What is wrong with this rank's share of the files."""
    for name in sorted(manifest["files"])[group.rank() :: group.size()]:
        about, path = manifest["files"][name], folder / name
        try:
            if path.stat().st_size != about["bytes"]:
                return f"{name} has {path.stat().st_size:,} bytes, not {about['bytes']:,}"
            if sha256(path) != about["sha256"]:
                return f"{name} has changed since it was written"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


# --- small things --------------------------------------------------------------------------------


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_places(name: str, about: dict) -> list[Place]:
    return [Place(name, about["shape"], *where) for _file, *where in about["pieces"]]


def digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sealed(manifest: dict) -> str:
    return json.dumps({**manifest, "sha256": digest(manifest)})


def sha256(path: Path) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def tell_all(message, group) -> list:
    """Every rank's message (anything that JSON can say), in rank order."""
    text = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
    data = torch.from_numpy(text.copy()).to(group.device)
    sizes = all_gather(torch.tensor([len(data)], device=group.device), group).tolist()
    everyones = all_gather(data, group, sizes).split(sizes)
    return [json.loads(each.cpu().numpy().tobytes()) for each in everyones]


def together(do: Callable, group) -> list:
    """Call `do` on every rank; what it returned on each. CheckpointError on all if one fails."""
    try:
        mine = do(), None
    except (OSError, SafetensorError) as error:
        mine = None, str(error)
    everyones = tell_all(mine, group)
    raise_first([problem and f"cannot write: {problem}" for _, problem in everyones])
    return [result for result, _ in everyones]


def raise_first(problems: list, kind: type[Exception] = CheckpointError) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise kind(f"rank {rank}: {problem}")
