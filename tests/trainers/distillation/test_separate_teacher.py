# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Teachers with processors of their own: updates are those of plain loops over the text of completions."""

import copy
import functools
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers.distillation_runs import InjectedOurs, distill, divergence
from helpers.distillation_runs import teacher as same_teacher
from helpers.encoding import extended
from helpers.families import ALL_FAMILIES, CORPUS, encode
from helpers.samplers import Wrapped
from helpers.tools import look_up
from helpers.trainer_utils import image_rows, load, make_trainer, relative_difference, shifted, text_rows
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from trainers.distillation.test_distillation import completions_of, content
from trainers.distillation.test_several_teachers import rows_with
from transformers import AutoProcessor, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.trainers.distillation import teachers


_FOLDERS = tempfile.TemporaryDirectory()


def other_tokenizer(tokenizer, normalizer=None):
    """Returns a tokenizer with the same control tokens, and other tokens of text."""
    special = [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizer
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([text[::-1] for text in CORPUS] * 20, trainer)
    names = ("image_token", "boi_token", "eoi_token")
    named = {name: getattr(tokenizer, name) for name in names if getattr(tokenizer, name, None)}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=named
    )


@functools.cache
def folder_of(family, changes_tokens=True, normalizer=None):
    """Returns a folder with a teacher of a family, by default with another tokenizer."""
    folder = Path(_FOLDERS.name, f"{family}-{changes_tokens}-{normalizer}")
    model, processor = ALL_FAMILIES[family].build()
    if changes_tokens:
        processor.tokenizer = other_tokenizer(processor.tokenizer, normalizer and getattr(normalizers, normalizer)())
    shifted(model, 0.1, seed=5).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def loaded(folder, family):
    """Returns the model of a folder in float64, and its processor."""
    model = ALL_FAMILIES[family].model_class.from_pretrained(folder)
    return model.double(), AutoProcessor.from_pretrained(folder)


def student_pair():
    model, processor = load("qwen2_5_vl")
    return copy.deepcopy(model).double(), processor


class Says(Wrapped):
    """Sampler of texts, some of which end with EOS."""

    texts = ("The answer is 10.", "Is there a bird?", "a café, naïve ✅ cat", "0 1 2 3", "red green", "x", "é", "no")

    def __call__(self, model, prompts, **options):
        rows = [self.encoded(self.texts[i % len(self.texts)]) for i in range(len(prompts))]
        return [ids if i % 3 else ids[:-1] for i, ids in enumerate(rows)], None


class Saying(MultimodalDistillationTrainer):
    texts = Says.texts

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Says(self)
        self.sampler.texts = self.texts


def one_step(rows, objects=None, *, family="llava", trainer=InjectedOurs, **options):
    """Returns a step on 4 completions of each row, of a Qwen2.5-VL that learns from a model of another family."""
    options = {"teacher_processor": "separate", "max_steps": 1, "learning_rate": 1.0, **options}
    objects = {"teacher_model": folder_of(family), **(objects or {})}
    return distill(trainer, "qwen2_5_vl", rows, objects, **options)


# The truth, in float64


def plain_text(ids, tokenizer):
    """Returns the text of tokens, and the number of its characters after each, from the text of all tokens so far."""
    ends = []
    text = ""
    for i in range(len(ids)):
        decoded = tokenizer.decode(ids[: i + 1], clean_up_tokenization_spaces=False)
        text = text if decoded.endswith("\ufffd") else decoded
        ends.append(len(text))
    return text, ends


