"""Lesson 22 without other programs: our runs, PyTorch's runs, stored results of the others."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from mini_dist import GPT, launch, token_loss
from mini_dist.course.elsewhere import in_torch, in_torchtitan, kept, ours, run
from mini_dist.course.elsewhere.kept import FOLDER
from tools.keep import all_kept

FOLDERS_HOME = "mini_dist.course.elsewhere.kept"  # In the package, `kept` is the decorator.


def test_ours_and_pytorchs_train_the_same_and_send_what_is_said():
    mine = {row["name"]: row for row in ours.runs()}
    theirs = {row["name"]: row for row in in_torch.runs()}
    for row in (*mine.values(), *theirs.values()):
        wanted = theirs["DDP"]["losses"]
        assert all(abs(a - b) < 1e-5 for a, b in zip(row["losses"], wanted, strict=True)), row
    whole = 4 * (run.RANKS - 1) * run.PSI
    assert mine["data parallel"]["sent"] == mine["ZeRO-1"]["sent"] == 2 * whole
    assert theirs["DDP"]["sent"] == pytest.approx(2 * whole, rel=1e-3)  # plus the bucket order
    root = 2 * 256 * 64 + 64  # embedding, head and its norm, gathered only once
    assert mine["ZeRO-3"]["sent"] == 3 * whole - 4 * (run.RANKS - 1) * root
    assert theirs["FSDP2"]["sent"] == mine["ZeRO-3"]["sent"]
    # HSDP: 2 all-gathers and a reduce-scatter in each pair, an all-reduce of shards across pairs.
    inside, across = 3 * 4 * run.PSI * 2, 2 * 4 * run.PSI / 2 * 2
    assert mine["HSDP 2 x 2"]["sent"] == inside + across - 4 * root * 2
    assert theirs["HSDP 2 x 2"]["sent"] == mine["HSDP 2 x 2"]["sent"]
    assert mine["ZeRO-3"]["peak"] < mine["data parallel"]["peak"]


def sleeps(batches, group):
    """Wait 0.2 s per step."""
    return [time.sleep(0.2) or 0.0 for _ in batches(group.rank(), group.size())]


def works(batches, group):
    """Use 0.2 s of CPU time per step, however long that takes."""
    losses = []
    for _ in batches(group.rank(), group.size()):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        losses.append(0.0)
    return losses


def test_the_processors_time_is_of_all_ranks_and_no_waiting_is_in_it():
    waiting, working = run.measure({"sleeps": (sleeps,), "works": (works,)})
    assert waiting["seconds"] > 0.2 > waiting["cpu_seconds"]
    assert 0.2 * run.RANKS <= working["cpu_seconds"] < 0.2 * run.RANKS + 0.2


def clipped(with_root, group):
    """Clip gradients of wrapped blocks, with or without a wrapped root; return True or an error."""
    gpt, mesh = GPT(run.CONFIG), in_torch.one_axis(group)
    for module in (*gpt.blocks, *([gpt] if with_root else [])):
        fully_shard(module, mesh=mesh)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    token_loss(gpt(tokens), tokens).mean().backward()
    try:
        return torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0).full_tensor().item() > 0
    except RuntimeError as error:
        return str(error)


def test_a_root_that_is_not_wrapped_shows_itself_where_gradients_are_clipped():
    """The last pitfall of lesson 22 describes this."""
    assert launch(clipped, 2, (True,)).results == [True, True]
    for said in launch(clipped, 2, (False,)).results:
        assert "mixed torch.Tensor and DTensor" in said


def test_everything_that_needs_another_program_is_kept():
    for fn in all_kept():
        text = (FOLDER / f"{fn.__module__.rsplit('.', 1)[-1]}.{fn.__name__}.json").read_text()
        assert {"versions", "result"} == set(json.loads(text)), fn


def test_what_torchtitan_has_executed_is_what_is_exported_today():
    """If the export changed: `make torchtitan`, then tools/keep.py in_torchtitan.exports there."""
    kept_now = json.loads((FOLDER / "in_torchtitan.exports.json").read_text())["result"]
    executed = {name: each["source"] for name, each in kept_now.items()}
    assert in_torchtitan.exported() == executed


def test_a_missing_program_is_named_in_one_line(capsys, monkeypatch):
    @kept("no_such_program")
    def nothing():
        raise AssertionError("this runs only where the program is installed")

    record = {"versions": {"no-such": "1.0"}, "result": [1]}
    folder = FakeFolder(record)
    monkeypatch.setattr(sys.modules[FOLDERS_HOME], "FOLDER", folder)
    assert nothing() == [1] and folder.asked
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "no_such_program is not installed" in said and "1.0" in said


class FakeFolder:
    def __init__(self, record):
        self.record, self.asked = record, []

    def __truediv__(self, name):
        self.asked.append(name)
        return self

    def read_text(self):
        return json.dumps(self.record)


def test_lines_of_code_leave_out_what_is_no_code_and_take_in_what_is_called():
    assert run.num_lines(sample) == 2 + 5


def sample():
    """Not counted."""
    # nor this
    return table()


def table():
    return dict(
        one=1,
        two=2,
    )


def test_a_wrong_factor_of_the_gradients_shows_in_the_losses():
    """Otherwise "losses equal" would not show that a program's gradients are right."""

    def losses(factor):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.full((4,), 0.5))
        optimizer, seen = run.adamw([weight]), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = (weight * torch.arange(4) / 10).square().sum()
            (factor * loss).backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    right = losses(1)
    assert losses(1) == right
    assert all(abs(losses(factor)[2] - right[2]) > 1e-4 for factor in (0.25, 4))
