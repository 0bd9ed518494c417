# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reads docstrings in TRL's style for the reference: their types and references are written in Markdown."""

import re

import griffe


# `    beta (`float`, *optional*, defaults to `0.0`):`, of which the signature has the default
_TYPE = re.compile(r"^( *\w+ )\(([^\n]*?)(?:, \*optional\*[^\n]*)?\):$", re.MULTILINE)
_REFERENCE = re.compile(r"\[(`)~?(?:[\w.]+\.)?(\w+`)\](?!\()")
_GROUP = re.compile(r"^ *> Parameters.*\n\n?", re.MULTILINE)


class TRLDocstrings(griffe.Extension):
    """Makes types plain, references code, and leaves out the headings within the arguments of a config."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is not None:
            text = _REFERENCE.sub(r"\1\2", _GROUP.sub("", obj.docstring.value))
            obj.docstring.value = _TYPE.sub(lambda match: f"{match[1]}({match[2].replace('`', '')}):", text)
