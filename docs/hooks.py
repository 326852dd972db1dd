"""For mkdocs: files of the repository that pages link to become pages, so that links work here and on a code host."""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\]\(\.\./((?:benchmarks|checkpoints)/[\w/]+\.md)\)")


def on_files(files, config):
    """Adds the results of benchmarks, and what is said of the checkpoints."""
    for path in [*sorted((ROOT / "benchmarks" / "results").glob("*.md")), ROOT / "checkpoints" / "README.md"]:
        files.append(File.generated(config, _page(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Points links that leave the folder at the added pages."""
    return LINK.sub(lambda match: f"]({_page(match[1])})", markdown)


def _page(path: str) -> str:
    return path.removeprefix("benchmarks/").replace("/README", "")
