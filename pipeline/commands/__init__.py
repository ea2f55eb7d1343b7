"""The click commands of `shardmill`, one module a group. They parse, call and print; the work is elsewhere."""
