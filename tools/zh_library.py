"""What the library says to a learner, in Chinese: mini_dist/course/language_zh.po.

    python tools/zh_library.py                      how much is translated, module by module
    python tools/zh_library.py sheet check/zero     print what is still to be translated, numbered
    python tools/zh_library.py fill check/zero FILE put a filled sheet into the catalog
    python tools/zh_library.py check                report what breaks the rules of STYLE.md

The texts of an exercise are its hints, the names of its measurements and the sentences of its
rules: every string with words in mini_dist/course/check/ but docstrings, skeletons and errors
other than complaints.
A value of an f-string is a field of the message: `f"rank {rank} sends"` is "rank {rank} sends".
In a filled sheet, "=== new" and two lines, English and Chinese, add a text that the code joins.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]

from mini_dist.course import language  # noqa: E402
from tools import zh  # noqa: E402

COURSE = ROOT / "mini_dist/course"
UNSAID = {"skeleton", "refuses"}  # keywords of an Exercise whose strings are code


def modules():
    return sorted((COURSE / "check").glob("*.py"))


def messages(path):
    """The texts of a module in its order: a line each, with {fields}."""
    found = {}
    for node in said(ast.parse(path.read_text(encoding="utf-8"))):
        for text in template(node).split("\n"):
            if words(text) >= 2:
                found.setdefault(text.strip())
    return list(found)


def words(text):
    bare = re.sub(r"`[^`]*`|\{[^{}]*\}|\w+\(.*?\)|\w*_\w*", "", text)
    return len(re.findall(r"[A-Za-z]{2,}", bare)) if " " in text.strip() else 0


def said(node):
    """The strings below a node that a learner may read."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.Raise) and "Complaint" not in ast.unparse(node):
        return
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ):
        yield node
        return
    if isinstance(node, ast.keyword) and node.arg in UNSAID:
        return
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        if field == "body" and isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            children = children[ast.get_docstring(node) is not None :]
        for child in children:
            if isinstance(child, ast.AST):
                yield from said(child)


def template(node):
    """A string with its values as named fields."""
    if isinstance(node, ast.Constant):
        return node.value
    text, names = "", []
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value
        else:
            names.append(field_name(part.value, names))
            text += f"{{{names[-1]}}}"
    return text


def field_name(value, taken):
    name = getattr(value, "id", None) or getattr(value, "attr", None) or "value"
    free = (each for number in range(1, 99) if (each := f"{name}{number}") not in taken)
    return name if name not in taken else next(free)


def translated():
    return zh.translations(language.CATALOG)


def sheet(path):
    known = translated()
    shown = []
    for number, text in enumerate(messages(path), 1):
        if text not in known:
            shown += [f"=== {number}", text, ""]
    return "\n".join(shown)


def fill(path, filled):
    """Put a filled sheet into the catalog; return how many texts it had. "-" leaves English."""
    catalog, texts = zh.read(language.CATALOG), messages(path)
    joined = re.findall(r"^=== new\n(.+)\n(.+)", filled, re.M)
    parts = zh.NUMBER.split(re.sub(r"^=== new\n.+\n.+", "", filled, flags=re.M))[1:]
    found = [(texts[int(number) - 1], text) for number, text in zip(parts[::2], parts[1::2])]
    found = [(text, chinese.strip()) for text, chinese in [*found, *joined]]
    for text, chinese in found:
        if chinese != "-":
            catalog.add(text.strip(), chinese)
    zh.write(language.CATALOG, catalog)
    return len(found)


def faults():
    """What is wrong in the catalog, a line each."""
    for text, chinese in translated().items():
        wanted, has = (
            {name for name, _ in language.FIELD.findall(each)} for each in (text, chinese)
        )
        if has - wanted:
            yield f"fields {sorted(has - wanted)} are not in {text!r}"
        for fault in zh.faults(plain(text), plain(chinese), "string"):
            yield f"{fault}\n    {chinese[:90]}"


def plain(text):
    """A text without its fields and the keys of configurations."""
    return re.sub(r'"\w+"', "X", re.sub(r"\{space\}", " ", language.FIELD.sub(r"{\1}", text)))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="count")
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args(argv)
    if options.what == "count":
        known = translated()
        for path in modules():
            if texts := messages(path):
                done = sum(text in known for text in texts)
                print(f"{path.stem:24} {done:4} of {len(texts):4}")
    elif options.what == "sheet" and len(options.rest) == 1:
        print(sheet(COURSE / f"{options.rest[0]}.py"), end="")
    elif options.what == "fill" and len(options.rest) == 2:
        path, filled = options.rest
        print(f"{fill(COURSE / f'{path}.py', Path(filled).read_text('utf-8'))} texts")
    elif options.what == "check":
        found = [*faults()]
        print("\n".join([*found, f"{len(found)} faults"]))
        return int(bool(found))
    else:
        parser.error("count, sheet MODULE, fill MODULE FILE or check")
    return 0


if __name__ == "__main__":
    sys.exit(main())
