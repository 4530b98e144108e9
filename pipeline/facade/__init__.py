"""What a loader shows to trainers: samplers, attributes, and a world that comes late."""
