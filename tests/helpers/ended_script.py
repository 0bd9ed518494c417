# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A run of `ended_runs.py` in one of several processes: `ended_script.py <folder> <trainer> <end> <part>`.

The part `ended` lets the last process end, which writes its error; `resumed` goes on from the last
checkpoint, and `whole` is a run without an end. Both write the weights and the log history.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from accelerate import PartialState

from helpers import trainer_utils
from helpers.ended_runs import World, end_at, made
from helpers.resumed_runs import logged


folder, name, end, part = sys.argv[1:]
trainer_utils._MODELS = TemporaryDirectory()  # processes that are forked would share one
trainer_utils.saved("qwen2_5_vl")  # while each process sees a world size of 1
state = PartialState(cpu=True)
world = World(Path(folder))
trainer = made(name, Path(folder, "whole" if part == "whole" else "run"), world, end)
if part == "ended" and state.process_index == state.num_processes - 1:
    end_at(trainer, world, end)
try:
    trainer.train(resume_from_checkpoint=part == "resumed")
except Exception as error:
    told = {"step": trainer.state.global_step, "error": repr(error), "notes": getattr(error, "__notes__", [])}
    Path(folder, f"error-{state.process_index}.json").write_text(json.dumps(told))
    raise
if state.process_index == 0:
    torch.save((trainer.model.state_dict(), logged(trainer)), Path(folder, f"{part}.pt"))
state.destroy_process_group()
