# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The estimates of `trl-multimodal-rft estimate` match the memory of a run."""

import functools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from helpers.families import FAMILIES, MORE_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import image_rows, load, make_trainer
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoModelForImageTextToText, TrainerCallback

from trl_multimodal_rft import MultimodalGRPOTrainer, cli
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.arguments import parse as parse_script
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.extras import estimate
from trl_multimodal_rft.extras.estimate import Usage, memory
from trl_multimodal_rft.extras.fake_run import Watch
from trl_multimodal_rft.forward import head
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
    text, vision = model.config.text_config, model.config.vision_config
    text.num_hidden_layers, text.layer_types = 1, text.layer_types[:1]
    vision.depth, vision.fullatt_block_indexes = 1, [0]
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@functools.cache
def measured(folder, *words):
    """Without gradient checkpointing or casts, which take `estimate` longer."""
    plain = ["--no-gradient_checkpointing", "--no-bf16"]
    return estimate.measure(parse("--model_name_or_path", folder, *TINY, *plain, *words))


@pytest.fixture
def small_tile(monkeypatch):
    """The LM head processes 512 columns at once: its 32768 would dominate a tiny model's memory."""
    monkeypatch.setattr(head, "_CHUNK_SIZE", 512)


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes(size):
    config, model_class = estimate.read_config(str(CONFIGS / f"qwen2_5_vl_{size}.json"))
    with torch.device("meta"):
        model = model_class(config)
        model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[size]


@pytest.mark.parametrize(
    ("packing", "checkpointing"),
    slow_but(
        [(p, f"--{no}gradient_checkpointing") for p in ("prefix", "padded") for no in ("no-", "")],
        ("prefix", "--gradient_checkpointing"),
        ("padded", "--no-gradient_checkpointing"),
    ),
)
def test_update_takes_what_is_said(folder, small_tile, packing, checkpointing):
    """Runs the same micro-batch with data on the CPU."""
    words = ["--model_name_or_path", folder, "--device", "cpu", "--no-bf16", "--packing", packing, checkpointing]
    args = parse(*words, *TINY)
    said = estimate.measure(args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "FakeFloats", nullcontext)
        measured = estimate.measure(args)
    assert said.trained == measured.trained and said.n_forwards == measured.n_forwards == 1
    assert said.held == pytest.approx(measured.held, rel=0.03)
    assert said.peak == pytest.approx(measured.peak, rel=0.05)
    assert said.operations == pytest.approx(measured.operations, rel=0.01)


@pytest.mark.parametrize("saved", [[], ["merger"]])
def test_adapters_are_those_of_a_run(folder, saved, tmp_path):
    """On the layers that the options name, and with whole layers beside them."""
    words = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    words += ["--lora_modules_to_save", *saved] if saved else []
    model = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved))
    said = measured(folder, "--device", "cpu", "--images", "0", *words)
    assert (said.trained, said.trained + said.frozen) == adapted.get_nb_trainable_parameters()
    assert said.trained < measured(folder, "--device", "cpu", "--images", "0", *words[:3]).trained or saved


@pytest.mark.parametrize("frozen", [[], ["vision_tower"]])
def test_states_are_those_of_a_trainer(folder, small_tile, tmp_path, frozen):
    words = ["--freeze", *frozen] if frozen else []
    args = parse("--model_name_or_path", folder, "--device", "cpu", "--no-bf16", "--packing", "prefix", *TINY, *words)
    measured = estimate.measure(args)
    parts = memory(args, measured)
    model, seen = AutoModelForImageTextToText.from_pretrained(folder), {}

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            seen["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)

    objects = {"model": model, "callbacks": [Gradients()]}
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "optim": "adamw_torch", "objects": objects}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(4), tmp_path, freeze=frozen, **options)
    trainer.train()
    state = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["gradients"] == seen["gradients"]
    assert parts["optimizer"] == sum(value.nbytes for value in state)
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
        assert torch.ones(3, 4) @ torch.ones(4, 5) is not None
    assert live.operations == 2 * 3 * 4 * 5


