# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes the address of the repository, which a clone doesn't know.

For the index, whose page shows README, where a relative link leads nowhere; the workflow `release.yml` runs this when
a tag is pushed:

```bash
python docs/release.py https://github.com/<owner>/<name> v0.1.0
```

Into README and the notebooks, once, with the badges: README's of the workflow, and those that open notebooks on Colab,
whose first cells install from it:

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

_ADDRESS = "https://github.com/<owner>/<name>"
_NO_BADGE = "*Colab opens this notebook once `docs/release.py` has written the address of its repository here.*"
_BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/"


def named(readme: str, address: str) -> str:
    """Returns README with the address and a badge of the workflow, or as it is if it has both."""
    if _ADDRESS not in readme:
        return readme
    workflow = f"{address}/actions/workflows/ci.yml"
    readme = readme.replace("[![Python]", f"[![CI]({workflow}/badge.svg)]({workflow}) [![Python]", 1)
    return readme.replace(_ADDRESS, address)


def absolute(text: str, address: str, tag: str) -> str:
    """Returns Markdown whose links to files of the repository lead to the tag's, and which installs from the index."""

    def point(path: str, is_image: bool) -> str:
        if "://" in path or path.startswith("#"):
            return path
        return f"{address}/{'raw' if is_image else 'blob'}/{tag}/{path}"

    def link(found: re.Match) -> str:
        bang, title, path, source, image = found.groups()
        if source:
            return f"{bang}{source}{point(image, True)}"
        return f"{bang}{_TARGET.sub(link, title)}({point(path, bool(bang))})"

    text = named(text, address)
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
    """Writes the address into README and the notebooks, whose badges are for Colab, which opens GitHub's pages."""
    repository = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?", address)
    if repository is None:
        raise SystemExit(f"{address!r} isn't the address of a repository on GitHub, {_ADDRESS}.")
    page = f"https://github.com/{repository[1]}"
    readme = root / "README.md"
    readme.write_text(named(readme.read_text(), page))
    for path in sorted((root / "examples" / "notebooks").glob("*.ipynb")):
        badge = f"{_BADGE}{repository[1]}/blob/main/examples/notebooks/{path.name})"
        path.write_text(path.read_text().replace(_NO_BADGE, badge).replace(_ADDRESS, page))


if __name__ == "__main__":
    write = main if len(sys.argv) > 2 else name_repository
    write(*sys.argv[1:])
