# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
PPO for vision-language models.

Without arguments, the script trains a small Qwen2.5-VL with random weights to read handwritten digits, on a CPU in
minutes. A cold start fine-tunes the model on a tenth of the images with their answers. Without it, PPO never tries
some digits once others have been rewarded, and the critic explains nothing until the policy knows most digits. PPO
then trains on all images, with rewards for the sampled answers:

```bash
accelerate launch examples/ppo_vision.py
```

A quarter of the training images is noise, whose answers the policy can only guess. Without noise, all returns are
equal once all answers are right, and no variance remains for the critic to explain. With noise, the critic must see
which rows have an answer. `demo_metrics.json` holds the accuracies on the held-out digits, which contain no noise, and
`explained_variance`: the mean of the trainer's metric (values at sampling time against returns) over the last quarter
of the logged steps.

With arguments, the script trains any vision-language model on any dataset with the columns `prompt`, `image` and
`solution`. The critic is a copy of the policy unless you name a saved critic, a reward model or a backbone of the
policy's family.

```bash
accelerate launch examples/ppo_vision.py \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --value_model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2.5-VL-PPO \
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

from demo import DEMO_ARGUMENTS, cold_start, demo_inputs, start, train_and_measure, with_noise
from small_models import digit_model
from tasks import handwritten_digits, leading_answer_reward

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.cli.commands import ppo
from trl_multimodal_rft.cli.inputs import ppo_inputs
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/ppo_vision",
    "max_steps": 250,
    "per_device_train_batch_size": 384,
    "num_generations": 4,
    "learning_rate": 5e-4,  # twice this rate undoes the cold start
    "freezing_actor_steps": 10,  # warm-up of the critic
    "entropy_coef": 0.05,
    "vf_coef": 0.5,
    "num_ppo_epochs": 2,
}


def demo(script_args, training_args, model_args):
    model, processor = digit_model(training_args.seed)
    dataset = handwritten_digits()
    answers = dataset["train"].select(range(400)).rename_column("solution", "completion")
    cold_start(model, processor, answers, training_args)
    dataset["train"] = with_noise(dataset["train"])
    trainer = MultimodalPPOTrainer(
        **demo_inputs(model, processor, dataset, training_args, model_args),
        reward_funcs=[accuracy_reward, leading_answer_reward],
        **ppo_inputs(script_args),
    )
    train_and_measure(trainer, script_args, dataset["test"], "digits")


if __name__ == "__main__":
    start(ppo, demo, DEMO)
