# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Accuracy of a model on a dataset.

This command reads a dataset with the columns `prompt`, `solution` and media, and samples each prompt four times:

```bash
accelerate launch examples/evaluate.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --num_samples 4 \
    --temperature 1.0 \
    --pass_at 1 2 4 \
    --batch_size 32 \
    --output_dir results
```

This command evaluates a saved LoRA adapter on a benchmark in its published format, with greedy decoding:

```bash
accelerate launch examples/evaluate.py \
    --model_name_or_path Qwen2-Audio-GRPO \
    --dtype bfloat16 \
    --benchmark mmau \
    --dataset_name MMAU/mmau-test-mini.json \
    --group_by task \
    --output_dir results
```

The script writes `metrics.json` and `rows.parquet` to `--output_dir`. Each process holds the whole model. With one
process, the model is spread over all GPUs.
"""

from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.extras.evaluate import ARGUMENTS, main


if __name__ == "__main__":
    main(*parse(ARGUMENTS))
