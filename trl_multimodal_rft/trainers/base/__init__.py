# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What all trainers share.

- `trainer` is their base, `signatures` and `configs` have the types of arguments and configs.
- Before anything is loaded: `multimodal_config` has the options of configs, `config_options` their table, `conflicts`
  what excludes each other, `batch_sizes` the sizes that must fit, and `argument_checks` reads what a constructor gets.
- In a constructor: `setup` compares config, launch and model, `loading` loads models, `preparation` prepares them for
  scores, and `optimizer` sets the rates of parts.
- Whenever a dataset comes, from a constructor or for an evaluation: `dataset_checks` reads its columns and first rows.
- In each update: `finite` checks weights and gradients, `ema` averages weights, `logs` writes metrics, by one of
  which `best_metric` lets a run choose its best model, and `signals` ends a run after it.
"""
