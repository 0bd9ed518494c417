# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From prompts to experience: samples, scores, rewards, and the advantages of a whole rollout."""

import base64
import functools
import io
import logging
import math
import re
from dataclasses import replace
from itertools import product

import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from helpers.chats import image, text, video
from helpers.chats import user as question
from helpers.families import FAMILIES
from helpers.reference import Injected, media_of
from helpers.trainer_utils import audio_rows, load, moved, sound, text_rows, video_rows
from helpers.trainer_utils import length_and_sum as by_length
from PIL import ImageChops
from torch import nn
from torch.testing import assert_close

from trl_multimodal_rft.algorithms.advantages import gae
from trl_multimodal_rft.algorithms.kl import FixedKLController
from trl_multimodal_rft.algorithms.returns import token_rewards
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL
from trl_multimodal_rft.lightrft.trainer import row_checks
from trl_multimodal_rft.lightrft.trainer.experience import Experience, ExperienceVL, Samples
from trl_multimodal_rft.lightrft.trainer.experience_maker import ExperienceConfig, NaiveExperienceMaker
from trl_multimodal_rft.lightrft.trainer.experience_metrics import rollout_logs
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import split_experience_batch


pytestmark = pytest.mark.gate


EXACT = {"rtol": 0, "atol": 0}
TEXT = ["Is there a bird?", "Is there a cat, a dog or a bird?", "The answer is red green"]
GROUP_ESTIMATORS = ["group_norm", "rloo", "reinforce_baseline", "cpgd", "dr_grpo"]
ESTIMATORS = [*GROUP_ESTIMATORS, "reinforce", "gae"]


# Models


@functools.cache
def actor(family="qwen2_5_vl", cls=ActorVL, packing=True, **options) -> Actor:
    return cls(load(family)[0], bf16=False, packing_samples=packing, **options)


@functools.cache
def reference(family="qwen2_5_vl", cls=ActorVL, **options) -> Actor:
    """Returns a policy close to that of [`actor`]."""
    return cls(moved(family)["model"], bf16=False, **options)


@functools.cache
def processor(family="qwen2_5_vl"):
    return load(family)[1]


class Critic(nn.Module):
    """Computes the value of a state from its last token; wrong in training mode."""

    def __init__(self, vocabulary=500):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 1)

    def forward(self, sequences, num_actions, attention_mask, **media):
        self.media = media
        values = self.head(self.dropout(self.embedding(sequences) * attention_mask[..., None])).squeeze(-1)
        return values[:, -num_actions - 1 : -1]


class LastToken(nn.Module):
    """A critic without a backbone, which computes the value of a state from its last token."""

    def forward(self, sequences, num_actions, attention_mask, **media):
        return (sequences % 11 * attention_mask / 10.0)[:, -num_actions - 1 : -1]


class RewardModel(nn.Module):
    """Judges the mean of the tokens; wrong in training mode."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(500, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, sequences, attention_mask, **media):
        self.media = media
        scores = self.embedding(sequences)[..., 0] * attention_mask
        return self.dropout(scores.sum(1) / attention_mask.sum(1))


@torch.no_grad()
def judged(each, *models):
    """Returns the scores of these reward models on an experience."""
    return [model.eval()(each.sequences, each.attention_mask) for model in models]


# Makers and rewards


def make(
    cls=NaiveExperienceMaker,
    family="qwen2_5_vl",
    *,
    policy=None,
    critic=None,
    reward_model=None,
    ref=None,
    beta=0.0,
    prompt_max_len=512,
    arguments=None,
    words=None,
    **config,
):
    """Returns a maker of groups of 3 in micro-batches of 4, with rewards by length unless `arguments` set others."""
    config = {"n_samples_per_prompt": 3, "micro_rollout_batch_size": 4, "progress": False, **config}
    if critic is None and config.get("advantage_estimator") == "gae":
        critic = Critic()
    arguments = {"reward_fn": by_length} if arguments is None and reward_model is None else arguments or {}
    words = words or processor(family)
    return cls(
        actor(family) if policy is None else policy,
        *(critic, reward_model, ref, words.tokenizer, prompt_max_len, FixedKLController(beta)),
        ExperienceConfig(**config),
        processor=words,
        **arguments,
    )


def made(prompts=TEXT, *, max_new_tokens=4, gamma=1.0, **options):
    maker = make(Injected, **options)
    return maker.make_experience_list(prompts, max_new_tokens=max_new_tokens, gamma=gamma)


def given(rewards):
    """Returns a reward function that yields these rewards in order."""
    rewards = iter(rewards)
    return {"reward_fn": lambda completions, **kwargs: [next(rewards) for _ in completions]}


def flat(experiences, name):
    """Returns a field or an entry of `info` for each sample; for fields per action, those in the mask."""
    rows = []
    for experience in experiences:
        if name in experience.info:
            rows += list(experience.info[name])
        else:
            value = getattr(experience, name)
            rows += [row[keep] for row, keep in zip(value, experience.action_mask, strict=True)]
    return rows


# Prompts

OMNI_ROWS = [
    {"prompt": question("What do you hear?"), "audio": sound(0.4, seed=1)},
    {
        "prompt": question("Compare them."),
        "image": image(84, 56, seed=2)["image"],
        "video": video(4, 56, 56, seed=4)["video"],
        "audios": [sound(0.7, seed=3), sound(0.3, seed=5)],
    },
    {"prompt": question("Is there a bird?")},
]
IMAGE_ROWS = [
    {"prompt": "Is there a bird?", "images": None},
    {"prompt": "What is in the image?", "images": [image(84, 56, seed=1)["image"]]},
    {"prompt": "Compare them.", "images": [image(56, 56, seed=2)["image"], image(112, 84, seed=3)["image"]]},
]

CASES = {
    "strings": ("qwen2_5_vl", ActorVL, TEXT),
    "messages": ("qwen2_5_vl", ActorVL, [row["prompt"] for row in text_rows(3)]),
    "images": ("qwen2_5_vl", ActorVL, IMAGE_ROWS),
    "videos": ("qwen2_5_vl", ActorVL, list(video_rows(3))),
    "audio": ("qwen2_audio", ActorAL, list(audio_rows(3))),
    "omni": ("qwen2_5_omni", ActorOmni, OMNI_ROWS),
}


@functools.cache
def encoded(case: str):
    """Returns ids and media of a case's prompts from the encoder."""
    family, cls, prompts = CASES[case]
    words = processor(family)
    model = actor(family, cls).base_model
    if case == "strings":
        return [(words.tokenizer(prompt, return_tensors="pt")["input_ids"][0], {}) for prompt in prompts]
    rows = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
    samples = [encode_prompt(row["prompt"], words, model) for row in rows_to_messages(rows)]
    return [(sample.input_ids, sample.media) for sample in samples]


def of_groups(case: str):
    """Repeats the value for each sample."""
    return [prompt for prompt, _ in product(encoded(case), range(3))]


# The pipeline


