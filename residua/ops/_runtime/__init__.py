"""Shared machinery of operators: choosing a backend, registering operators, launching kernels, small arithmetic."""
