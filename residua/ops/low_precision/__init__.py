"""FP8 and NVFP4: how values are rounded, with exact simulations that training and `residua.quantize` share."""
