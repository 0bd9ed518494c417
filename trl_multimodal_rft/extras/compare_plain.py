# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
`trl-multimodal-rft compare --plain METHOD`: updates of the user's own run, beside those of the plain step.

After the last micro-batch of each update, the plain step ([`plain`]) gets the update's rows as token ids and media
tensors, and a copy of the model in float64 whose classes are transformers' own. It computes loss, advantages and
gradient with one forward pass per completion.
"""

import copy
import io
import itertools
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import ModelOutput

from .. import trainers
from ..algorithms.advantages import estimate_advantages
from ..algorithms.losses import LossInputs, Normalizer
from ..algorithms.losses import grpo_loss as registered_loss
from ..cli.arguments import parse
from ..cli.commands import script_of
from ..cli.inputs import trainer_inputs
from ..cli.options import Parser
from ..cli.training import script_run
from ..encoding.prompts import EncodedPrompt
from ..models.modes import fix_batch_norms, has_dropout
from ..models.wrapped import replaced, unwrapped
from ..plain.dpo import dpo_loss
from ..plain.forward import Completion, descend, log_distributions, log_probabilities, sampled
from ..plain.grpo import group_advantages, grpo_loss
from ..plain.kto import kto_loss
from ..plain.reward import reward_loss
from ..plain.rloo import leave_one_out_advantages, rloo_loss
from ..plain.sft import sft_loss
from ..progress import announce
from ..reporting.console import CompactLogCallback
from ..rollout.rollout import Rollout
from ..trainers.grpo.config import MultimodalGRPOConfig
from ..trainers.grpo.trainer import MultimodalGRPOTrainer
from .compare import NOTHING_COMPARED


if TYPE_CHECKING:
    from peft import PeftModel


# By the dtype of the run, the largest difference, as a share of the value if it is above 1; a gradient's is its share
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# Options of methods that don't change what an update computes from its rows: of rows, sampling, packing and logs
_SAME_UPDATE = """
    model_init_kwargs trust_remote_code num_generations num_generations_eval max_completion_length shuffle_dataset
    ds3_gather_for_generation pad_to_multiple_of generation_batch_size steps_per_generation top_p top_k min_p
    generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged log_completions
    log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo max_tokens_per_microbatch
    freeze learning_rates audio_overlong ignored_media_columns special_tokens_in_text media_prefetch on_media_error
    media_rules media_dir min_pixels max_pixels video_fps max_frames use_audio_in_video offload_during_generation
    media_contribution_steps self_check difficulty_sampling balance_ranks soft_overlong_cache disable_dropout
    max_skipped_rows packing_shuffle
    max_length truncation_mode dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token
    chat_template_path activation_offloading completion_only_loss eval_packing packing_strategy router_aux_loss_coef
