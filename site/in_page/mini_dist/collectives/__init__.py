"""In a page: no messages. Grid, of mesh.py, needs none."""
