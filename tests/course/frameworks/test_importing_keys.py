"""The importers know exactly the keys of the installed frameworks."""

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from mini_dist.plan.calculators import from_megatron


def test_zero_s_keys_are_deepspeed_s():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    from mini_dist.plan.calculators.from_deepspeed import ZERO_KEYS

    fields = config.DeepSpeedZeroConfig.model_fields.items()
    assert set(ZERO_KEYS) == {field.alias or name for name, field in fields}


def test_what_the_importer_reads_deepspeed_reads_alike():
    """Both complete every combination of batch sizes to equal values, or both refuse it."""
    config = pytest.importorskip("deepspeed.runtime.config")
    from mini_dist.plan.calculators import from_deepspeed
    from mini_dist.plan.calculators.from_deepspeed import BATCH

    same = refused = 0
    for total in (None, 16, 24, 32, 33):
        for micro in (None, 1, 2, 3):
            for accumulated in (None, 1, 2, 4):
                said = dict(zip(BATCH, (total, micro, accumulated)))
                said = {name: value for name, value in said.items() if value is not None}
                theirs = config.DeepSpeedConfig.__new__(config.DeepSpeedConfig)
                theirs.world_size = 4
                for name, value in zip(BATCH, (total, micro, accumulated)):
                    setattr(theirs, name, value)
                try:
                    theirs._configure_train_batch_size()
                except AssertionError:
                    with pytest.raises(ValueError):
                        from_deepspeed(said, 4)
                    refused += 1
                    continue
                ours = from_deepspeed(said, 4).layout
                assert ours.global_batch_size == theirs.train_batch_size
                assert ours.micro_batch_size == theirs.train_micro_batch_size_per_gpu
                assert ours.num_micro_batches == theirs.gradient_accumulation_steps
                same += 1
    assert same > 20 and refused > 20


def test_deepspeed_reads_past_a_key_that_it_does_not_know():
    """As lesson 22 says, it starts with a micro-batch of 8 where 4 was meant."""
    config = pytest.importorskip("deepspeed.runtime.config")
    from mini_dist.plan.calculators import from_deepspeed

    said = {"train_batch_size": 128, "train_microbatch_size_per_gpu": 4}
    theirs = config.DeepSpeedConfig.__new__(config.DeepSpeedConfig)
    theirs.world_size, theirs._param_dict = 16, said
    theirs._initialize_params(dict(said))
    theirs._configure_train_batch_size()
    assert (theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps) == (8, 1)
    with pytest.raises(ValueError, match="give 'train_micro_batch_size_per_gpu'"):
        from_deepspeed(said, 16)


def test_sections_and_their_keys_are_torchtitan_s():
    """Read the keys from torchtitan's source, because importing it needs triton."""
    found = importlib.util.find_spec("torchtitan")
    if found is None:
        pytest.skip("torchtitan is not installed")
    source = Path(found.origin).with_name("config") / "job_config.py"
    from mini_dist.plan.calculators.from_torchtitan import (
        PARALLELISM,
        RECOMPUTE,
        SECTIONS,
        TRAINING,
    )

    fields = {
        node.name: {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert set(TRAINING) == fields["Training"]
    assert set(PARALLELISM) == fields["Parallelism"]
    assert set(RECOMPUTE) == fields["ActivationCheckpoint"]
    own = {"training", "parallelism", "activation_checkpoint"}
    assert {*SECTIONS, *own} == fields["JobConfig"]


def test_no_field_of_megatron_core_is_taken_for_a_slip_of_the_pen():
    """Megatron-LM derives its arguments from these fields, with dashes."""
    transformer = pytest.importorskip("megatron.core.transformer.transformer_config")
    names = [field.name for field in dataclasses.fields(transformer.MLATransformerConfig)]
    assert len(names) > 100
    ours = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}
    for name in set(names) - ours:
        word = "--" + name.replace("_", "-")
        try:
            from_megatron(["--micro-batch-size", "1", word, "1"], 16)
        except ValueError as error:
            assert "is no argument of Megatron-LM" not in str(error), word
