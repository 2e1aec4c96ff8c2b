"""The door: HTTP in, server-sent events out. Knows nothing about arrays.

    from serve import create_app, run_server

`create_app(engine)` is an ASGI application to run or to mount; `run_server(config)` is the whole
server process.
"""

from serve.app import create_app
from serve.options import ServeOptions
from serve.server import run_server

__all__ = ["ServeOptions", "create_app", "run_server"]
