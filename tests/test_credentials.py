# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Passwords, tokens and keys stay out of all that a run writes and prints."""

import json
from dataclasses import fields

import pytest
import yaml

import trl_multimodal_rft
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.run_file import write_run_file
from trl_multimodal_rft.credentials import is_secret, masked, masked_words, without_secrets
from trl_multimodal_rft.engines.vllm_requests import RequestLost, answer_of
from trl_multimodal_rft.evaluation import EvaluationResult
from trl_multimodal_rft.extras.openenv import Session
from trl_multimodal_rft.reporting.model_card import in_code
from trl_multimodal_rft.rollout.environments import EnvironmentFailure


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
