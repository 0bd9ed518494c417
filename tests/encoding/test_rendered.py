# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Texts to which a chat template was applied: encoded as they are where that is asked for, and else refused."""

import functools

import pytest
from datasets import Dataset
from helpers.chats import RATE, image, text, video
from helpers.chats import chat as user
from helpers.encoding import assert_same_features
from helpers.families import FAMILIES, encode
from helpers.trainer_utils import make_trainer, sound
from tokenizers.processors import TemplateProcessing

from trl_multimodal_rft import MultimodalDPOTrainer, MultimodalGRPOTrainer, MultimodalSFTTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.batches import Row
from trl_multimodal_rft.encoding.messages import template_marks
from trl_multimodal_rft.encoding.prompt_encoder import PromptEncoder
from trl_multimodal_rft.encoding.supervised import SupervisedEncoder


def encoder_of(name, **options):
    model, processor = build(name)
    return PromptEncoder(model, processor, **{"keeps_rendered": True, **options})


@functools.cache
def build(name):
    return FAMILIES[name].build()


def rendered(name, chat, **options):
    return build(name)[1].apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": True, **options})


def row_of(name, chat, index=0):
    """Returns a row with the text that the template writes for a chat, and its media in columns."""
    columns = {}
    for block in chat[0]["content"]:
        if block["type"] != "text":
            medium = block[block["type"]]
            medium = {"array": medium, "sampling_rate": RATE} if block["type"] == "audio" else medium
            columns.setdefault(f"{block['type']}s", []).append(medium)
    return Row(index, {"prompt": rendered(name, chat), **columns})


TELL_TIMES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5")
WITH_TEMPLATES = [name for name in FAMILIES if name != "voxtral"]  # whose tokenizer writes by rules


@pytest.mark.parametrize("name", WITH_TEMPLATES)
def test_the_processor_gets_the_text_as_it_is(name):
    """Covers images, videos and audio, several ones, and families whose template's placeholder isn't the model's."""
    encoder = encoder_of(name)
    for chat in FAMILIES[name].prompts():
        (prompt,) = encoder.messages([row_of(name, chat)])
        encoded = encoder.encode(prompt, 0)
        assert encoded.modalities == {block["type"] for block in chat[0]["content"]} - {"text"}
        if name in TELL_TIMES and "video" in encoded.modalities:  # of a video, whose rate arrays don't have
            assert "<|vision_start|>" in encoder.processor.decode(encoded.input_ids)
        else:
            assert_same_features(encoded, encode(encoder.processor, chat))


PICTURE = image(84, 56, seed=1)["image"]
MEDIA = {
    "qwen2_5_vl": {"images": [PICTURE, image(56, 84, seed=2)["image"]]},
    "gemma3": {"images": [PICTURE]},
    "llava": {"image": PICTURE},
    "qwen2_audio": {"audios": [sound(0.5, seed=1), sound(0.7, seed=2)]},
}
NAMES = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "llava": "<image>",
    "qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
BARE = "First {}, then{} what?"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["rendered", "bare", "blanks", "turns"])
def test_equals_a_call_of_the_processor(name, form):
    """Also texts without a template, which have placeholders within; text before and between stays where it is."""
    processor = build(name)[1]
    media = MEDIA[name]
    items = next(iter(media.values()))
    items = items if isinstance(items, list) else [items]
    words = BARE.format(NAMES[name], NAMES[name] if len(items) == 2 else "")
    turns = [{"role": "system", "content": "Brief."}, *user(text("Hm?")), {"role": "assistant", "content": "Yes?"}]
    if form == "rendered":
        words = rendered(name, user(text(words)))
    elif form == "turns":
        words = rendered(name, [*turns, *user(text(words))])
    elif form == "blanks":
        words = "\n " + rendered(name, user(text(words)), add_generation_prompt=False) + "\n\n"
    encoder = encoder_of(name)
    (prompt,) = encoder.messages([Row(0, {"prompt": words, **media})])
    encoded = encoder.encode(prompt, 0)
    columns = {"images": items}
    if "audios" in media:
        columns = {"audio": [each["array"] for each in items], "sampling_rate": RATE}
    expected = processor(text=[words], return_tensors="pt", add_special_tokens=False, **columns)
    assert_same_features(encoded, expected)
    kept = encoder_of(name, keep_decoded=True)  # for engines that run the processor themselves
    ((_, decoded),) = kept.encode(kept.messages([Row(0, {"prompt": words, **media})])[0], 0).decoded
    assert decoded.token_ids(processor) == processor.tokenizer(words, add_special_tokens=False)["input_ids"]
    assert processor.tokenizer.decode(encoded.input_ids).count("<|im_start|>") == words.count("<|im_start|>")


