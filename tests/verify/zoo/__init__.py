"""A zoo of tiny checkpoints made by code: clean ones of each format, and faulty ones, each with the rule it breaks."""
