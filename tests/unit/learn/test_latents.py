"""Latents fitted to keys and values: exact where they exist, an error that says how much is lost where they do not."""

from __future__ import annotations

import pytest
import torch

import kvist
from kvist.base.errors import KvistError, SpecError, UsageError
from kvist.compose import LLM
from kvist.learn.latents import fit, fit_rows


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return kvist.load("smollm2", ctx_size=1024, max_num_seqs=1)


def rows_of_rank(rank: int, tokens: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    latent = torch.randn(tokens, rank)
    return (latent @ torch.randn(rank, 24)).view(tokens, 2, 12) + 3, (latent @ torch.randn(rank, 16)).view(tokens, 2, 8)


def test_rows_that_come_from_a_latent_are_found() -> None:
    keys, values = rows_of_rank(6)
    exact, short = fit_rows(keys, values, 6), fit_rows(keys, values, 5)
    assert exact.error < 1e-5 < 1e-2 < short.error
    assert (exact.width, exact.rank) == (2 * (12 + 8), 6)
    rows = torch.cat([keys.flatten(1), values.flatten(1)], 1).double()
    latent = (rows - exact.mean) @ exact.down.T
    assert latent.shape == (200, 6)
    assert torch.allclose(exact.mean + latent @ exact.up.T, rows, atol=1e-3)


def test_errors_fall_with_the_rank_and_are_those_of_other_rows() -> None:
    keys, values = torch.randn(400, 2, 12), torch.randn(400, 2, 8)
    errors = [fit_rows(keys, values, rank, held_out=100).error for rank in (1, 10, 20, 30, 40)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-6
    # Rows without structure: what a rank leaves is the share of directions that it does not have.
    assert errors[2] == pytest.approx(0.5**0.5, abs=0.05)


def test_a_large_part_does_not_take_all_of_the_latent() -> None:
    keys, values = rows_of_rank(6)
    found = fit_rows(1000 * keys, values, 4)
    assert found.value_error < 0.9 and found.key_error < 0.9


def test_a_model_layer_by_layer(smollm2: LLM) -> None:
    report = fit(smollm2, [64, 256, 384], layer=[3, 12], sample=768, held_out=100)
    assert report.layers == (3, 12) and len(report.fits) == 6
    for layer in (3, 12):
        low, high, whole = (found for found in report.fits if found.layer == layer)
        assert low.width == 384 and low.error > high.error > 1e-3 and whole.error < 1e-6
        assert low.rotated_error is not None and low.rotated_error > low.error  # rope does not pass through a latent
    effects = {effect.rank: effect for effect in report.effects}
    assert effects[64].kl > 10 * effects[256].kl > 0
    assert effects[384].kl < 1e-3 and effects[384].same_token > 0.95  # the whole width: the model as it was
    assert "384 numbers per token and layer" in str(report) and len(str(report).splitlines()) == 5


def test_the_model_is_left_as_it_was(smollm2: LLM) -> None:
    before = smollm2.generate("The capital of France is", max_tokens=5).ids
    fit(smollm2, 16, layer=0, sample=768, held_out=64)
    assert smollm2.generate("The capital of France is", max_tokens=5).ids == before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"rank": 0}, UsageError, "rank 0: a token keeps 384 numbers in this layer, so use 1 to 384"),
        ({"rank": 385}, UsageError, "rank 385"),
        ({"rank": 8, "layer": 30}, UsageError, r"layers \[30\]: this model has 0 to 29"),
        ({"rank": 8, "sample": 100}, UsageError, "100 tokens determine no 384 directions: use 768 or more"),
        ({"rank": 8, "sample": 768, "text": "too short"}, UsageError, "the text gives 2 tokens"),
        ({"rank": 8, "sample": 2048}, KvistError, "exceed the context of 1024"),
    ],
)
def test_refusals(smollm2: LLM, settings: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        fit(smollm2, **settings)  # type: ignore[arg-type]


def test_rows_that_do_not_fit() -> None:
    keys, values = rows_of_rank(6)
    with pytest.raises(UsageError, match=r"are not \[T, G, D\] and \[T, G, Dv\]"):
        fit_rows(keys.flatten(1), values, 4)
    with pytest.raises(UsageError, match="at least two are needed"):
        fit_rows(keys, values, 4, held_out=199)
    with pytest.raises(UsageError, match="use 1 to 40"):
        fit_rows(keys, values, 41)


def test_latents_already(tmp_path_factory: pytest.TempPathFactory) -> None:
    import letters
    from family_configs import CONFIGS, random_model

    folder = tmp_path_factory.mktemp("mla")
    random_model(CONFIGS["deepseek_v2 dense"]()).save_pretrained(folder)
    letters.save(folder)
    with pytest.raises(SpecError, match="layer 0 leaves latents already"):
        fit(folder, 8)


def test_it_is_reached_from_the_package() -> None:
    assert kvist.latent.fit is fit and kvist.latent.compress is not None
