# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward models with media: against plain forward passes of single rows, and in the trainers."""

import functools
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers as hf
from helpers.chats import RATE, audio, chat, image, text
from helpers.chats import assistant as answer
from helpers.families import ALL_FAMILIES, FAMILIES, every_family, instantiate
from helpers.marks import slow_but
from helpers.tools import Scripted, shows, talking
from helpers.trainer_utils import (
    Injected,
    InjectedOurs,
    InjectedTRL,
    Recorded,
    Recording,
    assert_equal,
    audio_rows,
    forget_isolation,
    image_rows,
    images_rows,
    length_and_sum,
    load,
    make_trainer,
    run,
    sound,
    text_rows,
    with_media,
)
from torch import nn
from trainers.preference.test_dpo import conversations

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.features import restore_media
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.rewards import RewardModel, model


FOLDERS = tempfile.TemporaryDirectory()
OPTIONS = {"max_steps": 1, "logging_steps": 1}
OF_GROUPS = ["qwen2_5_vl", "qwen2_audio", "qwen2_5_omni", "qwen3_5", "granite_speech_scaled", "phi4_multimodal"]


@functools.cache
def saved(model_class: type) -> Path:
    """Returns a folder with a sequence classifier of Gemma 3 and its processor."""
    model, processor = FAMILIES["gemma3"].build()
    config = model.config if model_class is hf.Gemma3ForSequenceClassification else model.config.text_config
    config.num_labels = 1
    classifier, processor = instantiate(model_class, config, processor)
    folder = Path(FOLDERS.name, f"my-{model_class.__name__}")
    classifier.save_pretrained(folder)
    (processor if model_class is hf.Gemma3ForSequenceClassification else processor.tokenizer).save_pretrained(folder)
    if model_class is not hf.Gemma3ForSequenceClassification:
        (folder / "chat_template.jinja").write_text(processor.chat_template)
    return folder


def classifier(model_class: type = hf.Gemma3ForSequenceClassification):
    """Returns a fresh `(model, processor)`."""
    folder = saved(model_class)
    return model_class.from_pretrained(folder).eval(), hf.AutoProcessor.from_pretrained(folder)


def alone(model, processor, messages) -> float:
    """Returns the score at the last token of one row without padding, from the parts of a sequence classifier."""
    inputs = processor.apply_chat_template([messages], tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.base_model(**inputs).last_hidden_state
        return (model.score.weight @ hidden[0, -1]).item()


class Head(nn.Module):
    """A module outside transformers that wraps one of transformers: scores `(B,)` at the last token of the mask."""

    def __init__(self, model: hf.PreTrainedModel):
        super().__init__()
        self.backbone = model.base_model
        torch.manual_seed(0)
        self.score = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)

    def forward(self, input_ids, attention_mask, **media):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask, **media).last_hidden_state
        last = (attention_mask * torch.arange(attention_mask.size(1))).argmax(1)
        return self.score(hidden[torch.arange(len(hidden)), last])[:, 0]


PROMPTS = [
    chat(image(56, 84, seed=1), text("What is in the image?")),
    chat(text("Is there a bird? Is there a cat? Is there a dog?")),
    chat(image(28, 28, seed=2), text("Describe."), image(56, 28, seed=3)),
    chat(text("Look: "), image(84, 84, seed=4)),
]
COMPLETIONS = [answer("a bird " * (4 - i)) for i in range(4)]


def each_alone(model, processor, prompts=PROMPTS, completions=COMPLETIONS):
    scores = [alone(model, processor, p + c) for p, c in zip(prompts, completions, strict=True)]
    return pytest.approx(scores, abs=1e-5)


def test_scores_are_those_of_single_rows():
    model, processor = classifier()
    expected = each_alone(model, processor)
    for batch_size in (1, 3, 8):
        reward = RewardModel(model, processor, batch_size=batch_size)
        scores = reward(prompts=PROMPTS, completions=COMPLETIONS, label=[0] * 4)
        assert scores == expected
    assert max(scores) - min(scores) > 0.1
    # The processor pads
    model.config.get_text_config().pad_token_id = None
    processor.tokenizer.pad_token = None
    assert processor.tokenizer.eos_token_id != 0
    assert RewardModel(model, processor)(PROMPTS, COMPLETIONS) == expected


