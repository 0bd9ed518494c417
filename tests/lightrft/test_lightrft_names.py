# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names of LightRFT's scripts: the strategy, tokenizers, and whitening over batches by its formula."""

import base64
import io
import logging
import os
import re
from argparse import Namespace

import fix
import PIL.Image
import pytest
import torch
from helpers.lightrft_options import COMMAND_LINE, CRITIC_FREE, strategy_of
from helpers.trainer_utils import image_rows, length_and_sum, load, moved, saved
from torch.testing import assert_close
from torch.utils.data import DataLoader

from trl_multimodal_rft.lightrft import ActorVL, PPOTrainerVL
from trl_multimodal_rft.lightrft.models.utils import compute_approx_kl
from trl_multimodal_rft.lightrft.strategy import OPTIONS, RULES, get_strategy
from trl_multimodal_rft.lightrft.trainer.advantage_calculator import normalize_advantages_cross_batch
from trl_multimodal_rft.lightrft.trainer.experience import Experience
from trl_multimodal_rft.lightrft.utils import get_tokenizer, get_tokenizer_processor_vl, init_logger, remote_rm_fn


pytestmark = pytest.mark.gate


def test_strategy_of_a_whole_command_line():
    """The defaults of all options make the run that LightRFT makes of them."""
    assert not [name for name in COMMAND_LINE if name not in RULES]
    strategy = get_strategy(Namespace(**COMMAND_LINE))
    expected = {"output_dir": "./ckpt", "advantage_estimator": "gae(gamma=1.0, lam=0.95)", "beta": 0.01}
    expected |= {"kl_estimator": "k1", "kl_in_reward": True, "loss_type": "grpo", "epsilon": 0.2, "ptx_coef": 0.0}
    expected |= {"top_entropy_quantile": 1.0, "reward_clip_range": None, "reward_running_scale": False}
    expected |= {"soft_overlong_cache": None, "dynamic_sampling": 0, "freezing_actor_steps": 0, "freeze": None}
    expected |= {"learning_rate": 1e-6, "value_learning_rate": 9e-6, "warmup_steps": 0.03, "adam_beta2": 0.95}
    expected |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    expected |= {"gradient_accumulation_steps": 32, "generation_batch_size": 1024, "num_generations": 2}
    expected |= {"max_completion_length": 1024, "save_strategy": "no", "eval_strategy": "epoch", "logging_steps": 8}
    expected |= {"save_total_limit": 3, "gradient_checkpointing": False, "report_to": [], "use_vllm": True}
    assert {name: getattr(strategy, name) for name in expected} == expected
    # The command line has options of the critic also for estimators without one
    get_strategy(Namespace(**{**COMMAND_LINE, "advantage_estimator": "group_norm"}))
    assert get_strategy(Namespace(**{**COMMAND_LINE, "pretrain_data": "rows"})).ptx_coef == 0.05


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_are_fields(option):
    values = {"save_path": "elsewhere", "wandb_run_name": "first", "kl_target": 0.05, "reward_clip_range": [-1.0, 2.0]}
    values |= dict.fromkeys(("bf16", "gradient_checkpointing", "enable_engine_sleep", "disable_ds_ckpt"), False)
    integers = ("num_episodes", "max_epochs", "seed", "logging_steps", "max_ckpt_num", "engine_tp_size")
    values |= dict.fromkeys(integers, 3)
    values |= dict.fromkeys(("n_samples_per_prompt", "micro_train_batch_size", "generate_max_len"), 6)
    value = values.get(option, 0.25)
    given = {"advantage_estimator": "gae", "n_samples_per_prompt": 2, "micro_train_batch_size": 6, option: value}
    assert getattr(strategy_of(**given), OPTIONS[option]) == value


GAE = {"advantage_estimator": "gae"}
CPG_LOSS = "cpgd(drift_coef=0.0, average='completions')"
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SIZES = {"rollout_batch_size": 8, "train_batch_size": 16}  # two optimizer steps per rollout of 4 completions each


