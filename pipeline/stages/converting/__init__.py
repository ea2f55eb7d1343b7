"""What the stage `convert` is made of: reading parts, a weight on its way, and what is too wide to be held."""
