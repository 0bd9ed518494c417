# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Texts for terminals. Those of rows, completions and names of files may hold control sequences, by which a terminal
would write its clipboard, or change its title. Shown texts have them as `\\x1b`; files on disk keep them.
"""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar, cast


T = TypeVar("T")

# Control characters but tab and line feed, marks that change the direction of text, and halves of surrogate pairs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Returns a text with escapes, such as `\\x1b`, in place of characters that control a terminal."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)


class Foreign:
    """
    A text that another machine wrote, such as the name by which a server calls its model. It is no `str`, so that
    neither a loader nor a file's name takes it; a terminal gets it [`printable`].
    """

    def __init__(self, text: str):
        self._text = text

    def __str__(self) -> str:
        return printable(self._text)

    def __repr__(self) -> str:
        return repr(str(self))

    def for_loading(self) -> str:
        """
        Returns the text itself, to load what it names: files that run no code, or with the user's own
        `trust_remote_code`, never with the server's.
        """
        return self._text


def printable_cells(value: T) -> T:
    """Returns a table whose texts, in nested sequences and dictionaries, are [`printable`]."""
    if isinstance(value, dict):
        return cast(T, {printable_cells(key): printable_cells(item) for key, item in value.items()})
    if isinstance(value, str):
        return cast(T, printable(value))
    return cast(T, [printable_cells(item) for item in value]) if isinstance(value, Sequence) else value


def make_records_printable() -> None:
    """Makes the messages of this package's loggers [`printable`]. Those of other loggers stay as they are."""
    package = f"{__name__.partition('.')[0]}."
    make_record = logging.getLogRecordFactory()

    def make_printable(name: str, *details: str | int | tuple | dict | None, **more: str | None) -> logging.LogRecord:
        record = make_record(name, *details, **more)
        if name.startswith(package):
            with suppress(TypeError, ValueError):  # arguments that don't fit the message, which logging reports
                text = record.getMessage()
                if printable(text) != text:
                    record.msg = printable(text)
                    record.args = ()
        return record

    logging.setLogRecordFactory(make_printable)
