"""Finds lines in the user's code: where a variable is made, where a generator is, what cannot be watched at work."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_SEEDED = ("torch.Generator", "np.random.default_rng", "numpy.random.default_rng", "random.Random", "Generator",
           "np.random.RandomState", "numpy.random.RandomState", "default_rng", "RandomState")  # fmt: skip
_DATES = ("now", "utcnow", "today")


class Source:
    """The user's files, by the short names that workers note."""

    def __init__(self, script: str, files: list[str]) -> None:
        """`files`: those that the script has imported, itself included."""
        self._folders = (Path.cwd(), Path(script).resolve().parent)
        self._files = files
        self._trees: dict[str, ast.Module | None] = {}

    def line_of(self, file: str, scope: str, name: str) -> int | None:
        """Where a variable of a function, a class (`self.x`) or a module (`<module>`) first gets its value."""
        tree = self._tree(file)
        if tree is None:
            return None
        inside = tree if scope == "<module>" else next(_defined(tree, scope), None)
        lines = (
            [getattr(node, "lineno", 0) for node in ast.walk(inside) if _assigns(node, name)]
            if inside is not None
            else []
        )
        return min(lines, default=None)

    def generators(self) -> list[tuple[str, int]]:
        """(file, line) of generators that are made with a seed."""
        return [(file, node.lineno) for file, node in self._calls() if _makes_generator(node)]

    def unseeded_torch(self) -> list[tuple[str, int]]:
        """(file, line) of `generator.seed()`, by which torch draws a seed from the operating system."""
        return [
            (f, n.lineno) for f, n in self._calls() if _called(n).endswith(".seed") and not n.args and not n.keywords
        ]

    def dates(self) -> list[tuple[str, int]]:
        """(file, line) of `datetime.now()` and the like."""
        owners = ("datetime", "date")
        return [
            (file, node.lineno)
            for file, node in self._calls()
            if isinstance(node.func, ast.Attribute)
            and node.func.attr in _DATES
            and _name(node.func.value).split(".")[-1] in owners
        ]

    def hash_orders(self) -> list[tuple[str, int]]:
        """(file, line) of what depends on the hash of strings: `hash(x)`, and sets that are gone through."""
        found = [(file, node.lineno) for file, node in self._calls() if _called(node) == "hash"]
        for file in self._files:
            for node in ast.walk(self._tree(file) or ast.Module([], [])):
                through = [node.iter] if isinstance(node, (ast.For, ast.comprehension)) else []
                if isinstance(node, ast.Call) and _called(node) in ("list", "tuple", "enumerate", "sum", "iter"):
                    through = node.args[:1]
                found += [(file, part.lineno) for part in through if self._is_set(file, part)]
        return found

    def _is_set(self, file: str, node: ast.AST) -> bool:
        if isinstance(node, (ast.Set, ast.SetComp)):
            return True
        if isinstance(node, ast.Call):
            return _called(node) in ("set", "frozenset")
        if not isinstance(node, ast.Name):
            return False
        for other in ast.walk(self._tree(file) or ast.Module([], [])):
            value = other.value if isinstance(other, (ast.Assign, ast.AnnAssign)) and _assigns(other, node.id) else None
            if value is not None and not isinstance(value, ast.Name) and self._is_set(file, value):
                return True
        return False

    def _calls(self) -> Iterator[tuple[str, ast.Call]]:
        for file in self._files:
            for node in ast.walk(self._tree(file) or ast.Module([], [])):
                if isinstance(node, ast.Call):
                    yield file, node

    def _tree(self, file: str) -> ast.Module | None:
        if file not in self._trees:
            self._trees[file] = None
            for folder in self._folders:
                try:
                    self._trees[file] = ast.parse((folder / file).read_text())
                    break
                except (OSError, SyntaxError, ValueError):
                    continue
        return self._trees[file]


def _defined(tree: ast.AST, name: str) -> Iterator[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name)


def _assigns(node: ast.AST, name: str) -> bool:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.For)):
        targets = [node.target]
    flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return any(_name(target) == name for target in flat)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return ""


def _called(node: ast.Call) -> str:
    return _name(node.func) or (f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else "")


def _makes_generator(node: ast.Call) -> bool:
    return _called(node) in _SEEDED and (bool(node.args or node.keywords) or _called(node).endswith("Generator"))
