# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Metrics of correct and wrong completions with their confidence intervals, as functions of arrays."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binomtest


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> np.ndarray:
    """
    Computes an unbiased estimate of the probability that at least one of `k` completions is right, see
    [Evaluating Large Language Models Trained on Code](https://huggingface.co/papers/2107.03374).

    With `n` completions, of which `c` are right, the estimate is `1 - C(n - c, k) / C(n, k)`. This is the share of the
    sets of `k` completions that hold a right completion.

    Args:
        n (`int` or array of `int`):
            Number of completions of each row.
        c (`int` or array of `int`):
            Number of right completions, of a shape that broadcasts with `n`.
        k (`int`):
            Number of tries, between 1 and the smallest `n`.

    Returns:
        `np.ndarray`: Estimates between 0 and 1, of the broadcast shape.

    Raises:
        `ValueError`: If `k` is out of range, or `c` isn't between 0 and `n`.

    Example:
    ```python
    >>> pass_at_k(n=[4, 4, 4], c=[0, 1, 4], k=2)
    array([0. , 0.5, 1. ])
    ```
    """
    n, c = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if n.size and not 1 <= k <= n.min():
        raise ValueError(
            f"`k` is {k}, but must be between 1 and the smallest `n` ({n.min()}); sample more, or lower `k`."
        )
    if ((c < 0) | (c > n)).any():
        raise ValueError("`c`, the number of right completions among `n`, must be between 0 and `n`.")
    # Probability that draw `i`, without replacement, is wrong if all earlier draws are; 0 if all wrong ones are drawn
    failures = [np.clip(n - c - i, 0, None) / (n - i) for i in range(k)]
    return 1 - np.prod(failures, axis=0)


