"""Building into a hub: each shard is made, sent and removed, so that this disk never holds the checkpoint."""
