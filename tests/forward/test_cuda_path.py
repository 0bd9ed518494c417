# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What an update runs on CUDA, counted on a CPU; `test_packing.py` has its exactness for each family."""

import contextlib
from itertools import product

import pytest
import torch
from helpers.chats import chat, image, text
from helpers.completions import G, random_completions
from helpers.cuda_path import Attentions, cuda_path
from helpers.encoding import encode_chats
from helpers.families import ALL_FAMILIES, every_family
from helpers.packed_rows import backward, build, padded_reference
from helpers.trainer_utils import relative_difference
from torch.utils._python_dispatch import TorchDispatchMode

from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import kernels, logprobs, masks
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.forward.states import gather_copies


def test_shapes_for_which_cudnn_makes_plans(monkeypatch):
    """None over 50 micro-batches of many lengths, of a model whose prompts need masks."""
    model, _ = build("gemma3")
    processor = ALL_FAMILIES["gemma3"].build()[1]
    sizes, lengths = (torch.randn(2, 50, generator=torch.Generator().manual_seed(0)) * 0.5).exp().mul(20).int()
    prompts = encode_chats(model, processor, [chat(image(56, 56), text("up " * n)) for n in sizes.tolist()])

    def shapes():
        with cuda_path(monkeypatch), Attentions() as attentions, torch.no_grad():
            for prompt, length in zip(prompts, lengths.tolist(), strict=True):
                ids, mask = random_completions(2, length)
                completion_scores(model, model, ScoreRequest([prompt] * 2, ids, mask))
        return len(attentions.planned)

    assert shapes() == 0
    monkeypatch.setattr(kernels, "without_cudnn", contextlib.nullcontext)
    assert shapes() > 8


class Squares(TorchDispatchMode):
    """Records operations that make tensors of at least `size` rows and columns."""

    def __init__(self):
        super().__init__()
        self.size = 2**63
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dim() > 1 and min(result.shape[-2:]) >= self.size:
            self.found.add((str(function), *result.shape))
        return result


@pytest.mark.parametrize("name", every_family())
def test_no_masks_of_the_whole_row(name, monkeypatch):
    """Layers read none, and they would take 289 GiB for 64 completions of 8,192 tokens."""
    model, prompts = build(name)
    ids = torch.randint(50, 200, (len(prompts), 256))
    squares = Squares()
    own_pack = logprobs.pack

    def pack(*args, **kwargs):
        row = own_pack(*args, **kwargs)
        squares.size = row.input_ids.size(1)
        return row

    monkeypatch.setattr(logprobs, "pack", pack)
    with cuda_path(monkeypatch), torch.no_grad(), squares:
        completion_scores(
            model, model, ScoreRequest(prompts, ids, torch.ones_like(ids), isolate=family_of(model).isolate)
        )
    assert 256 < squares.size < 2**63 and not squares.found


@pytest.mark.parametrize("has_image", [False, True])
@pytest.mark.parametrize("name", ["cohere2_vision", "gemma3"])
def test_windows_bound_what_is_computed(name, has_image, monkeypatch):
    """
    Layers with a window of 8 tokens compute few keys beyond it, of prompts that are 120 times as long. Without a
    kernel, and for prompts with images that see themselves, as Gemma 3's, these are keys of neighbours.
    """
    model, _ = build(name)
    processor = ALL_FAMILIES[name].build()[1]
    media = [image(56, 56)] * has_image
    chats = [chat(*media, text("up " * n)) for n in (300, 320)]
    prompts = [prompt for prompt, _ in product(encode_chats(model, processor, chats), range(G))]
    ids, mask = random_completions(len(prompts), 20)
    truth, _, gradients = padded_reference(model, prompts, ids, mask)
    n_tokens = sum(map(len, prompts[::G])) + int(mask.sum())
    for path in (contextlib.nullcontext(), cuda_path(monkeypatch)):
        with path as kernel, Attentions() as dense:
            scores = completion_scores(model, model, ScoreRequest(prompts, ids, mask))
            found = backward(model, scores.logps, scores.entropies, mask)
        assert (scores.logps - truth * mask).abs().max() <= 1e-5
        assert relative_difference(gradients, found) <= 1e-5
        is_exact = kernel is not None and not (has_image and name == "gemma3")
        calls = kernel.calls if kernel else []
        masked = [query[0] * query[2] * key[2] for query, key in dense.calls]
        computed = [*masked, *(pairs for _, window, pairs in calls if window == (7, 0))]
        in_windows = sum(pairs for pairs in computed if pairs < 100 * n_tokens)
        assert 0 < in_windows <= (9 if is_exact else 50) * n_tokens, computed
        assert not calls or {window for _, window, _ in calls} == {(7, 0), (-1, 0)}


