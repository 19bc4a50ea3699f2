"""Test that objects arrive, in pieces or at once, and are not copied on the way."""

import gc
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from mini_dist.ranks.transport import Inbox, PicklingError, from_frames, receive, send, to_frames

ROOT = Path(__file__).resolve().parents[2]


def there_and_back(obj):
    frames = to_frames(obj, "it")
    return from_frames([bytearray(memoryview(frame)) for frame in frames]), frames


LARGE = 100_000


def test_tensors_arrive_on_the_device_that_is_asked_for():
    large, small = torch.zeros(300, 100)[:, ::2], torch.ones(2, requires_grad=True)
    frames = to_frames({"large": large, "weight": nn.Parameter(small), "n": 3}, "it")
    back = from_frames(frames, torch.device("meta"))
    assert {back["large"].device.type, back["weight"].device.type} == {"meta"} and back["n"] == 3
    assert back["large"].shape == (300, 50) and back["weight"].requires_grad
    assert type(back["weight"]) is nn.Parameter and back["weight"].is_leaf
    assert from_frames(frames)["large"].device.type == "cpu"


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(400, 400).t(),
        torch.randn(2, 300, 200).permute(1, 2, 0),
        torch.randn(300, 800)[:, ::2],
        torch.ones(1).expand(5),
        torch.ones(LARGE, dtype=torch.bfloat16),
        torch.ones(LARGE).to(torch.float8_e4m3fn),
        torch.randn(LARGE).to(torch.complex64),
        torch.conj(torch.tensor([1 + 2j])),
        torch.tensor(True),
        torch.ones(0, 3),
        torch.zeros(2, 0, 3).transpose(0, 2),
        torch.randn(LARGE, requires_grad=True),
        nn.Parameter(torch.randn(3), requires_grad=False),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}".replace("torch.", ""),
)
def test_a_tensor_is_the_same_after_the_way(x):
    y, _ = there_and_back(x)
    assert type(y) is type(x) and y.dtype == x.dtype and y.shape == x.shape
    assert y.layout == x.layout and y.requires_grad == x.requires_grad
    if x.layout is torch.strided:
        assert torch.equal(bits(y), bits(x))
        assert y.stride() == x.stride() or torch.empty_like(x).stride() != x.stride()


def bits(x):
    return x.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def test_a_view_takes_along_its_own_elements_and_not_the_whole_storage():
    whole = torch.randn(1000, 1000)
    _, frames = there_and_back(whole[3])
    assert sum(memoryview(frame).nbytes for frame in frames) < 8_000


def test_large_tensors_and_arrays_leave_from_where_they_are():
    x, array = torch.zeros(LARGE), numpy.zeros(LARGE)
    frames = to_frames({"x": [x], "array": array}, "it")
    x.fill_(1), array.fill(2)
    back = from_frames(frames)
    assert torch.equal(back["x"][0], x) and (back["array"] == array).all()
    assert len(memoryview(frames[0])) < 2_000


def test_a_small_tensor_has_memory_that_can_be_resized():
    y, _ = there_and_back(torch.ones(3))
    assert y.resize_(5).shape == (5,)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_a_nested_tensor_arrives():
    x = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    y, _ = there_and_back(x)
    assert all(torch.equal(a, b) for a, b in zip(y.unbind(), x.unbind(), strict=True))


@pytest.mark.parametrize("shape", [(0,), (3,), (LARGE,)])
def test_what_arrives_is_on_the_cpu_whatever_the_default_device(shape):
    x = torch.ones(shape)
    with torch.device("meta"):
        y, _ = there_and_back(x)
    assert y.device.type == "cpu" and torch.equal(x, y)


def test_one_tensor_under_two_names_stays_one():
    module = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    module[0].weight = module[1].weight
    back, _ = there_and_back(module)
    assert back[0].weight is back[1].weight


