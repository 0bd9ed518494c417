# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
How many rows of a dataset a model answers correctly.

A dataset with the columns `prompt`, `solution` and media, and four samples of each prompt:

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

A benchmark as it is published, with greedy decoding, and a LoRA adapter that a trainer has saved:

```bash
accelerate launch examples/evaluate.py \
    --model_name_or_path Qwen2-Audio-GRPO \
    --dtype bfloat16 \
    --benchmark mmau \
    --dataset_name MMAU/mmau-test-mini.json \
    --group_by task \
    --output_dir results
```

Writes `metrics.json` and `rows.parquet` into `--output_dir`. Each process holds the whole model; on one process it
spreads over all GPUs.
"""

from trl_multimodal_rft.scripts.arguments import parse
from trl_multimodal_rft.scripts.evaluate import ARGUMENTS, main


if __name__ == "__main__":
    main(*parse(ARGUMENTS))
