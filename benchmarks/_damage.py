"""Define the kinds of damage of checkpoint_faults.py: functions of a generator and a directory.

The directory holds checkpoints of steps 2, 4 and 6. Next to it, with the suffix "-latest-before",
is a copy of its `latest` from before the last save.
"""

import json
import os
import random
import shutil

from mini_dist.training.checkpoint.manifest import sealed

STEPS = (2, 4, 6)
NEWEST, OLDER = "step-00000006", "step-00000004"


def pick(draw, directory, *patterns):
    """Return a file of the ones that still exist."""
    found = sorted(path for pattern in patterns for path in directory.glob(pattern))
    return draw.choice([path for path in found if path.is_file() and not path.is_symlink()])


ANY = ("latest", "step-*/*")
SHARDS = f"{NEWEST}/*.safetensors"


def flip_a_bit(draw, at):
    path = pick(draw, at, *ANY)
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def overwrite_a_range(draw, at):
    path = pick(draw, at, *ANY)
    data = bytearray(path.read_bytes())
    begin = draw.randrange(len(data))
    end = min(len(data), begin + draw.randint(1, 4096))
    data[begin:end] = draw.choice([bytes(end - begin), draw.randbytes(end - begin)])
    path.write_bytes(data)


def truncate(draw, at):
    path = pick(draw, at, *ANY)
    os.truncate(path, draw.randrange(path.stat().st_size))


def make_empty(draw, at):
    os.truncate(pick(draw, at, *ANY), 0)


def append(draw, at):
    with pick(draw, at, *ANY).open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 100)))


def delete_a_file(draw, at):
    pick(draw, at, *ANY).unlink()


def rename_a_file(draw, at):
    path = pick(draw, at, *ANY)
    path.rename(path.with_name(path.name + ".bak"))


def swap_files_of_two_steps(draw, at):
    one = pick(draw, at, f"{NEWEST}/*")
    exchange(one, at / OLDER / one.name)


def swap_files_of_a_step(draw, at):
    exchange(pick(draw, at, f"{NEWEST}/*"), pick(draw, at, f"{NEWEST}/*"))


def exchange(one, other):
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def older_manifest(draw, at):
    shutil.copy(at / OLDER / "manifest.json", at / NEWEST / "manifest.json")


def older_file(draw, at):
    path = pick(draw, at, SHARDS)
    shutil.copy(at / OLDER / path.name, path)


def older_folder_in_its_place(draw, at):
    shutil.rmtree(at / NEWEST)
    shutil.copytree(at / OLDER, at / NEWEST)


def delete_a_folder(draw, at):
    shutil.rmtree(at / draw.choice([NEWEST, NEWEST, OLDER]))


def delete_all_folders(draw, at):
    for path in at.glob("step-*"):
        shutil.rmtree(path)


def rename_the_folder(draw, at):
    names = "step-00000006.bak", "step-00000005", "step-00000009", "step-6", "best"
    names += f"{NEWEST}.old", f"{NEWEST}.replaced"
    (at / NEWEST).rename(at / draw.choice(names))


def swap_folders(draw, at):
    (at / NEWEST).rename(at / "aside")
    (at / OLDER).rename(at / NEWEST)
    (at / "aside").rename(at / OLDER)


def folder_is_a_link(draw, at):
    (at / NEWEST).rename(at / "aside")
    (at / NEWEST).symlink_to(at / draw.choice(["aside", OLDER, "nothing"]))


def folder_is_a_file(draw, at):
    shutil.rmtree(at / NEWEST)
    (at / NEWEST).write_text("")


def file_is_a_link(draw, at):
    path = pick(draw, at, f"{NEWEST}/*", "latest")
    outside = at.with_name(f"{at.name}-outside")  # Not a system file: the test itself may be wrong.
    outside.write_bytes(path.read_bytes())
    target = draw.choice([outside, at / OLDER / path.name, at / "nothing"])
    path.unlink()
    path.symlink_to(target)


def file_is_a_pipe(draw, at):
    path = pick(draw, at, *ANY)
    path.unlink()
    os.mkfifo(path)


def file_is_a_directory(draw, at):
    path = pick(draw, at, *ANY)
    path.unlink()
    path.mkdir()


def not_to_be_read(draw, at):
    pick(draw, at, *ANY).chmod(0)


def others_beside(draw, at):
    (at / "step-00000099").mkdir(exist_ok=True)
    (at / "step-abc").mkdir(exist_ok=True)
    (at / "notes.txt").write_text("text")
    (at / NEWEST).is_dir() and (at / NEWEST / "rank-00009.safetensors").write_bytes(b"more")


def half_a_save_beside(draw, at):
    half = at / f"{draw.choice([NEWEST, 'step-00000008'])}.writing"
    half.mkdir(exist_ok=True)
    (half / "rank-00000.safetensors").write_bytes(b"half")


def older_latest(draw, at):
    shutil.copy(f"{at}-latest-before", at / "latest")


def delete_latest(draw, at):
    (at / "latest").unlink()


def delete_latest_and_folder(draw, at):
    delete_latest(draw, at)
    shutil.rmtree(at / NEWEST)


def garbage_in_latest(draw, at):
    names = "step-00000005\n", "step-6", "../other", "step-00000006/../step-00000002", "9" * 5000
    (at / "latest").write_bytes(draw.choice([name.encode() for name in names] + [b"\xff\x00"]))


def go_back(draw, at):
    (at / "latest").write_text(f"{OLDER}\n")


# damage to a manifest that is sealed again afterwards


