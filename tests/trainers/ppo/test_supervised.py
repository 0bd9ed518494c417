# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The supervised loss next to the policy's: its tokens, its rows, and its effect on the weights."""

from unittest import mock

import pytest
import torch
import transformers
from datasets import Dataset
from helpers.chats import RATE, audio, image
from helpers.families import FAMILIES, every_family
from helpers.ppo_runs import RemembersSupervised
from helpers.trainer_utils import Injected, audio_rows, image_rows, load, make_trainer, run, text_rows
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trl_multimodal_rft import MultimodalPPOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.batches import EndlessRows
from trl_multimodal_rft.data.rows.features import restore_rows
from trl_multimodal_rft.encoding.supervised import SupervisedEncoder


ANSWERS = ["It is a cat.", "There are two of them, I think.", "No"]
FAMILY = {"audio": "qwen2_audio", "image": "qwen2_5_vl", "text": "qwen2_5_vl"}
COEFFICIENT = 0.7


def sound(i: int) -> dict:
    return {"array": audio(0.3 + 0.1 * i, seed=i)["audio"], "sampling_rate": RATE}


def picture(i: int):
    return image(56 + 28 * (i % 2), 56, seed=i)["image"]


def rows_of(kind: str) -> list[dict]:
    """Returns three rows with a medium in a separate column, or without media."""
    media = [{"audio": {"audio": sound(i)}, "image": {"image": picture(i)}, "text": {}}[kind] for i in range(3)]
    questions = ["What is it?", "What is it? Is there a cat?", "How many?"]
    return [
        {"prompt": [{"role": "user", "content": q}], "completion": a, **m}
        for q, a, m in zip(questions, ANSWERS, media, strict=True)
    ]


def encoded(rows: list[dict], family: str, **options):
    model, processor = load(family)
    return SupervisedEncoder(processor, model, **options).encode_pairs(rows, [processor.tokenizer.eos_token_id])


def completions(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]