def test_frozen_tower_keeps_nothing_and_has_no_backward(folder):
    """In the policy and in a separate critic."""
    whole, frozen, pattern = (
        measured(folder, "--trainer", "ppo", "--device", "cpu", *more)
        for more in ((), ("--freeze", "vision_tower,projector"), ("--freeze", "model.visual"))
    )
    tower = whole.modules["vision_tower"][0] + whole.modules["projector"][0]
    assert frozen.frozen == frozen.frozen_critic == tower and whole.frozen == whole.frozen_critic == 0
    assert frozen.trained == whole.trained - tower and frozen.critic == whole.critic - tower
    assert frozen.held < whole.held and frozen.operations < whole.operations
    assert vars(pattern) == vars(frozen)


def numbers(**changes):
    fields = dict.fromkeys(Usage.__dataclass_fields__, 0)
    fields = {**fields, "trained": 8_000, "prompt_tokens": 10, "n_forwards": 1, "cache": [], "sharing": 1}
    return Usage(**{**fields, **changes})


@pytest.mark.parametrize(
    ("strategy", "bytes_per_parameter"),
    [("ddp", 16), ("zero1", 2 + 2 + 12 / 8), ("zero2", 2 + 2 / 8 + 12 / 8), ("zero3", 16 / 8), ("fsdp2", 16 / 8)],
)
def test_strategies(strategy, bytes_per_parameter):
    parts = memory(parse("--model_name_or_path", "m", "--strategy", strategy, "--gpus", 8), numbers(peak=5))
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == bytes_per_parameter * 8_000
    assert parts["buckets"] == {"ddp": 4, "fsdp2": 0}.get(strategy, 2) * 8_000
    assert parts["update"] >= bytes_per_parameter * 8_000 + parts["buckets"] + 5


def test_reference_critic_adapters_and_vllm():
    both = memory(
        parse("--model_name_or_path", "m", "--beta", 0.1, "--trainer", "ppo"), numbers(critic=7_000, frozen=50)
    )
    assert both["reference"] == 4 * 8_050 and both["critic"] == 16 * 7_000
    adapted = parse("--model_name_or_path", "m", "--beta", 0.1, "--use_peft", "--load_in_4bit", "--dtype", "bfloat16")
    parts = memory(adapted, numbers(trained=100, frozen=8_000, in_4_bits=8_000))
    assert parts["reference"] == 0 and parts["gradients"] == 200
    assert parts["weights"] == pytest.approx(200 + 0.52 * 8_000, rel=0.01)
    shared = memory(parse("--model_name_or_path", "m", "--use_vllm", "--gpu_memory", 10), numbers())
    assert shared["vLLM"] == 3 * 2**30 < shared["update"]
    asleep = memory(parse("--model_name_or_path", "m", "--use_vllm", "--vllm_enable_sleep_mode"), numbers())
    assert asleep["update"] < asleep["vLLM"] < asleep["generation"]
    assert memory(parse("--model_name_or_path", "m", "--use_vllm", "--vllm_mode", "server"), numbers())["vLLM"] == 0


def test_what_waits_on_the_host():
    """Each term by hand: AdamW in float32, a critic, a reference, buckets of DDP."""

    def said(*words, **changes):
        words = ["--model_name_or_path", "m", "--gpu_memory", 1e-3, *words]
        args = [parse(*words, *more) for more in ((), ("--offload_during_generation",))]
        return [memory(each, numbers(tensors=3, **changes)) for each in args]

    words = ["--beta", 0.1, "--trainer", "ppo", "--strategy", "ddp", "--gpus", 2]
    plain, ours = said(*words, critic=7_000, cache=[(1, None)])
    states = 4 * 8_000 + 8 * 8_000 + 4 * 3  # gradients, and averages with step counters
    assert plain["host"] == 0 and ours["host"] == states + 4 * 8_000 + 16 * 7_000
    assert ours["generation"] == 2 * 4 * 8_000 + ours["KV cache"]  # weights and buckets
    assert plain["generation"] - ours["generation"] == ours["host"]
    assert plain["update"] == ours["update"]
    engine = said("--strategy", "zero2", "--gpus", 2, "--trainer", "ppo", critic=7_000)[1]
    assert engine["host"] == (2 + 12) / 2 * 15_000  # the critic is gathered with the policy

    share = 0.3 * 1e-3 * 2**30
    plain, ours = said("--use_vllm", "--vllm_enable_sleep_mode")
    assert ours["host"] == states + 4 * 8_000 and plain["generation"] == ours["host"] + share
    assert ours["generation"] == share
    assert said("--use_vllm", "--vllm_enable_sleep_mode", trained=80_000)[1]["generation"] == (4 + 2) * 80_000
    server = said("--use_vllm", "--vllm_mode", "server")[1]
    assert server["host"] == 0 and server["generation"] == said()[0]["generation"]
    assert said("--trainer", "sft")[1]["host"] == 0


