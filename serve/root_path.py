"""The path under which a proxy shows this server, whether the proxy takes it off or not."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Pure ASGI middleware: the routes of a path below `root_path` are those of the rest of it."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            below = scope.get("root_path", "") + self._root_path
            if scope["path"].startswith(below + "/"):
                scope = {**scope, "root_path": below}
        await self.app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """The path as the routes see it, whatever this application is mounted under."""
    path, root_path = scope["path"], scope.get("root_path", "")
    if path == root_path or path.startswith(root_path + "/"):
        return path[len(root_path) :]
    return path
