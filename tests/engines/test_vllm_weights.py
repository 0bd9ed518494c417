# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names and values of the weights that the trainer sends to vLLM, for all families, without an engine."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from by_name.test_by_name import OMNI, whole_omni
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import saved
from peft import LoHaConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from trl.generation.vllm_client import VLLMClient

from trl_multimodal_rft.engines import vllm_in_process, vllm_weights
from trl_multimodal_rft.engines.vllm_adapters import EngineAdapter
from trl_multimodal_rft.engines.vllm_client import ServerGroup
from trl_multimodal_rft.engines.vllm_in_process import InProcess
from trl_multimodal_rft.engines.vllm_weights import checkpoint_layer, checkpoint_weights, load_and_find_unread
from trl_multimodal_rft.models.pretrained import load_model


# Of the default run: joined, split, transposed, tied or renamed weights
KINDS = ("qwen2_5_vl", "qwen2_audio", "qwen2_5_omni", "gemma3", "llava", "qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe")
KINDS += ("kimi_k25", "ernie4_5_vl_moe", "lfm2_vl")
with_adapters = pytest.mark.parametrize("family", slow_but(ALL_FAMILIES, *KINDS))
NO_ADAPTER = ("glm4v_moe",)  # PEFT adapts its experts along with its dense layer, which vLLM doesn't support
# Layers that some families don't have
no_such_layer = pytest.mark.filterwarnings(
    "ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"
)


class WithoutEngine(InProcess):
    def _init_vllm(self):
        pass


def load(family):
    return ALL_FAMILIES[family].model_class.from_pretrained(saved(family))


def synced(model) -> dict[str, torch.Tensor]:
    """Returns the weights of a sync, each once."""
    generation = WithoutEngine(model=model, accelerator=Accelerator(cpu=True), processing_class=None)
    weights = {}
    for name, weight in generation._iter_named_params():
        assert name not in weights
        weights[name] = weight.clone()
    return weights


def assert_stored(weights, folder, buffers=()):
    """Asserts that the sync has all weights of the folder, except those that no update changes."""
    stored = {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}
    if not any(name.startswith("thinker.") for name in stored):  # before transformers 5.21, they are sent with it
        weights = {name.removeprefix("thinker."): weight for name, weight in weights.items()}
    assert weights.keys() <= stored.keys(), weights.keys() - stored.keys()
    left = sum(stored[name].numel() for name in stored.keys() - weights.keys())
    assert left == sum(buffer.numel() for buffer in buffers)
    for name, weight in weights.items():
        assert torch.equal(weight, stored[name]), name


def buffers(model) -> list[torch.Tensor]:
    """Returns saved buffers, which don't train."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return [value for name, value in model.state_dict().items() if name not in parameters]


@pytest.mark.parametrize("family", slow_but(ALL_FAMILIES, *KINDS))
def test_weights_are_those_of_the_checkpoint(family, tmp_path):
    """The names are those of loading and of saving."""
    model = load(family)
    weights = synced(model)
    experts = {name: weight.shape for name, weight in model.named_parameters() if ".experts." in name}
    assert not any(shape[-1] == shape[-2] for shape in experts.values() if len(shape) == 3), experts
    assert_stored(weights, saved(family), buffers(model))
    model.save_pretrained(tmp_path)
    assert_stored(weights, tmp_path, buffers(model))
    assert not any("language_model.model.model." in name for name in weights)  # as released models have it


@pytest.mark.parametrize("is_released", [True, False])
def test_experts_are_sent_and_saved_as_released(is_released, tmp_path):
    """Also after transformers alone has saved them in its own layout, which vLLM doesn't load."""
    folder = shutil.copytree(saved("qwen3_vl_moe"), tmp_path / "loaded")
    stored = load_file(folder / "model.safetensors")
    shapes = {name.split(".")[-1]: tuple(each.shape) for name, each in stored.items() if ".experts." in name}
    assert shapes == {"gate_up_proj": (4, 64, 256), "down_proj": (4, 128, 64)}  # experts, inputs, outputs
    if not is_released:
        own = {k: w.transpose(1, 2).contiguous() if ".experts." in k else w for k, w in stored.items()}
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    model = ALL_FAMILIES["qwen3_vl_moe"].model_class.from_pretrained(folder)
    weights = synced(model)
    assert weights.keys() == stored.keys()
    assert_stored(weights, saved("qwen3_vl_moe"))
    model.save_pretrained(tmp_path / "again")
    assert_stored(weights, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["text_config"]["norm_topk_prob"] is True


class Transposing(nn.Module):
    """A model of an engine, whose kernel takes its weight transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def process_weights_after_loading(self):
        self.weight.data = self.weight.data.T.contiguous()

    def forward(self, x):
        return x @ self.weight

    def load_weights(self, weights):
        for _, weight in weights:
            self.weight.data.copy_(weight)


class Worker:
    """As vLLM's: it loads what it holds after the last weight was given."""

    def __init__(self, model):
        self.model_runner = SimpleNamespace(model=model)
        model.process_weights_after_loading()

    def reload_weights(self, weights_iterator):
        model = self.model_runner.model
        given = [*weights_iterator]
        model.weight.data = torch.zeros(3, 2)
        model.load_weights(given)
        model.process_weights_after_loading()


def test_weights_that_the_engine_converts_after_loading(monkeypatch):
    engine = WithoutEngine(model=nn.Linear(2, 3, bias=False), accelerator=Accelerator(cpu=True), processing_class=None)
    worker = Worker(Transposing())
    engine.llm = SimpleNamespace(
        llm_engine=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker), reset_encoder_cache=int),
        reset_prefix_cache=int,
    )

    def merged():
        yield "weight", engine.model.weight.data
        engine.model.weight.data.add_(1)  # as adapters are unmerged

    monkeypatch.setattr(engine, "_iter_named_params", merged)
    monkeypatch.setattr(vllm_in_process, "StageMissingLayer", nn.Identity, raising=False)
    for _ in range(2):
        before = engine.model.weight.detach().clone()
        engine.sync_weights()
        torch.testing.assert_close(worker.model_runner.model(torch.eye(2)), before.T)
    monkeypatch.delattr(Worker, "reload_weights")
    with pytest.raises(RuntimeError, match="Worker can't reload weights.*install vllm>=0.24"):
        engine.sync_weights()


