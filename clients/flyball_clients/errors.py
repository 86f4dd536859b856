"""Errors of the clients."""


class ConfigError(Exception):
    """A flag, a file or an environment variable is wrong; nothing was sent."""


class EndpointError(Exception):
    """A request did not get a complete answer.

    Attributes:
        kind: a short stable word; results count errors by kind.
    """

    kind = "endpoint"


class Unreachable(EndpointError):
    kind = "unreachable"

    def __init__(self, base_url: str, reason: str) -> None:
        super().__init__(
            f"no server answers at {base_url} ({reason}). Start one with `flyball serve MODEL`, "
            "or give the address of a running one with --base-url."
        )


class RequestTimeout(EndpointError):
    kind = "timeout"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no complete answer within {timeout_s:g} s. Raise --timeout or lower the load.")


class Disconnected(EndpointError):
    """The connection broke, or the stream stopped before its end."""

    kind = "disconnected"


class BadAnswer(EndpointError):
    """The server sent something that is not an OpenAI answer."""

    kind = "bad_answer"


class ServerError(EndpointError):
    """The stream contained an error object."""

    kind = "server_error"


class HttpError(EndpointError):
    """A status other than 200.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        way_out = " Name the environment variable that holds the key with --api-key-env." if status == 401 else ""
        super().__init__(f"HTTP {status}: {message}{way_out}")
        self.status = status
        self.kind = f"http_{status}"
