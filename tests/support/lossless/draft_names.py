"""Drafts of the small random model that every kind of request is tested with."""

DRAFTS = (
    "eagle3",
    "peagle",
    "dflash",
    "eagle",
    "medusa",
    "draft-model",
    "ngram",
    "ngram-blind",
    "suffix",
    "own-eagle3",
    "own-model",
)
