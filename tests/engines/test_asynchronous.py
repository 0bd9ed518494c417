# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions that are asked for ahead of the update: order, seeds, correction, resuming, and lost requests."""

import hashlib
import json
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Event, current_thread, main_thread

import pandas as pd
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from helpers.ahead import LENGTH, Ahead, answer, answers
from helpers.marks import slow_but
from helpers.resumed_runs import REPLAY, checkpoint, few_live, logged, same_weights
from helpers.resumed_runs import Recording as TrainedOn
from helpers.spoiled import KINDS, PLACEHOLDER, VOCABULARY
from helpers.trainer_utils import Recording, Weights, audio_rows, image_rows, make_trainer
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.engines.in_flight import EarlyCalls
from trl_multimodal_rft.engines.vllm_client import EngineRequest, ServerClient
from trl_multimodal_rft.engines.vllm_requests import RequestLost, WarnOnce, completions_in, scores_in, until_answered
from trl_multimodal_rft.engines.vllm_teacher import ServerTeacher
from trl_multimodal_rft.evaluation import EvaluationConfig, GenerationEvalCallback


class GRPO(TrainedOn, MultimodalGRPOTrainer):
    pass


class RLOO(TrainedOn, MultimodalRLOOTrainer):
    pass


class PPO(TrainedOn, MultimodalPPOTrainer):
    pass


# Two groups in a batch, two batches in an epoch
OPTIONS = {"max_steps": 5, "max_completion_length": LENGTH}


def make(folder, trainer_class=GRPO, k=2, send=answers, rows=None, family="qwen2_audio", **options):
    rows = audio_rows(4) if rows is None else rows
    trainer = make_trainer(trainer_class, family, rows, folder, **{**OPTIONS, **options})
    trainer.sampler = Ahead(trainer, k, send)
    return trainer


@pytest.mark.parametrize("k", [0, 1, 4])
def test_order_and_age(tmp_path, k):
    """A batch is asked for once all but `k` before it are trained on, and the engine has weights of that time."""
    trainer = make(tmp_path, k=k)
    trainer.train()
    expected = []
    for place in range(5):
        first = 0 if place == 0 else place + k
        expected += [("weights", place), *(("ask", each) for each in range(first, min(place + k + 1, 5)))]
        expected.append(("use", place))
    assert trainer.sampler.events == expected
    entries = trainer.state.log_history[:-1]
    for name in ("staleness/mean", "staleness/max"):
        assert [entry[name] for entry in entries] == [min(i, k) for i in range(5)]


class Draws(Recording, GRPO):
    pass


def test_seeds_and_versions(tmp_path):
    """A completion depends on the seed, its batch's place, its row and its index. Batches are as without."""
    trainer = make(tmp_path / "ahead", Draws)
    trainer.train()
    now = make_trainer(GRPO, "qwen2_audio", audio_rows(4), tmp_path / "now", **OPTIONS)
    now.train()
    for place, rollout in enumerate(draw.batch for draw in trainer.draws):
        starts = [
            int(hashlib.sha256(f"42 {place} {row}".encode()).hexdigest()[:8], 16) for row in rollout.source.row_indices
        ]
        salt = str(max(0, place - 2))
        assert rollout.source.ids == [
            answer(prompt.input_ids.tolist(), start + i, salt)
            for i, (prompt, start) in enumerate(zip(rollout.prompts, starts, strict=True))
        ]
        first, last = rollout.source.flight.versions.T
        assert (first == max(0, place - 2)).all() and ((first <= last) & (last <= place)).all()
    prompts = [[sorted(ids) for ids, _ in run.trained_on] for run in (now, trainer)]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 5


