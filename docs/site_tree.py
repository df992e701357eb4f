"""A hook of mkdocs: the site has the tree of the repository, so that the links of its pages work in both.

The pages are those in `PAGES` and all of docs/, under these names. A file that a page links to,
such as a configuration or a test, is copied into the site. mkdocs fails for a link to a file that does not exist.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/README.md", "examples/README.md")
"""The pages outside of docs/."""
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
"""Matches a Markdown link to a file. The group is the path, without an anchor."""
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
"""Matches an example in a docstring: lines from the first prompt of an interpreter to an empty line."""


class Examples(Extension):
    """Shows the examples of docstrings as code. Markdown would take their prompts for quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those of the repository's tree, and keeps the files of the theme."""
    pages = [*PAGES]
    pages += [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    names = {*pages, *(name for page in pages for name in linked(page))}
    kept = [file for file in files if not (REPOSITORY / "docs" / file.src_uri).is_file()]
    return Files(
        [*kept, *(File.generated(config, name, abs_src_path=str(REPOSITORY / name)) for name in sorted(names))]
    )


def linked(page: str) -> set[str]:
    """Returns the files that `page` links to, as paths from the root of the repository."""
    folder = posixpath.dirname(page)
    targets = LINK.findall((REPOSITORY / page).read_text(encoding="utf-8"))
    names = {posixpath.normpath(posixpath.join(folder, target)) for target in targets}
    return {name for name in names if (REPOSITORY / name).is_file()}
