# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Console output of a run, `run.yaml`, dry runs and interrupted runs."""

import logging
import math
import re
import shlex
import signal
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import house
import pytest
import yaml
from datasets import Dataset
from helpers.chats import RATE, audio, image, video
from helpers.files import sound_file
from helpers.trainer_utils import AS_SHIPPED, audio_rows, length_and_sum, load, make_trainer, saved
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig, get_peft_model
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback, TrainerState

from trl_multimodal_rft import GenerationEvalCallback, MultimodalGRPOTrainer
from trl_multimodal_rft.cli.arguments import RunArguments, parse
from trl_multimodal_rft.cli.commands import dpo, grpo, ppo, reward, rloo, sft
from trl_multimodal_rft.cli.run_file import write_run_file
from trl_multimodal_rft.cli.training import held_out_rows, resume_hint
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt, placeholder_token_ids
from trl_multimodal_rft.evaluation import EvaluationConfig
from trl_multimodal_rft.extras import evaluate
from trl_multimodal_rft.models.parts import count_parts
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.reporting import media_logs
from trl_multimodal_rft.reporting.console import (
    evaluation_values,
    media_descriptions,
    metric_values,
    prompt_text,
)
from trl_multimodal_rft.reporting.hub import repository_name


def masked(text: str) -> str:
    """Returns this package's lines, without numbers, the self-check, and the samples of a random model."""
    text = re.sub(r"(completion \(\d+ tokens\)): .*?(?=\nrewards:)", r"\1: ...", text, flags=re.DOTALL)
    text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", "#", text)
    text = re.sub(r" {2,}#", "  #", re.sub(r"# (s|min|h)\b", "# s", re.sub(r"# [kM] ", "# ", text)))
    text = text[re.search(r"Multimodal\w+ trains", text).start() :]
    return re.sub(r"self-check: .*(\n  .*)*", "self-check: ...", text)


def deprecations_are_errors():
    warnings.resetwarnings()
    for category in (FutureWarning, UserWarning):
        warnings.simplefilter("error", category)


# The callback

RUN = """\
MultimodalGRPOTrainer trains Qwen2AudioForConditionalGeneration for # steps:
  audio_tower  #  trained at #
  projector  #  trained at #
  language_model  #  trained at #
  total  #  # trained
self-check: ...
first prompt (# tokens), as the model gets it:
  <|im_start|>user
  <|audio_bos|><audio: # tokens, # s><|audio_eos|>What do you hear in the audio? Is there a cat? Is there a cat? #\
<|im_end|>
  <|im_start|>assistant
reference: a bird
completion (# tokens): ...
rewards: length_and_sum #
step #/# | # s/step | # s left
step #/# | reward # ± # | length #, # % clipped | # s/step | # s left
step #/# | eval reward # ± # | length #, # % clipped
step #/# | eval reward # ± # | length #, # % clipped
step #/# | trained in # s
"""


def test_what_a_run_shows(tmp_path, capsys):
    rows = audio_rows(4).add_column("solution", ["a bird"] * 4)
    held_out = audio_rows(1)
    options = {"max_steps": 3, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "disable_tqdm": False}
    options |= {"per_device_eval_batch_size": 4, "gradient_checkpointing": True, **AS_SHIPPED}
    with warnings.catch_warnings():
        deprecations_are_errors()
        options["objects"] = {"eval_dataset": held_out}
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", rows, tmp_path, **options)
        trainer.train()
        assert not {PrinterCallback, ProgressCallback} & {type(each) for each in trainer.callback_handler.callbacks}
    shown = capsys.readouterr()
    assert masked(shown.out) == RUN and "/3 [" not in shown.err
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert {"entropy", "packing/shared_frac", "rewards/length_and_sum/mean", "step_time"} <= logged[0].keys()
    assert f"reward {logged[0]['reward']:.2f} ± {logged[0]['reward_std']:.2f} | length" in shown.out


