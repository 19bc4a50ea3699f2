"""The site in a real browser, opened from disk: pages, links, search, explorers."""

import ast
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from mini_dist.course import working_copy

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [
    name
    for name in ("myst_nb", "sphinx_book_theme", "bs4")
    if importlib.util.find_spec(name) is None
]

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)} here (make site)"),
    pytest.mark.skipif(
        not (ROOT / "site/node_modules/pyodide").exists(),
        reason="the site's npm packages are not here (make site)",
    ),
]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update "
    "--disable-sync --no-first-run --disable-dev-shm-usage --disable-quic"
).split()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site from this tree without a warning; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "site", "-d", folder / "doctrees", "."]
    settings = {**os.environ, "MINI_DIST_BINDER": ""}
    built = subprocess.run(
        [*command, folder / "html"], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return folder / "html"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture
def page(browser, site):
    """Open a page that records errors and each request for anything but the site's own files."""
    page = browser.new_page(viewport={"width": 1300, "height": 1000})
    page.set_default_timeout(120_000)  # A busy machine may be slow.
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda said: said.type == "error" and page.wrong.append(said.text))
    page.on("request", lambda request: note_outside(page, request.url, site))
    page.on("requestfailed", lambda request: page.wrong.append(f"failed: {request.url}"))
    yield page
    page.close()


def note_outside(page, url, site):
    if not unquote(url).startswith((f"{site.as_uri()}/", "data:", "blob:")):
        page.wrong.append(f"asked another host: {url}")


def pages_of(site):
    return sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)


def test_every_lesson_lab_and_module_has_its_page(site):
    notebooks = [Path("notebooks", name) for name in working_copy.notebooks()]
    assert notebooks
    inits = (ROOT / "mini_dist").glob("*/*/__init__.py")
    modules = [path for path in (ROOT / "mini_dist").glob("*/*.py") if path.stem != "__init__"]
    names = [path.with_suffix("") for path in modules] + [path.parent for path in inits]
    modules = [".".join(path.relative_to(ROOT / "mini_dist").parts) for path in names]
    expected = [path.with_suffix(".html").as_posix() for path in notebooks]
    expected += [f"site/library/{name}.html" for name in modules]
    assert [name for name in expected if not (site / name).exists()] == []
    first = (site / "site/index.html").read_text()
    for path in notebooks:
        assert path.with_suffix(".html").as_posix() in first, f"{path} is not in the list"


@functools.cache
def parsed(path):
    from bs4 import BeautifulSoup

    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@functools.cache
def anchors(path):
    return {tag["id"] for tag in parsed(path).find_all(id=True)}


def test_every_link_inside_the_site_holds(site):
    broken = []
    for path in pages_of(site):
        for tag in parsed(path).find_all(["a", "img", "script", "link"]):
            link = tag.get("href") or tag.get("src")
            if not link or re.match(r"[a-z]+:|//", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            if not target.exists():
                broken.append(f"{path.relative_to(site)}: {link} is not there")
            elif anchor and target.suffix == ".html" and anchor not in anchors(target):
                broken.append(f"{path.relative_to(site)}: no anchor {link}")
    assert broken == []


def test_words_lead_to_the_glossary(site):
    links = parsed(site / "notebooks/11_context_parallel.html").find_all("a", class_="word")
    linked = {link.get_text().lower(): link for link in links}
    assert len(linked) == len(links) > 10  # Each word is linked once.
    zigzag = next(link for word, link in linked.items() if word.startswith("zig-zag"))
    assert "之字形" in zigzag["title"]
    file, _, anchor = zigzag["href"].partition("#")
    row = parsed(site / "docs/glossary.html").find(id=anchor).find_parent("tr").get_text()
    assert "zig-zag" in row and "causal mask" in row


def test_outputs_are_the_notebook_s_and_answers_are_folded(site):
    notebook = nbformat.read(ROOT / "notebooks/12_pipeline.ipynb", 4)
    shown = parsed(site / "notebooks/12_pipeline.html")
    said = " ".join(shown.get_text().split())
    streams = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    ]
    assert len(streams) > 5
    for text in streams:
        assert " ".join(text.split()) in said
    assert "use make lab and open notebooks/12_pipeline.ipynb" in said  # It says how to run it.
    pictures = sum("<img " in str(out.get("data", {}).get("text/html", ""))
                   or "image/png" in out.get("data", {})
                   for c in notebook.cells for out in c.get("outputs", []))  # fmt: skip
    shown_pictures = shown.select(".cell_output img")
    assert len(shown_pictures) == pictures > 0
    assert all(picture.get("alt") for picture in shown_pictures)
    assert shown.select("details summary")
    assert not shown.select("details[open] summary")


def test_binder_is_linked_where_it_is_said_to_be_and_else_not_named(site, monkeypatch):
    named = [path for path in pages_of(site) if "Binder" in path.read_text(encoding="utf-8")]
    assert named == []
    monkeypatch.setenv("MINI_DIST_BINDER", "https://mybinder.org/v2/gh/ada/mini_dist/main")
    spec = importlib.util.spec_from_file_location("conf", ROOT / "site/conf.py")
    conf = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conf)
    there = "https://mybinder.org/v2/gh/ada/mini_dist/main?urlpath=lab/tree/notebooks"
    source = [(ROOT / "site/index.md").read_text(encoding="utf-8")]
    conf.prepare(None, "site/index", source)
    assert f"[in Binder]({there})" in source[0]
    source = [(ROOT / "notebooks/12_pipeline.ipynb").read_text(encoding="utf-8")]
    conf.prepare(None, "notebooks/12_pipeline", source)
    assert f"[in Binder]({there}/12_pipeline.ipynb)" in source[0]


def test_the_first_page_says_of_each_lesson_what_one_does_in_it(site):
    page = (site / "site/index.html").read_text(encoding="utf-8").partition("<article")[2]
    rows = re.findall(r"<tr.*?</tr>", page, re.S)
    for name in working_copy.notebooks():
        if "/" not in name:
            (row,) = [row for row in rows if f"notebooks/{Path(name).stem}.html" in row]
            assert len(re.sub(r"<[^>]+>", " ", row).split()) > 8


@in_a_browser
@pytest.mark.parametrize("part", range(8))
def test_every_page_opens_without_an_error_asks_no_other_host_and_fits_a_phone(site, page, part):
    formulas = 0
    wide, phone = dict(page.viewport_size), {"width": 390, "height": 800}
    page.goto((site / "index.html").as_uri())
    page.wait_for_url("**/site/index.html")  # index.html redirects there.
    for path in [each for each in pages_of(site) if each != site / "index.html"][part::8]:
        page.goto(path.as_uri())
        if page.locator(".math").count():
            page.wait_for_function("() => document.querySelectorAll('mjx-container').length")
            formulas += page.locator("mjx-container svg").count()
            assert page.locator("mjx-merror").count() == 0, path
        widths = page.locator("article img").evaluate_all(
            "all => all.map(image => [image.getAttribute('src'), image.naturalWidth])"
        )
        assert all(width for _, width in widths), (path, widths)
        page.set_viewport_size(phone)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390, path
        page.set_viewport_size(wide)
        assert page.wrong == [], path
    assert formulas > 12  # The eight parts have over 100 in total.


@in_a_browser
def test_on_a_phone_a_word_and_its_meaning_are_seen_without_scrolling(site, page):
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto((site / "docs/glossary.html").as_uri())
    cells = "all => all.map(cell => cell.getBoundingClientRect().right)"
    rights = page.locator("#glossary td").evaluate_all(cells)
    assert len(rights) > 400 and max(rights) <= 390


# Returns how many texts an article shows, and the texts whose WCAG 2 contrast is too low.
CONTRAST = r"""() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const ground = (element) => {
    const own = rgba(getComputedStyle(element).backgroundColor);
    const parent = element.parentElement;
    return own[3] === 1 || !parent ? over(own, [255, 255, 255]) : over(own, ground(parent));
  };
  const luminance = (color) => {
    const [r, g, b] = color.map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const texts = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
  const faint = [];
  let count = 0;
  while (texts.nextNode()) {
    const text = texts.currentNode.data.trim(), element = texts.currentNode.parentElement;
    if (!text || element.closest("script, style, svg, mjx-container")) continue;
    if (!element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const below = ground(element), color = over(rgba(getComputedStyle(element).color), below);
    const [dark, bright] = [luminance(below), luminance(color)].sort((a, b) => a - b);
    const contrast = (bright + 0.05) / (dark + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)}: ${text.slice(0, 40)}`);
    count += 1;
  }
  return [count, faint];
}"""
# Returns the elements that cross the paper's edge or would need scrolling.
TOO_WIDE = """() => [...document.querySelectorAll("article :is(pre, div, table, img, svg)")]
  .filter((each) => each.checkVisibility() && each.clientWidth)
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth + 1
    || (getComputedStyle(each).overflowX !== "visible" && each.scrollWidth > each.clientWidth + 1))
  .map((each) => `${each.tagName} ${each.className}: ${each.textContent.trim().slice(0, 40)}`)"""
