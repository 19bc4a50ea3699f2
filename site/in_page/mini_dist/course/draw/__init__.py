"""In a page: the parts of draw that explorers use, over SVG instead of matplotlib."""
