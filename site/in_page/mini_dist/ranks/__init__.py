"""In a page: no ranks."""
