# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A forked command does what a started one does, however it ends."""

import signal
import subprocess
import sys
import time

import pytest
from helpers import forked
from helpers.processes import python_command, python_environment


SHOW = "import os, sys; print(sys.argv, __name__, os.getcwd(), os.environ.get('SHOWN'), sys.stdin.read())"
PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', 'raise SystemExit(7)']).returncode)"


def both(*words, **options):
    """Returns what a command gives when it is started, and when it is forked."""
    results = []
    for start in (subprocess.Popen, forked.Popen):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with start([sys.executable, *map(str, words)], text=True, **pipes, **options) as process:
            output, errors = process.communicate("given", timeout=60)
        results.append((process.returncode, output, errors.splitlines()[-1:]))
    return results


@pytest.mark.parametrize(
    "code",
    [
        SHOW,
        PARENT,
        "raise ValueError('five')",
        "import sys; sys.exit('said')",
        "import sys; sys.exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'left')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        "import os; print('lost'); os._exit(4)",
        "import os; print(len(os.listdir('/proc/self/fd')) < 20, os.getsid(0) == os.getpid())",
        "import signal; print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGCHLD))",
    ],
)
def test_it_ends_alike(code, tmp_path):
    (tmp_path / "script.py").write_text(code)
    options = {"cwd": tmp_path, "env": python_environment(SHOWN="so"), "start_new_session": True}
    for words in (["-c", code, "a", "-b"], ["script.py", "a"], ["-m", "script"]):
        started, ended = both(*words, **options)
        assert started == ended


def test_what_hangs_is_killed_with_its_children(tmp_path):
    child = "import time; print('up', flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n" and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert process.stdout.read() == ""  # the end comes when no process has the pipe any more
    process.stdout.close()


def test_one_that_leaves_a_process_behind_is_waited_for():
    """A reader of its output waits, as for a started one."""
    code = "import os, time\nif not os.fork(): time.sleep(1); print('left')"
    before = time.monotonic()
    assert forked.run([sys.executable, "-c", code], capture_output=True).stdout == "left\n"
    assert time.monotonic() - before >= 1


@pytest.mark.parametrize("dies", ["raise ValueError", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"])
def test_ranks_end_with_one_of_them(dies, tmp_path):
    script = tmp_path / "rank.py"
    lines = ["import os, time", "print('rank', os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)"]
    script.write_text("\n".join([*lines, f"if os.environ['RANK'] == '1':\n    {dies}", "time.sleep(600)"]))
    run = forked.run(python_command([script], processes=2), env=python_environment(), capture_output=True)
    assert run.returncode == 1 and sorted(run.stdout.splitlines()) == ["rank 0 2", "rank 1 2"]
    assert "local_rank: 1" in run.stderr and ("ValueError" in run.stderr or "SIGKILL" in run.stderr)


def test_nothing_is_imported_again_and_time_is_counted():
    code = "import time; start = time.process_time(); import trl_multimodal_rft.trainers.grpo.trainer\n"
    code += "while (used := time.process_time()) < 0.5: pass\nprint(used - start)"
    with forked.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        output, _ = process.communicate()
    assert float(output) < 1 and 0.5 < process.seconds < 5


def test_other_programs_are_executed():
    assert forked.run(["sh", "-c", "echo $0"], capture_output=True).stdout == "sh\n"
    assert forked.run([sys.executable, "-I", "-c", "print(1)"], capture_output=True).stdout == "1\n"
