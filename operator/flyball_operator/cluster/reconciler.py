"""One level-triggered reconcile: look at everything, do what is missing, write down how it stands."""

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import Enum

from flyball_operator import children, names
from flyball_operator.children import Platform, missing_kinds, token_secret
from flyball_operator.cluster.admin_token import AdminTokens
from flyball_operator.cluster.api_server import (
    CHILD_KINDS,
    LLM_DEPLOYMENT,
    SECRET,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    WebhookFailed,
)
from flyball_operator.cluster.client import Client
from flyball_operator.cluster.events import Recorder
from flyball_operator.cluster.store import Store
from flyball_operator.cluster.tuner import ClusterTuner
from flyball_operator.errors import SpecError
from flyball_operator.observed import Child, Key, Object, Resource
from flyball_operator.spec import LLMDeployment, manifest, schema
from flyball_operator.status import Observation, Problem, status_of
from flyball_operator.status.autoscaling import autoscaling_status
from flyball_operator.steps import Apply, Create, Delete, Leave, Step, compare, differences, find_steps, owned

log = logging.getLogger(__name__)

REFUSALS = (Invalid, Forbidden, WebhookFailed)
"""What does not pass by trying again at once; the status tells it."""


WATCHED = frozenset({"InvalidSpec", "MissingKind"})
"""Reasons that end with a change that the operator sees, of the spec or of the cluster's kinds. A retry would not help."""


class Outcome(Enum):
    """How a reconcile ended."""

    DONE = "nothing to do until something changes"
    REFUSED = "a user has to change something, which a watch may not show"
    FAILED = "to be tried again"


