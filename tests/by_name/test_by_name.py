# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Users name models instead of building them: folders of checkpoints, whose processors encode audio as transformers does.

Tokenizers of checkpoints seldom have a padding side, so none does here.
"""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import transformers as hf
from datasets import Dataset
from helpers.chats import video
from helpers.encoding import assert_same_features
from helpers.families import ALL_FAMILIES, FAMILIES, mel_extractor  # noqa: F401
from helpers.files import write_film
from helpers.marks import by_turns
from helpers.omni import OMNI, save_released
from helpers.trainer_utils import (
    CONFIGS,
    PLAIN,
    TRAINERS,
    InjectedOurs,
    Recorded,
    Recording,
    audio_rows,
    checkpoint,
    image_rows,
    length_and_sum,
    load,
    make_trainer,
    relative_difference,
    run,
    sound,
    text_rows,
    with_media,
)
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalSFTTrainer
from trl_multimodal_rft.data.reading.refs import iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.media import decode_media
from trl_multimodal_rft.encoding.processors import check_processor, load_processor
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids, encode_prompt, processor_outputs
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL
from trl_multimodal_rft.lightrft.trainer.experience_maker import ExperienceConfig, NaiveExperienceMaker
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.critic import policy_alone
from trl_multimodal_rft.models.pretrained import load_model, load_trained, read_config
from trl_multimodal_rft.rewards import RewardModel, accuracy_reward


pytestmark = pytest.mark.gate


FOLDERS = tempfile.TemporaryDirectory()
AUDIO = "qwen2_audio"
IMAGE = "qwen2_5_vl"
STEP = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1, "max_completion_length": 4}
POLICIES = [TRAINERS[kind] for kind in ("grpo", "rloo", "ppo")]


def plain(folder) -> hf.ProcessorMixin:
    return hf.AutoProcessor.from_pretrained(folder)


def rows(family: str, n: int = 4):
    media = {"audio": [sound(0.3 + 0.2 * (i % 3), seed=i) for i in range(n)]}
    return {
        AUDIO: lambda: audio_rows(n),
        IMAGE: lambda: image_rows(n),
        OMNI: lambda: with_media(image_rows(n), "audio", media["audio"]),
    }[family]()


def assert_saved_as_it_was(folder, source) -> None:
    """Asserts that the processor in a folder equals the checkpoint's."""
    with tempfile.TemporaryDirectory() as expected:
        plain(source).save_pretrained(expected)
        files = [path.name for path in Path(expected).iterdir()]
        assert {"processor_config.json", "tokenizer_config.json"} <= set(files)
        for name in files:
            assert Path(folder, name).read_bytes() == Path(expected, name).read_bytes(), name
    for name in ("processor_config.json", "tokenizer_config.json"):
        before, after = (json.loads(Path(each, name).read_text()) for each in (source, folder))
        for part in (None, *(key for key, value in before.items() if isinstance(value, dict))):
            a, b = (each if part is None else each[part] for each in (before, after))
            assert a.get("padding_side", "right") == b.get("padding_side", "right"), (name, part)


def assert_heard(prompts, samples, folder, model) -> None:
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = encode_prompt(prompt, plain(folder), model)
        assert torch.equal(sample.input_ids, expected.input_ids)
        assert sample.media.keys() == expected.media.keys() and sample.media
        for name, value in sample.media.items():
            assert torch.equal(value, expected.media[name]), name


def remembered(monkeypatch) -> list:
    """Records the prompts encoded from here on, with their inputs."""
    seen = []

    def remember(prompt, *args, **kwargs):
        seen.append((prompt, encode_prompt(prompt, *args, **kwargs)))
        return seen[-1][1]

    monkeypatch.setattr("trl_multimodal_rft.encoding.prompt_encoder.encode_prompt", remember)
    return seen


# Entry points


