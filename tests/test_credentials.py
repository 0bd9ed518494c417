# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Passwords, tokens and keys stay out of all that a run writes and prints."""

import copy
import io
import json
import logging
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from helpers.ended_runs import OPTIONS, REWARDED, World, rows_of
from helpers.trainer_utils import TRAINERS, make_trainer, saved
from transformers import AutoConfig, PreTrainedModel

import trl_multimodal_rft
from trl_multimodal_rft import MultimodalDistillationConfig, MultimodalGRPOConfig
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.run_file import write_run_file
from trl_multimodal_rft.credentials import (
    Secret,
    is_secret,
    masked,
    masked_words,
    revealed,
    secured,
    without_secrets,
)
from trl_multimodal_rft.engines.vllm_requests import RequestLost, answer_of
from trl_multimodal_rft.evaluation import EvaluationResult
from trl_multimodal_rft.extras.openenv import Session
from trl_multimodal_rft.printable import Foreign
from trl_multimodal_rft.reporting.model_card import in_code
from trl_multimodal_rft.rollout.environments import EnvironmentFailure
from trl_multimodal_rft.trainers.base.argument_checks import mapping


PASSWORD = "hunter2"
NAMES = (
    "token hub_token hf_token HF_TOKEN access_token auth_token aws_session_token githubToken bearerToken key api_key "
    "api-key apikey apiKey APIKey X-Api-Key openai_key private_key ssh-key aws_access_key_id aws_secret_access_key "
    "secret client_secret Authorization authorization proxy-authorization password db_password PASSWORD passwd pwd "
    "passphrase credentials wandb_api_key apitoken authtoken accesskey secretkey privatekey api_keys apiKeys pass pw "
    "db_pass master_key hmac_key x-functions-key connection_string connectionString jwt sas X-Sas hubtoken apitokens"
).split()
OF_RUNS = (
    "max_tokens_per_microbatch special_tokens_in_text eos_token pad_token image_token eos_token_id tokens "
    "skip_special_tokens key_frames keyboard author tokenizer top_k pass_at eostoken monkey turnkey first_pass "
    "string connection trust_remote_code keys image_keys"
).split()


@pytest.mark.parametrize("name", NAMES)
def test_values_behind_names_of_secrets(name):
    settings = {name: PASSWORD, "shown": [{"env": {name: PASSWORD}}, json.dumps({"headers": {name: PASSWORD}})]}
    kept = without_secrets({**settings, "tokens": PASSWORD, "n": {"tokens": 5}})
    assert kept.pop("n") == {"tokens": 5}
    assert PASSWORD not in str(kept) and kept["shown"][0] == {"env": {}}
    texts = [f"{name}={PASSWORD}", f"judge(url='http://h', {name}='{PASSWORD} x')", f"'{name}': '{PASSWORD}'"]
    texts += [f'{{"{name}": "{PASSWORD}"}}', f"https://h/a?x=1&{name}={PASSWORD}&y=2", f"model=m,{name}={PASSWORD}"]
    assert not [text for text in texts if PASSWORD in masked(text)]
    option = f"--{name}"
    for words in ([option, PASSWORD], [f"{option}={PASSWORD}"], ["evaluate", option, PASSWORD, "--x", "1"]):
        assert PASSWORD not in " ".join(masked_words(words))


@pytest.mark.parametrize(
    "text",
    [
        "http://bob:{}@host:8000/v1",
        "https://{}@host/x.git",
        "ws://bob:a/{}@host",
        "postgres://bob:{}@db/rows",
        "Authorization: Bearer {}",
        "authorization: Basic {}==",
        "x-api-key: {}",
        "it says hf_{}aaaaaaaaaaaaaaaa",
        "it says sk-proj-{}aaaaaaaaaaaa",
        *(
            "it says gho_AbCdEfGhIjKlMn{}",
            "nvapi-AbCdEfGhIjKlMn{}",
            "AIzaSyA-AbCdEfGhIjKlMnOpQrSt{}",
            "eyJh.eyJ{}.x_-",
        ),
        *("http://:{}@host:8000", "redis://:{}@host:6379/0", "http://bob:p@{}@host", "http://bob:{}@p@host/a@b"),
        *(
            "//bob:{}@host/x",
            "http:/bob:{}@host",
            "http://bob:{}%40host",
            "https://h/a?x=1&code={}#top",
            "bob:{}@host",
        ),
        *("http://h:8000,http://bob:{}@h2,http://h3/a@b", "'ftp://bob:{}@[::1]:5/x'", "s3://key:a/{}@bucket"),
        *(
            "Authorization: Token {}",
            "authorization: ApiKey x {}",
            "Cookie: a=b; session={}",
            "Proxy-Authorization: {}",
        ),
        *("token: {}", "{{token: {}}}", "api_key = '{}'", "api_key = {}", "--token -{}", "password: {} x", "pw={}"),
        *("judge(api_key = '{}')", "judge(api_key=b'{}')", "judge(password='a,{})')", "judge(token='a\\'{}')"),
        *("judge(headers={{'Authorization': 'Token {}'}})", 'judge(token="a\\"{}", x=1)', "x-api-key: 12{}"),
    ],
)
def test_forms_of_secrets(text):
    assert PASSWORD not in masked(text.format(PASSWORD))


