"""Literal transcriptions of the papers' equations, slow and obvious: one token, one head, one source at a time.

Nothing here calls Residua. The tests run these and Residua in float64 and compare values and every gradient.
Depth equations act on one token: the embedding x [C] and the outputs y_0 … y_{K−1} [C] of its sublayers go in; the
inputs h_0 … h_{K−1} of the sublayers and the input of the final norm, K + 1 vectors, come out.
"""