@functools.cache
def rollout(case: str, packing: bool):
    """A sampled rollout with all features."""
    family, cls, prompts = CASES[case]
    maker = make(
        family=family,
        policy=actor(family, cls, packing, temperature=0.5),
        critic=Critic(),
        ref=reference(family, cls, temperature=0.5),
        beta=0.1,
        advantage_estimator="gae",
    )
    torch.manual_seed(1)
    return maker, maker.make_experience_list(prompts, max_new_tokens=6, eos_token_id=list(range(50, 110)))


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_the_models(case):
    both = [rollout(case, packing) for packing in (True, False)]
    for maker, experiences in both:
        maker.critic.eval()
        policies = {"action_log_probs": maker.actor, "base_action_log_probs": maker.initial_model}
        for each in experiences:
            mask = each.action_mask
            inputs = (each.sequences, mask.size(1), each.attention_mask)
            media = media_of(each)
            with torch.no_grad():
                for name, policy in policies.items():
                    expected = torch.where(mask, policy(*inputs, **media), 0)
                    assert_close(getattr(each, name), expected, rtol=1e-4, atol=2e-5)
                assert_close(each.values, torch.where(mask, maker.critic(*inputs, **media), 0))
            difference = each.action_log_probs - each.base_action_log_probs
            assert (difference[mask].abs() > 1e-4).any()
            assert each.kl is None
            assert_close(each.info["kl"], difference.sum(1) / mask.sum(1))
            names = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"]
            assert all(getattr(each, name).shape == mask.shape for name in names)
            assert all(getattr(each, name).dtype == torch.float32 for name in names)
            assert not any(getattr(each, name).requires_grad for name in names)
        maker.critic.train()
    for packed, padded in zip(both[0][1], both[1][1], strict=True):
        assert_close(packed.sequences, padded.sequences, **EXACT)
        assert_close(packed.advantages, padded.advantages, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("case", CASES)
def test_sequences_are_padded_prompts_and_responses(case):
    maker, experiences = rollout(case, True)
    prompts = [ids for ids, _ in of_groups(case)]
    assert [len(each.sequences) for each in experiences] == [4, 4, 1]
    eos_ids = set(range(50, 110))
    ended = 0
    cut = 0
    for each in experiences:
        rows, width = each.action_mask.shape
        start = each.sequences.size(1) - width
        assert start == max(len(prompt) for prompt in prompts[:rows])
        assert (each.sequences.dtype, each.attention_mask.dtype) == (torch.long, torch.long)
        assert each.attention_mask.shape == each.sequences.shape
        assert_close(each.attention_mask[:, start:].bool(), each.action_mask, **EXACT)
        for i in range(rows):
            prompt = prompts.pop(0)
            assert each.attention_mask[i, :start].tolist() == [0] * (start - len(prompt)) + [1] * len(prompt)
            assert each.sequences[i, start - len(prompt) : start].tolist() == prompt.tolist()
            response = each.sequences[i, start:].tolist()
            n = int(each.action_mask[i].sum())
            assert each.action_mask[i].tolist() == [True] * n + [False] * (width - n)
            assert not eos_ids & set(response[: n - 1])
            assert bool(each.info["truncated"][i]) == (response[n - 1] not in eos_ids)
            ended = ended + (response[n - 1] in eos_ids and n < 6)
            cut = cut + (n == 6)
        outside = each.sequences[each.attention_mask == 0]
        assert (outside == maker.tokenizer.pad_token_id).all()
    assert prompts == [] and ended > 0 and cut > 0


@pytest.mark.parametrize("case", CASES)
def test_info(case):
    _, experiences = rollout(case, True)
    for each in experiences:
        info = each.info
        width = each.action_mask.size(1)
        assert set(info) == {"reward", "kl", "response_length", "total_length", "return", "truncated"}
        assert_close(info["response_length"], each.action_mask.sum(1).float())
        assert_close(info["total_length"], each.attention_mask.sum(1).float())
        responses = [
            ids[keep].tolist() for ids, keep in zip(each.sequences[:, -width:], each.action_mask, strict=True)
        ]
        assert info["reward"].tolist() == torch.tensor(by_length(responses)).tolist()
        penalty = 0.1 * torch.where(each.action_mask, each.action_log_probs - each.base_action_log_probs, 0).sum(1)
        assert_close(info["return"], info["reward"] - penalty)


SOUND = {"input_features": "audio_values", "feature_attention_mask": "audio_attention_mask"}


@pytest.mark.parametrize("case", CASES)
def test_media_of_each_sample(case):
    _, experiences = rollout(case, True)
    items = [item for each in experiences for item in split_experience_batch(each)]
    for item, (_, media) in zip(items, of_groups(case), strict=True):
        own = media_of(item)
        media = {SOUND.get(name, name): value for name, value in media.items()}
        assert own.keys() == media.keys()
        for name, value in media.items():
            # The encoder pads audio frames to the longest clip
            inside = own[name][tuple(map(slice, value.shape))]
            assert_close(inside.to(value.dtype), value, **EXACT)
            assert own[name].count_nonzero() == value.count_nonzero()
    with_media = [any(media for _, media in of_groups(case)[start : start + 4]) for start in (0, 4, 8)]
    assert [type(each) is ExperienceVL for each in experiences] == with_media


def test_images_of_each_sample():
    _, experiences = rollout("images", True)
    first, second, third = (each.raw_images for each in experiences)
    assert first[:3] == [None] * 3
    for found, row in ((first[3], 1), (second[0], 1), (second[2], 2), (third[0], 2)):
        expected = IMAGE_ROWS[row]["images"]
        assert len(found) == len(expected)
        assert all(ImageChops.difference(a, b).getbbox() is None for a, b in zip(found, expected, strict=True))
    assert {each.raw_images for each in rollout("videos", True)[1]} == {None}


@pytest.mark.parametrize("case", ["images", "videos", "audio", "omni"])
def test_critics_and_reward_models_get_media_by_the_names_of_the_model(case):
    family, cls, prompts = CASES[case]
    models = Critic(), RewardModel()
    options = {"critic": models[0], "reward_model": models[1], "advantage_estimator": "gae"}
    made(prompts, family=family, policy=actor(family, cls), micro_rollout_batch_size=9, **options)
    expected = [media for _, media in of_groups(case)]
    for model in models:
        assert set(model.media) == {name for media in expected for name in media}
        for name, value in model.media.items():
            assert len(value) == sum(len(media.get(name, ())) for media in expected)


def test_families_whose_media_must_not_be_padded():
    """The encoder has no mask, so a clip is encoded alone or with others of its length. The order stays."""
    rows = [
        {"prompt": question("What do you hear?"), "audio": sound(0.3, seed=1)},
        {"prompt": question("Is there a cat?"), "audio": sound(0.9, seed=2)},
        {"prompt": question("Is there a dog?"), "audio": sound(0.3, seed=3)},
        {"prompt": question("Is there a bird?")},
    ]
    model, words = FAMILIES["granite_speech"].build()
    policy = ActorAL(model, bf16=False)
    maker = make(policy=policy, words=words, n_samples_per_prompt=2, micro_rollout_batch_size=8)
    (samples,) = maker.generate_samples(rows, max_new_tokens=4, do_sample=False)
    experience = maker.make_experience(samples)
    for i, prompt in enumerate(samples.prompted.prompts):
        ids = prompt.input_ids[None]
        alone, mask, _ = policy.generate(ids, **prompt.media, max_new_tokens=4, do_sample=False)
        assert alone[0].tolist() == samples.sequences[i][samples.attention_mask[i].bool()].tolist()
        with torch.no_grad():
            expected = policy(alone, alone.size(1) - ids.size(1), mask, **prompt.media)
        assert_close(experience.action_log_probs[i][experience.action_mask[i]], expected[0], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("packing", [True, False])
def test_entropies_where_the_actor_filters_tokens(packing):
    policy = actor(packing=packing, high_entropy_token_ratio=0.2)
    for each in made(IMAGE_ROWS, policy=policy, max_new_tokens=5):
        inputs = (each.sequences, each.action_mask.size(1), each.attention_mask)
        with torch.no_grad():
            _, output = policy(*inputs, return_output=True, **media_of(each))
        expected = torch.where(each.action_mask, output["action_entropy"], 0)
        assert_close(each.action_entropy, expected, rtol=1e-4, atol=2e-5)
    # Handmade samples
    maker = make(Injected, policy=policy, micro_rollout_batch_size=9)
    (samples,) = maker.generate_samples(TEXT, max_new_tokens=4)
    expected = maker.make_experience(samples)
    samples.prompted = None
    assert_close(maker.make_experience(samples).action_entropy, expected.action_entropy, rtol=1e-4, atol=2e-5)


def test_policies_sample_and_score_without_dropout():
    """Their parts stay in the mode that they have, for example of a frozen encoder."""
    policy = fresh()
    for layer in policy.base_model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.5
    results = []
    for training in (False, True):
        policy.train(training)
        policy.base_model.model.visual.train(not training)
        modes = [module.training for module in policy.modules()]
        torch.manual_seed(0)
        (each,) = make(policy=policy, micro_rollout_batch_size=9).make_experience_list(TEXT, max_new_tokens=6)
        assert [module.training for module in policy.modules()] == modes
        results.append(each)
    assert_close(results[1].sequences, results[0].sequences, **EXACT)
    assert_close(results[1].action_log_probs, results[0].action_log_probs, **EXACT)


# Sampling


def fresh() -> ActorVL:
    """Returns a policy whose weights and generation config a test may change."""
    return ActorVL(load("qwen2_5_vl")[0], bf16=False)


def test_placeholders_are_never_sampled():
    policy = fresh()
    model = policy.base_model
    special = [processor().image_token_id, processor().video_token_id]
    with torch.no_grad():
        # Whatever the state, the model would write one of the two
        direction = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 100
        model.lm_head.weight[special[0]] = direction
        model.lm_head.weight[special[1]] = -direction
    ids = torch.tensor([processor().tokenizer(TEXT[0])["input_ids"]])
    assert model.generate(ids, max_new_tokens=4, do_sample=False)[0, -1].item() in special
    for prompts in (TEXT, IMAGE_ROWS):
        for each in make(policy=policy).make_experience_list(prompts, max_new_tokens=4):
            assert not torch.isin(each.sequences[:, -each.action_mask.size(1) :], torch.tensor(special)).any()


def test_sampling_is_that_of_the_policy_whatever_the_checkpoint_recommends(caplog):
    """Options of the checkpoint's generation config would sample from another policy than the scored one."""
    policy = fresh()
    maker = make(policy=policy, n_samples_per_prompt=8, micro_rollout_batch_size=8)

    def sample(**options):
        torch.manual_seed(0)
        (samples,) = maker.generate_samples(TEXT[:1], max_new_tokens=8, **options)
        return samples.sequences

    plain = sample()
    own = policy.base_model.generation_config
    own.update(top_p=0.001, top_k=1, temperature=0.01, repetition_penalty=0.05)
    own.update(min_p=0.99, no_repeat_ngram_size=1, epsilon_cutoff=0.9)
    assert_close(sample(), plain, **EXACT)
    assert policy.base_model.generation_config is own
    # Unless the caller sets them, with a warning
    assert len(sample(top_p=0.001, repetition_penalty=1.0).unique(dim=0)) == 1
    assert len(plain.unique(dim=0)) > 4
    caplog.clear()
    sample(temperature=0.5, top_k=3)
    assert "temperature" in caplog.text and "top_k" in caplog.text


def test_engines_completions_end_where_the_engine_ended_them():
    """A completion that an engine stopped early has no action on padding, where that is the end of text."""
    maker = make()
    end = maker.tokenizer.eos_token_id
    maker.sample_with_engine = lambda prompts, config: [[5], [5, end], [5, 6, 7]]
    [samples] = maker.generate_samples(["How many?"], max_new_tokens=3, pad_token_id=end)
    assert samples.action_mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert samples.prompted.source.ended == [True, True, False]


def test_group_shares_one_encoded_prompt():
    samples = make(Injected).generate_samples(IMAGE_ROWS, max_new_tokens=3)
    prompts = [prompt for each in samples for prompt in each.prompted.prompts]
    assert [prompts.index(prompt) for prompt in prompts] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
    assert [len(each.prompts) for each in samples] == [4, 4, 1]
    assert all(type(each) is Samples for each in samples)
    assert samples[0].labels is samples[0].packed_seq_lens is None
    # One prompt need not be a list
    (a,) = made(TEXT[0])
    (b,) = made(TEXT[:1])
    assert_close(a.sequences, b.sequences, **EXACT)


@pytest.mark.parametrize(
    ("prompts", "options", "error"),
    [
        *[(TEXT, {name: 2}, f"`{name}` is no option") for name in ("max_new_token", "num_return_sequences", "gama")],
        ([TEXT[0], "What is in <|image_pad|>?"], {}, "Prompt 1 is text with placeholders"),
        ([question(TEXT[0]), question([{"type": "image"}])], {}, "row 1, .*the placeholder has no image"),
        ([{"prompt": question("Is there?"), "image": "nowhere.png"}], {}, "row 0, column 'image': no such file"),
        (
            [{**IMAGE_ROWS[2], "prompt": "Is <|image_pad|>?"}],
            {},
            r"row 0, column 'images\[0\]': .* 2 images for 1 '<.im",
        ),
    ],
)
def test_errors_of_prompts_and_options(prompts, options, error):
    with pytest.raises((ValueError, MediaError), match=error):
        make().make_experience_list(prompts, max_new_tokens=3, **options)


def test_long_prompts():
    """Messages raise an error, text is cut where the tokenizer truncates, and audio may be cut."""
    lengths = [len(ids) for ids, _ in encoded("images")]
    assert lengths[2] == max(lengths)
    make(Injected, prompt_max_len=lengths[2]).generate_samples(IMAGE_ROWS, max_new_tokens=3)
    with pytest.raises(ValueError, match=rf"Prompt 2 has {lengths[2]} tokens, .*\({lengths[2] - 1}\)"):
        make(prompt_max_len=lengths[2] - 1).generate_samples(IMAGE_ROWS, max_new_tokens=3)
    words = load("qwen2_5_vl")[1]
    ids = words.tokenizer(TEXT[1])["input_ids"]
    assert len(ids) > 4
    for side, kept in (("left", ids[-4:]), ("right", ids[:4])):
        words.tokenizer.truncation_side = side
        (samples,) = make(Injected, prompt_max_len=4, words=words).generate_samples(TEXT[1:2], max_new_tokens=3)
        assert samples.sequences[0, :4].tolist() == kept
    rows = [{"prompt": question("What do you hear?"), "audio": sound(1.4, seed=1)}]
    family = {"family": "qwen2_audio", "policy": actor("qwen2_audio", ActorAL)}
    with pytest.raises(MediaError, match="row 0, column 'audio': .*1.40 s"):
        make(Injected, **family).generate_samples(rows, max_new_tokens=2)
    (cut,) = make(Injected, **family, audio_overlong="truncate").generate_samples(rows, max_new_tokens=2)
    assert cut.prompted.prompts[0].media["feature_attention_mask"].sum() == 100


@pytest.mark.parametrize("case", ["messages", "images", "audio"])
def test_packed_samples_are_those_of_padded_ones(case):
    maker, _ = rollout(case, False)
    samples = maker.generate_samples(CASES[case][2], max_new_tokens=6)[0]
    is_token = samples.attention_mask.bool()
    packed = replace(
        samples,
        sequences=samples.sequences[is_token][None],
        attention_mask=torch.ones(1, int(is_token.sum())),
        action_mask=None,
        num_actions=samples.action_mask.sum(1),
        packed_seq_lens=is_token.sum(1),
    )
    if case != "messages":  # the ids alone have no media
        for each in (samples, packed):
            with pytest.raises(ValueError, match=r"^Sample \d has placeholders of media.*; pass the `prompted`"):
                maker.make_experience(replace(each, prompted=None))
    a = maker.make_experience(samples)
    b = maker.make_experience(packed)
    assert type(b) is type(a) and media_of(b).keys() == media_of(a).keys()
    for name, values in media_of(a).items():
        assert_close(values, media_of(b)[name], **EXACT)
    assert b.info.pop("num_actions") == a.info.pop("num_actions")
    for name in ("sequences", "attention_mask", "action_mask", "action_log_probs", "values", "kl"):
        assert_close(getattr(a, name), getattr(b, name), **EXACT)
    assert_close(a.info, b.info, **EXACT)


def test_errors_of_packed_samples():
    lengths = {"response_length": torch.ones(2), "total_length": torch.ones(2), "prompts": ["a", "b"]}
    fields = {"sequences": torch.arange(6)[None], "attention_mask": torch.ones(1, 6), "action_mask": None, **lengths}
    numbers = {"num_actions": [2, 1], "packed_seq_lens": [4, 2]}
    padded = Samples(**fields, **numbers).padded(9)
    assert padded.sequences.tolist() == [[0, 1, 2, 3], [9, 4, 5, 9]]
    assert padded.action_mask.tolist() == [[True, True], [True, False]]
    assert padded.attention_mask.tolist() == [[1, 1, 1, 1], [0, 1, 1, 0]] and padded.num_actions == 2
    masked = Samples(**{**fields, "action_mask": torch.tensor([[0, 1], [1, 1]])}, **numbers).padded(9)
    assert masked.action_mask.tolist() == [[False, True], [True, False]]
    two_pads = Samples(**fields, num_actions=2, packed_seq_lens=[4], pad_len=2).padded(9)
    assert two_pads.sequences.tolist() == [[0, 1, 2, 3]]
    hidden = {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]])}
    for changes, error in (
        ({"packed_seq_lens": [4, 3]}, "add up to 7, but the sequences have the shape"),
        ({"num_actions": [2]}, "There are 1 `num_actions` for 2 packed samples"),
        ({"num_actions": [2, 2]}, r"`num_actions` of sample 1 \(2\) must be between 0 and 1"),
        (hidden, "`attention_mask` hides tokens of packed samples"),
        ({"action_mask": torch.ones(2, 3)}, r"`action_mask` has the shape \(2, 3\), but \(2, 2\) fits"),
    ):
        with pytest.raises(ValueError, match=error):
            Samples(**{**fields, **numbers, **changes}).padded(9)


