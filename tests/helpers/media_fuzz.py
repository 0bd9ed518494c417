# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Loads damaged media, and prints failures: `python media_fuzz.py FOLDER SEED SECONDS [NUMBER]`.

A failure is any error but a [`MediaError`] that names the row, an invalid result, much memory or time, or a file or
process that a damaged file opens. An input is a function of seed and number, so that one input can run alone.
"""

import contextlib
import ctypes
import faulthandler
import io
import os
import random
import resource
import struct
import sys
import time
import traceback
import warnings
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image, features

from helpers.files import LISTS, image_file, load_by_qwen, sound_file, video_file
from trl_multimodal_rft.data.reading import decoding
from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef
from trl_multimodal_rft.data.reading.rules import MediaRules


RULES = MediaRules(max_image_pixels=2**21, max_audio_seconds=60.0, max_video_seconds=60.0, max_video_pixels=2**24)
MOST_MEGABYTES = 300  # memory that an input may add
MOST_SECONDS = 15  # per input, also on a busy machine
# in Hz and pixels
RATE = 8000
WIDTH = 64
HEIGHT = 48

# Audit events of started processes
STARTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.spawn")
IN_OPEN = 0x20  # inotify's mask for opened files


def say(wrong):
    sys.stdout.write(wrong + "\n")


def images():
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
    kinds = {"PNG": "RGBA", "JPEG": "RGB", "GIF": "P", "BMP": "RGB", "TIFF": "RGB", "ICO": "RGBA", "PPM": "RGB"}
    kinds |= {"TGA": "RGBA", "WEBP": "RGBA"}
    kinds |= {"AVIF": "RGB"} if features.check("avif") else {}
    kinds |= {"JPEG2000": "RGB"} if features.check("jpg_2000") else {}
    for name, mode in kinds.items():
        image = Image.fromarray(noise).convert(mode)
        several = {"save_all": True, "append_images": [image] * 2} if name in ("GIF", "TIFF", "WEBP") else {}
        yield name, image_file(image, name, **several)


def sounds():
    sound = 0.3 * np.sin(np.arange(RATE) / 5)
    subtypes = {"WAV": ["PCM_16", "FLOAT", "IMA_ADPCM"], "OGG": ["VORBIS", "OPUS"], "CAF": ["ALAC_16"]}
    for name in ("WAV", "FLAC", "MP3", "OGG", "AIFF", "CAF", "AU", "W64", "RF64", "NIST"):
        for subtype in subtypes.get(name, [None]):
            yield f"{name}.{subtype}", sound_file(np.stack([sound, sound / 2], 1), RATE, name, subtype=subtype)
    for name in ("mp4", "matroska", "mpegts", "adts"):
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=name) as container:
            stream = container.add_stream("aac", rate=RATE, layout="mono")
            frame = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format="fltp", layout="mono")
            frame.sample_rate = RATE
            container.mux(stream.encode(frame))
            container.mux(stream.encode())
        yield f"aac in {name}", buffer.getvalue()


def videos():
    frames = np.random.default_rng(0).integers(0, 256, (8, HEIGHT, WIDTH, 3), np.uint8)
    for name, codec in (
        ("mp4", "libx264"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("mpegts", "mpeg2video"),
        ("flv", "flv"),
        ("asf", "wmv2"),
        ("ivf", "libvpx-vp9"),
        ("fragmented mp4", "libx264"),
    ):
        mux = {"movflags": "frag_keyframe+empty_moov"} if name == "fragmented mp4" else {}
        yield name, video_file(frames, name.split()[-1], codec, 25, mux)
    first, *others = (Image.fromarray(frame) for frame in frames)
    yield "gif", image_file(first, "GIF", save_all=True, append_images=others, duration=100)


def damaged(data, others, texts, chance):
    """Damages a file in a random way, maybe by parts of `others` or `texts`. Returns the way's name and the result."""
    start, end = sorted(chance.choices(range(len(data) + 1), k=2))
    early = chance.randrange(min(len(data), 256) + 1)
    other = chance.choice(others)
    size = chance.choice([0, 1, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1])
    number = struct.pack(chance.choice("<>") + "I", size)
    bits = bytearray(data)
    for i in chance.choices(range(len(data)), k=chance.choice([1, 3, 30])):
        bits[i if chance.random() < 0.5 else i % 256 % len(data)] ^= 1 << chance.randrange(8)
    ways = {
        "cut": lambda: data[:start],
        "cut early": lambda: data[:early],
        "without its start": lambda: data[early:],
        "bits": lambda: bytes(bits),
        "number": lambda: data[:early] + number + data[early + 4 :],
        "zeros": lambda: data[:start] + bytes(end - start) + data[end:],
        "hole": lambda: data[:start] + data[end:],
        "twice": lambda: data[:end] + data[start:],
        "start of another": lambda: other[:early] + data[early:],
        "end of another": lambda: data[:start] + other[start:],
        "followed by another": lambda: data + other,
        "text behind its start": lambda: data[: early % 16] + chance.choice(texts) + data,
        "text behind a tag": lambda: b"ID3\x04\0\0\0\0\0\0" + chance.choice(texts),
        "whole": lambda: data,
    }
    way = chance.choice(list(ways))
    return way, ways[way]()


