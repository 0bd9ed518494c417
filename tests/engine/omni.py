# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The tests' Qwen2.5-Omni as vLLM takes it: the folder of a whole model, whose thinker is trained."""

import json
import shutil
from pathlib import Path

import torch
import transformers as hf
from datasets import Dataset
from helpers.families import image, video
from helpers.trainer_utils import saved, sound
from safetensors.torch import load_file, save_file

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids


def save_omni(folder: Path) -> Path:
    """Writes the thinker among the configurations of a whole model."""
    thinker = saved("qwen2_5_omni")
    shutil.copytree(thinker, folder, ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    weights = load_file(thinker / "model.safetensors")
    save_file({f"thinker.{name}": weight for name, weight in weights.items()}, folder / "model.safetensors")
    config = json.loads((thinker / "config.json").read_text())
    ids = {name: config.get(name) for name in ("eos_token_id", "pad_token_id", "bos_token_id")}
    own = {"architectures": ["Qwen2_5OmniModel"], "dtype": "float32", **ids}
    whole = {**hf.Qwen2_5OmniConfig(thinker_config=config).to_dict(), **own}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def load_omni(folder: Path) -> dict:
    """The arguments `model` and `processing_class` of a trainer."""
    model = hf.Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype="float32")
    return {"model": model, "processing_class": hf.AutoProcessor.from_pretrained(folder)}


def omni_rows() -> Dataset:
    """Four rows: a sound, nothing, two sounds with an image and a video, an image."""
    prompts = ["What do you hear?", "Is there a cat?", "Compare them.", "What is in the image?"]
    media = {
        "audios": [[sound(0.4)], [], [sound(0.3, 1), sound(0.6, 2)], []],
        "images": [[], [], [image(84, 56)["image"]], [image(56, 56, 3)["image"]]],
        "videos": [[], [], [video(4, 56, 56)["video"]], []],
    }
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": each}], "index": i} for i, each in enumerate(prompts)]
    )
    return rows.with_transform(
        lambda batch: {**batch, **{kind: [own[i] for i in batch["index"]] for kind, own in media.items()}}
    )


class Exact(MultimodalGRPOTrainer):
    """
    Remembers each draw: `draws` hold ids of prompt and completion, and how far the log-probabilities of sampling are
    from those of the model's own forward.

    That is told positions, which are the model's own for the prompt: it takes each `<|audio_bos|>` in a completion for
    another sound.
    """

    draws: list[list[tuple[list[int], list[int], float]]]

    def _generate_single_turn(self, *args, **kwargs):
        completions, logps = super()._generate_single_turn(*args, **kwargs)
        model = self._unwrapped(self.model)
        banned = sorted(all_placeholder_ids(model, self.processing_class))
        draw = []
        for prompt, ids, sampled in zip(self._batch.prompts, completions, logps, strict=True):
            ids = torch.tensor(ids)
            sequence = torch.cat([prompt.input_ids, ids])[None]
            after = prompt.position_ids[..., -1:] + 1 + torch.arange(len(ids))
            positions = torch.cat([prompt.position_ids, after], dim=-1)
            fields = {"attention_mask": torch.ones_like(sequence), "position_ids": positions, **prompt.media}
            with torch.no_grad(), self.accelerator.autocast():
                logits = model(sequence.to(model.device), **{k: v.to(model.device) for k, v in fields.items()}).logits
            logits = logits[0, len(prompt) - 1 : -1].float().cpu()
            logits[:, banned] = -torch.inf
            own = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
            draw.append((prompt.input_ids.tolist(), ids.tolist(), (own - torch.tensor(sampled)).abs().max().item()))
        self.draws = [*getattr(self, "draws", []), draw]
        return completions, logps

    @property
    def differences(self) -> list[float]:
        """The largest of each draw."""
        return [max(difference for _, _, difference in draw) for draw in self.draws]
