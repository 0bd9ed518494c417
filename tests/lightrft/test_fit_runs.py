# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run of `PPOTrainerVL.fit` is a training run: its events, checkpoints and their checks, its lock, and signals."""

import logging
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
import transformers
from helpers import forked
from helpers.ended_runs import full, no_memory
from helpers.folders import TESTS
from helpers.processes import python_command, python_environment
from helpers.resumed_runs import equal
from helpers.trainer_utils import image_rows, length_and_sum, load, moved, saved
from lightrft.test_ppo_reference import (
    actor_of,
    critic_of,
    end_of,
    loader,
    make,
    own_optimizers,
    reference_of,
    strategy,
)
from lightrft.test_reference_updates import saved_weights
from transformers import EarlyStoppingCallback, TrainerCallback

import trl_multimodal_rft
from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.extras.remote import RemoteReward
from trl_multimodal_rft.lightrft.trainer.optimizers import TwoOptimizers
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.reporting.console import CompactLogCallback
from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


pytestmark = pytest.mark.gate


# What `train` calls

TRUNK = """
trainers/base/trainer.py trainers/base/optimizer.py trainers/base/ema.py trainers/base/signals.py
trainers/base/finite.py trainers/checkpoints/checkpoints.py trainers/checkpoints/files.py
trainers/checkpoints/lock.py trainers/checkpoints/manifest.py reporting/console.py reporting/events.py
reporting/hub.py reporting/model_card.py
""".split()
# Methods of a dataset, its loop and its evaluation, in whose place are `fit`'s batches and its `evaluate`
OWN_LOOP = """
BaseTrainer._row_readers BaseTrainer.get_batch_samples
BaseTrainer.get_eval_dataloader BaseTrainer.get_train_dataloader CallbackHandler.on_prediction_step
CompactLogCallback.on_prediction_step Trainer._evaluate Trainer._get_learning_rate
Trainer._get_num_items_in_batch Trainer._maybe_log_save_evaluate Trainer._report_to_hp_search Trainer._run_epoch
Trainer._track_num_input_tokens Trainer.evaluate Trainer.evaluation_loop Trainer.floating_point_ops
Trainer.get_batch_samples Trainer.num_examples Trainer.set_initial_training_values
TrainerCallback.on_prediction_step
""".split()


class Events(TrainerCallback):
    """Notes the events of a run."""

    def __init__(self):
        self.names = set()

    def __getattribute__(self, name):
        if name.startswith("on_"):
            self.names.add(name)
        return object.__getattribute__(self, name)


