# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What trainers share, by the moment at which it runs.

- The bases: `trainer` of all trainers, `base` of those that sample completions, and `reading` of those that read them.
  `method` says what a method consists of, and `signatures` and `configs` have the types of arguments and configs.
- Before anything is loaded: `multimodal_config` has the options of configs, `arguments` and `batches` check them, and
  `inputs` the arguments of a constructor.
- In a constructor, before TRL's: `setup` compares config, launch and model, and `loading` loads models and rewards.
- Whenever a dataset comes, from a constructor or for an evaluation: `dataset_checks` reads its columns and first rows.
- In a worker, for each micro-batch of a trainer that reads completions: `collator` encodes rows.
- In a constructor, after TRL's: `prompts` makes what reads rows, and `engine` what samples. `optimizer` sets the rates
  of parts.
- In each rollout: the stages `prompting`, `sampling`, `scoring` and `rewarding`, which `stages` lists and which read
  `context`, with `asynchronous`, `rollout_views` and `offload` as options. `rollout_logs` logs them.
- In each update: `finite` checks weights and gradients, `ema` averages weights, and `signals` ends a run after it.
- When a user looks at a dataset: `token_columns` shows the tokens of rows.
"""
