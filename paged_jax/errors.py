"""Every error that paged-jax raises on purpose."""

from scheduler import RequestError

__all__ = [
    "ConfigError",
    "EngineDeadError",
    "LateCompileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "PagedJaxError",
    "RequestError",
]


class PagedJaxError(Exception):
    """Base class of what is wrong with the installation, the model or the configuration."""


class ConfigError(PagedJaxError, ValueError):
    """A configuration that cannot work; the message names the field and the limit."""


class ModelNotFoundError(PagedJaxError):
    """MODEL names nothing that can be found; the message says what was tried."""


class ModelLoadError(PagedJaxError):
    """A model's files are damaged, incomplete or of an unsupported kind."""


class LateCompileError(PagedJaxError):
    """A step needs a program that the warm-up left out, and `late_compile=False`."""


class EngineDeadError(PagedJaxError):
    """The engine stopped after an error it could not recover from."""
