"""What a new manifest changes, in words."""

from collections.abc import Iterator

from msgspec import structs

from flyball_operator.local.template import ProcessTemplate
from flyball_operator.spec import LLMDeployment


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
