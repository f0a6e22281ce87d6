"""Fixtures that hand out model folders; each is made once for a checkout."""

from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, the real thing."""
    return tiny_models.smollm2()


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Random, 8 blocks, hidden size 128."""
    return tiny_models.tiny("tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """Random, 9 blocks, hidden size 128."""
    return tiny_models.tiny("tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_qwen3_moe() -> Path:
    """Random, 8 blocks of 8 experts, hidden size 128."""
    return tiny_models.tiny("tiny-qwen3-moe")
