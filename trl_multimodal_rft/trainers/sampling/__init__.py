# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What the trainers that sample completions share.

- `trainer` is their base. `constructor_inputs` checks and loads the arguments of their constructors, `prompt_setup`
  makes what reads rows, and `engine` what samples.
- The stages of a rollout, in their order: `prompting`, `sampling`, `scoring`, `rewarding` and `micro_batches`, all of
  which read `context`; with `asynchronous`, `rollout_views` and `offload` as options. `rollout_logs` logs them.
"""
