"""Generate text from a trained model: prefill, KV cache, decoding, sampling."""