def plain_spans(ids, student, teacher):
    """Returns the teacher's tokens, and pairs of lists: tokens of the student and of the teacher for the same text."""
    end = ids[-1] == student.eos_token_id
    control_ids = {token_id for token_id, token in student.added_tokens_decoder.items() if token.special}
    positions = [i for i, token in enumerate(ids[: len(ids) - end]) if token not in control_ids]
    text, ends = plain_text([ids[i] for i in positions], student)
    teacher_ids = teacher(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    teacher_text, teacher_ends = plain_text(teacher_ids, teacher)
    assert teacher_text == text
    spans = []
    starts = (0, 0)
    for cut in range(1, len(text) + 1):
        if cut in ends and cut in teacher_ends:
            stops = ends.index(cut) + 1, teacher_ends.index(cut) + 1
            spans.append([positions[starts[0] : stops[0]], [*range(starts[1], stops[1])]])
            starts = stops
    if end:
        spans.append([[len(ids) - 1], [len(teacher_ids)]])
        teacher_ids = [*teacher_ids, teacher.eos_token_id]
    return teacher_ids, spans


def logps_of(model, processor, blocks, ids, temperature=1.0):
    """Returns log-probabilities of all tokens after a prompt, in float64."""
    inputs = extended(encode(processor, [{"role": "user", "content": blocks}]), torch.tensor(ids))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    return (model(**inputs).logits[0, -len(ids) - 1 : -1] / temperature).log_softmax(-1)


def span_loss(student, teacher, contents, completions, temperature=1.0):
    """
    Returns the sum over completions of the differences of spans; a number with the gradient of the loss; and the
    number of aligned tokens. `student` and `teacher` are pairs of a model and its processor.
    """
    value = 0.0
    surrogate = 0.0
    n_aligned = 0
    for blocks, ids in zip(contents, completions, strict=True):
        teacher_ids, spans = plain_spans(ids, student[1].tokenizer, teacher[1].tokenizer)
        of_student = logps_of(*student, blocks, ids, temperature)[range(len(ids)), ids]
        with torch.no_grad():
            of_teacher = logps_of(*teacher, blocks, teacher_ids, temperature)[range(len(teacher_ids)), teacher_ids]
        for tokens, teacher_tokens in spans:
            difference = of_student[tokens].sum().item() - of_teacher[teacher_tokens].sum().item()
            value += difference
            surrogate = surrogate + difference * of_student[tokens].sum()
            n_aligned += len(tokens)
    return value, surrogate, n_aligned


def assert_update(run, loss, student):
    """Asserts that an update is that by the gradient of a loss of the `student`."""
    loss.backward()
    gradients = {name: p.grad.float() for name, p in student.named_parameters() if p.grad is not None}
    update = {name: run.update[name] for name in gradients}
    rate = run.trainer.args.learning_rate
    assert relative_difference({name: -rate * value for name, value in gradients.items()}, update) <= 1e-5


def four(contents):
    return [each for each, _ in product(contents, range(4))]


# A teacher of another tokenizer


@pytest.mark.parametrize(
    ("family", "options"), [("llava", {"packing": "prefix"}), ("gemma3", {"temperature": 0.8, "packing": "padded"})]
)
def test_update_is_that_of_spans(family, options):
    """With one medium, and tokens that are parts of characters."""
    rows = image_rows(2)
    run = one_step(rows, family=family, **options)
    student = student_pair()
    of_teacher = loaded(folder_of(family), family)
    contents = four([content(row, "image") for row in rows])
    completions = completions_of(run, "image", contents[::4])
    value, surrogate, n_aligned = span_loss(
        student, of_teacher, contents, completions, options.get("temperature", 1.0)
    )
    logs = run.history[0]
    share = n_aligned / sum(map(len, completions))
    assert logs["loss"] == pytest.approx(value / n_aligned, rel=1e-4)
    assert logs["teacher/aligned_frac"] == pytest.approx(share) and logs["teacher/unaligned"] == 0
    assert 0.5 < share < 1
    assert_update(run, surrogate / n_aligned, student[0])


def said(run, texts, n):
    """Returns the completions of [`Saying`]."""
    sampler = run.trainer.sampler
    return [
        ids if i % 3 else ids[:-1] for i, ids in enumerate(sampler.encoded(texts[i % len(texts)]) for i in range(n))
    ]


def test_texts_with_names_of_control_tokens_and_in_micro_batches():
    """The names are text to the teacher, whose own they are, and control tokens of the student are no text."""
    texts = (
        "A <|im_start|>bird",
        "a café ✅",
        "the <image> is red",
        "no.",
        "0 1",
        "is there",
        "yes <|im_end|> no",
        "é",
    )
    saying = type("Saying", (Saying,), {"texts": texts})
    rows = image_rows(2)
    run = one_step(rows, trainer=saying, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    student = student_pair()
    of_teacher = loaded(folder_of("llava"), "llava")
    contents = four([content(row, "image") for row in rows])
    value, surrogate, n_aligned = span_loss(student, of_teacher, contents, said(run, texts, 8))
    assert run.history[0]["loss"] == pytest.approx(value / n_aligned, rel=1e-4)
    assert_update(run, surrogate / n_aligned, student[0])


def test_completions_that_cant_be_aligned():
    """
    The teacher's tokenizer writes small letters alone: a text in capitals has no span, another one has some. A control
    token is no text.
    """
    folder = folder_of("llava", normalizer="Lowercase")
    rows = image_rows(2)
    texts = ("<|im_start|>", "no", "a Cat", "0 1", "red", "green", "blue", "NO")
    saying = type("Saying", (Saying,), {"texts": texts})
    with pytest.raises(
        ValueError, match="row 0: no token of the completion '<.im_start.>' can be aligned with tokens of the"
    ):
        one_step(rows, {"teacher_model": folder}, trainer=saying)
    run = one_step(rows, {"teacher_model": folder}, trainer=saying, teacher_processor="separate(on_unaligned='skip')")
    logs = run.history[0]
    assert logs["teacher/unaligned"] == 2 and 0.5 < logs["teacher/aligned_frac"] < 1
    student = student_pair()
    of_teacher = loaded(folder, "llava")
    contents = four([content(row, "image") for row in rows])
    completions = said(run, texts, 8)
    # "a Cat" has tokens of "a " before the capital, without the end of the answer
    kept = [1, *range(3, 7)]
    chosen = [contents[i] for i in kept], [completions[i] for i in kept]
    value, surrogate, n_aligned = span_loss(student, of_teacher, *chosen)
    start = student[1].tokenizer("a ")["input_ids"]
    part = span_loss(student, of_teacher, [contents[2]], [start])
    value = value + part[0]
    surrogate = surrogate + part[1]
    n_aligned = n_aligned + part[2]
    assert logs["loss"] == pytest.approx(value / n_aligned, rel=1e-4)
    assert_update(run, surrogate / n_aligned, student[0])


def test_evaluation_and_resumed_run(tmp_path):
    """Bit for bit, in the middle of an optimizer step's micro-batches."""
    options = {"max_steps": 3, "optim": "adamw_torch", "reward": None, "teacher_processor": "separate"}
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "shuffle_dataset": False}
    objects = {"teacher_models": {"near": load("qwen2_5_vl")[0], "far": folder_of("llava")}}

    def trainer(folder, **more):
        rows = rows_with("image", ["near", "far", "far"])
        options["objects"] = {**objects, "eval_dataset": rows}
        return make_trainer(MultimodalDistillationTrainer, "qwen2_5_vl", rows, tmp_path / folder, **options, **more)

    whole = trainer("whole", save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=2)
    whole.train()
    assert any("eval_teacher/far/aligned_frac" in entry for entry in whole.state.log_history)
    resumed = trainer("resumed", eval_strategy="steps", eval_steps=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


# Several teachers


def test_teachers_of_other_and_of_the_same_tokenizer_by_row():
    """One reads the student's inputs, one has other tokens, and a row has no teacher."""
    names = ["near", None, "far"]
    rows = rows_with("image", names)
    objects = {
        "teacher_models": {"near": same_teacher("qwen2_5_vl"), "far": folder_of("llava")},
        "teacher_model": None,
    }
    for offloads in (False, True):
        run = one_step(rows, objects, per_device_train_batch_size=12, offload_during_generation=offloads)
        student = student_pair()
        of_teacher = loaded(folder_of("llava"), "llava")
        near = same_teacher("qwen2_5_vl").double()
        contents = four([content(row, "image") for row in image_rows(3)])
        completions = completions_of(run, "image", contents[::4])
        value, surrogate, n_aligned = span_loss(student, of_teacher, contents[8:], completions[8:])
        whole = 0.0
        for blocks, ids in zip(contents[:4], completions[:4], strict=True):
            with torch.no_grad():
                of_near = logps_of(near, student[1], blocks, ids)
            whole = whole + divergence(logps_of(student[0], student[1], blocks, ids), of_near, 1.0).sum()
        n_near, n_far = (sum(map(len, part)) for part in (completions[:4], completions[8:]))
        logs = run.history[0]
        assert logs["loss"] == pytest.approx((value + whole.item()) / (n_aligned + n_near), rel=1e-4)
        assert logs["teacher/far/divergence"] == pytest.approx(value / n_aligned, rel=1e-4)
        assert logs["teacher/near/divergence"] == pytest.approx(whole.item() / n_near, rel=1e-4)
        assert logs["teacher/far/aligned_frac"] == pytest.approx(n_aligned / n_far)
        assert logs["teacher/near/token_frac"] == pytest.approx(n_near / (n_aligned + n_near))
        assert "teacher/near/aligned_frac" not in logs
        assert_update(run, (surrogate + whole) / (n_aligned + n_near), student[0])


# A teacher of the same tokenizer


def test_same_tokens_in_another_family_are_compared_whole():
    """Qwen2-VL has Qwen2.5-VL's tokenizer, and other features of images."""
    rows = image_rows(2)
    folder = folder_of("qwen2_vl", changes_tokens=False)
    run = one_step(rows, {"teacher_model": folder}, beta=0.3, teacher_view="blank")
    student = student_pair()
    of_teacher = loaded(folder, "qwen2_vl")
    contents = four([content(row, "image") for row in rows])
    blanked = four([content(row, "image", blanked=True) for row in rows])
    completions = completions_of(run, "image", contents[::4])
    total = 0.0
    for blocks, seen, ids in zip(contents, blanked, completions, strict=True):
        with torch.no_grad():
            logps = logps_of(*of_teacher, seen, ids)
        total = total + divergence(logps_of(*student, blocks, ids), logps, 0.3).sum()
    loss = total / sum(map(len, completions))
    assert run.history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_update(run, loss, student[0])


def test_a_rank_without_rows_of_a_teacher_forwards_a_prompt_that_it_reads(tmp_path, monkeypatch):
    """A teacher of text has the student's tokens. Other ranks may have its rows while this one has images."""
    model, processor = load("qwen2_5_vl")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    vocab_size = model.config.get_text_config().vocab_size
    Qwen2ForCausalLM(Qwen2Config(vocab_size=vocab_size, **sizes, **heads)).save_pretrained(tmp_path)
    shared = processor.tokenizer
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=shared.backend_tokenizer, eos_token=shared.eos_token, pad_token=shared.pad_token
    )
    tokenizer.chat_template = processor.chat_template
    tokenizer.save_pretrained(tmp_path)
    of_images = [{**row, "teacher_id": "near"} for row in image_rows(2)]
    of_text = [{**row, "image": None, "teacher_id": "text"} for row in [*text_rows()][:2]]
    objects = {
        "teacher_models": {"near": same_teacher("qwen2_5_vl"), "text": str(tmp_path)},
        "teacher_model": None,
    }
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "generation_batch_size": 16}
    losses = []
    for has_other_ranks in (False, True):
        if has_other_ranks:
            monkeypatch.setattr(teachers, "any_rank", lambda *_: True)
        losses.append(one_step(Dataset.from_list([*of_images, *of_text]), objects, **sizes).history[0]["loss"])
    assert losses[0] > 0.01 and losses[1] == losses[0]


