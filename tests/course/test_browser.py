"""In a real browser, JupyterLab opens and runs the first lesson, and every explorer responds."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

from mini_dist import widgets
from mini_dist.__main__ import DEFAULTS
from mini_dist.course import working_copy

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LESSON = "00_start_here.ipynb"

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (Debian: apt install chromium)"),
    pytest.mark.skipif(not (ROOT / "notebooks" / LESSON).exists(), reason=f"no {LESSON} yet"),
]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-dev-shm-usage --disable-quic"
).split()


EXPLORERS = {  # the slider that the test moves in each explorer
    "memory_and_time": "utilisation",
    "memory_waterfall": "zero",
    "rank_grid": "rank",
    "layout_planner": "num gpus",
    "scaling_curve": "num gpus",
    "compare_with_published": "straggler",
    "collective_stepper": "step",
    "expert_routing": "liking",
    "zero_figure": "ranks",
    "all_reduces": "num bytes",
    "pipelines": "num micro batches",
    "requests_fit": "batch",
    "goodput_of_a_month": "devices",
    "largest_fits": "micro batch size",
}


def notebook_of_explorers(path):
    """Write a notebook with one explorer per cell, as in a lesson."""
    imports = "from mini_dist.course.widgets import *\n"
    imports += "from mini_dist.course.widgets.links import explorer as all_reduces\n"
    imports += "from mini_dist.course.widgets.pipeline import explorer as pipelines"
    cells = [imports, *(f"{name}()" for name in EXPLORERS)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    # Without a kernelspec, JupyterLab asks which kernel to use.
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3 (ipykernel)"}
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Start JupyterLab on copies of the notebooks, without user settings; yield its URL."""
    tmp_path = tmp_path_factory.mktemp("lab")
    working_copy.update(ROOT / "notebooks", tmp_path / "work")  # as make lab does
    notebook_of_explorers(tmp_path / "work/explorers.ipynb")
    # Like a learner's shell, the environment has no variables of this test run.
    not_theirs = ("PYTEST_", "MPLBACKEND")
    env = {key: value for key, value in os.environ.items() if not key.startswith(not_theirs)}
    for kind in ("config", "data", "runtime"):
        env[f"JUPYTER_{kind.upper()}_DIR"] = str(tmp_path / kind)
    env["JUPYTER_CONFIG_PATH"] = str(DEFAULTS)  # as mini-dist lab does
    with socket.socket() as free:  # If another process takes the port, JupyterLab tries the next.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--expose-app-in-browser"]
    command += ["--allow-root", f"--port={port}", "--IdentityProvider.token=learner"]
    command += [f"--ServerApp.root_dir={tmp_path}"]
    with open(tmp_path / "lab.log", "w") as log:
        server = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        yield address_of(server, tmp_path)
    finally:
        server.terminate()  # This also stops its kernels.
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def address_of(server, folder):
    """Wait until the server answers at the URL in its runtime file; return the URL."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for info in (folder / "runtime").glob("jpserver-*.json"):
            try:
                url = json.loads(info.read_text())["url"]
                urllib.request.urlopen(f"{url}api?token=learner", timeout=5).close()
                return url
            except (OSError, ValueError):
                pass
        time.sleep(0.2)
    raise AssertionError((folder / "lab.log").read_text())


@pytest.fixture
def page():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # JupyterLab renders only the cells in view, so the page is tall enough for all of them.
        page = browser.new_page(viewport={"width": 1366, "height": 12_000})
        page.errors, page.outside = [], []
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda request: note_outside(page, request.url))
        yield page
        browser.close()


def note_outside(page, url):
    if not re.match(r"(http|ws)://(localhost|127\.0\.0\.1)[:/]|data:|blob:|about:", url):
        page.outside.append(url)


STATE = """() => {
    const notebook = window.jupyterapp.shell.currentWidget;
    const cells = notebook?.content?.model?.cells;
    if (!cells) return null;
    return Array.from({length: cells.length}, (_, i) => cells.get(i).toJSON())
                .filter(cell => cell.cell_type === "code");
}"""

IDLE = """() => {
    const notebook = window.jupyterapp.shell.currentWidget;
    return notebook?.sessionContext?.session?.kernel?.status === "idle";
}"""


DIRTY = "() => window.jupyterapp.shell.currentWidget.context.model.dirty"


def open_notebook(lab, page, name):
    page.goto(f"{lab}lab/tree/work/{name}?token=learner&reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    page.wait_for_function(IDLE, timeout=60_000)


def test_the_first_lesson_opens_and_runs_in_jupyterlab(lab, page):
    open_notebook(lab, page, LESSON)
    page.wait_for_timeout(1000)
    assert page.evaluate(DIRTY) is False, "nobody has changed it"
    cells = json.loads((ROOT / "notebooks" / LESSON).read_text())["cells"]
    shipped = [cell for cell in cells if cell["cell_type"] == "code"]
    # Clear all outputs first, so that every output at the end comes from this run.
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
    assert not any(cell["outputs"] for cell in page.evaluate(STATE))

    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    written = [i for i, cell in enumerate(shipped) if "".join(cell["source"]).strip()]
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ran, idle = page.evaluate(STATE), page.evaluate(IDLE)
        # A cell gets its execution count when it starts, so the last cell may still be running.
        if idle and all(ran[i]["execution_count"] for i in written):
            break
        page.wait_for_timeout(300)
    page.wait_for_timeout(500)  # The last output is drawn shortly after its cell ends.
    ran = page.evaluate(STATE)
    unfinished = [ran[i]["source"] for i in written if not ran[i]["execution_count"]]
    assert unfinished == []

    # Exactly the shipped notebook's cells fail on purpose, and exactly its cells show output.
    for before, after in zip(shipped, ran, strict=True):
        kinds = {output["output_type"] for output in after["outputs"]}
        expected = {output["output_type"] for output in before["outputs"]}
        assert ("error" in kinds) == ("error" in expected), after
        assert bool(kinds) == bool(expected), after
    assert page.locator(".jp-OutputArea-output").count() > 0
    figures = page.locator(".jp-OutputArea-output img")
    assert figures.count() > 0
    widths = figures.evaluate_all("all => all.map(image => image.naturalWidth)")
    assert all(width > 50 for width in widths)
    # An image that does not load has width 0.
    images = page.locator(".jp-MarkdownOutput img").evaluate_all(
        "all => all.map(image => [image.getAttribute('src'), image.naturalWidth])"
    )
    assert all(width for _, width in images), images

    assert page.errors == []
    assert page.outside == []
    assert page.locator("text=Jupyter news").count() == 0, "JupyterLab asks before the first cell"


SHOWN = """cell => {
    const found = document.querySelectorAll(".jp-NotebookPanel .jp-CodeCell")[cell];
    return [found?.querySelector(".picture")?.innerHTML ?? "",
            [...found?.querySelectorAll(".widget-html-content") ?? []].pop()?.innerText ?? ""];
}"""
# Returns an explorer's height, its truncated labels and its smallest font size in pixels.
LAID_OUT = """cell => {
    const output = cell.querySelector(".jp-OutputArea-output .jupyter-widgets");
    const cut = [...output.querySelectorAll(".widget-label")]
        .filter(label => label.checkVisibility() && label.scrollWidth > label.clientWidth);
    const letters = [...output.querySelectorAll("svg")].map(
        svg => 13 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
    return [output.getBoundingClientRect().height, cut.map(label => label.innerText),
            Math.min(...letters)];
}"""


def test_every_explorer_moves_in_jupyterlab(lab, page):
    assert {*widgets.__all__} - {"Explorer"} <= EXPLORERS.keys()
    open_notebook(lab, page, "explorers.ipynb")
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    for number, (name, slider) in enumerate(EXPLORERS.items(), start=1):
        cell = page.locator(".jp-NotebookPanel .jp-CodeCell").nth(number)
        control = cell.locator(".widget-inline-hbox").filter(
            has=page.get_by_text(slider, exact=True)
        )
        handle = control.locator(".noUi-handle")
        handle.wait_for(timeout=60_000)
        page.wait_for_function(f"() => ({SHOWN})({number})[1]", timeout=20_000)
        image, text = page.evaluate(SHOWN, number)
        assert image and text, name
        handle.focus()
        page.keyboard.press("ArrowRight")
        changed = f"""([image, text]) => {{
            const [src, words] = ({SHOWN})({number});
            return src !== image && words !== text;
        }}"""
        page.wait_for_function(changed, arg=[image, text], timeout=20_000)
        assert "rgb(211, 47, 47)" not in cell.inner_html(), name
        height, cut, letters = cell.evaluate(LAID_OUT)
        assert height <= 600 and cut == [] and letters >= 10.99, (name, height, cut, letters)
    assert not any("error" in str(cell["outputs"]) for cell in page.evaluate(STATE))
    assert page.errors == []
    assert page.outside == []
