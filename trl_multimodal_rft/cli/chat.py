# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft chat`: web page to talk to a trained model, and to compare it with its base."""

import argparse
import ast
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from inspect import Parameter, Signature
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import cached_file

from ..data.reading.decoding import require_module
from ..data.reading.refs import MediaRef, without_credentials
from ..data.reading.rules import BUDGET_NAMES
from ..data.rows.columns import file_modality, rows_to_messages
from ..encoding.prompts import placeholder_tokens
from ..evaluation import EvaluationConfig, evaluate
from ..families import MODALITIES
from ..models.pretrained import load_trained
from ..reporting.curves import FILE_NAME
from ..reporting.model_card import conversation_of, in_text


_MOST_UPLOADED = 2**28  # bytes of a request
_STYLE = '[aria-label="Share"] { display: none; }'  # a button that uploads media to the Hub
_KEPT = 3600  # seconds until an upload is deleted
_LONGEST = 2048  # tokens of an answer that the slider allows, unless the command allows more


def answerer(
    model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase, *, adapted: bool = True
) -> Callable[..., str]:
    """A function that continues a conversation with a model, sampling as evaluations do."""
    accelerator = Accelerator()
    placeholders = placeholder_tokens(model, processor)

    def unscored(completions, **columns):
        return [None] * len(completions)

    def answer(
        questions: list[tuple[str, dict[str, str]]], answers: list[str], system: str, config: EvaluationConfig
    ) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        for (text, media), reply in zip_longest(questions, answers):
            messages.append({"role": "user", "content": _content(text, media, placeholders)})
            messages += [] if reply is None else [{"role": "assistant", "content": reply}]
        with nullcontext() if adapted else model.disable_adapter():
            result = evaluate(model, processor, [{"prompt": messages}], unscored, config, accelerator=accelerator)
        return result.rows[0]["completions"][0]

    return answer


def _content(text: str, media: dict[str, str], placeholders: list[str]) -> Any:
    """The content of a user message: media at the tags in the text or else first, as in a row with columns."""
    if not media:
        return text
    [row] = rows_to_messages([{"prompt": text, **media}], placeholders=placeholders)
    return [
        {key: value.source if isinstance(value, MediaRef) else value for key, value in block.items()}
        for block in row["prompt"][0]["content"]
    ]


def example_of(name: str) -> tuple[str, str, dict[str, str]]:
    """System prompt and question of a trained model's card, with media saved in the model's folder."""
    card = cached_file(name, "README.md", _raise_exceptions_for_missing_entries=False)
    messages = _messages_of(Path(card).read_text(encoding="utf-8")) if card else []
    texts = {role: text for role, text in conversation_of(messages) if role in ("system", "user")}
    blocks = messages[-1]["content"] if messages and isinstance(messages[-1]["content"], list) else []
    files = [path for path in sorted(Path(name).glob("*")) if path.name != FILE_NAME]
    found = {file_modality(path.name): str(path) for path in reversed(files)}  # of each kind the first
    media = {str(block["type"]): found[block["type"]] for block in blocks if block["type"] in found}
    return texts.get("system", ""), texts.get("user", ""), media


def _messages_of(card: str) -> list[dict[str, Any]]:
    """The messages in the code of a card of this package, with `None` for media."""
    code = re.search(r"^```python\n(.*?)^```", card, re.DOTALL | re.MULTILINE)
    if code is None or "`trl-multimodal-rft`" not in card:
        return []
    for statement in ast.parse(code[1]).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "messages":
            for node in ast.walk(statement.value):
                if isinstance(node, ast.Dict):
                    literal = (ast.Constant, ast.List, ast.Dict)
                    node.values = [each if isinstance(each, literal) else ast.Constant(None) for each in node.values]
            return ast.literal_eval(statement.value)
    return []


