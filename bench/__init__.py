"""Programs that measure the project; none of them is part of it."""
