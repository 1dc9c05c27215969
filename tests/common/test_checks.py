import pytest
import torch

from longstride.common.checks import Boolean, Choice, PathText, Real, Text, Whole, short_repr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a\nb", r"'a\nb'"),
        (10**5000, "a very long int"),
        ("x" * 1000, f"'{'x' * 139}... (1,002 characters)"),
        (torch.zeros(2, 2), "tensor([[0., 0.], [0., 0.]])"),
    ],
    ids=lambda value: str(type(value)),
)
def test_values_are_shown_on_one_short_line(value, text):
    assert short_repr(value) == text


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (Whole(1, "layers"), [1, 4096], [0, 4097, 1.0, True, "1", None]),
        (Real(0, 1), [0, 1, 0.5], [-0.1, 1.1, True, "0", None, float("inf"), float("nan"), 10**400]),
        (Real(0, 1, below=True, above=True), [0.5], [0, 1]),
        (Real(0, 10, infinite=True), [float("inf")], [11, -float("inf"), float("nan")]),
        (Text("text"), ["", "x" * 8192], ["x" * 8193, 3, None, b"x"]),
        (PathText(), ["a"], [b"a", 3, None, []]),
        (Boolean(), [True, False], [0, 1, "true", None]),
        (Choice("a", "b"), ["a"], ["c", [], {}, None, True]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rules(rule, good, bad):
    for value in good:
        assert rule.check("it", "name", value) == value
    for value in bad:
        with pytest.raises(ValueError, match=r"it: (the length of )?name must be"):
            rule.check("it", "name", value)
