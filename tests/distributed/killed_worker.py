# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Runs that the tests kill: `killed_worker.py serve`, driven by `test_killed.py`.

This process makes the model once and forks for everything else. It reads one command per line and writes one line:
`{"start": job}` forks the processes of a job and returns their ids, `{"reap": id}` the exit status of one, `null`
while it runs. It kills the rest when its input ends.

`killed_worker.py train <job>` is one of the processes that `torch.distributed.run` starts for a job.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from helpers.ahead import Ahead
from helpers.processes import PATIENCE, free_port
from helpers.resumed_runs import EVERYTHING, REPLAY, REUSED, answered_audio, few_live
from helpers.trainer_utils import audio_rows, make_trainer, saved
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from transformers.trainer_utils import get_last_checkpoint

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.engines.vllm_client import EngineRequest, server_completions
from trl_multimodal_rft.engines.vllm_requests import ServerSample
from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


SHARED = {**REPLAY, "reward": few_live, "beta": 0.1, "kl_target": 0.01, "kl_horizon": 50, "difficulty_sampling": True}
# Each step has a generation batch of its own, which a server samples while earlier ones are trained on
AHEAD = {**REUSED, **SHARED, "steps_per_generation": 2, "num_iterations": 1}
OPTIONS = {"grpo": {**REUSED, **SHARED}, "ppo": {**EVERYTHING, **SHARED}, "ahead": AHEAD}
ZERO2 = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
ZERO2 |= {"zero_optimization": {"stage": 2}}
ENGINES = {
    "ddp": {"use_cpu": True},
    "fsdp2": {"use_cpu": True, "fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    "zero2": {"use_cpu": False, "deepspeed": ZERO2, "accelerator_config": {"use_configured_state": True}},
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Runs


def ask(url: str, request: EngineRequest, salt: str, turn: int, attempt: int) -> list[ServerSample]:
    """Returns the completions of a request from a server."""
    return server_completions(url, None, request, {}, salt=salt, timeout=20.0, vocab_size=1000)


class Mortal:
    """
    Dies at a given point of saving, and records what it resumes from.

    `death` holds the `point`, the `step` of the checkpoint, and the `rank` of the process that dies. `request` holds
    the `moment`, the `step` before it, the `rank` of the process that receives the signals, and the `signals`. At the
    point "disk full" the process survives, but one of its files is on a full device.
    """

    death: dict | None = None
    request: dict | None = None
    resumed: Path  # file that records where it resumes

    def _init_training_state(self, max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial):
        position = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        name = resume_from_checkpoint and Path(resume_from_checkpoint).name
        unfinished = self.resumed.with_suffix(".new")  # a kill may happen here, too
        unfinished.write_text(json.dumps({"checkpoint": name, "step": self.state.global_step}))
        unfinished.rename(self.resumed)
        return position

    def _due(self, point: str) -> bool:
        own = {"point": point, "step": self.state.global_step, "rank": self.accelerator.process_index}
        return self.death == own

    def _ask(self, moment: str) -> None:
        own = {"moment": moment, "step": self.state.global_step, "rank": self.accelerator.process_index}
        if self.request is not None and self.request | own == self.request:
            signals = self.request["signals"]
            self.request = None
            for name in signals:
                if name == "SIGTERM to all":  # a launcher sends it, not the parent of the workers
                    command = ["setsid", "kill", "-TERM", "--", f"-{os.getpgid(0)}"]
                    subprocess.run(command, check=True)
                    time.sleep(0.5)  # a worker that exits would show
                else:
                    os.kill(os.getpid(), signal.Signals[name])

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self._ask("sampled")
        return output

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self._ask("gradient added")
        return loss

    def _get_grad_norm(self, *args, **kwargs):
        self._ask("before the update")
        return super()._get_grad_norm(*args, **kwargs)

    def log(self, *args, **kwargs):
        self._ask("after the update")
        return super().log(*args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        if self._due("disk full"):
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            Path(output_dir, f"rollout_state_{self.accelerator.process_index}.pt").symlink_to("/dev/full")
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir):
        if self._due("weights written"):
            die()
        super()._save_optimizer_and_scheduler(output_dir)
        if self._due("optimizer written"):
            die()

    def _save_state(self, folder):
        super()._save_state(folder)
        if self._due("half a file written"):
            file = folder / f"rollout_state_{self.accelerator.process_index}.pt"
            os.truncate(file, file.stat().st_size // 2)
            die()
        if any(map(self._due, ("all written", "in place", "deleting"))):
            die_while_moving(f"checkpoint-{self.state.global_step}", self.death["point"])


def die_while_moving(name: str, point: str) -> None:
    """Schedules the death before the rename that publishes a checkpoint, or at a later operation."""
    moved = False
    deletions = 0

    def watch(event, args):
        nonlocal moved, deletions
        if event == "os.rename" and Path(args[1]).name == name:
            if point == "all written":
                die()
            moved = True
        elif moved and event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            deletions += event == "os.remove"
            if point == "in place" or deletions == 4:
                die()

    sys.addaudithook(watch)


class MortalGRPO(Mortal, MultimodalGRPOTrainer):
    pass


class MortalPPO(Mortal, MultimodalPPOTrainer):
    pass


TRAINERS = {"grpo": MortalGRPO, "ppo": MortalPPO, "ahead": MortalGRPO}


def train(job: dict) -> None:
    """
    Trains from the checkpoint that the job names, or else from the last one if it exists. Writes the final state of
    this process.
    """
    rank = int(os.environ.get("RANK", 0))
    output = Path(job["output"])
    options = {**OPTIONS[job["algorithm"]], **job["options"]}
    if job["processes"] > 1:
        switch = "ACCELERATE_USE_DEEPSPEED" if job["engine"] == "zero2" else "ACCELERATE_USE_CPU"
        os.environ[switch] = "true"
        PartialState(**({"backend": "gloo"} if job["engine"] == "zero2" else {"cpu": True}))
        if job["engine"] == "fsdp2":
            enable_fsdp2_on_cpu()
        # A generation batch has as many prompts as with one process
        options |= {"steps_per_generation": 2, **ENGINES[job["engine"]]}
    objects = {"ptx_dataset": answered_audio()} if job["algorithm"] == "ppo" else None
    rows = audio_rows(5)
    trainer = make_trainer(TRAINERS[job["algorithm"]], "qwen2_audio", rows, output, objects=objects, **options)
    if job["algorithm"] == "ahead":
        trainer.sampler = Ahead(trainer, send=partial(ask, options["vllm_server_base_url"]))
    trainer.death = job["death"]
    trainer.request = job["request"]
    trainer.resumed = Path(job["folder"], f"resumed-{rank}.json")
    checkpoint = output.is_dir() and get_last_checkpoint(output) is not None
    trainer.train(resume_from_checkpoint=str(output / job["resume"]) if job["resume"] else checkpoint)
    state = {
        "weights": trainer.model.state_dict(),  # includes the critic
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "rollouts": trainer._rollout_state(),
        "history": trainer.state.log_history,
    }
    assert any(isinstance(each, DTensor) for each in state["weights"].values()) == (job["engine"] == "fsdp2")
    state = tree_map_only(DTensor, DTensor.to_local, state)
    torch.save(state, Path(job["folder"], f"final-{rank}.pt"))
    if job["processes"] > 1:
        PartialState().destroy_process_group()


# Comparisons


def differences(a, b, where: str = "") -> Iterator[str]:
    """Yields where two nested states differ. What depends on time doesn't count."""
    a, b = (list(each) if type(each) is tuple else each for each in (a, b))  # FSDP restores tuples as lists
    if type(a) is not type(b):
        yield f"{where}: {type(a)} and {type(b)}"
    elif isinstance(a, (torch.Tensor, np.ndarray)):
        if a.dtype != b.dtype or not are_equal(a, b):
            yield where
    elif isinstance(a, dict):
        keys = [{key for key in side if not depends_on_time(key)} for side in (a, b)]
        if keys[0] != keys[1]:
            yield f"{where}: {keys[0] ^ keys[1]} in one of them"
        for key in keys[0] & keys[1]:
            yield from differences(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, list):
        if len(a) != len(b):
            yield f"{where}: {len(a)} and {len(b)} entries"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from differences(x, y, f"{where}[{i}]")
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        yield from differences(vars(a), vars(b), where)
    elif a != b:
        yield f"{where}: {a} and {b}"


def are_equal(a, b) -> bool:
    """Returns whether tensors or arrays are equal, and NaN at the same places."""
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    a, b = ([each.isnan(), each.nan_to_num()] if each.is_floating_point() else [each] for each in (a, b))
    return all(map(torch.equal, a, b))


def depends_on_time(key) -> bool:
    """Returns whether a value's name says so, as that of what servers have done when a checkpoint is saved."""
    parts = ("time", "runtime", "per_second", "train_loss", "wait/", "staleness/", "in_flight")
    return any(part in str(key) for part in parts)


def read(file: Path):
    # They hold the folder's name, or a checksum of what does
    if file.name in ("training_args.bin", ".metadata", "manifest.json"):
        return None
    if file.suffix in (".pt", ".pth", ".bin"):
        return torch.load(file, weights_only=False)
    if file.suffix == ".safetensors":
        return load_file(file)
    return json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()


def differing_files(a: Path, b: Path) -> list[str]:
    """Returns what differs between two folders."""
    files = [{str(path.relative_to(side)) for path in side.rglob("*") if path.is_file()} for side in (a, b)]
    found = [f"{name} in one of them" for name in sorted(files[0] ^ files[1])]
    for name in sorted(files[0] & files[1]):
        try:
            found += differences(read(a / name), read(b / name), name)
        except Exception as error:  # a truncated file fails in many ways
            found.append(f"{name}: {error!r}"[:300])
    return found


def inspect(job: dict) -> None:
    """Compares each checkpoint with the baseline's, and the final states if the job names their folder."""
    output = Path(job["output"])
    straight = Path(job["straight"])
    folders = [path for path in sorted(output.iterdir()) if path.is_dir()] if output.is_dir() else []
    last = get_last_checkpoint(output) if folders else None
    found = {"last": last and Path(last).name, "checkpoints": {}, "others": [], "final": []}
    for path in folders:
        if path.name.startswith("checkpoint-"):
            differing = differing_files(path, straight / "output" / path.name)
            found["checkpoints"][path.name] = verify_checkpoint(path) + differing
        else:
            found["others"].append(path.name)
    if job["final"] is not None:
        for file in sorted(straight.glob("final-*.pt")):
            states = [torch.load(path, weights_only=False) for path in (file, Path(job["final"], file.name))]
            found["final"] += differences(*states, where=f"{file.name}: ")
    Path(job["folder"], "found.json").write_text(json.dumps(found))


TASKS = {"train": train, "inspect": inspect}


# Processes


def start(job: dict) -> list[int]:
    """Forks the processes of a job into a new process group."""
    if job.get("engine") == "zero2":
        from deepspeed.comm.torch import build_shm_op

        build_shm_op()  # once for all: a process killed meanwhile would leave a lock, at which others wait forever
    port = free_port()
    folder = Path(job["folder"])
    folder.mkdir(parents=True)
    assert threading.active_count() == 1  # A lock of another thread would stay locked in the fork
    pids = []
    for rank in range(job["processes"]):
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, pids[0] if pids else 0)
            signal.alarm(PATIENCE)
            log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if job["processes"] > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["processes"], "MASTER_PORT": port}
                place |= {"LOCAL_WORLD_SIZE": job["processes"], "MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in place.items()})
            perform(job)
        pids.append(pid)
        os.setpgid(pid, pids[0])  # parent or child, whichever runs first
    return pids


def perform(job: dict) -> None:
    """Runs a job and ends without Python's exit handlers, because processes share the folders of the models."""
    status = 1
    try:
        TASKS[job["task"]](job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(answers) -> None:
    running = set()
    for line in sys.stdin:
        command = json.loads(line)
        if "start" in command:
            answer = start(command["start"])
            running.update(answer)
        else:
            pid, status = os.waitpid(command["reap"], os.WNOHANG)
            running.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tqdm.monitor_interval = 0  # disables the thread of progress bars
    tqdm.set_lock(threading.RLock())  # A killed process may hold a lock shared by processes forever
    saved("qwen2_audio")  # while each process still sees a world size of 1
    if sys.argv[1] == "train":
        signal.alarm(PATIENCE)
        train(json.loads(sys.argv[2]))
    else:
        serve(answers)
