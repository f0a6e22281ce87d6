"""Jobs: create, watch, cancel, retry, delete, finish."""
