"""The vLLM plugin that serves what the pipeline makes. It stands on kernels alone."""
