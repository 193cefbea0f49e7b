"""Images: decoded to one size, by either decoder."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image as Pillow

from horovod_runner.data import Image, Shard
from horovod_runner.data.pack import images
from horovod_runner.errors import DataError
from tests.pictures import encoded
from tests.shards import shard_of


def gradient(height: int, width: int, blue: int = 0) -> Any:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 200, width).astype(np.uint8)
    pixels[..., 1] = np.linspace(0, 200, height).astype(np.uint8)[:, None]
    pixels[..., 2] = blue
    return pixels


@pytest.fixture(params=["simplejpeg", "Pillow alone"])
def _decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        # It is remembered: a missing package is not looked for at every image.
        monkeypatch.setattr(images, "_simplejpeg", lambda: None)


@pytest.mark.usefixtures("_decoder")
@pytest.mark.parametrize("mode", ["RGB", "GRAY"])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
@pytest.mark.parametrize("size", [(20, 30), (64, 48), (200, 301)])
def test_images_of_any_size_and_format_are_decoded_to_one_size(
    mode: Any, form: str, size: tuple[int, int]
) -> None:
    image = Image(64, 48, mode)
    cells = [encoded(gradient(*size), form), encoded(gradient(64, 48), form)]
    pixels = image.decode(cells, "image")
    assert pixels.shape == (2, 64, 48, 3 if mode == "RGB" else 1)
    expected = gradient(64, 48)
    if mode == "GRAY":
        expected = np.asarray(Pillow.fromarray(expected).convert("L"))[..., None]
    assert np.abs(pixels[1].astype(int) - expected).max() <= (0 if form == "PNG" else 12)
    assert np.abs(pixels[0].astype(int) - expected).mean() <= 6


def test_gray_and_transparent_images_become_rgb() -> None:
    gray = np.arange(16, dtype=np.uint8).reshape(4, 4)
    alpha = np.dstack([gradient(4, 4), np.full((4, 4), 128, np.uint8)])
    pixels = Image(4, 4).decode([encoded(gray), encoded(alpha)], "image")
    assert pixels[0].tolist() == np.repeat(gray[..., None], 3, axis=2).tolist()
    assert pixels[1].tolist() == gradient(4, 4).tolist()


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "GRAY"])
def test_of_16_bits_the_upper_8_are_taken(form: str, mode: Any) -> None:
    deep = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000
    (pixels,) = Image(4, 4, mode).decode([encoded(deep, form)], "image")
    assert pixels[..., -1].tolist() == (deep // 256).tolist()


def test_a_forked_process_decodes_on_threads_of_its_own() -> None:
    cells = PNGS * 10  # enough for several threads
    Image(6, 6).decode(cells, "image")
    child = multiprocessing.get_context("fork").Process(
        target=Image(6, 6).decode, args=(cells, "image"), daemon=True
    )
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0


@pytest.mark.usefixtures("_decoder")
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_a_damaged_image_is_named(form: str) -> None:
    whole = encoded(gradient(40, 40, 7), form)
    for cell in (whole[: len(whole) // 2], b"no image at all"):
        with pytest.raises(DataError, match=r"row 1 .*'image' .*complete"):
            Image(40, 40).decode([whole, cell], "image")


NOISE = encoded(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (NOISE.rsplit(b"IDAT", 1)[0] + bytes(8), "not a complete image"),
        (encoded(gradient(300, 300)), "90000 pixels.*limit of 80000"),
    ],
    ids=["a damaged part", "too large"],
)
def test_whatever_a_decoder_says_the_image_is_named(
    monkeypatch: pytest.MonkeyPatch, cell: bytes, message: str
) -> None:
    monkeypatch.setattr(Pillow, "MAX_IMAGE_PIXELS", 40_000)
    with pytest.raises(DataError, match=rf"row 0 .*'image' .*{message}"):
        Image(40, 40).decode([cell], "image")


def test_images_of_a_known_size_are_not_resized() -> None:
    deep = np.arange(12, dtype=np.uint16).reshape(3, 4) * 5000
    pixels = images.decode_unresized([encoded(deep)], (3, 4), "uint16", "depth")
    assert pixels[0].tolist() == deep.tolist()
    with pytest.raises(DataError, match=r"row 0 .*'depth' .*\(3, 4, 1\).*\(3, 5\)"):
        images.decode_unresized([encoded(deep)], (3, 5), "uint16", "depth")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 0}, "height .*width .* 1 .* 0, 5"),
        ({"mode": "BGR"}, "mode .*'RGB' .*'GRAY'.*'BGR'"),
        ({"layout": "NCHW"}, "layout .*'HWC', 'CHW' .*None.*'NCHW'"),
    ],
)
def test_image_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Image(**{"height": 5, "width": 5, **options})


ROWS = 20
PNGS = [encoded(gradient(6, 6, n)) for n in range(ROWS)]
SPARK = [
    {
        "origin": f"file:{n}",
        "height": 6,
        "width": 6,
        "nChannels": 3,
        "mode": 16,
        "data": gradient(6, 6, n)[..., ::-1].tobytes(),  # blue comes first
    }
    for n in range(ROWS)
]


def shard_with(cells: list[Any]) -> Shard:
    return shard_of(pa.table({"n": range(ROWS), "image": cells}))


@pytest.mark.parametrize("cells", [PNGS, SPARK], ids=["encoded", "Spark's"])
@pytest.mark.parametrize("cache", [False, True])
def test_a_column_of_images_becomes_a_part_of_each_batch(cells: list[Any], cache: bool) -> None:
    shard = shard_with(cells)
    as_asked = {"image": Image(6, 6, cache=cache)}
    for columns in ({"x": "image", "n": "n"}, ["n", "image"], None):
        feed = shard.batches(7, columns, images=as_asked, shuffle=True)
        seen = 0
        for batch in feed:
            pixels = batch["x" if "x" in batch else "image"]
            assert set(batch) <= {"x", "n", "image"}
            assert pixels.dtype == np.uint8
            for n, image in zip(batch["n"], pixels, strict=True):
                assert image.tolist() == gradient(6, 6, n).tolist()
            seen += feed.real
        assert seen == ROWS


def test_a_batch_that_is_kept_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    # One batch a chunk, which otherwise has some megabytes; there is no option for it.
    monkeypatch.setattr("horovod_runner.data.feed.feed._CHUNK_BYTES", 1)
    shard = shard_with(PNGS)
    feed = shard.batches(1, ["n", "image"], images={"image": Image(6, 6)})
    for row, batch in enumerate(list(feed)):
        assert batch["n"].tolist() == [row]
        assert batch["image"][0].tolist() == gradient(6, 6, row).tolist()


def test_batches_of_images_use_the_same_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # One batch a chunk, as above.
    monkeypatch.setattr("horovod_runner.data.feed.feed._CHUNK_BYTES", 1)
    shard = shard_with(PNGS)
    feed = shard.batches(1, ["image"], images={"image": Image(200, 200)})
    places = [batch["image"].ctypes.data for _ in range(3) for batch in feed]
    assert len(places) == 3 * ROWS
    assert len(set(places)) <= 6
    assert all(place % 64 == 0 for place in places)


def test_cached_images_are_packed_once_for_each_size() -> None:
    shard = shard_with(PNGS)
    for size in (6, 3, 6):
        feed = shard.batches(ROWS, ["image"], images={"image": Image(size, size, cache=True)})
        (batch,) = feed
        assert batch["image"].shape == (ROWS, size, size, 3)


def test_many_cached_images_are_packed_in_order() -> None:
    pixels = [[n // 256, n % 256, 0] for n in range(600)]
    cells = [encoded(np.array([[pixel]], np.uint8)) for pixel in pixels]
    shard = shard_of(pa.table({"image": cells}))
    (batch,) = shard.batches(600, ["image"], images={"image": Image(1, 1, cache=True)})
    assert batch["image"].reshape(600, 3).tolist() == pixels


def test_a_column_without_images_is_refused() -> None:
    shard = shard_with(PNGS)
    with pytest.raises(DataError, match=r"column 'n' .*images.* number"):
        shard.batches(4, ["n"], images={"n": Image(6, 6)})
    with pytest.raises(DataError, match=r"images .*'image'.*columns={"):
        shard.batches(4, ["n"], images={"image": Image(6, 6)})


@pytest.mark.parametrize("cache", [False, True])
def test_a_missing_image_is_the_reason_why_a_column_is_refused(cache: bool) -> None:
    shard = shard_with([*PNGS[:-1], None])
    for columns in (["image"], {"x": "image"}):
        with pytest.raises(DataError, match=r"'image' has nulls \(1 of 20 rows\)"):
            shard.batches(4, columns, images={"image": Image(6, 6, cache=cache)})


def test_spark_images_of_the_wrong_size_are_refused() -> None:
    bad = [*SPARK[:-1], {**SPARK[-1], "width": 7}]
    shard = shard_with(bad)
    with pytest.raises(DataError, match=r"'image' .* 108 bytes .* 6 x 7 .* 3 "):
        list(shard.batches(4, ["image"], images={"image": Image(6, 6)}))


@pytest.mark.parametrize("cache", [False, True])
def test_the_layout_says_where_the_channels_are(tmp_path: Path, cache: bool) -> None:
    shard = shard_with(PNGS)
    shapes: list[tuple[Any, tuple[int, ...]]] = [(None, (6, 4, 3)), ("CHW", (3, 6, 4))]
    for layout, shape in shapes:
        images = {"image": Image(6, 4, cache=cache, layout=layout)}
        (batch,) = shard.batches(ROWS, ["image"], images=images)
        assert batch["image"].shape == (ROWS, *shape)
        blue = batch["image"][:, 2] if layout else batch["image"][..., 2]
        assert np.abs(blue - np.arange(ROWS)[:, None, None]).max() == 0
    # Pixels are packed in one layout for all.
    assert len(list(tmp_path.glob("*/layout.json"))) == 1


@pytest.mark.parametrize("cache", [False, True])
def test_dtypes_converts_pixels_that_it_names(cache: bool) -> None:
    images = {"image": Image(6, 6, cache=cache)}
    given: list[tuple[Any, list[str]]] = [
        ("float32", ["float32", "uint8"]),
        ({"image": "float32"}, ["int64", "float32"]),
    ]
    for dtypes, types in given:
        feed = shard_with(PNGS).batches(4, ["n", "image"], images=images, dtypes=dtypes)
        assert [part.dtype for part in next(iter(feed)).values()] == types
