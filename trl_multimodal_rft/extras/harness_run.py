# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Benchmarks of lmms-eval and EvalScope for `evaluate`: starts a server of the model, and runs the harness."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from pathlib import Path

import requests

from ..cli.arguments import HarnessArguments
from ..credentials import masked, masked_words
from ..evaluation import EvaluationResult
from .harnesses import PACKAGES, PLUGIN, harness_command, harness_result, read_evalscope, read_lmms


# The model's name on the server that `evaluate` starts. lmms-eval would mistake a real name that contains `o1`, such
# as `grpo1`, for a model of OpenAI.
_ALIAS = "checkpoint"
# Options of `evaluate` that apply to harnesses
_OPTIONS = {"benchmark", "model_name_or_path", "max_rows", "output_dir", "confidence", "compare_with"}


def evaluate_with_harness(harness_args: HarnessArguments, *arguments: object) -> EvaluationResult:
    """Evaluates a model on `--benchmark <harness>:<task>`. `arguments` are the command's other argument objects."""
    options = {}
    defaults = {}
    for argument in arguments:
        options |= vars(argument)
        defaults |= vars(type(argument)())
    benchmark = options["benchmark"]
    model = options["model_name_or_path"]
    url = harness_args.server_url
    name, _, task = benchmark.partition(":")
    if name not in PACKAGES:
        raise ValueError(f"`--benchmark` is {benchmark!r}; before the colon, write one of {', '.join(PACKAGES)}.")
    if model is None:
        raise ValueError(
            "Set `--model_name_or_path` to the model to serve, or to the name of the model at `--server_url`."
        )
    for option in options.keys() - _OPTIONS:
        if options[option] != defaults[option]:
            raise ValueError(f"`--{option}` has no effect on `--benchmark {benchmark}`; use `--harness_args`.")
    folder = Path(options["output_dir"], f"{name}-{datetime.now():%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True)
    log = folder / f"{name}.txt"
    with _serve(model, flags(harness_args.server_args), folder) if url is None else nullcontext(url) as address:
        address = address.rstrip("/").removesuffix("/v1")
        command = harness_command(name, task, _ALIAS if url is None else model, address, folder)
        command += flags({"limit": options["max_rows"], **harness_args.harness_args})
        if shutil.which(command[0]) is None:
            command = ["uvx", "--from", *PACKAGES[name].split(), *command]
        with _start_program(command, log, "Run `pip install uv`, or install the harness.") as harness:
            exit_code = harness.wait()
    read_results = read_lmms if name == "lmms" else read_evalscope
    # A harness that failed may have written some results
    rows = []
    figures = {}
    if exit_code == 0:
        rows, figures = read_results(folder)
    if not figures:
        raise ValueError(f"`--benchmark {benchmark}` has no results: {_last_error(log)}")
    settings = {"model": model, "benchmark": benchmark, "confidence": options["confidence"]}
    settings["command"] = masked_words(command)
    return harness_result(rows, figures, settings)


def flags(options: dict) -> list[str]:
    """Returns options as words of a command line, such as `--a 1 --b` for `{"a": 1, "b": True}`."""
    words: list[str] = []
    for name, value in options.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += [] if value is None or value is False else [f"--{name}", *([] if value is True else [text])]
    return words


@contextmanager
def _serve(model: str, words: list[str], folder: Path) -> Iterator[str]:
    """
    Runs `vllm serve` within the context, and yields its URL once the server is healthy. `words` are further arguments
    of the command.
    """
    with socket.socket() as probe:  # port 0 stands for any free port
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", port, "--served-model-name", _ALIAS, *words]
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.txt"
    with _start_program(command, log, "Install vLLM, or set `--server_url`.") as server:
        try:
            while server.poll() is None:
                with suppress(requests.RequestException):
                    if requests.get(f"{url}/health", timeout=5).ok:
                        break
                time.sleep(1)
            else:
                raise ValueError(f"`vllm serve` ended: {_last_error(log)}")
            yield url
        finally:
            server.terminate()
            server.wait()  # until its GPU memory is free


def _start_program(command: list[str], log: Path, remedy: str) -> subprocess.Popen:
    if shutil.which(command[0]) is None:
        raise ValueError(f"There is no program `{command[0]}`. {remedy}")
    key = os.environ.get("OPENAI_API_KEY", "none")
    # The program has its own Python environment, so `PYTHONPATH` holds the plugin and no folders of this process
    environment = {**os.environ, "OPENAI_API_KEY": key, "EVALSCOPE_API_KEY": key, "PYTHONPATH": str(PLUGIN)}
    sys.stderr.write(f"`{' '.join(masked_words(command))}` runs, and prints to {log}\n")
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _last_error(log: Path) -> str:
    lines = re.split(r"[\r\n]+", log.read_text(encoding="utf-8", errors="replace").strip())
    matches = [re.search(r"[\w.]*(?:Error|Exception): .*", line) for line in lines]
    errors = [match[0] for match in matches if match]
    return f"{masked([*lines[-1:], *errors][-1]).rstrip('.')} (see {log})."