@pytest.mark.parametrize("name", house.trainers())
def test_what_a_trainer_says_of_itself(name, tmp_path):
    trainer_class = house.trainers()[name]
    about = [f"model: Qwen2AudioForConditionalGeneration {saved('qwen2_audio')}", "rows: 4", "steps: 3 epochs"]
    rows = audio_rows(4)
    objects = {}
    reward = None
    if name in ("GRPO", "RLOO", "PPO"):
        about[2:2] = ["rewards: length_and_sum"]
        reward = length_and_sum
    elif name == "Distillation":
        objects = {"teacher_model": load("qwen2_audio")[0]}
    elif name == "Reward":
        model, processor = load("qwen2_audio")
        objects = {"model": as_reward_model(model), "processing_class": processor}
        about[0] = about[0].replace("ConditionalGeneration", "SequenceClassification")
    if name in ("DPO", "Reward"):
        rows = rows.add_column("chosen", ["a bird"] * 4).add_column("rejected", ["a dog"] * 4)
    elif name in ("SFT", "KTO"):
        rows = rows.add_column("completion", ["a bird"] * 4).add_column("label", [True, False] * 2)
    options = {"num_train_epochs": 3, "max_steps": -1, "reward": reward, "objects": objects}
    trainer = make_trainer(trainer_class, "qwen2_audio", rows, tmp_path, **options)
    assert repr(trainer) == f"{trainer_class.__name__}({'; '.join(about)})"
    trainer.args.max_steps = 1200
    trainer.train_dataset = Dataset.from_list([{"prompt": "What?"}]).to_iterable_dataset()
    about[1] = "rows: a stream"
    about[-1] = "steps: 1,200"
    assert repr(trainer) == f"{trainer_class.__name__}({'; '.join(about)})"
    assert repr(trainer_class.__new__(trainer_class)).startswith("<")  # before its constructor


def test_parts_add_up():
    model = load("qwen2_5_omni")[0]
    [visual] = [module for name, module in model.named_modules() if name.split(".")[-1] == "visual"]
    visual.requires_grad_(False)
    parts = count_parts(model)
    head = model.lm_head.weight.numel()
    assert list(parts) == ["vision_tower", "audio_tower", "projector", "language_model"]
    assert sum(total for total, _ in parts.values()) == sum(p.numel() for p in model.parameters())
    assert parts["vision_tower"][1] == 0 < parts["audio_tower"][1]
    assert 0 < parts["projector"][1] < parts["projector"][0]  # Qwen-Omni's sounds have one within their encoder
    adapted = count_parts(get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])))
    lora = Counter(language_model=head)
    for name, p in model.named_parameters():
        if "lora_" in name:
            lora["language_model" if "language_model" in name else "audio_tower"] += p.numel()
    assert {name: trained for name, (_, trained) in adapted.items() if trained} == lora
    assert sum(total for total, _ in adapted.values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("family", "row", "expected"),
    [
        ("qwen2_audio", audio(0.5), r"<audio: \d+ tokens, 0\.50 s>"),
        ("qwen2_5_vl", {"images": [image(*size)["image"] for size in ((56, 84), (112, 56))]}, "<image: 6 .*x56>"),
        # Several runs of placeholders for a medium: tiles of an image, times between frames
        ("idefics3", {"images": [image(96, 64)["image"], image(64, 64)["image"]]}, r"<image: \d+ tokens, 96x64>"),
        ("qwen3_vl", video(4, 84, 56), r"<video: \d+ tokens, 4 frames, 84x56>"),
    ],
)
def test_placeholders_of_a_prompt(family, row, expected):
    model, processor = load(family)
    if "audio" in row:
        row = {"audio": {"array": row["audio"], "sampling_rate": RATE}}
    (placed,) = rows_to_messages([{"prompt": [{"role": "user", "content": "What is it?"}], **row}])
    encoded = encode_prompt(placed["prompt"], processor, model)
    placeholders = placeholder_token_ids(model, processor)
    media = media_descriptions(placed["prompt"])
    text = prompt_text(encoded.input_ids.tolist(), processor.tokenizer, placeholders, media)
    assert re.search(expected, text, re.DOTALL), text
    kinds = re.findall(r"<(image|audio|video): (\d+) tokens, ", text)
    assert len(kinds) == sum(map(len, media.values())) and "What is it?" in text
    tokens = processor.tokenizer.convert_ids_to_tokens(sorted(set().union(*placeholders.values())))
    assert not any(token in text for token in tokens if token)