# Advantages


def test_unscorable_responses():
    """The critic doesn't learn from them either."""
    rewards = [1.0, None, 2.0, None, None, None, 0.0, None, 3.0]
    experiences = made(arguments=given(rewards), advantage_estimator="gae", max_new_tokens=6, gamma=0.9)
    advantages, returns, values = (flat(experiences, name) for name in ("advantages", "returns", "values"))
    assert [bool(row.any()) for row in advantages] == [r is not None for r in rewards]
    assert all(torch.equal(returns[i], values[i]) for i, r in enumerate(rewards) if r is None)


def test_values_after_truncated_responses_add_to_their_reward():
    """The critic is any module; other responses end with the reward."""
    maker = make(critic=LastToken(), advantage_estimator="gae", bootstrap_truncated=True, micro_rollout_batch_size=9)
    torch.manual_seed(1)
    options = {"max_new_tokens": 3, "eos_token_id": list(range(50, 200)), "gamma": 0.9, "lambd": 0.8}
    (each,) = maker.make_experience_list(TEXT, **options)
    mask = each.action_mask
    cut = each.info["truncated"]
    n = each.action_mask.size(1)
    values = torch.cat([each.sequences % 11 / 10.0 * each.attention_mask], dim=1)
    assert 0 < cut.sum() < 9
    assert_close(each.values, torch.where(mask, values[:, -n - 1 : -1], 0))
    rewards = token_rewards(each.info["reward"], mask)
    _, returns = gae(rewards, each.values, mask, gamma=0.9, lam=0.8, bootstrap=values[:, -1] * cut)
    assert_close(each.returns, returns)


