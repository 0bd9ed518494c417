# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Views, which replace the media of a prompt, and the options that name a view."""

from .views import as_view, view