def test_lines_of_metrics():
    logs = {"reward": 0.314, "reward_std": 0.4, "rewards/accuracy_reward/mean": 0.12, "loss": 0.1}
    logs |= {"completions/mean_length": 3.04, "completions/clipped_ratio": 0.8}
    assert metric_values(logs) == {"reward": "0.31 ± 0.40", "accuracy": "12.0 %", "length": "3.0, 80 % clipped"}
    agent = {"tools/call_frequency": 0.75, "tools/failure_frequency": 0.08, "tools/ended_by_length": 0.5}
    assert metric_values(agent) == {"calls": "0.75, 8 % failed", "ended by length": "0.50"}
    broken = {"loss": 0.0, "skipped_updates": 1.0}  # of which `Trainer` left out the losses
    assert metric_values(broken) == {"loss": "nan", "skipped updates": "100.0 %"}
    assert metric_values({"loss": 0.5, "skipped_updates": 0.25}) == {"loss": "0.50", "skipped updates": "25.0 %"}
    agent = {"tools/call_frequency": 0.0, "tools/unparsed_frequency": 0.25, "tools/ended_by_length": 0.0}
    assert metric_values(agent) == {"calls": "0.00", "unparsed calls": "0.25"}
    others = {"reward": 1.0, "reward_std": None, "rewards/brief/mean": 0.001}
    assert metric_values(others) == {"reward": "1.00 ± -"}  # a single function is the reward
    others |= {f"rewards/{name}/mean": value for name, value in {"format_reward": 1.0, "polite": math.nan}.items()}
    shown = {"reward": "1.00 ± -", "brief": "1e-03", "format_reward": "1.00", "polite": "-"}
    assert metric_values(others) == shown
    others |= {"rewards/choice_reward/mean": 0.002, "rewards/choice_reward/std": 0.1}
    assert [*metric_values(others).items()][1:] == [
        ("accuracy", "0.2 %"),
        ("brief", "1e-03"),
        ("format_reward", "1.00"),
    ]
    others = {"rewards/choice_reward/mean": 0.5, "rewards/accuracy_reward/mean": None}
    assert metric_values(others) == {"accuracy": "-", "choice_reward": "50.0 %"}


def test_accuracies_are_in_per_cent():
    """As `evaluate` shows them."""
    pairs = {"loss": 0.7, "rewards/accuracies": 0.75, "rewards/margins": 0.3, "mean_token_accuracy": 0.0}
    assert metric_values(pairs) == {"loss": "0.70", "accuracy": "75.0 %", "margin": "0.30"}
    assert metric_values({"loss": 2.3, "mean_token_accuracy": 0.41}) == {"loss": "2.30", "token accuracy": "41.0 %"}
    held_out = {"eval_accuracy": 0.62, "eval_accuracy_low": 0.58, "eval_accuracy_high": 0.66, "eval_pass@4": 0.8}
    held_out["eval_rewards/accuracy_reward/mean"] = 0.1
    assert evaluation_values(held_out) == ("eval", {"accuracy": "62.0 % (58.0 to 66.0 %)", "pass@4": "80.0 %"})
    named = {"eval_clean_loss": 2.0, "eval_clean_samples_per_second": 1.0, "eval_mean_token_accuracy": 0.5}
    assert evaluation_values(named) == ("eval clean", {"loss": "2.00", "token accuracy": "50.0 %"})


class EvaluatesInSteps(TrainerCallback):
    trainer = None
    fails = False

    def on_step_end(self, args, state, control, **parts):
        self.trainer.evaluate(metric_key_prefix="held_out")
        if self.fails:
            raise OSError("no more")


