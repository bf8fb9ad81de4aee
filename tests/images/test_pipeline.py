"""Pipelines of every supported kind, tiny and random, in this process."""

from __future__ import annotations

import io
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.images.files import PIPELINES
from kvloom.images.messages import Cancelled, Paint, Setup
from tests.support.models import kept_models

if TYPE_CHECKING:
    from kvloom.images.pipeline import Pipeline

pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers: pip install 'kvloom[images]'")
pictures = pytest.importorskip("PIL.Image")
SIZE = (64, 48)


def images() -> Any:
    """The module of pipelines; importing it loads diffusers, which takes seconds."""
    return import_module("kvloom.images.pipeline")


@pytest.fixture(scope="module", params=PIPELINES)
def pipeline(request: pytest.FixtureRequest) -> Pipeline:
    return images().open_pipeline(Setup(str(kept_models.pipeline(request.param))))


def order(**fields: object) -> Paint:
    values = {"prompt": "a cat", "negative_prompt": "", "seeds": [1], "steps": 3, **fields}
    return Paint(0, width=SIZE[0], height=SIZE[1], **values)


def painted(pipeline: Pipeline, paint: Paint) -> tuple[dict[int, bytes], list[tuple[int, int]], list[int | None]]:
    """The finished pictures, the (picture, step) pairs, and the number of each partial picture (None: finished)."""
    done: dict[int, bytes] = {}
    steps, partials = [], []

    def on_picture(picture: int, data: bytes, partial: int | None) -> None:
        partials.append(partial)
        if partial is None:
            done[picture] = data

    for number in range(len(paint.seeds)):
        pipeline.paint(paint, number, lambda picture, step, total: steps.append((picture, step)), on_picture)
    return done, steps, partials


def test_a_picture_is_of_the_size_and_the_seed_asked_for(pipeline: Pipeline):
    done, steps, partials = painted(pipeline, order(seeds=[1, 2]))
    assert [pictures.open(io.BytesIO(data)).size for data in done.values()] == [SIZE, SIZE]
    assert steps == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert partials == [None, None]
    assert done[0] != done[1]
    alone, _, _ = painted(pipeline, order(seeds=[2]))
    assert alone[0] == done[1]


def test_the_prompt_and_its_weight_count(pipeline: Pipeline):
    first, _, _ = painted(pipeline, order())
    other, _, _ = painted(pipeline, order(prompt="XYZ 123 &"))
    heavy, _, _ = painted(pipeline, order(guidance=9.5))
    assert len({first[0], other[0]}) == 2
    if pipeline.info.kind != "FluxPipeline":  # a random FLUX model ignores guidance
        assert heavy[0] != first[0]


def test_unfinished_pictures_come_on_the_way_and_change_nothing(pipeline: Pipeline):
    plain, _, _ = painted(pipeline, order())
    shown, _, partials = painted(pipeline, order(num_partials=2))
    assert partials == [0, 1, None]
    assert shown == plain


def test_a_sketch_of_the_last_latents_is_the_picture(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch):
    """The partial picture is decoded as the pipeline decodes the finished one."""
    sketches, done = [], []
    monkeypatch.setattr("kvloom.images.pipeline._partial_steps", lambda steps, count: [steps])
    pipeline.paint(
        order(), 0, lambda *step: None, lambda number, data, partial: (sketches, done)[partial is None].append(data)
    )
    assert sketches == done
    assert len(done) == 1


def test_it_ends_at_the_step_that_finds_it_cancelled(pipeline: Pipeline):
    steps = []

    def on_step(picture: int, step: int, total: int) -> None:
        steps.append(step)
        if step == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        pipeline.paint(order(steps=5), 0, on_step, lambda *picture: None)
    assert steps == [1, 2]


def test_a_text_that_is_too_long_is_refused_not_cut(pipeline: Pipeline):
    most = pipeline.info.max_prompt_tokens
    assert pipeline.check(order()) in range(3, 12)
    with pytest.raises(BadRequest, match=rf"prompt: has \d+ tokens; this model reads {most}$"):
        pipeline.check(order(prompt="x " * most))


def test_a_negative_prompt_counts_or_is_refused(pipeline: Pipeline):
    asked = order(negative_prompt="XYZ 123", guidance=7.0)
    if pipeline.info.kind == "FluxPipeline":
        with pytest.raises(BadRequest, match="negative_prompt"):
            pipeline.check(asked)
        return
    pipeline.check(asked)
    assert painted(pipeline, asked)[0] != painted(pipeline, order(guidance=7.0))[0]


@pytest.mark.parametrize(("format", "name"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_formats(pipeline: Pipeline, format: str, name: str):
    done, _, _ = painted(pipeline, order(format=format))
    assert pictures.open(io.BytesIO(done[0])).format == name
    if format != "png":
        small, _, _ = painted(pipeline, order(format=format, compression=0))
        assert len(small[0]) < len(done[0])


def test_files_that_lie_end_in_one_sentence(tiny_pipeline: Path, tmp_path: Path):
    path = shutil.copytree(tiny_pipeline, tmp_path / "broken")
    (path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x80\x04N.")
    with pytest.raises(ModelError, match=r"broken cannot be loaded: ") as caught:
        images().open_pipeline(Setup(str(path)))
    assert "\n" not in str(caught.value)