@pytest.mark.parametrize(
    "options, fields",
    [
        # The most important options
        (
            {"high_entropy_token_ratio": 0.2},
            {
                "top_entropy_quantile": 0.2,
                "entropy_source": "rollout(scope='sequence', renormalize=True, rounding='down')",
            },
        ),
        ({"use_cpg_loss": True}, {"loss_type": CPG_LOSS}),
        # Only `use_cpg_loss` chooses the loss
        ({"advantage_estimator": "cpgd"}, {"loss_type": "grpo", "advantage_estimator": "cpgd"}),
        ({"advantage_estimator": "cpgd", "use_cpg_loss": True}, {"loss_type": CPG_LOSS}),
        # Loss
        ({}, {"loss_type": "grpo"}),
        *(({"loss_agg_mode": mode}, {"loss_type": "grpo"}) for mode in AGGREGATIONS),
        *(({"loss_agg_mode": mode, "use_cpg_loss": True}, {"loss_type": CPG_LOSS}) for mode in AGGREGATIONS),
        ({"use_gspo": True}, {"importance_sampling_level": "sequence"}),
        ({"value_clip": 0.3, **GAE}, {"cliprange_value": 0.3}),
        # KL divergence
        ({"init_kl_coef": 0.0}, {"beta": 0.0, "kl_estimator": None}),
        ({"use_kl_loss": True}, {"beta": 0.001, "kl_estimator": "k3", "use_bias_correction_kl": False}),
        ({"use_kl_loss": True, "kl_estimator": "k2"}, {"kl_estimator": "k2"}),
        ({"use_kl_loss": True, "use_kl_estimator_k3": True, "kl_estimator": "k1"}, {"kl_estimator": "k3"}),
        ({"use_kl_loss": True, "advantage_estimator": "reinforce_baseline"}, {"kl_estimator": "k2"}),
        ({"kl_estimator": "k3", "init_kl_coef": 0.0}, {"kl_estimator": None}),
        ({"use_kl_estimator_k3": True}, {"kl_estimator": "k1", "use_kl_estimator_k3": True}),
        ({"kl_estimator": "k1"}, {"kl_estimator": "k1", "use_kl_estimator_k3": False}),
        ({"kl_target": 0.1, "kl_horizon": 50}, {"kl_target": 0.1, "kl_horizon": 50}),
        # Rewards and advantages
        ({"reward_running_norm": True}, {"reward_running_scale": True}),
        ({"reward_clip": 5.0}, {"reward_clip_range": [-5.0, 5.0]}),
        ({"overlong_buffer": True, "generate_max_len": 2048}, {"soft_overlong_cache": 1024}),
        ({"overlong_buffer": True, "overlong_buffer_len": 64}, {"soft_overlong_cache": 64}),
        ({"dynamic_sampling": True}, {"dynamic_sampling": 4}),
        ({"dynamic_sampling": 9}, {"dynamic_sampling": 9}),
        ({"no_advantage_std_norm": True, **GAE}, {"no_advantage_std_norm": True}),
        ({"gamma": 0.9, "lambd": 0.8, **GAE}, {"advantage_estimator": "gae(gamma=0.9, lam=0.8)"}),
        ({"gamma": 0.9, "lambd": 0.95}, {"advantage_estimator": "group_norm"}),
        ({"advantages_norm": True, "advantage_estimator": "reinforce"}, {"advantage_estimator": "reinforce"}),
        # Updates
        ({"adam_betas": (0.8, 0.9)}, {"adam_beta1": 0.8, "adam_beta2": 0.9}),
        ({"enable_ema": True}, {"ema_decay": 0.992}),
        ({"enable_ema": True, "ema_beta": 0.9}, {"ema_decay": 0.9}),
        ({"freeze_prefix": True}, {"freeze": ["vision_tower", "projector"]}),
        ({"freeze_prefix": "audio_tower"}, {"freeze": ["audio_tower"]}),
        ({"freeze_prefix": True, "text_only": True}, {"freeze": None}),
        ({"freezing_actor_steps": 20, **GAE}, {"freezing_actor_steps": 20}),
        ({"gradient_checkpointing_use_reentrant": True}, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ({"critic_learning_rate": 9e-6}, {"value_learning_rate": None}),
        # Sizes
        ({"train_batch_size": 16}, {"gradient_accumulation_steps": 4}),
        ({"rollout_batch_size": 8}, {"generation_batch_size": 32}),
        # Intervals, which LightRFT counts in rollouts
        ({"save_steps": 7}, {"save_strategy": "steps", "save_steps": 7}),
        ({"save_steps": 7, **SIZES}, {"save_steps": 14}),
        ({"save_steps": float("inf")}, {"save_strategy": "no"}),
        ({"save_steps": 0}, {"save_strategy": "no"}),
        ({"eval_steps": 9, "max_epochs": 3, **SIZES}, {"eval_strategy": "steps", "eval_steps": 54}),
        ({"eval_steps": -1, "eval_data": "rows"}, {"eval_strategy": "epoch"}),
        ({"eval_steps": -1, "eval_split": "test"}, {"eval_strategy": "epoch"}),
        ({"eval_steps": -1, "eval_split": ""}, {"eval_strategy": "no"}),
        ({"eval_steps": float("inf"), "eval_data": "rows"}, {"eval_strategy": "no"}),
        # Engines
        ({}, {"use_vllm": False}),
        ({"engine_type": "transformers", "engine_tp_size": 2}, {"use_vllm": False}),
        ({"engine_type": "vllm", "engine_tp_size": 2}, {"use_vllm": True, "vllm_tensor_parallel_size": 2}),
        ({"engine_type": "sglang", "enable_engine_sleep": True}, {"use_vllm": True, "vllm_enable_sleep_mode": True}),
        ({"freezing_actor_steps": 5, **SIZES, **GAE}, {"freezing_actor_steps": 10}),
        ({"logging_steps": 1, **SIZES}, {"logging_steps": 2}),
        # Trackers and folders
        ({"use_wandb": "a key"}, {"report_to": ["wandb"]}),
        ({"use_wandb": "", "use_tensorboard": ""}, {"report_to": []}),
        ({"use_wandb": True, "use_tensorboard": "logs"}, {"report_to": ["wandb"]}),
        ({"ckpt_path": "./out/"}, {"output_dir": "out"}),
    ],
)
def test_options_that_set_fields(options, fields):
    strategy = strategy_of(**options)
    assert {name: getattr(strategy, name) for name in fields} == fields


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "grpo", "cpgd"])
def test_divergence_is_in_the_reward(estimator):
    strategy = strategy_of(advantage_estimator=estimator, init_kl_coef=0.01)
    assert strategy.kl_in_reward and strategy.beta == 0.01
    strategy = strategy_of(advantage_estimator=estimator, init_kl_coef=0.01, use_kl_loss=True)
    assert not strategy.kl_in_reward and strategy.kl_estimator in ("k2", "k3")


