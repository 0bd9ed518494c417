# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Servers sample ahead of the update: order, age, correction, resuming, and servers and workers that fail."""

import hashlib
import os
import signal
from itertools import groupby
from pathlib import Path
from threading import Event

import pytest
import torch
from helpers.fake_server import LENGTH, digest, fake_servers
from helpers.resumed_runs import Recording, checkpoint, logged, same_weights
from helpers.trainer_utils import length_and_sum
from omni import load_omni, omni_rows
from transformers import TrainerCallback

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
)


CLASSES = {
    "grpo": (MultimodalGRPOTrainer, MultimodalGRPOConfig),
    "rloo": (MultimodalRLOOTrainer, MultimodalRLOOConfig),
    "ppo": (MultimodalPPOTrainer, MultimodalPPOConfig),
}
# Two groups in a batch, two batches in an epoch
OPTIONS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": LENGTH,
    "max_steps": 5,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "self_check": False,
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_timeout": 20.0,
    "max_staleness": 2,
}


def make(omni: Path, folder: Path, servers, kind: str = "grpo", rows=None, mixin=Recording, **options):
    """Returns a trainer that samples with servers, and records what it trains on."""
    trainer_class, config_class = CLASSES[kind]
    urls = [each.url for each in servers]
    where = {"vllm_server_base_urls": urls} if len(urls) > 1 else {"vllm_server_base_url": urls[0]}
    args = config_class(output_dir=str(folder), **{**OPTIONS, **where, **options})
    recorded = type(f"Recorded{kind}", (mixin, trainer_class), {})
    return recorded(
        reward_funcs=length_and_sum, args=args, train_dataset=omni_rows() if rows is None else rows, **load_omni(omni)
    )


class Sequence:
    """Records when a trainer's servers get weights, and when completions of a batch are asked for and used."""

    def __init__(self, trainer):
        self.events, flight = [], trainer.in_flight
        ask, take, sync = flight.ask, flight.take, trainer.vllm_generation.sync_weights
        trainer.vllm_generation.sync_weights = lambda: (sync(), self.events.append(("weights", None)))

        def asked(place, *given, **more):
            self.events.append(("ask", place))
            ask(place, *given, **more)

        def taken(place):
            self.events.append(("use", place))
            return take(place)

        flight.ask, flight.take = asked, taken


@pytest.mark.parametrize("k", [1, 2, 4])
def test_order_and_age(omni, tmp_path, k):
    """A batch is asked for once all but `k` before it are trained on. All are used, in the order without `k`."""
    with fake_servers(omni, [0]) as servers:
        now = make(omni, tmp_path / "now", servers, max_staleness=0)
        now.train()
        assert "/pause" not in [path for path, _ in servers[0].posts]
        trainer = make(omni, tmp_path / "ahead", servers, max_staleness=k)
        sequence = Sequence(trainer)
        trainer.train()
    expected = []
    for place in range(5):
        first = 0 if place == 0 else place + k
        expected += [("weights", None), *(("ask", each) for each in range(first, min(place + k + 1, 5)))]
        expected.append(("use", place))
    assert sequence.events == expected
    prompts = [[ids for ids, _ in run.trained_on] for run in (now, trainer)]
    assert [sorted(each) for each in prompts[0]] == [sorted(each) for each in prompts[1]]
    entries = trainer.state.log_history[:-1]
    for name in ("staleness/mean", "staleness/max"):
        assert [entry[name] for entry in entries] == [min(i, k) for i in range(5)]


def sampled(prompt: list[int], media, row: int, place: int, index: int, seed: int = 42, k: int = 2) -> list[int]:
    """Returns what a server makes of a completion, by the index in its batch."""
    start = int.from_bytes(hashlib.sha256(f"{seed} {place} {row}".encode()).digest()[:4], "big")
    drawn = digest([prompt, media], start + index, str(max(0, place - k)))[:LENGTH]
    return [50 + each % 100 for each in drawn]


