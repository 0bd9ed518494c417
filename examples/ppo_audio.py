# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
PPO for audio models.

Without arguments, the script trains a small Qwen2-Audio to recognize spoken digits, together with a critic. Both start
from random weights. Accuracy on held-out voices rises from chance to near-perfect, on a CPU in minutes:

```bash
accelerate launch examples/ppo_audio.py
```

A quarter of the training recordings is noise, whose answers the policy can only guess. Without noise, all returns are
equal once all answers are right, and no variance remains for the critic to explain. With noise, the critic must hear
which rows have an answer. `demo_metrics.json` holds the accuracies on the held-out voices, which contain no noise, and
`explained_variance`: the mean of the trainer's metric (values at sampling time against returns) over the last quarter
of the logged steps.

With arguments, the script trains any audio model on any dataset with the columns `prompt`, `audio` and `solution`.
The critic is a copy of the policy unless you name a saved critic, a reward model or a backbone of the policy's family.

```bash
accelerate launch examples/ppo_audio.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --value_model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2-Audio-PPO \
    --learning_rate 1e-6 \
    --value_learning_rate 5e-6 \
    --freezing_actor_steps 10 \
    --num_generations 4 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 256
```

`--ptx_dataset_name path/to/answers --ptx_coef 0.05` adds the supervised loss on a dataset with `completion`.
"""

from demo import DEMO_ARGUMENTS, demo_inputs, start, train_and_measure, with_noise
from small_models import spoken_digit_model
from tasks import leading_answer_reward, spoken_digits

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.cli.commands import ppo
from trl_multimodal_rft.cli.inputs import ppo_inputs
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/ppo_audio",
    "max_steps": 160,
    "num_generations": 8,
    "vf_coef": 0.5,
    "num_ppo_epochs": 2,
}


def demo(script_args, training_args, model_args):
    model, processor = spoken_digit_model()
    dataset = spoken_digits()
    dataset["train"] = with_noise(dataset["train"])
    trainer = MultimodalPPOTrainer(
        **demo_inputs(model, processor, dataset, training_args, model_args),
        reward_funcs=[accuracy_reward, leading_answer_reward],
        **ppo_inputs(script_args),
    )
    train_and_measure(trainer, script_args, dataset["test"], "voices")


if __name__ == "__main__":
    start(ppo, demo, DEMO)
