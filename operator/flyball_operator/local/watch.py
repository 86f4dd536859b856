"""Notice when a file's content changes."""

from pathlib import Path


class WatchedFile:
    """Looks at the file's metadata first, and at its content only when that changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int, int] | None = None
        self._content: bytes | None = None
        self.changed()

    def changed(self) -> bool:
        """Return whether the content differs from the last time this was asked. A file that cannot be read has not changed."""
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if stamp == self._stamp:
                return False
            content = self.path.read_bytes()
        except OSError:
            return False  # editors replace files in two steps; what runs goes on
        self._stamp = stamp
        before, self._content = self._content, content
        return content != before
