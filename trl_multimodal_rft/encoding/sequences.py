# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sequences of tokens to learn, and pairs of a preferred and a rejected completion after the same prompt."""

from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel
from transformers.utils import logging
from trl.data_utils import common_prefix_length

from ..data.rows.pairs import COMPLETIONS
from .conversations import encode_prefix
from .join import common_start, continued_field
from .prompts import EncodedPrompt


logger = logging.get_logger(__name__)


@dataclass(eq=False)
class SupervisedSequence(EncodedPrompt):
    """A row of a supervised dataset as one sequence."""

    learned: torch.Tensor = field(kw_only=True)  # whether a token is in the loss, `(P,)`
    is_cut: bool = field(default=False, kw_only=True)  # whether the row had more tokens

    def example(self) -> tuple[list[int], list[int], None]:
        """Returns ids before the first learned token, learned ids, and `None`, as there is no rejected completion."""
        start = int(self.learned.int().argmax())
        return self.input_ids[:start].tolist(), self.input_ids[self.learned].tolist(), None

    def cut(self, n: int, *, from_end: bool = False) -> "SupervisedSequence":
        """
        Returns the first or last `n` tokens, with all media. In both cases, the positions are those of the first `n`
        tokens.
        """
        span = slice(-n, None) if from_end else slice(n)
        return replace(
            self,
            input_ids=self.input_ids[span],
            token_fields={name: value[span] for name, value in self.token_fields.items()},
            position_ids=self.position_ids[..., :n],
            learned=self.learned[span],
            is_cut=True,
            mask_cache={},
        )


@dataclass(frozen=True, eq=False)
class Side:
    """A completion of a row, and what is before it."""

    column: str  # column of the completion
    ids: list[int]
    answer: SupervisedSequence | None = None  # the completion if it holds media, with the mask of its learned tokens
    prompt: EncodedPrompt | None = None  # the prompt before it, if it isn't the row's
    is_counted: bool = True  # whether TRL counts it; it doesn't under a view, or for another row's completion

    @property
    def learned(self) -> torch.Tensor:
        """Mask of learned tokens, `(C,)`."""
        return torch.ones(len(self.ids), dtype=torch.bool) if self.answer is None else self.answer.learned


@dataclass(eq=False)
class PreferencePair(EncodedPrompt):
    """The prompt of a row, with its media, and the completions after it: mostly a preferred and a rejected one."""

    sides: list[Side] = field(kw_only=True)
    is_cut: bool = field(default=False, kw_only=True)  # whether the row had more tokens

    @property
    def counted_sides(self) -> list[Side]:
        return [side for side in self.sides if side.is_counted]

    @property
    def sides_with_media(self) -> list[Side]:
        return [side for side in self.counted_sides if side.answer is not None]

    @property
    def holds_media(self) -> bool:
        """Whether the prompt or a completion holds media."""
        return bool(self.modalities or self.sides_with_media)

    def example(self) -> tuple[list[int], list[int], list[int] | None]:
        """Returns ids of the prompt and of the row's own completions, with `None` if there is no rejected one."""
        completion, *rejected = (side.ids for side in self.counted_sides)
        return self.input_ids.tolist(), completion, next(iter(rejected), None)

    def prompt_before(self, side: Side) -> EncodedPrompt:
        return self if side.prompt is None else side.prompt

    def sequence(self, side: Side, model: PreTrainedModel) -> SupervisedSequence:
        """Returns the prompt, followed by the completion, which is learned."""
        prompt = self.prompt_before(side)
        if side.answer is None:
            return with_text(prompt, side.ids, model)
        encoded = encode_prefix(prompt, side.ids, [(0, side.answer)], model)
        return SupervisedSequence(**vars(encoded), learned=torch.arange(len(encoded)) >= len(prompt))

    def cut(self, n: int, model: PreTrainedModel, *, from_end: bool = False) -> "PreferencePair":
        """
        Returns a pair of text in which prompt and completion together have at most `n` tokens, the first or the last
        ones, as in TRL. If only tokens of a completion are left, its first one counts as the prompt.
        """

        def cut_side(side: Side) -> Side:
            if len(self) + len(side.ids) <= n:
                return side
            if not from_end:
                return replace(side, ids=side.ids[: max(n - len(self), 0)])
            sequence = self.sequence(side, model).cut(n, from_end=True)
            n_prompt = max(n - len(side.ids), 1)
            return replace(side, ids=sequence.input_ids[n_prompt:].tolist(), prompt=sequence.part(slice(n_prompt)))

        pair = replace(self, sides=list(map(cut_side, self.sides)))
        pair.is_cut = any(side not in self.sides for side in pair.counted_sides)
        return pair


def divided(prompt: EncodedPrompt, *texts: tuple[list[int], list[int]]) -> tuple[EncodedPrompt, list[list[int]]]:
    """
    Returns the prompt and the ids after it in each of `texts`, which hold ids of the prompt and of the whole. As in
    TRL, a completion begins where these differ, so tokens across the boundary belong to the completion.
    """
    n_common = min((common_prefix_length(*ids) for ids in texts), default=0)
    lost_ids = texts[0][0][n_common:] if texts else []
    shorter_prompt = prompt
    if lost_ids:
        logger.warning_once(
            "A prompt of text ends inside of a token, such as a space before the completion's first word. As in "
            "TRL, this token belongs to the completion, so the model learns after another context than it sees "
            "when it answers; end prompts where a token ends. Other rows may be alike, as this is said once."
        )
        shorter_prompt = prompt.part(slice(len(prompt) - len(lost_ids)))
    return shorter_prompt, [ids[n_common:] for _, ids in texts]


def with_text(prompt: EncodedPrompt, ids: list[int], model: PreTrainedModel) -> SupervisedSequence:
    """Returns a sequence of a prompt and the `ids` of text after it, in which the text is learned."""
    n = len(ids)
    return SupervisedSequence(
        input_ids=torch.cat([prompt.input_ids, torch.tensor(ids, dtype=torch.long)]),
        token_fields={
            name: continued_field(model, name, value[None], n)[0] for name, value in prompt.token_fields.items()
        },
        media=prompt.media,
        position_ids=torch.cat([prompt.position_ids, prompt.positions_after(n)], dim=-1),
        modalities=prompt.modalities,
        row=prompt.row,
        learned=torch.arange(len(prompt) + n) >= len(prompt),
    )


def with_common_start(chosen: EncodedPrompt, rejected: EncodedPrompt) -> PreferencePair:
    """Returns a pair of two texts, with their common first tokens as the prompt."""
    texts = [chosen.input_ids.tolist(), rejected.input_ids.tolist()]
    if texts[0][:1] != texts[1][:1]:
        raise no_prompt(f"row {chosen.row}")
    prompt, completions = common_start(chosen, texts)
    return PreferencePair(**vars(prompt), sides=list(map(Side, COMPLETIONS, completions)))


def no_prompt(label: str) -> ValueError:
    return ValueError(
        f"{label}: `chosen` and `rejected` start differently, and there is no prompt; give it as `prompt`."
    )


def check_learned(sequence: SupervisedSequence, label: str) -> None:
    """Raises a `ValueError` if no token after the first one is learned. The first token isn't predicted."""
    if not sequence.learned[1:].any():
        raise ValueError(
            f"{label} has nothing to learn: no token counts in the loss; remove the row, or correct its masks or "
            "labels."
        )
