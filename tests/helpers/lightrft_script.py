# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A script as LightRFT's users write it: options of a command line, two optimizers, two schedules, and `fit`.

`lightrft_script.py <save_path> <model> <estimator> [n] [signal]` sends itself a signal, by default `SIGKILL`, while it
computes the rewards of rollout `n`; of several processes, the last one does. Without `n`, it resumes from the last
checkpoint, if there is one, and saves the model at the end.
"""

import os
import signal
import sys
from argparse import Namespace

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from helpers.trainer_utils import image_rows, length_and_sum
from trl_multimodal_rft.lightrft.models.actor_vl import ActorVL
from trl_multimodal_rft.lightrft.models.critic import Critic
from trl_multimodal_rft.lightrft.strategy import get_strategy
from trl_multimodal_rft.lightrft.trainer.ppo_trainer_vl import PPOTrainerVL
from trl_multimodal_rft.lightrft.utils import get_tokenizer_processor_vl


save_path, pretrain, estimator, *dies = sys.argv[1:]
N_PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
IS_LAST = int(os.environ.get("RANK", 0)) == N_PROCESSES - 1
args = Namespace(
    save_path=save_path,
    pretrain=pretrain,
    advantage_estimator=estimator,
    gamma=0.9,
    init_kl_coef=0.05,
    kl_target=0.1,
    num_episodes=2,
    n_samples_per_prompt=4,
    micro_train_batch_size=4,
    train_batch_size=4 * N_PROCESSES,
    rollout_batch_size=N_PROCESSES,
    max_epochs=2,
    reward_clip=1.5,
    reward_running_norm=True,
    high_entropy_token_ratio=0.5,
    save_steps=1,
    logging_steps=1,
    load_checkpoint=True,
    bf16=False,
    seed=3,
)
strategy = get_strategy(args)
strategy.use_cpu = True
torch.manual_seed(args.seed)
actor = ActorVL(pretrain, bf16=False, packing_samples=True, high_entropy_token_ratio=args.high_entropy_token_ratio)
initial_model = ActorVL(pretrain, bf16=False)
with torch.no_grad():
    for weight in initial_model.parameters():
        weight += 0.02 * torch.randn(weight.shape)
tokenizer, processor = get_tokenizer_processor_vl(pretrain, actor.model, "left")
actor_optim = torch.optim.AdamW(actor.parameters(), lr=1e-2, betas=(0.9, 0.95))
actor_scheduler = CosineAnnealingLR(actor_optim, 12)
critic = critic_optim = critic_scheduler = None
if estimator == "gae":
    critic = Critic(ActorVL(pretrain, bf16=False).model)
    critic_optim = torch.optim.Adam(critic.parameters(), lr=2e-2)
    critic_scheduler = CosineAnnealingLR(critic_optim, 9)

rollouts = []


def reward_fn(completion_ids, **columns):
    rollouts.append(completion_ids)
    if dies and IS_LAST and len(rollouts) == int(dies[0]):
        os.kill(os.getpid(), getattr(signal, dies[1] if len(dies) > 1 else "SIGKILL"))
    return length_and_sum(completion_ids)


trainer = PPOTrainerVL(
    strategy,
    actor,
    critic,
    None,
    initial_model,
    None,
    actor_optim,
    critic_optim,
    actor_scheduler,
    critic_scheduler,
    init_kl_coef=args.init_kl_coef,
    kl_target=args.kl_target,
    kl_horizon=50,
    micro_train_batch_size=args.micro_train_batch_size,
    micro_rollout_batch_size=4,
    max_epochs=args.max_epochs,
    tokenizer=tokenizer,
    processor=processor,
    prompt_max_len=512,
    reward_fn=reward_fn,
    max_new_tokens=5,
    gamma=args.gamma,
    **({"lambd": 0.9} if estimator == "gae" else {}),
)
prompts = DataLoader(list(image_rows(3 * N_PROCESSES)), batch_size=1, shuffle=True, collate_fn=list)
trainer.fit(args, prompts, None)
sys.stdout.write(f"rollouts: {len(rollouts)}\n")
trainer.save_model(save_path)
