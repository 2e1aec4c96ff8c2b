"""What every response and every chunk of one request has around its choices."""

from collections.abc import Sequence
from typing import Any

import msgspec

_encode = msgspec.json.encode


class Envelope:
    """Encodes what stays the same once, so that a streamed token costs one small encoding."""

    def __init__(self, **fields: Any):
        self._head = _encode(fields)[:-1] + b',"choices":['

    def around(self, choices: Sequence[msgspec.Struct], **fields: Any) -> bytes:
        """The JSON object; `fields` follow the choices, but for those that are None."""
        inner = b",".join([_encode(choice) for choice in choices])
        tail = b"]"
        for name, value in fields.items():
            if value is not None:
                tail += b',"' + name.encode() + b'":' + _encode(value)
        return self._head + inner + tail + b"}"
