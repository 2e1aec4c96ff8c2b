"""What a text with tool calls in it comes apart into, as it grows."""

from dataclasses import dataclass

__all__ = ["CallArguments", "CallStart", "Event", "Said"]


@dataclass(frozen=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins; `index` counts the calls of a message."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which are JSON."""

    index: int
    text: str


Event = Said | CallStart | CallArguments