def test_prompts_are_held_once_while_sampling(folder):
    """By hand, from the table of tokens: full attention and a window, then as a model and its options say."""
    words = ["--model_name_or_path", "m", "--completion_tokens", 512, "--steps_per_generation", 1]
    for group in (8, 64):
        for length in (1358, 16_000):
            args = parse(*words, "--per_device_train_batch_size", group, "--num_generations", group)
            cache = {"cache": [(2, None), (3, 1024)], "prompt_tokens": length}
            copied, held_once = (memory(args, numbers(sharing=n, **cache))["KV cache"] for n in (1, group))
            assert copied == group * (2 * (length + 512) + 3 * 1024)
            assert held_once == 2 * length + 3 * 1024 + group * (2 + 3) * 512
    for more, sharing in (([], 4), (["--packing", "padded"], 1), (["--strategy", "zero2", "--gpus", 2], 4)):
        assert measured(folder, "--images", 0, *more).sharing == sharing


def test_advice_to_wait_on_the_host():
    words = ["--model_name_or_path", "m", "--per_device_train_batch_size", 1, "--gpu_memory", 200_000 / 2**30]
    full = numbers(cache=[(100, None)])
    result = estimate.verdict(parse(*words), full)
    assert not result["fits"] and result["advice"] == "`--offload_during_generation`"
    assert estimate.verdict(parse(*words, "--offload_during_generation"), full)["fits"]


def test_supervised_rows(folder):
    """No rows share a prompt, and nothing is sampled."""
    sampled, supervised = (measured(folder, "--images", 0, *more) for more in ((), ("--trainer", "sft")))
    assert supervised.tokens == 4 * (60 + 24) and sampled.tokens == 60 + 4 * 24
    parts = memory(parse("--model_name_or_path", folder, *TINY, "--trainer", "sft"), supervised)
    assert parts["generation"] == parts["KV cache"] == 0 and parts["peak"] == parts["update"]


def test_options_of_a_run(tmp_path, monkeypatch):
    """Takes the options of a recipe and of its launcher, unless the command line sets them."""
    seen = []
    (tmp_path / "run.yaml").write_text("model_name_or_path: a/b\naccelerate_config: hsdp\n")
    monkeypatch.setattr(estimate, "run", seen.append)
    main(["estimate", "--config", "qwen2_5_vl_7b/geometry3k_grpo"])
    main(["estimate", "--config=qwen2_5_vl_7b/geometry3k_grpo_qlora", "--num_generations", "4", "--gpus", "2"])
    main(["estimate", "--config", "qwen2_5_omni_7b/audiomcq_sft", "--strategy", "zero2"])
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
    many = ["--per_device_train_batch_size", "8"]
    whole, budget = measured(folder, *many), measured(folder, *many, "--max_tokens_per_microbatch", 160)
    assert (whole.n_forwards, budget.n_forwards, budget.tokens) == (1, 2, 60 + 4 * 24)
    assert budget.held < 0.6 * whole.held and budget.operations > 1.2 * whole.operations


def test_a_split_group(folder):
    """Memory is that of the prompt and a chunk, operations count the prompt once; engines repeat it."""
    many = ["--per_device_train_batch_size", "8", "--num_generations", "8", "--gradient_checkpointing"]
    split = ["--max_tokens_per_microbatch", 60 + 2 * 24]
    whole, chunks = measured(folder, *many), measured(folder, *many, *split)
    engine = measured(folder, *many, *split, "--strategy", "fsdp2")
    alone = measured(folder, *many, "--per_device_train_batch_size", "2")
    assert (whole.n_forwards, chunks.n_forwards, chunks.tokens) == (1, 4, 60 + 2 * 24)
    assert chunks.peak <= 1.1 * alone.peak < 0.7 * whole.peak
    assert whole.operations < chunks.operations < 1.45 * whole.operations < engine.operations
    assert chunks.operations < 0.8 * 4 * alone.operations


