# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for models that hear.

Without arguments, a small Qwen2-Audio with random weights learns spoken digits, from chance to nearly all right on
voices it never heard, on a CPU in minutes:

```bash
accelerate launch examples/grpo_audio.py
```

With `--use_vllm`, on a GPU, vLLM samples. With arguments, any audio model and dataset (columns `prompt`, `audio` and
`solution`):

```bash
accelerate launch examples/grpo_audio.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --output_dir Qwen2-Audio-GRPO \
    --learning_rate 1e-5 \
    --num_generations 8 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 \
    --max_completion_length 256 \
    --use_peft \
    --lora_target_modules q_proj v_proj
```
"""

import shutil
from pathlib import Path

from datasets import load_dataset
from demo import DEMO_ARGUMENTS, DemoParser, HeldOutAccuracy, model_init_kwargs, saved
from small_models import spoken_digit_model
from tasks import leading_answer_reward, spoken_digits
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.rewards import accuracy_reward, format_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_audio",
    "max_steps": 200,
}


def main(script_args, training_args, model_args):
    demo = model_args.model_name_or_path is None
    if demo:
        model, processor = spoken_digit_model()
        if training_args.use_vllm:
            model = saved(model, processor, f"{training_args.output_dir}/before")
        dataset = spoken_digits()
        reward_funcs = [accuracy_reward, leading_answer_reward]
    else:
        model, processor = model_args.model_name_or_path, None
        training_args.model_init_kwargs = model_init_kwargs(model_args)
        dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
        reward_funcs = [accuracy_reward, format_reward]

    trainer = MultimodalGRPOTrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        processing_class=processor,
        callbacks=[TrainingCurvesCallback()],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if demo:
        held_out = HeldOutAccuracy(trainer, dataset["test"], "voices")
        trainer.add_callback(held_out)

    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    trainer.save_model(training_args.output_dir)
    trainer.create_model_card(dataset_name=script_args.dataset_name)
    if demo:
        if trainer.accelerator.is_main_process:
            shutil.copy(dataset["test"][7]["audio"]["path"], Path(training_args.output_dir, "seven.wav"))
        held_out.write()
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)


if __name__ == "__main__":
    parser = DemoParser((ScriptArguments, MultimodalGRPOConfig, ModelConfig), DEMO)
    main(*parser.parse_args_and_config())
