"""The README tells the truth: its commands, configuration names, Python snippets, folders and links exist."""

import ast
import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.M | re.S)
PYTHON_BLOCKS = [body for language, body in BLOCKS if language == "python"]


def shell_commands() -> list[list[str]]:
    """The commands of the README's shell blocks, split into words, without comments."""
    text = "\n".join(body for language, body in BLOCKS if language in {"bash", "sh", "console"})
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


MAKE_COMMANDS = [words for words in shell_commands() if words[0] == "make"]
SCRIPT_COMMANDS = [words for words in shell_commands() if len(words) > 1 and words[1].startswith("scripts/")]


def test_the_two_commands_are_there() -> None:
    assert ["make", "reproduce-table1"] in MAKE_COMMANDS
    assert ["make", "test"] in MAKE_COMMANDS


@pytest.mark.parametrize("words", MAKE_COMMANDS, ids=" ".join)
def test_make_target_and_the_script_it_calls_exist(words: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    done = subprocess.run(
        [words[0], "--dry-run", *words[1:]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [script for script in re.findall(r"scripts/\w+\.py", done.stdout) if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("words", SCRIPT_COMMANDS, ids=" ".join)
def test_script_exists_and_its_choices_too(words: list[str]) -> None:
    assert (ROOT / words[1]).is_file()
    for group, names in (word.split("=", 1) for word in words[2:] if "=" in word):
        if (ROOT / "conf" / group).is_dir():
            missing = [n for n in names.split(",") if not (ROOT / "conf" / group / f"{n}.yaml").is_file()]
            assert missing == [], f"conf/{group} has no {missing}"


@pytest.mark.parametrize("words", SCRIPT_COMMANDS, ids=" ".join)
def test_overrides_compose(words: list[str]) -> None:
    overrides = [word if "[" in word else word.split(",")[0] for word in words[2:] if "=" in word]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        compose(Path(words[1]).stem, overrides=overrides)


@pytest.mark.parametrize("body", PYTHON_BLOCKS)
def test_python_block_parses_and_its_imports_exist(body: str) -> None:
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            absent = [a.name for a in node.names if not hasattr(module, a.name)]
            assert absent == [], f"{node.module} has no {absent}"
        elif isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)


def test_folders_of_the_map_exist() -> None:
    rows = re.findall(r"^\| `([\w./]+/)` \|", README, flags=re.M)
    assert len(rows) > 5
    assert [row for row in rows if not (ROOT / row).is_dir()] == []


def test_links_to_files_exist() -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