def test_folders_and_names_of_trackers(tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_RUN_GROUP", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "before")
    strategy = strategy_of(wandb_project="own", use_tensorboard="logs", wandb_org="people")
    assert strategy.report_to == ["tensorboard"]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == "logs" and os.environ["WANDB_PROJECT"] == "before"
    strategy_of(use_wandb="True", wandb_project="own", wandb_org="people", wandb_group="a")
    assert [os.environ[f"WANDB_{name}"] for name in ("PROJECT", "ENTITY", "RUN_GROUP")] == ["own", "people", "a"]
    assert strategy_of(load_checkpoint=True, save_path=str(tmp_path / "new")).resume_from_checkpoint is None
    (tmp_path / "checkpoint-10").mkdir()
    assert strategy_of(load_checkpoint=True, save_path=str(tmp_path)).resume_from_checkpoint is True
    monkeypatch.chdir(tmp_path)
    given = {name: value for name, value in CRITIC_FREE.items() if name != "save_path"}
    assert get_strategy(Namespace(**given, load_checkpoint=True)).resume_from_checkpoint is None


@pytest.mark.parametrize(
    "options, error",
    [
        ({"engine_type": "tgi"}, "`engine_type` must be one of 'vllm', 'sglang', 'transformers', got 'tgi'"),
        ({"advantage_clip": 1.0}, "`advantage_clip=1.0` has .*; clip rewards by `reward_clip`"),
        ({"advantage_clip": 1.0, "use_fire": True}, r"`advantage_clip=1.0` has .*\. `use_fire=True` has"),
        ({"reward_running_norm_minus_mean": True}, "`reward_running_norm` alone"),
        ({"ckpt_path": "elsewhere"}, "`ckpt_path='elsewhere'` has no field, as checkpoints are in `save_path`"),
        ({"high_entropy_ratio": 0.2}, "`high_entropy_ratio` is no option .* Did you mean `high_entropy_token_ratio`"),
        ({"use_clip_higher": True}, "`use_clip_higher` is no option of LightRFT's; remove it"),
        ({"advantages_norm": True}, "`advantages_norm=True` whitens advantages, which .*'group_norm'` never does"),
        ({"no_advantage_std_norm": True}, "`no_advantage_std_norm=True` has no effect with .*'group_norm'`"),
        ({"kl_estimator": "k2"}, "`kl_estimator='k2'` is for the loss; pass `use_kl_loss`"),
        ({"reward_clip": "5"}, "`reward_clip` must be a number, got the text '5'; write it without quotes"),
        ({"adam_betas": (0.9,)}, r"`adam_betas=\(0.9,\)` must be two numbers"),
        ({"adam_betas": 0.9}, "`adam_betas=0.9` can't be converted"),
        ({"use_kl_loss": True, "kl_estimator": "k1"}, "`kl_estimator='k1'` as a loss has no gradient"),
        ({"loss_agg_mode": "mean"}, "`loss_agg_mode` must be one of"),
        ({"loss_agg_mode": "grpo"}, "`loss_agg_mode` must be one of"),
        ({"overlong_buffer": True, "overlong_buffer_penalty_factor": 0.5}, "`overlong_buffer_penalty_factor=0.5`"),
        ({"freezing_actor_steps": 20}, "`freezing_actor_steps` is about the critic"),
        ({"train_batch_size": 6}, "`train_batch_size=6` isn't a multiple of 4 samples"),
        ({"train_batch_size": 12, "rollout_batch_size": 2}, "`rollout_batch_size=2` makes 8 completions, which"),
        ({"advantage_estimator": "ppo"}, "`advantage_estimator` must be one of"),
        ({"use_gspo": True, **GAE}, "`importance_sampling_level` is LightRFT's `use_gspo`"),
        ({"eps_clip": -1.0}, "`eps_clip` must be at least 0, got -1.0"),
        ({"weight_decay": 1}, "`weight_decay` is no option of LightRFT's"),
    ],
)
def test_options_that_are_errors(options, error):
    with pytest.raises(ValueError, match=error) as caught:
        strategy_of(**options)
    assert "\n" not in str(caught.value)


def test_sizes_count_all_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert RULES["train_batch_size"].convert(16, {"micro_train_batch_size": 4}) == {"gradient_accumulation_steps": 2}


def test_page_has_the_table_of_options():
    text = fix.LIGHTRFT.read_text()
    table = fix.lightrft_table()
    assert fix.with_block(text, "options", table) == text, "run `make fix`"
    first_cells = " ".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))
    assert sorted(re.findall(r"`(\w+)`", first_cells)) == sorted(RULES)