"""
# Options that the plain step of a method takes, or that the registered loss and estimator take in its place
_TAKEN = {
    "grpo": """
        packing temperature beta num_iterations reward_weights scale_rewards loss_type epsilon epsilon_high delta
        importance_sampling_level use_bias_correction_kl advantage_estimator kl_estimator off_policy_mask_threshold
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
    """,
    "rloo": "packing temperature beta num_iterations reward_weights epsilon",
    "sft": "",
    "dpo": "packing beta",
    "kto": "packing beta desirable_weight undesirable_weight",
    "reward": "packing",
}
# Options of transformers that change an update
_CHANGES_UPDATE = "label_smoothing_factor neftune_noise_alpha fp16 use_liger_kernel deepspeed fsdp torch_compile"


def _refused(option: str) -> ValueError:
    return ValueError(f"The plain step knows no {option}, so this run can't be compared with it; leave it out.")


def plain_copy(model: nn.Module) -> PreTrainedModel:
    """Returns a copy in float64 with transformers' own forward, where a trainer's model has faster functions."""
    base = unwrapped(None, model)
    config = type(base.config).from_dict(base.config.to_dict())
    copied = type(base)._from_config(config, dtype=torch.float64)
    if base is not model:  # within an adapter
        configs = cast("PeftModel", model).peft_config
        if len(configs) > 1:
            raise _refused(f"second adapter ({', '.join(configs)})")
        copied = cast("PeftModel", type(model)(copied, copy.deepcopy(configs["default"])))
    copied = cast(PreTrainedModel, cast(nn.Module, copied).double().eval().to(base.device))
    copied.load_state_dict(model.state_dict())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in copied.named_parameters():
        parameter.requires_grad_(name in trained)
    return copied


def _row(prompt: EncodedPrompt, ids: torch.Tensor, device: torch.device, reward: float = 0.0) -> Completion:
    """Returns a completion of a trainer for the plain step."""
    has_masks = any(values.dim() > 1 for values in prompt.token_fields.values())
    if len(prompt.contexts) > 1 or len(prompt.parts) > 1 or has_masks:
        raise _refused("media after a prompt, and no cross-attention")
    tokens = {"input_ids": prompt.input_ids, "attention_mask": torch.ones_like(prompt.input_ids)}
    row = {name: values[None] for name, values in {**tokens, **prompt.token_fields}.items()} | prompt.media
    return Completion({name: values.to(device) for name, values in row.items()}, ids.to(device), reward)


def _answer(sequence: EncodedPrompt, labels: torch.Tensor, device: torch.device) -> Completion:
    """Returns the learned end of a supervised row."""
    n = len(sequence)
    is_learned = (labels[:n] != -100).cpu()
    start = n - int(is_learned.sum())
    if not is_learned[start:].all() or any(values[start:].any() for values in sequence.token_fields.values()):
        raise _refused("rows that learn other tokens than a last answer without media")
    return _row(sequence.part(slice(start)), sequence.input_ids[start:], device)


@dataclass
class Line:
    """A quantity of an update in the run and in the plain step, the share by which they differ, and its limit."""

    name: str
    ours: float
    plain: float
    difference: float
    limit: float

    @property
    def agrees(self) -> bool:
        """`False` for a difference of NaN, too."""
        return self.difference <= self.limit

    def __str__(self) -> str:
        verdict = "agree" if self.agrees else "DIFFER"
        return f"{self.name:44}{self.ours:>14.6g}{self.plain:>14.6g}{self.difference:>12.2g}  {verdict}"


class PlainComparison:
    """Comparison of a trainer's updates with the plain step."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.args = cast(MultimodalGRPOConfig, trainer.args)  # or the config of another method
        self.policy = cast(nn.Module, trainer.model)
        self.method = self._method()
        dtype = torch.bfloat16 if self.args.bf16 else next(self.policy.parameters()).dtype
        self.limit = _TOLERANCES.get(dtype, max(_TOLERANCES.values()))
        fix_batch_norms(self.policy.modules())  # the plain step has one row at a time, whose statistics are others
        self.model = plain_copy(self.policy)
        self.reference: PreTrainedModel | None = None
        if self.method in ("dpo", "kto") or getattr(self.args, "beta", 0) != 0:
            reference = cast(MultimodalGRPOTrainer, trainer).ref_model
            self.reference = self._adapted if reference is None else plain_copy(reference)
        self.updates: list[list[Line]] = []
        self.loss = 0.0
        self.micro_batches: list[Any] = []
        # Completions with their advantages, by group and tokens, in the order in which they were sampled
        self.sampled: dict[tuple, deque[tuple[Completion, torch.Tensor]]] = {}
        self.n_tokens = 0
        self.has_unscorable = False

    def _method(self) -> str:
        """Returns the run's method. Raises `ValueError` about the first thing that its plain step doesn't know."""
        trainer = self.trainer
        args: TrainingArguments = trainer.args
        configs = {script_of(name).ARGUMENTS[1]: name for name in _TAKEN}
        if type(args) not in configs:
            raise _refused(f"`{type(args).__name__}`")
        method = configs[type(args)]
        of_transformers = {spec.name for spec in fields(TrainingArguments)} - {*_CHANGES_UPDATE.split()}
        known = {*_SAME_UPDATE.split(), *_TAKEN[method].split(), *of_transformers}
        for spec in fields(args):
            default = spec.default if spec.default_factory is MISSING else spec.default_factory()
            is_known = spec.name in known or spec.name.startswith("vllm_")
            if not is_known and getattr(args, spec.name) not in (default, None):
                raise _refused(f"`{spec.name}={getattr(args, spec.name)!r}`")
        if getattr(args, "use_vllm", False) and self.args.vllm_importance_sampling_correction:
            raise _refused("`vllm_importance_sampling_correction`")
        for name in ("tools", "environment_factories", "rollout_func", "compute_loss_func"):
            if getattr(trainer, name, None):
                raise _refused(f"`{name}`")
        for name in ("training_step", "compute_loss", "_compute_loss", "_loss"):
            owner = next((cls for cls in type(trainer).__mro__ if name in vars(cls)), Trainer)
            if owner.__module__.partition(".")[0] not in (__name__.partition(".")[0], "trl", "transformers"):
                raise _refused(f"`{owner.__name__}.{name}`")
        if trainer.accelerator.num_processes > 1:
            raise _refused("second process")
        if getattr(unwrapped(None, self.policy), "quantization_method", None) is not None:
            raise _refused("quantization")
        if getattr(trainer, "aux_loss_enabled", False):
            raise _refused("`output_router_logits`")
        if has_dropout(self.policy):
            raise _refused("dropout (`disable_dropout=True`, or `lora_dropout=0`)")
        return method

    @property
    def _adapted(self) -> PreTrainedModel:
        """The policy without its adapter, as a model that the plain step calls."""

        def forward(**row: torch.Tensor) -> ModelOutput:
            with cast("PeftModel", self.model).disable_adapter():
                return self.model(**row)

        return cast(PreTrainedModel, forward)

    def train(self, n_updates: int) -> None:
        """Trains for a number of updates, and compares each of them."""
        trainer = self.trainer
        trainer.args.max_steps = n_updates
        roll_out: Callable | None = getattr(trainer, "_generate_and_score_completions", None)
        compute_loss: Callable = trainer.compute_loss
        training_step: Callable = trainer.training_step

        def rolled_out(inputs: list) -> Rollout:
            assert roll_out is not None
            rollout = roll_out(inputs)
            self._read_rollout(rollout)
            return rollout

        def computed_loss(
            model: nn.Module, inputs: Rollout | dict[str, Any], **options: torch.Tensor | int | None
        ) -> torch.Tensor:
            self.micro_batches.append(inputs)
            return compute_loss(model, inputs, **options)

        def trained(model: nn.Module, inputs: list, n_items: torch.Tensor | int | None = None) -> torch.Tensor:
            loss = training_step(model, inputs, n_items)
            self.loss += loss.item()
            if trainer.accelerator.sync_gradients:
                self._compare()
            return loss

        methods: dict[str, Callable] = {"compute_loss": computed_loss, "training_step": trained}
        methods |= {} if roll_out is None else {"_generate_and_score_completions": rolled_out}
        with replaced(trainer, **methods):
            trainer.train()

    # Completions

    def _read_rollout(self, rollout: Rollout) -> None:
        trainer = cast(MultimodalGRPOTrainer, self.trainer)
        self.model.load_state_dict(self.policy.state_dict())
        logged = [list(values)[-len(rollout.prompts) :] for values in trainer._logs["rewards"].values()]
        by_function = torch.tensor(logged, dtype=torch.float64).T
        is_unscorable = by_function.isnan().all(1)
        self.has_unscorable = bool(is_unscorable.any())
        if self.has_unscorable and self.method == "rloo":
            raise _refused("completion without a reward")
        weighted = (by_function * trainer.reward_weights.double().cpu()).nansum(1)
        rewards = torch.where(is_unscorable, torch.nan, weighted)
        completions = []
        for i, prompt in enumerate(rollout.prompts):
            ids = rollout.completion_ids[i][rollout.completion_mask[i].bool()]
            completions.append(_row(prompt, ids, self.model.device, rewards[i].item()))
        temperature = self.args.temperature
        sampled(self.model, completions, temperature)
        self.n_tokens = sum(len(completion.ids) for completion in completions)
        group_ids = rollout.group_ids.tolist()
        groups = defaultdict(list)
        for group_id, completion in zip(group_ids, completions, strict=True):
            groups[group_id].append(completion)
        if self.method == "rloo":
            options = {"beta": self.args.beta, "temperature": temperature}
            advantages = torch.cat(leave_one_out_advantages([*groups.values()], self.reference, **options))
        elif self._has_papers_advantages:
            advantages = torch.cat([group_advantages([c.reward for c in group]) for group in groups.values()])
        else:
            advantages = self._estimated(completions, rewards, by_function, rollout.group_ids)
        self.sampled = defaultdict(deque)
        for group_id, completion, advantage in zip(group_ids, completions, advantages, strict=True):
            self.sampled[group_id, tuple(completion.ids.tolist())].append((completion, advantage))

    @property
    def _has_papers_advantages(self) -> bool:
        args = self.args
        return (args.advantage_estimator, args.scale_rewards) == ("group_norm", "group") and not self.has_unscorable

    def _estimated(
        self, completions: list[Completion], rewards: torch.Tensor, by_function: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """Returns the advantages of the run's estimator, which may be the user's."""
        args = self.args
        if args.reads_steps:
            raise _refused(f"`advantage_estimator={args.advantage_estimator!r}`")
        estimator = args.advantage_estimator
        estimated = estimate_advantages(
            estimator if callable(estimator) else args.estimator,
            rewards=rewards,
            rewards_per_func=by_function,
            group_ids=group_ids.cpu(),
            mask=pad_sequence([torch.ones_like(completion.ids) for completion in completions], True).cpu(),
            old_logps=pad_sequence([completion.old for completion in completions], True).cpu(),
            ref_logps=None if self.reference is None else self._of_reference(completions).cpu(),
            kl_coef=args.beta if args.kl_in_reward else 0.0,
            scale=args.scale_rewards,
        )
        return estimated.double()

    @torch.no_grad()
    def _of_reference(self, completions: Sequence[Completion]) -> torch.Tensor:
        """Returns the reference's log-probabilities, padded."""
        reference = cast(PreTrainedModel, self.reference)
        rows = [log_probabilities(reference, completion, self.args.temperature) for completion in completions]
        return pad_sequence(rows, True)

    def _rows_of(self, micro_batch: Rollout) -> list[tuple[Completion, torch.Tensor]]:
        """Returns the completions of a micro-batch and their plain advantages, in its order."""
        rows = []
        for i, group_id in enumerate(micro_batch.group_ids.tolist()):
            ids = micro_batch.completion_ids[i][micro_batch.completion_mask[i].bool()]
            equal = self.sampled[group_id, tuple(ids.tolist())]
            rows.append(equal[0])
            equal.rotate(-1)
        return rows

    # An update

    def _compare(self) -> None:
        self.model.load_state_dict(self.policy.state_dict())
        name = "loss, paper's"
        lines = []
        if self.method in ("grpo", "rloo"):
            rows = [self._rows_of(micro_batch) for micro_batch in self.micro_batches]
            lines.append(self._advantages_line(rows))
            is_papers = self.method == "rloo" or self._has_papers_loss
            name = name if is_papers else f"loss, {self.args.loss.name!r} on plain log-probabilities"
            loss = self._papers_loss(rows) if is_papers else self._registered_loss(rows)
        else:
            loss = torch.stack([*map(self._supervised_loss, self.micro_batches)]).sum()
        gradients = descend(self.model, loss, 0.0)
        actual = {name: p.grad for name, p in self.policy.named_parameters() if p.grad is not None}
        zero = torch.zeros((), dtype=torch.float64)
        differences = {key: gradients.get(key, zero) - actual.get(key, zero) for key in {*gradients, *actual}}
        plain_norm = _norm(gradients)
        share = _norm(differences) / plain_norm if plain_norm else _norm(differences)
        lines.append(self._line(name, self.loss, loss.item()))
        lines.append(Line("gradient, norm", _norm(actual), plain_norm, share, self.limit))
        self.updates.append(lines)
        self.loss = 0.0
        self.micro_batches = []

    def _line(self, name: str, ours: float, plain: float) -> Line:
        return Line(name, ours, plain, abs(ours - plain) / max(1, abs(plain)), self.limit)

    def _advantages_line(self, rows: list[list[tuple[Completion, torch.Tensor]]]) -> Line:
        """Returns the advantages that differ most."""
        pairs = []
        for micro_batch, rows_of_batch in zip(self.micro_batches, rows, strict=True):
            for ours, (completion, plain) in zip(micro_batch.advantages.double().cpu(), rows_of_batch, strict=True):
                n = len(completion.ids)
                pairs += zip(ours.reshape(-1)[:n].tolist(), plain.reshape(-1)[:n].tolist(), strict=True)
        name = "advantages, " + ("paper's" if self.method == "rloo" or self._has_papers_advantages else "estimator's")
        return max((self._line(name, *pair) for pair in pairs), key=lambda line: line.difference)

    @property
    def _has_papers_loss(self) -> bool:
        args = self.args
        return (
            self._has_papers_advantages
            and args.loss.spelling in ("grpo", "dapo")
            and args.epsilon_high in (None, args.epsilon)
            and args.delta is None
            and args.off_policy_mask_threshold is None
            and args.importance_sampling_level == "token"
            and (args.beta == 0 or args.kl_estimator == "k3")
            # An update has whole groups, and the mean over tokens is that of the update
            and args.steps_per_generation == len(self.micro_batches)
        )

    def _papers_loss(self, rows: list[list[tuple[Completion, torch.Tensor]]]) -> torch.Tensor:
        args = self.args
        every = [*itertools.chain.from_iterable(rows)]
        if self.method == "rloo":
            groups = [[completion] for completion, _ in every]
            advantages = [advantage[None] for _, advantage in every]
            return rloo_loss(self.model, groups, advantages, epsilon=args.epsilon, temperature=args.temperature)
        by_prompt = defaultdict(list)
        group_ids = torch.cat([micro_batch.group_ids for micro_batch in self.micro_batches]).tolist()
        for group_id, (completion, _) in zip(group_ids, every, strict=True):
            by_prompt[group_id].append(completion)
        return grpo_loss(
            self.model,
            [*by_prompt.values()],
            self.reference,
            epsilon=args.epsilon,
            beta=args.beta,
            corrects_kl=args.use_bias_correction_kl,
            loss_type=args.loss.name,
            temperature=args.temperature,
        )

    def _registered_loss(self, rows: list[list[tuple[Completion, torch.Tensor]]]) -> torch.Tensor:
        """Returns the loss of the run's policy loss, which may be the user's, on the plain log-probabilities."""
        args = self.args
        n = len(self.micro_batches)
        normalizer = Normalizer(n, args.max_completion_length, self.n_tokens * n / args.steps_per_generation)
        losses = []
        for rows_of_batch in rows:
            completions = [completion for completion, _ in rows_of_batch]
            logps = []
            entropies = []
            for completion in completions:
                distributions = log_distributions(self.model, completion, args.temperature)
                logps.append(distributions.gather(1, completion.ids[:, None])[:, 0])
                entropies.append(-(distributions.exp() * distributions).sum(-1).detach())
            n_columns = max(map(len, logps))
            advantages = torch.stack([advantage for _, advantage in rows_of_batch])
            inputs = LossInputs(
                pad_sequence(logps, True),
                pad_sequence([completion.old for completion in completions], True),
                (advantages if advantages.dim() == 1 else advantages[:, :n_columns]).to(self.model.device),
                pad_sequence([torch.ones_like(completion.ids) for completion in completions], True),
                entropies=pad_sequence(entropies, True),
                ref_logps=self._of_reference(completions) if self.reference and not args.kl_in_reward else None,
            )
            options = args.loss_options()
            losses.append(registered_loss(args.loss, inputs, options, normalizer, kl_coef=args.beta).loss)
        return torch.stack(losses).sum()

    def _supervised_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Returns a micro-batch's part of the loss of an update."""
        n = len(batch["sequences"])
        args = self.args
        if self.method == "sft":
            labels = [micro_batch["labels"] for micro_batch in self.micro_batches]
            n_tokens = sum(int((values != -100).sum()) for values in labels)
            rows = zip(batch["sequences"], batch["labels"], strict=True)
            answers = [_answer(sequence, values, self.model.device) for sequence, values in rows]
            return sft_loss(self.model, answers) * sum(len(answer.ids) for answer in answers) / n_tokens
        if not torch.equal(batch.get("learned", batch["completion_mask"]), batch["completion_mask"]):
            raise _refused("completions of which only a part is learned")
        completions = [
            _row(prompt, ids[mask.bool()], self.model.device)
            for prompt, ids, mask in zip(
                batch["prompts"], batch["completion_ids"], batch["completion_mask"], strict=True
            )
        ]
        pairs = list(zip(completions[:n], completions[n : 2 * n], strict=True))
        reference = cast(PreTrainedModel, self.reference)
        if self.method == "dpo":
            loss = dpo_loss(self.model, reference, pairs, beta=args.beta)
        elif self.method == "kto":
            weights = {name: vars(args)[name] for name in ("desirable_weight", "undesirable_weight")}
            labels = batch["label"].tolist()
            loss = kto_loss(self.model, reference, completions[:n], labels, beta=args.beta, **weights)
        else:
            if batch["tie"].any():
                raise _refused("`tie`")
            loss = reward_loss(self.model, pairs, batch["margin"].tolist())
        return loss / len(self.micro_batches)

    # Findings

    def report(self) -> str:
        """Returns a table. Its last line is the verdict."""
        lines = [f"{'':44}{'run':>14}{'plain':>14}{'difference':>12}"]
        for i, update in enumerate(self.updates):
            lines += [f"update {i + 1}", *map(str, update)]
        if self.lacks_comparison:
            verdict = "No update has a gradient, so that nothing was compared; name rewards that differ in a group."
        elif self.differs:
            verdict = f"The run and the plain step DIFFER by more than {self.limit:.0e}."
        else:
            verdict = f"The run and the plain step agree within {self.limit:.0e}."
        return "\n".join([*lines, "", verdict])

    @property
    def lacks_comparison(self) -> bool:
        """`True` if no update has a gradient."""
        return not any(update[-1].plain for update in self.updates)

    @property
    def differs(self) -> bool:
        """`True` if a quantity differs."""
        return not all(line.agrees for line in itertools.chain(*self.updates))


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return sum(gradient.double().square().sum().item() for gradient in gradients.values()) ** 0.5


def run(words: Sequence[str]) -> None:
    """
    Runs `compare --plain` with the words after `compare`. Exits with status 1 if an update differs, and with
    [`NOTHING_COMPARED`] if none has a gradient.
    """
    parser = Parser("trl-multimodal-rft compare", add_help=False)
    parser.add_argument("--plain", choices=[*_TAKEN], required=True)
    parser.add_argument("--steps", type=int, default=2)
    chosen, others = parser.parse_known_args(words)
    if chosen.steps < 1:
        raise ValueError(f"`--steps` must be at least 1, got {chosen.steps}.")
    script = script_of(chosen.plain)
    script_args, training_args, model_args = parse(script.ARGUMENTS, others)
    if training_args.resume_from_checkpoint:
        raise _refused("`resume_from_checkpoint`")
    script_args.dry_run = True
    training_args.eval_strategy = IntervalStrategy.NO
    training_args.disable_tqdm = True
    if hasattr(training_args, "disable_dropout"):
        training_args.disable_dropout = True
    with script_run(script_args, training_args):
        announce("loading the model")
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            inputs = trainer_inputs(script_args, training_args, model_args)
            trainer = getattr(trainers, f"{script.prefix}Trainer")(**inputs)
            trainer.remove_callback(CompactLogCallback)
            comparison = PlainComparison(trainer)
            announce("training")
            comparison.train(chosen.steps)
    print(f"{model_args.model_name_or_path} on {script_args.dataset_name}: {chosen.plain}, {trainer.args.device}")
    print(comparison.report())
    if comparison.lacks_comparison:
        raise SystemExit(NOTHING_COMPARED)
    if comparison.differs:
        raise SystemExit(1)
