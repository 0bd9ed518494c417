# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
PPO for models that see.

Without arguments, a small Qwen2.5-VL with random weights learns to read handwritten digits, beside a critic with
weights as random, on a CPU in minutes:

```bash
accelerate launch examples/ppo_vision.py
```

A quarter of the pictures to train on is noise, where there is nothing but to guess. Else all returns would be equal
once all answers are right, and nothing left to explain; so the critic has to see what can be answered. Into
`demo_metrics.json` goes, beside the accuracies on held-out digits, which are all clear, the `explained_variance`: the
trainer's metric (values when completions were sampled, against their returns), the mean of the last quarter of the
logged steps.

With arguments, any vision-language model and dataset (columns `prompt`, `image` and `solution`). The critic is a copy
of the policy unless you name one: a saved critic, a reward model or a backbone, of the policy's family.

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

from datasets import load_dataset
from demo import DEMO_ARGUMENTS, DemoParser, HeldOutAccuracy, PPOScriptArguments, model_init_kwargs, with_noise
from small_models import digit_model
from tasks import handwritten_digits, leading_answer_reward
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_multimodal_rft import MultimodalPPOConfig, MultimodalPPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.rewards import accuracy_reward, format_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/ppo_vision",
    "max_steps": 300,
    "num_generations": 8,
    "entropy_coef": 0.05,
    "vf_coef": 0.5,
    "num_ppo_epochs": 2,
}


def main(script_args, training_args, model_args):
    demo = model_args.model_name_or_path is None
    ptx_dataset = None
    if demo:
        model, processor = digit_model()
        dataset = handwritten_digits()
        dataset["train"] = with_noise(dataset["train"])
        reward_funcs = [accuracy_reward, leading_answer_reward]
    else:
        model, processor = model_args.model_name_or_path, None
        training_args.model_init_kwargs = model_init_kwargs(model_args)
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        reward_funcs = [accuracy_reward, format_reward]
    if script_args.ptx_dataset_name is not None:
        ptx_dataset = load_dataset(
            script_args.ptx_dataset_name, name=script_args.ptx_dataset_config, split=script_args.ptx_dataset_split
        )

    trainer = MultimodalPPOTrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=processor,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        callbacks=[TrainingCurvesCallback()],
        value_model=script_args.value_model_name_or_path,
        ptx_dataset=ptx_dataset,
    )
    if demo:
        held_out = HeldOutAccuracy(trainer, dataset["test"], "digits")
        trainer.add_callback(held_out)

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    trainer.save_model(training_args.output_dir)
    trainer.create_model_card(dataset_name=script_args.dataset_name)
    if demo:
        held_out.write()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = DemoParser((PPOScriptArguments, MultimodalPPOConfig, ModelConfig), DEMO)
    main(*parser.parse_args_and_config())
