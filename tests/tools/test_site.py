"""The site that `make docs` makes: nothing is missing, leads nowhere or asks another host."""

import importlib
import inspect
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from celery_idempotent.troubleshooting import PAGES, link
from tests.support.documents import ROOT
from tests.support.messages import linked
from tests.support.screens import NARROW, WIDE, sizes
from tests.unit.test_public_names import PUBLIC

REPOSITORY = "https://github.com/celery-idempotent/celery-idempotent"
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""By element: the attribute that names what a browser fetches without being asked."""

OF_THE_ENGINE = {
    *("conflict_delay_ms", "deadline_ms", "fingerprint_selector", "key_selector", "label_selector", "observed"),
    *("outage_delay_ms", "outcomes", "scope_of"),
}
"""Of a policy: what the engine reads of it, in its own units. Users have the fields."""

pytestmark = pytest.mark.timeout(300)


class Addresses(HTMLParser):
    """What a page loads, and where it leads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: set[str] = set()
        self.links: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.loaded.add(found.get(LOADED.get(tag, ""), ""))
        if tag == "a":
            self.links.add(found.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it: a link to a page or heading that is not there is a warning, so an error."""
    target = tmp_path_factory.mktemp("site")
    (command,) = re.findall(
        r"\$\(SITE\)/bin/sphinx-build (.*) docs build/site$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    ended = subprocess.run(
        [sys.executable, "-m", "sphinx", *command.split(), "-d", target / "trees", "docs", target / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return target / "site"


@pytest.fixture(scope="module")
def addresses(site: Path) -> dict[str, Addresses]:
    """Of every page."""
    return {str(page.relative_to(site)): Addresses(page) for page in sorted(site.rglob("*.html"))}


def test_pages_are_whole_without_another_host(site: Path, addresses: dict[str, Addresses]) -> None:
    """No font, script or picture from elsewhere: opening a page tells nobody, and works without a network."""
    assert len(addresses) > 60
    elsewhere = re.compile("(https?:)?//")
    assert {page for page, each in addresses.items() if any(map(elsewhere.match, each.loaded))} == set()
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"@import|url\([\"']?(?:https?:)?//", styles) == []


def test_links_stay_on_the_site_or_lead_to_files_of_the_repository(addresses: dict[str, Addresses]) -> None:
    """Also those to a page that the site includes, and those from it; what is no page the repository shows."""
    links = {link for each in addresses.values() for link in each.links if link.startswith(REPOSITORY)}
    paths = {re.split("[?#]", link)[0].split("/main/", 1)[1] for link in links if "/main/" in link}
    assert {"LICENSE", "example_project"} <= paths
    assert any(path.startswith("celery_idempotent/") for path in paths)
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {link for link in links if re.search(r"/blob/main/.*\.md$", link)} == {
        f"{REPOSITORY}/blob/main/tests/README.md"
    }
    assert "../reference/glossary.html" in addresses["project/contributing.html"].links
    assert "reference/failures.html" in addresses["index.html"].links


@pytest.mark.parametrize(("beside", "missed"), [("tests/README.md", 0), ("PKG-INFO", 0), ("setup.py", 1)])
def test_a_link_leads_out_of_a_source_archive(beside: str, missed: int, tmp_path: Path) -> None:
    """The archive has pages, and not all that they lead to; in a checkout such a link is an error."""
    for path in (tmp_path / "docs/index.md", tmp_path / beside):
        path.parent.mkdir(exist_ok=True)
        path.write_text("# Pages\n\n[tests](../tests/README.md)\n")
    shutil.copyfile(ROOT / "docs/conf.py", tmp_path / "docs/conf.py")
    command = (sys.executable, "-m", "sphinx", "-q", "-b", "dummy", "docs", "built")
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stderr.count("target not found: '../tests/README.md'") == missed


@pytest.fixture(scope="module")
def described(site: Path) -> set[str]:
    """Every name of Python that some page describes, with its module."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    return {line.split()[0] for line in listed.splitlines() if " py:" in line}


def test_every_public_name_and_member_is_in_the_reference(described: set[str]) -> None:
    """Under a public module that hands it on; what a class of ours says of a member of its own is shown with it."""
    modules = [*PUBLIC, "celery_idempotent.testing"]
    held = {module: vars(importlib.import_module(module)) for module in modules}
    for name in {name for each in PUBLIC.values() for name in each} - {"__version__"}:
        assert {f"{module}.{name}" for module, names in PUBLIC.items() if name in names} & described, name
    absent = {
        f"{module}.{name}.{member}"
        for module, names in held.items()
        for name in names["__all__"]
        if f"{module}.{name}" in described and isinstance(names[name], type)
        for member, value in vars(names[name]).items()
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)) and value.__doc__
    } - described
    assert absent == {f"celery_idempotent.Policy.{name}" for name in OF_THE_ENGINE}


def test_every_entry_is_where_its_link_leads(site: Path) -> None:
    """The address at the end of a message names a page of the site, and a heading on it."""
    pages = {page.stem: page.read_text() for page in (site / "troubleshooting").glob("*.html")}
    addresses = {link(see).removeprefix(f"{PAGES}/") for see in linked()}
    assert len(addresses) > 150
    assert {each for each in addresses if f'id="{each.split("#")[1]}"' not in pages[each.split(".html")[0]]} == set()


def test_no_page_is_longer_than_six_screens_or_wider_than_a_phone(site: Path, addresses: dict[str, Addresses]) -> None:
    """In a browser: nobody gets lost in a page that is read, and on a phone nobody scrolls sideways."""
    found, limit = sizes(site, addresses), 6.1  # fonts of machines differ by some percent
    read = {page: size.screens for page, size in found.items() if "reference/api" not in page}
    assert {page: screens for page, screens in read.items() if screens > limit} == {}, f"screens are {WIDE}"
    assert {page: size.width for page, size in found.items() if size.width > NARROW[0]} == {}
    assert max(size.screens for size in found.values()) > 2
