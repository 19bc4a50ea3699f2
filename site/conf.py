"""Build the course as a static site with `make site`: Sphinx reads the repository and runs no cell.

The pages are the course's notebooks with their saved outputs, docs/, TEACHING.md, and the library's
docstrings. A new lesson needs no line here. Notebooks and notes that a reader adds to the checkout
do not become pages.
"""

import json
import os
import pkgutil
import shutil
import sys
from pathlib import Path

from markdown_it import MarkdownIt

import mini_dist
from mini_dist.course import working_copy

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

from tools.build_notebooks import REPOSITORY  # noqa: E402

# The address where Binder serves the repository: https://mybinder.org/v2/gh/OWNER/NAME/main. If it
# is set, the pages link to it; otherwise they do not mention Binder.
BINDER = os.environ.get("MINI_DIST_BINDER", "")

project = "mini_dist"
author = "the authors of mini_dist"
extensions = ["myst_nb", "sphinx.ext.autodoc", "words", "explorers", "both_languages", "excerpts"]
root_doc = "site/index"
include_patterns = ["site/*.md", "site/library/*.md", "CONTRIBUTING.md"]
include_patterns += ["TEACHING.md", "TEACHING.zh.md"]
include_patterns += ["docs/glossary.md", "docs/coming_from_elsewhere.md", "docs/wrong_answers.md"]
include_patterns += ["docs/installing.md", "docs/planner_errors.md", "docs/cluster/README.md"]
include_patterns += [f"notebooks/{name}" for name in working_copy.notebooks(ROOT / "notebooks")]
exclude_patterns = [
    "site/explorers_head.md",
    "**/.ipynb_checkpoints",
    "**/node_modules",
    ".venv*",
    "out",
    "runs",
    "work",
]
templates_path = ["templates"]
html_additional_pages = {"index": "redirect.html"}  # the folder's first page

# ---- pages ---------------------------------------------------------------------------------------

nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js = {}
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
suppress_warnings = [
    "mystnb.unknown_mime_type",
    "ref.python",  # ModelConfig is documented where it is defined and where it is exported.
]

html_theme = "sphinx_book_theme"
html_title = "mini_dist"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {"default_mode": "auto"}
html_search_language = "en-zh"
html_show_sourcelink = False
html_show_search_summary = False  # excerpts.py shows them, on pages from the disk as well.
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "collapse_navigation": True,  # Expanded, the library's sidebar would be half of each page.
}
if REPOSITORY:
    html_theme_options |= {"repository_url": f"https://github.com/{REPOSITORY}"}
    html_theme_options |= {"use_repository_button": True}
# One file that draws formulas as SVG: no fonts to fetch.
mathjax_path = "mathjax/tex-svg.js"

# ---- the library's reference ---------------------------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
toc_object_entries = False  # Each page would list every object, and the build would take twice as
# long.


def write_library(app):
    """A page for each room of mini_dist, and for each module and package in a room."""
    folder = HERE / "library"
    rooms = [room.name for room in pkgutil.iter_modules(mini_dist.__path__) if room.ispkg]
    inside = [(room, [f"{mini_dist.__path__[0]}/{room}"]) for room in rooms]
    names = [f"{room}.{each.name}" for room, path in inside for each in pkgutil.iter_modules(path)]
    pages = {name: f"# {name}\n\n" for name in sorted([*rooms, *names])}
    for name in pages:
        directive = f".. automodule:: mini_dist.{name}"
        if name in rooms:
            directive += "\n   :no-members:"  # They stand on the pages of the room's modules.
        pages[name] += f"```{{eval-rst}}\n{directive}\n```\n"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.stem not in pages:
            old.unlink()
    for name, text in pages.items():
        page = folder / f"{name}.md"
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


def as_markdown(app, what, name, obj, options, lines):
    """Render a docstring as Markdown, since it is plain text with indented code."""
    page = MarkdownIt().render("\n".join(lines))
    if page:
        lines[:] = [".. raw:: html", "", *(f"   {line}" for line in page.splitlines()), ""]


# ---- notebooks -----------------------------------------------------------------------------------


TO_RUN = """
```{{tip}}
This page shows a finished run. To run and change it yourself, use `make lab` and open
`{path}`{or_in_binder}.
```
"""


TO_RUN_IN_CHINESE = """
```{{tip}}
本页展示一次运行的结果。想亲手运行和修改，请用 `make lab`，然后打开 `{path}`{or_in_binder}。
```
"""


def in_the_other_language(path):
    """A link from a lesson to its Chinese page, if it has one. (A Chinese page links by itself.)"""
    name = path.removeprefix("notebooks/")
    chinese = ROOT / "notebooks/zh" / name
    if not chinese.exists():
        return []
    return [f"[中文]({os.path.relpath(chinese, (ROOT / path).parent)})"]


def set_language(app, pagename, templatename, context, doctree):
    if pagename.startswith("notebooks/zh/") or pagename.endswith(".zh"):
        context["language"] = "zh-CN"


def table_of_lessons():
    """The README's table: of each lesson what one does in it, and the minutes."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = text.partition("\n| | lesson |")[2].partition("\n\n")[0]
    return "| | lesson |" + rows.replace("](notebooks/", "](../notebooks/")


def or_in_binder(path):
    return f", or [in Binder]({BINDER}?urlpath=lab/tree/{path})" if BINDER else ""


def prepare(app, docname, source):
    """Add how to run a page, fold the cells that JupyterLab folds, and mark explorer cells."""
    if docname == root_doc:
        page = source[0].replace("{or_in_binder}", or_in_binder("notebooks"))
        source[0] = page.replace("{lessons}", table_of_lessons())
    if not docname.startswith("notebooks/"):
        return
    path = f"{docname}.ipynb"
    notebook = json.loads(source[0])
    paragraphs = "".join(notebook["cells"][0]["source"]).split("\n\n")
    to_run = TO_RUN_IN_CHINESE if docname.startswith("notebooks/zh/") else TO_RUN
    paragraphs.insert(  # below the title and the minutes
        2, to_run.format(path=path, or_in_binder=or_in_binder(path))
    )
    paragraphs[1:1] = in_the_other_language(path)
    notebook["cells"][0]["source"] = "\n\n".join(paragraphs)
    for cell in notebook["cells"]:
        tags = cell["metadata"].setdefault("tags", [])
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            tags.append("hide-input")
        if "mini_dist.course.widgets" in "".join(cell["source"]) and shows_a_picture(cell):
            tags.append("explorer")
    source[0] = json.dumps(notebook)


def shows_a_picture(cell):
    found = [output.get("data", {}).get("text/html", "") for output in cell.get("outputs", [])]
    return any("<img " in "".join(html) for html in found)


def copy_mathjax(app, exception):
    if exception is None and app.builder.format == "html":
        source, target = HERE / "node_modules/mathjax/es5", Path(app.outdir) / "_static/mathjax"
        for part in ("tex-svg.js", "input/tex/extensions"):
            if (source / part).is_dir():
                shutil.copytree(source / part, target / part, dirs_exist_ok=True)
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(source / part, target / part)


def setup(app):
    app.connect("builder-inited", write_library)
    app.connect("autodoc-process-docstring", as_markdown)
    app.connect("source-read", prepare)
    app.connect("html-page-context", set_language)
    app.connect("build-finished", copy_mathjax)
