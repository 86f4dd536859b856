"""Changes of a manifest: noticed in its file, and described in words."""

from collections.abc import Iterator
from pathlib import Path

from msgspec import structs

from flyball_operator.local.template import ProcessTemplate
from flyball_operator.spec import LLMDeployment
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


def describe_changes(
    old: LLMDeployment, new: LLMDeployment, old_template: ProcessTemplate, new_template: ProcessTemplate
) -> list[str]:
    """Return one line for each thing that will be done to get from ``old`` to ``new``; empty when nothing differs."""
    return [*_replicas(old, new), *_template(old_template, new_template), *_tuning(old, new)]


def _replicas(old: LLMDeployment, new: LLMDeployment) -> Iterator[str]:
    if old.spec.replicas != new.spec.replicas:
        yield f"scaling {old.spec.replicas} -> {new.spec.replicas}: spec.replicas changed"


def _template(old: ProcessTemplate, new: ProcessTemplate) -> Iterator[str]:
    if old.digest == new.digest:
        return
    gone, come = ([word for word in one.argv if word not in other.argv] for one, other in ((old, new), (new, old)))
    details = f" ({' '.join(gone) or 'nothing'} -> {' '.join(come) or 'nothing'})" if gone or come else ""
    yield f"replacing the replicas one by one: their template changed{details}"


def _tuning(old: LLMDeployment, new: LLMDeployment) -> Iterator[str]:
    before, after = structs.asdict(old.spec.tuning), structs.asdict(new.spec.tuning)
    changed = sorted(name for name in after if before[name] != after[name])
    if changed:
        yield f"tuning follows new settings: {', '.join(changed)}"
