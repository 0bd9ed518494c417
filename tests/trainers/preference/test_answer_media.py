# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Answers with media: losses, scores and gradients of reward models and DPO are those of the model's own forward."""

import copy
import functools

import PIL.Image
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from evaluation.test_judges import run_script
from helpers import chats
from helpers.chats import RATE, text
from helpers.chats import turn as chat
from helpers.checks import in_float32
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import PLAIN, assert_update_is_gradient, shifted
from helpers.trainer_utils import load as load_model
from torch.nn.functional import logsigmoid, pad
from trainers.preference.test_dpo import IN_ORDER
from trainers.preference.test_reward_trainer import fresh

from trl_multimodal_rft import (
    MultimodalDPOConfig,
    MultimodalDPOTrainer,
    MultimodalKTOConfig,
    MultimodalKTOTrainer,
    MultimodalRewardConfig,
    MultimodalRewardTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.checks.self_check import check_conversation
from trl_multimodal_rft.checks.sequence_check import check_pairs
from trl_multimodal_rft.data import judge_rows, write_folder
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding import supervised
from trl_multimodal_rft.encoding.conversations import encode_prefix
from trl_multimodal_rft.encoding.join import join_media, padded
from trl_multimodal_rft.evaluation import score_pairs
from trl_multimodal_rft.forward import masks
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.encoders import to_model
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import windows_reach
from trl_multimodal_rft.forward.scores import ScoreRequest, with_answer, with_media
from trl_multimodal_rft.models.reward_model import as_reward_model
from trl_multimodal_rft.policy import Fallbacks, PolicyForward
from trl_multimodal_rft.rewards import RewardModel


IMAGES = [functools.partial(chats.image, *size) for size in ((84, 56), (56, 56), (112, 84))]
SOUNDS = [functools.partial(chats.audio, seconds) for seconds in (0.4, 0.7, 0.3)]
CLIPS = [functools.partial(chats.video, *size) for size in ((4, 56, 84), (6, 56, 56))]
KINDS = {
    "qwen2_5_omni": [IMAGES[0], SOUNDS[0], CLIPS[0], IMAGES[1]],
    "qwen2_audio": SOUNDS,
    "qwen3_vl": [CLIPS[0], IMAGES[0], CLIPS[1]],
    "qwen2_5_vl": IMAGES,
    "gemma3": IMAGES,  # images attend to all of themselves, so that prompts depend on the answer
    "idefics3": IMAGES,  # its processor pads the images of a conversation to one number of tiles
    # Sounds of a conversation of other lengths would change each other
    "gemma3n": [SOUNDS[i] for i in (0, 1, 0, 0, 1, 1, 0)],
}
END = "<|im_end|>\n"


def rows_of(family):
    """Pairs whose media are in both answers, the prompt and an answer, one answer twice, and in the prompt alone."""
    kinds = KINDS[family]
    first, second, third, fourth, fifth, sixth, seventh = (kinds[i % len(kinds)](seed=i) for i in range(7))
    rows = [
        ([text("Draw a bird.")], [text("So it is"), first, text("a bird.")], [second, text("No")]),
        ([third, text("Which?")], [text("red"), fourth, text("green or blue.")], [text("blue")]),
        ([text("What is it?")], [text("It is a cat.")], [fifth, sixth, text("7")]),
        ([seventh, text("Is there a dog?")], [text("There is")], [text("No.")]),
    ]
    return [
        {"prompt": chat("user", p), "chosen": chat("assistant", c), "rejected": chat("assistant", r)}
        for p, c, r in rows
    ]


def lazily(rows):
    """A dataset of rows that Arrow couldn't hold, with the rates of sounds."""

    def block(part):
        sounds = part["type"] == "audio"
        return {"type": "audio", "audio": {"array": part["audio"], "sampling_rate": RATE}} if sounds else part

    def blocks(value):
        is_chat = isinstance(value, list) and isinstance(value[0]["content"], list)
        return [{**m, "content": [block(part) for part in m["content"]]} for m in value] if is_chat else value

    rows = [{name: blocks(value) for name, value in row.items()} for row in rows]
    dataset = Dataset.from_dict({"n": range(len(rows))})
    return dataset.with_transform(lambda batch: {k: [rows[n][k] for n in batch["n"]] for k in rows[0]})


def processed(processor, messages, **options):
    """A processor's outputs for a conversation, in one call."""
    if any(part["type"] == "video" for message in messages for part in message["content"]):
        options["processor_kwargs"] = {"videos_kwargs": {"do_sample_frames": False}}
    form = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template([messages], **form, **options)


def own_scores(model, processor, rows):
    """Scores of the chosen and of the rejected answers by the model's own forward of each conversation."""
    scores = []
    for name in ("chosen", "rejected"):
        inputs = [processed(processor, row["prompt"] + row[name]).to(model.dtype) for row in rows]
        scores.append(torch.stack([model(**each).logits[0, 0] for each in inputs]))
    return scores


def own_logps(model, processor, rows, name):
    """Sums of the log-probabilities of the texts of answers, by the model's own forward of each conversation."""
    sums = []
    for row in rows:
        inputs = processed(processor, row["prompt"] + row[name]).to(model.dtype)
        n = processed(processor, row["prompt"], add_generation_prompt=True)["input_ids"].size(1)
        logits = model(**inputs).logits[:, n - 1 : -1].log_softmax(-1)
        logps = logits.gather(-1, inputs["input_ids"][:, n:, None]).flatten()
        first, *_, last = [part.get("text", "") for part in row[name][0]["content"]] * 2
        spans = [len(processor.tokenizer(each, add_special_tokens=False)["input_ids"]) for each in (first, last + END)]
        is_text = all(part["type"] == "text" for part in row[name][0]["content"])
        sums.append(logps.sum() if is_text else logps[: spans[0]].sum() + logps[-spans[1] :].sum())
    return torch.stack(sums)


LAYOUTS = [{"packing": "prefix"}, {"packing": "padded"}, {"max_tokens_per_microbatch": 60}]
# One family with all layouts, the others with one each, by turns
IN_LAYOUTS = [
    pytest.param(family, LAYOUTS[j], id=f"{family}-{j}", marks=[pytest.mark.slow] * (i > 0 or j == 2))
    for i, family in enumerate(KINDS)
    for j in (range(3) if i == 0 else [i % 3])
]


@pytest.mark.parametrize(("family", "options"), IN_LAYOUTS)
def test_updates_of_a_reward_model_are_those_of_plain_forwards(family, options, tmp_path):
    """Bradley and Terry's loss with margins and a tie, in float64; a pair's answers may be media alone."""
    rows = rows_of(family)
    rows[0] |= {"chosen": chat("assistant", rows[0]["chosen"][0]["content"][1:2]), "tie": True}
    rows = [{**row, "margin": 0.3 * i, "tie": i == 1} for i, row in enumerate(rows)]
    model, processor = ALL_FAMILIES[family].build()
    torch.manual_seed(1)
    model = as_reward_model(model).double().eval()
    plain = copy.deepcopy(model)
    args = MultimodalRewardConfig(
        str(tmp_path), **{**PLAIN, **IN_ORDER, "max_steps": 1, "learning_rate": 0.1, "self_check": False, **options}
    )
    trainer = MultimodalRewardTrainer(model, args, train_dataset=lazily(rows), processing_class=processor)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    chosen, rejected = own_scores(plain, processor, rows)
    difference = chosen - rejected
    margin = torch.tensor([row["margin"] for row in rows])
    losses = -logsigmoid(difference - margin)
    losses[1] = losses[1] - logsigmoid(-difference[1] - margin[1])
    losses.mean().backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert difference.abs().min() > 1e-4
    assert trainer.state.log_history[0].get("token_budget/parts", 1) > ("max_tokens_per_microbatch" in options)
    assert_update_is_gradient(before, trainer.model, plain, learning_rate=0.1)


def test_sounds_of_two_answers_that_would_change_each_other_are_forwarded_apart(tmp_path):
    """Granite Speech pads the sounds of a batch, which its encoder hears."""
    first, second = (chats.audio(seconds, seed=i) for i, seconds in enumerate((0.4, 0.9)))
    answers = {"chosen": [text("So"), first, text("a bird.")], "rejected": [second, text("No")]}
    row = {
        "prompt": chat("user", [text("Sing.")]),
        **{name: chat("assistant", each) for name, each in answers.items()},
    }
    model, processor = ALL_FAMILIES["granite_speech"].build()
    torch.manual_seed(1)
    model = as_reward_model(model).double().eval()
    args = MultimodalRewardConfig(str(tmp_path), **PLAIN, self_check=False)
    trainer = MultimodalRewardTrainer(model, args, train_dataset=lazily([row]), processing_class=processor)
    with torch.no_grad():
        batch = trainer.data_collator([lazily([row])[0]])
        scores = trainer._loss(model, batch, None)[1].values[:, 0]
        expected = torch.cat(own_scores(model, processor, [row]))
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "options"), IN_LAYOUTS)
def test_updates_of_dpo_are_those_of_plain_forwards(family, options, tmp_path):
    """Equation 7 of DPO in float64, over the tokens of text."""
    rows = rows_of(family)
    model, processor = ALL_FAMILIES[family].build()
    plain = copy.deepcopy(model).double().eval()
    reference = shifted(copy.deepcopy(model).double().eval())
    options = {**PLAIN, **IN_ORDER, "router_aux_loss_coef": 0.0, "max_steps": 1, "learning_rate": 0.1, **options}
    args = MultimodalDPOConfig(str(tmp_path), beta=0.3, self_check=False, **options)
    objects = {"ref_model": copy.deepcopy(reference), "processing_class": processor}
    trainer = MultimodalDPOTrainer(model.double(), args=args, train_dataset=lazily(rows), **objects)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    ratios = []
    for name in ("chosen", "rejected"):
        with torch.no_grad():
            by_reference = own_logps(reference, processor, rows, name)
        ratios.append(own_logps(plain, processor, rows, name) - by_reference)
    loss = -logsigmoid(0.3 * (ratios[0] - ratios[1])).mean()
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_update_is_gradient(before, trainer.model, plain, learning_rate=0.1)


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_pictures_attend_to_all_of_themselves_after_text_prompts_of_any_length(family):
    """Pictures of answers and of tools' results, packed, in float64, up to and beyond what shows the masks of text."""
    model, processor = ALL_FAMILIES[family].build()
    plain = copy.deepcopy(model).double().eval()
    encoder = supervised.SupervisedEncoder(processor, model)
    add_fused_head(model.double().eval(), outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    reach = windows_reach(model)
    word = text("cat")
    picture = chats.image(84, 56, seed=1)
    other = chats.image(84, 56, seed=2)
    n_fixed = len(encoder.encode_preference(supervised.Row(0, pair_of([word], [picture, word], [word])))) - 1
    for length in (reach - 1, reach, reach + 1, 3 * reach):
        asked = [text(" ".join(["cat"] * (length - n_fixed)))]
        pair = encoder.encode_preference(
            supervised.Row(0, pair_of(asked, [text("So"), picture, word, other, word], [other, word]))
        )
        assert len(pair) == length
        first, second = (side.answer for side in pair.sides)
        # Two results of tools, after 3 and 2 sampled tokens
        ids = [5, 6, 7, *first.input_ids.tolist(), 8, 9, *second.input_ids.tolist()]
        whole = encode_prefix(pair, ids, [(3, first), (5 + len(first), second)], model)
        conversations = [with_answer(model, pair, first), with_answer(model, pair, second)]
        conversations.append(with_media(model, pair, [first, second], whole))
        completions = [torch.tensor(each) for each in (*(side.ids for side in pair.sides), [*ids, 10, 11])]
        rows = padded(completions)
        with torch.no_grad():
            packed = completion_scores(model, model, ScoreRequest(conversations, *rows)).logps
            for logps, conversation, completion in zip(packed, conversations, completions, strict=True):
                sequence = torch.cat([pair.input_ids, completion])[None]
                n = len(completion)
                fields = {
                    name: pad(value, (length, n - len(value)))[None]
                    for name, value in conversation.later.token_fields.items()
                }
                media = to_model(join_media(conversation.parts), plain, torch.device("cpu"))
                logits = plain(input_ids=sequence, **fields, **media).logits[0, length - 1 : -1].log_softmax(-1)
                truth = logits.gather(-1, completion[:, None])[:, 0].float()
                torch.testing.assert_close(logps[:n], truth, rtol=0, atol=2e-6)


def test_the_self_check_measures_media_after_a_prompt_longer_than_the_windows(monkeypatch):
    """As of pairs of a first batch with short prompts, and of tools' results after them."""
    model, processor = ALL_FAMILIES["gemma3"].build()
    encoder = supervised.SupervisedEncoder(processor, model)
    picture = chats.image(84, 56)
    word = text("cat")
    add_fused_head(model.eval(), outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    policy = PolicyForward(in_float32(), processor)
    row = pair_of([word], [picture, word], [word])
    pair = encoder.encode_preference(supervised.Row(0, row))
    chosen = pair.sides[0].answer
    answered = [*chosen.input_ids.tolist(), 5, 6]

    def packs():
        conversation = with_answer(model, pair, chosen)
        of_pairs = check_pairs(policy, model, [pair], lambda *of_answer: chosen.media)
        _, fallbacks = check_conversation(policy, model, [conversation], [answered], False)
        return of_pairs.fallbacks.packing, fallbacks.packing

    assert len(pair) < windows_reach(model) and packs() == (True, True)
    monkeypatch.setattr(masks, "_marks_media", lambda prompt, n_new, fill: prompt.media != {})
    assert packs() == (False, False)


def pair_of(prompt, chosen, rejected):
    return {
        "prompt": chat("user", prompt),
        "chosen": chat("assistant", chosen),
        "rejected": chat("assistant", rejected),
    }


# Rows


def image_file(folder, name, seed=0, size=(56, 56)):
    chats.image(*size, seed=seed)["image"].save(folder / name)
    return str(folder / name)


def files(folder, n=4):
    """Pairs of texts with images of files: in the prompt, in both answers, in one of them, and in none."""
    names = [image_file(folder, f"{i}.png", i, [(56, 56), (84, 56), (56, 112)][i % 3]) for i in range(3 * n)]

    def picture(i):
        return {"type": "image", "image": names[i]}

    return [
        {
            "prompt": chat("user", [text("Draw it."), *[picture(3 * i)] * (i % 2)]),
            "chosen": chat("assistant", [text("It is"), *[picture(3 * i + 1)] * (i % 4 != 3), text("red.")]),
            "rejected": chat("assistant", [*[picture(3 * i + 2)] * (i % 4 < 2), text("No, blue.")]),
        }
        for i in range(n)
    ]


def opened(messages):
    """Messages with the images of their files."""
    parts = [[PIL.Image.open(p["image"]) if "image" in p else p for p in message["content"]] for message in messages]
    parts = [[p if isinstance(p, dict) else {"type": "image", "image": p} for p in content] for content in parts]
    return [{**message, "content": content} for message, content in zip(messages, parts, strict=True)]


def in_columns(rows):
    """The rows with placeholders, and their images in the order of prompt, chosen and rejected answer."""
    placed = []
    for row in rows:
        parts = [part for name in row for message in row[name] for part in message["content"]]
        images = [part["image"] for part in parts if part["type"] == "image"]
        blank = {
            name: [
                {**m, "content": [{"type": p["type"], "text": p.get("text")} for p in m["content"]]} for m in row[name]
            ]
            for name in row
        }
        placed.append({**blank, "images": images})
    return placed


def stored(rows):
    """The rows as Datasets stores them: images as a feature, sounds and videos as lists of numbers."""
    frames = functools.reduce(lambda feature, _: List(feature), range(4), Value("uint8"))
    sounds = {"array": List(Value("float32")), "sampling_rate": Value("int64")}
    block = {"type": Value("string"), "text": Value("string"), "image": Image(), "audio": sounds, "video": frames}
    messages = List({"role": Value("string"), "content": List(block)})

    def listed(part):
        found = dict.fromkeys(block) | part
        found["video"] = None if found["video"] is None else found["video"].tolist()
        return found

    chats_of = ("prompt", "chosen", "rejected")
    rows = [{k: [{**m, "content": [*map(listed, m["content"])]} for m in row[k]] for k in chats_of} for row in rows]
    return Dataset.from_list(rows, Features(dict.fromkeys(chats_of, messages)))


def make(trainer, config, rows, folder, family="qwen2_5_vl", objects=None, **options):
    model, processor = fresh(family) if trainer is MultimodalRewardTrainer else load_model(family)
    args = config(str(folder / "out"), **{**PLAIN, **IN_ORDER, "learning_rate": 0.03, **options})
    rows = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return trainer(model, args=args, train_dataset=rows, processing_class=processor, **(objects or {}))


dpo = functools.partial(make, MultimodalDPOTrainer, MultimodalDPOConfig)
reward = functools.partial(make, MultimodalRewardTrainer, MultimodalRewardConfig)
TRAINERS = [dpo, reward]


@pytest.mark.parametrize("as_stored", [in_columns, stored, Dataset.from_list])
def test_media_are_inline_or_in_columns_in_order_of_appearance(as_stored, tmp_path):
    rows = files(tmp_path)
    expected, actual = (dpo(each, tmp_path).data_collator for each in (rows, as_stored(rows)))
    assert [side.answer is None for side in expected([rows[0]])["sequences"][0].sides] == [False, False]
    for row, other in zip(rows, as_stored(rows), strict=True):
        [mine], [theirs] = (collate([each])["sequences"] for collate, each in ((expected, row), (actual, other)))
        assert mine.example() == theirs.example() and len(mine.sides_with_media) == len(theirs.sides_with_media)
        for sides in zip(mine.sides_with_media, theirs.sides_with_media, strict=True):
            assert torch.equal(*(side.answer.media["pixel_values"] for side in sides))
        assert mine.media.keys() == theirs.media.keys()
        assert all(torch.equal(value, theirs.media[name]) for name, value in mine.media.items())


@pytest.mark.parametrize("make", TRAINERS)
def test_the_prompt_is_encoded_once_and_the_self_check_measures_answers(make, tmp_path, monkeypatch):
    encoded = []
    encode = supervised.encode_prompt
    monkeypatch.setattr(supervised, "encode_prompt", lambda *a, **k: encoded.append(1) or encode(*a, **k))
    trainer = make(files(tmp_path), tmp_path, max_steps=1)
    trainer.train()
    assert len(encoded) == 4
    check = trainer.checks.self_check
    assert (
        check.padded < check.tolerance > check.packed and check.fallbacks == Fallbacks() and check.media["image"] > 0
    )


@pytest.mark.parametrize("make", TRAINERS)
def test_the_self_check_finds_answers_at_other_positions(make, tmp_path, monkeypatch):
    from trl_multimodal_rft.forward import scores

    def misplaced(*arguments):
        whole = encode_prefix(*arguments)
        whole.position_ids = torch.arange(len(whole)).expand_as(whole.position_ids)
        return whole

    encode_prefix = scores.encode_prefix
    monkeypatch.setattr(scores, "encode_prefix", misplaced)
    with pytest.raises(RuntimeError, match="scores of padded rows differ by .* from the model's forward"):
        make(files(tmp_path)[:1] * 4, tmp_path, max_steps=1).train()


def test_the_self_check_finds_processors_that_see_media_of_a_conversation_otherwise(tmp_path):
    """LLaVA-OneVision's cuts one image into tiles, and not several."""
    rows = [
        {**row, "prompt": row["chosen"] and chat("user", row["chosen"][0]["content"])} for row in files(tmp_path)[:1]
    ]
    rows = [{**row, "rejected": chat("assistant", [text("No")])} for row in rows]
    with pytest.raises(RuntimeError, match="llava_onevision can't be trained exactly: the model's forward fails"):
        dpo(rows * 4, tmp_path, "llava_onevision", max_steps=1).train()
    dpo(
        [{**row, "prompt": chat("user", "What?")} for row in rows] * 4, tmp_path, "llava_onevision", max_steps=1
    ).train()


@pytest.mark.parametrize("make", TRAINERS)
def test_resuming_continues_bit_for_bit(make, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    options |= {"optim": "adamw_torch", "learning_rate": 1e-3}
    whole, resumed = (make(files(tmp_path, 8), tmp_path, **options) for _ in range(2))
    whole.train()
    resumed.train(f"{tmp_path}/out/checkpoint-2")
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    losses = [[entry["loss"] for entry in each.state.log_history[:4]] for each in (whole, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("precomputes", [False, True])
def test_a_view_replaces_media_of_the_prompt_alone(precomputes, tmp_path):
    trainer = dpo(files(tmp_path), tmp_path, rejected_view="blank", precompute_ref_log_probs=precomputes, max_steps=1)
    batch = trainer.data_collator(files(tmp_path))
    assert batch["viewed"] == [1, 3]  # whose prompts have an image
    view = batch["prompts"][8]
    chosen = batch["prompts"][1]
    assert torch.equal(view.later.media["pixel_values"], chosen.later.media["pixel_values"])
    assert not torch.equal(view.media["pixel_values"], chosen.media["pixel_values"])
    trainer.train()
    assert trainer.state.log_history[0]["rewards/view_margins"] == pytest.approx(0, abs=1e-5)


def test_max_length_never_cuts_a_medium(tmp_path):
    [row] = files(tmp_path)[:1]
    [pair] = dpo([row] * 4, tmp_path).data_collator([row])["sequences"]
    chosen = pair.sides[0]
    end = chosen.answer.media_span[1]
    n = len(pair)
    for limit in (n + end + 2, n + end, 4):
        for trainer in (dpo, reward):
            [longer] = trainer([row] * 4, tmp_path, max_length=limit).data_collator([row])["sequences"]
            kept = longer.sides[0]
            assert len(longer) + len(kept.ids) == n + len(chosen.ids) and not longer.is_cut
            assert kept.answer.media.keys() == chosen.answer.media.keys()


@pytest.mark.parametrize("make", TRAINERS)
@pytest.mark.parametrize("columns", [False, True])
def test_a_missing_file_names_row_and_column(make, columns, tmp_path):
    rows = files(tmp_path)
    (tmp_path / "2.png").unlink()  # of the first rejected answer
    rows = in_columns(rows) if columns else rows
    column = r"images\[1\]" if columns else r"rejected\[0\].content\[0\]"
    with pytest.raises(MediaError, match=f"row 0, column '{column}'.*2.png"):
        make(rows, tmp_path).train()
    trainer = make(rows, tmp_path, on_media_error="skip", max_skipped_rows=1, max_steps=1)
    trainer.train()
    assert [*trainer._stream.skipped] == [0]


def test_what_reads_no_media_of_answers_says_so(tmp_path):
    rows = files(tmp_path)
    message = "assistant messages must be text, as only DPO and reward models read media of answers"
    completions = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in rows]
    for trainer, config in ((MultimodalSFTTrainer, MultimodalSFTConfig), (MultimodalKTOTrainer, MultimodalKTOConfig)):
        with pytest.raises(MediaError, match=rf"row 0, column 'completion\[0\].content\[1\]': {message}"):
            make(trainer, config, completions, tmp_path).train()
    with pytest.raises(MediaError, match=rf"row 0, column 'chosen\[0\].content\[1\]': {message}"):
        judge_rows(Dataset.from_list(rows))
    alone = {**rows[0], "chosen": chat("assistant", rows[0]["chosen"][0]["content"][1:2])}
    with pytest.raises(
        MediaError, match="row 0, column 'chosen': the answer has media and no text, and DPO trains text"
    ):
        dpo([alone], tmp_path).data_collator([alone])
    fewer = {**in_columns(rows)[0], "images": [str(tmp_path / "0.png")]}
    with pytest.raises(
        MediaError, match="row 0, column 'images': has 1 images for 2 image placeholders in the messages"
    ):
        dpo([fewer], tmp_path).data_collator([fewer])
    model, processor = ALL_FAMILIES["paligemma"].build()
    encoder = supervised.SupervisedEncoder(processor, model)
    with pytest.raises(MediaError, match=r"row 0, column 'chosen\[0\].content\[1\]': paligemma attends to media thr"):
        encoder.encode_preference(supervised.Row(0, {**rows[0], "prompt": rows[1]["prompt"]}))


def test_sounds_of_a_conversation_that_would_change_each_other_are_refused(tmp_path):
    first, second = ({"type": "audio", "audio": chats.audio(seconds)["audio"]} for seconds in (0.4, 0.8))
    row = {
        "prompt": chat("user", [first]),
        "chosen": chat("assistant", [second, text("A")]),
        "rejected": chat("assistant", "B"),
    }
    with pytest.raises(MediaError, match="row 0, column 'chosen': gemma3n pads media of one conversation to one size"):
        dpo(lazily([row]), tmp_path, "gemma3n").data_collator([lazily([row])[0]])


# Scores


@pytest.mark.parametrize("family", slow_but(["qwen2_5_omni", "qwen2_audio", "qwen3_vl", "gemma3"], "qwen2_5_omni"))
def test_scores_are_those_of_the_models_own_forward(family):
    model, processor = fresh(family)
    rows = rows_of(family)
    rows[0] |= {"chosen": chat("assistant", rows[0]["chosen"][0]["content"][1:2])}
    with torch.no_grad():
        expected = torch.stack(own_scores(model.eval(), processor, rows), dim=1)
    result = score_pairs(RewardModel(model, processor), stored(lazily(rows)))
    scores = torch.tensor([pair["scores"] for pair in result.rows])
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
    right = (expected[:, 0] > expected[:, 1]).float().mean().item()
    assert result.metrics["accuracy"] == right and scores.std() > 1e-3
    assert "<" in result.rows[0]["completions"][0] and len({pair["fingerprint"] for pair in result.rows}) == 4


def test_the_command_scores_pairs_with_media_in_answers(tmp_path):
    pairs = Dataset.from_list(in_columns(files(tmp_path))).cast_column("images", List(Image()))
    write_folder(pairs, tmp_path / "pairs")
    model, processor = fresh()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    written = run_script(tmp_path, f"--reward_model_name_or_path={tmp_path / 'model'}")
    rows = [{**row, **{k: opened(row[k]) for k in ("prompt", "chosen", "rejected")}} for row in files(tmp_path)]
    with torch.no_grad():
        chosen, rejected = own_scores(model.eval(), processor, rows)
    assert written["metrics"]["margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)
    assert written["metrics"]["accuracy"] == (chosen > rejected).float().mean().item()
