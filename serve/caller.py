"""Whose request it is: how urgent, at whose expense, and with whom cached prefixes are shared."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from paged_jax import RequestError
from serve.front import Front
from serve.protocol import EngineRequest

FAIRNESS_HEADER = "x-gateway-inference-fairness-id"
MAX_LEN = 256


@dataclass(frozen=True)
class Caller:
    """What goes to the engine beside the prompt and the parameters."""

    priority: int
    tenant: str
    cache_salt: str
    adapter: str | None  # what the request names as its model, if that is one

    def standing(self) -> dict[str, Any]:
        """As keywords of the engine's methods."""
        fields = dataclasses.asdict(self)
        if self.adapter is None:
            del fields["adapter"]
        return fields


def caller_of(request: Request, body: EngineRequest, front: Front) -> Caller:
    """RequestError names a header that is too long, given twice or, for the salt, empty."""
    return Caller(
        priority=body.priority,
        tenant=_header(request, FAIRNESS_HEADER) or body.user or "",
        cache_salt=_cache_salt(request, body, front.options.cache_salt_header),
        adapter=body.model if body.model in front.engine.adapter_names else None,
    )


def _cache_salt(request: Request, body: EngineRequest, header: str | None) -> str:
    """The header's part comes first and with its length: no request can write itself into the
    prefixes of another header's value, nor one without the header into any of theirs.
    """
    own = body.cache_salt or ""
    if header is None:
        return own
    trusted = _header(request, header)
    if trusted is None:
        return f"-:{own}"
    if not trusted:
        raise RequestError(f"The header {header} is empty", param=header)
    return f"{len(trusted)}:{trusted}{own}"


def _header(request: Request, name: str) -> str | None:
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise RequestError(f"The header {name} is given {len(values)} times", param=name)
    if not values:
        return None
    if len(values[0]) > MAX_LEN:
        raise RequestError(
            f"The header {name} has {len(values[0])} characters, at most {MAX_LEN} are allowed",
            param=name,
        )
    return values[0]