def test_an_inbox_puts_together_what_comes_in_pieces():
    dice = random.Random(0)
    for _ in range(20):
        frames = [dice.randbytes(dice.choice([0, 1, 7, 1000, 70_000])) for _ in range(4)]
        here, there = socket.socketpair()
        with here, there:
            thread = threading.Thread(target=send, args=(there, frames))
            thread.start()
            inbox = Inbox()
            while inbox.message is None:
                inbox.room = inbox.room[:]  # (as it is between two reads)
                assert inbox.read(here)
            thread.join()
        assert inbox.message == frames


def test_a_sender_that_goes_in_the_middle_is_an_end_and_no_message():
    here, there = socket.socketpair()
    with here:
        there.sendall(bytes([2, 0, 0, 0, 0, 0, 0, 0, 5]))
        there.close()
        with pytest.raises(EOFError, match="the other process is gone"):
            receive(here)


def test_a_function_that_torch_has_decorated_travels_without_torch():
    @once_differentiable
    def backward(ctx, dy):
        return 2 * dy

    there, frames = there_and_back(backward)
    assert there(None, 3) == 6 and sum(memoryview(frame).nbytes for frame in frames) < 5000


def test_a_function_keeps_its_file_and_lines_with_a_cloudpickle_that_leaves_them_out(monkeypatch):
    """Version 3.1.3 puts "<dynamic-code>" there, and no error could name the learner's cell."""
    from cloudpickle import cloudpickle

    with_file = cloudpickle._code_reduce

    def without_file(code):
        make, arguments = with_file(code)
        return make, tuple("<dynamic-code>" if a == code.co_filename else a for a in arguments)

    monkeypatch.setattr(cloudpickle, "_code_reduce", without_file)
    cell = {"__name__": "__main__"}
    source = "def outer():\n    def inner():\n        pass\n    return inner"
    exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"), cell)
    there = from_frames(to_frames(cell["outer"], "a function"))
    found = [(f.__code__.co_filename, f.__code__.co_firstlineno) for f in (there, there())]
    assert found == [("/tmp/ipykernel_1/2.py", 1), ("/tmp/ipykernel_1/2.py", 2)]


def test_a_class_of_a_cell_may_have_cached_properties():
    cell = {"__name__": "__main__"}
    source = """
from functools import cached_property

class Sizes:
    @cached_property
    def width(self):
        return self.heads * Sizes.EACH

    @cached_property
    def heads(self):
        return 3

    EACH = 4

def width():
    sizes = Sizes()
    return sizes.width, sizes.__dict__
"""
    exec(compile(source, "a cell", "exec"), cell)
    assert from_frames(to_frames(cell["width"], "it"))() == (12, {"heads": 3, "width": 12})


def test_what_cannot_travel_is_named_through_functions_and_containers():
    lock = threading.Lock()

    def innermost():
        return lock

    for obj, said in (
        (lambda group: innermost(), "the variable 'lock' of the variable 'innermost'"),
        ({"a": [1, {"b": lock}]}, "the entry 'b' of the entry 'a'"),
        (lambda group: [lock for _ in range(3)], "the variable 'lock'"),
    ):
        with pytest.raises(PicklingError) as caught:
            to_frames(obj, "it")
        assert said in str(caught.value) and "a _thread.lock" in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_a_result_of_200_megabytes_needs_little_more_memory_than_itself():
    """Neither side needs 1.25 times the result's size; a copy on either side would need 2 times."""
    code = """
import resource, torch
from mini_dist import launch
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def work(group):
    x = torch.ones(50_000_000)
    return x, peak()
launch(lambda group: torch.ones(2), 1)
before = peak()
(x, rank_before), = launch(work, 1).results
assert peak() - before < 1.25 * x.nbytes, (peak() - before) / x.nbytes
def after(x, group):
    return peak()
(rank_after,) = launch(after, 1, (x,)).results
assert rank_after < rank_before + 0.25 * x.nbytes, (rank_before, rank_after)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_said_when_what_was_pickled_is_collected(monkeypatch):
    """Python 3.13 reports on stderr if a BytesIO is collected while a view of it exists."""
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    around = [to_frames((lambda: 1, (), {}), "a function")]
    around.append(around)
    del around
    gc.collect()
    assert not heard