def forge(at, change, name=NEWEST):
    path = at / name / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    manifest = change(manifest) or manifest
    path.write_text(sealed(manifest) if isinstance(manifest, dict) else json.dumps(manifest))


def forge_a_field(draw, at):
    field = draw.choice(["format", "step", "world_size", "extra", "files", "tensors"])
    wrong = [None, -1, 1.5, True, "text", [], {}, [[]], {"a": {}}, 10**400, float("nan")]
    value = draw.choice(wrong)
    forge(at, lambda m: m.update({field: value}) if draw.random() < 0.7 else m.pop(field) and None)


def forge_a_tensor(draw, at):
    def change(manifest):
        name = draw.choice(sorted(manifest["tensors"]))
        about = manifest["tensors"][name]
        value = {
            "dtype": draw.choice(["save", "Tensor", "float16", "int64", "", 3, "__class__"]),
            "shape": draw.choice([[-1], [2**40, 2**40], [1] * 3000, [0], [2**70], "a", [1.5], []]),
            "pieces": draw.choice([[], [[]], about["pieces"][:-1], about["pieces"] * 2, None, 3]),
        }
        key = draw.choice(sorted(value))
        if draw.random() < 0.2:
            manifest["tensors"].pop(name)
        elif value[key] != about[key]:
            about[key] = value[key]

    forge(at, change)


def forge_a_piece(draw, at):
    def change(manifest):
        entry = draw.choice(manifest["tensors"][draw.choice(sorted(manifest["tensors"]))]["pieces"])
        number = draw.randrange(5)
        old = entry[number]
        wrong = {
            0: [
                f"../{OLDER}/{old}",
                f"/tmp/{old}",
                "manifest.json",
                "",
                1,
                "rank-00099.safetensors",
            ],
            3: [old + 1, -1, 2**80, None],
            4: [old + 1, old - 1, -1, 2**80, None],
        }.get(number, [[], [-1], [n + 1 for n in old] or [1], [2**80], None, "a"])
        entry[number] = draw.choice(wrong)

    forge(at, change)


def forge_a_checksum(draw, at):
    def change(manifest):
        about = manifest["files"][draw.choice(sorted(manifest["files"]))]
        about[draw.choice(["bytes", "sha256"])] = draw.choice([0, -1, "", "0" * 64, None, 10**30])

    forge(at, change)


def forge_what_it_says(draw, at):
    changes = {"extra": {"optimizers": ["AdamW"], "extra": {"scale": 9.0}}, "world_size": 64}
    key = draw.choice(sorted(changes))
    forge(at, lambda m: m.update({key: changes[key]}), draw.choice([NEWEST, OLDER]))


def manifest_of_something_else(draw, at):
    deep = draw.choice(['{"a":', "["]) * 200_000
    texts = "null", "[]", "1", '"a"', "{}", '{"sha256": 1}', deep, "NaN", "1" * 5000, "\ud800"
    text = draw.choice(texts).encode("utf-8", "surrogatepass")
    (at / NEWEST / "manifest.json").write_bytes(draw.choice([text, text, b"\xfe\xff"]))


def manifest_says_it_twice(draw, at):
    path = at / NEWEST / "manifest.json"
    key, value = draw.choice([("step", 4), ("world_size", 9), ("tensors", {}), ("files", {})])
    twice = f'"{key}": {json.dumps(value)}'
    text = path.read_text()
    path.write_text(
        "{" + twice + ", " + text[1:] if draw.random() < 0.5 else f"{text[:-1]}, {twice}}}"
    )


TOUCH_LATEST = {
    *(flip_a_bit, overwrite_a_range, truncate, make_empty, append, delete_a_file, rename_a_file),
    *(file_is_a_link, file_is_a_pipe, file_is_a_directory, older_latest, delete_latest),
    *(delete_latest_and_folder, garbage_in_latest, go_back),
}
KINDS = [
    *sorted(TOUCH_LATEST, key=lambda kind: kind.__name__),
    *(swap_files_of_two_steps, swap_files_of_a_step, older_manifest, older_file),
    *(older_folder_in_its_place, delete_a_folder, delete_all_folders, rename_the_folder),
    *(swap_folders, folder_is_a_link, folder_is_a_file, not_to_be_read, others_beside),
    *(half_a_save_beside, forge_a_field, forge_a_tensor, forge_a_piece, forge_a_checksum),
    *(forge_what_it_says, manifest_of_something_else, manifest_says_it_twice),
]


LAST = file_is_a_link, file_is_a_pipe, file_is_a_directory, folder_is_a_link, folder_is_a_file


def cases(count, seed):
    """Yield (number, kinds) of each case, first every kind alone, as far as the count goes. After a
    damage that makes a file something else, no further damage writes to it: the write would go
    elsewhere, or wait forever."""
    draw = random.Random(seed)
    alone = draw.sample(KINDS, len(KINDS))
    for number in range(count):
        kinds = [alone[number]] if number < len(alone) else draw.sample(KINDS, draw.randint(1, 3))
        if forge_what_it_says in kinds and TOUCH_LATEST & set(kinds):
            kinds = [forge_what_it_says]
        yield number, sorted(kinds, key=lambda kind: kind in LAST)


def damage(directory, number, kinds, seed):
    draw = random.Random(f"{seed} {number}")
    for kind in kinds:
        try:
            kind(draw, directory)
        except (OSError, ValueError, IndexError, KeyError, TypeError, AttributeError):
            pass  # An earlier damage has removed the target.
