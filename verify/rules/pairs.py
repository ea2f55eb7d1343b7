"""Rules about two things compared, about signatures and about remote places. Rows of shardmill.verify.rules.table."""

E, W, N = "error", "warning", "info"
LOOK = "Look at the weight: a scale of another block, a wrong convention, codes computed with another scale."

PAIRS = (
    ("SM401", "diff-missing", W, "B lacks a tensor that A has.", "Nothing, if it was meant."),
    ("SM402", "diff-added", W, "B has a tensor that A lacks.", "Nothing, if it was meant."),
    ("SM403", "diff-changed", W, "A tensor of the same form has other bytes.", "Nothing, if it was meant."),
    ("SM404", "diff-reencoded", N, "A tensor has another form in B, and decodes to about the same.",
     "`verify roundtrip` holds the loss to limits."),
    ("SM405", "diff-retyped", W, "A tensor has another form in B that cannot be decoded for a comparison.",
     "Nothing, if it was meant."),
    ("SM406", "diff-config", N, "A configuration file differs.", "Nothing, if it was meant."),
    ("SM501", "roundtrip-error", E, "A weight's relative error is above its limit.", LOOK),
    ("SM502", "roundtrip-cosine", E, "A weight points elsewhere than the parent's.", LOOK),
    ("SM503", "clipped-codes", W, "Weights lie beyond their block's largest value and were clipped.", LOOK),
    ("SM504", "vanished-codes", W, "Many codes are zero where the parent's weights are not.", LOOK),
    ("SM601", "block-differs", E, "A block's codes or scale are not what its numerics make of the parent.",
     "The checkpoint was not made from this parent by this recipe, or was altered: make it again."),
    ("SM602", "recipe-unknown", W, "Numerics that this judge cannot recompute.", "Update shardmill."),
    ("SM603", "claim-false", E, "The manifest's count of lossless blocks is not what the blocks show.",
     "The record was altered, or its maker is faulty: make the checkpoint again."),
    ("SM701", "signature-missing", E, "There is no signature.", "`shardmill verify sign` makes one."),
    ("SM702", "signature-bad", E, "The signature does not fit the files or the key.",
     "Treat the checkpoint as altered: download it again from its publisher, and check whose key this is."),
    ("SM703", "provenance-differs", E, "The provenance statement does not say what the manifest says.",
     "Treat the statement as altered; sign again if the checkpoint is yours."),
    ("SM704", "provenance-missing", W, "There is no provenance statement.", "`shardmill verify sign` writes one."),
    ("SM801", "remote-fails", E, "The server does not give a file, though asked again.", "Try later, or download it."),
    ("SM802", "remote-no-ranges", E, "The server does not answer range requests as it should.",
     "Download the checkpoint and ask about the folder."),
    ("SM803", "remote-changed", E, "A file changed while it was read.", "Ask again, with a pinned revision."),
    ("SM804", "revision-resolved", N, "The revision is not a commit; it was resolved, and that commit was read.",
     "Pin it: write the commit after @."),
)  # fmt: skip
