# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards from a model that reads the prompt with its media."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple, cast

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..data.reading.refs import MediaRef, iter_refs
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.columns import has_media, read_messages, rows_to_messages, strip_media
from ..data.rows.features import as_encoded
from ..data.rows.names import MEDIA_COLUMNS
from ..encoding.join import common_start, join_media, padded, same_prompt
from ..encoding.media import decode_media
from ..encoding.messages import write_chat
from ..encoding.processors import check_processor, tokenizer_of
from ..encoding.prompts import EncodedPrompt, check_ids, placeholder_tokens, processor_outputs, prompt_position_ids
from ..families import TOKEN_FIELDS, family_of, input_modalities
from ..forward.attention import install_prefix_attention
from ..forward.encoders import is_sharded
from ..forward.logprobs import completion_rewards
from ..forward.masks import sharing_obstacle
from ..forward.scores import ScoreRequest
from ..modalities import MODALITIES
from ..models.reward_model import as_reward_model, load_trained_reward_model
from ..models.wrapped import unwrapped as unwrapped_model
from .calls import Argument


def rows_of_batch(prompts: list, columns: dict[str, Any], further: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns rows with the prompt and `further` columns, and with the media columns if the prompt holds no media."""
    rows = []
    for i, prompt in enumerate(as_encoded(prompts)):
        names = [*further, *(() if has_media(prompt) else MEDIA_COLUMNS)]
        rows.append({"prompt": prompt, **{name: as_encoded(columns[name][i]) for name in names if columns.get(name)}})
    return rows


class _Group(NamedTuple):
    """Completions of one prompt, which are scored in one forward pass of the prompt."""

    rows: Sequence[int]  # batch indices of the completions
    prompt: EncodedPrompt  # the tokens that all sequences of the group start with
    completions: list[list[int]]  # token ids behind `prompt`


class RewardModel:
    """
    A reward function, with TRL's signature, that scores completions with a reward model.

    The model gets prompt, completion and the media of both through its processor and chat template; its family may
    differ from the policy's. The model stays on its device, and runs in evaluation mode without gradients. Consecutive
    text completions of one prompt share the prompt's decoded media and, where the model allows it, the prompt's
    encoding and forward pass.

    Args:
        model (`torch.nn.Module`):
            Sequence classifier with one label, such as [`~transformers.Gemma3ForSequenceClassification`], also in
            a wrapper such as DDP; or a module that is called as `model(input_ids, attention_mask=..., **media)`, with
            the processor's names of token fields and media, and returns scores of shape `(B,)` or `(B, 1)`. Rows are
            right-padded, so the model must read the score at the last token of the attention mask.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The model's processing class, with a chat template (for messages). As in TRL, its padding token, or else
            its end-of-sequence token, becomes the padding token in the model's config.
        batch_size (`int`, *optional*, defaults to `8`):
            Completions per forward pass. Completions that share the pass of their prompt stay together.
        template_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            Handling of audio longer than the model's window: `"raise"` or `"truncate"`.

    Raises:
        [`MediaError`]: When called, if a medium can't be decoded, if the model or its processor doesn't support the
            medium's modality, or if the chat template writes no placeholder for it. The message names the row.
        `ValueError`: If the processor pads audio on the wrong side; when called, if the model doesn't return one score
            per row.

    Example:
    ```python
    reward = RewardModel.from_pretrained("path/to/reward-model")
    trainer = MultimodalGRPOTrainer(reward_funcs=[reward, format_reward], ...)
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        template_kwargs: dict[str, Any] | None = None,
        audio_overlong: Literal["raise", "truncate"] = "raise",
    ):
        check_processor(processor)
        self.model = model
        self.processor = processor
        self.batch_size = batch_size
        self.template_kwargs = template_kwargs or {}
        self.audio_overlong = audio_overlong
        unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
        pretrained = [module for module in unwrapped.modules() if isinstance(module, PreTrainedModel)]
        self.config = pretrained[0].config if pretrained else PreTrainedConfig()
        self.__name__ = self.config._name_or_path.split("/")[-1] or type(unwrapped).__name__
        # The arguments of `forward` don't show the modalities, since some classes accept arguments that they ignore
        self._modalities = {
            modality
            for modality in MODALITIES
            if not pretrained or any(modality in input_modalities(m) for m in pretrained)
        }
        tokenizer = tokenizer_of(processor)
        # `self` can stand for a model here, because `placeholder_tokens` reads only its attribute `config`
        self._placeholders = placeholder_tokens(self, processor)  # pyrefly: ignore[bad-argument-type]
        self._pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        # Sequence classifiers read the score at the last token that isn't the padding token of their config. So the
        # config must name the token that rows are padded with.
        self.config.get_text_config().pad_token_id = self._pad_id
        self._template_options = {"add_generation_prompt": False, **self.template_kwargs}
        self._group_model = _model_for_groups(unwrapped)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        revision: str | None = None,
        trust_remote_code: bool = False,
        model_init_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> "RewardModel":
        """
        Loads a reward model, or the adapter of a reward model, with its processor.

        Args:
            name (`str`):
                Folder or repository of the Hub.
            revision (`str`, *optional*):
                Branch, tag or commit of the repository.
            trust_remote_code (`bool`, *optional*, defaults to `False`):
                Whether to run code from the repository.
            model_init_kwargs (`dict[str, Any]`, *optional*):
                Further arguments of `from_pretrained`.
            kwargs:
                Arguments of [`RewardModel`].

        Returns:
            [`RewardModel`]: The reward function.

        Raises:
            `ValueError`: If neither the model nor the adapter has a trained score.
        """
        return cls(*load_trained_reward_model(name, revision, trust_remote_code, **model_init_kwargs or {}), **kwargs)

    def __call__(
        self, prompts: list, completions: list, media_rules: MediaRules = DEFAULT_RULES, **columns: Argument
    ) -> list[float]:
        """Scores completions. Media columns apply to prompts without media. Trainers pass `media_rules`."""
        rows = rows_of_batch(prompts, columns)
        rules = media_rules.without_budgets()
        prompts = [row["prompt"] for row in rows_to_messages(rows, rules=rules)]
        completions = [
            answer
            if isinstance(answer, str) or not has_media(answer)
            else read_messages(answer, "completions", i, rules)
            for i, answer in enumerate(as_encoded(completions))
        ]
        sequences, groups = self._encode_batch(prompts, completions)
        scores = torch.empty(len(rows))
        self.model.eval()
        with torch.no_grad():
            for batch in self._batches(sequences):
                scores[batch] = self._score_sequences([sequences[i] for i in batch])
            groups_per_pass = max(1, self.batch_size // max((len(group.rows) for group in groups), default=1))
            for start in range(0, len(groups), groups_per_pass):
                batch = groups[start : start + groups_per_pass]
                rows_of_groups = [*chain.from_iterable(group.rows for group in batch)]
                scores[rows_of_groups] = self._score_groups(batch)
        return scores.tolist()

    def _encode_batch(self, prompts: list, completions: list) -> "tuple[dict[int, EncodedPrompt], list[_Group]]":
        """Returns sequences to forward whole, by batch index, and groups that share a forward pass of their prompt."""
        sequences = {}
        groups = []
        start = 0
        # Rows `start` to `stop - 1` have equal prompts. They are encoded when row `stop` has another prompt or doesn't
        # exist: the prompts a, a and b are encoded at `stop` 2 and 3. A row with media in its completion stays alone.
        for stop in range(1, len(prompts) + 1):
            completion_refs = [*iter_refs(completions[start]), *iter_refs(completions[stop : stop + 1])]
            if stop < len(prompts) and not completion_refs and same_prompt(prompts[stop], prompts[start]):
                continue
            rows = range(start, stop)
            prompt = prompts[start]
            refs = [*iter_refs(prompt), *iter_refs(completions[start])]
            start = stop
            media = self._load_media(refs)
            chats = [self._chat(prompt, completions[i]) for i in rows]
            first_sequence = self._encode_row(chats[0], refs, *media)
            group = None if self._group_model is None or len(rows) == 1 else self._group(rows, first_sequence, chats)
            if group is None:
                other_sequences = (self._encode_row(chat, refs, *media) for chat in chats[1:])
                sequences |= dict(zip(rows, [first_sequence, *other_sequences], strict=True))
            else:
                groups.append(group)
        return sequences, groups

    def _chat(self, prompt: str | list, completion: str | list) -> str | list:
        if isinstance(prompt, str):
            return cast(str, self._without_placeholders(prompt + cast(str, completion)))
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        return [self._without_placeholders(message) for message in prompt + answer]

    def _encode_row(
        self, chat: str | list, refs: list[MediaRef], decoded: dict[int, Any], processor_kwargs: dict[str, Any]
    ) -> EncodedPrompt:
        if isinstance(chat, str):
            call: Callable[..., Mapping[str, torch.Tensor]] = self.processor
            outputs = dict(call(text=[chat], add_special_tokens=False, return_tensors="pt"))
            outputs.pop("attention_mask")
        else:
            outputs = processor_outputs(chat, refs, self.processor, decoded, processor_kwargs, self._template_options)
        ids = outputs.pop("input_ids")[0]
        check_ids(ids, self.config, None)
        fields = {name: outputs.pop(name)[0] for name in TOKEN_FIELDS if name in outputs}
        # Without position ids, which only a shared forward of the prompt needs, see `_group`
        modalities = frozenset(ref.modality for ref in refs)
        return EncodedPrompt(ids, fields, outputs if refs else {}, ids.new_empty(1, 0), modalities=modalities)

    def _group(self, rows: Sequence[int], first_sequence: EncodedPrompt, chats: list[str | list]) -> "_Group | None":
        assert self._group_model is not None
        texts = [
            chat if isinstance(chat, str) else write_chat(chat, self.processor, "", **self._template_options)
            for chat in chats
        ]
        # With one placeholder per medium, while `first_sequence` has expanded placeholders
        unexpanded_ids = [tokenizer_of(self.processor)(text, add_special_tokens=False)["input_ids"] for text in texts]
        first_sequence.position_ids = prompt_position_ids(
            self._group_model, first_sequence.input_ids, first_sequence.media, first_sequence.token_fields
        )
        try:
            group = _Group(rows, *common_start(first_sequence, unexpanded_ids))
        except ValueError:  # the sequences don't have the same first tokens, or not the same media
            return None
        # If a completion has only padding tokens, its score is read at the prompt's last token. That token must then
        # be no padding token.
        return None if group.prompt.input_ids[-1] == self._pad_id else group

    def _load_media(self, refs: list[MediaRef]) -> tuple[dict[int, Any], dict[str, Any]]:
        """Decodes media, see [`decode_media`], after a check that the model and its processor take them."""
        for ref in refs:
            if ref.modality not in self._modalities or not isinstance(self.processor, ProcessorMixin):
                raise ref.error(
                    f"the reward model '{self.__name__}' with its {type(self.processor).__name__} takes no "
                    f"{ref.modality}; use a model that does, with its processor, or drop the column"
                )
        return decode_media(refs, self.processor, self.audio_overlong)

    def _without_placeholders(self, value: str | list | dict) -> str | list | dict:
        """Inserts a space into placeholder tokens in texts, so that they aren't encoded as placeholders."""
        if isinstance(value, str):
            for token in self._placeholders:
                value = value.replace(token, f"{token[0]} {token[1:]}")
        elif isinstance(value, list):
            value = [self._without_placeholders(item) for item in value]
        elif isinstance(value, dict):
            texts = {key: self._without_placeholders(value[key]) for key in ("content", "text") if key in value}
            value = {**value, **texts}
        return value

    def _batches(self, rows: dict[int, EncodedPrompt]) -> list[list[int]]:
        """If media must not be padded, a pass has media of equal shapes."""
        shape_groups: dict[tuple | None, list[int]] = {}
        needs_equal_shapes = family_of(self.config).isolate is not None
        for i, row in rows.items():
            shapes = tuple((name, tuple(value.shape[1:])) for name, value in sorted(row.media.items()))
            shape_groups.setdefault(shapes if needs_equal_shapes else None, []).append(i)
        size = self.batch_size
        batches = []
        for indices in shape_groups.values():
            batches += [indices[start : start + size] for start in range(0, len(indices), size)]
        return batches

    def _score_groups(self, groups: "list[_Group]") -> torch.Tensor:
        assert self._group_model is not None
        device = next(self.model.parameters()).device
        completions = []
        prompts = []
        for group in groups:
            completions += [torch.tensor(ids, dtype=torch.long) for ids in group.completions]
            prompts += [group.prompt] * len(group.rows)
        ids, mask = (values.to(device) for values in padded(completions))
        request = ScoreRequest(prompts, ids, mask, isolate=family_of(self._group_model).isolate)
        return completion_rewards(self.model, self._group_model, request)[:, 0].cpu()

    def _score_sequences(self, rows: list[EncodedPrompt]) -> torch.Tensor:
        """Returns the scores of whole sequences, `(len(rows),)`, from one forward of padded rows."""
        ids, mask = padded([row.input_ids for row in rows])
        ids = ids.masked_fill(mask == 0, self._pad_id)
        fields = {name: [row.token_fields[name] for row in rows] for name in rows[0].token_fields}
        inputs = {
            "attention_mask": mask,
            **{name: pad_sequence(values, batch_first=True) for name, values in fields.items()},
            **join_media(rows),
        }
        parameter = next(p for p in self.model.parameters() if p.is_floating_point())
        inputs = {
            name: value.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype)
            for name, value in inputs.items()
        }
        output = self.model(ids.to(parameter.device), **inputs)
        scores = output if isinstance(output, torch.Tensor) else output.logits
        if scores.shape not in ((len(rows),), (len(rows), 1)):
            raise ValueError(
                f"The reward model '{self.__name__}' returned scores of shape {tuple(scores.shape)} for {len(rows)} "
                "rows; it must return one for each (`num_labels=1`)."
            )
        return scores.view(-1).float().cpu()


def _model_for_groups(model: nn.Module) -> PreTrainedModel | None:
    """
    Returns a model that forwards a prompt once per group, with the modules of `model`, or `None` if completions can't
    share the prompt's forward. With sharded weights, they can't, since all ranks need equally many forward passes, but
    may have different numbers of groups.
    """
    base = unwrapped_model(None, model)
    if not isinstance(base, PreTrainedModel) or getattr(base, "score", None) is None or is_sharded(base):
        return None
    try:
        group_model = as_reward_model(base)
    except ValueError:  # several labels, or no generative model of its family
        return None
    if sharing_obstacle(group_model) is not None or family_of(group_model).token_field_fill:
        return None
    install_prefix_attention(group_model)
    return group_model


def text_reward_func(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
) -> Callable[..., list[float]]:
    """Returns a reward function of a text model. Texts such as `"<image>"` replace media."""

    def reward(prompts: list, completions: list, **columns: Argument) -> list[float]:
        reward_model = RewardModel(model, tokenizer, batch_size=len(prompts), template_kwargs=template_kwargs)
        return reward_model(strip_media(prompts), strip_media(completions))

    return reward
