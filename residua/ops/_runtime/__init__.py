"""What the operators share: which backend runs, how kernels are launched and registered, small arithmetic."""
