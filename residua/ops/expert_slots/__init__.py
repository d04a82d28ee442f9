"""Where each token's copies go when they are sorted by expert, and how their results come back."""

from residua.ops.expert_slots.reference import Slots, combine, dispatch, slots_of, sort_slots

__all__ = ["Slots", "combine", "dispatch", "slots_of", "sort_slots"]
