"""Training loops of other libraries: `lightning` and `transformers`, each with its own module."""
