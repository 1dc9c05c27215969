import pytest
import torch

import longstride.attention.tiles as tiles
from longstride.patterns import Block, Column, Dense, Local, Pattern, Summary, fixed, strided, union


@pytest.mark.parametrize("wide", [8, 512])
@pytest.mark.parametrize(
    "pattern",
    [union(*strided(6)), union(*fixed(8, 2)), Dense(), Local(30), Block(6) | Block(4), Local(3) | Summary(5, 2)],
    ids=repr,
)
def test_tiles_hold_every_pair_once(pattern: Pattern, wide, monkeypatch):
    monkeypatch.setattr(tiles, "WIDE_REACH", wide)
    monkeypatch.setattr(tiles, "MAX_SIDE", 16)
    tiles.arrange.cache_clear()
    for n in (1, 5, 24, 61):
        times = torch.zeros(n, n, dtype=torch.int)
        met = torch.zeros(n, dtype=torch.bool)
        for arrangement in tiles.arrange(pattern, n):
            lanes = arrangement.lanes
            for group in arrangement.tiles:
                rows = torch.arange(group.rows) + group.query_shift * torch.arange(group.count)[:, None] + group.query
                queries = lanes.position(torch.arange(lanes.lanes)[:, None, None], rows).flatten()
                if group.fresh:
                    assert not met[queries].any()
                met[queries] = True
                lane, tile = torch.arange(lanes.lanes), torch.arange(group.count)
                seen = arrangement.visible(group, lane, tile)
                if not group.masked:
                    assert seen.all()
                if group.uniform:
                    assert (seen == seen[:1, :1]).all()
                for at in lane.tolist():
                    for t in range(group.count):
                        for row, column in seen[at, t].nonzero().tolist():
                            i = lanes.position(at, group.query + t * group.query_shift + row)
                            j = arrangement.key_position(at, group.key + t * group.key_shift + column)
                            times[i, j] += 1
        assert torch.equal(times, pattern.mask(n).int())
    tiles.arrange.cache_clear()


@pytest.mark.parametrize("pattern", [union(*strided(64)), union(*fixed(64, 8)), Local(40), Column(50)], ids=repr)
def test_tiles_waste_little(pattern):
    n = 8192
    area = sum(
        arrangement.lanes.lanes * group.rows * group.columns * group.count
        for arrangement in tiles.arrange(pattern, n)
        for group in arrangement.tiles
    )
    assert area < 2.5 * pattern.pairs(n)
