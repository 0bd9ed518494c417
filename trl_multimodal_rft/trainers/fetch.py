# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).

from datasets import Dataset


class FetchOnce:
    """
    A map-style dataset that reads and decodes each row of a batch once.

    TRL's sampler asks for a prompt once per completion, and for the whole generation batch once per micro-batch. Here
    the repeats are the same row object, so that media are decoded once and shared.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset to read from.
    """

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self._rows: dict[int, dict] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict]:
        wanted = dict.fromkeys(indices)
        missing = [i for i in wanted if i not in self._rows]
        fetched = dict(zip(missing, self.dataset.__getitems__(missing), strict=True)) if missing else {}
        self._rows = {i: fetched[i] if i in fetched else self._rows[i] for i in wanted}
        return [self._rows[i] for i in indices]
