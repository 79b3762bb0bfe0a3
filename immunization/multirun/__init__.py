"""What belongs to many runs."""
