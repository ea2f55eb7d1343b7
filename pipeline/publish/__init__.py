"""Publishing to a Hugging Face hub: what it holds is copied there, the rest goes up, one commit shows it all."""
