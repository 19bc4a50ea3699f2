"""Test the trainer: a recipe runs anywhere, metrics are measured, crashes change nothing."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys

import pytest

from mini_dist import Layout, ModelConfig, RankError, launch
from mini_dist.model.data import load_text
from mini_dist.plan.calculators import hardware, step_volume
from mini_dist.plan.calculators.flops import model_flops
from mini_dist.training.checkpoint.manifest import sealed
from mini_dist.training.trainer import Recipe, train, train_on_ranks
from mini_dist.training.trainer.__main__ import main

MODEL = ModelConfig(d_model=32, num_layers=4, num_heads=4, seq_len=32, vocab_size=256)
FOUR = Layout(pp=2, tp=2, micro_batch_size=2, num_micro_batches=4)
RECIPE = Recipe(MODEL, FOUR, steps=6, save_every=2)


def losses(run):
    return [metrics.loss for metrics in run.results[0]]


@pytest.fixture(scope="module")
def uninterrupted():
    return losses(train_on_ranks(RECIPE))


def test_the_loss_falls_and_all_ranks_report_the_same():
    run = train_on_ranks(dataclasses.replace(RECIPE, steps=12, learning_rate=1e-2, warmup=3))
    assert losses(run)[-1] < losses(run)[0] - 0.5
    for result in run.results:
        assert [(m.step, m.loss, m.norm) for m in result] == [
            (m.step, m.loss, m.norm) for m in run.results[0]
        ]


def test_metrics_are_the_ledgers_and_the_calculators():
    recipe = dataclasses.replace(RECIPE, steps=2, machine="laptop")
    run = train_on_ranks(recipe, memory=True)
    for rank, history in enumerate(run.results):
        last = history[-1]
        predicted = step_volume(MODEL, FOUR, "course", rank // 2)
        assert last.bytes_sent["pp"] == pytest.approx(predicted["pp"], abs=32)  # plus the loss
        tokens = FOUR.global_batch_size * MODEL.seq_len
        assert last.tokens_per_second == pytest.approx(tokens / last.seconds)
        peak = hardware("laptop").device.peak_flops * 4
        flops = model_flops(MODEL, FOUR.global_batch_size)
        assert last.mfu == pytest.approx(flops / last.seconds / peak)
        assert last.held_bytes > 0
    for axis in ("pp", "tp"):
        noted = sum(m.bytes_sent[axis] for result in run.results for m in result)
        before = run.ledger.total_bytes(axis=axis, phase="setup")
        assert noted == run.ledger.total_bytes(axis=axis) - before


def dies_once(recipe, step, marker, group):
    """Kill a rank in the middle of the first run."""
    from mini_dist.training.trainer.metering import Meter

    read = Meter.read

    def read_or_die(self, at, done):
        if at == step and group.rank() == 1 and not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, at, done)

    Meter.read = read_or_die
    return train(recipe, group)


@pytest.mark.parametrize("step", [0, 3, 5])
def test_after_a_kill_the_losses_are_those_of_the_uninterrupted_run(step, tmp_path, uninterrupted):
    recipe = dataclasses.replace(RECIPE, checkpoints=str(tmp_path / "checkpoints"))
    crash = (recipe, step, str(tmp_path / "died"))
    with pytest.raises(RankError, match="rank 1"):
        launch(dies_once, 4, crash)
    resumed = launch(dies_once, 4, crash)
    assert losses(resumed) == uninterrupted[step // 2 * 2 :]


def test_a_run_goes_on_in_another_layout(tmp_path, uninterrupted):
    recipe = dataclasses.replace(RECIPE, checkpoints=str(tmp_path / "checkpoints"))
    begun = losses(train_on_ranks(dataclasses.replace(recipe, steps=3)))
    other = Layout(dp=4, zero=3, micro_batch_size=2)
    rest = losses(train_on_ranks(dataclasses.replace(recipe, layout=other)))
    assert begun == uninterrupted[:3]
    assert rest == pytest.approx(uninterrupted[3:], rel=1e-5)  # sums in another order


def test_float16_goes_on_with_the_scale_that_it_had(tmp_path):
    recipe = dataclasses.replace(
        RECIPE, precision="float16", layout=Layout(dp=2, micro_batch_size=4), steps=4
    )
    whole = losses(train_on_ranks(recipe))
    recipe = dataclasses.replace(recipe, checkpoints=str(tmp_path))
    train_on_ranks(dataclasses.replace(recipe, steps=2))
    assert losses(train_on_ranks(recipe)) == whole[2:]


def test_restarts_begin_at_the_newest_checkpoint(tmp_path, uninterrupted, capsys):
    recipe = dataclasses.replace(RECIPE, checkpoints=str(tmp_path / "checkpoints"))
    with pytest.raises(RankError):  # every time, so the one restart is used up
        train_on_ranks(recipe, restarts=1, timeout=0.01)
    assert "starting again from the newest checkpoint" in capsys.readouterr().out
    assert losses(train_on_ranks(recipe, restarts=1)) == uninterrupted


def with_model(recipe, **changes):
    return dataclasses.replace(recipe, model=recipe.model.replace(**changes))


SMALL = dataclasses.replace(RECIPE, layout=Layout(dp=2, micro_batch_size=2), steps=2, save_every=1)
OTHERS = {
    "heads": (lambda r: with_model(r, num_heads=2, head_dim=8), ["model.num_heads"]),
    "dropout": (lambda r: with_model(r, dropout=0.5), ["model.dropout"]),
    "width": (lambda r: with_model(r, d_ffn=64), ["model.d_ffn"]),
    "seed": (lambda r: dataclasses.replace(r, seed=1), ["seed"]),
    "rate": (lambda r: dataclasses.replace(r, learning_rate=1e-4), ["learning_rate"]),
    "warmup": (lambda r: dataclasses.replace(r, warmup=5, max_norm=None), ["warmup", "max_norm"]),
    "precision": (lambda r: dataclasses.replace(r, precision="float16"), ["precision"]),
    "batch": (lambda r: dataclasses.replace(r, layout=Layout(dp=2)), ["batch"]),
    "text": (lambda r: dataclasses.replace(r, text=__file__), ["text"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = dataclasses.replace(SMALL, checkpoints=str(tmp_path_factory.mktemp("recipe") / "a"))
    train_on_ranks(recipe)
    return recipe


def longer(recipe, tmp_path, **changes):
    """Return the same recipe with more steps and a copy of its checkpoints."""
    shutil.copytree(recipe.checkpoints, tmp_path / "copy")
    return dataclasses.replace(recipe, steps=3, checkpoints=str(tmp_path / "copy"), **changes)


@pytest.mark.parametrize("name", OTHERS)
def test_another_recipe_does_not_go_on_by_the_fields_that_differ(name, trained, tmp_path):
    change, fields = OTHERS[name]
    before = longer(trained, tmp_path)
    recipe = change(before)
    with pytest.raises(RankError, match="ValueError: .*/copy is of another recipe: ") as caught:
        train_on_ranks(recipe)
    said = str(caught.value)
    for field in fields:
        assert f"{field}=" in said and f"{field!r}" in said.partition("changed=")[2]
    assert (", now " in said) and said.count(", now ") % len(fields) == 0


@pytest.mark.parametrize("name", ["dropout", "seed", "rate", "precision", "batch"])
def test_another_recipe_goes_on_if_one_asks_for_it_and_then_is_the_recipe(name, trained, tmp_path):
    change, fields = OTHERS[name]
    recipe = change(longer(trained, tmp_path))
    history = train_on_ranks(recipe, changed=fields).results[0]
    assert [metrics.step for metrics in history] == [2]
    more = dataclasses.replace(recipe, steps=4)
    assert [metrics.step for metrics in train_on_ranks(more).results[0]] == [3]


def test_what_does_not_decide_may_change(trained, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(load_text().numpy().tobytes())  # the same text, from elsewhere
    recipe = longer(trained, tmp_path, save_every=7, machine="laptop", text=str(text))
    recipe = dataclasses.replace(recipe, layout=Layout(dp=1, tp=2, micro_batch_size=4))
    assert [metrics.step for metrics in train_on_ranks(recipe).results[0]] == [2]


def test_a_checkpoint_that_says_nothing_of_its_recipe_is_refused(trained, tmp_path):
    recipe = longer(trained, tmp_path)
    folder = tmp_path / "copy" / "step-00000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"], manifest["extra"]["extra"]["recipe"]
    (folder / "manifest.json").write_text(sealed(manifest))
    (tmp_path / "copy" / "latest").write_text(f"{folder.name}\n")  # as older versions wrote it
    with pytest.raises(RankError, match="copy does not say by which recipe it was trained"):
        train_on_ranks(recipe, changed=["seed"])
    assert len(train_on_ranks(recipe, changed="all").results[0]) == 1


def test_changed_names_what_decides(trained):
    with pytest.raises(RankError, match=r"changed=\['sed'\] decides nothing: give some of all"):
        train_on_ranks(trained, changed=["sed"])


def test_on_the_command_line_too(trained, tmp_path, capsys):
    recipe = dataclasses.replace(longer(trained, tmp_path), seed=5, learning_rate=1e-2)
    (tmp_path / "recipe.json").write_text(recipe.to_json())
    command = [str(tmp_path / "recipe.json")]
    with pytest.raises(RankError, match="learning_rate=0.001, now 0.01; seed=0, now 5"):
        main(command)
    main([*command, "--changed", "seed", "--changed", "learning_rate"])
    assert "step      2   loss" in capsys.readouterr().out
    main(command)
    assert "is already at step 3 or beyond: raise steps" in capsys.readouterr().out


def test_a_recipe_is_its_json():
    recipe = dataclasses.replace(RECIPE, precision="bfloat16", checkpoints="somewhere")
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert Recipe.from_json('{"steps": 3}') == Recipe(ModelConfig(), steps=3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"precision": "int8"}, "precision='int8' is not known"),
        ({"steps": 0}, "steps=0 is no number of steps"),
        ({"learning_rate": math.nan}, "learning_rate=nan is not a finite number"),
        ({"stepps": 3}, "'stepps' is no field of a recipe"),
        ({"layout": {"tp": 3}}, "tp=3 does not divide num_heads"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_in_one_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Recipe.from_json(json.dumps(fields))


def test_a_text_of_bytes_that_the_vocabulary_lacks_is_refused():
    """The course's text has bytes up to 226; in another layout, these would have been zeros."""
    recipe = Recipe(MODEL.replace(vocab_size=64), Layout(tp=2), steps=1)
    largest = int(load_text().max())
    said = f"the text's byte {largest} lies outside the vocabulary, 0..63: vocab_size={largest + 1}"
    with pytest.raises(RankError, match=said):
        train_on_ranks(recipe)


def test_restarts_need_checkpoints():
    with pytest.raises(ValueError, match="give the recipe checkpoints"):
        train_on_ranks(RECIPE, restarts=1)


@pytest.mark.parametrize("torchrun", [False, True])
def test_the_same_recipe_is_a_script_and_a_torchrun_job(torchrun, tmp_path, uninterrupted):
    (tmp_path / "recipe.json").write_text(RECIPE.to_json())
    runner = [sys.executable]
    if torchrun:
        runner += ["-m", "torch.distributed.run", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*runner, "-m", "mini_dist.training.trainer", str(tmp_path / "recipe.json")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"step      5   loss {uninterrupted[5]:.4f}" in done.stdout
    assert done.stdout.count("step      5") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", r"recipe=\[\] is no JSON object: give one, such as {}"),
        ('{"layout": 3}', "layout=3 is no JSON object"),
        ('{"model": {"d_modle": 3}}', "'d_modle' is no field of a model: it has vocab_size, "),
        ('{"stepz": 3}', "'stepz' is no field of a recipe: it has "),
    ],
)
def test_a_recipe_that_is_none_is_refused_in_a_sentence(text, says):
    with pytest.raises(ValueError, match=says):
        Recipe.from_json(text)