@pytest.mark.parametrize("fails", [False, True])
def test_evaluations_of_the_last_step_stand_below_its_metrics(fails, tmp_path, capsys):
    callback = EvaluatesInSteps()
    callback.fails = fails
    options = {"max_steps": 1 if fails else 2, "logging_steps": 5, "self_check": False}
    options |= {"per_device_eval_batch_size": 4, "objects": {"eval_dataset": audio_rows(1), "callbacks": [callback]}}
    callback.trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(4), tmp_path, **options)
    with pytest.raises(OSError, match="no more") if fails else nullcontext():
        callback.trainer.train()
    callback.trainer.evaluate()
    lines = re.findall(r"^step (./. \| (?:loss|held_out|eval))", capsys.readouterr().out, re.MULTILINE)
    whole = ["1/2 | held_out", "2/2 | loss", "2/2 | held_out", "2/2 | eval"]
    assert lines == (["1/1 | held_out", "1/1 | eval"] if fails else whole)


def test_evaluations_of_a_callback_stand_below_the_metrics_of_their_step(tmp_path, capsys):
    options = {"max_steps": 4, "logging_steps": 2, "self_check": False}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(4), tmp_path, **options)
    config = EvaluationConfig(max_completion_length=2, batch_size=4)
    trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(1), length_and_sum, config, freq=1))
    trainer.train()
    lines = re.findall(r"^step (./. \| (?:reward|eval))", capsys.readouterr().out, re.MULTILINE)
    logged = ["2/4 | reward", "2/4 | eval", "3/4 | eval", "4/4 | reward", "4/4 | eval"]
    assert lines == ["0/4 | eval", "1/4 | eval", *logged]


@pytest.mark.parametrize(("steps", "expected"), [(2, []), (5, [5]), (6, [5])])
def test_a_run_that_is_shorter_than_its_logging_steps_logs_with_its_totals(steps, expected, tmp_path, capsys):
    options = {"max_steps": steps, "logging_steps": 5, "self_check": False, "eval_on_start": True}
    options |= {"per_device_eval_batch_size": 4, "objects": {"eval_dataset": audio_rows(1)}}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(4), tmp_path, **options)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry and "train_runtime" not in entry]
    assert [entry["step"] for entry in logs] == expected
    assert ("reward" in trainer.state.log_history[-1]) == (not expected or steps > expected[-1])
    assert f"step {expected[0] if expected else steps}/{steps} | reward " in capsys.readouterr().out


@pytest.mark.parametrize("number", [None, 3])
def test_few_completions_are_printed(number, tmp_path, monkeypatch):
    printed = []
    monkeypatch.setattr(media_logs, "print_prompt_completions_sample", lambda *args, **more: printed.append(args[5]))
    options = {"max_steps": 1, "self_check": False, "log_completions": True}
    options |= {} if number is None else {"num_completions_to_print": number}
    make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(4), tmp_path, **options).train()
    assert printed == [number or 4]


# Scripts


def interrupting(completions, trainer_state, **kwargs):
    """Ctrl-C in the second step, or twice in the third."""
    for _ in range({1: 1, 2: 2}.get(trainer_state.global_step, 0)):
        signal.raise_signal(signal.SIGINT)
    return [float(len(each) % 3) for each in completions]


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = {"prompt": "What do you hear?", "solution": "a bird", "completion": "A bird."}
    sounds = [sound_file(audio(0.5, seed=i)["audio"]) for i in range(4)]
    rows = [{**texts, "audio": {"bytes": sound, "path": None}} for sound in sounds]
    Dataset.from_list(rows).to_parquet("data/train.parquet")
    arguments = {"model_name_or_path": str(saved("qwen2_audio")), "dataset_name": "data", "output_dir": "out"}
    arguments |= {"max_steps": 3, "logging_steps": 1, "save_steps": 10, "per_device_train_batch_size": 4}
    return arguments | {"dtype": "float32", "use_cpu": True, "bf16": False, "report_to": "none"}


REWARDED = {"num_generations": 2, "max_completion_length": 4}


