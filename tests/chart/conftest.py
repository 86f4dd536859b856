"""Helm for the tests of the chart. They need no cluster."""

import pytest

from chart_kit import Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm()