def test_what_is_no_secret_is_kept():
    assert not [name for name in OF_RUNS if is_secret(name)]
    names = [name for name in trl_multimodal_rft.__all__ if name.endswith("Config")]
    configs = [getattr(trl_multimodal_rft, name) for name in names]
    assert {each.name for config in configs for each in fields(config) if is_secret(each.name)} == {"hub_token"}
    for text in (
        "hf://datasets/who/what@main/i.png",
        "http://host:8000/a@b.png and s3://bucket/a@b/i.png",
        "`eos_token='<|x|>'`, the token: 5",
        "https://host/rows.parquet?download=true",
        "accuracy_reward(tolerance=0.1)",
        *(
            "http://host:8000/?y",
            "http://[::1]:8000/a@b",
            "https://host/a?encode=x",
            "row 3 has no token: its row is",
        ),
        *("token = tokens[0]", "key = row.key", "key: 5 of 7", "a second pass: it is slow", "https://h:80/x%40y"),
    ):
        assert masked(text) == text and without_secrets({"x": text}) == {"x": text}


# Doors


def of_run_file(folder, capsys):
    options = {"vllm_server_base_url": f"http://bob:{PASSWORD}@host", "launch": {"aws_access_key_id": PASSWORD}}
    options |= {"model_init_kwargs": f'{{"headers": {{"Authorization": "Bearer {PASSWORD}"}}}}', "hf_token": PASSWORD}
    write_run_file(
        folder, "x", {**options, "reward_funcs": [f"judge(url='http://b:{PASSWORD}@h', api_key='{PASSWORD}')"]}
    )
    text = (folder / "run.yaml").read_text()
    assert {"vllm_server_base_url", "model_init_kwargs", "reward_funcs"} == {*yaml.safe_load(text)}
    return text


def of_metrics(folder, capsys):
    EvaluationResult({}, [{"x": 1}], {"command": ["e", "--api-key", PASSWORD], "api_key": PASSWORD}).save(folder)
    return (folder / "metrics.json").read_text()


def of_environment(folder, capsys):
    with pytest.raises(EnvironmentFailure) as error:
        Session(f"http://bob:{PASSWORD}@127.0.0.1:9").ask("reset", {}, opens=True)
    return str(error.value)


def of_server(folder, capsys):
    with pytest.raises(RequestLost) as error:
        answer_of(f"http://bob:{PASSWORD}@127.0.0.1:9", "/health", seconds=5)
    return str(error.value)


def of_card(folder, capsys):
    return in_code(f"judge(url='http://b:{PASSWORD}@h', api_key='{PASSWORD}')")


def of_command(folder, capsys):
    words = [
        "check",
        "--dataset_name",
        f"https://bob:{PASSWORD}@127.0.0.1:9/rows.parquet",
        "--model_name_or_path",
        "m",
    ]
    with pytest.raises(SystemExit):
        main(words)
    return capsys.readouterr().err


def test_words_of_commands():
    for words in (["-u", f"bob:{PASSWORD}"], ["--apitoken", PASSWORD], ["--db-pass", f"-{PASSWORD}"]):
        assert masked_words(["x", *words]) == ["x", words[0], "***"]
    assert masked_words(["python", "-u", "train.py"]) == ["python", "-u", "train.py"]


@pytest.mark.parametrize("door", [of_run_file, of_metrics, of_environment, of_server, of_card, of_command])
def test_doors(door, tmp_path, capsys):
    written = door(tmp_path, capsys)
    assert written and PASSWORD not in written


# Values by type