@pytest.mark.slow
def test_a_split_group_of_long_completions(tmp_path):
    """
    Completions of 8,192 tokens to a prompt of 32,768, in eight layers: activations of a prompt and one completion. The
    third and later ones add nothing.
    """
    config = json.loads((CONFIGS / "qwen2_5_vl_3b.json").read_text())
    # As many bytes of all layers for each of one as in the 36 of 3B, with a head that is small beside them
    config["text_config"] |= {"num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 1024}
    config["vision_config"] |= {"depth": 1, "fullatt_block_indexes": [0]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--model_name_or_path", tmp_path / "config.json", "--images", 0, "--dtype", "bfloat16"]
    words += ["--prompt_tokens", 32_768, "--completion_tokens", 8_192, "--num_generations", 4]
    split = [*words, "--per_device_train_batch_size", 4, "--max_tokens_per_microbatch", 40_960]
    group, alone = (estimate.measure(parse(*each)) for each in (split, [*words, "--per_device_train_batch_size", 1]))
    assert (group.n_forwards, group.tokens) == (4, 40_960)
    # Keys and values of the prompt, 2 heads of 128 in 8 layers, their gradients, and the sums of these in float32
    kept = 2 * 8 * 32_768 * 2 * 128 * (2 + 2 + 4)
    assert group.peak <= alone.peak + kept < 5.5 * 2**30


def test_a_view_is_another_prompt(folder):
    plain, view = measured(folder), measured(folder, "--loss_view", "blank(kl_coef=0.01)")
    assert view.tokens == 2 * plain.tokens and view.held > 1.8 * plain.held


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
    assert "Fits into 90% of 80 GiB." in output and "peak" in output and "excludes media encoders" not in output
    assert "PFLOP a micro-batch." in output  # which `--json` names `operations`; an update may accumulate several


OTHERS = ["qwen2_audio", "qwen2_5_omni", "gemma3", "qwen3_5", "internvl", "glm4v", "gemma4", "apertus1p5"]


@pytest.mark.parametrize("family", slow_but(OTHERS, "qwen2_audio"))
def test_other_families(family, tmp_path, capsys):
    seconds = ["--audio_seconds", "1"] if family in ("qwen2_audio", "qwen2_5_omni") else ["--image_size", "56"]
    options = ["--prompt_tokens", "60", "--completion_tokens", "24", *seconds]
    main(["estimate", "--model_name_or_path", str((FAMILIES | MORE_FAMILIES)[family].save(tmp_path)), *options])
    assert "excludes media encoders" not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_a_token_count(dtype, tmp_path):
    """An expert has three matrices, each in one product of the forward and two of the backward pass."""
    folder = FAMILIES["qwen3_vl_moe"].save(tmp_path)
    options = ["--model_name_or_path", folder, *TINY, "--images", "0", "--no-gradient_checkpointing", "--dtype", dtype]
    config, usages = json.loads((folder / "config.json").read_text()), []
    text = config["text_config"]
    for text["num_experts_per_tok"] in (1, 2):
        (folder / "config.json").write_text(json.dumps(config))
        usages.append(estimate.measure(parse(*options)))
    more = 18 * text["num_hidden_layers"] * text["hidden_size"] * text["moe_intermediate_size"] * usages[0].tokens
    assert usages[1].operations - usages[0].operations == pytest.approx(more, rel=1e-3)


def test_config_alone_counts_the_encoder(folder, small_tile, capsys):
    """A file with a config has no processor. The tower runs on patches of the config's sizes."""
    config = ["--model_name_or_path", folder / "config.json", *TINY, "--num_generations", "2"]
    config += ["--device", "cpu", "--no-bf16", "--images"]
    said, without = (estimate.measure(parse(*config, n)) for n in (1, 0))
    assert said.held > without.held
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "FakeFloats", nullcontext)
        measured = estimate.measure(parse(*config, 1))
    assert said.held == pytest.approx(measured.held, rel=0.03)
    assert said.operations == pytest.approx(measured.operations, rel=0.01)


def test_config_alone_of_other_encoders_is_said_to_exclude_them(tmp_path, capsys):
    config = FAMILIES["qwen2_audio"].save(tmp_path) / "config.json"
    main(["estimate", "--model_name_or_path", str(config), "--prompt_tokens", "60", "--completion_tokens", "24"])
    assert "The estimate excludes media encoders" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NotImplementedError(), "NotImplementedError"),
        (DataDependentOutputException("aten.item"), "aten.item"),
        (TypeError("None is not\ncallable"), "None is not"),
    ],
)
def test_models_that_fail_on_fake_tensors(error, reason, monkeypatch):
    """The encoder alone is excluded, and the text model is named with its error, also one without text."""

    def measure(args):
        if args.images is None or fails_on_text:
            raise error
        return numbers()

    monkeypatch.setattr(estimate, "measure", measure)
    args, fails_on_text = parse("--model_name_or_path", "m"), False
    assert estimate.measure_with_note(args)[1] == f"The estimate excludes media encoders: {reason}."
    fails_on_text = True
    with pytest.raises(ValueError, match=f"^m doesn't run on fake tensors: {reason}$"):
        estimate.measure_with_note(args)
    with pytest.raises(ValueError, match=rf"^m doesn't run on fake tensors with media \({reason}\); leave out"):
        estimate.measure_with_note(parse("--model_name_or_path", "m", "--images", "1"))


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