def whole_chat(row: dict, answer: str, kind: str) -> dict:
    """Returns the processor's encoding of prompt and answer at once, with the medium inline."""
    _, processor = load(FAMILY[kind])
    block = {"audio": lambda: {"audio": row["audio"]["array"]}, "image": lambda: {"image": row["image"]}}
    media = [{"type": kind, **block[kind]()}] if kind in block else []
    messages = [
        {"role": "user", "content": [*media, {"type": "text", "text": row["prompt"][0]["content"]}]},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return processor.apply_chat_template([messages], tokenize=True, return_dict=True, return_tensors="pt")


# Target tokens


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.parametrize("form", ["text", "message", "messages", "blocks", "inline"])
def test_completion_is_that_of_the_chat_template_up_to_its_end(kind, form):
    rows = rows_of(kind)
    reshaped = [reshape(row, form, kind) for row in rows]
    prompts, ids, mask = encoded(reshaped, FAMILY[kind])
    _, processor = load(FAMILY[kind])
    end = processor.tokenizer.eos_token_id
    assert ids.shape == mask.shape and ids.dtype == torch.long
    for row, answer, prompt, completion in zip(rows, ANSWERS, prompts, completions(ids, mask), strict=True):
        whole = whole_chat(row, answer, kind)["input_ids"][0].tolist()
        n = len(prompt)
        assert prompt.input_ids.tolist() == whole[:n]
        assert completion == whole[n : whole.index(end, n) + 1]  # includes the end of the user's turn
        assert processor.tokenizer.decode(completion[:-1]) == answer
        assert (prompt.modalities == {kind}) == (kind != "text")


def reshape(row: dict, form: str, kind: str) -> dict:
    """Returns the same row in another accepted form."""
    question = row["prompt"]
    answer = row["completion"]
    media = {key: value for key, value in row.items() if key in ("audio", "image")}
    if form == "text":
        return row
    if form == "message":
        return {"prompt": question, "completion": [{"role": "assistant", "content": answer}], **media}
    if form == "messages":
        return {"messages": [*question, {"role": "assistant", "content": answer}], **media}
    block = {"type": "text", "text": answer, "image": None}  # Arrow adds the keys of other blocks
    placeholder = [{"type": kind}] if media else []
    asked = {"type": "text", "text": question[0]["content"]}
    if form == "inline":
        placeholder = [{"type": k, k: v} for k, v in media.items()]
        media = {}
    chat = [{"role": "user", "content": [*placeholder, asked]}, {"role": "assistant", "content": [block]}]
    return {"messages": chat, "prompt": None, "completion": None, **media}


def test_texts_without_media_are_taken_as_they_are():
    rows = [{"prompt": "Is there a cat?", "completion": " No"}, {"prompt": "And a dog?", "completion": " Yes, it is."}]
    prompts, ids, mask = encoded(rows, "qwen2_5_vl")
    _, processor = load("qwen2_5_vl")
    tokenizer = processor.tokenizer
    for row, prompt, completion in zip(rows, prompts, completions(ids, mask), strict=True):
        assert prompt.input_ids.tolist() == tokenizer(row["prompt"])["input_ids"]
        assert completion == [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
    # A sampled completion can't begin within a token, so the answer is tokenized separately
    before = "ca"
    answer = "t"
    assert len(tokenizer(before + answer)["input_ids"]) < sum(len(tokenizer(t)["input_ids"]) for t in (before, answer))
    (prompt,), ids, _ = encoded([{"prompt": before, "completion": answer}], "qwen2_5_vl")
    assert prompt.input_ids.tolist() == tokenizer(before)["input_ids"]
    assert ids[0].tolist() == [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]


def test_rows_do_not_depend_on_those_beside_them():
    """A plain text stays unchanged where another row has an image, whose text comes from the chat template."""
    plain = {"prompt": "Is there a cat?", "completion": " No", "image": None}
    seen = {"prompt": "Is there a cat?", "completion": "No", "image": picture(0)}
    together, ids, mask = encoded([plain, seen], "qwen2_5_vl")
    for row, prompt, completion in zip([plain, seen], together, completions(ids, mask), strict=True):
        (alone,), own_ids, own_mask = encoded([row], "qwen2_5_vl")
        assert prompt.input_ids.tolist() == alone.input_ids.tolist()
        assert [completion] == completions(own_ids, own_mask)
    _, processor = load("qwen2_5_vl")
    assert "<|im_start|>" not in processor.tokenizer.decode(together[0].input_ids)
    assert "<|im_start|>" in processor.tokenizer.decode(together[1].input_ids)


@pytest.mark.parametrize("answer", ["No<|im_end|>\nand more", "No<|endoftext|> and more<|im_end|>"])
def test_completion_goes_to_the_first_of_the_end_tokens(answer):
    model, processor = load("qwen2_5_vl")
    tokenizer = processor.tokenizer
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    row = {"prompt": "Is there a cat?", "completion": answer}
    _, ids, _ = SupervisedEncoder(processor, model).encode_pairs([row], ends)
    assert ids.tolist() == [[*tokenizer("No")["input_ids"], ends["endoftext" in answer]]]


def test_several_messages_before_the_answer():
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Is there a cat?"},
        {"role": "assistant", "content": "No"},
        {"role": "user", "content": "And a dog?"},
        {"role": "assistant", "content": "It is a dog."},
    ]
    (prompt,), ids, _ = encoded([{"messages": chat, "image": picture(0)}], "qwen2_5_vl")
    _, processor = load("qwen2_5_vl")
    text = processor.tokenizer.decode(prompt.input_ids)
    assert "helpful" in text and "No<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")
    assert processor.tokenizer.decode(ids[0]) == "It is a dog.<|im_end|>"


