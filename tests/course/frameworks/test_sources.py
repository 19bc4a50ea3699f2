"""What lesson 22 cites from other programs is where it says, in the versions that it names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

LESSON = Path(__file__).parents[3] / "lessons/22_in_their_words.md"
# column of the table -> (module, distribution)
PROGRAMS = {
    "DeepSpeed": ("deepspeed", "deepspeed"),
    "Megatron-core": ("megatron.core", "megatron-core"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "torchft": ("torchft", "torchft-nightly"),
}
IN_THE_TEXT = {  # (file, text that it must contain) -> module
    ("runtime/zero/stage_1_and_2.py", "def average_tensor"): "deepspeed",
    ("runtime/zero/config.py", "use_multi_rank_bucket_allreduce: bool = True"): "deepspeed",
    ("runtime/zero/config.py", "when the model is small and we want to scale it"): "deepspeed",
    ("runtime/zero/parameter_offload.py", "mark_persistent_parameters"): "deepspeed",
    ("runtime/constants.py", "GRADIENT_CLIPPING_DEFAULT = 1.0"): "deepspeed",
    ("runtime/pipe/engine.py", "incompatible with pipeline parallelism"): "deepspeed",
    ("runtime/config.py", "Elastic training has been removed"): "deepspeed",
    ("transformer/torch_norm.py", "assert not config.sequence_parallel"): "megatron.core",
    ("models/llama3/model/args.py", "scaling_factor: float = 8.0"): "torchtitan",
    ("models/llama3/infra/parallelize.py", "SequenceParallel()"): "torchtitan",
}


def root_of(module: str) -> Path:
    pytest.importorskip(module.partition(".")[0])
    return Path(importlib.util.find_spec(module).submodule_search_locations[0])


def table() -> dict[str, list[str]]:
    """Return the cells below each program's name in the lesson's table of frameworks."""
    rows = [line.strip("|").split("|") for line in LESSON.read_text().splitlines() if "|" in line]
    first = next(i for i, row in enumerate(rows) if "DeepSpeed 0" in row[1])
    columns = zip(*rows[first:])
    return {head.strip(): [cell.strip() for cell in cells] for head, _, *cells in columns}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_cell_of_the_table_names_a_file_that_has_its_words(program):
    module, distribution = PROGRAMS[program]
    root = root_of(module)
    ((head, cells),) = [each for each in table().items() if each[0].startswith(program)]
    assert "nightly" in head or head.endswith(importlib.metadata.version(distribution))
    assert len(cells) == 7
    cited = 0
    for cell in cells:
        for inside in re.findall(r"\(([^()]*\.py`[^()]*)\)", cell):
            words = re.findall(r"`([^`]+)`", inside)
            files = [word for word in words if word.endswith(".py")]
            text = "".join((root / file).read_text() for file in files)
            assert all(word in text for word in words if word not in files), (program, cell)
            cited += len(files)
        assert cell.startswith("nothing") or re.search(r"run\b|`|lesson|yes", cell), cell
    assert cited >= 3


@pytest.mark.parametrize("cited, module", IN_THE_TEXT.items())
def test_what_the_text_says_of_a_file_stands_in_it(cited, module):
    file, words = cited
    assert file.rsplit("/", 1)[-1] in LESSON.read_text()
    text = " ".join((root_of(module) / file).read_text().split())
    assert words in text


def test_torchft_has_no_pipeline_and_offloads_no_states():
    sources = {path.name: path.read_text() for path in root_of("torchft").rglob("*.py")}
    assert [name for name, text in sources.items() if "pipelin" in text.lower()] == [
        "local_sgd_integ_test.py"
    ]
    assert not any("offload" in text.lower() for text in sources.values())
