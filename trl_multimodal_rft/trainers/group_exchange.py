# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Other groups in the place of those whose completions all have the same reward."""

from typing import Any

import torch

from ..data.batches import RowBatch
from ..models.trainer_mixin import TrainerMixin
from .groups import Group, GroupBuffer, join_groups, split_groups


class GroupExchangeMixin(TrainerMixin):
    """Gives GRPO dynamic sampling and a replay of past groups."""

    _replay: GroupBuffer
    _surplus: GroupBuffer
    _n_extra_prompts: int
    _draw: Any
    _loss_mask: Any
    _score_reference: Any

    def _exchange_groups(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Puts groups with signal in the place of groups whose completions all have the same reward."""
        args, step = self.args, self.state.global_step
        drawn = split_groups(batch, self.num_generations, step)
        size, rounds = len(drawn), 1
        chosen = self._surplus.take(len(self._surplus)) + _with_signal(drawn)
        while (
            args.dynamic_sampling
            and rounds < args.dynamic_sampling_max_rounds
            and self._any_process(len(chosen) < size)
        ):
            more = split_groups(self._draw(self._draw_prompts(size)), self.num_generations, step)
            drawn, chosen, rounds = drawn + more, chosen + _with_signal(more), rounds + 1
        if args.dynamic_sampling:
            self._surplus.append(chosen[size:])
        chosen = chosen[:size]
        replayed = self._replay.sample(size - len(chosen), step)
        if args.replay_buffer_size > 0:
            self._replay.append(chosen)
        live = _with_signal(drawn)
        dead = [group for group in drawn if group not in live]
        joined = chosen + replayed + dead[: size - len(chosen) - len(replayed)]

        result = join_groups(joined, self._tokenizer.pad_token_id, self.accelerator.device)
        del result["live"]
        result["packed"] = batch["packed"]
        if self._any_process(any(group.step != step for group in joined)) and "ref_per_token_logps" in result:
            # The reference may have moved since
            result["ref_per_token_logps"] = self._score_reference(result, extra=True)
        result["num_items_in_batch"] = self.accelerator.gather(self._loss_mask(result).sum()).sum()

        counts = torch.tensor([[len(drawn), len(live), size, len(replayed)]], device=self.accelerator.device)
        n_drawn, n_live, n_used, n_replayed = self.accelerator.gather(counts).sum(0).tolist()
        metrics = self._metrics["train"]
        metrics["sampling/kept_frac"].append(n_live / n_drawn)
        if args.dynamic_sampling:
            metrics["sampling/rounds"].append(rounds)
        if args.replay_buffer_size > 0:
            metrics["replay/frac"].append(n_replayed / n_used)
            age = sum(step - group.step for group in replayed)
            ages = self.accelerator.gather(torch.tensor([age], device=self.accelerator.device)).sum().item()
            metrics["replay/age"].append(ages / n_replayed if n_replayed else 0.0)
        return result

    def _draw_prompts(self, n: int) -> RowBatch:
        """This process's next rows of dynamic sampling, each as often as it has completions."""
        start = self._n_extra_prompts
        self._n_extra_prompts += self.accelerator.num_processes * n
        return self._stream.draw(start, n)


def _with_signal(groups: list[Group]) -> list[Group]:
    return [group for group in groups if group.rows["live"].all()]
