# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes the address of the repository, which a clone doesn't know.

For the index, whose page shows README, where a relative link leads nowhere; the workflow `release.yml` runs this when
a tag is pushed:

```bash
python docs/release.py https://github.com/<owner>/<name> v0.1.0
```

Into the notebooks, once, so that their badges open them on Colab and their first cells install from it:

```bash
python docs/release.py https://github.com/<owner>/<name>
```
"""

import re
import sys
import tomllib
from pathlib import Path


ROOT = Path(__file__).parents[1]
# The target of a link in Markdown or of an image in HTML
_TARGET = re.compile(r'(!?)(?:(\[[^\[\]]*\]|\[!\[[^\[\]]*\]\([^)]*\)\])\(([^)\s]+)\)|(src=")([^"]+))')


def absolute(text: str, address: str, tag: str) -> str:
    """Returns Markdown whose links to files of the repository lead to the tag's, and which installs from the index."""

    def point(path: str, is_image: bool) -> str:
        if "://" in path or path.startswith("#"):
            return path
        if path.startswith("../../"):  # of the repository's page, such as a badge of its workflow
            return f"{address}/{path[6:]}"
        return f"{address}/{'raw' if is_image else 'blob'}/{tag}/{path}"

    def link(found: re.Match) -> str:
        bang, title, path, source, image = found.groups()
        if source:
            return f"{bang}{source}{point(image, True)}"
        return f"{bang}{_TARGET.sub(link, title)}({point(path, bool(bang))})"

    text = re.sub(r'pip install -e "\.(\[.*?\])"  # in a clone; ', r'pip install "trl-multimodal-rft\1"  # ', text)
    return _TARGET.sub(link, text)


def main(address: str, tag: str, root: Path = ROOT) -> None:
    """Writes README and the addresses of `pyproject.toml` for a tag, which is the version with a `v` before it."""
    file, readme = root / "pyproject.toml", root / "README.md"
    settings = file.read_text()
    version = tomllib.loads(settings)["project"]["version"]
    if tag != f"v{version}":
        raise SystemExit(f"The tag is {tag!r} and the version of pyproject.toml {version!r}; tag `v{version}`.")
    pages = {"Homepage": address, "Documentation": f"{address}/tree/{tag}/docs", "Issues": f"{address}/issues"}
    pages["Changelog"] = f"{address}/blob/{tag}/CHANGELOG.md"
    urls = "".join(f'{name} = "{page}"\n' for name, page in pages.items())
    file.write_text(settings.replace("[project.scripts]", f"[project.urls]\n{urls}\n[project.scripts]"))
    readme.write_text(absolute(readme.read_text(), address, tag))


def name_repository(address: str, root: Path = ROOT) -> None:
    """Writes the address into the notebooks: the badges for Colab, which opens GitHub's pages, and the first cells."""
    repository = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    if repository is None:
        raise SystemExit(
            f"{address!r} isn't the address of a repository on GitHub, https://github.com/<owner>/<name>."
        )
    for path in sorted((root / "examples" / "notebooks").glob("*.ipynb")):
        path.write_text(path.read_text().replace("OWNER/NAME", repository[1]))


if __name__ == "__main__":
    write = main if len(sys.argv) > 2 else name_repository
    write(*sys.argv[1:])