@pytest.mark.parametrize("name", ["cohere2_vision", "gemma3"])
def test_windows_are_those_of_a_short_prompt(name):
    """A mask of the whole prompt would take 10 GiB at 100,000 tokens."""
    model, _ = build(name)
    (prompt,) = encode_chats(model, ALL_FAMILIES[name].build()[1], [chat(text("up " * 300))])
    squares = Squares()
    squares.size = len(prompt)
    with squares:
        found = masks.linear_masks(model, prompt, 5)
    assert not squares.found
    fields = {each: torch.zeros(1, len(prompt) + 5, dtype=torch.long) for each in prompt.token_fields}
    whole = masks._model_masks(model, len(prompt), 5, fields)
    windows = [{kind: mask and (mask.window, mask.prompt) for kind, mask in each.items()} for each in (found, whole)]
    assert windows[0] == windows[1] and windows[0]["sliding_attention"] == (8, None)


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_masks_of_images_are_made_by_rows(name, monkeypatch):
    """Tokens of an image, or of a prefix, see later ones."""
    model, prompts = build(name)
    prompt = next(each for each in prompts if each.media)
    whole = masks.linear_masks(model, prompt, 5)
    prompt.mask_cache.clear()
    monkeypatch.setattr(masks, "_MASK_ELEMENTS", 3 * len(prompt))
    squares = Squares()
    squares.size = len(prompt)
    with squares:
        found = masks.linear_masks(model, prompt, 5)
    assert not squares.found and found.keys() == whole.keys()
    for kind, mask in found.items():
        assert (mask.window, mask.lookahead) == (whole[kind].window, whole[kind].lookahead)
        assert mask.prompt.equal(whole[kind].prompt) and (mask.prompt[:, 1] > torch.arange(len(prompt)) + 1).any()


class Sums(TorchDispatchMode):
    """Records in which dtype gradients are added up, which on CUDA is that of each partial sum."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._overloadpacket.__name__ in ("index_add", "index_add_"):
            total, dim, index, gradient = args
            is_added = gradient.movedim(dim, 0).flatten(1).any(1)
            if index[is_added].unique().numel() < is_added.sum():
                self.dtypes.add(total.dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "qwen3_5"])
def test_gradients_of_shared_keys_are_summed_in_float32(name, monkeypatch):
    """One after the other in bfloat16, the sum for 64 completions and their prompt would be 1 % off."""
    model, prompts = build(name, dtype=torch.bfloat16)
    ids, mask = random_completions(len(prompts))
    for path in (cuda_path(monkeypatch), contextlib.nullcontext()):
        with path:
            logps = completion_scores(model, model, ScoreRequest(prompts, ids, mask)).logps
            layers = [layer for layer in model.get_decoder().layers if hasattr(layer, "self_attn")]
            projection = layers[-1].self_attn.k_proj.weight
            with Sums() as sums:  # from the scores back to keys
                torch.autograd.grad(logps.sum(), projection)
        assert sums.dtypes == {torch.float32}
    index = torch.arange(512).repeat(65)
    gradients = (torch.randn(len(index), 2, 16) * 0.003 + 0.01).bfloat16()
    states = torch.zeros(512, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    gather_copies(states, index).backward(gradients)
    truth = gradients.view(65, 512, 2, 16).double().sum(0)
    assert (states.grad.double() - truth).norm() < 2e-3 * truth.norm()
