# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From a dataset to the rows of a batch: layouts, columns, features, order, prefetching."""
