# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Publishing on the Hub: what stays here, and errors that say what to do."""

import shlex
from collections.abc import Sequence
from contextlib import contextmanager

from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # that of the library which the client talks with
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers.utils.hub import hf_api


# What `Trainer` leaves out of a push itself
_NEVER = ("_*", "checkpoint-*")
# Statuses of a Hub that has too much to do, or is down
_LATER = (408, 429, 500, 502, 503, 504)


def private_files(args) -> list[str]:
    """
    Patterns of the files that hold prompts, completions and media of the dataset in the output folder.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Arguments of the trainer.

    Returns:
        `list[str]`: The tables of completions, and the files of TensorBoard if these show the tables.
    """
    return ["completions/*", "*tfevents*"] if args.log_completions else ["completions/*"]


def how_to_upload(repo: str, folder: str, patterns: Sequence[str], private: bool) -> str:
    """
    A command that publishes a folder as a trainer does.

    Args:
        repo (`str`):
            Repository.
        folder (`str`):
            Output folder of the trainer.
        patterns (`Sequence[str]`):
            Patterns of what stays here.
        private (`bool`):
            Whether a repository that it makes is private.

    Returns:
        `str`: The command.
    """
    excluded = [word for pattern in (*_NEVER, *patterns) for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo, folder, ".", *(["--private"] if private else []), *excluded])


def explain(error: BaseException, repo: str) -> OSError | None:
    """
    What an error of the Hub means.

    Args:
        error (`BaseException`):
            The error, which may have come from another.
        repo (`str`):
            What was to be published to.

    Returns:
        `OSError` or `None`: A `PermissionError` if there is no token or the Hub refuses it, a `ConnectionError` if it can't
        be reached or is out of service; `None` for other errors.
    """
    cause: BaseException | None = error
    while cause is not None:
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        # Without a token that may see it, a repository looks as if it didn't exist
        if isinstance(cause, (LocalTokenNotFoundError, RepositoryNotFoundError)) or status in (401, 403):
            return PermissionError(
                f"You may not write to {repo!r} on the Hub ({_reason(cause)}). Log in with `hf auth login`, or set `HF_TOKEN` "
                "or `hub_token` to a token that may write there."
            )
        if isinstance(cause, OfflineModeIsEnabled):
            return ConnectionError(
                f"`HF_HUB_OFFLINE` keeps this process from publishing {repo!r}. Unset it where there is a network."
            )
        if status in _LATER or (status is None and isinstance(cause, HTTPError)):
            return ConnectionError(
                f"The Hub can't be reached to publish {repo!r} ({_reason(cause)}). Check the network, and `HF_ENDPOINT` if it is "
                "set, or try again later."
            )
        cause = cause.__cause__
    return None


@contextmanager
def explained(repo: str, then: str):
    """
    Turns errors of the Hub within the context into ones that say what to do.

    Args:
        repo (`str`):
            What is to be published to.
        then (`str`):
            What else to do; other errors get it as a note.

    Raises:
        `PermissionError`: If there is no token, or the Hub refuses it.
        `ConnectionError`: If the Hub can't be reached.
    """
    try:
        yield
    except Exception as error:
        known = explain(error, repo)
        if known is None:
            error.add_note(then)
            raise
        raise type(known)(f"{known} {then}") from error


@contextmanager
def uploads(repo: str, left_out: Sequence[str], then: str = ""):
    """
    Leaves files out of what `Trainer` uploads within the context, and explains errors that it waits for.

    Args:
        repo (`str`):
            What is published to.
        left_out (`Sequence[str]`):
            Patterns of paths, for which `Trainer` has no argument.
        then (`str`, *optional*, defaults to `""`):
            What to do about an error, see [`explained`].
    """
    api = hf_api()  # the client that `Trainer` uploads with

    def upload_folder(*args, **kwargs):
        ignored = [*(kwargs.pop("ignore_patterns", None) or ()), *left_out]
        with explained(repo, then):
            return type(api).upload_folder(api, *args, ignore_patterns=ignored, **kwargs)

    api.upload_folder = upload_folder
    try:
        yield
    finally:
        del api.upload_folder


def _reason(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"{status}: {' '.join(error.server_message.split())}" if error.server_message else str(status)
    return str(error).strip() or type(error).__name__
