# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft chat`: a page on which to ask a trained model, and its base beside it."""

import argparse
import ipaddress
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from urllib.parse import urlsplit

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..data.columns import without_credentials
from ..data.loading import require_module
from ..evaluation import EvaluationConfig, evaluate
from ..families import MODALITIES
from ..models.pretrained import load_trained


_MOST_UPLOADED = 2**28  # bytes of a request
_KEPT = 3600  # seconds until an upload is deleted


def answerer(
    model: PreTrainedModel,
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    config: EvaluationConfig,
    *,
    system: str | None = None,
    adapted: bool = True,
) -> Callable[..., str]:
    """
    A model that is asked one question at a time, as evaluations ask.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            Its processor.
        config ([`EvaluationConfig`]):
            How it answers.
        system (`str`, *optional*):
            Text of the system message.
        adapted (`bool`, *optional*, defaults to `True`):
            Whether the model answers with its adapter, if it has one.

    Returns:
        `Callable`: Gives the answer to `(text, **media)`, with media by their kind.
    """
    accelerator = Accelerator()

    def unscored(completions, **columns):
        return [None] * len(completions)

    def answer(text: str, **media: Any) -> str:
        messages = [{"role": "system", "content": system}] if system else []
        row = {"prompt": [*messages, {"role": "user", "content": text}], **media}
        config.seed = secrets.randbits(31)
        with nullcontext() if adapted else model.disable_adapter():
            result = evaluate(model, processor, [row], unscored, config, accelerator=accelerator)
        return result.rows[0]["completions"][0]

    return answer


def page(answerers: dict[str, Callable[..., str]], kinds: tuple[str, ...]) -> Any:
    """
    The page, which answers at `/ask`, too.

    Args:
        answerers (`dict[str, Callable]`):
            What answers, by the names over its answers.
        kinds (`tuple[str, ...]`):
            The media that it takes: `"image"`, `"video"`, `"audio"`.

    Returns:
        `gradio.Blocks`: The page.

    Raises:
        `ImportError`: If gradio is missing.
    """
    gradio = require_module("gradio", "chat")
    buttons = ["download"]  # not the one that shares with the Hub
    makers = {
        "audio": lambda: gradio.Audio(
            label="Sound", type="filepath", sources=["upload", "microphone"], buttons=buttons
        ),
        "image": lambda: gradio.Image(
            label="Image",
            type="filepath",
            image_mode=None,  # as it was sent: what converts it opens documents, too
            sources=["upload", "webcam", "clipboard"],
            buttons=buttons,
        ),
        "video": lambda: gradio.Video(label="Video", sources=["upload", "webcam"], buttons=buttons),
    }

    def ask(text: str, *media: str | None) -> Any:
        given = {kind: path for kind, path in zip(kinds, media, strict=True) if path is not None}
        if not (text or "").strip():
            raise gradio.Error("There is no question; write one.")
        try:
            said = [answer(text, **given) for answer in answerers.values()]
            return said if len(said) > 1 else said[0]  # of which a list would be the text
        except (ValueError, ImportError) as error:  # of media that can't be decoded, or can't be placed
            raise gradio.Error(shown_error(error)) from error

    with gradio.Blocks(
        title="trl-multimodal-rft", analytics_enabled=False, delete_cache=(_KEPT // 6, _KEPT)
    ) as blocks:
        with gradio.Row():
            inputs = [makers[kind]() for kind in kinds]
        question = gradio.Textbox(label="Question", placeholder="What do you want to know?", lines=2)
        button = gradio.Button("Ask", variant="primary")
        with gradio.Row():
            answers = [gradio.Textbox(label=name, lines=6, interactive=False) for name in answerers]
        gradio.on([button.click, question.submit], ask, inputs=[question, *inputs], outputs=answers, api_name="ask")
    return blocks


def shown_error(error: Exception) -> str:
    """
    What the page says of an error, which others may read.

    Args:
        error (`Exception`):
            The error.

    Returns:
        `str`: Its message without credentials, tokens and the folders of paths.
    """
    text = re.sub(r"\b(hf|api_org)_\w+", r"\1_***", without_credentials(str(error)))
    text = re.sub(r"(?<=['\"])/[^'\"]*/", "", text)  # quoted, and maybe with spaces
    return re.sub(r"(?<![\w.:/*])/(?:[^\s'\"]*/)?", "", text)


def refusal(headers: Mapping[str, str], host: str) -> tuple[int, str] | None:
    """
    Why a request isn't answered: because another site sent it, by its own scripts or under a name of its own that
    leads here (DNS rebinding), or because it is too large.

    Args:
        headers (`Mapping[str, str]`):
            Headers of the request, their names in lower case.
        host (`str`):
            Address or name that the page listens at.

    Returns:
        `tuple[int, str]`: Status and reason; `None` if it is answered.
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
        return 403, "Only the page itself may ask."
    if "transfer-encoding" in headers:
        return 411, "The request must say how long it is."
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > _MOST_UPLOADED:
        return 413, f"More than {_MOST_UPLOADED // 2**20} MiB; shorten the file."
    return None


def _is_address(name: str) -> bool:
    """Whether it is no name, which somebody else's DNS could let lead here."""
    try:
        return ipaddress.ip_address(name) is not None
    except ValueError:
        return False


class _Guard:
    """ASGI middleware that answers with a [`refusal`] where there is a reason."""

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
    """
    Serves the page to those who open it, and to no other site.

    Args:
        blocks (`gradio.Blocks`):
            The page.
        host (`str`):
            Address or name to listen at.
        port (`int`, *optional*):
            Port; by default the first from 7860 on that is free.
        options (`Any`):
            Others of `launch`.

    Returns:
        `Any`: What `launch` returns: the app and its addresses.
    """
    middleware = require_module("starlette.middleware", "chat").Middleware
    return blocks.launch(
        server_name=host,
        server_port=port,
        share=False,
        max_file_size=_MOST_UPLOADED,
        app_kwargs={"middleware": [middleware(_Guard, host=host)]},
        **options,
    )


def load(args: argparse.Namespace) -> tuple[dict[str, Callable[..., str]], tuple[str, ...]]:
    """
    Loads the models.

    Args:
        args (`argparse.Namespace`):
            Parsed options.

    Returns:
        `tuple`: What answers, by name, and the media that it takes.
    """
    config = EvaluationConfig(max_completion_length=args.max_completion_length, temperature=args.temperature)
    options: dict[str, Any] = {"dtype": args.dtype, "trust_remote_code": args.trust_remote_code}
    model, processor = load_trained(args.model_name_or_path, **options)
    answerers = {args.model_name_or_path: answerer(model, processor, config, system=args.system_prompt)}
    if args.base is not None:
        base = load_trained(args.base, **options)
        answerers[f"base: {args.base}"] = answerer(*base, config, system=args.system_prompt)
    elif is_peft_model(model):
        name = model.get_base_model().config._name_or_path
        answerers[f"base: {name}"] = answerer(model, processor, config, system=args.system_prompt, adapted=False)
    takes = (model.get_base_model() if is_peft_model(model) else model).input_modalities
    return answerers, tuple(kind for kind in MODALITIES if kind in takes and isinstance(processor, ProcessorMixin))


def run(args: argparse.Namespace) -> None:
    """
    Loads the models, and serves the page until it is interrupted.

    Args:
        args (`argparse.Namespace`):
            Parsed options.
    """
    serve(page(*load(args)), args.host, args.port)
