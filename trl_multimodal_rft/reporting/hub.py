# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Publishing on the Hub: what is published and what stays here, and errors that say what to do."""

import shlex
import shutil
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,  # that of the library which the client talks with
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress, hf_api

from ..models.trainer_mixin import TrainerMixin
from .model_card import in_code, training_lines, write_card


logger = get_logger(__name__)

# What `Trainer` leaves out of a push, too
_NEVER = ("_*", f"{PREFIX_CHECKPOINT_DIR}-*")
# What a checkpoint holds of the model
_WEIGHTS = ("config.json", "generation_config.json", "model*.safetensors*", "adapter_config.json", "adapter_model.*")
# Statuses of a Hub that has too much to do, or is down
_LATER = (408, 429, 500, 502, 503, 504)


def private_files(args) -> list[str]:
    """Patterns of the files that hold prompts, completions and media of the dataset in the output folder."""
    return ["completions/*", "*tfevents*"] if getattr(args, "log_completions", False) else ["completions/*"]


def how_to_upload(repo: str, folder: str, patterns: Sequence[str], private: bool) -> str:
    """A command that publishes a folder as a trainer does."""
    excluded = [word for pattern in (*_NEVER, *patterns) for word in ("--exclude", pattern)]
    return shlex.join(["hf", "upload", repo, folder, ".", *(["--private"] if private else []), *excluded])


def explain(error: BaseException, repo: str) -> OSError | None:
    """What an error of the Hub means."""
    cause: BaseException | None = error
    while cause is not None:
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
        # Without a token that may see it, a repository looks as if it didn't exist
        if isinstance(cause, (LocalTokenNotFoundError, RepositoryNotFoundError)) or status in (401, 403):
            return PermissionError(
                f"You may not write to {repo!r} on the Hub ({_reason(cause)}). Log in with `hf auth login`, or set "
                "`HF_TOKEN` or `hub_token` to a token that may write there."
            )
        if isinstance(cause, OfflineModeIsEnabled):
            return ConnectionError(
                f"`HF_HUB_OFFLINE` keeps this process from publishing {repo!r}. Unset it where there is a network."
            )
        if status in _LATER or (status is None and isinstance(cause, HTTPError)):
            return ConnectionError(
                f"The Hub can't be reached to publish {repo!r} ({_reason(cause)}). Check the network, and "
                "`HF_ENDPOINT` if it is set, or try again later."
            )
        cause = cause.__cause__
    return None


@contextmanager
def explained(repo: str, then: str):
    """Turns errors of the Hub within the context into ones that say what to do."""
    try:
        yield
    except Exception as error:
        known = explain(error, repo)
        if known is None:
            error.add_note(then)
            raise
        raise type(known)(f"{known} {then}") from error


