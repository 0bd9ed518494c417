# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs notebooks and keeps their outputs, without progress bars and times:

```bash
python docs/refresh_notebooks.py examples/notebooks/grpo_audio.ipynb
```

Those that need a GPU run on a tiny model and made-up rows, of `tests/helpers/notebook_models.py`; their first cell
says so.
"""

import hashlib
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient


ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(path: Path) -> None:
    """Runs a notebook in its folder and writes it with what came out."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as folder:
        parameters = parameters_cell(notebook)
        committed = parameters.source
        values = small_values(path.stem, Path(folder))
        parameters.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
        resources = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=None, record_timing=False, resources=resources).execute()
        parameters.source = committed
    notebook.metadata = {**metadata, "sources": sources(notebook)}
    tidy(notebook)
    nbformat.write(notebook, path)


def parameters_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return cell


def small_values(name: str, folder: Path) -> dict:
    """Returns values of the parameters with which a CPU runs a notebook for a GPU, and none for the others."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import notebook_models

    prepare = getattr(notebook_models, name, None)
    return {} if prepare is None else prepare(folder)


def sources(notebook: nbformat.NotebookNode) -> str:
    """Returns the checksum of its code, but for the cell that installs, and of the modules beside that it imports."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    code = "".join(source for source in cells if "find_spec" not in source)
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
