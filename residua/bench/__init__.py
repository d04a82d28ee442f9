"""How fast training steps, operators and decoding are, measured or planned on paper."""
