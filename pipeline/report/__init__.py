"""What a loader measures of itself, and the verdict that follows."""
