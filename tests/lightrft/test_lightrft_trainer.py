# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What LightRFT's scripts pass to its trainer: arguments beside the strategy's options, keywords, and its datasets."""

import inspect
import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from helpers.lightrft_options import COMMAND_LINE, CRITIC_FREE, strategy_of
from helpers.trainer_utils import image_rows, length_and_sum, load, moved, saved
from PIL import Image
from torch.utils.data import DataLoader

from trl_multimodal_rft import MultimodalPPOConfig
from trl_multimodal_rft.lightrft import ActorVL, PPOTrainerVL
from trl_multimodal_rft.lightrft.datasets import PromptDatasetVL, SFTDatasetVL
from trl_multimodal_rft.lightrft.models.actor_al import ActorAL, ActorOmni
from trl_multimodal_rft.lightrft.strategy import get_strategy
from trl_multimodal_rft.lightrft.trainer.ppo_arguments import remember_passed, resolve_arguments, take_keywords
from trl_multimodal_rft.lightrft.trainer.ppo_options import media_columns_of
from trl_multimodal_rft.lightrft.trainer.spmd_ppo_trainer import SPMDPPOTrainerVL
from trl_multimodal_rft.lightrft.utils import blending_datasets, get_tokenizer_processor_vl


pytestmark = pytest.mark.gate


# Values win over defaults

SIGNATURE = inspect.signature(PPOTrainerVL).parameters
DEFAULTS = {name: spec.default for name, spec in SIGNATURE.items() if spec.default is not spec.empty}
# Options of the command line by the trainer's arguments, with values that aren't defaults
GIVEN = {"init_kl_coef": 0.05, "ema_beta": 0.9, "kl_target": 0.1, "kl_horizon": 50, "ptx_coef": 0.5, "eps_clip": 0.3}
GIVEN |= {"micro_train_batch_size": 2, "value_clip": 0.4, "gradient_checkpointing": True, "max_epochs": 3}
GIVEN |= {"max_norm": 0.5, "disable_ds_ckpt": True, "prompt_max_len": 512, "micro_rollout_batch_size": 2}
GIVEN |= {"buffer_limit": 8, "buffer_cpu_offload": False, "remote_rm_url": "http://a", "save_hf_ckpt": True}
# Fields of a config with these values
FIELDS = {"beta": 0.05, "ema_decay": 0.9, "kl_target": 0.1, "kl_horizon": 50, "ptx_coef": 0.5, "epsilon": 0.3}
FIELDS |= {
    "per_device_train_batch_size": 2,
    "vf_coef": 0.2,
    "cliprange_value": 0.4,
    "num_ppo_epochs": 3,
    "max_grad_norm": 0.5,
}
FIELDS |= {"save_only_model": True}
OF_FIELDS = [*GIVEN][: [*GIVEN].index("prompt_max_len")]
OF_FIELDS.remove("gradient_checkpointing")  # `True` is the default of a config
GAE = {"advantage_estimator": "gae", "enable_ema": True, "n_samples_per_prompt": 2}


def resolved(strategy, **passed):
    return vars(resolve_arguments(strategy, DEFAULTS | passed, passed))


def plain(tmp_path, **options):
    return MultimodalPPOConfig(str(tmp_path), **{"use_cpu": True, "bf16": False, "num_generations": 2, **options})