def majority_at_k(answers: Sequence[Sequence[Hashable]], correct: Sequence[Sequence[bool]], k: int) -> np.ndarray:
    """
    Computes how often the majority answer of `k` completions is right, see
    [Self-Consistency](https://huggingface.co/papers/2203.11171).

    Each row's completions form consecutive blocks of `k`, which vote separately; a remainder doesn't vote. Among
    answers with equally many votes the first one wins, so that the result is deterministic.

    Args:
        answers (`Sequence[Sequence[Hashable]]`):
            Answers of each row's completions; equal answers agree, and `None` has no vote.
        correct (`Sequence[Sequence[bool]]`):
            Whether each answer is right. For a block, the block's first completion with the winning answer counts.
        k (`int`):
            Number of votes, between 1 and the smallest number of completions.

    Returns:
        `np.ndarray`: Share of each row's blocks that are right, shape `(rows,)`.

    Raises:
        `ValueError`: If `k` is out of range, or a row has unequal numbers of answers and of values of `correct`.

    Example:
    ```python
    >>> majority_at_k([["7", "8", "7"], ["7", "8", "9"]], [[True, False, True], [True, False, False]], k=3)
    array([1., 1.])
    ```
    """
    shares = []
    for row, (votes, right) in enumerate(zip(answers, correct, strict=True)):
        if len(votes) != len(right):
            raise ValueError(
                f"row {row} has {len(votes)} answers and {len(right)} values of `correct`; pass one for each."
            )
        if not 1 <= k <= len(votes):
            raise ValueError(f"`k` is {k}, but row {row} has {len(votes)} answers; sample more, or lower it.")
        is_block_right = []
        for start in range(0, len(votes) - k + 1, k):
            block = list(votes[start : start + k])
            counts = Counter(answer for answer in block if answer is not None)
            if not counts:
                is_block_right.append(False)
                continue
            (winner, _), *_ = counts.most_common()  # equal counts are in the order of first appearance
            is_block_right.append(bool(right[start + block.index(winner)]))
        shares.append(np.mean(is_block_right))
    return np.array(shares, dtype=float)


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """
    Computes the confidence interval of a proportion by Wilson's score (1927,
    https://doi.org/10.1080/01621459.1927.10502953).

    The interval stays between 0 and 1. Unlike a normal interval, it has a width even if all or no trials succeed.

    Args:
        successes (`int`):
            Number of successes.
        n (`int`):
            Number of independent trials, at least 1.
        confidence (`float`, *optional*, defaults to `0.95`):
            Share of such intervals that hold the true proportion.

    Returns:
        `tuple[float, float]`: Lower and upper end.

    Raises:
        `ValueError`: If there is no trial, or if `successes` isn't between 0 and `n`.

    Example:
    ```python
    >>> wilson_interval(8, 10)
    (0.49016247153664183, 0.9433178485456247)
    ```
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(
            f"`successes` is {successes} and `n` is {n}; pass at least one trial, and between 0 and `n` successes."
        )
    low, high = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    return float(low), float(high)


def mean_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """
    Computes the confidence interval of a mean over rows from the standard error of the rows, see
    [Adding Error Bars to Evals](https://huggingface.co/papers/2411.00640).

    The random sample consists of prompts, so there is one value per row, such as the row's pass@k. Completions of one
    prompt are correlated, so an interval over completions would be too narrow. The interval is normal, so it needs
    dozens of rows.

    Args:
        values (`ArrayLike`):
            One value per row.
        confidence (`float`, *optional*, defaults to `0.95`):
            Share of such intervals that hold the true mean.

    Returns:
        `tuple[float, float]`: Lower and upper end, `NaN` with fewer than two rows.

    Example:
    ```python
    >>> mean_interval([0.0, 0.5, 1.0, 0.5])
    (0.09992402697039093, 0.9000759730296091)
    ```
    """
    values = np.asarray(values, dtype=float)
    if len(values) < 2:
        return math.nan, math.nan
    margin = _quantile(confidence) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()) - margin, float(values.mean()) + margin


def paired_interval(differences: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    r"""
    Computes the confidence interval of the mean difference between two measurements of the same rows, see
    [Adding Error Bars to Evals](https://huggingface.co/papers/2411.00640).

    Effects on both measurements of a row, such as its difficulty, cancel in its difference, which is between -1 and 1.
    The result is the normal interval of $n$ differences $d_i$ and two added differences, $d_{n+1} = 1$ and
    $d_{n+2} = -1$:

    $$\tilde{d} \pm z \sqrt{\frac{1}{(n + 2)^2} \sum_{i=1}^{n+2} (d_i - \tilde{d})^2},
    \qquad \tilde{d} = \frac{1}{n + 2} \sum_{i=1}^{n+2} d_i$$

    If all differences are -1, 0 or 1, this is the interval of Bonett and Price (2012,
    https://doi.org/10.3102/1076998611411915) for proportions in paired data. The two added differences
    give the interval a width even if all other differences are equal.

    Args:
        differences (`ArrayLike`):
            One difference per row, each between -1 and 1.
        confidence (`float`, *optional*, defaults to `0.95`):
            Share of such intervals that hold the true mean difference.

    Returns:
        `tuple[float, float]`: Lower and upper end, within -1 and 1.

    Raises:
        `ValueError`: If `differences` is empty, or if a difference isn't between -1 and 1.

    Example:
    ```python
    >>> paired_interval([1] * 7 + [-1] + [0] * 13)
    (0.013379823768343263, 0.5083593066664394)
    ```
    """
    values = np.asarray(differences, dtype=float)
    if not len(values) or not (np.abs(values) <= 1).all():
        raise ValueError("`differences` needs at least one value, and values between -1 and 1.")
    values = np.append(values, (1.0, -1.0))
    margin = _quantile(confidence) * float(values.std()) / math.sqrt(len(values))
    return max(float(values.mean()) - margin, -1.0), min(float(values.mean()) + margin, 1.0)


def _quantile(confidence: float) -> float:
    """Returns half the width of a normal interval in standard errors, such as 1.96 for a confidence of 0.95."""
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` is {confidence}, but must be between 0 and 1, such as 0.95.")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
