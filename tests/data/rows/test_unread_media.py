# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainer never drops a medium silently: unread columns and blocks, tags, and other names for prompts."""

import base64
from functools import partial

import numpy as np
import pytest
import soundfile
import torch
from accelerate.logging import MultiProcessAdapter
from datasets import Audio, Dataset, Image, IterableDataset, List, load_dataset, load_from_disk
from helpers.chats import RATE, audio, image, text, video
from helpers.chats import chat as user
from helpers.families import FAMILIES
from helpers.files import load as load_medium
from helpers.files import ref
from helpers.samplers import Remembers
from helpers.trainer_utils import (
    CONFIGS,
    TRAINERS,
    InjectedOurs,
    image_rows,
    load,
    make_trainer,
    run,
    saved,
    sound,
    text_rows,
    with_media,
)
from trl import TrlParser
from trl.chat_template_utils import qwen3_vl_chat_template

from trl_multimodal_rft import MultimodalSFTTrainer
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.features import restore_media
from trl_multimodal_rft.data.rows.unread import check_columns
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.encoding.supervised import SupervisedEncoder
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate


QUESTION = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    soundfile.write(folder / "tone.wav", audio(0.4)["audio"], RATE, subtype="FLOAT")
    image(84, 56)["image"].save(folder / "picture.png")
    return folder


def rows(n: int = 8, **columns) -> Dataset:
    return Dataset.from_list([{"prompt": QUESTION, **columns} for _ in range(n)])


def sounds(folder, column: str) -> Dataset:
    return rows(**{column: str(folder / "tone.wav")}).cast_column(column, Audio())


def pictures(folder, column: str) -> Dataset:
    return rows(**{column: str(folder / "picture.png")}).cast_column(column, Image())


def made(tmp_path, dataset, family="qwen2_audio", trainer_class=InjectedOurs, **options):
    return make_trainer(trainer_class, family, dataset, tmp_path, **options)


def warnings_of(caplog) -> list[str]:
    messages = [record.getMessage().removeprefix("[RANK 0] ") for record in caplog.records]
    return [message for message in messages if "no prompt gets these media" in message]


# Columns


def as_parquet(dataset, path):
    dataset.to_parquet(path / "rows.parquet")
    return load_dataset("parquet", data_files=str(path / "rows.parquet"), split="train", cache_dir=str(path / "cache"))


def as_folder(dataset, path):
    dataset.save_to_disk(path / "rows")
    return load_from_disk(path / "rows")


def as_stream(dataset, path):
    dataset.to_parquet(path / "rows.parquet")
    return load_dataset("parquet", data_files=str(path / "rows.parquet"), split="train", streaming=True)


BLOCK = {"type": "image", "image": "data:image/png;base64,AAAA"}