PAPER = 794 - 76  # A4 without 1 cm on each side, in CSS pixels
PAGES = ("notebooks/00_start_here", "notebooks/03_ring_and_collectives", "docs/glossary")


@in_a_browser
@pytest.mark.parametrize("name", PAGES)
def test_what_is_written_can_be_read_in_light_and_in_dark(name, site, page):
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
        count, faint = page.evaluate(CONTRAST)
        assert count > 500 and faint == [], scheme


@in_a_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_printed_whole(name, site, page):
    page.goto((site / f"{name}.html").as_uri())
    if page.locator(".math").count():
        page.wait_for_function("() => document.querySelectorAll('mjx-container').length")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": PAPER, "height": 1000})
    assert page.evaluate(TOO_WIDE) == []
    assert page.pdf(format="A4").startswith(b"%PDF-")


SEARCHES = {
    "zig-zag": ["11 Context parallel", "Glossary"],
    "ring_all_reduce": ["mini_dist.collectives.ring.ring_all_reduce"],
    "流水线气泡": ["12 流水线并行", "实验：流水线气泡"],
    "环": ["03 环与集合通信"],
}


@in_a_browser
@pytest.mark.parametrize("asked", SEARCHES)
def test_search_finds_words_of_both_languages(site, page, asked):
    page.goto((site / "notebooks/00_start_here.html").as_uri())
    page.keyboard.press("Control+k")
    page.keyboard.insert_text(asked)
    page.keyboard.press("Enter")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    page.wait_for_function("() => document.querySelector('.search-summary')?.innerText")
    found = results.evaluate_all("all => all.map(link => link.innerText)")
    assert {*SEARCHES[asked]} <= {*found}, found
    marked = page.locator("#search-results .excerpt mark")
    marked.first.wait_for()
    assert asked[:2] in marked.first.inner_text().lower()
    assert page.wrong == []


# ---- explorers -----------------------------------------------------------------------------------


def start(page, number):
    """Start an explorer on the page; return its element once it has answered."""
    place = page.locator(".live-explorer").nth(number)
    place.locator("button").click()
    place.locator("xpath=self::*[@data-state]").wait_for(timeout=120_000)
    return place


def shown_by(place):
    return place.locator(".words").evaluate("place => place.innerHTML")


def text_of(page_html):
    from bs4 import BeautifulSoup

    return BeautifulSoup(page_html, "html.parser").get_text("|")


def change(place, name, value):
    """Set one control as a user would, and wait for the answer."""
    before = int(place.get_attribute("data-answers") or 0)
    control = place.locator(f"[name={name}]")
    if control.evaluate("control => control.tagName") == "SELECT":
        control.select_option(str(value))
    elif control.get_attribute("type") == "checkbox":
        control.set_checked(value)
    else:
        control.evaluate(
            "(slider, value) => { slider.value = value;"
            " slider.dispatchEvent(new Event('input', {bubbles: true})); }",
            str(value),
        )
    place.locator(f"xpath=self::*[@data-answers={before + 1}]").wait_for(timeout=60_000)


def sources(site):
    """Return the cells on the page of all explorers, keyed by explorer."""
    page = parsed(site / "site/explorers.html")
    found = {}
    for place in page.select("div.explorer"):
        name = place.find_parent("section").find("h2").get_text().rstrip("#").strip()
        found[name] = place.find("pre").get_text()
    return found


def made(source):
    """Run a cell in this Python; return the explorer on its last line."""
    *before, last = ast.parse(source).body
    names = {}
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


NEED_TORCH = {"expert_routing", "collective_stepper"}
MOVES = {  # new values for controls of each explorer, different from its start
    "memory_and_time": {"model": "llama3-70b", "num_gpus": 4096},
    "memory_waterfall": {"model": "mixtral-8x7b", "zero": 3, "tp": 2, "sequence_parallel": True},
    "rank_grid": {"axis": "dp", "gpu": "b200"},
    "layout_planner": {"pp": 8},
    "scaling_curve": {"gpu": "b200", "zero": 3},
    "compare_with_published": {"straggler": 1.1},
    "zero_figure": {"ranks": 1024, "gpu": "h200"},
    "all_reduces": {"machine": "laptop", "num_ranks": 8},
    "pipelines": {"schedule": "interleaved", "num_micro_batches": 12},
    "requests_fit": {"tp": 4, "model": "llama3-70b"},
}


