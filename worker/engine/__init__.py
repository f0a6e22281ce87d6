"""One SGLang engine: its command line, its processes, and the requests it is sent."""