UNREAD = {
    "feature": (lambda f: sounds(f, "speech"), "'speech' (feature Audio): rename it to 'audio'"),
    "undecoded": (
        lambda f: sounds(f, "speech").cast_column("speech", Audio(decode=False)),
        "'speech' (feature Audio): rename it to 'audio'",
    ),
    "list": (lambda f: rows(shots=[image(9, 9)["image"]] * 2), "'shots' (feature Image): rename it to 'images'"),
    "nested": (
        lambda f: rows(extra={"view": str(f / "picture.png")}).cast_column("extra", {"view": Image()}),
        "'extra.view' (feature Image): move it to 'image'",
    ),
    "bytes": (lambda f: rows(voice={"bytes": b"RIFF", "path": None}), "'voice' (bytes): rename it to 'audio'"),
    "binary": (lambda f: rows(data=b"RIFF"), "'data' (bytes): rename it to 'audio', 'image' or 'video'"),
    "array": (
        lambda f: rows(clip={"array": [0.5] * 9, "sampling_rate": RATE}),
        "'clip' (arrays with their rate): rename it to 'audio'",
    ),
    "blocks": (
        lambda f: rows(messages=[{"role": "user", "content": [BLOCK]}]),
        "'messages.content' (blocks): move them to 'prompt'",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_column_of_media_that_nothing_reads_raises(name, folder):
    make, message = UNREAD[name]
    with pytest.raises(MediaError) as error:
        check_columns(make(folder), "`train_dataset`")
    assert str(error.value).startswith("`train_dataset`: no prompt gets these media, and there are no others")
    assert message in str(error.value) and "`ignored_media_columns`" in str(error.value)


@pytest.mark.parametrize("load_again", [as_parquet, as_folder, as_stream])
@pytest.mark.parametrize("make", [sounds, pictures])
def test_column_is_found_however_it_was_loaded(load_again, make, folder, tmp_path):
    with pytest.raises(MediaError, match=r"'seen' \(feature .*\): rename it to"):
        check_columns(load_again(make(folder, "seen"), tmp_path), "rows")
    assert not check_columns(load_again(make(folder, "audio" if make is sounds else "image"), tmp_path), "rows")


def test_supervised_rows_are_looked_at(folder, tmp_path):
    supervised = sounds(folder, "speech").add_column("completion", ["A cat."] * 8)
    objects = {"ptx_dataset": supervised}
    with pytest.raises(MediaError, match=r"^`ptx_dataset`: no prompt gets .*'speech' \(feature Audio\)"):
        made(tmp_path, text_rows(), trainer_class=TRAINERS["ppo"], objects=objects, ptx_coef=1.0)
    # The trainer reads both columns there
    chat = [
        {"role": "user", "content": [BLOCK]},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
    ]
    objects = {"ptx_dataset": Dataset.from_list([{"messages": chat}] * 4)}
    made(tmp_path, text_rows(), trainer_class=TRAINERS["ppo"], objects=objects, ptx_coef=1.0)


@pytest.mark.parametrize(
    ("column", "value", "remedy"),
    [
        ("audio_path", "clips/0001.wav", "rename it to 'audio'"),
        ("image_path", "https://host/a/b.JPG?size=2", "rename it to 'image'"),
        ("clips", ["clips/my 1.mp4", "clips/my 2.mp4"], "rename it to 'videos'"),
        ("seen", "data:image/png;base64,AAAA", "rename it to 'image'"),
        ("extra", {"where": {"picture": "a.webp"}}, "move it to 'image'"),
        ("audio_path", {"path": "clips/0001.flac"}, "move it to 'audio'"),
        ("memo", "New Recording 12.m4a", "rename it to 'audio'"),
        ("seen", ["Bildschirmfoto 2024-05-01 um 10.22.33.png"] * 2, "rename it to 'images'"),
        ("clip", {"name": "WhatsApp Video 2024-05-01 at 10.22.33 (1).mp4"}, "move it to 'video'"),
    ],
)
def test_text_that_looks_like_a_file(column, value, remedy):
    """It is an error for a model that supports such media, and a warning for another."""
    kind = remedy.split("'")[1].rstrip("s")
    data = rows(**{column: value})
    name = "`train_dataset`"
    with pytest.raises(MediaError) as error:
        check_columns(data, name, model_modalities=[kind])
    message = str(error.value)
    assert message.startswith("`train_dataset`: no prompt gets these media, and there are no others, so that the")
    assert f"'{column}" in message and remedy in message
    assert "texts that look like files" in message and "`ignored_media_columns`" in message
    warning = check_columns(data, name, model_modalities=["image" if kind == "audio" else "audio"])
    assert warning.startswith(f"`train_dataset`: no prompt gets these media: '{column}") and remedy in warning
    ignored = check_columns(data, name, [column], model_modalities=[kind])
    assert ignored.startswith(f"`train_dataset`: no prompt has media, so that a model for {kind} gets text alone.")


def test_rows_from_all_over_are_looked_at():
    for answer in ("see bird.wav", "my bird.wav"):  # a sentence, or a name with spaces, which every row would have
        answers = rows(7).add_column("solution", ["a bird"] * 6 + [answer])
        assert "no prompt gets" not in check_columns(answers, "rows", model_modalities=["audio"])
    some = rows(7).add_column("solution", ["a bird"] * 6 + ["bird.wav"])
    assert "'solution'" in check_columns(some, "rows", model_modalities=["audio"])
    with pytest.raises(MediaError, match="'path'"):
        check_columns(
            rows(1000).add_column("path", [None] * 500 + ["a.wav"] * 500), "rows", model_modalities=["audio"]
        )
    for solution in ("A cat.", "see: a/b.png", "3.5", "main.py", "What is in a.wav?", ["A", "B"]):
        others = rows(solution=solution, sizes=[[1.0, 2.0]], code="")
        warning = check_columns(others, "rows", model_modalities=["audio", "image"])
        assert warning.startswith("rows: no prompt has media, so that a model for image, audio gets text alone.")
    listed = [{"prompt": "What?", "thumb": b"12", "image": None} for _ in range(41)]
    with pytest.raises(MediaError, match="there are no others"):
        check_columns(listed, "rows")
    listed[1]["image"] = image_rows(1)[0]["image"]  # no row is missing
    assert "'thumb'" in check_columns(listed, "rows")


@pytest.mark.parametrize("trainer_class", [InjectedOurs, TRAINERS["rloo"], TRAINERS["ppo"], MultimodalSFTTrainer])
def test_no_trainer_trains_deaf(trainer_class, folder, tmp_path):
    deaf = rows(sound="clips/0001.wav", completion="A bird.")
    heard = sounds(folder, "audio").add_column("completion", ["A bird."] * 8)
    remedy = (
        r"'sound' \(texts that look like files, .*\): rename it to 'audio' \(`rename_column\('sound', 'audio'\)`\)"
    )
    for train, test, name in (
        (deaf, None, "train_dataset"),
        (heard, deaf, "eval_dataset"),
        (heard, {"clean": heard, "noisy": deaf}, r"eval_dataset\['noisy'\]"),
    ):
        with pytest.raises(MediaError, match=f"^`{name}`: no prompt gets .* the model would get text alone: {remedy}"):
            if trainer_class is MultimodalSFTTrainer:
                config = CONFIGS["sft"](str(tmp_path), use_cpu=True, bf16=False)
                MultimodalSFTTrainer(str(saved("qwen2_audio")), config, None, train, test)  # by name
            else:
                made(tmp_path, train, trainer_class=trainer_class, objects={"eval_dataset": test})


@pytest.mark.parametrize("known", [True, False])
def test_stream_of_text_that_looks_like_files(known, folder, tmp_path):
    table = rows(audio_path="clips/0001.wav")
    deaf = table.to_iterable_dataset() if known else IterableDataset.from_generator(lambda: iter(table))
    trainer = made(tmp_path, deaf, max_steps=1)
    with pytest.raises(MediaError, match="^`train_dataset`: no prompt gets .* text alone: 'audio_path'"):
        trainer.train()
    # The first rows of one dataset have no sound, and later ones may
    columns = {"audio": [None] * 8 + [str(folder / "tone.wav")], "reference": ["a.wav"] * 9}
    mixed = Dataset.from_dict({"prompt": ["What?"] * 9, **columns}).to_iterable_dataset()
    made(tmp_path, mixed, max_steps=1).train()


def test_column_beside_media_that_are_read_warns_once(folder, tmp_path, caplog):
    beside = sounds(folder, "audio").add_column("reference", [str(folder / "tone.wav")] * 8)
    beside = beside.cast_column("reference", Audio())
    inline = Dataset.from_list([{"prompt": [{"role": "user", "content": [BLOCK]}], "reference": b"RIFF"}] * 4)
    few = rows(40, reference=b"RIFF").add_column("image", [None] * 39 + [str(folder / "picture.png")])
    made(tmp_path, beside)
    (warning,) = warnings_of(caplog)
    for each in (warning, *(check_columns(data, "`train_dataset`") for data in (inline, few))):
        assert each.startswith("`train_dataset`: no prompt gets these media: 'reference'")
    for absent in ([None] * 8, [[] for _ in range(8)]):
        with pytest.raises(MediaError, match="and there are no others"):
            check_columns(rows(reference=b"RIFF").add_column("images", absent), "rows")
    both = pictures(folder, "image").add_column("speech", [b"RIFF"] * 8)
    with pytest.raises(MediaError, match="and there are no others"):
        check_columns(both, "rows", ["image"])


def beside(*media) -> Dataset:
    """Rows with an answer and one of these images each."""
    answers = {name: [{"role": "assistant", "content": name}] for name in ("completion", "chosen", "rejected")}
    return Dataset.from_list([{"prompt": QUESTION, **answers, "image": each} for each in media])


def test_empty_cells_of_media_are_counted(tmp_path, caplog):
    made(tmp_path, beside(None, PNG, PNG, None).select([1, 0, 2, 3, 0]), "qwen2_5_vl")
    (told,) = [each for each in caplog.messages if "is empty" in each]
    assert told.endswith(
        "`train_dataset`: column 'image' is empty in 3 of 5 rows, first in 1. Their prompts have no such media."
    )


NOTHING = {
    "no medium": lambda: beside(None, None),
    "no list": lambda: beside([], []).rename_column("image", "images").cast_column("images", List(Image())),
    "blanks": lambda: beside(" ", ""),
    "selected": lambda: beside(PNG, None, None).select([1, 2]),
}


@pytest.mark.parametrize("form", NOTHING)
@pytest.mark.parametrize("kind", ["grpo", "sft", "dpo", "reward", "distillation"])
def test_a_column_without_any_medium_raises(form, kind, tmp_path):
    dataset = NOTHING[form]()
    column = dataset.column_names[-1]
    options = {"family": "qwen2_5_vl", "trainer_class": TRAINERS[kind]}
    options |= {} if kind == "grpo" else {"reward": None}
    with pytest.raises(MediaError, match=f"no row has anything in '{column}', so that the model would get text alone"):
        made(tmp_path, dataset, **options)
    made(tmp_path, dataset, ignored_media_columns=[column], **options)


def test_looking_decodes_nothing():
    """Undecodable media raise on use."""
    broken = rows(audio={"bytes": b"broken", "path": None}, solution="a cat").cast_column("audio", Audio())
    assert not check_columns(broken, "rows")
    with pytest.raises(MediaError, match="'speech'"):
        check_columns(broken.rename_column("audio", "speech"), "rows")


@pytest.mark.parametrize("form", ["stream", "transform"])
def test_rows_that_are_not_known_yet_are_looked_at_when_they_come(form, folder, tmp_path, caplog):
    read = []

    def generate():
        for i in range(100):
            read.append(i)
            yield {"prompt": QUESTION, "speech": sound(0.4)}

    def transform(batch):
        read.extend(batch["prompt"])
        return {**batch, "speech": [sound(0.4)] * len(batch["prompt"])}

    dataset = IterableDataset.from_generator(generate) if form == "stream" else rows().with_transform(transform)
    trainer = made(tmp_path, dataset, max_steps=2)
    assert not read
    with pytest.raises(MediaError, match=r"and there are no others.*'speech' \(of type dict\): rename it to 'audio'"):
        trainer.train()


def test_environments_read_columns_themselves(folder, tmp_path):
    class Environment:
        def reset(self, **columns):
            return None

        def listen(self) -> str:
            """Tells what the sound is."""
            return "a bird"

    model, processor = load("qwen3_vl")
    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    objects = {"model": model, "processing_class": processor, "environment_factory": Environment}
    made(tmp_path, sounds(folder, "speech"), objects=objects)


# Ignored columns


@pytest.mark.parametrize("column", ["audio", "speech"])
def test_ignored_column_goes_to_rewards_alone(column, folder):
    heard = []

    def listening(completions, **columns):
        heard.extend(columns[column])
        return [float(i) for i in range(len(completions))]

    dataset = sounds(folder, column).cast_column(column, Audio(decode=False))
    result = run(InjectedOurs, "qwen2_audio", dataset, reward=listening, ignored_media_columns=[column])
    assert {medium["path"] for medium in heard} == {str(folder / "tone.wav")}
    assert result.trainer.card_notes.modalities == set()


@pytest.mark.parametrize(("value", "message"), [("audio", r"write \['audio'\]"), (["prompt"], "always read")])
def test_ignored_columns_are_names(value, message, tmp_path):
    for config in (partial(CONFIGS["grpo"], str(tmp_path), use_cpu=True, bf16=False), EvaluationConfig):
        with pytest.raises(ValueError, match=f"`ignored_media_columns`.*{message}"):
            config(ignored_media_columns=value)


def test_ignored_columns_from_the_command_line():
    line = "--output_dir out --use_cpu true --bf16 false --ignored_media_columns audio reference"
    (args,) = TrlParser(CONFIGS["grpo"]).parse_args_and_config(line.split())
    assert args.ignored_media_columns == ["audio", "reference"]


# Prompts by other names


@pytest.mark.parametrize(
    "column", ["messages", "conversations", "conversation", "question", "problem", "query", "ask"]
)
def test_prompt_by_another_name_is_named(column):
    wrong = text_rows().rename_column("prompt", column).add_column("answer", ["a"] * 8)
    remedy = (
        "; rename the column of prompts to 'prompt'"
        if column == "ask"
        else f"rename (the column )?'{column}' to 'prompt'"
    )  # not guessed
    with pytest.raises(ValueError, match=f"^`train_dataset` has no column 'prompt', only .*{remedy}"):
        check_columns(wrong, "`train_dataset`")


def test_all_warnings_of_the_first_rows_are_returned():
    """Of media that no prompt gets, and of options that change none of the prompts' media."""
    first = rows(2, image="a.png", audio_path="a.wav")
    options = {"`rollout_view`": {"audio"}, "`loss_view`": {"video"}}
    warning = check_columns(first, "The batch", dataset_part="first", option_modalities=options)
    assert "no prompt gets these media: 'audio_path'" in warning
    assert all(f"The batch: {option} changes" in warning for option in options)


# Evaluation and experience


def silent(completions, **columns):
    return [0.0] * len(completions)


def test_evaluation_looks_at_its_rows(folder, caplog):
    MultiProcessAdapter.warning_once.cache_clear()
    config = EvaluationConfig(max_completion_length=2)
    speech = sounds(folder, "speech").cast_column("speech", Audio(decode=False)).select(range(2))
    for dataset in (speech, list(speech)):
        with pytest.raises(MediaError, match="^The dataset: no prompt gets these media, and there are no others"):
            evaluate(*load("qwen2_audio"), dataset, silent, config)
    with pytest.raises(
        ValueError, match="^The dataset has no column 'prompt', only .*rename the column 'question' to 'prompt'"
    ):
        evaluate(*load("qwen2_audio"), text_rows(2).rename_column("prompt", "question"), silent, config)
    transformed = with_media(text_rows(2), "speech", [sound(0.4)] * 2)
    for dataset in (transformed, rows(2, audio_path="a.wav"), list(rows(2, audio_path="a.wav"))):
        with pytest.raises(MediaError, match="^The dataset: no prompt gets these media, and there are no others"):
            evaluate(*load("qwen2_audio"), dataset, silent, config)
    evaluate(*load("qwen2_5_vl"), rows(2, audio_path="a.wav"), silent, config)
    assert len(warnings_of(caplog)) == 1
    for column in ("speech", "audio"):
        config = EvaluationConfig(max_completion_length=2, ignored_media_columns=[column])
        dataset = speech if column == "speech" else speech.rename_column("speech", "audio")
        found = evaluate(*load("qwen2_audio"), dataset, silent, config)
        assert found.rows[0]["prompt"] == "What is it?"


# Blocks


def encoded(family, prompt, **columns):
    model, processor = FAMILIES[family].build()
    (row,) = rows_to_messages([{"prompt": prompt, **columns}])
    return encode_prompt(row["prompt"], processor, model)


def assert_same(a, b):
    assert a.input_ids.tolist() == b.input_ids.tolist()
    assert a.media.keys() == b.media.keys() and a.media
    assert all(torch.equal(a.media[name], b.media[name]) for name in a.media)


def in_base64(path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def decoded(medium):
    value = load_medium(medium)
    return np.asarray(value[0] if medium.modality == "video" else value)


def test_blocks_of_others_are_the_same(folder):
    tone = folder / "tone.wav"
    picture = folder / "picture.png"
    frames = list(video(4, 56, 56)["video"])
    uri = f"data:image/png;base64,{in_base64(picture)}"
    same = {
        ("audio", tone): [
            {"type": "input_audio", "input_audio": {"data": in_base64(tone), "format": "wav"}},
            {"type": "input_audio", "data": in_base64(tone), "format": "wav", "input_audio": None},
            {"type": "input_audio", "input_audio": {"data": tone.read_bytes(), "format": "wav"}},
            {"type": "audio_url", "audio_url": str(tone)},
            {"type": "audio_url", "audio_url": {"url": tone.as_uri()}},
            {"type": "audio", "audio": {"data": f"data:audio/wav;base64,{in_base64(tone)}"}},
        ],
        ("image", picture): [
            {"type": "image_url", "image_url": {"url": uri, "detail": "high"}},
            {"type": "image_url", "image_url": str(picture)},
            {"type": "input_image", "image_url": uri, "detail": "auto"},
            {"type": "input_image", "image_url": {"url": uri}},
            {"type": "image", "image": {"base64": in_base64(picture)}},
        ],
        ("video", "frames"): [{"type": form, "video_url": frames} for form in ("video_url", "input_video")],
    }
    for (modality, source), others in same.items():
        expected = decoded(ref(modality, frames if modality == "video" else source))
        for block in others:
            (medium,) = iter_refs(rows_to_messages([{"prompt": user(block, text("What?"))}]))
            assert (medium.modality, medium.options) == (modality, {})
            np.testing.assert_array_equal(decoded(medium), expected)


def test_text_blocks_of_others_are_text_and_what_they_leave_empty_is_nothing():
    answer = [{"type": "output_text", "text": "This."}, {"type": "refusal", "refusal": "No."}]
    prompt = [*user({"type": "input_text", "text": "What?"}), {"role": "assistant", "content": answer}]
    (row,) = rows_to_messages([{"prompt": prompt}])
    assert [message["content"] for message in row["prompt"]] == [[text("What?")], [text("This."), text("No.")]]
    block = {"type": "text", "text": "What?", "audio": None, "image": "", "images": [], "annotations": ["page 3.png"]}
    (row,) = rows_to_messages([{"prompt": [{"role": "user", "content": [block], "images": []}]}])
    assert not list(iter_refs(row))


PNG = image(9, 9)["image"]


@pytest.mark.parametrize(
    ("block", "key"),
    [
        ({"type": "sound", "sound": "a.wav"}, "sound"),
        ({"type": "sound", "of": "a.wav"}, "of"),
        ({"type": "sound", "sound": {"array": [0.1], "sampling_rate": 8000}}, "sound"),
        ({"type": "picture", "picture": PNG}, "picture"),
        ({"type": "pdf", "pdf": b"%PDF"}, "pdf"),
        ({"type": "document", "parts": [{"page": {"image": "pages/1.png"}}]}, "parts"),
        ({"type": "thinking", "thinking": "A bird?", "image": "i.png"}, "image"),
        ({"type": "tool_result", "content": [{"type": "image", "path": "i.png"}]}, "content"),
        ({"type": "text", "text": "What?", "audio": "a.wav"}, "audio"),
        ({"type": "text", "text": "see a.wav", "sound": "a.wav"}, "sound"),
        ({"type": "text", "text": "What?", "image": PNG}, "image"),
        ({"type": "text", "text": "What?", "image_url": {"url": "http://host/i"}}, "image_url"),
        ({"type": "text", "text": "What?", "shown": PNG}, "shown"),
        ({"type": "image", "image": "i.png", "audio": "a.wav"}, "audio"),
        ({"type": "image", "file": "i.png"}, "file"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}, "source"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
    ],
)
def test_block_with_media_that_nothing_reads_raises(block, key):
    dataset = [
        {"prompt": "fine"},
        {"prompt": [*user(text("Look.")), *user(text("Well?"), block)], "images": ["i.png"]},
    ]
    with pytest.raises(MediaError) as error:
        rows_to_messages(dataset)
    assert str(error.value).startswith(
        f"row 1, column 'prompt[1].content[1]': nothing reads '{key}' of a block of type '{block['type']}'"
    )
    assert "known types are 'text', 'image', 'audio' and 'video'" in str(error.value)


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ({"role": "user", "content": "?", "images": ["i.png"]}, "nothing reads the media in 'images' of a message"),
        ({"role": "user", "content": "?", "picture": b"123"}, "nothing reads the media in 'picture' of a message"),
        (
            {"role": "user", "content": "?", "attachments": ["a.png"]},
            "nothing reads the media in 'attachments' of a mes",
        ),
        ({"role": "user", "content": "?", "image_path": "a.png"}, "nothing reads the media in 'image_path' of a mess"),
        ({"role": "user", "content": {"type": "image", "image": "i.png"}}, "nothing reads the media in 'content'"),
        ({"role": "User", "content": "?"}, "the role is 'User'; write 'user'"),
        ({"role": " ASSISTANT", "content": "?"}, "the role is ' ASSISTANT'; write 'assistant'"),
        ({"role": "Bot", "content": "?"}, "the role is 'Bot'; write 'assistant'"),
        ({"role": "GPT", "content": "?"}, "the role is 'GPT'; convert the sharegpt rows"),
        ({"from": "human", "value": "<image>What?"}, "a message must be .* got \\['from', 'value'\\]"),
    ],
)
def test_message_of_another_layout_raises(message, found):
    with pytest.raises(MediaError, match=rf"^row 0, column 'prompt\[0\]': {found}"):
        rows_to_messages([{"prompt": [message]}])


@pytest.mark.parametrize("block", [{"text": "?"}, {"image": PNG}, "text", None])
def test_block_without_a_type_is_named(block):
    found = sorted(block) if isinstance(block, dict) else f"a {type(block).__name__}"
    with pytest.raises(MediaError) as error:
        rows_to_messages([{"prompt": user(block)}])
    assert str(error.value).endswith(f"with a 'type', such as {{'type': 'text', 'text': ...}}, got {found}")


def test_block_that_the_template_leaves_out_raises():
    prompt = user(text("Look."), {"type": "citation", "text": "A book."})
    message = r"row \d, column 'prompt\[0\].content\[1\]': the chat template leaves out .*'citation'"
    with pytest.raises(MediaError, match=message):
        run(InjectedOurs, "qwen2_audio", Dataset.from_list([{"prompt": prompt}] * 4))
    model, processor = load("qwen2_audio")
    written = "{% elif block.type == 'citation' %}({{ block.text }}){% endif %}{% endfor %}"
    processor.chat_template = processor.chat_template.replace("{% endif %}{% endfor %}", written)
    (row,) = rows_to_messages([{"prompt": prompt}])
    ids = encode_prompt(row["prompt"], processor, model).input_ids
    assert "Look.(A book.)" in processor.tokenizer.decode(ids)


KEYS = {
    "reasoning_content": "It sings.",
    "thinking": "It sings.",
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}],
    "function_call": {"name": "look"},
    "weight": 0,
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("place", [1, 3])
def test_keys_that_the_template_leaves_out_raise(key, place):
    """Of an earlier turn, too, though a template that knows thoughts may leave out those of earlier turns."""
    turns = [*user(text("Hm?")), {"role": "assistant", "content": [text("A bird.")], "name": "bot", "id": ""}] * 2
    turns[place] = {**turns[place], key: KEYS[key]}
    model, processor = load("qwen2_audio")
    message = rf"^row 4, column 'prompt\[{place}\]': the chat template leaves out '{key}' of a message, so the model w"
    with pytest.raises(MediaError, match=message):
        encode_prompt(turns, processor, model, row=4)
    known = f"{{% if loop.last and message.{key} is defined %}}{{{{ message.{key} }}}}{{% endif %}}{{% endfor %}}"
    processor.chat_template = processor.chat_template.rsplit("{% endfor %}", 1)
    processor.chat_template = known.join(processor.chat_template)
    assert len(encode_prompt(turns, processor, model)) > 0


