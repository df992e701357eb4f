"""The sizes of all parts: `gpu` is for the table of docs/gpu.md, `cpu-check` shows in seconds that each part runs."""

from dataclasses import dataclass, replace
from typing import Literal

SizeName = Literal["cpu-check", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of a Qwen2 with random weights. The output head is tied to the embedding."""

    name: str
    vocabulary: int
    width: int
    feed_forward: int
    layers: int
    heads: int
    key_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSize:
    """Of packed attention. Numerics are compared for `groups` prompts with 4 answers each, and speed for `rows` rows of
    up to `longest` tokens, in micro-batches of `budget` tokens."""

    model: ModelShape
    groups: int
    prompt: int
    answer: int
    rows: int
    longest: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSize:
    """Of the output head."""

    tokens: int
    width: int
    vocabulary: int
    chunk_logits: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The sizes of one run of the command. `rounds` is the number of measurements of which the fastest one counts."""

    device: Literal["cpu", "cuda"]
    rounds: int
    sharded: ModelShape
    attention: AttentionSize
    head: HeadSize
    trained: tuple[ModelShape, ...]
    trained_rows: int
    trained_tokens: int
    """Number of tokens of each row of `trained_rows`."""
    bucket_bytes: int
    """Size of the bucket that is encoded as a delta."""
    shared_bytes: int
    """Size of each of the four tensors that are shared with a second process."""


QWEN_05B = ModelShape(
    name="0.5B", vocabulary=151_936, width=896, feed_forward=4864, layers=24, heads=14, key_heads=2
)  # the shape of Qwen2.5-0.5B
QWEN_15B = ModelShape(
    name="1.5B", vocabulary=151_936, width=1536, feed_forward=8960, layers=28, heads=12, key_heads=2
)  # the shape of Qwen2.5-1.5B
TINY = ModelShape(name="tiny", vocabulary=512, width=64, feed_forward=128, layers=2, heads=4, key_heads=2)

SIZES: dict[SizeName, Size] = {
    "cpu-check": Size(
        device="cpu",
        rounds=1,
        sharded=TINY,
        attention=AttentionSize(model=TINY, groups=2, prompt=16, answer=8, rows=8, longest=32, budget=64),
        head=HeadSize(tokens=64, width=32, vocabulary=1000, chunk_logits=(2**13, 2**15)),
        trained=(TINY,),
        trained_rows=2,
        trained_tokens=16,
        bucket_bytes=2**20,
        shared_bytes=2**16,
    ),
    "gpu": Size(
        device="cuda",
        rounds=5,
        sharded=replace(QWEN_05B, name="0.5B with 4 layers", layers=4),
        attention=AttentionSize(
            model=replace(QWEN_05B, name="0.5B with 8 layers", vocabulary=32_768, layers=8),
            groups=4,
            prompt=256,
            answer=128,
            rows=128,
            longest=4096,
            budget=16_384,
        ),
        head=HeadSize(tokens=8192, width=1536, vocabulary=151_936, chunk_logits=(2**24, 2**26, 2**28)),
        trained=(QWEN_05B, QWEN_15B),
        trained_rows=8,
        trained_tokens=1024,
        bucket_bytes=2**28,
        shared_bytes=2**28,
    ),
}