@pytest.mark.slow
def test_suggested_config_fits_and_is_read(folder, small_tile, tmp_path, capsys):
    """`estimate` accepts its suggestions for less and less memory, and the command's parser reads them."""
    size = [*TINY[:-4], "--num_generations", "4", "--device", "cpu"]  # of prompts and completions

    def suggested(*options):
        main(["estimate", "--model_name_or_path", str(folder), *size, "--suggest", *options])
        path = tmp_path / "run.yaml"
        path.write_text(capsys.readouterr().out)
        return path, yaml.safe_load(path.read_text())

    whole = ["--per_device_train_batch_size", "1", "--gradient_checkpointing"]
    args = parse("--model_name_or_path", folder, *size, *whole)
    too_little = 0.99 * memory(args, estimate.measure(args))["peak"] / estimate.USABLE / 2**30
    found = []
    for memory_ in ("1", str(too_little)):
        path, keys = suggested("--gpu_memory", memory_)
        found.append(keys)
        main(["estimate", "--config", str(path), *size, "--gpu_memory", memory_, "--json"])
        assert json.loads(capsys.readouterr().out)["fits"]
    plenty, little = found
    assert "use_peft" not in plenty and plenty["per_device_train_batch_size"] == 4 and plenty["dtype"] == "float32"
    assert little["use_peft"] and little["dtype"] == "bfloat16" and little["lora_alpha"] == 2 * little["lora_r"]
    for keys in found:
        completions = keys["per_device_train_batch_size"] * keys["gradient_accumulation_steps"]
        assert completions == 64 and keys["steps_per_generation"] * keys["per_device_train_batch_size"] % 4 == 0

    argv = ["--config", str(path), "--dataset_name", "d", "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    argv += ["--bf16", "False", "--report_to", "none"]
    _, config, model_args = parse_script(grpo.ARGUMENTS, argv)
    assert config.max_tokens_per_microbatch == little["max_tokens_per_microbatch"] and config.learning_rate == 1e-5
    assert model_args.use_peft and model_args.lora_target_modules == "all-linear"

    several = suggested("--gpus", "4", "--gpu_memory", "1")[1]
    assert several["accelerate_config"] == "multi_gpu" and several["num_processes"] == 4
    assert several["gradient_accumulation_steps"] == 4
    with pytest.raises(SystemExit):
        suggested("--gpu_memory", "0.001")
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "nothing fits into 90% of 0.001 GiB: the smallest run takes 0.00" in line