class Scored(Draws):
    """Trains as if vLLM had sampled."""

    _uses_every_score = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights = Weights()
        self.add_callback(self.weights)

    def scored(self) -> list[tuple]:
        """Returns scores of micro-batches by a plain forward of the model at that time, the old ones, and ratios."""
        found = []
        for each in self.micro_batches:
            self.model.load_state_dict(self.weights[each.step])
            own = []
            batch = each.batch
            for prompt, ids in zip(batch.prompts, batch.completion_ids, strict=True):
                sequence = torch.cat([prompt.input_ids, ids])[None]
                given = {"input_ids": sequence, "attention_mask": torch.ones_like(sequence), **prompt.media}
                with torch.no_grad():
                    logps = self.model(**given).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                own.append(logps.gather(-1, ids[:, None])[:, 0])
            found.append((torch.stack(own), batch.old_per_token_logps, batch.importance_sampling_ratio))
        return found


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_ratio_is_of_the_policy_at_use(tmp_path, mode):
    options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 0.02}
    trainer = make(tmp_path, Scored, learning_rate=5e-2, **options)
    trainer.train()
    scored = trainer.scored()
    assert len(scored) == 5
    for own, old, ratio in scored:
        torch.testing.assert_close(old, own, atol=1e-5, rtol=0)
        expected = own + 1.0  # the engine's log-probabilities
        expected = expected if mode.startswith("token") else expected.sum(1, keepdim=True)
        torch.testing.assert_close(ratio, expected.exp().clamp(max=0.02), atol=1e-6, rtol=1e-4)
    assert not torch.equal(scored[0][0], scored[-1][0])


def test_share_of_ratios_within_bounds(tmp_path):
    """The bound is the median of the first batch's ratios."""
    trainer = make(tmp_path / "all", Scored, max_steps=1, vllm_importance_sampling_mode="token_truncate")
    trainer.args.max_staleness = 2  # which the config refuses without vLLM
    trainer.train()
    [(own, _, _)] = trainer.scored()
    ratios = (own + 1).exp()
    assert _kept(trainer) == (ratios < 3.0).float().mean().item()
    for mode in ("token_truncate", "token_mask"):
        options = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": ratios.median().item()}
        trainer = make(tmp_path / mode, Scored, max_steps=1, **options)
        trainer.args.max_staleness = 2
        trainer.train()
        assert _kept(trainer) == pytest.approx(0.5, abs=2 / ratios.numel())


def _kept(trainer) -> float:
    return trainer.state.log_history[0]["sampling/importance_sampling_ratio/kept_frac"]


# Resuming


class Holding(TrainerCallback):
    """
    Lets checkpoints find answers and open requests. The last request of a batch, but the first batch, waits for the
    first checkpoint after it was asked for, and each step for the first request of every batch.
    """

    def __init__(self, trainer):
        self.flight = trainer.in_flight
        self.saved = Event()
        self.waits = {}
        ask = self.flight.ask
        send = self.flight._send

        def asked(place, batch, numbers, requests, **more):
            if place > 0:
                self.waits[[*requests][-1][2]] = self.saved
            ask(place, batch, numbers, requests, **more)

        def held(request, *given):
            if request.seed in self.waits:
                self.waits[request.seed].wait()
            return send(request, *given)

        self.flight.ask = asked
        self.flight._send = held

    def on_step_end(self, args, state, control, **kwargs):
        for asked in self.flight._pending.values():
            [*asked.answers.values()][0].result()

    def on_save(self, args, state, control, **kwargs):
        self.saved.set()
        self.saved = Event()


RUNS = {
    "plain": (GRPO, {}),
    "views": (GRPO, {"rollout_view": "blank(fraction=0.25)", "contrast_view": "blank"}),
    "reused": (GRPO, {"beta": 0.1, "num_iterations": 2, "top_entropy_quantile": 0.5}),
    "micro": (GRPO, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "media_prefetch": 0}),
    "dynamic": (GRPO, {**REPLAY, "reward": few_live}),  # further rounds are sampled when they are needed
    "difficulty": (GRPO, {"difficulty_sampling": True, "media_prefetch": 2}),
    "rloo": (RLOO, {"beta": 0.1, "replay_buffer_size": 4}),
    "ppo": (PPO, {"ema_decay": 0.9, "num_ppo_epochs": 1}),
}
STALE = ("staleness/", "wait/")  # of completions that are asked for again


