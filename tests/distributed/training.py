# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Trains tiny models with the engine that the command line names. The global batches don't depend on the number of
processes.
"""

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import ParallelismConfig, PartialState
from accelerate.state import AcceleratorState
from datasets import Dataset
from helpers.chats import RATE, audio, image
from helpers.collectives import Gathered
from helpers.families import FAMILIES, SPECIAL
from helpers.samplers import Remembers, Wrapped
from helpers.trainer_utils import PLAIN, config_of
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.generation.vllm_generation import VLLMGeneration

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.engines.vllm import MultimodalVLLMGeneration


ENGINE = sys.argv[1]
FOLDER = Path(sys.argv[2])
SCENARIOS = sys.argv[3:]
ON_CPU = os.environ.get("TESTS_DEVICE", "cpu") == "cpu"
SHARES_GPU = not ON_CPU and int(os.environ.get("WORLD_SIZE", 1)) > 1  # NCCL refuses this
if SHARES_GPU:
    os.environ["LOCAL_RANK"] = "0"
ZERO = {"zero2": 2, "zero3": 3}  # DeepSpeed stages
GROUP = 4  # completions per prompt


# Trainers


class Injecting(Wrapped):
    """
    Before the step `until`, takes completions that depend only on the step and on the position in the global batch.

    Evaluators, which have separate configs, sample.
    """

    def __init__(self, trainer, until: float = math.inf):
        super().__init__(trainer)
        self.until = until

    def __call__(self, model, prompts, *, step, config=None, **options):
        if config is None and step < self.until:
            return injected(self.trainer, len(prompts)), None
        return super().__call__(model, prompts, step=step, config=config, **options)


class RecordingTrainer(MultimodalGRPOTrainer):
    """Keeps the completions of all calls."""

    n_given = 0  # steps with injected completions

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Injecting(self, self.n_given * self.num_iterations)
        self.sampler = Remembers(self)

    @property
    def completions(self):
        return [ids for _, ids, _ in self.sampler.calls]


class InjectingTrainer(RecordingTrainer):
    """Samples after two steps."""

    n_given = 2


class RemembersParts:
    """Records the number of parts of each micro-batch, and how many of them ran."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.parts = []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        deferred = self._scores.deferred
        self.parts.append([1, 1] if deferred is None else [deferred.n_local, len(deferred.parts)])
        return loss


def injected(trainer, n: int) -> list[list[int]]:
    completions = []
    for i in range(n):
        place = trainer.accelerator.process_index * n + i
        generator = torch.Generator().manual_seed(1000 * trainer.state.global_step + place)
        length = int(torch.randint(1, 9, (), generator=generator))
        completions.append(torch.randint(50, 200, (length,), generator=generator).tolist())
    return completions


def reward(completion_ids, group_ids=None, **kwargs):
    # Passed only where each process has whole groups
    assert group_ids is None or all(group_ids.count(each) == GROUP for each in group_ids)
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def train(
    folder,
    family,
    rows,
    batch,
    trainer_class=InjectingTrainer,
    end_ids=None,
    reward_func=reward,
    checkpoint=None,
    objects=None,
    sampler=None,
    **options,
):
    """Trains on global batches of `batch` samples, with the trainer's sampler or another one."""
    state = start()
    model, processor = (FAMILIES.get(family) or SPECIAL[family]).build()
    if end_ids is not None:
        model.generation_config.eos_token_id = end_ids
    model.save_pretrained(folder / "model")  # only rank 0 writes
    state.wait_for_everyone()
    config = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": batch // state.num_processes,
        "num_generations": GROUP,
        "max_completion_length": 8,
        **PLAIN,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": True,
        "learning_rate": 0.5,  # hides the rounding of the weights in an update
        "shuffle_dataset": False,
        "self_check": False,
        **engine_options(state),
    }
    args = config_of(trainer_class)(**{**config, **options})
    data = Dataset.from_list(rows)
    trainer = trainer_class(
        str(folder / "model"), reward_func, args, data, processing_class=processor, **(objects or {})
    )
    trainer.sampler = trainer.sampler if sampler is None else sampler(trainer)
    return trainer, observed(trainer, checkpoint)


def refusal(call, *args, error=ValueError, **options) -> str:
    """Returns the message of the error that a call raises, or an empty text."""
    try:
        call(*args, **options)
    except error as raised:
        return str(raised)
    return ""


def observed(trainer, checkpoint=None):
    """Trains. Returns the updates of the weights, the logs, and whether weights are sharded."""
    before = {**weights(trainer.model), **averages(trainer)}
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    after = {**weights(trainer.model), **averages(trainer)}
    steps = [
        {name: value for name, value in entry.items() if isinstance(value, float)}
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]
    return {
        "update": {name: after[name].cpu() - before[name].cpu() for name in before},
        "steps": steps,
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
    }