def page(
    answerers: dict[str, Callable[..., str]],
    kinds: tuple[str, ...],
    config: EvaluationConfig,
    *,
    system: str = "",
    example: tuple[str, dict[str, str]] | None = None,
) -> Any:
    """The page, with the endpoints `/ask`, `/clear` and `/example`."""
    gradio = require_module("gradio", "chat")

    def ask(text: str, *given: Any) -> Any:
        *media, system, temperature, length, turns = given
        if not (text or "").strip():
            raise gradio.Error("There is no question; write one.")
        question = text, {kind: path for kind, path in zip(kinds, media, strict=True) if path is not None}
        questions = [*(earlier for earlier, _ in turns), question]
        try:
            sampling = replace(
                config, temperature=temperature, max_completion_length=int(length), seed=secrets.randbits(31)
            )
            answers = [
                answer(questions, [replies[i] for _, replies in turns], system, sampling)
                for i, answer in enumerate(answerers.values())
            ]
        except (ValueError, ImportError) as error:  # unreadable media, or missing packages
            raise gradio.Error(shown_error(error)) from error
        return *answers, [*turns, (question, answers)]

    # Names of the endpoint's parameters; all but the question are optional
    defaults = {**dict.fromkeys(kinds), "system_prompt": system, "temperature": config.temperature}
    defaults |= {"max_completion_length": config.max_completion_length, "turns": None}
    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, default=defaults[each]) for each in defaults]
    question = Parameter("question", Parameter.POSITIONAL_OR_KEYWORD)
    setattr(ask, "__signature__", Signature([question, *parameters]))  # noqa: B010

    def show(turns: list) -> Any:
        """The conversations, and empty inputs for the next question."""
        shown = []
        for i in range(len(answerers)):
            messages = []
            for (text, media), answers in turns:
                contents = [*({"path": path} for path in media.values()), text]
                messages += [{"role": "user", "content": content} for content in contents]
                messages.append({"role": "assistant", "content": answers[i]})
            shown.append(messages)
        return *shown, "", *(None for _ in kinds)

    name = next(iter(answerers))
    with gradio.Blocks(
        title=f"{name} - trl-multimodal-rft", analytics_enabled=False, delete_cache=(_KEPT // 6, _KEPT)
    ) as blocks:
        gradio.Markdown(f"# Ask {in_text(name)}")
        with gradio.Row():
            # As plain text: Markdown could load remote images
            chats = [
                gradio.Chatbot(label=name, height=300, render_markdown=False, buttons=["copy"]) for name in answerers
            ]
        with gradio.Row():
            inputs = [_input(gradio, kind) for kind in kinds]
        question = gradio.Textbox(label="Question", placeholder="What do you want to know?", lines=2)
        with gradio.Row():
            ask_button = gradio.Button("Ask", variant="primary")
            clear_button = gradio.Button("Clear")
            example_button = gradio.Button("Example of the model card", visible=example is not None)
        with gradio.Accordion("Settings", open=False):
            system_box = gradio.Textbox(label="System prompt", value=system)
            temperature = gradio.Slider(0.0, 2.0, config.temperature, label="Temperature", info="0 is greedy decoding")
            longest = max(_LONGEST, config.max_completion_length)
            length = gradio.Slider(
                1, longest, config.max_completion_length, step=1, label="Maximum completion length", info="tokens"
            )
        turns = gradio.State([])  # on the server, out of the client's reach
        answers = [gradio.Textbox(label=name, visible=False) for name in answerers]
        gradio.on(
            [ask_button.click, question.submit],
            ask,
            inputs=[question, *inputs, system_box, temperature, length, turns],
            outputs=[*answers, turns],
            api_name="ask",
        ).success(show, turns, [*chats, question, *inputs], api_visibility="private")
        gradio.on(
            [clear_button.click, *(chat.clear for chat in chats)],
            lambda: ([], *show([])),
            outputs=[turns, *chats, question, *inputs],
            api_name="clear",
        )
        if example is not None:
            text, media = example
            example_button.click(
                lambda: [text, *(media.get(kind) for kind in kinds)], None, [question, *inputs], api_name="example"
            )
    return blocks


def _input(gradio: Any, kind: str) -> Any:
    options: dict[str, Any] = {"buttons": ["download"]}  # without the one that uploads to the Hub
    if kind == "audio":
        return gradio.Audio(label="Sound", type="filepath", sources=["upload", "microphone"], **options)
    if kind == "video":
        return gradio.Video(label="Video", sources=["upload", "webcam"], **options)
    # The file as uploaded: gradio's conversion would also open documents
    options |= {"type": "filepath", "image_mode": None, "sources": ["upload", "webcam", "clipboard"]}
    return gradio.Image(label="Image", **options)


def shown_error(error: Exception) -> str:
    """The message of an error without row, credentials and folders, for any visitor to read."""
    text = re.sub(r"^row 0, column '[^']*'( \([^)]*\))?: ", "", str(error))  # the conversation
    text = re.sub(r"\b(hf|api_org)_\w+", r"\1_***", without_credentials(text))
    text = re.sub(r"(?<=['\"])/[^'\"]*/", "", text)  # quoted, and maybe with spaces
    return re.sub(r"(?<![\w.:/*])/(?:[^\s'\"]*/)?", "", text)


def refusal(headers: Mapping[str, str], host: str) -> tuple[int, str] | None:
    """
    The reason to refuse a request: it comes from another site, by a script or by a host name that resolves to this
    server (DNS rebinding), or it is too large.
    """
    named, origin = headers.get("host", ""), headers.get("origin")
    try:
        name = urlsplit(f"//{named}").hostname or ""
        is_known = name in {"localhost", host.lower(), socket.gethostname().lower()} or _is_address(name)
        is_ours = origin is None or urlsplit(origin).netloc == named
    except ValueError:
        is_known = is_ours = False
    if not is_known:
        return 403, "Unknown host: open the page by its IP address, or pass its name as `--host`."
    if not is_ours:
        return 403, "Only the page itself may send requests."
    if "transfer-encoding" in headers:
        return 411, "The request needs a Content-Length."
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > _MOST_UPLOADED:
        return 413, f"More than {_MOST_UPLOADED // 2**20} MiB; shorten the file."
    return None


def _is_address(name: str) -> bool:
    """Whether it is an IP address; somebody else's DNS could resolve a name to this server."""
    try:
        return ipaddress.ip_address(name) is not None
    except ValueError:
        return False


class _Guard:
    """ASGI middleware that refuses requests by [`refusal`]."""

    def __init__(self, app: Any, host: str):
        self.app, self.host = app, host

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope.get("headers", ())}
        refused = refusal(headers, self.host) if scope["type"] in ("http", "websocket") else None
        if refused is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            status, reason = refused
            start = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": start})
            await send({"type": "http.response.body", "body": reason.encode()})


