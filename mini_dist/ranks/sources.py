"""Make a rank run the source on the disk, even if it was edited twice within a second."""

from __future__ import annotations

import os
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source


def trust_no_older_bytecode() -> None:
    """Let imports of this process use a .pyc only if it was written after its source.

    Python compares the source's size and its time in whole seconds (PEP 3147). So after two edits
    in the same second with the same length, it would take the older version's bytecode for the
    newest.
    """
    path_stats = SourceFileLoader.path_stats

    def path_stats_unless_edited_since(self, path: str) -> dict:
        cache = cache_from_source(path)
        try:
            edited_since = os.stat(path).st_mtime_ns > os.stat(cache).st_mtime_ns
        except FileNotFoundError:  # there is no bytecode: it may be written
            edited_since = False
        if edited_since:
            raise OSError(f"{cache} is older than {path}")  # the import then compiles the source
        return path_stats(self, path)

    SourceFileLoader.path_stats = path_stats_unless_edited_since