def test_tokenizer_that_marks_the_start_of_a_text():
    """For a tokenizer like Llama's, the tokens of an answer differ from those of the same text alone."""
    words = ["<s>", "</s>", "▁Q", "▁A", ":", "▁Yes", "▁", "Yes"]
    bpe = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split(":", "isolated")]
    )
    bpe.decoder = decoders.Metaspace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %} A:{{ m.content }}</s>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %} A:{% endif %}"
    )
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    row = {"prompt": [{"role": "user", "content": "Q:"}], "completion": "Yes"}
    (prompt,), ids, _ = SupervisedEncoder(tokenizer, model).encode_pairs([row], [1])
    assert tokenizer.convert_ids_to_tokens(prompt.input_ids) == ["▁Q", ":", "▁A", ":"]
    assert tokenizer.convert_ids_to_tokens(ids[0]) == ["Yes", "</s>"]
    assert tokenizer.tokenize("Yes</s>") == ["▁Yes", "</s>"]


@pytest.mark.parametrize("family", every_family(name for name in FAMILIES if name not in ("voxtral", "paligemma")))
def test_every_family_that_has_a_chat_template(family):
    """Prompt and completion together equal the processor's encoding of both."""
    model, processor = FAMILIES[family].build()
    end = processor.tokenizer.eos_token_id
    for chat in FAMILIES[family].prompts()[:2]:
        blocks = [
            {**block, "audio": {"array": block["audio"], "sampling_rate": RATE}} if block["type"] == "audio" else block
            for block in chat[0]["content"]
        ]
        row = {"prompt": [{"role": "user", "content": blocks}], "completion": "It is a cat."}
        (prompt,), ids, _ = SupervisedEncoder(processor, model).encode_pairs([row], [end])
        answer = {"role": "assistant", "content": [{"type": "text", "text": "It is a cat."}]}
        whole = processor.apply_chat_template([[*chat, answer]], tokenize=True, return_dict=True, return_tensors="pt")
        whole = whole["input_ids"][0].tolist()
        assert [*prompt.input_ids.tolist(), *ids[0].tolist()] == whole[: whole.index(end, len(prompt)) + 1]


# The loss


def cross_entropy(model, row: dict, answer: str, kind: str, n_prompt: int) -> torch.Tensor:
    """Returns transformers' mean loss over the tokens of an answer, with all earlier tokens masked."""
    inputs = whole_chat(row, answer, kind)
    _, processor = load(FAMILY[kind])
    end = inputs["input_ids"][0].tolist().index(processor.tokenizer.eos_token_id, n_prompt) + 1
    of_tokens = ("input_ids", "attention_mask", "mm_token_type_ids")
    inputs = {k: v[:, :end] if k in of_tokens else v for k, v in inputs.items()}
    labels = inputs["input_ids"].clone()
    labels[:, :n_prompt] = -100
    return model(**inputs, labels=labels).loss


