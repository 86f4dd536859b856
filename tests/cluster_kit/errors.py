"""Why there is no cluster, and what to do about it."""

from collections.abc import Sequence


class ClusterError(Exception):
    """The test cluster cannot do what a test asked of it."""


class MissingProgram(ClusterError):
    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is not there, and the tests on a cluster need it. {remedy}")


class CommandFailed(ClusterError):
    """A command ended with an error; ``stderr`` is all that it said."""

    def __init__(self, command: Sequence[str], status: int, stderr: str) -> None:
        self.status = status
        self.stderr = stderr
        super().__init__(f"{' '.join(command)} ended with status {status}: {stderr.strip()}")


class StartFailed(ClusterError):
    def __init__(self, what: str, timeout_s: float, log: str) -> None:
        super().__init__(f"{what} not within {timeout_s:g} s. The end of its log:\n{log}")


class NotOurCluster(ClusterError):
    def __init__(self, what: str, variable: str) -> None:
        super().__init__(f"{what} is for a control plane that the tests started: unset {variable} for this test.")
