"""The house: imports go down the layers, and files stay short."""

import ast
import pathlib

import pytest

import qstate

PACKAGE = pathlib.Path(qstate.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = [
    "cli",
    "__init__",
    "optimizers",
    "transforms",
    "precision",
    "report",
    "state",
    "kernels",
    "numerics",
    "theory",
]
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}


def layer_of(module: list[str]) -> str:
    """The layer of a dotted name inside the package."""
    return module[0] if module and module[0] in LAYERS else "__init__"


def imports(path: pathlib.Path) -> list[list[str]]:
    """Dotted names inside the package that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = (node.module or "").split(".")
            found += [[*module, alias.name] for alias in node.names]
    return [name[1:] for name in found if name[0] == "qstate"]


def ids(path: pathlib.Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_imports_go_down_the_layers(path):
    own = layer_of(list(path.relative_to(PACKAGE).with_suffix("").parts))
    for name in imports(path):
        other = layer_of(name)
        if own == other:
            continue
        assert LAYERS.index(own) < LAYERS.index(other), f"{own} imports {'.'.join(name)}"
        private = [part for part in name[1:] if part.startswith("_")]
        assert not private, f"{own} reaches into {'.'.join(name)}"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_files_are_short_and_well_named(path):
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem.strip("_") not in FORBIDDEN_NAMES
    assert ast.get_docstring(ast.parse(path.read_text())), "a file starts with what it is"
