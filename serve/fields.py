"""What becomes of each field of a request: honoured, refused by name, set aside, or unknown."""

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import msgspec

from paged_jax import RequestError, SamplingParams

IGNORED_HEADER = "x-paged-jax-ignored-fields"
MAX_NAMED_FIELDS = 20

# Sampling fields that any generating request may carry under SamplingParams' own names.
SAMPLING = frozenset(SamplingParams.field_names()) & {
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "logprobs_mode",
    "max_tokens",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
}
COMPLETION_SAMPLING = SAMPLING | {"best_of"}

# Known elsewhere, not honoured here: refused unless the value asks for nothing.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}

# For whoever bills, stores or routes; they ask nothing of the engine.
SET_ASIDE = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)

Body = TypeVar("Body", bound=msgspec.Struct)
Body_co = TypeVar("Body_co", bound=msgspec.Struct, covariant=True)


@dataclass(frozen=True)
class Fields(Generic[Body_co]):
    """A request taken apart: its checked body, its sampling fields as they came, the rest."""

    body: Body_co
    sampling: dict[str, Any]
    unknown: tuple[str, ...]

    def headers(self) -> dict[str, str]:
        """The response header that names what nobody knew, if there is anything."""
        if not self.unknown:
            return {}
        named = [quote(name[:64], safe="[]$.") for name in self.unknown[:MAX_NAMED_FIELDS]]
        return {IGNORED_HEADER: ",".join(named)}


def read_fields(
    raw: dict[str, Any],
    body_type: type[Body],
    sampling: Set[str] = frozenset(),
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES,
) -> Fields[Body]:
    """Take `raw` apart. RequestError names a field that is wrong, missing or not supported.

    sampling: the endpoint's sampling fields; where it has none, all of them are unknown.
    neutral: fields that it does not support, with the values that are welcome all the same.
    """
    own = {field.name for field in msgspec.structs.fields(body_type)}
    unknown = []
    for name, value in raw.items():
        if name in own or name in sampling or name in SET_ASIDE:
            continue
        if sampling and name in neutral:
            _refuse_unless_neutral(name, value, neutral[name])
        else:
            unknown.append(name)
    body = _convert({name: raw[name] for name in own if name in raw}, body_type)
    return Fields(body, {name: raw[name] for name in sampling if name in raw}, tuple(unknown))


def _refuse_unless_neutral(name: str, value: Any, welcome: tuple[Any, ...]) -> None:
    for neutral in welcome:
        if type(value) is type(neutral) and value == neutral:
            return
    raise RequestError(
        f"{name} is not supported by this server", param=name, code="unsupported_field"
    )


def _convert(raw: dict[str, Any], body_type: type[Body]) -> Body:
    try:
        return msgspec.convert(raw, body_type)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = re.fullmatch(r"Object missing required field `(\w+)`", text)
        if missing:
            param = missing.group(1)
            raise RequestError(f"{param} is required", param=param) from None
        what, _, path = text.partition(" - at ")
        param = path.strip("`").removeprefix("$.") or None
        raise RequestError(f"{param}: {what[:1].lower()}{what[1:]}", param=param) from None