@pytest.mark.parametrize(("trainer_class", "family"), by_turns(POLICIES, [OMNI, AUDIO, IMAGE]))
def test_a_step_by_name(trainer_class, family, tmp_path):
    folder = checkpoint(family)
    objects = {"model": folder}
    if trainer_class is MultimodalPPOTrainer:
        objects["value_model"] = folder
    kind = type("Hearing", (Recording, trainer_class), {})
    trainer = make_trainer(kind, family, rows(family), tmp_path, objects=objects, **STEP)
    trainer.train()
    assert_heard(
        trainer.draws[-1].batch.source.messages,
        trainer.draws[-1].batch.prompts,
        folder,
        trainer._unwrapped(trainer.model),
    )
    trainer.save_model(tmp_path)
    assert_saved_as_it_was(tmp_path, folder)


def test_sampling_ignores_what_a_checkpoint_recommends(tmp_path, caplog):
    """`generate` fills gaps of a given config from `generation_config.json`."""
    recommended = {"min_p": 0.9, "no_repeat_ngram_size": 1, "typical_p": 0.3, "num_return_sequences": 2}
    recommended |= {"min_new_tokens": 3, "num_beams": 2, "bad_words_ids": [[i] for i in range(40, 60)]}
    recommended |= {
        "repetition_penalty": 3.0,
        "cache_implementation": "static",
        "do_sample": True,
        "_from_model_config": True,
    }
    released = Path(shutil.copytree(checkpoint(IMAGE), tmp_path / "released"))
    path = released / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **recommended}))
    runs = []
    for folder in (checkpoint(IMAGE), str(released)):
        caplog.clear()
        args = CONFIGS["grpo"](str(tmp_path), **STEP, use_cpu=True, bf16=False, report_to="none")
        run = MultimodalGRPOTrainer(folder, length_and_sum, args, rows(IMAGE))
        run.train()
        runs.append(run)
        warned = [record.message for record in caplog.records if "generation config recommends" in record.message]
    assert len(warned) == 1 and runs[0].checks.self_check.changed == runs[1].checks.self_check.changed < 0.1
    # TRL's `repetition_penalty` of 1.0 is the trainer's default
    unnamed = {"repetition_penalty", "do_sample", "_from_model_config"}
    assert all((f"`{name}=" in warned[0]) == (name not in unnamed) for name in recommended), warned
    a, b = (run._buffered_inputs[0].completion_ids for run in runs)
    assert torch.equal(a, b)
    assert_equal_weights(runs[1].model, runs[0].model)
    runs[1].save_model(str(tmp_path / "saved"))
    kept = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert recommended.items() <= kept.items()


@pytest.mark.parametrize("family", [AUDIO, IMAGE, OMNI])
def test_evaluation_by_name(family, monkeypatch):
    folder = checkpoint(family)
    seen = remembered(monkeypatch)
    model, processor = load_trained(folder, dtype="float32")
    dataset = rows(family).add_column("solution", ["a bird"] * 4)
    evaluate(model, processor, dataset, accuracy_reward, EvaluationConfig(max_completion_length=2))
    assert_heard(*zip(*seen, strict=True), folder, model)
    seen_folder = tempfile.mkdtemp(dir=FOLDERS.name)
    processor.save_pretrained(seen_folder)
    assert_saved_as_it_was(seen_folder, folder)


def judge_class(family: str) -> type:
    """Returns a sequence classifier of a family; transformers has none for audio."""
    if family == "gemma3":
        return hf.Gemma3ForSequenceClassification
    policy = type(load(family)[0])
    parent = next(each for each in policy.__mro__ if each.__name__.endswith("PreTrainedModel"))
    names = {"config_class": policy.config_class, "input_modalities": policy.input_modalities}
    return type("Judge", (GenericForSequenceClassification, parent), names)


@pytest.mark.parametrize(("family", "policy"), [(AUDIO, AUDIO), ("gemma3", IMAGE), (OMNI, OMNI)])
def test_reward_models_by_name(family, policy, tmp_path, monkeypatch):
    folder = tmp_path / "judge"
    shutil.copytree(checkpoint(family), folder)
    judges = judge_class(family)
    if family == OMNI and Version(hf.__version__) < Version("5.21"):
        pytest.skip("its thinker has no backbone of its own before transformers 5.21")
    if family != "gemma3":
        mapping = hf.AutoModelForSequenceClassification._model_mapping
        monkeypatch.setattr(mapping, "_extra_content", {judges.config_class: judges})
    config = hf.AutoConfig.from_pretrained(folder, num_labels=1)
    torch.manual_seed(0)
    judge = judges(config).eval()
    with torch.no_grad():
        for parameter in judge.parameters():
            if parameter.ndim >= 2 and parameter.abs().max() < 0.5:
                parameter.mul_(6)
    judge.save_pretrained(folder)
    by_name, by_instance = (
        _rewards(policy, each, tmp_path) for each in (str(folder), RewardModel(judge, plain(folder)))
    )
    assert torch.equal(by_name, by_instance) and by_name.std() > 0.01


