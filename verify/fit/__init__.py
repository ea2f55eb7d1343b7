"""Does this checkpoint serve at this context on these cards, and with which pin: known from headers and a preset.

Nothing boots and no weight is read. The arithmetic is that of vLLM 0.33.0's KV-cache planner (`planner`), and of the
fork that the published system ran on (`fork`), kept apart and named. What the planner does not know (scratch memory,
CUDA graphs, the context) enters as a range with its source, so that the answer has a margin and never is a bare yes.
"""
