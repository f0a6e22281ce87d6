"""The `source` installer's edit, as pure functions over the bytes of SGLang's `model_runner.py`.

The edit is a marked block at the end of `ModelRunner.load_model`, found in the syntax tree, so that one rule serves
every release. The result is parsed again: it must be the original plus exactly these statements.
"""

import ast
import hashlib
import re
import textwrap

VERSION = 1
"""To be raised whenever the block changes."""
_CLASS, _METHOD = "ModelRunner", "load_model"

BLOCK = """\
import os as _layertap_os

if _layertap_os.environ.get("LAYERTAP_ENGINE_DIR") and _layertap_os.environ.get("LAYERTAP_INSTALLER") == "source":
    try:
        from worker.capture.source import after_load as _layertap_after_load
    except ImportError:
        import logging as _layertap_logging

        _layertap_logging.getLogger("layertap").exception("the capture cannot be imported: this engine runs unpatched")
    else:
        _layertap_after_load(self)
"""
"""Does nothing in an engine that no worker started for this installer, and a failing import breaks none."""

_MARKED = re.compile(
    rb"^ *# layertap edit (?P<version>\d+) begin, sha256 (?P<digest>[0-9a-f]{64})\r?\n"
    rb"(?P<block>.*?)"
    rb"^ *# layertap edit (?P=version) end\r?\n",
    re.MULTILINE | re.DOTALL,
)
"""The block bears its own hash, so that any release of Layertap can tell an edit of another from a tampered one."""


class UnknownSourceError(ValueError):
    """The source has no place for the edit; the message says what was looked for."""


def insert(source: bytes) -> bytes:
    """The source with the block at the end of `ModelRunner.load_model`. Raises `UnknownSourceError`."""
    if _MARKED.search(source):
        raise UnknownSourceError("it holds an edit of Layertap already")
    tree = _parse(source)
    method = _find(tree)
    lines = source.splitlines(keepends=True)
    last = method.end_lineno
    assert last is not None
    newline = b"\r\n" if lines[0].endswith(b"\r\n") else b"\n"
    block = _marked(" " * method.body[0].col_offset, newline)
    if not lines[last - 1].endswith(b"\n"):
        raise UnknownSourceError("its last line is not ended")
    edited = b"".join([*lines[:last], block, *lines[last:]])
    _verify(tree, edited)
    return edited


def remove(source: bytes) -> tuple[bytes, int] | None:
    """The source without the block, and the block's version; None where there is not exactly one, as it was inserted.

    Whether that is the original again, its hash must tell.
    """
    found = list(_MARKED.finditer(source))
    if len(found) != 1:
        return None
    match = found[0]
    if hashlib.sha256(match["block"]).hexdigest().encode() != match["digest"]:
        return None
    return source[: match.start()] + source[match.end() :], int(match["version"])


def _find(tree: ast.Module) -> ast.FunctionDef:
    owners = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == _CLASS]
    methods = [
        node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == _METHOD
    ]
    if len(methods) != 1:
        raise UnknownSourceError(f"it defines {_CLASS}.{_METHOD} {len(methods)} times, not once")
    method = methods[0]
    if not method.args.args or method.args.args[0].arg != "self":
        raise UnknownSourceError(f"the first parameter of {_CLASS}.{_METHOD} is not self")
    if any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(method)):
        raise UnknownSourceError(f"{_CLASS}.{_METHOD} may end before its last line")
    return method


def _verify(original: ast.Module, edited: bytes) -> None:
    tree = _parse(edited)
    body = _find(tree).body
    added = ast.parse(BLOCK).body
    if ast.dump(ast.Module(body[-len(added) :], [])) != ast.dump(ast.Module(added, [])):
        raise UnknownSourceError(f"the edit does not land at the end of {_CLASS}.{_METHOD}")
    del body[-len(added) :]
    if ast.dump(tree) != ast.dump(original):
        raise UnknownSourceError("the edit would change more than it adds")
    compile(edited, "model_runner.py", "exec", dont_inherit=True)


def _parse(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise UnknownSourceError(f"it is not Python that this interpreter can parse ({error})") from error


def _marked(indent: str, newline: bytes) -> bytes:
    block = textwrap.indent(BLOCK, indent).encode().replace(b"\n", newline)
    begin = f"{indent}# layertap edit {VERSION} begin, sha256 {hashlib.sha256(block).hexdigest()}".encode()
    return b"".join([begin, newline, block, f"{indent}# layertap edit {VERSION} end".encode(), newline])
