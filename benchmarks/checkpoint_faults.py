"""Damage checkpoints and kill trainings: no resume may give a wrong or silently older state.

    python benchmarks/checkpoint_faults.py [--json FILE] [--long] [--seed N]
        [--corruptions N] [--kills N]

Corruptions: checkpoints of a GPT with AdamW are written in several layouts, damaged in one to three
ways at once, and resumed in the same or another layout. Three results are right: the newest state
bit for bit; an older state bit for bit with a warning; CheckpointError on all ranks. Everything
else is wrong: another state, a start from scratch, another error, a hang, or an older state without
a warning while a file name, `latest` or a manifest still mentions the newest one. Changing only the
name in `latest` is not damage, because it is how a user asks for an older checkpoint.

(A seal is not a signature. Anyone who changes a manifest, seals it again and also changes `latest`
can make it say anything in the right form, so those two kinds are never combined.)

Kills: trainings in several layouts, saving in the foreground or in the background, are killed with
SIGKILL (a rank, all ranks, or the process that launched them) at random moments and started again
until they are done. The loss of every step of every start must equal, bit for bit, the loss of an
undisturbed training.
"""

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from _damage import KINDS, STEPS, cases, damage, go_back
from _form import machine

from mini_dist import Layout, ModelConfig, RankError, launch
from mini_dist.collectives import all_reduce, barrier
from mini_dist.model.data import Batches
from mini_dist.training.all_axes import parallelize
from mini_dist.training.checkpoint import CheckpointError, Piece, Training, piece
from mini_dist.training.checkpoint.pieces import copy_common

