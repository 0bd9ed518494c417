# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Training never resumes silently from a damaged checkpoint, and a full disk gives an error with its path."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.constants import FSDP_MODEL_NAME
from helpers.marks import slow_but
from helpers.resumed_runs import REUSED, same_weights
from helpers.trainer_utils import image_rows, make_trainer
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, MultimodalPPOTrainer
from trl_multimodal_rft.trainers.base import trainer as base_trainer
from trl_multimodal_rft.trainers.base.setup import resolve_config
from trl_multimodal_rft.trainers.checkpoints import checkpoints
from trl_multimodal_rft.trainers.checkpoints.files import replace_folder
from trl_multimodal_rft.trainers.checkpoints.manifest import measure_folder, verify_checkpoint, write_manifest
from trl_multimodal_rft.trainers.checkpoints.shards import SHARDS, check_shards, layout_mismatch


pytestmark = pytest.mark.gate


STEPS = 3


def make(folder: Path, trainer_class: type = MultimodalGRPOTrainer, **options):
    options = {**REUSED, "self_check": False, "max_steps": STEPS, "logging_steps": 10, **options}
    return make_trainer(trainer_class, "qwen2_5_vl", image_rows(5), folder, **options)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An uninterrupted run."""
    trainer = make(tmp_path_factory.mktemp("straight"))
    trainer.train()
    return trainer


@pytest.fixture
def output(straight, tmp_path) -> Path:
    """Returns a copy of its folder to damage."""
    shutil.copytree(straight.args.output_dir, tmp_path / "output")
    return tmp_path / "output"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


KINDS = {
    Path.unlink: "is missing",
    flip: "has other content",
    halve: r"has \d+ bytes, not \d+",
    empty: "has 0 bytes, not",
}
DAMAGES = [
    *[(file, Path.unlink) for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json")],
    *[(file, Path.unlink) for file in ("model.safetensors", "trainer_state.json", "rollout_state_0.pt")],
    *[(file, flip) for file in ("optimizer.pt", "model.safetensors", "rng_state.pth", "trainer_state.json")],
    *[(file, empty) for file in ("optimizer.pt", "scheduler.pt", "rollout_state_0.pt", "trainer_state.json")],
    ("model.safetensors", halve),
]
WITHOUT_MANIFEST = [
    *[(file, halve) for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_state_0.pt")],
    *[(file, halve) for file in ("config.json", "model.safetensors", "trainer_state.json", "training_args.bin")],
    *[(file, harm) for file, harm in product(("optimizer.pt", "rollout_state_0.pt"), (flip, empty))],
]


def test_every_damage_is_an_error_that_names_folder_and_file(straight, output):
    folder = output / "checkpoint-2"
    trainer = make(output)
    for file, harm in DAMAGES:
        harm(folder / file)
        message = f"{re.escape(str(folder))} isn't whole: {file} {KINDS[harm]}"
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=str(folder))
        shutil.copy(Path(straight.args.output_dir, "checkpoint-2", file), folder / file)
    assert verify_checkpoint(folder) == []
    halve(folder / "manifest.json")
    with pytest.raises(ValueError, match=r"manifest\.json can't be read"):
        trainer.train(resume_from_checkpoint=str(folder))
    (folder / "manifest.json").unlink()  # formats tell of damage, too
    for file, harm in WITHOUT_MANIFEST:
        harm(folder / file)
        with pytest.raises(ValueError, match=f"isn't whole: {file} (can't be read|is empty|has other)"):
            trainer.train(resume_from_checkpoint=str(folder))
        shutil.copy(Path(straight.args.output_dir, "checkpoint-2", file), folder / file)
    assert verify_checkpoint(folder) == []
    with pytest.raises(ValueError, match="checkpoint-7 isn't whole: there is no such folder"):
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-7"))


@contextmanager
def as_nobody():
    """Drops the rights of root, who can read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_cannot_be_read_is_an_error_that_names_it(output):
    folder = output / "checkpoint-2"
    manifest = folder / "manifest.json"
    content = manifest.read_text()
    for hostile, reason in [
        ("[" * 100_000, "RecursionError"),
        ('{"model_only": false, "datasets": {}, "files": {"a": [Infinity, 0]}}', "OverflowError"),
    ]:
        manifest.write_text(hostile)
        assert verify_checkpoint(folder) == [f"manifest.json can't be read ({reason})"]
    for make_other in (manifest.mkdir, lambda: os.mkfifo(manifest)):
        manifest.rmdir() if manifest.is_dir() else manifest.unlink()
        make_other()
        assert verify_checkpoint(folder) == ["manifest.json can't be read (it isn't a regular file)"]
    manifest.unlink()
    manifest.write_text(content)
    folder.chmod(0)
    try:
        with as_nobody():
            assert verify_checkpoint(folder) == ["it can't be read (Permission denied)"]
    finally:
        folder.chmod(0o755)
    assert verify_checkpoint(folder) == []


