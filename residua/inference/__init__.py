"""A trained model put to use: generation with a KV cache, evaluation, export."""