def test_arguments_that_are_left_out(tmp_path):
    """They take the values of a command line, or of a config, and else their documented defaults."""
    found = resolved(strategy_of(**GAE, **GIVEN))
    assert {name: found[name] for name in GIVEN} == GIVEN
    found = resolved(plain(tmp_path, **FIELDS))
    assert {name: found[name] for name in OF_FIELDS} == {name: GIVEN[name] for name in OF_FIELDS}
    for strategy in (plain(tmp_path), strategy_of(micro_train_batch_size=None, bf16=False)):
        found = resolved(strategy)
        differs = {name for name, value in found.items() if value != DEFAULTS[name]}
        assert differs <= {"dataloader_pin_memory"}
    assert resolved(plain(tmp_path, gradient_checkpointing=False))["gradient_checkpointing"] is False
    assert resolved(plain(tmp_path, cliprange_value=None))["value_clip"] is None
    assert resolved(strategy_of(kl_horizon=50), kl_target=0.1)["kl_horizon"] == 50
    assert resolved(strategy_of(gradient_checkpointing=False))["gradient_checkpointing"] is False
    assert resolved(strategy_of(init_kl_coef=0.0))["init_kl_coef"] == 0  # off, not the default
    strategy = strategy_of()
    strategy.epsilon = 0.35  # as `strategy.use_cpu = True`
    strategy.beta = 0.3
    assert (resolved(strategy)["eps_clip"], resolved(strategy)["init_kl_coef"]) == (0.35, 0.3)


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_that_are_passed(name, tmp_path):
    """They win over defaults of a strategy; a contradiction is an error of one line."""
    value = GIVEN[name]
    other = {"remote_rm_url": "http://b"}.get(name, DEFAULTS[name])
    for strategy in (strategy_of(enable_ema=True, micro_train_batch_size=None), plain(tmp_path)):
        assert resolved(strategy, **{name: value})[name] == value
    strategies = [strategy_of(**GAE, **GIVEN)]
    if name in OF_FIELDS:
        strategies.append(plain(tmp_path, **FIELDS))
    for strategy in strategies:
        assert resolved(strategy, **{name: value})[name] == value
        with pytest.raises(ValueError, match=f"`{name}=.*` contradicts `.* of .*strategy.*; remove one") as caught:
            resolved(strategy, **{name: other})
        assert "\n" not in str(caught.value) and repr(other) in str(caught.value)


def test_arguments_from_the_command_line():
    """`ptx_coef=args.ptx_coef` means what the strategy has made of it."""
    args = Namespace(**{**COMMAND_LINE, "bf16": False, "enable_ema": True})
    strategy = get_strategy(args)
    assert args.ptx_coef == 0.05 and args.pretrain_data is None
    names = [name for name in SIGNATURE if hasattr(args, name) and name in DEFAULTS]
    found = resolved(strategy, **{name: getattr(args, name) for name in names}, ema_beta=0.992)
    assert found["ptx_coef"] == 0 and found["init_kl_coef"] == 0.01 and found["ema_beta"] == 0.992
    assert resolved(strategy, ema_beta=0.9)["ema_beta"] == 0.9  # `enable_ema` alone asks for no particular decay
    assert resolved(strategy)["ptx_coef"] == 0
    with pytest.raises(ValueError, match="`ptx_coef=0.1` contradicts `ptx_coef=0.05` of the strategy's command line"):
        resolved(strategy, ptx_coef=0.1)


def test_which_arguments_were_passed():
    class Base:
        @remember_passed
        def __init__(self, a, b=1, *, c=2, **others):
            """Makes it."""
            self.values = (a, b, c, others)

    class Derived(Base):
        def __init__(self, a):
            super().__init__(a, c=3, d=4)

    assert Base(0, 1).passed == {"self", "a", "b"} and Base(0).passed == {"self", "a"}
    made = Derived(0)
    assert made.values == (0, 1, 3, {"d": 4}) and made.passed == {"self", "a", "c", "others"}
    assert [*inspect.signature(Base).parameters] == ["a", "b", "c", "others"] and Base.__init__.__doc__ == "Makes it."
    with pytest.raises(TypeError):
        Base()


def trainer_of(strategy, cls=PPOTrainerVL, actor=None, ema_model=None, family="qwen2_5_vl", **arguments):
    actor = actor or ActorVL(load(family)[0], bf16=False)
    reference = type(actor)(moved(family)["model"], bf16=False)
    arguments = {"processor": load(family)[1], "reward_fn": length_and_sum, **arguments}
    return cls(strategy, actor, None, [], reference, ema_model, *(None,) * 4, **arguments)


def cpu_strategy(**options):
    strategy = strategy_of(**options)
    strategy.use_cpu = True
    return strategy