# Rewards


@pytest.mark.parametrize("name", ["model_reward_list", "scores", "kwargs"])
def test_reward_fn_of_one_argument(name):
    functions = {
        "model_reward_list": lambda model_reward_list: model_reward_list[0] - model_reward_list[1],
        "scores": lambda scores: scores[0] - scores[1],
        "kwargs": lambda **kwargs: kwargs["model_reward_list"][0] - kwargs["model_reward_list"][1],
    }
    models = [RewardModel(seed) for seed in (0, 1)]
    for each in made(reward_model=models, arguments={"reward_fn": functions[name]}):
        a, b = judged(each, *models)
        assert_close(each.info["reward"], a - b)
        assert "reward_metrics" not in each.info


def test_errors_of_reward_recipes():
    recipe = {"both": [("model", "helpful", 1.0), ("rule", "harmless", 0.5)], "one": [("model", "harmless", 2.0)]}
    both_known = {"helpful": 0, "harmless": 1}
    for labels, label_map, error in (
        (["both", "neither", "one"], both_known, r"Completion 3 has the label 'neither'.*\['both', 'one'\]"),
        ([None] * 3, both_known, "Completion 0 has the label None"),
        (["one"] * 3, {"helpful": 0}, "uses 'harmless', but `reward_fn_label_map` has only"),
        (["both"] * 3, None, "`reward_recipe` uses 'helpful'"),
    ):
        rows = [{"prompt": prompt, "kind": label} for prompt, label in zip(TEXT, labels, strict=True)]
        arguments = {"reward_fn": None, "reward_recipe": recipe, "reward_fn_label_map": label_map}
        with pytest.raises(ValueError, match=error):
            made(rows, reward_model=[RewardModel(), RewardModel()], arguments=arguments, label_column="kind")


