# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The page of `trl-multimodal-rft chat`, asked over HTTP."""

import http.client
import io
import socket
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers.chats import RATE, audio, chat, text
from helpers.families import encode
from helpers.trainer_utils import load, saved
from peft import LoraConfig, get_peft_model
from PIL import EpsImagePlugin, Image
from transformers import GenerationConfig

from trl_multimodal_rft.cli import arguments
from trl_multimodal_rft.cli import chat as command
from trl_multimodal_rft.scripts.options import Parser


gradio = pytest.importorskip("gradio", exc_type=ImportError)

# Of gradio, about its use of pandas
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

QUESTION = "What do you hear in the audio?"


@pytest.fixture
def served():
    """Serves a page; gives a client of it."""
    from gradio_client import Client

    pages = []

    def serve(*argv):
        parser = Parser("chat")
        arguments.chat(parser)
        page = command.page(*command.load(parser.parse_args([*argv, "--max_completion_length", "6"])))
        pages.append(page)
        _, url, shared = command.serve(page, "127.0.0.1", prevent_thread_lock=True, quiet=True)
        assert url.startswith("http://127.0.0.1:") and shared is None
        return Client(url, verbose=False)

    yield serve
    for page in pages:
        page.close()


def greedy(model, processor, sound):
    config = GenerationConfig(
        max_new_tokens=6,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
        suppress_tokens=[model.config.audio_token_id],
    )
    inputs = encode(processor, chat({"type": "audio", "audio": sound}, text(QUESTION)))
    output = model.generate(**inputs, generation_config=config)
    return processor.tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def test_adapter_and_its_base_hear(served, tmp_path):
    from gradio_client import handle_file
    from gradio_client.exceptions import AppError

    model, processor = load("qwen2_audio")
    sounds = [np.float32(audio(seconds, seed=seed)["audio"]) for seconds, seed in ((0.5, 1), (0.8, 2))]
    by_base = [greedy(model, processor, sound) for sound in sounds]
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    by_adapter = [greedy(model, processor, sound) for sound in sounds]
    assert len({*by_base, *by_adapter}) == 4
    model.save_pretrained(tmp_path / "adapter")

    client = served(str(tmp_path / "adapter"))
    for i, sound in enumerate(sounds):
        soundfile.write(tmp_path / f"{i}.wav", sound, RATE, subtype="FLOAT")
        answers = client.predict(QUESTION, handle_file(tmp_path / f"{i}.wav"), api_name="/ask")
        assert answers == (by_adapter[i], by_base[i])
    (tmp_path / "none.wav").write_text("no sound")
    with pytest.raises(AppError, match="column 'audio'"):
        client.predict(QUESTION, handle_file(tmp_path / "none.wav"), api_name="/ask")
    with pytest.raises(AppError, match="There is no question"):
        client.predict(" ", None, api_name="/ask")


def test_model_beside_another(served):
    folder = str(saved("qwen2_audio"))
    answers = served(folder, "--base", folder).predict("Is there a cat?", None, api_name="/ask")
    assert len(answers) == 2 and answers[0] == answers[1]
    assert served(folder).predict("Is there a cat?", None, api_name="/ask") == answers[0]


SECRETS = "cannot read '/home/me and you/own/a.wav', /own/b.png at https://u:own@h/c?own as hf_own123456"


@pytest.fixture(scope="module")
def port():
    """Of a page whose model repeats what it is asked, or fails as it is told."""

    def answer(text, **media):
        if text in ("ValueError", "RuntimeError"):
            raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[text](SECRETS)
        return "".join(Path(path).read_bytes().hex() for path in media.values()) or text

    page = command.page({"echo": answer}, ("image",))
    command.serve(page, "127.0.0.1", prevent_thread_lock=True, quiet=True)
    yield page.server_port
    page.close()


def asked(port, method="GET", path="/", **headers):
    """The status of a request with these headers alone."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.putrequest(method, path, skip_host=True)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def test_other_sites_are_refused(port):
    """They may have a name that leads here, or a script that asks from the browser of who may ask."""
    here = f"127.0.0.1:{port}"
    for host in (here, f"localhost:{port}", f"192.168.0.7:{port}", f"[::1]:{port}", socket.gethostname()):
        assert asked(port, Host=host) == 200
        assert asked(port, Host=host, Origin=f"http://{host}") == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", "evil@", "", "[::1"):
        assert asked(port, Host=host) == 403
    assert asked(port) in (400, 403)
    for origin in ("http://evil.example", f"http://evil.example:{port}", "null", f"http://{here}.evil.example"):
        assert asked(port, Host=here, Origin=origin) == 403
        assert asked(port, "POST", "/gradio_api/queue/join", Host=here, Origin=origin, Content_Length="0") == 403
    assert command.refusal({"host": "gpu.example:7860"}, "gpu.example") is None


def test_uploads_have_a_largest_size(port, tmp_path, monkeypatch):
    from gradio_client import Client, handle_file

    upload = {"method": "POST", "path": "/gradio_api/upload", "Host": f"127.0.0.1:{port}"}
    form = {"Content_Type": "multipart/form-data; boundary=x"}
    assert asked(port, **upload, **form, Content_Length=str(2**28 + 1)) == 413
    assert asked(port, **upload, **form, Transfer_Encoding="chunked") == 411
    monkeypatch.setattr(command, "_MOST_UPLOADED", 10_000)
    client = Client(f"http://127.0.0.1:{port}", verbose=False)
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)
    for name, side in (("small", 40), ("large", 100)):
        Image.fromarray(pixels[:side, :side]).save(tmp_path / f"{name}.png")
    answer = client.predict("Who?", handle_file(tmp_path / "small.png"), api_name="/ask")
    assert bytes.fromhex(answer) == (tmp_path / "small.png").read_bytes()
    with pytest.raises(Exception, match="413"):
        client.predict("Who?", handle_file(tmp_path / "large.png"), api_name="/ask")


def test_uploads_start_no_program(port, tmp_path, monkeypatch):
    """An EPS that is named like an image, with a program on the path by which Pillow would draw it."""
    from gradio_client import Client, handle_file

    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    program = (  # of gray pixels, which the page wouldn't take as they are
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n1\n"
        b'%ImageData: 9 9 8 1 0 1 1 "image"\n%%EOF\n'
    )
    assert Image.open(io.BytesIO(program)).mode == "L"
    (tmp_path / "i.png").write_bytes(program)
    client = Client(f"http://127.0.0.1:{port}", verbose=False)
    assert bytes.fromhex(client.predict("Who?", handle_file(tmp_path / "i.png"), api_name="/ask")) == program
    assert not (tmp_path / "started").exists()


def test_errors_show_neither_paths_nor_tokens(port):
    from gradio_client import Client
    from gradio_client.exceptions import AppError

    client = Client(f"http://127.0.0.1:{port}", verbose=False)
    with pytest.raises(AppError, match=r"read 'a.wav', b.png at https://\*{3}@h/c\?\*{3} as hf_\*{3}$") as error:
        client.predict("ValueError", None, api_name="/ask")
    with pytest.raises(AppError) as other:
        client.predict("RuntimeError", None, api_name="/ask")
    for each in (error, other):
        assert not any(word in str(each.value) for word in ("home", "you", "own", "123456"))
