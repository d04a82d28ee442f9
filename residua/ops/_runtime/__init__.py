"""What the operators share: choosing a backend, registering operators, launching kernels, small arithmetic."""
