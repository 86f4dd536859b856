"""Notice when a file's content changes."""

from pathlib import Path

from flyball_operator.spec.manifest import MAX_BYTES, STDIN


class WatchedFile:
    """Looks at the file's metadata first, and at its content only when that changed. Standard input never changes.

    Attributes:
        content: what was read last, up to one byte more than a manifest may have; empty before the first success.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """``content`` is what the caller knows of the file; None reads it now."""
        self.path = path
        self.content = content or b""
        self._stamp: tuple[int, int, int] | None = None
        if content is None:
            self.changed()

    def changed(self) -> bool:
        """Return whether the content differs from the last time this was asked. A file that cannot be read has not changed."""
        before = self.content
        try:
            if self._stamp_now() != self._stamp:
                self.read()
        except OSError:
            return False  # editors replace files in two steps; what runs goes on, and the next look tries again
        return self.content != before

    def read(self) -> None:
        """Read the file, changed or not. Raises OSError."""
        stamp = self._stamp_now()
        with self.path.open("rb") as file:
            self.content = file.read(MAX_BYTES + 1)
        self._stamp = stamp

    def _stamp_now(self) -> tuple[int, int, int]:
        if self.path.name == STDIN.name:
            raise OSError("the manifest came from standard input, which is read once")
        stat = self.path.stat()
        return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
