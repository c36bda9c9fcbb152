"""What the lower layers may import: the arithmetic knows no model, and the kernels know no cache."""

import ast
from pathlib import Path

import pytest

import windowquant

ROOT = Path(windowquant.__file__).parent


def imported(path: Path) -> set[str]:
    """Names of all modules that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("folder", "below"), [("core", ("core",)), ("kernels", ("kernels", "core"))])
def test_lower_layers_import_nothing_above_them(folder: str, below: tuple[str, ...]) -> None:
    allowed = tuple(f"windowquant.{name}" for name in (*below, "errors"))
    for path in (ROOT / folder).rglob("*.py"):
        names = imported(path)
        assert not [name for name in names if name.split(".")[0] == "transformers"], path
        ours = [name for name in names if name.split(".")[0] == "windowquant"]
        assert [name for name in ours if not name.startswith(allowed)] == [], path
