# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
GRPO for an agent that looks at a screen: it scrolls until it sees an icon, clicks on it and reads the digit it opens.

A trajectory has three or four turns, each with a screenshot. Only the last one stays in the context
(`max_context_media=1`), so that each turn is sampled, and scored, in a context of its own. A small Qwen2.5-VL learns
this on a CPU in minutes. It starts with supervised fine-tuning on the turns of demonstrations, whose first scroll goes
up or down at random. Where to scroll, which a bar shows, is learned from the reward alone:

```bash
accelerate launch examples/grpo_agent.py
```

No conversation has more than six screenshots, so the same with the whole history is

```bash
accelerate launch examples/grpo_agent.py --max_context_media 6 --output_dir outputs/grpo_agent_history
```

Both print the accuracy on held-out screens with its confidence interval, and how many tokens the policy reads.
"""

from collections import defaultdict

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets
from demo import DEMO_ARGUMENTS, cold_start, demo_inputs, start, train_and_measure
from PIL import Image, ImageDraw
from small_models import screen_model, tool_call
from tasks import DIGITS, HIDDEN_QUESTION

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.engines.samplers import Sampler
from trl_multimodal_rft.rewards import accuracy_reward


DEMO = {
    **DEMO_ARGUMENTS,
    "output_dir": "outputs/grpo_agent",
    "per_device_train_batch_size": 96,
    "num_generations": 12,
    "max_completion_length": 150,  # with the whole history, all screenshots
    "max_tool_calling_iterations": 3,  # which leaves none to turn around
    "max_context_media": 1,
    "max_steps": 30,
    "lr_scheduler_type": "constant",
    "entropy_coef": 0.01,
}
SIZE = 28  # pixels of a screenshot's side
SCREENS = 5  # of a page, which opens at the one in the middle
GREY = 128  # of what is empty
# Of digits of 18 x 24 pixels: left, top, width and height
STROKES = {
    "a": (0, 0, 18, 4),
    "b": (14, 0, 4, 14),
    "c": (14, 10, 4, 14),
    "d": (0, 20, 18, 4),
    "e": (0, 10, 4, 14),
    "f": (0, 0, 4, 14),
    "g": (0, 10, 18, 4),
}
SEGMENTS = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")
SCREENSHOT = {"type": "image", "text": None}


class Screen:
    """Shows a page, screen by screen, and what its icon opens."""

    def reset(self, page: Image.Image, opened: Image.Image, place: list[int], **row) -> list:
        self.page = page
        self.opened = opened
        self.place = place
        self.screen = SCREENS // 2
        self.is_open = False
        return self._screenshot()

    def scroll(self, down: int) -> list:
        """
        Scrolls to the next screen.

        Args:
            down: 1 to scroll down, 0 to scroll up.

        Returns:
            A screenshot.
        """
        self.screen = min(max(self.screen + (1 if down else -1), 0), SCREENS - 1)
        self.is_open = False
        return self._screenshot()

    def click(self, x: int, y: int) -> list:
        """
        Clicks on a quarter of the screen.

        Args:
            x: 0 for the left half, 1 for the right one.
            y: 0 for the upper half, 1 for the lower one.

        Returns:
            A screenshot.
        """
        self.is_open = self.is_open or [self.screen, x, y] == self.place
        return self._screenshot()

    def _screenshot(self) -> list:
        top = self.screen * SIZE
        return [
            {"type": "image", "image": self.opened if self.is_open else self.page.crop((0, top, SIZE, top + SIZE))}
        ]


def draw_page(place: list[int], rng: np.random.Generator) -> Image.Image:
    """A page of text with an icon in a quarter of one of its screens; bars on the others show where to scroll."""
    page = Image.new("L", (SIZE, SCREENS * SIZE), GREY)
    draw = ImageDraw.Draw(page)
    half = SIZE // 2
    for top in range(2, page.height, 4):
        draw.line((2, top, int(rng.integers(4, SIZE - 2)), top), fill=int(rng.integers(60, 120)))
    for screen in range(SCREENS):
        left = 0
        top = screen * SIZE
        right = SIZE - 1
        bottom = (screen + 1) * SIZE - 1
        if screen < place[0]:
            top = bottom - 4
        elif screen > place[0]:
            bottom = top + 4
        else:
            left = left + 1 + half * place[1]
            top = top + 1 + half * place[2]
            right = left + half - 3
            bottom = top + half - 3
        draw.rectangle((left, top, right, bottom), fill=255)
    return page


def draw_digit(digit: int, rng: np.random.Generator) -> Image.Image:
    """A digit of seven segments, at a random place."""
    picture = Image.new("L", (SIZE, SIZE), GREY)
    left = rng.integers(3, 8)
    top = rng.integers(1, 4)
    for segment in SEGMENTS[digit]:
        x, y, width, height = STROKES[segment]
        box = (left + x, top + y, left + x + width - 1, top + y + height - 1)
        ImageDraw.Draw(picture).rectangle([int(n) for n in box], fill=255)
    return picture


def pages(n: int, seed: int) -> Dataset:
    """Rows with a page, and a digit that its icon opens, one or two screens away from the one in the middle."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        screen = SCREENS // 2 + int(rng.choice([-2, -1, 1, 2]))
        place = [screen, *rng.integers(2, size=2).tolist()]
        rows.append(
            {
                "prompt": [{"role": "user", "content": HIDDEN_QUESTION}],
                "page": draw_page(place, rng),
                "opened": draw_digit(i % 10, rng),
                "place": place,
                "solution": DIGITS[i % 10],
            }
        )
    return Dataset.from_list(rows)


