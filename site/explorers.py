"""Put the explorers into the pages. Python ships with the site and starts when a reader needs it.

Pages opened from a disk may neither fetch files nor start a worker from a file. So the build packs
everything that Pyodide would fetch into one script, and the page unpacks it. That works the same
from a disk and from a server.
"""

import base64
import gzip
import importlib
import io
import json
import zipfile
from pathlib import Path

from docutils import nodes

from mini_dist import widgets

HERE = Path(__file__).resolve().parent
PYODIDE = HERE / "node_modules/pyodide"
PAGE = HERE / "explorers.md"
BESIDE = {  # explorers that lessons import from their own module
    "all_reduces": "mini_dist.course.widgets.links",
    "pipelines": "mini_dist.course.widgets.pipeline",
}


def library() -> bytes:
    """Return mini_dist as a zip in which files from in_page/ replace the files that need torch."""
    files = {}
    for root, pattern in ((HERE.parent, "mini_dist/**/*.py"), (HERE / "in_page", "**/*.py")):
        for path in sorted(root.glob(pattern)):
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content)
    return buffer.getvalue()


def packed_as_text(part: bytes) -> str:
    return base64.b64encode(gzip.compress(part, 9, mtime=0)).decode()


def pack(app, exception):
    """Write _static/python.js and copy Pyodide's loader into the same folder."""
    if exception is not None or app.builder.format != "html":
        return
    lock = json.loads((PYODIDE / "pyodide-lock.json").read_text())
    lock["packages"] = {}  # The site ships no packages.
    parts = {
        "module": (PYODIDE / "pyodide.asm.mjs").read_bytes(),
        "wasm": (PYODIDE / "pyodide.asm.wasm").read_bytes(),
        "stdlib": (PYODIDE / "python_stdlib.zip").read_bytes(),
        "lock": json.dumps(lock).encode(),
        "library": library(),
    }
    packed = {name: packed_as_text(part) for name, part in parts.items()}
    static = Path(app.outdir) / "_static"
    (static / "python.js").write_text(f"globalThis.packedPython = {json.dumps(packed)};\n")
    (static / "pyodide.js").write_bytes((PYODIDE / "pyodide.js").read_bytes())


SECTION = """
## {name}

{said}

```{{code-block}} python
:class: explorer

{source}
```
"""


def write_page(app):
    """Write a page with every explorer of the library."""
    cells = {}
    for name in sorted({*widgets.__all__} - {"Explorer"}):
        home = getattr(widgets, name).__module__
        cells[name] = f"from mini_dist.course.widgets import {name}", f"{name}()", home
    for name, home in BESIDE.items():
        cells[name] = f"from {home} import explorer", "explorer()", home
    text = (HERE / "explorers_head.md").read_text()
    for name, (imports, call, home) in cells.items():
        module = importlib.import_module(home)
        said = module.__doc__.split("\n")[0].removeprefix("Explorer of ")
        source = f"{imports}\n\n{call}"
        text += SECTION.format(name=name, said=said[0].upper() + said[1:], source=source)
    if not PAGE.exists() or PAGE.read_text() != text:  # A new date would rebuild the page.
        PAGE.write_text(text)


def script_where_needed(app, pagename, templatename, context, doctree):
    """Add the script to the pages that have an explorer, and to no others."""
    if doctree is not None and any(
        name in ("explorer", "tag_explorer")
        for node in doctree.findall(nodes.Element)
        for name in node.get("classes", ())
    ):
        app.add_js_file("explorers.js")


def setup(app):
    app.connect("builder-inited", write_page)
    app.connect("html-page-context", script_where_needed)
    app.connect("build-finished", pack)
