"""Log lines, each with the name of the request that it belongs to: as text, or as JSON objects."""

import contextvars
import json
import logging
from datetime import UTC, datetime

# Set by the middleware that names requests; tasks started for a request inherit it.
current_request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "current_request_id", default=None
)

_ACCESS = "uvicorn.access"  # logs (client, method, path, HTTP version, status)


class TextFormatter(logging.Formatter):
    def __init__(self):
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        line = super().formatMessage(record)
        request_id = current_request_id.get()
        return line if request_id is None else f"{line} [{request_id}]"


class JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `message`, and what else is known.

    `request_id` within a request; `client`, `method`, `path` and `status` of a response;
    `traceback` of an error.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id is not None:
            told["request_id"] = request_id
        if record.name == _ACCESS and isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, _, status = record.args
            told |= {"client": client, "method": method, "path": path, "status": status}
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def set_up_logs(form: str) -> None:
    """Log to standard error from here on; `form` is `text` or `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
