"""Search in English and Chinese. Chinese has no spaces between words, so its texts and queries are
split into pairs of neighboring characters: 流水线 is found as 流水 and 水线."""

import re

from sphinx.search.en import SearchEnglish

CHINESE = "\u4e00-\u9fff"
PIECES = re.compile(rf"[{CHINESE}]+|[^\W{CHINESE}]+")


class SearchBoth(SearchEnglish):
    lang = "en-zh"
    language_name = "English"  # names the stemmer in the page
    js_splitter_code = rf"""
var splitQuery = (query) =>
  (query.match(/[{CHINESE}]+|(?:(?![{CHINESE}])[\p{{L}}\p{{N}}_])+/gu) ?? []).flatMap((piece) =>
    /[{CHINESE}]/.test(piece) && piece.length > 1
      ? Array.from({{ length: piece.length - 1 }}, (_, at) => piece.slice(at, at + 2))
      : [piece]
  );
"""

    def split(self, input):
        return [part for piece in PIECES.findall(input) for part in parts_of(piece)]


def parts_of(piece):
    if not re.match(f"[{CHINESE}]", piece):
        return [piece]
    pairs = [piece[at : at + 2] for at in range(len(piece) - 1)]
    return [*piece, *pairs]  # (a query of a single character is found as well)


def setup(app):
    app.add_search_language(SearchBoth)
