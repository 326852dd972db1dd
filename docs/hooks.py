"""For mkdocs: files of the repository that pages link to become pages, so that links work here and on a code host.

For griffe, which reads docstrings: an ``Example:`` is shown as code.
"""

import pathlib
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\]\(\.\./((?:benchmarks|checkpoints)/[\w/]+\.md)\)")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


def on_files(files, config):
    """Adds the results of benchmarks, and what is said of the checkpoints."""
    for path in [*sorted((ROOT / "benchmarks" / "results").glob("*.md")), ROOT / "checkpoints" / "README.md"]:
        files.append(File.generated(config, _page(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links that leave the folder at the added pages."""
    return LINK.sub(lambda match: f"]({_page(match[1])})", markdown)


class Examples(griffe.Extension):
    """Calls the section by the only name that griffe knows; it takes another for prose."""

    def on_instance(self, *, obj, **kwargs):
        """Changes an object's docstring."""
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)


def _page(path: str) -> str:
    return path.removeprefix("benchmarks/").replace("/README", "")