def demonstrations(rows: Dataset, most: int, seed: int) -> Dataset:
    """
    Turns of conversations in which an agent finds the icon and answers correctly, each with its context, in which the
    last `most` screenshots are left. At first, the agent scrolls up or down at random, as it doesn't look at the bars.
    """
    screen = Screen()
    turns = []
    rng = np.random.default_rng(seed)
    for row in rows:
        messages = [said("user", HIDDEN_QUESTION)]
        images = [screen.reset(**row)[0]["image"]]
        messages[0]["content"].append(SCREENSHOT)
        to, x, y = row["place"]
        down = int(rng.integers(2))
        while not screen.is_open:
            if screen.screen == to:
                name = "click"
                arguments = {"x": x, "y": y}
            else:
                name = "scroll"
                arguments = {"down": down}
            call = said("assistant", tool_call(name, **arguments))
            turns.append(turn(messages, images, call, most))
            images.append(getattr(screen, name)(**arguments)[0]["image"])
            messages += [call, {"role": "tool", "content": [SCREENSHOT]}]
            down = int(to > screen.screen)
        turns.append(turn(messages, images, said("assistant", row["solution"]), most))
    return Dataset.from_list(turns)


def said(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def turn(messages: list[dict], images: list[Image.Image], answer: dict, most: int) -> dict:
    """An answer to messages with their last screenshots alone."""
    surplus = len(images) - most
    context = []
    for message in messages:
        content = [block for block in message["content"] if block != SCREENSHOT or surplus <= 0]
        surplus -= SCREENSHOT in message["content"]
        context.append({**message, "content": content})
    return {"prompt": context, "completion": [answer], "images": images[-most:]}


class Counting:
    """A sampler that counts the tokens of the contexts that it reads in evaluations, by optimizer steps."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.lengths = defaultdict(list)

    def __getattr__(self, name: str):
        return getattr(self.__dict__["sampler"], name)

    def __call__(self, model, prompts, *, step, config=None, **options):
        if config is not None:
            self.lengths[step] += map(len, prompts)
        return self.sampler(model, prompts, step=step, config=config, **options)


def demo(script_args, training_args, model_args):
    seed = training_args.seed
    model, processor = screen_model(seed)
    dataset = DatasetDict(train=pages(1000, seed=1), test=pages(200, seed=2))
    training_args.ignored_media_columns = ["page", "opened"]
    turns = demonstrations(pages(300, seed=3), training_args.max_context_media, seed)
    harder = turns.filter(lambda row: "scroll" not in str(row["completion"]))  # where to click, and digits
    cold_start(
        model,
        processor,
        concatenate_datasets([turns, harder, harder]),
        training_args,
        batch_size=40,
        max_steps=130,
        learning_rate=2e-3,
    )
    trainer = MultimodalGRPOTrainer(
        **demo_inputs(model, processor, dataset, training_args, model_args),
        reward_funcs=accuracy_reward,
        environment_factory=Screen,
    )
    trainer.sampler = counting = Counting(trainer.sampler)
    train_and_measure(trainer, script_args, dataset["test"], "screens", times=2)
    for logs in trainer.state.log_history:
        if "eval_accuracy_low" in logs:
            lengths = counting.lengths[logs["step"]]
            trainer.accelerator.print(
                "Step {step}: accuracy {eval_accuracy:.1%} ({eval_accuracy_low:.1%} to {eval_accuracy_high:.1%}); "
                "contexts of {:.0f} tokens, {} at most, {:.0f} in a trajectory".format(
                    sum(lengths) / len(lengths), max(lengths), sum(lengths) / len(dataset["test"]), **logs
                )
            )


if __name__ == "__main__":
    start(grpo, demo, DEMO)
