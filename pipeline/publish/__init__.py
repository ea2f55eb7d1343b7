"""Publishing to a Hugging Face hub: what it holds already is copied there, the rest goes up, one commit shows it all."""