def test_thoughts_in_blocks_that_the_template_leaves_out_raise():
    thought = [{"role": "assistant", "content": [{"type": "thinking", "thinking": "A bird in a.wav?"}, text("Yes.")]}]
    with pytest.raises(MediaError, match=r"'prompt\[1\].content\[0\]': .* leaves out blocks of type 'thinking'"):
        encoded("qwen2_audio", [*user(text("?")), *thought])


# Tags


def test_tags_are_places_of_their_media():
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "<image>\nLike <image>? <audio>"},
        {"role": "assistant", "content": "An <image>."},
        *user(text("And <image>?")),
    ]
    row = {"prompt": prompt, "images": ["i", "j", "k"], "audio": "a", "video": "v"}
    (out,) = rows_to_messages([row])
    assert [message["content"] for message in restore_media(out["prompt"])] == [
        [text("Be brief.")],
        [
            {"type": "video", "video": "v"},
            {"type": "image", "image": "i"},
            text("\nLike "),
            {"type": "image", "image": "j"},
            text("? "),
            {"type": "audio", "audio": "a"},
        ],
        [text("An <image>.")],
        [text("And "), {"type": "image", "image": "k"}, text("?")],
    ]
    assert row["prompt"][1]["content"] == "<image>\nLike <image>? <audio>"  # the row is unchanged
    prompt = user({"type": "image"}, text("What does <image> do, what <audio>?"))
    (row,) = rows_to_messages([{"prompt": prompt, "image": "i.png"}])
    assert row["prompt"][0]["content"][1:] == prompt[0]["content"][1:]


