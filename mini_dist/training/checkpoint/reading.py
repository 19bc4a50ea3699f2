"""Find the checkpoint to resume from, complete and checked, and load a rank's part of it.

It never silently uses an older one, and loads nothing that differs from what was saved: a warning
and `Saved.refused` name what was skipped, and if nothing complete is left, it raises
CheckpointError.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from mini_dist.plan.fields import checks_kinds

from .files import check_whole, raise_first, tell_all, together
from .manifest import (
    DTYPES,
    CheckpointError,
    Latest,
    folder_name,
    opened,
    read_manifest,
    sha256,
    stored_places,
)
from .pieces import Piece, copy_common, meet


@dataclass
class Saved:
    """A complete checkpoint.

    step: as saved. extra: as given to `save`. world_size: the number of ranks that wrote it.
    refused: what was skipped, and why: newer steps, "latest" if it cannot be read, and folders
    whose names no save gives.
    """

    folder: Path
    step: int
    extra: dict
    world_size: int
    refused: dict[int | str, str]
    tensors: dict = field(repr=False)

    def load(self, pieces: list[Piece], group) -> None:
        """Fill the pieces of every rank, whatever the sharding, casting to their dtype.

        Raises ValueError on all ranks, without changes, for a tensor that the checkpoint lacks or
        has in another shape, and for one that no rank asks for (states, whose names have a "/", may
        be left out). Raises CheckpointError on all ranks if one cannot read.
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
        # (together: no rank writes to this directory while others read)
        together(lambda: self.fill(pieces), group, "read")

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
    def fill(self, pieces: list[Piece]) -> None:
        """Copy the overlap of each stored piece with these; only the needed pages are read."""
        files = {}
        for piece in pieces:
            about = self.tensors[piece.place.name]
            places = stored_places(piece.place.name, about)
            for (file, *_where), source in zip(about["pieces"], places):
                if meet(piece.place, source):
                    if file not in files:
                        files[file] = safe_open(self.folder / file, "pt")
                    copy_common(piece, Piece(source, files[file].get_tensor(str(source))))

    @cached_property
    def states(self) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """Return shape and dtype of each parameter's saved states, such as exp_avg."""
        states = {}
        for name, about in self.tensors.items():
            owner, slash, key = name.rpartition("/")
            if slash:
                states.setdefault(owner, {})[key] = tuple(about["shape"]), DTYPES[about["dtype"]]
        return states


@checks_kinds
def find(directory: str | Path, group, step: int | None = None) -> Saved | None:
    """Find the checkpoint that `latest` names, or, if it is not complete, the newest complete one
    before it; None if there is none at all. All ranks of the group call it: each checks a share of
    the files. It only reads.

    step: only this one. Warns of each that is skipped, see `Saved.refused`. Raises
    CheckpointError if there are some, but none is complete.
    """
    directory = Path(directory)
    first = group.rank() == 0
    tries, passed_over = together(lambda: first and to_try(directory, step), group, "read")[0]
    refused: dict[int | str, str] = dict(passed_over)
    for number, seal, names in tries:
        problems = {}
        for name in names:
            folder = directory / name
            manifest, problem = check(folder, number, seal, group)
            if problem is None:
                if problems and seal is None:  # the one used may be an older save of this step
                    refused[number] = problems[names[0]]
                tell(directory, refused, number, group)
                fields = {key: manifest[key] for key in ("step", "extra", "world_size", "tensors")}
                return Saved(folder, refused=refused, **fields)
            problems[name] = problem
        refused[number] = problems[names[0]]
    if refused:
        reasons = "; ".join(f"{called(what)}: {why}" for what, why in refused.items())
        raise CheckpointError(f"no checkpoint in {directory} is whole: {reasons}")
    return None


def tell(directory: Path, refused: dict, taken: int, group) -> None:
    for what, why in refused.items() if group.rank() == 0 else ():
        name = folder_name(what) if isinstance(what, int) else what
        warnings.warn(f"{directory / name} is refused: {why}. Step {taken} is taken.", stacklevel=4)


def called(what: int | str) -> str:
    return f"step {what}" if isinstance(what, int) else what


# --- which, in which order -----------------------------------------------------------------------