def words_of(keys) -> list[str]:
    return [word for name, value in keys.items() for word in (f"--{name}", str(value))]


def start(script, *argv):
    script.main(*parse(script.ARGUMENTS, argv))


def pairs_as_data() -> None:
    rows = Dataset.from_parquet("data/train.parquet").remove_columns(["solution", "completion"])
    rows.map(lambda _: {"chosen": "A bird.", "rejected": "A dog, a dog."}).to_parquet("data/train.parquet")


@pytest.mark.parametrize("script", [grpo, rloo, ppo, sft])
def test_dry_run(script, given, tmp_path, capsys):
    rewarded = {} if script is sft else {**REWARDED, "reward_funcs": "accuracy_reward"}
    options = {**given, **rewarded, "eval_strategy": "steps", "eval_steps": 1, "dataset_test_split": "train"}
    start(script, *words_of(options), "--dry_run", "--log_completions" if script is not sft else "--use_cpu")
    lines = masked(capsys.readouterr().out).splitlines()
    assert any("<audio: # tokens, # s>" in line for line in lines)
    metrics = "loss # | token accuracy # %" if script is sft else "reward # ± # | accuracy # % | length #, # % clipped"
    assert [line for line in lines if line.startswith("step")] == [
        f"step #/# | {metrics} | # s/step | # s left",
        "step #/# | trained in # s",
    ]
    assert lines[-1] == "Dry run: # step of #; nothing was saved."
    assert ("target (# tokens): A bird.<|im_end|>" in lines) == (script is sft)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("script", [dpo, reward])
def test_what_a_run_on_pairs_shows(script, given, capsys):
    pairs_as_data()
    start(script, *words_of(given), "--dry_run")
    lines = masked(capsys.readouterr().out).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("chosen"))
    assert lines[first - 1] == "  <|im_start|>assistant"  # the prompt that both answers follow
    answers = ["chosen (# tokens): A bird.<|im_end|>", "rejected (# tokens): A dog, a dog.<|im_end|>"]
    assert lines[first : first + 2] == answers
    assert "step #/# | loss # | accuracy # % | margin # | # s/step | # s left" in lines