@pytest.mark.parametrize("prompt", ["<image> and <image>?", [{"role": "user", "content": "<image> and <image>?"}]])
@pytest.mark.parametrize("images", [["i"], ["i", "j", "k"]])
def test_as_many_tags_as_media(prompt, images):
    with pytest.raises(MediaError) as error:
        rows_to_messages([{"prompt": "fine"}, {"prompt": prompt, "images": images}])
    assert str(error.value).startswith(
        f"row 1, column 'images': has {len(images)} images for 2 '<image>' in the text of the prompt; write one"
    )


@pytest.mark.parametrize("mark", ["<img>", "<image 1>", "<IMAGE_2>", "<Img/>", "<sound>", "<Audio>", "<clip>"])
def test_marks_of_others_are_no_text(mark):
    column = {"<i": "image", "<c": "video"}.get(mark[:2].lower(), "audio")
    rows = [{"prompt": f"Is {mark} red?", column: f"a.{column}"}]
    with pytest.raises(
        MediaError, match=f"column 'prompt': '{mark}' in the text is no placeholder; write '<{column}>'"
    ):
        rows_to_messages(rows)
    for prompt in (user({"type": column}, text(mark)), f"<{column}>{mark}", f'<img src="{mark[1:-1]}.png">'):
        rows_to_messages([{**rows[0], "prompt": prompt}])
    rows_to_messages([{"prompt": mark}])


