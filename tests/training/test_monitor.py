"""Test the monitor of a long run: lines that survive, meaningful alerts, the time left."""

import json
import sys

import pytest

from mini_dist import ModelConfig
from mini_dist.training.trainer import Metrics, Recipe, train_on_ranks
from mini_dist.training.trainer.monitor import LEAST, Monitor, clock, read

NAN, INF = float("nan"), float("inf")


def metrics(step, loss=2.0, speed=1000.0, seconds=1.0):
    return Metrics(step, loss, None, False, seconds, speed, None, {"dp": 8}, None)


def alerts(*steps):
    monitor = Monitor(None, 100, every=0)
    return [[a.split(":")[0] for a in monitor.write(m)] for m in steps]


def test_every_step_is_a_line_of_json_at_once(tmp_path):
    monitor = Monitor(tmp_path / "deep/er.jsonl", 10, every=0)
    monitor.write(metrics(0))
    monitor.write(metrics(1, loss=1.5))
    lines = (tmp_path / "deep/er.jsonl").read_text().splitlines()  # it is still open
    assert [json.loads(line)["loss"] for line in lines] == [2.0, 1.5]
    assert json.loads(lines[0])["bytes_sent"] == {"dp": 8}


def test_of_a_step_done_twice_the_later_line_counts_and_half_a_line_does_not(tmp_path):
    for first, loss in ((0, 2.0), (2, 1.0)):  # the second run resumes at step 2
        monitor = Monitor(tmp_path / "log", 10, every=0)
        for step in range(first, 4):
            monitor.write(metrics(step, loss))
        monitor.close()
    with open(tmp_path / "log", "a") as file:
        file.write('{"step": 4, "lo')
    assert [(line["step"], line["loss"]) for line in read(tmp_path / "log")] == [
        (0, 2.0), (1, 2.0), (2, 1.0), (3, 1.0)
    ]  # fmt: skip


def test_a_healthy_run_raises_no_alarm():
    assert not any(alerts(*(metrics(k, 5 - 0.02 * k, 1000 + 50 * (k % 3)) for k in range(60))))


@pytest.mark.parametrize("loss", [NAN, INF])
def test_a_loss_that_is_no_number_is_told_at_once(loss):
    assert alerts(metrics(0, loss)) == [["nan"]]


def test_a_spike_is_told_and_does_not_become_usual():
    found = alerts(*(metrics(k, 2.0) for k in range(LEAST)), *(metrics(k, 5.0) for k in range(30)))
    assert found[LEAST:] == [["spike"]] * 30


def test_a_loss_may_grow_a_little():
    assert not any(alerts(*(metrics(k, 2.0) for k in range(LEAST)), metrics(LEAST, 3.9)))


def test_one_slow_step_is_a_checkpoint_and_three_are_an_alarm():
    usual = [metrics(k) for k in range(10)]
    slow = [metrics(10 + k, speed=500.0) for k in range(3)]
    assert alerts(*usual, *slow, metrics(13, speed=500.0))[10:] == [[], [], ["slow"], []]
    assert not any(alerts(*usual, slow[0], metrics(11), *slow[1:]))


def test_the_line_says_how_far_how_fast_how_long_still():
    monitor = Monitor(None, 1000, every=0)
    for step in range(10):
        monitor.write(metrics(step, seconds=2.0))
    assert monitor.line(metrics(99, seconds=2.0)) == (
        "step 100 of 1,000   loss 2.0000   1,000 tokens/s   0:30:00 left"
    )
    times = [clock(seconds) for seconds in (0, 59.6, 3600, 90061)]
    assert times == ["0:00:00", "0:01:00", "1:00:00", "25:01:01"]


def test_it_prints_as_often_as_asked_and_always_an_alert(capsys):
    monitor = Monitor(None, 10, every=4)
    for step in range(10):
        monitor.write(metrics(step, NAN if step == 5 else 2.0))
    told = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert told == ["4", "6", "8", "10"]


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        Monitor(None, 10, tensorboard=str(tmp_path))


class Writer:
    def __init__(self, folder):
        self.folder, self.seen = folder, []

    def add_scalar(self, *what):
        self.seen.append(what)

    def close(self):
        self.seen.append("closed")


def test_tensorboard_gets_what_there_is(monkeypatch, tmp_path):
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monitor = Monitor(None, 10, every=0, tensorboard="here")
    monitor.write(metrics(3))
    monitor.close()
    assert monitor.writer.seen == [("loss", 2.0, 3), ("tokens_per_second", 1000.0, 3), "closed"]


def test_the_trainer_writes_it_and_goes_on_in_the_same_file(tmp_path):
    config = ModelConfig(d_model=16, num_layers=1, num_heads=2, seq_len=16)
    recipe = Recipe(config, steps=3, save_every=1, checkpoints=str(tmp_path / "run"))
    log = str(tmp_path / "log")
    history = train_on_ranks(recipe, log=log, quiet=True).results[0]
    assert [line["loss"] for line in read(log)] == [m.loss for m in history]
    more = Recipe(config, steps=5, save_every=1, checkpoints=str(tmp_path / "run"))
    train_on_ranks(more, log=log, quiet=True)
    assert [line["step"] for line in read(log)] == [0, 1, 2, 3, 4]


def test_prometheus_reads_the_last_step(tmp_path):
    from prometheus_client.parser import text_string_to_metric_families

    monitor = Monitor(None, 10, every=0, prometheus=tmp_path / "run.prom")
    for number in range(3):
        monitor.write(metrics(number, loss=5.0 - number))
    read = text_string_to_metric_families((tmp_path / "run.prom").read_text())
    samples = {(s.name, *s.labels.values()): s.value for family in read for s in family.samples}
    assert samples["mini_dist_step",] == 2
    assert samples["mini_dist_loss",] == 3.0
    assert samples["mini_dist_sent_bytes", "dp"] == 8
    assert ("mini_dist_mfu",) not in samples  # the peak of this machine is not known


def test_a_nan_is_a_number_for_prometheus(tmp_path):
    Monitor(None, 10, every=0, prometheus=tmp_path / "x.prom").write(metrics(0, loss=NAN))
    assert "mini_dist_loss NaN" in (tmp_path / "x.prom").read_text()