class Reconciler:
    """``reconcile(key)`` may run for many keys at once, for one key only once at a time."""

    def __init__(
        self,
        *,
        store: Store,
        client: Client,
        tokens: AdminTokens,
        platform: Callable[[], Platform],
        tuner: ClusterTuner,
        event: Recorder,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._client = client
        self._tokens = tokens
        self._platform = platform
        self._tuner = tuner
        self._event = event
        self._now = now
        self._memory: dict[Key, _Memory] = {}

    async def reconcile(self, key: Key) -> Outcome:
        """Bring the children to the spec and the status to the facts.

        Raises:
            ClusterError: the API server is out of reach, overloaded, or has a newer state than we know.
        """
        resource = self._store.resources.get(key)
        if resource is None or resource.deleting:
            self._memory.pop(key, None)
            return Outcome.DONE
        memory = self._memory.setdefault(key, _Memory())
        problems = [] if _is_suspended(resource) else await self._bring_about(resource, memory)
        await self._write_status(resource, problems, memory)
        return outcome_of(problems)

    async def _bring_about(self, resource: Resource, memory: "_Memory") -> list[Problem]:
        try:
            llm = memory.read(resource)
            wanted = self._wanted(llm, resource)
        except SpecError as error:
            return [Problem("InvalidSpec", str(error), accepted=False)]
        steps = find_steps(wanted, self._store.children(resource.key), resource, memory.settled)
        no_token = await self._create_token(llm, resource) if self._wants_token(resource, steps) else None
        # Pods without their token cannot start, so the Deployment waits for it; on the next try it is wanted again.
        tried = [no_token] if no_token else [await self._try(step, resource, memory) for step in steps]
        problems = [problem for problem in tried if problem is not None]
        problems += [Problem("MissingKind", line) for line in missing_kinds(llm, self._platform())]
        self._tell(resource, steps, problems)
        return problems

    def _wanted(self, llm: LLMDeployment, resource: Resource) -> list[Object]:
        built = children.build(
            llm,
            self._platform(),
            admin_token_secret=self._tokens.secret_name(resource),
            boot_prior=self._tuner.boot_prior(resource.key),
        )
        return [owned(one, resource) for one in built]

    async def _try(self, step: Step, resource: Resource, memory: "_Memory") -> Problem | None:
        """Do a step; what the API server refuses for long is returned, so that the other steps follow all the same."""
        try:
            return await self._do(step, resource, memory)
        except REFUSALS as error:
            log.warning("%s: %s", resource.key, error)
            return problem_of(step, error)
        except Conflict:
            await self._look_again(step, resource.key)
            raise

    async def _look_again(self, step: Step, key: Key) -> None:
        """Forget what the step is about if it is another object by now, or none: no watch told of its end."""
        kind, name = _name_of(step)
        known = self._store.child(key, kind, name)
        if known is None:
            return
        found = await self._client.find(CHILD_KINDS[kind], key.namespace, name)
        if found is None or found["metadata"]["uid"] != known.uid:
            self._store.remove_child(key, kind, name, known.uid, "0")

    async def _do(self, step: Step, resource: Resource, memory: "_Memory") -> Problem | None:
        match step:
            case Create():
                return await self._create(step, resource, memory)
            case Apply(manifest=wanted, uid=uid, reason=reason):
                log.info("%s: applying, %s", resource.key, reason)
                metadata = {**wanted["metadata"], "uid": uid}
                await self._apply({**wanted, "metadata": metadata}, resource.key, memory, force=True)
            case Delete(child=child, reason=reason):
                log.info("%s: deleting, %s", resource.key, reason)
                await self._client.delete(CHILD_KINDS[child.kind], resource.key.namespace, child.name, uid=child.uid)
            case Leave(reason=reason, foreign=foreign):
                await self._look_again(step, resource.key)
                return Problem("NameConflict" if foreign else "Replacing", reason, accepted=not foreign)
        return None

    async def _create(self, step: Create, resource: Resource, memory: "_Memory") -> Problem | None:
        """Create the child unless something has its name: an object without our labels, which no watch shows."""
        wanted = step.manifest
        kind, name = CHILD_KINDS[wanted["kind"]], wanted["metadata"]["name"]
        found = await self._client.find(kind, resource.key.namespace, name)
        if found is not None:
            instead = compare(wanted, Child.of(found), resource)
            return None if instead is None else await self._do(instead, resource, memory)
        log.info("%s: creating, %s", resource.key, step.reason)
        # Without force: should one appear at this very moment, its fields are not overwritten.
        await self._apply(wanted, resource.key, memory, force=False)
        return None

    async def _apply(self, wanted: Object, key: Key, memory: "_Memory", *, force: bool) -> None:
        applied = await self._client.apply(CHILD_KINDS[wanted["kind"]], wanted, force=force)
        child = Child.of(applied)
        self._store.put_child(key, child)
        # What still differs is spelled differently by the API server, or added by somebody to a list of ours.
        memory.settled[(child.kind, child.name)] = "\n".join(differences(wanted, child.object))

    def _wants_token(self, resource: Resource, steps: Sequence[Step]) -> bool:
        """Return whether the admin token's Secret may be missing. It cannot be looked up: we may not read Secrets."""
        secret = self._tokens.secret_name(resource)
        child = self._store.child(resource.key, "Deployment", resource.key.name)
        is_new = child is None or secret.encode() not in child.text
        writes = (step.manifest["kind"] for step in steps if isinstance(step, Create | Apply))
        missed = (one.waiting for pod in self._store.pods(resource.key) for one in pod.containers if one.waiting)
        return (is_new and "Deployment" in writes) or any(secret in waiting.message for waiting in missed)

    async def _create_token(self, llm: LLMDeployment, resource: Resource) -> Problem | None:
        secret = token_secret(llm, self._tokens.secret_name(resource), self._tokens.token(resource))
        try:
            await self._client.create(SECRET, owned(secret, resource))
        except Conflict:
            log.debug("%s: the admin token's Secret exists", resource.key)
        except REFUSALS as error:
            log.warning("%s: %s", resource.key, error)
            return problem_of(Create(secret, "the pods need a token"), error)
        return None

    def _tell(self, resource: Resource, steps: Sequence[Step], problems: Sequence[Problem]) -> None:
        for problem in problems:
            self._event(resource, "Warning", problem.reason, problem.message)
        made = [
            f"{step.manifest['kind']} {step.manifest['metadata']['name']}" for step in steps if isinstance(step, Create)
        ]
        if made and not problems:
            self._event(resource, "Normal", "Created", f"created {', '.join(made)}")
        for step in steps:
            if isinstance(step, Apply | Delete) and not problems:
                self._event(resource, "Normal", "Deleted" if isinstance(step, Delete) else "Applied", step.reason)

    async def _write_status(self, resource: Resource, problems: Sequence[Problem], memory: "_Memory") -> None:
        status = status_of(
            self._observe(resource, problems), self._now().isoformat(timespec="seconds").replace("+00:00", "Z")
        )
        if status in (resource.status, memory.status):
            return
        metadata = {"namespace": resource.key.namespace, "name": resource.key.name, "uid": resource.uid}
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": status}
        try:
            applied = Resource.of(await self._client.apply(LLM_DEPLOYMENT, body, force=True, subresource="status"))
        except NotFound:
            log.info("%s: it is gone, and no watch told", resource.key)
            self._memory.pop(resource.key, None)
            self._store.remove_resource(resource.key, resource.uid, "0")  # the next list may know it after all
            return
        # An answer with a newer spec is left to the watch, for which it would be no news any more.
        if is_of_this_spec := applied.generation == resource.generation:
            self._store.put_resource(applied)
        # A status that the API server changes on its way in must not be written again and again.
        memory.status = None if is_of_this_spec and applied.status == status else status
        self._tell_ready(resource, status)

    def _observe(self, resource: Resource, problems: Sequence[Problem]) -> Observation:
        key, spec = resource.key, schema.with_defaults(resource.spec)
        child = self._store.child(key, "Deployment", key.name)
        is_ours = child is not None and child.owner == resource.uid
        autoscaling, conditions = autoscaling_status(
            spec, self._store.children(key), owner=resource.uid, keda=self._platform().keda
        )
        return Observation(
            resource=resource,
            replicas=spec["replicas"],
            accelerator=spec["accelerator"]["resourceName"],
            port=spec["service"]["port"],
            pods=self._store.pods(key),
            deployment=child.object if child is not None and is_ours else None,
            problem=_summary(problems),
            suspended=_is_suspended(resource),
            autoscaling=autoscaling,
            tuning=self._tuner.status(key),
            extra=(*conditions, *self._tuner.conditions(key)),
        )

    def _tell_ready(self, resource: Resource, status: Object) -> None:
        """Tell of a change in Ready's reason."""
        ready = next(one for one in status["conditions"] if one["type"] == "Ready")
        told = resource.status.get("conditions", [])
        before: Object = next((one for one in told if one["type"] == "Ready"), {})
        degraded = any(one["type"] == "Degraded" and one["status"] == "True" for one in status["conditions"])
        is_first = not before and not degraded  # Created has been told
        if not is_first and (before.get("status"), before.get("reason")) != (ready["status"], ready["reason"]):
            self._event(resource, "Warning" if degraded else "Normal", ready["reason"], ready["message"])


class _Memory:
    """What a process knows of a deployment beyond the store. Losing it costs a write at most.

    Attributes:
        settled: see ``steps.Settled``.
        status: the last that was written, when the API server did not keep it as it was.
    """

    __slots__ = ("_read", "settled", "status")

    def __init__(self) -> None:
        self.settled: dict[tuple[str, str], str] = {}
        self.status: Object | None = None
        self._read: tuple[str, int, LLMDeployment] | None = None

    def read(self, resource: Resource) -> LLMDeployment:
        """Return the resource as a value. Checking it against the schema takes longer than all the rest, so once is enough.

        Raises:
            SpecError: it cannot be taken.
        """
        if self._read is None or self._read[:2] != (resource.uid, resource.generation):
            llm = manifest.from_object(resource.as_object())
            self._read = (resource.uid, resource.generation, llm)
        return self._read[2]


def outcome_of(problems: Sequence[Problem]) -> Outcome:
    """Return what is left to do about the problems."""
    unwatched = [problem for problem in problems if problem.reason not in WATCHED]
    if not unwatched:
        return Outcome.DONE
    return Outcome.FAILED if any(problem.accepted for problem in unwatched) else Outcome.REFUSED


def problem_of(step: Step, error: ApiError) -> Problem:
    """Return what it means that the API server refused a step."""
    if isinstance(error, Forbidden) and error.is_missing_rule:
        message = f"the operator's role lacks a rule: {error.message}. Grant {error.call.verb} on {error.call.resource}"
        return Problem("MissingPermission", message)
    if isinstance(error, WebhookFailed):
        return Problem("WebhookFailed", f"an admission webhook of the cluster gives no answer: {error.message}")
    is_template = isinstance(step, Create | Apply) and step.manifest["kind"] == "Deployment"
    reason = "InvalidPodTemplate" if is_template and isinstance(error, Invalid) else "Refused"
    return Problem(reason, f"the API server refuses it: {error.message}", accepted=False)


def _name_of(step: Step) -> tuple[str, str]:
    match step:
        case Create(manifest=wanted) | Apply(manifest=wanted):
            return wanted["kind"], wanted["metadata"]["name"]
        case Delete(child=child):
            return child.kind, child.name
        case Leave(kind=kind, name=name):
            return kind, name


def _summary(problems: Sequence[Problem]) -> Problem | None:
    """Return all problems as one, named after the first."""
    if not problems:
        return None
    messages = "; ".join(problem.message for problem in problems)
    return Problem(problems[0].reason, messages, accepted=all(problem.accepted for problem in problems))


def _is_suspended(resource: Resource) -> bool:
    return bool(resource.spec.get("suspend", False))
