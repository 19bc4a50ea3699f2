"""The one pattern of all explorers: a pure function, its parameters, and a control for each.

    def squares(n=3, color="blue"):
        return drawing, "<p>some HTML</p>"

    Explorer(squares, n=whole(1, 9), color=choice("blue", "red"))

The function's defaults are where the controls start. In a live notebook, moving a control calls the
function again, and an error is shown in red below the last good picture. A saved notebook keeps no
live state, so it shows the picture alone, and so does a notebook without ipywidgets.
"""

from __future__ import annotations

import gc
import html
import inspect
import math
from collections.abc import Callable
from contextlib import contextmanager

from ..lab import Choice, Flag, Number, Parameter, Text, check
from ..language import drawn, said

TALLEST = 560  # pixels of picture and words together, so that a laptop's window holds both
LABEL = 132  # pixels of the widest name of a control


class Explorer:
    """Controls around `render(**parameters) -> (Drawing, HTML)`.

    Declare each parameter of `render` by choice, whole, real, flag or text of mini_dist.course.lab.
    shown_if: maps the name of a control to a function of all values; the control is hidden while
    that function returns False, because then the control would change nothing.
    Raises TypeError if declarations and parameters differ, and what `render` raises at the start.
    """

    def __init__(
        self,
        render: Callable,
        shown_if: dict[str, Callable[[dict], bool]] | None = None,
        /,
        **declared: Parameter,
    ):
        signature = inspect.signature(render).parameters
        if list(signature) != list(declared):
            raise TypeError(
                f"{render.__name__} takes {', '.join(signature)}, but declared are "
                f"{', '.join(declared) or 'none'}: declare each parameter, in this order."
            )
        self.render, self.declared, self.shown_if = render, declared, dict(shown_if or {})
        self.values = {name: parameter.default for name, parameter in signature.items()}
        self.change()
        self._view = None

    def change(self, **values) -> None:
        """Set some parameters and render again.

        Raises ParameterError, and what `render` raises; then nothing has changed.
        """
        values = check(self.declared, {**self.values, **values})
        self.picture, self.html = self.render(**values)
        self.values = values

    def keep_only(self, *names: str) -> None:
        """Hide all controls but these. Raises ValueError for a name that is no parameter."""
        if unknown := [name for name in names if name not in self.declared]:
            raise ValueError(
                f"{unknown[0]!r} is no control: give some of {', '.join(self.declared)}"
            )
        for name in self.declared.keys() - names:
            self.shown_if[name] = lambda values: False

    def shown(self, values: dict) -> list[str]:
        """Return the names of the controls that change something at these values."""
        always = lambda values: True  # noqa: E731
        return [name for name in self.declared if self.shown_if.get(name, always)(values)]

    def drawn(self) -> str:
        """Return the picture as a live widget shows it."""
        return drawn(self.picture.html(), "")[0]

    def words(self) -> str:
        """Return the HTML below the picture; it scrolls if both are taller than TALLEST."""
        most = max(TALLEST - self.picture.height, 150)
        style = f"max-height:{most:.0f}px;overflow:auto;font-size:12px;line-height:1.35"
        return f'<div style="{style}">{self.html}</div>'

    def _repr_mimebundle_(self, include=None, exclude=None):
        still = {"text/plain": repr(self.picture), "text/html": self.picture._repr_html_()}
        try:
            import ipywidgets  # noqa: F401
        except ImportError:
            return still
        return {**self.view._repr_mimebundle_(), **still}

    @property
    def view(self):
        """The live widget: controls next to the picture and its HTML. It is built once."""
        if self._view is None:
            self._view = self._build()
        return self._view

    def _build(self):
        import ipywidgets as widgets

        controls = {
            name: control(name, parameter, self.values[name])
            for name, parameter in self.declared.items()
        }
        picture, page = widgets.HTML(self.drawn()), widgets.HTML(self.words())

        def moved(_):
            values = {name: control.value for name, control in controls.items()}
            with garbage_stays():
                try:
                    self.change(**values)
                except Exception as error:  # nobody sees a traceback that is raised here
                    message = html.escape(str(error) or type(error).__name__)
                    page.value = (
                        f'<p style="color:{WRONG}"><b>{message}</b></p>'
                        "<p>The picture is the last one that could be drawn.</p>"
                    )
                else:
                    picture.value, page.value = self.drawn(), self.words()
            show(values)

        def show(values):
            there = self.shown(values)
            for name, each in controls.items():
                each.layout.display = None if name in there else "none"

        show(self.values)
        for each in controls.values():
            each.observe(moved, names="value")
        # Side by side where there is room, one below the other on a phone.
        side = widgets.VBox([*controls.values()], layout=widgets.Layout(flex="1 1 270px"))
        seen = widgets.VBox([picture, page], layout=widgets.Layout(flex="3 1 560px", min_width="0"))
        return widgets.Box([side, seen], layout=widgets.Layout(flex_flow="row wrap"))


WRONG = "#d32f2f"


@contextmanager
def garbage_stays():
    """Let Python collect its garbage later. With torch loaded a collection takes some tenths of a
    second, and the new picture has to appear first."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def control(name: str, parameter: Parameter, value):
    """Return a widget that offers only values that `parameter` allows."""
    import ipywidgets as widgets

    label = dict(
        description=said(name.replace("_", " ")),
        style={"description_width": f"{LABEL}px"},
        layout=widgets.Layout(width="98%"),
    )
    if isinstance(parameter, Choice):
        return widgets.Dropdown(options=parameter.values, value=value, **label)
    if isinstance(parameter, Flag):
        return widgets.Checkbox(value=value, **label)
    if isinstance(parameter, Text):
        return widgets.Text(value=value, continuous_update=False, **label)
    assert isinstance(parameter, Number)
    if parameter.log:
        return widgets.SelectionSlider(options=stops(parameter, value), value=value, **label)
    least, most = parameter.least, parameter.most
    if parameter.is_whole:
        return widgets.IntSlider(value, least, most, **label)
    return widgets.FloatSlider(value, min=least, max=most, step=step_of(parameter), **label)


def stops(parameter: Number, value) -> list:
    """Return the positions of a number's slider; `value`, where it starts, is among them."""
    least, most = parameter.least, parameter.most
    if parameter.log:
        grown = doublings(least, most) if parameter.is_whole else round_values(least, most)
        return sorted({*grown, most, value})
    if parameter.is_whole:
        return list(range(least, most + 1))
    step = step_of(parameter)
    count = round((most - least) / step)
    return sorted({*(round(least + k * step, 9) for k in range(count + 1)), value})


def step_of(parameter: Number) -> float:
    """Return the largest power of ten that gives a slider at least 50 steps."""
    return 10 ** math.floor(math.log10((parameter.most - parameter.least) / 50))


def doublings(least: int, most: int) -> list[int]:
    return [least << k for k in range((most // least).bit_length())]


def round_values(least: float, most: float) -> list[float]:
    """Return 1, 1.5, 2, 3, 5 and 7 times the powers of ten, from `least` to `most`."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [float(f"{digits}e{power}") for power in powers for digits in (1, 1.5, 2, 3, 5, 7)]
    return [value for value in values if least <= value <= most]