def test_the_newest_whole_one_is_taken(straight, output, caplog):
    (output / "checkpoint-3" / "scheduler.pt").unlink()
    flip(output / "checkpoint-2" / "optimizer.pt")
    (output / "checkpoint-4").write_text("a file")
    trainer = make(output)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "Passed over: " in caplog.text and "checkpoint-3 isn't whole: scheduler.pt is missing." in caplog.text
    assert "checkpoint-2 isn't whole: optimizer.pt has other content." in caplog.text
    assert "checkpoint-1" not in caplog.text and not any("manifest" in text for text in caplog.messages)
    assert same_weights(straight, trainer)
    assert not any(
        verify_checkpoint(folder) for folder in output.glob("checkpoint-?") if folder.is_dir()
    )  # written once more


def test_nothing_whole_is_an_error(output, tmp_path):
    for step in range(1, STEPS + 1):
        (output / f"checkpoint-{step}" / "rng_state.pth").unlink()
    with pytest.raises(ValueError, match=r"no whole checkpoint in .*checkpoint-3 isn't whole: .*checkpoint-1 isn't"):
        make(output).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="There is no checkpoint in .*new' to resume from"):
        make(tmp_path / "new").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"no such folder\. Resume from another checkpoint \([^()]*\)\.$"):
        make(tmp_path / "new").train(resume_from_checkpoint=str(tmp_path / "gone"))


def test_a_missing_manifest_is_logged(straight, output, caplog):
    folder = output / "checkpoint-2"
    (folder / "manifest.json").unlink()
    trainer = make(output, save_strategy="no")
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(folder))
    assert "checkpoint-2 has no manifest.json" in caplog.text
    assert same_weights(straight, trainer)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2 has no config\.json"):
        make(output).train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_of_the_model_only_is_logged(tmp_path, caplog):
    make(tmp_path, save_only_model=True, max_steps=1).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    assert not list((tmp_path / "checkpoint-1").glob("rollout_state*"))
    assert verify_checkpoint(tmp_path / "checkpoint-1") == []
    trainer = make(tmp_path, max_steps=2)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-1 holds the model only (`save_only_model`)" in caplog.text
    assert trainer.state.global_step == 2


def test_a_run_resumes_from_what_is_left_without_the_manifest(output):
    shutil.rmtree(output / "checkpoint-3")
    (output / "checkpoint-2" / "rng_state.pth").unlink()
    (output / "checkpoint-2" / "manifest.json").unlink()
    trainer = make(output)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert (output / "checkpoint-3" / "manifest.json").exists()


def test_all_files_are_listed_and_what_is_added_is_not(tmp_path):
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    make(tmp_path, objects={"peft_config": lora}, max_steps=2, save_total_limit=1).train()
    (folder,) = tmp_path.glob("checkpoint-*")
    files = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {"adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "rollout_state_0.pt"} <= files
    assert json.loads((folder / "manifest.json").read_text())["files"].keys() == files
    shard = folder / "global_step1" / "zero_pp_rank_1.pt"
    shard.parent.mkdir()
    shard.write_bytes(bytes(range(128, 256)) * 200)
    assert verify_checkpoint(folder) == []
    write_manifest(folder, model_only=False)
    flip(shard)
    assert verify_checkpoint(folder) == ["global_step1/zero_pp_rank_1.pt has other content"]
    shutil.rmtree(shard.parent)
    assert verify_checkpoint(folder) == ["global_step1/zero_pp_rank_1.pt is missing"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process writes
def test_every_shard_counts(tmp_path):
    """What two processes write: `distributed/test_killed.py`."""
    shards = tmp_path / SHARDS
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=shards)
    (tmp_path / "trainer_state.json").write_text("{}")
    check_shards(tmp_path)
    names = {f"{SHARDS}/.metadata", f"{SHARDS}/__0_0.distcp", "trainer_state.json"}
    found = measure_folder(tmp_path, 0, 1)
    assert found.keys() == names
    # Two processes read each file once
    assert {**measure_folder(tmp_path, 0, 2), **measure_folder(tmp_path, 1, 2)} == found
    (shards / "__0_0.distcp").unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"^{SHARDS}/__0_0.distcp isn't there. Shards need an `output_dir` on"
    ):
        check_shards(tmp_path)
    write_manifest(tmp_path, model_only=False, measurements=found)
    assert verify_checkpoint(tmp_path) == [f"{SHARDS}/__0_0.distcp is missing"]


