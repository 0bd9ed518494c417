# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The steps of a training script: build a trainer, train, save, publish."""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from accelerate import PartialState
from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint
from transformers.utils import is_matplotlib_available
from trl import ModelConfig

from ..data.rows.load import only_split
from ..paths import names_reward_model
from ..progress import announce, print_above_bars
from ..reporting.console import CompactLogCallback
from ..reporting.events import EventPart
from ..reporting.hub import repository_name, upload_command
from ..trainers.base.configs import TrainerConfig
from ..trainers.base.trainer import BaseTrainer
from ..trainers.checkpoints.files import checkpoints
from ..trainers.preference.dpo_config import MultimodalDPOConfig
from ..trainers.preference.kto_config import MultimodalKTOConfig
from ..trainers.preference.reward_config import MultimodalRewardConfig
from .arguments import RFTScriptArguments, RunArguments
from .errors import write_end
from .inputs import trainer_inputs
from .run_file import FILE_NAME, write_run_file


logger = get_logger(__name__)


def run(
    name: str,
    trainer_class: type[BaseTrainer],
    script_args: RunArguments,
    training_args: TrainerConfig,
    model_args: ModelConfig,
) -> None:
    """Trains, saves and publishes a model, or with `--dry_run` takes one step and saves nothing."""
    script_args.command = script_args.command or f"trl-multimodal-rft {name}"
    with script_run(script_args, training_args):
        announce("loading the dataset")
        arguments = trainer_inputs(script_args, training_args, model_args)
        announce("loading the model")
        trainer = trainer_class(**arguments, callbacks=[*curves_callbacks(), ScriptCallback(script_args)])
        if script_args.disable_compact_log:
            trainer.remove_callback(CompactLogCallback)
        trainer.train(resume_from_checkpoint=checkpoint_of(training_args))
        if not script_args.dry_run:
            trainer.save_model()
            trainer.create_model_card(dataset_name=script_args.dataset_name)
            if training_args.push_to_hub:
                trainer.push_to_hub(dataset_name=script_args.dataset_name)
                training_args.hub_model_id = trainer.hub_model_id
        trainer.accelerator.end_training()


class ScriptCallback(TrainerCallback):
    """Callback that writes the user's options to `run.yaml` as training begins, and ends a dry run after one step."""

    def __init__(self, script_args: RunArguments):
        self.script_args = script_args

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart
    ):
        script_args = self.script_args
        script_args.state = state
        folder = str(args.output_dir)
        resumed = state.global_step > 0
        if resumed:
            option = checkpoint_of(args)
            checkpoint = Path(folder, f"checkpoint-{state.global_step}") if option is True else option
            left = f"of {state.max_steps}" if state.global_step < state.max_steps else "with no step left to train"
            PartialState().print(f"Resumed from {checkpoint}, after step {state.global_step} {left}.")
        if state.is_world_process_zero and script_args.user_options is not None and not script_args.dry_run:
            write_run_file(folder, script_args.command, script_args.user_options, resumed)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        if self.script_args.dry_run:
            control.should_log = control.should_training_stop = True
            control.should_evaluate = control.should_save = False

    on_epoch_end = on_step_end

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: EventPart):
        if self.script_args.dry_run and state.is_world_process_zero:
            print_above_bars(f"Dry run: 1 step of {state.max_steps}; nothing was saved.")


@contextmanager
def script_run(script_args: RunArguments, training_args: TrainerConfig) -> Iterator[None]:
    """
    Context for the training of a script with [`ScriptCallback`]. At the end, or at a signal, prints the next commands.
    For a dry run, turns off saving and publishing, uses a temporary `output_dir`, and prints no commands.
    """
    if script_args.dry_run:
        if checkpoint_of(training_args) is True:  # the last checkpoint in `output_dir`, which changes below
            folders = checkpoints(str(training_args.output_dir))
            if not folders:
                raise ValueError(f"There is no checkpoint in {training_args.output_dir!r} to resume from.")
            training_args.resume_from_checkpoint = str(folders[-1])
        training_args.save_strategy = SaveStrategy.NO
        training_args.push_to_hub = training_args.eval_on_start = training_args.load_best_model_at_end = False
        training_args.report_to = []
        with TemporaryDirectory() as folder:
            training_args.output_dir = folder
            yield
        return
    try:
        yield
    except KeyboardInterrupt:
        if script_args.state is None:
            raise
        PartialState().print(f"\nInterrupted {end_note(script_args, training_args, script_args.state)}")
        sys.exit(130)
    except Exception as error:
        if script_args.state is not None and script_args.state.global_step > 0:
            note = f"Ended by an error {end_note(script_args, training_args, script_args.state)}"
            if not write_end(error, note):
                PartialState().print(f"\n{note}")
        raise
    if script_args.state is not None and not script_args.disable_compact_log:
        PartialState().print("\n".join(next_command_lines(script_args, training_args, script_args.state)))


def curves_callbacks() -> list[TrainerCallback]:
    """Returns the callback that draws the curves of a run, if matplotlib is installed."""
    if is_matplotlib_available():
        from ..extras.curves import TrainingCurvesCallback

        return [TrainingCurvesCallback()]
    logger.warning('No curves are drawn without matplotlib; `pip install "trl-multimodal-rft[plots]"`.')
    return []


