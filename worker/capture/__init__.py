"""The part of the worker that runs inside the engine's processes.

It reads the residual stream during prefill and writes it to the shard file. It changes nothing that the engine computes
or returns, does nothing for requests that are not Layertap's, and is inert unless `LAYERTAP_ENGINE_DIR` is set.
"""
