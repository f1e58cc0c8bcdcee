"""The site that `make docs` makes: nothing is missing, leads nowhere or asks another host."""

import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sphinx.search.en import SearchEnglish

from tests.support.documents import DOCS, ROOT, table
from tests.unit.test_public_names import PUBLIC

REPOSITORY = "https://github.com/celery-idempotent/celery-idempotent"
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
"""By element: the attribute that names what a browser fetches without being asked."""

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
        r"\$\(BIN\)/sphinx-build (.*) docs build/site$", (ROOT / "Makefile").read_text(), re.MULTILINE
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
    assert {
        page: found for page, each in addresses.items() if (found := set(filter(elsewhere.match, each.loaded)))
    } == {}
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"@import|url\([\"']?(?:https?:)?//", styles) == []


def test_links_into_the_repository_lead_to_files_of_it(addresses: dict[str, Addresses]) -> None:
    """What is no page of the site is shown by the repository, whatever page the link is on."""
    links = {link for each in addresses.values() for link in each.links if link.startswith(REPOSITORY)}
    paths = {re.split("[?#]", link)[0].split("/main/", 1)[1] for link in links if "/main/" in link}
    assert {"LICENSE", "example_project", "celery_idempotent/engine/claim.py"} <= paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_links_to_pages_stay_on_the_site(addresses: dict[str, Addresses]) -> None:
    """Also those to a file that the site includes, and those from it."""
    assert "readme.html#words" in addresses["project/contributing.html"].links
    assert "../failures.html" in addresses["project/readme.html"].links
    shown = {
        link for each in addresses.values() for link in each.links if re.match(rf"{REPOSITORY}/blob/main/.*\.md$", link)
    }
    assert shown == {f"{REPOSITORY}/blob/main/tests/README.md"}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """Under a public module that hands it on."""
    listed = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    described = {line.split()[0] for line in listed.splitlines() if " py:" in line}
    names = {name for each in PUBLIC.values() for name in each} - {"__version__"}
    modules = {name: {module for module, held in PUBLIC.items() if name in held} for name in names}
    absent = {name for name, at in modules.items() if not {f"{module}.{name}" for module in at} & described}
    assert absent == set()


def test_the_search_finds_errors_by_their_text(site: Path) -> None:
    """Every word of what docs/failures.md says of an error leads there, as the search cuts words to their stems."""
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    page, search = index["docnames"].index("failures"), SearchEnglish({})
    found = {
        word
        for part in ("terms", "titleterms")
        for word, at in index[part].items()
        if page in (at if isinstance(at, list) else [at])
    }
    rows = table(DOCS / "failures.md", "error")
    assert "KeyMissing" in rows[2]["error"]
    said = {word for row in rows for cell in row.values() for word in search.split(re.sub(r"\]\(.*?\)", "", cell))}
    sought = {word.lower() for word in said if search.word_filter(word.lower())}
    assert {word for word in sought if search.stem(word) not in found} == set()
