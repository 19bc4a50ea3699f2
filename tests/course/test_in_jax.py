"""Parse XLA's text without JAX: every form in which XLA writes groups of ranks."""

import pytest

from mini_dist.course.elsewhere.in_jax import collectives_in

LINES = [
    (
        "%a = f32[64,32]{1,0} all-reduce(%d), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to=%add",
        ["all_reduce", 8192, 2, 65536],
    ),
    (
        "%a = f32[128,64]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[8], dim={0}",
        ["all_gather", 32768, 4, 196608],
    ),
    (
        "%a = f32[8]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(2,1,0), dimensions={0}",
        ["all_gather", 32, 2, 128],
    ),
    (
        "%a = f32[64,32]{1,0} all-reduce(%y), "
        "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, use_global_device_ids=true",
        ["all_reduce", 8192, 4, 98304],
    ),
    (
        "%a = (f32[4]{0}, f32[4]{0}) all-to-all(%a, %b), replica_groups=mesh['axis_0'=4,"
        "'axis_1'=1,'axis_2'=1,'axis_3'=2], device_ids=([2,4]T(1,0)) {'axis_3'}, x={1}",
        ["all_to_all", 32, 2, 128],
    ),
    (
        "%a = f32[128]{0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
        ["reduce_scatter", 4096, 8, 28672],
    ),
    (
        "%a = bf16[32]{0} collective-permute(%p), source_target_pairs={{0,0},{4,2},{2,4}}",
        ["collective_permute", 64, 2, 128],
    ),
]


@pytest.mark.parametrize("line, row", LINES, ids=[row[0] for _, row in LINES])
def test_a_collective_is_read(line, row):
    assert collectives_in(f"  ROOT %x = f32[4] add(%p)\n{line}\n") == [row]


def test_groups_in_a_form_that_is_not_known_are_an_error():
    with pytest.raises(ValueError, match="no groups of ranks are known from"):
        collectives_in("%a = f32[4]{0} all-reduce(%p), replica_groups=?")