def check_image(image):
    return image.mode == "RGB" and 0 < image.width * image.height <= RULES.max_image_pixels


def check_sound(samples):
    long = len(samples) / 16000 <= RULES.max_audio_seconds + 0.1
    return samples.dtype == np.float32 and samples.ndim == 1 and len(samples) and np.isfinite(samples).all() and long


def check_video(loaded):
    frames, metadata = loaded
    pixels = np.prod(frames.shape) / 3
    return len(frames) == len(metadata["frames_indices"]) and 0 < pixels <= RULES.max_video_pixels


def loads(ref, chance):
    """Loads a medium in one of several ways. Returns whether the result is valid."""
    decoding.is_torchcodec_usable = chance.choice([TORCHCODEC, lambda: False])
    if ref.modality == "image":
        return check_image(decoding.load_image(ref))
    if ref.modality == "audio":
        window, overlong = chance.choice([(None, "raise"), (0.5, "truncate"), (30.0, "raise")])
        return check_sound(decoding.load_audio(ref, 16000, window, overlong))
    if chance.random() < 0.3:
        return check_video(load_by_qwen(ref, 14))
    return check_video(decoding.load_video(ref))


TORCHCODEC = decoding.is_torchcodec_usable
heard = []  # paths that the interpreter opened or started


def listen(event, args):
    if event in STARTED or event.startswith("socket."):
        heard.append((event, str(args)))
    elif event == "open" and not isinstance(args[0], int):
        path = os.fsdecode(args[0])
        # Imports and tracebacks open files of Python
        if not path.endswith((".py", ".pyc", ".so")) and not path.startswith("<"):
            heard.append((event, path))


def opened_of(watch):
    """Returns whether any process opened a file in the watched folder."""
    with contextlib.suppress(BlockingIOError):
        return bool(os.read(watch, 4096))
    return False


def main(folder, seed, seconds, only=None):
    secrets = folder / "secrets"
    files = folder / "files"
    secrets.mkdir(), files.mkdir()
    intact_files = {"image": dict(images()), "audio": dict(sounds()), "video": dict(videos())}
    decoy = secrets / "decoy.mp4"
    decoy.write_bytes(intact_files["video"]["mp4"])
    texts = [data.replace(b"SECRET", os.fsencode(decoy)) for data in LISTS.values()]
    all_files = [data for entry in intact_files.values() for data in entry.values()]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    # Intact files: at least one decoder must load a file. This also imports the decoders, before opened files count.
    for kind, entry in intact_files.items():
        for name, data in entry.items():
            ref = MediaRef(kind, data, {}, kind, 0, rules=RULES)
            loaded = False
            for number in range(6):
                with contextlib.suppress(MediaError):
                    loaded = loaded or loads(ref, random.Random(number))
            if not loaded:
                say(f"whole {kind} {name} doesn't load")

    # Watch for opened files: those of this process by audit events, those of any process by inotify
    libc = ctypes.CDLL(None)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, os.fsencode(secrets), IN_OPEN) >= 0
    sys.addaudithook(listen)
    # Damaged files, half of them on disk
    deadline = time.monotonic() + seconds
    number = -1
    n_loaded = 0
    n_rejected = 0
    while only is not None or time.monotonic() < deadline:
        number += 1
        chance = random.Random(f"{seed} {number if only is None else only}")
        kind = chance.choice(list(intact_files))
        name, data = chance.choice(list(intact_files[chance.choice([kind, kind, kind, *intact_files])].items()))
        way, data = damaged(data, all_files, texts, chance)
        source = data
        allowed = []
        if chance.random() < 0.5:
            source = str(files / f"{number}{chance.choice(['.mp4', '.wav', '.png', '.m3u8', '.sdp', '.eps', ''])}")
            Path(source).write_bytes(data)
            allowed = [source]
        label = f"{number} as {kind}: {name}, {way}, {len(data)} bytes"
        (folder / "last.txt").write_text(label)
        heard.clear()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.monotonic()
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        try:
            loaded = loads(MediaRef(kind, source, {}, kind, 7, rules=RULES), chance)
            n_loaded += 1
            if not loaded:
                say(f"{label}: neither a medium nor an error")
        except MediaError as error:
            n_rejected += 1
            if not str(error).startswith("row 7, column"):
                say(f"{label}: {error}")
        except Exception:
            say(f"{label}: {traceback.format_exc()}")
        faulthandler.cancel_dump_traceback_later()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        if grown > MOST_MEGABYTES:
            say(f"{label}: {grown:.0f} MB in {time.monotonic() - start:.1f} s")
        unexpected = [entry for entry in heard if entry[0] != "open" or entry[1] not in allowed]
        if unexpected or opened_of(watch):
            say(f"{label}: opened or started {unexpected or decoy}")
        if only is not None:
            break
    sys.stderr.write(f"{number + 1} inputs, {n_loaded} loaded, {n_rejected} named\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
