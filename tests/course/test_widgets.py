"""The explorer pattern and the explorers: what a control does and what a saved page shows."""

import re
import sys

import ipywidgets
import pytest

from mini_dist.course.draw.svg import Box, Drawing, Line, Panel, Words
from mini_dist.course.lab import ParameterError, choice, flag, real, text, whole
from mini_dist.course.widgets import Explorer, memory_and_time
from mini_dist.course.widgets import model_needs as needs
from mini_dist.course.widgets.explorer import WRONG
from mini_dist.plan.calculators import MODELS, hardware, model_states, num_parameters


def dots(n=2, color="blue", size=0.5, ranks=4, filled=True, title="dots"):
    """Draw n dots; five are too many."""
    if n == 5:
        raise ValueError("5 > 4: too <many> dots")
    panel = Panel(100, 100, (0, 9), (0, 1), title=title)
    for x in range(n):
        panel.dot(x, 0.5, color)
    return Drawing([panel], f"{n} {color} dots"), f"<p>{n} of {ranks}</p>"


DECLARED = dict(
    n=whole(1, 9),
    color=choice("blue", "red"),
    size=real(0, 1),
    ranks=whole(1, 48, log=True),
    filled=flag(),
    title=text(),
)


@pytest.fixture
def explorer():
    return Explorer(dots, **DECLARED)


def parts(explorer):
    """Return (controls by name, image, page) of the live view."""
    grid, seen = explorer.view.children
    return {c.description.replace(" ", "_"): c for c in grid.children}, *seen.children


# ---- the pattern ---------------------------------------------------------------------------------


def test_every_parameter_has_a_control_that_starts_at_its_default(explorer):
    controls, _, _ = parts(explorer)
    assert {name: control.value for name, control in controls.items()} == explorer.values
    kinds = [type(control).__name__ for control in controls.values()]
    assert kinds == ["IntSlider", "Dropdown", "FloatSlider", "SelectionSlider", "Checkbox", "Text"]


def test_a_control_reaches_both_ends_and_the_start(explorer):
    controls, _, _ = parts(explorer)
    assert controls["ranks"].options == (1, 2, 4, 8, 16, 32, 48)
    assert (controls["n"].min, controls["n"].max) == (1, 9)
    assert (controls["size"].min, controls["size"].max, controls["size"].step) == (0, 1, 0.01)
    assert controls["color"].options == ("blue", "red")
    explorer = Explorer(dots, **DECLARED)
    explorer.change(ranks=7)  # 7 is allowed but lies between two stops.
    assert parts(explorer)[0]["ranks"].value == 7


def test_moving_a_control_shows_what_the_function_returns_for_it(explorer):
    controls, image, page = parts(explorer)
    controls["n"].value = 3
    controls["color"].value = "red"
    picture, html = dots(n=3, color="red")
    assert image.value == picture.html() and html in page.value
    assert explorer.values["n"] == 3


def test_an_error_is_one_red_sentence_and_the_last_good_picture_stays(explorer):
    controls, image, page = parts(explorer)
    controls["n"].value = 4
    good = image.value
    controls["n"].value = 5
    assert WRONG in page.value and "5 &gt; 4: too &lt;many&gt; dots" in page.value
    assert image.value == good
    assert explorer.values["n"] == 4 and repr(explorer.picture) == "4 blue dots"
    controls["n"].value = 6
    assert "<p>6 of 4</p>" in page.value and image.value != good


def test_a_saved_page_has_the_picture_besides_the_view_and_the_view_is_one(explorer):
    bundle, again = explorer._repr_mimebundle_(), explorer._repr_mimebundle_()
    view = "application/vnd.jupyter.widget-view+json"
    assert bundle["text/html"] == dots()[0]._repr_html_()
    assert bundle["text/plain"] == "2 blue dots"
    assert bundle[view]["model_id"] == explorer.view.model_id == again[view]["model_id"]