def trained(tmp_path, arguments=(), actor=(), **options):
    """Returns a trainer of the strategy of a command line after a rollout, and its policy's weights before."""
    args = {**CRITIC_FREE, "save_path": str(tmp_path), "actor_learning_rate": 1e-2, "rollout_batch_size": 2, **options}
    args |= {"lr_warmup_ratio": 0.0, "train_batch_size": 4, "generate_max_len": 4, "gradient_checkpointing": False}
    args |= {"num_episodes": 1, "logging_steps": 1, "save_steps": -1}
    strategy = get_strategy(Namespace(**args))
    model, processor = load("qwen2_5_vl")
    policy, reference = (ActorVL(each, bf16=False, **dict(actor)) for each in (model, moved("qwen2_5_vl")["model"]))
    before = {name: value.clone() for name, value in model.named_parameters()}
    ppo = PPOTrainerVL(
        *(strategy, policy, None, None, reference, None, None, None, None, None),
        init_kl_coef=strategy.beta,
        micro_train_batch_size=args["micro_train_batch_size"],
        processor=processor,
        prompt_max_len=512,
        reward_fn=length_and_sum,
        **dict(arguments),
    )
    ppo.fit(strategy, DataLoader(list(image_rows(2)), batch_size=2, collate_fn=list), None)
    assert ppo.trainer.state.global_step == 2
    return ppo, before


