"""The report: what a built checkpoint is and what it lost, for people: one page, one card section, one JSON object.

Numbers are the judge's (verify) and the manifest's; this room adds them up, and draws and words them. It knows nothing
of how a checkpoint is made, so it can't report what was meant instead of what is there.
"""