def forms(value) -> list[str]:
    """Returns what is printed, logged, pickled and serialized of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    record = logging.LogRecord("a", 20, "a.py", 1, "%s %r", (value, value), None)
    texts = [str(value), repr(value), f"{value}", record.getMessage(), yaml.dump(value)]
    return [*texts, json.dumps(value, default=str), *map(repr, (pickle.dumps(value), file.getvalue()))]


@pytest.mark.parametrize("text", [PASSWORD, f"http://bob:{PASSWORD}@host:9/v1?x=1"])
def test_a_secret_shows_in_no_form(text):
    secret = Secret(text)
    holder = {"token": secret, "more": [secret, {"a": (secret,)}]}
    for value in (secret, holder, copy.copy(holder), copy.deepcopy(holder), secured(text, "token")):
        assert all(PASSWORD not in form for form in forms(value))
    assert revealed(copy.deepcopy(secret)) == revealed(copy.copy(secret)) == revealed(secret) == text
    assert pickle.loads(pickle.dumps(secret)) == "***" and type(pickle.loads(pickle.dumps(secret))) is str


def test_only_secrets_are_replaced():
    options = {"dtype": "float32", "revision": "main", "nested": {"eos_token": "<end>", "url": "http://host:9/a"}}
    assert secured(options) is options and revealed(options) is options
    options["nested"]["token"] = PASSWORD
    held = secured(options)
    assert held == {**options, "nested": {**options["nested"], "token": "***"}} and revealed(held) == options
    assert secured("http://bob:pw@a,http://b:1") == "http://***@a,http://b:1"


LOADERS = {
    MultimodalGRPOConfig: {
        "vllm_server_base_url": f"http://bob:{PASSWORD}@host:9,http://{PASSWORD}@other",
        "model_init_kwargs": json.dumps({"token": PASSWORD, "revision": "main"}),  # as on a command line
        "vllm_engine_kwargs": {"hf_token": PASSWORD},
    },
    MultimodalDistillationConfig: {
        "teacher_model_init_kwargs": {"token": PASSWORD},
        "teacher_models": {"a": f"https://bob:{PASSWORD}@host"},
        "teacher_model_server_url": f"http://{PASSWORD}@host:9",
    },
}


@pytest.mark.parametrize(
    ("config_class", "name"), [(config_class, name) for config_class, options in LOADERS.items() for name in options]
)
def test_options_of_loaders_hold_secrets(config_class, name, tmp_path):
    more = {"loss_top_k": 5, "temperature": 1.0} if config_class is MultimodalDistillationConfig else {}
    config = config_class(str(tmp_path), use_cpu=True, report_to=[], **{name: LOADERS[config_class][name]}, **more)
    setattr(config, name, revealed(getattr(config, name)))  # as commands do
    for value in (config, config.to_dict(), config.to_sanitized_dict(), config.to_json_string()):
        assert all(PASSWORD not in form for form in forms(value))
    value = getattr(copy.deepcopy(config), name)
    assert PASSWORD in str(mapping(value) if isinstance(value, dict) else revealed(value))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dpo", "kto", "sft", "reward"])
def test_a_token_reaches_the_loaders_and_no_file(kind, tmp_path, monkeypatch):
    """Those of this package and, for the reference, TRL's."""
    tokens = []
    from_pretrained = PreTrainedModel.from_pretrained.__func__

    def spied(cls, *args, **kwargs):
        tokens.append(kwargs["token"])
        return from_pretrained(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(spied))
    options = {**OPTIONS[kind], "model_init_kwargs": {"token": PASSWORD}, "max_steps": 1, "save_steps": 1}
    options["eval_strategy"] = "no"
    if kind in REWARDED:
        options |= {"vllm_server_base_url": f"http://bob:{PASSWORD}@host:9", "beta": 0.1}
    objects = {"model": str(saved("qwen2_5_vl")), "processing_class": None}
    world = World(tmp_path)
    reward = world.reward if kind in REWARDED else None
    rows = rows_of(kind, world)
    trainer = make_trainer(TRAINERS[kind], "qwen2_5_vl", rows, tmp_path, objects=objects, reward=reward, **options)
    trainer.train()
    trainer.save_model()
    assert {*tokens} == {PASSWORD} and len(tokens) == (1 if kind in ("sft", "reward") else 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert Path(tmp_path, "training_args.bin") in files
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []


def test_a_foreign_text_is_nothing_that_loaders_take():
    name = Foreign("evil/model\x1b[2J")
    for take in (open, Path, AutoConfig.from_pretrained, json.dumps):
        with pytest.raises((TypeError, AttributeError, ValueError)):
            take(name)
    assert str(name) == f"{name}" == r"evil/model\x1b[2J" and repr(name) == repr(str(name))
    assert name.for_loading() == "evil/model\x1b[2J"
