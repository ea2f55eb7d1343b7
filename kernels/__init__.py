"""Numbers only: number formats, block FP8, fp6 tiles, KV rows and the kernels that make them.

This room knows no file, no tensor name, no TOML and no hash, so that the pipeline, the judge and the
serving image can all stand on it.
"""