@pytest.mark.parametrize("rows", [IMAGE_ROWS, [{"prompt": prompt} for prompt in TEXT]], ids=["images", "text"])
@pytest.mark.parametrize("size", [3, 9])
def test_what_reward_functions_get(rows, size):
    """If any row of a micro-batch has media, all rows become messages. Columns replace nothing that was made."""
    seen = {name: [] for name in ("prompts", "completions", "completion_ids", "level", "images", "queries")}

    def reward(**columns):
        for name, own in seen.items():
            own += columns.get(name, [])
        return [0.0] * len(columns["prompts"])

    rows = [{**row, "level": i, "completions": "GOLD", "queries": "GOLD"} for i, row in enumerate(rows)]
    experiences = made(rows, arguments={"reward_fn": reward}, micro_rollout_batch_size=size)
    ids = [
        row[keep].tolist()
        for each in experiences
        for row, keep in zip(each.sequences[:, -each.action_mask.size(1) :], each.action_mask, strict=True)
    ]
    assert seen["completion_ids"] == ids and seen["level"] == [0] * 3 + [1] * 3 + [2] * 3
    assert seen["queries"] == [words for each in experiences for words in processor().batch_decode(each.sequences)]
    texts = processor().tokenizer.batch_decode(ids, skip_special_tokens=True)
    if "images" not in rows[0]:
        assert seen["prompts"] == [prompt for prompt, _ in product(TEXT, range(3))] and seen["completions"] == texts
        return
    assert seen["completions"] == [[{"role": "assistant", "content": words}] for words in texts]
    assert seen["images"] == [row["images"] for row, _ in product(rows, range(3))]
    for i, (message,) in enumerate(seen["prompts"]):
        assert message["content"][-1] == text(rows[i // 3]["prompt"])
        images = [id(each) for each in rows[i // 3]["images"] or []]
        assert [id(block["image"]) for block in message["content"][:-1]] == images  # the row's objects


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda completions, solution: [0.0], "'<lambda>' requires `solution`, but there are only .*'completions'"),
        (lambda completions: [0.0], "'<lambda>' returned 1 rewards for 4 completions"),
        (lambda completions: torch.zeros(len(completions), 1), r"of shape \(4, 1\) for 4"),
    ],
)
def test_errors_of_reward_functions(function, error):
    with pytest.raises(ValueError, match=error):
        made(arguments={"reward_fn": function})


def by_rules(model_reward_list, labels, queries, refs, label_map):
    assert model_reward_list == [] and label_map == {} and len(labels) == len(queries) == len(refs)
    found = torch.tensor([float(ref == "cat") for ref in refs], requires_grad=True)
    return found, {"accuracy_reward": found * 2, "format_reward": torch.ones(len(queries))}


def by_rules_with_defaults(labels, queries, refs=None, label_map=None, *, model_reward_list=()):
    return by_rules(model_reward_list, labels, queries, refs, label_map)


def by_rules_of_all(queries, **kwargs):
    return by_rules(kwargs["model_reward_list"], kwargs["labels"], queries, kwargs["refs"], kwargs["label_map"])


class ByRules:
    def __call__(self, model_reward_list, labels, queries, refs, label_map):
        rewards, metrics = by_rules(model_reward_list, labels, queries, refs, label_map)
        return rewards.tolist(), {name: values.tolist() for name, values in metrics.items()}


RULES = [by_rules, by_rules_with_defaults, by_rules_of_all, ByRules(), functools.partial(by_rules)]


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("function", RULES)
def test_rule_rewards_without_a_model(function, size):
    """Also in batches of two, whose rewards could be taken for `(rewards, metrics)`, and without labels."""
    rows = [{"prompt": prompt, "references": name} for prompt, name in zip(TEXT, ("cat", "dog", "cat"), strict=True)]
    for reward_model in (None, []):
        experiences = made(
            rows, reward_model=reward_model, arguments={"reward_fn": function}, micro_rollout_batch_size=size
        )
        expected = torch.tensor([1.0] * 3 + [0.0] * 3 + [1.0] * 3)
        assert_close(torch.stack(flat(experiences, "reward")), expected)
        metrics = [each.info["reward_metrics"] for each in experiences]
        for name, values in (("accuracy_reward", expected * 2), ("format_reward", torch.ones(9))):
            assert_close(torch.cat([torch.as_tensor(each[name]) for each in metrics]), values)


async def by_rules_later(**kwargs):
    return by_rules(**{name: kwargs[name] for name in ("model_reward_list", "labels", "queries", "refs", "label_map")})


def with_unknown(queries, log_metric, **kwargs):
    return [0.0] * len(queries)


def test_coroutines_and_unknown_parameters(tmp_path):
    rows = [{"prompt": prompt, "references": "cat"} for prompt in TEXT]
    experiences = made(rows, reward_model=None, arguments={"reward_fn": by_rules_later}, micro_rollout_batch_size=9)
    assert flat(experiences, "reward") == [1.0] * 9
    with pytest.raises(ValueError, match="requires `log_metric`, but there are only"):
        made(rows, reward_model=None, arguments={"reward_fn": with_unknown})
    path = tmp_path / "rewards.py"
    path.write_text("def reward_func(queries, prompts):\n    return [0.5] * len(queries), {'a': [1.0] * len(queries)}")
    experiences = made(rows, reward_model=None, arguments={"remote_rm_url": str(path)}, micro_rollout_batch_size=9)
    assert flat(experiences, "reward") == [0.5] * 9


def test_metrics_without_numbers_and_with_names_of_others():
    """`None` doesn't count, and a metric can't take the place of the logged reward."""
    info = {"reward": torch.tensor([1.0, 2.0]), "reward_metrics": {"reward": [9.0, 9.0], "a": [None, 4.0]}}
    experience = Experience(torch.zeros(2, 3), info=info)
    assert rollout_logs([experience]) == {"a": 4.0, "reward": 1.5, "reward_std": 0.5}


@pytest.mark.parametrize(
    ("returned", "rewards", "metrics"),
    [
        ((1.0, 0.5), [1.0, 0.5], None),
        ((1.0, None), [1.0, math.nan], None),
        (([1.0, 0.5], {"a": torch.tensor([1.0, 2.0])}), [1.0, 0.5], {"a": torch.tensor([1.0, 2.0])}),
        ((torch.tensor([1.0, 0.5]), None), [1.0, 0.5], None),
        ((torch.tensor([1.0, 0.5]), {}), [1.0, 0.5], None),
        ([0.5, 1], [0.5, 1.0], None),
        (torch.tensor([0.5, 1.0], dtype=torch.bfloat16), [0.5, 1.0], None),
    ],
)
def test_what_reward_functions_return(returned, rewards, metrics):
    def combining(model_reward_list):
        return returned

    judge = {"reward_model": RewardModel()}  # with which a tuple of two means the same
    for options in ({"reward_fn": lambda completions: returned}, {"reward_fn": combining}):
        for sources in ({}, judge):
            each = made(TEXT[:1], arguments=options, n_samples_per_prompt=2, **sources)[0]
            assert_close(each.info["reward"], torch.tensor(rewards), equal_nan=True)
            assert_close(each.info.get("reward_metrics"), metrics)


def write(path, source) -> str:
    path.write_text(source)
    return str(path)


def test_reward_file(tmp_path):
    """Follows the protocol of the reference page: queries hold prompt and response with special tokens."""
    write(tmp_path / "helper.py", "raise SystemExit('only the named file is run')")
    source = "import torch\n\ndef reward_func(queries, prompts):\n"
    source += "    return torch.tensor([float(len(q) - len(p)) for q, p in zip(queries, prompts)])\n"
    prompts = [prompt for prompt, _ in product(TEXT, range(3))]
    for each in made(arguments={"remote_rm_url": write(tmp_path / "rewards.py", source)}):
        queries = processor().tokenizer.batch_decode(each.sequences)
        assert each.info["reward"].tolist() == [len(query) - len(prompts.pop(0)) for query in queries]
    for path, error, message in (
        (str(tmp_path / "nowhere.py"), ValueError, "There is no file .*nowhere.py to load"),
        (write(tmp_path / "empty.py", "reward = 1\n"), ValueError, "empty.py has no function `reward_func`"),
        (write(tmp_path / "broken.py", "1 / 0\n"), ZeroDivisionError, "by zero"),
    ):
        with pytest.raises(error, match=message):
            make(arguments={"remote_rm_url": path})


FILES = {
    "(queries, prompts)": "queries, prompts, None",
    "(q, p)": "q, p, None",
    "(q, p, /)": "q, p, None",
    "(prompts, queries)": "prompts, queries, None",  # LightRFT calls by position
    "(*given)": "*given, None",
    "(q, *rest)": "q, *rest, None",
    "(queries)": "queries, None, None",
    "(queries, prompts, references)": "queries, prompts, references",
    "(q, p, answers=None)": "q, p, answers",
    "(q, p, answers, limit=3)": "q, p, answers",
    "(q, p, labels)": "q, p, labels",
    "(q, p, **others)": "q, p, others['refs']",
    "(queries, prompts, **others)": "queries, prompts, others['refs']",
    "(**given)": "given['queries'], given['prompts'], given['refs']",
    "(refs, prompts, queries)": "queries, prompts, refs",  # by name
    "(completions, prompts, queries, refs)": "queries, prompts, refs",
}


@pytest.mark.parametrize("parameters", FILES)
def test_reward_files_are_called_by_position(parameters, tmp_path):
    source = f"SEEN = []\ndef reward_func{parameters}:\n    SEEN.append(({FILES[parameters]}))\n"
    source += "    reward_func.seen = SEEN\n    return [0.0] * len(SEEN[-1][0])\n"
    rows = [{**row, "references": str(i)} for i, row in enumerate(IMAGE_ROWS)]
    maker = make(Injected, arguments={"remote_rm_url": write(tmp_path / "rewards.py", source)})
    for samples in maker.generate_samples(rows, max_new_tokens=3):
        maker.make_experience(samples)
        queries, prompts, references = maker.custom_reward_func.__globals__["SEEN"][-1]
        assert queries == processor().batch_decode(samples.sequences)
        ids = [prompt.input_ids for prompt in samples.prompted.prompts]
        assert prompts in (None, processor().batch_decode(ids))
        assert references in (None, [row["references"] for row in samples.prompted.source.rows])
        assert (prompts is None) == (parameters == "(queries)")
        assert (references is None) == FILES[parameters].endswith("None")


def test_reward_files_that_need_more(tmp_path):
    path = write(tmp_path / "rewards.py", "def reward_func(q, p, references, further): return [0.0] * len(q)\n")
    with pytest.raises(ValueError, match="'reward_func' requires `further`"):
        made(arguments={"remote_rm_url": path})


def test_servers_and_functions_see_one_text(serve):
    """Queries are decoded with control tokens and the prompts' placeholders; requests have the media of each row."""
    server = serve(lambda request: {"rewards": list(map(len, request["queries"]))})
    seen = []

    def combining(model_reward_list, queries):
        seen.extend(queries)
        return model_reward_list[0] / 2

    rows = [{**row, "references": str(i), "labels": i} for i, row in enumerate(IMAGE_ROWS)]
    maker = make(Injected, arguments={"remote_rm_url": server.url, "reward_fn": combining})
    for batch in (rows, TEXT):
        seen.clear()
        server.requests.clear()
        all_samples = maker.generate_samples(batch, max_new_tokens=3)
        for samples, each in zip(all_samples, map(maker.make_experience, all_samples), strict=True):
            request = server.requests[-1]
            assert request["queries"] == processor().batch_decode(samples.sequences)
            assert each.info["reward"].tolist() == [len(query) / 2 for query in request["queries"]]
            ids = [prompt.input_ids for prompt in samples.prompted.prompts]
            assert request["prompts"] == (samples.prompts if batch is TEXT else processor().batch_decode(ids))
            actions = zip(samples.sequences[:, -samples.num_actions :], samples.action_mask, strict=True)
            texts = processor().batch_decode([row[keep] for row, keep in actions], skip_special_tokens=True)
            assert request["completions"] == texts
            if batch is TEXT:
                assert request.keys() == {"queries", "prompts", "completions"}
                continue
            assert request["references"] == [row["references"] for row in samples.prompted.source.rows]
            assert request["labels"] == [row["labels"] for row in samples.prompted.source.rows]
            for own, row in zip(request["images"], samples.prompted.source.rows, strict=True):
                decoded = [PIL.Image.open(io.BytesIO(base64.b64decode(png))) for png in own or ()]
                assert (own is None) == (row["images"] is None)
                for got, expected in zip(decoded, row["images"] or (), strict=True):
                    assert not ImageChops.difference(got, expected).getbbox()
        assert seen == [query for request in server.requests for query in request["queries"]]


def test_servers_get_audio_and_videos(serve):
    server = serve(lambda request: {"rewards": [0.0] * len(request["queries"])})
    policy = actor("qwen2_5_omni", ActorOmni)
    maker = make(Injected, "qwen2_5_omni", policy=policy, arguments={"remote_rm_url": server.url})
    for samples in maker.generate_samples(OMNI_ROWS, max_new_tokens=2):
        maker.make_experience(samples)
    numbers = {name: [] for name in ("audios", "videos", "images")}
    for request in server.requests:
        for name, own in numbers.items():
            own += [len(each or ()) for each in request.get(name, [[]] * len(request["queries"]))]
    assert numbers == {
        "audios": [1] * 3 + [2] * 3 + [0] * 3,
        **dict.fromkeys(("videos", "images"), [0, 0, 0, 1, 1, 1, 0, 0, 0]),
    }


def test_reward_files_get_labels_and_add_up(tmp_path):
    first = write(tmp_path / "a.py", "def reward_func(labels, completions): return [2.0 * x for x in labels]\n")
    second = write(tmp_path / "b.py", "def reward_func(refs, **kwargs): return [None if x else 1 for x in refs]\n")
    rows = [{"prompt": prompt, "score": score} for prompt, score in zip(TEXT, [3, 0, 4], strict=True)]
    experiences = made(rows, arguments={"remote_rm_url": [first, second]}, label_column="score")
    # A function that doesn't apply leaves the others, as in the trainers
    assert [float(r) for r in flat(experiences, "reward")] == [6] * 3 + [1] * 3 + [8] * 3
    combine = {"reward_fn": lambda model_reward_list: (model_reward_list[0], {"second": model_reward_list[1]})}
    for each in made(rows, arguments={"remote_rm_url": [first, second], **combine}, label_column="score"):
        assert_close(each.info["reward_metrics"]["second"].isnan(), each.info["reward"] > 0)


def test_servers_replace_reward_models(tmp_path, caplog):
    """As on the reference page; a function or a recipe over all sources gets both."""
    path = write(tmp_path / "ten.py", "def reward_func(completions): return [10.0] * len(completions)\n")
    judge = RewardModel(0)
    sources = {"reward_model": judge, "arguments": {"remote_rm_url": path}}
    maker = make(**sources)
    assert maker.reward_models == [] and maker.reward_model is judge and maker.remote_rm_url == path
    assert maker.custom_reward_func(completions="ab") == [10.0, 10.0]
    assert "`remote_rm_url` replaces `reward_model`" in caplog.text
    assert [float(r) for r in flat(made(**sources), "reward")] == [10.0] * 9
    both = {"reward_fn": lambda model_reward_list: sum(model_reward_list)}
    recipe = {"reward_recipe": {None: [("model", "judge", 1.0), ("rule", "ten", 1.0)]}}
    for options in (both, {**recipe, "reward_fn_label_map": {"judge": 0, "ten": 1}}):
        sources["arguments"] = {"remote_rm_url": path, **options}
        for each in made(**sources):
            assert_close(each.info["reward"], judged(each, judge)[0] + 10)


def test_what_subclasses_read():
    maker = make(arguments={"reward_fn": by_length, "reward_fn_label_map": {"a": 0}}, advantage_estimator="rloo")
    assert (
        maker.reward_fn is by_length and maker.reward_fn_label_map == {"a": 0} and maker.advantage_estimator == "rloo"
    )
    names = ("reward_model", "remote_rm_url", "reward_recipe", "perf_stats", "custom_reward_func")
    assert all(getattr(maker, name) is None for name in names)
    args = maker.strategy.args
    assert (args.advantage_estimator, args.n_samples_per_prompt, args.use_kl_estimator_k3) == ("rloo", 3, False)


# Tokenizing


def test_tokenize_fn():
    """Pads on the left, whatever the tokenizer does."""
    maker = make(words=load("qwen2_5_vl")[1])
    words = processor().tokenizer
    maker.tokenizer.padding_side = "right"
    ids = [words(prompt)["input_ids"] for prompt in TEXT]
    longest = max(map(len, ids))
    shortest = min(map(len, ids))
    batch = maker.tokenize_fn(TEXT, max_length=longest, padding=True, device="cpu")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"].tolist() == [[words.pad_token_id] * (longest - len(row)) + row for row in ids]
    assert batch["attention_mask"].tolist() == [[0] * (longest - len(row)) + [1] * len(row) for row in ids]
    assert {value.device.type for value in maker.tokenize_fn(TEXT, longest, device="meta").values()} == {"meta"}
    lists = maker.tokenize_fn(TEXT, longest, padding=False)
    assert lists == {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    for side, start, end in (("left", 1 - shortest, None), ("right", 0, shortest - 1)):
        maker.tokenizer.truncation_side = side
        kept = [row[start:end] for row in ids]
        assert maker.tokenize_fn(TEXT, shortest - 1)["input_ids"].tolist() == kept
        assert maker.tokenize_fn(TEXT, shortest - 1, padding=False)["input_ids"] == kept
    assert maker.tokenizer.padding_side == "right"


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokenize_fn_never_cuts_media(side):
    maker = make(words=load("qwen2_5_vl")[1])
    maker.tokenizer.truncation_side = side
    prompt = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Is there a bird?"
    if side == "right":
        prompt = "Is there a bird?<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    ids = processor().tokenizer(prompt)["input_ids"]
    image_id = processor().image_token_id
    assert [(ids if side == "left" else ids[::-1]).index(image_id), ids.count(image_id)] == [1, 2]
    kept = maker.tokenize_fn([TEXT[0], prompt], len(ids) - 1, padding=False)["input_ids"][1]
    assert kept.count(image_id) == 2
    error = rf"Prompt 1 has {len(ids)} tokens, and cutting it to {len(ids) - 2} would cut"
    with pytest.raises(ValueError, match=error):
        maker.tokenize_fn([TEXT[0], prompt], len(ids) - 2)


# Arguments


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("advantage_estimator", "ppo", "`advantage_estimator` must be one of 'group_norm', .*'gae', got 'ppo'"),
        ("kl_estimator", "k4", "`kl_estimator` must be one of 'k1', 'k2', 'k3'"),
        ("n_samples_per_prompt", 0, "`n_samples_per_prompt` must be at least 1"),
        ("reward_clip_range", (1.0, -1.0), r"`reward_clip_range` must be \(min, max\)"),
        ("advantage_estimator", "grpo", "'group_norm'` compares the completions"),
        ("advantage_estimator", "turn_norm", "`advantage_estimator='turn_norm'` needs `MultimodalGRPOTrainer`"),
    ],
)
def test_errors_of_configs(name, value, error):
    with pytest.raises(ValueError, match=error):
        ExperienceConfig(**{"n_samples_per_prompt": 1, "advantage_estimator": "gae", name: value})


