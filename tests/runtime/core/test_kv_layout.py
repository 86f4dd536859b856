"""Which layers share block tables and tensors."""

import pytest

from flyball_runtime.core.kv_layout import KVLayout


def test_layers_alike_are_one_group() -> None:
    for window in (None, 8):
        layout = KVLayout.of((window,) * 5, max_model_len=100)
        assert (layout.windows, layout.num_tensors) == ((window,), 5)
        assert layout.places == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]


@pytest.mark.parametrize(("max_model_len", "window"), [(8, None), (9, 8)])
def test_a_window_that_no_sequence_outgrows_is_none(max_model_len: int, window: int | None) -> None:
    assert KVLayout.of((8, 8), max_model_len).windows == (window,)


def test_groups_have_equally_many_layers() -> None:
    """As in Gemma 3: every sixth layer attends to all tokens."""
    layout = KVLayout.of(((16,) * 5 + (None,)) * 2, max_model_len=100)
    assert layout.windows == (16, 16, 16, 16, 16, None)
    assert [group.layers for group in layout.groups] == [(0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11)]
    assert layout.num_tensors == 2
    assert layout.places[6] == (2, 1)


def test_kinds_of_nearly_equal_number_are_not_split() -> None:
    layout = KVLayout.of((None,) * 9 + (4,) * 11, max_model_len=100)
    assert (layout.windows, layout.num_tensors) == ((None, 4), 11)
    layout = KVLayout.of((None,) * 8 + (4,) * 10, max_model_len=100)
    assert (layout.windows, layout.num_tensors) == ((None, 4, 4), 8)
