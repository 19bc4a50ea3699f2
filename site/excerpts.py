"""Show under each search result where its page uses the words.

Sphinx itself would fetch the found pages, which a page opened from the disk may not do. It may load
scripts, so each page's text is also written as one: _static/texts/NAME.js.
"""

import json
from pathlib import Path


def write_text(app, doctree, docname):
    if app.builder.format != "html":
        return
    path = Path(app.outdir) / "_static/texts" / f"{docname}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = " ".join(doctree.astext().split())
    call = f"textIs({json.dumps(docname)}, {json.dumps(text, ensure_ascii=False)});\n"
    path.write_text(call, encoding="utf-8")


def load_script(app, pagename, templatename, context, doctree):
    if pagename == "search":
        app.add_js_file("excerpts.js")


def setup(app):
    app.connect("doctree-resolved", write_text)
    app.connect("html-page-context", load_script)
