"""The explorer of lesson 24 and the figure of blocks show what was computed."""

import re

import pytest

from mini_dist import draw
from mini_dist.course.draw.block_maps import SHARED, of_blocks
from mini_dist.course.lab import ParameterError
from mini_dist.course.widgets import requests_fit
from mini_dist.plan.calculators.serving import Server, answer, largest_batch
from mini_dist.serving import Memory, Policy, Request, Scheduler, plan, replayed


def test_it_says_what_the_calculator_says():
    explorer = requests_fit(model="llama3-70b", gpu="h100", tp=4, prompt=2048, new=512, batch=32)
    server = Server("llama3-70b", "h100", 4)
    mine = answer(server, 32, 2048, 512)
    assert f"{largest_batch(server, 2560):,} requests of 2,560 tokens fit" in explorer.html
    assert f"{mine.tokens_a_second:,.0f} tokens per second and GPU" in explorer.html
    assert f"${mine.dollars(2.5):.2f} for a million" in explorer.html
    assert repr(explorer.picture).startswith(f"{largest_batch(server, 2560):,} requests")


def test_a_batch_that_does_not_fit_becomes_the_largest_that_does():
    explorer = requests_fit(prompt=2**16, batch=1024)
    most = largest_batch(Server("llama3-8b", "h100"), 2**16 + 256)
    assert f" {most} at once" in explorer.html


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match="give a larger tp"):
        requests_fit(model="llama3-405b")
    with pytest.raises(ParameterError):
        requests_fit(tp=3)


def test_fewer_bits_make_room():
    def fits(**changed):
        (found,) = re.findall(r"([\d,]+) requests of", requests_fit(**changed).html)
        return int(found.replace(",", ""))

    assert fits() < fits(weights="8 bits") < fits(weights="8 bits", cache="8 bits")


def test_a_block_is_drawn_for_whoever_has_it_and_as_full_as_it_is():
    requests = [Request("a", range(6), 2, samples=2)]
    book = next(iter(replayed(plan(requests, Scheduler(Memory(8, 4))), Memory(8, 4))))[1]
    assert of_blocks(book, {"a.0": "red", "a.1": "blue"}) == [(0, SHARED, 1.0), (1, SHARED, 0.5)]


def test_the_figure_says_how_many_steps_and_what_is_empty():
    requests = [Request("a", range(4), 5), Request("b", range(3), 9)]
    steps = plan(requests, Scheduler(Memory(8, 4), Policy(2)))
    picture = draw.blocks({"paged": steps}, Memory(8, 4), requests)
    assert repr(picture).startswith(f"paged: {len(steps)} steps, ")
    assert picture.svg().count("<path") > 2
