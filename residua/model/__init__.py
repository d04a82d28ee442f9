"""The decoder and its parts: attention, anchors, mixers, feed-forwards, norms, topologies."""
