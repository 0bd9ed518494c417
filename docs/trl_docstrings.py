# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reads docstrings in TRL's style for the reference: their types, defaults and references are written in Markdown."""

import re

import griffe


# `    beta (`float`, *optional*, defaults to `0.0`):`, whose default goes into the signature
_TYPE = re.compile(r"^( *(\w+) )\(([^\n]*?)(?:, \*optional\*(?:, defaults to `([^`\n]+)`)?[^\n]*)?\):$", re.MULTILINE)
_REFERENCE = re.compile(r"\[(`)~?(?:[\w.]+\.)?(\w+`)\](?!\()")
_RESULT = re.compile(r"^( +)`([\w.]+)`: ", re.MULTILINE)  # or error
_GROUP = re.compile(r"^ *> Parameters.*\n\n?", re.MULTILINE)
_FACTORY = re.compile(r"\(lambda: (.*)\)\(\)")


class TRLDocstrings(griffe.Extension):
    """Makes types plain, references code, and leaves out the headings within the arguments of a config."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        waiting = [pkg]
        while waiting:
            obj = waiting.pop()
            waiting += [member for member in obj.members.values() if not member.is_alias]
            documented = _rewrite(obj.docstring) if obj.docstring is not None else {}
            function = obj.members.get("__init__") if obj.is_class else obj if obj.is_function else None
            for parameter in function.parameters if function is not None and not function.is_alias else ():
                if parameter.default is not None:
                    made = _FACTORY.sub(r"\1", str(parameter.default))  # of a field of a dataclass
                    parameter.default = documented.get(parameter.name, made)


def _rewrite(docstring: griffe.Docstring) -> dict[str, str]:
    """Writes a docstring in Markdown; returns the defaults that it names."""
    text = _REFERENCE.sub(r"\1\2", _GROUP.sub("", docstring.value))
    plain = _TYPE.sub(lambda found: f"{found[1]}({found[3].replace('`', '')}):", text)
    docstring.value = _RESULT.sub(r"\1\2: ", plain)
    return {found[2]: found[4] for found in _TYPE.finditer(text) if found[4]}