def to_try(directory: Path, step: int | None) -> tuple[list, list]:
    """Return, in order, [step, seal, folders that may contain it], and all [skipped name, why].

    step: only this one.
    """
    there = folders(directory)
    if step is not None:
        return [(step, None, there.get(step, [folder_name(step)]))], []
    steps, refused, others = sorted(there, reverse=True), {}, strangers(directory, there)
    try:
        latest = Latest.read(directory)
    except ValueError as problem:
        latest = Latest()
        if there or others or os.path.lexists(directory / "latest"):
            refused = {"latest": str(problem)} | {name: why for name, (_, why) in others.items()}
    else:
        step, by_hand = latest.step, latest.seals[latest.step] is None
        if step not in there:
            refused = {step: "latest names it, but it is gone"}
        elif not by_hand:  # written by a save, which would list newer ones
            for number in set(steps).difference(latest.seals, latest.left):
                if number > step and there[number] != [f"{folder_name(number)}.writing"]:
                    refused[number] = "it is newer than latest, which does not list it"
        for name, (number, why) in others.items():
            if step not in there or (number > step and not by_hand):
                refused[name] = why
    order = latest.with_older(steps).seals
    tries = [(number, seal, there[number]) for number, seal in order.items() if number in there]
    return tries or [(number, None, there[number]) for number in steps], list(refused.items())


def folders(directory: Path) -> dict[int, list[str]]:
    """Return, for each step, the folders that may be its checkpoint. Besides the folder of that
    name: one whose save was killed before the rename, and one that it replaced (see
    files.rename)."""
    there: dict[int, list[str]] = {}
    for kind in ("", ".writing", ".replaced"):
        for path in sorted(directory.glob(f"step-*{kind}")):
            match = re.fullmatch(rf"step-(\d{{8,18}}){re.escape(kind)}", path.name)
            if match and (not kind or (path / "manifest.json").exists()):
                there.setdefault(int(match[1]), []).append(path.name)
    return there


def strangers(directory: Path, there: dict[int, list[str]]) -> dict[str, tuple[int, str]]:
    """Return checkpoints under a name that no save gives, such as a renamed folder: their steps,
    and why they are not used."""
    known = {name for names in there.values() for name in names}
    found = {}
    for path in sorted(directory.glob("*")):
        if path.name not in known and path.is_dir():
            manifest, problem = read_manifest(path)
            if problem is None:
                step = manifest["step"]
                name = folder_name(step)
                found[path.name] = step, f"it has a checkpoint, but would have to be named {name}"
    return found


# --- whether it is complete ----------------------------------------------------------------------


def check(folder: Path, step: int, seal: str | None, group) -> tuple[dict | None, str | None]:
    """Return (the manifest, None), or on all ranks (None, the first problem found)."""
    manifest, problem = read_manifest(folder, step, seal)
    for share in (damage, missing):  # (the tensors' sizes are known once the files are checked)
        problem = problem or share(folder, manifest, group)
        problems = [p for p in tell_all(problem, group) if p]
        if problems:
            return None, problems[0]
    return manifest, None


def damage(folder: Path, manifest: dict, group) -> str | None:
    """Return what is wrong with this rank's share of the files."""
    for name in sorted(manifest["files"])[group.rank() :: group.size()]:
        about, path = manifest["files"][name], folder / name
        try:
            with opened(path) as file:
                size = file.seek(0, 2)
            if size != about["bytes"]:
                return f"{name} has {size:,} bytes, not {about['bytes']:,}"
            if sha256(path) != about["sha256"]:
                return f"{name} has changed since it was written"
            if problem := unlike_manifest(path, manifest):
                return problem
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        except Exception as error:  # whatever safetensors raises
            return f"{name} cannot be read: {error}"
    return None


def unlike_manifest(path: Path, manifest: dict) -> str | None:
    """Return whether the file holds other tensors than the manifest lists."""
    expected = {}
    for name, about in manifest["tensors"].items():
        for (file, *_), place in zip(about["pieces"], stored_places(name, about)):
            if file == path.name:
                expected[str(place)] = DTYPES[about["dtype"]], place.numel
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # (mapped, not read)
        held = {key: (tensor.dtype, tensor.numel()) for key, tensor in tensors.items()}
    if held != expected:
        one = min(key for key, _ in held.items() ^ expected.items())
        return f"manifest.json and {path.name} do not agree about {one}"
    return None


def missing(folder: Path, manifest: dict, group) -> str | None:
    """Check, for this rank's share of the tensors, whether the pieces leave a gap."""
    share = sorted(manifest["tensors"])[group.rank() :: group.size()]
    try:
        check_whole({name: manifest["tensors"][name] for name in share})
    except ValueError as error:
        return str(error)
    return None
