# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs of test_hub.py that publish models and load them again: `helpers/hub_worker.py <folder> <scenario> ...`. The
environment has the address of the Hub. Results of a scenario go to `<folder>/<scenario>.json`.
"""

import contextlib
import copy
import io
import json
import logging
import os
import re
import sys
import traceback
import urllib.request
from pathlib import Path
from unittest.mock import patch

import numpy as np
import PIL.ExifTags
import PIL.Image
import soundfile
from huggingface_hub import HfApi, ModelCard, constants, snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration, TrainerCallback
from transformers.utils.hub import hf_api

from helpers.files import video_file
from helpers.resumed_runs import equal
from helpers.trainer_utils import InjectedOurs, audio_rows, image_rows, load, make_trainer, text_rows
from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.critic import policy_alone


PUSHED = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 1, "hub_always_push": True}


def same(loaded, trained) -> bool:
    """Returns whether two modules have the same weights."""
    return equal(loaded.state_dict(), trained.state_dict())


def media_files(folder: Path) -> None:
    """Writes media for quick starts: stereo at a rate that no model accepts, a rotated image and a video."""
    waveform = np.random.default_rng(0).uniform(-0.1, 0.1, (11025, 2)).astype("float32")
    soundfile.write(folder / "audio.wav", waveform, 22050, subtype="FLOAT")
    pixels = np.random.default_rng(0).integers(0, 255, (84, 56, 3), dtype=np.uint8)
    exif = PIL.Image.Exif()
    exif[PIL.ExifTags.Base.Orientation] = 6
    PIL.Image.fromarray(pixels).save(folder / "image.png", exif=exif)
    frames = [np.random.default_rng(seed).integers(0, 255, (56, 84, 3), dtype=np.uint8) for seed in range(8)]
    (folder / "video.mp4").write_bytes(video_file(frames, codec="mpeg4", rate=2))


def ask(repo: str) -> dict:
    """Runs the quick start of a repository's model card verbatim. Returns the card, and the inputs and the answer."""
    card = ModelCard.load(repo)
    (code,) = re.findall(r"## Quick start\n\n```python\n(.*?)```", card.text, re.DOTALL)
    namespace = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, repo, "exec"), namespace)
    return {
        "data": card.data.to_dict(),
        "text": card.text,
        "code": code,
        "inputs": sorted(namespace["inputs"]),
        "answer": namespace["answer"].tolist(),
        "printed": printed.getvalue(),
    }


def refusal(call) -> dict:
    """Returns type and message of the error of a call. Asserts that there is one."""
    try:
        call()
    except Exception as error:
        return {"type": type(error).__name__, "message": str(error)}
    raise AssertionError("nothing was refused")


@contextlib.contextmanager
def warnings():
    """Collects the package's warnings."""
    records = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    handler.addFilter(lambda record: "no prompt has media" not in record.getMessage())  # the rows are text
    logger = logging.getLogger("trl_multimodal_rft")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def without_token():
    """Returns a context whose environment has no token."""
    return patch.dict(os.environ, {name: os.environ[name] for name in {*os.environ} - {"HF_TOKEN"}}, clear=True)


class Release(TrainerCallback):
    """Callback that unblocks the Hub at the end of training."""

    def on_train_end(self, args, state, control, **kwargs):
        urllib.request.urlopen(urllib.request.Request(f"{os.environ['HF_ENDPOINT']}/release", method="POST"))


# Scenarios


def grpo_audio(folder: Path) -> dict:
    """Publishes a run with everything that could leak: tables with media, TensorBoard files, checkpoints, a token."""
    options = {"log_completions": True, "num_completions_to_print": 0, "report_to": ["tensorboard"], "max_steps": 1}
    options |= {"hub_model_id": "someone/digits", "hub_token": os.environ["HF_TOKEN"], "save_strategy": "steps"}
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen2_audio", audio_rows(8), folder / "out", save_steps=1, **options
    )
    trainer.train()
    with without_token():
        trainer.push_to_hub(dataset_name="someone/spoken", tags="digits")
    model = type(trainer.model).from_pretrained("someone/digits")
    processor = AutoProcessor.from_pretrained("someone/digits")
    local = {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file()}
    return {
        "same": same(model, trainer.model),
        "processor": [type(processor).__name__, type(trainer.processing_class).__name__],
        "vocabulary": processor.tokenizer.get_vocab() == trainer.processing_class.tokenizer.get_vocab(),
        "local": sorted(local),
        **ask("someone/digits"),
    }