def test_media_and_completion_change_the_score():
    reward = RewardModel(*classifier())
    before = reward(PROMPTS, COMPLETIONS)
    other_image = [chat(image(56, 84, seed=9), text("What is in the image?")), *PROMPTS[1:]]
    other_words = [*COMPLETIONS[:3], answer("a cat")]
    moved = torch.tensor([reward(other_image, COMPLETIONS), reward(PROMPTS, other_words)]) - torch.tensor(before)
    assert (moved.abs() > 1e-3).tolist() == [[True, False, False, False], [False, False, False, True]]


def test_completions_of_a_prompt_share_its_media(monkeypatch):
    decoded = []

    def load(refs, *args):
        decoded.append(len(refs))
        return original(refs, *args)

    original = model.decode_media
    monkeypatch.setattr(model, "decode_media", load)
    classifier_, processor = classifier()
    prompts = [PROMPTS[0]] * 3 + [PROMPTS[2]] * 2
    completions = [answer(words) for words in ("a", "a bird", "a cat", "a", "a bird")]
    scores = RewardModel(classifier_, processor)(prompts, completions)
    assert decoded == [1, 2]
    assert scores == each_alone(classifier_, processor, prompts, completions)


def test_every_form_of_a_row_scores_alike():
    reward = RewardModel(*classifier())
    picture = image(56, 84, seed=1)["image"]
    expected = reward(PROMPTS[:2], COMPLETIONS[:2])
    questions = ["What is in the image?", "Is there a bird? Is there a cat? Is there a dog?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    placeholders = [chat({"type": "image"}, text(questions[0])), messages[1]]
    for prompts in (messages, placeholders):
        assert reward(prompts, COMPLETIONS[:2], image=[picture, None]) == expected
    assert reward(questions, ["a bird " * 4, "a bird " * 3], images=[[picture], None]) == expected
    # The trainers' format: the medium in the message, and its column
    assert reward(PROMPTS[:2], COMPLETIONS[:2], image=[picture, None]) == expected


def test_plain_text_is_joined():
    model, processor = classifier()
    prompts = ["Is there a bird? ", "Is there? "]
    completions = ["a bird", "The answer is red green blue"]
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = processor.tokenizer(prompt + completion, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            expected.append(model(ids).logits.item())
    for processing_class in (processor, processor.tokenizer):
        assert RewardModel(model, processing_class)(prompts, completions) == pytest.approx(expected, abs=1e-5)


def test_written_placeholders_are_text():
    reward = RewardModel(*classifier())
    written = "a <start_of_image> bird <image_soft_token>"
    read = "a < start_of_image> bird < image_soft_token>"
    for prompt in PROMPTS[:2]:
        assert reward([prompt], [answer(written)]) == reward([prompt], [answer(read)])
    pictured = [chat(image(28, 28), text(words)) for words in (written, read)]
    assert reward(pictured[:1], [answer("a")]) == reward(pictured[1:], [answer("a")])
    assert reward([written], [written]) == reward([read], [read])


def test_no_dropout_no_gradient_and_any_dtype():
    model, processor = classifier()
    reward = RewardModel(model, processor)
    assert reward.__name__ == "my-Gemma3ForSequenceClassification"
    expected = reward(PROMPTS, COMPLETIONS)
    model.config.text_config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.train()
    assert reward(PROMPTS, COMPLETIONS) == expected
    modes = []
    model.score.register_forward_hook(lambda module, args, output: modes.append(output.requires_grad))
    reward(PROMPTS, COMPLETIONS)
    assert modes == [False]
    model.to(torch.bfloat16)
    assert reward(PROMPTS, COMPLETIONS) == pytest.approx(expected, abs=0.1)


# Voxtral's template ends with the user
@pytest.mark.parametrize("name", every_family(sorted(FAMILIES.keys() - {"voxtral"})))
def test_rows_of_every_family_are_independent(name):
    model, processor = FAMILIES[name].build()
    if model.base_model is model:
        pytest.skip("it has no backbone of its own before transformers 5.21")
    reward = RewardModel(Head(model), processor)
    prompts = FAMILIES[name].prompts()
    for block in [block for prompt in prompts for block in prompt[0]["content"]]:
        if block["type"] == "audio":
            block["audio"] = {"array": block["audio"], "sampling_rate": RATE}
    completions = [answer("a bird " * (1 + i % 4)) for i in range(len(prompts))]
    together = reward(prompts, completions)
    one_by_one = [reward([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert together == pytest.approx(one_by_one, abs=1e-5)
    assert max(together) - min(together) > 0.05


def test_clips_that_would_mix_are_run_apart(monkeypatch):
    base, processor = FAMILIES["granite_speech"].build()
    reward = RewardModel(Head(base), processor)
    clips = [
        {"array": audio(seconds, seed=i)["audio"], "sampling_rate": RATE} for i, seconds in enumerate((0.3, 0.9, 0.3))
    ]
    prompts = [chat({"type": "audio", "audio": clip}, text("Who?")) for clip in clips]
    completions = [answer("a bird")] * 3
    expected = [reward([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    sizes = []
    reward.model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    assert reward(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert sizes == [2, 1]
    forget_isolation(monkeypatch)
    assert reward(prompts, completions) != pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("family", slow_but(OF_GROUPS, "qwen2_5_vl", "qwen2_audio"))
def test_completions_of_a_prompt_share_its_forward(family):
    model, processor = ALL_FAMILIES[family].build()
    # Texts end with the padding token, whose score isn't read
    processor.chat_template = processor.chat_template.replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}")
    processor.tokenizer.pad_token = processor.tokenizer.eos_token
    torch.manual_seed(1)
    reward = RewardModel(as_reward_model(model), processor, batch_size=6)
    rows = conversations(family)[2]
    words = ("a bird", "a bird is a cat", "no")
    prompts = [rows[i]["prompt"] for i, _ in product(range(len(rows)), range(3))] + [rows[0]["prompt"]] * 2
    completions = [answer(words[i % 3]) for i in range(len(prompts) - 2)] + [answer("no")] * 2
    lengths = []
    reward.model.get_decoder().register_forward_hook(
        lambda module, args, output: lengths.append(output[0][..., 0].numel())
    )
    together = reward(prompts, completions)
    n_tokens = sum(lengths)
    n_forwards = len(lengths)
    alone = [reward([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert together == pytest.approx(alone, abs=1e-5) and max(alone) - min(alone) > 0.05
    assert n_tokens < sum(lengths[n_forwards:]) / 1.5 and len(lengths) == n_forwards + len(prompts)
    reward._group_model = None
    assert reward(prompts, completions) == pytest.approx(alone, abs=1e-5)


# Refusals


def test_media_that_cannot_be_taken_raise():
    clip = chat({"type": "audio", "audio": sound(0.3)}, text("Who?"))
    model, processor = classifier()
    name = "my-Gemma3ForSequenceClassification"
    (qwen, qwen_processor) = FAMILIES["qwen2_audio"].build()
    reader, _ = classifier(hf.Gemma3TextForSequenceClassification)
    blind = classifier()[1]
    blind.chat_template = processor.chat_template.replace("<start_of_image>", "")
    for reward, prompts, error in (
        ((model, processor), [PROMPTS[1], clip], f"row 1, .*'{name}' with its Gemma3Processor takes no audio; use a"),
        ((model, processor.tokenizer), PROMPTS, "row 0, .*takes no image; use a model that does, with its processor"),
        # Its keyword arguments would accept the pixels, and ignore them
        ((reader, processor), PROMPTS, "row 0, .*'my-Gemma3TextForSequenceClassification' .*takes no image"),
        ((Head(qwen), qwen_processor), PROMPTS, "row 0, .*Qwen2AudioProcessor takes no image"),
        ((model, blind), PROMPTS, "row 0, column 'prompt.0..content.0.': .*writes one placeholder per medium"),
    ):
        with pytest.raises(MediaError, match=error):
            RewardModel(*reward)(prompts, COMPLETIONS[: len(prompts)])


def test_more_than_one_label_raises():
    folder = saved(hf.Gemma3ForSequenceClassification)
    options = {"num_labels": 2, "ignore_mismatched_sizes": True}
    model = hf.Gemma3ForSequenceClassification.from_pretrained(folder, **options)
    with pytest.raises(ValueError, match=r"shape \(4, 2\) for 4 rows; .*num_labels=1"):
        RewardModel(model, classifier()[1])(PROMPTS, COMPLETIONS)


# In the trainers


def given(family: str, reward_processing_class) -> dict:
    policy, processor = load(family)
    return {"model": policy, "processing_class": processor, "reward_processing_classes": reward_processing_class}


def expected_rewards(trainer, rows: list[dict], batch: dict, end: str = "") -> list[float]:
    """Computes the scores of a trainer's completions with plain forward passes and a template with this end."""
    model, processor = classifier()
    processor.chat_template += end
    scores = []
    for row, ids, mask in zip(rows, batch["completion_ids"], batch["completion_mask"], strict=True):
        words = trainer.processing_class.tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
        pictures = [row["image"]] if row.get("image") else row.get("images") or []
        blocks = [*({"type": "image", "image": picture} for picture in pictures), text(row["prompt"][0]["content"])]
        scores.append(alone(model, processor, chat(*blocks) + answer(words)))
    return scores


@pytest.mark.parametrize(
    ("given", "rows"), [("instance", image_rows), ("instance and processor", text_rows), ("path", images_rows)]
)
def test_a_policy_is_rewarded_by_a_model_of_another_family(given, rows):
    reward = saved(hf.Gemma3ForSequenceClassification)
    objects = {}
    if given != "path":
        reward, processor = classifier()
        objects = {"reward_processing_classes": [None, processor]} if "processor" in given else {}
    policy, processing_class = load("qwen2_5_vl")
    objects |= {"model": policy, "processing_class": processing_class}
    reward = [length_and_sum, reward if given != "path" else str(reward)]
    result = run(Recorded, "qwen2_5_vl", rows(), reward=reward, objects=objects, **OPTIONS)
    (draw,) = result.trainer.draws
    expected = expected_rewards(result.trainer, draw.rows, draw.batch)
    assert draw.rewards[:, 1].tolist() == pytest.approx(expected, abs=1e-5)
    assert draw.rewards[:, 1].std() > 0.1
    assert result.trainer.reward_func_names == ["length_and_sum", "my-Gemma3ForSequenceClassification"]
    logged = result.history[0]["rewards/my-Gemma3ForSequenceClassification/mean"]
    assert logged == pytest.approx(sum(expected) / 8, abs=1e-5)


def test_template_arguments_reach_the_reward_model():
    reward, processor = classifier()
    objects = given("qwen2_5_vl", processor)
    for each in (processor, objects["processing_class"]):
        each.chat_template += "{{ hint }}"
    options = {**OPTIONS, "chat_template_kwargs": {"hint": "Is there a cat?"}}
    trainer = run(Recorded, "qwen2_5_vl", image_rows(), reward=reward, objects=objects, **options).trainer
    (draw,) = trainer.draws
    expected = expected_rewards(trainer, draw.rows, draw.batch, "Is there a cat?")
    assert draw.rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert draw.rewards[:, 0].tolist() != pytest.approx(expected_rewards(trainer, draw.rows, draw.batch), abs=1e-2)


class RecordedRLOO(Recording, Injected, MultimodalRLOOTrainer):
    pass


def test_rloo_is_rewarded_by_a_model():
    path = str(saved(hf.Gemma3ForSequenceClassification))
    trainer = run(RecordedRLOO, "qwen2_5_vl", image_rows(), reward=path, **OPTIONS).trainer
    model, processor = classifier()
    (draw,) = trainer.draws
    expected = [
        alone(model, processor, chat({"type": "image", "image": restore_media(ref)}, *blocks) + completion)
        for prompt, completion in zip(draw.batch.source.messages, draw.batch.source.completions, strict=True)
        for ref, *blocks in [(prompt[0]["content"][0]["image"], *prompt[0]["content"][1:])]
    ]
    assert draw.rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_text_is_rewarded_as_in_trl():
    """A text-only classifier uses TRL's path, and a model with a processor uses this package's."""
    for model_class in (hf.Gemma3TextForSequenceClassification, hf.Gemma3ForSequenceClassification):
        path = str(saved(model_class))
        theirs, ours = (run(t, "qwen2_5_vl", text_rows(), reward=path) for t in (InjectedTRL, InjectedOurs))
        assert_equal(theirs, ours)
        assert isinstance(ours.trainer.reward_funcs[0], nn.Module) == ("Text" in model_class.__name__)


@pytest.mark.parametrize("model_class", [hf.Gemma3TextForSequenceClassification, hf.Gemma3ForSequenceClassification])
def test_a_reader_of_text_refuses_media(model_class):
    rows = with_media(text_rows(8), "image", [None] * 4 + [image(56, 56)["image"]] * 4)
    reward, processor = classifier(model_class)
    tokenizer = processor.tokenizer if isinstance(processor, hf.ProcessorMixin) else processor
    message = rf"row [0-7], column 'image': the reward model 'my-{model_class.__name__}' .*`reward_processing_classes`"
    with pytest.raises(MediaError, match=message):
        run(InjectedOurs, "qwen2_5_vl", rows, reward=reward, objects=given("qwen2_5_vl", tokenizer), **OPTIONS)


class Talking(Scripted):
    turns = (0, 1)  # every other completion gets an image


class RecordedGRPO(Recording, MultimodalGRPOTrainer):
    pass


def test_a_reader_of_text_scores_what_was_said_after_tools_showed_images(caplog):
    model_class = hf.Gemma3TextForSequenceClassification
    reader, tokenizer = classifier(model_class)
    objects = {**talking("qwen2_5_vl"), "tools": [shows([image(56, 84), {"type": "text", "text": "Look."}])]}
    options = {"objects": objects, "sampler": Talking, "max_completion_length": 200, "max_steps": 2}
    result = run(RecordedGRPO, "qwen2_5_vl", text_rows(), reward=str(saved(model_class)), **options)
    assert caplog.text.count("reads text alone and doesn't get the media that tools returned") == 1
    draw = result.trainer.draws[0]
    for i, (row, reward) in enumerate(zip(draw.rows, draw.rewards[:, 0].tolist(), strict=True)):
        call = {"type": "function", "function": {"name": "show", "arguments": {"number": 0}}}
        shown = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "show", "content": "<image>Look."},
        ]
        completion = [*shown[: 2 * (i % 2)], *answer(f"The answer is {i} cat")]
        assert reward == pytest.approx(alone(reader, tokenizer, [*row["prompt"], *completion]), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_vl"])
def test_what_can_not_be_a_reward_raises(family, tmp_path):
    name = "my-Gemma3ForSequenceClassification"
    (reward, processor) = classifier()
    rows = audio_rows()
    error = MediaError
    message = f"row 0, .*'{name}' .*takes no audio"
    if family == "qwen2_5_vl":
        rows = image_rows()
        error = ValueError
        message = f"'{name}' returned nan for row [0-7];"
        with torch.no_grad():
            reward.score.weight.fill_(torch.nan)
    with pytest.raises(error, match=message):
        run(InjectedOurs, family, rows, reward=reward, objects=given(family, processor), **OPTIONS)
    with pytest.raises(ValueError, match="must match the number of reward functions"):
        make_trainer(InjectedOurs, family, rows, tmp_path, reward=reward, objects=given(family, [processor, None]))
