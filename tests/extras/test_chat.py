# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tests the page of `trl-multimodal-rft chat` over HTTP."""

import argparse
import http.client
import re
import shutil
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import soundfile
from helpers.chats import RATE, audio, chat, image, text
from helpers.families import greedy
from helpers.trainer_utils import InjectedOurs, image_rows, load, make_trainer, saved
from peft import LoraConfig, get_peft_model
from PIL import Image

from trl_multimodal_rft import TrainingCurvesCallback, cli
from trl_multimodal_rft.evaluation import EvaluationConfig
from trl_multimodal_rft.extras import chat as command
from trl_multimodal_rft.reporting.model_card import CURVES


pytest.importorskip("gradio", exc_type=ImportError)
gradio_client = pytest.importorskip("gradio_client")
Client = gradio_client.Client
handle_file = gradio_client.handle_file
AppError = gradio_client.exceptions.AppError

# gradio's use of pandas
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SERVING = Path(__file__).parents[2] / "docs" / "hub.md"
QUESTION = "What do you hear in the audio?"


@pytest.fixture
def served():
    """Serves a page, and returns its client."""
    pages = []

    def serve(*argv):
        args = cli._parser("chat").parse_args([*argv, "--max_completion_length", "6"])
        pages.append(command.run(args, waits=False))
        url = pages[-1].local_url
        shared = pages[-1].share_url
        assert url.startswith("http://127.0.0.1:") and shared is None
        return Client(url, verbose=False)

    yield serve
    for page in pages:
        page.close()


def ask(client, question, *files, **settings):
    """Returns the completions of all models."""
    message = {"text": question, "files": [handle_file(file) for file in files]}
    replies = client.predict(message, api_name="/chat", **settings)
    return (replies,) if isinstance(replies, str) else tuple(reply["content"] for reply in replies)


@pytest.fixture
def adapted(tmp_path):
    """Returns a model with the adapter in `adapter`, its processor, and the sounds in `0.wav` and `1.wav`."""
    model, processor = load("qwen2_audio")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    sounds = [np.float32(audio(seconds, seed=seed)["audio"]) for seconds, seed in ((0.5, 1), (0.8, 2))]
    for i, sound in enumerate(sounds):
        soundfile.write(tmp_path / f"{i}.wav", sound, RATE, subtype="FLOAT")
    return model, processor, sounds


def test_code_of_the_docs_and_what_is_no_question(served, adapted, tmp_path, monkeypatch, capfd):
    client = served(str(tmp_path / "adapter"))
    shutil.copy(tmp_path / "0.wav", tmp_path / "seven.wav")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```py\n(.*?)^```", SERVING.read_text(), re.DOTALL | re.MULTILINE)
    namespace = {}
    exec(code.replace("http://127.0.0.1:7860", client.src), namespace)
    digit = "Which digit is spoken?"
    assert tuple(each["content"] for each in namespace["answer"]) == ask(client, digit, tmp_path / "0.wav")
    (tmp_path / "none.wav").write_text("no sound")
    with pytest.raises(AppError, match="^this isn't a readable audio file"):
        ask(client, QUESTION, tmp_path / "none.wav")
    capfd.readouterr()
    with pytest.raises(AppError, match="There is no question"):
        ask(client, " ")
    assert "Traceback" not in capfd.readouterr().err


def test_a_base_that_the_adapter_has_changed(tmp_path):
    model, processor = load("qwen2_audio")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights="olora"))
    assert command.answerer(model, processor)
    with pytest.raises(ValueError, match="'olora'` moves .* can't be the base to compare with; .* or pass `--base`"):
        command.answerer(model, processor, adapted=False)


def test_model_beside_another(served):
    folder = str(saved("qwen2_audio"))
    answers = ask(served(folder, "--base", folder), "Is there a cat?")
    assert len(answers) == 2 and answers[0] == answers[1]
    assert ask(served(folder), "Is there a cat?") == answers[:1]
    # It takes no value
    assert cli._parser("chat").parse_args(["--use_audio_in_video", folder]).model_name_or_path == folder


def test_conversation(served, adapted, tmp_path):
    """An adapter and its base get the earlier questions with their sounds, and their earlier answers."""
    model, processor, sounds = adapted
    client = served(str(tmp_path / "adapter"), "--system_prompt", "Is there a cat?")
    told = {"role": "system", "content": [text("Is there a cat?")]}

    def expected(asked):
        said = []
        for adapted in (True, False):
            messages = [told]
            for blocks, length in asked:
                with nullcontext() if adapted else model.disable_adapter():
                    messages += chat(*blocks)
                    answer = greedy(model, processor, messages, length)
                messages.append({"role": "assistant", "content": [text(answer)]})
            said.append(answer)
        return tuple(said)

    def heard(i):
        return {"type": "audio", "audio": sounds[i]}

    asked = [([heard(0), text(QUESTION)], 6)]
    first = ask(client, QUESTION, tmp_path / "0.wav")
    assert first == expected(asked) and len({*first, *expected([([heard(1), text(QUESTION)], 6)])}) == 4
    # A position in the text, and a separate length
    asked.append(([text("Is it "), heard(1), text(" ?")], 4))
    assert ask(client, "Is it <audio> ?", tmp_path / "1.wav", max_completion_length=4) == expected(asked)
    asked.append(([text("Is there a bird?")], 6))
    third = ask(client, "Is there a bird?")
    assert third == expected(asked)
    # Several media in one question
    asked.append(([heard(1), heard(0), text(QUESTION)], 6))
    assert ask(client, QUESTION, tmp_path / "1.wav", tmp_path / "0.wav") == expected(asked)
    # Not another user's conversation
    other = ask(Client(client.src, verbose=False), "Is there a bird?")
    assert other == expected(asked[2:3]) != third
    assert len({ask(client, QUESTION, temperature=2.0) for _ in range(4)}) > 1