def lora_image(folder: Path) -> dict:
    """Publishes an adapter whose base model is on the Hub, too."""
    for part in load("qwen2_5_vl"):
        part.push_to_hub("someone/base")
    objects = {"model": "someone/base", "peft_config": LoraConfig(target_modules=["q_proj"], init_lora_weights=False)}
    options = {**PUSHED, "hub_strategy": "every_save", "hub_model_id": "someone/adapter", "max_steps": 1}
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(8), folder / "out", objects=objects, **options
    )
    trainer.train()
    trainer.push_to_hub()
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained("someone/base")
    loaded = PeftModel.from_pretrained(base, "someone/adapter")
    return {
        "same": equal(get_peft_model_state_dict(loaded), get_peft_model_state_dict(trainer.model)),
        "processor": type(AutoProcessor.from_pretrained("someone/adapter")).__name__,
        **ask("someone/adapter"),
    }


def ppo_image(folder: Path) -> dict:
    """Publishes the last checkpoint at each save, and everything at the end. Compares the models and resumes."""
    common = {"hub_model_id": "someone/ppo", "ema_decay": 0.5, "num_ppo_epochs": 1, "beta": 0.05}
    options = {**PUSHED, **common, "hub_strategy": "checkpoint", "save_total_limit": 1, "max_steps": 2}
    with warnings() as warned:
        trainer = make_trainer(MultimodalPPOTrainer, "qwen2_5_vl", image_rows(16), folder / "out", **options)
        trainer.train()
        trainer.push_to_hub()
    model_class = type(trainer._unwrapped(trainer.model))
    trained = copy.deepcopy(policy_alone(trainer.model).state_dict())
    with trainer.ema_weights():
        averaged = copy.deepcopy(policy_alone(trainer.model).state_dict())

    def loads(expected, **options):
        return equal(model_class.from_pretrained("someone/ppo", **options).state_dict(), expected)

    critic = Critic.from_pretrained("someone/ppo", model_class, subfolder="critic")
    result = {
        "same": loads(trained),
        "critic": same(critic, trainer.critic) and critic.head.weight.abs().sum().item() > 0,
        "average": loads(averaged, subfolder="ema"),
        "moved": not equal(averaged, trained),
        "warned": warned,
        **ask("someone/ppo"),
    }
    # The checkpoint of the first step, before the checkpoint of the second step replaced it
    history = HfApi().list_repo_commits("someone/ppo")
    revision = next(commit.commit_id for commit in history if commit.title.endswith("step 1, checkpoint"))
    downloaded = snapshot_download("someone/ppo", revision=revision, allow_patterns="last-checkpoint/*")
    options |= {"push_to_hub": False, "save_strategy": "no"}
    resumed = make_trainer(MultimodalPPOTrainer, "qwen2_5_vl", image_rows(16), folder / "resumed", **options)
    resumed.train(resume_from_checkpoint=str(Path(downloaded, "last-checkpoint")))
    result["resumed"] = equal(policy_alone(resumed.model).state_dict(), trained) and same(
        resumed.critic, trainer.critic
    )
    result["resumed_steps"] = [entry["step"] for entry in resumed.state.log_history if "reward" in entry]
    return result


