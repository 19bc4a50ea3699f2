"""Tests that need a GPU: `python -m pytest tests/gpu --json figures.json` must skip none.

One GPU is enough: one rank runs on NCCL, and several ranks share it over gloo. The measured
figures go to the file, for the docstrings of the benchmarks.
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
    """Return figure(name, value), which keeps a measured value."""

    def keep(name: str, value) -> None:
        request.config.stash[FIGURES][name] = value

    return keep


def pytest_sessionfinish(session):
    path = session.config.getoption("json", None)
    if path and torch.cuda.is_available():
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        figures = about | session.config.stash[FIGURES]
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")
