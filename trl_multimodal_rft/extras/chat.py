# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft chat`: web page to talk to a trained model, and to compare it with its base."""

import argparse
import ipaddress
import json
import re
import secrets
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import cached_file

from ..credentials import without_credentials
from ..data.reading.decoding import require_module
from ..data.reading.refs import MediaRef
from ..data.reading.rules import BUDGET_NAMES
from ..data.rows.columns import rows_to_messages
from ..data.rows.values import file_modality
from ..encoding.prompts import placeholder_tokens
from ..evaluation import EvaluationConfig, evaluate
from ..families import input_modalities
from ..modalities import MODALITIES
from ..models.parts import check_base_is_kept
from ..models.pretrained import load_trained
from ..reporting.card_notes import conversation_of
from ..reporting.model_card import CURVES, in_text


if TYPE_CHECKING:
    from gradio import ChatInterface
    from starlette.types import ASGIApp, Receive, Scope, Send


Message = tuple[str, str, list[str]]  # role, text and files of media
Answerer = Callable[[list[Message], EvaluationConfig], str]

_MAX_REQUEST_BYTES = 2**28
_STYLE = '[aria-label="Share"] { display: none; }'  # CSS that hides a button, which uploads media to the Hub
_UPLOAD_SECONDS = 3600  # time until an upload is deleted
_MAX_TOKENS = 2048  # end of the slider for completion lengths, unless `--max_completion_length` is larger


def answerer(
    model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase, *, adapted: bool = True
) -> Answerer:
    """
    Returns a function that samples a model's answer to a conversation, with the code and options of evaluations. The
    model's adapter is off unless `adapted`.
    """
    if not adapted:
        check_base_is_kept(model, None, "the base to compare with", "pass `--base`")
    accelerator = Accelerator()
    placeholders = placeholder_tokens(model, processor)

    def no_reward(completions: list[str], **columns: list) -> list[None]:
        return [None] * len(completions)

    def answer(conversation: list[Message], config: EvaluationConfig) -> str:
        messages = [
            {"role": role, "content": _content(text, files, placeholders)} for role, text, files in conversation
        ]
        with nullcontext() if adapted else model.disable_adapter():
            result = evaluate(model, processor, [{"prompt": messages}], no_reward, config, accelerator=accelerator)
        return result.rows[0]["completions"][0]

    return answer


def _content(text: str, files: list[str], placeholders: list[str]) -> str | list[dict[str, Any]]:
    """Media take the places of tags such as `<image>`, or precede a text without tags."""
    if not files:
        return text
    columns = defaultdict(list)  # files by column of media, such as "images"
    for file in files:
        modality = file_modality(file)
        if modality is None:
            raise ValueError(f"{Path(file).name!r} has no ending of an image, a sound or a video; rename the file.")
        columns[f"{modality}s"].append(file)
    [row] = rows_to_messages([{"prompt": text, **columns}], placeholders=placeholders)
    return [
        {key: value.source if isinstance(value, MediaRef) else value for key, value in block.items()}
        for block in row["prompt"][0]["content"]
    ]


def example_of(name: str) -> tuple[str, str, list[str]]:
    """
    Returns the system prompt and the question in the code of a model's card. Also returns media files of the model's
    folder, one for each modality in the question. A card by another program gives empty results.
    """
    card = cached_file(name, "README.md", _raise_exceptions_for_missing_entries=False)
    text = Path(card).read_text(encoding="utf-8") if card else ""
    line = re.search(r"^messages = (\[.*)$", text, re.MULTILINE)
    if line is None or "`trl-multimodal-rft`" not in text:
        return "", "", []
    # The card's code has variables in place of media, which JSON can't hold
    messages = json.loads(re.sub(r'"(image|audio)": \1(?=})', r'"\1": null', line[1]))
    texts = {role: text for role, text in conversation_of(messages) if role in ("system", "user")}
    content = messages[-1]["content"]
    files = [path for path in sorted(Path(name).glob("*")) if path.name != CURVES]
    # First file of each modality: earlier files replace later ones
    first_files = {file_modality(path.name): str(path) for path in reversed(files)}
    modalities = dict.fromkeys(block["type"] for block in content) if isinstance(content, list) else ()
    return (
        texts.get("system", ""),
        texts.get("user", ""),
        [first_files[modality] for modality in modalities if modality in first_files],
    )