def history(trainer) -> list[dict]:
    return [{k: v for k, v in entry.items() if not k.startswith(STALE)} for entry in logged(trainer)][:-1]


@pytest.mark.parametrize("name", slow_but(RUNS, "plain", "dynamic"))
def test_resumed_run_is_the_same(tmp_path, name):
    """Completions of a checkpoint aren't asked for, the others are, by the same seeds."""
    trainer_class, options = RUNS[name]
    options = {"optim": "adamw_torch", "lr_scheduler_type": "linear", **options}
    straight = make(tmp_path / "straight", trainer_class, save_strategy="steps", save_steps=1, **options)
    straight.add_callback(Holding(straight))
    straight.train()
    assert max(entry.get("staleness/max", 0) for entry in straight.state.log_history) == 2
    if name == "views":
        assert all({"view/reward", "contrast/accuracy"} <= entry.keys() for entry in straight.state.log_history[:-1])
    for step in (1, 2, 4) if name == "plain" else (2,):
        asked = []

        def sent(request, *given, asked=asked):
            asked.append(request.seed)
            return answers(request, *given)

        trainer = make(tmp_path / f"from-{step}", trainer_class, send=sent, **options)
        loaded = []
        load = trainer.in_flight.load_state_dict
        trainer.in_flight.load_state_dict = lambda state, loaded=loaded, load=load: (loaded.append(state), load(state))
        trainer.train(resume_from_checkpoint=checkpoint(straight, step))
        [state] = loaded
        known = {key[2] for key in state["answers"]}
        assert known and known.isdisjoint(asked)
        if name == "plain":
            assert [*state["rows"]] == [*range(step, min(step + 2, 5))]
            assert len(asked) == 2 * (5 - step) - len(known) and (len(known) < 4 or step > 3)
        assert trainer.trained_on == straight.trained_on[-len(trainer.trained_on) :]
        assert same_weights(trainer, straight) and history(trainer) == history(straight)


# Rewards


def evens(completion_ids, completions, log_metric, log_extra, **columns) -> list[float]:
    """The share of even tokens."""
    rewards = [sum(each % 2 == 0 for each in ids) / len(ids) for ids in completion_ids]
    log_metric("evens", sum(rewards) / len(rewards))
    log_extra("text", [each[0]["content"] for each in completions])
    return rewards


class Evens:
    """The same, and records the steps and threads in which it is called."""

    def __init__(self):
        self.calls = []
        self.__name__ = "evens"

    def record(self, trainer_state, prompts, group_ids):
        self.calls.append((trainer_state.global_step, current_thread() is main_thread()))
        assert len(prompts) == 4 and len(set(group_ids)) == 1


class Async(Evens):
    async def __call__(self, trainer_state, prompts, group_ids, **columns):
        self.record(trainer_state, prompts, group_ids)
        return evens(**columns)


class Waits(Evens):
    only_waits = True

    def __call__(self, trainer_state, prompts, group_ids, **columns):
        self.record(trainer_state, prompts, group_ids)
        return evens(**columns)


def first_token(completion_ids, **columns) -> list[float]:
    return [float(ids[0] % 3) for ids in completion_ids]


@pytest.mark.parametrize("kind", slow_but([Async, Waits], Async))
def test_functions_that_wait_are_called_when_a_group_comes(tmp_path, kind):
    """They have the results and the logs of functions that are called with a whole batch, also of a resumed run."""

    options = {"save_strategy": "steps", "save_steps": 1, "log_completions": True, "num_completions_to_print": 1}
    now = make(tmp_path / "now", reward=[first_token, evens], **options)
    now.add_callback(Holding(now))
    now.train()
    early = kind()
    ahead = make(tmp_path / "ahead", reward=[first_token, early], **options)
    ahead.add_callback(Holding(ahead))
    ahead.train()
    assert same_weights(ahead, now) and history(ahead) == history(now)
    files = [sorted(tmp_path.glob(f"{name}/_private/completions/*")) for name in ("now", "ahead")]
    tables = [[*map(pd.read_parquet, each)] for each in files]
    assert len(tables[0]) == 5 and all(table["text"].str.len().all() for table in tables[0])
    for name in ("completion", "text", "evens"):
        assert [[*table[name]] for table in tables[0]] == [[*table[name]] for table in tables[1]]
    assert all(0 < entry["evens"] < 1 for entry in history(ahead))
    steps, in_main = zip(*early.calls, strict=True)
    assert len(steps) == 10 and not any(in_main) and steps[4] < 2  # before the first batch of that age is due
    resumed = make(tmp_path / "resumed", reward=[first_token, kind()], **options)
    resumed.train(resume_from_checkpoint=checkpoint(ahead, 2))
    assert same_weights(resumed, ahead) and history(resumed) == history(ahead)