def serve(blocks: Any, host: str, port: int | None = None, **options: Any) -> Any:
    """Serves the page, and refuses requests of other sites."""
    middleware = require_module("starlette.middleware", "chat").Middleware
    return blocks.launch(
        server_name=host,
        server_port=port,
        share=False,
        max_file_size=_MOST_UPLOADED,
        css=_STYLE,
        app_kwargs={"middleware": [middleware(_Guard, host=host)]},
        **options,
    )


def load(args: argparse.Namespace) -> tuple[dict[str, Callable[..., str]], tuple[str, ...]]:
    """Loads the models."""
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, processor = load_trained(args.model_name_or_path, **options)
    answerers = {_shown_name(args.model_name_or_path): answerer(model, processor)}
    if args.base is not None:
        answerers[f"base: {_shown_name(args.base)}"] = answerer(*load_trained(args.base, **options))
    elif is_peft_model(model):
        name = _shown_name(model.get_base_model().config._name_or_path)
        answerers[f"base: {name}"] = answerer(model, processor, adapted=False)
    takes = (model.get_base_model() if is_peft_model(model) else model).input_modalities
    return answerers, tuple(kind for kind in MODALITIES if kind in takes and isinstance(processor, ProcessorMixin))


def _shown_name(name: str) -> str:
    """Name of a model without its parent folders."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def open_page(args: argparse.Namespace, **options: Any) -> Any:
    """Loads the models and serves the page."""
    names = ("max_completion_length", "temperature", *BUDGET_NAMES)
    config = EvaluationConfig(**{name: getattr(args, name) for name in names})
    system, text, media = example_of(args.model_name_or_path)
    answerers, kinds = load(args)
    media = {kind: path for kind, path in media.items() if kind in kinds}
    blocks = page(
        answerers,
        kinds,
        config,
        system=system if args.system_prompt is None else args.system_prompt,
        example=(text, media) if text else None,
    )
    return serve(blocks, args.host, args.port, allowed_paths=[*media.values()], **options)


def run(args: argparse.Namespace) -> None:
    """Loads the models and serves the page until it is interrupted."""
    open_page(args)
