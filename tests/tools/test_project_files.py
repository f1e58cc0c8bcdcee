"""Files that only other programs read: the forms of GitHub, the hooks of pre-commit, the help of make."""

import re
import subprocess
import sys

import yaml

from tests.support.documents import ROOT

FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
HOOKS = ROOT / ".pre-commit-config.yaml"
MAKEFILE = (ROOT / "Makefile").read_text()


def run(*command: str) -> str:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_github_understands_the_issue_forms() -> None:
    """By its own schemas; a form with a mistake is not shown at all."""
    assert {each.name for each in FORMS.iterdir()} == {"bug.yml", "feature.yml", "config.yml"}
    for schema, form in (("forms", "bug"), ("forms", "feature"), ("config", "config")):
        kind = f"vendor.github-issue-{schema}"
        run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", kind, str(FORMS / f"{form}.yml"))


def test_hooks_run_what_make_runs() -> None:
    """The linters and the type checker of the environment, so that a version stands in one place."""
    run(sys.executable, "-m", "pre_commit", "validate-config", str(HOOKS))
    (repository,) = yaml.safe_load(HOOKS.read_text())["repos"]
    commands = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    assert commands == [".venv/bin/ruff format", ".venv/bin/ruff check", ".venv/bin/mypy"]
    assert all(command in MAKEFILE.replace("$(BIN)", ".venv/bin") for command in commands)


def test_help_of_make_fits_into_a_terminal() -> None:
    """Of 80 columns; every target that is described, and none of them cut."""
    shown = run("make", "--no-print-directory", "help").splitlines()
    assert [line.split()[0] for line in shown] == re.findall(r"^(\w+):.*## ", MAKEFILE, re.MULTILINE)
    assert max(map(len, shown)) <= 80
