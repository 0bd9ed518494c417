# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A run that is killed repeatedly, also while it saves, ends bit for bit like the uninterrupted baseline."""

import glob
import json
import os
import random
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import forked
from helpers.fake_server import FakeServer
from helpers.marks import slow_but
from helpers.processes import PATIENCE, python_command, python_environment
from safetensors.torch import load_file

from trl_multimodal_rft.trainers.checkpoints.manifest import verify_checkpoint


HERE = Path(__file__).parent
LAST = 9  # step, in the middle of an epoch and of a generation batch
FEWER = 5  # steps of ranks that shard states
KEPT = 2  # checkpoints
PARTIAL = "_partial_checkpoint"
KILLS = int(os.environ.get("KILLS", 2))  # of a run that a server samples for

CASES = {
    "grpo": {"algorithm": "grpo", "engine": None, "processes": 1},
    "ppo": {"algorithm": "ppo", "engine": None, "processes": 1},
    "ddp": {"algorithm": "grpo", "engine": "ddp", "processes": 2},
    "zero2": {"algorithm": "grpo", "engine": "zero2", "processes": 2, "max_steps": FEWER},
    "fsdp2": {"algorithm": "grpo", "engine": "fsdp2", "processes": 2, "max_steps": FEWER},
    "ahead": {"algorithm": "ahead", "engine": None, "processes": 1},
}


class Worker:
    """Runs `killed_worker.py` in the background, which forks the processes to kill."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._straight: dict[str, list] = {}
        command = python_command([HERE / "killed_worker.py", "serve"])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (folder / "log.txt").open("w") as log:
            self.process = forked.Popen(command, env=python_environment(), stderr=log, **pipes)

    def ask(self, **command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        ready = select.select([self.process.stdout], [], [], PATIENCE)[0]
        answer = self.process.stdout.readline() if ready else ""
        assert answer, f"the worker {'ended' if ready else 'hangs'}\n{(self.folder / 'log.txt').read_text()[-8000:]}"
        return json.loads(answer)

    def straight(self, name: str, **options) -> Path:
        """Returns the folder of a case's uninterrupted run."""
        if name not in self._straight:
            folder = self.folder / name
            self._straight[name] = [folder, Processes(self, train(name, folder, folder / "output", **options))]
        folder, processes = self._straight[name]
        codes = processes.wait()
        assert set(codes) == {0}, processes.logs()
        return folder

    def stop(self) -> None:
        """Ends the worker and its running processes."""
        self.process.stdin.close()  # the worker then kills them
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Processes:
    """The forked processes of a job."""

    def __init__(self, worker: Worker, job: dict):
        self._worker = worker
        self.folder = Path(job["folder"])
        self.ids = worker.ask(start=job)
        self._codes: dict[int, int] = {}

    def ended(self) -> int:
        for pid in self.ids:
            code = None if pid in self._codes else self._worker.ask(reap=pid)
            if code is not None:
                self._codes[pid] = code
        return len(self._codes)

    def until(self, happened: Callable[[], bool], n_ended: int, pause: float = 0.02) -> bool:
        """Waits for a condition or for `n_ended` processes to end. Returns whether the condition holds."""
        limit = time.monotonic() + PATIENCE
        while not happened():
            if self.ended() >= n_ended:
                return False
            if time.monotonic() > limit:
                self.kill()
                pytest.fail(f"still running after {PATIENCE} s\n{self.logs()}")
            time.sleep(pause)
        return True

    def wait(self) -> list[int]:
        self.until(lambda: False, len(self.ids))
        return [self._codes[pid] for pid in self.ids]

    def kill(self) -> None:
        if self.ended() < len(self.ids):
            os.killpg(self.ids[0], signal.SIGKILL)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-6000:] for path in sorted(self.folder.glob("log-*.txt")))


def inspect(worker: Worker, folder: Path, output: Path, straight: Path, final: Path | None) -> dict:
    """Returns what the worker finds in the checkpoints, and where final states differ from the baseline's."""
    job = {"task": "inspect", "processes": 1, "folder": str(folder), "output": str(output), "straight": str(straight)}
    inspection = Processes(worker, {**job, "final": final and str(final)})
    assert inspection.wait() == [0], inspection.logs()
    return json.loads((folder / "found.json").read_text())


def last_of(name: str) -> int:
    """Returns the last step of a case."""
    return CASES[name].get("max_steps", LAST)