def moved_names(ppo, before):
    weights = dict(ppo.actor.model.named_parameters())
    return {name for name, value in before.items() if not torch.equal(weights[name], value)}


def test_trainer_takes_the_strategy_without_a_critic(tmp_path):
    options = {"high_entropy_token_ratio": 0.3, "use_cpg_loss": True, "reward_clip": 2.0, "reward_running_norm": True}
    options |= {"overlong_buffer": True, "overlong_buffer_len": 2, "init_kl_coef": 0.1, "freeze_prefix": True}
    ppo, before = trained(tmp_path, actor={"high_entropy_token_ratio": 0.3}, **options)
    args = ppo.trainer.args
    maker = ppo.experience_maker.strategy
    assert (args.loss_type, args.top_entropy_quantile, args.kl_estimator) == (CPG_LOSS, 0.3, "k1")
    assert maker.kl_in_reward and maker.reward_running_scale and maker.soft_overlong_cache == 2
    assert [*maker.reward_clip_range] == [-2.0, 2.0]
    names = moved_names(ppo, before)
    assert names and not [name for name in names if "visual" in name]
    (first, *_) = ppo.experience_maker.make_experience_list(list(image_rows(2)), **ppo.generate_kwargs)
    ppo.replay_buffer.append(first)
    rollout = ppo.trainer._rollout_of(list(ppo.replay_buffer))
    (rollout,) = ppo.trainer._on_rollout([rollout])
    mask = rollout.loss_mask.bool()
    weights = rollout.tokens.weights
    kept = torch.where(mask, weights > 0, False).sum(1)
    # As LightRFT counts the tokens of a completion: 1 of 4, and 1 of fewer
    assert kept.tolist() == [max(1, int(n * 0.3)) for n in mask.sum(1).tolist()] and mask.sum(1).max() == 4


def test_trainer_takes_the_strategy_with_a_critic(tmp_path):
    options = {"advantage_estimator": "gae", "gamma": 0.9, "lambd": 0.8, "freezing_actor_steps": 1, "value_clip": 0.3}
    options |= {"use_kl_loss": True, "kl_estimator": "k3", "init_kl_coef": 0.1, "critic_learning_rate": 1e-2}
    ppo, before = trained(tmp_path, {"value_clip": 0.3}, **options)
    args = ppo.trainer.args
    assert (args.kl_estimator, args.use_bias_correction_kl, args.freezing_actor_steps) == ("k3", False, 2)
    assert args.advantage_estimator == "gae(gamma=0.9, lam=0.8)" and args.cliprange_value == 0.3
    assert not moved_names(ppo, before)  # the only rollout trains the critic alone
    assert any(value.any() for name, value in ppo.trainer.model.named_parameters() if "critic" in name)


def test_trainer_refuses_dynamic_sampling(tmp_path):
    with pytest.raises(ValueError, match="`dynamic_sampling` of `strategy` has no effect in `PPOTrainerVL`"):
        trained(tmp_path, dynamic_sampling=True)


def test_k3_has_two_names():
    log_probs, base = torch.randn(2, 2, 3)
    assert_close(
        compute_approx_kl(log_probs, base, use_kl_estimator_k3=True), (base - log_probs).expm1() - (base - log_probs)
    )


def test_tokenizers_pad():
    model = load("qwen2_5_vl")
    tokenizer, processor = get_tokenizer_processor_vl(saved("qwen2_5_vl"), model, "left")
    assert processor.tokenizer is tokenizer and tokenizer.padding_side == "left" and tokenizer.pad_token is not None
    tokenizer = get_tokenizer(saved("qwen2_5_vl"), model, "right")
    assert tokenizer("a b", return_tensors="pt").input_ids.numel() and tokenizer.padding_side == "right"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("estimator, shift_only", [("gae", False), ("reinforce", True), ("rloo", False)])
