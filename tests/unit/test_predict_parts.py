"""The small parts of `keepstep predict`: how data is cut, what becomes of columns, what progress says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DataError

pa = pytest.importorskip("pyarrow")

from keepstep.predict import progress  # noqa: E402
from keepstep.predict.agreement import Agreement  # noqa: E402
from keepstep.predict.columns import chosen_columns, to_arrow, to_numpy  # noqa: E402
from keepstep.predict.progress import Progress  # noqa: E402
from keepstep.predict.source import _LEAST_ROWS, _MOST_CUTS, _MOST_ROWS, Piece, _cuts  # noqa: E402


@given(st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 10**6)), max_size=40))
def test_pieces_cover_a_file_once_and_in_order(group_rows: list[int]) -> None:
    starts = np.cumsum([0, *group_rows])
    position = 0
    cuts = list(_cuts(group_rows))
    for groups, skip, first, rows in cuts:
        assert rows > 0 and first == position == starts[groups[0]] + skip
        assert first + rows <= starts[groups[-1] + 1]
        position += rows
    assert position == sum(group_rows)
    assert all(rows >= _LEAST_ROWS for _, _, _, rows in cuts[:-1])
    largest = max(group_rows, default=0) + _LEAST_ROWS
    assert all(rows <= max(_MOST_ROWS, largest / _MOST_CUTS + 1) for _, _, _, rows in cuts)


def test_a_piece_travels_as_json() -> None:
    piece = Piece(3, "a.parquet", "/data/a.parquet", (1, 2), 5, 105, 95)
    assert Piece.from_json(piece.to_json()) == piece


@pytest.mark.parametrize(
    ("column", "dtype", "shape"),
    [
        (pa.array([1, 2]), "int64", (2,)),
        (pa.array([1, None]), "float64", (2,)),
        (pa.array([True, False]), "bool", (2,)),
        (pa.array(["a", "b"]), "object", (2,)),
        (pa.array(["a", "b"]).dictionary_encode(), "object", (2,)),
        (pa.array([b"a", b"b"]), "object", (2,)),
        (pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)), "float32", (2, 2)),
        (pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int8(), 2), 1)), "int8", (2, 1, 2)),
        (pa.array([[1], [3, 4]]), "object", (2,)),
        (pa.array([{"bytes": b"png"}] * 2), "object", (2,)),
        (pa.array([0, 1], pa.timestamp("s")), "datetime64[s]", (2,)),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_columns_become_arrays_that_torch_takes(column: Any, dtype: str, shape: tuple[int, ...]) -> None:
    array = to_numpy(pa.record_batch({"x": column}).slice(0, 2))["x"]
    assert (str(array.dtype), array.shape, array.flags.writeable) == (dtype, shape, True)


def test_a_slice_of_lists_is_the_slice() -> None:
    column = pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2))
    assert to_numpy(pa.record_batch({"x": column}).slice(1, 1))["x"].tolist() == [[3, 4]]


def test_a_column_that_is_not_there_is_answered_with_those_that_are() -> None:
    with pytest.raises(DataError, match="there is no column 'y' in the data; there are x"):
        to_numpy(pa.record_batch({"x": [1]}))["y"]


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=np.uint8), np.ones((6, 2, 3), np.float16), np.ones((6, 4))[:, ::2], np.array(list("abcdef"))],
    ids=str,
)
def test_arrays_come_back_as_they_were(array: Any) -> None:
    (found,) = to_numpy(pa.record_batch({"x": to_arrow("x", array)})).values()
    assert found.tolist() == array.tolist() and found.shape == array.shape


def test_heavy_columns_are_not_kept_unless_they_are_named() -> None:
    heavy = {"b": pa.binary(), "l": pa.list_(pa.int8()), "s": pa.struct([]), "t": pa.fixed_shape_tensor(pa.int8(), [2])}
    light = {"i": pa.int8(), "f": pa.float32(), "n": pa.string(), "d": pa.date32(), "c": pa.decimal128(5)}
    schema = pa.schema({**heavy, **light})
    assert chosen_columns(schema, None) == tuple(light)
    assert chosen_columns(schema, "b,i") == ("b", "i")


def test_the_first_schema_wins_and_beginnings_are_counted() -> None:
    agreement = Agreement(None)
    assert [agreement.agree(b"one"), agreement.agree(b"two")] == [b"one", b"one"]
    assert Agreement(b"part's").agree(b"two") == b"part's"
    assert [agreement.begin(piece) for piece in (1, 2, 1)] == [1, 1, 2]


def test_progress_is_rows_a_second_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [200.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = Progress(done=4000, total=10_000)
    shown.begin(199.0)
    now[0] += 9.0
    shown.add(1000)  # too early for a line
    now[0] += 2.0
    shown.add(200)
    assert capsys.readouterr().err == "5,200 of 10,000 rows, 100 rows/s, 48 s left\n"
    assert (shown.rate, shown.seconds) == (100.0, 12.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.4, "7 s"), (119, "119 s"), (125, "2 min"), (3 * 3600 + 130, "3 h 2 min")]
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text
