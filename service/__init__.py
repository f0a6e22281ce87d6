"""The control plane: data sets, jobs, leases, shards and workers behind one HTTP interface."""

from importlib.metadata import version

VERSION = version("layertap")