def test_tags_are_trained_on(folder):
    """The model sees them at their position, instead of words next to an image at the start."""
    tagged = pictures(folder, "image").map(lambda row: {"prompt": "Is <image> red?"})
    blocks = user(text("Is "), {"type": "image"}, text(" red?"))
    placed = Dataset.from_list([{"prompt": blocks, "image": str(folder / "picture.png")}] * 8)
    ids = []
    for rows in (tagged, placed):
        trainer = run(InjectedOurs, "qwen2_5_vl", rows, sampler=Remembers, max_steps=1).trainer
        ((prompts, *_),) = trainer.sampler.calls
        ids.append([prompt.input_ids.tolist() for prompt in prompts])
    assert ids[0] == ids[1]


def test_plain_text_keeps_the_token_of_its_model(folder):
    """Such a text may have its template applied. Encoding raises as for any placeholder in a text."""
    dataset = pictures(folder, "image").map(lambda row: {"prompt": "USER: <image>\nWhat? ASSISTANT:"})
    with pytest.raises(MediaError, match=r"row \d, column 'image': the text of the prompt holds the placeholder '<im"):
        run(InjectedOurs, "llava", dataset)
    (row,) = rows_to_messages([{"prompt": "<image> <audio>", "image": "i", "audio": "a"}], placeholders=["<image>"])
    blocks = {"type": "image", "image": "i"}, text("<image> "), {"type": "audio", "audio": "a"}
    assert restore_media(row["prompt"]) == user(*blocks)