def test_a_teacher_of_the_same_processor_gives_the_same_bits():
    """With `teacher_processor="separate"`, too, it reads the student's inputs."""
    runs = []
    for teacher_processor in ("student", "separate"):
        objects = {"teacher_model": same_teacher("qwen2_5_vl")}
        run = one_step(image_rows(2), objects, teacher_processor=teacher_processor, beta=0.5)
        assert all(run.trainer.scored_packed)
        runs.append(run)
    assert runs[0].history[0]["loss"] == runs[1].history[0]["loss"]
    assert all(torch.equal(update, runs[1].update[name]) for name, update in runs[0].update.items())


# Errors


REFUSED = {
    "beta": ({"beta": 0.5}, "`beta=0.5` compares all tokens, but those of the teacher are others; .* set `beta=1.0`"),
    "top k": ({"loss_top_k": 5}, "`loss_top_k=5` compares tokens, but those of the teacher are others; "),
    "steps": (
        {"steps_per_generation": 2, "per_device_train_batch_size": 4},
        "by the current weights, but `steps_per_",
    ),
    "tools": ({"objects": {"tools": [look_up]}}, "scores completions of one turn; remove `tools`"),
    "itself": ({"objects": {"teacher_model": None}, "teacher_view": "blank"}, "for other models, but the student is"),
    "average": ({"self_teacher": "ema"}, "for other models, but `self_teacher` makes the student its own"),
    "server": (
        {"objects": {"teacher_model": None}, "teacher_model_server_url": "http://localhost:1", "loss_top_k": 5},
        "scores text, but a teacher on a server scores the student's tokens; load the teacher by its name",
    ),
    "setting": ({"teacher_processor": "student(on_unaligned='skip')"}, "`on_unaligned` of .* has no effect with the"),
    "unknown": ({"teacher_processor": "own"}, "teacher_processor"),
    "student": ({"teacher_processor": "student"}, "With `teacher_processor='separate'`, it reads them by"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    options = dict(REFUSED[name][0])
    message = REFUSED[name][1]
    with pytest.raises(ValueError, match=message):
        one_step(image_rows(2), options.pop("objects", None), **options)


def test_a_teacher_without_a_processor_is_refused(tmp_path):
    load("llava")[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'separate'` needs the processor of the teacher, but there is none in"):
        one_step(image_rows(2), {"teacher_model": str(tmp_path)})


def test_a_row_with_media_that_the_teacher_doesnt_take_is_refused():
    with pytest.raises(ValueError, match="row 0: the teacher takes no image; remove the row, or choose another"):
        one_step(image_rows(2), {"teacher_model": folder_of("qwen2_audio")})


def test_text_rows_and_a_teacher_that_hears():
    run = one_step(text_rows(2), {"teacher_model": folder_of("qwen2_audio")})
    assert 0.5 < run.history[0]["teacher/aligned_frac"] < 1
