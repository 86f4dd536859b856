"""The operator's own reading of a spec against an API server's: the same verdict on random specs, the same defaults."""

import pytest

from flyball_operator.errors import SpecError
from flyball_operator.spec import manifest
from operator_kit.api_server import ApiServer
from operator_kit.specs import Document, SpecMaker


def problems(document: Document) -> tuple[str, ...]:
    try:
        manifest.from_object(document)
    except SpecError as error:
        return error.problems
    return ()


def test_valid_specs_are_accepted_and_completed_alike(api_server: ApiServer) -> None:
    make = SpecMaker(seed=1)
    for _ in range(150):
        document = make.valid()
        answer = api_server.create(document)
        assert answer.message == "", document
        assert manifest.from_object(answer.body) == manifest.from_object(document)


@pytest.mark.parametrize("bad", [0.0, 0.005, 0.02])
def test_both_give_the_same_verdict_on_near_valid_specs(api_server: ApiServer, bad: float) -> None:
    make = SpecMaker(seed=2, bad=bad)
    for _ in range(200):
        document = make.document()
        ours, theirs = problems(document), api_server.create(document).message
        assert bool(ours) == bool(theirs), f"{document}\noperator: {ours}\nAPI server: {theirs}"