def test_groups_from_two_prompts_are_rewarded_whole(tmp_path):
    sizes = []

    async def function(group_ids, completion_ids, **columns):
        sizes.append(len(group_ids))
        return [float(ids[0] % 3) for ids in completion_ids]

    make(tmp_path, reward=function, rollout_view="blank").train()
    assert sizes == [8] * 5


def test_early_calls_wait_for_each_other_and_share_an_error():
    calls = EarlyCalls()
    running = []
    n_most = []

    def function(fails):
        running.append(1)
        n_most.append(len(running))
        time.sleep(0.02)
        running.pop()
        if fails:
            raise ValueError("no judge")
        return len(n_most)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: calls("function", function, fails=False), range(4))) == [1, 2, 3, 4]
    assert n_most == [1] * 4
    for name in ("function", "other"):
        with pytest.raises(ValueError, match="no judge"):
            calls(name, function, fails=True)
    assert len(n_most) == 5


def test_evaluation_leaves_what_is_in_flight(tmp_path):
    runs = []
    for name in ("without", "with"):
        trainer = make(tmp_path / name)
        if name == "with":
            config = EvaluationConfig(max_completion_length=2)
            trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(2), first_token, config, freq=1))
        trainer.train()
        runs.append(trainer)
    asked = [[place for kind, place in run.sampler.events if kind == "ask"] for run in runs]
    assert asked == [[*range(5)]] * 2
    assert runs[0].trained_on == runs[1].trained_on and same_weights(*runs)


def test_error_of_a_function_that_waits_names_its_row(tmp_path):
    async def failing(prompts, **columns):
        return [float("nan")] * len(prompts)

    with pytest.raises(ValueError, match=r"'failing' returned nan for row \d"):
        make(tmp_path, reward=failing).train()


# Faults


def test_attempts_fit_into_the_patience(monkeypatch):
    """Waits double, and their sum is the patience; each attempt gets its number."""
    waits = []
    numbers = []
    warnings = []
    monkeypatch.setattr("trl_multimodal_rft.engines.vllm_requests.time.sleep", waits.append)

    def attempt(n):
        numbers.append(n)
        raise RequestLost("The server is gone.")

    with pytest.raises(
        RuntimeError, match="is gone. It was asked 6 times; check the server, or raise the limit `vllm_server_timeout`"
    ):
        until_answered(attempt, 5.0, warnings.append)
    assert waits == [0.25, 0.5, 1.0, 2.0, 1.25] and numbers == [*range(6)] and len(warnings) == 5
    with pytest.raises(RuntimeError, match="asked 12 times"):
        until_answered(attempt, 60.0, warnings.append)
    assert max(waits) == 10.0
    with pytest.raises(RuntimeError, match="asked 2006 times"):  # after more than five hours
        until_answered(attempt, 20_000.0, warnings.append)

    def late(n):
        raise RequestLost("Nothing in 5 s.", timed_out=True)

    with pytest.raises(RuntimeError, match="Nothing in 5 s. It was asked once"):
        until_answered(late, 5.0, warnings.append)


