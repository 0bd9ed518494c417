# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM samples a pretrained language model in float32: log-probabilities, ends of text, and weights of an update."""

import pytest
from helpers.engine_runs import Recorded, make
from helpers.real_models import folder, question_rows


pytestmark = pytest.mark.slow
LONGEST = 24
TOLERANCE = 1e-4  # nats


class Kept(Recorded):
    """Trainer that keeps its samples, to compare them with other weights."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = []

    def compare(self, *sampled):
        super().compare(*sampled)
        self.kept.append(sampled)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns a trainer after two updates, and the differences of its first samples from the weights after them."""
    try:
        path = folder("text")
    except ImportError as error:
        pytest.skip(str(error))
    options = {"max_steps": 2, "learning_rate": 1e-5, "max_completion_length": LONGEST, "self_check": False}
    given = (Kept, None, question_rows(4), tmp_path_factory.mktemp("out"), {"model": path})
    trainer = make(*given, engine={"num_gpu_blocks_override": None}, **options)  # its blocks are larger
    trainer.train()
    return trainer


def test_log_probabilities_are_those_of_the_trainer(trained):
    """Of both draws, one before and one after the first update; the weights in between moved them by more."""
    assert len(trained.kept) == 2 and max(trained.differences) < TOLERANCE, trained.differences
    trained.compare(*trained.kept[1])  # with the weights after the second update
    assert trained.differences.pop() > 100 * TOLERANCE
    trained.draws = trained.draws[:2]


def test_completions_end_where_the_model_ends_them(trained):
    end = trained.processing_class.eos_token_id
    completions = [ids for _, sampled, _ in trained.kept[:2] for ids in sampled]
    assert all(end not in ids[:-1] for ids in completions)
    assert all((ids[-1] == end) == (len(ids) < LONGEST) or len(ids) == LONGEST for ids in completions)
    lengths = {len(ids) for ids in completions}
    assert max(lengths) == LONGEST and min(lengths) < LONGEST and len(lengths) > 2