LAYOUTS = {"SHARDED_STATE_DICT": SHARDS, "FULL_STATE_DICT": FSDP_MODEL_NAME + ".bin", None: "model.safetensors"}


@pytest.mark.parametrize("own", LAYOUTS)
@pytest.mark.parametrize("saved", LAYOUTS)
def test_layouts_are_not_confused(own, saved, tmp_path):
    plugin = own and FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=own)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    (tmp_path / LAYOUTS[saved]).touch()
    message = layout_mismatch(accelerator, tmp_path)
    if own == saved:
        assert message is None
        return
    before = f"with FSDP's `{saved}`" if saved else "without FSDP (or with `save_only_model`)"
    this = f"with FSDP's `{own}`" if own else "without FSDP"
    launched = "the `--accelerate_config` of that run, such as `multi_gpu`"
    if saved:
        launched = f"`--accelerate_config fsdp2 --fsdp_state_dict_type {saved}`, on any number of GPUs"
    assert f"was saved {before}, and this run is {this}. Resume with {launched}" in message


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalPPOTrainer])
def test_shards_are_refused_before_anything_loads(trainer_class, tmp_path):
    trainer = make_trainer(trainer_class, "qwen2_5_vl", image_rows(5), tmp_path / "run")
    (tmp_path / "checkpoint-2" / SHARDS).mkdir(parents=True)
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    with pytest.raises(ValueError, match="was saved with FSDP's `SHARDED_STATE_DICT`, and this run is without FSDP"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / "latest").write_text("global_step2")
    with pytest.raises(ValueError, match="was saved with DeepSpeed, and this run is without, so that it would begin"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_models_alone_are_saved_whole_beside_shards(tmp_path, monkeypatch):
    for module in (base_trainer, checkpoints):
        monkeypatch.setattr(module, "writes_shards", lambda accelerator: True)
    make(tmp_path, save_only_model=True).train()
    assert load_file(tmp_path / f"checkpoint-{STEPS}" / "model.safetensors")


class Touched(TrainerCallback):
    """Simulates a changed clock, or a copy: the first checkpoint looks newer than later ones."""

    def on_save(self, args, state, control, **kwargs):
        later = time.time() + 3600
        os.utime(Path(args.output_dir, "checkpoint-1"), (later, later)) if state.global_step == 1 else None


def test_surplus_checkpoints_are_those_of_the_lowest_steps(tmp_path):
    trainer = make(tmp_path, save_total_limit=1)
    trainer.add_callback(Touched())
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    # A new run in the folder: its checkpoints stay, although an older run got further
    trainer = make(tmp_path, save_total_limit=2, max_steps=2)
    trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


class Removed(MultimodalGRPOTrainer):
    """Removes its folder before or while the trainer saves a step."""

    moment = ""

    def _remove(self, moment: str) -> None:
        if self.moment == moment and self.state.global_step == 2:
            shutil.rmtree(self.args.output_dir)

    def _save_checkpoint(self, model, trial):
        self._remove("before")
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir):
        self._remove("weights written")
        super()._save_optimizer_and_scheduler(output_dir)

    def _save_state(self, folder):
        super()._save_state(folder)
        self._remove("all written")


def test_a_folder_that_is_removed_is_named(tmp_path, caplog):
    for moment in ("weights written", "all written"):
        trainer = make(tmp_path / "run", Removed)
        trainer.moment = moment
        with pytest.raises(
            FileNotFoundError, match=f"'{tmp_path / 'run'}' was removed while checkpoint-2 was written"
        ):
            trainer.train()
    trainer = make(tmp_path / "run", Removed)
    trainer.moment = "before"
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert f"`output_dir` '{tmp_path / 'run'}' was removed during the run" in caplog.text
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    make(tmp_path / "run", max_steps=STEPS + 1).train(resume_from_checkpoint=True)


