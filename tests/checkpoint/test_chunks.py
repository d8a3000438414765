import math

import hypothesis
from hypothesis import strategies as st

from shardfn.checkpoint.chunks import boxes, choose_chunks, covering_volume, volume

SIZES = st.sampled_from([1, 2, 3, 8, 12, 64, 96, 131, 768, 1024, 50257, 50304])


@hypothesis.given(shape=st.lists(SIZES, max_size=4), data=st.data(), itemsize=st.sampled_from([0.5, 1, 2, 4, 8]))
def test_files_and_chunks_divide_the_array(shape, data, itemsize):
    cuts = [data.draw(st.sampled_from([d for d in (1, 2, 3, 4, 8) if n % d == 0])) for n in shape]
    file_bytes = data.draw(st.sampled_from([1 << 16, 1 << 20, 1 << 28]))
    cut = choose_chunks(shape, cuts, itemsize, file_bytes)
    for n, c, file, chunk in zip(shape, cuts, cut.file, cut.chunk, strict=True):
        assert (n // c) % file == 0 and file % chunk == 0
    assert math.prod(cut.file) * itemsize <= file_bytes
    assert math.prod(cut.chunk) * itemsize <= 1 << 20


def test_a_large_array_is_read_evenly_whatever_way_it_is_cut():
    for shape in ((4096, 4096), (12, 1024, 4096), (50304, 768), (32, 4096, 1024)):
        for saved in [(1,) * len(shape), *((1,) * i + (4,) + (1,) * (len(shape) - i - 1) for i in range(len(shape)))]:
            chunk = choose_chunks(shape, saved, 4).chunk
            for dim, n in enumerate(shape):
                for ways in (2, 4, 8):
                    if n % ways == 0:
                        box = tuple(slice(0, m // ways if i == dim else m) for i, m in enumerate(shape))
                        assert covering_volume(box, chunk, shape) <= 1.1 * volume(box), (shape, saved, dim, ways)


@hypothesis.given(shape=st.lists(st.integers(1, 7), max_size=3), data=st.data())
def test_boxes_cover_everything_once(shape, data):
    size = [data.draw(st.integers(1, 7)) for _ in shape]
    assert sum(map(volume, boxes(shape, size))) == math.prod(shape)