class Rollouts(Recording):
    """Records rollouts, and the hashes of media by prompt that servers get."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rollouts, self.hashes, ask = [], {}, self.in_flight.ask

        def asked(place, batch, numbers, requests, **more):
            for request in requests.values():
                self.hashes[tuple(request.ids)] = request.features and request.features["mm_hashes"]
            ask(place, batch, numbers, requests, **more)

        self.in_flight.ask = asked

    def _roll_out(self, inputs):
        self.rollouts.append(super()._roll_out(inputs))
        return self.rollouts[-1]


def test_seeds_and_versions(omni, tmp_path):
    """A completion depends on the seed, the place of its batch, its row and its index alone."""
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, tmp_path, servers, mixin=Rollouts)
        trainer.train()
    assert len({tuple(ids) for rollout in trainer.rollouts for ids in rollout.ids}) == 40
    for place, rollout in enumerate(trainer.rollouts):
        prompts = [prompt.input_ids.tolist() for prompt in rollout.prompts]
        numbers = [number for number, run in groupby(rollout.numbers) for _ in run]
        expected = [
            sampled(prompt, trainer.hashes[tuple(prompt)], number, place, i)
            for i, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
        ]
        assert rollout.ids == expected
        assert (rollout.versions[:, 0] == max(0, place - 2)).all()
        assert ((rollout.versions[:, 0] <= rollout.versions[:, 1]) & (rollout.versions[:, 1] <= place)).all()


class Scored(Recording):
    """Scores each micro-batch by a plain forward of the model at that time."""

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        own = []
        for prompt, ids in zip(inputs.prompts, inputs["completion_ids"], strict=True):
            fields = {name: torch.nn.functional.pad(v, (0, len(ids)))[None] for name, v in prompt.token_fields.items()}
            after = prompt.position_ids[..., -1:] + 1 + torch.arange(len(ids))
            fields["position_ids"] = torch.cat([prompt.position_ids, after], dim=-1)
            sequence = torch.cat([prompt.input_ids, ids])[None]
            with torch.no_grad():
                logits = model(
                    input_ids=sequence, attention_mask=torch.ones_like(sequence), **fields, **prompt.media
                ).logits
            logps = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            own.append(logps.gather(-1, ids[:, None])[:, 0])
        self.scored.append((torch.stack(own), inputs["old_per_token_logps"], inputs["importance_sampling_ratio"]))
        return loss

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored = []


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_correction(omni, tmp_path, kind):
    """Ratios are those of the policy at use to the engine, cut at a bound, and the metric counts what isn't cut."""
    with fake_servers(omni, [0]) as servers:
        options = {"vllm_importance_sampling_clip_max": 0.02}
        trainer = make(omni, tmp_path, servers, kind, mixin=Scored, learning_rate=5e-2, beta=0.0, **options)
        trainer.train()
    mode = trainer.args.vllm_importance_sampling_mode
    assert mode == {"grpo": "token_truncate", "rloo": "sequence_truncate"}[kind]
    entries = trainer.state.log_history
    assert len(trainer.scored) == 5
    for (own, old, ratio), entry in zip(trainer.scored, entries, strict=False):
        torch.testing.assert_close(old, own, atol=1e-5, rtol=0)
        difference = own + 1.0  # the server's log-probabilities
        difference = difference if kind == "grpo" else difference.sum(1, keepdim=True)
        torch.testing.assert_close(ratio, difference.exp().clamp(max=0.02), atol=1e-6, rtol=1e-4)
        kept = (difference.exp() < 0.02).float().mean().item()
        assert entry["sampling/importance_sampling_ratio/kept_frac"] == pytest.approx(kept)
    if kind == "grpo":
        shares = [entry["sampling/importance_sampling_ratio/kept_frac"] for entry in entries[:-1]]
        assert 0 < min(shares) < 1


# Resuming


TIMES = ("staleness/", "wait/")  # of completions that are asked for again


def history(trainer) -> list[dict]:
    return [{name: value for name, value in entry.items() if not name.startswith(TIMES)} for entry in logged(trainer)]


class Holding(TrainerCallback):
    """
    Lets checkpoints find answers and open requests. The last request of a batch, but the first batch, waits for the
    first checkpoint after it was asked for, and each step for the first request of every batch.
    """

    def __init__(self, trainer):
        self.flight, self.saved, self.waits = trainer.in_flight, Event(), {}
        ask, send = self.flight.ask, self.flight._send

        def asked(place, batch, numbers, requests, **more):
            if place > 0:
                self.waits[[*requests][-1][2]] = self.saved
            ask(place, batch, numbers, requests, **more)

        def held(request, *given):
            if request.seed in self.waits:
                self.waits[request.seed].wait()
            return send(request, *given)

        self.flight.ask, self.flight._send = asked, held

    def on_step_end(self, args, state, control, **kwargs):
        for asked in self.flight._asked.values():
            [*asked.answers.values()][0].result()

    def on_save(self, args, state, control, **kwargs):
        self.saved.set()
        self.saved = Event()


def straight_run(omni, folder, **options):
    """Returns a run with a checkpoint of every step."""
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, folder, servers, save_strategy="steps", save_steps=1, **options)
        trainer.add_callback(Holding(trainer))
        trainer.train()
    return trainer


@pytest.fixture(scope="module")
def straight(omni, tmp_path_factory):
    return straight_run(omni, tmp_path_factory.mktemp("straight"))


