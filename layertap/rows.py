"""Input rows: the five shapes a line of a data set may have, checked before anything is tokenised.

`parse_row` is the only judge of a line: the service runs it on upload, the worker again when it plans.
"""
