"""Where things lie below the storage root, the one place that spells these paths. Pure string building."""

NONCE_FILE = ".layertap-storage"
"""Holds a random word; a worker proves with it that it sees the service's storage."""


def dataset_dir(dataset: str) -> str:
    """Everything of one data set."""
    return f"datasets/{dataset}"


def dataset_file(dataset: str) -> str:
    """The uploaded JSONL, as it came."""
    return f"{dataset_dir(dataset)}/rows.jsonl"


def job_dir(job: str) -> str:
    """Everything of one job."""
    return f"jobs/{job}"


def tokens_dir(job: str, generation: int) -> str:
    """Tokenised rows, written once by the plan task of this generation."""
    return f"jobs/{job}/tokens.g{generation}"


def shard_name(index: int, generation: int) -> str:
    """File name of a shard; users see it in the manifest."""
    return f"shard-{index:05d}.g{generation}.safetensors"


def shard_file(job: str, index: int, generation: int) -> str:
    """A shard's final place."""
    return f"jobs/{job}/shards/{shard_name(index, generation)}"


def manifest_file(job: str) -> str:
    """The job's manifest."""
    return f"jobs/{job}/manifest.json"
