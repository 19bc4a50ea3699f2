"""Stand in for the room `collectives` in a web page: only Grid of mesh.py, which sends nothing."""
