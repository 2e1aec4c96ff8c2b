"""The one error that a caller of the scheduler can cause."""


class RequestError(ValueError):
    """A request that cannot be honoured, refused before it touches any state.

    `param` names the offending field; `code` is a short machine-readable reason
    (the HTTP layer passes both on in OpenAI's error shape).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code