def test_a_trainer_of_a_strategy_alone(tmp_path):
    options = {name: value for name, value in GIVEN.items() if name not in ("ptx_coef", "remote_rm_url")}
    options |= {"enable_ema": True, "save_path": str(tmp_path), "top_p": 0.9, "gamma": 0.8, "generate_max_len": 7}
    options |= {"micro_train_batch_size": 4}
    ppo = trainer_of(cpu_strategy(**options))
    config = ppo.trainer.args
    assert (config.beta, config.epsilon, config.num_ppo_epochs, config.max_grad_norm) == (0.05, 0.3, 3, 0.5)
    assert (config.kl_target, config.kl_horizon, config.ema_decay, config.save_only_model) == (0.1, 50, 0.9, True)
    assert config.cliprange_value == MultimodalPPOConfig.cliprange_value  # there is no critic
    assert config.gradient_checkpointing and ppo.save_hf_ckpt
    assert ppo.actor.base_model.is_gradient_checkpointing
    maker = ppo.experience_maker
    assert maker.prompt_max_len == 512 and maker.strategy.micro_rollout_batch_size == 2
    assert (ppo.replay_buffer.limit, ppo.replay_buffer.cpu_offload) == (8, False)
    assert ppo.generate_kwargs == {"max_new_tokens": 7, "top_p": 0.9, "gamma": 0.8}
    assert ppo.trainer.ema is not None

    class Own(PPOTrainerVL):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, eps_clip=0.1, **kwargs)

    with pytest.raises(ValueError, match="`eps_clip=0.1` contradicts `eps_clip=0.3` of the strategy's command line"):
        trainer_of(cpu_strategy(**options), Own)
    without = trainer_of(cpu_strategy(save_path=str(tmp_path)))
    assert without.trainer.ema is None and without.trainer.args.num_ppo_epochs == 1


# Keywords of LightRFT's trainer


def test_keywords_are_options_of_the_strategy(tmp_path):
    """Those from the command line change nothing; others set what they set there."""
    strategy = strategy_of(overlong_buffer=True, overlong_buffer_len=16, use_gspo=True, **{"use_kl_loss": True})
    keywords = {"loss_agg_mode": "seq-mean-token-mean", "normalize_advantages": True, "use_sequence_rewards": True}
    keywords |= {"reward_tokenizers": [], "packing_samples": False, "dynamic_sampling": False, "use_gspo": True}
    keywords |= {"overlong_buffer": True, "overlong_buffer_len": 16, "overlong_buffer_penalty_factor": 1.0}
    keywords |= {"print_replay_buffer_stats": False, "freezing_actor_steps": -1, "high_entropy_token_ratio": 0.0}
    sampling = {"do_sample": True, "max_new_tokens": 8, "temperature": 1.0, "eos_token_id": 2}
    nothing = {"max_length": None, "pad_token_id": None}
    assert take_keywords(strategy, {**keywords, **sampling, **nothing}) == (strategy, sampling)
    # Without a command line, or without these options on it
    for own in (plain(tmp_path, advantage_estimator="rloo", loss_type="grpo", beta=0.0), strategy_of()):
        config, left = take_keywords(own, {**keywords, "high_entropy_token_ratio": 0.2, **sampling, **nothing})
        assert left == sampling and config is not own and own.importance_sampling_level == "token"
        assert (config.importance_sampling_level, config.soft_overlong_cache) == ("sequence", 16)
        assert config.top_entropy_quantile == 0.2 and config.loss_type == "grpo"
    gae = strategy_of(advantage_estimator="gae", gamma=0.9)
    assert take_keywords(gae, {"freezing_actor_steps": 5})[0].freezing_actor_steps == 5
    assert take_keywords(gae, {"gamma": 0.9})[1] == {"gamma": 0.9}
    assert take_keywords(gae, {})[1] == {}  # the estimator has it


