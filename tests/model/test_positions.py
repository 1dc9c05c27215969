import pytest
import torch

from longstride.model.positions import positions


def test_a_matrix_has_rows_as_long_as_the_stride():
    found = positions("matrix(4)", 10)
    assert found.sizes == (3, 4)
    rows, columns = found.indices(torch.arange(10))
    assert rows.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert columns.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_an_image_has_rows_columns_and_channels():
    found = positions("image(2, 3, 2)", 12)
    rows, columns, channels = (x.tolist() for x in found.indices(torch.arange(12)))
    assert rows == [0] * 6 + [1] * 6
    assert columns == [0, 0, 1, 1, 2, 2] * 2
    assert channels == [0, 1] * 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image(2, 3, 3)", r"has 18 bytes and context is 12; context must be height \* width \* channels"),
        ("image(2, 6)", r"must be matrix\(width\), image\(height, width, channels\) or rotary"),
        ("matrix(0)", "the width must be at least 1, got 0"),
        ("matrix(2.5)", "the width must be a whole number"),
        ("matrix 4", "does not read as one"),
        ("sound(3)", "must be matrix"),
        ("matrix(x)", "does not read as one"),
        ("matrix(width=3)", "does not read as one"),
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError, match=message):
        positions(text, 12)
