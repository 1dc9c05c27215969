import numpy as np
import pytest

from longstride.data.streams import Part, measure, read_span


def test_every_span_of_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr("longstride.data.streams.READ", 3)
    whole, parts = bytes(range(20)), []
    for number, (start, stop) in enumerate(((0, 7), (7, 7), (7, 8), (8, 20))):
        (tmp_path / str(number)).write_bytes(whole[start:stop])
        parts.append(measure(tmp_path / str(number), False))
    for start in range(21):
        for stop in range(start, 21):
            pieces = list(read_span(parts, False, start, stop))
            assert b"".join(piece.tobytes() for piece in pieces) == whole[start:stop]
            assert all(piece.dtype == np.uint8 and 0 < len(piece) <= 3 for piece in pieces)


def test_a_file_that_shrinks(tmp_path):
    (tmp_path / "log").write_bytes(bytes(5))
    with pytest.raises(ValueError, match="log became shorter while it was read"):
        list(read_span([Part(tmp_path / "log", 6)], False, 0, 6))