def test_threads_warn_once(caplog):
    PartialState()  # which the logger needs
    for _ in range(50):
        warn = WarnOnce()
        together = threading.Barrier(8)

        def lost(warn=warn, together=together):
            together.wait()
            warn(RequestLost("The server is gone."))

        threads = [threading.Thread(target=lost) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert sum("It is asked again" in message for message in caplog.messages) == 50


@pytest.mark.parametrize("name", KINDS)
def test_what_an_answer_holds(name):
    logprobs = {"content": [{"logprob": -1.0}] * LENGTH}
    ids = [[*range(10 + i, 10 + i + LENGTH)] for i in range(4)]
    choices = [{"index": i, "token_ids": ids[i], "logprobs": logprobs, "finish_reason": "stop"} for i in range(4)]
    spoiled = KINDS[name].change({"choices": choices})
    if not isinstance(spoiled, (dict, list)):
        return  # no answer, or one of another status
    given = (json.dumps(spoiled).encode(), 4, LENGTH, VOCABULARY, {PLACEHOLDER})
    if KINDS[name].outcome == "taken":
        found, logps = zip(*completions_in(*given), strict=True)
        assert [*found] == ids and {each for own in logps for each in own} <= {-1.0, None}
        return
    with pytest.raises(ValueError) as error:
        completions_in(*given)
    assert KINDS[name].says in str(error.value) and "\n" not in str(error.value)


def logps_at(*pairs):
    return {str(token): {"logprob": logp} for token, logp in pairs}


SCORES = [None, logps_at((3, -1)), logps_at((4, -1), (9, -2)), logps_at((7, -0.5), (8, -1.5), (5, -9999.0))]
LIES = {
    "a position fewer": (SCORES[:-1], "the scores of 3 positions, not 4"),
    "a position more": ([*SCORES, SCORES[-1]], "the scores of 5 positions, not 4"),
    "no positions": (None, "it holds no scores"),
    "NaN": ([*SCORES[:-1], logps_at((5, math.nan), (8, -2.5))], "the log-probability nan, which isn't a number from"),
    "a text": ([*SCORES[:-1], logps_at((5, "-1"), (8, -2.5))], "the log-probability '-1', which"),
    "truth values": ([*SCORES[:-1], logps_at((5, False), (8, -2.5))], "the log-probability False, which"),
    "above 0": ([*SCORES[:-1], logps_at((5, 0.1), (8, -2.5))], "the log-probability 0.1, which"),
    "a token beyond": ([*SCORES[:-1], logps_at((5, -1), (VOCABULARY, -2.5))], f"the token {VOCABULARY}, which"),
    "a negative token": ([*SCORES[:-1], logps_at((5, -1), (-1, -2.5))], "the token -1, which"),
    "a word": ([*SCORES[:-1], {"five": {"logprob": -1}}], "position 3 has no log-probabilities by token"),
    "no scores at a position": ([*SCORES[:-1], None], "position 3 has no log-probabilities by token"),
    "two certain tokens": ([*SCORES[:-1], logps_at((5, 0.0), (8, 0.0))], "whose probabilities sum to 2"),
    "another prompt": ([*SCORES[:-1], logps_at((6, -1), (8, -2.5))], "no score of the prompt's token 5"),
    "too few tokens": ([*SCORES[:-1], logps_at((5, -1))], "has 1 tokens, not the 2 most likely ones"),
}


@pytest.mark.parametrize("name", LIES)
def test_what_scores_hold(name):
    positions, says = LIES[name]
    with pytest.raises(ValueError, match=says):
        scores_in(json.dumps({"prompt_logprobs": positions}).encode(), [1, 3, 4, 5], 2, 2, VOCABULARY)


def test_scores_of_the_last_tokens():
    whole = {"prompt_logprobs": SCORES}
    expected = [{4: -1, 9: -2}, {7: -0.5, 8: -1.5}]  # without the prompt's token, which isn't among the most likely
    assert scores_in(json.dumps(whole).encode(), [1, 3, 4, 5], 2, 2, VOCABULARY) == expected
    for body in (json.dumps({**whole, "error": "dead"}), "<html>", "[1]", '{"choices": []}'):
        with pytest.raises(ValueError, match="it holds (an error beside|no) scores"):
            scores_in(body.encode(), [1, 3, 4, 5], 2, 2, VOCABULARY)


def test_a_teacher_that_lies_is_asked_again(serve):
    """A server's teacher gets another chance, as with completions."""
    answers = iter([{"prompt_logprobs": SCORES[:-1]}, {"prompt_logprobs": SCORES}])
    server = serve(lambda request: next(answers))
    PartialState()
    teacher = object.__new__(ServerTeacher)  # without vLLM, which the constructor needs
    teacher.client = object.__new__(ServerClient)
    teacher.vocab_size = VOCABULARY
    vars(teacher.client).update(base_url=server.url, timeout=5.0, warn=WarnOnce(), model=None)
    ids, logps = teacher.top_k([EngineRequest([1, 3], None, 1, 1, None)], [[4, 5]], 3, 2)
    assert ids.tolist() == [[[4, 9], [7, 8], [0, 0]]] and logps.tolist() == [[[-1, -2], [-0.5, -1.5], [0, 0]]]
    assert len(server.requests) == 2


def test_lost_requests_are_asked_again(tmp_path, caplog):
    """A lost request changes nothing, and one warning says so. Other errors end the run."""
    straight = make(tmp_path / "straight")
    straight.train()
    lost = []

    def lossy(request, salt, turn, attempt):
        if attempt < turn % 3:
            lost.append(turn)
            raise RequestLost("No answer.")
        return answers(request, salt, turn, attempt)

    trainer = make(tmp_path / "lossy", send=lossy)
    trainer.train()
    assert len(lost) == 9 and trainer.trained_on == straight.trained_on and same_weights(trainer, straight)
    assert [each.levelname for each in caplog.records if "It is asked again" in each.message] == ["WARNING"]

    def refused(request, salt, turn, attempt):
        if turn == 5:
            raise RuntimeError("400: too long")
        return answers(request, salt, turn, attempt)

    trainer = make(tmp_path / "refused", send=refused)
    with pytest.raises(RuntimeError, match="400: too long"):
        trainer.train()
    assert trainer.in_flight.state_dict() == {"rows": {}, "answers": {}}


class KillReader(TrainerCallback):
    """Kills the processes that read rows, after each step."""

    def __init__(self, trainer):
        self.stream = trainer._stream
        self.killed = set()

    def on_step_end(self, args, state, control, **kwargs):
        if self.stream._pool._pool is not None:
            for process in [*self.stream._pool._pool._processes.values()]:
                with suppress(ProcessLookupError):  # those of a pool that is broken already
                    os.kill(process.pid, signal.SIGKILL)
                    self.killed.add(process.pid)
                process.join()


def test_killed_readers_start_again(tmp_path):
    straight = make(tmp_path / "straight")
    straight.train()
    trainer = make(tmp_path / "killed", media_prefetch=1, dataloader_num_workers=1)
    killer = KillReader(trainer)
    trainer.add_callback(killer)
    trainer.train()
    assert len(killer.killed) > 1
    assert trainer.trained_on == straight.trained_on and same_weights(trainer, straight)


def test_bad_rows_are_skipped_ahead(tmp_path):
    """Rows that can't be read are replaced when their batch is asked for, by the same rows in a resumed run."""
    rows = [{"prompt": row["prompt"], "image": str(tmp_path / f"{i}.png")} for i, row in enumerate(image_rows(6))]
    for i in (0, 2, 3, 5):
        image_rows(6)[i]["image"].save(tmp_path / f"{i}.png")
    options = {"on_media_error": "skip", "max_skipped_rows": 3, "rows": Dataset.from_list(rows)}
    options |= {"family": "qwen2_5_vl"}
    straight = make(tmp_path / "straight", save_strategy="steps", save_steps=1, **options)
    straight.add_callback(Holding(straight))
    straight.train()
    assert set(straight._stream.skipped) == {1, 4}
    trainer = make(tmp_path / "resumed", **options)
    trainer.train(resume_from_checkpoint=checkpoint(straight, 2))
    assert trainer.trained_on == straight.trained_on[2:] and same_weights(trainer, straight)