def test_without_ipywidgets_there_is_still_the_picture(explorer, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert set(explorer._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_a_picture_that_the_learner_changed_is_what_is_saved(explorer):
    controls, _, _ = parts(explorer)
    controls["n"].value = 3
    assert explorer._repr_mimebundle_()["text/plain"] == "3 blue dots"


def test_a_wrong_start_fails_in_the_cell_not_in_red(explorer):
    with pytest.raises(ValueError, match="too <many> dots"):
        explorer.change(n=5)
    with pytest.raises(ParameterError, match="n=0 is out of range: give a whole number from 1"):
        explorer.change(n=0)
    with pytest.raises(ParameterError, match="colour='red' is not a parameter.*did you mean color"):
        explorer.change(colour="red")
    assert explorer.values["n"] == 2


def test_declarations_and_parameters_are_the_same_list():
    missing = {name: kind for name, kind in DECLARED.items() if name != "title"}
    with pytest.raises(TypeError, match="dots takes n, color.*but declared are n, color"):
        Explorer(dots, **missing)


def test_a_start_outside_of_its_declaration_is_refused():
    with pytest.raises(ParameterError, match="n=2 is out of range"):
        Explorer(dots, **{**DECLARED, "n": whole(3, 9)})


# ---- memory and time -----------------------------------------------------------------------------


def labels(picture):
    """Return all text in a figure, including titles."""
    found = []
    for panel in picture.panels:
        found += [mark.text for mark in panel.marks if isinstance(mark, Words)] + [panel.title]
    return found


def test_gpt3_needs_33_a100_for_its_states_and_32_years_of_one_at_peak():
    picture, html = needs.render("gpt3-175b", "bf16 + Adam", "a100-80", 1, 1.0, "as published")
    D, L = 12288, 96  # per layer: 12 matrices D x D, 9 D of biases, 4 D of norms
    parameters = L * (12 * D * D + 13 * D) + (50257 + 2048) * D + 2 * D
    gib = 16 * parameters / 2**30
    assert f"{gib:,.0f}" in labels(picture)
    assert f"gpt3-175b: model states = {gib / 79.2:.0f} × A100 SXM 80GB" in labels(picture)
    years = 6 * parameters * 300e9 / 312e12 / (365.25 * 86400)
    assert f"training: {years:.4g} years on 1 GPU" in labels(picture)
    assert f"{years:.4g} years" in html and "6 P T" in html and "Brown et al. 2020" in html
    assert "Activations are not in here" in html


def test_bars_are_the_recipe_one_after_the_other_and_the_line_is_the_gpu():
    for name, recipe in needs.RECIPES.items():
        left = needs.render("llama3-8b", name)[0].panels[0]
        *kinds, total = [mark for mark in left.marks if isinstance(mark, Box)]
        gib = num_parameters(MODELS["llama3-8b"]) / 2**30
        assert [bar.x1 - bar.x0 for bar in kinds] == pytest.approx([b * gib for b in recipe])
        ends = [0, *(bar.x1 for bar in kinds)]
        assert [bar.x0 for bar in kinds] == pytest.approx(ends[:-1])
        assert total.x1 - total.x0 == pytest.approx(ends[-1])
        (limit,) = [mark for mark in left.marks if isinstance(mark, Line)]
        assert {x for x, _ in limit.points} == {hardware("a100-80").device.memory_bytes / 2**30}


def test_the_first_recipe_is_the_calculators_own():
    first = next(iter(needs.RECIPES.values()))
    assert sum(first) == model_states(1).total and first[0] == model_states(1)["parameters"]


def test_twice_the_gpus_take_half_the_time_and_better_use_less():
    def title(**parameters):
        return needs.render("llama3-405b", **parameters)[0].panels[1].title

    def days(**parameters):
        words = title(**parameters).split()
        assert words[2] == "days"
        return float(words[1])

    one = days(num_gpus=16384, gpu="h100", utilisation=0.4)
    assert days(num_gpus=32768, gpu="h100", utilisation=0.4) == pytest.approx(one / 2, rel=1e-3)
    assert days(num_gpus=16384, gpu="h100", utilisation=0.8) == pytest.approx(one / 2, rel=1e-3)


def test_unpublished_tokens_are_20_a_parameter_and_said_to_be():
    explorer = memory_and_time()
    controls, image, page = parts(explorer)
    before = image.value
    controls["model"].value = "gpt2-xl"
    assert "31.15 G tokens: not published: 20 per parameter" in page.value
    assert image.value != before and "gpt2-xl" in repr(explorer.picture)
    controls["tokens"].value = "20 per parameter"
    assert "not published" not in page.value and "31.15 G tokens" in page.value


def test_numbers_of_gpus_are_chosen_not_typed():
    """A SelectionSlider's readout accepts typing but ignores it."""
    control = parts(memory_and_time())[0]["num_gpus"]
    assert isinstance(control, ipywidgets.Dropdown)
    assert control.options == tuple(2**k for k in range(17))


@pytest.mark.parametrize("num_gpus", [1, 2**16])
@pytest.mark.parametrize("model", needs.MODELS)
def test_the_dot_is_in_the_picture(model, num_gpus):
    for gpu, utilisation in (("a100-40", 0.05), ("b200", 1.0)):
        picture, _ = needs.render(model, gpu=gpu, num_gpus=num_gpus, utilisation=utilisation)
        low, high = picture.panels[1].y
        *_, line, dot = picture.panels[1].marks
        assert all(low < y < high for y in [dot.y, *(y for _, y in line.points)])


def test_durations_are_said_in_the_unit_one_would_choose():
    year = 365.25 * 86400
    assert needs.duration(77_160 * year) == "77,160 years"
    assert needs.duration(32.38 * year) == "32.38 years"
    assert needs.duration(30 * 86400) == "30 days"
    assert needs.duration(11_500) == "3.194 hours" and needs.duration(31.64) == "31.64 s"


def test_each_recipe_names_who_states_it_and_each_key_its_source():
    for recipe in needs.RECIPES:
        html = needs.render(recipe=recipe)[1]
        assert html.count(needs.STATED_BY[recipe].replace("'", "&#x27;")) == 3
        assert "[ZeRO]" not in html
        keys = set(re.findall(r"\[[a-z]+\]", html))
        assert keys and keys <= set(needs.KEYS)
        assert all(html.count(key) == 2 for key in keys)


@pytest.mark.parametrize("model", needs.MODELS)
@pytest.mark.parametrize("gpu", needs.GPUS)
def test_every_choice_can_be_drawn(model, gpu):
    explorer = memory_and_time(model=model, gpu=gpu, tokens="15 trillion")
    assert explorer.picture.html().count("<svg") == 2
    assert isinstance(explorer.view, ipywidgets.Widget)


def test_the_same_parameters_draw_the_same_bytes():
    assert needs.render()[0].svg() == needs.render()[0].svg()
