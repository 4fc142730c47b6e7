"""The text in a module's source."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType


def string_constants(module: ModuleType) -> list[str]:
    """All string constants of a module except docstrings; ``{...}`` fields split a constant."""
    tree = ast.parse(Path(module.__file__).read_text())
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if hasattr(node, "body")
                  and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)}  # fmt: skip
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [part for value in values if value not in docstrings for part in re.split(r"\{.*?\}", value)]