def _rewards(policy: str, reward, folder) -> torch.Tensor:
    trainer = make_trainer(Recorded, policy, rows(policy), folder, reward=reward, **STEP)
    trainer.train()
    return trainer.draws[-1].rewards


@pytest.mark.parametrize(("family", "cls"), [(AUDIO, ActorAL), (IMAGE, ActorVL), (OMNI, ActorOmni)])
def test_actors_by_name(family, cls, tmp_path, monkeypatch):
    folder = checkpoint(family)
    kind = type("Hearing", (Recording, MultimodalGRPOTrainer), {})
    actor = cls(folder, bf16=False)
    trainer = make_trainer(kind, family, rows(family), tmp_path, objects={"model": actor}, **STEP)
    trainer.train()
    assert_heard(trainer.draws[-1].batch.source.messages, trainer.draws[-1].batch.prompts, folder, actor.base_model)
    trainer.save_model(tmp_path)
    assert_saved_as_it_was(tmp_path, folder)

    seen = remembered(monkeypatch)
    processor = load_processor(folder)
    critic = Critic.from_pretrained(folder, type(actor.base_model))
    settings = ExperienceConfig("gae", n_samples_per_prompt=2, micro_rollout_batch_size=4, progress=False)
    maker = NaiveExperienceMaker(
        *(actor, critic, None, None, processor.tokenizer, 512, None, settings),
        reward_fn=length_and_sum,
        processor=processor,
    )
    assert len(maker.make_experience_list(list(rows(family, 2)), max_new_tokens=3)) == 1
    assert_heard(*zip(*seen, strict=True), folder, actor.base_model)