def test_errors_of_makers():
    words = load("qwen2_5_vl")[1]
    words.tokenizer.pad_token = None
    for options, error in (
        ({"critic": Critic(), "advantage_estimator": "rloo"}, "'rloo'` doesn't use the `critic`; pass `None`"),
        ({"arguments": {"remote_rm_url": []}}, "There is no source of reward"),
        ({"words": words}, "no token for padding; set its `pad_token`"),
        ({"soft_overlong_cache": 0}, "`soft_overlong_cache` must be at least 1"),
    ):
        with pytest.raises(ValueError, match=error):
            make(**options)
    with pytest.raises(ValueError, match="`soft_overlong_cache` counts from `max_new_tokens`"):
        make(policy=fresh(), soft_overlong_cache=2).make_experience_list(TEXT)
    arguments = actor(), None, None, None, processor().tokenizer, 8, None
    with pytest.raises(ValueError, match="'gae'` needs a `critic`; pass one"):
        NaiveExperienceMaker(*arguments, ExperienceConfig("gae"), reward_fn=by_length)


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar(progress, capsys):
    made(progress=progress, accelerator=Accelerator(cpu=True))
    assert ("make_experience: 100%" in capsys.readouterr().err) == progress


PICTURE = PIL.Image.new("RGB", (56, 56))


