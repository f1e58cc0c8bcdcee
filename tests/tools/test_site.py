"""The site that `make docs` makes: nothing is missing, leads nowhere or asks another host."""

import importlib
import inspect
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from celery_idempotent.troubleshooting import PAGES, link
from tests.support.browser import a_window
from tests.support.documents import ROOT
from tests.support.messages import linked
from tests.unit.test_public_names import PUBLIC

REPOSITORY = "https://github.com/celery-idempotent/celery-idempotent"
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""By element: the attribute that names what a browser fetches without being asked."""

OF_THE_ENGINE = {
    *("conflict_delay_ms", "deadline_ms", "observed", "outage_delay_ms", "outcomes", "scope_of", "selectors"),
}
"""Of a policy: what the engine reads of it, in its own units. Users have the fields."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


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


def test_pages_ask_no_other_host_and_their_links_lead_somewhere(site: Path) -> None:
    """No font, script or picture from elsewhere; what is no page of the site the repository shows."""
    pages = {str(page.relative_to(site)): Addresses(page) for page in site.rglob("*.html")}
    assert len(pages) > 60
    assert [page for page in pages if any(re.match("(https?:)?//", each) for each in pages[page].loaded)] == []
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"@import|url\([\"']?(?:https?:)?//", styles) == []

    links = {link for each in pages.values() for link in each.links if link.startswith(f"{REPOSITORY}/")}
    paths = {re.split("[?#]", link)[0].split("/main/", 1)[1] for link in links if "/main/" in link}
    assert {"LICENSE", "example_project"} <= paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    assert {link for link in links if re.search(r"/blob/main/.*\.md$", link)} == {
        f"{REPOSITORY}/blob/main/tests/README.md"
    }
    assert "../reference/glossary.html" in pages["project/contributing.html"].links
    assert "reference/failures.html" in pages["index.html"].links


def test_every_public_name_and_member_is_in_the_reference(site: Path) -> None:
    """Under a public module that hands it on; what a class of ours says of a member of its own is shown with it."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    described = {line.split()[0] for line in listed.splitlines() if " py:" in line}
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


SCREENS, PHONE = 6.1, 360
"""Screens of a desktop that a page may fill, as fonts of machines differ by some percent; CSS pixels of a phone."""


def test_no_page_is_longer_than_six_screens_or_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    """In a browser: nobody gets lost in a page that is read, and on a phone nobody scrolls sideways."""
    pages, sizes = sorted(site.rglob("*.html")), {}
    with a_window(tmp_path) as browser:
        for width, height, what in (
            (1920, 1080, "querySelector('article').getBoundingClientRect().height / 1080"),
            (PHONE, 800, "documentElement.scrollWidth"),
        ):
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            for page in pages:
                browser.get(page.as_uri())
                sizes[width, page] = float(browser.execute_script(f"return document.{what}"))
    read = {page: sizes[1920, page] for page in pages if "reference/api" not in str(page)}
    assert {page: screens for page, screens in read.items() if screens > SCREENS} == {}
    assert {page: sizes[PHONE, page] for page in pages if sizes[PHONE, page] > PHONE} == {}
    assert max(read.values()) > 2
