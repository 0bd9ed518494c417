# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Spans of a text that two tokenizers cut alike, and the ends of answers."""

import pytest
import torch
from helpers.families import tokenizer
from helpers.trainer_utils import load
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_multimodal_rft.algorithms.span_divergence import span_divergence
from trl_multimodal_rft.encoding.spans import TokenText, common_spans, end_of_answer, text_ids, token_text


def of_characters():
    """Returns a tokenizer as those of SentencePiece: words begin with ▁, and unknown characters are bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcde", "▁a", "▁ab", "ab"]
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    bpe = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    strip = decoders.Strip(" ", 1, 0)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>")


TEXTS = st.text(st.sampled_from("abe é✅🙂\n"), max_size=12)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS)
def test_text_and_ends_are_those_of_all_tokens_so_far(text):
    for words in (tokenizer(), of_characters()):
        ids = words(text, add_special_tokens=False)["input_ids"]
        # The first characters, also where the bytes of the last one are incomplete
        for n in range(len(ids) + 1):
            decoded, ends = token_text(ids[:n], words)
            whole = [words.decode(ids[: i + 1], clean_up_tokenization_spaces=False) for i in range(n)]
            complete = [part for part in whole if not part.endswith("\ufffd")]
            assert decoded == (complete[-1] if complete else "")
            assert [len(part) for part in complete] == [
                end for end, part in zip(ends, whole, strict=True) if not part.endswith("\ufffd")
            ]
            assert ends == sorted(ends)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TEXTS)
def test_spans_have_the_same_text_on_both_sides(text):
    sides = tokenizer(), of_characters()
    rows = [text_ids(text, words) for words in sides]
    parts = [token_text(ids, words) for ids, words in zip(rows, sides, strict=True)]
    spans = common_spans(*parts)
    starts = []
    shifts = (0, len(text) - len(parts[1].text))
    for side, part, shift in zip(spans[:2], parts, shifts, strict=True):
        last = {span: i for i, span in enumerate(side)}
        starts.append([part.ends[last[span]] + shift for span in range(max(side, default=-1) + 1)])
        assert side == sorted(side, key=lambda span: (span < 0, span))
    if spans.is_whole and shifts[1] in (0, 1):
        assert starts[0] == starts[1] == sorted(starts[0]) and starts[0][-1:] == ([len(text)] if text else [])
    assert spans.is_whole or text.startswith("  ")


def test_examples():
    left = TokenText("the bird.", [2, 5, 7, 9])
    right = TokenText("the bird.", [1, 2, 4, 7, 8, 9])
    assert common_spans(left, right) == ([0, 1, 1, 2], [0, 0, 1, 1, 2, 2], True)
    assert common_spans(left, right._replace(text="the birD.")) == ([0, 1, 1, -1], [0, 0, 1, 1, -1, -1], False)
    assert common_spans(TokenText("", []), TokenText("a", [1])) == ([], [-1], True)
    assert common_spans(TokenText(" ab", [2, 3]), TokenText("ab", [1, 2])) == ([0, 1], [0, 1], True)
    words = tokenizer(image_token="<image>")
    ids = [words.convert_tokens_to_ids(token) for token in ("c", "Ã", "©", "s", "Ã")]
    assert token_text(ids, words) == ("cés", [1, 1, 2, 3, 3])
    assert words.image_token_id in words("<image>")["input_ids"]
    assert words.image_token_id not in text_ids("<image>", words)


def test_end_of_answer():
    """By the template, which may write another token than EOS, or none."""
    processor = load("gemma3")[1]
    end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_answer(processor) == end == processor.tokenizer.eos_token_id
    processor.tokenizer.eos_token = "<|endoftext|>"
    assert end_of_answer(processor) == end
    processor.chat_template = "{% for message in messages %}{{ message.content[0].text }}\n{% endfor %}"
    assert end_of_answer(processor) == processor.tokenizer.eos_token_id != end
    words = processor.tokenizer
    words.chat_template = None
    assert end_of_answer(words) == words.eos_token_id


def test_divergence_of_spans():
    """Two spans of one and two tokens, and a token in none; the values and gradients are written out."""
    logps = torch.tensor([[-1.0, -2.0, -4.0, -8.0]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[-3.0, -5.0, -5.0, 7.0]])
    spans = torch.tensor([[0, 1, 1, -1]])
    values = span_divergence(logps, teacher, spans)
    assert values.tolist() == [[2.0, -0.5, -0.5, 0.0]]
    assert torch.autograd.grad(values.sum(), logps)[0].tolist() == [[2.0, -1.0, -1.0, 0.0]]


@pytest.mark.parametrize("spans", [[0, 1, 2, 3], [0, 0, 0, 1]])
def test_gradient_is_that_of_the_divergence_of_spans(spans):
    """On average over all sequences of three symbols, with spans of given lengths."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, 3, 3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, 3, 3, 3, 3, generator=generator, dtype=torch.float64)

    def tokens(of, ids):
        """Returns the log-probability of each token, which depends on those before."""
        return torch.stack(
            [of[tuple([0] * (3 - i) + [*ids[:i], ...])].reshape(-1)[:3].log_softmax(-1)[ids[i]] for i in range(4)]
        )

    expected = surrogate = 0.0
    for ids in torch.cartesian_prod(*[torch.arange(3)] * 4).tolist():
        ours = tokens(logits, ids)
        theirs = tokens(other, ids)
        index = torch.tensor(spans)
        totals = torch.zeros(4, dtype=torch.float64).index_add(0, index, theirs)[index]
        probability = ours.sum().exp()
        surrogate = surrogate + probability.detach() * span_divergence(ours[None], totals[None], index[None]).sum()
        prefix = 0.0
        for span in range(max(spans) + 1):
            chosen = index == span
            difference = ours[chosen].sum() - theirs[chosen].sum()
            # The divergence given the earlier tokens, which aren't differentiated
            prefix_probability = ours[index < span].sum().exp().detach()
            rest = ours[index > span].sum().exp().detach()
            prefix = prefix + prefix_probability * ours[chosen].sum().exp() * difference * rest
        expected = expected + prefix
    assert surrogate.item() == pytest.approx(expected.item())
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (surrogate, expected)]
    torch.testing.assert_close(*gradients)
