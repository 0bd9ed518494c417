# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs notebooks and keeps their outputs, without progress bars and times:

```bash
python docs/refresh_notebooks.py examples/notebooks/grpo_audio.ipynb
```
"""

import hashlib
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


EXAMPLES = Path(__file__).parents[1] / "examples"


def run(path: Path) -> None:
    """Runs a notebook in its folder and writes it with what came out."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
    notebook.metadata = {**metadata, "sources": sources(notebook)}
    tidy(notebook)
    nbformat.write(notebook, path)


def sources(notebook: nbformat.NotebookNode) -> str:
    """Returns the checksum of its code and of the modules beside the notebooks that it imports, of one run."""
    code = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    modules = sorted(path for path in EXAMPLES.glob("*.py") if f"from {path.stem} import" in code)
    return hashlib.sha256("".join([code, *(path.read_text() for path in modules)]).encode()).hexdigest()[:16]


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Leaves out what a reader doesn't look for: bars and logs on the standard error, and a library's word on CPUs."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [
                output
                for output in cell.outputs
                if output.get("name") != "stderr" and "get_accelerator" not in output.get("text", "")
            ]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        run(Path(name))
