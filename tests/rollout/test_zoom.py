# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The tool `zoom`: its regions, what it refuses, and its images in training, by name and by a command."""

import functools
import json

import numpy as np
import PIL.Image
import pytest
from helpers.tools import Saying, call, with_tools
from helpers.trainer_utils import image_rows, make_trainer

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.extras import evaluate
from trl_multimodal_rft.rollout.tools import Zoom, load_tools


WIDTH = 200
HEIGHT = 100


def picture(width=WIDTH, height=HEIGHT):
    """An image whose pixels tell their place."""
    y, x = np.mgrid[:height, :width].astype("uint8")
    return PIL.Image.fromarray(np.stack([x, y, x], axis=-1))


def zooming(*images, **settings):
    zoom = Zoom(**settings)
    [row] = rows_to_messages([{"prompt": "Look.", "images": list(images or [picture()])}])
    assert zoom.reset(prompt_messages=row["prompt"], solution="x") is None
    return zoom


def shown(zoom, box, **arguments):
    """The region of the first image that a call shows, as [left, top, right, bottom]."""
    [block] = zoom.zoom(box, **arguments)
    assert block["type"] == "image"
    part = np.asarray(block["image"])
    (left, top) = part[0, 0, :2].tolist()
    (right, bottom) = part[-1, -1, :2].tolist()
    assert part.shape[:2] == (bottom + 1 - top, right + 1 - left)
    return [left, top, right + 1, bottom + 1]


@pytest.mark.parametrize(
    ("box", "region"),
    [
        ([10, 20, 60, 80], [10, 20, 60, 80]),
        ([10.4, 20.6, 59.5, 79.2], [10, 20, 60, 80]),
        ([-5, -5, 1000, 50], [0, 0, 200, 50]),
        ([100, 50, 104, 90], [88, 50, 116, 90]),  # at least 28 pixels
        ([0, 0, 2, 2], [0, 0, 28, 28]),
        ([198, 99, 200, 100], [172, 72, 200, 100]),
        (["10", "20", "60", "80"], [10, 20, 60, 80]),
    ],
)
def test_regions(box, region):
    assert shown(zooming(), box, label="a cat") == region


def test_scale():
    assert shown(zooming(scale=1000), [100, 200, 500, 600]) == [20, 20, 100, 60]
    assert shown(zooming(scale=1), [0.1, 0.2, 0.5, 0.6]) == [20, 20, 100, 60]


def test_a_region_of_an_earlier_result():
    """Coordinates are those of the result."""
    zoom = zooming(picture(), picture(40, 30))
    assert shown(zoom, [50, 10, 150, 90]) == [50, 10, 150, 90]
    assert shown(zoom, [10, 20, 60, 70], image=3) == [60, 30, 110, 80]
    assert shown(zoom, [0, 0, 40, 30], image=2) == [0, 0, 40, 30]
    zoom.reset(prompt_messages=None)
    with pytest.raises(ValueError, match="There is no image 1; the conversation has 0"):
        zoom.zoom([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("box", "problem"),
    [
        ([60, 20, 10, 80], "left must be less than right"),
        ([1, 2, 3], r"give \[left, top, right, bottom\]"),
        ("all", r"give \[left, top, right, bottom\]"),
        (None, r"give \[left, top, right, bottom\]"),
        ([0, 0, float("inf"), 5], "left must be less than right"),
        ([300, 0, 400, 50], "outside of the image; its size is 200 x 100"),
    ],
)
def test_wrong_boxes(box, problem):
    with pytest.raises(ValueError, match=problem):
        zooming().zoom(box)
    with pytest.raises(ValueError, match="There is no image 2"):
        zooming().zoom([0, 0, 50, 50], image=2)
    with pytest.raises(ValueError, match="a side is over 100 times the other"):
        zooming(picture(255, 2)).zoom([0, 0, 255, 2])


def test_tools_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_tools.py").write_text("def search(word: str):\n    return word\n\n\nclass Room:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = load_tools(["zoom", "my_tools.search"])
    assert found["environment_factory"] is Zoom and [each.__name__ for each in found["tools"]] == ["search"]
    assert load_tools(["zoom(scale=1000)"])["environment_factory"]().scale == 1000
    for names, problem in [
        (["zoomed"], "no tool 'zoomed'.*Did you mean `zoom`"),
        (["zoom(size=3)"], "no setting 'size'"),
        (["zoom", "my_tools.Room"], "several classes"),
        (["my_tools.search(word='a')"], "has no settings; leave them out"),
    ]:
        with pytest.raises(ValueError, match=problem):
            load_tools(names)


def test_training(tmp_path):
    boxes = [[9, 9, 0, 0], *7 * [[0, 0, 40, 40]]]
    seen = []
    script = {i: [call("zoom", bbox_2d=box, label="cat")] for i, box in enumerate(boxes)}

    def watch(completions, **kwargs):
        seen.append([message["content"] for each in completions for message in each if message["role"] == "tool"])
        return [float(i) for i in range(len(completions))]

    options = {"max_steps": 2, "max_completion_length": 600, "self_check": True, "max_tool_media": 2}
    trainer = make_trainer(
        MultimodalGRPOTrainer,
        "qwen3_vl",
        image_rows(),
        tmp_path,
        reward=watch,
        objects=with_tools(**load_tools(["zoom"])),
        sampler=functools.partial(Saying, script=script),
        **options,
    )
    trainer.train()
    assert [tool.__name__ for tool in trainer.tools] == ["zoom"] and len(seen) == 2
    for step in seen:
        assert "left must be less than right" in step[0]
        assert [each[0]["image"].size for each in step[1:]] == [(40, 40)] * 7
    logs = trainer.state.log_history[0]
    assert logs["tools/call_frequency"] == 1 and logs["tools/failure_frequency"] == pytest.approx(1 / 8)


def test_command_of_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    objects = with_tools()
    objects["model"].save_pretrained("model")
    objects["processing_class"].save_pretrained("model")
    image_rows(2).add_column("solution", ["7"] * 2).to_parquet("rows.parquet")
    words = ["--model_name_or_path", "model", "--dataset_name", "rows.parquet", "--dataset_test_split", "train"]
    words += ["--tools", "zoom", "--max_completion_length", "8"]
    evaluate.main(*parse(evaluate.ARGUMENTS, words))
    assert capsys.readouterr().out.endswith("The rows are those of 'train', which training may have used.\n")
    results = json.loads((tmp_path / "outputs" / "evaluate" / "metrics.json").read_text())
    assert "tools/call_frequency" in str(results)