def checkpoint_of(training_args: TrainingArguments) -> str | bool | None:
    """Returns the checkpoint to resume from: a path, or `True` for the last one. `None` and `False` start anew."""
    resume = training_args.resume_from_checkpoint  # the command line gives booleans as strings
    return {"true": True, "false": False}.get(str(resume).lower(), resume)


def next_command_lines(script_args: RunArguments, args: TrainerConfig, state: TrainerState) -> list[str]:
    """Returns lines with the folder of a trained model and the next commands for it."""
    folder = str(args.output_dir)
    # Words of the command lines: the model, the system message, and the data
    model = ["--model_name_or_path", folder]
    system = ["--system_prompt", script_args.system_prompt] if script_args.system_prompt else []
    data = ["--dataset_name", held_out_rows(script_args, args.eval_strategy != "no") or "path/to/held-out-rows"]
    values = {**vars(script_args), "media_dir": args.media_dir}
    values["max_completion_length"] = getattr(args, "max_completion_length", None)
    # Scores of a reward model don't tell whether an answer is correct
    values["reward_funcs"] = [name for name in values.get("reward_funcs") or () if not names_reward_model(name)]
    for name in ("dataset_config", "media_dir", "prompt", "reward_funcs", "tools", "max_completion_length"):
        value = values.get(name)
        if value:
            data += [f"--{name}", *(value if isinstance(value, list) else [str(value)])]
    if isinstance(script_args, RFTScriptArguments) and script_args.reward_recipe:
        data += ["--reward_recipe", json.dumps(script_args.reward_recipe)]
        data += ["--reward_label_column", script_args.reward_label_column]
    repo = args.hub_model_id or f"USER/{repository_name(folder)}"
    publish = upload_command(repo, folder, args.hub_private_repo or False)
    if args.push_to_hub:
        publish = f"https://huggingface.co/{args.hub_model_id}"
    ask = ["  ask:      " + shlex.join(["trl-multimodal-rft", "chat", *model, *system])]
    if isinstance(args, MultimodalRewardConfig):  # a reward model scores pairs and writes no text
        ask = []
        model = ["--pairs", "--reward_model_name_or_path", folder]
        system = []
    evaluate = "  evaluate: " + shlex.join(["trl-multimodal-rft", "evaluate", *model, *data, *system])
    # Rows of DPO and KTO have no solutions
    has_solutions = not isinstance(args, (MultimodalDPOConfig, MultimodalKTOConfig))
    return [
        f"The model is in {folder}.",
        *ask,
        *([evaluate] if has_solutions else []),
        "  resume:   " + resume_hint(script_args, folder, state, prefix=""),
        *([] if _has_local_base(folder) else ["  publish:  " + publish]),
    ]


def _has_local_base(folder: str) -> bool:
    """Returns whether a folder has an adapter of a model in another folder, without which others can't load it."""
    config = Path(folder, "adapter_config.json")
    base = json.loads(config.read_text()).get("base_model_name_or_path") if config.is_file() else None
    return base is not None and Path(base).is_dir()


def held_out_rows(script_args: RunArguments, evaluates: bool) -> str | None:
    """Returns the name of the run's dataset if `evaluate` would read held-out rows, else `None`."""
    name = script_args.dataset_name
    if name is None or (not evaluates and only_split(name, script_args.dataset_config) is not None):
        return None
    return name if script_args.dataset_test_split == "test" else None


def end_note(script_args: RunArguments, args: TrainerConfig, state: TrainerState) -> str:
    """Returns the last step of a run that didn't end by itself, its checkpoint, and the command that goes on."""
    last_step = saved_step(args.output_dir, state)
    folder = Path(str(args.output_dir), f"checkpoint-{last_step}")
    checkpoint = "" if last_step is None else f"; the last checkpoint is {folder}"
    return f"after step {state.global_step}{checkpoint}. {resume_hint(script_args, args.output_dir, state)}"


def resume_hint(
    script_args: RunArguments, folder: str | None, state: TrainerState, prefix: str = "Resume with: "
) -> str:
    """Returns the command that resumes a run, with more steps for a finished run."""
    config = [] if script_args.user_options is None else ["--config", str(Path(str(folder), FILE_NAME))]
    command = f"{script_args.command} {shlex.join(config)}".strip()
    if saved_step(folder, state) is None:
        return f"No checkpoint of this run is in {folder} (set `--save_steps` for one); start again with: {command}"
    steps = f" --max_steps {2 * state.global_step}" if state.global_step >= state.max_steps else ""
    return f"{prefix}{command} --resume_from_checkpoint True{steps}"


def saved_step(folder: str | None, state: TrainerState) -> int | None:
    """Returns the step of the run's last checkpoint, or `None` if the folder has no checkpoint of this run."""
    checkpoint = get_last_checkpoint(folder) if Path(str(folder)).is_dir() else None
    step = None if checkpoint is None else int(checkpoint.rpartition("-")[2])
    return None if step is None or step > state.global_step else step
