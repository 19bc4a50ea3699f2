"""The one pattern of all explorers: a pure function, its parameters, and a control for each.

    def squares(n=3, color="blue"):
        return picture, "<p>some HTML</p>"

    Explorer(squares, n=whole(1, 9), color=choice("blue", "red"))

The function's defaults are where the controls start. In a live notebook moving a control calls the
function again; what it raises is shown in red below the last good picture. In a saved notebook,
which keeps no live state, and where ipywidgets is not installed, the picture is what is shown.
"""

from __future__ import annotations

import base64
import gc
import html
import inspect
import math
from collections.abc import Callable
from contextlib import contextmanager

from ..lab import Choice, Flag, Number, Parameter, Text, check


class Explorer:
    """Controls around `render(**parameters) -> (Picture, HTML)`.

    Declare each parameter of `render` by choice, whole, real, flag or text of mini_dist.course.lab.
    Raises TypeError when declarations and parameters differ, and what `render` raises at the start.
    """

    def __init__(self, render: Callable, /, **declared: Parameter):
        signature = inspect.signature(render).parameters
        if list(signature) != list(declared):
            raise TypeError(
                f"{render.__name__} takes {', '.join(signature)}, but declared are "
                f"{', '.join(declared) or 'none'}: declare each parameter, in this order."
            )
        self.render, self.declared = render, declared
        self.values = {name: parameter.default for name, parameter in signature.items()}
        self.change()
        self._view = None

    def change(self, **values) -> None:
        """Set some parameters and render again: for the start; later the controls do it.

        Raises ParameterError, and what `render` raises; then nothing has changed.
        """
        values = check(self.declared, {**self.values, **values})
        self.picture, self.html = self.render(**values)
        self.values = values

    def _repr_mimebundle_(self, include=None, exclude=None):
        png = base64.b64encode(self.picture._repr_png_()).decode()
        still = {"text/plain": repr(self.picture), "image/png": png}
        try:
            import ipywidgets  # noqa: F401
        except ImportError:
            return still
        return {**self.view._repr_mimebundle_(), **still}

    @property
    def view(self):
        """The live widget: controls, picture, HTML. One an explorer, however often it is shown."""
        if self._view is None:
            self._view = self._build()
        return self._view

    def _build(self):
        import ipywidgets as widgets

        controls = {
            name: control(name, parameter, self.values[name])
            for name, parameter in self.declared.items()
        }
        image = widgets.Image(value=self.picture._repr_png_(), format="png")
        image.layout.max_width = "100%"
        page = widgets.HTML(self.html)

        def moved(_):
            with garbage_stays():
                try:
                    self.change(**{name: control.value for name, control in controls.items()})
                except Exception as error:  # nobody sees a traceback that is raised here
                    message = html.escape(str(error) or type(error).__name__)
                    page.value = (
                        f'<p style="color:#c62828"><b>{message}</b></p>'
                        "<p>The picture is the last one that could be drawn.</p>"
                    )
                else:
                    image.value, page.value = self.picture._repr_png_(), self.html

        for each in controls.values():
            each.observe(moved, names="value")
        grid = widgets.Layout(grid_template_columns="repeat(2, minmax(280px, 440px))")
        return widgets.VBox([widgets.GridBox(list(controls.values()), layout=grid), image, page])


@contextmanager
def garbage_stays():
    """Python collects its garbage later: with torch and matplotlib loaded that takes some tenths of
    a second, and an old picture is much garbage. The new one is to be seen first."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def control(name: str, parameter: Parameter, value):
    """The widget that can say every value that `parameter` allows, and no other."""
    import ipywidgets as widgets

    label = dict(
        description=name.replace("_", " "),
        style={"description_width": "8em"},
        layout=widgets.Layout(width="95%"),
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
    """Where the slider of a number can stand; it starts at `value`."""
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
    """0.01, 0.1, 1, ...: round values, 50 of them or more."""
    return 10 ** math.floor(math.log10((parameter.most - parameter.least) / 50))


def doublings(least: int, most: int) -> list[int]:
    return [least << k for k in range((most // least).bit_length())]


def round_values(least: float, most: float) -> list[float]:
    """1, 1.5, 2, 3, 5, 7, 10, 15, ... and their like below 1, from least to most."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    values = [float(f"{digits}e{power}") for power in powers for digits in (1, 1.5, 2, 3, 5, 7)]
    return [value for value in values if least <= value <= most]
