# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`compare --plain` finds that runs compute what the plain step computes, and faults that are planted in runs."""

import pytest
from helpers.compared import drop_masks, verdicts
from helpers.plain_steps import image_pairs
from helpers.samplers import PseudoRandom
from helpers.trainer_utils import audio_rows, image_rows, load, make_trainer, saved, video_rows
from peft import LoraConfig

from trl_multimodal_rft import (
    MultimodalDPOTrainer,
    MultimodalGRPOTrainer,
    MultimodalKTOTrainer,
    MultimodalPPOTrainer,
    MultimodalRewardTrainer,
    MultimodalRLOOTrainer,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.algorithms import loss_types
from trl_multimodal_rft.algorithms.losses import LossOutput, importance_ratios, policy_loss
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.extras.compare_plain import PlainComparison


SAMPLED = {"sampler": PseudoRandom, "learning_rate": 0.05, "max_grad_norm": 0.1}


@pytest.fixture
def compared(tmp_path):
    def compare(trainer_class, family="qwen2_5_vl", rows=None, n=2, change=lambda trainer: None, **options):
        options = {**SAMPLED, **options}
        rows = image_rows() if rows is None else rows
        trainer = make_trainer(trainer_class, family, rows, tmp_path / "run", **options)
        change(trainer)
        comparison = PlainComparison(trainer)
        comparison.train(n)
        return comparison

    return compare


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows", "options"),
    [
        (MultimodalGRPOTrainer, "qwen2_5_vl", image_rows, {}),
        (MultimodalGRPOTrainer, "qwen2_audio", audio_rows, {"beta": 0.04, "num_iterations": 2}),
        (MultimodalGRPOTrainer, "qwen2_5_vl", video_rows, {"max_tokens_per_microbatch": 64, "loss_type": "grpo"}),
        (MultimodalRLOOTrainer, "qwen2_audio", audio_rows, {"num_iterations": 2}),
        # Micro-batches and updates with parts of groups
        (
            MultimodalRLOOTrainer,
            "qwen2_5_vl",
            image_rows,
            {"per_device_train_batch_size": 2, "steps_per_generation": 4},
        ),
    ],
    ids=["images", "sounds", "videos", "rloo of sounds", "rloo of images"],
)
def test_runs_are_those_of_the_paper(compared, trainer_class, family, rows, options):
    text = compared(trainer_class, family, rows(), **options).report()
    assert verdicts(text) == ["agree"] * 6 and text.count("paper's") == 4, text
    assert text.endswith("The run and the plain step agree within 1e-04.")


def test_an_adapter_is_compared_beside_its_base(compared):
    model, processor = load("qwen2_5_vl")
    objects = {"model": model, "processing_class": processor}
    objects["peft_config"] = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    text = compared(MultimodalRLOOTrainer, objects=objects).report()
    assert verdicts(text) == ["agree"] * 6, text


def test_several_updates_of_a_rollout_with_the_registered_loss(compared):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "steps_per_generation": 4}
    text = compared(MultimodalGRPOTrainer, n=4, beta=0.04, num_iterations=2, **options).report()
    assert verdicts(text) == ["agree"] * 12 and text.count("loss, 'dapo' on plain log-probabilities") == 4, text


def test_own_loss_and_estimator(compared):
    def halved(rewards, group_ids, **tensors):
        return (rewards - rewards.mean()) / 2

    def squared(inputs, options):
        ratios = importance_ratios(inputs, options)
        return LossOutput(-inputs.advantages[:, None] * ratios.square() / 2, {})

    try:
        policy_loss("squared_ratio", paper=None)(squared)
        text = compared(
            MultimodalGRPOTrainer, loss_type="squared_ratio", advantage_estimator=halved, num_iterations=2
        ).report()
    finally:
        loss_types.LOSSES.pop("squared_ratio", None)
    assert verdicts(text) == ["agree"] * 6 and "'squared_ratio' on plain" in text and "estimator's" in text, text


@pytest.mark.parametrize("trainer_class", [MultimodalDPOTrainer, MultimodalRewardTrainer])
def test_pairs(compared, trainer_class):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "reward": None, "sampler": None}
    assert verdicts(compared(trainer_class, rows=image_pairs(), **options).report()) == ["agree"] * 4


@pytest.mark.parametrize("trainer_class", [MultimodalKTOTrainer, MultimodalSFTTrainer])
def test_answers(compared, trainer_class):
    rows = image_pairs()
    rows = rows.add_column("completion", rows["chosen"]).remove_columns(["chosen", "rejected"])
    rows = rows.add_column("label", [True, False] * 4) if trainer_class is MultimodalKTOTrainer else rows
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "reward": None, "sampler": None}
    assert verdicts(compared(trainer_class, rows=rows, **options).report()) == ["agree"] * 4


