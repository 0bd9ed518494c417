# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teacher on a vLLM server, which scores completions as parts of prompts."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..encoding.prompts import EncodedPrompt
from .vllm_client import EngineRequest, ServerClient, check_protocol, prompt_scores, server_renderer
from .vllm_prompts import EnginePrompts
from .vllm_versions import engine_obstacle


class ServerTeacher:
    """
    Teacher on a vLLM server. `processor`, the student's, encodes its prompts; vLLM must be installed here, too, as its
    renderer processes media. Raises a `ValueError` if the server has another version, or takes no media.
    """

    def __init__(
        self, url: str, processor: ProcessorMixin | PreTrainedTokenizerBase, timeout: float, trust_remote_code: bool
    ):
        obstacle = engine_obstacle("pass a `teacher_model`")
        if obstacle is not None:
            raise ImportError(f"`teacher_model_server_url` is set, but {obstacle}")
        self.client = ServerClient(url, timeout)
        check_protocol(self.client)
        info = self.client.get_server_info()
        self.name = info["model_config"]["model"]
        self.revision = info["model_config"]["revision"]
        renderer = server_renderer(info, *self.source, trust_remote_code)
        self.prompts = EnginePrompts(renderer, processor, "server")
        self.vocab_size = renderer.model_config.get_vocab_size()

    @property
    def source(self) -> tuple[str, str | None]:
        """Name and revision of the server's model, for loading."""
        return self.name.for_loading(), None if self.revision is None else self.revision.for_loading()

    def requests_for(self, prompts: Sequence[EncodedPrompt]) -> list[EngineRequest]:
        """Returns requests to the server for prompts with decoded media. Each distinct prompt is processed once."""
        requests: dict[int, EngineRequest] = {}
        for i, prompt in enumerate(prompts):
            if id(prompt) not in requests:
                rendered = self.prompts.engine_input(prompt, None, i)
                request = EngineRequest(rendered["prompt_token_ids"], rendered, count=1, max_tokens=1, seed=None)
                requests[id(prompt)] = request.for_server()
        return [requests[id(prompt)] for prompt in prompts]

    def top_k(
        self, prompts: Sequence[EngineRequest], completions: Sequence[list[int]], width: int, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Returns the `k` likeliest tokens at each position of `N` completions, and their log-probabilities, both `(N,
        width, k)` on the CPU, 0 after a completion's end. The server scores all tokens but the prompt's first.
        """
        ids = torch.zeros(len(completions), width, k, dtype=torch.long)
        logps = torch.zeros(len(completions), width, k)
        requests = [
            prompt._replace(ids=prompt.ids + completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        counts = [len(completion) for completion in completions]
        # Log-probabilities by token, at each position
        for i, scores in enumerate(prompt_scores(self.client, requests, counts, k, self.vocab_size)):
            ids[i, : len(scores)] = torch.tensor([[*position] for position in scores])
            logps[i, : len(scores)] = torch.tensor([[*position.values()] for position in scores])
        return ids, logps