def test_media_that_no_prompt_gets():
    """An error as in the trainers, whatever the batch. Ignored media are for rewards."""
    rows = [{"prompt": question("What?"), "picture": PICTURE}]
    seen = []

    def looking(completion_ids, picture):
        seen.extend(picture)
        return by_length(completion_ids)

    maker = make(arguments={"reward_fn": looking})
    maker.generate_samples(["Text alone"], max_new_tokens=2)
    for batch in (rows, rows * 20, [*rows, {"prompt": question("What?"), "photo": PICTURE}], [*rows, {"prompt": "A"}]):
        with pytest.raises(
            MediaError, match="^The rows: no prompt gets these media.*'picture' .of type Image.: rename"
        ):
            make(arguments={"reward_fn": looking}).generate_samples(batch, max_new_tokens=2)
        with pytest.raises(MediaError, match="^The rows: no prompt gets these media"):
            maker.generate_samples(batch, max_new_tokens=2)
    maker = make(arguments={"reward_fn": looking}, ignored_media_columns=["picture"])
    (each, _) = (maker.make_experience_list(rows, max_new_tokens=4)[0] for _ in range(2))
    assert not media_of(each) and len(seen) == 2 * 3 and all(each is rows[0]["picture"] for each in seen)


def test_rows_of_every_batch_are_checked(caplog, monkeypatch):
    """Filled columns that no batch had are asked about, once, whether rows have the others or `None` in them."""
    calls = []
    check = row_checks.check_columns
    monkeypatch.setattr(row_checks, "check_columns", lambda *args, **kw: calls.append(args) or check(*args, **kw))
    maker = make(Injected)

    def warnings(*rows):
        caplog.clear()
        rows = [{"prompt": question(f"What? {i}"), **columns} for i, columns in enumerate(rows)]
        with caplog.at_level(logging.WARNING):
            maker.generate_samples(rows, max_new_tokens=2)
        return [message for message in caplog.messages if "no prompt" in message]

    assert not warnings({"image": PICTURE}) and len(calls) == 1
    assert not warnings({"image": PICTURE, "picture": None}) and len(calls) == 1
    (warning,) = warnings({"image": PICTURE}, {"picture": PICTURE})
    assert re.match("Row 1 of a batch: no prompt gets these media.*'picture' .of type Image.: rename it to", warning)
    assert len(calls) == 2 and not warnings({"picture": PICTURE}, {"image": PICTURE}) and len(calls) == 2
    (warning,) = warnings({"image": None, "photo": "a/b.png"})
    assert "'photo'" in warning and len(calls) == 3 and not warnings({"image": None, "photo": "c.png"})
    assert not warnings({}) and not warnings({"solution": "text"}) and len(calls) == 5  # without a warning of no media
    rows = [{"image": PICTURE}] * 40 + [{"images": None, "drawing": PICTURE}]  # more rows than one check looks at
    (warning,) = warnings(*rows)
    assert warning.startswith("Row 40 of a batch: ") and "'drawing'" in warning
    with pytest.raises(ValueError, match="^Row 1 of a batch has no column 'prompt'.*rename 'question' to 'prompt'"):
        maker.generate_samples([{"prompt": "A"}, {"question": "B"}])
    maker = make(Injected)
    (warning,) = warnings({"image": PICTURE}, {"picture": PICTURE}, {"picture": PICTURE}, {"picture": PICTURE})
    assert warning.startswith("Row 1 of a batch: no prompt gets these media")