def test_interrupted_run_says_how_to_resume(given, capsys, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    options = {**given, **REWARDED, "reward_funcs": f"{__name__}.interrupting"}
    with warnings.catch_warnings():
        deprecations_are_errors()
        with pytest.raises(SystemExit) as ended:
            start(grpo, *words_of(options))
    assert ended.value.code == 130
    line = capsys.readouterr().out.splitlines()[-1]
    told = "Interrupted after step 2; the last checkpoint is out/checkpoint-{}. Resume with: trl-multimodal-rft grpo "
    prefix = told.format(2)
    assert line == prefix + "--config out/run.yaml --resume_from_checkpoint True"
    Path("out/checkpoint-2").rename("out/checkpoint-1")
    with pytest.raises(SystemExit):  # at once
        start(grpo, *shlex.split(line.removeprefix(prefix)))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(told.format(1))
    Path("out/checkpoint-1").rename("out/checkpoint-2")
    line = line.replace("out/checkpoint-1", "out/checkpoint-2")

    more = ("--reward_funcs", "accuracy_reward", "--max_steps", "4")
    start(grpo, *shlex.split(line.removeprefix(prefix)), *more)
    assert "missing keys" not in caplog.text
    lines = capsys.readouterr().out.splitlines()
    assert "Resumed from out/checkpoint-2, after step 2 of 4." in lines
    assert {line.split(" | ")[0] for line in lines if line.startswith("step")} == {"step 3/4", "step 4/4"}
    asked = "--model_name_or_path out"
    assert lines[-5:-2] == [
        "The model is in out.",
        f"  ask:      trl-multimodal-rft chat {asked}",
        f"  evaluate: trl-multimodal-rft evaluate {asked} --dataset_name path/to/held-out-rows "
        "--reward_funcs accuracy_reward --max_completion_length 4",
    ]
    assert lines[-2].endswith("grpo --config out/run.yaml --resume_from_checkpoint True --max_steps 8")
    assert lines[-1].startswith("  publish:  hf upload USER/out out . --exclude")
    options = yaml.safe_load(open("out/run.yaml"))
    assert "resume" not in options and (options["max_steps"], options["reward_funcs"]) == (3, ["accuracy_reward"])
    assert not Path("out/run-1.yaml").exists()

    card = Path("out/README.md").read_text()
    runs = Path("out/run.yaml").read_bytes()
    assert "columns `audio`" in card
    start(grpo, "--config", "out/run.yaml", "--resume_from_checkpoint", "True")
    assert Path("out/README.md").read_text() == card
    out = capsys.readouterr().out
    assert "Resumed from out/checkpoint-4, after step 4 with no step left to train." in out.splitlines()
    assert "--resume_from_checkpoint True --max_steps 8\n" in out
    start(grpo, *words_of({**options, "reward_funcs": "accuracy_reward", "max_steps": 1, "learning_rate": "0"}))
    assert Path("out/run-1.yaml").read_bytes() == runs and Path("out/README.md").read_text() != card


@pytest.mark.parametrize(
    ("splits", "evaluates", "test_split", "named"),
    [
        (["train"], False, "test", False),
        (["train", "test"], False, "test", True),
        (["train"], True, "train[90%:]", False),
        (["train", "test"], True, "test", True),
    ],
)
def test_rows_of_the_training_are_not_offered_for_evaluation(splits, evaluates, test_split, named, tmp_path):
    for split in splits:
        Dataset.from_dict({"prompt": ["What?"]}).to_parquet(tmp_path / f"{split}.parquet")
    arguments = RunArguments(dataset_name=str(tmp_path), dataset_test_split=test_split)
    assert held_out_rows(arguments, evaluates) == (str(tmp_path) if named else None)
    assert held_out_rows(RunArguments(dataset_name="org/rows"), False) == "org/rows"


@pytest.mark.parametrize(
    ("steps", "resumes"), [([], False), ([7], False), ([2], True), ([1, 3], True), ([1, 7], False)]
)
def test_only_checkpoints_of_the_run_are_offered(steps, resumes, tmp_path):
    """The last checkpoint is beyond the run's last step, 3, if an earlier run wrote it."""
    for step in steps:
        (tmp_path / f"checkpoint-{step}").mkdir()
    arguments = RunArguments()
    arguments.command = "trl-multimodal-rft grpo"
    hint = resume_hint(arguments, str(tmp_path), TrainerState(global_step=3, max_steps=9))
    assert hint.endswith("--resume_from_checkpoint True") == resumes
    assert hint.startswith("Resume with: " if resumes else f"No checkpoint of this run is in {tmp_path} ")


def test_resumed_run_keeps_its_steps_if_its_file_has_them(tmp_path):
    kept = {"max_steps: 3\n": 3, "max_steps: -1": -1, "{max_steps: 9}": 9}
    for text in (None, "", "- a\n", "max_steps: [", "max_steps", "max_steps:", "b: 1", *kept):
        if text is not None:
            (tmp_path / "run.yaml").write_text(text)
        write_run_file(tmp_path, "trl-multimodal-rft grpo", {"max_steps": 8}, resumed=True)
        expected = {} if text in ("max_steps:", "b: 1") else {"max_steps": kept.get(text, 8)}
        assert yaml.safe_load((tmp_path / "run.yaml").read_text()) == expected, text


def test_options_of_earlier_runs_stay(tmp_path):
    for rate in (1, 2, 2, 3):
        write_run_file(tmp_path, "trl-multimodal-rft grpo", {"learning_rate": rate})
    rates = {path.name: yaml.safe_load(path.read_text())["learning_rate"] for path in tmp_path.iterdir()}
    assert rates == {"run-1.yaml": 1, "run-2.yaml": 2, "run.yaml": 3}


def test_run_file_starts_the_same_run(given):
    """Covers values of a config file and of the command line, in the types of either."""
    from_file = {"learning_rate": "1e-5", "reward_funcs": "accuracy_reward", "dtype": "float32", "max_steps": 7}
    from_file |= {"chat_template_kwargs": {"enable_thinking": False}, "env": {"HF_TOKEN": "hf_1", "SHOWN": "yes"}}
    Path("recipe.yaml").write_text(yaml.safe_dump(from_file))
    argv = ["--config", "recipe.yaml", *words_of({**given, **REWARDED}), "--save_strategy", "no"]
    argv += ["--prompt", 'Say: "{solution}" # \\boxed{}\nNow.', "--hub_token", "hf_2", "--reward_weights", "0.5"]
    argv += ["--model_init_kwargs", '{"token": "hf_3", "use_safetensors": true}', "--resume_from_checkpoint", "True"]
    first = parse(grpo.ARGUMENTS, argv)
    launch = {"num_processes": 2, "multi_gpu": True, "mixed_precision": "bf16"}
    write_run_file("out", "trl-multimodal-rft grpo", {**first[0].user_options, "launch": launch})
    text = open("out/run.yaml").read()
    assert text.startswith("# trl-multimodal-rft grpo --config out/run.yaml\nmodel_name_or_path: ")
    assert not re.search("hf_[123]", text) and "SHOWN" in text and "resume" not in text
    keys = yaml.safe_load(text)
    launched = {name: keys.pop(name) for name in ("num_processes", "multi_gpu", "mixed_precision")}
    assert launched == launch
    Path("again.yaml").write_text(yaml.safe_dump(keys))
    again = parse(grpo.ARGUMENTS, ["--config", "again.yaml"])
    changed = {"hub_token", "model_init_kwargs", "resume_from_checkpoint", "user_options"}
    for before, after in zip(first, again, strict=True):
        for each in fields(before):
            if each.name not in changed:
                assert getattr(after, each.name) == getattr(before, each.name), each.name
    assert again[1].model_init_kwargs == {"use_safetensors": True} and again[1].max_steps == 3


def test_printed_commands_of_preferences_work_on_pairs(given, capsys):
    pairs_as_data()
    options = {**given, "max_steps": 1, "output_dir": "out/lauf é-", "system_prompt": "Be brief."}
    with pytest.raises(ValueError, match="no checkpoint in 'out/lauf é-' to resume"):
        start(dpo, *words_of(options), "--dry_run", "--resume_from_checkpoint", "True")
    start(dpo, *words_of(options))
    *_, ask, _, publish = capsys.readouterr().out.splitlines()  # and no evaluation, as pairs have no solutions
    assert shlex.split(ask)[:3] == ["ask:", "trl-multimodal-rft", "chat"]
    assert shlex.split(publish)[:5] == ["publish:", "hf", "upload", "USER/lauf-e", "out/lauf é-"]

    start(reward, *words_of({**options, "output_dir": "judge"}))
    *_, judge, _, _ = capsys.readouterr().out.splitlines()
    _, _, command, *words = shlex.split(judge)
    assert command == "evaluate" and "Be brief." not in words
    words[words.index("path/to/held-out-rows")] = given["dataset_name"]
    start(evaluate, *words)
    assert "accuracy" in capsys.readouterr().out


def test_names_of_repositories_are_valid_and_keep_what_is():
    names = ["out", "qwen2.5-vl_3b", "lauf é", "a..b", "-x-", "x.git.git", "模型", "a - .. b", "x" * 200, "a-.git"]
    for name in map(repository_name, names):
        validate_repo_id(f"USER/{name}")
    assert [*map(repository_name, names[:3])] == [*names[:2], "lauf-e"]


def test_other_display(given, capsys):
    """`--disable_compact_log` gives transformers' output."""
    options = {**given, **REWARDED, "max_steps": 1, "reward_funcs": "accuracy_reward"}
    start(grpo, *words_of(options), "--disable_compact_log")
    shown = capsys.readouterr()
    assert "'rewards/accuracy_reward/mean'" in shown.out and "1/1 [" in shown.err
    assert "step 1/1" not in shown.out and "trains" not in shown.out
