"""The contents of a checkpoint, and the list of a directory's checkpoints: both read with care.

Every checkpoint has a `manifest.json`. Its seal is a SHA-256 of its contents. `latest` is a list:

    step-00000200 3f8a...        the checkpoint to resume from, and the seal of its manifest
    step-00000100 77b0...        earlier ones, in case the first is damaged
    left step-00000300           not to be used: training has gone back to before it

To send the training back to a checkpoint, write just its name into the file, without a seal. If a
checkpoint is lost or replaced by an older one, this is noticed, because latest still lists it.

Anything may have changed the files, so everything that does not have exactly the form of a
save is refused. (A seal detects accidents. It is not a signature: it contains no secret.)
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from .pieces import Place

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or no complete one exists."""


# --- names ---------------------------------------------------------------------------------------


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES = {
    name_of(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    )
}


def steps_in(directory: str | Path) -> list[int]:
    """Return the steps that have a folder, newest first."""
    found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in Path(directory).glob("step-*")]
    return sorted((int(match[1]) for match in found if match), reverse=True)


def stored_places(name: str, about: dict) -> list[Place]:
    return [Place(name, about["shape"], *where) for _file, *where in about["pieces"]]


# --- the manifest --------------------------------------------------------------------------------


def digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def sealed(manifest: dict) -> str:
    return json.dumps({**manifest, "sha256": digest(manifest)})


FORM = {
    "format": int,
    "step": int,
    "world_size": int,
    "extra": dict,
    "files": {str: {"bytes": int, "sha256": str}},
    # a piece: its file, the offset and size of its box, start and stop in the flattened box
    "tensors": {str: {"dtype": str, "shape": [int], "pieces": [(str, [int], [int], int, int)]}},
}


def check_form(value, form=FORM, where: str = "manifest.json") -> None:
    """Raise ValueError unless `value`, read from JSON, has the given form; ints are sizes."""
    if isinstance(form, type):
        fits = type(value) is form and (form is not int or 0 <= value < 2**63)
    elif isinstance(form, dict):
        fits = isinstance(value, dict) and (str in form or value.keys() == form.keys())
    else:
        fits = isinstance(value, list) and (isinstance(form, list) or len(value) == len(form))
    if not fits:
        raise ValueError(f"{where} is {json.dumps(value)[:40]}, which no save writes")
    if isinstance(form, dict):
        for key, each in value.items():
            check_form(each, form.get(key, form.get(str)), f"{where}: {key}")
    elif isinstance(form, (list, tuple)):
        for number, each in enumerate(value):
            check_form(each, form[number if isinstance(form, tuple) else 0], where)


def check_tensors(manifest: dict) -> None:
    """Raise ValueError for an impossible file or piece, before it is used."""
    expected = {file_name(rank) for rank in range(min(manifest["world_size"], 10**6))}
    for name in manifest["files"]:
        if name not in expected:
            raise ValueError(f"{name!r} is no file of one of {manifest['world_size']} ranks")
    for name, about in manifest["tensors"].items():
        if about["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {about['dtype']!r}, which cannot be stored")
        for file, *_where in about["pieces"]:
            if file not in manifest["files"]:
                raise ValueError(f"{name} is in {file!r}, which is not among its files")
        places = stored_places(name, about)  # (ValueError if one is not in the tensor)
        held = [place.numel for place in places]
        if not all(held) or sum(held) < max(1, math.prod(about["shape"])):
            raise ValueError(f"the pieces of {name} are not all of its {about['shape']}")


def read_manifest(folder: Path, step: int | None = None, seal: str | None = None):
    """Return (the manifest, None), or (None, what is wrong with it).

    step: the expected step. seal: the expected seal.
    """
    try:
        if folder.is_symlink():
            return None, "it is a symbolic link"
        manifest = json.loads(read(folder / "manifest.json"))
        own = manifest.pop("sha256")
        if own != digest(manifest):
            return None, "manifest.json has changed since it was written"
        if manifest["format"] != FORMAT:
            return None, f"its format is {manifest['format']}, this version reads {FORMAT}"
    except (FileNotFoundError, NotADirectoryError):
        return None, "it has no manifest.json"
    except Exception:  # (for example, a list has no sha256, and JSON may be too deep)
        return None, "manifest.json cannot be read"
    if seal not in (None, own):
        return None, "it is not the checkpoint that latest lists under this name"
    try:
        check_form(manifest)
        check_tensors(manifest)
    except (ValueError, RecursionError) as error:
        return None, str(error)
    if step not in (None, manifest["step"]):
        return None, f"its manifest.json is of step {manifest['step']}"
    return manifest, None


# --- latest --------------------------------------------------------------------------------------


@dataclass
class Latest:
    """The contents of `latest`. seals: step -> seal, the one to resume from first; None: by
    hand."""

    seals: dict[int, str | None] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    @property
    def step(self) -> int:
        return next(iter(self.seals))

    @staticmethod
    def read(directory: Path) -> Latest:
        """Read the file. Raises ValueError, which says why, if there is none or it cannot be
        read."""
        try:
            lines = read(directory / "latest").decode("ascii").splitlines()
        except FileNotFoundError:
            raise ValueError("it is missing, so a newer checkpoint may also be missing") from None
        except (OSError, UnicodeError):
            raise ValueError("it cannot be read") from None
        latest = Latest()
        for line in lines:
            match = re.fullmatch(r"(left )?step-(\d{8,18})( [0-9a-f]{64})?\s*", line)
            if match and match[1]:
                latest.left.add(int(match[2]))
            elif match:
                latest.seals.setdefault(int(match[2]), match[3] and match[3].strip())
            elif not latest.seals:
                break
        if not latest.seals:
            raise ValueError("its first line is no name of a checkpoint")
        return latest

    def with_older(self, present: list[int]) -> Latest:
        """Return a copy with the other existing steps, below all listed ones."""
        older = [step for step in present if step < min(self.seals, default=math.inf)]
        return Latest({**self.seals, **dict.fromkeys(older)}, self.left)

    def text(self) -> str:
        listed = [f"{folder_name(step)} {seal or ''}".strip() for step, seal in self.seals.items()]
        return "\n".join(
            [*listed, *(f"left {folder_name(step)}" for step in sorted(self.left)), ""]
        )


# --- files ---------------------------------------------------------------------------------------


def opened(path: Path) -> BinaryIO:
    """Open a plain file: not a link, which may lead anywhere, or a pipe, which may never end."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return open(handle, "rb")


def read(path: Path) -> bytes:
    with opened(path) as file:
        return file.read()


def sha256(path: Path) -> str:
    total = hashlib.sha256()
    with opened(path) as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()
