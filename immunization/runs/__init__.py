"""What a run leaves on disk: its files, result, environment, trackers, and resuming."""
