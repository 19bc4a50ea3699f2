"""Link the words of docs/glossary.md from the place where a page first uses them.

A link's tooltip shows the Chinese word and the meaning. Each row of the glossary has an anchor.
"""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

GLOSSARY = "docs/glossary"
NOT_IN = (nodes.literal, nodes.literal_block, nodes.reference, nodes.title, nodes.math,
          nodes.math_block, nodes.raw, nodes.caption, nodes.table)  # fmt: skip


def anchor(word):
    return "word-" + re.sub(r"\W+", "-", word.lower()).strip("-")


def read_glossary(app, doctree):
    """Store the glossary's rows, and give each row an anchor."""
    env = app.env
    if env.docname != GLOSSARY:
        return
    env.glossary_words = {}
    for row in doctree.findall(nodes.row):
        cells = [cell.astext() for cell in row.children]
        if row.parent.tagname == "thead" or len(cells) < 3:
            continue
        words = [word.strip() for word in cells[0].split(",")]
        paragraph = next(iter(row.children[0].findall(nodes.paragraph)))
        paragraph["ids"].append(anchor(words[0]))
        for word in words:
            env.glossary_words[word] = anchor(words[0]), f"{cells[1]}: {cells[2]}"


class LinkWords(SphinxPostTransform):
    """Turn the first use of each word on a page of the course into a link to its row."""

    default_priority = 900

    def run(self):
        docname, words = self.env.docname, getattr(self.env, "glossary_words", {})
        if not docname.startswith(("notebooks/", "docs/coming")) or not words:
            return
        uri = self.app.builder.get_relative_uri(docname, GLOSSARY)
        # A word in capitals is an abbreviation and must match exactly. Other words also match as a
        # plural or with a capital first letter.
        by_key = {word if word.isupper() else word.lower(): found for word, found in words.items()}
        longest = sorted(by_key, key=len, reverse=True)
        any_word = "|".join(map(re.escape, longest))
        pattern = re.compile(rf"(?<![\w-])({any_word})(e?s)?(?![\w-])", re.IGNORECASE)
        seen = set()

        def link(match):
            key = match[1] if match[1] in by_key else match[1].lower()
            target, meaning = by_key.get(key, (None, None))
            if target is None or target in seen:
                return None
            seen.add(target)
            return nodes.reference("", match[0], refuri=f"{uri}#{target}", reftitle=meaning,
                                   internal=True, classes=["word"])  # fmt: skip

        for text in list(self.document.findall(nodes.Text)):
            if not isinstance(text.parent, (nodes.paragraph, nodes.strong, nodes.emphasis)):
                continue
            if any(isinstance(above, NOT_IN) for above in ancestors(text)):
                continue
            parts, end = [], 0
            for match in pattern.finditer(text):
                if found := link(match):
                    parts += [nodes.Text(text[end : match.start()]), found]
                    end = match.end()
            if parts:
                text.parent.replace(text, [*parts, nodes.Text(text[end:])])


def ancestors(node):
    while node := node.parent:
        yield node


def all_with_the_glossary(app, env, added, changed, removed):
    """Rebuild all pages if the glossary has changed, because every page links to it."""
    return env.found_docs - added if GLOSSARY in changed else set()


def setup(app):
    app.connect("doctree-read", read_glossary)
    app.connect("env-get-outdated", all_with_the_glossary)
    app.add_post_transform(LinkWords)
