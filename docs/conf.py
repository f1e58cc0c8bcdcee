"""How Sphinx makes the site of these pages. `make docs` calls it; on GitHub the pages are read as they are."""

import os
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms import SphinxTransform

from celery_idempotent import __version__
from celery_idempotent.engine.events import EventName

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/celery-idempotent/celery-idempotent"
IS_ARCHIVE = (ROOT / "PKG-INFO").exists()
"""Whether these are the pages of a source archive, which has neither the tests nor the lab that some links lead to."""
INCLUDED = {ROOT / f"{page.stem.upper()}.md": f"project/{page.stem}" for page in DOCS.glob("project/*.md")} | {
    ROOT / "README.md": "index"
}
"""Pages of the site that are files beside this folder."""
CHILDREN = {
    "troubleshooting/index": "[!i]*",
}
"""By page: what stands below it in the table of contents. The pages do not say it themselves: GitHub would show it."""
DEFINED_IN = {
    "celery_idempotent.stores.sql": "celery_idempotent.stores.sql.schema",
}
"""By public module: where the values stand that it hands on, each with its docstring."""

project = "celery-idempotent"
author = "celery-idempotent contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
needs_sphinx = "8.2"
nitpicky = True
highlight_language = "text"

myst_heading_anchors = 6
myst_enable_extensions = ["html_image"]
# A link without a scheme that leads nowhere is an error, and none looks for its target on the net.
myst_url_schemes = ["https", "http", "mailto"]

autodoc_default_options = {"no-value": True}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False  # Celery's are not ours to repeat
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
# Other packages' names, and types that nobody imports: there is no page to lead to.
nitpick_ignore_regex = [
    ("py:.*", r"(?!celery_idempotent\b).*"),
    ("py:class", r"celery_idempotent\..*\.(_?T|Selector)"),
]

html_theme = "furo"
html_title = "celery-idempotent"
html_favicon = html_logo = "../celery_idempotent/contrib/web/static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False  # the licence is a file of the repository
html_use_index = False  # of 17 screens; the search finds names, too
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
}


class Links(SphinxTransform):
    """Links lead where they lead on GitHub: to a page of the site where there is one, else to the repository.

    MyST reports those that lead nowhere.
    """

    default_priority = 5

    def apply(self, **_: Any) -> None:
        """Give each link the meaning that it has in the file that it is written in."""
        for link in list(self.document.findall(_is_link)):
            target, anchor = _target(link)
            if page := self._page(target):
                link.replace_self(_to_page(link, page, anchor))
            elif not target.is_relative_to(DOCS) and (target.exists() or IS_ARCHIVE):
                link.replace_self(_to_repository(link, target, anchor))

    def _page(self, target: Path) -> str | None:
        found: str | None = self.env.path2doc(target) if target.is_relative_to(DOCS) else INCLUDED.get(target)
        return found


def _is_link(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.pending_xref | addnodes.download_reference) and node.get("reftype") == "myst"


def _target(link: nodes.Element) -> tuple[Path, str]:
    if link.get("refdomain") == "doc":  # found by MyST, by its path without the suffix
        return DOCS / f"{link['reftarget']}.md", link["reftargetid"] or ""
    written, _hash, anchor = link["reftarget"].partition("#")
    return Path(os.path.normpath(Path(link.source).parent / written)), anchor


def _to_page(link: nodes.Element, page: str, anchor: str) -> nodes.Element:
    found = addnodes.pending_xref(
        *("", *link.children),
        **{**link.attributes, "refdomain": "doc", "reftarget": page, "reftargetid": anchor or None},
    )
    found.source, found.line = link.source, link.line
    return found


def _to_repository(link: nodes.Element, target: Path, anchor: str) -> nodes.Element:
    kind = "tree" if target.is_dir() else "blob"
    address = f"{REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}"
    return nodes.reference("", "", *link.children, refuri=f"{address}#{anchor}" if anchor else address)


def _with_children(_: Sphinx, page: str, text: list[str]) -> None:
    if below := CHILDREN.get(page):
        text[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{below}\n```\n"


def _as_written(_app: Sphinx, kind: str, name: str, _of: object, _options: object, text: list[str]) -> None:
    """Put right what autodoc takes for a docstring: of a value its class's, and of the package pytest's marker, too."""
    if kind == "data":
        module, _, short = name.rpartition(".")
        text[:] = (
            [f"Sent when {EventName[short.upper()].text}.".replace("`", "``")]
            if module == "celery_idempotent.signals"
            else ModuleAnalyzer.for_module(DEFINED_IN[module]).find_attr_docs()["", short]
        )
    elif kind == "module":
        text[:] = "\n".join(text).partition("PYTEST_DONT_REWRITE")[0].splitlines()


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_written)
    app.add_transform(Links)
    app.connect("source-read", _with_children)
