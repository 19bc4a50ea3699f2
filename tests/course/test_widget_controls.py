"""Every explorer's sliders can return to their start value and reach both ends."""

import ipywidgets
import pytest

from mini_dist import widgets
from mini_dist.course.widgets import links, pipeline
from mini_dist.course.widgets.explorer import round_values

EXPLORERS = {name: getattr(widgets, name) for name in widgets.__all__ if name != "Explorer"}
EXPLORERS |= {"all_reduces": links.explorer, "pipelines": pipeline.explorer}


def on_a_step(control) -> bool:
    steps = (control.value - control.min) / control.step
    return abs(steps - round(steps)) < 1e-6


@pytest.mark.parametrize("name", EXPLORERS)
def test_a_control_opens_on_a_value_to_which_it_can_return(name):
    grid, _ = EXPLORERS[name]().view.children
    for control in grid.children:
        if isinstance(control, ipywidgets.SelectionSlider | ipywidgets.Dropdown):
            assert control.value in control.options, control.description
        elif isinstance(control, ipywidgets.FloatSlider):
            assert on_a_step(control), control.description


def test_a_slider_that_opens_between_its_steps_would_be_found():
    assert not on_a_step(ipywidgets.FloatSlider(7.5, min=0.1, max=1000, step=10))


def test_the_zero_papers_model_and_round_ones_can_be_chosen():
    grid, _ = widgets.zero_figure().view.children
    (billions,) = [c for c in grid.children if c.description == "billions"]
    assert billions.value == 7.5 and {0.1, 1.5, 7, 70, 1000} <= set(billions.options)


def test_round_values_keep_to_their_range():
    assert round_values(0.3, 2) == [0.3, 0.5, 0.7, 1, 1.5, 2]