class PublishingMixin(TrainerMixin):
    """
    What a trainer publishes: TRL's and [`~transformers.Trainer`]'s hooks for the Hub and the model card. No private
    files are uploaded, and errors say what to do.
    """

    push_in_progress: PushInProgress | None = None  # of checkpoints, on the main process
    _uploaded: Path | None = None  # the checkpoint of the last push from one
    _partial: Path | None = None  # where a checkpoint is being written
    _folders_beside_model: tuple[str, ...] = ()  # what else of a checkpoint belongs to the published model

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        with explained(
            self._repo, "Or train with `push_to_hub=False`, and publish with `trainer.push_to_hub()` afterwards."
        ):
            super().init_hf_repo(token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """
        Saves the model and publishes the output folder: the model, its processor, its card, and what belongs to it.
        Not published are checkpoints, and files that hold prompts, completions and media of the dataset.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to return only when all is uploaded.
            token (`str`, *optional*):
                Token that may write. Defaults to `hub_token`, then to that of the environment or of `hf auth login`.
            revision (`str`, *optional*):
                Branch, which must exist. Defaults to `hub_revision`, then to `"main"`.
            private (`bool`, *optional*):
                Whether to make the repository private when it is created. Defaults to `hub_private_repo`.
            kwargs:
                Arguments of [`create_model_card`].

        Returns:
            [`~huggingface_hub.CommitInfo`] or `Future`: The commit, with `blocking=False` a future of it.

        Raises:
            `PermissionError`: If there is no token, or the Hub refuses it. The saved folder stays as it is.
            `ConnectionError`: If the Hub can't be reached. The saved folder stays as it is.
        """
        args = self.args
        self.callback_handler.on_push_begin(args, self.state, self.control)
        hidden = bool(args.hub_private_repo if private is None else private)
        command = how_to_upload(self._repo, args.output_dir, private_files(args), hidden)
        again = f"The model is saved in {args.output_dir!r}. To publish it: `trainer.push_to_hub()`, or `{command}`."
        if self.hub_model_id is None:
            try:
                with explained(self._repo, again):
                    super().init_hf_repo(token, private)
            except Exception:
                # All processes save what was trained, as those do that have no part in the repository
                self.save_model(_internal_call=True)
                self.create_model_card(**kwargs)
                raise
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = kwargs.pop("model_name", None) or Path(args.hub_model_id or args.output_dir).name
        tags = kwargs.pop("tags", None) or ()
        tags = [*([tags] if isinstance(tags, str) else tags), *(getattr(self.model, "model_tags", None) or ())]
        self.create_model_card(name, tags=tags, **kwargs)
        self._finish_current_push()
        with explained(self._repo, again):
            return self._upload(args.output_dir, commit_message, token, revision, run_as_future=not blocking)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """
        Writes a card that says on what and how the model was trained, and how to ask it about media.

        Args:
            model_name (`str`, *optional*):
                Name of the model.
            dataset_name (`str`, *optional*):
                Name of the dataset.
            tags (`str` or `list[str]`, *optional*):
                Tags beside the package's own.
        """
        tags = {tags} if isinstance(tags, str) else set(tags or ())
        super().create_model_card(model_name, dataset_name, sorted(tags | self._kinds_seen))
        if self.is_world_process_zero():
            write_card(self, model_name, dataset_name)

    def _training_lines(self) -> list[tuple[str, str]]:
        """What the card says about the method."""
        rewards = ", ".join(map(in_code, self.reward_func_names))
        return [*training_lines(self.args.to_dict()), ("Rewards", rewards)]

    def _published_beside_model(self, model_class: str, folder: str) -> list[tuple[str, str]]:
        """What the card says about the folders beside the model."""
        return []

    def _push_from_checkpoint(self, checkpoint_folder):
        args, folder = self.args, Path(checkpoint_folder)
        quiet = args.hub_strategy == HubStrategy.END or not self.is_world_process_zero()
        if self._partial is not None or quiet:
            return
        if self._pushes:
            if not args.hub_always_push:
                return
            self._finish_current_push()  # what it uploads would change meanwhile
        self._warn_of_failed_pushes()
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._copy_model(folder)
        self._uploaded = folder
        by_steps = args.save_strategy == SaveStrategy.STEPS
        progress = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch)}"
        message = f"Training in progress, {progress}"
        jobs = [self._upload(args.output_dir, message, run_as_future=True)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            place = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            jobs.append(self._upload(folder, f"{message}, checkpoint", path_in_repo=place, run_as_future=True))
        self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder, message: str | None, token: str | None = None, revision: str | None = None, **options):
        """Uploads a folder, but for what stays here."""
        return hf_api().upload_folder(  # pyrefly: ignore[no-matching-overload]  which one is in `options`
            repo_id=self.hub_model_id,
            folder_path=folder,
            commit_message=message,
            token=self.args.hub_token if token is None else token,
            revision=self.args.hub_revision if revision is None else revision,
            ignore_patterns=[*_NEVER, *private_files(self.args)],
            **options,
        )

    def _copy_model(self, checkpoint: Path) -> None:
        """Brings the model of a checkpoint to the output folder, which saves gathering its weights once more."""
        folder = self.args.output_dir
        for path in (path for pattern in _WEIGHTS for path in checkpoint.glob(pattern)):
            shutil.copy(path, folder)
        for name in self._folders_beside_model:
            if (checkpoint / name).is_dir():
                shutil.copytree(checkpoint / name, Path(folder, name), dirs_exist_ok=True)
        self.processing_class.save_pretrained(folder)
        torch.save(self.args, Path(folder, TRAINING_ARGS_NAME))

    def _finish_current_push(self):
        super()._finish_current_push()
        self._warn_of_failed_pushes()

    def _warn_of_failed_pushes(self) -> None:
        """Of pushes in the background, whose errors nobody would see."""
        if self.push_in_progress is None or self._pushes:
            return
        jobs: Any = self.push_in_progress.jobs
        errors = [job.exception() for job in jobs]
        self.push_in_progress = None
        for error in filter(None, errors):
            logger.warning(
                f"{self._uploaded} was not published, or not all of it: {explain(error, self._repo) or repr(error)} "
                "Training goes on."
            )

    @property
    def _pushes(self) -> bool:
        """Whether a checkpoint is being uploaded."""
        return self.push_in_progress is not None and not self.push_in_progress.is_done()

    @property
    def _repo(self) -> str:
        """The repository, as far as it is known before it is made."""
        return self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name


def _reason(error: BaseException) -> str:
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return f"{status}: {' '.join(error.server_message.split())}" if error.server_message else str(status)
    return str(error).strip() or type(error).__name__
