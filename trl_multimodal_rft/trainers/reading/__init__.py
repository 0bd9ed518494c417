# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What the trainers that read completions share: `trainer` is their base, `collator` encodes the rows of micro-batches in
workers, and `token_columns` shows the tokens of rows to a user.
"""