def assert_the_same(place, explorer):
    """Check the text, the picture's description, and that the picture lies inside its frame."""
    assert text_of(shown_by(place)) == text_of(explorer.html)
    picture = place.locator(".picture")
    assert picture.get_attribute("aria-label") == explorer.picture.alt
    panels = picture.locator("svg")
    assert panels.count() == len(explorer.picture.panels)
    for panel, drawn in zip(panels.all(), explorer.picture.panels):
        assert panel.evaluate("panel => panel.innerHTML").count("<path") >= 1
        assert panel.locator("text").count() > len(drawn.xticks) + len(drawn.yticks)
        frame, reach = panel.bounding_box(), panel.evaluate(REACH)
        assert reach[0] >= frame["x"] - 1 and reach[1] <= frame["x"] + frame["width"] + 1
    shown = place.locator("label:visible [name]").evaluate_all("all => all.map(each => each.name)")
    assert shown == explorer.shown(explorer.values)


REACH = """panel => {
  const boxes = [...panel.querySelectorAll("*")].map((each) => each.getBoundingClientRect());
  return [Math.min(...boxes.map((b) => b.left)), Math.max(...boxes.map((b) => b.right))];
}"""
# Returns an explorer's height and its smallest font size in pixels.
SIZES = """place => {
  const letters = [...place.querySelectorAll("svg")].map(
    (svg) => 13 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width);
  return [place.getBoundingClientRect().height, Math.min(...letters)];
}"""
LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}


def assert_it_fits(page, place):
    """Check that all of it fits a laptop's window, and that its text is legible on a phone too."""
    page.set_viewport_size(LAPTOP)
    height, letters = place.evaluate(SIZES)
    assert height <= 600 and letters >= 10.99
    page.set_viewport_size(PHONE)
    assert place.evaluate(SIZES)[1] >= 10.99
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    page.set_viewport_size(LAPTOP)


@in_a_browser
def test_explorers_in_the_page_say_what_they_say_in_python(site, page):
    from mini_dist.course.lab import Number
    from mini_dist.course.widgets.explorer import stops

    page.goto((site / "site/explorers.html").as_uri())
    cells = sources(site)
    assert MOVES.keys() | NEED_TORCH <= cells.keys()
    for number, (name, source) in enumerate(cells.items()):
        place = start(page, number)
        if name in NEED_TORCH:
            assert "JupyterLab" in place.inner_text()
            continue
        explorer = made(source)
        assert place.get_attribute("data-state") == "started", place.inner_text()
        assert_the_same(place, explorer)
        for control, value in MOVES.get(name, {}).items():
            start_of, parameter = explorer.values[control], explorer.declared[control]
            explorer.change(**{control: value})
            if isinstance(parameter, Number):  # A slider's value is an index into its stops.
                value = stops(parameter, start_of).index(value)
            change(place, control, value)
        assert_the_same(place, explorer)
        assert_it_fits(page, place)
    assert page.wrong == []


@in_a_browser
def test_a_search_is_said_at_once_and_then_how_long_it_took(site, page):
    page.goto((site / "site/explorers.html").as_uri())
    place = start(page, list(sources(site)).index("layout_planner"))
    status = place.locator(".status")
    said = place.evaluate("""place => {
        const slider = place.querySelector("[name=num_gpus]");
        slider.value = 4;
        slider.dispatchEvent(new Event("input"));
        return place.querySelector(".status").textContent;
    }""")
    assert said == "searching ..."
    place.locator("xpath=self::*[@data-answers=1]").wait_for()
    assert re.fullmatch(r"|found in \d+\.\d s", status.inner_text())
    assert page.wrong == []


@in_a_browser
def test_what_a_page_cannot_do_is_said(site, page):
    page.goto((site / "site/explorers.html").as_uri())
    place = start(page, list(sources(site)).index("pipelines"))
    picture = place.locator(".picture").inner_html()
    change(place, "measured", True)
    assert "JupyterLab" in place.locator(".wrong").inner_text()
    assert place.locator(".picture").inner_html() == picture
    change(place, "measured", False)
    assert place.locator(".wrong").count() == 0

    # A lesson gives its explorer values that only the lesson's own run has measured.
    page.goto((site / "notebooks/04_the_machine.html").as_uri())
    place = start(page, 0)
    assert place.get_attribute("data-state") == "started"
    assert "Left out here: yours" in place.inner_text()
    assert page.wrong == []