def flipped(trainer):
    roll_out = trainer._generate_and_score_completions

    def with_wrong_sign(inputs):
        rollout = roll_out(inputs)
        rollout.advantages.neg_()
        return rollout

    trainer._generate_and_score_completions = with_wrong_sign


def test_a_wrong_sign_is_found(compared):
    text = compared(MultimodalGRPOTrainer, change=flipped).report()
    assert verdicts(text)[::3] == ["DIFFER"] * 2 and verdicts(text)[2::3] == ["DIFFER"] * 2, text
    assert text.endswith("The run and the plain step DIFFER by more than 1e-04.")


def test_a_wrong_factor_is_found(compared, monkeypatch):
    compute = MultimodalGRPOTrainer._compute_loss
    monkeypatch.setattr(MultimodalGRPOTrainer, "_compute_loss", lambda self, *args: 1.001 * compute(self, *args))
    monkeypatch.setattr(MultimodalGRPOTrainer._compute_loss, "__module__", MultimodalGRPOTrainer.__module__)
    assert verdicts(compared(MultimodalGRPOTrainer, n=1).report()) == ["agree", "DIFFER", "DIFFER"]


def test_a_dropped_mask_is_found(compared, monkeypatch):
    drop_masks(monkeypatch)
    assert verdicts(compared(MultimodalGRPOTrainer, n=1).report())[2] == "DIFFER"


def test_equal_rewards_prove_nothing(compared):
    equal = compared(MultimodalGRPOTrainer, reward=lambda completion_ids, **columns: [1.0] * len(completion_ids))
    assert "No update has a gradient" in equal.report() and equal.lacks_comparison


def test_nan_differs(compared):
    comparison = compared(MultimodalGRPOTrainer, n=1)
    assert not comparison.differs
    comparison.updates[0][0].difference = float("nan")
    assert comparison.differs and verdicts(comparison.report())[0] == "DIFFER"


class OwnLoss(MultimodalGRPOTrainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("trainer_class", "options", "message"),
    [
        (MultimodalGRPOTrainer, {"loss_view": "mask_patches(ratio=0.6, kl_coef=0.01)"}, "`loss_view='mask_patches"),
        (MultimodalGRPOTrainer, {"replay_buffer_size": 4}, "`replay_buffer_size=4`"),
        (MultimodalGRPOTrainer, {"top_entropy_quantile": 0.2}, "`top_entropy_quantile=0.2`"),
        (MultimodalGRPOTrainer, {"label_smoothing_factor": 0.1}, "`label_smoothing_factor=0.1`"),
        (MultimodalRLOOTrainer, {"normalize_advantages": True}, "`normalize_advantages=True`"),
        (OwnLoss, {}, "`OwnLoss.compute_loss`"),
        (MultimodalPPOTrainer, {}, "`MultimodalPPOConfig`"),
    ],
)
def test_what_the_plain_step_does_not_know_is_named(compared, trainer_class, options, message):
    with pytest.raises(ValueError, match="The plain step knows no ") as error:
        compared(trainer_class, **options)
    assert message in str(error.value)


@pytest.fixture
def words(tmp_path):
    folder = str(tmp_path / "images")
    image_rows().save_to_disk(folder)
    words = ["compare", "--plain", "grpo", "--steps", "1", "--model_name_or_path", str(saved("qwen2_5_vl"))]
    words += ["--dataset_name", folder, "--output_dir", str(tmp_path / "out"), "--max_completion_length", "8"]
    return [*words, "--num_generations", "4", "--reward_funcs", "helpers.trainer_utils.length_and_sum"]


def test_the_command(words, tmp_path, capsys):
    main(words)
    output = capsys.readouterr().out
    assert verdicts(output) == ["agree"] * 3 and "images: grpo, cpu" in output
    assert not (tmp_path / "out").exists()


def test_the_command_exits_with_status_1_if_it_finds_a_fault(words, capsys, monkeypatch):
    drop_masks(monkeypatch)
    with pytest.raises(SystemExit, match="1"):
        main([*words, "--self_check", "false"])  # otherwise the run falls back to padded rows
    assert verdicts(capsys.readouterr().out) == ["agree", "agree", "DIFFER"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--steps", "0"], "`--steps` must be at least 1, got 0"),
        (["--plain", "ppo"], "invalid choice: 'ppo'"),
        (["--kl_target", "0.1", "--beta", "0.1"], "The plain step knows no `kl_target=0.1`"),
        (["--dataset_name", "no.jsonl"], "no.jsonl"),
    ],
)
def test_wrong_input_of_the_command_is_one_line(words, changes, message, capsys):
    with pytest.raises(SystemExit):
        main([*words, *changes])
    errors = capsys.readouterr().err.splitlines()
    assert [line for line in errors if "compare: error" in line and message in line], errors
