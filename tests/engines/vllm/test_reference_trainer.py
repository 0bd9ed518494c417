# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO with LightRFT's interface that samples from vLLM, colocated and from a server."""

from argparse import Namespace
from itertools import product

import pytest
import torch
import vllm_cpu
from helpers.engine_runs import Recorded
from helpers.ppo_runs import critic_of
from helpers.samplers import Wrapped
from helpers.trainer_utils import image_rows, length_and_sum, load, saved
from omni import load_omni, omni_rows
from torch.utils.data import DataLoader

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorOmni, ActorVL, PPOTrainerVL
from trl_multimodal_rft.lightrft.strategy import get_strategy


class Compared(Wrapped):
    """Compares log-probabilities of the engine with those of the policy's forward."""

    def __init__(self, trainer, differences):
        super().__init__(trainer)
        self.differences = differences

    def __call__(self, model, prompts, **options):
        completions, logps = super().__call__(model, prompts, **options)
        for prompt, ids, engine_logps in zip(prompts, completions, logps, strict=True):
            own = Recorded._own_logps(self.trainer, prompt, torch.tensor(ids))
            self.differences.append((own - torch.tensor(engine_logps)).abs().max().item())
        return completions, logps


class Counted(Wrapped):
    """Notes the lengths of prompts."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.lengths = []

    def __call__(self, model, prompts, **options):
        self.lengths += map(len, prompts)
        return super().__call__(model, prompts, **options)


def trained(folder, actor, processor, critic, rows, own_positions=True, **options):
    """
    Returns the trainer after two rollouts of one update each, and for each completion the largest difference between
    log-probabilities of the engine and of the policy's forward.
    """
    options = {
        "num_generations": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "use_vllm": True,
        "num_train_epochs": 1,
        **options,
    }
    strategy = MultimodalPPOConfig(str(folder), **options)
    ppo = PPOTrainerVL(
        *(strategy, actor, critic, *(None,) * 7),
        micro_train_batch_size=4,
        processor=processor,
        prompt_max_len=512,
        reward_fn=length_and_sum,
        max_new_tokens=5,
    )
    ppo.trainer.own_positions = own_positions
    differences: list[float] = []
    ppo.trainer.sampler = Compared(ppo.trainer, differences)
    ppo.fit(strategy, DataLoader(rows, batch_size=2, collate_fn=list), None)
    assert ppo.trainer.state.global_step == 2 and len(differences) == 8
    return ppo, differences


def test_completions_come_from_the_colocated_engine(tmp_path):
    actor = ActorVL(saved("qwen2_5_vl"), bf16=False)
    engine = {**vllm_cpu.ENGINE, "max_model_len": 512}
    rows = list(image_rows(4))
    processor = load("qwen2_5_vl")[1]
    critic = critic_of("qwen2_5_vl")
    ppo, differences = trained(tmp_path, actor, processor, critic, rows, vllm_engine_kwargs=engine)
    assert max(differences) < 1e-4  # of both rollouts, before and after the update
    batches = [[row] for row in rows]
    greedy = ppo.evaluate(batches, 2)
    assert len(differences) == 8 + 4
    ppo.experience_maker.sample_with_engine = None
    assert ppo.evaluate(batches, 2) == pytest.approx(greedy)  # as the policy's own greedy completions


def test_engine_and_prompts_of_a_command_line(tmp_path):
    """LightRFT's `engine_type`, and prompts with their template, whose placeholder the engine's prompt has once."""
    processor = load("qwen2_5_vl")[1]
    args = Namespace(
        **{"save_path": str(tmp_path), "advantage_estimator": "rloo", "n_samples_per_prompt": 2, "bf16": False},
        **{"micro_train_batch_size": 4, "train_batch_size": 4, "rollout_batch_size": 2, "num_episodes": 1},
        **{"engine_type": "vllm", "enable_engine_sleep": False, "engine_tp_size": 1, "init_kl_coef": 0.0},
    )
    strategy = get_strategy(args)
    strategy.use_cpu = not torch.cuda.is_available()
    strategy.vllm_engine_kwargs = {**vllm_cpu.ENGINE, "max_model_len": 512}
    content = [{"type": "image"}, {"type": "text", "text": "What is in the image?"}]
    messages = [{"role": "user", "content": content}]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rows = [(text, [row["image"]], "a cat", "rule") for row in image_rows(4)]
    ppo = PPOTrainerVL(
        *(strategy, ActorVL(saved("qwen2_5_vl"), bf16=False), *(None,) * 8),
        processor=processor,
        prompt_max_len=512,
        reward_fn=length_and_sum,
        max_new_tokens=5,
    )
    ppo.trainer.sampler = Counted(ppo.trainer)
    batches = DataLoader(rows, batch_size=2, collate_fn=lambda rows: tuple(map(list, zip(*rows, strict=True))))
    ppo.fit(args, batches, None)
    assert ppo.trainer.state.global_step == 2
    expected = [len(processor(text=[text], images=[images])["input_ids"][0]) for text, images, *_ in rows]
    assert ppo.trainer.sampler.lengths == [length for length, _ in product(expected, range(2))]


@pytest.mark.slow
def test_completions_come_from_a_server(server, omni, tmp_path):
    objects = load_omni(omni)
    actor = ActorOmni(objects["model"], bf16=False)
    options = {"vllm_mode": "server", "vllm_server_base_url": server, "advantage_estimator": "rloo"}
    rows = [dict(row) for row in omni_rows()]
    _, differences = trained(tmp_path, actor, objects["processing_class"], None, rows[:4], False, **options)
    assert max(differences) < 1e-4
