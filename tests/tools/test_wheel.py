"""What is published is what was tested: the distributions are built, looked at, installed elsewhere and used."""

import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from readme_renderer.markdown import render

from celery_idempotent.troubleshooting import PAGES
from lab.embedded import EmbeddedRedis
from tests.support.documents import ROOT

PACKAGE = ("celery_idempotent/", "pytest_celery_idempotent.py")
HOME = "https://github.com/celery-idempotent/celery-idempotent"
RAW = HOME.replace("github.com", "raw.githubusercontent.com")

TESTED_BY = (
    *("ephem", "flask[async]", "greenlet", "httpx2", "hypothesis", "logfmtkv", "opentelemetry-sdk", "psutil"),
    *("pydantic", "pytest", "pytest-timeout", "python-json-logger", "pyyaml"),
    *("pg8000", "psycopg[binary]", "psycopg2-binary", "pymysql"),
)
"""What the unit tests import beyond the package and its extras, and the drivers that they expect to be installed."""


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files of the project, by their paths from its root."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return {path for path in listed.splitlines() if (ROOT / path).is_file()}


@pytest.fixture(scope="module")
def built(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that was built from it."""
    checkout, dist = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    copy(tracked, checkout)  # without what earlier builds left behind
    run(sys.executable, "-m", "build", "--outdir", str(dist), cwd=checkout)
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return source, wheel


def test_the_distributions_hold_the_package_and_nothing_else(built: tuple[Path, Path], tracked: set[str]) -> None:
    """Every file of it, whatever its kind, and in the archive what it is built from and its pages; no lab, no tests."""
    source, wheel = built
    package = {path for path in tracked if path.startswith(PACKAGE)}
    assert {
        f"{PACKAGE[0]}{each}" for each in ("py.typed", "stores/redis/swap.lua", "stores/redis/search.lua")
    } <= package
    with ZipFile(wheel) as archive:
        assert {each for each in archive.namelist() if ".dist-info/" not in each} == package
    with tarfile.open(source) as opened:
        files = {each.name.split("/", 1)[1] for each in opened if each.isfile()}
    held = {each for each in files if not each.startswith(("PKG-INFO", "celery_idempotent.egg-info/"))}
    beside = "LICENSE MANIFEST.in README.md pyproject.toml setup.cfg setup.py CHANGELOG.md CONTRIBUTING.md SECURITY.md"
    assert held == {*beside.split(), *package, *(path for path in tracked if path.startswith("docs/"))}


def test_an_index_page_names_the_project_and_its_links_and_pictures_live(built: tuple[Path, Path]) -> None:
    """They are absolute; those into the project lead to a file of it, and pictures are fetched as files."""
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built), cwd=ROOT)
    with ZipFile(built[1]) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    assert (metadata["Author"], metadata["License-Expression"]) == ("celery-idempotent contributors", "Apache-2.0")
    assert dict(each.split(", ") for each in metadata.get_all("Project-URL", [])) == {
        "Source": HOME,
        "Changelog": f"{HOME}/blob/main/CHANGELOG.md",
        "Documentation": PAGES.removesuffix("troubleshooting"),
        "Issues": f"{HOME}/issues",
    }
    text = str(metadata.get_payload())
    page = render(text, variant="GFM")
    assert page is not None
    links = {link for link in re.findall('href="([^"]*)', page) if not link.startswith("#user-content-")}
    assert {link for link in links if not link.startswith("https://")} == set()
    paths = {link.removeprefix(f"{HOME}/blob/main/").split("#")[0] for link in links if link.startswith(HOME)}
    assert len(paths) > 10
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert [each.removeprefix(f"{RAW}/main/") for each in pictures] == ["docs/pictures/demo.svg"]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_unit_tests_pass_against_the_wheel(built: tuple[Path, Path], tracked: set[str], tmp_path: Path) -> None:
    """In an environment that has nothing else, beside a checkout without the package."""
    python = environment(tmp_path / "environment", f"{built[1]}[cipher,dynamodb,flask,otel,redis,sql,web]", *TESTED_BY)
    checkout = tmp_path / "checkout"
    copy({path for path in tracked if not path.startswith(PACKAGE)}, checkout)
    imported = run(str(python), "-c", "import celery_idempotent as it; print(it.__file__)", cwd=checkout)
    assert Path(imported.strip()).is_relative_to(tmp_path / "environment")
    assert " passed" in run(str(python), "-m", "pytest", "tests/unit", "-q", cwd=checkout).splitlines()[-1]


SHOP = """
import sys
from celery import Celery
from celery_idempotent import Policy, idempotent

def charge(order_id):
    print("charged", order_id)

for _ in range(2):
    idempotent(Policy("order_id"), store=sys.argv[1], name="charge")(charge)("o-1")
Celery(broker=sys.argv[1], backend=sys.argv[1]).send_task("charge").forget()
"""


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_redis_extra_is_all_redis_needs(built: tuple[Path, Path], redis_server: EmbeddedRedis, tmp_path: Path) -> None:
    """Store, broker and result backend; on SQL the tutorial shows it."""
    python = environment(tmp_path / "environment", f"{built[1]}[redis]")
    assert run(str(python), "-c", SHOP, redis_server.url, cwd=tmp_path) == "charged o-1\n"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(built: tuple[Path, Path]) -> None:
    """Each file, command and output of the page, in its order, in two terminals and an environment that is empty."""
    done = run(sys.executable, "-m", "tests.support.tutorial", str(built[1]), cwd=ROOT)
    assert done.startswith("the tutorial does what it says")


def environment(folder: Path, *requirements: str) -> Path:
    """A new environment with `requirements` and what they need; gives its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    python = folder / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile")
    run(*install, *requirements, cwd=folder)
    return python


def copy(paths: set[str], target: Path) -> None:
    for path in paths:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target / path)


def run(*command: str, cwd: Path) -> str:
    """What a command prints; what it printed is in the failure if it fails."""
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout
