# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`offload_during_generation`: what sampling doesn't need takes no memory of the device, and updates stay the same."""

from types import SimpleNamespace

import pytest
import torch
from helpers.grpo_runs import FAMILY, TWO
from helpers.marks import slow_but
from helpers.resumed_runs import Recording, checkpoint, logged, same_weights
from helpers.samplers import PseudoRandom, Wrapped
from helpers.trainer_utils import TRAINERS, image_rows, load, make_trainer, metrics, norm, run
from peft import LoraConfig
from torch.optim import AdamW

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.evaluation import evaluate_trainer
from trl_multimodal_rft.trainers.sampling.offload import HostMemory, idle_storages, storages


pytestmark = pytest.mark.gate


KINDS = ["grpo", "rloo", "ppo"]
ADAM = {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1}
LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def n_bytes(tensors) -> int:
    """Bytes of memory that tensors have, each once."""
    return sum(storage.nbytes() for storage in storages(tensors).values())


def live(trainer) -> dict[str, int]:
    """Bytes of memory by what they are for."""
    optimizer = trainer.optimizer.state.values()
    critic = getattr(trainer, "critic", None)
    of_critic = [] if critic is None else [*critic.parameters()]
    ids = set(map(id, of_critic))
    parameters = [parameter for parameter in trainer.model.parameters() if id(parameter) not in ids]
    return {
        "optimizer": n_bytes(value for state in optimizer for value in state.values()),
        "gradients": n_bytes(p.grad for p in trainer.model.parameters() if p.grad is not None),
        "reference": 0 if trainer.ref_model is None else n_bytes(trainer.ref_model.parameters()),
        "critic": n_bytes(of_critic),
        "average": n_bytes(trainer.ema.state_dict().values()) if getattr(trainer, "ema", None) else 0,
        "policy": n_bytes(parameters),
    }


class Counting(Wrapped):
    """Counts memory while the model samples."""

    def __init__(self, trainer):
        super().__init__(trainer)
        self.live = []
        if trainer.ref_model is not None:  # which is mapped from its file, as no weights on a GPU are
            for parameter in trainer.ref_model.parameters():
                parameter.data = parameter.data.clone()

    def __call__(self, model, prompts, **options):
        self.live.append(live(self.trainer))
        return super().__call__(model, prompts, **options)


class CountingRandom(Counting, PseudoRandom):
    pass


def both(kind: str, *, rows=None, **options):
    """Runs without the option, and with it."""
    once = {"num_ppo_epochs": 1} if kind == "ppo" else {}
    options = {"sampler": CountingRandom, **ADAM, **once, "max_steps": 3, **options}
    return [
        run(TRAINERS[kind], FAMILY, rows or image_rows(), offload_during_generation=offload, **options)
        for offload in (False, True)
    ]


def assert_same(plain, ours) -> None:
    assert norm(plain.update) > 0.01
    assert all(torch.equal(plain.update[name], ours.update[name]) for name in plain.update)
    assert metrics(plain.history) == metrics(ours.history)
    assert live(plain.trainer) == live(ours.trainer)  # all came back


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("grpo", {"beta": 0.1}),
        ("grpo", {"optim": "sgd"}),
        ("rloo", {"beta": 0.1}),
        ("ppo", {"beta": 0.1, "ema_decay": 0.9, "kl_estimator": "k1"}),
        ("ppo", {"shared_trunk": True}),
    ],
)
def test_only_the_policy_takes_memory_while_it_samples(kind, options):
    plain, ours = both(kind, **options)
    assert_same(plain, ours)
    trainer = plain.trainer
    (_, second, third) = plain.trainer.sampler.live
    numbers = [p.numel() for p in trainer.model.parameters() if p.requires_grad]
    policy = sum(p.nbytes for p in load(FAMILY)[0].parameters())
    critic = sum(p.nbytes for p in trainer.critic.parameters()) if kind == "ppo" else 0
    adam = 0 if options.get("optim") == "sgd" else sum(2 * 4 * n + 4 for n in numbers)  # and a step counter
    assert (
        second
        == third
        == {
            "optimizer": adam,
            "gradients": 0,  # none after the update
            "reference": policy if "beta" in options else 0,
            "critic": critic,
            "average": policy if "ema_decay" in options else 0,
            "policy": policy,
        }
    )
    for each in ours.trainer.sampler.live:
        assert each == {**dict.fromkeys(each, 0), "policy": policy}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_an_update_that_samples_twice(kind):
    """They are accumulated over two rollouts."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}
    plain, ours = both(kind, max_steps=2, **options)
    assert_same(plain, ours)
    trained = sum(p.nbytes for p in plain.trainer.model.parameters())
    assert [each["gradients"] for each in plain.trainer.sampler.live] == [0, trained, 0, trained]
    assert [each["gradients"] for each in ours.trainer.sampler.live] == [0] * 4


@pytest.mark.parametrize("kind", slow_but(KINDS, "ppo"))
def test_adapter(kind):
    """With the model's own samples."""
    options = {"objects": {"peft_config": LORA}, "sampler": Counting, "beta": 0.1, **TWO, **ADAM}
    plain, ours = both(kind, **options)
    assert_same(plain, ours)
    assert plain.trainer.sampler.live[1]["optimizer"] > 0
    assert all(each["optimizer"] == each["critic"] == 0 < each["policy"] for each in ours.trainer.sampler.live)


def test_evaluation_samples_without_them(tmp_path):
    """In training, and by an evaluator."""
    runs = []
    for offload in (False, True):
        model, processor = load(FAMILY)
        trainer = make_trainer(
            MultimodalGRPOTrainer,
            FAMILY,
            image_rows(8),
            tmp_path / str(offload),
            objects={"model": model, "processing_class": processor, "eval_dataset": image_rows(4)},
            sampler=Counting,
            eval_strategy="steps",
            eval_steps=1,
            offload_during_generation=offload,
            **ADAM,
        )
        trainer.train()
        runs.append((trainer, evaluate_trainer(trainer).metrics))
    (plain, expected), (ours, result) = runs
    assert result == expected and same_weights(plain, ours)
    assert metrics(plain.state.log_history) == metrics(ours.state.log_history)
    assert len(ours.sampler.live) == len(plain.sampler.live) > 4
    assert all(each["optimizer"] > 0 for each in plain.sampler.live[1:])
    assert not any(each["optimizer"] for each in ours.sampler.live)


REUSED = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
REUSED |= {**ADAM, "num_iterations": 2, "max_steps": 6, "save_steps": 1, "media_prefetch": 1, "beta": 0.1}


@pytest.mark.slow
def test_resumes_from_any_step(tmp_path):
    """A checkpoint within a rollout, or before the next, continues bit for bit, also without the option."""

    class Recorded(Recording, MultimodalGRPOTrainer):
        pass

    def make(folder, **more):
        return make_trainer(Recorded, FAMILY, image_rows(5), tmp_path / folder, **{**REUSED, **more})

    plain = make("plain", save_strategy="no")
    plain.train()
    straight = make("straight", save_strategy="steps", offload_during_generation=True)
    straight.train()
    assert same_weights(plain, straight) and plain.trained_on == straight.trained_on
    for step, offload in ((3, True), (4, True), (3, False)):
        resumed = make(f"{step}{offload}", save_strategy="no", offload_during_generation=offload)
        resumed.train(resume_from_checkpoint=checkpoint(straight, step))
        assert resumed.trained_on == straight.trained_on[2 * step :]
        assert same_weights(straight, resumed) and logged(resumed, ()) == logged(straight, ())


def test_what_sampling_may_use_stays(tmp_path):
    """Weights that the reference shares with the policy, and all of the reference if the user samples."""
    trainer = make_trainer(MultimodalGRPOTrainer, FAMILY, image_rows(), tmp_path, beta=0.1)
    reference = [*trainer.ref_model.parameters()]
    given = trainer.model, trainer.optimizer, trainer.ref_model
    assert idle_storages(*given).keys() == storages(reference).keys()
    reference[0].data = next(trainer.model.parameters()).data
    assert idle_storages(*given).keys() == storages(reference[1:]).keys()
    freed = []
    trainer.host_memory = SimpleNamespace(offloading=freed.append)
    trainer.offloading()
    trainer.rollout_func = print
    trainer.offloading()
    assert freed[0].keys() == storages(reference[1:]).keys() and not freed[1]


