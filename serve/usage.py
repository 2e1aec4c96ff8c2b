"""How many tokens one request took."""

from collections.abc import Sequence

from serve.engine import Output
from serve.prompts import Prompt
from serve.protocol import CachedTokens, Usage


class UsageCount:
    """Adds up over all prompts and samples; a prompt counts once however many samples it has.

    Samples that `best_of` drew and did not return count too: they were asked for and computed.
    """

    def __init__(self, prompts: Sequence[Prompt]):
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._cached_tokens = [0] * len(prompts)
        self._completion_tokens = [0] * len(prompts)

    def add(self, i: int, output: Output) -> None:
        self._cached_tokens[i] = output.num_cached_tokens
        self._completion_tokens[i] = output.num_generated_tokens

    def usage(self) -> Usage:
        completion_tokens = sum(self._completion_tokens)
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(cached_tokens=sum(self._cached_tokens)),
        )