def test_nothing_is_added_to_the_text():
    """Tokenizers such as Gemma's put a token before each text, which the template has written, or was left out."""
    model, words = FAMILIES["llava"].build()
    start = ("<|endoftext|>", words.tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    backend = words.tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    assert words.tokenizer("What?")["input_ids"][0] == start[1]
    encoder = PromptEncoder(model, words, keeps_rendered=True)
    chat = rendered("llava", user({"type": "image"}, text("What?")))
    for written, n in ((chat, 0), (start[0] + chat, 1)):
        row = Row(0, {"prompt": written, "image": PICTURE})
        encoded = encoder.encode(encoder.messages([row])[0], 0)
        assert encoded.input_ids.tolist().count(start[1]) == n
        expected = words(text=[written], images=[PICTURE], add_special_tokens=False, return_tensors="pt")
        assert_same_features(encoded, expected)


def test_all_modalities_of_one_text():
    """Columns of a modality stand in the order of its placeholders, wherever those of others are."""
    encoder = encoder_of("qwen2_5_omni")
    media = {"videos": [video(4, 56, 56, seed=4)["video"]], "images": [PICTURE], "audios": [sound(0.5, seed=1)]}
    chat = user({"type": "audio"}, text("and"), {"type": "image"}, {"type": "video"})
    (prompt,) = encoder.messages([Row(0, {"prompt": rendered("qwen2_5_omni", chat), **media})])
    encoded = encoder.encode(prompt, 0)
    given = [{"type": "audio", "audio": media["audios"][0]["array"]}, text("and"), {"type": "image", "image": PICTURE}]
    expected = encode(encoder.processor, user(*given, {"type": "video", "video": media["videos"][0]}))
    assert encoded.modalities == {"image", "video", "audio"}
    assert_same_features(encoded, expected)


def test_what_is_kept_and_what_becomes_messages():
    encoder = encoder_of("qwen2_5_vl")
    words = rendered("qwen2_5_vl", user({"type": "image"}, text("What?")))
    alone = rendered("qwen2_5_vl", user(text("What?")))
    rows = [
        Row(0, {"prompt": words, "images": [PICTURE]}),
        Row(1, {"prompt": alone, "images": None}),
        Row(2, {"prompt": "What?", "images": [PICTURE]}),
        Row(3, {"prompt": user(text("What?")), "images": None}),
        Row(4, {"prompt": "Is it?", "images": None}),
    ]
    prompts = encoder.messages(rows)
    assert prompts[0].text == words and prompts[0].refs[0].source is PICTURE
    assert prompts[1] == alone  # with the others' media, too
    assert [block["type"] for block in prompts[2][0]["content"]] == ["image", "text"]
    assert prompts[3][0]["content"] == [text("What?")] and prompts[4][0]["content"] == [text("Is it?")]
    assert encoder.messages(rows[1:2] + rows[4:]) == [alone, "Is it?"]
    ignoring = encoder_of("qwen2_5_vl", ignored_media_columns=["images"])
    assert ignoring.messages([Row(0, {"prompt": alone, "images": [PICTURE]})]) == [alone]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_placeholders_and_media(name):
    column, media = next(iter(MEDIA[name].items()))
    media = media if isinstance(media, list) else [media]
    column = column if column.endswith("s") else f"{column}s"
    encoder = encoder_of(name)
    kind = FAMILIES[name].modalities[0]
    for n_media, n_placeholders in ((1, 0), (1, 2), (2, 1), (3, 2)):
        words = rendered(name, user(text("What?" + NAMES[name] * n_placeholders)))
        row = Row(7, {"prompt": words, column: (media * 3)[:n_media]})
        where = (
            rf"^row 7, column '{column}\[0\]': the row has {n_media} {kind}s for {n_placeholders} '.*' in its text, to"
        )
        with pytest.raises(MediaError, match=where):
            encoder.encode(encoder.messages([row])[0], 7)
    other = "audio" if kind == "image" else "image"
    row = Row(7, {"prompt": words, f"{other}s": [sound(0.5) if other == "audio" else PICTURE]})
    with pytest.raises(MediaError, match="^row 7, column '"):
        encoder.encode(encoder.messages([row])[0], 7)
    both = encoder_of("qwen2_5_vl")
    row = Row(7, {"prompt": NAMES["qwen2_5_vl"] + "<|video_pad|>", "images": [PICTURE]})
    with pytest.raises(MediaError, match="^row 7, column 'prompt': .* has 1 '<.video_pad.>' but the row has no video"):
        both.encode(both.messages([row])[0], 7)


# Trainers put the template around texts themselves


def forms(name, words="What?"):
    """Returns texts to which the template of a family was applied, in part or as a whole."""
    chat = user(text(words))
    whole = rendered(name, chat)
    return {
        "whole": whole,
        "without generation prompt": rendered(name, chat, add_generation_prompt=False),
        "blanks around": f"\n  {whole}\n\n",
        "words before": f"Be brief. {whole}",
        "turns": rendered(name, [*chat, {"role": "assistant", "content": "Yes."}, *chat]),
        "answer begun": whole + "It is",
        "start cut": whole[3:],
    }


RAW = ["What?", "", " ", "Is <|im_start|> a word?", "a < b", "assistant", "<think> Is it?", "[INST] What?"]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio", "gemma3", "llava"])
def test_what_looks_like_a_template(name):
    marks = template_marks(build(name)[1], {})
    assert all(marks.are_in(each) for each in forms(name).values())
    assert not any(marks.are_in(each) for each in RAW)


@pytest.mark.parametrize(
    "template",
    [
        "USER: {{ messages[0].content[0].text }} {% if add_generation_prompt %}ASSISTANT:{% endif %}",
        "{% for m in messages %}<|im_start|>{{ m.content[0].text }}{% endfor %}",
        "{{ raise_exception('no') }}",
        None,
    ],
)
def test_marks_of_other_templates(template):
    """Without control tokens, only with them, and none where nothing can be rendered."""
    processor = FAMILIES["llava"].build()[1]
    processor.chat_template = processor.tokenizer.chat_template = template
    marks = template_marks(processor, {})
    known = template is not None and "raise" not in template
    assert marks.are_in("USER: What? ASSISTANT:") == (known and "USER" in template)
    assert marks.are_in("<|im_start|>What?") == (known and "im_start" in template)
    assert not marks.are_in("What?") and not marks.are_in("")
    if template is None:
        by_option = template_marks(processor, {"chat_template": "<|im_start|>{{ messages[0].content[0].text }}"})
        assert by_option.are_in("<|im_start|>What?")


MESSAGE = r"row {}, column 'prompt': it looks like a chat template was applied already"
TRAINED = {"qwen2_5_vl": {"image": PICTURE}, "qwen2_audio": {"audio": sound(0.5)}}


@pytest.mark.parametrize("name", TRAINED)
def test_prompts_beside_media_are_refused(name):
    encoder = encoder_of(name, keeps_rendered=False)
    for mode in (None, "allow", "strip", "raise"):
        encoder.special_tokens_in_text = mode
        for words in forms(name).values():
            with pytest.raises(MediaError, match=MESSAGE.format(3)):
                encoder.encode_row(Row(3, {"prompt": words, **TRAINED[name]}))
            # The column alone says that other rows have media, in this batch or in others
            with pytest.raises(MediaError, match=MESSAGE.format(3)):
                encoder.messages([Row(3, {"prompt": words, **dict.fromkeys(TRAINED[name])})])
            with pytest.raises(MediaError, match=MESSAGE.format(1)):
                encoder.messages([Row(0, {"prompt": "What?", **TRAINED[name]}), Row(1, {"prompt": words})])
            with pytest.raises(MediaError, match=MESSAGE.format(1)):
                encoder.messages([Row(0, {"prompt": user(text("What?"))}), Row(1, {"prompt": words})])
            with pytest.raises(MediaError, match=MESSAGE.format(2).replace("'prompt'", "'teacher_prompt'")):
                teacher = {"prompt": "What?", "teacher_prompt": words}
                encoder.messages([Row(2, {**teacher, **TRAINED[name]})], "teacher_")
            # Text alone may have its template, as in TRL
            assert encoder.messages([Row(0, {"prompt": words})]) == [words]
    encoder.special_tokens_in_text = None
    for words in RAW[:1] + RAW[3:]:
        assert encoder.messages([Row(0, {"prompt": words, **TRAINED[name]})])


@pytest.mark.parametrize("form", ["whole", "words before"])
@pytest.mark.parametrize("name", TRAINED)
def test_supervised_rows_beside_media_are_refused(name, form):
    model, processor = build(name)
    encoder = SupervisedEncoder(processor, model)
    words = forms(name)[form]
    pair = {"chosen": "Yes.", "rejected": "No."}
    for media in (TRAINED[name], dict.fromkeys(TRAINED[name])):
        row = {"prompt": words, "completion": "Yes.", **media}
        for encode_rows, columns in (
            (encoder.encode_sequence, row),
            (encoder.encode_completion, row),
            (encoder.encode_preference, {"prompt": words, **pair, **media}),
        ):
            with pytest.raises(MediaError, match=MESSAGE.format(4)):
                encode_rows(Row(4, columns))
    sight = [{"role": "assistant", "content": [{"type": kind, kind: each} for kind, each in TRAINED[name].items()]}]
    with pytest.raises(MediaError, match=MESSAGE.format(4)):
        encoder.encode_preference(Row(4, {"prompt": words, "chosen": sight, "rejected": sight}))
    answer = [{"role": "assistant", "content": "Yes."}]
    with pytest.raises(MediaError, match=MESSAGE.format(4)):  # becomes a message as the answer is one
        encoder.encode_sequence(Row(4, {"prompt": words, "completion": answer}))
    assert encoder.encode_sequence(Row(4, {"prompt": words, "completion": "Yes."}))
    assert encoder.encode_sequence(Row(4, {"prompt": "What?", "completion": "Yes.", **TRAINED[name]}))


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalSFTTrainer, MultimodalDPOTrainer])
def test_trainers_refuse_them(trainer_class, tmp_path):
    rows = [{"prompt": "What?", "image": PICTURE, "completion": "Yes.", "chosen": "Yes.", "rejected": "No."}] * 3
    rows += [{**rows[0], "prompt": forms("qwen2_5_vl")["whole"]}]
    columns = {MultimodalSFTTrainer: ["completion"], MultimodalDPOTrainer: ["chosen", "rejected"]}
    dataset = Dataset.from_list(rows).select_columns(["prompt", "image", *columns.get(trainer_class, [])])
    options = {} if trainer_class is MultimodalGRPOTrainer else {"reward": None}
    if trainer_class is MultimodalGRPOTrainer:
        options |= {"per_device_train_batch_size": 16}
    with pytest.raises(MediaError, match=MESSAGE.format(3)):
        make_trainer(trainer_class, "qwen2_5_vl", dataset, tmp_path, **options).train()


def test_a_template_that_writes_ids():
    """mistral-common has no text to take as it is: it would keep the media alone, or apply its template twice."""
    clip = {"audio": sound(0.5, seed=1)}
    for words in ("[INST][BEGIN_AUDIO][AUDIO]What is it?[/INST]", "What is it?[/INST]"):
        encoder = encoder_of("voxtral")
        with pytest.raises(MediaError, match="a chat template was applied to its text, which mistral-common can't"):
            (prompt,) = encoder.messages([Row(0, {"prompt": words, **clip})])
            encoder.encode(prompt, 0)
        with pytest.raises(MediaError, match="it looks like a chat template was applied already"):
            encoder_of("voxtral", keeps_rendered=False).messages([Row(0, {"prompt": words, **clip})])
    encoder.messages([Row(0, {"prompt": "What is it?", **clip})])
