"""Find the checkpoint to resume from, whole and checked, and load from it what a rank asks for.

Nothing older is ever taken in silence, and nothing is loaded that is not what was saved: a warning
and `Saved.refused` name what was passed over, and where nothing whole is left, CheckpointError.
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
    """A checkpoint that is whole.

    step: as saved. extra: as given to `save`. world_size: of the ranks that wrote it. refused: what
    would have been taken before it, and why not: of each step, of "latest" if it cannot be read,
    and of folders with a name that no save gives.
    """

    folder: Path
    step: int
    extra: dict
    world_size: int
    refused: dict[int | str, str]
    tensors: dict = field(repr=False)

    def load(self, pieces: list[Piece], group) -> None:
        """Fill the pieces of every rank, however they are cut, casting to their dtype.

        Raises ValueError on all ranks, with nothing changed, for a tensor that the checkpoint does
        not have or has in another shape, and for one that no rank asks for (states, whose names
        have a "/", may be left). Raises CheckpointError on all ranks if one cannot read.
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
        # (together: nobody writes to this directory while others read)
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
        """Copy what each stored piece has of these; only the pages that are needed are read."""
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
        """What was saved of each parameter besides itself, as exp_avg: shape and dtype."""
        states = {}
        for name, about in self.tensors.items():
            owner, slash, key = name.rpartition("/")
            if slash:
                states.setdefault(owner, {})[key] = tuple(about["shape"]), DTYPES[about["dtype"]]
        return states


@checks_kinds
def find(directory: str | Path, group, step: int | None = None) -> Saved | None:
    """The checkpoint that `latest` names, or if that is not whole the newest one before it that
    is; None if there are none at all. All ranks of the group call it: each checks a share of the
    files. It only reads.

    step: this one and no other. Warns of each that is passed over, see `Saved.refused`. Raises
    CheckpointError if there are some, but none is whole.
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
                if problems and seal is None:  # what is taken may be an older save of this step
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
    """([step, seal, folders that may be it] of each in order, [what is passed over, why] of each).

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
        elif not by_hand:  # a save wrote it: what is newer, it would list
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
    """Of each step, the folders that may be its checkpoint. Besides the one of its name: one whose
    save was killed before it got that name, and one that had it before (see files.rename)."""
    there: dict[int, list[str]] = {}
    for kind in ("", ".writing", ".replaced"):
        for path in sorted(directory.glob(f"step-*{kind}")):
            match = re.fullmatch(rf"step-(\d{{8,18}}){re.escape(kind)}", path.name)
            if match and (not kind or (path / "manifest.json").exists()):
                there.setdefault(int(match[1]), []).append(path.name)
    return there


def strangers(directory: Path, there: dict[int, list[str]]) -> dict[str, tuple[int, str]]:
    """Checkpoints under a name that no save gives, as of a folder that was renamed: their steps,
    and why they are not taken."""
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


# --- whether it is whole -------------------------------------------------------------------------


def check(folder: Path, step: int, seal: str | None, group) -> tuple[dict | None, str | None]:
    """(the manifest, None), or on all ranks (None, what the first of them finds wrong)."""
    manifest, problem = read_manifest(folder, step, seal)
    for share in (damage, missing):  # (how large the tensors are is known when the files are)
        problem = problem or share(folder, manifest, group)
        problems = [p for p in tell_all(problem, group) if p]
        if problems:
            return None, problems[0]
    return manifest, None


def damage(folder: Path, manifest: dict, group) -> str | None:
    """What is wrong with this rank's share of the files."""
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
        except Exception as error:  # whatever safetensors says
            return f"{name} cannot be read: {error}"
    return None


def unlike_manifest(path: Path, manifest: dict) -> str | None:
    """Whether the file holds other tensors than the manifest says."""
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
    """Whether the pieces leave something out, of this rank's share of the tensors."""
    share = sorted(manifest["tensors"])[group.rank() :: group.size()]
    try:
        check_whole({name: manifest["tensors"][name] for name in share})
    except ValueError as error:
        return str(error)
    return None
