"""Files that only other programs read: the forms of GitHub, the hooks of pre-commit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
HOOKS = ROOT / ".pre-commit-config.yaml"


@pytest.mark.parametrize(("schema", "form"), [("forms", "bug.yml"), ("forms", "feature.yml"), ("config", "config.yml")])
def test_github_understands_the_issue_forms(schema: str, form: str) -> None:
    """By its own schemas; a form with a mistake is not shown at all."""
    _run("check_jsonschema", "--builtin-schema", f"vendor.github-issue-{schema}", str(FORMS / form))


def test_every_issue_form_is_checked() -> None:
    """The list above names them all."""
    assert {each.name for each in FORMS.iterdir()} == {"bug.yml", "feature.yml", "config.yml"}


def test_pre_commit_understands_its_hooks() -> None:
    """By its own check."""
    _run("pre_commit", "validate-config", str(HOOKS))


def test_hooks_run_what_make_runs() -> None:
    """The linters and the type checker of the environment, so that a version stands in one place."""
    (repository,) = yaml.safe_load(HOOKS.read_text())["repos"]
    commands = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    assert commands == [".venv/bin/ruff format", ".venv/bin/ruff check", ".venv/bin/mypy"]
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    assert all(command in makefile for command in commands)


def test_help_of_make_fits_into_a_terminal() -> None:
    """Of 80 columns; every target that is described, and none of them cut."""
    shown = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    described = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert [line.split()[0] for line in shown] == described
    assert max(map(len, shown)) <= 80


def _run(module: str, *arguments: str) -> None:
    ended = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