def resume(omni, folder, straight, step, **options):
    """Returns a resumed run that is the same as one that wasn't interrupted."""
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, folder, servers, **options)
        flight, loaded, asked = trainer.in_flight, [], []
        load, send = flight.load_state_dict, flight._send
        flight.load_state_dict = lambda state: (loaded.append(state), load(state))
        flight._send = lambda request, *given: (asked.append(request.seed), send(request, *given))[1]
        trainer.train(resume_from_checkpoint=checkpoint(straight, step))
    [state] = loaded
    known = {key[2] for key in state["answers"]}
    assert known and known.isdisjoint(asked)
    if not options:
        assert [*state["rows"]] == [*range(step, min(step + 2, 5))]
        assert len(asked) == 2 * (5 - step) - len(known) and (len(known) < 4 or step > 3)
    n_trained = len(trainer.trained_on)
    assert trainer.trained_on == straight.trained_on[-n_trained:]
    assert same_weights(trainer, straight)
    assert history(trainer)[:-1] == history(straight)[:-1]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_resumed_run_is_the_same(omni, tmp_path, straight, step):
    resume(omni, tmp_path, straight, step)


EVERYTHING = {
    "views": ("grpo", {"rollout_view": "blank", "contrast_view": "blank", "rollout_view_fraction": 0.25}),
    "dynamic": (
        "grpo",
        {
            "dynamic_sampling": True,
            "dynamic_sampling_max_rounds": 2,
            "difficulty_sampling": True,
            "replay_buffer_size": 4,
            "generation_kwargs": {"seed": 100},  # of what is drawn when it is needed
        },
    ),
    "reused": (
        "grpo",
        {"beta": 0.1, "num_iterations": 2, "gradient_accumulation_steps": 2, "top_entropy_quantile": 0.5},
    ),
    "rloo": ("rloo", {"beta": 0.1, "media_prefetch": 0}),
    "ppo": ("ppo", {"ema_decay": 0.9, "num_ppo_epochs": 1}),
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_options_resume(omni, tmp_path, name):
    kind, options = EVERYTHING[name]
    straight = straight_run(omni, tmp_path / "straight", kind=kind, **options)
    entries = straight.state.log_history[:-1]
    assert max(entry.get("staleness/max", 0) for entry in entries) == 2
    if name == "views":
        assert all("contrast/accuracy" in entry and "view/reward" in entry for entry in entries)
    resume(omni, tmp_path / "resumed", straight, 2, kind=kind, **options)


# Faults


@pytest.mark.parametrize("kind", ["drop", "error", "slow", "die"])
def test_requests_are_asked_again(omni, tmp_path, straight, kind, caplog):
    """A request without an answer is asked again, by the same seed, and one warning says so."""
    with fake_servers(omni, [0]) as servers:
        timeout = 1.0 if kind == "slow" else 20.0
        trainer = make(omni, tmp_path, servers, vllm_server_timeout=timeout)
        for adapter in trainer.vllm_generation.vllm_client.session.adapters.values():
            adapter.max_retries.backoff_factor = 0.1
        servers[0].fault(kind, after=5, count=3 if kind in ("drop", "error") else 1, seconds=1.5)
        trainer.train()
        counters = servers[0].counters
    assert counters["requests"] > 10 and counters["torn"] == 0
    assert [record.levelname for record in caplog.records if "It is asked again" in record.message] == ["WARNING"]
    assert trainer.trained_on == straight.trained_on and same_weights(trainer, straight)


def test_lost_server_ends_the_run(omni, tmp_path):
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, tmp_path, servers, vllm_server_timeout=1.0)
        servers[0].fault("error", count=1000)
        with pytest.raises(RuntimeError, match=r"500 .* asked 4 times; `vllm_server_timeout` bounds"):
            trainer.train()


def test_servers_share_requests(omni, tmp_path, straight):
    """Requests of a process take turns among servers, and what one doesn't answer another does."""
    with fake_servers(omni, [0, 1]) as servers:
        trainer = make(omni, tmp_path, servers)
        servers[1].fault("drop", after=2)
        trainer.train()
        counters = [each.counters for each in servers]
    assert [each["requests"] for each in counters] == [6, 5]
    assert [each["answers"] for each in counters] == [6, 4]
    assert trainer.trained_on == straight.trained_on and same_weights(trainer, straight)


class KillReader(TrainerCallback):
    """Kills the processes that read rows."""

    def __init__(self, trainer):
        self.stream, self.killed = trainer._stream, []

    def on_step_end(self, args, state, control, **kwargs):
        if self.stream._pool._pool is not None:
            for process in [*self.stream._pool._pool._processes.values()]:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                self.killed.append(process.pid)


def test_killed_reader_starts_again(omni, tmp_path, straight):
    with fake_servers(omni, [0]) as servers:
        trainer = make(omni, tmp_path, servers)
        trainer.add_callback(killer := KillReader(trainer))
        trainer.train()
    assert len(set(killer.killed)) > 1
    assert trainer.trained_on == straight.trained_on and same_weights(trainer, straight)