def train(name: str, folder: Path, output: Path, death=None, resume=None, request=None, **options) -> dict:
    own = {"folder": str(folder), "output": str(output), "death": death, "request": request, "resume": resume}
    options = {"max_steps": last_of(name), **options}
    return {"task": "train", "options": options, **own, **CASES[name]}


class Restarted:
    """A run that restarts after each kill."""

    def __init__(self, worker: Worker, name: str, folder: Path, seed: int, **options):
        self.worker = worker
        self.name = name
        self.folder = folder
        self.output = folder / "output"
        self.straight = worker.straight(name, **options)
        self.options = {"save_total_limit": KEPT, **options}
        self.random = random.Random(seed)
        self.story = [f"seed {seed}"]  # for the message of a failure
        self.n_starts = 0
        self.last: str | None = None  # checkpoint that a start should resume from

    def start(self, death=None, resume=None) -> Processes:
        self.n_starts += 1
        folder = self.folder / str(self.n_starts)
        return Processes(self.worker, train(self.name, folder, self.output, death, resume, **self.options))

    def step(self) -> int:
        return max([0, *(int(path.name.split("-")[1]) for path in self.output.glob("checkpoint-*"))])

    def check(self, processes: Processes, resumed: str | None, is_over: bool) -> dict:
        """
        Checks where the run resumed, that all checkpoints match the baseline's, and the final states if it is over.
        """
        where = "; ".join(self.story)
        for file in sorted(processes.folder.glob("resumed-*.json")):
            expected = {"checkpoint": resumed, "step": int(resumed.split("-")[1]) if resumed else 0}
            assert json.loads(file.read_text()) == expected, where
        assert "has changed since" not in processes.logs(), where  # every process sees the same dataset
        folder = self.folder / f"inspected-{self.n_starts}"
        final = processes.folder if is_over else None
        found = inspect(self.worker, folder, self.output, self.straight, final)
        assert not any(found["checkpoints"].values()), f"{where}: {found}"
        assert set(found["others"]) <= {PARTIAL}, f"{where}: {found}"
        assert not found["final"], f"{where}: {found['final']}"
        self.last = found["last"]
        return found

    def dies(self, point: str, step: int, rank: int, last: int, resume: str | None = None) -> dict:
        """One process ends itself at a point of saving, then the test kills the others. See also `check`."""
        self.story.append(f"process {rank} dies with {point} at step {step}")
        expected = resume or self.last
        processes = self.start({"point": point, "step": step, "rank": rank}, resume)
        processes.until(lambda: False, 1)
        time.sleep(0.2 * self.random.random())  # a launcher doesn't notice at once
        processes.kill()
        codes = processes.wait()
        where = f"{self.story}: {codes}\n{processes.logs()}"
        assert codes[rank] == -signal.SIGKILL and 0 not in codes, where
        found = self.check(processes, expected, is_over=False)
        assert found["last"] == (f"checkpoint-{last}" if last else None), f"{self.story}: {found}"
        return found

    def killed(self, happened: Callable[[Processes], bool], moment: str, delay: float) -> bool:
        """Kills all processes some time after a condition holds. Returns whether they were still running."""
        processes = self.start()
        if processes.until(lambda: happened(processes), 1, pause=0.0005):
            time.sleep(delay)
            processes.kill()
            self.story.append(f"killed at step {self.step()}, {delay:.3f} s after {moment}")
        else:
            self.story.append(f"at its end before {moment}")
        codes = processes.wait()
        assert set(codes) <= {0, -signal.SIGKILL}, f"{self.story}: {codes}\n{processes.logs()}"
        is_over = set(codes) == {0}
        self.check(processes, self.last, is_over)
        return not is_over

    def ends(self) -> dict:
        """Runs to the end."""
        self.story.append("left alone")
        expected = self.last
        processes = self.start()
        assert set(processes.wait()) == {0}, f"{self.story}\n{processes.logs()}"
        return self.check(processes, expected, is_over=True)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("straight"))
    try:
        yield worker
    finally:
        worker.stop()


@pytest.fixture(params=[pytest.param("grpo", marks=pytest.mark.gate), *slow_but(["ppo", "zero2"])])
def case(request):
    if request.param == "zero2":
        pytest.importorskip("deepspeed")
    return request.param