def test_advantages_are_those_of_all_batches(packed, estimator, shift_only):
    torch.manual_seed(0)
    masks = [torch.tensor([[1, 1, 0], [1, 0, 0]]), torch.tensor([[1, 1, 1, 1]])]
    before = [torch.randn(mask.shape) for mask in masks]
    fields = [None] * 4
    batches = [
        Experience(mask, *fields, list(values) if packed else values.clone(), mask, list(mask) if packed else mask, {})
        for mask, values in zip(masks, before, strict=True)
    ]
    assert normalize_advantages_cross_batch(batches, estimator, Namespace(no_advantage_std_norm=shift_only)) is batches
    # In float64, as LightRFT's calculator writes it
    flat, mask = (torch.cat([each.flatten() for each in own]).double() for own in (before, masks))
    mean = (flat * mask).sum() / mask.sum()
    scale = 1 if shift_only else (((flat - mean) ** 2 * mask).sum() / mask.sum()).rsqrt()
    for batch, values, own in zip(batches, before, masks, strict=True):
        expected = values if estimator == "rloo" else ((values - mean) * scale).float() * own
        found = torch.stack(batch.advantages) if packed else batch.advantages
        assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_rewards_of_servers(serve):
    def answer(request):
        return {
            "rewards": [None if label == "no" else len(query) for query, label in zip(*pair(request), strict=True)]
        }

    def pair(request):
        return request["queries"], request.get("labels", request["queries"])

    server = serve(answer)
    assert remote_rm_fn(server.url, ["ab", "c"], ["a", ""]).tolist() == [2.0, 1.0]
    assert server.requests[0] == {"queries": ["ab", "c"], "prompts": ["a", ""]}
    rewards = remote_rm_fn([server.url, server.url], queries=["ab", "c"], labels=["yes", "no"])
    assert rewards.dtype == torch.float32 and rewards[0] == 4 and rewards[1].isnan()
    with pytest.raises(ValueError, match="There are 1 `labels` for 2 `queries`"):
        remote_rm_fn(server.url, ["ab", "c"], labels=["yes"])
    with pytest.raises(RuntimeError, match="for 3 completions"):
        remote_rm_fn(serve(lambda request: {"rewards": [1.0]}).url, ["ab", "c", "d"])


def test_all_arguments_of_requests_for_rewards(serve):
    """In LightRFT's order, with its names in the request and its `score_key` in the answer."""
    server = serve(lambda request: {"scores": list(map(len, request["references"])), "rewards": "unread"})
    red = PIL.Image.new("RGBA", (6, 4), (255, 0, 0, 255))
    grey = PIL.Image.new("L", (3, 3), 7)
    images = [[red, grey], None, grey]
    given = (["q", "r", "s"], ["a", "b", "c"], [1, 2, 3], ["xx", "", "yyy"], images, "scores")
    assert remote_rm_fn(server.url, *given).tolist() == [2.0, 0.0, 3.0]
    (request,) = server.requests
    assert {name: request[name] for name in ("queries", "prompts", "labels", "references")} == dict(
        zip(("queries", "prompts", "labels", "references"), given, strict=False)
    )
    decoded = [[read_image(each) for each in own or ()] for own in request["images"]]
    assert [[each.size for each in own] for own in decoded] == [[(6, 4), (3, 3)], [], [(3, 3)]]
    assert request["images"][1] is None and decoded[0][0].convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    with pytest.raises(RuntimeError, match="it holds no rewards.*return {'points': "):
        remote_rm_fn(server.url, *given[:-1], score_key="points")
    with pytest.raises(ValueError, match="There are 2 `images` for 3 `queries`"):
        remote_rm_fn(server.url, ["q", "r", "s"], raw_images=[red, None])


def read_image(text):
    return PIL.Image.open(io.BytesIO(base64.b64decode(text)))


def test_loggers_have_names():
    assert init_logger("a.b") is logging.getLogger("a.b")
