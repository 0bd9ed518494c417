# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluates during training on one or several ranks: `evaluation_worker.py <ddp|fsdp2|zero3> <folder>`."""

import faulthandler
import json
from datetime import timedelta

import torch
from fsdp2_on_cpu import enable_fsdp2_on_cpu
from helpers.processes import COLLECTIVE
from helpers.trainer_utils import audio_rows, image_rows, text_rows
from torch.distributed.tensor import DTensor
from training import ENGINE, FOLDER, InjectingTrainer, start, train, weights

from trl_multimodal_rft import GenerationEvalCallback
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer


LOGGED = ("step", "eval_accuracy", "eval_accuracy_low", "eval_completion_length", "eval_rows")


class EvaluatedTrainer(InjectingTrainer):
    """Evaluates after each step and keeps the rows: 5 in batches of 2, so that one of two ranks has one row less."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tables = []
        config = EvaluationConfig(max_completion_length=6, batch_size=2)
        self.add_callback(Remembering(self, image_rows(5), even_length, config, freq=1))


class Remembering(GenerationEvalCallback):
    def _evaluate(self, state, control):
        metrics = super()._evaluate(state, control)
        self.trainer.tables.append([row["completions"] for row in self.result.rows])
        return metrics


def even_length(completion_ids, **kwargs):
    return [float(len(ids) % 2 == 0) for ids in completion_ids]


def main():
    torch.set_num_threads(1)
    if ENGINE == "fsdp2":
        enable_fsdp2_on_cpu()
    faulthandler.dump_traceback_later(COLLECTIVE - 60)  # before a collective fails, and its rank ends the others
    state = start(timeout=timedelta(seconds=COLLECTIVE))
    trainer, _ = train(
        FOLDER, "qwen2_5_omni", list(image_rows(4)), 8, trainer_class=EvaluatedTrainer, end_ids=[2, *range(60, 100)]
    )
    before = weights(trainer.model)
    # Some ranks have no rows of some kinds of media
    rows = [*image_rows(1), *audio_rows(1), *text_rows(1)]
    config = EvaluationConfig(max_completion_length=4, batch_size=1, ablate="audio", ablate_with="other_row")
    mixed = evaluate_trainer(trainer, [*rows, *audio_rows(2).select([1])], even_length, config)
    after = weights(trainer.model)
    result = {
        "tables": trainer.tables,
        "logged": [
            {name: entry[name] for name in LOGGED} for entry in trainer.state.log_history if "eval_accuracy" in entry
        ],
        "mixed": [[row["completions"], row["completions_without"]] for row in mixed.rows],
        "sharded": any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in trainer.model.parameters()),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before) and trainer.model.training,
    }
    (FOLDER / f"{state.process_index}.json").write_text(json.dumps(result))
    state.destroy_process_group()


if __name__ == "__main__":
    main()
