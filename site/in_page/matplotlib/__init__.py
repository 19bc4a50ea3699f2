"""As much of matplotlib as the explorers draw with, written as SVG.

A page has no matplotlib: it is no part of the npm package of Pyodide, and it would be another
20 MB. An explorer's drawing function runs here unchanged. What it calls that is not here raises
AttributeError, and tests/course/test_site.py draws every explorer.
"""
