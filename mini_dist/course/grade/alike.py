"""Which answers say the same: by their code, whatever its names, comments and layout.

It is information and no verdict. An answer of three lines has few right forms, and two learners who
both write the plainest one have not copied.
"""

from __future__ import annotations

import ast
import hashlib

MOST_SOURCE = (
    1 << 18
)  # letters that are parsed of a notebook: a tree is some hundred times as large
NO_CODE = (SyntaxError, ValueError, RecursionError, MemoryError)  # (the last: the parser's stack)


class Renamed(ast.NodeTransformer):
    """Names that a function makes itself get numbers, in the order in which they come up."""

    def __init__(self, own: set[str]):
        self.own, self.numbers = own, {}

    def new(self, name: str) -> str:
        return f"_{self.numbers.setdefault(name, len(self.numbers))}" if name in self.own else name

    def visit_Name(self, node):
        node.id = self.new(node.id)
        return node

    def visit_arg(self, node):
        node.arg, node.annotation = self.new(node.arg), None
        return node

    def visit_FunctionDef(self, node):
        node.name, node.returns, node.decorator_list = self.new(node.name), None, []
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]  # its docstring
        return self.generic_visit(node)


def normalised(source: str) -> str:
    """A short name of what the code says; "" for what is no code."""
    try:
        return of_code(ast.parse(source[:MOST_SOURCE]))
    except NO_CODE:
        return ""


def of_code(tree: ast.Module) -> str:
    tree.body = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom))]
    own = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    own |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and is_made(n)}
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    said = ast.dump(Renamed(own).visit(tree))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def is_made(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
