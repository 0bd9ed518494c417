# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Calling reward functions outside of a trainer."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import TrainerState
from trl import is_conversational
from trl.trainer.utils import (
    get_callable_name,
    is_async_callable,
    shutdown_event_loop_in_daemon,
    start_event_loop_in_daemon,
)

from ..data.rules import DEFAULT_RULES, MediaRules
from .checks import rules_for


# Columns of the dataset that reward functions get under other names, as in TRL
_NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")


def reward_arguments(
    prompts: Sequence[Any],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
    completions: Sequence[list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """What reward functions get, by the names that TRL's trainers give it."""
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _NOT_FOR_REWARDS]
    if completions is None and is_conversational({"prompt": prompts[0]}):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        **{name: [row.get(name) for row in rows] for name in names},
        "prompts": prompts,
        "completions": texts if completions is None else completions,
        "completion_ids": ids,
    }


def call_rewards(
    reward_funcs: Sequence[Callable],
    prompts: Sequence[Any],
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    rows: Sequence[dict[str, Any]],
    trainer_state: TrainerState | None,
    loop: Any,
    media_rules: MediaRules = DEFAULT_RULES,
    completions: Sequence[list[dict[str, Any]]] | None = None,
) -> tuple[dict[str, list[float | None]], dict[str, list], list[tuple[str, float]]]:
    """Calls reward functions as TRL's trainers do, outside of one."""
    extras: dict[str, list] = {}
    metrics: list[tuple[str, float]] = []
    arguments = {
        **reward_arguments(prompts, texts, ids, rows, completions),
        "trainer_state": trainer_state,
        "log_extra": lambda column, values: extras.__setitem__(column, list(values)),
        "log_metric": lambda name, value: metrics.append((name, float(value))),
    }
    results = {}
    waiting = {}
    for reward_func in reward_funcs:
        called = waiting if is_async_callable(reward_func) else results
        called[get_callable_name(reward_func)] = reward_func(**arguments, **rules_for(reward_func, media_rules))
    if waiting:

        async def together():
            return await asyncio.gather(*waiting.values())

        awaited = asyncio.run_coroutine_threadsafe(together(), loop).result()
        results.update(zip(waiting, awaited, strict=True))
    for column, values in extras.items():
        if len(values) != len(texts):
            raise ValueError(
                f"`log_extra` got {len(values)} values of {column!r} for {len(texts)} completions; give one each."
            )
    order = [get_callable_name(reward_func) for reward_func in reward_funcs]
    return {name: [None if r is None else float(r) for r in results[name]] for name in order}, extras, metrics


@contextmanager
def reward_loop(reward_funcs: Sequence[Callable]) -> Iterator[asyncio.AbstractEventLoop | None]:
    """An event loop where a function is async, in a thread, since one may run here already, as in a notebook."""
    if not any(is_async_callable(reward_func) for reward_func in reward_funcs):
        yield None
        return
    thread, loop, ready = start_event_loop_in_daemon(name="evaluation")
    ready.wait()
    try:
        yield loop
    finally:
        shutdown_event_loop_in_daemon(thread, loop)
