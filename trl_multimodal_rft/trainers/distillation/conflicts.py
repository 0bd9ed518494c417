# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of distillation that contradict each other or have no effect: tables of conditions and messages."""

from typing import Any

from ..base.conflicts import Conflicts


def conflicts_of_self_teacher(args: Any) -> Conflicts:
    """Returns conflicts of the settings of `self_teacher`."""
    settings = args.self_teacher_settings
    defaults = type(settings)()
    return [
        (
            settings.rate != defaults.rate and settings.weights != "ema",
            "`rate` of `self_teacher` has no effect without an average; write 'ema(rate=...)'.",
        ),
        (
            not settings.shows_best and settings.min_reward != defaults.min_reward,
            "`min_reward` of `self_teacher` has no effect without `shows_best=True`; leave it out.",
        ),
        (
            settings.shows_best and args.num_generations < 2,
            "`shows_best=True` of `self_teacher` shows another completion of the group, but `num_generations` is "
            f"{args.num_generations}; set it to 2 or more.",
        ),
        (
            settings.shows_best and args.eval_strategy != "no",
            "`shows_best=True` of `self_teacher` needs groups, and evaluation samples one completion for each prompt; "
            "set `eval_strategy='no'`, and evaluate with `GenerationEvalCallback`.",
        ),
    ]


def conflicts_of_processor(args: Any) -> Conflicts:
    """Returns conflicts of the settings of `teacher_processor`."""
    settings = args.teacher_processor_settings
    student_settings = args.self_teacher_settings
    separate = args.separates_teachers
    return [
        (
            not separate and settings.on_unaligned != type(settings)().on_unaligned,
            "`on_unaligned` of `teacher_processor` has no effect with the student's processor; write "
            "\"separate(on_unaligned='skip')\".",
        ),
        (
            separate and args.keeps_decoded,
            "`teacher_processor='separate'` scores text, but a teacher on a server scores the student's tokens; load "
            "the teacher by its name in place of the server, or leave `teacher_processor` out.",
        ),
        (
            separate and student_settings != type(student_settings)(),
            "`teacher_processor='separate'` is for other models, but `self_teacher` makes the student its own "
            "teacher; leave out one of them.",
        ),
    ]


def conflicts_of_server(args: Any) -> Conflicts:
    """Returns conflicts of a teacher on a server with options that need all of its probabilities."""
    if not args.keeps_decoded:
        return []
    others = ("teacher_model_name_or_path", "teacher_model_init_kwargs", "teacher_model_revision")
    return [
        (
            args.loss_top_k == 0,
            "A teacher on a server returns the log-probabilities of its most likely tokens alone; set `loss_top_k`, "
            "at most the server's `--max-logprobs` (20 by default).",
        ),
        (
            args.temperature != 1.0,
            "A teacher on a server returns log-probabilities at a temperature of 1; `temperature` is "
            f"{args.temperature}, so set it to 1.",
        ),
        *(
            (
                getattr(args, name) is not None,
                f"`teacher_model_server_url` and `{name}` name two teachers; remove one of them.",
            )
            for name in others
        ),
    ]


def conflicts_of_losses(args: Any) -> Conflicts:
    """Returns conflicts of the options of the divergence, and of sizes that it can't change."""
    return [
        (
            not args.loss_add_tail and args.loss_top_k == 1,
            "`loss_add_tail=False` renormalizes over `loss_top_k=1` token, whose probability is then always 1; raise "
            "`loss_top_k`.",
        ),
        (
            args.auto_find_batch_size,
            "`auto_find_batch_size` would change the size of the batches that completions are sampled for; lower "
            "`per_device_train_batch_size` instead.",
        ),
    ]


def conflicts_of_other_tokens(args: Any, teacher: str) -> Conflicts:
    """Returns conflicts with teachers of another tokenizer. `teacher` names one of them."""
    instead = (
        "; its log-probabilities of text give the reverse KL divergence of the sampled tokens: set `beta=1.0` and "
        "`loss_top_k=0`, or choose a teacher with the student's tokenizer."
    )
    top_k = args.loss_top_k
    return [
        (top_k > 0, f"`loss_top_k={top_k}` compares tokens, but those of {teacher} are others{instead}"),
        (args.beta != 1.0, f"`beta={args.beta}` compares all tokens, but those of {teacher} are others{instead}"),
        (
            args.steps_per_generation != args.gradient_accumulation_steps,
            f"The divergence from {teacher}, whose tokens are others than the student's, is that of completions by "
            f"the current weights, but `steps_per_generation` ({args.steps_per_generation}) isn't "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}); set both to one number.",
        ),
    ]
