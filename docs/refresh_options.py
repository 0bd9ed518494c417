# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
`python docs/refresh_options.py` writes the table of options that the package ships, and the page about its own. `make
fix` does it, too.
"""

import json
from pathlib import Path

from trl_multimodal_rft.cli.option_table import collect_options
from trl_multimodal_rft.spelling import interval_words


TABLE = Path(__file__).parents[1] / "trl_multimodal_rft" / "cli" / "options.json"
PAGE = Path(__file__).parent / "generated" / "options.md"
ABOUT = """
Options of this package's configs, by the commands and trainers that have them, with their defaults and valid numbers.
All options of TRL's configs work, too. `make fix` wrote this.
""".strip()


def stored() -> dict[Path, str]:
    """The table as it is stored, and the options in it that this package's configs define, as a page."""
    collected = collect_options()
    options = collected.pop("options")
    trainers: dict[str, list[str]] = {}
    lines = ",\n".join(json.dumps(option) for option in options)
    for option in sorted(options, key=lambda option: (-len(option["commands"]), option["name"])):
        if option["group"] == "multimodal":
            default = "none" if option["default"] is None else f"`{json.dumps(option['default'])}`"
            facts = [default, *([interval_words(option["interval"])] if option["interval"] else [])]
            title = ", ".join(f"`{command}`" for command in option["commands"])
            trainers.setdefault(title, []).append(f"- **`{option['name']}`** ({'; '.join(facts)}): {option['help']}")
    sections = "\n\n".join(f"## {title}\n\n" + "\n".join(lines) for title, lines in trainers.items())
    table = f'{json.dumps(collected)[:-1]}, "options": [\n{lines}\n]}}\n'
    return {TABLE: table, PAGE: f"# Options\n\n{ABOUT}\n\n{sections}\n"}


if __name__ == "__main__":
    for path, text in stored().items():
        path.write_text(text, encoding="utf-8")