def test_uninterrupted_run_has_something_to_lose(worker, case):
    folder = worker.straight(case)
    last = last_of(case)
    checkpoints = [folder / "output" / f"checkpoint-{step}" for step in (1, last)]
    weights = [load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    history = json.loads((checkpoints[1] / "trainer_state.json").read_text())["log_history"]
    # The run moves in the first epoch of each rollout
    assert len({entry["kl_coef"] for entry in history}) == (last + 1) // 2
    assert any(entry.get("replay/frac", 0) > 0 for entry in history)
    assert any(entry.get("sampling/rounds", 0) > 1 for entry in history)


@pytest.mark.gate
def test_killed_while_it_saves(worker, tmp_path):
    run = Restarted(worker, "grpo", tmp_path, random.randrange(2**32))
    run.dies("weights written", 1, 0, last=0)
    run.dies("optimizer written", 2, 0, last=1)
    run.dies("half a file written", 3, 0, last=2)
    run.dies("all written", 4, 0, last=3)
    assert len(run.dies("in place", 5, 0, last=5)["checkpoints"]) == KEPT + 1
    run.dies("deleting", 7, 0, last=7)
    run.dies("in place", LAST, 0, last=LAST)
    run.ends()  # without another step
    # The destination now exists, and the old checkpoint is already moved away
    run.dies("all written", LAST, 0, last=LAST - 1, resume=f"checkpoint-{LAST - 1}")
    found = run.ends()
    assert sorted(found["checkpoints"]) == [f"checkpoint-{step}" for step in (LAST - 1, LAST)]
    assert found["others"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ppo", "zero2"], indirect=True)
def test_killed_while_it_saves_more(worker, case, tmp_path):
    """Models and averages beside the policy, or files of several processes and of DeepSpeed."""
    run = Restarted(worker, case, tmp_path, random.randrange(2**32))
    run.dies("weights written", 1, CASES[case]["processes"] - 1, last=0)
    run.dies("half a file written", 2, CASES[case]["processes"] - 1, last=1)
    run.dies("deleting", 4, 0, last=4)
    run.ends()


@pytest.mark.slow
def test_killed_while_it_writes_shards(worker, tmp_path):
    run = Restarted(worker, "fsdp2", tmp_path, random.randrange(2**32))
    run.dies("optimizer written", 1, 0, last=0)
    run.dies("half a file written", 2, 1, last=1)
    run.dies("in place", 3, 0, last=3)
    for step, shard in (3, "pytorch_model_fsdp_0/__1_0.distcp"), (2, "optimizer_0/__1_0.distcp"):
        file = run.output / f"checkpoint-{step}" / shard
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    run.last = "checkpoint-1"
    run.ends()
    log = (run.folder / str(run.n_starts) / "log-0.txt").read_text()
    assert "checkpoint-3 isn't whole: pytorch_model_fsdp_0/__1_0.distcp has other content." in log
    assert "checkpoint-2 isn't whole: optimizer_0/__1_0.distcp has other content." in log


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero2"], indirect=True)
def test_killed_at_random(worker, case, tmp_path):
    seed = random.randrange(2**32)
    last = last_of(case)
    run = Restarted(worker, case, tmp_path, seed)
    saved = [run.straight / "output" / f"checkpoint-{step}" for step in (1, last)]
    of_a_step = (saved[1].stat().st_mtime - saved[0].stat().st_mtime) / (last - 1)
    files = sorted(str(path.relative_to(saved[0])) for path in saved[0].rglob("*") if path.is_file())
    run.killed(lambda processes: (processes.folder / "resumed-0.json").exists(), "its start", run.random.random())
    for kind in ("step", "file"):
        before = run.step()
        if kind == "step":
            delay = 2 * of_a_step * run.random.random()
            goes_on = run.killed(lambda _, before=before: run.step() > before, "a checkpoint", delay)
        else:
            file = run.random.choice(files).replace("global_step1/", "*/")
            pattern = f"{PARTIAL}/checkpoint-*/{file}"

            def appears(_, before=before, pattern=pattern):
                return run.step() > before and bool(glob.glob(str(run.output / pattern)))

            goes_on = run.killed(appears, f"{file} was there", 0.005 * run.random.random())
        if not goes_on:
            break
    found = run.ends()
    assert {f"checkpoint-{step}" for step in (last - 1, last)} <= set(found["checkpoints"])


@pytest.mark.slow
def test_killed_while_a_server_samples_ahead(worker, tmp_path):
    """Some requests fail, too: once, so that they are asked again, or with the whole server."""
    seed = random.randrange(2**32)
    n_kills = 0
    runs = []
    chance = random.Random(seed)
    server = FakeServer({"model": "served"}, unit=0.05, slots=8)
    try:
        options = {"vllm_server_base_url": server.url}
        folder = worker.straight("ahead", **options)
        n_asked = server.counters["completions"]
        saved = [folder / "output" / f"checkpoint-{step}" for step in (1, LAST)]
        of_a_step = (saved[1].stat().st_mtime - saved[0].stat().st_mtime) / (LAST - 1)
        while n_kills < KILLS:
            runs.append(Restarted(worker, "ahead", tmp_path / f"run-{len(runs)}", seed + len(runs), **options))
            goes_on = True
            run = runs[-1]
            while goes_on and n_kills < KILLS:
                server.fault(chance.choice(["drop", "error", "slow", "die"]), chance.randrange(6), seconds=0.2)
                before = run.step()
                moments = {
                    "its start": lambda processes: (processes.folder / "resumed-0.json").exists(),
                    "a checkpoint": lambda _, run=run, before=before: run.step() > before,
                }
                moment = chance.choice([*moments])
                goes_on = run.killed(moments[moment], moment, 2 * of_a_step * chance.random())
                n_kills += goes_on
        if goes_on:
            run.ends()
        assert server.counters["completions"] > n_asked * len(runs)  # those in flight are asked again
    finally:
        server.end()
    history = json.loads((saved[1] / "trainer_state.json").read_text())["log_history"]
    assert [entry["staleness/mean"] for entry in history] == [min(step, 2) for step in range(LAST)]


class Asked:
    """A run that receives a signal, saves only the resulting checkpoint, and restarts."""

    def __init__(self, worker: Worker, name: str, folder: Path):
        self.worker = worker
        self.name = name
        self.folder = folder
        self.output = folder / "output"

    def start(self, *signals: str, options: dict | None = None, **request) -> Processes:
        """Starts the run. The process `rank` gets the signals at the `moment` after `step` steps."""
        asks = {**request, "signals": signals} if signals else None
        folder = self.folder / f"at {request.get('step', LAST)}"
        options = {"enable_jit_checkpoint": True, "save_strategy": "no", **(options or {})}
        return Processes(self.worker, train(self.name, folder, self.output, request=asks, **options))

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.output.glob("checkpoint-*"))

    def differences(self, processes: Processes) -> list[str]:
        """Returns where the final states differ from the baseline's."""
        straight = self.worker.straight(self.name)
        return inspect(self.worker, self.folder / "inspected", self.output, straight, processes.folder)["final"]


@pytest.mark.parametrize(
    "case",
    [pytest.param("grpo", marks=pytest.mark.gate), *slow_but(["fsdp2"])],
    indirect=True,
)
def test_signalled_to_end(worker, case, tmp_path):
    run = Asked(worker, case, tmp_path)
    other = CASES[case]["processes"] - 1
    expected = []
    moments = [
        ("sampled", 0, "SIGTERM"),
        ("gradient added", 2, "SIGINT"),  # the first of two
        ("sampled", 4, "SIGUSR1"),
        ("before the update", 6, "SIGTERM"),
    ]
    for moment, step, name in moments if case == "grpo" else moments[:2]:
        processes = run.start(*([name] if name == "SIGINT" else 2 * [name]), moment=moment, step=step, rank=other)
        assert set(processes.wait()) == {0}, processes.logs()
        assert "This run saves a checkpoint after its current step" in processes.logs()
        expected.append(f"checkpoint-{step + 1}")
        assert run.checkpoints() == expected, moment
    os.truncate(run.output / expected[-1] / f"rollout_state_{other}.pt", 1000)
    processes = run.start()
    assert set(processes.wait()) == {0}, processes.logs()
    log = (processes.folder / "log-0.txt").read_text()
    assert f"{expected[-1]} isn't whole: rollout_state_{other}.pt has 1000 bytes" in log
    for file in processes.folder.glob("resumed-*.json"):
        assert json.loads(file.read_text())["checkpoint"] == expected[-2]
    assert run.differences(processes) == []


@pytest.mark.slow
def test_signalled_between_steps(worker, tmp_path):
    """The run ends after the next step."""
    run = Asked(worker, "grpo", tmp_path)
    assert run.start("SIGTERM", moment="after the update", step=3, rank=0).wait() == [0]
    assert run.checkpoints() == ["checkpoint-4"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"media_prefetch": 2, "dataloader_num_workers": 1}, {"media_prefetch": 0, "dataloader_num_workers": 1}],
    ids=["ahead", "loader"],
)
def test_signalled_with_its_workers(options, worker, tmp_path):
    """Workers hold the rest of the batch, or rows of the next one."""
    run = Asked(worker, "grpo", tmp_path)
    processes = run.start("SIGTERM to all", options=options, moment="gradient added", step=1, rank=0)
    assert processes.wait() == [0], processes.logs()
    assert run.checkpoints() == ["checkpoint-2"]


