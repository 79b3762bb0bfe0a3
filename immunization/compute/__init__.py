"""Device, processes and random states."""
