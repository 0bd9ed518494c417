# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
vLLM's own server: what it must be started with, how prompts with media reach it, what it must forget.

It takes token ids and what a processor made of media, which the trainer makes, by vLLM's renderer with the server's
settings. Media themselves never travel: HTTP would encode them again, and has no place for what processors are told.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig
from trl.generation.vllm_client import VLLMClient

from ..data.columns import MediaError
from .vllm_versions import engine_obstacle


if engine_obstacle() is None:
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import encode_mm_kwargs_item
    from vllm.renderers import renderer_from_config

# Settings of a server that decide what it makes of media, in the two parts of its configuration
_OF_MODEL = ("tokenizer_mode", "config_format", "hf_overrides", "model_impl", "max_model_len")
_OF_MEDIA = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
    "language_model_only",
)
# Connections that TRL's client keeps
_AT_ONCE = 64
# What tells models apart whose weights don't fit each other
_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ServerRequest(NamedTuple):
    """What a server is asked."""

    ids: list[int]
    features: dict[str, Any] | None
    count: int
    most: int
    seed: int | None


def check_server(client: VLLMClient, info: dict[str, Any], config: PretrainedConfig, dtype: str) -> None:
    """Refuses a server that would sample from another model, or can't be told what from."""
    settings = info["model_config"]
    computed = settings["dtype"].removeprefix("torch.")
    version = client.session.get(f"{client.base_url}/version").json()["version"]
    problem = None
    if version.split("+")[0] != vllm.__version__.split("+")[0]:
        problem = (
            f"runs vLLM {version} and the trainer {vllm.__version__}, which may make other features of the same "
            "media; install the same version for both"
        )
    elif client.session.post(f"{client.base_url}/inference/v1/generate", json={}).status_code == 404:
        problem = "takes no features of media; start it with `--enable-scale-out`"
    elif settings["logprobs_mode"] != "processed_logprobs":
        problem = (
            f"returns {settings['logprobs_mode']}, which it doesn't sample from; start it with "
            "`--logprobs-mode processed_logprobs`"
        )
    elif computed != dtype:
        problem = (
            f"computes in {computed} and the trainer in {dtype}, so it rounds otherwise; start it "
            f"with `--dtype {dtype}`"
        )
    elif different := _other_shape(settings, config):
        problem = f"serves '{settings['model']}', another model than the trainer's: {different}; start it with that"
    if problem is not None:
        raise ValueError(f"The vLLM server at {client.base_url} {problem}.")


def _other_shape(settings: dict[str, Any], config: PretrainedConfig) -> str:
    """How the server's model differs, as far as its configuration can be read from here."""
    try:
        served = AutoConfig.from_pretrained(
            settings["model"], revision=settings["revision"], trust_remote_code=settings["trust_remote_code"]
        )
    except (OSError, ValueError):
        return ""  # on another machine, whose paths say nothing here
    theirs, own = (each.get_text_config() for each in (served, config))
    values = {name: (getattr(theirs, name, None), getattr(own, name, None)) for name in _SHAPE}
    return ", ".join(f"`{name}` is {a}, not {b}" for name, (a, b) in values.items() if a != b)


def server_renderer(info: dict[str, Any], model: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Makes of prompts what a server would, without an engine."""
    settings = info["model_config"]
    media = settings["multimodal_config"] or {}
    args = EngineArgs(
        model=model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        dtype=settings["dtype"].removeprefix("torch."),
        mm_processor_cache_gb=0,  # each prompt is rendered once
        limit_mm_per_prompt=media.get("limit_per_prompt", {}),
        **{name: settings[name] for name in _OF_MODEL},
        **{name: media[name] for name in _OF_MEDIA if name in media},
    )
    return renderer_from_config(args.create_engine_config())


def server_features(rendered: dict[str, Any]) -> dict[str, Any] | None:
    """
    What a server is sent beside the ids of a prompt.

    Returns the features and where they go, `None` for a prompt without media.
    """
    if "mm_kwargs" not in rendered:
        return None
    return {
        "mm_hashes": dict(rendered["mm_hashes"]),
        "mm_placeholders": {
            kind: [_range(place, kind) for place in places] for kind, places in rendered["mm_placeholders"].items()
        },
        "kwargs_data": {
            kind: [encode_mm_kwargs_item(item) for item in items] for kind, items in rendered["mm_kwargs"].items()
        },
    }


def _range(place, kind: str) -> dict[str, int]:
    """Where the embeddings of a medium go, without the tokens around them."""
    offset, length = place.offset, place.length
    if place.is_embed is not None:
        first, last = place.is_embed.nonzero().flatten()[[0, -1]].tolist()
        if not place.is_embed[first : last + 1].all():
            raise MediaError(
                f"vLLM's server can't be told where the parts of {kind} go that have text between them, as this "
                "model's have; set `vllm_mode='colocate'`."
            )
        offset, length = offset + first, last - first + 1
    return {"offset": offset, "length": length}


def joined(asked: list[ServerRequest]) -> list[ServerRequest]:
    """Requests that follow each other with the same prompt as one, since processes may share a group."""
    result: list[ServerRequest] = []
    for each in asked:
        if result and _of_same_prompt(result[-1], each):
            result[-1] = result[-1]._replace(count=result[-1].count + each.count)
        else:
            result.append(each)
    return result


def _of_same_prompt(one: ServerRequest, other: ServerRequest) -> bool:
    media = [each.features and each.features["mm_hashes"] for each in (one, other)]
    return (one.ids, one.most) == (other.ids, other.most) and media[0] == media[1]


def server_completions(
    client: VLLMClient, asked: list[ServerRequest], options: dict[str, Any]
) -> list[tuple[list[int], list[float | None]]]:
    """Samples with a server."""

    def sample(request: ServerRequest) -> list[tuple]:
        output: dict[str, Any] = client.generate(
            [request.ids],
            features=[request.features],  # without, TRL's client goes another way, by text
            n=request.count,
            generation_kwargs={"seed": request.seed, **options, "max_tokens": request.most},
        )
        sampled = zip(output["completion_ids"], output["logprobs"], output["logprob_token_ids"], strict=True)
        return [
            (ids, [of[at.index(token)] for token, of, at in zip(ids, logps, tokens, strict=True)])
            for ids, logps, tokens in sampled
        ]

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [completion for each in pool.map(sample, asked) for completion in each]


def forget_media(client: VLLMClient) -> None:
    """Has a server forget what its encoders made, which it keeps by the medium alone (huggingface/trl#7198)."""
    response = client.session.post(f"{client.base_url}/reset_encoder_cache")
    if response.status_code != 200:
        raise RuntimeError(
            f"The vLLM server at {client.base_url} didn't forget what its encoders made with weights of before "
            f"({response.status_code} {response.text}); start it with `VLLM_SERVER_DEV_MODE=1` in its environment."
        )
