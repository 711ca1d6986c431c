"""The public face of the package: what it offers, and that asking for it costs nothing before it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import kvist
from kvist.base import errors

OFFERED = [
    *("Completion", "KvistError", "LLM", "LayerCache", "Sampling", "Stream"),
    *("__version__", "errors", "latent", "load", "plan"),
]


def test_all_is_sorted_and_complete() -> None:
    assert sorted(kvist.__all__) == OFFERED
    assert [name for name in kvist.__all__ if name not in dir(kvist)] == []
    for name in kvist.__all__:
        assert getattr(kvist, name) is not None


def test_names_are_the_objects_of_their_homes() -> None:
    assert kvist.errors is errors
    assert kvist.KvistError is errors.KvistError
    assert kvist.load is importlib.import_module("kvist.compose").load
    assert kvist.LayerCache is importlib.import_module("kvist.layer").LayerCache
    assert kvist.Sampling is importlib.import_module("kvist.engine.request").Sampling


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'lode'; it offers .*load"):
        kvist.lode  # noqa: B018


def test_importing_kvist_and_its_settings_imports_no_torch() -> None:
    script = (
        "import sys, kvist; kvist.Sampling(temperature=0.5); kvist.errors.TooLong; kvist.__version__;"
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules); print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_error_is_a_kvist_error_that_says_what_it_is() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 20
    assert all(issubclass(kind, kvist.KvistError) and kind.__doc__ for kind in kinds)