# Invalid rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "A cat?"}, r"row 1 of `ptx_dataset` has \['prompt'\]; it needs `prompt` and `completion`, or"),
        ({"prompt": "A cat?", "completion": None}, r"row 1 of `ptx_dataset` has \['prompt'\]"),
        ({"completion": "No"}, r"row 1 of `ptx_dataset` has \['completion'\]"),
        ({"text": "A cat? No"}, r"row 1 of `ptx_dataset` has \['text'\]"),
        ({"messages": []}, r"row 1 of `ptx_dataset` has \['messages'\]"),
        ({"messages": [{"role": "assistant", "content": "No"}]}, r"row 1 of `ptx_dataset` has \['messages'\]"),
        (
            {"messages": [{"role": "user", "content": "A cat?"}, {"role": "user", "content": "A dog?"}]},
            "row 1, column 'messages': an answer must be the assistant's, but the role is 'user'",
        ),
        (
            {"prompt": [{"role": "user", "content": "A cat?"}], "completion": [{"role": "user", "content": "No"}]},
            "row 1, column 'completion': an answer must be the assistant's",
        ),
        (
            {"prompt": [{"role": "user", "content": "A cat?"}], "completion": "<|image_pad|>"},
            r"row 1 of `ptx_dataset`: the completion contains '<\|image_pad\|>', a placeholder of media",
        ),
        ({"prompt": "A cat?", "image": {"path": "missing.png"}, "completion": "No"}, "row 1, column 'image': no such"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "completion": "No"},
            r"row 1, column 'prompt\[0\].content\[0\]': the placeholder has no image",
        ),
        (
            {"prompt": "?", "completion": [{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
            "row 1, .*: assistant messages must be text",
        ),
    ],
)
def test_row_that_can_not_be_learned(row, message):
    with pytest.raises((ValueError, MediaError), match=message):
        encoded([{"prompt": "A dog?", "completion": "No"}, row], "qwen2_5_vl")


@pytest.mark.parametrize("kind", FAMILY)
def test_template_that_writes_the_prompt_otherwise(kind):
    template = (
        "{% for message in messages %}{{ loop.length }}{{ message.role }}{% for block in message.content %}"
        "{% if block.type == 'audio' %}<|AUDIO|>{% elif block.type == 'image' %}<|image_pad|>"
        "{% else %}{{ block.text }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
    )
    rows = rows_of(kind)
    if kind == "text":
        rows = [{**row, "prompt": [{"role": "user", "content": [{"type": "text", "text": "A cat?"}]}]} for row in rows]
    message = "row 0 of `ptx_dataset`: the chat template renders the prompt differently when an"
    with pytest.raises(ValueError, match=message):
        encoded(rows, FAMILY[kind], template_kwargs={"chat_template": template})


# Selection of rows


def numbers(n: int) -> Dataset:
    return Dataset.from_list([{"number": i} for i in range(n)])


def order(rows: EndlessRows, start: int, n: int) -> list[int]:
    return [row["number"] for row in rows.at(start, n)]


@pytest.mark.parametrize("size", [1, 5, 8])
def test_each_row_once_in_an_epoch_in_another_order_each_time(size):
    rows = EndlessRows(numbers(size), seed=3)
    drawn = order(rows, 0, 6 * size)
    epochs = [drawn[i * size :][:size] for i in range(6)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size == 1 or len(set(map(tuple, epochs))) > 1
    in_pieces = [n for start in range(0, 6 * size, 3) for n in order(rows, start, min(3, 6 * size - start))]
    assert in_pieces == drawn
    assert order(EndlessRows(numbers(size), seed=3), 0, 6 * size) == drawn
    assert size == 1 or order(EndlessRows(numbers(size), seed=4), 0, 6 * size) != drawn


class Supervised(RemembersSupervised, Injected, MultimodalPPOTrainer):
    pass


def supervised(kind: str, n: int = 5) -> Dataset:
    """Returns rows with distinct completions."""
    rows = [{**rows_of(kind)[i % 3], "completion": f"number {i}" + " and more" * (i % 2)} for i in range(n)]
    return Dataset.from_list(rows)


POLICY_ROWS = {"audio": audio_rows, "image": image_rows, "text": text_rows}
OPTIONS = {
    "num_ppo_epochs": 1,
    "self_check": False,
    "ptx_coef": COEFFICIENT,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
}


def test_rows_of_a_run(monkeypatch):
    """Each micro-batch has two, in an order that the seed determines once per epoch. Evaluations have none."""
    shuffled = mock.Mock(wraps=torch.randperm)
    monkeypatch.setattr(torch, "randperm", shuffled)
    data = supervised("text")
    objects = {"ptx_dataset": data, "eval_dataset": text_rows(4)}
    options = {**OPTIONS, "ptx_coef": COEFFICIENT, "ptx_batch_size": 2, "max_steps": 5, "seed": 7}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    result = run(Supervised, "qwen2_5_vl", text_rows(), objects=objects, **options)
    assert [call.args[0] for call in shuffled.call_args_list].count(len(data)) == 4
    # A resumed run relies on this order
    places = [torch.randperm(5, generator=torch.Generator().manual_seed(7 + epoch)).tolist() for epoch in range(4)]
    _, ids, mask = encoded([data[place] for epoch in places for place in epoch], "qwen2_5_vl")
    drawn = completions(ids, mask)
    assert [completions(*each) for each in result.trainer.supervised] == [drawn[i : i + 2] for i in range(0, 20, 2)]
    for epoch in range(4):
        assert len(set(map(tuple, drawn[5 * epoch :][:5]))) == 5


# In the update


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("audio", {}),
        ("image", {}),
        pytest.param("text", {}, marks=pytest.mark.slow),
        ("image", {"shared_trunk": True}),
        ("audio", {"advantage_estimator": "group_norm"}),
        ("image", {"loss_type": "grpo", "packing": "padded"}),
        ("audio", {"objects": {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}}),
    ],
    ids=["audio", "image", "text", "shared trunk", "without a critic", "padded", "adapter"],
)
def test_update_is_that_of_the_policy_and_of_the_supervised_loss(kind, options, tmp_path):
    """In one step of gradient descent, both gradients add up."""
    options = {
        **OPTIONS,
        **options,
        "max_steps": 1,
        "learning_rate": 0.1,
        "ptx_coef": COEFFICIENT,
        "ptx_batch_size": 2,
    }
    own = dict(options.pop("objects", {}))
    data = supervised(kind)
    family = FAMILY[kind]
    objects = {**own, "ptx_dataset": data}
    with_it = run(Supervised, family, POLICY_ROWS[kind](), objects=objects, **options)
    own_options = {**options, "ptx_coef": 0.0, "ptx_batch_size": 1}
    without = run(Supervised, family, POLICY_ROWS[kind](), objects=own, **own_options)
    start = make_trainer(Supervised, family, POLICY_ROWS[kind](), tmp_path, objects=own, **own_options)
    model = start.model
    loss = 0.0
    totals = []
    for place in (0, 2):  # of two micro-batches
        rows = restore_rows(EndlessRows(data, start.args.seed).at(place, 2))
        prompts, _, mask = encoded(rows, family)
        for row, prompt, n in zip(rows, prompts, mask.sum(1), strict=True):
            row_loss = cross_entropy(model, row, row["completion"], kind, len(prompt))
            loss += row_loss * n / mask.sum() / 2
            totals.append((row_loss.item() * n.item(), n.item()))
    logged = [entry["ptx_loss"] for entry in with_it.history if "ptx_loss" in entry]
    losses, numbers = zip(*totals, strict=True)
    assert logged == pytest.approx([sum(losses) / sum(numbers)], rel=1e-5)
    loss.backward()
    step = -start.args.learning_rate * COEFFICIENT
    expected = {n: 0 if p.grad is None else step * p.grad for n, p in model.named_parameters()}
    difference = {n: with_it.update[n] - without.update[n] for n in expected}
    length = torch.stack([torch.as_tensor(v).float().norm() for v in expected.values()]).norm()
    assert length > 1e-3
    assert torch.stack([(difference[n] - expected[n]).norm() for n in expected]).norm() <= 1e-4 * length
    assert not any(n.startswith("critic.") and difference[n].any() for n in difference)


def test_frozen_policy_learns_nothing():
    options = {**OPTIONS, "max_steps": 1, "freezing_actor_steps": 1}
    result = run(Supervised, "qwen2_5_vl", text_rows(), objects={"ptx_dataset": supervised("text")}, **options)
    moved = {name for name, change in result.update.items() if change.any()}
    assert moved and all(name.startswith("critic.") for name in moved)
    assert result.history[0]["ptx_loss"] > 1  # the loss is still logged


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objects": {"ptx_dataset": text_rows()}}, r"\(0.0\) go together; set `ptx_coef` above 0"),
        ({"ptx_coef": 0.5}, r"\(0.5\) go together; pass `ptx_dataset`"),
    ],
)
def test_options_that_make_no_sense(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(MultimodalPPOTrainer, "qwen2_5_vl", text_rows(), tmp_path, **options)