@pytest.mark.parametrize(
    "options, keywords, error",
    [
        ({"use_gspo": True}, {"use_gspo": False}, "`use_gspo=False` contradicts `use_gspo=True` of the strategy's"),
        ({"loss_agg_mode": "token-mean"}, {"loss_agg_mode": "seq-mean-token-mean"}, "contradicts `loss_agg_mode="),
        ({"overlong_buffer_len": 64}, {"overlong_buffer": True, "overlong_buffer_len": 16}, "contradicts .*=64"),
        ({"gamma": 0.9}, {"gamma": 0.8}, "`gamma=0.8` contradicts `gamma=0.9` of the strategy's command line"),
        ({"generate_max_len": 9}, {"max_new_tokens": 8}, "`max_new_tokens=8` contradicts `generate_max_len=9`"),
        ({}, {"use_gspo": "False"}, "`use_gspo` must be `True` or `False`, got the text"),
        ({}, {"advantage_clip": 1.0}, "`advantage_clip=1.0` has no field in the config"),
        ({}, {"overlong_buffer": True, "overlong_buffer_penalty_factor": 0.5}, "`overlong_buffer_penalty_factor=0.5`"),
    ],
)
def test_keywords_that_are_errors(options, keywords, error):
    with pytest.raises(ValueError, match=error):
        take_keywords(strategy_of(**options), keywords)


def test_keywords_contradict_fields(tmp_path):
    strategy = plain(tmp_path, advantage_estimator="rloo", soft_overlong_cache=8)
    with pytest.raises(ValueError, match="`overlong_buffer=True` contradicts `soft_overlong_cache=8` of `strategy`"):
        take_keywords(strategy, {"overlong_buffer": True, "overlong_buffer_len": 16})
    assert take_keywords(strategy, {"overlong_buffer": True, "overlong_buffer_len": 8})[0].soft_overlong_cache == 8


@pytest.mark.parametrize(
    "keywords, error",
    [
        ({"dynamic_sampling": True}, "`dynamic_sampling` .* has no effect .*, or use `MultimodalPPOTrainer`"),
        ({"max_new_token": None}, "`max_new_token` is no option of sampling"),
        ({"use_gsp": True}, "`use_gsp` is no option"),
        ({"save_hf_ckpt": "False"}, "`save_hf_ckpt` must be `True` or `False`, got the text 'False'"),
        ({"buffer_cpu_offload": "no"}, "`buffer_cpu_offload` must be `True` or `False`, got the text 'no'"),
        ({"eps_clip": -0.2}, "`eps_clip` must be at least 0"),
        ({"prompt_max_len": 0}, "`prompt_max_len` must be at least 1"),
        ({"high_entropy_token_ratio": 0.2}, "make the actor with `high_entropy_token_ratio=0.2`"),
    ],
)
def test_errors_of_the_constructor(tmp_path, keywords, error):
    with pytest.raises(ValueError, match=error):
        trainer_of(cpu_strategy(save_path=str(tmp_path)), **keywords)


# Batches and datasets


def test_media_columns_follow_the_actor():
    assert media_columns_of(ActorVL) == (("images",), ("images", "videos")) == media_columns_of(ActorOmni)
    assert media_columns_of(ActorAL) == (("audios",),)


def test_audio_with_the_trainer_of_scripts(tmp_path):
    """Samples with their rate are a medium, alone or in a list, as librosa returns them."""
    rate = 16000
    clips = [np.sin(np.arange(n) * 0.1).astype(np.float32) for n in (4000, 6000)]
    batch = (["What do you hear?", "And here?"], [(clips[0], rate), [(clips[1], rate)]], ["a", "b"], ["x", "y"])
    options = {
        "advantage_estimator": "rloo",
        "n_samples_per_prompt": 2,
        "micro_train_batch_size": 4,
        "num_episodes": 1,
    }
    options |= {"save_path": str(tmp_path), "actor_learning_rate": 1e-2, "lambd": 0.95, "images_key": "audio_path"}
    strategy = cpu_strategy(**options, rollout_batch_size=2, train_batch_size=4, generate_max_len=4)
    actor = ActorAL(load("qwen2_audio")[0], bf16=False)
    seen = []

    def reward_fn(completion_ids, references, audios, **columns):
        seen.append((references, [len(audio) for audio in audios]))
        return length_and_sum(completion_ids)

    arguments = {"prompt_max_len": 1024, "reward_fn": reward_fn, "lambd": 0.95, "micro_rollout_batch_size": 4}
    ppo = trainer_of(strategy, SPMDPPOTrainerVL, actor, family="qwen2_audio", **arguments)
    before = {name: value.clone() for name, value in actor.model.named_parameters()}
    loader = DataLoader([0, 1], batch_size=2, collate_fn=lambda rows: batch)
    ppo.fit(strategy, loader, None)
    assert ppo.trainer.state.global_step == 1 and ppo.trainer.card_notes.modalities == {"audio"}
    assert seen[0][0] == ["a", "a", "b", "b"]
    assert any(not torch.equal(value, before[name]) for name, value in actor.model.named_parameters())
    rows = ppo._rows(batch)
    assert all(len(row["audios"]) == 1 and row["audios"][0][1] == rate for row in rows)


