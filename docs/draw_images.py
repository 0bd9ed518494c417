# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Draws README's pictures from a run of `make demo`: its reward and held-out accuracy, and what it printed.

```bash
make demo > demo.txt
python docs/draw_images.py outputs/grpo_audio demo.txt
```

Both are for light and dark pages: the curves have no background, and the console brings its own.
"""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text

from trl_multimodal_rft.extras.curves import figure_of


IMAGES = Path(__file__).parent / "images"
_SHOWN = r"reward reward_std eval_accuracy eval_accuracy_low eval_accuracy_high step".split()
_GREY = "#7d8590"  # is read on white and on black


def curves(history: list[dict]) -> str:
    """Returns the curves of reward and held-out accuracy as SVG."""
    entries = [{name: entry[name] for name in _SHOWN if name in entry} for entry in history]
    return as_svg(lambda: figure_of(entries))


def as_svg(draw: Callable[[], Figure]) -> str:
    """Returns a figure as SVG without a background, with text that is read on light and dark pages."""
    names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    style = {**dict.fromkeys(names, _GREY), "svg.fonttype": "none", "svg.hashsalt": "curves"}
    file = io.StringIO()
    with matplotlib.rc_context(style):
        draw().savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def console(printed: str, width: int = 120) -> str:
    """Returns what a command printed as a picture of a console."""
    recorder = Console(record=True, width=width, file=io.StringIO())
    lines = [line for line in printed.splitlines() if "get_accelerator" not in line]  # a library's word on CPUs
    recorder.print(Text.from_ansi("\n".join(lines)))
    picture = recorder.export_svg(title="make demo", unique_id="console")
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)  # from another site


if __name__ == "__main__":
    state, printed = Path(sys.argv[1], "trainer_state.json"), Path(sys.argv[2])
    (IMAGES / "training_curves.svg").write_text(curves(json.loads(state.read_text())["log_history"]))
    (IMAGES / "console.svg").write_text(console(printed.read_text()))