def linear(model) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and "lm_head" not in name]


@with_adapters
@no_such_layer
def test_merged_weights_are_those_of_the_checkpoint(family, tmp_path):
    model = load(family)
    untrained = buffers(model)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=linear(model), init_lora_weights=False))
    before = {name: weight.clone() for name, weight in synced(load(family)).items()}
    weights = synced(peft)
    assert sum(not torch.equal(weight, before[name]) for name, weight in weights.items()) >= 10
    peft.merge_and_unload().save_pretrained(tmp_path)
    assert_stored(weights, tmp_path, untrained)


@pytest.mark.parametrize("family", [OMNI, "qwen3_omni_moe"])
def test_weights_of_a_thinker_are_those_of_the_whole_model(family, tmp_path):
    folder, _ = whole_omni(family)
    weights = synced(load_model(folder, dtype="float32", device_map=None))
    stored = load_file(Path(folder, "model.safetensors"))
    assert weights.keys() == {name for name in stored if name.startswith("thinker.")}
    assert all(torch.equal(weight, stored[name]) for name, weight in weights.items())


# Once per sync


@pytest.mark.parametrize(
    ("family", "groups"),
    # Weights of kimi_k25 are joined, those of ernie4_5_vl_moe are joined and split, those of experts are transposed
    [("qwen2_5_vl", 0), ("qwen2_audio", 0), ("qwen3_vl_moe", 4), ("kimi_k25", 6), ("ernie4_5_vl_moe", 5)],
)
def test_names_are_looked_up_after_the_first_sync(family, groups, monkeypatch):
    """Groups of weights that are joined, split or transposed are converted by each sync."""
    model = load(family)
    reverted = []
    revert = vllm_weights.revert_weight_conversion
    monkeypatch.setattr(vllm_weights, "revert_weight_conversion", lambda *args: reverted.append(1) or revert(*args))
    before = synced(model)
    assert len(reverted) == groups + 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    after = synced(model)
    assert len(reverted) == 2 * groups + 1
    assert list(before) == list(after) and not any(torch.equal(before[name], after[name]) for name in before)


def test_weights_are_converted_when_their_group_has_arrived():
    """So that only one group at a time is held, also where a next weight takes the memory of the last."""
    model = load("kimi_k25")
    given = []
    memory = torch.empty(max(weight.numel() for weight in model.parameters()))

    def gathered():
        for name, weight in model.named_parameters():
            given.append(name)
            yield name, memory[: weight.numel()].view(weight.shape).copy_(weight.detach())

    made = {}
    expected = synced(model)
    for name, weight in checkpoint_weights(model, gathered()):
        made[name] = given[-1]
        assert torch.equal(weight, expected[name]), name
    joined = {name: last for name, last in made.items() if "wqkv" in name}
    assert len(joined) == 4
    for last in joined.values():
        assert "v_proj" in last


