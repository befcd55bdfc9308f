"""What a run tells about itself: metrics, heartbeat, where the time went, the progress display."""