def strategies(folder: Path) -> dict:
    """Publishes with every `hub_strategy`, in consecutive steps."""
    result = {}
    for strategy in ("end", "every_save", "all_checkpoints"):
        options = {**PUSHED, "hub_strategy": strategy, "hub_model_id": f"someone/{strategy}", "max_steps": 2}
        trainer = make_trainer(InjectedOurs, "qwen2_5_vl", text_rows(8), folder / strategy, **options)
        trainer.train()
        if strategy != "end":
            published = type(trainer.model).from_pretrained(f"someone/{strategy}")
            result[strategy] = same(published, trainer.model)
    # The first checkpoint is still uploading when the trainer writes the second and the third. The third replaces the
    # second, since the first must stay.
    options = {**PUSHED, "hub_strategy": "all_checkpoints", "hub_always_push": False, "save_total_limit": 1}
    options |= {"hub_model_id": "slow/all_checkpoints", "hub_token": "hf_slow", "max_steps": 3}
    with warnings() as result["warned"]:
        trainer = make_trainer(InjectedOurs, "qwen2_5_vl", text_rows(8), folder / "slow", **options)
        trainer.add_callback(Release())
        trainer.train()
    result["left"] = sorted(path.name for path in (folder / "slow").glob("*checkpoint-*"))
    return result


def refused(folder: Path) -> dict:
    """Tries missing, wrong, revoked and read-only tokens, and an unreachable Hub. `whole`: the local folder loads."""

    def trainer(name, **options):
        options = {"max_steps": 1, **options}
        return make_trainer(InjectedOurs, "qwen2_5_vl", text_rows(8), folder / name, **options)

    def pushed_after_training(name, **options):
        trained = trainer(name, **options)
        trained.train()
        error = refusal(trained.push_to_hub)
        loaded = type(trained.model).from_pretrained(folder / name)
        AutoProcessor.from_pretrained(folder / name)
        whole = same(loaded, trained.model) and "## Quick start" in Path(folder, name, "README.md").read_text()
        return {**error, "whole": whole}

    with without_token():
        result = {"none": refusal(lambda: trainer("none", push_to_hub=True))}
        result["none_after"] = pushed_after_training("none_after", hub_private_repo=True)
    result["wrong"] = refusal(lambda: trainer("wrong", push_to_hub=True, hub_token="hf_wrong"))
    result["reading"] = pushed_after_training("reading", hub_token="hf_read")
    result["foreign"] = pushed_after_training("foreign", hub_model_id="other/model")
    options = {**PUSHED, "hub_strategy": "every_save", "hub_token": "hf_short", "hub_model_id": "short/revoked"}
    options |= {"max_steps": 2}
    with warnings() as warned:
        result["revoked"] = pushed_after_training("revoked", **options)
    result["revoked"]["warned"] = warned

    with patch.object(constants, "HF_HUB_OFFLINE", True):  # the client reads this before every request
        result["offline"] = refusal(lambda: trainer("offline", push_to_hub=True))

    trained = trainer("down_later", push_to_hub=True, hub_model_id="someone/down_later")
    with patch.object(hf_api(), "endpoint", "http://127.0.0.1:9"):
        result["down"] = pushed_after_training("down", hub_model_id="someone/down")
        result["down_before"] = refusal(lambda: trainer("down_before", push_to_hub=True))
        result["down_saving"] = refusal(trained.save_model)
    saved = type(trained.model).from_pretrained(folder / "down_later")
    result["down_saving"]["whole"] = same(saved, trained.model)
    return result


def mixed(folder: Path) -> dict:
    """Publishes a policy of images and audio, and its tables of completions to a separate dataset."""
    from helpers.media_logs_worker import dataset  # it imports modules that the other scenarios don't need

    options = {"hub_model_id": "someone/omni", "max_steps": 1, "log_completions": True, "num_completions_to_print": 0}
    options |= {"log_completions_hub_repo": "someone/omni-logs", "hub_private_repo": True}
    options |= {"per_device_train_batch_size": 16, "shuffle_dataset": False}  # one prompt of each kind
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_omni", dataset(), folder / "out", **options)
    trainer.train()
    trainer.push_to_hub(private=False)
    trainer.commit_scheduler.trigger().result()
    trainer.commit_scheduler.stop()
    return ask("someone/omni")


def main(folder: Path, scenarios: list[str]) -> None:
    os.chdir(folder)
    media_files(folder)
    for name in scenarios:
        try:
            result = globals()[name](folder / name)
        except Exception:
            result = {"error": traceback.format_exc()}
        Path(folder, f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # clearing all modules takes seconds
