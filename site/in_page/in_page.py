"""Answer a page of the site: build an explorer from a cell's source and answer its controls."""

import ast
import json

from mini_dist.course.lab import Choice, Flag, Text
from mini_dist.course.widgets.explorer import Explorer, stops

shown = []  # the page's explorers, by number

NEEDS = (
    "This needs PyTorch or processes of its own, which a web page does not have. It works in "
    "JupyterLab: make lab."
)


def open_cell(source: str) -> str:
    """Return the explorer in a cell's last line as JSON: number, controls, picture and words.

    Arguments that a page cannot compute (a link measured above, a run on ranks) are left out, and
    `left_out` names the one that was.
    """
    *before, last = ast.parse(source).body
    names: dict = {}
    try:
        exec(compile(ast.Module(before, []), "cell", "exec"), names)
        explorer, left_out = call(last.value, names)
    except ImportError:
        return json.dumps({"error": NEEDS})
    assert isinstance(explorer, Explorer), explorer
    shown.append(explorer)
    controls = [
        control(name, parameter, explorer.values[name])
        for name, parameter in explorer.declared.items()
    ]
    found = {"number": len(shown) - 1, "controls": controls, "left_out": left_out}
    return json.dumps({**found, **seen(explorer)})


def call(node: ast.Call, names: dict):
    """Return the result of the call and the name of the argument that was left out, or ""."""

    def made(keywords):
        alone = ast.Expression(ast.Call(node.func, node.args, keywords))
        return eval(compile(ast.fix_missing_locations(alone), "cell", "eval"), names)

    try:
        return made(node.keywords), ""
    except ImportError:
        raise
    except Exception:
        for without in node.keywords:
            try:
                return made([each for each in node.keywords if each is not without]), without.arg
            except Exception:
                continue
        raise


def control(name: str, parameter, value) -> dict:
    """Return a control as the page draws it. `values` lists all values that it can take."""
    if isinstance(parameter, Text):
        return {"name": name, "kind": "text", "value": value}
    if isinstance(parameter, Flag):
        return {"name": name, "kind": "flag", "value": value}
    kind = "choice" if isinstance(parameter, Choice) else "slider"
    values = list(parameter.values) if kind == "choice" else stops(parameter, value)
    return {"name": name, "kind": kind, "values": values, "value": value}


def change(number: int, values: str) -> str:
    """Return the explorer's answer to new values, or the reason why it refuses them."""
    explorer, asked = shown[number], json.loads(values)
    try:
        explorer.change(**asked)
    except ValueError as error:
        return json.dumps({"error": str(error), "shown": explorer.shown(asked)})
    except Exception as error:
        said = f"{NEEDS} ({type(error).__name__})"
        return json.dumps({"error": said, "shown": explorer.shown(asked)})
    return json.dumps(seen(explorer))


def seen(explorer: Explorer) -> dict:
    return {
        "picture": explorer.picture.html(),
        "html": explorer.words(),
        "shown": explorer.shown(explorer.values),
    }
