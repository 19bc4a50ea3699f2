"""Schedules in files: what torch writes of its own schedules is read, runs, and trains the same."""

from types import SimpleNamespace

import pytest
import torch

from mini_dist import launch
from mini_dist.plan.schedule import (
    ScheduleError,
    dualpipe_v,
    from_csv,
    gpipe,
    interleaved,
    peak_in_flight,
    simulate,
    validate,
    zb_v,
)
from tests.strategies.test_pipeline import assert_equal_in_bits, one_process, one_thread, train_each

__all__ = ["one_thread"]  # (pytest finds the fixture by its name here)

FORMATS = ("compute_only", "compute_comms")
# Their class, chunks a rank, whether these lie in a V, and ours with the same lists if any.
THEIRS = {
    "ScheduleLoopedBFS": (2, False, None),
    "ScheduleInterleaved1F1B": (2, False, lambda p, m: interleaved(p, m, 2)),
    "ScheduleInterleavedZeroBubble": (2, False, None),
    "ScheduleZBVZeroBubble": (2, True, zb_v),
    "ScheduleDualPipeV": (2, True, dualpipe_v),
}


def their_schedule(name, p, m):
    """As rank 0 of torch makes it, on stages that compute nothing."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        def __init__(self, index, num_stages):
            self.stage_index, self.num_stages = index, num_stages
            self.group_size, self.group_rank, self.group = p, 0, None
            self.submod, self.has_backward = None, True
            self.stage_index_to_group_rank = {i: i % p for i in range(num_stages)}

    Stage.__abstractmethods__ = frozenset()
    chunks, in_a_v, _ = THEIRS.get(name, (1, False, None))
    mine = [0, 2 * p - 1] if in_a_v else [p * chunk for chunk in range(chunks)]
    stages = [Stage(index, p * chunks) for index in mine]
    return getattr(schedules, name)(stages if name in THEIRS else stages[0], m)


def write(name, p, m, form, folder):
    path = folder / f"{name}.csv"
    their_schedule(name, p, m)._dump_csv(path, format=form)
    return path


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", THEIRS)
def test_what_torch_writes_is_read_validated_and_simulated(name, form, tmp_path):
    ours = THEIRS[name][2]
    for p, m in ((2, 4), (3, 6), (4, 8), (4, 12)):
        path = write(name, p, m, form, tmp_path)
        read = from_csv(path)
        validate(read)
        assert read.name == name and read.mixed == (name == "ScheduleDualPipeV")
        assert (read.num_ranks, read.num_stages, read.num_micro_batches) == (p, 2 * p, m)
        assert read.has_communication == (form == "compute_comms")
        work = [a for a in read.all_actions if len(a.kind) == 1]
        splits = sum(a.kind == "W" for a in work)
        assert len(work) == 2 * p * m * 2 + splits
        assert (splits > 0) == (name not in ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B"))
        timeline = simulate(read)
        assert sum(timeline.busy) == 2 * p * m * 3  # F, B and W last 1 each, split or not
        if ours:
            assert timeline.makespan == simulate(ours(p, m)).makespan
            assert peak_in_flight(read) == peak_in_flight(ours(p, m))
        if ours and form == "compute_only":
            assert read.ranks == ours(p, m).ranks


def test_the_cells_that_only_torch_has_are_in_these_files(tmp_path):
    """Or the test above would say nothing of them."""
    text = write("ScheduleDualPipeV", 4, 10, "compute_only", tmp_path).read_text()
    assert "OVERLAP_F_B" in text and "I" in text.replace("F_B", "")
    text = write("ScheduleZBVZeroBubble", 4, 8, "compute_comms", tmp_path).read_text()
    assert "UNSHARD" in text and "RESHARD" in text and "REDUCE_GRAD" in text and "7I0" in text


def test_the_tables_of_its_single_stage_schedules(tmp_path):
    """GPipe's is ours. Its 1F1B runs as ours does, but the table that it shows of it is wrong on
    the last ranks (a forward of micro-batch 8, of 8): refused, with the place."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    for name in ("ScheduleGPipe", "Schedule1F1B"):
        order = their_schedule(name, 4, 8)._get_pipeline_order()
        table = SimpleNamespace(pipeline_order=order)
        PipelineScheduleMulti._dump_csv(table, tmp_path / f"{name}.csv")
    assert from_csv(tmp_path / "ScheduleGPipe.csv").ranks == gpipe(4, 8).ranks
    with pytest.raises(ScheduleError, match="0F8 is missing"):
        validate(from_csv(tmp_path / "Schedule1F1B.csv"))


def test_what_torch_wrote_trains_as_one_process(tmp_path):
    """Its sends and receives in its order, on real ranks, to the last bit; but for one schedule
    whose backwards come in falling order, so that gradients are added up in another one."""
    for p, m in ((2, 4), (3, 6)):
        cases = [
            (from_csv(write(name, p, m, form, tmp_path)), {}) for name in THEIRS for form in FORMATS
        ]
        reference = one_process(m, steps=1)
        for (schedule, _), results in zip(cases, zip(*launch(train_each, p, (cases,)).results)):
            if schedule.name == "ScheduleLoopedBFS":
                for _, parameters in results:
                    for name, (gradient, _) in parameters.items():
                        torch.testing.assert_close(gradient, reference[1][name][0])
            else:
                assert_equal_in_bits(results, reference)


def test_cells_by_hand(tmp_path):
    path = tmp_path / "mine.csv"

    def read(text):
        path.write_text(text)
        return from_csv(path)

    assert read("0F0,0I0,0W0\n").ranks == read("0F0,0B0,0W0\n").ranks
    assert not read("0F0,0I0,0W0\n").mixed and not read("0F0,0B0,0W0\n").mixed
    assert read("0F0,0F1,0I0,0B1,0W0\n").mixed
    overlapped = read(
        "0UNSHARD,0F0,(0F1;0B0)OVERLAP_F_B,,( 0F2 ; 0I1 )OVERLAP_F_B,0B2,0W1,0RESHARD"
    )
    assert [str(a) for a in overlapped.actions(0)] == "0F0 0F1 0B0 0F2 0B1 0B2 0W1".split()
    fused = read("0F0,(0SEND_F0;0RECV_B0),0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert str(fused.ranks[0][1]) == "(0SEND_F0;0RECV_B0)"


@pytest.mark.parametrize(
    "text, said",
    [
        ("0F0,0F1,0I0,0B1", "0I0 is half a backward, and the other half, 0W0, is missing"),
        ("0F0,0F1,0I0,0W0,0B1,0W1", "0W1 is half a backward, and the other half, 0I1, is missing"),
        ("0F0,0B0,(0F1;0X1)OVERLAP_F_B", "'0X1' is not an action"),
        ("0F0,0B0,0GATHER", "'0GATHER' is not an action"),
        ("0F0,0F1,0I0,0W0,0B0,0B1", "0B0 stands 2 times"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, said, tmp_path):
    """A lone I would else have been taken for a full backward, an I beside a B done twice."""
    (tmp_path / "wrong.csv").write_text(text)
    with pytest.raises(ScheduleError) as error:
        validate(from_csv(tmp_path / "wrong.csv"))
    assert said in str(error.value)
