"""What only a GPU can prove: `python -m pytest tests/gpu --json figures.json`, without one skipped.

One GPU is enough: one rank on NCCL, and several ranks that share it over gloo. The figures that the
tests measure go to the file, for the heads of the benchmarks.
"""

import json
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FIGURES = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption("--json", help="the file for the figures that tests/gpu measures")


def pytest_configure(config):
    config.stash[FIGURES] = {}


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU: this machine has none"))


@pytest.fixture
def figure(request):
    """figure(name, value): keep a measured value."""

    def keep(name: str, value) -> None:
        request.config.stash[FIGURES][name] = value

    return keep


def pytest_sessionfinish(session):
    path = session.config.getoption("json", None)
    if path and torch.cuda.is_available():
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        figures = about | session.config.stash[FIGURES]
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
