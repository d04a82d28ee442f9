"""Models of transformers in Residua's terms, both ways: configurations and tensor names, one class per family."""
