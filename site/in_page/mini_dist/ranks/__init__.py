"""Stand in for the room `ranks` in a web page, which has no ranks."""