@pytest.mark.slow
def test_second_interrupt_ends_at_once(worker, tmp_path):
    run = Asked(worker, "grpo", tmp_path)
    processes = run.start("SIGINT", "SIGINT", moment="gradient added", step=2, rank=0)
    assert processes.wait() == [1]
    assert "KeyboardInterrupt" in processes.logs() and run.checkpoints() == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has such a device")
def test_full_disk_of_one_ends_all(worker, tmp_path):
    """That of the main process: `test_whole_checkpoints.py`."""
    pytest.importorskip("deepspeed")
    run = Restarted(worker, "zero2", tmp_path, 0)  # which has a baseline
    run.story.append("the disk of process 1 is full")
    processes = run.start({"point": "disk full", "step": 2, "rank": 1})
    assert processes.wait() == [1, 1], processes.logs()
    log = (processes.folder / "log-1.txt").read_text()
    assert re.search(rf"OSError: checkpoint-2 can't be written to '{run.output}', where [\d,]+ MB are free", log), log
    run.check(processes, None, is_over=False)
    assert run.last == "checkpoint-1"


@pytest.mark.slow
def test_second_run_in_a_folder_is_refused(worker, tmp_path):
    """All processes refuse until the first run is killed."""
    options = {"save_strategy": "no", "disable_tqdm": True}
    first = Processes(worker, train("ddp", tmp_path / "first", tmp_path / "output", max_steps=10_000, **options))
    begun = [first.folder / f"resumed-{rank}.json" for rank in range(2)]
    assert first.until(lambda: all(file.exists() for file in begun), 1), first.logs()
    second = Processes(worker, train("ddp", tmp_path / "second", tmp_path / "output", **options))
    assert second.wait() == [1, 1], second.logs()
    for log in second.folder.glob("log-*.txt"):
        assert f"'{tmp_path / 'output'}' is in use by process {first.ids[0]} on" in log.read_text()
    first.kill()
    third = Processes(worker, train("ddp", tmp_path / "third", tmp_path / "output", max_steps=1, **options))
    assert third.wait() == [0, 0], third.logs()
    first.wait()


