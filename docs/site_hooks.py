# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What MkDocs is told about the site: files of the repository that its pages link to are pages of it, so that no link is
dead, a link such as [`Rollout`](../trl_multimodal_rft/rollout/rollout.py) leads to the line of that class there, and
formulas are MathML, which browsers draw without a script.
"""

import ast
import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files, config):
    """Adds the files that pages link to."""
    waiting = [(page.src_uri, Path(page.abs_src_path).read_text()) for page in files.documentation_pages()]
    for uri, text in waiting:
        for _, link, _ in _LINK.findall(text):
            target = _target(uri, link)
            if target is None or files.get_file_from_path(target):
                continue
            content = _content(target)
            files.append(File.generated(config, target, content=content))
            waiting.append((target, content))
    return files


def on_page_markdown(markdown, page, **kwargs):
    """Points links to where files are on the site; what isn't there, such as a folder, keeps its text alone."""
    uri = page.file.src_uri
    if uri == "models.md":  # its box searches the table
        markdown += (ROOT / "docs" / "generated" / "families.md").read_text().rpartition("<!-- measured -->")[2]

    def link(found: re.Match) -> str:
        text, path, anchor = found.groups()
        target = _target(uri, path)
        if target is None:
            return text
        line = lines_of_names(_path(target)).get(text.strip("`")) if path.endswith(".py") else None
        anchor = f"#__codelineno-0-{line}" if line else anchor or ""
        return f"[{text}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')}{anchor})"

    # Code stays as it is
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def on_page_content(content, **kwargs):
    """Writes formulas as MathML."""
    display = {"span": "inline", "div": "block"}
    return _FORMULA.sub(lambda found: convert(html.unescape(found[2]), display=display[found[1]]), content)


def lines_of_names(path: Path) -> dict[str, int]:
    """Returns the line of each class, function and method of a file, and of each name assigned at its top."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        for target in [*getattr(node, "targets", []), *filter(None, [getattr(node, "target", None)])]:
            found[ast.unparse(target)] = node.lineno
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            inner = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {node.name: node.lineno, **{f"{node.name}.{each.name}": each.lineno for each in inner}}
    return found


def _target(uri: str, link: str) -> str | None:
    """Where on the site a page's link leads; `None` if nowhere."""
    place = f"docs/{uri}" if not uri.startswith("source/") else uri.removeprefix("source/").removesuffix(".source.md")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
    if path.startswith("docs/") and (ROOT / path).suffix != ".py":
        return path.removeprefix("docs/")
    if path.endswith((".md", ".svg")):
        return f"source/{path}"
    return f"source/{path}.source.md" if Path(path).suffix in _LANGUAGES else None


def _path(target: str) -> Path:
    """Returns the file of the repository that a page shows."""
    return ROOT / target.removeprefix("source/").removesuffix(".source.md")


def _content(target: str) -> str:
    """A page with a file of the repository, or a picture."""
    path = _path(target)
    text = path.read_text()
    if path.suffix in (".md", ".svg"):
        return text
    # Found by the links to it, not by searching
    name = path.relative_to(ROOT)
    top = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n"
    return f'{top}# {name}\n\n```````{_LANGUAGES[path.suffix]} linenums="1"\n{text}\n```````\n'