class Paused(TrainerCallback):
    """Pauses the process in a step until a kill."""

    def on_step_begin(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.skipif(sys.platform == "win32", reason="needs locks and signals of POSIX")
def test_a_folder_takes_one_run_at_a_time(tmp_path):
    first = make(tmp_path)
    second = make(tmp_path)
    first.add_callback(Paused())
    process = os.fork()
    if process == 0:
        try:
            first.train()
        finally:
            os._exit(1)
    os.waitpid(process, os.WUNTRACED)
    try:
        with pytest.raises(RuntimeError, match=rf"'{tmp_path}' is in use by process {process} on \S+ since 2\d\d\d-"):
            second.train()
        assert not list(tmp_path.glob("checkpoint-*"))
        make(tmp_path / "other", max_steps=1).train()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert (tmp_path / "_run.lock").exists()  # which doesn't lock anyone out
    second.train()
    second.train(resume_from_checkpoint=True)
    make(tmp_path).train()
    assert not (tmp_path / "_run.lock").exists()


def test_a_folder_without_locks_is_logged_and_trained_in(tmp_path, caplog):
    (tmp_path / "_run.lock").mkdir()
    with caplog.at_level(logging.WARNING):
        make(tmp_path, max_steps=1).train()
    assert f"'{tmp_path}' can't be locked, so a second run in it will not be noticed: [Errno 21]" in caplog.text
    assert (tmp_path / "checkpoint-1").exists()


class OnFullDisk(MultimodalGRPOTrainer):
    """From the second checkpoint on, the trainer writes one of its files to a full device."""

    file: str

    def save_model(self, output_dir=None, _internal_call=False):
        Path(output_dir).mkdir(parents=True)
        if self.state.global_step > 1:
            Path(output_dir, self.file).symlink_to("/dev/full")
        super().save_model(output_dir, _internal_call)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has such a device")
@pytest.mark.parametrize(
    "file",
    slow_but(
        ["optimizer.pt", "rollout_state_0.pt", "trainer_state.json", "manifest.json"], "optimizer.pt", "manifest.json"
    ),
)
def test_full_disk_names_folder_and_checkpoint(file, straight, tmp_path):
    trainer = make(tmp_path, OnFullDisk)
    trainer.file = file
    with pytest.raises(
        OSError, match=rf"^checkpoint-2 can't be written to '{tmp_path}', where [\d,]+ MB are free"
    ) as caught:
        trainer.train()
    assert isinstance(caught.value.__cause__, (OSError, RuntimeError))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["checkpoint-1"]  # no partial checkpoint
    if file == "optimizer.pt":
        resumed = make(tmp_path)
        resumed.train(resume_from_checkpoint=True)
        assert same_weights(straight, resumed)


@pytest.mark.parametrize("moved", ["checkpoint-2", "checkpoint-1"])
def test_a_file_server_that_forgets_its_folders_ends_the_run_in_one_line(moved, straight, tmp_path, monkeypatch):
    """In the move of the second checkpoint to its place, and of the first, which is one too many."""
    rename = Path.rename

    def forgets(path, target):
        if path.name == moved and (moved == "checkpoint-1") == (Path(target).parent.name != tmp_path.name):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", forgets)
    with pytest.raises(
        OSError, match=f"^checkpoint-2 can't be written to '{tmp_path}': .*Stale.*Make the folder"
    ) as e:
        make(tmp_path, save_total_limit=1).train()
    assert "\n" not in str(e.value)
    monkeypatch.undo()
    resumed = make(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert same_weights(straight, resumed)


def test_a_move_that_fails_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    written = tmp_path / "partial" / "new"
    written.mkdir(parents=True)
    place = tmp_path / "checkpoint-1"
    place.mkdir()
    (place / "old").touch()
    rename = Path.rename

    def fails(path, target):
        if path == written:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Stale"):
        replace_folder(written, place)
    assert (place / "old").exists()


@pytest.mark.parametrize("below", [".", "runs/new"])
def test_a_folder_that_cannot_be_written_is_named_at_construction(below, tmp_path):
    folder = tmp_path / "read_only"
    folder.mkdir(mode=0o555)
    tmp_path.chmod(0o755)
    with (
        as_nobody(),
        pytest.raises(OSError, match=r"^`output_dir=.*` can't be written to \(Permission denied.*; name a"),
    ):
        resolve_config(MultimodalGRPOConfig, MultimodalGRPOConfig(str(folder / below), use_cpu=True), "model")