# Prompts to which a template was applied


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio", "gemma3"])
def test_prompts_with_their_template(family):
    """The policy, rewards and servers get the text as it is; other texts of the batch keep theirs, too."""
    words = processor(family)
    kind = "audio" if family == "qwen2_audio" else "image"
    medium = sound(0.5, seed=1) if kind == "audio" else image(84, 56, seed=1)["image"]
    policy = actor(family, ActorAL if kind == "audio" else ActorVL)
    given = {"tokenize": False, "add_generation_prompt": True}
    both = [words.apply_chat_template(question([{"type": kind}] * n + [text("What?")]), **given) for n in (1, 0)]
    rows = [
        {"prompt": both[0], f"{kind}s": [medium], "references": "cat", "labels": "rule"},
        {"prompt": both[1], f"{kind}s": None, "references": "dog", "labels": "rule"},
    ]
    seen = []

    def reward(prompts, queries, completions, refs):
        seen.append((prompts, queries, completions, refs))
        return [0.0] * len(prompts)

    maker = make(Injected, family, policy=policy, arguments={"reward_fn": reward})
    for batch in (rows, rows[:1], rows[1:]):
        seen.clear()
        for samples in maker.generate_samples(batch, max_new_tokens=3):
            maker.make_experience(samples)
            for row, prompt, ids, mask in zip(
                samples.prompted.source.rows,
                samples.prompted.prompts,
                samples.sequences,
                samples.attention_mask,
                strict=True,
            ):
                media = {f"{kind}s": [medium]} if row["references"] == "cat" else {}
                if kind == "audio" and media:
                    media = {"audio": [medium["array"]], "sampling_rate": medium["sampling_rate"]}
                call = words if media else words.tokenizer
                expected = call(text=row["prompt"], return_tensors="pt", add_special_tokens=False, **media)
                assert torch.equal(prompt.input_ids, expected["input_ids"][0])
                assert ids[mask.bool()][: len(prompt)].tolist() == prompt.input_ids.tolist()
                for name in prompt.media:
                    assert_close(prompt.media[name], expected[name])
        texts = [row["prompt"] for row, _ in product(batch, range(3))]
        assert [each for prompts, *_ in seen for each in prompts] == texts
        assert all(isinstance(each, str) for _, _, completions, _ in seen for each in completions)
        assert [each for *_, refs in seen for each in refs] == [
            row["references"] for row, _ in product(batch, range(3))
        ]
        assert all(each.count("<|im_start|>") == 2 for _, queries, *_ in seen for each in queries)


def test_errors_of_prompts_with_their_template():
    words = processor().apply_chat_template(
        question([{"type": "image"}, text("What?")]), tokenize=False, add_generation_prompt=True
    )
    alone = words.replace("<|vision_start|><|image_pad|><|vision_end|>", "")
    for prompt, images, message in (
        (
            alone,
            [PICTURE],
            r"row 1, column 'images\[0\]': the row has 1 images for 0 '<.image_pad.>' in its text, to which a",
        ),
        (words, [PICTURE, PICTURE], r"row 1, column 'images\[0\]': the row has 2 images for 1 '<.image_pad.>'"),
        (words, None, "Prompt 1 is text with placeholders of media, but no media"),
        (words + "\ud800", [PICTURE], "row 1, column 'prompt': the text has the lone surrogate"),
    ):
        with pytest.raises(ValueError, match=message):
            make().generate_samples([{"prompt": "A"}, {"prompt": prompt, "images": images}], max_new_tokens=2)
    with pytest.raises(ValueError, match="Prompt 0 has .* neither messages nor prompts with media are cut"):
        make(prompt_max_len=5).generate_samples([{"prompt": words, "images": [PICTURE]}], max_new_tokens=2)
