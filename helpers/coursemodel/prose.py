"""General English prose from the running Python: its language reference by topic, and the docstrings of its library."""

from __future__ import annotations

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def documents() -> list[str]:
    """Texts of at least 200 characters, in a fixed order. Python's own licence (PSF-2.0) covers them."""
    from pydoc_data.topics import topics

    texts = [*(topics[name] for name in sorted(topics)), *_docstrings(Path(sysconfig.get_path("stdlib")))]
    return [text for text in map(str.strip, texts) if len(text) >= 200]


def _docstrings(library: Path) -> Iterator[str]:
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if file.parent.name in ("test", "site-packages", "idlelib", "lib2to3"):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
        if any(found):
            yield inspect.cleandoc("\n\n".join(text for text in found if text))
