# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The process from which `forked.py` forks: it imports everything, starts no thread, and runs no command itself.

A request is a line of JSON, with the command's three standard streams. The answer has two lines, such as `4711` and
`256 1.5`: the child's process id and, when the child has ended, its status as of `os.wait` and the CPU seconds of the
child and of its children. A child is killed if its client disconnects.
"""

import atexit
import gc
import importlib.util
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


TESTS = Path(__file__).parents[1]
IMPORTED = """
accelerate.commands.launch av datasets deepspeed jsonschema matplotlib.pyplot mistral_common peft qwen_vl_utils
safetensors.torch tiktoken torch.distributed.fsdp torch.distributed.run torchvision torch.utils.serialization.config
torch.distributed.elastic.rendezvous.c10d_rendezvous_backend transformers.integrations.deepspeed
transformers.models.auto.modeling_auto transformers.models.auto.processing_auto
transformers.models.qwen2.modeling_qwen2 transformers.models.qwen2_vl.image_processing_qwen2_vl
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl transformers.models.qwen2_5_vl.processing_qwen2_5_vl
transformers.models.qwen2_audio.modeling_qwen2_audio transformers.models.qwen2_audio.processing_qwen2_audio
transformers.models.qwen2_vl.video_processing_qwen2_vl transformers.models.qwen3_vl.processing_qwen3_vl
transformers.models.whisper.feature_extraction_whisper transformers.tokenization_mistral_common
trl_multimodal_rft.cli trl_multimodal_rft.evaluation trl_multimodal_rft.lightrft.trainer.experience_maker
trl_multimodal_rft.extras.evaluate trl_multimodal_rft.cli.training
trl_multimodal_rft.trainers.distillation.trainer trl_multimodal_rft.trainers.preference.dpo_trainer
trl_multimodal_rft.trainers.grpo.trainer
trl_multimodal_rft.trainers.ppo.trainer trl_multimodal_rft.trainers.rloo.trainer
trl_multimodal_rft.trainers.supervised.trainer
""".split()
FORKABLE = "jemalloc_bg_thd"  # a thread of Arrow that Arrow starts again in a child


@dataclass
class Child:
    """A command that runs."""

    connection: socket.socket
    client: int  # process id
    seconds: float = 0.0  # CPU seconds of the command's children that have ended, in the end also its own


class Forks:
    """Server that forks a child for each connection."""

    def __init__(self, address: str):
        self._children: dict[int, Child] = {}
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wakened = socket.socketpair()
        self._wakened.setblocking(False)
        signal.set_wakeup_fd(self._wakened.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector.register(self._wakes, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)

    def request(self) -> dict:
        """Serves forever. Returns only in a child, with the request for [`perform`]."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    request = self._fork(self._listener.accept()[0])
                    if request is not None:
                        return request
                elif key.fileobj is self._wakes:
                    self._wakes.recv(4096)
                else:  # a client sends one request, so this event is the end of its connection
                    self._selector.unregister(key.fileobj)
                    for pid, child in self._children.items():
                        if child.connection is key.fileobj:
                            os.killpg(pid, signal.SIGKILL)
            self._reap()

    def _fork(self, connection: socket.socket) -> dict | None:
        """Reads a request and forks. Returns the request in the child, and `None` in the server."""
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        if not streams:  # the client has gone already
            connection.close()
            return None
        with connection.makefile() as lines:
            request = json.loads(lines.readline())
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert len(names) - names.count(FORKABLE) == 1, (
            f"{names}: a child may wait for locks of these threads for ever"
        )
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for finalizer in weakref.finalize._registry:  # would delete folders that the server uses
                finalizer.atexit = False
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._selector.close()
            connections = [child.connection for child in self._children.values()]
            for handle in (self._listener, self._wakes, self._wakened, connection, *connections):
                handle.close()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for handle in (*streams, read_end, write_end):
                os.close(handle)
            return request
        for handle in (*streams, write_end):
            os.close(handle)
        os.read(read_end, 1)  # waits until the child has its session, and closes its end of the pipe
        os.close(read_end)
        client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        self._children[pid] = Child(connection, client)
        self._selector.register(connection, selectors.EVENT_READ)
        connection.sendall(b"%d\n" % pid)
        return None

    def _reap(self) -> None:
        """Answers the clients of children that have ended."""
        for pid, child in [*self._children.items()]:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if not ended:
                continue
            del self._children[pid]
            child.seconds += usage.ru_utime + usage.ru_stime
            if child.client in self._children:  # a child of a child
                self._children[child.client].seconds += child.seconds
            if child.connection in self._selector.get_map():
                self._selector.unregister(child.connection)
                child.connection.sendall(f"{status} {child.seconds}\n".encode())
            child.connection.close()

    def end(self) -> None:
        signal.set_wakeup_fd(-1)
        for pid in self._children:
            os.killpg(pid, signal.SIGKILL)


def perform(words: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Runs the words that follow `python` on a command line."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    folders = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = [*folders, *sys.path]
    for folder in folders:
        if Path(folder, "sitecustomize.py").exists():
            runpy.run_path(str(Path(folder, "sitecustomize.py")))
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    sys.argv = words[1:] if words[0] in ("-m", "-c") else words
    if words[0] == "-m":
        sys.path.insert(0, cwd)
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


def end_as_python_does(error: BaseException | None) -> None:
    """Ends the process as Python does, but without clearing modules."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        code = 1
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def main() -> None:
    address = os.environ["TESTS_FORK_SERVER"]
    gc.disable()
    python_path = {os.path.realpath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [str(TESTS), str(TESTS.parent), *sys.path[1:]]
    from helpers import forked

    subprocess.Popen = forked.Popen  # children fork their own commands, too
    import torch.multiprocessing

    modules = sys.argv[1:]
    for name in modules or IMPORTED:
        if importlib.util.find_spec(
            name.partition(".")[0]
        ):  # a machine with a GPU may lack packages that no test needs there
            importlib.import_module(name)
    if "deepspeed" in sys.modules:  # DeepSpeed would compile an operation for inference, which takes 90 CPU seconds
        sys.modules["deepspeed"].ops.__compatible_ops__ = {}
        sys.modules["deepspeed"].utils.nvtx.enable_nvtx = False  # marks for a profiler of GPUs
    sys.path[:] = [folder for folder in sys.path[2:] if os.path.realpath(folder) not in python_path]
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # the server ends with the tests in any case
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
    forks = Forks(address)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        request = forks.request()
    except BaseException:
        forks.end()
        raise
    if modules:  # native code, such as vLLM's, frees shared memory as Python ends normally
        perform(**request)
        return
    try:
        perform(**request)
        error = None
    except BaseException as exception:
        error = exception
    end_as_python_does(error)


if __name__ == "__main__":
    main()