def called(function) -> set[str]:
    """Returns the functions of transformers' trainer and of this package's trunk that a call runs."""
    package, library = (Path(module.__file__).parent for module in (trl_multimodal_rft, transformers))
    files = {str(package / name) for name in TRUNK}
    files |= {str(library / name) for name in ("trainer.py", "trainer_callback.py")}
    names = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename in files and "<" not in code.co_qualname:
            names.add(code.co_qualname)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def test_fit_calls_what_train_calls(tmp_path):
    """Both resume, log, evaluate and save."""
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    options |= {"per_device_eval_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-2}

    def native(checkpoint):
        rows = image_rows(8)
        trainer = MultimodalPPOTrainer(
            load("qwen2_5_vl")[0],
            length_and_sum,
            strategy(tmp_path / "native", self_check=False, beta=0.1, kl_estimator="k1", **options),
            rows,
            rows.select(range(1)),
            processing_class=load("qwen2_5_vl")[1],
            value_model=critic_of("qwen2_5_vl"),
            ref_model=moved("qwen2_5_vl")["model"],
        )
        return trainer, lambda: trainer.train(checkpoint)

    def like_lightrft(checkpoint):
        options["resume_from_checkpoint"] = checkpoint
        ppo = make(tmp_path / "lightrft", config=options, ref=reference_of("image"))
        batches = loader(image_rows(8)), None, loader(image_rows(1))
        return ppo.trainer, lambda: ppo.fit(ppo.strategy, *batches)

    functions = []
    events = []
    for start, name in ((native, "native"), (like_lightrft, "lightrft")):
        start(None)[1]()
        trainer, resumed = start(str(tmp_path / name / "checkpoint-2"))
        watch = Events()
        trainer.add_callback(watch)
        functions.append(called(resumed))
        events.append(watch.names)
    assert sorted(functions[0] - functions[1]) == sorted(OWN_LOOP)
    assert {"Checkpoints.verify", "holding_lock", "EndOnSignal.handling_signals", "run_mismatch"} <= functions[1]
    assert events[0] - events[1] == {"on_prediction_step"}


# Checkpoints and signals


def prepared(folder, estimator="gae", reward_fn=length_and_sum, **config):
    """Returns a trainer with the caller's optimizers, which makes four rollouts of two updates, and its run."""
    policy = actor_of("image")
    ema = actor_of("image")
    critic = critic_of("qwen2_5_vl") if estimator == "gae" else None
    optimizers = own_optimizers(policy, critic_of("qwen2_5_vl") if critic is None else critic)
    options = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    ppo = make(
        folder,
        policy=policy,
        critic=critic,
        ema=ema,
        ref=reference_of("image"),
        optimizers=optimizers if critic is not None else (optimizers[0], None, optimizers[2], None),
        config={**options, "advantage_estimator": estimator, "reward_running_scale": True, **config},
        kl_target=0.01,
        max_epochs=2,
        reward_fn=reward_fn,
    )

    def run(consumed_samples=0):
        torch.manual_seed(0)
        ppo.fit(ppo.strategy, loader(image_rows(4), shuffle=True), None, None, consumed_samples)
        return end_of(ppo, ema)

    return run


ESTIMATORS = ["gae", "group_norm"]


@pytest.fixture(scope="module", params=ESTIMATORS)
def straight(request, tmp_path_factory):
    """Returns the estimator, the folder and the end of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    end = prepared(folder, request.param)()
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (4, 6, 8)]
    return request.param, folder, end


@pytest.fixture
def output(straight, tmp_path):
    return Path(shutil.copytree(straight[1], tmp_path / "output"))


def assert_equal(expected, found):
    assert [name for name in expected if not equal(expected[name], found[name])] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_signals_end_a_run_with_a_checkpoint(number, straight, tmp_path):
    """The rollout in which the signal comes is trained on, since a checkpoint lies between rollouts."""
    calls = []

    def reward(completion_ids, **columns):
        calls.append(completion_ids)
        if len(calls) == 2:
            signal.raise_signal(number)
        return length_and_sum(completion_ids)

    estimator, _, end = straight
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="after step 4 of 8; resume from .*checkpoint-4"):
        prepared(tmp_path, estimator, reward, save_steps=8)()
    assert signal.getsignal(number) is before
    assert len(calls) == 2 and verify_checkpoint(tmp_path / "checkpoint-4") == []
    assert_equal(end, prepared(tmp_path, estimator, resume_from_checkpoint=True)())


def judge_away(patch):
    raise TimeoutError("the judge is away")


def judge_gone(patch):
    """The server has closed."""
    patch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/reward"
    RemoteReward(url, timeout=0.5, patience=1)(prompts=["a"], completions=["b"])


def memory_full(patch):
    patch.setattr(torch.nn.Embedding, "forward", no_memory)


def half_updated(patch):
    """Schedules have replaced `step`, which calls this method at its end."""
    patch.setattr(torch.optim.Optimizer, "_optimizer_step_code", no_memory)


def callback_away(patch):
    patch.setattr(CompactLogCallback, "on_step_end", no_memory)


def disk_full(patch):
    patch.setattr(CompactLogCallback, "on_log", full)


@pytest.mark.parametrize("end", [judge_away, judge_gone, memory_full, half_updated, callback_away, disk_full])
def test_an_error_names_the_last_checkpoint_and_saves_no_half_of_a_rollout(end, straight, tmp_path, monkeypatch):
    calls = []
    estimator, _, expected = straight
    with monkeypatch.context() as patch:

        def reward(completion_ids, **columns):
            calls.append(completion_ids)
            if len(calls) == 4:
                end(patch)
            return length_and_sum(completion_ids)

        with pytest.raises((RuntimeError, OSError)) as raised:
            prepared(tmp_path, estimator, reward, save_steps=4)()
    assert len(calls) == 4 and [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    (note,) = raised.value.__notes__
    assert note == f"The last checkpoint is {tmp_path / 'checkpoint-4'}; `resume_from_checkpoint=True` resumes it."
    assert_equal(expected, prepared(tmp_path, estimator, resume_from_checkpoint=True)())


def without_states(path):
    state = torch.load(path, weights_only=False)
    state["state"] = {}
    torch.save(state, path)


def overwrite(path):
    content = bytearray(path.read_bytes())
    content[-200:-100] = b"\x3c" * 100
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


DAMAGES = {
    "optimizer.pt is missing": lambda folder: (folder / "optimizer.pt").unlink(),
    "scheduler.pt is missing": lambda folder: (folder / "scheduler.pt").unlink(),
    "rollout_state_0.pt is missing": lambda folder: (folder / "rollout_state_0.pt").unlink(),
    "optimizer.pt has": lambda folder: without_states(folder / "optimizer.pt"),
    "scheduler.pt has": lambda folder: cut(folder / "scheduler.pt"),
    "model.safetensors has other content": lambda folder: overwrite(folder / "model.safetensors"),
    "rng_state.pth has": lambda folder: cut(folder / "rng_state.pth"),
    "critic/model.safetensors is missing": lambda folder: shutil.rmtree(folder / "critic"),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_damaged_checkpoints(fault, straight, output, caplog):
    """One that is named is an error of one line. A search passes it over, and ends in the uninterrupted run."""
    estimator, _, end = straight
    if estimator != "gae" and "critic" in fault:
        pytest.skip("has no critic")
    shutil.rmtree(output / "checkpoint-8")
    folder = output / "checkpoint-6"
    DAMAGES[fault](folder)
    run = prepared(output, estimator, resume_from_checkpoint=str(folder))
    with pytest.raises(ValueError, match="checkpoint-6 isn't whole: ") as raised:
        run()
    assert fault in str(raised.value) and "\n" not in str(raised.value)
    with caplog.at_level(logging.WARNING):
        assert_equal(end, prepared(output, estimator, resume_from_checkpoint=True)())
    assert "Passed over: " in caplog.text
    assert "has changed since" not in caplog.text and "no prompt has media" not in caplog.text


def test_what_a_resumed_run_is_asked(straight, output, caplog):
    """Rows that differ are told, and another optimizer or another method is an error."""
    estimator, _, _ = straight
    checkpoint = str(output / "checkpoint-6")
    ppo = make(
        output,
        critic=critic_of("qwen2_5_vl") if estimator == "gae" else None,
        ref=reference_of("image"),
        config={"advantage_estimator": estimator, "num_train_epochs": 2, "resume_from_checkpoint": checkpoint},
        max_epochs=2,
    )
    rows = [{**row, "prompt": [{"role": "user", "content": "What is it?"}]} for row in image_rows(4)]
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match="parameter groups"):
        ppo.fit(ppo.strategy, loader(rows, shuffle=True), None)  # one optimizer, in place of the caller's
    assert "`train_dataset` has changed since" in caplog.text and "of the 4 rows compared, 4" in caplog.text
    manifest = output / "checkpoint-6" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"algorithm": "ppo"', '"algorithm": "grpo"'))
    with pytest.raises(ValueError, match="is of a run of 'grpo' without an adapter, and this one is of 'ppo'"):
        prepared(output, estimator, resume_from_checkpoint=checkpoint)()
    with pytest.raises(ValueError, match="There is no checkpoint in .* to resume from"):
        prepared(output / "new", estimator, resume_from_checkpoint=True)()


def test_states_of_other_optimizers():
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    policy, critic = ([weight] for weight in weights)
    saved_state = TwoOptimizers(torch.optim.AdamW(policy), torch.optim.RMSprop(critic)).state_dict()
    with pytest.raises(ValueError, match="The checkpoint's optimizer isn't a SGD: it has no `dampening`"):
        TwoOptimizers(torch.optim.SGD(policy), torch.optim.RMSprop(critic)).load_state_dict(saved_state)
    with pytest.raises(ValueError, match="The checkpoint's optimizer isn.t a Adagrad: it has no `fused`"):
        TwoOptimizers(torch.optim.AdamW(policy), torch.optim.Adagrad(critic)).load_state_dict(saved_state)


def test_a_resumed_run_skips_what_the_run_skipped(tmp_path):
    """A run that leaves out its first prompts is as long after resuming, whatever the call then says."""
    ends = []
    for folder, consumed in (("whole", [4]), ("resumed", [4, 4]), ("otherwise", [4, 0])):
        for index, n in enumerate(consumed):
            run = prepared(tmp_path / folder, "group_norm", resume_from_checkpoint=index > 0)
            end = run(n)
            if len(consumed) > index + 1:
                shutil.rmtree(tmp_path / folder / "checkpoint-4")
        ends.append(end)
    assert ends[0]["rollouts"][0] == {"consumed_samples": 8}
    for end in ends[1:]:
        assert_equal(ends[0], end)
    for n in (-2, 8, 100):
        with pytest.raises(
            ValueError, match=f"`consumed_samples` .{n}. must be at least 0, and less than the run's 8"
        ):
            prepared(tmp_path / "refused", "group_norm")(n)


def test_checkpoints_of_others(tmp_path):
    """One of a loop of one's own goes on, and one of another trainer is an error of one line."""
    ppo = make(tmp_path, config={"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2})
    for step in (1, 2):
        ppo.save_logs_and_checkpoints(ppo.strategy, step, None)
    ppo = make(tmp_path, config={"num_train_epochs": 2, "resume_from_checkpoint": True, "learning_rate": 1e-2})
    ppo.fit(ppo.strategy, loader(image_rows(4)), None)
    assert ppo.trainer.state.global_step == 4
    options = {"max_steps": 1, "save_steps": 1, "max_completion_length": 6, "advantage_estimator": "group_norm"}
    trainer = MultimodalPPOTrainer(
        load("qwen2_5_vl")[0],
        length_and_sum,
        strategy(tmp_path / "native", self_check=False, save_strategy="steps", **options),
        image_rows(4),
        processing_class=load("qwen2_5_vl")[1],
    )
    trainer.train()
    config = {"advantage_estimator": "group_norm", "resume_from_checkpoint": True, "num_train_epochs": 2}
    ppo = make(tmp_path / "native", config=config)
    with pytest.raises(ValueError, match="The checkpoint is of a `MultimodalPPOTrainer`"):
        ppo.fit(ppo.strategy, loader(image_rows(4)), None)


def test_loops_of_ones_own_with_default_options(tmp_path, capsys):
    """Progress bars of `train` aren't asked, and the number of steps isn't known."""
    ppo = make(tmp_path, config={"advantage_estimator": "group_norm", "disable_tqdm": False, "logging_steps": 1})
    for experience in ppo.experience_maker.make_experience_list(list(image_rows(2)), **ppo.generate_kwargs):
        ppo.replay_buffer.append(experience)
    status = ppo.ppo_train(0)
    ppo.save_logs_and_checkpoints(ppo.strategy, 1, None, status)
    assert ppo.trainer.state.global_step == 1 and "/9223372036854775807" not in capsys.readouterr().out


def test_the_best_step_is_noted(tmp_path):
    stops = EarlyStoppingCallback(1)
    config = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_num_samples"}
    ppo = make(tmp_path, config={**config, "advantage_estimator": "group_norm", "num_train_epochs": 4})
    ppo.trainer.add_callback(stops)
    ppo.fit(ppo.strategy, loader(image_rows(4)), None, loader(image_rows(1)))
    assert ppo.trainer.state.best_metric == 1 and ppo.trainer.state.global_step == 2


def test_one_run_in_a_folder(tmp_path):
    """A second run is refused while the first one samples."""
    refusals = []

    def reward(completion_ids, **columns):
        if not refusals:
            with pytest.raises(RuntimeError, match="is in use by process") as raised:
                prepared(tmp_path, "group_norm")()
            refusals.append(str(raised.value))
        return length_and_sum(completion_ids)

    prepared(tmp_path, "group_norm", reward, max_steps=2)()
    assert len(refusals) == 1


def test_weights_of_a_critic_that_it_does_not_have_are_not_missing(tmp_path, capfd):
    """transformers' report of a load names the LM head, which a critic replaces."""
    critic_of("qwen2_5_vl").save_pretrained(tmp_path)
    Critic.from_pretrained(tmp_path, type(load("qwen2_5_vl")[0]))
    assert "MISSING" not in capfd.readouterr().err


# Two processes


def run_script(folder, estimator, *words, processes=2):
    command = [TESTS / "helpers" / "lightrft_script.py", folder, saved("qwen2_5_vl"), estimator, *words]
    environment = python_environment(ACCELERATE_USE_CPU="true")
    return forked.run(python_command(command, processes), capture_output=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gae", "group_norm"])
def test_two_processes(estimator, tmp_path):
    """A script of two processes resumes bit for bit after kill -9 of one, after SIGTERM, and after a damage."""
    whole = run_script(tmp_path / "model", estimator)
    assert whole.returncode == 0 and "rollouts: 6" in whole.stdout, whole.stderr[-3000:]
    expected = saved_weights(tmp_path / "model")
    for name, words in {"killed": ["5"], "ended": ["5", "SIGTERM"], "damaged": ["5", "SIGKILL"]}.items():
        folder = tmp_path / name / "model"
        ended = run_script(folder, estimator, *words)
        assert ended.returncode != 0, name
        if name == "damaged":
            (sorted(folder.glob("checkpoint-*"))[-1] / "rollout_state_1.pt").unlink()
        resumed = run_script(folder, estimator)
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert ("Passed over" in resumed.stderr) == (name == "damaged")
        found = saved_weights(folder)
        assert [key for key in expected if not torch.equal(expected[key], found[key])] == [], name
