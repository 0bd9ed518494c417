# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Asynchronous rollouts: servers sample completions while the trainer still updates the weights."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle, islice
from typing import Any

import torch

from ...algorithms.metrics import average, largest, nan_mean
from ...checks.run_checks import Checks
from ...data.rows.batches import Row
from ...encoding.prompt_encoder import PromptEncoder
from ...encoding.prompts import EncodedPrompt
from ...engines.in_flight import EarlyRewards, InFlight, Key, request_keys
from ...engines.vllm_client import on_all_ranks, server_features
from ...engines.vllm_prompts import EnginePrompts
from ...engines.vllm_requests import ServerSample
from ...engines.vllm_servers import Servers
from ...rollout.completion_columns import with_completions
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Drawn, Flight, Prompted, Rollout
from ...rollout.turns import with_one_turn
from .context import Context
from .prompting import Prompting
from .rollout_views import prompts_under_views, without_extra


# Number of completions that each rank samples to compare the engine with the policy, and their maximum length
_N_PROBES = 4
_PROBE_LENGTH = 16


def row_encoder(
    prompt_encoder: PromptEncoder, engine_prompts: Callable[[], EnginePrompts]
) -> Callable[..., EncodedPrompt | None]:
    """
    Returns a function that encodes a row and renders its media for servers. The process that reads the row calls it.
    """

    def encode(row: Row, prompt: Any = None) -> EncodedPrompt | None:
        encoded = prompt_encoder.encode_row(row, prompt)
        if encoded is not None:
            encoded.decoded = server_features(engine_prompts().engine_input(encoded, None, row.row_index))
        return encoded

    return encode


