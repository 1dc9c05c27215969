import pytest
import torch

from longstride.attention.kernels.hopper.choice import choose, fits_tma, is_hopper
from longstride.attention.kernels.jobs import passes
from longstride.patterns import notation


def kinds(text, n=12_288, d_qk=64, d_v=64, heads=2):
    """For each pass, what takes it forward and backward."""
    patterns = notation.parse(text)
    found = passes(notation.write(patterns * (heads // len(patterns))), n)
    return [
        tuple(choose(one, backward, number > 0, heads, n, d_qk, d_v) for backward in (False, True))
        for number, one in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("text", "n", "d", "expected"),
    [
        ("local(128)", 12_288, 64, [("walk", "walk")]),
        ("local(129)", 12_288, 64, [("tiles", "tiles")]),
        ("local(128)", 12_288, 48, [("tiles", "tiles")]),
        ("column(128)", 12_288, 64, [("lanes", "lanes")]),
        ("column(128)", 12_289, 64, [("lanes", "lanes")]),
        ("column(128)", 2048, 64, [(None, None)]),  # The general kernels put several short lanes into a tile.
        ("column(128)", 2049, 64, [("lanes", "lanes")]),
        ("column(128)", 512, 48, [(None, None)]),
        ("column(128)", 100, 32, [(None, None)]),
        ("dilated(32, 64)", 512, 64, [(None, None)]),
        ("merged(strided(128))", 1000, 32, [("walk", "walk"), (None, None)]),
        ("merged(strided(96))", 3072, 64, [("walk", "walk"), ("lanes", "lanes")]),
        ("block(16)", 16, 64, [("walk", "walk")]),
        ("column(256)", 65_536, 32, [("lanes", "lanes")]),
        ("column(256)", 65_536, 64, [("lanes", "tiles")]),  # Too long a lane backward.
        ("column(1024)", 1_048_576, 64, [("chunks", "tiles")]),
        ("column(1024)", 1_048_576, 48, [("tiles", "tiles")]),
        ("column(1024)", 1_048_577, 64, [("chunks", None)]),
        ("block(128)", 12_288, 64, [("lanes", "lanes")]),
        ("block(16)", 12_288, 64, [(None, None)]),  # Several blocks in a lane.
        ("block(1024)", 12_288, 64, [("chunks", "tiles")]),
        ("block(2048)", 12_288, 32, [("chunks", "tiles")]),
        ("block(2049)", 12_288, 64, [("tiles", None)]),
        ("block(4096)", 12_288, 64, [("tiles", "tiles")]),
        ("dense()", 12_288, 64, [("tiles", "tiles")]),
        ("dense()", 1024, 64, [("tiles", "tiles")]),
        ("merged(strided(8))", 12_288, 64, [("walk", "walk"), ("tiles", "tiles")]),  # The second adds to the first.
        ("summary(128, 32)", 12_288, 64, [("tiles", "tiles")]),
        ("merged(fixed(128, 32))", 12_288, 64, [("tiles", "tiles")]),
        ("merged(fixed(1024, 256))", 12_288, 64, [("tiles", "tiles")]),
        ("merged(fixed(128, 24))", 12_288, 64, [(None, None)]),  # 128 cells are no whole number of copies.
        ("merged(strided(128))", 12_288, 64, [("walk", "walk"), ("lanes", "lanes")]),
        ("block(128)|column(128)", 12_288, 64, [("lanes", "lanes"), (None, None)]),  # The second leaves pairs out.
        ("local(128), column(128)", 12_288, 64, [(None, None)]),
        ("local(64), local(64)|column(64)", 4096, 64, [("walk", "walk"), (None, None)]),
        ("block(128)|summary(128, 8, 0), block(128)|summary(128, 8, 1)", 4096, 64, [("tiles", "tiles")]),
        ("merged(fixed(128, 32))", 12_288, 80, [(None, None)]),
    ],
)
def test_choices(text, n, d, expected):
    assert kinds(text, n, d, d) == expected


def test_unequal_dimensions_are_for_tiles():
    assert kinds("block(128)", d_qk=64, d_v=32) == [("tiles", "tiles")]


@pytest.mark.parametrize(
    ("text", "n", "expected"),
    [
        ("local(96)", 3072, [("walk", "walk")]),
        ("local(129)", 3072, [(None, None)]),
        ("column(96)", 3072, [("lanes", "lanes")]),
        ("column(48)", 3072, [("lanes", "lanes")]),
        ("column(32)", 3072, [("lanes", "lanes")]),
        ("column(16)", 3072, [("tiles", "tiles")]),  # Too long a lane.
        ("merged(strided(96))", 1000, [("walk", "walk"), (None, None)]),
        ("block(96)", 3072, [("lanes", "lanes")]),
        ("block(129)", 3072, [("tiles", None)]),
        ("merged(strided(96))", 3072, [("walk", "walk"), ("lanes", "lanes")]),
        ("merged(fixed(96, 8))", 3072, [("tiles", "tiles")]),
        ("merged(fixed(96, 24))", 3072, [(None, None)]),
        ("dense()", 3072, [("tiles", "tiles")]),
    ],
)
def test_values_of_two_panels_are_not_for_windows_of_tiles(text, n, expected):
    assert kinds(text, n, d_qk=64, d_v=128) == expected


@pytest.mark.parametrize(("d_qk", "d_v"), [(128, 128), (32, 64), (32, 128), (64, 192), (128, 64), (64, 96)])
def test_other_unequal_dimensions_are_not(d_qk, d_v):
    for text in ("local(96)", "column(96)", "block(96)", "column(4)", "block(512)"):
        assert {"walk", "lanes", "chunks"}.isdisjoint(kinds(text, 3072, d_qk, d_v)[0])


def test_what_tma_reads():
    x = torch.zeros(2, 3, 50, 64, dtype=torch.bfloat16)
    assert fits_tma(x, x.half(), x.transpose(1, 2).contiguous().transpose(1, 2))
    assert fits_tma(torch.zeros(1, 3, 50, 8, dtype=torch.bfloat16).as_strided((1, 3, 50, 8), (7, 400, 8, 1)))
    for wrong in (
        x.float(),
        x[:0],
        x[..., 1:33],
        torch.zeros(2, 3, 50, 20, dtype=torch.bfloat16),
        torch.zeros(2, 3, 1, 64, dtype=torch.bfloat16).expand(2, 3, 50, 64),
    ):
        assert not fits_tma(x, wrong)


def test_a_cpu_is_no_hopper():
    assert not is_hopper(torch.device("cpu"))
