"""What becomes of evidence before it is stored: secrets masked, cut to size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.schemas.incidents import Evidence, ProcessEvidence
from service.incidents.fitting import fitted, size
from service.incidents.masking import MASK, masked, masked_evidence


def process(stack: str = "", **more: object) -> ProcessEvidence:
    facts = {"pid": 1, "command": "sglang::scheduler", "state": "R", "threads": 2, "rss_bytes": 3, "cpu_seconds": 4.5}
    return ProcessEvidence.model_validate({**facts, "wait_channel": "0", "stack": stack, **more})


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --api-key {} --port 1",
        "--admin-api-key={}",
        "argv: ['--api-key', '{}', '--port']",
        "Authorization: Bearer {}",
        "{{'authorization': 'Bearer {}'}}",
        "[(b'authorization', b'Bearer {}')]",
        "LAYERTAP_TOKEN={} layertap worker",
        "environ: 'HF_TOKEN': '{}'",
        "export HUGGING_FACE_HUB_TOKEN={}",
        "ServerArgs(model_path='m', api_key='{}', port=1)",
        "AWS_SECRET_ACCESS_KEY={}",
        "db_password: {}",
        "postgresql://layertap:{}@db/layertap",
    ],
)
def test_a_secret_is_masked_by_what_stands_before_it(text: str) -> None:
    assert masked(text.format("q7Zx")) == text.format(MASK)
    assert masked(masked(text.format("q7Zx"))) == text.format(MASK)


@pytest.mark.parametrize("key", ["hf_" + "a1B2" * 6, "sk-" + "a1B2" * 6, "ghp_" + "a1B2" * 6, "AKIA" + "A1B2" * 4])
def test_a_well_known_kind_of_key_is_masked_wherever_it_stands(key: str) -> None:
    assert masked(f"could not log in with {key}, giving up") == f"could not log in with {MASK}, giving up"


def test_the_token_of_the_service_is_masked_wherever_it_stands() -> None:
    assert masked("got 'hunter2hunter2' here", ["hunter2hunter2"]) == f"got '{MASK}' here"


@pytest.mark.parametrize(
    "text",
    [
        "Prefill batch. #new-seq: 2, #new-token: 4096, #cached-token: 0, token usage: 0.01",
        "--tokenizer-path /models/m --max-total-tokens 4096 --skip-tokenizer-init",
        "eos_token='</s>', pad_token_id=0, api_key=None, max_prefill_tokens=16384",
        "tokens_captured: 4096, last moved 3.0 s ago",
        'Thread 4711 (active): "MainThread"\n    forward (model_runner.py:2410)',
    ],
)
def test_what_a_diagnosis_needs_is_not_masked(text: str) -> None:
    assert masked(text) == text


def test_every_text_of_the_evidence_is_masked() -> None:
    secret = "Bearer q7Zx"
    evidence = Evidence(
        log_tail=secret,
        processes=[process(secret, command="--api-key q7Zx")],
        gpu=[secret],
        signals={"last request": secret},
        engine={"api_key": "q7Zx", "HF_TOKEN": "q7Zx", "tokenizer": "kept"},
    )
    clean = masked_evidence(evidence)
    assert "q7Zx" not in clean.model_dump_json()
    assert clean.engine == {"api_key": MASK, "HF_TOKEN": MASK, "tokenizer": "kept"}


def test_evidence_that_fits_is_kept_as_it_is() -> None:
    evidence = Evidence(log_tail="log\n", processes=[process("stack")], gpu=["0"], engine={"version": "1"})
    assert fitted(evidence, size(evidence)) is evidence


def test_the_log_keeps_its_end_and_a_stack_its_beginning() -> None:
    log = "".join(f"line {i}\n" for i in range(2000))
    stack = "".join(f"frame {i}\n" for i in range(2000))
    evidence = Evidence(log_tail=log, processes=[process(stack), process("short")], gpu=["0"], signals={"a": "b"})
    cut = fitted(evidence, 4000)
    assert size(cut) <= 4000
    assert cut.log_tail.endswith("line 1999\n")
    assert cut.log_tail.startswith("[cut to fit]\nline ")
    assert cut.processes[0].stack.startswith("frame 0\nframe 1\n")
    assert cut.processes[0].stack.endswith("[cut to fit]")
    assert min(len(cut.log_tail), len(cut.processes[0].stack)) > 1000
    assert cut.processes[1] == evidence.processes[1]
    assert (cut.gpu, cut.signals) == (evidence.gpu, evidence.signals)


def test_evidence_that_is_too_large_besides_log_and_stacks_is_cut_too() -> None:
    many = {f"signal {i}": "x" * 500 for i in range(300)}
    evidence = Evidence(log_tail="the end", processes=[process("s" * 5000, command="c" * 9000)] * 300, signals=many)
    cut = fitted(evidence, 20_000)
    assert size(cut) <= 20_000
    assert cut.log_tail == "the end"
    assert cut.processes[0].command == "c" * 200
    assert "signal 0" in cut.signals


texts = st.text(st.characters(codec="utf-8"), max_size=400)


@settings(max_examples=60, deadline=None)
@given(
    log=texts,
    stacks=st.lists(texts, max_size=6),
    gpu=st.lists(texts, max_size=6),
    names=st.dictionaries(texts, texts, max_size=6),
    limit=st.integers(200, 5000),
)
def test_whatever_it_holds_evidence_fits(
    log: str, stacks: list[str], gpu: list[str], names: dict[str, str], limit: int
) -> None:
    evidence = Evidence(log_tail=log, processes=[process(stack) for stack in stacks], gpu=gpu, signals=names)
    assert size(fitted(evidence, limit)) <= limit
