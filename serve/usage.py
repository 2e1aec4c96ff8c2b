"""How many tokens one request took."""

from collections.abc import Sequence

from serve.engine import Output
from serve.prompts import Prompt
from serve.protocol import CachedTokens, Usage


class UsageCount:
    """Adds up over all prompts and choices; a prompt counts once however many choices it has."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._cached_tokens = [0] * len(prompts)
        self._completion_tokens = 0

    def add(self, i: int, output: Output) -> None:
        self._cached_tokens[i] = output.num_cached_tokens
        for choice in output.outputs:
            self._completion_tokens += len(choice.token_ids)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(self._cached_tokens)),
        )
