"""`shardmill init`: a checkpoint's headers and config become a recipe that a person would have written.

Only names, shapes, dtypes and config.json are looked at, as published; a library's names in memory are others. What
is not known is kept, and said.
"""
