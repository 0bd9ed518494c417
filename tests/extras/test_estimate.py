# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The estimates of `trl-multimodal-rft estimate` match the memory of a run."""

import functools
import json
from pathlib import Path

import pytest
import torch
from helpers.families import FAMILIES, MORE_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import image_rows, load, make_trainer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer, cli
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.extras import estimate, micro_batch
from trl_multimodal_rft.extras.estimate import memory
from trl_multimodal_rft.extras.micro_batch import Usage, Watch
from trl_multimodal_rft.models.modes import checkpoint_activations
from trl_multimodal_rft.models.parts import count_parts


CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
# Parameters of the published models, see https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct
PUBLISHED = {"3b": 3_754_622_976, "7b": 8_292_166_656, "32b": 33_452_718_336, "72b": 73_410_777_344}
TINY = ["--images", "1", "--image_size", "56", "--prompt_tokens", "60", "--completion_tokens", "24"]
TINY += ["--per_device_train_batch_size", "4", "--num_generations", "4"]


def parse(*argv):
    return cli._parser("estimate").parse_args([str(each) for each in argv])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one layer and one block of its encoder."""
    model, processor = load("qwen2_5_vl")
    del model.get_decoder().layers[1:], model.model.visual.blocks[1:]
    text = model.config.text_config
    vision = model.config.vision_config
    text.num_hidden_layers = 1
    text.layer_types = text.layer_types[:1]
    vision.depth = 1
    vision.fullatt_block_indexes = [0]
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@functools.cache
def measured(folder, *words):
    """Without gradient checkpointing or casts, which take `estimate` longer."""
    plain = ["--no-gradient_checkpointing", "--no-bf16"]
    return estimate.measure(parse("--model_name_or_path", folder, *TINY, *plain, *words))


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size):
    config, model_class = micro_batch.read_config(str(CONFIGS / f"qwen2_5_vl_{size}.json"))
    with torch.device("meta"):
        model = model_class(config)
        model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[size]


@pytest.mark.parametrize("checkpointing", ["--gradient_checkpointing", "--no-gradient_checkpointing"])
def test_update_takes_what_is_said(folder, checkpointing):
    """Runs the same micro-batch with data on the CPU."""
    args = parse("--model_name_or_path", folder, "--no-bf16", *TINY, checkpointing)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").train()
    if checkpointing == "--gradient_checkpointing":
        checkpoint_activations(model, {"use_reentrant": False})
    measured = micro_batch._measure_micro_batch(args, [model], 1, 4, has_media=True)
    said = estimate.measure(args)
    assert said.left_out is None and said.tokens == 60 + 4 * 24
    assert said.activations == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("saved", [[], ["merger"]])
def test_adapters_are_those_of_a_run(folder, saved, tmp_path):
    """On the layers that the options name, and with whole layers beside them."""
    words = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    words += ["--lora_modules_to_save", *saved] if saved else []
    model = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved))
    said = measured(folder, "--images", "0", *words)
    assert (said.trained, said.trained + said.frozen) == adapted.get_nb_trainable_parameters()
    assert said.trained < measured(folder, "--images", "0", *words[:3]).trained or saved


@pytest.mark.parametrize("frozen", [[], ["vision_tower"]])
def test_states_are_those_of_a_trainer(folder, tmp_path, frozen):
    words = ["--freeze", *frozen] if frozen else []
    args = parse("--model_name_or_path", folder, "--no-bf16", "--packing", "prefix", *TINY, *words)
    measured = estimate.measure(args)
    parts = memory(args, measured)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    seen = {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    objects = {"model": model, "callbacks": [Gradients()]}
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "optim": "adamw_torch", "objects": objects}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(4), tmp_path, freeze=frozen, **options)
    trainer.train()
    state = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["gradients and optimizer"] == pytest.approx(
        seen["gradients"] + sum(value.nbytes for value in state), rel=1e-3
    )
    assert measured.modules == count_parts(model)


def test_watch():
    outside = torch.ones(1000)
    with Watch([outside]) as live:
        made = outside + 1
        view = made.view(10, 100)
        made *= 2
        assert live.now == 4000
        del made
        assert live.now == 4000 and view.sum() == 4000
        del view
        assert live.now == 0 and live.peak >= 4000
        weight = torch.ones(1000, requires_grad=True)
        saved = weight.sigmoid().sigmoid().sum()  # autograd keeps both outputs
        assert live.now == 3 * 4000 + 4
        saved.backward()


def test_frozen_tower_keeps_nothing_and_has_no_backward(folder):
    """In the policy and in a separate critic."""
    whole, frozen, pattern = (
        measured(folder, "--trainer", "ppo", *more)
        for more in ((), ("--freeze", "vision_tower,projector"), ("--freeze", "model.visual"))
    )
    tower = whole.modules["vision_tower"][0] + whole.modules["projector"][0]
    assert frozen.frozen == frozen.frozen_critic == tower and whole.frozen == whole.frozen_critic == 0
    assert frozen.trained == whole.trained - tower and frozen.critic == whole.critic - tower
    assert frozen.activations < whole.activations and vars(pattern) == vars(frozen)


def numbers(**changes):
    fields = dict.fromkeys(Usage.__dataclass_fields__, 0)
    return Usage(**{**fields, "trained": 8_000, "cache": [], **changes})


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter", "buckets"),
    [("ddp", 16, 4), ("zero1", 2 + 2 + 12 / 8, 2), ("zero2", 2 + 2 / 8 + 12 / 8, 2), ("zero3", 2, 2), ("fsdp2", 2, 0)],
)
def test_strategies(strategy, bytes_per_parameter, buckets):
    args = parse("--model_name_or_path", "m", "--strategy", strategy, "--gpus", 8, "--no-bf16")
    parts = memory(args, numbers(activations=5))
    assert parts["weights"] + parts["gradients and optimizer"] == (bytes_per_parameter + buckets) * 8_000
    gathered = 2 * 8_000 if strategy == "zero3" else 0
    assert parts["activations"] == 5 + gathered
    assert parts["update"] == (bytes_per_parameter + buckets) * 8_000 + 5 + gathered


def test_reference_critic_adapters_and_vllm():
    words = ["--model_name_or_path", "m", "--no-bf16", "--beta", 0.1]
    both = memory(parse(*words, "--trainer", "ppo"), numbers(critic=7_000, frozen=50))
    assert both["weights"] == 4 * (2 * 8_050 + 7_000) and both["gradients and optimizer"] == 12 * 15_000
    adapted = parse(*words, "--use_peft", "--load_in_4bit", "--dtype", "bfloat16")
    parts = memory(adapted, numbers(trained=100, frozen=8_000, in_4_bits=8_000))
    assert parts["gradients and optimizer"] == 600
    assert parts["weights"] == pytest.approx(200 + 0.52 * 8_000, rel=0.01)
    shared = memory(parse("--model_name_or_path", "m", "--use_vllm", "--gpu_memory", 10), numbers())
    assert shared["sampling"] == 3 * 2**30 < shared["update"]
    asleep = memory(parse("--model_name_or_path", "m", "--use_vllm", "--vllm_enable_sleep_mode"), numbers())
    assert asleep["update"] < asleep["sampling"] < asleep["generation"]
    server = parse("--model_name_or_path", "m", "--use_vllm", "--vllm_mode", "server")
    assert memory(server, numbers())["sampling"] == 0


def test_states_wait_on_the_host():
    args = [parse("--model_name_or_path", "m", *more) for more in ((), ("--offload_during_generation",))]
    plain, ours = (memory(each, numbers(cache=[(1, None)])) for each in args)
    assert plain["generation"] - ours["generation"] == 12 * 8_000 and plain["update"] == ours["update"]


def test_copies_of_autocast():
    casts, plain = (
        memory(parse("--model_name_or_path", "m", "--trainer", "sft", *more), numbers())
        for more in ((), ("--no-bf16",))
    )
    assert casts["update"] - plain["update"] == 2 * 8_000


def test_prompts_are_held_once_while_sampling():
    """By hand, from the table of tokens: full attention and a window."""
    words = ["--model_name_or_path", "m", "--completion_tokens", 512, "--steps_per_generation", 1, "--no-bf16"]
    for group in (8, 64):
        for length in (1358, 16_000):
            sizes = ["--per_device_train_batch_size", group, "--num_generations", group, "--prompt_tokens", length]
            cache = memory(parse(*words, *sizes), numbers(cache=[(2, None), (3, 1024)]))["sampling"]
            assert cache == 2 * length + 3 * 1024 + group * (2 + 3) * 512


@pytest.mark.parametrize(
    ("usage", "options", "advice"),
    [
        ({"trained": 0, "frozen": 10**9}, [], "--load_in_4bit"),
        ({"trained": 10**9}, [], "--use_peft`"),
        ({"activations": 10**9}, [], "--gradient_checkpointing"),
        ({"cache": [(10**9, None)]}, [], "--steps_per_generation"),
    ],
)
def test_advice_is_about_the_largest_sum(usage, options, advice, monkeypatch):
    monkeypatch.setattr(estimate, "measure", lambda args: numbers(**usage))
    result = estimate.estimate(parse("--model_name_or_path", "m", "--gpu_memory", 0.5, *options))
    assert not result["fits"] and advice in result["advice"]


def test_supervised_rows(folder):
    """No rows share a prompt, and nothing is sampled."""
    sampled, supervised = (measured(folder, "--images", 0, *more) for more in ((), ("--trainer", "sft")))
    assert supervised.tokens == 4 * (60 + 24) and sampled.tokens == 60 + 4 * 24
    parts = memory(parse("--model_name_or_path", folder, *TINY, "--trainer", "sft"), supervised)
    assert parts["sampling"] == 0 and parts["peak"] == parts["update"]


def test_options_of_a_run(tmp_path, monkeypatch):
    """Takes the options of a recipe and of its launcher, unless the command line sets them."""
    seen = []
    (tmp_path / "run.yaml").write_text("model_name_or_path: a/b\naccelerate_config: hsdp\n")
    monkeypatch.setattr(estimate, "run", seen.append)
    main(["estimate", "--config", "qwen2_5_vl_7b/geometry3k_grpo"])
    main(["estimate", "--config=qwen2_5_vl_7b/geometry3k_grpo_qlora", "--num_generations", "4", "--gpus", "2"])
    (tmp_path / "sft.yaml").write_text("model_name_or_path: a/b\npacking: true\n")
    main(["estimate", "--config", str(tmp_path / "sft.yaml"), "--strategy", "zero2"])
    main(["estimate", "--config", str(tmp_path / "run.yaml")])
    first, second, third, replicated = map(vars, seen)
    assert (replicated["strategy"], replicated["gpus"]) == ("fsdp2", 8)  # of 16, which hold the shards twice
    assert first["model_name_or_path"] == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert (first["strategy"], first["gpus"]) == ("fsdp2", 8)
    sizes = first["per_device_train_batch_size"], first["steps_per_generation"], first["num_generations"]
    assert sizes == (20, 16, 5)
    assert first["use_vllm"] and (first["completion_tokens"], first["beta"], first["dtype"]) == (2048, 0.01, "float32")
    assert (second["strategy"], second["gpus"], second["num_generations"]) == ("single", 2, 4)
    assert second["load_in_4bit"] and second["use_peft"] and second["steps_per_generation"] == 8
    assert second["dtype"] == "bfloat16" and third["strategy"] == "zero2" and third["packing"] == "prefix"


def test_budget_and_batch(folder):
    many = ["--per_device_train_batch_size", "8", "--num_generations", "8"]
    whole = measured(folder, *many)
    budget = measured(folder, *many, "--max_tokens_per_microbatch", 160)
    assert (whole.tokens, budget.tokens) == (60 + 8 * 24, 60 + 4 * 24)
    assert budget.activations < 0.7 * whole.activations


def test_a_view_is_another_prompt(folder):
    plain = measured(folder)
    view = measured(folder, "--loss_view", "blank(kl_coef=0.01)")
    assert view.tokens == 2 * plain.tokens and view.activations > 1.5 * plain.activations


@pytest.mark.parametrize(
    "options",
    slow_but(
        [["--use_peft"], ["--trainer", "ppo"], ["--trainer", "ppo", "--shared_trunk"], ["--strategy", "fsdp2"]],
        ["--trainer", "ppo"],
    ),
)
def test_says_whether_it_fits(folder, capsys, options):
    main(["estimate", "--model_name_or_path", str(folder), *TINY, *options])
    output = capsys.readouterr().out
    assert "Fits into 90% of 80 GiB." in output and "peak" in output and "aren't counted" not in output


UNCOUNTED = {"qwen2_audio", "apertus1p5", "gemma4"}  # without a method that returns features, or with other inputs
OTHERS = ["qwen2_audio", "qwen2_5_omni", "gemma3", "qwen3_5", "internvl", "glm4v", "gemma4", "apertus1p5"]


@pytest.mark.parametrize("family", slow_but(OTHERS, "qwen2_audio"))
def test_other_families(family, tmp_path, capsys):
    options = ["--prompt_tokens", "60", "--completion_tokens", "24", "--image_size", "56"]
    main(["estimate", "--model_name_or_path", str((FAMILIES | MORE_FAMILIES)[family].save(tmp_path)), *options])
    assert ("Media encoders aren't counted" in capsys.readouterr().out) == (family in UNCOUNTED)


def test_models_that_need_values(folder, monkeypatch):
    """The encoder alone is left out, and the text model is named with its error, also one without text."""
    class_of_model = type(AutoModelForImageTextToText.from_pretrained(folder))
    args = parse("--model_name_or_path", folder, *TINY)

    def fails(self, pixel_values=None, image_grid_thw=None, **kwargs):
        raise NotImplementedError

    monkeypatch.setattr(class_of_model, "get_image_features", fails)
    assert estimate.measure(args).left_out == "NotImplementedError"
    monkeypatch.setattr(class_of_model, "get_decoder", fails)
    with pytest.raises(ValueError, match="doesn't run without weights: NotImplementedError.$"):
        estimate.measure(args)


def test_errors(folder, capsys):
    main(["estimate", "--model_name_or_path", str(folder), *TINY, "--gpu_memory", "0.001", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert not result["fits"] and result["advice"]
    for options, message in (
        (["--model_name_or_path", "no/such-model"], "'no/such-model' is no folder or file"),
        (["--model_name_or_path", str(folder), "--load_in_4bit"], "add `--use_peft`"),
        (["--model_name_or_path", str(folder), "--gpus", "2"], "uses one GPU"),
        (["--model_name_or_path", str(folder), "--audio_seconds", "3"], "`--audio_seconds` has no effect on"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(["estimate", *options])
        assert exit.value.code == 1 and message in capsys.readouterr().err
