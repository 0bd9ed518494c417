# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The sound of a video with its frames, compared with the processor and the model called by hand."""

from itertools import product

import av
import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.chats import RATE, audio, image, mosaic, text
from helpers.chats import chat as user
from helpers.encoding import assert_same_features
from helpers.families import FAMILIES
from helpers.trainer_utils import InjectedOurs, run

from trl_multimodal_rft.data.reading.decoding import load_audio, load_sound_of_video, load_video
from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt, hears_videos
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.scores import ScoreRequest


OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
RULES = MediaRules(use_audio_in_video=True, video_fps=4.0)


def write_clip(path, seconds=1.0, sound=True, seed=0, size=64):
    """Writes a video of 8 frames per second with a sound, and returns its path."""
    frames = mosaic(int(8 * seconds), size, size, seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8, width=size, height=size)
        track = container.add_stream("flac", rate=RATE, layout="mono") if sound else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame)))
        container.mux(stream.encode())
        if track is not None:
            samples = (32767 * audio(seconds, seed)["audio"]).astype(np.int16)
            for i in range(0, len(samples), 1024):
                piece = av.AudioFrame.from_ndarray(samples[None, i : i + 1024], format="s16", layout="mono")
                piece.sample_rate = RATE
                piece.pts = i
                container.mux(track.encode(piece))
            container.mux(track.encode())
    return str(path)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Returns paths of clips of a second, with two tokens on each edge, by family and content."""
    folder = tmp_path_factory.mktemp("clips")
    names = {"heard": {}, "other": {"seed": 3}, "silent": {"sound": False, "seed": 1}}
    return {
        family: {name: write_clip(folder / f"{name}-{size}.mkv", size=size, **each) for name, each in names.items()}
        for family, size in zip(OMNI, (56, 64), strict=True)
    }


def block(path, **options):
    return {"type": "video", "path": path, **options}


def encoded(name, *blocks, rules=RULES):
    model, processor = FAMILIES[name].build()
    [row] = rows_to_messages([{"prompt": user(*blocks, text("What is it?"))}], rules=rules)
    return model, processor, encode_prompt(row["prompt"], processor, model)


def ref(path, kind="video", **options):
    return MediaRef(kind, path, options, kind, 0)


def frames_of(path, indices):
    return torch.from_numpy(load_video(ref(path))[0][indices]).permute(0, 3, 1, 2)


def by_hand(processor, text, videos, sounds, slots, images=None):
    """Calls a processor as its documentation says, with decoded media."""
    videos_kwargs = {"fps": 4.0, "do_sample_frames": False, "do_resize": False}
    options = {"audio_kwargs": {"sampling_rate": RATE}, "return_tensors": "pt", "images": images}
    if hasattr(processor, "load_audio_from_video"):
        options |= {"load_audio_from_video": True, "audio_from_video_indices": slots}
    else:
        videos_kwargs["use_audio_in_video"] = True
    return processor(text=[text], videos=videos, audio=sounds, videos_kwargs=videos_kwargs, **options)


EVERY_SECOND = [0, 2, 5, 7]  # of eight frames, as qwen-vl-utils spaces them


def prompts(name, clips):
    """A prompt with a clip, and one with a sound, two clips and an image; each encoded, and by hand."""
    clips = clips[name]
    model, processor, one = encoded(name, block(clips["heard"]))
    token = {kind: getattr(processor, f"{kind}_token") for kind in ("image", "audio", "video")}
    frames = frames_of(clips["heard"], EVERY_SECOND)
    other = frames_of(clips["other"], EVERY_SECOND)
    sounds = [load_audio(ref(clips[each], "audio"), RATE) for each in ("heard", "other")]
    own = audio(0.6, seed=9)["audio"]
    picture = image(64, 64, seed=4)["image"]
    speech = {"type": "audio", "audio": own, "sampling_rate": RATE}
    blocks = [speech, block(clips["heard"]), {"type": "image", "image": picture}, block(clips["other"])]
    _, _, several = encoded(name, *blocks)

    def words(*kinds):
        content = [{"type": kind} for kind in kinds]
        chat = user(*content, text("What is it?"))
        return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)

    assert token["video"] in words("video")
    return model, [
        (one, by_hand(processor, words("video"), [frames], [sounds[0]], [0])),
        (
            several,
            by_hand(
                processor,
                words("audio", "video", "image", "video"),
                [frames, other],
                [own, sounds[0], sounds[1]],
                [None, 0, 1],
                images=[picture],
            ),
        ),
    ]


@pytest.mark.parametrize("name", OMNI)
def test_prompts_are_those_of_the_processor(name, clips):
    model, pairs = prompts(name, clips)
    for ours, expected in pairs:
        assert_same_features(ours, expected)
        assert torch.equal(ours.media["video_second_per_grid"], torch.as_tensor(expected["video_second_per_grid"]))
        assert ours.media["video_second_per_grid"].tolist() == [0.5] * len(ours.media["video_grid_thw"])
        assert hears_videos(model, ours.input_ids) and {"video", "audio"} <= ours.modalities


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OMNI)
def test_scores_are_those_of_the_model(name, packed, clips):
    model, pairs = prompts(name, clips)
    ids = torch.randint(60, 200, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = []
    with torch.no_grad():
        for _, inputs in pairs:
            for row in ids[:, None]:
                whole = {**inputs, "input_ids": torch.cat([inputs["input_ids"], row], dim=1)}
                whole["attention_mask"] = torch.ones_like(whole["input_ids"])
                whole.pop("mm_token_type_ids", None)
                logits = model(**whole, use_audio_in_video=True).logits[:, -6:-1]
                expected.append(logits.log_softmax(-1).gather(-1, row[..., None])[0, :, 0])
                assert (model(**whole).logits[:, -6:-1] - logits).abs().max() > 1e-3  # at other positions
        add_fused_head(model, outputs=("log_probs", "entropy"))
        if packed:
            install_prefix_attention(model)
        prompts_of_rows = [ours for (ours, _), _ in product(pairs, range(2))]
        options = {"packed": packed, "isolate": family_of(model).isolate}
        ones = torch.ones(4, 5, dtype=torch.long)
        logps = completion_scores(model, model, ScoreRequest(prompts_of_rows, ids.repeat(2, 1), ones, **options)).logps
    assert (logps - torch.stack(expected)).abs().max() <= 2e-5


def test_the_trainer_hears_videos(clips, tmp_path):
    paths = [clips[OMNI[0]][name] for name in ("heard", "other")]
    rows = [{"prompt": user(text(f"What is it? {i}")), "video": paths[i % 2]} for i in range(8)]
    options = {"use_audio_in_video": True, "video_fps": 4.0, "max_steps": 2, "self_check": True, "media_prefetch": 1}
    result = run(InjectedOurs, "qwen2_5_omni", Dataset.from_list(rows), **options)
    check = result.trainer.checks.self_check
    assert check.padded < 1e-4 and check.packed < 1e-4


def test_a_span_and_silence(clips):
    clips = clips[OMNI[0]]
    whole = load_audio(ref(clips["heard"], "audio"), RATE)
    span = load_sound_of_video(ref(clips["heard"], video_start=0.25, video_end=0.75), RATE, None, "raise")
    assert np.array_equal(span, whole[RATE // 4 : 3 * RATE // 4])
    assert load_sound_of_video(ref(clips["silent"]), RATE, None, "raise") is None
    with pytest.raises(MediaError, match="audio_overlong"):
        load_sound_of_video(ref(clips["heard"]), RATE, 0.5, "raise")
    assert len(load_sound_of_video(ref(clips["heard"]), RATE, 0.5, "truncate")) == RATE // 2


@pytest.mark.parametrize("name", OMNI)
def test_videos_without_a_sound(name, clips):
    """They are seen alone, but not next to one with a sound."""
    clips = clips[name]
    model, _, silent = encoded(name, block(clips["silent"]))
    _, _, plain = encoded(name, block(clips["silent"]), rules=MediaRules(video_fps=4.0))
    assert torch.equal(silent.input_ids, plain.input_ids) and torch.equal(silent.position_ids, plain.position_ids)
    assert silent.modalities == {"video"} and not hears_videos(model, silent.input_ids)
    with pytest.raises(MediaError, match="has no sound and another video of the prompt has one.*add a silent sound"):
        encoded(name, block(clips["heard"]), block(clips["silent"]))


def test_other_families_refuse(clips):
    with pytest.raises(ValueError, match="Qwen2_5_VLProcessor can't take the sound of videos.*use Qwen2.5-Omni or"):
        encoded("qwen2_5_vl", block(clips[OMNI[0]]["heard"]))


@pytest.mark.parametrize("name", OMNI)
def test_seconds_follow_the_sampled_frames(name, clips):
    """Also where the processor's default is another rate."""
    clips = clips[name]
    for rate, seconds in ((4.0, 0.5), (8.0, 0.25)):
        _, _, prompt = encoded(name, block(clips["silent"]), rules=MediaRules(video_fps=rate))
        assert prompt.media["video_second_per_grid"].tolist() == [seconds]
    with pytest.raises(MediaError, match="the processor takes one rate; set the same 'fps' in both blocks"):
        encoded(name, block(clips["heard"], fps=8.0), block(clips["other"], fps=4.0))
