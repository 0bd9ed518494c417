# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The options of an evaluation."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ..data.reading.rules import MediaRules, budgets_of
from ..data.rows.unread import check_ignored
from ..trainers.base.config_options import Needs, check_values, help_from_docstring
from ..trainers.base.conflicts import Conflicts, raise_first
from ..views.views import as_view


def _conflicts_of_samples(config: Any) -> Conflicts:
    """Returns conflicts of the number of samples with what is counted, and of an ablation with its view."""
    sizes = [("pass_at", k) for k in config.pass_at]
    sizes += [("majority_at", k) for k in config.majority_at]
    return [
        (
            config.num_samples > 1 and config.temperature == 0,
            f"`num_samples` is {config.num_samples}, but greedy decoding gives the same completion every time; set a "
            "`temperature`.",
        ),
        *(
            (
                not 1 <= k <= config.num_samples,
                f"`{name}` has {k}, but its values must be between 1 and `num_samples` ({config.num_samples}).",
            )
            for name, k in sizes
        ),
        (
            config.ablate is not None and not as_view(config.ablate_with).applies_to(config.ablate),
            f"`ablate_with={config.ablate_with!r}` has no effect on `ablate={config.ablate!r}`; name another view.",
        ),
    ]


@help_from_docstring
@dataclass
class EvaluationConfig:
    """
    Configuration of an evaluation: sampling and counting of completions.

    Args:
        num_samples (`int`, *optional*, defaults to `1`):
            Completions per prompt. More than one completion needs a temperature.
        temperature (`float`, *optional*, defaults to `0.0`):
            Sampling temperature; 0 is greedy decoding.
        top_p (`float`, *optional*, defaults to `1.0`):
            Cumulative probability of the most probable tokens, from which tokens are sampled.
        top_k (`int`, *optional*, defaults to `0`):
            Number of the most probable tokens, from which tokens are sampled; 0 is all.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Maximum tokens of a completion.
        batch_size (`int`, *optional*, defaults to `8`):
            Completions sampled at once on each process. A batch has `batch_size // num_samples` prompts. If
            the completions of one prompt don't fit, they are sampled in several calls.
        pass_at (`list[int]`, *optional*, defaults to `[1]`):
            Values of `k` for pass@k, at most `num_samples`.
        majority_at (`list[int]`, *optional*):
            Values of `k` for majority@k, at most `num_samples`. By default those of `pass_at`, except 1.
        correct_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest value of the first reward function at which a completion counts as correct.
        group_by (`str`, *optional*):
            Column for a separate accuracy per value, such as `"task"` of MMAU.
        max_tool_calling_iterations (`int`, *optional*):
            Maximum turns of a completion that call tools. By default the trainer's maximum; without a trainer, only
            the length of the completion limits the turns.
        max_tool_media (`int`, *optional*):
            Maximum media that tools return in a completion. By default the trainer's maximum; without a trainer, no
            limit.
        max_context_media (`int`, *optional*):
            Maximum media that the policy reads at a time while it calls tools. By default the trainer's maximum;
            without a trainer, no limit.
        ablate (`str`, *optional*):
            `"audio"`, `"image"` or `"video"`: rows with such a medium are answered again without it, to measure how
            much it contributes to the accuracy. A replacement of the same duration and size takes its place.
        ablate_with (`str`, *optional*, defaults to `"blank"`):
            View that replaces the medium, see [`~views.VIEWS`]: `"blank"` is silence or grey, `"other_row"` another
            row's medium. Settings of a view go in brackets, as in `"mask_patches(ratio=0.5)"`.
        confidence (`float`, *optional*, defaults to `0.95`):
            Level of the confidence intervals.
        speech_decoder (`str` or `Callable`, *optional*):
            Decoder of completions that are codes of an audio codec, see [`MultimodalGRPOConfig`]. By default the
            trainer's decoder, if there is a trainer.
        speech_tokens (`str`, *optional*):
            The tokens that stand for codes, see [`MultimodalGRPOConfig`].
        seed (`int`, *optional*, defaults to `0`):
            Sampling seed. Each batch derives its own seed from it and from its index.
        ignored_media_columns (`list[str]`, *optional*):
            Columns with media that only reward functions read, see [`MultimodalGRPOConfig`]. By default the trainer's
            columns, if there is a trainer.
        on_media_error (`str`, *optional*):
            What happens to an unreadable row: `"raise"` ends the evaluation with an error that names the row, `"skip"`
            excludes it from all metrics. By default the trainer's setting, or `"raise"` without a trainer.
        min_pixels (`int`, *optional*):
            Fewest pixels of images and frames, see [`MultimodalGRPOConfig`]. The default of this option, `max_pixels`,
            `video_fps`, `max_frames` and `use_audio_in_video` is the trainer's setting, if there is a trainer.
        max_pixels (`int`, *optional*):
            Most pixels of images and frames.
        video_fps (`float`, *optional*):
            Frames per second that are sampled from videos.
        max_frames (`int`, *optional*):
            Most frames of a video.
        use_audio_in_video (`bool`, *optional*):
            Whether the model hears the sound of a video with its frames.

    Raises:
        `ValueError`: If a value is out of range.
    """

    num_samples: Annotated[int, "[1, inf)"] = 1
    temperature: Annotated[float, "[0, inf)"] = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: Annotated[int, "[1, inf)"] = 256
    batch_size: Annotated[int, "[1, inf)"] = 8
    pass_at: list[int] = field(default_factory=lambda: [1])
    majority_at: list[int] | None = None
    correct_threshold: float = 1.0
    group_by: str | None = None
    max_tool_calling_iterations: Annotated[int | None, "[0, inf]"] = None
    max_tool_media: Annotated[int | None, "[0, inf]"] = None
    max_context_media: Annotated[int | None, "[1, inf]"] = None
    ablate: Literal["image", "audio", "video"] | None = None
    ablate_with: str = "blank"
    confidence: Annotated[float, "(0, 1)"] = 0.95
    speech_decoder: str | None = None
    speech_tokens: Annotated[str | None, Needs("speech_decoder")] = None
    seed: int = 0
    ignored_media_columns: list[str] | None = None
    on_media_error: Literal["raise", "skip"] | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    max_frames: int | None = None
    use_audio_in_video: bool | None = None

    def __post_init__(self):
        check_values(self)
        if self.majority_at is None:
            self.majority_at = [k for k in self.pass_at if k > 1]
        raise_first(_conflicts_of_samples(self))
        check_ignored(self.ignored_media_columns)
        MediaRules(**budgets_of(self))  # the constructor checks the budgets
