"""Watch a run: one line per step into a file, one line to read, and alerts.

    monitor = Monitor("runs/first/metrics.jsonl", steps=1000)
    monitor.write(metrics)                  # after each step; prints progress and alerts
    python -m mini_dist.training.trainer recipe.json --log runs/first/metrics.jsonl
    tail -f runs/first/metrics.jsonl        # from anywhere
    Monitor(None, 1000, prometheus="/var/lib/node_exporter/mini_dist.prom")  # for a dashboard

Each line is complete JSON and is on its way to the disk when `write` returns, so the log survives
the death of the run. A resumed run appends; if a step was done twice, the later line counts
(`read`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from pathlib import Path
from statistics import median

from .metering import Metrics

WINDOW = 20  # "usual" is the median of this many steps
LEAST = 5  # before this many steps nothing is usual yet
SPIKE = 2.0  # times the usual loss
SLOW = 0.7  # times the usual tokens per second, in three consecutive steps

GAUGES = {  # fields of Metrics that Prometheus gets, and what its page says of them
    "step": "Number of the last step, from 0.",
    "loss": "Loss of the last step.",
    "norm": "Norm of the gradients of the last step.",
    "tokens_per_second": "Tokens per second of the whole job.",
    "mfu": "Model FLOPs of the last step, as a share of the machine's peak.",
    "held_bytes": "Bytes of tensors that the rank holds after the step.",
}


class Monitor:
    """Write each step's Metrics, and report progress and problems.

    path: of the file; None writes none. steps: of the whole run. every: steps between two printed
    lines; 0 prints alerts only. tensorboard: a folder for its event files, if the package is
    installed. Raises ImportError in one sentence if it is not. prometheus: a file that always has
    the last step in Prometheus's text format (`write_prometheus`).
    """

    def __init__(
        self,
        path: str | Path | None,
        steps: int,
        every: int = 10,
        tensorboard: str | None = None,
        prometheus: str | Path | None = None,
    ):
        self.steps, self.every, self.prometheus = steps, every, prometheus
        self.file = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "a", buffering=1, encoding="utf-8")
        self.writer = tensorboard_writer(tensorboard) if tensorboard else None
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.speeds: deque[float] = deque(maxlen=WINDOW)
        self.seconds: deque[float] = deque(maxlen=WINDOW)
        self.is_slow = False

    def write(self, metrics: Metrics) -> list[str]:
        """Note one step; return and print its alerts."""
        alerts = self.alerts(metrics)
        if self.file:
            line = {**dataclasses.asdict(metrics), "alerts": alerts}
            for name in ("loss", "norm"):  # JSON has no nan; the alert reports it
                if line[name] is not None and not math.isfinite(line[name]):
                    line[name] = None
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
        if self.writer:
            for name in ("loss", "norm", "tokens_per_second", "mfu", "held_bytes"):
                if getattr(metrics, name) is not None:
                    self.writer.add_scalar(name, getattr(metrics, name), metrics.step)
        if self.prometheus:
            write_prometheus(metrics, self.prometheus)
        self.seconds.append(metrics.seconds)
        if not any(alert.startswith(("nan", "spike")) for alert in alerts):
            self.losses.append(metrics.loss)  # (otherwise the unusual would become usual)
        self.speeds.append(metrics.tokens_per_second)
        done = metrics.step + 1
        if alerts or self.every and (done % self.every == 0 or done == self.steps):
            print(self.line(metrics), *alerts, sep="   ", flush=True)
        return alerts

    def alerts(self, metrics: Metrics) -> list[str]:
        """Return what is unusual about this step, compared with earlier ones."""
        found = []
        if not math.isfinite(metrics.loss):
            found.append(f"nan: the loss is {metrics.loss}")
        elif len(self.losses) >= LEAST and metrics.loss > SPIKE * median(self.losses):
            usual = median(self.losses)
            found.append(f"spike: loss {metrics.loss:.4g}, usual is {usual:.4g}")
        if len(self.speeds) >= LEAST:
            usual = median(self.speeds)
            last = [*self.speeds][-2:] + [metrics.tokens_per_second]
            was_slow, self.is_slow = self.is_slow, max(last) < SLOW * usual
            if self.is_slow and not was_slow:  # once, until it is over
                found.append(f"slow: {last[-1]:,.0f} tokens/s, usual is {usual:,.0f}")
        return found

    def line(self, metrics: Metrics) -> str:
        """step 120 of 1,000   loss 2.3412   81,920 tokens/s   0:07:20 left"""
        left = (self.steps - metrics.step - 1) * median(self.seconds or [metrics.seconds])
        parts = [
            f"step {metrics.step + 1:,} of {self.steps:,}",
            f"loss {metrics.loss:.4f}",
            f"{metrics.tokens_per_second:,.0f} tokens/s",
            *([] if metrics.mfu is None else [f"MFU {metrics.mfu:.1%}"]),
            f"{clock(left)} left",
        ]
        return "   ".join(parts)

    def close(self) -> None:
        for open_ in filter(None, (self.file, self.writer)):
            open_.close()


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def write_prometheus(metrics: Metrics, path: str | Path) -> None:
    """Replace `path` by the step's numbers in Prometheus's text format, one gauge for each.

    Prometheus's node_exporter serves every `*.prom` file of one folder (its textfile collector).
    Raises ImportError in one sentence if prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError:
        raise ImportError(
            f"prometheus={str(path)!r} needs the package prometheus-client, which JupyterLab "
            "brings: pip install prometheus-client, or leave it out."
        ) from None
    registry = CollectorRegistry()
    for name, meaning in GAUGES.items():
        if (value := getattr(metrics, name)) is not None:
            Gauge(f"mini_dist_{name}", meaning, registry=registry).set(value)
    meaning = "Bytes that the rank sent in the step."
    sent = Gauge("mini_dist_sent_bytes", meaning, ["axis"], registry=registry)
    for axis, num_bytes in metrics.bytes_sent.items():
        sent.labels(axis).set(num_bytes)
    write_to_textfile(str(path), registry)


def tensorboard_writer(folder: str):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError(
            f"tensorboard={folder!r} needs the package tensorboard: pip install tensorboard, or "
            "leave it out; the JSON lines have the same numbers."
        ) from None
    return SummaryWriter(folder)


def read(path: str | Path) -> list[dict]:
    """Return the steps in a monitor's file, in order, each with its last result. A last line that
    was cut off by a crash is skipped."""
    steps = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        steps[found["step"]] = found
    return [steps[step] for step in sorted(steps)]