CONFIG = ModelConfig(d_model=16, num_layers=2, num_heads=2, seq_len=8, vocab_size=32)
TEXT = torch.randint(0, 32, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
LAYOUTS = {
    "one process": Layout(micro_batch_size=4),
    "dp 2": Layout(dp=2, micro_batch_size=2),
    "dp 2, ZeRO-3": Layout(dp=2, zero=3, micro_batch_size=2),
    "pp 2": Layout(pp=2, num_micro_batches=2, micro_batch_size=2),
    "tp 2 x dp 2": Layout(tp=2, dp=2, micro_batch_size=2),
    "dp 4, ZeRO-1": Layout(dp=4, zero=1, micro_batch_size=1),
}


def made(layout, group, **options):
    def adamw(tensors):
        return torch.optim.AdamW(tensors, lr=1e-2)

    model = parallelize(CONFIG, layout, group, adamw)
    optimizers, names = model.optimizer.optimizers, model.names_in_whole()
    training = Training(model.parts, optimizers, group, names=names, **options)
    place = {"rank": model.mesh.index("dp"), "size": layout.dp}
    batches = Batches(TEXT, layout.global_batch_size, CONFIG.seq_len, **place)
    return model, training, batches


# --- corruptions ---------------------------------------------------------------------------------


def write_all(directory, layout, group):
    """Train and save; return the pieces after each save, with the generator's state."""
    model, training, batches = made(layout, group)
    states = {}
    for number in range(STEPS[-1]):
        model.step(*batches.batch(number))
        if number + 1 in STEPS:
            step = number + 1
            if group.rank() == 0 and step == STEPS[-1]:
                shutil.copy(f"{directory}/latest", f"{directory}-latest-before")
            training.save(directory, step, {"scale": 0.5 * step}, keep=None)
            states[step] = [(each.place, each.tensor.clone()) for each in training.pieces()]
    return states


def whole_states(results):
    """Return {step: {name: the whole tensor}}, assembled from the memory of the ranks."""
    whole = {step: {} for step in STEPS}
    for states in results:
        for step, pieces in states.items():
            for place, tensor in pieces:
                empty = torch.zeros(place.shape, dtype=tensor.dtype)
                full = whole[step].setdefault(place.name, empty)
                copy_common(piece(place.name, full), Piece(place, tensor))
    return whole


def resume_all(directory, layout, states, mine, seed, log, group):
    """Return how each case ended: newest, older with a warning, refused, or a wrong result."""
    _, training, _ = made(layout, group)
    said = []
    for number, kinds in mine:
        here = Path(f"{directory}-{number}")
        if group.rank() == 0:
            shutil.copytree(directory, here)
            shutil.copy(f"{directory}-latest-before", f"{here}-latest-before")
            with open(log, "a") as file:
                print(number, *(kind.__name__ for kind in kinds), file=file)
            damage(here, number, kinds, seed)
        barrier(group)
        said.append(outcome(training, here, states, go_back in kinds))
        barrier(group)
        if group.rank() == 0:
            shutil.rmtree(here)
    return said


def outcome(training, directory, states, may_go_back):
    with torch.no_grad():
        for each in training.pieces():
            each.tensor.fill_(3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            saved = training.resume(directory)
        except CheckpointError:
            return "refused"
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
    if saved is None:  # Right only if somebody has removed all of them, and latest.
        left = [*directory.glob("*/manifest.json"), *directory.glob("latest*")]
        if left:
            return f"WRONG: started from scratch although there was {left}"
        return "started from scratch, as nothing was left"
    expected = states.get(saved.step, {})
    held = training.pieces()
    if saved.extra != {"scale": 0.5 * saved.step} or {p.place.name for p in held} - set(expected):
        return f"WRONG: extra {saved.extra} or tensors of step {saved.step}"
    for each in held:
        right = torch.zeros(each.place.numel, dtype=each.tensor.dtype)
        full = piece(each.place.name, expected[each.place.name])
        copy_common(Piece(each.place, right), full)
        if not torch.equal(each.tensor.reshape(-1), right):
            return f"WRONG: {each.place} of step {saved.step}"
    if saved.step == STEPS[-1]:
        return "newest"
    if may_go_back and saved.step == STEPS[-2]:
        return "went back"
    if saved.refused and (told or training.group.rank() > 0):
        return "older, and said so"
    if not tells_of_the_newest(directory):
        return "older, and nothing told of the newest any more"
    return f"WRONG: step {saved.step} without a word"


def tells_of_the_newest(directory):
    """Return whether a name, `latest` or a manifest still mentions the last step. (If not, the
    directory equals its state before that step, as if restored from a copy.)"""
    manifests = directory.glob("*/manifest.json")
    texts = [path.read_bytes() for path in [directory / "latest", *manifests] if path.is_file()]
    names = [path.name.encode() for path in directory.glob("*")]
    name = f"step-{STEPS[-1]:08d}".encode()
    said = b'"step": %d,' % STEPS[-1]
    return any(name in text for text in names + texts) or any(said in text for text in texts)


def corruptions(count, seed, scratch):
    """Return {how it ended: how often}, and a line for each case that ended wrong."""
    layouts = list(LAYOUTS.values())
    every = list(cases(count, seed))
    found, wrong = Counter(), []
    for number, written in enumerate(layouts):
        directory = scratch / f"layout-{number}"
        run = launch(write_all, written.world_size, (str(directory), written), timeout=600)
        states = whole_states(run.results)
        for turn, read in enumerate((written, layouts[number - 1])):
            mine = every[2 * number + turn :: 2 * len(layouts)]
            log = scratch / f"log-{number}-{turn}"
            job = (str(directory), read, states, mine, seed, str(log))
            try:
                run = launch(resume_all, read.world_size, job, timeout=300 + 20 * len(mine))
            except RankError as error:  # A rank hung or ended.
                last = log.read_text().splitlines()[-1] if log.exists() else "the first"
                wrong.append(f"case {last}: {error}")
                continue
            for (case, kinds), *said in zip(mine, *run.results):
                names = ", ".join(kind.__name__ for kind in kinds)
                if len(set(said)) > 1 or said[0].startswith("WRONG"):
                    wrong.append(f"case {case} ({names}): {said}")
                found[said[0]] += 1
    return found, wrong


# --- kills ---------------------------------------------------------------------------------------

LAST, EVERY = 40, 2


def logged(directory, layout, background, log, group):
    """Train to the last step; each rank writes down its process id, and rank 0 each loss."""
    with open(f"{log}.pids", "a") as file:
        print(os.getpid(), file=file)
    model, training, batches = made(layout, group, background=background)
    saved = training.resume(directory)
    for number in range(saved.step if saved else 0, LAST):
        loss = model.step(*batches.batch(number)).loss.detach().reshape(1)
        loss = all_reduce(loss, group, op="max").item()
        if group.rank() == 0:
            with open(f"{log}.losses", "a") as file:
                print(number, loss.hex(), file=file)
        if (number + 1) % EVERY == 0:
            training.save(directory, number + 1)


def start(directory, name, background, log):
    """Run as a separate program: launch the training, and start it again if a rank has died."""
    layout = LAYOUTS[name]
    while True:
        try:
            launch(logged, layout.world_size, (directory, layout, background, log), timeout=120)
            return
        except RankError as error:
            with open(f"{log}.errors", "a") as file:
                print(str(error).splitlines()[0], file=file)


def read_losses(log):
    """Return {step: every loss that a start has logged}. A line that a kill cut off is left out."""
    losses = {}
    path = Path(f"{log}.losses")
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            number, loss = line.split()
            losses.setdefault(int(number), set()).add(loss)
    return losses


def killed_training(name, background, kills, draw, scratch):
    """Kill a training this many times, then let it end. Return (its losses, the number of kills),
    or a sentence that says what was wrong."""
    log = scratch / "log"
    job = [str(scratch / "saved"), name, str(background), str(log)]
    command = [sys.executable, __file__, "--start", *job]
    process, happened = launched(command, log), 0
    try:
        wait_for_more(process, log, "pids", 0)
        while happened < kills:
            victim = draw.choice(["a rank", "all ranks", "the program"])
            if draw.random() < 0.8:  # Otherwise the kill may come before the first step.
                wait_for_more(process, log, "losses", count_lines(log, "losses"))
            time.sleep(draw.uniform(0, 0.6))
            started = pids(log)
            ranks = started[-LAYOUTS[name].world_size :]
            if process.poll() is not None:  # It had finished already.
                break
            happened += 1
            if victim == "the program":
                process.kill()
                process.wait()
                process = launched(command, log)
            for pid in {"a rank": [draw.choice(ranks)], "all ranks": ranks}.get(victim, ()):
                kill(pid)
            wait_for_more(process, log, "pids", len(started))
        process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        return "it does not come to its end"
    finally:
        process.kill()
    if process.returncode:
        return f"it ended with status {process.returncode}: {Path(f'{log}.errors').read_text()}"
    return read_losses(log), happened


def kill(pid):
    try:
        if b"mini_dist" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    except OSError:  # The process has ended.
        pass


def launched(command, log):
    with open(f"{log}.errors", "a") as errors:
        return subprocess.Popen(command, stdout=errors, stderr=errors)


def pids(log):
    path = Path(f"{log}.pids")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def count_lines(log, what):
    path = Path(f"{log}.{what}")
    return path.read_text().count("\n") if path.exists() else 0


def wait_for_more(process, log, what, before):
    """Wait until more ranks have started or more losses are written down, or all is done."""
    until = time.monotonic() + 120
    while count_lines(log, what) <= before and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)


@functools.cache
def undisturbed(name):
    with tempfile.TemporaryDirectory() as scratch:
        layout, log = LAYOUTS[name], f"{scratch}/log"
        launch(logged, layout.world_size, (f"{scratch}/saved", layout, False, log), timeout=300)
        return read_losses(log)


def all_kills(count, seed, scratch):
    """Return (the number of kills, the number of repeated steps, a line for each mistake)."""
    draw, done, again, wrong, number = random.Random(seed), 0, 0, [], 0
    names = [name for name in LAYOUTS if name != "one process"]
    while done < count:
        name, background = names[number % len(names)], number // len(names) % 2 == 1
        here = scratch / f"kills-{number}"
        here.mkdir()
        number += 1
        kills = min(5, count - done)
        result = killed_training(name, background, kills, draw, here)
        what = f"{name}, {'behind' if background else 'in the foreground'}"
        if isinstance(result, str):
            wrong.append(f"{what}: {result}")
            done += kills
            continue
        losses, happened = result
        done += happened
        lines = count_lines(here / "log", "losses")
        again += lines - len(losses)
        expected = undisturbed(name)
        if losses != expected:
            apart = [n for n in range(LAST) if losses.get(n) != expected[n]]
            wrong.append(f"{what}: the losses of steps {apart} are others")
        print(f"{done:4d} kills: {what}, {lines - len(losses)} steps done again", flush=True)
    return done, again, wrong


# --- the command ---------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and results here")
    parser.add_argument("--long", action="store_true", help="ten times as many of both")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corruptions", type=int, default=300)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--start", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.start:
        directory, name, background, log = options.start
        return start(directory, name, background == "True", log)
    for which in ("corruptions", "kills") if options.long else ():
        setattr(options, which, 10 * getattr(options, which))
    about = machine()
    with tempfile.TemporaryDirectory(prefix="checkpoint-faults-") as scratch:
        found, wrong = corruptions(options.corruptions, options.seed, Path(scratch))
        print(f"{options.corruptions} corruptions of {len(KINDS)} kinds, seed {options.seed}:")
        for what, number in found.most_common():
            print(f"{number:6d}  {what}")
        done, again, wrong_kills = all_kills(options.kills, options.seed, Path(scratch))
    print(f"{done} kills; {again} steps were done again, {len(wrong_kills)} trainings went wrong")
    for line in wrong + wrong_kills:
        print(line)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if options.json:
        results = {"found": found, "wrong": wrong, "kills": done, "wrong_kills": wrong_kills}
        options.json.write_text(json.dumps({"machine": about, **results}, indent=1) + "\n")
    return 1 if wrong or wrong_kills else 0


if __name__ == "__main__":
    sys.exit(main())
