"""The mathematics of rewy in plain torch, for any device and dtype.

`recurrent` is the definition and the oracle; `chunked` the forward over chunks; `rewy` its backward with three
products around the WY matrix; `conventional` the seven-product backward it replaces. Letters: docs/derivation.md.
"""