def start(**options):
    """Resets the accelerator and the engine of the previous scenario. Returns the state of the processes."""
    AcceleratorState._reset_state()
    unset_hf_deepspeed_config()
    if not ON_CPU:
        return PartialState(**options, **({"backend": "gloo"} if SHARES_GPU else {}))
    if ENGINE in ZERO and "WORLD_SIZE" in os.environ:
        return PartialState(backend="gloo", **options)  # accelerate refuses DeepSpeed with `cpu=True`
    return PartialState(cpu=True, **options)


def engine_options(state):
    splits = state.num_processes > 1 or not ON_CPU  # GPUs run engines with one process, too
    if ENGINE in ZERO and splits:
        zero = {"stage": ZERO[ENGINE]}
        if zero["stage"] == 3:
            # Engines shard even the smallest weight, and free it after its layer, as in models of billions of weights
            zero |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
            zero["stage3_gather_16bit_weights_on_model_save"] = True
        config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
        config |= {"gradient_clipping": "auto", "zero_optimization": zero}
        own_state = {"accelerator_config": {"use_configured_state": True}} if ON_CPU else {}
        return {"deepspeed": config, "use_cpu": False, **own_state}
    own_backend = {"ddp_backend": "gloo"} if SHARES_GPU else {}
    shards = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}  # as in `fsdp2.yaml`
    if ENGINE == "hsdp":  # as in `hsdp.yaml`, with two machines
        shards["parallelism_config"] = ParallelismConfig(dp_replicate_size=2, dp_shard_size=state.num_processes // 2)
    return {"use_cpu": ON_CPU, **(shards if ENGINE in ("fsdp2", "hsdp") and splits else {}), **own_backend}


def weights(model):
    parameters = dict(model.named_parameters())
    with gathered(parameters.values()):
        return {name: whole(parameter) for name, parameter in parameters.items()}


def averages(trainer):
    """Returns copies of the averages of the policy's parameters."""
    average = getattr(trainer, "ema", None)
    return {} if average is None else {f"average of {name}": whole(value) for name, value in average._average.items()}


def synced(trainer):
    """
    Returns the weights that differ between what vLLM gets in bfloat16 and what TRL's loop over parameters gives, cast
    afterwards, and how many bytes are gathered for the former relative to the latter.
    """

    class Engine(MultimodalVLLMGeneration):
        dtype = torch.bfloat16

        def _init_vllm(self):
            pass

    given = []
    counts = []
    engine = Engine(model=trainer.model, accelerator=trainer.accelerator, processing_class=None)
    for loop in (Engine._iter_fsdp2_params, VLLMGeneration._iter_fsdp2_params):
        Engine._iter_fsdp2_params = loop
        with Gathered() as gathered:
            given.append({name: weight.clone() for name, weight in engine._iter_named_params()})
        counts.append(gathered.n_bytes)
    ours, trl = given
    assert {weight.dtype for weight in trl.values()} == {torch.float32}
    differ = [name for name in ours | trl if not torch.equal(ours[name], trl[name].bfloat16())]
    # A single process gathers nothing
    return {"cast_otherwise": differ, "gathered": counts[0] / counts[1] if counts[1] else None}


def compared(straight, resumed):
    """Returns the result of a resumed run, and where it differs from the uninterrupted one."""
    updates = straight["update"], resumed["update"]
    logs = [
        [{name: value for name, value in step.items() if "time" not in name} for step in each["steps"]]
        for each in (straight, resumed)
    ]
    return {
        **resumed,
        "otherwise": [name for name in updates[0] if not torch.equal(updates[0][name], updates[1][name])],
        "logs": logs,
    }


def gathered(parameters):
    """Returns a context that gathers the parameters that ZeRO-3 sharded."""
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not split:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(split)


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


# Datasets


def row(question, **media):
    return {"prompt": [{"role": "user", "content": question}], **media}


def image_rows():
    sizes = [(84, 56), (56, 112), (112, 84), (56, 56), (84, 84), (112, 56), (84, 112), (56, 84)]
    return [
        row("What is in the image? " * (1 + i % 2), image=image(*size, seed=i)["image"])
        for i, size in enumerate(sizes)
    ]


# The budget of a forward pass fits two of the first four prompts together, and one of the other four
SHORT_AND_LONG = 4 * [image_rows()[3]] + 4 * [row("What is in the image? " * 4, image=image_rows()[2]["image"])]


# Four questions about each of two images
ONE_IMAGE = [row("What is in the image? " * 4 + str(i), image=image_rows()[i // 4]["image"]) for i in range(8)]


def audio_rows(seconds=(0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)):
    return [
        row("What do you hear?", audio={"array": audio(length, seed=i)["audio"], "sampling_rate": RATE})
        for i, length in enumerate(seconds)
    ]