@pytest.mark.slow
def test_launcher_is_killed(tmp_path):
    """
    The launched process saves a checkpoint and ends with the launcher. A signal that a launcher forwards is that of
    `test_signalled_to_end`.
    """
    job = train("grpo", tmp_path, tmp_path / "output", max_steps=10_000)
    job["options"] |= {"enable_jit_checkpoint": True, "save_strategy": "no", "disable_tqdm": True}
    script = [HERE / "killed_worker.py", "train", json.dumps(job)]
    command = python_command(["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", *script])
    with (tmp_path / "log-0.txt").open("w") as log:
        launched = subprocess.Popen(command, env=python_environment(), stdout=log, stderr=subprocess.STDOUT)
    left = []
    try:
        wait_until((tmp_path / "resumed-0.json").exists, tmp_path)
        left = [int(pid) for pid in Path(f"/proc/{launched.pid}/task/{launched.pid}/children").read_text().split()]
        assert len(left) == 1
        launched.kill()
        wait_until(lambda: not any(map(is_running, left)), tmp_path)
    finally:
        launched.kill()
        launched.wait()
        for pid in filter(is_running, left):
            os.kill(pid, signal.SIGKILL)
    (checkpoint,) = (tmp_path / "output").glob("checkpoint-*")
    assert verify_checkpoint(checkpoint) == []


def wait_until(happened: Callable[[], bool], folder: Path) -> None:
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < limit, (folder / "log-0.txt").read_text(errors="replace")[-6000:]
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A zombie doesn't count as running."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
