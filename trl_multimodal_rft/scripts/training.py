# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The life of a trainer in a script: build, train, save, publish."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint
from transformers.utils import is_matplotlib_available
from trl import ModelConfig

from ..reporting.console import CompactLogCallback
from ..reporting.curves import TrainingCurvesCallback
from ..reporting.hub import how_to_upload
from ..trainers.checkpoints import CheckpointMixin
from .arguments import RFTScriptArguments, RunArguments
from .inputs import trainer_inputs
from .run_file import NAME, write_run_file


logger = get_logger(__name__)


def run(
    name: str,
    trainer_class: type[CheckpointMixin],
    script_args: RunArguments,
    training_args: TrainingArguments,
    model_args: ModelConfig,
    **inputs: Any,
) -> None:
    """Trains and saves a model, or with `--dry_run` takes one step and saves nothing."""
    script_args.command = script_args.command or f"trl-multimodal-rft {name}"
    with output_folder(script_args, training_args):
        trainer = trainer_class(**trainer_inputs(script_args, training_args, model_args), **inputs, callbacks=curves())
        train(trainer, script_args)
        finish(trainer, script_args)


@contextmanager
def output_folder(script_args: RunArguments, training_args: TrainingArguments) -> Iterator[None]:
    """Redirects the files of a dry run to a temporary folder."""
    if not script_args.dry_run:
        yield
        return
    training_args.save_strategy = SaveStrategy.NO
    training_args.push_to_hub = training_args.eval_on_start = training_args.load_best_model_at_end = False
    training_args.report_to = []
    with TemporaryDirectory() as folder:
        training_args.output_dir = folder
        yield


class _OneStep(TrainerCallback):
    """Ends a run after its first step, with a log and nothing else."""

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        control.should_log = control.should_training_stop = True
        control.should_evaluate = control.should_save = False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        control.should_evaluate = control.should_save = False


def curves() -> list[TrainerCallback]:
    """Curves of a run, if matplotlib is installed."""
    if is_matplotlib_available():
        return [TrainingCurvesCallback()]
    logger.warning('No curves are drawn; `pip install "trl-multimodal-rft[plots]"`.')
    return []


def train(trainer: CheckpointMixin, script_args: RunArguments) -> None:
    """
    Writes the user's options to `run.yaml`, trains, or resumes if the config says so, and saves the model and its
    card. A dry run takes one step and saves nothing.
    """
    if not script_args.disable_compact_log:
        trainer.add_callback(CompactLogCallback())
    if script_args.dry_run:
        trainer.add_callback(_OneStep())
        trainer.train()
        trainer.accelerator.print(f"Dry run: 1 step of {trainer.state.max_steps}; nothing was saved.")
        return
    is_main, folder = trainer.accelerator.is_main_process, trainer.args.output_dir
    if is_main and script_args.given is not None:
        write_run_file(folder, script_args.command, script_args.given)
    resume = trainer.args.resume_from_checkpoint
    try:
        trainer.train(resume_from_checkpoint={"true": True, "false": False}.get(str(resume).lower(), resume))
    except KeyboardInterrupt:
        step = trainer.state.global_step
        trainer.accelerator.print(f"\nInterrupted after step {step}. {_how_to_resume(trainer, script_args)}")
        sys.exit(130)
    trainer.save_model(folder)
    trainer.create_model_card(dataset_name=script_args.dataset_name)


def finish(trainer: CheckpointMixin, script_args: RunArguments) -> None:
    """Pushes to the Hub if the config says so, prints the next commands, and ends trackers and processes."""
    if trainer.args.push_to_hub and not script_args.dry_run:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    if not script_args.dry_run and not script_args.disable_compact_log:
        trainer.accelerator.print("\n".join(next_lines(trainer, script_args)))
    trainer.accelerator.end_training()


def next_lines(trainer: CheckpointMixin, script_args: RunArguments) -> list[str]:
    """The next commands for a trained model."""
    args, folder = trainer.args, trainer.args.output_dir
    model = ["--model_name_or_path", folder]
    system = ["--system_prompt", script_args.system_prompt] if script_args.system_prompt else []
    data = ["--dataset_name", script_args.dataset_name or "path/to/dataset"]
    values = {**vars(script_args), "media_dir": args.media_dir}
    for name in ("dataset_config", "media_dir", "prompt"):
        if values[name] is not None:
            data += [f"--{name}", values[name]]
    for name in ("reward_funcs", "tools"):
        if named := getattr(script_args, name, None):
            data += [f"--{name}", *([named] if isinstance(named, str) else named)]
    if isinstance(script_args, RFTScriptArguments) and script_args.reward_recipe:
        data += ["--reward_recipe", json.dumps(script_args.reward_recipe)]
        data += ["--reward_label_column", script_args.reward_label_column]
    name = args.hub_model_id or f"USER/{Path(folder).name}"
    publish = how_to_upload(name, folder, args.hub_private_repo or False)
    if args.push_to_hub:
        publish = f"https://huggingface.co/{trainer.hub_model_id}"
    return [
        f"The model is in {folder}.",
        "  ask:      " + shlex.join(["trl-multimodal-rft", "chat", *model, *system]),
        "  evaluate: " + shlex.join(["trl-multimodal-rft", "evaluate", *model, *data, *system]),
        "  resume:   " + _how_to_resume(trainer, script_args, prefix=""),
        "  publish:  " + publish,
    ]


def _how_to_resume(trainer: CheckpointMixin, script_args: RunArguments, prefix: str = "Resume with: ") -> str:
    """The command that resumes a run; a finished one needs more steps."""
    folder, state = trainer.args.output_dir, trainer.state
    config = [] if script_args.given is None else ["--config", str(Path(folder, NAME))]
    again = f"{script_args.command} {shlex.join(config)}".strip()
    if not Path(folder).is_dir() or get_last_checkpoint(folder) is None:
        return f"there is no checkpoint in {folder} (`--save_steps`); start again with: {again}"
    more = f" --max_steps {2 * state.max_steps}" if state.global_step == state.max_steps else ""
    return f"{prefix}{again} --resume_from_checkpoint True{more}"