class Fails(PseudoRandom):
    """Fails once in the second step."""

    failed = False

    def __call__(self, model, prompts, *, step, **options):
        if step == 1 and not self.failed:
            self.failed = True
            raise RuntimeError("The engine is gone.")
        return super().__call__(model, prompts, step=step, **options)


def test_comes_back_after_an_error(tmp_path):
    """The optimizer and the weights are those of the first step, and can be saved."""
    options = {**ADAM, "save_strategy": "no", "max_steps": 2, "beta": 0.1}
    first = make_trainer(MultimodalGRPOTrainer, FAMILY, image_rows(), tmp_path / "a", **options, sampler=PseudoRandom)
    first.args.max_steps = 1
    first.train()
    second = make_trainer(
        MultimodalGRPOTrainer,
        FAMILY,
        image_rows(),
        tmp_path / "b",
        **options,
        sampler=Fails,
        offload_during_generation=True,
    )
    with pytest.raises(RuntimeError, match="engine is gone"):
        second.train()
    states = [list(each.optimizer.state.values()) for each in (first, second)]
    assert same_weights(first, second) and len(states[0]) > 0
    for one, other in zip(*states, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


# The host's memory


def test_tensors_keep_their_identity_and_slabs_are_used_again():
    """Views, ties, a parameter's gradient and an optimizer see the same memory before and after."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1000, generator=generator)
    parameter = torch.nn.Parameter(whole[:600].view(20, 30))
    tied = whole[300:]
    other = torch.randn(7, 5, generator=generator).bfloat16().t()
    tensors = [parameter, tied, other, whole, torch.ones(()), torch.empty(0)]
    expected = [tensor.detach().clone() for tensor in tensors]
    memory = HostMemory(torch.device("cpu"), slab_size=1024)
    for _ in range(3):
        with memory.offloading(storages(tensors)):
            assert n_bytes(tensors) == 0 and [tensor.shape for tensor in tensors] == [e.shape for e in expected]
            with memory.offloading(storages(tensors[:2])):  # already held
                pass
            assert n_bytes(tensors) == 0
        assert n_bytes(tensors) == 4000 + 70 + 4
        assert all(torch.equal(tensor, each) for tensor, each in zip(tensors, expected, strict=True))
        assert len(memory.slabs) == 4  # of 1,024 bytes for 4,074
    slabs = [slab.data_ptr() for slab in memory.slabs]
    inner = torch.randn(100, generator=generator)
    expected_inner = inner.clone()
    with memory.offloading(storages(tensors)), memory.offloading(storages([inner])):
        assert n_bytes([inner, *tensors]) == 0
    assert torch.equal(inner, expected_inner) and torch.equal(whole, expected[3])
    assert [slab.data_ptr() for slab in memory.slabs][:4] == slabs and len(memory.slabs) == 5
    optimizer = AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones_like(parameter)
    with memory.offloading(storages([parameter, parameter.grad])):
        pass
    optimizer.step()
    assert not torch.equal(parameter, expected[0]) and torch.equal(whole[:600], parameter.detach().flatten())


def test_what_is_elsewhere_stays(tmp_path):
    """Tensors of another device, and files that are mapped."""
    path = tmp_path / "weights"
    torch.arange(10.0).numpy().tofile(path)
    mapped = torch.from_file(str(path), size=10)
    elsewhere = torch.empty(10, device="meta")
    own = torch.arange(10.0)
    with HostMemory(torch.device("cpu")).offloading(storages([mapped, elsewhere, own])):
        assert n_bytes([own]) == 0 and torch.equal(mapped, torch.arange(10.0)) and n_bytes([elsewhere]) == 40
    assert torch.equal(own, torch.arange(10.0))


def test_engine_on_other_gpus_has_nothing_to_gain(tmp_path):
    with pytest.raises(ValueError, match="`offload_during_generation` has no effect with `vllm_mode='server'`"):
        MultimodalGRPOConfig(str(tmp_path), use_vllm=True, vllm_mode="server", offload_during_generation=True)