@dataclass
class AsynchronousSampling:
    """Asynchronous sampler: servers get the requests of a batch before the batch is due."""

    context: Context
    prompting: Prompting
    checks: Checks
    reward_functions: RewardFunctions
    flight: InFlight
    engine: Servers

    def __call__(self, sampler: Any, rollout: Prompted, batch_index: int) -> Drawn:
        """
        Returns the samples of the batch with this index in the run, after it has sent the current weights, and
        requested all batches up to `max_staleness` ahead, which servers sample during the updates. All ranks must call
        this.
        """
        context = self.context
        flight = self.flight
        n = len(rollout)
        accelerator = context.accelerator
        self.engine.generation_batch_index = batch_index
        with sampler.explain():
            sampler.load_weights(context.step)
        flight.version = batch_index
        for index in self.prompting.stream.batch_indices(batch_index, flight.max_staleness + 1):
            if index not in flight:
                self._request_batch(index)
        with sampler.explain(), sampler.profile("vLLM.generate"):
            pending, answers, wait_seconds = on_all_ranks(accelerator, lambda: flight.take(batch_index))
            self.engine.check_restarts()
        completions = []  # pairs of ids and log-probabilities
        versions = []
        for answer in answers:
            completions += answer.completions
            versions += [[answer.first_version, answer.last_version]] * len(answer.completions)
        ids, logps = ([*column] for column in zip(*completions, strict=True))
        # Completions after the first `n` are sampled under `contrast_view`, and aren't trained on
        early_rewards = None
        if pending.rewards:
            rewards = on_all_ranks(accelerator, lambda: [future.result() for future in pending.rewards.values()])
            early_rewards = EarlyRewards.join(rewards)
        answered = Flight(torch.tensor(versions[:n], device=accelerator.device), early_rewards)
        flight.probes = pending.probes
        ages = batch_index - accelerator.gather(answered.versions[:, 0]).float()
        # (ranks, 2): the trainer's wait for answers, and the answers' wait for the trainer
        waits = accelerator.gather(torch.tensor([wait_seconds], device=ages.device))
        context.metrics.add(
            {
                "staleness/mean": nan_mean(ages, is_of_all_ranks=True),
                "staleness/max": largest(ages, is_of_all_ranks=True),
                "wait/rollout": average(waits[:, 0].max().item()),
                "wait/trainer": average(waits[:, 1].mean().item()),
            }
        )
        drawn = Drawn(ids, logps, flight=answered)
        return without_extra(context, self.prompting.encoder, rollout, pending.views, drawn)

    def _request_batch(self, batch_index: int) -> None:
        """
        Requests the completions of this rank's part of a batch. All ranks must call this. Global indices count all
        ranks' completions, then the extra ones under `contrast_view`: 7 for the prompt of index 3 of 4.
        """
        context = self.context
        accelerator = context.accelerator
        batch, step = self.prompting.stream.batch(batch_index)
        rows = list(batch)
        rollout = self.prompting.collect(rows)
        # On the CPU, threads that reward completions can read the ids
        rollout = replace(rollout, group_ids=rollout.group_ids.cpu())
        for row, prompt in zip(rows, rollout.prompts, strict=True):
            row.prompt = prompt  # so that the prompt isn't encoded again when the batch is due
        views = prompts_under_views(context, self.prompting.encoder, rollout, step)
        n = len(rollout)
        offset = accelerator.process_index * len(rollout)
        batch_indices = [*range(n), *views.contrast]
        prompts = views.prompts(rollout)
        # Seeds depend on the indices over all ranks. Completions under the contrast view come after those of all
        # ranks. `i` is the batch index of the completion, or of the one that it contrasts with, and `j` counts both
        global_indices = [
            offset + i + (accelerator.num_processes * n if j >= n else 0) for j, i in enumerate(batch_indices)
        ]
        row_indices = [rollout.source.row_indices[i] for i in batch_indices]
        # A key is (batch index, row index, seed, number of completions)
        keys = request_keys(prompts, row_indices, global_indices, batch_index, context.args.seed)
        requests = [request.for_server() for request in self.engine.requests(prompts)]
        if not self.prompting.toolbox.tools:  # with tools, later turns need the decoded media
            for prompt in prompts:
                prompt.decoded = ()
        requests = {key: request._replace(seed=key[2]) for key, request in zip(keys, requests, strict=True)}
        check = self.checks.self_check
        # Probes compare engine and policy once after an update
        needs_probes = check is not None and check.engine_updated is None
        # Maps keys to the position of their request's first completion in `prompts`
        starts = dict(zip(requests, accumulate((item.count for item in requests.values()), initial=0), strict=False))
        probes = [(prompts[start], requests[key]) for key, start in starts.items()] if needs_probes else []
        # Requests that start at `n` or later are under the contrast view, and aren't rewarded early
        rollouts = {key: rollout.select(range(start, start + key[3])) for key, start in starts.items() if start < n}
        reward_functions = self._early_rewards(rollouts)
        self.flight.ask(
            batch_index,
            batch,
            rollout.source.row_indices,
            requests,
            reward_functions=reward_functions,
            views=views,
            probes=probes,
        )

    def _early_rewards(self, rollouts: dict[Key, Prompted]) -> dict[Key, Callable[[list[ServerSample]], EarlyRewards]]:
        """
        Returns one function per request, which rewards the request's completions on arrival. Threads call it, so it
        uses only reward functions that wait for other processes, see [`~rollout.reward_functions.only_waits`].
        `rollouts` has the parts of the rollout by request.
        """
        context = self.context
        flight = self.flight
        reward_functions = self.reward_functions.that_wait()
        # With tools, an arriving completion isn't final yet, and with `rollout_view` two requests share a group
        if not reward_functions.names or self.prompting.toolbox.tools or context.args.rollout_view is not None:
            return {}
        if flight.processor is None:  # threads can't share the trainer's processor
            flight.processor = copy.deepcopy(self.prompting.encoder.processor)

        def reward(part: Prompted, samples: list[ServerSample]) -> EarlyRewards:
            all_ids = [ids for ids, _ in samples]
            part = with_one_turn(part, all_ids, flight.processor)
            source = replace(part.source, whole_groups=len(part) == context.group_sizes[0])
            part = replace(part, source=source)
            return reward_functions.call_early(part, context.live.state, context.args.rules, flight.calls)

        return {key: partial(reward, part) for key, part in rollouts.items()}


def probe_engine(prompting: Prompting, flight: InFlight, n: int) -> Rollout:
    """
    Samples a few tokens after some prompts of the last batch with the engine's current weights. Returns the rollout of
    these completions, at most `n` of them. All ranks must call this.
    """
    n_probes = min(n, _N_PROBES)
    accelerator = prompting.context.accelerator
    prompts, requests = zip(*islice(cycle(flight.probes), n_probes), strict=True)
    short_requests = [item._replace(count=1, max_tokens=min(item.max_tokens, _PROBE_LENGTH)) for item in requests]
    ids, logps = (
        [*column] for column in zip(*on_all_ranks(accelerator, lambda: flight.sample(short_requests)), strict=True)
    )
    # Group ids don't matter, since probes get no advantages
    group_ids = torch.zeros(n_probes, dtype=torch.long, device=accelerator.device)
    prompted = Prompted([*prompts], group_ids, prompting.tokenizer.pad_token_id)
    options: dict[str, Any] = {"pad_to_multiple_of": None, "mask_truncated": False, "accelerator": accelerator}
    return with_completions(prompted, Drawn(ids, logps), ended=[True] * n_probes, **options)[0]
