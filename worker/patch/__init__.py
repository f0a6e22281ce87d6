"""The patch: the one point where Layertap's capture enters SGLang, and the installers that put it there.

An attachment point calls `worker.capture.attach.attach` once the model is loaded, nothing else. `plugin` and
`forward_hooks` ask the engine for it and change nothing on disk; `source` edits the installed package, for what neither
can reach, and can undo that after a crash at any point.
"""
