# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Tools around a training run that no trainer needs: commands, served environments, judges and remote rewards.

The core imports these modules lazily, for a command or a named reward. The modules use public names of the core only.
"""
