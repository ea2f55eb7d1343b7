"""The judge: yes/no questions about a checkpoint, asked of the published files alone.

It shares no code with the pipeline that may have made them, so that a fault there cannot hide itself here.
"""
