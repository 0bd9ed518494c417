# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for vision-language models in a self-contained script: geometry problems with figures.

```bash
accelerate launch examples/grpo_vlm.py \
    --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct \
    --dataset_name hiyouga/geometry3k \
    --output_dir Qwen2.5-VL-3B-Geometry3K \
    --learning_rate 1e-5 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 1024 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```

For audio or video, use an audio or video model and a dataset with a column `audio` or `video` instead of `images`.
Nothing else changes.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.rewards import accuracy_reward, format_reward


def as_row(problem: str, answer: str) -> dict[str, object]:
    """A prompt and its solution. Each `<image>` in the prompt marks the position of one of the row's `images`."""
    prompt = f"{problem} Output the final answer in <answer> </answer>."
    return {"prompt": [{"role": "user", "content": prompt}], "solution": answer}


def short_reward(completion_ids, **kwargs) -> list[float]:
    """A custom reward function: shorter completions get a slightly higher reward."""
    return [-len(ids) / 10_000 for ids in completion_ids]


def main() -> None:
    parser = TrlParser((ScriptArguments, MultimodalGRPOConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)
    dataset = dataset.map(as_row, input_columns=["problem", "answer"], remove_columns=["problem", "answer"])
    evaluates = training_args.eval_strategy != "no"
    trainer = MultimodalGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=[accuracy_reward, format_reward, short_reward],
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if evaluates else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    main()
