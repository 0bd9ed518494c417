# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Prefix trees of prompts that share a system prompt or media. Shared tokens are forwarded once.

For example, the prompts `s1 ... s20 a` and `s1 ... s20 b c`, with short completions, become a node with `stop=20` and
two leaves, with `stop=21` and `stop=22`. The packed row is `s1 ... s20 | s20 a | s20 b c`, with completions after the
leaves.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from ..encoding.prompts import EncodedPrompt


# A common start becomes a node only if the node saves at least this fraction of the tokens after its parent, including
# completions. Smaller savings make no measurable difference.
_WORTH_SHARING = 0.1


@dataclass(eq=False)
class Node:
    """Tokens that several prompts share after the parent node, or, in a leaf, the last tokens of one prompt."""

    prompt: EncodedPrompt  # the longest prompt below the node; its masks hold for all prompts below
    stop: int  # number of the prompt's tokens from the root to the end of the node
    children: list["Node"] = field(default_factory=list)

    @property
    def leaves(self) -> list[EncodedPrompt]:
        """The prompts that start with the tokens of the node."""
        return [*chain.from_iterable(child.leaves for child in self.children)] or [self.prompt]


def leaf(prompt: EncodedPrompt) -> Node:
    """Returns a node of one prompt, without children."""
    return Node(prompt, len(prompt))


def walk(nodes: Sequence[Node], parent: Node | None = None) -> Iterator[tuple[Node, Node | None]]:
    """Yields nodes with their parents, in row order."""
    for node in nodes:
        yield node, parent
        yield from walk(node.children, node)


def count_tokens(trees: Sequence[Node]) -> int:
    """Returns the number of prompt tokens in a packed row, in which a node repeats the last token of its parent."""
    return sum(node.stop - (0 if parent is None else parent.stop - 1) for node, parent in walk(trees))


def prompt_trees(prompts: Mapping[EncodedPrompt, int], causal_prompts: Collection[EncodedPrompt]) -> list[Node]:
    """
    Returns the prefix trees of unique prompts. `prompts` maps a prompt to the number of completion tokens after it.

    Only `causal_prompts` share tokens. Shared tokens have equal ids, token fields and positions. Media are shared if
    they are equal and all their placeholders are among the shared tokens.
    """
    shareable = [prompt for prompt in prompts if prompt in causal_prompts]
    trees = _nodes_after(shareable, 0, _symbols(shareable), prompts) if len(shareable) > 1 else [*map(leaf, shareable)]
    order = {prompt: i for i, prompt in enumerate(prompts)}
    leaves = [leaf(prompt) for prompt in prompts if prompt not in causal_prompts]
    return sorted([*trees, *leaves], key=lambda node: min(order[prompt] for prompt in node.leaves))


def _nodes_after(
    prompts: Sequence[EncodedPrompt],
    depth: int,
    symbols: Mapping[EncodedPrompt, torch.Tensor],
    n_completion_tokens: Mapping[EncodedPrompt, int],
) -> list[Node]:
    """Returns the nodes of prompts after their first `depth` tokens, which a parent node holds."""
    if len(prompts) == 1:
        return [leaf(prompts[0])]
    first = prompts[0]
    n_equal = n_common = min(_n_equal(symbols[first], symbols[prompt]) for prompt in prompts)
    # Children repeat the last token of a node. Where this token would belong to media, the node ends before the media.
    # `(n_equal, 0)` stands for prompts without media, and changes neither condition.
    starts, ends = zip(*(prompt.media_span or (n_equal, 0) for prompt in prompts), strict=True)
    if min(starts) < n_equal <= max(ends):
        n_common = min(starts)
    # Each prompt after the first saves the node's tokens, and each child repeats one token
    n_saved = (n_common - depth) * (len(prompts) - 1) - len(prompts)
    is_worthwhile = n_saved >= _WORTH_SHARING * sum(
        len(prompt) - depth + n_completion_tokens[prompt] for prompt in prompts
    )
    # Prompts by their first symbol after the common start. A prompt that ends there gets a separate entry.
    prompts_by_symbol: dict[tuple, list[EncodedPrompt]] = {}
    for i, prompt in enumerate(prompts):
        next_symbol = symbols[prompt][n_equal : n_equal + 1].flatten().tolist()
        prompts_by_symbol.setdefault((*next_symbol,) or (None, i), []).append(prompt)
    child_depth = n_common if is_worthwhile and n_common else depth
    children: list[Node] = []
    for alike_prompts in prompts_by_symbol.values():
        children += _nodes_after(alike_prompts, child_depth, symbols, n_completion_tokens)
    return [Node(max(prompts, key=len), n_common, children)] if is_worthwhile and n_common else children


def _n_equal(a: torch.Tensor, b: torch.Tensor) -> int:
    n = min(len(a), len(b))
    differs = (a[:n] != b[:n]).any(1)
    return int(differs.int().argmax()) if differs.any() else n


def _symbols(prompts: Sequence[EncodedPrompt]) -> dict[EncodedPrompt, torch.Tensor]:
    """
    Returns the symbols of the tokens of each prompt, `(P, K)`. Two tokens of `P` are equal if all `K` values of their
    symbols are: id, media number, token fields and positions.
    """
    names = sorted(set().union(*(prompt.token_fields for prompt in prompts)))
    n_axes = max(prompt.position_ids.shape[:-1].numel() for prompt in prompts)
    share_media(prompts)
    media_numbers: dict[int, int] = {}
    symbols = {}
    for i, prompt in enumerate(prompts):
        media = torch.zeros_like(prompt.input_ids)
        if prompt.media_span is not None:
            # At the first placeholder alone, since prompts share all of their media or none
            media[prompt.media_span[0]] = media_numbers.setdefault(id(prompt.on_device), len(media_numbers) + 1)
        elif prompt.media:
            media[0] = -1 - i  # another number for each prompt, as media without a span can't be shared
        fields = [prompt.token_fields.get(name, torch.zeros_like(prompt.input_ids)) for name in names]
        positions = prompt.position_ids.flatten(0, -2).expand(n_axes, -1)
        symbols[prompt] = torch.stack([prompt.input_ids, media, *fields, *positions], dim=1)
    return symbols


def share_media(prompts: Iterable[EncodedPrompt]) -> None:
    """Makes prompts with equal media share `on_device`, the cache of media and of encoder outputs on devices."""
    # Media of different shapes differ, so only prompts whose media have equal shapes need a hash
    prompts_by_shapes: dict[tuple, list[EncodedPrompt]] = {}
    for prompt in dict.fromkeys(prompts):
        if prompt.media:
            shapes = ((name, value.dtype, *value.shape) for name, value in sorted(prompt.media.items()))
            prompts_by_shapes.setdefault((*shapes,), []).append(prompt)
    for similar_prompts in prompts_by_shapes.values():
        if len(similar_prompts) == 1:
            continue
        caches: dict[bytes, dict] = {}
        for prompt in similar_prompts:
            prompt.on_device = caches.setdefault(_digest(prompt), prompt.on_device)


def _digest(prompt: EncodedPrompt) -> bytes:
    """The hash is cached on the prompt."""
    if "media" not in prompt.mask_cache:
        digest = hashlib.blake2b()
        for name, value in sorted(prompt.media.items()):
            digest.update(name.encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        prompt.mask_cache["media"] = digest.digest()
    return prompt.mask_cache["media"]