def page(
    answerers: dict[str, Answerer],
    modalities: tuple[str, ...],
    config: EvaluationConfig,
    *,
    system: str = "",
    example: tuple[str, list[str]] | None = None,
) -> "ChatInterface":
    """Returns the page. Each model answers a message in the context of its own earlier completions."""
    gradio = require_module("gradio", "chat")
    lock = Lock()
    name, *other_names = answerers

    def chat(
        message: dict[str, Any],
        history: list[dict[str, Any]],
        system_prompt: str,
        temperature: float,
        max_completion_length: int,
    ) -> str | list[dict[str, Any]]:
        if not message["text"].strip():
            raise gradio.Error("There is no question; write one.", print_exception=False)
        seed = secrets.randbits(31)
        sampling = replace(
            config, temperature=temperature, max_completion_length=int(max_completion_length), seed=seed
        )
        system_messages: list[Message] = [("system", system_prompt, [])] if system_prompt else []
        replies: list[dict[str, Any]] = []
        for model_name, answer in answerers.items():
            # A completion's title names the model that wrote it. Completions of the other model are left out.
            context = [turn for turn in history if (turn.get("metadata") or {}).get("title") in (None, model_name)]
            turns = [(turn["role"], *_text_and_files(turn["content"])) for turn in context]
            try:
                with lock:
                    content = answer([*system_messages, *turns, ("user", message["text"], message["files"])], sampling)
            except (ValueError, ImportError) as error:  # media can't be read, or a package is missing
                raise gradio.Error(shown_error(error), print_exception=False) from error
            replies.append({"role": "assistant", "content": content, "metadata": {"title": model_name}})
        return replies if other_names else replies[0]["content"]

    max_length = max(_MAX_TOKENS, config.max_completion_length)
    sources = ["upload"] if modalities else []
    if "audio" in modalities:
        sources.append("microphone")
    interface = gradio.ChatInterface(
        chat,
        multimodal=True,
        description=f"# Ask {in_text(name)}",
        # Completions are shown as plain text, because Markdown could load remote images
        chatbot=gradio.Chatbot(render_markdown=False, buttons=["copy"]),
        textbox=gradio.MultimodalTextbox(
            file_types=[*modalities], file_count="multiple", sources=sources, placeholder="What do you want to know?"
        ),
        additional_inputs=[
            gradio.Textbox(label="System prompt", value=system),
            gradio.Slider(0.0, 2.0, config.temperature, label="Temperature", info="0 is greedy decoding"),
            gradio.Slider(
                1, max_length, config.max_completion_length, step=1, label="Maximum completion length (tokens)"
            ),
        ],
        additional_inputs_accordion="Settings",
        examples=None if example is None else [[{"text": example[0], "files": example[1]}]],
        run_examples_on_click=False,
        analytics_enabled=False,
        delete_cache=(_UPLOAD_SECONDS // 6, _UPLOAD_SECONDS),
    )
    interface.title = f"{name} - trl-multimodal-rft"
    return interface


def _text_and_files(content: str | list[Any]) -> tuple[str, list[str]]:
    """Texts and files of a message have other formats in Gradio's API than on its page."""
    text = ""
    files = []
    blocks = [content] if isinstance(content, str) else content
    for block in blocks:
        if isinstance(block, str) or "text" in block:
            text += block if isinstance(block, str) else block["text"]
        else:
            files.append(block.get("file", block)["path"])
    return text, files


def shown_error(error: Exception) -> str:
    """Returns an error's message for visitors: without row, credentials and folders."""
    text = re.sub(r"^row 0, column '[^']*'( \([^)]*\))?: ", "", str(error))  # the only row is the conversation
    text = re.sub(r"\b(hf|api_org)_\w+", r"\1_***", without_credentials(text))
    text = re.sub(r"(?<=['\"])/[^'\"]*/", "", text)  # quoted paths may have spaces
    return re.sub(r"(?<![\w.:/*])/(?:[^\s'\"]*/)?", "", text)


def refusal(headers: Mapping[str, str], host: str) -> tuple[int, str] | None:
    """
    Returns the HTTP status and message that refuse a request, or `None` for an acceptable one. Requests are
    refused if scripts of other sites send them, if they name an unknown host, which may resolve to this server (DNS
    rebinding), or if they are too large.
    """
    address = headers.get("host", "")
    origin = headers.get("origin")
    try:
        # The browser adds `origin` if a page's script sends the request
        name = urlsplit(f"//{address}").hostname or ""
        is_ours = origin is None or urlsplit(origin).netloc == address
        if name not in {"localhost", host.lower(), socket.gethostname().lower()}:
            ipaddress.ip_address(name)  # raises for any other name, which a foreign DNS may resolve to this server
    except ValueError:
        return 403, "Unknown host: open the page by its IP address, or pass its name as `--host`."
    if not is_ours:
        return 403, "Only the page itself may send requests."
    if "transfer-encoding" in headers:
        return 411, "The request needs a Content-Length."
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > _MAX_REQUEST_BYTES:
        return 413, f"The request has more than {_MAX_REQUEST_BYTES // 2**20} MiB; shorten the file."
    return None


def guarded(app: "ASGIApp", host: str) -> "ASGIApp":
    """Returns ASGI middleware that refuses requests by [`refusal`]."""
    headers_class = require_module("starlette.datastructures", "chat").Headers
    response_class = require_module("starlette.responses", "chat").PlainTextResponse

    async def respond(scope: "Scope", receive: "Receive", send: "Send") -> None:
        error = refusal(headers_class(scope=scope), host) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await app(scope, receive, send)
        else:
            status, reason = error
            await response_class(reason, status, {"connection": "close"})(scope, receive, send)

    return respond


def load(args: argparse.Namespace) -> tuple[dict[str, Answerer], tuple[str, ...]]:
    """
    Loads the model, and the base for comparison: `--base`, or else an adapter's base. Returns their answerers by shown
    name, and the modalities that the model takes.
    """
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, processor = load_trained(args.model_name_or_path, **options)
    answerers = {_shown_name(args.model_name_or_path): answerer(model, processor)}
    if args.base is not None:
        answerers[f"base: {_shown_name(args.base)}"] = answerer(*load_trained(args.base, **options))
    elif is_peft_model(model):
        name = _shown_name(model.get_base_model().config._name_or_path)
        answerers[f"base: {name}"] = answerer(model, processor, adapted=False)
    model_modalities = input_modalities(model.get_base_model() if is_peft_model(model) else model)
    return answerers, tuple(
        modality for modality in MODALITIES if modality in model_modalities and isinstance(processor, ProcessorMixin)
    )


def _shown_name(name: str) -> str:
    return Path(name).resolve().name if Path(name).is_dir() else name


def serve(interface: "ChatInterface", args: argparse.Namespace, waits: bool = True) -> None:
    """Starts the page's server in a thread. If `waits`, prints the address and returns when the server ends."""
    middleware = require_module("starlette.middleware", "chat").Middleware
    interface.launch(
        server_name=args.host,
        server_port=args.port,
        share=False,
        max_file_size=_MAX_REQUEST_BYTES,
        css=_STYLE,
        app_kwargs={"middleware": [middleware(guarded, host=args.host)]},
        prevent_thread_lock=True,
        quiet=True,  # otherwise Gradio prints how to make a public link
    )
    if waits:
        print(f"Chat at {interface.local_url}", flush=True)
        interface.block_thread()


def run(args: argparse.Namespace, waits: bool = True) -> "ChatInterface":
    require_module("gradio", "chat")  # raises before weights are loaded
    names = ("max_completion_length", "temperature", *BUDGET_NAMES)
    config = EvaluationConfig(**{name: getattr(args, name) for name in names})
    system, text, media = example_of(args.model_name_or_path)
    answerers, modalities = load(args)
    files = [file for file in media if file_modality(file) in modalities]
    system = system if args.system_prompt is None else args.system_prompt
    interface = page(answerers, modalities, config, system=system, example=(text, files) if text else None)
    serve(interface, args, waits)
    return interface