def test_smolvlm_as_it_is_released(tmp_path):
    """Its video settings are among those for images, and its template's call samples frames by them."""
    folder = tmp_path / "smolvlm"
    shutil.copytree(checkpoint("smolvlm"), folder)
    path = folder / "processor_config.json"
    settings = json.loads(path.read_text())
    images = settings["image_processor"]
    video_sampling = {"fps": 1, "max_frames": 3, "video_size": images["size"]}
    path.write_text(json.dumps({name: settings[name] for name in ("image_seq_len", "processor_class")}))
    legacy = {**images, "processor_class": "SmolVLMProcessor", "video_sampling": video_sampling}
    (folder / "preprocessor_config.json").write_text(json.dumps(legacy))
    processor = plain(folder)
    assert (processor.video_processor.num_frames, processor.video_processor.fps) == (3, 1)

    films = [write_film(tmp_path / f"{i}.mp4", 60 + 10 * i) for i in range(4)]
    prompts = [[{"role": "user", "content": f"Is there a dog? {i}"}] for i in range(4)]
    table = Dataset.from_dict({"prompt": prompts, "video": films})
    kind = type("Hearing", (Recording, MultimodalGRPOTrainer), {})
    trainer = make_trainer(kind, None, table, tmp_path, objects={"model": str(folder)}, **STEP)
    trainer.train()
    heard = trainer.draws[-1].batch
    for prompt, seen in zip(heard.source.messages, heard.prompts, strict=True):
        [[film, words]] = [message["content"] for message in prompt]
        content = [{"type": "video", "path": film["video"].source}, words]
        expected = processor.apply_chat_template(
            [[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        assert_same_features(seen, expected)
        assert seen.media["pixel_values"].shape[1] == 3
    frames = {"prompt": prompts[0], "video": video(4, 84, 56)["video"]}
    assert trainer.prompts.encode(rows_to_messages([frames])[0]["prompt"], 0).media["pixel_values"].shape[1] == 4


# A processor saved with the wrong side


@pytest.mark.parametrize("family", [AUDIO, OMNI, "gemma3n", "gemma4", "phi4_multimodal", "granite_speech", "voxtral"])
@pytest.mark.usefixtures("mel_extractor")
def test_saved_with_the_wrong_side(family, tmp_path):
    folder = checkpoint(family)
    hf.AutoProcessor.from_pretrained(folder, padding_side="left").save_pretrained(tmp_path)
    part = "audio_processor" if family in ("phi4_multimodal", "granite_speech") else "feature_extractor"
    remedy = rf"pads audio on the left.*delete `padding_side` of `{part}` in its `processor_config.json`"
    with pytest.raises(ValueError, match=remedy):
        load_processor(tmp_path)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    del settings[part]["padding_side"]
    path.write_text(json.dumps(settings))
    assert load_processor(tmp_path).to_dict()[part] == plain(folder).to_dict()[part]


def test_doors_refuse_the_wrong_side(tmp_path):
    processor = hf.AutoProcessor.from_pretrained(checkpoint(AUDIO), padding_side="left")
    wrong = tmp_path / "wrong"
    processor.save_pretrained(wrong)
    model = load(AUDIO)[0]
    model.save_pretrained(wrong)
    actor = Actor(model, bf16=False)
    settings = ExperienceConfig()
    doors = [
        lambda: evaluate(model, processor, rows(AUDIO), accuracy_reward),
        lambda: RewardModel(model, processor),
        lambda: load_trained(str(wrong)),
        lambda: NaiveExperienceMaker(
            *(actor, None, None, None, processor.tokenizer, 8, None, settings),
            reward_fn=length_and_sum,
            processor=processor,
        ),
    ]
    for trainer in POLICIES:
        for objects in ({"model": model, "processing_class": processor}, {"model": str(wrong)}):
            doors.append(
                functools.partial(make_trainer, trainer, AUDIO, rows(AUDIO), tmp_path, objects=objects, **STEP)
            )
    for door in doors:
        with pytest.raises(ValueError, match="encoders would hear the padding and miss the sound"):
            door()


def test_an_extractor_may_have_a_side_of_its_own():
    class FromTheLeft(hf.WhisperFeatureExtractor):
        def __init__(self, **settings):
            super().__init__(**{"padding_side": "left", **settings})

    processor = plain(checkpoint(AUDIO))
    settings = processor.feature_extractor.to_dict()
    del settings["padding_side"]
    processor.feature_extractor = FromTheLeft(**settings)
    check_processor(processor)
    processor.feature_extractor.padding_side = "right"
    with pytest.raises(ValueError, match="pads audio on the right, but FromTheLeft by default on the left"):
        check_processor(processor)


# Tokenizers with any side


@pytest.mark.parametrize("trainer_class", POLICIES)
def test_the_side_of_a_given_tokenizer_does_not_matter(trainer_class, tmp_path):
    def train(side, bare):
        model, processor = load(AUDIO)
        processor.tokenizer.padding_side = side
        given = processor.tokenizer if bare else processor
        result = run(
            trainer_class,
            AUDIO,
            text_rows(4) if bare else audio_rows(4),
            objects={"model": model, "processing_class": given},
            **STEP,
        )
        assert result.trainer.processing_class is given and processor.tokenizer.padding_side == side
        return result

    for bare in (False, True):
        left = train("left", bare)
        right = train("right", bare)
        assert max(value.abs().max() for value in left.update.values()) > 0
        assert relative_difference(left.update, right.update) == 0


# Released omni models


@functools.cache
def whole_omni(family: str) -> tuple[str, hf.PreTrainedModel]:
    """Returns the folder of an omni model as released, and its thinker."""
    folder = Path(FOLDERS.name, f"whole-{family}")
    return str(folder), save_released(family, checkpoint(family), folder)


def assert_equal_weights(model, expected) -> None:
    assert type(model) is type(expected)
    weights = model.state_dict()
    others = expected.state_dict()
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.parametrize(("trainer_class", "family"), by_turns(POLICIES, ["qwen3_omni_moe", OMNI]))
def test_a_released_omni_model_trains_as_its_thinker(trainer_class, family, tmp_path):
    folder, thinker = whole_omni(family)
    is_ppo = trainer_class is MultimodalPPOTrainer
    objects = {"model": folder, **({"value_model": folder} if is_ppo else {})}
    trainer = make_trainer(trainer_class, family, rows(OMNI), tmp_path, objects=objects, beta=0.1, **STEP)
    assert_equal_weights(policy_alone(trainer.model), thinker)
    assert_equal_weights(trainer.ref_model, thinker)
    if is_ppo:
        expected = thinker.model.state_dict()
        assert all(torch.equal(v, expected[n]) for n, v in trainer.critic.model.model.state_dict().items())
    trainer.train()
    trainer.save_model(tmp_path)
    again, info = type(thinker).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert_equal_weights(again, policy_alone(trainer.model))
    assert any(not torch.equal(a, b) for a, b in zip(again.parameters(), thinker.parameters(), strict=True))
    assert_saved_as_it_was(tmp_path, folder)


def test_head_of_an_omni_reference_is_not_cast(tmp_path):
    options = {"objects": {"model": whole_omni(OMNI)[0]}, "beta": 0.1, "cast_lm_head_to_fp32": True}
    with pytest.raises(ValueError, match="`cast_lm_head_to_fp32` needs a reference that TRL loads"):
        make_trainer(MultimodalGRPOTrainer, OMNI, rows(OMNI), tmp_path, **options, **STEP)


@pytest.mark.parametrize("family", [OMNI, "qwen3_omni_moe"])
def test_a_released_omni_model_is_its_thinker_elsewhere(family):
    folder, thinker = whole_omni(family)
    model, processor = load_trained(folder, dtype="float32")
    assert_equal_weights(model, thinker)
    assert type(processor) is type(FAMILIES[family].build()[1])
    assert_equal_weights(ActorOmni(folder, bf16=False).base_model, thinker)
    critic = Critic.from_pretrained(folder, type(thinker)).model.base_model
    thinker = copy.deepcopy(thinker)
    thinker.set_output_embeddings(nn.Identity())
    assert_equal_weights(critic, thinker.base_model)


def test_a_family_that_transformers_lacks_is_named_with_the_version_that_has_it(tmp_path):
    config = {"model_type": "seer9", "architectures": ["Seer9ForConditionalGeneration"]}
    remedy = '; it was saved with 5.99.0: run `pip install "transformers>=5.99.0"`'
    for written, end in ({}, "."), ({"transformers_version": "5.99.0"}, remedy):
        tmp_path.joinpath("config.json").write_text(json.dumps(config | written))
        message = rf"is a 'seer9' model, which transformers {hf.__version__} doesn't have{end}"
        with pytest.raises(ImportError, match=message):
            MultimodalGRPOTrainer(str(tmp_path), length_and_sum, train_dataset=image_rows(2))
        with pytest.raises(ImportError, match=message):
            read_config(str(tmp_path))


# A folder with a model and its own adapter

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def with_own_adapter(folder, family: str = "granite_speech"):
    """Saves a model and an adapter of its that names another base, and returns the folder and the processor."""
    model, processor = ALL_FAMILIES[family].build()
    if family == "granite_speech":
        model.config.has_lora_adapter = True
    else:
        processor.save_pretrained(folder)
    model.save_pretrained(folder)
    adapted = get_peft_model(copy.deepcopy(model), LORA)
    adapted.peft_config["default"].base_model_name_or_path = "released/language-model"
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return str(folder), processor


def frozen_models(folder, family: str = "granite_speech") -> dict:
    name, processor = with_own_adapter(folder / "both", family)
    files = folder / "adapter"
    files.mkdir()
    for path in Path(name).glob("adapter_*"):
        shutil.copy(path, files)
    model = ALL_FAMILIES[family].build()[0]
    models = {
        "'.*both'; move the files `adapter_.*is_trainable=True": load_model(name, dtype=torch.float32),
        "load its adapter .* is_trainable=True": PeftModel.from_pretrained(copy.deepcopy(model), files),
        "call `model.requires_grad_": model.requires_grad_(False),
    }
    return models, processor, files


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalSFTTrainer])
def test_models_of_which_nothing_trains(trainer_class, tmp_path):
    """Transformers freezes a model with the adapter in its folder."""
    models, processor, files = frozen_models(tmp_path)
    for remedy, model in models.items():
        objects = {"model": model, "processing_class": processor}
        with pytest.raises(
            ValueError, match=f"GraniteSpeech.* has no weights to train, as all are frozen: .*{remedy}"
        ):
            if trainer_class is MultimodalSFTTrainer:
                MultimodalSFTTrainer(args=CONFIGS["sft"](str(tmp_path), **PLAIN), train_dataset=SAID, **objects)
            else:
                make_trainer(trainer_class, "", audio_rows(2), tmp_path, objects=objects, beta=0)


SAID = Dataset.from_list(
    [{"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "No"}]}]
)


def test_an_adapter_apart_from_its_model_trains(tmp_path):
    models, processor, files = frozen_models(tmp_path)
    model = next(iter(models.values()))
    model = PeftModel.from_pretrained(ALL_FAMILIES["granite_speech"].build()[0], files, is_trainable=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {"model": model, "processing_class": processor}
    make_trainer(InjectedOurs, "", audio_rows(), tmp_path, objects=objects, self_check=True, max_steps=1).train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)


def answer(model, processor, prompt) -> str:
    refs = list(iter_refs(prompt))
    inputs = processor_outputs(prompt, refs, processor, *decode_media(refs, processor, "raise"))
    ids = model.generate(
        **inputs,
        attention_mask=torch.ones_like(inputs["input_ids"]),
        max_new_tokens=6,
        do_sample=False,
        suppress_tokens=sorted(all_placeholder_ids(model, processor)),
    )
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def test_a_folder_with_a_model_and_its_adapter_answers_as_transformers_has_it(tmp_path):
    """The `generate` of Granite Speech uses the adapter for prompts with sounds alone."""
    folder, processor = with_own_adapter(tmp_path)
    asked = [row for pair in zip(audio_rows(3), text_rows(3), strict=True) for row in pair]
    config = EvaluationConfig(max_completion_length=6, batch_size=4)
    model = load_model(folder, dtype=torch.float32)
    answers = [row["completions"][0] for row in evaluate(model, processor, asked, length_and_sum, config).rows]
    prompts = [row["prompt"] for row in rows_to_messages(asked)]
    own = hf.GraniteSpeechForConditionalGeneration.from_pretrained(folder)
    base = ALL_FAMILIES["granite_speech"].build()[0]
    expected, without = ([answer(each.eval(), processor, prompt) for prompt in prompts] for each in (own, base))
    assert answers == expected
    assert [a == b for a, b in zip(answers, without, strict=True)] == [False, True] * 3


def test_commands_load_a_folder_with_a_model_and_its_adapter(tmp_path):
    folder, processor = with_own_adapter(tmp_path / "both", AUDIO)
    model, loaded = load_trained(folder, dtype=torch.float32)
    expected = hf.Qwen2AudioForConditionalGeneration.from_pretrained(folder)
    inputs = processor(text=["Is there a bird?"], return_tensors="pt")
    assert type(loaded) is type(processor) and type(model) is type(expected)
    assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    assert not torch.allclose(load(AUDIO)[0](**inputs).logits, expected(**inputs).logits, atol=1e-3)
    (tmp_path / "both" / "model.safetensors").unlink()  # an adapter beside a config is no model
    with pytest.raises(FileNotFoundError, match="no weights .* it holds an adapter"):
        load_model(folder)


@pytest.mark.parametrize("texts", [True, False], ids=["sounds and text", "sounds"])
def test_an_adapter_that_generation_switches_off_is_found(texts, tmp_path):
    """Granite Speech samples completions of text without its adapter, which scores would have."""
    folder, processor = with_own_adapter(tmp_path / "both")
    model = load_model(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    dataset = with_media(text_rows(2), "audio", [sound(0.5), None if texts else sound(0.7)])
    objects = {"model": model, "processing_class": processor}
    options = {"max_steps": 1, "self_check": True}
    trainer = make_trainer(MultimodalGRPOTrainer, "", dataset, tmp_path / "out", objects=objects, **options)
    if texts:
        with pytest.raises(RuntimeError, match="granite_speech can't be trained exactly: .* differ by .* from the mo"):
            trainer.train()
        return
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} >= moved