def test_example_of_the_card(served, tmp_path, monkeypatch):
    """
    The page's example is the card's question about the picture in the model's folder, which it can't read otherwise.
    """
    prompt = [{"role": "system", "content": "Is it a bird?"}, {"role": "user", "content": "What is in the image?"}]
    rows = image_rows(8).map(lambda row: {"prompt": prompt})
    folder = tmp_path / "seen"
    callbacks = {"callbacks": [TrainingCurvesCallback()]}
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", rows, folder, objects=callbacks, max_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    picture = image(84, 56)["image"]
    picture.save(folder / "view.png")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    client = served(str(folder))
    assert client.config["title"].startswith("seen") and '[aria-label="Share"]' in client.config["css"]
    parts = [component["props"] for component in client.config["components"]]
    assert "# Ask seen" in {part.get("value") for part in parts if isinstance(part.get("value"), str)}
    ((example,),) = (part["examples"] for part in parts if part.get("examples"))
    question = example["text"]
    image_path = example["files"][0]["path"]
    assert (folder / CURVES).exists() and Path(image_path).read_bytes() == (folder / "view.png").read_bytes()
    messages = [{"role": "system", "content": [text(prompt[0]["content"])]}]
    messages += chat({"type": "image", "image": picture}, text(question))
    expected = greedy(trainer.model, trainer.processing_class, messages)
    assert ask(client, question, image_path) == (expected,)
    # A model without a card of this package has none
    other = served(str(saved("qwen2_audio")))
    assert not any(component["props"].get("examples") for component in other.config["components"])


def test_messages_of_the_page(tmp_path):
    """The page sends the conversation that it shows: text and files of a user, and the completions by model."""
    seen = []
    picture = tmp_path / "view.png"
    image(84, 56)["image"].save(picture)
    models = {name: lambda conversation, config: seen.append(conversation) or "No." for name in ("ours", "base")}
    page = command.page(models, ("image",), EvaluationConfig(), system="Be brief.")
    shown = [{"role": "user", "content": [{"path": str(picture)}, "A bird?"]}]
    shown += [{"role": "assistant", "content": f"{name} 1", "metadata": {"title": name}} for name in models]
    history = page.chatbot.preprocess(page.chatbot.postprocess(shown))
    for earlier, told in ((history, "Be brief."), ([], "")):
        page.fn({"text": "A cat?", "files": []}, earlier, told, 0.0, 5)
    start = [("system", "Be brief.", []), ("user", "A bird?", [str(picture)])]
    end = ("user", "A cat?", [])
    assert seen == [[*start, ("assistant", f"{name} 1", []), end] for name in models] + [[end]] * 2


SECRETS = "cannot read '/home/me and you/own/a.wav', /own/b.png at https://u:own@h/c?own as hf_own123456"


@pytest.fixture(scope="module")
def port():
    """Returns the port of a page whose model repeats its input, or fails on demand."""

    def answer(conversation, config):
        _, text, files = conversation[-1]
        if text in ("ValueError", "RuntimeError"):
            raise {"ValueError": ValueError, "RuntimeError": RuntimeError}[text](SECRETS)
        return "".join(Path(path).read_bytes().hex() for path in files) or text

    page = command.page({"echo": answer}, ("image",), EvaluationConfig())
    command.serve(page, argparse.Namespace(host="127.0.0.1", port=None), waits=False)
    yield page.server_port
    page.close()


def asked(port, method="GET", path="/", **headers):
    """Returns the status of a request with only these headers."""
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
    """Other sites may have a name that resolves to this machine, or a script in the browser of a permitted user."""
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
    upload = {"method": "POST", "path": "/gradio_api/upload", "Host": f"127.0.0.1:{port}"}
    form = {"Content_Type": "multipart/form-data; boundary=x"}
    assert asked(port, **upload, **form, Content_Length=str(2**28 + 1)) == 413
    assert asked(port, **upload, **form, Transfer_Encoding="chunked") == 411
    monkeypatch.setattr(command, "_MAX_REQUEST_BYTES", 10_000)
    client = Client(f"http://127.0.0.1:{port}", verbose=False)
    pixels = np.random.default_rng(0).integers(0, 256, (100, 100), np.uint8)
    for name, side in (("small", 40), ("large", 100)):
        Image.fromarray(pixels[:side, :side]).save(tmp_path / f"{name}.png")
    (answer,) = ask(client, "Who?", tmp_path / "small.png")
    assert bytes.fromhex(answer) == (tmp_path / "small.png").read_bytes()
    with pytest.raises(Exception, match="413"):
        ask(client, "Who?", tmp_path / "large.png")


def test_errors_show_neither_paths_nor_tokens(port):
    client = Client(f"http://127.0.0.1:{port}", verbose=False)
    with pytest.raises(AppError, match=r"read 'a.wav', b.png at https://\*{3}@h/c\?\*{3} as hf_\*{3}$") as error:
        ask(client, "ValueError")
    with pytest.raises(AppError) as other:
        ask(client, "RuntimeError")
    for each in (error, other):
        assert not any(word in str(each.value) for word in ("home", "you", "own", "123456"))