def test_prompts(tmp_path):
    path = saved("qwen2_5_vl")
    tokenizer, processor = get_tokenizer_processor_vl(path, load("qwen2_5_vl")[0], "left")
    picture = Image.new("RGB", (56, 56))
    rows = [
        {"question": "<image>What is it?", "images": [picture], "answer": "['9']", "kind": "geo"},
        {
            "question": [{"role": "system", "content": "x"}, {"role": "user", "content": "Two?"}],
            "images": [picture] * 2,
        },
        {"question": {"value": "Why?"}, "reward_model": {"ground_truth": " 4 "}, "extra_info": {"kind": "text"}},
        {"question": {"content": [{"type": "image"}, {"type": "text", "text": "How?"}]}, "images": picture},
        {"question": "Plain", "ground_truth": {"value": ["a", "b"]}, "extra_info": {"constraints": "c"}},
    ]
    keys = {"input_key": "question", "images_key": "images", "reference_key": "answer", "label_key": "kind"}
    strategy = strategy_of(**keys, apply_chat_template=True, system_prompt="Think.")
    dataset = PromptDatasetVL(rows, tokenizer, processor, 512, strategy, input_template="Q: {}")
    assert len(dataset) == 5
    prompts, images, references, labels = dataset.collate_fn([dataset[index] for index in range(5)])
    assert references == ["9", None, "4", None, ["a", "b"]] and labels == ["geo", None, "text", None, None]
    assert images == [[picture], [picture] * 2, None, picture, None]
    content = [{"type": "image"}, {"type": "text", "text": "Q: What is it?"}]
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": content}]
    assert prompts[0] == processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert [prompt.count("<|image_pad|>") for prompt in prompts] == [1, 2, 0, 1, 0]
    assert [text in prompt for text, prompt in zip(("What", "Two?", "Why?", "How?", "Plain"), prompts, strict=True)]
    without = PromptDatasetVL(rows, tokenizer, processor, 512, strategy_of(**keys))
    assert without[1][0] is rows[1]["question"] and without[0][0] == "<image>What is it?"
    of_text = PromptDatasetVL(rows, None, tokenizer, None, strategy)[2][0]
    assert of_text == tokenizer.apply_chat_template(
        [{"role": "system", "content": "Think."}, {"role": "user", "content": "Why?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    with pytest.raises(ValueError, match="has no message of a user"):
        PromptDatasetVL([{"question": []}], None, processor, None, strategy)[0]


def test_supervised_rows():
    picture = Image.new("RGB", (56, 56))
    rows = [
        {"q": "What?", "a": "This.", "image": picture},
        {"q": [{"role": "user", "content": "b"}], "a": {"value": "c"}},
    ]
    strategy = strategy_of(input_key="q", output_key="a", images_key="image")
    dataset = SFTDatasetVL(rows, None, None, 512, strategy, input_template="<{}>")
    completion = [{"role": "assistant", "content": "This."}]
    expected = {"prompt": [{"role": "user", "content": "<What?>"}], "completion": completion, "images": [picture]}
    assert dataset[0] == expected and dataset[1]["completion"][0]["content"] == "c" and "images" not in dataset[1]
    assert dataset.collate_fn([1]) == [1] and len(dataset) == 2
    # As LightRFT's script calls it, without a processor
    script = SFTDatasetVL(rows, None, 512, strategy_of(input_key="q"), pretrain_mode=True)
    assert script[1] == {"messages": rows[1]["q"]}
    with pytest.raises(ValueError, match="set `output_key`"):
        script[0]
    with pytest.raises(TypeError, match="`strategy` must be that of `get_strategy`"):
        SFTDatasetVL(rows, None, 512)


def test_blended_datasets(tmp_path, caplog):
    numbers = Dataset.from_dict({"n": [*range(40)]})
    DatasetDict(train=numbers, test=numbers.select(range(3))).save_to_disk(str(tmp_path / "disk"))
    numbers.map(lambda row: {"n": row["n"] + 100}).to_json(str(tmp_path / "rows.jsonl"))
    (tmp_path / "list.json").write_text(json.dumps([{"n": 200}, {"n": 201}]))
    numbers.to_csv(str(tmp_path / "table.csv"))
    disk = str(tmp_path / "disk")
    lines = str(tmp_path / "rows.jsonl")
    assert blending_datasets(disk, "1.0", None, 42, return_eval=False)["n"][:] == [*range(40)]
    assert len(blending_datasets(disk, "1.0", strategy_of(), return_eval=False, train_split="test")) == 3
    train, held_out = blending_datasets(f"{disk}, {lines}", "0.25,0.75", None, 7)
    assert (train["n"][:], held_out["n"][:]) == tuple(
        part["n"][:] for part in blending_datasets(f"{disk},{lines}", "0.25,0.75", None, 7)
    )
    share = sum(n >= 100 for n in train["n"]) / len(train)
    assert 0.6 < share < 0.9 and {*train["n"]} <= {*range(40), *range(100, 140)}
    assert {*held_out["n"]} <= {0, 1, 2, 100}
    for name in ("list.json", "table.csv"):
        assert len(blending_datasets(str(tmp_path / name), "1", return_eval=False, max_count=2)) == 2
    assert len(blending_datasets(lines, "1", return_eval=False, train_split="validation")) == 40
    assert "has no split 'validation', but ['train']: 'train' is taken" in caplog.text
    with pytest.raises(ValueError, match=r"There are 1 probabilities \(1.0\) for 2 datasets"):
        blending_datasets(f"{disk},{lines}", "1.0")


# A script


@pytest.mark.parametrize("estimator", ["group_norm", "gae"])
def test_a_script_trains(tmp_path, estimator):
    """The calls of LightRFT's scripts, with all arguments that they pass, make updates and save the model."""
    from trl_multimodal_rft.lightrft.models.critic_vl import CriticVL

    path = saved("qwen2_5_vl")
    options = {**COMMAND_LINE, **CRITIC_FREE, "advantage_estimator": estimator, "engine_type": "transformers"}
    options |= {"pretrain": path, "critic_pretrain": path, "save_path": str(tmp_path), "ckpt_path": str(tmp_path)}
    options |= {"rollout_batch_size": 2, "train_batch_size": 4, "micro_rollout_batch_size": 4, "generate_max_len": 4}
    options |= {"actor_learning_rate": 1e-3, "lr_warmup_ratio": 0.0, "eval_split": None, "max_epochs": 2}
    options |= {"input_key": "prompt", "images_key": "image", "label_key": "prompt", "prompt_max_len": 512, "l2": 0.01}
    args = Namespace(**options)
    strategy = get_strategy(args)
    strategy.use_cpu = True
    actor = ActorVL(path, bf16=args.bf16, target_modules=args.target_modules, lora_rank=args.lora_rank)
    initial_model = ActorVL(path, bf16=args.bf16)
    critic = CriticVL(path, bf16=args.bf16) if estimator == "gae" else None
    tokenizer, processor = get_tokenizer_processor_vl(path, actor.model, "left")
    rows = [{"prompt": "What is it?", "image": row["image"]} for row in image_rows(4)]
    dataset = PromptDatasetVL(rows, tokenizer, processor, args.prompt_max_len, strategy)
    size = args.rollout_batch_size // strategy.world_size
    prompts = strategy.setup_dataloader(dataset, size, True, True, collate_fn=dataset.collate_fn)
    sides = strategy.prepare_models_and_optimizers(actor, critic, [], initial_model, args, 8)
    (actor, actor_optim, actor_scheduler), (critic, critic_optim, critic_scheduler), rewards, initial_model = sides
    names = (
        "max_epochs micro_train_batch_size micro_rollout_batch_size gradient_checkpointing prompt_max_len value_clip"
    )
    names += " eps_clip loss_agg_mode use_gspo normalize_advantages use_sequence_rewards gamma lambd init_kl_coef"
    names += " kl_target ptx_coef max_norm temperature top_p save_hf_ckpt disable_ds_ckpt packing_samples"
    names += " dynamic_sampling overlong_buffer overlong_buffer_len overlong_buffer_penalty_factor"
    trainer = SPMDPPOTrainerVL(
        *(strategy, actor, critic, rewards, initial_model, None),
        *(actor_optim, critic_optim, actor_scheduler, critic_scheduler),
        tokenizer=tokenizer,
        processor=processor,
        ema_beta=0.992,
        do_sample=True,
        max_new_tokens=args.generate_max_len,
        max_length=args.max_len,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        reward_fn=length_and_sum,
        reward_tokenizers=[],
        print_replay_buffer_stats=args.print_replay_buffer_stats,
        **{name: getattr(args, name) for name in names.split()},
    )
    # `fit` shuffles each pass by the seed, also in a run that resumes with a new loader
    orders = []
    for passes in ((0, 1), (1,)):
        loader = strategy.setup_dataloader(range(8), 2, True, True, list)
        shards = trainer.trainer.accelerator.prepare_data_loader(loader, device_placement=False)
        for index in passes:
            shards.set_epoch(index)
            orders.append(list(shards))
    assert orders[0] != orders[1] == orders[2]
    before = {name: value.clone() for name, value in actor.model.named_parameters()}
    trainer.fit(strategy, prompts, None)
    assert trainer.trainer.state.global_step == 8
    weights = dict(actor.model.named_parameters())
    assert any(not torch.equal(value, weights[name]) for name, value in before.items())
    strategy.save_model(actor, tokenizer, args.save_path)
    again = dict(ActorVL(args.save_path, bf16=False).model.named_parameters())
    assert again.keys() == {name for name in weights if not name.startswith("critic.")}
    assert all(torch.equal(value, weights[name]) for name, value in again.items())


def test_values_that_a_config_was_given(tmp_path):
    """A field counts as set if it was passed, even if it is the config's default."""
    left_out = {"max_epochs": 1, "gradient_checkpointing": False, "init_kl_coef": 0.001}
    values = resolved(plain(tmp_path))
    assert {name: values[name] for name in left_out} == left_out
    values = resolved(plain(tmp_path, num_ppo_epochs=4, gradient_checkpointing=True, beta=0.0))
    assert [values[name] for name in left_out] == [4, True, 0.0]
    assert resolved(plain(tmp_path, num_ppo_epochs=4), max_epochs=2)["max_epochs"] == 2
    strategy = strategy_of(remote_rm_url="http://a", reward_clip_range=[-1.0, 1.0])
    assert resolved(strategy, remote_rm_url=["http://a"])["remote_rm_url"] == ["http://a"]
    assert take_keywords(strategy, {"reward_clip_range": (-1.0, 1.0)})[0] is strategy


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kl_estimator": "K3"}, "`kl_estimator` must be"),
        ({"kl_estimator": "k4", "use_kl_loss": True}, "`kl_estimator` must be"),
        ({"save_steps": 2.7}, "`save_steps=2.7` must be a whole number"),
        ({"save_steps": 0.5}, "`save_steps=0.5` must be a whole number"),
    ],
)
def test_options_that_meant_something_else(options, error):
    with pytest.raises(ValueError, match=error):
        strategy_of(init_kl_coef=0.1, **options)
