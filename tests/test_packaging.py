"""What an installation promises: declared dependencies are the used ones, every version is pinned, data files ship."""

import ast
import importlib
import importlib.metadata as metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN = {"windowquant", "baselines", "scripts", "tests"}

# Declared although no line of ours imports them, with the reason.
NOT_IMPORTED = {
    "filelock": "lmms-eval 0.7.3 breaks with filelock 4",
    "hydra-joblib-launcher": "hydra/launcher=joblib runs a sweep in several processes",
    "torchvision": "transformers' video processors need it",
}


# Distributions that are called otherwise than the module they hold.
DIST_OF = {
    "PIL": "pillow",
    "hydra": "hydra-core",
    "optimum": "optimum-quanto",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def dist_of(module: str) -> str:
    """Canonical distribution name of a top-level module."""
    return str(canonicalize_name(DIST_OF.get(module, module)))


def imported_modules(*folders: str) -> dict[str, Path]:
    """Top-level modules that the given folders import from outside the project, each with one file that does."""
    found: dict[str, Path] = {}
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found.update({name.split(".")[0]: path for name in names})
    return {m: p for m, p in found.items() if m not in sys.stdlib_module_names and m not in OWN}


def declared(*extras: str) -> dict[str, Requirement]:
    lines = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return {str(canonicalize_name(r.name)): r for r in map(Requirement, lines)}


def constraints() -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    return {str(canonicalize_name(name)): Version(version) for name, version in lines}


def test_code_imports_only_declared_packages() -> None:
    known = set(declared("gpu", "stock"))
    missing = {dist_of(m): str(p) for m, p in imported_modules("windowquant", "baselines", "scripts").items()}
    assert {d: p for d, p in missing.items() if d not in known} == {}


def test_tests_import_only_declared_packages() -> None:
    known = set(declared("gpu", "dev"))
    missing = {dist_of(m): str(p) for m, p in imported_modules("tests").items()}
    assert {d: p for d, p in missing.items() if d not in known} == {}


def test_every_declared_package_is_used() -> None:
    used = {dist_of(m) for m in imported_modules("windowquant", "baselines", "scripts")}
    assert sorted(set(declared()) - used - set(NOT_IMPORTED)) == []


@pytest.mark.parametrize("extra", [None, "gpu", "stock", "pretrained", "dev"])
def test_constraints_pin_a_version_that_the_range_admits(extra: str | None) -> None:
    pins = constraints()
    for name, requirement in declared(*[extra] if extra else []).items():
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit {pins[name]}"


def drawn_in(names: list[str]) -> Iterator[str]:
    """Canonical names of the given distributions and of all that they require here, each once."""
    seen: set[str] = set()
    while names:
        name = str(canonicalize_name(names.pop()))
        if name in seen:
            continue
        seen.add(name)
        yield name
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)


def test_constraints_pin_everything_that_an_installation_draws_in() -> None:
    unpinned = sorted(set(drawn_in(list(declared("dev")))) - set(constraints()))
    assert unpinned == []


def test_ranges_admit_the_oldest_supported_versions() -> None:
    oldest = {"torch": "2.11.0", "transformers": "5.17.0"}
    assert all(declared()[name].specifier.contains(version) for name, version in oldest.items())


def test_every_data_file_of_the_package_matches_a_package_data_pattern() -> None:
    package = ROOT / "windowquant"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["windowquant"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    data = {p for p in package.rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}}
    assert sorted(str(p.relative_to(ROOT)) for p in data - shipped) == []


def test_every_folder_with_modules_is_a_package_or_shipped_as_data() -> None:
    shipped = {
        path
        for pattern in PROJECT["tool"]["setuptools"]["package-data"]["windowquant"]
        for path in (ROOT / "windowquant").glob(pattern)
    }
    modules = [p for folder in ("windowquant", "baselines") for p in (ROOT / folder).rglob("*.py")]
    lost = [p for p in modules if not (p.parent / "__init__.py").exists() and p not in shipped]
    assert [str(p.relative_to(ROOT)) for p in lost] == []


def test_entry_point_resolves_to_a_model_manifest() -> None:
    target = PROJECT["project"]["entry-points"]["lmms_eval.models"]["windowquant"]
    module, attribute = target.split(":")
    assert getattr(importlib.import_module(module), attribute) is not None


def test_installed_entry_point_is_found_by_name() -> None:
    names = {point.name for point in metadata.entry_points(group="lmms_eval.models")}
    assert "windowquant" in names


def test_lmms_eval_lists_the_model_even_if_our_plugin_module_was_imported_first() -> None:
    code = (
        "import windowquant.harness.plugin\n"
        "from lmms_eval.models import list_available_models\n"
        "raise SystemExit('windowquant' not in list_available_models(True))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