def test_supervised_rows_have_tags_and_ignored_columns(folder):
    model, processor = load("qwen2_5_vl")
    row = {"prompt": "Is <image> red?", "completion": "No, see <image>.", "image": str(folder / "picture.png")}
    ends = [processor.tokenizer.eos_token_id]
    (prompt,), ids, _ = SupervisedEncoder(processor, model).encode_pairs([row], ends)
    blocks = text("Is "), {"type": "image", "image": row["image"]}, text(" red?")
    assert_same(prompt, encoded("qwen2_5_vl", user(*blocks)))
    assert processor.tokenizer.decode(ids[0][:-1]) == "No, see <image>."
    (prompt,), _, _ = SupervisedEncoder(processor, model, ignored_media_columns=["image"]).encode_pairs([row], ends)
    assert prompt.modalities == frozenset()


# Regression tests


@pytest.mark.parametrize("more", [{}, {"label": 1}])
def test_inline_media_without_a_column_of_text_train(more, tmp_path):
    block = {"type": "image", "image": image_rows(1)[0]["image"]}
    data = Dataset.from_list([{"prompt": user(block, text(f"Cat? {i}")), **more} for i in range(4)])
    trainer = made(tmp_path, data, "qwen2_5_vl", TRAINERS["grpo"], max_steps=1, self_check=True)
    trainer.train()
    assert trainer.checks.self_check.media["image"] > 0


@pytest.mark.parametrize("feature", [None, List(Audio())], ids=["paths", "feature"])
def test_a_list_in_a_column_of_one_raises(feature):
    data = rows(audio=["a.wav", "b.wav"])
    data = data if feature is None else data.cast_column("audio", feature)
    with pytest.raises(MediaError, match="^rows: column 'audio' holds a list; rename the column to 'audios'"):
        check_columns(data, "rows")