def test_a_transfer_that_fails_goes_on_gathering(monkeypatch):
    """Other ranks gather each weight with the one that sends it, and would wait for it."""
    gathered = []

    def fail(client, metadata, named_params):
        next(named_params)
        raise RuntimeError("a server is gone")

    monkeypatch.setattr(VLLMClient, "update_named_params", fail)
    weights = ((str(i), gathered.append(i)) for i in range(4))
    with pytest.raises(RuntimeError, match="a server is gone"):
        ServerGroup.update_named_params(object.__new__(ServerGroup), [], weights)
    assert gathered == [0, 1, 2, 3]


def test_weights_that_no_one_reads():
    into = torch.zeros(6)
    held = []

    def loaded(weights):
        for name, weight in weights:
            if name == "dropped":
                weight.view(2, 3).t().shape  # noqa: B018
            elif name == "number":
                into.fill_(weight.item())
            elif name == "part":
                into[:3].copy_(weight.narrow(0, 0, 3))
            elif name.startswith("late"):
                held.append(weight)
            elif name == "last":
                break
        into.copy_(torch.cat(held))

    whole = torch.ones(6)
    late = zip(["late 1", "late 2"], torch.ones(6).chunk(2), strict=True)
    given = [
        ("number", torch.ones(())),
        ("part", whole),
        ("dropped", whole),
        *late,
        ("empty", whole[:0]),
        ("last", whole),
        ("more", whole),
    ]
    assert load_and_find_unread(loaded, given) == ["dropped", "last", "more"]


# Adapters alone


def adapted(family, **settings):
    model = load(family)
    layers = [name for name in linear(model) if checkpoint_layer(model, name) is not None]
    return get_peft_model(
        model, LoraConfig(**{"r": 2, "target_modules": layers, "init_lora_weights": False, **settings})
    )


@with_adapters
@no_such_layer
def test_adapter_is_what_moves_the_checkpoint(family, tmp_path):
    """Covers the layers of the same names, with any scales and ranks."""
    if family in NO_ADAPTER:
        with pytest.raises(ValueError, match="its config has `target_parameters="):
            EngineAdapter(adapted(family), Accelerator(cpu=True))
        return
    model = adapted(family, r=4, use_rslora=True, rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 16})
    EngineAdapter(model, Accelerator(cpu=True)).write(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 4
    before = synced(load(family))
    after = synced(model)
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    moved = {name.removesuffix(".weight") for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert names == moved and len(names) >= 10
    for name in names:
        down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        update = after[f"{name}.weight"] - before[f"{name}.weight"]
        torch.testing.assert_close(up @ down, update, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "has `use_dora=True`; remove this option"),
        ({"modules_to_save": ["merger"]}, r"has `modules_to_save=\['merger'\]`; remove this option"),
        ({"trainable_token_indices": [1]}, r"has `trainable_token_indices=\[1\]`; remove this option"),
        ({"bias": "all"}, "has `bias='all'`; remove this option"),
        (
            {"target_modules": ["patch_embed.proj"]},
            r"the layer 'model.visual.patch_embed.proj' \(Conv3d\); leave it out",
        ),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens' \(Embedding\); leave it out"),
    ],
)
def test_adapters_that_vllm_cannot_take(settings, message):
    with pytest.raises(ValueError, match=f"{message}.*or set `vllm_engine_kwargs={{'enable_lora': False}}`"):
        EngineAdapter(adapted("qwen2_5_vl", **settings), Accelerator(cpu=True))


def test_other_ways_to_train_than_one_lora():
    def refused(model, message):
        with pytest.raises(ValueError, match=message):
            EngineAdapter(model, Accelerator(cpu=True))

    model = load("qwen2_5_vl")
    refused(model, "needs an adapter; pass `peft_config`")
    refused(
        get_peft_model(model, LoHaConfig(target_modules=["q_proj"])),
        "`peft_config` is a LoHaConfig; pass a `LoraConfig`",
    )
    model = adapted("qwen2_5_vl")
    model.base_model.model.model.visual.merger.ln_q.weight.requires_grad_(True)
    refused(model, r"other weights are trained, too, such as 'model.visual.merger.ln_q.weight'; freeze all")
    model = adapted("qwen2_5_vl", r=513)
    with pytest.raises(ValueError, match="its rank is 513; lower it to 512"):
        EngineAdapter(model, Accelerator(cpu=True)).engine_kwargs  # noqa: B018


def test_engine_of_an_adapter():
    own = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1}
    decoder = adapted("qwen2_5_vl", r=12, target_modules=r".*language_model.*q_proj|lm_head")
    assert EngineAdapter(decoder, Accelerator(cpu=True)).engine_kwargs == own
    everywhere = EngineAdapter(adapted("qwen2_5_vl", r=12), Accelerator(cpu=True))
    assert everywhere.engine_kwargs == {**own, "enable_tower_connector_lora": True}
